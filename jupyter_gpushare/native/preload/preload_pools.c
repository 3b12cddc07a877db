/* Memory pools and graph memory of this process: the account charges what they reserve.  Their hooks
 * are in preload_pooled.c.
 *
 * Rules (CUDA Driver API reference 13.0, "Stream Ordered Memory Allocator", "Graph Management").
 *   - A pool keeps freed memory up to its release threshold, which frameworks set to all of the
 *     device, so the account charges what the pool has reserved
 *     (CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), not what is allocated from it.
 *   - The bytes of an allocation are taken before the driver is called; afterwards the charge
 *     becomes what the pool has reserved then.
 *   - A pool releases memory when a stream, an event or a context is synchronized, or when it is
 *     trimmed, so after those it is asked again.
 *   - Graph memory of a device is a pool without a handle (CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT).
 *     What a launch needs is not known before: a launch is denied once the limit is exceeded.
 *   - No lock across a call of the driver: what a pool has reserved is read between two looks at
 *     its version, which every change of the charge raises.
 */
#include "preload_pools.h"

#include <pthread.h>

#include "lease_client.h"
#include "preload_devices.h"
#include "preload_driver.h"

/* Further pools are charged by request, like other allocations. */
enum { POOLS = 128, SETTLE_TRIES = 8 };
enum { MEMPOOL_RESERVED_CURRENT = 5, MEMPOOL_USED_CURRENT = 7, GRAPH_RESERVED_CURRENT = 2, GRAPH_USED_CURRENT = 0 };

static pthread_mutex_t pools_lock = PTHREAD_MUTEX_INITIALIZER;
static struct pool pools[POOLS];
static _Atomic bool any_dirty; /* a pool may release memory at the next synchronisation */

/* The parent's memory is not the child's. */
void pools_in_child(void)
{
    pthread_mutex_init(&pools_lock, NULL);
    memset(pools, 0, sizeof pools);
}

/* ---- what the driver says ---- */

typedef CUresult pool_attribute(CUmemoryPool, int, void *);
typedef CUresult graph_attribute(CUdevice, int, void *);
typedef CUresult device_pool(CUmemoryPool *, CUdevice);

static bool read_bytes(const struct pool *pool, bool used, uint64_t *bytes)
{
    static void *_Atomic of_pool, *_Atomic of_graph;
    pool_attribute *ask_pool = (pool_attribute *)plain_function(&of_pool, "cuMemPoolGetAttribute");
    graph_attribute *ask_graph = (graph_attribute *)plain_function(&of_graph, "cuDeviceGetGraphMemAttribute");
    if (pool->is_graph)
        return ask_graph && !ask_graph(pool->ordinal, used ? GRAPH_USED_CURRENT : GRAPH_RESERVED_CURRENT, bytes);
    return ask_pool && !ask_pool(pool->handle, used ? MEMPOOL_USED_CURRENT : MEMPOOL_RESERVED_CURRENT, bytes);
}

CUmemoryPool pool_of_device(CUdevice ordinal, bool is_default)
{
    static void *_Atomic current, *_Atomic initial;
    CUmemoryPool pool = NULL;
    device_pool *ask = is_default ? (device_pool *)plain_function(&initial, "cuDeviceGetDefaultMemPool")
                                  : (device_pool *)plain_function(&current, "cuDeviceGetMemPool");
    return ask && !ask(&pool, ordinal) ? pool : NULL;
}

/* ---- the table ---- */

struct pool *pool_with(CUmemoryPool handle, CUdevice ordinal, bool is_graph)
{
    struct pool *found = NULL, *unused = NULL;
    for (int pass = 0; !found && pass < 2; pass++) {
        if (pass && ordinal < 0)
            for (ordinal = 0; ordinal < GPUSHARE_DEVICES && pool_of_device(ordinal, true) != handle; ordinal++) {
            }
        if (pass && ordinal == GPUSHARE_DEVICES)
            ordinal = current_ordinal();
        int device = pass ? page_device(ordinal) : -1;
        pthread_mutex_lock(&pools_lock);
        for (int i = 0; i < POOLS && !found; i++) {
            struct pool *pool = &pools[i];
            bool is_it = is_graph ? pool->is_graph && pool->ordinal == ordinal : pool->handle == handle;
            if (pool->is_used && pool->is_graph == is_graph && !pool->is_destroyed && is_it)
                found = pool;
            unused = !pool->is_used && !unused ? pool : unused;
        }
        if (!found && device >= 0 && unused) {
            found = unused;
            *found = (struct pool){.handle = handle, .ordinal = ordinal, .device = device, .is_used = true,
                                   .is_graph = is_graph, .version = found->version + 1};
        }
        pthread_mutex_unlock(&pools_lock);
    }
    return found;
}

void settle_pool(struct pool *pool, uint64_t mine)
{
    for (int tries = 0;; tries++) {
        uint64_t reserved = 0, used = 0;
        pthread_mutex_lock(&pools_lock);
        struct pool seen = *pool;
        pthread_mutex_unlock(&pools_lock);
        bool known = !seen.is_destroyed && read_bytes(&seen, false, &reserved) && read_bytes(&seen, true, &used);
        if (seen.is_destroyed && seen.live)
            reserved = seen.charged;
        else if (!seen.is_destroyed && !known)
            reserved = seen.charged + mine;
        pthread_mutex_lock(&pools_lock);
        bool is_last = pool->version == seen.version || tries == SETTLE_TRIES;
        uint64_t before = pool->charged + mine, after = reserved;
        if (is_last) {
            if (pool->version != seen.version && after < pool->charged)
                after = pool->charged; /* rather too much than too little */
            pool->charged = after;
            pool->pending -= mine;
            pool->version++;
            pool->is_used = !pool->is_destroyed || pool->live || pool->pending;
            if (known && reserved > used)
                atomic_store(&any_dirty, true);
        }
        int device = pool->device;
        pthread_mutex_unlock(&pools_lock);
        if (is_last) {
            lease_change(device, before, after);
            return;
        }
    }
}

void settle_pools(CUdevice ordinal)
{
    atomic_store(&any_dirty, false);
    for (int i = 0; i < POOLS; i++) {
        pthread_mutex_lock(&pools_lock);
        bool is_meant = pools[i].is_used && (ordinal < 0 || pools[i].ordinal == ordinal);
        pthread_mutex_unlock(&pools_lock);
        if (is_meant)
            settle_pool(&pools[i], 0);
    }
}

void trim_pools(int device)
{
    static void *_Atomic of_graph;
    CUresult (*trim)(CUmemoryPool, size_t) = real_of(HOOK_cuMemPoolTrimTo);
    CUresult (*trim_graph)(CUdevice) = (CUresult(*)(CUdevice))plain_function(&of_graph, "cuDeviceGraphMemTrim");
    for (int i = 0; i < POOLS; i++) {
        pthread_mutex_lock(&pools_lock);
        struct pool seen = pools[i];
        pthread_mutex_unlock(&pools_lock);
        if (!seen.is_used || seen.device != device || seen.is_destroyed)
            continue;
        if (seen.is_graph && trim_graph)
            trim_graph(seen.ordinal);
        else if (!seen.is_graph && trim)
            trim(seen.handle, 0);
        settle_pool(&pools[i], 0);
    }
}

void settle_released(void)
{
    if (atomic_load_explicit(&any_dirty, memory_order_relaxed))
        settle_pools(-1);
}

void pool_awaits(struct pool *pool, uint64_t bytes)
{
    pthread_mutex_lock(&pools_lock);
    pool->pending += bytes;
    pthread_mutex_unlock(&pools_lock);
}

void pool_allocated(struct pool *pool)
{
    pthread_mutex_lock(&pools_lock);
    pool->live++;
    pthread_mutex_unlock(&pools_lock);
}

void pool_freed(struct pool *pool)
{
    pthread_mutex_lock(&pools_lock);
    pool->live--;
    bool ends = pool->is_destroyed && !pool->live;
    pthread_mutex_unlock(&pools_lock);
    atomic_store(&any_dirty, true);
    if (ends)
        settle_pool(pool, 0);
}

void pool_destroyed(CUmemoryPool handle)
{
    struct pool *destroyed = NULL;
    pthread_mutex_lock(&pools_lock);
    for (int i = 0; i < POOLS && !destroyed; i++)
        if (pools[i].is_used && !pools[i].is_graph && !pools[i].is_destroyed && pools[i].handle == handle) {
            destroyed = &pools[i];
            destroyed->is_destroyed = true;
        }
    pthread_mutex_unlock(&pools_lock);
    if (destroyed)
        settle_pool(destroyed, 0);
}

struct pool *graph_memory(void)
{
    struct pool *found = NULL;
    CUdevice ordinal = -1;
    pthread_mutex_lock(&pools_lock);
    bool any = false;
    for (int i = 0; i < POOLS && !any; i++)
        any = pools[i].is_used && pools[i].is_graph;
    pthread_mutex_unlock(&pools_lock);
    if (!any || (ordinal = current_ordinal()) < 0)
        return NULL;
    pthread_mutex_lock(&pools_lock);
    for (int i = 0; i < POOLS && !found; i++)
        found = pools[i].is_used && pools[i].is_graph && pools[i].ordinal == ordinal ? &pools[i] : NULL;
    pthread_mutex_unlock(&pools_lock);
    return found;
}
