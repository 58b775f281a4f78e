/* A call of mmap that the libcuda of the tests makes (image_libcuda.c), and what came of it. */
#pragma once
#include <sys/types.h>

typedef struct {
    void *address;
    size_t nbytes;
    int protection, flags, fd;
    off_t offset;
    void *result;
    int error;
} Mapping;
