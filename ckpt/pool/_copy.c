/* Between the GPU and host memory, at the speed of the link.
 *
 * A block's copy lies in anonymous memory of its own, of huge pages where the kernel has them. It is copied in pieces, by several threads with a
 * stream each. Memory that the driver has not registered is copied at a quarter of the rate of the link, and memory that stays registered makes
 * every restore of the process slower. So either a piece is registered while it is copied, or it goes through a stage: a small buffer of
 * the thread's, registered for the whole of one sleep or wake. Which threads do which: docs/pool.md.
 */
#define _GNU_SOURCE
#include "_pool.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

enum way { REGISTERED, STAGED, PAGEABLE, MIXED };

static struct {
    enum way way;
    unsigned threads; /* 0: as many as there are CPUs, at most MOST_THREADS */
    size_t piece, stage;
} tuning = {REGISTERED, 0, (size_t)32 << 20, (size_t)16 << 20};

struct piece {
    struct block *block;
    size_t offset, nbytes;
};

struct job {
    struct piece *pieces;
    size_t count;
    int device;
    bool down;
    _Atomic size_t next;
    _Atomic unsigned hands;
    _Atomic uint64_t copied, pageable;
    _Atomic bool stop;
    pthread_mutex_t lock; /* of `moved` */
    struct moved *moved;
};

struct hand { /* of a worker */
    struct job *job;
    cu_stream stream;
    unsigned number;
    char *stage; /* registered; NULL: this one does without */
};

static struct {
    char *at; /* kept from call to call, as its pages cost more than its registering */
    size_t nbytes;
    bool stuck; /* may be registered still: unregistering failed */
} stages[MOST_THREADS];

_Atomic bool leaving;

OURS void gpuckpt_pool_tune(int way, unsigned threads, size_t piece, size_t stage)
{
    tuning.way = (enum way)way;
    tuning.threads = threads;
    tuning.piece = piece ? (piece + HUGE - 1) / HUGE * HUGE : (size_t)32 << 20;
    tuning.stage = stage ? (stage + HUGE - 1) / HUGE * HUGE : (size_t)16 << 20;
}

/* Host memory. */

/* Aligned to huge pages; NULL: none. */
static char *get(size_t nbytes)
{
    char *found = mmap(NULL, nbytes + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED)
        return NULL;
    char *host = (char *)(((uintptr_t)found + HUGE - 1) & ~(uintptr_t)(HUGE - 1));
    if (host > found)
        munmap(found, (size_t)(host - found));
    if (found + HUGE > host)
        munmap(host + nbytes, (size_t)(found + HUGE - host));
    /* Each may fail, and costs speed, memory of a child, or the size of a core dump. */
    madvise(host, nbytes, MADV_HUGEPAGE);
    madvise(host, nbytes, MADV_DONTFORK);
    madvise(host, nbytes, MADV_DONTDUMP);
    return host;
}

bool host_copy(struct block *block)
{
    if (block->host)
        return true;
    block->host = get(block->nbytes);
    block->touched = block->stuck = false;
    return block->host;
}

void drop_host_copy(struct block *block)
{
    if (!block->host)
        return;
    if (block->stuck)
        for (size_t at = 0; at < block->nbytes; at += tuning.piece)
            cu.cuMemHostUnregister(block->host + at);
    munmap(block->host, block->nbytes);
    drop_prints(block);
    block->host = NULL;
    block->touched = block->stuck = false;
}

/* Copying. */

static void fail(struct job *job, enum failure failure, const char *call, cu_result result, const struct piece *piece)
{
    pthread_mutex_lock(&job->lock);
    failed(job->moved, failure, call, result, piece ? piece->block : NULL);
    pthread_mutex_unlock(&job->lock);
    atomic_store(&job->stop, true);
}

static bool touch(struct job *job, const struct piece *piece, char *host)
{
    int tries = 0;
    while (madvise(host, piece->nbytes, MADV_POPULATE_WRITE)) {
        if ((errno == EINTR || errno == EAGAIN) && ++tries < 100)
            continue;
        if (errno == EINVAL) /* an older kernel: the pages come when they are written */
            break;
        fail(job, NO_HOST_MEMORY, "madvise", errno, piece);
        return false;
    }
    return true;
}

static bool over_the_link(struct hand *hand, const struct piece *piece, size_t offset, char *host, size_t nbytes)
{
    struct job *job = hand->job;
    cu_address device = piece->block->address + offset;
    const char *call = job->down ? "cuMemcpyDtoHAsync" : "cuMemcpyHtoDAsync";
    cu_result result = job->down ? cu.cuMemcpyDtoHAsync_v2(host, device, nbytes, hand->stream)
                                 : cu.cuMemcpyHtoDAsync_v2(device, host, nbytes, hand->stream);
    /* Waited for in any case: what may be under way must not meet memory that is no longer registered. */
    cu_result waited = cu.cuStreamSynchronize(hand->stream);
    if (result == CU_OK) {
        call = "cuStreamSynchronize";
        result = waited;
    }
    if (result != CU_OK)
        fail(job, DRIVER_FAILED, call, result, piece);
    return result == CU_OK;
}

static bool registered(struct hand *hand, const struct piece *piece, char *host)
{
    struct job *job = hand->job;
    cu_result result = cu.cuMemHostRegister_v2(host, piece->nbytes, 0);
    bool ours = result == CU_OK || result == CU_ALREADY_REGISTERED; /* by a call whose cuMemHostUnregister failed */
    if (!ours)
        atomic_fetch_add(&job->pageable, piece->nbytes);
    if (!over_the_link(hand, piece, piece->offset, host, piece->nbytes)) {
        if (ours && cu.cuMemHostUnregister(host) != CU_OK)
            piece->block->stuck = true;
        return false;
    }
    if (ours && (result = cu.cuMemHostUnregister(host)) != CU_OK) {
        piece->block->stuck = true;
        fail(job, DRIVER_FAILED, "cuMemHostUnregister", result, piece);
        return false;
    }
    return true;
}

static bool staged(struct hand *hand, const struct piece *piece, char *host)
{
    size_t most = stages[hand->number].nbytes;
    for (size_t at = 0; at < piece->nbytes; at += most) {
        size_t nbytes = piece->nbytes - at < most ? piece->nbytes - at : most;
        if (!hand->job->down)
            memcpy(hand->stage, host + at, nbytes);
        if (!over_the_link(hand, piece, piece->offset + at, hand->stage, nbytes))
            return false;
        if (hand->job->down)
            memcpy(host + at, hand->stage, nbytes);
    }
    return true;
}

void drop_stages(void)
{
    for (unsigned i = 0; i < MOST_THREADS; i++)
        if (stages[i].at) {
            if (stages[i].stuck)
                cu.cuMemHostUnregister(stages[i].at);
            munmap(stages[i].at, stages[i].nbytes);
            stages[i].at = NULL;
        }
}

/* The stage of the hand with this number, registered; NULL where it is to do without, or has to. */
static char *stage_for(unsigned number)
{
    bool wanted = tuning.way == STAGED || (tuning.way == MIXED && number % 2 == 0);
    if (!wanted || number >= MOST_THREADS)
        return NULL;
    if (!stages[number].at) {
        stages[number].nbytes = tuning.stage;
        stages[number].stuck = false;
        if (!(stages[number].at = get(tuning.stage)))
            return NULL;
    }
    cu_result result = cu.cuMemHostRegister_v2(stages[number].at, stages[number].nbytes, 0);
    return result == CU_OK || result == CU_ALREADY_REGISTERED ? stages[number].at : NULL;
}

static void *work(void *argument)
{
    struct job *job = argument;
    struct hand hand = {.job = job};
    cu_result result;
    size_t at;
    if (!enter(job->device)) {
        fail(job, DRIVER_FAILED, "cuCtxPushCurrent", CU_INVALID_VALUE, NULL);
        return NULL;
    }
    if ((result = cu.cuStreamCreate(&hand.stream, CU_STREAM_NON_BLOCKING)) != CU_OK) {
        fail(job, result == CU_OUT_OF_MEMORY ? NO_GPU_MEMORY : DRIVER_FAILED, "cuStreamCreate", result, NULL);
        leave();
        return NULL;
    }
    hand.number = atomic_fetch_add(&job->hands, 1);
    hand.stage = stage_for(hand.number);
    while (!atomic_load(&job->stop) && (at = atomic_fetch_add(&job->next, 1)) < job->count) {
        struct piece *piece = &job->pieces[at];
        char *host = piece->block->host + piece->offset;
        if (atomic_load(&leaving)) {
            fail(job, LEAVING, "", 0, piece);
            break;
        }
        if (job->down && !piece->block->touched && !touch(job, piece, host))
            break;
        bool done = hand.stage                ? staged(&hand, piece, host)
                    : tuning.way == PAGEABLE ? over_the_link(&hand, piece, piece->offset, host, piece->nbytes)
                                              : registered(&hand, piece, host);
        if (!done)
            break;
        atomic_fetch_add(&job->copied, piece->nbytes);
    }
    if (hand.stage && (result = cu.cuMemHostUnregister(hand.stage)) != CU_OK) {
        stages[hand.number].stuck = true; /* the next call finds it registered, and tries again */
        fail(job, DRIVER_FAILED, "cuMemHostUnregister", result, NULL);
    }
    cu.cuStreamDestroy_v2(hand.stream);
    leave();
    return NULL;
}

static unsigned threads_for(const struct job *job)
{
    cpu_set_t cpus;
    unsigned threads = tuning.threads;
    if (!threads)
        threads = sched_getaffinity(0, sizeof cpus, &cpus) ? 4 : (unsigned)CPU_COUNT(&cpus);
    if (threads > MOST_THREADS)
        threads = MOST_THREADS;
    if (threads > job->count)
        threads = (unsigned)job->count;
    return threads ? threads : 1;
}

static void run(struct job *job)
{
    pthread_t threads[MOST_THREADS];
    unsigned started = 0, wanted = threads_for(job);
    sigset_t all, mask;
    /* Signals are the program's own threads' business; this one takes them when the helpers are gone. */
    sigfillset(&all);
    bool blocked = pthread_sigmask(SIG_SETMASK, &all, &mask) == 0;
    while (started + 1 < wanted && pthread_create(&threads[started], NULL, work, job) == 0)
        started++;
    if (blocked)
        pthread_sigmask(SIG_SETMASK, &mask, NULL);
    work(job);
    for (unsigned i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
}

/* Copy the *blocks*, all of which have a host copy and are mapped; down, only what is not there already. False: `moved` says why, and what
 * arrived is not known. */
bool copy_blocks(struct block **blocks, size_t count, bool down, struct moved *moved)
{
    size_t most = 0;
    bool done = true;
    for (size_t i = 0; i < count; i++)
        most += (blocks[i]->nbytes + tuning.piece - 1) / tuning.piece;
    struct piece *pieces = malloc((most ? most : 1) * sizeof *pieces);
    if (!pieces)
        return failed(moved, NO_HOST_MEMORY, "malloc", ENOMEM, NULL);
    for (int device = 0; device < DEVICES && done; device++) {
        struct job job = {.pieces = pieces, .device = device, .down = down, .moved = moved, .lock = PTHREAD_MUTEX_INITIALIZER};
        for (size_t i = 0; i < count; i++)
            for (size_t at = 0; blocks[i]->device == device && at < blocks[i]->nbytes; at += tuning.piece) {
                size_t left = blocks[i]->nbytes - at, nbytes = left < tuning.piece ? left : tuning.piece;
                if (down && unchanged(blocks[i], at, nbytes))
                    moved->unchanged += nbytes;
                else
                    pieces[job.count++] = (struct piece){blocks[i], at, nbytes};
            }
        if (!job.count)
            continue;
        run(&job);
        moved->copied += atomic_load(&job.copied);
        moved->pageable += atomic_load(&job.pageable);
        done = !atomic_load(&job.stop);
    }
    free(pieces);
    for (size_t i = 0; i < count && down; i++) {
        if (!done)
            drop_prints(blocks[i]);
        else {
            blocks[i]->touched = true;
            keep_prints(blocks[i]);
        }
    }
    return done;
}
