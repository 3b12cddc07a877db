/* The preload library's own sources under a sanitizer: threads allocate and free in every way within their limit,
 * while memory is kept for another lease and given back without pause; none is ever denied.
 *
 *   kept_race SECONDS PAGE    exit code 0, or 1 and a line number of what was wrong
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "cuda_types.h"
#include "gpushare_lease.h"

void *hooked_dlsym(void *handle, const char *name);

static void *cuda;
static CUcontext context;
static atomic_bool over;
static _Atomic int wrong;

#define MUST(condition)                                                     \
    do {                                                                    \
        if (!(condition)) {                                                 \
            atomic_store(&wrong, __LINE__);                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
        }                                                                   \
    } while (0)
#define CALL(name, ...) (((CUresult (*)(DECLARED_##name))hooked_dlsym(cuda, #name))(__VA_ARGS__))
#define DECLARED_cuInit unsigned
#define DECLARED_cuDevicePrimaryCtxRetain CUcontext *, CUdevice
#define DECLARED_cuCtxSetCurrent CUcontext
#define DECLARED_cuMemAlloc_v2 CUdeviceptr *, size_t
#define DECLARED_cuMemAllocAsync CUdeviceptr *, size_t, CUstream
#define DECLARED_cuMemFree_v2 CUdeviceptr
#define DECLARED_cuMemFreeAsync CUdeviceptr, CUstream

enum { THREADS = 4, MIB = 1 << 20 };

static void *allocate(void *number)
{
    size_t bytes = (size_t)64 * MIB + (size_t)(uintptr_t)number * 4096;
    bool pooled = (uintptr_t)number % 2;
    MUST(!CALL(cuCtxSetCurrent, context));
    while (!atomic_load(&over)) {
        CUdeviceptr at = 0;
        MUST(!(pooled ? CALL(cuMemAllocAsync, &at, bytes, NULL) : CALL(cuMemAlloc_v2, &at, bytes)));
        MUST(!(pooled ? CALL(cuMemFreeAsync, at, NULL) : CALL(cuMemFree_v2, at)));
    }
    return NULL;
}

int main(int count, char **words)
{
    pthread_t threads[THREADS];
    int fd = count == 3 ? open(words[2], O_RDWR) : -1;
    struct gpushare_limit_page *page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (page == MAP_FAILED || !cuda)
        return 2;
    MUST(!CALL(cuInit, 0) && !CALL(cuDevicePrimaryCtxRetain, &context, 0) && !CALL(cuCtxSetCurrent, context));
    for (uintptr_t i = 0; i < THREADS; i++)
        MUST(!pthread_create(&threads[i], NULL, allocate, (void *)i));
    time_t ends = time(NULL) + atoi(words[1]);
    for (unsigned turn = 0; time(NULL) < ends && !atomic_load(&wrong); turn++) {
        uint64_t limit = page->device[0].limit_bytes;
        atomic_store(&page->device[0].kept_bytes, turn % 3 == 0 ? 0 : turn % 3 == 1 ? limit : limit - 100 * MIB);
        nanosleep(&(struct timespec){0, 3000000}, NULL);
    }
    atomic_store(&over, true);
    atomic_store(&page->device[0].kept_bytes, 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    return atomic_load(&wrong) ? 1 : 0;
}
