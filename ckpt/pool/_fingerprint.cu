/* The fingerprint of a chunk of GPU memory: 128 bits in two words. Compiled to PTX by hand, see _fingerprint_ptx.h; and as plain C by the test
 * that has a GPU in C. What it promises: fingerprint.py.
 *
 * A thread takes every 256th 16 bytes of the chunk, 1 KiB in all, and hashes that by NH, four times, with keys shifted by a pair each time. The
 * eight words of it are multiplied by numbers of their place in the block, and all summed, modulo 2^64 - 59, twice with keys of their own. */
#ifndef __CUDACC__
#include <stdint.h>
#define __device__
#define __forceinline__ inline
typedef struct {
    uint32_t x, y, z, w;
} uint4;
#else
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#endif

#define PRINT_THREADS 256
#define PRINT_ROWS 64
#define PRINT_CHUNK (PRINT_THREADS * PRINT_ROWS * 16) /* bytes */
#define PRINT_FOLD ((uint64_t)59) /* 2^64 modulo the prime, the largest of 64 bits */
#define PRINT_PRIME (0 - PRINT_FOLD)

struct print_keys {
    uint64_t place[2];
    uint32_t nh[4 * PRINT_ROWS + 6];
};

static __device__ __forceinline__ uint64_t print_high(uint64_t a, uint64_t b)
{
#ifdef __CUDACC__
    return __umul64hi(a, b);
#else
    return (uint64_t)(((unsigned __int128)a * b) >> 64);
#endif
}

/* Modulo the prime. Both are below it, or b is so small that the sum is below 2^64 once more. */
static __device__ __forceinline__ uint64_t print_add(uint64_t a, uint64_t b)
{
    uint64_t sum = a + b;
    sum += sum < a ? PRINT_FOLD : 0;
    return sum >= PRINT_PRIME ? sum - PRINT_PRIME : sum;
}

/* SplitMix64, as numbers that cannot be told from random without the key. */
static __device__ __forceinline__ uint64_t print_random(uint64_t key, uint64_t number)
{
    uint64_t z = key + (number + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* What the thread with the number `place` in its block of memory, whose first 16 bytes lie at `at`, adds to both sums. */
static __device__ __forceinline__ void print_part(const uint4 *at, uint64_t place, const struct print_keys *keys, uint64_t sums[2])
{
    uint64_t nh[4] = {0, 0, 0, 0};
#ifdef __CUDACC__
#pragma unroll 8
#endif
    for (int row = 0; row < PRINT_ROWS; row++) {
        uint4 word = at[row * PRINT_THREADS];
        const uint32_t *key = &keys->nh[4 * row];
#ifdef __CUDACC__
#pragma unroll
#endif
        for (int i = 0; i < 4; i++)
            nh[i] += (uint64_t)(uint32_t)(word.x + key[2 * i]) * (uint32_t)(word.y + key[2 * i + 1]) +
                     (uint64_t)(uint32_t)(word.z + key[2 * i + 2]) * (uint32_t)(word.w + key[2 * i + 3]);
    }
    for (int sum = 0; sum < 2; sum++) {
        uint64_t low = 0, high = 0; /* eight products of 64 and 32 bits */
#ifdef __CUDACC__
#pragma unroll
#endif
        for (int i = 0; i < 8; i++) {
            uint64_t random = print_random(keys->place[sum], place * 8 + (uint64_t)i);
            uint64_t word = i & 1 ? nh[i / 2] >> 32 : nh[i / 2] & 0xFFFFFFFFu, product = random * word;
            low += product;
            high += print_high(random, word) + (low < product);
        }
        sums[sum] = print_add(low, high * PRINT_FOLD); /* of 41 bits */
    }
}

#ifdef __CUDACC__
/* One block of threads a chunk; `out` has two words for each. */
extern "C" __global__ void __launch_bounds__(PRINT_THREADS) gpuckpt_fingerprint(const uint4 *data, uint64_t *out, const __grid_constant__ struct print_keys keys)
{
    __shared__ uint64_t of_warps[2][PRINT_THREADS / 32];
    uint64_t sums[2], chunk = blockIdx.x;
    print_part(data + chunk * (PRINT_CHUNK / 16) + threadIdx.x, chunk * PRINT_THREADS + threadIdx.x, &keys, sums);
    for (int sum = 0; sum < 2; sum++) {
        for (int step = 16; step; step /= 2)
            sums[sum] = print_add(sums[sum], __shfl_xor_sync(0xFFFFFFFFu, sums[sum], step));
        if (threadIdx.x % 32 == 0)
            of_warps[sum][threadIdx.x / 32] = sums[sum];
    }
    __syncthreads();
    if (threadIdx.x < 2) {
        uint64_t all = 0;
        for (int warp = 0; warp < PRINT_THREADS / 32; warp++)
            all = print_add(all, of_warps[threadIdx.x][warp]);
        out[chunk * 2 + threadIdx.x] = all;
    }
}
#endif
