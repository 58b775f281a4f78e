/* Times pairs of mmap and munmap. usage: preload_cost N NBYTES FLAGS; prints nanoseconds a pair */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

int main(int argc, char **argv)
{
    long n = atol(argv[1]);
    size_t nbytes = strtoul(argv[2], NULL, 0);
    int flags = (int)strtol(argv[3], NULL, 0);
    struct timespec a, b;
    (void)argc;
    for (long i = -n / 10; i < n; i++) {
        if (i == 0)
            clock_gettime(CLOCK_MONOTONIC, &a);
        void *p = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (p == MAP_FAILED || munmap(p, nbytes) != 0)
            return 1;
    }
    clock_gettime(CLOCK_MONOTONIC, &b);
    printf("%f\n", ((double)(b.tv_sec - a.tv_sec) * 1e9 + (double)(b.tv_nsec - a.tv_nsec)) / (double)n);
    return 0;
}
