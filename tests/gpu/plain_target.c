/* A CUDA program with no Python in it, and known content: answers each line on stdin. usage: plain_target GIB
 *
 * build: gcc -O3 -o plain_target plain_target.c -ldl     (no CUDA toolkit: it loads the driver by name)
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define CHUNK ((size_t)256 << 20)

static void *cuda;

static void *function(const char *name)
{
    void *found = dlsym(cuda, name);
    if (!found) {
        fprintf(stderr, "plain_target: no %s\n", name);
        exit(1);
    }
    return found;
}

static void must(int result, const char *what)
{
    if (result != 0) {
        fprintf(stderr, "plain_target: %s: %d\n", what, result);
        exit(1);
    }
}

int main(int argc, char **argv)
{
    size_t n = (size_t)(argc > 1 ? atof(argv[1]) * 4 : 4); /* chunks */
    uint64_t *chunks = calloc(n + 1, sizeof *chunks);
    uint32_t *host = malloc(CHUNK);
    char line[64];
    void *context = NULL;
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda || !chunks || !host) {
        fprintf(stderr, "plain_target: %s\n", cuda ? "no memory" : dlerror());
        return 1;
    }
    int (*init)(unsigned) = function("cuInit");
    int (*retain)(void **, int) = function("cuDevicePrimaryCtxRetain");
    int (*set)(void *) = function("cuCtxSetCurrent");
    int (*alloc)(uint64_t *, size_t) = function("cuMemAlloc_v2");
    int (*fill)(uint64_t, unsigned, size_t) = function("cuMemsetD32_v2");
    int (*up)(uint64_t, const void *, size_t) = function("cuMemcpyHtoD_v2");
    int (*down)(void *, uint64_t, size_t) = function("cuMemcpyDtoH_v2");
    must(init(0), "cuInit");
    must(retain(&context, 0), "cuDevicePrimaryCtxRetain");
    must(set(context), "cuCtxSetCurrent");
    for (size_t i = 0; i < n; i++) {
        must(alloc(&chunks[i], CHUNK), "cuMemAlloc");
        must(fill(chunks[i], (unsigned)(i * 2654435761u), CHUNK / 4), "cuMemsetD32");
        for (size_t k = 0; k < 1024; k++)
            host[k] = (uint32_t)(i * 40503 + k * 2246822519u);
        must(up(chunks[i] + (i % 64) * 1048576, host, 4096), "cuMemcpyHtoD"); /* not the same everywhere */
    }
    for (;;) {
        uint64_t sum = 0;
        for (size_t i = 0; i < n; i++) {
            must(down(host, chunks[i], CHUNK), "cuMemcpyDtoH");
            const uint64_t *words = (const uint64_t *)host;
            uint64_t lanes[8] = {0}; /* one chain, or one of multiplications, takes longer than the copy */
            for (size_t k = 0; k < CHUNK / 8; k += 8)
                for (size_t l = 0; l < 8; l++)
                    lanes[l] = (lanes[l] << 7 | lanes[l] >> 57) ^ words[k + l];
            for (size_t l = 0; l < 8; l++)
                sum = sum * 3 + lanes[l];
        }
        printf("{\"pid\": %d, \"sum\": %llu, \"replay\": 0}\n", (int)getpid(), (unsigned long long)sum);
        fflush(stdout);
        if (!fgets(line, sizeof line, stdin))
            return 0;
    }
}
