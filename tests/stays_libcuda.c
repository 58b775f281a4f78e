/* A libcuda of two GPUs, of which the second has no context of this process, as far as it is asked what stays on them.
 *
 *   FAKE_UNKNOWN    the call that answers with an error
 *
 * A call that would make a context, or is made outside of one, ends the process. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int retained, current;

static int result(const char *call)
{
    const char *unknown = getenv("FAKE_UNKNOWN");
    return unknown && !strcmp(unknown, call) ? 3 : 0; /* CUDA_ERROR_NOT_INITIALIZED */
}

static void need(int condition)
{
    if (!condition)
        abort();
}

int fake_held(void) { return retained + current; }

int cuDeviceGetCount(int *count)
{
    *count = 2;
    return result(__func__);
}

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal + 10;
    return result(__func__);
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    *flags = 0;
    *active = device == 10;
    return result(__func__);
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    need(device == 10);
    *context = &retained;
    retained++;
    return result(__func__);
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
    need(device == 10 && retained-- > 0);
    return result(__func__);
}

int cuCtxPushCurrent_v2(void *context)
{
    need(context == &retained);
    current++;
    return result(__func__);
}

int cuCtxPopCurrent_v2(void **context)
{
    need(current-- > 0);
    *context = &retained;
    return result(__func__);
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    need(device == 10);
    *value = attribute == 16 ? 132 : attribute == 39 ? 2048 : -1;
    return result(__func__);
}

int cuCtxGetLimit(size_t *value, int limit)
{
    need(current);
    *value = limit == 0 ? 4096 : limit == 1 ? 1 << 20 : limit == 2 ? 8 << 20 : 0;
    return result(__func__);
}

int cuDeviceGetGraphMemAttribute(int device, int attribute, void *value)
{
    need(device == 10 && current);
    *(uint64_t *)value = attribute == 2 ? 6 << 20 : 0;
    return result(__func__);
}

int cuDeviceGetDefaultMemPool(void **pool, int device)
{
    need(device == 10 && current);
    *pool = &current;
    return result(__func__);
}

int cuMemPoolGetAttribute(void *pool, int attribute, void *value)
{
    need(pool == &current);
    *(uint64_t *)value = attribute == 5 ? 32 << 20 : 0;
    return result(__func__);
}
