/* Calls of virtual memory management that overlap in two threads, against a driver that holds the calls of
 * the second thread until it may return (SLOW_DRIVER in test_sanitizers.py).  Exit code 0, or the line of what was wrong.
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

extern _Atomic int calls_in_driver, driver_may_return;

CUresult cuMemCreate(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long);
CUresult cuMemRelease(CUmemGenericAllocationHandle);
CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
CUresult cuMemUnmap(CUdeviceptr, size_t);
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *, void *);

#define MUST(condition)                                                      \
    do {                                                                     \
        if (!(condition)) {                                                  \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);  \
            return __LINE__ & 255;                                           \
        }                                                                    \
    } while (0)

static void *release(void *nothing) { cuMemRelease(handle); return nothing; }
static void *map(void *nothing) { cuMemMap(address, SIZE, 0, handle, 0); return nothing; }
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
    return lease.used_bytes;
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
    MUST(!cuMemCreate(&handle, SIZE, &property, 0) && used() == SIZE);
    return mapped && cuMemMap(address, SIZE, 0, handle, 0);
}

int main(void)
{
    for (int round = 0; round < 3; round++) {
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
    }
    return 0;
}
