/* Stands for libcuda.so.1 where the preload library is tested: a restore thread that maps memory when it is told to. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "image_mapping.h"

static sem_t asked, answered;
static void (*todo)(void *);
static void *argument;
static int restore_tid;

static void *be_restore_thread(void *unused)
{
    (void)unused;
    restore_tid = (int)syscall(SYS_gettid);
    sem_post(&answered);
    for (;;) {
        while (sem_wait(&asked) != 0)
            ;
        todo(argument);
        sem_post(&answered);
    }
    return NULL;
}

int fake_start(void)
{
    pthread_t thread;
    sem_init(&asked, 0, 0), sem_init(&answered, 0, 0);
    if (pthread_create(&thread, NULL, be_restore_thread, NULL) != 0)
        abort();
    while (sem_wait(&answered) != 0)
        ;
    return restore_tid;
}

/* Has code of the program run in the restore thread. */
void fake_in_restore_thread(void (*code)(void *), void *its_argument)
{
    todo = code, argument = its_argument;
    sem_post(&asked);
    while (sem_wait(&answered) != 0)
        ;
}

/* Maps from here, in the thread that calls. */
void fake_map(void *mapping)
{
    Mapping *m = mapping;
    errno = 0;
    m->result = mmap(m->address, m->nbytes, m->protection, m->flags, m->fd, m->offset);
    m->error = errno;
}

void fake_unmap(void *mapping)
{
    Mapping *m = mapping;
    errno = 0;
    m->error = munmap(m->address, m->nbytes) ? errno : 0;
}

#define BUFFER ((size_t)2 << 20)
#define BUFFERS 4

typedef struct {
    unsigned char *image;
    size_t nbytes, wrong;
    unsigned seed;
    int back;
} Copy;

static unsigned char buffers[BUFFERS][BUFFER] __attribute__((aligned(4096)));

static unsigned char expected(size_t at, unsigned seed)
{
    return (unsigned char)(at * 7 + (at >> 12) * 13 + (at >> 21) * 29 + seed);
}

/* Copies from here, in the thread that calls: through buffers in turn into the image, or out of it. */
void fake_copy(void *copy)
{
    Copy *c = copy;
    c->wrong = 0;
    for (size_t at = 0; at < c->nbytes; at += BUFFER) {
        unsigned char *buffer = buffers[at / BUFFER % BUFFERS];
        size_t n = c->nbytes - at < BUFFER ? c->nbytes - at : BUFFER;
        if (c->back) {
            memset(buffer, 0, n);
            memcpy(buffer, c->image + at, n);
            for (size_t i = 0; i < n; i++)
                c->wrong += buffer[i] != expected(at + i, c->seed);
        } else {
            for (size_t i = 0; i < n; i++)
                buffer[i] = expected(at + i, c->seed);
            c->wrong += memcpy(c->image + at, buffer, n) != c->image + at;
        }
    }
}
