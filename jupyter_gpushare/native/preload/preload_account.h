/* Allocations: bytes are taken from the lease's account before the driver is called, and given back if it
 * refuses. */
#ifndef GPUSHARE_PRELOAD_ACCOUNT_H
#define GPUSHARE_PRELOAD_ACCOUNT_H

#include "lease_client.h"
#include "preload_driver.h"
#include "preload_records.h"

/* An allocation in progress; if it is granted, its bytes are taken from the account. */
struct taken {
    uint64_t bytes;
    CUdevice ordinal;
    int device; /* in the limit page; -1 if nothing is taken */
    bool granted;
};

/* Waits until the lease runs.  `ordinal` -1 is the current context's device; without one nothing is charged
 * and the driver answers. */
struct taken begin_allocation(CUdevice ordinal, uint64_t bytes);
CUresult end_allocation(struct taken taken, CUresult result, uint64_t key);
bool take_or_trim(int device, uint64_t bytes);

/* Whether to call the driver again after it had no memory, because another lease's kept bytes are free now. */
static inline bool has_more(CUresult result, int device)
{
    return result == CUDA_ERROR_OUT_OF_MEMORY && lease_get_kept(device);
}

/* The bodies of wrappers.  `call` calls the driver's function as `real`. */
#define ALLOCATE(name, ordinal, size, key, call)             \
    lease_enter(LEASE_WORK);                                 \
    FIND_REAL(name);                                         \
    struct taken taken = begin_allocation(ordinal, size);    \
    if (!taken.granted)                                      \
        return CUDA_ERROR_OUT_OF_MEMORY;                     \
    CUresult result = call;                                  \
    if (has_more(result, taken.device))                      \
        result = call;                                       \
    return end_allocation(taken, result, result ? 0 : (uint64_t)(key))

#define RELEASE(name, held, call)                            \
    lease_enter(LEASE_CALLS);                                \
    FIND_REAL(name);                                         \
    struct record record = forget((uint64_t)(held));         \
    CUresult result = call;                                  \
    if (record.key && result)                                \
        remember(record);                                    \
    else                                                     \
        give_record(record);                                 \
    return result

/* Taint 0 is none. */
static inline CUresult tainted_by(CUresult result, enum gpushare_taint taint)
{
    if (!result && taint)
        lease_taint(taint);
    return result;
}

#endif
