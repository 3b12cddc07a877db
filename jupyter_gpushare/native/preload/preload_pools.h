/* Memory pools and graph memory of this process, and their charge in the account. */
#ifndef GPUSHARE_PRELOAD_POOLS_H
#define GPUSHARE_PRELOAD_POOLS_H

#include <stdbool.h>
#include <stdint.h>

#include "../cuda_types.h"
#include "../hold.h"

/* A stream has a number below STREAMS, which several streams may share. */
enum { STREAMS = 32, NO_STREAM = -1, ALL_STREAMS = -2 };
int stream_number(CUstream stream, bool per_thread);

enum pool_kind { POOL_UNKNOWN, POOL_OF_DEVICE, POOL_OF_GRAPHS, POOL_OF_HOST, POOL_MANAGED };

struct pool_place {
    enum pool_kind kind;
    CUdevice ordinal; /* -1 if there is none, or it is unknown */
};

struct pool {
    CUmemoryPool handle;
    struct pool_place place;
    int device; /* in the limit page; -1 if nothing is charged for the pool itself */
    bool is_used, is_destroyed;
    bool is_due;         /* may release memory at the next synchronisation of any kind */
    uint64_t charged;    /* bytes in the account: the pool's reserved memory when it was last read */
    uint64_t live_bytes; /* of its recorded allocations */
    uint64_t promised;   /* charged bytes that are for allocations in progress */
    uint64_t freed[STREAMS]; /* bytes freed since the last synchronisation of the stream */
    unsigned under_way;  /* number of allocations in progress */
    uint64_t version;
};

/* The bytes for an allocation in progress: from the pool's free part (`promised`), and from the account (`taken`). */
struct pool_share {
    uint64_t promised, taken;
    int stream;
    bool is_set;
};

/* Returns the place of a pool with these properties. */
struct pool_place pool_place(int allocation_type, CUmemLocation location);
/* Returns the pool, added if it is new; NULL if the table is full or the device is not the lease's.  Writes
 * `place` in all cases.  A managed pool taints the process. */
struct pool *pool_with(CUmemoryPool handle, struct pool_place *place);
/* Returns the place of a pool without adding it, because an imported pool is the exporter's. */
struct pool_place place_of_pool(CUmemoryPool handle);
/* Returns the current pool of a device, or its default pool; NULL if the driver has none. */
CUmemoryPool pool_of_device(CUdevice ordinal, bool is_default);
/* Returns the graph memory of the current device if a graph of this process may use it, else NULL. */
struct pool *graph_memory(void);

/* Promises bytes of the pool's free part to an allocation in a stream.  The caller must take the rest, `taken`,
 * in pages, from the account.  `settle_pool` ends the share. */
struct pool_share share_pool(struct pool *pool, uint64_t bytes, int stream);
/* Charges the pool's reserved memory in place of its earlier charge and of `mine`, the share of an allocation
 * that has ended with `allocated` bytes (0 if it failed).  Returns whether the charge grew. */
bool settle_pool(struct pool *pool, struct pool_share mine, uint64_t allocated);
/* The same without an allocation: for one pool, and for the pools of an ordinal (-1: all). */
void ask_pool(struct pool *pool);
void ask_pools(CUdevice ordinal);

/* Called after a recorded allocation of the pool was freed in a stream (NO_STREAM: at once), and if the pool may
 * release memory at the next synchronisation for another reason. */
void pool_freed(struct pool *pool, uint64_t bytes, int stream);
void pool_may_release(struct pool *pool);
/* Whether a synchronisation may release memory.  If so, `pools_synchronized` is called after one of a stream, of
 * ALL_STREAMS of an ordinal, or of an unknown stream (NO_STREAM). */
bool pools_may_release(void);
void pools_synchronized(int stream, CUdevice ordinal);
/* `pool_ends` is called before the driver destroys a pool, so that a new pool with the same handle is not taken for
 * it; NULL if the pool is unknown.  `pool_ended` is called afterwards, with whether the pool is gone. */
struct pool *pool_ends(CUmemoryPool handle);
void pool_ended(struct pool *ending, CUmemoryPool handle, bool is_gone);

/* Trims the pools of a device in the limit page; returns whether the lease exceeds its limit on a device. */
void trim_pools(int device);
bool exceeds_limit(int device);

/* Called in the child after fork. */
void pools_in_child(void);

#endif
