/* Memory kept ready for images, so that even the first one need not be populated while somebody waits.
 *
 * It is one area of address space: populated, zeroed pages at its beginning, no access beyond. An image *is* the first part of the area that it
 * needs: nothing moves, and nothing is unmapped. What of it is not ready is populated as ever. When libcuda unmaps the image, the part
 * belongs to the area again. It is then zeroed in the background, and is never given away before: at the next image, pages that are not
 * zeroed yet are exchanged for new ones.
 *
 *   0          dirty          ready       readable          AREA
 *   |-- not -----|-- zeroed ----|-- no pages ---|-- no access --|      nothing taken
 *   |-- images ------|-- zeroed |                                      taken: up to there
 *
 * The area is mapped while the process has its GPU memory, and never for an image that is being made: where GPU memory was, the driver will want
 * the same addresses again.
 *
 * How much is wanted comes from gpuckpt, which knows what the machine and the cgroups can give, in steps. Populating and zeroing is done by one bare
 * thread with nice 19, by STEP at a time: while it populates, others wait that map memory. A child of the program gets none of it, an
 * image excepted, which is mapped just as the driver asked.
 */
#define _GNU_SOURCE
#include "_preload.h"
#include <errno.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#define AREA ((size_t)512 << 30) /* of address space: of images, together */
#define STEP ((size_t)8 << 20)
#define MOST_WAIT 5000 /* times 200 us, for a thread that has it for one step */

static struct {
    uint32_t pid;      /* whose this is: a forked child has none of it */
    _Atomic int inside, claimed; /* somebody is at work on what follows; somebody more urgent than the background thread waits */
    uintptr_t begin, end; /* what was mapped */
    size_t nbytes, writable; /* from page.area on */
    struct part {
        uintptr_t address;
        size_t nbytes;
        int out;
    } part[MOST_IMAGES];
    _Atomic unsigned parts;
    uint64_t operation; /* of the images that are out */
    int running;
    _Atomic int tid;
} its;
static char stack[STACK_BYTES] __attribute__((aligned(64)));

static size_t up(size_t nbytes, size_t unit)
{
    return (nbytes + unit - 1) & ~(unit - 1);
}

static void wait_a_moment(void)
{
    const struct timespec moment = {0, 200000};
    quietly(SYS_nanosleep, (long)&moment, 0, 0, 0);
}

static int enter(void)
{
    int entered = 0;
    atomic_fetch_add(&its.claimed, 1);
    for (int i = 0; i < MOST_WAIT && !(entered = !atomic_exchange(&its.inside, 1)); i++)
        wait_a_moment();
    atomic_fetch_sub(&its.claimed, 1);
    return entered;
}

static void leave(void)
{
    atomic_store(&its.inside, 0);
}

static void nothing_is_kept(void)
{
    its.begin = its.end = its.nbytes = its.writable = 0;
    atomic_store(&its.parts, 0);
    page.area = page.ready = page.dirty = page.taken = 0;
}

/* What a forked child has of this is its parent's. */
static void begin_anew_in_a_child(void)
{
    if (its.pid == own_pid())
        return;
    nothing_is_kept();
    its.running = 0;
    atomic_store(&its.tid, 0);
    atomic_store(&its.claimed, 0);
    page.wanted = 0;
    page.reserve_error = 0;
    page.returned = 0;
    its.pid = own_pid();
    leave();
}

static void let_go(uintptr_t from, uintptr_t to)
{
    if (from < to)
        quietly(SYS_munmap, (long)from, (long)(to - from), 0, 0);
}

/* Unmap all but the images that are out: those are the driver's. */
static void release(void)
{
    uintptr_t from = its.begin;
    for (unsigned i = 0; i < its.parts; i++)
        if (its.part[i].out) {
            let_go(from, its.part[i].address);
            from = its.part[i].address + up(its.part[i].nbytes, HUGE_PAGE);
        }
    let_go(from, its.end);
    nothing_is_kept();
}

/* A child gets none, neither does a core dump. 0 or -errno. */
static long keep_apart(uintptr_t from, size_t nbytes)
{
    name((void *)from, nbytes, "gpuckpt-reserve");
    quietly(SYS_madvise, (long)from, (long)nbytes, MADV_DONTDUMP, 0);
    quietly(SYS_madvise, (long)from, (long)nbytes, MADV_HUGEPAGE, 0);
    return quietly(SYS_madvise, (long)from, (long)nbytes, MADV_DONTFORK, 0);
}

static long map(void)
{
    static const int limits[] = {RLIMIT_AS, RLIMIT_DATA};
    for (unsigned i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        struct rlimit space = {0, 0};
        if (quietly(SYS_prlimit64, 0, limits[i], 0, (long)&space) < 0 || space.rlim_cur != RLIM_INFINITY)
            return -EDQUOT; /* what is mapped here the program could not map */
    }
    long found = quietly6(SYS_mmap, 0, (long)(AREA + HUGE_PAGE), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found < 0 && found > -4096)
        return found;
    its.begin = (uintptr_t)found;
    its.end = its.begin + AREA + HUGE_PAGE;
    its.nbytes = AREA;
    its.writable = 0;
    page.area = up(its.begin, HUGE_PAGE);
    quietly(SYS_munlock, found, (long)(AREA + HUGE_PAGE), 0, 0); /* a program may lock all that it maps, and all of it at once */
    long result = keep_apart(its.begin, its.end - its.begin);
    if (result < 0)
        release();
    return result;
}

/* Or about to be: who asked may have looked before that. */
static int suspended(void)
{
    return (atomic_load(&page.operation) && now_ns(CLOCK_BOOTTIME) < page.expires_ns) || page.images;
}

/* Have the first *nbytes* writable. */
static long open_up(size_t nbytes)
{
    long result = 0;
    if (!page.area || nbytes > its.nbytes)
        return -ENOMEM;
    if (nbytes > its.writable) {
        result = quietly(SYS_mprotect, (long)(page.area + its.writable), (long)(nbytes - its.writable), PROT_READ | PROT_WRITE, 0);
        if (result == 0)
            its.writable = nbytes;
    }
    return result;
}

static long drop(size_t from, size_t to)
{
    return from < to ? quietly(SYS_madvise, (long)(page.area + from), (long)(to - from), MADV_DONTNEED, 0) : 0;
}

static void shrink(size_t nbytes)
{
    if (nbytes >= page.ready || drop(nbytes, page.ready) < 0)
        return;
    page.ready = nbytes;
    page.dirty = page.dirty < nbytes ? page.dirty : nbytes;
}

/* Not by memset: a bare thread must not come into the loader. */
static void zero(uintptr_t at, size_t nbytes)
{
#if defined(__x86_64__)
    size_t words = nbytes / 8;
    __asm__ volatile("rep stosq" : "+D"(at), "+c"(words) : "a"(0L) : "memory");
#else
    for (uintptr_t end = at + nbytes; at < end; at += 16)
        __asm__ volatile("stp xzr, xzr, [%0]" : : "r"(at) : "memory");
#endif
}

/* One step of what is to be done; 0: nothing is. */
static int step(void)
{
    if (page.taken || !page.area)
        return 0;
    if (page.dirty) {
        size_t nbytes = page.dirty < STEP ? page.dirty : STEP;
        zero(page.area + page.dirty - nbytes, nbytes);
        page.dirty -= nbytes;
    } else if (page.ready < page.wanted) {
        size_t nbytes = page.wanted - page.ready < STEP ? page.wanted - page.ready : STEP;
        long result = quietly(SYS_madvise, (long)(page.area + page.ready), (long)nbytes, MADV_POPULATE_WRITE, 0);
        if (result < 0 && result != -EINTR && result != -EAGAIN) {
            page.reserve_error = (int32_t)-result;
            page.wanted = page.ready;
            return 0;
        }
        page.ready += result == 0 ? nbytes : 0;
    } else
        return 0;
    return 1;
}

static int work_in_the_background(void *unused)
{
    (void)unused;
    quietly(SYS_prctl, PR_SET_NAME, (long)"gpuckpt-reserve", 0, 0);
    quietly(SYS_setpriority, PRIO_PROCESS, 0, 19, 0);
    for (;;) {
        if (atomic_load(&its.claimed) || atomic_exchange(&its.inside, 1)) {
            wait_a_moment();
            continue;
        }
        int more = step();
        its.running = more;
        leave();
        if (!more)
            return 0;
    }
}

static void have_it_done(void)
{
    if (its.running || !page.area || page.taken || (!page.dirty && page.ready >= page.wanted))
        return;
    for (int i = 0; i < MOST_WAIT && atomic_load(&its.tid); i++) /* the last one is about to end: it has the stack */
        wait_a_moment();
    its.running = !atomic_load(&its.tid) && bare_thread(work_in_the_background, NULL, stack + STACK_BYTES, &its.tid, 0) == 0;
}

void reserve_begin(void)
{
    begin_anew_in_a_child();
    if (!page.reserve_auto || !enter())
        return;
    if (!page.area)
        map();
    leave();
}

void *reserve_take(size_t nbytes)
{
    void *found = NULL;
    size_t whole = up(nbytes, HUGE_PAGE);
    uint64_t operation = atomic_load(&page.operation);
    if (!page.kept || its.pid != own_pid() || !page.area || !enter())
        return NULL;
    if (page.taken && its.operation != operation)
        release(); /* an earlier image was not unmapped, or not so that we saw it */
    size_t from = page.taken, to = from + whole, dirty = page.dirty < to ? page.dirty : to;
    if ((page.wanted || page.reserve_auto) && its.parts < MOST_IMAGES && open_up(to) == 0 && drop(from, dirty) == 0) {
        size_t clean = dirty > from ? dirty : from, until = page.ready < from + nbytes ? page.ready : from + nbytes;
        page.from_reserve += until > clean ? until - clean : 0;
        found = (void *)(page.area + from);
        quietly(SYS_madvise, (long)found, (long)whole, MADV_DOFORK, 0);
        its.part[its.parts] = (struct part){(uintptr_t)found, nbytes, 1};
        its.parts++;
        its.operation = operation;
        page.taken = to;
        page.ready = page.ready > to ? page.ready : to;
    } else if (!from)
        release(); /* the image is mapped beside it, and must find the memory */
    leave();
    return found;
}

void reserve_undo(void)
{
    if (!enter())
        return;
    unsigned last = its.parts - 1;
    its.part[last].out = 0;
    if (last == 0)
        release();
    else {
        let_go(its.part[last].address, its.end);
        its.end = its.part[last].address;
        page.taken = page.ready = its.nbytes = its.writable = its.end - page.area;
        its.parts = last;
    }
    leave();
}

int reserve_takes_back(void *address, size_t nbytes)
{
    uintptr_t at = (uintptr_t)address;
    if (!its.parts || at + nbytes <= page.area || at >= page.area + page.taken || its.pid != own_pid() || !enter())
        return 0;
    int found = 0;
    unsigned out = 0;
    for (unsigned i = 0; i < its.parts; i++) {
        struct part *part = &its.part[i];
        if (part->out && part->address == at && up(part->nbytes, 4096) == up(nbytes, 4096)) {
            part->out = 0;
            found = 1;
        }
        out += part->out != 0;
    }
    if (!found)
        release(); /* of a part of an image we keep no account: it is the kernel's */
    else {
        page.returned++;
        if (!out) {
            uint64_t taken = page.taken;
            page.dirty = page.dirty > taken ? page.dirty : taken;
            page.taken = 0;
            its.parts = 0;
            if (page.reserve_auto)
                page.wanted = taken;
            if (!page.wanted || keep_apart(page.area, its.nbytes) < 0)
                release();
            else
                shrink(page.wanted);
            have_it_done();
        }
    }
    leave();
    return found;
}

long reserve_order(uint64_t nbytes, int as_the_last)
{
    long result = 0;
    uint64_t wanted = up(nbytes, HUGE_PAGE);
    if (!page.kept)
        return -EPERM;
    begin_anew_in_a_child();
    if (!enter())
        return -EBUSY;
    if (page.taken && wanted)
        result = -EBUSY;
    else {
        page.reserve_auto = as_the_last != 0;
        page.wanted = wanted;
        page.reserve_error = 0;
        if (page.taken)
            shrink(page.taken);
        else if (!wanted)
            release();
        else {
            shrink(wanted);
            result = page.area ? 0 : suspended() ? -EBUSY : map();
            if (result == 0)
                result = open_up(wanted);
            if (result < 0)
                page.wanted = page.ready;
            have_it_done();
        }
    }
    leave();
    return result;
}

void reserve_trim(void)
{
    if (its.pid != own_pid() || !enter())
        return;
    if (page.taken) {
        shrink(page.taken);
        if (page.wanted > page.taken)
            page.wanted = page.taken; /* whether there is memory for more is seen from outside */
    }
    leave();
}

static int (*unmap_plainly)(void *, size_t);

int unmap(void *address, size_t nbytes)
{
    if (reserve_takes_back(address, nbytes))
        return 0;
    return unmap_plainly ? unmap_plainly(address, nbytes) : (int)syscall(SYS_munmap, address, nbytes);
}

__attribute__((constructor)) static void start(void)
{
    unmap_plainly = dlsym ? (int (*)(void *, size_t))dlsym(RTLD_NEXT, "munmap") : NULL;
}
