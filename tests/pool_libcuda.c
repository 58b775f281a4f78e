/* A libcuda.so.1 of two GPUs whose memory is this process's own, so that contents can be checked. What is unmapped cannot be touched, as
 * on a GPU; what is mapped anew holds garbage. Calls that a driver would answer with an error give that error here.
 *
 * fake_fail(name, n, code) lets the n-th call of that name from now fail, without effect; fake_look() tells what is held.
 */
#define _GNU_SOURCE
#include "../ckpt/pool/_driver.h"
#include "../ckpt/pool/_fingerprint.cu"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define GPUS 2
#define GARBAGE 0xDB

enum { INVALID_CONTEXT = 201, NOT_FOUND = 500, NOT_REGISTERED = 713 };

struct memory {
    size_t nbytes;
    int device, held, mapped;
};

struct range {
    struct range *next;
    uintptr_t from;
    size_t nbytes;
    struct memory *memory;
    int accessible;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range *reserved, *mapped, *registered;
static size_t used[GPUS], capacity[GPUS] = {(size_t)1 << 40, (size_t)1 << 40}, granularity = (size_t)256 << 10, host_left = (size_t)1 << 60;
static long calls, fail_at, streams, pinned, copied_bytes, memories, handles;
static int fail_code;
static char failed_call[64], fail_in[64];
static void (*hook)(const char *);
static __thread int stack[16], depth;

/* What a test asks and sets. */

void fake_fail(const char *call, long nth, int code) /* "": of any name */
{
    strncpy(fail_in, call, sizeof fail_in - 1);
    fail_at = nth;
    fail_code = code;
    failed_call[0] = 0;
}

const char *fake_failed(void) { return failed_call; }
void fake_capacity(int device, size_t nbytes) { capacity[device] = nbytes; }
void fake_granularity(size_t nbytes) { granularity = nbytes; }
void fake_hook(void (*called)(const char *)) { hook = called; }
void fake_register_limit(size_t nbytes) { host_left = nbytes; }

static size_t count(const struct range *at)
{
    size_t n = 0;
    for (; at; at = at->next)
        n++;
    return n;
}

void fake_look(uint64_t seen[10])
{
    pthread_mutex_lock(&lock);
    size_t found[] = {used[0], used[1], memories, handles, count(reserved), count(mapped), count(registered), streams, pinned, depth};
    pthread_mutex_unlock(&lock);
    memcpy(seen, found, sizeof found);
}

long fake_calls(void) { return calls; }
long fake_copied(void) { return copied_bytes; }

static int begin(const char *name)
{
    if (hook)
        hook(name);
    pthread_mutex_lock(&lock);
    calls++;
    if (!fail_at || (*fail_in && strcmp(name, fail_in)) || --fail_at)
        return CU_OK;
    strncpy(failed_call, name, sizeof failed_call - 1);
    return fail_code;
}

static int end(int result)
{
    pthread_mutex_unlock(&lock);
    return result;
}

#define BEGIN                                                                                                                                \
    int begun = begin(__func__);                                                                                                             \
    if (begun != CU_OK)                                                                                                                      \
        return end(begun)
#define IN_CONTEXT                                                                                                                           \
    BEGIN;                                                                                                                                   \
    if (!depth)                                                                                                                              \
    return end(INVALID_CONTEXT)

static struct range **at(struct range **list, uintptr_t from)
{
    while (*list && (*list)->from != from)
        list = &(*list)->next;
    return list;
}

static struct range *around(struct range *list, uintptr_t from, size_t nbytes)
{
    while (list && !(list->from <= from && from + nbytes <= list->from + list->nbytes))
        list = list->next;
    return list;
}

static struct range *add(struct range **list, uintptr_t from, size_t nbytes)
{
    struct range *made = calloc(1, sizeof *made);
    *made = (struct range){.next = *list, .from = from, .nbytes = nbytes};
    return *list = made;
}

static void drop(struct range **list)
{
    struct range *gone = *list;
    *list = gone->next;
    free(gone);
}

static void settle(struct memory *memory)
{
    if (memory->held || memory->mapped)
        return;
    used[memory->device] -= memory->nbytes;
    memories--;
    free(memory);
}

int cuDeviceGet(cu_device *device, int ordinal)
{
    BEGIN;
    *device = ordinal;
    return end(ordinal < GPUS ? CU_OK : 101);
}

int cuDeviceGetAttribute(int *value, int attribute, cu_device device)
{
    BEGIN;
    *value = attribute == CU_VMM_SUPPORTED || attribute == CU_GPUDIRECT_WITH_VMM;
    return end(CU_OK);
}

int cuDevicePrimaryCtxRetain(cu_context *context, cu_device device)
{
    BEGIN;
    *context = (void *)(uintptr_t)(device + 1);
    return end(CU_OK);
}

int cuCtxPushCurrent_v2(cu_context context)
{
    BEGIN;
    if (depth == 16)
        return end(1);
    stack[depth++] = (int)(uintptr_t)context - 1;
    return end(CU_OK);
}

int cuCtxPopCurrent_v2(cu_context *context)
{
    pthread_mutex_lock(&lock); /* does not fail: nobody could do anything about it */
    if (!depth)
        return end(INVALID_CONTEXT);
    *context = (void *)(uintptr_t)(stack[--depth] + 1);
    return end(CU_OK);
}

int cuMemGetAllocationGranularity(size_t *found, const struct cu_allocation *kind, int option)
{
    BEGIN;
    *found = granularity;
    return end(kind->gpudirect ? CU_OK : CU_INVALID_VALUE); /* case 52: where the card can, the flag is set */
}

int cuMemAddressReserve(cu_address *address, size_t nbytes, size_t alignment, cu_address wished, unsigned long long flags)
{
    IN_CONTEXT;
    void *found = mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED)
        return end(CU_OUT_OF_MEMORY);
    *address = (uintptr_t)add(&reserved, (uintptr_t)found, nbytes)->from;
    return end(CU_OK);
}

int cuMemAddressFree(cu_address address, size_t nbytes)
{
    BEGIN;
    struct range **found = at(&reserved, address);
    if (!*found || (*found)->nbytes != nbytes || *at(&mapped, address))
        return end(CU_INVALID_VALUE);
    munmap((void *)address, nbytes);
    drop(found);
    return end(CU_OK);
}

int cuMemCreate(cu_handle *handle, size_t nbytes, const struct cu_allocation *kind, unsigned long long flags)
{
    IN_CONTEXT;
    int device = kind->place.id;
    if (kind->kind != CU_DEVICE || kind->place.kind != CU_DEVICE || nbytes % granularity)
        return end(CU_INVALID_VALUE);
    if (used[device] + nbytes > capacity[device])
        return end(CU_OUT_OF_MEMORY);
    struct memory *made = calloc(1, sizeof *made);
    *made = (struct memory){nbytes, device, 1, 0};
    memories++, handles++;
    used[device] += nbytes;
    *handle = (uintptr_t)made;
    return end(CU_OK);
}

int cuMemRelease(cu_handle handle)
{
    BEGIN;
    struct memory *memory = (struct memory *)handle;
    if (!memory->held)
        return end(CU_INVALID_VALUE);
    memory->held = 0, handles--;
    settle(memory);
    return end(CU_OK);
}

int cuMemMap(cu_address address, size_t nbytes, size_t offset, cu_handle handle, unsigned long long flags)
{
    IN_CONTEXT;
    struct range *place = around(reserved, address, nbytes);
    struct memory *memory = (struct memory *)handle;
    if (!place || offset || memory->nbytes != nbytes || *at(&mapped, address))
        return end(CU_INVALID_VALUE);
    add(&mapped, address, nbytes)->memory = memory;
    memory->mapped = 1;
    return end(CU_OK);
}

int cuMemUnmap(cu_address address, size_t nbytes)
{
    BEGIN;
    struct range **found = at(&mapped, address);
    if (!*found || (*found)->nbytes != nbytes)
        return end(CU_INVALID_VALUE);
    struct memory *memory = (*found)->memory;
    mmap((void *)address, nbytes, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    drop(found);
    memory->mapped = 0;
    settle(memory);
    return end(CU_OK);
}

int cuMemSetAccess(cu_address address, size_t nbytes, const struct cu_access *access, size_t how_many)
{
    BEGIN;
    struct range *place = *at(&mapped, address);
    if (!place || place->nbytes != nbytes || how_many != 1 || access->place.id != place->memory->device || access->flags != CU_READ_WRITE)
        return end(CU_INVALID_VALUE);
    mprotect((void *)address, nbytes, PROT_READ | PROT_WRITE);
    memset((void *)address, GARBAGE, nbytes);
    place->accessible = 1;
    return end(CU_OK);
}

int cuMemHostRegister_v2(void *host, size_t nbytes, unsigned flags)
{
    IN_CONTEXT;
    if (nbytes > host_left)
        return end(CU_OUT_OF_MEMORY);
    for (struct range *r = registered; r; r = r->next)
        if (r->from < (uintptr_t)host + nbytes && (uintptr_t)host < r->from + r->nbytes)
            return end(CU_ALREADY_REGISTERED);
    add(&registered, (uintptr_t)host, nbytes);
    return end(CU_OK);
}

int cuMemHostUnregister(void *host)
{
    BEGIN;
    struct range **found = at(&registered, (uintptr_t)host);
    if (!*found)
        return end(NOT_REGISTERED);
    drop(found);
    return end(CU_OK);
}

int cuMemHostAlloc(void **host, size_t nbytes, unsigned flags)
{
    IN_CONTEXT;
    *host = malloc(nbytes);
    pinned++;
    return end(CU_OK);
}

int cuMemFreeHost(void *host)
{
    BEGIN;
    free(host);
    pinned--;
    return end(CU_OK);
}

static bool reachable(const struct range *place, cu_stream stream)
{
    return place && place->accessible && place->memory->device == stack[depth - 1] && stream;
}

static int copy(void *to, const void *from, cu_address device, size_t nbytes, cu_stream stream)
{
    const struct range *place = around(mapped, device, nbytes);
    if (!reachable(place, stream))
        return CU_INVALID_VALUE;
    memcpy(to, from, nbytes);
    copied_bytes += (long)nbytes;
    return CU_OK;
}

int cuMemcpyDtoHAsync_v2(void *host, cu_address device, size_t nbytes, cu_stream stream)
{
    IN_CONTEXT;
    return end(copy(host, (void *)device, device, nbytes, stream));
}

int cuMemcpyHtoDAsync_v2(cu_address device, const void *host, size_t nbytes, cu_stream stream)
{
    IN_CONTEXT;
    return end(copy((void *)device, host, device, nbytes, stream));
}

int cuStreamCreate(cu_stream *stream, unsigned flags)
{
    IN_CONTEXT;
    *stream = (void *)(uintptr_t)++streams;
    return end(CU_OK);
}

int cuStreamDestroy_v2(cu_stream stream)
{
    BEGIN;
    streams--;
    return end(CU_OK);
}

/* Nothing is ever under way. */
#define SYNCHRONISES(name, ...)                                                                                                              \
    int name(__VA_ARGS__)                                                                                                                    \
    {                                                                                                                                        \
        IN_CONTEXT;                                                                                                                          \
        return end(CU_OK);                                                                                                                   \
    }
SYNCHRONISES(cuCtxSynchronize, void)
SYNCHRONISES(cuStreamSynchronize, cu_stream stream)

/* The one kernel there is: the source of the real one, as C. */

uint64_t fake_add(uint64_t a, uint64_t b) { return print_add(a, b); }

int cuModuleLoadData(cu_module *module, const void *text)
{
    IN_CONTEXT;
    *module = (void *)text;
    return end(strstr(text, ".entry gpuckpt_fingerprint(") ? CU_OK : CU_INVALID_VALUE);
}

int cuModuleGetFunction(cu_function *function, cu_module module, const char *name)
{
    IN_CONTEXT;
    *function = module;
    return end(strcmp(name, "gpuckpt_fingerprint") ? NOT_FOUND : CU_OK);
}

int cuLaunchKernel(cu_function function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz, unsigned shared,
                   cu_stream stream, void **arguments, void **extra)
{
    IN_CONTEXT;
    cu_address data = *(cu_address *)arguments[0];
    uint64_t *out = *(uint64_t **)arguments[1];
    const struct print_keys *keys = arguments[2];
    const struct range *place = around(mapped, data, (size_t)x * PRINT_CHUNK);
    if (!reachable(place, stream) || !pinned || !x || y != 1 || z != 1 || threads != PRINT_THREADS || ty != 1 || tz != 1)
        return end(CU_INVALID_VALUE);
    memset(out, 0, x * 2 * sizeof *out);
    for (uint64_t n = 0; n < (uint64_t)x * PRINT_THREADS; n++) {
        uint64_t sums[2], chunk = n / PRINT_THREADS;
        print_part((const uint4 *)data + chunk * (PRINT_CHUNK / 16) + n % PRINT_THREADS, n, keys, sums);
        for (int sum = 0; sum < 2; sum++)
            out[chunk * 2 + sum] = print_add(out[chunk * 2 + sum], sums[sum]);
    }
    return end(CU_OK);
}
