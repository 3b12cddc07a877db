/* The allocations of this process, by address. */
#ifndef GPUSHARE_PRELOAD_RECORDS_H
#define GPUSHARE_PRELOAD_RECORDS_H

#include <stdbool.h>
#include <stdint.h>

#include "../cuda_types.h"
#include "../hold.h"

struct pool;

struct record {
    uint64_t key; /* address, or array handle; 0 if there is no record */
    uint64_t bytes;
    CUcontext context; /* its end frees the allocation */
    struct pool *pool; /* the pool whose charge includes the bytes; NULL if they are charged by themselves */
    CUdevice ordinal;
    int device; /* in the limit page */
    bool in_own_context;
    uint64_t serial; /* set by `remember` */
};
void remember(struct record record);
struct record forget(uint64_t key);
void give_record(struct record record);

/* Returns the serial of the last record.  A caller reads it before the driver ends a context, because a later
 * record may belong to a new context with the same handle. */
uint64_t last_record(void);
/* Gives back every record up to a serial of a context that has ended. */
void forget_context(CUcontext context, uint64_t last);
void forget_primary_context(CUdevice ordinal, uint64_t last);

/* A context of cuCtxCreate; `forget_own_context` returns whether it was one. */
void remember_own_context(CUcontext context);
bool forget_own_context(CUcontext context);

/* Called in the child after fork. */
void records_in_child(void);

#endif
