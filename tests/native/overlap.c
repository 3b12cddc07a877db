/* Calls that overlap in two threads, against a driver that holds the calls of the second thread until it may
 * return (SLOW_DRIVER in test_sanitizers.py): what it freed is there for the first one meanwhile.  Exit code 0,
 * or the line of what was wrong.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <time.h>

#include "cuda_types.h"
#include "preload/lease_client.h"

enum { MIB = 1 << 20, SIZE = 4 * MIB };
static const CUdeviceptr address = 1 << 30;
static CUmemGenericAllocationHandle handle;
static CUcontext context;
static uint64_t exported; /* stays charged */

extern _Atomic int calls_in_driver, driver_may_return;

CUresult cuMemCreate(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long);
CUresult cuMemRelease(CUmemGenericAllocationHandle);
CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
CUresult cuMemUnmap(CUdeviceptr, size_t);
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *, void *);
CUresult cuMemExportToShareableHandle(void *, CUmemGenericAllocationHandle, int, unsigned long long);
CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);
CUresult cuMemFree_v2(CUdeviceptr);
CUresult cuCtxCreate_v2(CUcontext *, unsigned, CUdevice);
CUresult cuCtxDestroy_v2(CUcontext);
CUresult cuDevicePrimaryCtxReset_v2(CUdevice);

#define MUST(condition)                                                      \
    do {                                                                     \
        if (!(condition)) {                                                  \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);  \
            return __LINE__ & 255;                                           \
        }                                                                    \
    } while (0)

static void *release(void *nothing) { cuMemRelease(handle); return nothing; }
static void *map(void *nothing) { cuMemMap(address, SIZE, 0, handle, 0); return nothing; }
static void *unmap(void *nothing) { cuMemUnmap(address, SIZE); return nothing; }
static void *destroy(void *nothing) { cuCtxDestroy_v2(context); return nothing; }
static void *reset(void *nothing) { cuDevicePrimaryCtxReset_v2(0); return nothing; }
static void *export(void *nothing)
{
    int shared;
    cuMemExportToShareableHandle(&shared, handle, 1, 0);
    return nothing;
}
static void *retain(void *nothing)
{
    CUmemGenericAllocationHandle again;
    cuMemRetainAllocationHandle(&again, (void *)address);
    return nothing;
}

static uint64_t used(void)
{
    struct lease_memory lease = {0, UINT64_MAX};
    lease_memory(0, &lease);
    return lease.used_bytes - exported;
}

/* Starts a call in another thread, and returns while the driver is in it. */
static pthread_t start(void *call(void *))
{
    pthread_t thread;
    driver_may_return = 0;
    pthread_create(&thread, NULL, call, NULL);
    while (!calls_in_driver)
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    return thread;
}

static void finish(pthread_t thread)
{
    driver_may_return = 1;
    pthread_join(thread, NULL);
}

static int create(bool mapped)
{
    CUmemAllocationProp property = {.type = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    uint64_t before = used();
    MUST(!cuMemCreate(&handle, SIZE, &property, 0) && used() == before + SIZE);
    return mapped && cuMemMap(address, SIZE, 0, handle, 0);
}

static int overlap_virtual_memory(void)
{
    MUST(!create(true)); /* Release in progress, Unmap ends it */
    pthread_t slow = start(release);
    MUST(!cuMemUnmap(address, SIZE));
    finish(slow);
    MUST(used() == 0);

    MUST(!create(false)); /* Map in progress, Release: mapped memory stays charged */
    slow = start(map);
    MUST(!cuMemRelease(handle));
    finish(slow);
    MUST(used() == SIZE);
    MUST(!cuMemUnmap(address, SIZE) && used() == 0);

    MUST(!create(true)); /* Retain in progress, the mapping goes: the new holder stays charged */
    MUST(!cuMemRelease(handle) && used() == SIZE);
    slow = start(retain);
    MUST(!cuMemUnmap(address, SIZE));
    finish(slow);
    MUST(used() == SIZE);
    MUST(!cuMemRelease(handle) && used() == 0);

    MUST(!create(true)); /* Unmap in progress, other memory is mapped there: it stays charged */
    MUST(!cuMemRelease(handle));
    slow = start(unmap);
    MUST(!create(true));
    finish(slow);
    MUST(used() == SIZE);
    MUST(!cuMemRelease(handle) && used() == SIZE);
    MUST(!cuMemUnmap(address, SIZE) && used() == 0);

    MUST(!create(true)); /* Export in progress, all else ends: it stays charged */
    slow = start(export);
    MUST(!cuMemUnmap(address, SIZE) && !cuMemRelease(handle));
    finish(slow);
    MUST(used() == SIZE);
    exported += SIZE;
    return 0;
}

/* Allocations of a context that has the handle of one that ends stay charged. */
static int overlap_contexts(void)
{
    CUdeviceptr before, after;
    MUST(!cuCtxCreate_v2(&context, 0, 0) && !cuMemAlloc_v2(&before, SIZE));
    pthread_t slow = start(destroy);
    MUST(!cuCtxCreate_v2(&context, 0, 0) && !cuMemAlloc_v2(&after, SIZE));
    finish(slow);
    MUST(used() == SIZE);
    slow = start(reset); /* of the primary context: this one is another */
    finish(slow);
    MUST(used() == SIZE);
    MUST(!cuCtxDestroy_v2(context) && used() == 0);

    MUST(!cuMemAlloc_v2(&before, SIZE));
    slow = start(reset);
    MUST(!cuMemAlloc_v2(&after, SIZE) && used() == 2 * SIZE);
    finish(slow);
    MUST(used() == SIZE);
    MUST(!cuMemFree_v2(after) && used() == 0);
    return 0;
}

int main(void)
{
    for (int round = 0; round < 3; round++) {
        int line = overlap_virtual_memory();
        if (line || (line = overlap_contexts()))
            return line;
    }
    return 0;
}
