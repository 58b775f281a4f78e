/* What the parts of the pool's library share. */
#ifndef GPUCKPT_POOL_H
#define GPUCKPT_POOL_H

#include "_driver.h"

#include <stdatomic.h>
#include <stdbool.h>

#if !defined(__linux__) || !defined(__LP64__)
#error "for Linux on 64 bits, as CUDA is"
#endif

#define OURS __attribute__((visibility("default")))
#define TAGS 16
#define DEVICES 64
#define MOST_THREADS 16
#define HUGE ((size_t)2 << 20)
#define CHUNK ((size_t)256 << 10) /* what has a fingerprint */

/* Where the content of a block is. */
enum where { ON_GPU, ON_HOST, DISCARDED };

/* What became of a call. Read by gpuckpt/pool/allocator.py, which has the same numbers. */
enum failure {
    DONE,
    NO_DRIVER,      /* no libcuda, or it lacks a function, which `call` names */
    FORKED,         /* a forked child: its parent's GPU memory is not there */
    NO_HOST_MEMORY,
    NO_GPU_MEMORY,
    DRIVER_FAILED,  /* `call` gave `result` */
    LEAVING,        /* the process is ending */
};

struct block {
    struct block *next; /* in its chain of the table */
    cu_address address; /* which never changes */
    size_t nbytes;
    int device;
    unsigned tag;
    cu_handle handle; /* 0 unless a cuMemRelease failed: then it is released, or used again, by the next call */
    char *host;       /* its copy in host memory, kept while awake too; NULL: none */
    uint64_t *prints; /* two words a chunk: fingerprints of what is in the host copy; NULL: not known */
    uint64_t *fresh;  /* of what is on the GPU, while it goes to sleep */
    uint8_t where;
    bool mapped, accessible; /* both with ON_GPU; else only where undoing failed */
    bool busy;               /* a sleep or wake has it: nobody else changes it */
    bool doomed;             /* freed meanwhile */
    bool dead;               /* freed, but it could not be unmapped yet */
    bool touched;            /* all pages of the host copy are there */
};

/* What a sleep or wake did. Read by allocator.py. */
struct moved {
    uint64_t copied, discarded, unchanged; /* bytes */
    uint64_t by_tag[TAGS];
    uint64_t sync_ns, host_ns, print_ns, map_ns, copy_ns, unmap_ns;
    uint64_t pageable; /* bytes of `copied` that could not be registered, and went the slow way */
    int32_t failure, result;
    int32_t device;
    uint32_t blocks;
    uint64_t wanted; /* bytes that could not be had */
    char call[48];
};

/* _cumem.c */
bool ours(void);        /* this process opened the driver: it is no child of the one that did */
bool learn(int device); /* what blocks on it need; false: there is no such device, or none that can have blocks */
bool enter(int device); /* its context is current on this thread until leave() */
void leave(void);
bool failed(struct moved *moved, enum failure failure, const char *call, cu_result result, const struct block *block); /* always false */
bool map(struct block *block, struct moved *moved);
bool unmap(struct block *block, struct moved *moved);
void reap(void);
struct block **take(bool (*wanted)(const struct block *, const uint8_t *), const uint8_t *tags, size_t *count);
void put_back(struct block **blocks, size_t count);

/* _sleep.c */
void wait_for_moves(void);

/* _copy.c */
bool host_copy(struct block *block); /* has one when it returns true; the pages need not be there yet */
void drop_host_copy(struct block *block);
void drop_stages(void);
bool copy_blocks(struct block **blocks, size_t count, bool down, struct moved *moved);
extern _Atomic bool leaving;

/* _fingerprint.c */
bool prepare_prints(int device); /* whose context is current: load what computes them */
void print_blocks(struct block **blocks, size_t count);
void keep_prints(struct block *block); /* the fresh ones are those of the host copy now */
void drop_prints(struct block *block);
bool unchanged(const struct block *block, size_t offset, size_t nbytes);

#endif
