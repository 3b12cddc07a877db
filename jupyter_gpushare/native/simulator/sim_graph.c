/* The simulated libcuda.so.1: graphs that allocate, set memory and launch kernels.
 *
 * Facts (cuda.h 13.5): the parameters of a kernel node are copied when it is added; later changes of a
 * graph do not affect its executable graphs; a node is added after those that it depends on, so a launch
 * may run the nodes in the order in which they were added.
 * Facts (CUDA C++ Programming Guide 13.0, "Graph Memory Nodes"; comments of CUgraphMem_attribute in
 * cuda.h 13.5): memory of allocation nodes is backed when a graph is launched; the device keeps it
 * reserved for further launches until cuDeviceGraphMemTrim; used and reserved bytes are attributes of the
 * device.  In the simulator the memory of a graph is in use from its first launch until the end of the
 * executable graph, which is longer than with a node that frees it.
 */
#include <stdlib.h>
#include <string.h>

#include "sim_account.h"
#include "sim_stream.h"

/* A kernel, or a set of memory if there is no function. */
struct work {
    struct work *next;
    CUfunction function;
    uint64_t argument[SIM_KERNEL_ARGUMENTS];
    CUdeviceptr to;
    unsigned value, element_bytes;
    size_t count;
};

struct CUgraph_st {
    uint64_t bytes;
    CUdevice device;
    struct work *first; /* in the order in which nodes were added */
};

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

/* CUDA_KERNEL_NODE_PARAMS_v2 */
struct kernel_node {
    CUfunction function;
    unsigned grid[3], block[3], shared_bytes;
    void **arguments, **extra;
    void *kernel;
    CUcontext context;
};

/* CUDA_MEMSET_NODE_PARAMS */
struct set_node {
    CUdeviceptr to;
    size_t pitch;
    unsigned value, element_bytes;
    size_t width, height;
};

static uint64_t used[SIM_DEVICES], reserved[SIM_DEVICES]; /* by ordinal; guarded by sim_local */

API CUresult cuGraphCreate(CUgraph *out, unsigned flags)
{
    ENTER(SIM_NEED_INIT);
    if (!out || flags)
        return CUDA_ERROR_INVALID_VALUE;
    *out = sim_make_graph();
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static void free_all(struct work *first)
{
    for (struct work *next; first; first = next) {
        next = first->next;
        free(first);
    }
}

CUgraph sim_make_graph(void)
{
    return calloc(1, sizeof(struct CUgraph_st));
}

void sim_end_graph(CUgraph graph)
{
    free_all(graph->first);
    free(graph);
}

/* Appends a copy of `work` to the list. */
static CUresult append(struct work **list, struct work work)
{
    struct work *made = malloc(sizeof *made);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *made = work;
    made->next = NULL;
    while (*list)
        list = &(*list)->next;
    *list = made;
    return CUDA_SUCCESS;
}

CUresult sim_add_kernel(CUgraph graph, CUfunction function, void **arguments)
{
    struct work work = {.function = function};
    if (!function || (function->arguments && !arguments))
        return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < function->arguments; i++)
        memcpy(&work.argument[i], arguments[i], sizeof work.argument[i]);
    return append(&graph->first, work);
}

CUresult sim_add_set(CUgraph graph, CUdeviceptr to, unsigned value, unsigned element_bytes, size_t count)
{
    return append(&graph->first,
                  (struct work){.to = to, .value = value, .element_bytes = element_bytes, .count = count});
}

API CUresult cuGraphDestroy(CUgraph graph)
{
    ENTER(SIM_NEED_INIT);
    if (!graph)
        return CUDA_ERROR_INVALID_VALUE;
    sim_end_graph(graph);
    return CUDA_SUCCESS;
}

API CUresult cuGraphAddKernelNode_v2(void **node, CUgraph graph, const void *dependencies, size_t count,
                                     const struct kernel_node *parameters)
{
    ENTER(SIM_NEED_INIT);
    (void)dependencies, (void)count;
    if (!node || !graph || !parameters || parameters->extra)
        return CUDA_ERROR_INVALID_VALUE;
    *node = graph;
    return sim_add_kernel(graph, parameters->function, parameters->arguments);
}

API CUresult cuGraphAddMemsetNode(void **node, CUgraph graph, const void *dependencies, size_t count,
                                  const struct set_node *parameters, CUcontext context)
{
    ENTER(SIM_NEED_INIT);
    (void)dependencies, (void)count;
    if (!node || !graph || !parameters || !context || parameters->height != 1 || /* only one row is supported */
        (parameters->element_bytes != 1 && parameters->element_bytes != 2 && parameters->element_bytes != 4))
        return CUDA_ERROR_INVALID_VALUE;
    *node = graph;
    return sim_add_set(graph, parameters->to, parameters->value, parameters->element_bytes, parameters->width);
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
    parameters->address = (CUdeviceptr)1 << 46; /* reserved; it has no contents that could be copied */
    return CUDA_SUCCESS;
}

API CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags)
{
    ENTER(SIM_NEED_CONTEXT);
    (void)flags;
    if (!out || !graph)
        return CUDA_ERROR_INVALID_VALUE;
    CUgraphExec made = calloc(1, sizeof *made);
    bool whole = made != NULL;
    if (made)
        made->graph = (struct CUgraph_st){graph->bytes, graph->device, NULL};
    for (const struct work *work = graph->first; whole && work; work = work->next)
        whole = !append(&made->graph.first, *work);
    if (!whole) {
        free_all(made ? made->graph.first : NULL);
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = made;
    return CUDA_SUCCESS;
}

static CUresult run(const struct work *work, CUstream stream)
{
    void *arguments[SIM_KERNEL_ARGUMENTS];
    if (!work->function)
        return sim_set(stream, work->to, work->value, work->element_bytes, work->count);
    for (int i = 0; i < SIM_KERNEL_ARGUMENTS; i++)
        arguments[i] = (void *)(uintptr_t)&work->argument[i];
    return sim_launch(work->function, stream, arguments);
}

API CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
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
    for (const struct work *work = executable->graph.first; !result && work; work = work->next)
        result = run(work, stream);
    return result;
}

API CUresult cuGraphExecDestroy(CUgraphExec executable)
{
    ENTER(SIM_NEED_INIT);
    if (!executable)
        return CUDA_ERROR_INVALID_VALUE;
    HOLD(&sim_local);
    used[executable->graph.device] -= executable->is_launched ? executable->graph.bytes : 0;
    free_all(executable->graph.first);
    free(executable);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetGraphMemAttribute(CUdevice ordinal, int attribute, void *value)
{
    ENTER(SIM_NEED_INIT);
    if (sim_physical(ordinal) < 0 || attribute < 0 || attribute > 3)
        return CUDA_ERROR_INVALID_VALUE;
    HOLD(&sim_local);
    memcpy(value, attribute < 2 ? &used[ordinal] : &reserved[ordinal], sizeof *used);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGraphMemTrim(CUdevice ordinal)
{
    ENTER(SIM_NEED_INIT);
    if (sim_physical(ordinal) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    HOLD(&sim_local);
    if (reserved[ordinal] > used[ordinal])
        sim_refund(sim_me->visible[ordinal], reserved[ordinal] - used[ordinal], false, "free");
    reserved[ordinal] = used[ordinal];
    return CUDA_SUCCESS;
}
