/* Copies of the driver's restore thread, shared among several threads.
 *
 * The driver's copy engine fills pinned buffers of 2 MiB, four in turn, and one thread of the process copies each into the image by memcpy; a
 * restore does the same the other way round (docs/driver-path.md). That one thread is what a checkpoint waits for. So libcuda gets a memcpy of
 * ours (_imports.c), which shares a copy among helpers if it is large, in the restore thread, into or out of an image, and within an operation that
 * gpuckpt has announced; any other goes to the C library's memcpy, as before.
 *
 * Helpers are bare threads, as in _threads.c, that copy and make system calls. They look for work for as long as the driver takes for its next
 * buffer, then sleep, and end when there has been none for a while: nobody needs to tell them, and nobody waits for one that has not taken
 * a piece.
 */
#define _GNU_SOURCE
#include "_preload.h"
#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PIECE ((size_t)128 << 10) /* what a thread takes at a time */
#define MOST_HELPERS 15
#define LOOKS 4096 /* for work, about 100 us, before a helper sleeps */
#define IDLE_S 1   /* after which it ends */

#if defined(__x86_64__)
#define pause_a_moment() __asm__ volatile("pause")
#else
#define pause_a_moment() __asm__ volatile("yield")
#endif

void *(*copy_plainly)(void *, const void *, size_t);

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
        copy_plainly(job.to + at, job.from + at, n);
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

void *copy(void *to, const void *from, size_t nbytes)
{
    unsigned threads;
    if (__builtin_expect(nbytes < 2 * PIECE, 1) || (threads = copy_threads((uintptr_t)to, (uintptr_t)from, nbytes)) < 2 ||
        atomic_exchange(&sharing, 1))
        return copy_plainly(to, from, nbytes);
    share(to, from, nbytes, threads);
    atomic_store(&sharing, 0);
    return to;
}

void no_helpers(void)
{
    for (unsigned i = 0; i < MOST_HELPERS; i++)
        atomic_store(&alive[i], 0);
    atomic_store(&job.asleep, 0);
    atomic_store(&sharing, 0);
}
