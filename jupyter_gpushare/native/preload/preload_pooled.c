/* The preload library's hooks of memory pools and of graphs that allocate; preload_pools.c has the rules. */
#include "preload_account.h"
#include "preload_devices.h"
#include "preload_pools.h"

typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct CUgraphExec_st *CUgraphExec;

static const uint64_t page_bytes = (uint64_t)2 << 20;

/* ---- what the driver says of a stream ---- */

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
    if (taken->granted)
        pool_awaits(pooled.pool, taken->bytes);
    return pooled;
}

static CUresult end_pooled(struct pooled pooled, CUresult result, CUdeviceptr address)
{
    struct pool *pool = pooled.pool;
    if (!pool)
        return end_allocation(pooled.taken, result, address);
    if (!result) {
        pool_allocated(pool);
        remember((struct record){.key = address, .context = current_context(), .pool = pool,
                                 .ordinal = pool->ordinal, .device = pool->device});
    }
    settle_pool(pool, pooled.taken.bytes);
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
    lease_enter(LEASE_CALLS);
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
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuMemPoolDestroy);
    CUresult result = real(handle);
    if (!result)
        pool_destroyed(handle);
    return result;
}

/* ---- calls after which a pool may have released memory ---- */

#define SETTLES(counter, name, parameters, arguments)        \
    API CUresult name parameters                             \
    {                                                        \
        lease_enter(counter);                                \
        FIND_REAL(name);                                     \
        CUresult result = real arguments;                    \
        settle_released();                                   \
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
    lease_enter(LEASE_CALLS);
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

static bool exceeds_limit(int device)
{
    struct lease_memory lease;
    return lease_memory(device, &lease) && lease.used_bytes > lease.limit_bytes;
}

#define LAUNCHES_GRAPH(name, counter)                                       \
    API CUresult name(CUgraphExec graph, CUstream stream)                   \
    {                                                                       \
        lease_enter(counter);                                               \
        FIND_REAL(name);                                                    \
        struct pool *memory = lease_is_set() ? graph_memory() : NULL;       \
        if (memory && exceeds_limit(memory->device)) {                      \
            trim_pools(memory->device);                                     \
            if (exceeds_limit(memory->device))                              \
                return CUDA_ERROR_OUT_OF_MEMORY;                            \
        }                                                                   \
        CUresult result = real(graph, stream);                              \
        if (memory)                                                         \
            settle_pool(memory, 0);                                              \
        return result;                                                      \
    }
LAUNCHES_GRAPH(cuGraphLaunch, LEASE_WORK)
LAUNCHES_GRAPH(cuGraphLaunch_ptsz, LEASE_WORK)
LAUNCHES_GRAPH(cuGraphUpload, LEASE_CALLS)
LAUNCHES_GRAPH(cuGraphUpload_ptsz, LEASE_CALLS)
