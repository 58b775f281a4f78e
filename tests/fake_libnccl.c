/* A libnccl.so.2 without GPUs: communicators are small records that know which copy made them, "device memory" is the host's.
 *
 *   -DVERSION=23007             what ncclGetVersion answers
 *   -DOLD                       without the functions of 2.29.7
 *   FAKE_NCCL_<function>        the result of that function (default 0), FAKE_NCCL_<function>_<name> on the communicator of that name
 *   FAKE_NCCL_IDLE=name         its suspend says that it did and does nothing
 *   FAKE_NCCL_WRONG=name        its sums are wrong
 *   FAKE_NCCL_HANG=name         its ncclAllReduce never returns
 *   FAKE_NCCL_LOG               the file that calls are appended to: copy, function, communicator
 *
 * A communicator of another copy is not answered but ends the process, as it well may.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef VERSION
#define VERSION 23007
#endif

static int self; /* its address is this copy's */

typedef struct {
    void *owner;
    int rank, size, device, suspended, pending;
    uint64_t suspendable, total;
    char name[64];
} Comm;

static void note(const char *function, const Comm *comm)
{
    const char *path = getenv("FAKE_NCCL_LOG");
    Dl_info info;
    FILE *log = path ? fopen(path, "a") : NULL;
    if (comm && comm->owner != &self) {
        fprintf(stderr, "%s on a communicator of another copy\n", function);
        abort();
    }
    if (!log)
        return;
    dladdr(&self, &info);
    fprintf(log, "%s %s %s\n", strrchr(info.dli_fname, '/') + 1, function, comm ? comm->name : "-");
    fclose(log);
}

static int result(const char *function, const Comm *comm)
{
    char name[256];
    const char *value;
    note(function, comm);
    snprintf(name, sizeof name, "FAKE_NCCL_%s_%s", function, comm->name);
    value = getenv(name);
    snprintf(name, sizeof name, "FAKE_NCCL_%s", function);
    value = value ? value : getenv(name);
    return value ? atoi(value) : 0;
}

static int is(const char *variable, const Comm *comm)
{
    const char *value = getenv(variable);
    return value && !strcmp(value, comm->name);
}

Comm *fake_create(const char *name, int rank, int size, int device, uint64_t suspendable, uint64_t total)
{
    Comm *comm = calloc(1, sizeof *comm);
    *comm = (Comm){&self, rank, size, device, 0, 0, suspendable, total, ""};
    strncpy(comm->name, name, sizeof comm->name - 1);
    return comm;
}

int ncclGetVersion(int *version) { *version = VERSION; return 0; }
const char *ncclGetErrorString(int code) { return code == 5 ? "invalid usage" : code == 1 ? "unhandled cuda error" : "some error"; }
const char *ncclGetLastError(void *comm) { (void)comm; return "what NCCL said last"; }
int ncclCommCount(Comm *comm, int *n) { *n = comm->size; return result(__func__, comm); }
int ncclCommUserRank(Comm *comm, int *n) { *n = comm->rank; return result(__func__, comm); }
int ncclCommCuDevice(Comm *comm, int *n) { *n = comm->device; return result(__func__, comm); }

int ncclCommGetAsyncError(Comm *comm, int *error)
{
    char name[128];
    const char *value;
    snprintf(name, sizeof name, "FAKE_NCCL_ASYNC_%s", comm->name);
    value = getenv(name);
    *error = comm->pending > 0 ? (comm->pending--, 7) : value ? atoi(value) : 0;
    return result(__func__, comm);
}

int ncclAllReduce(const int64_t *send, int64_t *receive, size_t count, int type, int op, Comm *comm, void *stream)
{
    int code = result(__func__, comm);
    if (is("FAKE_NCCL_HANG", comm))
        pause();
    if (type != 4 || op != 0 || comm->suspended || !stream)
        return 4;
    for (size_t i = 0; i < count; i++) /* what all ranks together have, told from this rank's share */
        receive[i] = send[i] / (comm->rank + 1) * (comm->size * (comm->size + 1) / 2);
    if (is("FAKE_NCCL_WRONG", comm))
        receive[count / 2]++;
    return code;
}

#ifndef OLD
int ncclCommSuspend(Comm *comm, int flags)
{
    int code = result(__func__, comm);
    if (flags != 1)
        return 4;
    if (comm->suspended)
        return 5;
    comm->suspended = !code && !is("FAKE_NCCL_IDLE", comm);
    if (code == 7)
        comm->suspended = 1, comm->pending = 3;
    return code;
}

int ncclCommResume(Comm *comm)
{
    int code = result(__func__, comm);
    if (!comm->suspended)
        return 5;
    comm->suspended = code != 0;
    return code;
}

int ncclCommMemStats(Comm *comm, int stat, uint64_t *value)
{
    uint64_t values[] = {comm->suspendable, comm->suspended, comm->total - comm->suspendable, comm->total};
    *value = values[stat];
    return result(__func__, comm);
}
#endif
