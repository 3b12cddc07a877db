/* Memory pools and graph memory of this process: the account charges the memory that they reserve.  Their
 * hooks are in preload_pooled.c.
 *
 * Rules (CUDA Driver API reference 13.0, "Stream Ordered Memory Allocator", "Graph Management"; CUDA
 * Programming Guide 13.0, 4.3; comments of cuMemPoolCreate and cuMemPoolTrimTo in cuda.h 13.5).
 *   - A pool keeps freed memory up to its release threshold, which frameworks set to the size of the
 *     device.  So the account charges the memory that the pool has reserved
 *     (CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), not the memory allocated from it.
 *   - For a stream, the free part of a pool is its charge less its recorded allocations, less the bytes
 *     promised to allocations in progress, and less the bytes freed in other streams since these were
 *     synchronized: the driver reserves more before it makes a stream wait for another
 *     (cudaMemPoolReuseAllowInternalDependencies).  A request that fits takes nothing from the account.  For
 *     one that does not fit, the rest is taken before the driver is called.  Afterwards the charge becomes
 *     the pool's reserved memory; while other allocations are in progress, at least the allocated and promised
 *     bytes.
 *   - The driver may have to reserve more even for a request that fits, because the free part may be in
 *     pieces.  That is charged afterwards, even beyond the limit, because the driver already has it.
 *     Allocations in use stay within the limit.  The excess is free memory of pools, which is trimmed at
 *     once, and again at synchronisations until the lease is within its limit.
 *   - No function of this file waits for a stream: work in it may end only after this thread has enqueued
 *     more (github.com/tensorflow/tensorflow pull request 50699).  cuMemPoolTrimTo does not wait, and keeps
 *     memory whose free the host has not seen complete.  Frameworks that can wait synchronize after a denial
 *     and allocate again (the same; github.com/pytorch/pytorch pull request 188110).
 *   - A pool releases memory when a stream, an event or a context is synchronized, or when it is trimmed.
 *     Its reserved memory is read again after a trim.  It is read after a synchronisation if memory was freed
 *     since the last one of the same stream or of the device's context, or if its release threshold changed.
 *   - Pools of host memory take no device memory, so nothing is charged.  Managed pools are charged by
 *     request, like cuMemAllocManaged, and taint their process: it cannot be suspended.
 *   - Graph memory of a device is a pool without a handle (CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT).
 *     The need of a launch is not known in advance: a launch is denied once the limit is exceeded.
 *   - No lock is held across a call of the driver.  The reserved memory of a pool is read between two reads
 *     of its version, which every change of the charge raises.
 */
#include "preload_pools.h"

#include <pthread.h>

#include "lease_client.h"
#include "preload_devices.h"
#include "preload_driver.h"

/* Further pools of a device are charged by request, like other allocations. */
enum { POOLS = 128, MAX_SETTLE_TRIES = 8 };
enum { RESERVED_CURRENT = 5, ALLOCATION_TYPE = 9, LOCATION_ID = 11, LOCATION_TYPE = 12, GRAPH_RESERVED_CURRENT = 2 };

static const uint64_t page_bytes = (uint64_t)2 << 20;

static pthread_mutex_t pools_lock = PTHREAD_MUTEX_INITIALIZER;
static struct pool pools[POOLS];
static _Atomic bool any_freed; /* a pool may release memory at a synchronisation */

/* The parent's memory is not the child's. */
void pools_in_child(void)
{
    pthread_mutex_init(&pools_lock, NULL);
    memset(pools, 0, sizeof pools);
}

static uint64_t pages(uint64_t bytes)
{
    return bytes <= UINT64_MAX / 4 ? (bytes + page_bytes - 1) / page_bytes * page_bytes : UINT64_MAX;
}

bool exceeds_limit(int device)
{
    struct lease_memory lease;
    return lease_memory(device, &lease) && lease.used_bytes > lease.limit_bytes;
}

/* ---- the driver's answers ---- */

typedef CUresult pool_attribute(CUmemoryPool, int, void *);
typedef CUresult graph_attribute(CUdevice, int, void *);
typedef CUresult device_pool(CUmemoryPool *, CUdevice);

/* Also works for attributes with a value of 4 bytes. */
static bool ask_attribute(CUmemoryPool handle, int attribute, uint64_t *value)
{
    static void *_Atomic kept;
    pool_attribute *ask = (pool_attribute *)plain_function(&kept, "cuMemPoolGetAttribute");
    *value = 0;
    return ask && !ask(handle, attribute, value);
}

static bool read_reserved(const struct pool *pool, uint64_t *bytes)
{
    static void *_Atomic kept;
    graph_attribute *ask = (graph_attribute *)plain_function(&kept, "cuDeviceGetGraphMemAttribute");
    if (pool->place.kind == POOL_OF_GRAPHS)
        return ask && !ask(pool->place.ordinal, GRAPH_RESERVED_CURRENT, bytes);
    return ask_attribute(pool->handle, RESERVED_CURRENT, bytes);
}

CUmemoryPool pool_of_device(CUdevice ordinal, bool is_default)
{
    static void *_Atomic current, *_Atomic initial;
    CUmemoryPool pool = NULL;
    device_pool *ask = is_default ? (device_pool *)plain_function(&initial, "cuDeviceGetDefaultMemPool")
                                  : (device_pool *)plain_function(&current, "cuDeviceGetMemPool");
    return ask && !ask(&pool, ordinal) ? pool : NULL;
}

/* CU_MEM_LOCATION_TYPE_INVISIBLE is the memory of an imported pool, from which nothing is allocated. */
struct pool_place pool_place(int allocation_type, CUmemLocation location)
{
    CUdevice ordinal = ordinal_of_location(location);
    if (allocation_type == CU_MEM_ALLOCATION_TYPE_MANAGED)
        return (struct pool_place){POOL_MANAGED, ordinal};
    if (ordinal >= 0)
        return (struct pool_place){POOL_OF_DEVICE, ordinal};
    bool is_host = location.type >= CU_MEM_LOCATION_TYPE_HOST && location.type <= CU_MEM_LOCATION_TYPE_INVISIBLE;
    return (struct pool_place){is_host ? POOL_OF_HOST : POOL_UNKNOWN, -1};
}

/* Returns the place of a pool whose creation no hook saw.  Drivers before CUDA 13 do not answer, and have only
 * default pools of devices. */
static struct pool_place described_place(CUmemoryPool handle)
{
    struct pool_place place = {POOL_UNKNOWN, -1};
    uint64_t allocation, type, id;
    if (ask_attribute(handle, ALLOCATION_TYPE, &allocation) && ask_attribute(handle, LOCATION_TYPE, &type) &&
        ask_attribute(handle, LOCATION_ID, &id))
        place = pool_place((int)allocation, (CUmemLocation){(int)type, (int)id});
    for (CUdevice ordinal = 0; place.kind == POOL_UNKNOWN && ordinal < GPUSHARE_DEVICES; ordinal++)
        if (pool_of_device(ordinal, true) == handle)
            place = (struct pool_place){POOL_OF_DEVICE, ordinal};
    return place.kind == POOL_UNKNOWN ? (struct pool_place){POOL_OF_DEVICE, current_ordinal()} : place;
}

/* ---- the table ---- */

/* Under pools_lock. */
static struct pool *find_pool(CUmemoryPool handle, struct pool_place place)
{
    bool of_graphs = place.kind == POOL_OF_GRAPHS;
    for (struct pool *pool = pools; pool < pools + POOLS; pool++) {
        bool is_it = of_graphs ? pool->place.ordinal == place.ordinal : pool->handle == handle;
        if (pool->is_used && !pool->is_destroyed && (pool->place.kind == POOL_OF_GRAPHS) == of_graphs && is_it)
            return pool;
    }
    return NULL;
}

static struct pool *known_pool(CUmemoryPool handle, struct pool_place *place)
{
    HOLD(&pools_lock);
    struct pool *found = find_pool(handle, *place);
    if (found)
        *place = found->place;
    return found;
}

static struct pool *added_pool(CUmemoryPool handle, struct pool_place place)
{
    bool is_charged = place.kind == POOL_OF_DEVICE || place.kind == POOL_OF_GRAPHS;
    int device = is_charged ? page_device(place.ordinal) : -1;
    if (is_charged && device < 0)
        return NULL;
    HOLD(&pools_lock);
    struct pool *found = find_pool(handle, place);
    for (int i = 0; !found && i < POOLS; i++)
        if (!pools[i].is_used) {
            found = &pools[i];
            *found = (struct pool){.handle = handle, .place = place, .device = device, .is_used = true,
                                   .version = found->version + 1};
        }
    return found;
}

struct pool *pool_with(CUmemoryPool handle, struct pool_place *place)
{
    struct pool *found = known_pool(handle, place);
    if (!found) {
        if (place->kind == POOL_UNKNOWN)
            *place = described_place(handle);
        found = added_pool(handle, *place);
    }
    if (place->kind == POOL_MANAGED)
        lease_taint(GPUSHARE_TAINT_MANAGED);
    return found;
}

struct pool_place place_of_pool(CUmemoryPool handle)
{
    struct pool_place place = {POOL_UNKNOWN, -1};
    return known_pool(handle, &place) ? place : described_place(handle);
}

struct pool *graph_memory(void)
{
    bool any = false;
    pthread_mutex_lock(&pools_lock);
    for (int i = 0; i < POOLS && !any; i++)
        any = pools[i].is_used && pools[i].place.kind == POOL_OF_GRAPHS;
    pthread_mutex_unlock(&pools_lock);
    struct pool_place here = {POOL_OF_GRAPHS, any ? current_ordinal() : -1};
    return any ? known_pool(NULL, &here) : NULL;
}

/* ---- charges ---- */

/* Under pools_lock. */
static uint64_t freed_elsewhere(const struct pool *pool, int stream)
{
    uint64_t bytes = 0;
    for (int i = 0; i < STREAMS; i++)
        bytes += i == stream ? 0 : pool->freed[i];
    return bytes;
}

struct pool_share share_pool(struct pool *pool, uint64_t bytes, int stream)
{
    HOLD(&pools_lock);
    uint64_t held = pool->live_bytes + pool->promised + freed_elsewhere(pool, stream);
    uint64_t left = pool->charged > held ? pool->charged - held : 0;
    struct pool_share share = {bytes < left ? bytes : left, bytes > left ? pages(bytes - left) : 0, stream, true};
    pool->promised += share.promised;
    pool->under_way++;
    return share;
}

/* Under pools_lock.  Returns the charge for the pool with this many reserved bytes.  A destroyed pool cannot be
 * queried, and lives until its last allocation is freed. */
static uint64_t charge_for(const struct pool *pool, bool is_known, uint64_t reserved)
{
    uint64_t held = pages(pool->live_bytes + pool->promised);
    if (pool->is_destroyed)
        return pool->live_bytes ? pool->charged : 0;
    if (!is_known)
        return held > pool->charged ? held : pool->charged;
    return pool->promised && held > reserved ? held : reserved;
}

/* Under pools_lock.  No stream has freed more bytes than are unused. */
static void bound_freed(struct pool *pool, uint64_t reserved)
{
    uint64_t unused = reserved > pool->live_bytes ? reserved - pool->live_bytes : 0;
    for (int i = 0; i < STREAMS; i++)
        pool->freed[i] = pool->freed[i] < unused ? pool->freed[i] : unused;
}

bool settle_pool(struct pool *pool, struct pool_share mine, uint64_t allocated)
{
    for (int tries = 0;; tries++) {
        uint64_t reserved = 0;
        pthread_mutex_lock(&pools_lock);
        struct pool seen = *pool;
        pthread_mutex_unlock(&pools_lock);
        if (seen.device < 0)
            return false;
        bool is_known = !seen.is_destroyed && read_reserved(&seen, &reserved);
        pthread_mutex_lock(&pools_lock);
        bool is_changed = pool->version != seen.version;
        if (is_changed && tries < MAX_SETTLE_TRIES) {
            pthread_mutex_unlock(&pools_lock);
            continue;
        }
        if (allocated && mine.promised)
            pool->freed[mine.stream] -= mine.promised < pool->freed[mine.stream] ? mine.promised : pool->freed[mine.stream];
        pool->live_bytes += allocated;
        pool->promised -= mine.promised;
        pool->under_way -= mine.is_set;
        if (is_known)
            bound_freed(pool, reserved);
        uint64_t before = pool->charged + mine.taken, after = charge_for(pool, is_known, reserved);
        if (is_changed && after < pool->charged)
            after = pool->charged; /* too much is better than too little */
        pool->charged = after;
        pool->version++;
        pool->is_used = !pool->is_destroyed || pool->live_bytes || pool->under_way;
        lease_change(seen.device, before, after); /* in the order of the charges */
        pthread_mutex_unlock(&pools_lock);
        return after > before;
    }
}

void ask_pool(struct pool *pool)
{
    settle_pool(pool, (struct pool_share){0}, 0);
}

void ask_pools(CUdevice ordinal)
{
    for (struct pool *pool = pools; pool < pools + POOLS; pool++) {
        pthread_mutex_lock(&pools_lock);
        bool is_meant = pool->is_used && (ordinal < 0 || pool->place.ordinal == ordinal);
        pthread_mutex_unlock(&pools_lock);
        if (is_meant)
            ask_pool(pool);
    }
}

void trim_pools(int device)
{
    static void *_Atomic of_graph;
    CUresult (*trim)(CUmemoryPool, size_t) = real_of(HOOK_cuMemPoolTrimTo);
    CUresult (*trim_graph)(CUdevice) = (CUresult(*)(CUdevice))plain_function(&of_graph, "cuDeviceGraphMemTrim");
    for (struct pool *pool = pools; pool < pools + POOLS; pool++) {
        pthread_mutex_lock(&pools_lock);
        struct pool seen = *pool;
        pthread_mutex_unlock(&pools_lock);
        if (!seen.is_used || seen.device != device || seen.is_destroyed)
            continue;
        if (seen.place.kind == POOL_OF_GRAPHS && trim_graph)
            trim_graph(seen.place.ordinal);
        else if (seen.place.kind == POOL_OF_DEVICE && trim)
            trim(seen.handle, 0);
        ask_pool(pool);
    }
}

/* ---- frees and synchronisations ---- */

/* A thread's own default stream has the number of the thread. */
int stream_number(CUstream stream, bool per_thread)
{
    enum { LEGACY = 1, PER_THREAD = 2 };
    uint64_t key = (uintptr_t)stream;
    if (key == PER_THREAD || (!key && per_thread))
        key = (uint64_t)(uintptr_t)pthread_self();
    else if (key == LEGACY)
        key = 0;
    return (int)((key * 0x9e3779b97f4a7c15u >> 32) % STREAMS);
}

void pool_freed(struct pool *pool, uint64_t bytes, int stream)
{
    pthread_mutex_lock(&pools_lock);
    pool->live_bytes -= bytes < pool->live_bytes ? bytes : pool->live_bytes;
    if (stream >= 0)
        pool->freed[stream] += bytes;
    pool->is_due = pool->is_due || stream < 0;
    bool ends = pool->is_destroyed && !pool->live_bytes;
    pthread_mutex_unlock(&pools_lock);
    atomic_store(&any_freed, true);
    if (ends)
        ask_pool(pool);
}

void pool_may_release(struct pool *pool)
{
    pool_freed(pool, 0, NO_STREAM);
}

bool pools_may_release(void)
{
    return atomic_load_explicit(&any_freed, memory_order_relaxed);
}

void pools_synchronized(int stream, CUdevice ordinal)
{
    bool any_left = false;
    atomic_store(&any_freed, false);
    for (struct pool *pool = pools; pool < pools + POOLS; pool++) {
        pthread_mutex_lock(&pools_lock);
        bool is_due = pool->is_used && (pool->is_due || freed_elsewhere(pool, NO_STREAM));
        int device = pool->device;
        pool->is_due = false;
        if (stream >= 0)
            pool->freed[stream] = 0;
        else if (stream == ALL_STREAMS && pool->place.ordinal == ordinal)
            memset(pool->freed, 0, sizeof pool->freed);
        any_left = any_left || (is_due && freed_elsewhere(pool, NO_STREAM));
        pthread_mutex_unlock(&pools_lock);
        if (!is_due)
            continue;
        ask_pool(pool);
        if (exceeds_limit(device))
            trim_pools(device);
        if (exceeds_limit(device))
            pool_may_release(pool);
    }
    if (any_left)
        atomic_store(&any_freed, true);
}

struct pool *pool_ends(CUmemoryPool handle)
{
    HOLD(&pools_lock);
    struct pool *ending = find_pool(handle, (struct pool_place){POOL_UNKNOWN, -1});
    if (ending)
        ending->is_destroyed = true;
    return ending;
}

void pool_ended(struct pool *ending, CUmemoryPool handle, bool is_gone)
{
    pthread_mutex_lock(&pools_lock);
    if (ending->handle == handle) {
        ending->is_destroyed = is_gone;
        ending->is_used = ending->is_used && (!is_gone || ending->device >= 0);
    }
    pthread_mutex_unlock(&pools_lock);
    ask_pool(ending);
}
