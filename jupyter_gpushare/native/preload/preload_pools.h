/* Memory pools and graph memory of this process, and what the account charges for them. */
#ifndef GPUSHARE_PRELOAD_POOLS_H
#define GPUSHARE_PRELOAD_POOLS_H

#include <stdbool.h>
#include <stdint.h>

#include "../cuda_types.h"

struct pool {
    CUmemoryPool handle;
    CUdevice ordinal;
    int device; /* in the limit page */
    bool is_used, is_graph, is_destroyed;
    uint64_t charged, pending; /* of the account: settled, and taken by allocations under way */
    uint64_t version;
    unsigned live; /* recorded allocations */
};

/* The pool, added where it is new; `ordinal` -1: it has to be found out.  NULL: the table is full, or
 * the device is not the lease's. */
struct pool *pool_with(CUmemoryPool handle, CUdevice ordinal, bool is_graph);
/* The current pool of a device, or its first one; NULL: the driver has none. */
CUmemoryPool pool_of_device(CUdevice ordinal, bool is_default);
/* The graph memory of the current device, where a graph of this process may use any; else NULL. */
struct pool *graph_memory(void);

/* Bytes that an allocation under way has taken from the account; `settle_pool` takes them back. */
void pool_awaits(struct pool *pool, uint64_t bytes);
/* A recorded allocation of the pool was made, or freed. */
void pool_allocated(struct pool *pool);
void pool_freed(struct pool *pool);
/* The pool with this handle was destroyed. */
void pool_destroyed(CUmemoryPool handle);

/* Charge what the pool has reserved now, in place of what was charged and of `mine`, which an
 * allocation that ends here has taken. */
void settle_pool(struct pool *pool, uint64_t mine);
/* The same for the pools of an ordinal (-1: all), and for all where one may have released memory. */
void settle_pools(CUdevice ordinal);
void settle_released(void);
/* Trim the pools of a device in the limit page. */
void trim_pools(int device);

/* After fork, in the child. */
void pools_in_child(void);

#endif
