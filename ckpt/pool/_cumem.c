/* GPU memory whose bytes can leave and come back while its addresses stay: allocated for torch, put to sleep and woken by gpuckpt.pool.
 *
 * A block is a range of addresses with physical memory mapped into it. To sleep is to copy its bytes to host memory, or not, and to unmap it:
 * the physical memory is released as soon as it is mapped, so that its one owner is the mapping, and unmapping is the one step that gives
 * it back. So a block is wholly awake before that call and wholly asleep after it, whatever fails.
 *
 * torch calls gpuckpt_pool_malloc_N and gpuckpt_pool_free, on any thread and with locks of its own held, so they wait for no copy:
 * a block that is freed while it is being moved is only marked, and the mover (_sleep.c) frees it. `table_lock` is held for looks at the table
 * alone, never over a driver call. No call ends the process, and nothing here knows Python or torch.
 */
#define _GNU_SOURCE
#include "_pool.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHAINS 4096

struct driver cu;

static struct gpu {
    cu_context context; /* its primary one, which is torch's */
    size_t granularity;
    bool known, gpudirect;
} gpus[DEVICES];

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER, gpus_lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *table[CHAINS];
static size_t blocks_count;
static _Atomic unsigned dead_count;
static _Atomic unsigned captures; /* under way in gpuckpt.pool.cuda_graph: nothing may wait for the GPU */
static pid_t owner;               /* 0: not open yet */

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
            atexit(wait_for_moves);
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

bool ours(void)
{
    return owner && owner == getpid();
}

static struct cu_allocation kind_of(int device)
{
    return (struct cu_allocation){.kind = CU_DEVICE, .place = {CU_DEVICE, device}, .gpudirect = gpus[device].gpudirect};
}

bool learn(int device)
{
    cu_device found;
    int value = 0;
    if (device < 0 || device >= DEVICES)
        return false;
    struct gpu *gpu = &gpus[device];
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
bool map(struct block *block, struct moved *moved)
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
bool unmap(struct block *block, struct moved *moved)
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
void reap(void)
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

/* For the mover. */

/* Those of the table that `wanted` wants are ours until put_back(). NULL: no memory for the list. */
struct block **take(bool (*wanted)(const struct block *, const uint8_t *), const uint8_t *tags, size_t *count)
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

void put_back(struct block **blocks, size_t count)
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
