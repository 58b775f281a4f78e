/* Preloaded into a CUDA program: makes the one large mapping of a checkpoint, its image, faster to get.
 *
 * The driver maps the image with MAP_POPULATE, which one thread faults in by 4 KiB inside the system call. Here it is mapped without,
 * given huge pages, and populated by several threads. That happens only if all of this holds:
 *
 *   - gpuckpt announced an operation on this very process, and it has not expired;
 *   - the calling thread is the driver's restore thread, which the announcement names;
 *   - the caller lies in libcuda, whose addresses the announcement gives;
 *   - the mapping is private, anonymous, writable, populated, at no fixed address, and at least LARGE.
 *
 * Every other call goes on as it came, after two comparisons. If anything fails on the way, the mapping is undone and made exactly as
 * the program asked: this library is never the reason why a mapping fails.
 *
 * Of an image that was mapped so, the driver's copies are shared among threads too: _copy.c.
 *
 * The announcement is written into `page`, below, through /proc/PID/mem, by a gpuckpt that finds it by its magic; whoever may suspend a
 * process may write its memory. So there is no file, no environment and no lock, and it works in a chroot or another mount namespace.
 *
 * What a caller may be in the middle of is not known: a signal handler, malloc, dlopen, the child of a vfork. So there is no malloc here,
 * no stdio, no lock of the loader (no dladdr), and no pthread_create (which allocates, and others interpose it): helpers are bare
 * threads that make system calls and touch nothing of the C library, errno included.
 *
 * The first image also starts the keeper (_keeper.c). Where the program was started to have memory kept ready for its images
 * (_reserve.c), the first mapping of GPU memory does, and images come from there.
 *
 * Other interposers of mmap: a plain call is handed to the next definition after ours (the C library's, if nobody else interposes), and so
 * is the mapping of an image, so that they see all that they would see without us. Those before us see it anyway; where they call us
 * from code of their own, the caller is not libcuda, and nothing is altered. Before our constructor ran, the system call is made directly.
 */
#undef _FILE_OFFSET_BITS /* with 64 the header would make our mmap a second mmap64 */
#define _GNU_SOURCE
#include "_preload.h"
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LARGE ((size_t)32 << 20)
#define IMAGE_FLAGS (MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE)

struct page page = {.magic = "gpuckpt-preload", .version = 4, .wake = -1, .held = -1};

typedef void *mapper(void *, size_t, int, int, int, off_t);
static mapper *next;
static _Atomic int awaits_gpu_memory; /* memory shall be kept ready, once this process uses a GPU */

/* The call as the program made it. */
static void *plainly(void *address, size_t nbytes, int protection, int flags, int fd, off_t offset)
{
    if (next)
        return next(address, nbytes, protection, flags, fd, offset);
    return (void *)syscall(SYS_mmap, address, nbytes, protection, flags, fd, offset);
}

/* Deciding. */

unsigned copy_threads(uintptr_t to, uintptr_t from, size_t nbytes)
{
    uint32_t threads = page.threads, images = page.images < MOST_IMAGES ? page.images : MOST_IMAGES;
    int within = 0;
    for (uint32_t i = 0; i < images; i++) {
        uintptr_t begin = page.image[i].address, end = begin + page.image[i].nbytes;
        within |= (to >= begin && to + nbytes <= end) || (from >= begin && from + nbytes <= end);
    }
    if (!within || threads < 2 || !atomic_load(&page.operation) || page.pid != own_pid() ||
        page.tid != (uint32_t)quietly(SYS_gettid, 0, 0, 0, 0) || now_ns(CLOCK_BOOTTIME) >= page.expires_ns)
        return 0;
    atomic_fetch_add(&page.copies, 1);
    atomic_fetch_add(&page.copied, nbytes);
    atomic_store(&page.copy_threads, threads);
    return threads;
}

static enum verdict judge(uintptr_t caller, size_t nbytes)
{
    enum verdict verdict = FAST;
    uint32_t tid = (uint32_t)quietly(SYS_gettid, 0, 0, 0, 0);
    if (!atomic_load(&page.operation) || page.pid != own_pid())
        return NOTHING;
    if (now_ns(CLOCK_BOOTTIME) >= page.expires_ns)
        verdict = EXPIRED;
    else if (page.tid != tid)
        verdict = OTHER_THREAD;
    else if (caller < page.libcuda_from || caller >= page.libcuda_to)
        verdict = OTHER_CALLER;
    atomic_fetch_add(&page.seen, 1);
    atomic_store(&page.last_verdict, verdict);
    atomic_store(&page.last_tid, tid);
    atomic_store(&page.last_caller, caller);
    atomic_store(&page.last_nbytes, nbytes);
    return verdict;
}

static void note(void *address, size_t nbytes, enum verdict verdict, int error)
{
    if (page.images < MOST_IMAGES)
        page.image[page.images] = (struct image){(uintptr_t)address, nbytes, verdict, (uint32_t)error};
    page.images++; /* beyond what was noted, so that a reader knows that some are missing */
    atomic_store(&page.last_verdict, verdict);
}

void name(void *address, size_t nbytes, const char *text)
{
    quietly5(SYS_prctl, PR_SET_VMA, PR_SET_VMA_ANON_NAME, (long)address, (long)nbytes, (long)text);
}

static void name_image(void *address, size_t nbytes)
{
    char text[] = "gpuckpt-image-0000000000000000";
    uint64_t operation = atomic_load(&page.operation);
    for (size_t i = sizeof text - 1; operation; operation >>= 4)
        text[--i] = "0123456789abcdef"[operation & 15];
    name(address, nbytes, text);
}

#define RARE __attribute__((cold, noinline))

RARE static void *image(uintptr_t caller, void *address, size_t nbytes, int protection, int flags, int fd, off_t offset)
{
    int before = errno, error = 0;
    enum verdict verdict = judge(caller, nbytes);
    if (verdict != FAST || atomic_exchange(&busy, 1)) { /* only a signal handler of the restore thread can find it so */
        errno = before;
        return plainly(address, nbytes, protection, flags, fd, offset);
    }
    uint64_t begin = now_ns(CLOCK_MONOTONIC);
    void *kept = flags == IMAGE_FLAGS && !address ? reserve_take(nbytes) : NULL;
    void *found = kept ? kept : plainly(address, nbytes, protection, flags & ~MAP_POPULATE, fd, offset);
    if (found == MAP_FAILED) {
        verdict = NO_MAPPING;
        error = errno;
    } else {
        page.huge = quietly(SYS_madvise, (long)found, (long)nbytes, MADV_HUGEPAGE, 0) == 0; /* either failure costs speed or secrecy only */
        quietly(SYS_madvise, (long)found, (long)nbytes, MADV_DONTDUMP, 0);
        error = populate(found, nbytes, &page.threads_used);
        if (error && kept) {
            reserve_undo();
            verdict = NO_POPULATE;
        } else if (error && quietly(SYS_munmap, (long)found, (long)nbytes, 0, 0) == 0)
            verdict = NO_POPULATE;
    }
    errno = before;
    if (verdict != FAST)
        found = plainly(address, nbytes, protection, flags, fd, offset);
    page.populate_ns += now_ns(CLOCK_MONOTONIC) - begin;
    if (found != MAP_FAILED) {
        name_image(found, nbytes); /* by which gpuckpt knows later that what lies there is this image still */
        start_keeper();
        if (atomic_load(&page.keeper)) /* which gives them back */
            take_imports(page.libcuda_base);
        errno = before;
    }
    note(found == MAP_FAILED ? NULL : found, nbytes, verdict, error);
    atomic_store(&busy, 0);
    return found;
}

#define OURS __attribute__((visibility("default")))

/* The first GPU memory of this process: from now on gpuckpt can have memory kept ready in it. Its pages are a mapping of the driver's. */
RARE static void look_for_gpu_memory(int fd)
{
    static const char wanted[] = "/dev/nvidia-uvm";
    char link[32] = "/proc/self/fd/", path[256];
    size_t n = strlen(link), digits = 1;
    for (int rest = fd; rest >= 10; rest /= 10)
        digits++;
    for (size_t i = digits; i--; fd /= 10)
        link[n + i] = (char)('0' + fd % 10);
    long length = quietly(SYS_readlinkat, AT_FDCWD, (long)link, (long)path, sizeof path);
    size_t tail = sizeof wanted - 1;
    if (length >= (long)tail && length < (long)sizeof path && !memcmp(path + length - tail, wanted, tail) &&
        atomic_exchange(&awaits_gpu_memory, 0)) {
        reserve_begin();
        start_keeper();
    }
}

OURS void *mmap(void *address, size_t nbytes, int protection, int flags, int fd, off_t offset)
{
    if (__builtin_expect(nbytes >= LARGE && (flags & ~MAP_NORESERVE) == IMAGE_FLAGS, 0) && protection == (PROT_READ | PROT_WRITE) &&
        atomic_load_explicit(&page.state, memory_order_relaxed) == READY)
        return image((uintptr_t)__builtin_return_address(0), address, nbytes, protection, flags, fd, offset);
    if (__builtin_expect(atomic_load_explicit(&awaits_gpu_memory, memory_order_relaxed), 0) && fd >= 0 && (flags & MAP_SHARED))
        look_for_gpu_memory(fd);
    return plainly(address, nbytes, protection, flags, fd, offset);
}

OURS void *mmap64(void *address, size_t nbytes, int protection, int flags, int fd, off_t offset) __attribute__((alias("mmap")));

/* AddressSanitizer's runtime ends a program in which it is not the first library. It is told that we do no harm before it, unless the program itself
 * has options for it: those are found before ours. */
OURS const char *__asan_default_options(void)
{
    return "verify_asan_link_order=0";
}

__attribute__((constructor)) static void start(void)
{
    const char *wish = getenv("GPUCKPT_PRELOAD");
    void *found = dlsym ? dlsym(RTLD_NEXT, "mmap") : NULL;
    if (found != (void *)mmap) /* a dlsym that others interpose may lead back to us */
        next = (mapper *)found;
    const char *kept = getenv("GPUCKPT_RESERVE");
    int off = wish && !strcmp(wish, "0");
    if (kept && *kept && !off) {
        page.kept = 1;
        page.reserve_auto = !strcmp(kept, "auto");
        atomic_store(&awaits_gpu_memory, 1);
    }
    atomic_store(&page.state, off ? OFF : READY);
}
