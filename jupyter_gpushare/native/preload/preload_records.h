/* What this process holds, by address. */
#ifndef GPUSHARE_PRELOAD_RECORDS_H
#define GPUSHARE_PRELOAD_RECORDS_H

#include <stdbool.h>
#include <stdint.h>

#include "../cuda_types.h"
#include "../hold.h"

struct pool;

struct record {
    uint64_t key; /* address, or array handle; 0: none */
    uint64_t bytes;
    CUcontext context; /* its end frees the allocation */
    struct pool *pool; /* whose charge has the bytes; NULL: they are charged themselves */
    CUdevice ordinal;
    int device; /* in the limit page */
    bool in_own_context;
    uint64_t serial; /* set by `remember` */
};
void remember(struct record record);
struct record forget(uint64_t key);
void give_record(struct record record);

/* The serial of the last record.  A caller reads it before it asks the driver to end a context: what is
 * remembered later may belong to a new context that has the handle of the old one. */
uint64_t last_record(void);
/* Give back every record of a context that has ended, up to a serial. */
void forget_context(CUcontext context, uint64_t last);
void forget_primary_context(CUdevice ordinal, uint64_t last);

/* A context of cuCtxCreate; `forget_own_context` returns whether it was one. */
void remember_own_context(CUcontext context);
bool forget_own_context(CUcontext context);

/* After fork, in the child. */
void records_in_child(void);

#endif
