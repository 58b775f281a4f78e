/* LD_PRELOADed into gpuckpt: a disk that fails or is slow, for files below one of the paths in $DISK, with colons between.
 *
 * $DISK_FAULT: "write ERRNO NTH", "read ERRNO NTH", "flush ERRNO NTH", "room ERRNO NTH": the call NTH (from 0) and all later ones of that process fail;
 * "slow MILLISECONDS 0": each write takes so much longer, and makes the file $DISK_SLOW first.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int fault(int fd, const char *what)
{
    static _Atomic int seen;
    const char *disk = getenv("DISK"), *spec = getenv("DISK_FAULT");
    char link[64], path[4096], kind[16] = "";
    int number = 0, nth = 0, ours = 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path);
    while (n > 0 && spec && disk && *disk && !ours) {
        size_t length = strcspn(disk, ":");
        ours = (size_t)n > length && strncmp(path, disk, length) == 0;
        disk += length + (disk[length] == ':');
    }
    if (!ours)
        return 0;
    sscanf(spec, "%15s %d %d", kind, &number, &nth);
    if (!strcmp(kind, "slow") && !strcmp(what, "write")) {
        close(open(getenv("DISK_SLOW"), O_CREAT | O_WRONLY, 0600));
        usleep(number * 1000);
    }
    if (strcmp(kind, what) != 0 || atomic_fetch_add(&seen, 1) < nth)
        return 0;
    errno = number;
    return 1;
}

ssize_t pwrite64(int fd, const void *data, size_t nbytes, off64_t offset)
{
    static ssize_t (*real)(int, const void *, size_t, off64_t);
    if (!real)
        real = (ssize_t (*)(int, const void *, size_t, off64_t))dlsym(RTLD_NEXT, "pwrite64");
    return fault(fd, "write") ? -1 : real(fd, data, nbytes, offset);
}

ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t offset)
{
    static ssize_t (*real)(int, const struct iovec *, int, off64_t);
    if (!real)
        real = (ssize_t (*)(int, const struct iovec *, int, off64_t))dlsym(RTLD_NEXT, "preadv64");
    return fault(fd, "read") ? -1 : real(fd, parts, count, offset);
}

/* CPython takes the one with flags where the C library has it. */
ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags)
{
    static ssize_t (*real)(int, const struct iovec *, int, off64_t, int);
    if (!real)
        real = (ssize_t (*)(int, const struct iovec *, int, off64_t, int))dlsym(RTLD_NEXT, "preadv64v2");
    return fault(fd, "read") ? -1 : real(fd, parts, count, offset, flags);
}

int fallocate(int fd, int mode, off_t offset, off_t nbytes)
{
    static int (*real)(int, int, off_t, off_t);
    if (!real)
        real = (int (*)(int, int, off_t, off_t))dlsym(RTLD_NEXT, "fallocate");
    return fault(fd, "room") ? -1 : real(fd, mode, offset, nbytes);
}

int fsync(int fd)
{
    static int (*real)(int);
    if (!real)
        real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    return fault(fd, "flush") ? -1 : real(fd);
}
