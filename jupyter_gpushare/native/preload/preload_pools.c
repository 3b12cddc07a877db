/* The preload library's hooks of memory pools and of graphs that allocate.
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
#include "preload.h"

typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct CUgraphExec_st *CUgraphExec;

struct pool {
    CUmemoryPool handle;
    CUdevice ordinal;
    int device; /* in the limit page */
    bool is_used, is_graph, is_destroyed;
    uint64_t charged, pending; /* of the account: settled, and taken by allocations under way */
    uint64_t version;
    unsigned live; /* recorded allocations */
};

/* Further pools are charged by request, like other allocations. */
enum { POOLS = 128, SETTLE_TRIES = 8 };
enum { MEMPOOL_RESERVED_CURRENT = 5, MEMPOOL_USED_CURRENT = 7, GRAPH_RESERVED_CURRENT = 2, GRAPH_USED_CURRENT = 0 };

static const uint64_t page_bytes = (uint64_t)2 << 20;
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

static CUmemoryPool pool_of_device(CUdevice ordinal, bool is_default)
{
    static void *_Atomic current, *_Atomic initial;
    CUmemoryPool pool = NULL;
    device_pool *ask = is_default ? (device_pool *)plain_function(&initial, "cuDeviceGetDefaultMemPool")
                                  : (device_pool *)plain_function(&current, "cuDeviceGetMemPool");
    return ask && !ask(&pool, ordinal) ? pool : NULL;
}

static CUdevice ordinal_of_stream(CUstream stream)
{
    static void *_Atomic kept;
    CUdevice ordinal = -1;
    CUresult (*ask)(CUstream, CUdevice *) = (CUresult(*)(CUstream, CUdevice *))plain_function(&kept, "cuStreamGetDevice");
    if ((uintptr_t)stream > 2 && ask && !ask(stream, &ordinal)) /* 0 to 2: of the current context */
        return ordinal;
    return current_ordinal();
}

static bool is_capturing(CUstream stream, bool per_thread)
{
    static void *_Atomic legacy, *_Atomic of_thread;
    typedef CUresult is_capturing(CUstream, int *);
    int status = 0;
    is_capturing *ask = per_thread ? (is_capturing *)plain_function(&of_thread, "cuStreamIsCapturing_ptsz")
                                   : (is_capturing *)plain_function(&legacy, "cuStreamIsCapturing");
    return ask && !ask(stream, &status) && status;
}

/* ---- the table ---- */

/* The pool, added where it is new; `ordinal` -1: it has to be found out.  NULL: the table is full, or
 * the device is not the lease's. */
static struct pool *pool_with(CUmemoryPool handle, CUdevice ordinal, bool is_graph)
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

/* Charges what the pool has reserved now, in place of what was charged and of `mine`, which an
 * allocation that ends here has taken. */
static void settle(struct pool *pool, uint64_t mine)
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
            settle(&pools[i], 0);
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
        settle(&pools[i], 0);
    }
}

void pool_freed(struct pool *pool)
{
    pthread_mutex_lock(&pools_lock);
    pool->live--;
    bool ends = pool->is_destroyed && !pool->live;
    pthread_mutex_unlock(&pools_lock);
    atomic_store(&any_dirty, true);
    if (ends)
        settle(pool, 0);
}

/* ---- allocation ---- */

struct pooled {
    struct pool *pool; /* NULL: charged by request */
    struct taken taken;
};

/* On denial waits for what the stream has freed, so that the pool can release it. */
static struct pooled begin_pooled(CUmemoryPool handle, size_t bytes, CUstream stream, bool per_thread)
{
    struct pooled pooled = {NULL, {0, -1, -1, true}};
    CUdevice ordinal = lease_is_set() ? ordinal_of_stream(stream) : -1;
    if (ordinal < 0)
        return pooled; /* no lease, or the driver's own answer */
    pooled.taken.granted = lease_wait_for_turn();
    if (!pooled.taken.granted)
        return pooled;
    if (is_capturing(stream, per_thread)) {
        pool_with(NULL, ordinal, true);
        return pooled; /* takes memory when its graph is launched */
    }
    bool is_current = !handle;
    handle = is_current ? pool_of_device(ordinal, false) : handle;
    pooled.pool = handle ? pool_with(handle, is_current ? ordinal : -1, false) : NULL;
    if (!pooled.pool) {
        pooled.taken = begin_allocation(ordinal, bytes);
        return pooled;
    }
    struct taken *taken = &pooled.taken;
    taken->ordinal = pooled.pool->ordinal;
    taken->device = pooled.pool->device;
    taken->bytes = bytes <= UINT64_MAX / 4 ? (bytes + page_bytes - 1) / page_bytes * page_bytes : UINT64_MAX;
    CUresult (*wait)(CUstream) = real_of(per_thread ? HOOK_cuStreamSynchronize_ptsz : HOOK_cuStreamSynchronize);
    taken->granted = lease_take(taken->device, taken->bytes);
    if (!taken->granted && wait && !wait(stream))
        taken->granted = take_or_trim(taken->device, taken->bytes);
    if (taken->granted) {
        pthread_mutex_lock(&pools_lock);
        pooled.pool->pending += taken->bytes;
        pthread_mutex_unlock(&pools_lock);
    }
    return pooled;
}

static CUresult end_pooled(struct pooled pooled, CUresult result, CUdeviceptr address)
{
    struct pool *pool = pooled.pool;
    if (!pool)
        return end_allocation(pooled.taken, result, address);
    if (!result) {
        pthread_mutex_lock(&pools_lock);
        pool->live++;
        pthread_mutex_unlock(&pools_lock);
        remember((struct record){.key = address, .context = current_context(), .pool = pool,
                                 .ordinal = pool->ordinal, .device = pool->device});
    }
    settle(pool, pooled.taken.bytes);
    return result;
}

#define STREAM_ORDERED(suffix, per_thread)                                                                        \
    API CUresult cuMemAllocAsync##suffix(CUdeviceptr *out, size_t bytes, CUstream stream)                         \
    {                                                                                                             \
        lease_count(LEASE_WORK);                                                                                  \
        FIND_REAL(cuMemAllocAsync##suffix);                                                                       \
        struct pooled pooled = begin_pooled(NULL, bytes, stream, per_thread);                                     \
        if (!pooled.taken.granted)                                                                                \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                      \
        CUresult result = real(out, bytes, stream);                                                               \
        return end_pooled(pooled, result, result ? 0 : *out);                                                     \
    }                                                                                                             \
    API CUresult cuMemAllocFromPoolAsync##suffix(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream) \
    {                                                                                                             \
        lease_count(LEASE_WORK);                                                                                  \
        FIND_REAL(cuMemAllocFromPoolAsync##suffix);                                                               \
        struct pooled pooled = begin_pooled(pool, bytes, stream, per_thread);                                     \
        if (!pooled.taken.granted)                                                                                \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                      \
        CUresult result = real(out, bytes, pool, stream);                                                         \
        return end_pooled(pooled, result, result ? 0 : *out);                                                     \
    }                                                                                                             \
    API CUresult cuMemFreeAsync##suffix(CUdeviceptr address, CUstream stream)                                     \
    {                                                                                                             \
        RELEASE(cuMemFreeAsync##suffix, address, real(address, stream));                                          \
    }
STREAM_ORDERED(, false)
STREAM_ORDERED(_ptsz, true)

API CUresult cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *properties)
{
    lease_count(LEASE_CALLS);
    FIND_REAL(cuMemPoolCreate);
    CUresult result = real(out, properties);
    if (!result && lease_is_set() && properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        pool_with(*out, properties->location.id, false);
    if (!result && properties->handleTypes & CU_MEM_HANDLE_TYPE_FABRIC)
        lease_taint(GPUSHARE_TAINT_FABRIC);
    return result;
}

/* Allocations of a destroyed pool live on until they are freed. */
API CUresult cuMemPoolDestroy(CUmemoryPool handle)
{
    lease_count(LEASE_CALLS);
    FIND_REAL(cuMemPoolDestroy);
    CUresult result = real(handle);
    struct pool *destroyed = NULL;
    pthread_mutex_lock(&pools_lock);
    for (int i = 0; !result && i < POOLS && !destroyed; i++)
        if (pools[i].is_used && !pools[i].is_graph && !pools[i].is_destroyed && pools[i].handle == handle) {
            destroyed = &pools[i];
            destroyed->is_destroyed = true;
        }
    pthread_mutex_unlock(&pools_lock);
    if (destroyed)
        settle(destroyed, 0);
    return result;
}

/* ---- calls after which a pool may have released memory ---- */

#define SETTLES(counter, name, parameters, arguments)        \
    API CUresult name parameters                             \
    {                                                        \
        lease_count(counter);                                \
        FIND_REAL(name);                                     \
        CUresult result = real arguments;                    \
        if (atomic_load_explicit(&any_dirty, memory_order_relaxed)) \
            settle_pools(-1);                                \
        return result;                                       \
    }
SETTLES(LEASE_WORK, cuStreamSynchronize, (CUstream stream), (stream))
SETTLES(LEASE_WORK, cuStreamSynchronize_ptsz, (CUstream stream), (stream))
SETTLES(LEASE_WORK, cuCtxSynchronize, (void), ())
SETTLES(LEASE_WORK, cuCtxSynchronize_v2, (CUcontext context), (context))
SETTLES(LEASE_WORK, cuEventSynchronize, (CUevent event), (event))
SETTLES(LEASE_CALLS, cuMemPoolTrimTo, (CUmemoryPool pool, size_t keep), (pool, keep))
SETTLES(LEASE_CALLS, cuDeviceGraphMemTrim, (CUdevice ordinal), (ordinal))

/* ---- graphs ---- */

/* CUDA_MEM_ALLOC_NODE_PARAMS begins with the pool's properties. */
API CUresult cuGraphAddMemAllocNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                    CUmemPoolProps *parameters)
{
    lease_count(LEASE_CALLS);
    FIND_REAL(cuGraphAddMemAllocNode);
    CUresult result = real(out, graph, dependencies, count, parameters);
    if (!result && lease_is_set())
        pool_with(NULL, parameters->location.id, true);
    return result;
}

/* CUgraphNodeParams of cuda.h 13.5: the parameters of a node lie behind its type. */
struct node_parameters {
    int type, reserved[3];
    CUmemPoolProps pool; /* of CU_GRAPH_NODE_TYPE_MEM_ALLOC */
};
enum { GRAPH_NODE_MEM_ALLOC = 10 };

static CUresult after_node(CUresult result, const struct node_parameters *parameters)
{
    if (!result && lease_is_set() && parameters && parameters->type == GRAPH_NODE_MEM_ALLOC)
        pool_with(NULL, parameters->pool.location.id, true);
    return result;
}

API CUresult cuGraphAddNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                            struct node_parameters *parameters)
{
    lease_count(LEASE_CALLS);
    FIND_REAL(cuGraphAddNode);
    return after_node(real(out, graph, dependencies, count, parameters), parameters);
}

#define ADDS_NODE(name)                                                                                        \
    API CUresult name(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, const void *edges,     \
                      size_t count, struct node_parameters *parameters)                                        \
    {                                                                                                          \
        lease_count(LEASE_CALLS);                                                                              \
        FIND_REAL(name);                                                                                       \
        return after_node(real(out, graph, dependencies, edges, count, parameters), parameters);               \
    }
ADDS_NODE(cuGraphAddNode_v2)
ADDS_NODE(cuGraphAddNode_v3)

/* The graph memory of a device, where a graph of this process may use any. */
static struct pool *graph_memory(void)
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

static bool exceeds_limit(int device)
{
    struct lease_memory lease;
    return lease_memory(device, &lease) && lease.used_bytes > lease.limit_bytes;
}

#define LAUNCHES_GRAPH(name, counter)                                       \
    API CUresult name(CUgraphExec graph, CUstream stream)                   \
    {                                                                       \
        lease_count(counter);                                               \
        FIND_REAL(name);                                                    \
        struct pool *memory = lease_is_set() ? graph_memory() : NULL;       \
        if (memory && exceeds_limit(memory->device)) {                      \
            trim_pools(memory->device);                                     \
            if (exceeds_limit(memory->device))                              \
                return CUDA_ERROR_OUT_OF_MEMORY;                            \
        }                                                                   \
        CUresult result = real(graph, stream);                              \
        if (memory)                                                         \
            settle(memory, 0);                                              \
        return result;                                                      \
    }
LAUNCHES_GRAPH(cuGraphLaunch, LEASE_WORK)
LAUNCHES_GRAPH(cuGraphLaunch_ptsz, LEASE_WORK)
LAUNCHES_GRAPH(cuGraphUpload, LEASE_CALLS)
LAUNCHES_GRAPH(cuGraphUpload_ptsz, LEASE_CALLS)
