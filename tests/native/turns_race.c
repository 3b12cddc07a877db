/* The preload library's own sources under a sanitizer: threads launch, make and end contexts, retain and release
 * the primary one and capture, while the turn changes without pause; children are forked in the middle.
 *
 *   turns_race SECONDS PAGE    exit code 0, or 1 and a line number of what was wrong
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cuda_types.h"
#include "gpushare_lease.h"

void *hooked_dlsym(void *handle, const char *name);

static void *cuda;
static CUcontext context;
static _Thread_local CUdeviceptr memory; /* of one thread each: the simulated driver writes it at once */
static atomic_bool over;
static _Atomic int wrong;
static _Atomic unsigned launched;

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
#define DECLARED_cuDevicePrimaryCtxRelease_v2 CUdevice
#define DECLARED_cuCtxSetCurrent CUcontext
#define DECLARED_cuCtxCreate_v2 CUcontext *, unsigned, CUdevice
#define DECLARED_cuCtxDestroy_v2 CUcontext
#define DECLARED_cuMemAlloc_v2 CUdeviceptr *, size_t
#define DECLARED_cuMemsetD8Async CUdeviceptr, unsigned char, size_t, CUstream
#define DECLARED_cuStreamCreate CUstream *, unsigned
#define DECLARED_cuStreamSynchronize CUstream
#define DECLARED_cuStreamBeginCapture_v2 CUstream, int
#define DECLARED_cuStreamEndCapture CUstream, void **
#define DECLARED_cuGraphDestroy void *

static void *launch(void *unused)
{
    CUstream stream;
    (void)unused;
    MUST(!CALL(cuCtxSetCurrent, context) && !CALL(cuMemAlloc_v2, &memory, 64) && !CALL(cuStreamCreate, &stream, 1));
    while (!atomic_load(&over)) {
        MUST(!CALL(cuMemsetD8Async, memory, 1, 64, stream));
        if (atomic_fetch_add(&launched, 1) % 16 == 0)
            MUST(!CALL(cuStreamSynchronize, stream));
    }
    return NULL;
}

static void *use_contexts(void *unused)
{
    CUcontext own, primary;
    (void)unused;
    MUST(!CALL(cuCtxSetCurrent, context) && !CALL(cuMemAlloc_v2, &memory, 64));
    while (!atomic_load(&over)) {
        MUST(!CALL(cuCtxCreate_v2, &own, 0, 0));
        MUST(!CALL(cuMemsetD8Async, memory, 2, 64, NULL));
        MUST(!CALL(cuDevicePrimaryCtxRetain, &primary, 0) && !CALL(cuDevicePrimaryCtxRelease_v2, 0));
        MUST(!CALL(cuCtxSetCurrent, context));
        MUST(!CALL(cuCtxDestroy_v2, own));
    }
    return NULL;
}

static void *capture(void *unused)
{
    CUstream stream;
    void *graph;
    (void)unused;
    MUST(!CALL(cuCtxSetCurrent, context) && !CALL(cuMemAlloc_v2, &memory, 64) && !CALL(cuStreamCreate, &stream, 1));
    while (!atomic_load(&over)) {
        MUST(!CALL(cuStreamBeginCapture_v2, stream, 1));
        for (int i = 0; i < 8; i++)
            MUST(!CALL(cuMemsetD8Async, memory, 3, 64, stream));
        MUST(!CALL(cuStreamEndCapture, stream, &graph) && graph);
        MUST(!CALL(cuGraphDestroy, graph));
        nanosleep(&(struct timespec){0, 500000}, NULL);
    }
    return NULL;
}

int main(int count, char **words)
{
    void *(*const bodies[])(void *) = {launch, launch, launch, use_contexts, capture};
    enum { THREADS = sizeof bodies / sizeof *bodies };
    pthread_t threads[THREADS];
    int fd = count == 3 ? open(words[2], O_RDWR) : -1;
    struct gpushare_limit_page *page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (page == MAP_FAILED || !cuda)
        return 2;
    MUST(!CALL(cuInit, 0) && !CALL(cuDevicePrimaryCtxRetain, &context, 0) && !CALL(cuCtxSetCurrent, context));
    MUST(!CALL(cuMemAlloc_v2, &memory, 64)); /* for the children */
    for (int i = 0; i < THREADS; i++)
        MUST(!pthread_create(&threads[i], NULL, bodies[i], NULL));
    time_t ends = time(NULL) + atoi(words[1]);
    for (uint32_t turn = 2; time(NULL) < ends && !atomic_load(&wrong); turn++) {
        atomic_store(&page->turn, turn % 8 ? turn : GPUSHARE_NO_TURNS);
        syscall(SYS_futex, &page->turn, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
        nanosleep(&(struct timespec){0, 3000000}, NULL);
        pid_t child = turn % 16 ? -1 : fork();
        if (!child)
            _exit(CALL(cuCtxSetCurrent, context) == 3 && CALL(cuMemsetD8Async, memory, 1, 64, NULL) == 3 ? 0 : 1);
        int status = 0;
        MUST(child < 0 || (waitpid(child, &status, 0) == child && !status));
    }
    atomic_store(&over, true);
    atomic_store(&page->turn, GPUSHARE_NO_TURNS);
    syscall(SYS_futex, &page->turn, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    printf("%u\n", atomic_load(&launched));
    return atomic_load(&wrong) ? 1 : 0;
}
