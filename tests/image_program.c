/* A program without Python that is under test with the preload library: answers each line of its input with one line.
 *
 *   map WHO NBYTES [FLAGS [PROTECTION [ADDRESS]]]   WHO: image (restore thread, from libcuda), thread (main thread, from libcuda),
 *                                                   caller (restore thread, from here), both (main thread, from here)
 *   zero ADDRESS NBYTES      is all of it zero? Then fills it
 *   unmap ADDRESS NBYTES
 *   gpu PATH                 libcuda maps PATH, shared, as it does GPU memory
 *   back ADDRESS NBYTES      libcuda unmaps that, in the restore thread
 *   lockall                  all memory, of now and later
 *   again ADDRESS NBYTES     libcuda unmaps that, and maps as much in the same moment
 *   heir ADDRESS             has a child anything mapped there?
 *   lock ADDRESS NBYTES      with mlock2(MLOCK_ONFAULT), which needs no right
 *   fill | check WHO ADDRESS NBYTES SEED   WHO (thread or image): libcuda copies a pattern there, or back; how many bytes are wrong
 *   forked WHO ADDRESS NBYTES SEED   the same in a child
 *   often                    from now on a signal each half millisecond comes to the restore thread, whose handler maps and unmaps
 *   child                    the pid of a child that waits; exec: becomes /bin/true
 *   rlimit NAME NBYTES       NAME: as, data, nproc
 *   deny CALL ERROR [ADVICE] seccomp: madvise, clone or close_range fails with ERROR; with ADVICE only that one
 *   fork | vfork | threads | signals
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
#include "image_mapping.h"

int fake_start(void);
void fake_in_restore_thread(void (*code)(void *), void *argument);
void fake_map(void *mapping);
void fake_unmap(void *mapping);

typedef struct {
    unsigned char *image;
    size_t nbytes, wrong;
    unsigned seed;
    int back;
} Copy;

void fake_copy(void *copy);
extern __attribute__((weak)) long interposer_mallocs(void); /* of malloc_interposer.c */

#define MIB (1UL << 20)
#define IMAGE (MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE)

static void map_here(void *mapping)
{
    Mapping *m = mapping;
    errno = 0;
    m->result = mmap(m->address, m->nbytes, m->protection, m->flags, m->fd, m->offset);
    m->error = errno;
}

static void unmap_and_map(void *mapping)
{
    Mapping *m = mapping;
    fake_unmap(m);
    m->address = NULL;
    fake_map(m);
}

static void map(const char *who, Mapping *m)
{
    if (!strcmp(who, "image"))
        fake_in_restore_thread(fake_map, m);
    else if (!strcmp(who, "thread"))
        fake_map(m);
    else if (!strcmp(who, "caller"))
        fake_in_restore_thread(map_here, m);
    else
        map_here(m);
}

static int deny(const char *call, int error, long advice)
{
    unsigned number = !strcmp(call, "madvise") ? SYS_madvise : !strcmp(call, "clone") ? SYS_clone : SYS_close_range;
    struct sock_filter all[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_JUMP(BPF_JMP | (advice < 0 ? BPF_JGE : BPF_JEQ) | BPF_K, advice < 0 ? 0 : (unsigned)advice, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof all / sizeof all[0], all};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    /* of all threads, the restore thread too */
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program);
}

static int map_and_unmap(size_t nbytes)
{
    char *p = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, nbytes >= 32 * MIB ? IMAGE : MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return 1;
    p[0] = p[nbytes - 1] = 1;
    return munmap(p, nbytes) != 0;
}

static void *storm(void *failures)
{
    for (int i = 0; i < 2000; i++)
        *(int *)failures += map_and_unmap(i % 500 ? 65536 : 32 * MIB);
    return NULL;
}

static volatile sig_atomic_t handled, failed_in_handler;

static void on_signal(int signum)
{
    int before = errno;
    (void)signum;
    failed_in_handler += map_and_unmap(handled % 50 ? 4096 : 32 * MIB);
    handled++;
    errno = before;
}

static void signals(void *mapping)
{
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    struct itimerval often = {{0, 500}, {0, 500}}, never = {{0, 0}, {0, 0}};
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    for (int i = 0; i < 4; i++) {
        fake_map(mapping); /* in the restore thread, while signals come to it too */
        if (((Mapping *)mapping)->result != MAP_FAILED && i < 3)
            munmap(((Mapping *)mapping)->result, ((Mapping *)mapping)->nbytes);
    }
    while (handled < 300)
        failed_in_handler += map_and_unmap(65536);
    setitimer(ITIMER_REAL, &never, NULL);
}

static int ended(pid_t child)
{
    int status = 1;
    return child < 0 || waitpid(child, &status, 0) != child || status != 0;
}

int main(void)
{
    char line[512], who[32], path[256];
    setvbuf(stdout, NULL, _IOLBF, 0);
    int tid = fake_start();
    printf("%d %d\n", (int)getpid(), tid);
    while (fgets(line, sizeof line, stdin)) {
        unsigned long a = 0, b = 0;
        Mapping m = {NULL, 0, PROT_READ | PROT_WRITE, IMAGE, -1, 0, NULL, 0};
        if (sscanf(line, "map %31s %zu %i %i %p", who, &m.nbytes, &m.flags, &m.protection, &m.address) >= 2) {
            long before = interposer_mallocs ? interposer_mallocs() : 0;
            map(who, &m);
            long mallocs = interposer_mallocs ? interposer_mallocs() - before : 0;
            printf("%lx %d %ld\n", m.result == MAP_FAILED ? 0 : (unsigned long)m.result, m.error, mallocs);
        } else if (sscanf(line, "%31s", who) == 1 && (!strcmp(who, "fill") || !strcmp(who, "check") || !strcmp(who, "forked"))) {
            Copy c = {.back = !strcmp(who, "check")};
            if (sscanf(line, "%*s %31s %lx %zu %u", who, &a, &c.nbytes, &c.seed) != 4)
                return 1;
            c.image = (unsigned char *)a;
            if (line[2] == 'r') { /* forked: a child fills, for itself */
                pid_t child = fork();
                if (child == 0) {
                    fake_copy(&c);
                    c.back = 1;
                    fake_copy(&c);
                    _exit(c.wrong != 0);
                }
                c.wrong = (size_t)ended(child);
            } else if (!strcmp(who, "image"))
                fake_in_restore_thread(fake_copy, &c);
            else
                fake_copy(&c);
            printf("%zu\n", c.wrong);
        } else if (sscanf(line, "zero %lx %lu", &a, &b) == 2) {
            unsigned long other = 0;
            for (unsigned long i = 0; i < b; i += 8)
                other += *(unsigned long *)(a + i) != 0;
            memset((void *)a, 0x5a, b);
            printf("%lu\n", other);
        } else if (sscanf(line, "unmap %lx %lu", &a, &b) == 2) {
            printf("%d\n", munmap((void *)a, b));
        } else if (sscanf(line, "gpu %255s", path) == 1) {
            m = (Mapping){NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, open(path, O_RDWR), 0, NULL, 0};
            fake_map(&m);
            printf("%d\n", m.error);
        } else if (sscanf(line, "back %lx %lu", &a, &b) == 2) {
            m.address = (void *)a, m.nbytes = b;
            fake_in_restore_thread(fake_unmap, &m);
            printf("%d\n", m.error);
        } else if (sscanf(line, "again %lx %lu", &a, &b) == 2) {
            m.address = (void *)a, m.nbytes = b;
            fake_in_restore_thread(unmap_and_map, &m);
            printf("%lx %d %d\n", m.result == MAP_FAILED ? 0 : (unsigned long)m.result, m.error, 0);
        } else if (sscanf(line, "heir %lx", &a) == 1) {
            unsigned char there;
            pid_t child = fork();
            if (child == 0)
                _exit(mincore((void *)a, 4096, &there) == 0);
            printf("%d\n", ended(child));
        } else if (!strncmp(line, "lockall", 7)) {
            printf("%d\n", mlockall(MCL_CURRENT | MCL_FUTURE));
        } else if (sscanf(line, "lock %lx %lu", &a, &b) == 2) {
            printf("%d\n", mlock2((void *)a, b, MLOCK_ONFAULT));
        } else if (!strncmp(line, "child", 5)) {
            pid_t child = fork();
            if (child == 0)
                pause();
            printf("%d\n", (int)child);
        } else if (!strncmp(line, "often", 5)) {
            struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
            struct itimerval often = {{0, 500}, {0, 500}};
            sigset_t ours;
            sigemptyset(&ours), sigaddset(&ours, SIGALRM);
            pthread_sigmask(SIG_BLOCK, &ours, NULL); /* here, so that they come to the restore thread */
            sigaction(SIGALRM, &action, NULL);
            printf("%d\n", setitimer(ITIMER_REAL, &often, NULL));
        } else if (!strncmp(line, "exec", 4)) {
            execl("/bin/true", "true", NULL);
        } else if (sscanf(line, "rlimit %31s %lu", who, &a) == 2) {
            struct rlimit limit = {a, a};
            printf("%d\n", setrlimit(!strcmp(who, "as") ? RLIMIT_AS : !strcmp(who, "data") ? RLIMIT_DATA : RLIMIT_NPROC, &limit));
        } else if (sscanf(line, "deny %31s %lu %lu", who, &a, &b) >= 2) {
            printf("%d\n", deny(who, (int)a, sscanf(line, "deny %*s %*u %lu", &b) == 1 ? (long)b : -1));
        } else if (!strncmp(line, "fork", 4)) {
            pid_t child = fork();
            if (child == 0) {
                Mapping in_child = {NULL, 64 * MIB, PROT_READ | PROT_WRITE, IMAGE, -1, 0, NULL, 0};
                fake_map(&in_child);
                _exit(in_child.result == MAP_FAILED || map_and_unmap(4096));
            }
            printf("%d\n", ended(child));
        } else if (!strncmp(line, "vfork", 5)) {
            pid_t child = vfork();
            if (child == 0)
                _exit(map_and_unmap(64 * MIB) || map_and_unmap(4096));
            printf("%d\n", ended(child));
        } else if (!strncmp(line, "threads", 7)) {
            pthread_t threads[8];
            int failures[8] = {0}, sum = 0;
            for (int i = 0; i < 8; i++)
                pthread_create(&threads[i], NULL, storm, &failures[i]);
            m.nbytes = 256 * MIB;
            map("image", &m);
            for (int i = 0; i < 8; i++)
                pthread_join(threads[i], NULL), sum += failures[i];
            printf("%lx %d\n", m.result == MAP_FAILED ? 0 : (unsigned long)m.result, sum);
        } else if (!strncmp(line, "signals", 7)) {
            sigset_t ours;
            m.nbytes = 128 * MIB;
            sigemptyset(&ours), sigaddset(&ours, SIGALRM);
            pthread_sigmask(SIG_BLOCK, &ours, NULL); /* here, so that they come to the restore thread */
            fake_in_restore_thread(signals, &m);
            printf("%lx %d\n", m.result == MAP_FAILED ? 0 : (unsigned long)m.result, (int)failed_in_handler);
        } else {
            printf("?\n");
        }
    }
    return 0;
}
