/* Fingerprints of blocks, computed where they lie. What they promise: fingerprint.py. Where anything here fails there is no fingerprint, and
 * what has none is copied. */
#define _GNU_SOURCE
#include "_pool.h"

#include "_fingerprint.cu"
#include "_fingerprint_ptx.h"

#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

_Static_assert(PRINT_CHUNK == CHUNK && PRINT_CHUNK <= HUGE, "a piece is of whole chunks");

static struct {
    cu_module module;
    cu_function function; /* NULL: not yet */
} programs[DEVICES];

static struct print_keys keys; /* of this process: nobody who writes the memory knows them */
static bool have_keys;

bool prepare_prints(int device)
{
    if (!have_keys)
        have_keys = syscall(SYS_getrandom, &keys, sizeof keys, 0) == (long)sizeof keys; /* glibc has a name for it from 2.25 on */
    if (!programs[device].function && have_keys) {
        cu_function found;
        if (!programs[device].module && cu.cuModuleLoadData(&programs[device].module, fingerprint_ptx) != CU_OK)
            programs[device].module = NULL;
        else if (cu.cuModuleGetFunction(&found, programs[device].module, "gpuckpt_fingerprint") == CU_OK)
            programs[device].function = found;
    }
    return programs[device].function;
}

static size_t words(const struct block *block)
{
    return block->nbytes / CHUNK * 2;
}

void drop_prints(struct block *block)
{
    free(block->prints);
    free(block->fresh);
    block->prints = block->fresh = NULL;
}

void keep_prints(struct block *block)
{
    free(block->prints);
    block->prints = block->fresh;
    block->fresh = NULL;
}

/* Whether this part of the block is in its host copy as it is now. Both ends are of whole chunks. */
bool unchanged(const struct block *block, size_t offset, size_t nbytes)
{
    size_t from = offset / CHUNK * 2, count = nbytes / CHUNK * 2;
    return block->host && block->touched && block->prints && block->fresh &&
           !memcmp(block->prints + from, block->fresh + from, count * sizeof *block->prints);
}

/* One device's. Its context is current. */
static bool print(struct block **blocks, size_t count, size_t all, cu_function function)
{
    uint64_t *out = NULL, *at;
    cu_stream stream;
    if (cu.cuMemHostAlloc((void **)&out, all * sizeof *out, CU_HOST_DEVICEMAP) != CU_OK)
        return false;
    bool done = cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CU_OK;
    if (done) {
        at = out;
        for (size_t i = 0; i < count && done; at += words(blocks[i]), i++) {
            void *arguments[] = {&blocks[i]->address, &at, &keys};
            done = cu.cuLaunchKernel(function, (unsigned)(blocks[i]->nbytes / CHUNK), 1, 1, PRINT_THREADS, 1, 1, 0, stream, arguments, NULL) ==
                   CU_OK;
        }
        done = cu.cuStreamSynchronize(stream) == CU_OK && done; /* also before what it writes to is freed */
        cu.cuStreamDestroy_v2(stream);
    }
    at = out;
    for (size_t i = 0; i < count && done; at += words(blocks[i]), i++)
        if ((blocks[i]->fresh = malloc((words(blocks[i]) + 1) * sizeof *at)))
            memcpy(blocks[i]->fresh, at, words(blocks[i]) * sizeof *at);
    cu.cuMemFreeHost(out);
    return done;
}

/* Give the blocks, which are mapped and sorted by device, fresh fingerprints; those that get none have `fresh` NULL. */
void print_blocks(struct block **blocks, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        free(blocks[i]->fresh);
        blocks[i]->fresh = NULL;
    }
    for (size_t from = 0, to; from < count; from = to) {
        int device = blocks[from]->device;
        size_t all = 0;
        bool whole = true;
        for (to = from; to < count && blocks[to]->device == device; to++) {
            all += words(blocks[to]);
            whole = whole && blocks[to]->nbytes % CHUNK == 0;
        }
        if (!whole || !enter(device))
            continue;
        if (prepare_prints(device))
            print(blocks + from, to - from, all, programs[device].function);
        leave();
    }
}

/* For tests: those of any mapped memory of whole chunks, with keys given by the caller if any. False: none. */
OURS int gpuckpt_pool_fingerprint(uint64_t address, size_t nbytes, int device, const void *with, uint64_t *found)
{
    struct block block = {.address = address, .nbytes = nbytes, .device = device}, *one = &block;
    if (with) {
        memcpy(&keys, with, sizeof keys);
        have_keys = true;
    }
    print_blocks(&one, 1);
    if (block.fresh)
        memcpy(found, block.fresh, words(&block) * sizeof *found);
    bool done = block.fresh;
    free(block.fresh);
    return done;
}
