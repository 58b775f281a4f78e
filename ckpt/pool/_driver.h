/* What the pool calls of the CUDA driver, found at run time: gpuckpt is built without CUDA, and imported where there is none. */
#ifndef GPUCKPT_DRIVER_H
#define GPUCKPT_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef int cu_result;
typedef int cu_device;
typedef uint64_t cu_address; /* of device memory */
typedef uint64_t cu_handle;  /* of physical memory */
typedef void *cu_context, *cu_stream, *cu_module, *cu_function;

enum {
    CU_OK = 0,
    CU_INVALID_VALUE = 1,
    CU_OUT_OF_MEMORY = 2,
    CU_ALREADY_REGISTERED = 712,
    CU_DEVICE = 1,                   /* a kind of place, and the kind of allocation that is pinned */
    CU_READ_WRITE = 3,
    CU_VMM_SUPPORTED = 102,          /* attributes of a device */
    CU_GPUDIRECT_WITH_VMM = 110,
    CU_STREAM_NON_BLOCKING = 1,
    CU_HOST_DEVICEMAP = 2,
    CU_NOT_PERMITTED = 800,
    CU_NOT_SUPPORTED = 801,
};

struct cu_place {
    int kind, id;
};

struct cu_allocation {
    int kind, handle_types;
    struct cu_place place;
    void *windows;
    unsigned char compression, gpudirect;
    unsigned short usage;
    unsigned char reserved[4];
};

struct cu_access {
    struct cu_place place;
    int flags;
};

_Static_assert(sizeof(struct cu_allocation) == 32 && sizeof(struct cu_access) == 12, "as cuda.h has them");

#define DRIVER_CALLS(X)                                                                                                                      \
    X(cuDeviceGet, cu_device *, int)                                                                                                         \
    X(cuDeviceGetAttribute, int *, int, cu_device)                                                                                           \
    X(cuDevicePrimaryCtxRetain, cu_context *, cu_device)                                                                                     \
    X(cuCtxPushCurrent_v2, cu_context)                                                                                                       \
    X(cuCtxPopCurrent_v2, cu_context *)                                                                                                      \
    X(cuCtxSynchronize, void)                                                                                                                \
    X(cuMemGetAllocationGranularity, size_t *, const struct cu_allocation *, int)                                                            \
    X(cuMemAddressReserve, cu_address *, size_t, size_t, cu_address, unsigned long long)                                                     \
    X(cuMemAddressFree, cu_address, size_t)                                                                                                  \
    X(cuMemCreate, cu_handle *, size_t, const struct cu_allocation *, unsigned long long)                                                    \
    X(cuMemRelease, cu_handle)                                                                                                               \
    X(cuMemMap, cu_address, size_t, size_t, cu_handle, unsigned long long)                                                                   \
    X(cuMemUnmap, cu_address, size_t)                                                                                                        \
    X(cuMemSetAccess, cu_address, size_t, const struct cu_access *, size_t)                                                                  \
    X(cuMemHostRegister_v2, void *, size_t, unsigned)                                                                                        \
    X(cuMemHostUnregister, void *)                                                                                                           \
    X(cuMemHostAlloc, void **, size_t, unsigned)                                                                                             \
    X(cuMemFreeHost, void *)                                                                                                                 \
    X(cuMemcpyDtoHAsync_v2, void *, cu_address, size_t, cu_stream)                                                                           \
    X(cuMemcpyHtoDAsync_v2, cu_address, const void *, size_t, cu_stream)                                                                     \
    X(cuStreamCreate, cu_stream *, unsigned)                                                                                                 \
    X(cuStreamDestroy_v2, cu_stream)                                                                                                         \
    X(cuStreamSynchronize, cu_stream)                                                                                                        \
    X(cuModuleLoadData, cu_module *, const void *)                                                                                           \
    X(cuModuleGetFunction, cu_function *, cu_module, const char *)                                                                           \
    X(cuLaunchKernel, cu_function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, cu_stream, void **, void **)

struct driver {
#define FIELD(name, ...) cu_result (*name)(__VA_ARGS__);
    DRIVER_CALLS(FIELD)
#undef FIELD
};

extern struct driver cu; /* complete once gpuckpt_pool_open has returned 0 */

#endif
