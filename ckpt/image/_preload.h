/* What the two parts of the preload library share: the mapping of an image (_preload.c), and the copies into it and out of it (_copy.c). */
#ifndef GPUCKPT_PRELOAD_H
#define GPUCKPT_PRELOAD_H
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

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

#define STACK_BYTES 16384 /* for system calls and copies; signals, which would need more, are blocked */

/* A system call that leaves errno alone: helpers share the thread-local storage of the thread that started them. */
long quietly5(long number, long a, long b, long c, long d, long e);
long quietly(long number, long a, long b, long c, long d);

/* With every signal blocked meanwhile: run *body* in a bare thread on the stack that ends at *top*. *tid* is its number until it has ended.
 * *own_table*: with a copy of the descriptor table. Returns 0, or -1 where no thread was to be had. */
int bare_thread(int (*body)(void *), void *argument, char *top, _Atomic int *tid, int own_table);

/* Whether this copy, in the calling thread, is the driver's own, into an image or out of one, within an operation. Then by how many threads it
 * may be made, and what is made so is counted; else 0. */
unsigned copy_threads(uintptr_t to, uintptr_t from, size_t nbytes);

/* Put our memcpy into the imports of the library that lies at *base*, and nobody else's; or what was there before. */
void take_copies(uintptr_t base);
void give_back_copies(void);
#endif
