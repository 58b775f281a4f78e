/* The keeper: a bare thread that the first image starts, and that waits until the process has been restored, then ends. Where memory is kept
 * ready for images it is there from the first GPU memory on, and stays.
 *
 * It gives the pages of an image back to the kernel once gpuckpt has them in a file, and gets new ones before they return: nobody else can do
 * that for a process. It has a descriptor table of its own, in which it holds that file, so that the program cannot close what it
 * waits on, and a file without a name ends with the process. It acts on the ranges that gpuckpt gives, and on nothing by itself.
 */
#define _GNU_SOURCE
#include "_preload.h"
#include <errno.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#ifndef SYS_close_range
#define SYS_close_range 436 /* Linux 5.9 */
#endif

static char keeper_stack[STACK_BYTES] __attribute__((aligned(64)));

static long do_as_asked(uint32_t request)
{
    uint64_t from = page.from, to = page.to; /* once: a gpuckpt that gave up on us may be writing its next request */
    uint32_t threads; /* of an image that is made it is told, not of one that comes back */
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
        reserve_trim();
        atomic_store(&page.dropped, 1);
        result = quietly(SYS_madvise, (long)from, (long)(to - from), MADV_DONTNEED, 0);
        break;
    case FILL:
        if (atomic_exchange(&busy, 1))
            return -EBUSY;
        result = -populate((void *)from, to - from, &threads);
        atomic_store(&busy, 0);
        break;
    case END:
        give_back_imports(!page.kept);
        /* fall through */
    case LOADED:
        atomic_store(&page.dropped, 0);
        break;
    case RESERVE:
        result = reserve_order(from, to != 0);
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
        if (request == END && result == 0) {
            if (page.held >= 0)
                quietly(SYS_close, page.held, 0, 0, 0);
            page.held = -1;
        }
        atomic_store(&page.answered, asked);
        if (request == END && result == 0 && !page.kept)
            return 0;
    }
}

void start_keeper(void)
{
    uint32_t pid = own_pid();
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
