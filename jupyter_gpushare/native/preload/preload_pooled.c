/* The preload library's hooks of memory pools and of graphs that allocate; preload_pools.c has the rules. */
#include "preload_account.h"
#include "preload_devices.h"
#include "preload_pools.h"
#include "preload_turns.h"

typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct CUgraphExec_st *CUgraphExec;

/* ---- the driver's answers about a stream ---- */

static CUdevice ordinal_of_stream(CUstream stream)
{
    static void *_Atomic kept;
    CUdevice ordinal = -1;
    CUresult (*ask)(CUstream, CUdevice *) = (CUresult(*)(CUstream, CUdevice *))plain_function(&kept, "cuStreamGetDevice");
    if ((uintptr_t)stream > 2 && ask && !ask(stream, &ordinal)) /* 0 to 2 are default streams of the context */
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

/* ---- allocation ---- */

struct pooled {
    struct pool *pool; /* NULL if charged by request, or not at all */
    struct pool_share share;
    uint64_t bytes;
    struct taken taken;
};

static uint64_t bytes_in_pool(size_t bytes)
{
    enum { UNIT = 512 };
    return bytes <= UINT64_MAX / 4 ? (bytes + UNIT - 1) / UNIT * UNIT : UINT64_MAX;
}

static struct pooled begin_pooled(CUmemoryPool handle, size_t bytes, CUstream stream, bool per_thread)
{
    struct pooled pooled = {.taken = {0, -1, -1, true}, .bytes = bytes_in_pool(bytes)};
    struct taken *taken = &pooled.taken;
    CUdevice ordinal = lease_is_set() ? ordinal_of_stream(stream) : -1;
    if (ordinal < 0)
        return pooled; /* there is no lease, or the driver answers itself */
    taken->granted = lease_wait_to_allocate();
    if (!taken->granted)
        return pooled;
    bool captures = is_capturing(stream, per_thread);
    struct pool_place place = handle ? (struct pool_place){POOL_UNKNOWN, -1} : (struct pool_place){POOL_OF_DEVICE, ordinal};
    handle = handle || captures ? handle : pool_of_device(ordinal, false);
    struct pool *pool = handle ? pool_with(handle, &place) : NULL;
    if (captures) { /* it takes memory when its graph is launched */
        place.kind = place.kind == POOL_OF_DEVICE ? POOL_OF_GRAPHS : place.kind;
        if (place.kind == POOL_OF_GRAPHS)
            pool_with(NULL, &place);
        return pooled;
    }
    if (place.kind == POOL_OF_HOST)
        return pooled;
    if (!pool || place.kind != POOL_OF_DEVICE) {
        *taken = begin_allocation(place.ordinal < 0 ? ordinal : place.ordinal, bytes);
        return pooled;
    }
    pooled.pool = pool;
    pooled.share = share_pool(pool, pooled.bytes, stream_number(stream, per_thread));
    *taken = (struct taken){pooled.share.taken, pool->place.ordinal, pool->device, true};
    taken->granted = !taken->bytes || take_or_trim(taken->device, taken->bytes);
    if (!taken->granted) {
        pooled.share.taken = 0;
        settle_pool(pool, pooled.share, 0);
    }
    return pooled;
}

static CUresult end_pooled(struct pooled pooled, CUresult result, CUdeviceptr address)
{
    struct pool *pool = pooled.pool;
    if (!pool)
        return end_allocation(pooled.taken, result, address);
    bool grew = settle_pool(pool, pooled.share, result ? 0 : pooled.bytes);
    if (!result)
        remember((struct record){.key = address, .bytes = pooled.bytes, .context = current_context(), .pool = pool,
                                 .ordinal = pool->place.ordinal, .device = pool->device});
    if (grew && exceeds_limit(pool->device))
        trim_pools(pool->device);
    if (grew && exceeds_limit(pool->device))
        pool_may_release(pool);
    if (grew)
        lease_get_beyond(pool->device);
    return result;
}

static CUresult free_in_order(CUdeviceptr address, CUresult (*real)(CUdeviceptr, CUstream), CUstream stream, bool per_thread)
{
    struct record record = forget((uint64_t)address);
    CUresult result = real(address, stream);
    if (record.key && result)
        remember(record);
    else if (record.pool)
        pool_freed(record.pool, record.bytes, stream_number(stream, per_thread));
    else
        give_record(record);
    return result;
}

#define STREAM_ORDERED(suffix, per_thread)                                                                        \
    API CUresult cuMemAllocAsync##suffix(CUdeviceptr *out, size_t bytes, CUstream stream)                         \
    {                                                                                                             \
        lease_enter(LEASE_WORK);                                                                                  \
        FIND_REAL(cuMemAllocAsync##suffix);                                                                       \
        struct pooled pooled = begin_pooled(NULL, bytes, stream, per_thread);                                     \
        if (!pooled.taken.granted)                                                                                \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                      \
        CUresult result = real(out, bytes, stream);                                                               \
        if (has_more(result, pooled.taken.device))                                                                \
            result = real(out, bytes, stream);                                                                    \
        return end_pooled(pooled, result, result ? 0 : *out);                                                     \
    }                                                                                                             \
    API CUresult cuMemAllocFromPoolAsync##suffix(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream) \
    {                                                                                                             \
        lease_enter(LEASE_WORK);                                                                                  \
        FIND_REAL(cuMemAllocFromPoolAsync##suffix);                                                               \
        struct pooled pooled = begin_pooled(pool, bytes, stream, per_thread);                                     \
        if (!pooled.taken.granted)                                                                                \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                      \
        CUresult result = real(out, bytes, pool, stream);                                                         \
        if (has_more(result, pooled.taken.device))                                                                \
            result = real(out, bytes, pool, stream);                                                              \
        return end_pooled(pooled, result, result ? 0 : *out);                                                     \
    }                                                                                                             \
    API CUresult cuMemFreeAsync##suffix(CUdeviceptr address, CUstream stream)                                     \
    {                                                                                                             \
        lease_enter(LEASE_CALLS);                                                                                 \
        FIND_REAL(cuMemFreeAsync##suffix);                                                                        \
        return free_in_order(address, real, stream, per_thread);                                                  \
    }
STREAM_ORDERED(, false)
STREAM_ORDERED(_ptsz, true)

/* ---- pools ---- */

static CUresult after_pool(CUresult result, const CUmemoryPool *pool, int allocation_type, const CUmemLocation *location)
{
    if (!result && lease_is_set()) {
        struct pool_place place = pool_place(allocation_type, *location);
        pool_with(*pool, &place);
    }
    return result;
}

API CUresult cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *properties)
{
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuMemPoolCreate);
    CUresult result = real(out, properties);
    if (!result && properties->handleTypes & CU_MEM_HANDLE_TYPE_FABRIC)
        lease_taint(GPUSHARE_TAINT_FABRIC);
    return result ? result : after_pool(result, out, properties->allocType, &properties->location);
}

#define NAMES_POOL(counter, name, parameters, arguments)              \
    API CUresult name parameters                                      \
    {                                                                 \
        lease_enter(counter);                                         \
        FIND_REAL(name);                                              \
        return after_pool(real arguments, out, type, location);       \
    }
NAMES_POOL(LEASE_QUERIES, cuMemGetDefaultMemPool, (CUmemoryPool *out, CUmemLocation *location, int type),
           (out, location, type))
NAMES_POOL(LEASE_QUERIES, cuMemGetMemPool, (CUmemoryPool *out, CUmemLocation *location, int type), (out, location, type))

API CUresult cuMemSetMemPool(CUmemLocation *location, int type, CUmemoryPool pool)
{
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuMemSetMemPool);
    return after_pool(real(location, type, pool), &pool, type, location);
}

enum { RELEASE_THRESHOLD = 4 };

/* A lower release threshold takes effect at the next synchronisation. */
API CUresult cuMemPoolSetAttribute(CUmemoryPool handle, int attribute, void *value)
{
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuMemPoolSetAttribute);
    CUresult result = real(handle, attribute, value);
    struct pool_place place = {POOL_UNKNOWN, -1};
    bool changes = !result && attribute == RELEASE_THRESHOLD && lease_is_set();
    struct pool *pool = changes ? pool_with(handle, &place) : NULL;
    if (pool)
        pool_may_release(pool);
    return result;
}

/* Allocations of a destroyed pool live on until they are freed. */
API CUresult cuMemPoolDestroy(CUmemoryPool handle)
{
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuMemPoolDestroy);
    struct pool *ending = pool_ends(handle);
    CUresult result = real(handle);
    if (ending)
        pool_ended(ending, handle, !result);
    return result;
}

/* ---- calls after which a pool may have released memory ---- */

#define SYNCHRONIZES(name, parameters, arguments, stream)                            \
    API CUresult name parameters                                                     \
    {                                                                                \
        lease_enter(LEASE_WORK);                                                     \
        FIND_REAL(name);                                                             \
        CUresult result = real arguments;                                            \
        if (pools_may_release())                                                     \
            pools_synchronized(result ? NO_STREAM : stream, current_ordinal());      \
        return result;                                                               \
    }
SYNCHRONIZES(cuStreamSynchronize, (CUstream stream), (stream), stream_number(stream, false))
SYNCHRONIZES(cuStreamSynchronize_ptsz, (CUstream stream), (stream), stream_number(stream, true))
SYNCHRONIZES(cuCtxSynchronize, (void), (), ALL_STREAMS)
SYNCHRONIZES(cuCtxSynchronize_v2, (CUcontext context), (context), context == current_context() ? ALL_STREAMS : NO_STREAM)
SYNCHRONIZES(cuEventSynchronize, (CUevent event), (event), NO_STREAM)

#define TRIMS(name, parameters, arguments) \
    API CUresult name parameters           \
    {                                      \
        lease_enter(LEASE_CALLS);          \
        FIND_REAL(name);                   \
        CUresult result = real arguments;  \
        ask_pools(-1);                     \
        return result;                     \
    }
TRIMS(cuMemPoolTrimTo, (CUmemoryPool pool, size_t keep), (pool, keep))
TRIMS(cuDeviceGraphMemTrim, (CUdevice ordinal), (ordinal))

/* ---- graphs ---- */

/* Host memory takes no device memory. */
static void graph_allocates(const CUmemPoolProps *properties)
{
    struct pool_place place = {POOL_OF_GRAPHS, ordinal_of_location(properties->location)};
    if (properties->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED)
        lease_taint(GPUSHARE_TAINT_MANAGED);
    if (place.ordinal >= 0)
        pool_with(NULL, &place);
}

/* CUDA_MEM_ALLOC_NODE_PARAMS begins with the pool's properties. */
API CUresult cuGraphAddMemAllocNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                    CUmemPoolProps *parameters)
{
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuGraphAddMemAllocNode);
    CUresult result = real(out, graph, dependencies, count, parameters);
    if (!result && lease_is_set())
        graph_allocates(parameters);
    return result;
}

/* CUgraphNodeParams of cuda.h 13.5: the parameters of a node follow its type. */
struct node_parameters {
    int type, reserved[3];
    CUmemPoolProps pool; /* for CU_GRAPH_NODE_TYPE_MEM_ALLOC */
};
enum { GRAPH_NODE_MEM_ALLOC = 10 };

static CUresult after_node(CUresult result, const struct node_parameters *parameters)
{
    if (!result && lease_is_set() && parameters && parameters->type == GRAPH_NODE_MEM_ALLOC)
        graph_allocates(&parameters->pool);
    return result;
}

API CUresult cuGraphAddNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                            struct node_parameters *parameters)
{
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuGraphAddNode);
    return after_node(real(out, graph, dependencies, count, parameters), parameters);
}

#define ADDS_NODE(name)                                                                                        \
    API CUresult name(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, const void *edges,     \
                      size_t count, struct node_parameters *parameters)                                        \
    {                                                                                                          \
        lease_enter(LEASE_CALLS);                                                                              \
        FIND_REAL(name);                                                                                       \
        return after_node(real(out, graph, dependencies, edges, count, parameters), parameters);               \
    }
ADDS_NODE(cuGraphAddNode_v2)
ADDS_NODE(cuGraphAddNode_v3)

#define LAUNCHES_GRAPH(name, enter)                                         \
    API CUresult name(CUgraphExec graph, CUstream stream)                   \
    {                                                                       \
        enter;                                                              \
        FIND_REAL(name);                                                    \
        struct pool *memory = lease_is_set() ? graph_memory() : NULL;       \
        if (memory && exceeds_limit(memory->device)) {                      \
            trim_pools(memory->device);                                     \
            if (exceeds_limit(memory->device))                              \
                return CUDA_ERROR_OUT_OF_MEMORY;                            \
        }                                                                   \
        CUresult result = real(graph, stream);                              \
        if (has_more(result, memory ? memory->device : -1))                 \
            result = real(graph, stream);                                   \
        if (memory) {                                                       \
            ask_pool(memory);                                               \
            lease_get_beyond(memory->device);                               \
        }                                                                   \
        return result;                                                      \
    }
LAUNCHES_GRAPH(cuGraphLaunch, enter_launch())
LAUNCHES_GRAPH(cuGraphLaunch_ptsz, enter_launch())
LAUNCHES_GRAPH(cuGraphUpload, lease_enter(LEASE_CALLS))
LAUNCHES_GRAPH(cuGraphUpload_ptsz, lease_enter(LEASE_CALLS))
