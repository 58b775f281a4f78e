/* What libcuda calls of ours: its memcpy and its munmap, by its table of imports and no other.
 *
 * From the mapping of an image on; memcpy until the process has been restored, munmap for as long as memory is kept ready for images.
 */
#define _GNU_SOURCE
#include "_preload.h"
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <linux/futex.h>
#include <string.h>
#include <unistd.h>

#define MOST_SLOTS 8

#if defined(__x86_64__)
#define JUMP_SLOT R_X86_64_JUMP_SLOT
#define GLOB_DAT R_X86_64_GLOB_DAT
#else
#define JUMP_SLOT R_AARCH64_JUMP_SLOT
#define GLOB_DAT R_AARCH64_GLOB_DAT
#endif

static struct slot {
    _Atomic uintptr_t *at;
    uintptr_t before, ours, page; /* page: of those that are read-only once the library is loaded; else 0 */
} slot[MOST_SLOTS];
static unsigned slots;
static uintptr_t page_bytes;
static uintptr_t taken_of; /* the library */
static uint32_t owner;     /* the process in which that is so: a forked child has it as well, and no keeper */

/* Whether *at* has *value*, asked of the kernel: a wait for no time, of a word that has another value, or is not there. The library may have
 * been unloaded since, and what lies there be somebody else's, or nothing. */
static int has(_Atomic uintptr_t *at, uintptr_t value)
{
    const struct timespec no_time = {0, 0};
    for (int half = 0; half < 2; half++) {
        long result;
        do
            result = quietly(SYS_futex, (long)((uint32_t *)at + half), FUTEX_WAIT_PRIVATE, (uint32_t)(value >> (32 * half)), (long)&no_time);
        while (result == -EINTR);
        if (result != -ETIMEDOUT)
            return 0;
    }
    return 1;
}

static void put(struct slot *s, uintptr_t expected, uintptr_t value)
{
    if (!has(s->at, expected))
        return;
    if (s->page && quietly(SYS_mprotect, (long)s->page, (long)page_bytes, PROT_READ | PROT_WRITE, 0) < 0)
        return;
    atomic_compare_exchange_strong(s->at, &expected, value); /* what somebody else has put there since stays */
    if (s->page)
        quietly(SYS_mprotect, (long)s->page, (long)page_bytes, PROT_READ, 0);
}

/* What *name* becomes, or 0. */
static uintptr_t ours_for(const char *name)
{
    static const struct {
        char name[8];
        uintptr_t ours;
    } all[] = {{"memcpy", (uintptr_t)copy}, {"munmap", (uintptr_t)unmap}};
    for (unsigned i = 0; i < 2; i++) {
        unsigned n = 0;
        while (name[n] && name[n] == all[i].name[n])
            n++;
        if (name[n] == all[i].name[n])
            return all[i].ours;
    }
    return 0;
}

/* Note the places among *relocations* through which something of ours may be called. */
static void find(uintptr_t base, const ElfW(Rela) * relocation, size_t nbytes, const ElfW(Sym) * symbols, const char *names,
                 uintptr_t readonly, uintptr_t readonly_end)
{
    for (size_t i = 0; i < nbytes / sizeof *relocation && slots < MOST_SLOTS; i++) {
        uint64_t type = ELF64_R_TYPE(relocation[i].r_info);
        uintptr_t ours = type == JUMP_SLOT || type == GLOB_DAT ? ours_for(names + symbols[ELF64_R_SYM(relocation[i].r_info)].st_name) : 0;
        if (!ours)
            continue;
        uintptr_t at = base + relocation[i].r_offset;
        int fixed = at >= readonly && at < readonly_end;
        slot[slots++] = (struct slot){(_Atomic uintptr_t *)at, *(uintptr_t *)at, ours, fixed ? at & ~(page_bytes - 1) : 0};
    }
}

/* Reads the tables of the library as the loader does. It asks the loader nothing, which may be in the middle of something. */
static void look(uintptr_t base)
{
    const ElfW(Ehdr) *head = (const ElfW(Ehdr) *)base;
    const ElfW(Dyn) *dynamic = NULL;
    uintptr_t end = base, readonly = 0, readonly_end = 0, table[DT_JMPREL + 1] = {0};
    if (memcmp(head->e_ident, ELFMAG, SELFMAG) != 0 || head->e_ident[EI_CLASS] != ELFCLASS64 || head->e_type != ET_DYN)
        return;
    const ElfW(Phdr) *part = (const ElfW(Phdr) *)(base + head->e_phoff);
    for (unsigned i = 0; i < head->e_phnum; i++) {
        if (part[i].p_type == PT_LOAD && base + part[i].p_vaddr + part[i].p_memsz > end)
            end = base + part[i].p_vaddr + part[i].p_memsz;
        if (part[i].p_type == PT_DYNAMIC)
            dynamic = (const ElfW(Dyn) *)(base + part[i].p_vaddr);
        if (part[i].p_type == PT_GNU_RELRO)
            readonly = (base + part[i].p_vaddr) & ~(page_bytes - 1), /* whole pages, as the loader counts them */
                readonly_end = (base + part[i].p_vaddr + part[i].p_memsz) & ~(page_bytes - 1);
    }
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++)
        if (dynamic->d_tag > 0 && dynamic->d_tag <= DT_JMPREL)
            table[dynamic->d_tag] = dynamic->d_un.d_val;
    const int pointers[] = {DT_SYMTAB, DT_STRTAB, DT_JMPREL, DT_RELA};
    for (unsigned i = 0; i < sizeof pointers / sizeof pointers[0]; i++) {
        uintptr_t *p = &table[pointers[i]];
        if (*p && *p < base)
            *p += base; /* a C library that leaves them as they are in the file */
        if (*p >= end)
            return;
    }
    if (!table[DT_SYMTAB] || !table[DT_STRTAB] || (table[DT_JMPREL] && table[DT_PLTREL] != DT_RELA))
        return;
    const ElfW(Sym) *symbols = (const ElfW(Sym) *)table[DT_SYMTAB];
    const char *names = (const char *)table[DT_STRTAB];
    if (table[DT_JMPREL])
        find(base, (const ElfW(Rela) *)table[DT_JMPREL], table[DT_PLTRELSZ], symbols, names, readonly, readonly_end);
    if (table[DT_RELA])
        find(base, (const ElfW(Rela) *)table[DT_RELA], table[DT_RELASZ], symbols, names, readonly, readonly_end);
}

void take_imports(uintptr_t base)
{
    uint32_t pid = own_pid();
    if (!copy_plainly || !base)
        return;
    if (owner != pid)
        no_helpers(); /* of a parent's there is none here */
    if (owner != pid || taken_of != base || !slots) {
        give_back_imports(1); /* what a parent had taken */
        owner = pid;
        taken_of = base;
        look(base);
    }
    for (unsigned i = 0; i < slots; i++)
        put(&slot[i], slot[i].before, slot[i].ours);
}

void give_back_imports(int all)
{
    for (unsigned i = 0; i < slots; i++)
        if (all || slot[i].ours == (uintptr_t)copy)
            put(&slot[i], slot[i].ours, slot[i].before);
    if (all)
        slots = 0;
}

__attribute__((constructor)) static void start(void)
{
    copy_plainly = dlsym ? (void *(*)(void *, const void *, size_t))dlsym(RTLD_NEXT, "memcpy") : NULL;
    page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
}
