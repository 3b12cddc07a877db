/* What the parts of the preload library share; preload.c has the rules. */
#ifndef GPUSHARE_PRELOAD_H
#define GPUSHARE_PRELOAD_H

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_types.h"
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

/* preload_memory.c.  Index in the limit page of an ordinal of this process, or -1. */
int page_device(CUdevice ordinal);
/* The current context's device, or -1. */
CUdevice current_ordinal(void);

/* An allocation under way: its bytes are taken from the account, where it is granted. */
struct taken {
    uint64_t bytes;
    int device;
    bool granted;
};

/* Waits for the lease's turn.  `ordinal` -1: the current context's device, and without one the
 * driver's own answer. */
struct taken begin_allocation(CUdevice ordinal, uint64_t bytes);

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
