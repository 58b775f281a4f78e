/* A libnvidia-ml.so.1 that answers what the environment says. %d is a GPU's index.
 *
 *   FAKE_GPUS                        how many there are (default 2)
 *   FAKE_RESULT_<function>[_%d]      the result of that function, on that GPU alone (default 0)
 *   FAKE_TOTAL_%d, FAKE_FREE_%d      MiB (defaults 1000, 900)
 *   FAKE_MODE_%d, FAKE_MIG_%d, FAKE_PERSISTENCE_%d   compute mode (0), current MIG mode (0), persistence mode (1)
 *   FAKE_PROCESSES_%d                "PID:BYTES PID:BYTES"; -1 for bytes unknown
 *   FAKE_BIRTHS                      how many times the list is longer when read than when it was counted
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INSUFFICIENT_SIZE = 7 };

typedef struct { int index; } Device;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;
typedef struct { unsigned pid; unsigned long long bytes; unsigned instance, compute; } Process;

static Device devices[8] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};

static int number(const char *name, int otherwise)
{
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}

static int of(const char *what, const Device *device, int otherwise)
{
    char name[128];
    snprintf(name, sizeof name, "FAKE_%s_%d", what, device->index);
    return number(name, otherwise);
}

static int result(const char *function, const Device *device)
{
    char name[128];
    snprintf(name, sizeof name, "FAKE_RESULT_%s", function);
    return number(name, device ? of(name + strlen("FAKE_"), device, 0) : 0);
}

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return result(__func__, NULL);
}

const char *nvmlErrorString(int code)
{
    (void)code;
    return "an error";
}

int nvmlSystemGetDriverVersion(char *out, unsigned length)
{
    snprintf(out, length, "580.159.04");
    return result(__func__, NULL);
}

int nvmlSystemGetCudaDriverVersion_v2(int *out)
{
    *out = 12080;
    return result(__func__, NULL);
}

int nvmlDeviceGetCount_v2(unsigned *out)
{
    *out = number("FAKE_GPUS", 2);
    return result(__func__, NULL);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out)
{
    *out = &devices[index];
    return result(__func__, *out);
}

int nvmlDeviceGetUUID(Device *device, char *out, unsigned length)
{
    snprintf(out, length, "GPU-%08d-0000-0000-0000-000000000000", device->index);
    return result(__func__, device);
}

int nvmlDeviceGetName(Device *device, char *out, unsigned length)
{
    snprintf(out, length, "NVIDIA Fake");
    return result(__func__, device);
}

int nvmlDeviceGetMinorNumber(Device *device, unsigned *out)
{
    *out = 4 + device->index;
    return result(__func__, device);
}

int nvmlDeviceGetPciInfo_v3(Device *device, Pci *out)
{
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:0%d:00.0", device->index);
    return result(__func__, device);
}

int nvmlDeviceGetComputeMode(Device *device, unsigned *out)
{
    *out = of("MODE", device, 0);
    return result(__func__, device);
}

int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending)
{
    *current = of("MIG", device, 0);
    *pending = 0;
    return result(__func__, device);
}

int nvmlDeviceGetPersistenceMode(Device *device, unsigned *out)
{
    *out = of("PERSISTENCE", device, 1);
    return result(__func__, device);
}

int nvmlDeviceGetMemoryInfo_v2(Device *device, Memory *out)
{
    if (out->version != (sizeof *out | 2u << 24))
        return 25; /* ARGUMENT_VERSION_MISMATCH */
    out->total = (unsigned long long)of("TOTAL", device, 1000) << 20;
    out->free = (unsigned long long)of("FREE", device, 900) << 20;
    return result(__func__, device);
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, Process *out)
{
    static int births = -1;
    char name[32];
    unsigned room = *count, found = 0;
    int failed = result(__func__, device), read = 0;
    const char *list;
    unsigned pid;
    long long bytes;
    if (failed)
        return failed;
    snprintf(name, sizeof name, "FAKE_PROCESSES_%d", device->index);
    list = getenv(name);
    for (; list && sscanf(list, "%u:%lld %n", &pid, &bytes, &read) >= 2; list += read, found++)
        if (found < room)
            out[found] = (Process){pid, (unsigned long long)bytes, ~0u, ~0u};
    *count = found;
    if (births < 0)
        births = number("FAKE_BIRTHS", 0);
    if (room && births > 0) {
        births--;
        return INSUFFICIENT_SIZE;
    }
    return found > room ? INSUFFICIENT_SIZE : 0;
}
