/* Sleep, wake and trim: one at a time in a process. What holds of a block after each, whatever failed: _cumem.c. */
#define _GNU_SOURCE
#include "_pool.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum action { LEAVE, OFFLOAD, DISCARD };

static pthread_mutex_t move_lock = PTHREAD_MUTEX_INITIALIZER;

/* A sleep or wake of another thread ends after the piece that it copies, and no other begins. The driver takes itself down after this. */
void wait_for_moves(void)
{
    struct timespec until = {0, 0};
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 5;
    atomic_store(&leaving, true);
    if (ours())
        pthread_mutex_timedlock(&move_lock, &until);
}

static int by_device_and_size(const void *a, const void *b)
{
    const struct block *x = *(struct block *const *)a, *y = *(struct block *const *)b;
    return x->device != y->device ? (x->device > y->device) - (x->device < y->device) : (x->nbytes < y->nbytes) - (x->nbytes > y->nbytes);
}

static bool to_sleep(const struct block *block, const uint8_t *actions)
{
    return actions[block->tag] != LEAVE && (block->where == ON_GPU || block->mapped || block->handle);
}

static bool to_wake(const struct block *block, const uint8_t *wanted)
{
    return wanted[block->tag] && block->where != ON_GPU;
}

static bool synchronise(struct block **blocks, size_t count, struct moved *moved)
{
    cu_result result = CU_OK;
    for (size_t i = 0; i < count; i++) {
        if (i && blocks[i]->device == blocks[i - 1]->device)
            continue;
        if (!enter(blocks[i]->device))
            return failed(moved, DRIVER_FAILED, "cuCtxPushCurrent", CU_INVALID_VALUE, blocks[i]);
        result = cu.cuCtxSynchronize();
        leave();
        if (result != CU_OK)
            return failed(moved, DRIVER_FAILED, "cuCtxSynchronize", result, blocks[i]);
    }
    return true;
}

static uint64_t now_ns(void)
{
    struct timespec t = {0, 0};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* Nanoseconds since *begun, which is now from now on. */
static uint64_t since(uint64_t *begun)
{
    uint64_t before = *begun;
    *begun = now_ns();
    return *begun - before;
}

static void sleep_blocks(struct block **blocks, size_t count, const uint8_t *actions, struct moved *moved)
{
    struct block **copies = malloc((count + 1) * sizeof *copies);
    size_t to_copy = 0;
    uint64_t clock = now_ns();
    if (!copies) {
        failed(moved, NO_HOST_MEMORY, "malloc", 0, NULL);
        return;
    }
    bool going = synchronise(blocks, count, moved);
    moved->sync_ns = since(&clock);
    for (size_t i = 0; i < count && going; i++)
        if (blocks[i]->where == ON_GPU && actions[blocks[i]->tag] == OFFLOAD) {
            going = host_copy(blocks[i]) || failed(moved, NO_HOST_MEMORY, "mmap", 0, blocks[i]);
            copies[to_copy++] = blocks[i];
        }
    moved->host_ns = since(&clock);
    if (going)
        print_blocks(copies, to_copy);
    moved->print_ns = since(&clock);
    going = going && copy_blocks(copies, to_copy, true, moved);
    moved->copy_ns = since(&clock);
    free(copies);
    for (size_t i = 0; i < count && going; i++) {
        struct block *block = blocks[i];
        if (!enter(block->device)) {
            failed(moved, DRIVER_FAILED, "cuCtxPushCurrent", CU_INVALID_VALUE, block);
            break;
        }
        unmap(block, moved); /* the others go on: each is asleep as soon as it is not mapped */
        leave();
        if (block->mapped || block->where != ON_GPU)
            continue;
        bool kept = actions[block->tag] == OFFLOAD;
        block->where = kept ? ON_HOST : DISCARDED;
        if (!kept) {
            drop_host_copy(block);
            moved->discarded += block->nbytes;
        }
        moved->by_tag[block->tag] += block->nbytes;
        moved->blocks++;
    }
    moved->unmap_ns = since(&clock);
}

static void wake_blocks(struct block **blocks, size_t count, struct moved *moved)
{
    struct block **copies = malloc((count + 1) * sizeof *copies);
    size_t to_copy = 0, to_map = 0;
    uint64_t clock = now_ns();
    if (!copies) {
        failed(moved, NO_HOST_MEMORY, "malloc", 0, NULL);
        return;
    }
    bool going = true;
    for (; to_map < count && going; to_map += going) {
        struct block *block = blocks[to_map];
        going = enter(block->device) || failed(moved, DRIVER_FAILED, "cuCtxPushCurrent", CU_INVALID_VALUE, block);
        if (going) {
            going = map(block, moved);
            leave();
        }
        if (going && block->where == ON_HOST)
            copies[to_copy++] = block;
    }
    moved->map_ns = since(&clock);
    going = going && copy_blocks(copies, to_copy, false, moved);
    moved->copy_ns = since(&clock);
    free(copies);
    for (size_t i = 0; i < count; i++) {
        struct block *block = blocks[i];
        if (going) {
            if (block->where == DISCARDED)
                moved->discarded += block->nbytes;
            block->where = ON_GPU;
            moved->by_tag[block->tag] += block->nbytes;
            moved->blocks++;
        } else if (enter(block->device)) {
            unmap(block, NULL); /* all bytes are in host memory still */
            leave();
        }
    }
    moved->unmap_ns = since(&clock);
}

static int move(bool (*wanted)(const struct block *, const uint8_t *), const uint8_t *tags, bool sleeping, struct moved *moved)
{
    size_t count;
    memset(moved, 0, sizeof *moved);
    if (!ours())
        return moved->failure = FORKED;
    pthread_mutex_lock(&move_lock);
    reap();
    struct block **blocks = take(wanted, tags, &count);
    if (blocks) {
        qsort(blocks, count, sizeof *blocks, by_device_and_size);
        if (sleeping)
            sleep_blocks(blocks, count, tags, moved);
        else
            wake_blocks(blocks, count, moved);
        put_back(blocks, count);
    } else
        failed(moved, NO_HOST_MEMORY, "malloc", 0, NULL);
    pthread_mutex_unlock(&move_lock);
    return moved->failure;
}

/* actions[tag]: LEAVE, OFFLOAD, DISCARD. Blocks already asleep stay as they are. */
OURS int gpuckpt_pool_sleep(const uint8_t *actions, struct moved *moved)
{
    return move(to_sleep, actions, true, moved);
}

/* Those of the tags wanted that sleep; all of them, or none. */
OURS int gpuckpt_pool_wake(const uint8_t *wanted, struct moved *moved)
{
    return move(to_wake, wanted, false, moved);
}

/* Do now what the first sleep would have to wait for. No block of the device need exist. */
OURS void gpuckpt_pool_prepare(int device)
{
    if (!ours() || !learn(device))
        return;
    pthread_mutex_lock(&move_lock);
    if (enter(device)) {
        prepare_prints(device);
        leave();
    }
    pthread_mutex_unlock(&move_lock);
}

static bool has_idle_copy(const struct block *block, const uint8_t *unused)
{
    (void)unused;
    return block->where == ON_GPU && block->host;
}

/* Give back the host copies of what is awake, and what could not be freed before. Returns bytes of host memory. */
OURS uint64_t gpuckpt_pool_trim(void)
{
    size_t count;
    uint64_t given = 0;
    if (!ours())
        return 0;
    pthread_mutex_lock(&move_lock);
    reap();
    struct block **blocks = take(has_idle_copy, NULL, &count);
    for (size_t i = 0; blocks && i < count; i++) {
        given += blocks[i]->nbytes;
        drop_host_copy(blocks[i]);
    }
    if (blocks)
        put_back(blocks, count);
    drop_stages();
    pthread_mutex_unlock(&move_lock);
    return given;
}
