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
 * The first image also starts the keeper, one more such thread, which waits until the process has been restored and then ends. It gives the
 * pages of an image back to the kernel once gpuckpt has them in a file, and gets new ones before they return: nobody else can do
 * that for a process. It has a descriptor table of its own, in which it holds that file, so that the program cannot close what it
 * waits on, and a file without a name ends with the process. It acts on the ranges that gpuckpt gives, and on nothing by itself.
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
#include <linux/futex.h>
#include <sched.h>
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

#if !defined(__linux__) || !defined(__LP64__)
#error "for Linux on 64 bits, as CUDA is"
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#ifndef SYS_close_range
#define SYS_close_range 436 /* Linux 5.9 */
#endif
#ifndef PR_SET_VMA
#define PR_SET_VMA 0x53564d41 /* Linux 5.17 */
#define PR_SET_VMA_ANON_NAME 0
#endif

#define LARGE ((size_t)32 << 20)
#define CHUNK ((uintptr_t)64 << 20) /* what a thread takes at a time: a multiple of a huge page */
#define MOST_THREADS 16
#define MOST_IMAGES 16
#define IMAGE_FLAGS (MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE)

enum state { STARTING, READY, OFF };

/* What became of a large populated mapping. */
enum verdict {
    NOTHING,      /* none was seen */
    EXPIRED,      /* the announcement was too old: its gpuckpt died */
    OTHER_THREAD, /* not the restore thread */
    OTHER_CALLER, /* not libcuda */
    NO_MAPPING,   /* even without MAP_POPULATE the mapping failed; the plain call was made */
    NO_POPULATE,  /* it could not be populated; undone, and the plain call was made */
    FAST,
};

struct image {
    uint64_t address, nbytes;
    uint32_t verdict, error;
};

/* What the keeper is asked. */
enum request {
    END = 1, /* the process runs again: let go of the file, and end */
    HOLD,    /* open `path`, and hold it */
    LET_GO,  /* of the file */
    DROP,    /* give back the pages from `from` to `to`: their content is gone */
    FILL,    /* get pages for that range */
    LOADED,  /* all content is there again */
    NONE,    /* after its answer no earlier request can act any more */
};

/* Read and written from outside by gpuckpt/image/page.py, which has the same layout: change `version` with it. */
static struct {
    char magic[16];
    uint32_t version;
    _Atomic uint32_t state;
    uint64_t reserved0;
    /* by gpuckpt; all that follows is zeroed with each announcement */
    _Atomic uint64_t operation; /* 0: none is announced. Written last */
    uint32_t pid, tid;          /* as this process sees them: a forked child has another pid, and what it inherited is void */
    uint64_t expires_ns;        /* CLOCK_BOOTTIME */
    uint64_t libcuda_from, libcuda_to; /* its code; 0 while restoring: then nothing that it maps is an image */
    uint64_t libcuda_base;             /* where it begins; 0: its copies are left alone */
    uint32_t threads, reserved1;
    /* by us */
    _Atomic uint32_t seen, last_verdict; /* large populated mappings while announced, and the last one's fate */
    _Atomic uint32_t last_tid;
    uint32_t images; /* entries of `image` */
    _Atomic uint64_t last_caller, last_nbytes;
    uint64_t populate_ns;
    uint32_t threads_used, huge;
    _Atomic uint64_t copied; /* bytes, by several threads */
    _Atomic uint32_t copies, copy_threads;
    struct image image[MOST_IMAGES];
    /* The keeper. By us */
    _Atomic int32_t keeper;    /* its tid, which the kernel clears when it has ended */
    uint32_t keeper_pid;       /* of the process that it is in: a forked child has none */
    _Atomic int32_t wake;      /* the descriptor in its table at which a byte wakes it; -1: not yet */
    int32_t held;              /* the descriptor of the file; -1: none */
    _Atomic uint32_t answered; /* number of the last request that was done, */
    int32_t result;            /* and what became of it: 0 or an errno */
    _Atomic uint32_t dropped;  /* pages were given back, and not all content has returned: to restore now would be the end */
    uint32_t reserved2;
    /* by gpuckpt */
    _Atomic uint32_t asked; /* number of the request. Written last */
    uint32_t request;
    uint64_t from, to;
    uint64_t reserved3[5];
    char path[960]; /* as this process sees it */
} page __attribute__((aligned(64))) = {.magic = "gpuckpt-preload", .version = 3, .wake = -1, .held = -1};
_Static_assert(sizeof page == 1592 && sizeof(struct image) == 24 && offsetof(__typeof__(page), keeper) == 536, "the layout that page.py has");

typedef void *mapper(void *, size_t, int, int, int, off_t);
static mapper *next;

long quietly5(long number, long a, long b, long c, long d, long e)
{
#if defined(__x86_64__)
    long result;
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
    return result;
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c, x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
    return x0;
#else
#error "for x86-64 and AArch64"
#endif
}

long quietly(long number, long a, long b, long c, long d)
{
    return quietly5(number, a, b, c, d, 0);
}

int bare_thread(int (*body)(void *), void *argument, char *top, _Atomic int *tid, int own_table)
{
    unsigned long all = ~0UL, mask = 0;
    const int flags = CLONE_VM | CLONE_FS | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID;
    int before = errno;
    if (quietly(SYS_rt_sigprocmask, 0 /* SIG_BLOCK */, (long)&all, (long)&mask, sizeof all) < 0)
        return -1; /* the thread would inherit a mask with which it may be interrupted */
    int made = clone(body, top, own_table ? flags : flags | CLONE_FILES, argument, (pid_t *)tid, NULL, (pid_t *)tid);
    if (made < 0)
        atomic_store(tid, 0);
    quietly(SYS_rt_sigprocmask, 2 /* SIG_SETMASK */, (long)&mask, 0, sizeof mask);
    errno = before;
    return made < 0 ? -1 : 0;
}

static uint64_t now_ns(clockid_t clock)
{
    struct timespec t = {0, 0};
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* The call as the program made it. */
static void *plainly(void *address, size_t nbytes, int protection, int flags, int fd, off_t offset)
{
    if (next)
        return next(address, nbytes, protection, flags, fd, offset);
    return (void *)syscall(SYS_mmap, address, nbytes, protection, flags, fd, offset);
}

/* Populating. */

struct crew {
    uintptr_t begin, end;
    _Atomic uintptr_t at; /* the next chunk that nobody has taken */
    _Atomic long error;
};

static char stacks[MOST_THREADS - 1][STACK_BYTES] __attribute__((aligned(64)));

/* Take chunks until there are none, or somebody failed. Runs in bare threads: system calls only. */
static int work(void *argument)
{
    struct crew *crew = argument;
    while (!atomic_load(&crew->error)) {
        uintptr_t from = atomic_fetch_add(&crew->at, CHUNK), to = from + CHUNK;
        if (from >= crew->end)
            break;
        if (from < crew->begin)
            from = crew->begin;
        if (to > crew->end)
            to = crew->end;
        long result = -EINTR;
        for (int again = 0; again < 100 && (result == -EINTR || result == -EAGAIN); again++)
            result = quietly(SYS_madvise, (long)from, (long)(to - from), MADV_POPULATE_WRITE, 0);
        if (result < 0)
            atomic_store(&crew->error, -result);
    }
    return 0;
}

static unsigned threads_for(size_t nbytes)
{
    unsigned long cpus[128]; /* 8192 of them */
    long filled = quietly(SYS_sched_getaffinity, 0, sizeof cpus, (long)cpus, 0);
    unsigned wanted = page.threads, allowed = 0;
    for (long i = 0; i < filled / (long)sizeof cpus[0]; i++)
        allowed += (unsigned)__builtin_popcountl(cpus[i]);
    if (wanted > allowed)
        wanted = allowed;
    if (wanted > nbytes / CHUNK)
        wanted = (unsigned)(nbytes / CHUNK);
    if (wanted > MOST_THREADS)
        wanted = MOST_THREADS;
    return wanted ? wanted : 1;
}

static _Atomic int busy; /* somebody populates: there is one set of stacks */

/* Returns 0, or the error that ended it. With as many threads as can be had, this one among them. */
static int populate(void *address, size_t nbytes)
{
    struct crew crew = {.begin = (uintptr_t)address, .end = (uintptr_t)address + nbytes};
    _Atomic int alive[MOST_THREADS - 1]; /* the helper's tid, which the kernel clears when it has ended */
    unsigned helpers = 0, wanted = threads_for(nbytes) - 1;
    unsigned long all = ~0UL, mask = 0;
    atomic_init(&crew.at, crew.begin & ~(CHUNK - 1));
    atomic_init(&crew.error, 0);
    /* Helpers inherit the mask. This thread keeps it until they have ended: they use what lies on its stack, and a handler might jump
     * out of here. While the kernel populates a mapping by itself, signals wait as well. */
    int blocked = wanted && quietly(SYS_rt_sigprocmask, 0 /* SIG_BLOCK */, (long)&all, (long)&mask, sizeof all) == 0;
    if (blocked)
        for (; helpers < wanted; helpers++) /* no thread to be had, by rlimit, cgroup or seccomp: with fewer */
            if (bare_thread(work, &crew, stacks[helpers] + STACK_BYTES, &alive[helpers], 0) != 0)
                break;
    work(&crew);
    for (unsigned i = 0; i < helpers; i++)
        for (int tid; (tid = atomic_load(&alive[i])) != 0;)
            quietly(SYS_futex, (long)&alive[i], FUTEX_WAIT, tid, 0);
    if (blocked)
        quietly(SYS_rt_sigprocmask, 2 /* SIG_SETMASK */, (long)&mask, 0, sizeof mask);
    page.threads_used = helpers + 1;
    return (int)atomic_load(&crew.error);
}

/* The keeper. */

static char keeper_stack[STACK_BYTES] __attribute__((aligned(64)));

static long do_as_asked(uint32_t request)
{
    uint64_t from = page.from, to = page.to; /* once: a gpuckpt that gave up on us may be writing its next request */
    long result = 0;
    if (atomic_load(&page.dropped) && (request == HOLD || request == LET_GO || request == END))
        return -EBUSY; /* what is held has the only copy */
    switch (request) {
    case HOLD:
    case LET_GO:
        if (page.held >= 0)
            quietly(SYS_close, page.held, 0, 0, 0);
        page.held = -1;
        if (request == HOLD) {
            page.path[sizeof page.path - 1] = 0;
            result = quietly(SYS_openat, AT_FDCWD, (long)page.path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0);
            page.held = result < 0 ? -1 : (int32_t)result;
        }
        break;
    case DROP:
        atomic_store(&page.dropped, 1);
        result = quietly(SYS_madvise, (long)from, (long)(to - from), MADV_DONTNEED, 0);
        break;
    case FILL:
        if (atomic_exchange(&busy, 1))
            return -EBUSY;
        result = -populate((void *)from, to - from);
        atomic_store(&busy, 0);
        break;
    case END:
        give_back_copies();
        /* fall through */
    case LOADED:
        atomic_store(&page.dropped, 0);
        break;
    }
    return result;
}

/* System calls only, with every signal blocked, like work(). */
static int keep(void *unused)
{
    int ends[2];
    char byte;
    (void)unused;
    /* This is a copy of the program's table, as a child has it: what it closes must close. A kernel that cannot do that has no keeper. */
    if (quietly(SYS_close_range, 0, ~0U, 0, 0) < 0 || quietly(SYS_pipe2, (long)ends, O_CLOEXEC, 0, 0) < 0)
        return 0;
    quietly(SYS_prctl, PR_SET_NAME, (long)"gpuckpt-image", 0, 0);
    atomic_store(&page.wake, ends[1]);
    for (;;) {
        long got = quietly(SYS_read, ends[0], (long)&byte, 1, 0);
        if (got != 1 && got != -EINTR)
            return 0;
        uint32_t asked = atomic_load(&page.asked);
        if (asked == atomic_load(&page.answered))
            continue;
        uint32_t request = page.request;
        long result = do_as_asked(request);
        page.result = result < 0 ? (int32_t)-result : 0;
        if (request == END && result == 0)
            page.held = -1;
        atomic_store(&page.answered, asked);
        if (request == END && result == 0)
            return 0; /* its table goes with it */
    }
}

static void start_keeper(void)
{
    uint32_t pid = (uint32_t)quietly(SYS_getpid, 0, 0, 0, 0);
    if (atomic_load(&page.keeper) && page.keeper_pid == pid)
        return;
    page.keeper_pid = pid;
    page.held = -1;
    page.result = 0;
    atomic_store(&page.wake, -1);
    atomic_store(&page.dropped, 0);
    atomic_store(&page.answered, atomic_load(&page.asked));
    bare_thread(keep, NULL, keeper_stack + STACK_BYTES, &page.keeper, 1);
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
    if (!within || threads < 2 || !atomic_load(&page.operation) || page.pid != (uint32_t)quietly(SYS_getpid, 0, 0, 0, 0) ||
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
    if (!atomic_load(&page.operation) || page.pid != (uint32_t)quietly(SYS_getpid, 0, 0, 0, 0))
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

static void name(void *address, size_t nbytes)
{
    char text[] = "gpuckpt-image-0000000000000000";
    uint64_t operation = atomic_load(&page.operation);
    for (size_t i = sizeof text - 1; operation; operation >>= 4)
        text[--i] = "0123456789abcdef"[operation & 15];
    quietly5(SYS_prctl, PR_SET_VMA, PR_SET_VMA_ANON_NAME, (long)address, (long)nbytes, (long)text);
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
    void *found = plainly(address, nbytes, protection, flags & ~MAP_POPULATE, fd, offset);
    if (found == MAP_FAILED) {
        verdict = NO_MAPPING;
        error = errno;
    } else {
        page.huge = quietly(SYS_madvise, (long)found, (long)nbytes, MADV_HUGEPAGE, 0) == 0; /* either failure costs speed or secrecy only */
        quietly(SYS_madvise, (long)found, (long)nbytes, MADV_DONTDUMP, 0);
        error = populate(found, nbytes);
        if (error && quietly(SYS_munmap, (long)found, (long)nbytes, 0, 0) == 0)
            verdict = NO_POPULATE;
    }
    errno = before;
    if (verdict != FAST)
        found = plainly(address, nbytes, protection, flags, fd, offset);
    page.populate_ns += now_ns(CLOCK_MONOTONIC) - begin;
    if (found != MAP_FAILED) {
        name(found, nbytes); /* by which gpuckpt knows later that what lies there is this image still */
        start_keeper();
        if (atomic_load(&page.keeper)) /* which gives them back */
            take_copies(page.libcuda_base);
        errno = before;
    }
    note(found == MAP_FAILED ? NULL : found, nbytes, verdict, error);
    atomic_store(&busy, 0);
    return found;
}

#define OURS __attribute__((visibility("default")))

OURS void *mmap(void *address, size_t nbytes, int protection, int flags, int fd, off_t offset)
{
    if (__builtin_expect(nbytes >= LARGE && (flags & ~MAP_NORESERVE) == IMAGE_FLAGS, 0) && protection == (PROT_READ | PROT_WRITE) &&
        atomic_load_explicit(&page.state, memory_order_relaxed) == READY)
        return image((uintptr_t)__builtin_return_address(0), address, nbytes, protection, flags, fd, offset);
    return plainly(address, nbytes, protection, flags, fd, offset);
}

OURS void *mmap64(void *address, size_t nbytes, int protection, int flags, int fd, off_t offset) __attribute__((alias("mmap")));

__attribute__((constructor)) static void start(void)
{
    const char *wish = getenv("GPUCKPT_PRELOAD");
    void *found = dlsym ? dlsym(RTLD_NEXT, "mmap") : NULL;
    if (found != (void *)mmap) /* a dlsym that others interpose may lead back to us */
        next = (mapper *)found;
    atomic_store(&page.state, wish && !strcmp(wish, "0") ? OFF : READY);
}
