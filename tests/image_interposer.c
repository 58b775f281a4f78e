/* Another LD_PRELOAD library: its own malloc, from memory that it maps, and with -DMAP an mmap of its own that counts. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static _Atomic long mallocs;
static _Atomic(char *) at, end;
static _Atomic int lock;

long interposer_mallocs(void)
{
    return mallocs;
}

void *malloc(size_t nbytes)
{
    mallocs++;
    nbytes = (nbytes + 31) & ~(size_t)15;
    while (atomic_exchange(&lock, 1))
        ;
    if (!at || end - at < (ptrdiff_t)nbytes) {
        size_t more = nbytes > 1 << 20 ? nbytes : 1 << 20;
        at = mmap(NULL, more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        end = at + more;
    }
    char *p = at;
    at = p + nbytes;
    *(size_t *)p = nbytes - 16;
    lock = 0;
    return p + 16;
}

void free(void *p)
{
    (void)p;
}

void *calloc(size_t n, size_t each)
{
    return malloc(n * each); /* never given out before: zero */
}

void *realloc(void *p, size_t nbytes)
{
    void *q = malloc(nbytes);
    if (p) {
        size_t had = *(size_t *)((char *)p - 16);
        memcpy(q, p, had < nbytes ? had : nbytes);
    }
    return q;
}

#ifndef MAP
/* It calls a library that comes before it in LD_PRELOAD, and so is initialised after it. */
__attribute__((constructor)) static void early(void)
{
    char *p = mmap(NULL, 32 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (p == MAP_FAILED || p[(32 << 20) - 1] || munmap(p, 32 << 20))
        _exit(99);
}
#else
static _Atomic long maps;

long interposer_maps(void)
{
    return maps;
}

void *mmap(void *a, size_t n, int protection, int flags, int fd, off_t offset)
{
    maps++;
    if (n >= 32u << 20)
        if (write(2, "interposed\n", 11) < 0)
            return MAP_FAILED;
    return (void *)syscall(SYS_mmap, a, n, protection, flags, fd, offset);
}
#endif
