/* GPU memory whose bytes can leave and come back while its addresses stay: allocated for torch, put to sleep and woken by gpuckpt.pool.
 *
 * A block is a range of addresses with physical memory mapped into it. To sleep is to copy its bytes to host memory, or not, and to unmap it:
 * the physical memory is released as soon as it is mapped, so that its one owner is the mapping, and unmapping is the one step that gives
 * it back. So a block is wholly awake before that call and wholly asleep after it, whatever fails.
 *
 * torch calls gpuckpt_pool_malloc_N and gpuckpt_pool_free, on any thread and with locks of its own held, so they wait for no copy:
 * a block that is freed while it is being moved is only marked, and the mover frees it. `table_lock` is held for looks at the table alone,
 * never over a driver call; `move_lock` by the one sleep, wake or trim. No call ends the process, and nothing here knows Python or torch.
 */
#define _GNU_SOURCE
#include "_pool.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define OURS __attribute__((visibility("default")))
#define CHAINS 4096

struct driver cu;

static struct gpu {
    cu_context context; /* its primary one, which is torch's */
    size_t granularity;
    bool known, gpudirect;
} gpus[DEVICES];

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER, move_lock = PTHREAD_MUTEX_INITIALIZER, gpus_lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *table[CHAINS];
static size_t blocks_count;
static _Atomic unsigned dead_count;
static _Atomic unsigned captures; /* under way in gpuckpt.pool.cuda_graph: nothing may wait for the GPU */
static pid_t owner;               /* 0: not open yet */

uint64_t now_ns(void)
{
    struct timespec t = {0, 0};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

bool failed(struct moved *moved, enum failure failure, const char *call, cu_result result, const struct block *block)
{
    if (!moved || moved->failure) /* the first is what went wrong */
        return false;
    moved->failure = failure;
    moved->result = result;
    moved->device = block ? block->device : -1;
    moved->wanted = block ? block->nbytes : 0;
    strncpy(moved->call, call, sizeof moved->call - 1);
    return false;
}

static bool out_of_memory(struct moved *moved, const char *call, cu_result result, const struct block *block)
{
    return failed(moved, result == CU_OUT_OF_MEMORY ? NO_GPU_MEMORY : DRIVER_FAILED, call, result, block);
}

/* The driver. */

/* A sleep or wake of another thread ends after the piece that it copies, and no other begins. The driver takes itself down after this. */
static void before_exit(void)
{
    struct timespec until = {0, 0};
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 5;
    atomic_store(&leaving, true);
    if (owner == getpid())
        pthread_mutex_timedlock(&move_lock, &until);
}

/* Find the driver; *missing, of 48 bytes, names what it lacks. Safe to call again. */
OURS int gpuckpt_pool_open(const char *libcuda, char *missing)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    int result = DONE;
    pthread_mutex_lock(&lock);
    if (!owner) {
        void *library = dlopen(libcuda, RTLD_NOW);
        const char *lacks = library ? NULL : "libcuda";
#define FIND(name, ...)                                                                                                                      \
    if (!lacks && !(cu.name = (cu_result(*)(__VA_ARGS__))(uintptr_t)dlsym(library, #name)))                                                    \
        lacks = #name;
        DRIVER_CALLS(FIND)
#undef FIND
        if (lacks) {
            strncpy(missing, lacks, 47);
            result = NO_DRIVER;
        } else {
            owner = getpid();
            atexit(before_exit);
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static bool ours(void)
{
    return owner && owner == getpid();
}

static struct cu_allocation kind_of(int device)
{
    return (struct cu_allocation){.kind = CU_DEVICE, .place = {CU_DEVICE, device}, .gpudirect = gpus[device].gpudirect};
}

static bool learn(int device)
{
    struct gpu *gpu = &gpus[device];
    cu_device found;
    int value = 0;
    if (device < 0 || device >= DEVICES)
        return false;
    pthread_mutex_lock(&gpus_lock);
    if (!gpu->known && cu.cuDeviceGet(&found, device) == CU_OK) {
        if (cu.cuDeviceGetAttribute(&value, CU_GPUDIRECT_WITH_VMM, found) == CU_OK)
            gpu->gpudirect = value;
        struct cu_allocation kind = kind_of(device);
        value = 0;
        gpu->known = cu.cuDeviceGetAttribute(&value, CU_VMM_SUPPORTED, found) == CU_OK && value &&
                     cu.cuMemGetAllocationGranularity(&gpu->granularity, &kind, 0) == CU_OK && gpu->granularity &&
                     cu.cuDevicePrimaryCtxRetain(&gpu->context, found) == CU_OK; /* never released: blocks may outlive all else */
    }
    pthread_mutex_unlock(&gpus_lock);
    return gpu->known;
}

bool enter(int device)
{
    return cu.cuCtxPushCurrent_v2(gpus[device].context) == CU_OK;
}

void leave(void)
{
    cu_context left;
    cu.cuCtxPopCurrent_v2(&left);
}

/* Blocks. The context of the block's device is current in all of these. */

/* Physical memory behind the block's addresses. False: as before, but for what could not be undone, which the block knows. */
static bool map(struct block *block, struct moved *moved)
{
    cu_result result;
    if (!block->mapped) {
        if (!block->handle) {
            struct cu_allocation kind = kind_of(block->device);
            result = cu.cuMemCreate(&block->handle, block->nbytes, &kind, 0);
            if (kind.gpudirect && (result == CU_NOT_PERMITTED || result == CU_NOT_SUPPORTED)) { /* the card can, the machine cannot */
                kind.gpudirect = gpus[block->device].gpudirect = false;
                result = cu.cuMemCreate(&block->handle, block->nbytes, &kind, 0);
            }
            if (result != CU_OK) {
                block->handle = 0;
                return out_of_memory(moved, "cuMemCreate", result, block);
            }
        }
        result = cu.cuMemMap(block->address, block->nbytes, 0, block->handle, 0);
        block->mapped = result == CU_OK;
        cu_result released = cu.cuMemRelease(block->handle);
        if (released == CU_OK)
            block->handle = 0; /* else unmap() does it */
        if (!block->mapped)
            return out_of_memory(moved, "cuMemMap", result, block);
    }
    if (!block->accessible) {
        struct cu_access access = {{CU_DEVICE, block->device}, CU_READ_WRITE};
        if ((result = cu.cuMemSetAccess(block->address, block->nbytes, &access, 1)) != CU_OK) {
            if (cu.cuMemUnmap(block->address, block->nbytes) == CU_OK)
                block->mapped = false;
            return out_of_memory(moved, "cuMemSetAccess", result, block);
        }
        block->accessible = true;
    }
    return true;
}

/* The other way. False: it is still mapped, or its memory still held. */
static bool unmap(struct block *block, struct moved *moved)
{
    cu_result result;
    if (block->mapped) {
        if ((result = cu.cuMemUnmap(block->address, block->nbytes)) != CU_OK)
            return failed(moved, DRIVER_FAILED, "cuMemUnmap", result, block);
        block->mapped = block->accessible = false;
    }
    if (block->handle) {
        if ((result = cu.cuMemRelease(block->handle)) != CU_OK)
            return failed(moved, DRIVER_FAILED, "cuMemRelease", result, block);
        block->handle = 0;
    }
    return true;
}

static struct block **find(cu_address address)
{
    struct block **at = &table[(address >> 21) % CHAINS];
    while (*at && (*at)->address != address)
        at = &(*at)->next;
    return at;
}

static void insert(struct block *block)
{
    struct block **at = &table[(block->address >> 21) % CHAINS];
    pthread_mutex_lock(&table_lock);
    block->next = *at;
    *at = block;
    blocks_count++;
    pthread_mutex_unlock(&table_lock);
}

static void bury(struct block *block)
{
    block->dead = true;
    atomic_fetch_add(&dead_count, 1);
    insert(block);
}

/* Give all back that a block has, which is in no table any more. False: the GPU may not be waited for now, or the driver fails; then
 * it is in the table as a dead one, for the next call to try again. */
static bool end(struct block *block)
{
    bool done = false;
    drop_host_copy(block);
    drop_prints(block);
    if (enter(block->device)) {
        /* torch frees what a kernel may still use, as with cudaFree, which waits. */
        if (!block->mapped || (!atomic_load(&captures) && cu.cuCtxSynchronize() == CU_OK))
            done = unmap(block, NULL) && cu.cuMemAddressFree(block->address, block->nbytes) == CU_OK;
        leave();
    }
    if (done) {
        free(block);
        return true;
    }
    block->busy = block->doomed = false;
    bury(block);
    return false;
}

/* Try again what end() could not. */
static void reap(void)
{
    if (!atomic_load(&dead_count) || atomic_load(&captures))
        return;
    for (size_t chain = 0; chain < CHAINS; chain++) {
        struct block *dead = NULL;
        pthread_mutex_lock(&table_lock);
        for (struct block **at = &table[chain]; *at && !dead;)
            if ((*at)->dead && !(*at)->busy) {
                dead = *at;
                *at = dead->next;
                blocks_count--;
                dead_count--;
                dead->dead = false;
            } else
                at = &(*at)->next;
        pthread_mutex_unlock(&table_lock);
        if (dead && end(dead))
            chain--; /* perhaps more in this chain */
    }
}

static void *allocate(unsigned tag, ptrdiff_t size, int device)
{
    struct moved moved = {0};
    if (!ours() || size <= 0 || !learn(device))
        return NULL;
    reap();
    size_t granularity = gpus[device].granularity, nbytes = ((size_t)size + granularity - 1) / granularity * granularity;
    struct block *block = calloc(1, sizeof *block);
    if (!block)
        return NULL;
    *block = (struct block){.nbytes = nbytes, .device = device, .tag = tag, .where = ON_GPU};
    bool reserved = false, done = false;
    if (enter(device)) {
        reserved = cu.cuMemAddressReserve(&block->address, nbytes, 0, 0, 0) == CU_OK;
        done = reserved && map(block, &moved);
        leave();
    }
    if (!done) { /* torch empties its cache and tries again, or says that memory is out */
        if (reserved)
            end(block);
        else
            free(block);
        return NULL;
    }
    insert(block);
    return (void *)(uintptr_t)block->address;
}

/* What torch calls. One function a tag: then a block's tag does not depend on the thread that torch allocates on. */

#define SLOT(n)                                                                                                                              \
    OURS void *gpuckpt_pool_malloc_##n(ptrdiff_t size, int device, void *stream)                                                               \
    {                                                                                                                                        \
        (void)stream;                                                                                                                        \
        return allocate(n, size, device);                                                                                                    \
    }
SLOT(0)
SLOT(1)
SLOT(2)
SLOT(3)
SLOT(4)
SLOT(5)
SLOT(6)
SLOT(7)
SLOT(8)
SLOT(9)
SLOT(10)
SLOT(11)
SLOT(12)
SLOT(13)
SLOT(14)
SLOT(15)

OURS void gpuckpt_pool_free(void *pointer, ptrdiff_t size, int device, void *stream)
{
    (void)size, (void)device, (void)stream;
    if (!ours() || !pointer)
        return;
    pthread_mutex_lock(&table_lock);
    struct block **at = find((cu_address)(uintptr_t)pointer), *block = *at;
    if (block && (block->dead || block->doomed))
        block = NULL;
    else if (block && block->busy) {
        block->doomed = true;
        block = NULL;
    } else if (block) {
        *at = block->next;
        blocks_count--;
    }
    pthread_mutex_unlock(&table_lock);
    if (block)
        end(block);
}

OURS void gpuckpt_pool_capturing(int begun)
{
    atomic_fetch_add(&captures, begun ? 1u : -1u);
}

/* Sleep and wake. */

enum action { LEAVE, OFFLOAD, DISCARD };

/* Those of the table that `wanted` wants are ours until put_back(). NULL: no memory for the list. */
static struct block **take(bool (*wanted)(const struct block *, const uint8_t *), const uint8_t *tags, size_t *count)
{
    pthread_mutex_lock(&table_lock);
    struct block **taken = malloc((blocks_count + 1) * sizeof *taken);
    *count = 0;
    for (size_t chain = 0; taken && chain < CHAINS; chain++)
        for (struct block *block = table[chain]; block; block = block->next)
            if (!block->dead && wanted(block, tags)) {
                block->busy = true;
                taken[(*count)++] = block;
            }
    pthread_mutex_unlock(&table_lock);
    return taken;
}

static void put_back(struct block **blocks, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        struct block *block = blocks[i];
        pthread_mutex_lock(&table_lock);
        block->busy = false;
        bool doomed = block->doomed;
        if (doomed) {
            struct block **at = find(block->address);
            *at = block->next;
            blocks_count--;
        }
        pthread_mutex_unlock(&table_lock);
        if (doomed)
            end(block);
    }
    free(blocks);
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
    if (!owner)
        return moved->failure = NO_DRIVER;
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

/* Read by allocator.py. */
struct row {
    uint64_t address, nbytes, host_bytes;
    int32_t device;
    uint32_t tag;
    uint32_t where, dead;
};

/* The first `most` blocks, and how many there are. */
OURS size_t gpuckpt_pool_rows(struct row *rows, size_t most)
{
    size_t count = 0;
    if (!ours())
        return 0;
    pthread_mutex_lock(&table_lock);
    for (size_t chain = 0; chain < CHAINS; chain++)
        for (const struct block *block = table[chain]; block; block = block->next, count++)
            if (count < most)
                rows[count] = (struct row){block->address, block->nbytes, block->host ? block->nbytes : 0, block->device, block->tag,
                                           block->where,   block->dead};
    pthread_mutex_unlock(&table_lock);
    return count;
}
