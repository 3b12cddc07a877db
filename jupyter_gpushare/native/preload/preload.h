/* What the parts of the preload library share; preload.c has the rules. */
#ifndef GPUSHARE_PRELOAD_H
#define GPUSHARE_PRELOAD_H

#include "../old_glibc.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "../cuda_types.h"
#include "lease_client.h"

#define API __attribute__((visibility("default")))

enum hook {
#define HOOK(kind, name) HOOK_##name,
#include "hooks.h"
#undef HOOK
    HOOKS
};

/* preload.c: the driver's function behind a hook, and one without a hook (kept in `kept`); NULL
 * while there is none. */
void *real_of(unsigned hook);
void *plain_function(void *_Atomic *kept, const char *name);

#define REAL(name) ((__typeof__(&name))real_of(HOOK_##name))
/* In a wrapper: `real` is the driver's function of the same name. */
#define FIND_REAL(name)                    \
    __typeof__(&name) real = REAL(name);   \
    if (!real)                             \
    return CUDA_ERROR_NOT_INITIALIZED

/* preload_symbols.c.  The first definition of a name in the process other than `ours`; NULL: none. */
void *search_symbol(const char *name, void *ours);

/* preload_memory.c.  Index in the limit page of an ordinal of this process, or -1. */
int page_device(CUdevice ordinal);
/* The current context's device, or -1; the current context, or NULL. */
CUdevice current_ordinal(void);
CUcontext current_context(void);
bool primary_is_active(CUdevice ordinal);

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

/* preload_pools.c */
struct pool;
/* A recorded allocation of the pool was freed. */
void pool_freed(struct pool *pool);
/* Charge what the pools of an ordinal (-1: all) reserve now; trim those of a device in the limit page. */
void settle_pools(CUdevice ordinal);
void trim_pools(int device);
void pools_in_child(void);

/* preload_records.c */
struct record {
    uint64_t key; /* address, or array handle; 0: none */
    uint64_t bytes;
    CUcontext context; /* its end frees the allocation */
    struct pool *pool; /* charged there, not here */
    CUdevice ordinal;
    int device; /* in the limit page */
    bool in_own_context;
};
void remember(struct record record);
struct record forget(uint64_t key);
void give_record(struct record record);
void forget_context(CUcontext context);
void forget_primary_context(CUdevice ordinal);
void remember_own_context(CUcontext context);

/* The bodies of wrappers.  `call` names the driver's function `real`. */
#define ALLOCATE(name, ordinal, size, key, call)             \
    lease_count(LEASE_WORK);                                 \
    FIND_REAL(name);                                         \
    struct taken taken = begin_allocation(ordinal, size);    \
    if (!taken.granted)                                      \
        return CUDA_ERROR_OUT_OF_MEMORY;                     \
    CUresult result = call;                                  \
    return end_allocation(taken, result, result ? 0 : (uint64_t)(key))

#define RELEASE(name, held, call)                            \
    lease_count(LEASE_CALLS);                                \
    FIND_REAL(name);                                         \
    struct record record = forget((uint64_t)(held));         \
    CUresult result = call;                                  \
    if (record.key && result)                                \
        remember(record);                                    \
    else                                                     \
        give_record(record);                                 \
    return result

/* preload_taints.c.  Whether this process sees more than one device, and whether one other than
 * `home` (in the limit page) is given access. */
bool has_peers(void);
bool opens_to_peer(const CUmemAccessDesc *access, size_t count, int home);

/* After fork, in the child. */
void records_in_child(void);
void mappings_in_child(void);

static inline CUresult tainted_by(CUresult result, enum gpushare_taint taint)
{
    if (!result)
        lease_taint(taint);
    return result;
}

#endif
