/* Bare threads, and memory populated by several of them.
 *
 * A bare thread is made by clone, has every signal blocked, and touches nothing of the C library, errno included: what the thread that
 * started it is in the middle of is not known.
 */
#define _GNU_SOURCE
#include "_preload.h"
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <unistd.h>

long quietly6(long number, long a, long b, long c, long d, long e, long f)
{
#if defined(__x86_64__)
    long result;
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
    return result;
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c, x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e, x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
#else
#error "for x86-64 and AArch64"
#endif
}

long quietly5(long number, long a, long b, long c, long d, long e)
{
    return quietly6(number, a, b, c, d, e, 0);
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

uint64_t now_ns(clockid_t clock)
{
    struct timespec t = {0, 0};
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
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

_Atomic int busy;

int populate(void *address, size_t nbytes, uint32_t *threads)
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
    *threads = helpers + 1;
    return (int)atomic_load(&crew.error);
}
