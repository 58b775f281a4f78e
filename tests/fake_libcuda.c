/* A libcuda.so.1 that answers what the environment says, and writes down what it was asked.
 *
 *   FAKE_STATE                the state that GetState answers (default 0)
 *   FAKE_RESULT_<function>    the result of that function (default 0)
 *   FAKE_VERSION              what cuDriverGetVersion answers (default 13000)
 *   FAKE_LOG                  the file that calls are appended to, one a line
 *
 * -DOLD leaves the checkpoint functions out, as a driver before 570 does.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned char bytes[16]; } Uuid;
typedef struct { unsigned timeout_ms, reserved0; uint64_t reserved1[7]; } LockArgs;
typedef struct { Uuid old, new; } GpuPair;
typedef struct { GpuPair *pairs; unsigned count; } RestoreArgs;

static int number(const char *name, int otherwise)
{
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}

static int result(const char *function)
{
    char name[128];
    snprintf(name, sizeof name, "FAKE_RESULT_%s", function);
    return number(name, 0);
}

static void note(const char *format, ...)
{
    const char *path = getenv("FAKE_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    va_list args;
    if (!log)
        return;
    va_start(args, format);
    vfprintf(log, format, args);
    va_end(args);
    fclose(log);
}

int cuInit(unsigned flags)
{
    note("cuInit %u\n", flags);
    return result(__func__);
}

int cuDriverGetVersion(int *version)
{
    *version = number("FAKE_VERSION", 13000);
    return result(__func__);
}

#ifndef OLD
int cuCheckpointProcessGetState(int pid, int *state)
{
    note("state %d\n", pid);
    *state = number("FAKE_STATE", 0);
    return result(__func__);
}

int cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
    *tid = pid;
    return result(__func__);
}

int cuCheckpointProcessLock(int pid, LockArgs *args)
{
    note("lock %d timeout_ms=%u\n", pid, args ? args->timeout_ms : 0);
    return result(__func__);
}

int cuCheckpointProcessCheckpoint(int pid, void *args)
{
    note("checkpoint %d args=%s\n", pid, args ? "some" : "none");
    return result(__func__);
}

int cuCheckpointProcessRestore(int pid, RestoreArgs *args)
{
    note("restore %d pairs=%d", pid, args ? (int)args->count : 0);
    for (unsigned i = 0; args && i < args->count; i++) {
        note(" ");
        for (int b = 0; b < 16; b++)
            note("%02x", args->pairs[i].old.bytes[b]);
        note(">");
        for (int b = 0; b < 16; b++)
            note("%02x", args->pairs[i].new.bytes[b]);
    }
    note("\n");
    return result(__func__);
}

int cuCheckpointProcessUnlock(int pid, void *args)
{
    note("unlock %d args=%s\n", pid, args ? "some" : "none");
    return result(__func__);
}
#endif

int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, void *status)
{
    Dl_info self;
    (void)version, (void)flags, (void)status;
    if (!strcmp(symbol, "cuGetProcAddress"))
        symbol = "cuGetProcAddress_v2"; /* what a driver answers a caller of CUDA 12 or newer */
    *function = NULL;
    if (dladdr((void *)cuGetProcAddress_v2, &self))
        *function = dlsym(dlopen(self.dli_fname, RTLD_NOLOAD | RTLD_NOW), symbol);
    return *function ? 0 : 500; /* CUDA_ERROR_NOT_FOUND */
}
