/* Copies of the driver's restore thread, shared among several threads.
 *
 * The driver's copy engine fills pinned buffers of 2 MiB, four in turn, and one thread of the process copies each into the image by memcpy; a
 * restore does the same the other way round (docs/driver-path.md). That one thread is what a checkpoint waits for. libcuda finds memcpy through its
 * table of imports, so in that table, and in no other, ours takes its place from the mapping of an image until the process has been
 * restored. It shares a copy among helpers if it is large, in the restore thread, into or out of an image, and within an operation that
 * gpuckpt has announced; any other goes to the C library's memcpy, as before.
 *
 * Helpers are bare threads, as in _preload.c, that copy and make system calls. They look for work for as long as the driver takes for its next
 * buffer, then sleep, and end when there has been none for a while: nobody needs to tell them, and nobody waits for one that has not taken
 * a piece.
 */
#define _GNU_SOURCE
#include "_preload.h"
#include <elf.h>
#include <errno.h>
#include <linux/futex.h>
#include <link.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PIECE ((size_t)128 << 10) /* what a thread takes at a time */
#define MOST_HELPERS 15
#define LOOKS 4096 /* for work, about 100 us, before a helper sleeps */
#define IDLE_S 1   /* after which it ends */
#define MOST_SLOTS 4

#if defined(__x86_64__)
#define JUMP_SLOT R_X86_64_JUMP_SLOT
#define GLOB_DAT R_X86_64_GLOB_DAT
#define pause_a_moment() __asm__ volatile("pause")
#else
#define JUMP_SLOT R_AARCH64_JUMP_SLOT
#define GLOB_DAT R_AARCH64_GLOB_DAT
#define pause_a_moment() __asm__ volatile("yield")
#endif

typedef void *copier(void *, const void *, size_t);
static copier *plainly;

/* Sharing. */

static struct {
    _Atomic uint64_t ticket; /* number of the copy, and below it how many pieces nobody has taken: all that says whether there is one */
    _Atomic uint32_t done;   /* pieces */
    _Atomic uint32_t asleep;
    char *to;
    const char *from;
    size_t nbytes;
    uint32_t pieces;
} job;
static _Atomic int alive[MOST_HELPERS]; /* tids, which the kernel clears when they have ended */
static char stacks[MOST_HELPERS][STACK_BYTES] __attribute__((aligned(64)));
static _Atomic int sharing; /* only a signal handler of the restore thread can find it so */

static uint32_t number(void)
{
    return (uint32_t)(atomic_load(&job.ticket) >> 32);
}

/* Copy pieces of the copy *number* until all are taken. What is taken belongs to it: the next one begins when all of them are done. The rest
 * of `job` is read only with a piece in hand: before, it may be of the next copy already. */
static void take_part(uint32_t number)
{
    uint64_t ticket = atomic_load(&job.ticket);
    while (ticket >> 32 == number && (uint32_t)ticket != 0) {
        if (!atomic_compare_exchange_weak(&job.ticket, &ticket, ticket - 1))
            continue;
        size_t at = (job.pieces - (uint32_t)ticket) * PIECE, n = job.nbytes - at < PIECE ? job.nbytes - at : PIECE;
        plainly(job.to + at, job.from + at, n);
        atomic_fetch_add(&job.done, 1);
        ticket = atomic_load(&job.ticket);
    }
}

static int help(void *unused)
{
    const struct timespec idle = {IDLE_S, 0};
    /* the number is the upper half of the ticket */
    uint32_t *word = (uint32_t *)&job.ticket + (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
    uint32_t seen = 0;
    (void)unused;
    for (;;) {
        for (int i = 0; i < LOOKS && number() == seen; i++)
            pause_a_moment();
        if (number() == seen) {
            atomic_fetch_add(&job.asleep, 1);
            long result = quietly(SYS_futex, (long)word, FUTEX_WAIT_PRIVATE, seen, (long)&idle);
            atomic_fetch_sub(&job.asleep, 1);
            if (result == -ETIMEDOUT && number() == seen)
                return 0;
            continue;
        }
        seen = number();
        take_part(seen);
    }
}

static void share(char *to, const char *from, size_t nbytes, unsigned threads)
{
    unsigned helpers = threads - 1 < MOST_HELPERS ? threads - 1 : MOST_HELPERS;
    job.to = to, job.from = from, job.nbytes = nbytes, job.pieces = (uint32_t)((nbytes + PIECE - 1) / PIECE);
    atomic_store(&job.done, 0);
    uint32_t mine = number() + 1 ? number() + 1 : 1; /* 0 is what a helper has seen that has seen nothing */
    atomic_store(&job.ticket, (uint64_t)mine << 32 | job.pieces);
    if (atomic_load(&job.asleep))
        quietly(SYS_futex, (long)((uint32_t *)&job.ticket + (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)), FUTEX_WAKE_PRIVATE, MOST_HELPERS, 0);
    for (unsigned i = 0; i < helpers; i++)
        if (!atomic_load(&alive[i]) && bare_thread(help, NULL, stacks[i] + STACK_BYTES, &alive[i], 0) != 0)
            break; /* no thread to be had: with fewer */
    take_part(mine);
    for (unsigned i = 1; atomic_load(&job.done) < job.pieces; i++) {
        pause_a_moment();
        if (i % LOOKS == 0)
            quietly(SYS_sched_yield, 0, 0, 0, 0);
    }
}

static void *copy(void *to, const void *from, size_t nbytes)
{
    unsigned threads;
    if (__builtin_expect(nbytes < 2 * PIECE, 1) || (threads = copy_threads((uintptr_t)to, (uintptr_t)from, nbytes)) < 2 ||
        atomic_exchange(&sharing, 1))
        return plainly(to, from, nbytes);
    share(to, from, nbytes, threads);
    atomic_store(&sharing, 0);
    return to;
}

/* Taking its place. */

static struct slot {
    _Atomic uintptr_t *at;
    uintptr_t before, page; /* page: of those that are read-only once the library is loaded; else 0 */
} slot[MOST_SLOTS];
static unsigned slots;
static uintptr_t page_bytes;
static uint32_t owner; /* the process in which that is so: a forked child has it as well, and no keeper */

static void put(struct slot *s, uintptr_t expected, uintptr_t value)
{
    if (s->page && quietly(SYS_mprotect, (long)s->page, (long)page_bytes, PROT_READ | PROT_WRITE, 0) < 0)
        return;
    atomic_compare_exchange_strong(s->at, &expected, value); /* what somebody else has put there since stays */
    if (s->page)
        quietly(SYS_mprotect, (long)s->page, (long)page_bytes, PROT_READ, 0);
}

static int is_memcpy(const char *name)
{
    const char *wanted = "memcpy";
    while (*wanted && *name == *wanted)
        name++, wanted++;
    return *name == *wanted;
}

/* Note the places among *relocations* through which memcpy is called. */
static void find(uintptr_t base, const ElfW(Rela) * relocation, size_t nbytes, const ElfW(Sym) * symbols, const char *names,
                 uintptr_t readonly, uintptr_t readonly_end)
{
    for (size_t i = 0; i < nbytes / sizeof *relocation && slots < MOST_SLOTS; i++) {
        uint64_t type = ELF64_R_TYPE(relocation[i].r_info);
        if ((type != JUMP_SLOT && type != GLOB_DAT) || !is_memcpy(names + symbols[ELF64_R_SYM(relocation[i].r_info)].st_name))
            continue;
        uintptr_t at = base + relocation[i].r_offset;
        int fixed = at >= readonly && at < readonly_end;
        slot[slots++] = (struct slot){(_Atomic uintptr_t *)at, *(uintptr_t *)at, fixed ? at & ~(page_bytes - 1) : 0};
    }
}

/* Reads the tables of the library as the loader does. It asks the loader nothing, which may be in the middle of something. */
static void look(uintptr_t base)
{
    const ElfW(Ehdr) *head = (const ElfW(Ehdr) *)base;
    const ElfW(Dyn) *dynamic = NULL;
    uintptr_t end = base, readonly = 0, readonly_end = 0, table[DT_JMPREL + 1] = {0};
    if (memcmp(head->e_ident, ELFMAG, SELFMAG) != 0 || head->e_ident[EI_CLASS] != ELFCLASS64 || head->e_type != ET_DYN)
        return;
    const ElfW(Phdr) *part = (const ElfW(Phdr) *)(base + head->e_phoff);
    for (unsigned i = 0; i < head->e_phnum; i++) {
        if (part[i].p_type == PT_LOAD && base + part[i].p_vaddr + part[i].p_memsz > end)
            end = base + part[i].p_vaddr + part[i].p_memsz;
        if (part[i].p_type == PT_DYNAMIC)
            dynamic = (const ElfW(Dyn) *)(base + part[i].p_vaddr);
        if (part[i].p_type == PT_GNU_RELRO)
            readonly = (base + part[i].p_vaddr) & ~(page_bytes - 1), /* whole pages, as the loader counts them */
                readonly_end = (base + part[i].p_vaddr + part[i].p_memsz) & ~(page_bytes - 1);
    }
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++)
        if (dynamic->d_tag > 0 && dynamic->d_tag <= DT_JMPREL)
            table[dynamic->d_tag] = dynamic->d_un.d_val;
    const int pointers[] = {DT_SYMTAB, DT_STRTAB, DT_JMPREL, DT_RELA};
    for (unsigned i = 0; i < sizeof pointers / sizeof pointers[0]; i++) {
        uintptr_t *p = &table[pointers[i]];
        if (*p && *p < base)
            *p += base; /* a C library that leaves them as they are in the file */
        if (*p >= end)
            return;
    }
    if (!table[DT_SYMTAB] || !table[DT_STRTAB] || (table[DT_JMPREL] && table[DT_PLTREL] != DT_RELA))
        return;
    const ElfW(Sym) *symbols = (const ElfW(Sym) *)table[DT_SYMTAB];
    const char *names = (const char *)table[DT_STRTAB];
    if (table[DT_JMPREL])
        find(base, (const ElfW(Rela) *)table[DT_JMPREL], table[DT_PLTRELSZ], symbols, names, readonly, readonly_end);
    if (table[DT_RELA])
        find(base, (const ElfW(Rela) *)table[DT_RELA], table[DT_RELASZ], symbols, names, readonly, readonly_end);
}

void take_copies(uintptr_t base)
{
    uint32_t pid = (uint32_t)quietly(SYS_getpid, 0, 0, 0, 0);
    if (!plainly || !base || (slots && owner == pid))
        return;
    if (owner != pid) { /* of a parent's helpers there is none here */
        memset(alive, 0, sizeof alive);
        atomic_store(&job.asleep, 0);
        atomic_store(&sharing, 0);
        owner = pid;
    }
    give_back_copies(); /* what a parent had taken */
    look(base);
    for (unsigned i = 0; i < slots; i++)
        put(&slot[i], slot[i].before, (uintptr_t)copy);
}

void give_back_copies(void)
{
    for (unsigned i = 0; i < slots; i++)
        put(&slot[i], (uintptr_t)copy, slot[i].before);
    slots = 0;
}

__attribute__((constructor)) static void start(void)
{
    plainly = dlsym ? (copier *)dlsym(RTLD_NEXT, "memcpy") : NULL;
    page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
}
