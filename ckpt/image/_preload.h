/* What the parts of the preload library share:
 *
 *   _preload.c  the mapping of an image, and whether one is meant
 *   _threads.c  bare threads, and populating memory by several of them
 *   _keeper.c   the thread that acts for gpuckpt in a process
 *   _reserve.c  memory kept ready for images
 *   _copy.c     the driver's copies, shared among threads
 *   _imports.c  what libcuda calls of ours
 */
#ifndef GPUCKPT_PRELOAD_H
#define GPUCKPT_PRELOAD_H
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>

/* A program that inherits us may have an older C library, in a container say, and a version of a symbol that it lacks would end it at its
 * start. So no symbol is newer than 2.17, and dlsym, which moved with 2.34, may be missing: then we chain to nobody. */
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 34)
#if defined(__x86_64__)
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver dlsym, dlsym@GLIBC_2.17");
#endif
#endif
#pragma weak dlsym

#if !defined(__linux__) || !defined(__LP64__)
#error "for Linux on 64 bits, as CUDA is"
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#ifndef SYS_close_range
#define SYS_close_range 436 /* Linux 5.9 */
#endif
#ifndef PR_SET_VMA
#define PR_SET_VMA 0x53564d41 /* Linux 5.17 */
#define PR_SET_VMA_ANON_NAME 0
#endif

/* Bytes that threads populate at a time: a multiple of a huge page. */
#define CHUNK ((uintptr_t)64 << 20)
#define HUGE_PAGE ((uintptr_t)2 << 20)
#define MOST_THREADS 16
#define MOST_IMAGES 16
#define STACK_BYTES 16384 /* for system calls and copies; signals, which would need more, are blocked */

enum state { STARTING, READY, OFF };

/* What became of a large populated mapping. */
enum verdict {
    NOTHING,      /* none was seen */
    EXPIRED,      /* the announcement was too old: its gpuckpt died */
    OTHER_THREAD, /* not the restore thread */
    OTHER_CALLER, /* not libcuda */
    NO_MAPPING,   /* even without MAP_POPULATE the mapping failed; the plain call was made */
    NO_POPULATE,  /* it could not be populated; undone, and the plain call was made */
    FAST,
};

struct image {
    uint64_t address, nbytes;
    uint32_t verdict, error;
};

/* What the keeper is asked. */
enum request {
    END = 1, /* the process runs again: let go of the file, and end */
    HOLD,    /* open `path`, and hold it */
    LET_GO,  /* of the file */
    DROP,    /* give back the pages from `from` to `to`: their content is gone */
    FILL,    /* get pages for that range */
    LOADED,  /* all content is there again */
    NONE,    /* after its answer no earlier request can act any more */
    RESERVE, /* have `from` bytes ready, `to`: or as many as the last image took; 0 and 0: give all back */
};

/* Read and written from outside by gpuckpt/image/page.py, which has the same layout: change `version` with it. Magic, version and state, and
 * all from `keeper` to `request`, stay where they are: a gpuckpt of another version must know whether an image is whole. */
extern struct page {
    char magic[16];
    uint32_t version;
    _Atomic uint32_t state;
    uint64_t reserved0;
    /* by gpuckpt; all that follows is zeroed with each announcement */
    _Atomic uint64_t operation; /* 0: none is announced. Written last */
    uint32_t pid, tid;          /* as this process sees them: a forked child has another pid, and what it inherited is void */
    uint64_t expires_ns;        /* CLOCK_BOOTTIME */
    uint64_t libcuda_from, libcuda_to; /* its code; 0 while restoring: then nothing that it maps is an image */
    uint64_t libcuda_base;             /* where it begins; 0: its copies are left alone */
    uint32_t threads, reserved1;
    /* by us */
    _Atomic uint32_t seen, last_verdict; /* large populated mappings while announced, and the last one's fate */
    _Atomic uint32_t last_tid;
    uint32_t images; /* entries of `image` */
    _Atomic uint64_t last_caller, last_nbytes;
    uint64_t populate_ns;
    uint32_t threads_used, huge;
    _Atomic uint64_t copied; /* bytes, by several threads */
    _Atomic uint32_t copies, copy_threads;
    uint64_t from_reserve; /* bytes of images that were ready */
    struct image image[MOST_IMAGES];
    /* The keeper. By us */
    _Atomic int32_t keeper;    /* its tid, which the kernel clears when it has ended */
    uint32_t keeper_pid;       /* of the process that it is in: a forked child has none */
    _Atomic int32_t wake;      /* the descriptor in its table at which a byte wakes it; -1: not yet */
    int32_t held;              /* the descriptor of the file; -1: none */
    _Atomic uint32_t answered; /* number of the last request that was done, */
    int32_t result;            /* and what became of it: 0 or an errno */
    _Atomic uint32_t dropped;  /* pages were given back, and not all content has returned: to restore now would be the end */
    uint32_t reserved2;
    /* by gpuckpt */
    _Atomic uint32_t asked; /* number of the request. Written last */
    uint32_t request;
    uint64_t from, to;
    uint64_t reserved3[5];
    char path[960]; /* as this process sees it */
    /* The memory kept ready, by us (_reserve.c) */
    uint32_t kept;         /* whether any is wanted in this process, as its environment said when it started */
    uint32_t reserve_auto; /* as much as the last image took */
    int32_t reserve_error; /* the errno that stopped it, or 0 */
    uint32_t returned;     /* images whose memory came back */
    uint64_t wanted, ready; /* bytes that were ordered; that are populated, from the beginning of the area on */
    uint64_t dirty, taken;  /* bytes of these that are not zeroed yet; that are in images now */
    uint64_t area;          /* where it lies; 0: nowhere */
    uint64_t reserved4;
} page __attribute__((aligned(64)));
_Static_assert(sizeof page == 1664 && sizeof(struct image) == 24 && offsetof(struct page, keeper) == 544 && offsetof(struct page, kept) == 1600,
               "the layout that page.py has");

/* A system call that leaves errno alone: helpers share the thread-local storage of the thread that started them. */
long quietly6(long number, long a, long b, long c, long d, long e, long f);
long quietly5(long number, long a, long b, long c, long d, long e);
long quietly(long number, long a, long b, long c, long d);

/* With every signal blocked meanwhile: run *body* in a bare thread on the stack that ends at *top*. *tid* is its number until it has ended.
 * *own_table*: with a copy of the descriptor table. Returns 0, or -1 where no thread was to be had. */
int bare_thread(int (*body)(void *), void *argument, char *top, _Atomic int *tid, int own_table);

uint64_t now_ns(clockid_t clock);

extern _Atomic int busy; /* somebody populates: there is one set of stacks */

/* Returns 0, or the error that ended it. With as many *threads* as can be had, this one among them. */
int populate(void *address, size_t nbytes, uint32_t *threads);

/* The number of this process as it sees itself. A forked child has another. */
static inline uint32_t own_pid(void)
{
    return (uint32_t)quietly(SYS_getpid, 0, 0, 0, 0);
}

/* Start the keeper, unless it is there. */
void start_keeper(void);

/* The process has GPU memory now. */
void reserve_begin(void);

/* Memory for an image of *nbytes*: zero and mapped as the driver wants it, ready in part, still to be populated where it is not. NULL: there is
 * none to be had here, and none is kept that would be in the way. */
void *reserve_take(size_t nbytes);

/* What was taken last is of no use: everything is unmapped. */
void reserve_undo(void);

/* Whether *address* was given by reserve_take, and is back now: then it is not unmapped. */
int reserve_takes_back(void *address, size_t nbytes);

/* Have *nbytes* ready from now on. Returns 0 or -errno. */
long reserve_order(uint64_t nbytes, int as_the_last);

/* An image is being moved to disk: what is ready beside it is given back too. */
void reserve_trim(void);

void name(void *address, size_t nbytes, const char *text);

/* Whether this copy, in the calling thread, is the driver's own, into an image or out of one, within an operation. Then by how many threads it
 * may be made, and what is made so is counted; else 0. */
unsigned copy_threads(uintptr_t to, uintptr_t from, size_t nbytes);

/* memcpy, for libcuda. */
void *copy(void *to, const void *from, size_t nbytes);
extern void *(*copy_plainly)(void *, const void *, size_t);
void no_helpers(void); /* in this process, which a fork made */

/* munmap, for libcuda. */
int unmap(void *address, size_t nbytes);

/* Put ours into the imports of the library that lies at *base*, and nobody else's; or what was there before: with *all* of both functions. */
void take_imports(uintptr_t base);
void give_back_imports(int all);
#endif
