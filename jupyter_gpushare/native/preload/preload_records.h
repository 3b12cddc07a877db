/* What this process holds, by address. */
#ifndef GPUSHARE_PRELOAD_RECORDS_H
#define GPUSHARE_PRELOAD_RECORDS_H

#include <stdbool.h>
#include <stdint.h>

#include "../cuda_types.h"

struct pool;

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

/* After fork, in the child. */
void records_in_child(void);

#endif
