/* Between the GPU and host memory, at the speed of the link.
 *
 * A block's copy lies in anonymous memory of its own, of huge pages where the kernel has them. Several threads copy it, a piece at a time, each
 * through a stage: a small buffer of its own that is registered with the driver for the time of one sleep or wake. Memory that is
 * not registered is copied at a quarter of the link's rate; to register the copy itself piece by piece is slower still, as the driver does
 * one registering at a time and copies nothing meanwhile; and what stays registered makes every restore of the process slower. What each
 * costs: docs/pool.md.
 */
#define _GNU_SOURCE
#include "_pool.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

#define PIECE ((size_t)32 << 20)
#define PART ((size_t)4 << 20) /* what goes through a stage at a time: smaller ones cost more calls than the CPU's caches save (docs/pool.md) */

static struct {
    unsigned threads; /* at most MOST_THREADS */
    size_t piece, part;
} tuning = {1, PIECE, PART};

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

struct part { /* of a piece, on its way through a slot */
    const struct piece *piece;
    char *host;
    size_t nbytes; /* 0: nothing is under way */
};

struct hand { /* of a worker: two slots, so that one is copied by the GPU while the other is by the CPU */
    struct job *job;
    unsigned number, slot; /* the one that is next */
    cu_stream streams[2];
    struct part parts[2];
    char *stage; /* registered; NULL: there is none */
};

static struct {
    char *at; /* kept from call to call, as its pages cost more than its registering */
    size_t nbytes;
    bool stuck; /* may be registered still: unregistering failed */
} stages[MOST_THREADS];

_Atomic bool leaving;

/* How many threads copy; and, to measure, other sizes than the defaults, which 0 stands for. Stages are new after a trim. */
OURS void gpuckpt_pool_tune(unsigned threads, size_t piece, size_t part)
{
    tuning.threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    tuning.piece = piece ? (piece + HUGE - 1) / HUGE * HUGE : PIECE;
    tuning.part = part ? (part + 4095) / 4096 * 4096 : PART;
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
    if (!block->host) {
        block->host = get(block->nbytes);
        block->touched = false;
    }
    return block->host;
}

void drop_host_copy(struct block *block)
{
    if (!block->host)
        return;
    munmap(block->host, block->nbytes);
    drop_prints(block);
    block->host = NULL;
    block->touched = false;
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

/* The stage of the hand with this number, registered; NULL: it cannot be had. */
static char *stage_for(unsigned number)
{
    if (!stages[number].at) {
        stages[number].nbytes = (2 * tuning.part + HUGE - 1) / HUGE * HUGE;
        stages[number].stuck = false;
        if (!(stages[number].at = get(stages[number].nbytes)))
            return NULL;
    }
    cu_result result = cu.cuMemHostRegister_v2(stages[number].at, stages[number].nbytes, 0);
    return result == CU_OK || result == CU_ALREADY_REGISTERED ? stages[number].at : NULL; /* by a call that could not unregister it */
}

/* Copying. */

static bool fail(struct job *job, enum failure failure, const char *call, cu_result result, const struct piece *piece)
{
    pthread_mutex_lock(&job->lock);
    failed(job->moved, failure, call, result, piece ? piece->block : NULL);
    pthread_mutex_unlock(&job->lock);
    atomic_store(&job->stop, true);
    return false;
}

static bool touch(struct job *job, const struct piece *piece, char *host)
{
    int tries = 0;
    while (madvise(host, piece->nbytes, MADV_POPULATE_WRITE)) {
        if ((errno == EINTR || errno == EAGAIN) && ++tries < 100)
            continue;
        if (errno == EINVAL) /* an older kernel: the pages come when they are written */
            break;
        return fail(job, NO_HOST_MEMORY, "madvise", errno, piece);
    }
    return true;
}

/* Past the caches: what is copied out is not read again. All are multiples of 4 KiB. */
static void copy_out(char *to, const char *from, size_t nbytes)
{
#if defined(__x86_64__)
    for (size_t at = 0; at < nbytes; at += 64) {
        const __m128i *source = (const __m128i *)(from + at);
        __m128i *target = (__m128i *)(to + at);
        __m128i a = _mm_load_si128(source), b = _mm_load_si128(source + 1), c = _mm_load_si128(source + 2), d = _mm_load_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    _mm_sfence();
#else
    memcpy(to, from, nbytes);
#endif
}

static bool begin(struct hand *hand, const struct piece *piece, size_t offset, char *host, size_t nbytes, unsigned slot)
{
    cu_address device = piece->block->address + piece->offset + offset;
    bool down = hand->job->down;
    cu_result result = down ? cu.cuMemcpyDtoHAsync_v2(host, device, nbytes, hand->streams[slot])
                            : cu.cuMemcpyHtoDAsync_v2(device, host, nbytes, hand->streams[slot]);
    return result == CU_OK || fail(hand->job, DRIVER_FAILED, down ? "cuMemcpyDtoHAsync" : "cuMemcpyHtoDAsync", result, piece);
}

static bool over(struct hand *hand, const struct piece *piece, unsigned slot)
{
    cu_result result = cu.cuStreamSynchronize(hand->streams[slot]);
    return result == CU_OK || fail(hand->job, DRIVER_FAILED, "cuStreamSynchronize", result, piece);
}

static char *stage_of(struct hand *hand, unsigned slot)
{
    return hand->stage + slot * (stages[hand->number].nbytes / 2);
}

/* What is under way in the slot is over when this returns, and where it belongs if it returns true. */
static bool settle(struct hand *hand, unsigned slot)
{
    struct part part = hand->parts[slot];
    if (!part.nbytes)
        return true;
    hand->parts[slot].nbytes = 0;
    if (!over(hand, part.piece, slot))
        return false;
    if (hand->job->down)
        copy_out(part.host, stage_of(hand, slot), part.nbytes);
    atomic_fetch_add(&hand->job->copied, part.nbytes);
    return true;
}

/* Begin to copy a piece, part by part. The last ones may be under way still: the next piece goes on from there. */
static bool staged(struct hand *hand, const struct piece *piece, char *host)
{
    size_t most = stages[hand->number].nbytes / 2, size = tuning.part < most ? tuning.part : most, nbytes;
    for (size_t at = 0; at < piece->nbytes; at += nbytes) {
        unsigned slot = hand->slot;
        char *stage = stage_of(hand, slot);
        nbytes = piece->nbytes - at < size ? piece->nbytes - at : size;
        if (!settle(hand, slot))
            return false;
        if (!hand->job->down)
            memcpy(stage, host + at, nbytes); /* the part before is copied by the GPU meanwhile */
        if (!begin(hand, piece, at, stage, nbytes, slot))
            return false;
        hand->parts[slot] = (struct part){piece, host + at, nbytes};
        hand->slot = !slot;
        if (hand->job->down && !settle(hand, !slot)) /* the part before is copied out while the GPU copies this one */
            return false;
    }
    return true;
}

static bool pageable(struct hand *hand, const struct piece *piece, char *host)
{
    bool begun = begin(hand, piece, 0, host, piece->nbytes, 0), done = over(hand, piece, 0);
    if (!begun || !done)
        return false;
    atomic_fetch_add(&hand->job->pageable, piece->nbytes);
    atomic_fetch_add(&hand->job->copied, piece->nbytes);
    return true;
}

static void copy_pieces(struct hand *hand)
{
    struct job *job = hand->job;
    size_t at;
    bool going = true;
    while (going && !atomic_load(&job->stop) && (at = atomic_fetch_add(&job->next, 1)) < job->count) {
        struct piece *piece = &job->pieces[at];
        char *host = piece->block->host + piece->offset;
        if (atomic_load(&leaving))
            going = fail(job, LEAVING, "", 0, piece);
        else
            going = (!job->down || piece->block->touched || touch(job, piece, host)) && (hand->stage ? staged : pageable)(hand, piece, host);
    }
    /* Waited for in any case: what is under way must not meet memory that is no longer registered. */
    settle(hand, hand->slot);
    settle(hand, !hand->slot);
}

static void *work(void *argument)
{
    struct job *job = argument;
    struct hand hand = {.job = job, .number = atomic_fetch_add(&job->hands, 1)};
    cu_result result = CU_OK;
    unsigned streams = 0;
    if (!enter(job->device)) {
        fail(job, DRIVER_FAILED, "cuCtxPushCurrent", CU_INVALID_VALUE, NULL);
        return NULL;
    }
    while (streams < 2 && (result = cu.cuStreamCreate(&hand.streams[streams], CU_STREAM_NON_BLOCKING)) == CU_OK)
        streams++;
    if (streams == 2) {
        hand.stage = stage_for(hand.number);
        copy_pieces(&hand);
        if (hand.stage && (result = cu.cuMemHostUnregister(hand.stage)) != CU_OK) {
            stages[hand.number].stuck = true; /* the next call finds it registered, and tries again */
            fail(job, DRIVER_FAILED, "cuMemHostUnregister", result, NULL);
        }
    } else
        fail(job, result == CU_OUT_OF_MEMORY ? NO_GPU_MEMORY : DRIVER_FAILED, "cuStreamCreate", result, NULL);
    while (streams--)
        cu.cuStreamDestroy_v2(hand.streams[streams]);
    leave();
    return NULL;
}

static void run(struct job *job)
{
    pthread_t threads[MOST_THREADS];
    unsigned started = 0;
    sigset_t all, mask;
    /* Signals are the program's own threads' business; this one takes them when the helpers are gone. */
    sigfillset(&all);
    bool blocked = pthread_sigmask(SIG_SETMASK, &all, &mask) == 0;
    while (started + 1 < tuning.threads && started + 1 < job->count && pthread_create(&threads[started], NULL, work, job) == 0)
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
