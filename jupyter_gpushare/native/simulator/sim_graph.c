/* The simulated libcuda.so.1: graphs, as far as they allocate memory.
 *
 * Facts (CUDA C++ Programming Guide 13.0, "Graph Memory Nodes"; comments of CUgraphMem_attribute in
 * cuda.h 13.5): memory of allocation nodes is backed when a graph is launched; the device keeps it for
 * further launches, reserved, until cuDeviceGraphMemTrim; used and reserved bytes are attributes of the
 * device.  Here the memory of a graph is in use from its first launch to the end of the executable
 * graph, which is longer than with a node that frees it.
 */
#include <stdlib.h>
#include <string.h>

#include "sim_account.h"

typedef struct CUgraph_st {
    uint64_t bytes;
    CUdevice device;
} *CUgraph;

typedef struct CUgraphExec_st {
    struct CUgraph_st graph;
    bool is_launched;
} *CUgraphExec;

/* CUDA_MEM_ALLOC_NODE_PARAMS */
struct allocation_node {
    CUmemPoolProps properties;
    const CUmemAccessDesc *access;
    size_t access_count, bytes;
    CUdeviceptr address;
};

static uint64_t used[SIM_DEVICES], reserved[SIM_DEVICES]; /* by ordinal; guarded by sim_local */

API CUresult cuGraphCreate(CUgraph *out, unsigned flags)
{
    ENTER(SIM_NEED_INIT);
    if (!out || flags)
        return CUDA_ERROR_INVALID_VALUE;
    *out = calloc(1, sizeof **out);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuGraphDestroy(CUgraph graph)
{
    ENTER(SIM_NEED_INIT);
    free(graph);
    return graph ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGraphAddMemAllocNode(void **node, CUgraph graph, const void *dependencies, size_t count,
                                    struct allocation_node *parameters)
{
    ENTER(SIM_NEED_INIT);
    (void)dependencies, (void)count;
    if (!node || !graph || !parameters || sim_physical(parameters->properties.location.id) < 0)
        return CUDA_ERROR_INVALID_VALUE;
    graph->device = parameters->properties.location.id;
    graph->bytes += sim_pages(parameters->bytes);
    *node = graph;
    parameters->address = (CUdeviceptr)1 << 46; /* reserved, and backed by nothing that can be copied */
    return CUDA_SUCCESS;
}

API CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags)
{
    ENTER(SIM_NEED_CONTEXT);
    (void)flags;
    if (!out || !graph)
        return CUDA_ERROR_INVALID_VALUE;
    *out = calloc(1, sizeof **out);
    if (*out)
        (*out)->graph = *graph;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    (void)stream;
    if (!executable)
        return CUDA_ERROR_INVALID_VALUE;
    CUdevice device = executable->graph.device;
    pthread_mutex_lock(&sim_local);
    uint64_t need = used[device] + (executable->is_launched ? 0 : executable->graph.bytes);
    uint64_t growth = need > reserved[device] ? need - reserved[device] : 0;
    CUresult result = growth ? sim_charge(sim_me->visible[device], growth, false, "alloc") : CUDA_SUCCESS;
    if (!result) {
        used[device] = need;
        reserved[device] += growth;
        executable->is_launched = true;
    }
    pthread_mutex_unlock(&sim_local);
    return result;
}

API CUresult cuGraphExecDestroy(CUgraphExec executable)
{
    ENTER(SIM_NEED_INIT);
    if (!executable)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim_local);
    used[executable->graph.device] -= executable->is_launched ? executable->graph.bytes : 0;
    pthread_mutex_unlock(&sim_local);
    free(executable);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetGraphMemAttribute(CUdevice ordinal, int attribute, void *value)
{
    ENTER(SIM_NEED_INIT);
    if (sim_physical(ordinal) < 0 || attribute < 0 || attribute > 3)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim_local);
    memcpy(value, attribute < 2 ? &used[ordinal] : &reserved[ordinal], sizeof *used);
    pthread_mutex_unlock(&sim_local);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGraphMemTrim(CUdevice ordinal)
{
    ENTER(SIM_NEED_INIT);
    if (sim_physical(ordinal) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&sim_local);
    if (reserved[ordinal] > used[ordinal])
        sim_refund(sim_me->visible[ordinal], reserved[ordinal] - used[ordinal], false, "free");
    reserved[ordinal] = used[ordinal];
    pthread_mutex_unlock(&sim_local);
    return CUDA_SUCCESS;
}

#define ALSO(name, suffix) extern __typeof__(name) name##suffix __attribute__((alias(#name), visibility("default")))
ALSO(cuGraphLaunch, _ptsz);
