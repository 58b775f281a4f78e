/* A program that loads libcuda when it is told to, and unloads it: answers each line of its input with one line.
 *
 *   open     libcuda; where its code for fake_map lies
 *   map N    libcuda maps N bytes as the driver does an image, in this thread, which stands for the restore thread: where
 *   close    libcuda
 *   mine ADDRESS    maps memory of its own there; write ADDRESS: writes to all of it
 */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "image_mapping.h"

#define WRITABLE ((size_t)1 << 20)

int main(void)
{
    char line[128];
    void *cuda = NULL, (*map)(void *) = NULL;
    unsigned long n;
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("%d %d\n", (int)getpid(), (int)getpid());
    while (fgets(line, sizeof line, stdin)) {
        if (!strncmp(line, "open", 4)) {
            cuda = dlopen("libcuda.so.1", RTLD_LAZY);
            map = cuda ? (void (*)(void *))dlsym(cuda, "fake_map") : NULL;
            printf("%lx\n", (unsigned long)map);
        } else if (sscanf(line, "map %lu", &n) == 1) {
            Mapping m = {NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0, NULL, 0};
            map(&m);
            printf("%lx\n", (unsigned long)m.result);
        } else if (!strncmp(line, "close", 5)) {
            printf("%d\n", dlclose(cuda));
        } else if (sscanf(line, "mine %lx", &n) == 1) {
            void *p = mmap((void *)n, WRITABLE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
            printf("%d\n", p == (void *)n);
        } else if (sscanf(line, "write %lx", &n) == 1) {
            memset((void *)n, 1, WRITABLE);
            printf("0\n");
        }
    }
    return 0;
}
