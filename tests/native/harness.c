/* The preload library's own sources under a sanitizer, against the simulated driver.
 *
 * Threads allocate and free in every way, map and unmap, copy, launch and synchronize, while
 * another process suspends and resumes this one and another allocates in the same lease; a
 * child is forked in the middle.  At the end everything is given back: the account and the
 * device are empty.  Exit code 0, or a line number of what was wrong.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cuda_types.h"
#include "preload/lease_client.h"

enum { THREADS = 4, TURNS = 200 };

void *hooked_dlsym(void *handle, const char *name);

static void *cuda;
static CUcontext context;
static _Atomic int wrong;
/* Shared with the process that disturbs this one. */
static struct {
    _Atomic unsigned turns_done;
    atomic_bool over;
    pthread_rwlock_t polls; /* read: calls that end a process that is checkpointed; written: its suspension */
} *shared;

#define MUST(condition)                      \
    do {                                     \
        if (!(condition)) {                  \
            atomic_store(&wrong, __LINE__);  \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
        }                                    \
    } while (0)

#define CALL(name, ...) (((CUresult (*)(DECLARED_##name))hooked_dlsym(cuda, #name))(__VA_ARGS__))
#define DECLARED_cuInit unsigned
#define DECLARED_cuDevicePrimaryCtxRetain CUcontext *, CUdevice
#define DECLARED_cuCtxSetCurrent CUcontext
#define DECLARED_cuCtxSynchronize void
#define DECLARED_cuMemAlloc_v2 CUdeviceptr *, size_t
#define DECLARED_cuMemAllocAsync CUdeviceptr *, size_t, CUstream
#define DECLARED_cuMemFree_v2 CUdeviceptr
#define DECLARED_cuMemFreeAsync CUdeviceptr, CUstream
#define DECLARED_cuMemGetInfo_v2 size_t *, size_t *
#define DECLARED_cuMemcpyHtoD_v2 CUdeviceptr, const void *, size_t
#define DECLARED_cuMemcpyDtoH_v2 void *, CUdeviceptr, size_t
#define DECLARED_cuMemsetD8_v2 CUdeviceptr, unsigned char, size_t
#define DECLARED_cuMemAddressReserve CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long
#define DECLARED_cuMemAddressFree CUdeviceptr, size_t
#define DECLARED_cuMemCreate CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long
#define DECLARED_cuMemMap CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long
#define DECLARED_cuMemSetAccess CUdeviceptr, size_t, const CUmemAccessDesc *, size_t
#define DECLARED_cuMemUnmap CUdeviceptr, size_t
#define DECLARED_cuMemRelease CUmemGenericAllocationHandle
#define DECLARED_cuStreamCreate CUstream *, unsigned
#define DECLARED_cuStreamDestroy_v2 CUstream
#define DECLARED_cuStreamQuery CUstream
#define DECLARED_cuEventCreate CUevent *, unsigned
#define DECLARED_cuEventRecord CUevent, CUstream
#define DECLARED_cuEventSynchronize CUevent
#define DECLARED_cuEventDestroy_v2 CUevent
#define DECLARED_cuGetProcAddress_v2 const char *, void **, int, uint64_t, int *
#define DECLARED_cuCheckpointProcessLock int, CUcheckpointLockArgs *
#define DECLARED_cuCheckpointProcessCheckpoint int, CUcheckpointCheckpointArgs *
#define DECLARED_cuCheckpointProcessRestore int, CUcheckpointRestoreArgs *
#define DECLARED_cuCheckpointProcessUnlock int, CUcheckpointUnlockArgs *

static void plain(unsigned turn)
{
    CUdeviceptr at = 0;
    char word[8] = "pattern", back[8] = "";
    size_t bytes = turn % 3 == 0 ? 100 : turn % 3 == 1 ? (size_t)1 << 20 : (size_t)5 << 20;
    CUresult code = turn % 2 ? CALL(cuMemAlloc_v2, &at, bytes) : CALL(cuMemAllocAsync, &at, bytes, NULL);
    MUST(code == CUDA_SUCCESS || code == CUDA_ERROR_OUT_OF_MEMORY);
    if (code)
        return;
    MUST(!CALL(cuMemsetD8_v2, at, 7, bytes < 4096 ? bytes : 4096));
    MUST(!CALL(cuMemcpyHtoD_v2, at, word, sizeof word));
    MUST(!CALL(cuMemcpyDtoH_v2, back, at, sizeof back) && back[0] == 'p' && back[6] == 'n');
    MUST(!(turn % 2 ? CALL(cuMemFreeAsync, at, NULL) : CALL(cuMemFree_v2, at)));
}

static void mapped(void)
{
    const size_t bytes = (size_t)4 << 20;
    CUmemAllocationProp property = {.type = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, 3};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    MUST(!CALL(cuMemAddressReserve, &at, bytes, 0, 0, 0));
    CUresult code = CALL(cuMemCreate, &handle, bytes, &property, 0);
    MUST(code == CUDA_SUCCESS || code == CUDA_ERROR_OUT_OF_MEMORY);
    if (!code) {
        MUST(!CALL(cuMemMap, at, bytes, 0, handle, 0));
        MUST(!CALL(cuMemRelease, handle));
        MUST(!CALL(cuMemSetAccess, at, bytes, &access, 1));
        MUST(!CALL(cuMemsetD8_v2, at + bytes - 64, 1, 64));
        MUST(!CALL(cuMemUnmap, at, bytes));
    }
    MUST(!CALL(cuMemAddressFree, at, bytes));
}

static void waiting(void)
{
    CUstream stream;
    CUevent event;
    size_t left, total;
    MUST(!CALL(cuStreamCreate, &stream, 0) && !CALL(cuEventCreate, &event, 0));
    MUST(!CALL(cuEventRecord, event, stream));
    pthread_rwlock_rdlock(&shared->polls);
    MUST(!CALL(cuEventSynchronize, event) && !CALL(cuStreamQuery, stream) && !CALL(cuCtxSynchronize));
    pthread_rwlock_unlock(&shared->polls);
    MUST(!CALL(cuEventDestroy_v2, event) && !CALL(cuStreamDestroy_v2, stream));
    MUST(!CALL(cuMemGetInfo_v2, &left, &total) && left <= total && total == (size_t)1 << 30);
}

static void turns(unsigned count)
{
    void *found = NULL;
    MUST(!CALL(cuCtxSetCurrent, context));
    for (unsigned turn = 0; turn < count; turn++) {
        plain(turn);
        mapped();
        waiting();
        MUST(!CALL(cuGetProcAddress_v2, "cuMemAlloc", &found, 13000, 0, NULL) && found);
        atomic_fetch_add(&shared->turns_done, 1);
    }
}

static void *work(void *nothing)
{
    turns(TURNS);
    return nothing;
}

/* Suspends and resumes `pid` until all is over, each time after some work was done: on a loaded
 * machine none might be done between two suspensions otherwise. */
static void disturb(int pid)
{
    CUcheckpointLockArgs lock = {.timeoutMs = 1000};
    struct timespec pause = {0, 3000000};
    if (CALL(cuInit, 0))
        _exit(1);
    for (unsigned seen = 0; !atomic_load(&shared->over);) {
        pthread_rwlock_wrlock(&shared->polls);
        if (atomic_load(&shared->turns_done) != seen && !CALL(cuCheckpointProcessLock, pid, &lock)) {
            int code = CALL(cuCheckpointProcessCheckpoint, pid, NULL);
            if (code || CALL(cuCheckpointProcessRestore, pid, NULL))
                _exit(2);
            nanosleep(&pause, NULL);
            seen = atomic_load(&shared->turns_done);
            CALL(cuCheckpointProcessUnlock, pid, NULL);
        }
        pthread_rwlock_unlock(&shared->polls);
        nanosleep(&pause, NULL);
    }
    _exit(0);
}

static void share(void)
{
    pthread_rwlockattr_t how;
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        exit(1);
    pthread_rwlockattr_init(&how);
    pthread_rwlockattr_setpshared(&how, PTHREAD_PROCESS_SHARED);
    pthread_rwlockattr_setkind_np(&how, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&shared->polls, &how);
}

/* A child that ends with this process: it holds its standard error open. */
static int begin_child(void)
{
    int child = fork();
    if (!child)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    return child;
}

int main(void)
{
    pthread_t threads[THREADS];
    int self = getpid(), status;
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda)
        return 1;
    share();
    int other = begin_child(); /* before this process uses CUDA, so that the child may */
    if (!other)
        disturb(self);
    int neighbour = begin_child();
    if (!neighbour) {
        MUST(!CALL(cuInit, 0) && !CALL(cuDevicePrimaryCtxRetain, &context, 0));
        work(NULL);
        _exit(wrong != 0);
    }
    MUST(!CALL(cuInit, 0) && !CALL(cuDevicePrimaryCtxRetain, &context, 0));
    /* Finds every driver function now: ThreadSanitizer's own lock in dlopen does not survive
     * a fork in the middle of another thread's dlopen (glibc's does). */
    turns(2);
    for (int i = 0; i < THREADS; i++)
        MUST(!pthread_create(&threads[i], NULL, work, NULL));
    int child = fork(); /* in the middle of it all: must neither hang nor hold anything */
    if (!child) {
        CUdeviceptr at;
        _exit(CALL(cuMemAlloc_v2, &at, 1 << 21) == CUDA_ERROR_NOT_INITIALIZED ? 0 : 1);
    }
    MUST(waitpid(child, &status, 0) == child && status == 0);
    for (int i = 0; i < THREADS; i++)
        MUST(!pthread_join(threads[i], NULL));
    MUST(waitpid(neighbour, &status, 0) == neighbour && status == 0);
    /* Not killed: it may have locked this process. */
    atomic_store(&shared->over, true);
    MUST(waitpid(other, &status, 0) == other && status == 0);
    MUST(!CALL(cuCtxSynchronize)); /* the pool gives back what it keeps */
    struct lease_memory memory;
    MUST(lease_memory(0, &memory) && memory.used_bytes == 0 && memory.limit_bytes == (uint64_t)1 << 30);
    return wrong ? 1 : 0;
}
