/* Allocations: taken from the lease's account before the driver is called, given back when it refuses. */
#ifndef GPUSHARE_PRELOAD_ACCOUNT_H
#define GPUSHARE_PRELOAD_ACCOUNT_H

#include "lease_client.h"
#include "preload_driver.h"
#include "preload_records.h"

/* An allocation under way: its bytes are taken from the account, where it is granted. */
struct taken {
    uint64_t bytes;
    CUdevice ordinal;
    int device; /* in the limit page; -1: nothing is taken */
    bool granted;
};

/* Waits until the lease runs.  `ordinal` -1: the current context's device, and without one the
 * driver's own answer. */
struct taken begin_allocation(CUdevice ordinal, uint64_t bytes);
CUresult end_allocation(struct taken taken, CUresult result, uint64_t key);
bool take_or_trim(int device, uint64_t bytes);

/* Whether the driver, which has no memory, is to be called once more: what another lease had is free now. */
static inline bool has_more(CUresult result, int device)
{
    return result == CUDA_ERROR_OUT_OF_MEMORY && lease_get_kept(device);
}

/* The bodies of wrappers.  `call` names the driver's function `real`. */
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

/* Taint 0: none. */
static inline CUresult tainted_by(CUresult result, enum gpushare_taint taint)
{
    if (!result && taint)
        lease_taint(taint);
    return result;
}

#endif
