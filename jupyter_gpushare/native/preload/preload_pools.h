/* Memory pools and graph memory of this process, and what the account charges for them. */
#ifndef GPUSHARE_PRELOAD_POOLS_H
#define GPUSHARE_PRELOAD_POOLS_H

#include <stdbool.h>
#include <stdint.h>

#include "../cuda_types.h"
#include "../hold.h"

/* Streams are told apart by a number below STREAMS, which several may share. */
enum { STREAMS = 32, NO_STREAM = -1, ALL_STREAMS = -2 };
int stream_number(CUstream stream, bool per_thread);

enum pool_kind { POOL_UNKNOWN, POOL_OF_DEVICE, POOL_OF_GRAPHS, POOL_OF_HOST, POOL_MANAGED };

struct pool_place {
    enum pool_kind kind;
    CUdevice ordinal; /* -1: none, or not known */
};

struct pool {
    CUmemoryPool handle;
    struct pool_place place;
    int device; /* in the limit page; -1: nothing is charged for the pool itself */
    bool is_used, is_destroyed;
    bool is_due;         /* may release memory at the next synchronisation, whatever that covers */
    uint64_t charged;    /* to the account: what the pool had reserved when it was asked */
    uint64_t live_bytes; /* of its recorded allocations */
    uint64_t promised;   /* of what is charged, to allocations under way */
    uint64_t freed[STREAMS]; /* bytes, since a synchronisation of the stream */
    unsigned under_way;  /* allocations */
    uint64_t version;
};

/* What an allocation under way counts on: bytes of the pool's free part, and bytes taken from the account. */
struct pool_share {
    uint64_t promised, taken;
    int stream;
    bool is_set;
};

/* What a pool with these properties is made of. */
struct pool_place pool_place(int allocation_type, CUmemLocation location);
/* The pool, added where it is new.  `place` becomes what is known of it, also where the answer is NULL:
 * the table is full, or the device is not the lease's.  A managed pool is put on record as a taint. */
struct pool *pool_with(CUmemoryPool handle, struct pool_place *place);
/* The same without adding it: an imported pool is the exporter's. */
struct pool_place place_of_pool(CUmemoryPool handle);
/* The current pool of a device, or its first one; NULL: the driver has none. */
CUmemoryPool pool_of_device(CUdevice ordinal, bool is_default);
/* The graph memory of the current device, where a graph of this process may use any; else NULL. */
struct pool *graph_memory(void);

/* Count on the pool's free part for an allocation in a stream; the rest, `taken`, in pages, is still to be
 * taken from the account.  `settle_pool` ends the share. */
struct pool_share share_pool(struct pool *pool, uint64_t bytes, int stream);
/* Charge what the pool has reserved now, in place of what was charged before and of `mine`, the share of
 * an allocation of so many bytes that ends here (0: it failed).  Whether the charge grew. */
bool settle_pool(struct pool *pool, struct pool_share mine, uint64_t allocated);
/* The same where no allocation ends: of one pool, and of the pools of an ordinal (-1: all). */
void ask_pool(struct pool *pool);
void ask_pools(CUdevice ordinal);

/* A recorded allocation of the pool was freed in a stream (NO_STREAM: at once); the pool may release memory
 * at the next synchronisation for another reason. */
void pool_freed(struct pool *pool, uint64_t bytes, int stream);
void pool_may_release(struct pool *pool);
/* Whether a synchronisation may release memory; then ask after one of a stream, of ALL_STREAMS of an
 * ordinal, or of one that is not known (NO_STREAM). */
bool pools_may_release(void);
void pools_synchronized(int stream, CUdevice ordinal);
/* The pool with this handle was destroyed. */
/* Before the driver destroys it, so that no thread gives it the handle afterwards; NULL: not known.  Then
 * whether it did. */
struct pool *pool_ends(CUmemoryPool handle);
void pool_ended(struct pool *ending, CUmemoryPool handle, bool is_gone);

/* Trim the pools of a device in the limit page; whether the lease is beyond its limit there. */
void trim_pools(int device);
bool exceeds_limit(int device);

/* After fork, in the child. */
void pools_in_child(void);

#endif
