/* The preload library's hooks of functions that make a process impossible to suspend. */
#include "preload_account.h"
#include "preload_devices.h"
#include "preload_pools.h"

#define TAINTS(taint, name, parameters, arguments)           \
    API CUresult name parameters                             \
    {                                                        \
        lease_enter(LEASE_CALLS);                                  \
        FIND_REAL(name);                                     \
        return tainted_by(real arguments, taint);            \
    }

typedef CUipcMemHandle CUipcEventHandle; /* 64 opaque bytes too */

TAINTS(GPUSHARE_TAINT_IPC, cuIpcGetMemHandle, (CUipcMemHandle * out, CUdeviceptr address), (out, address))
TAINTS(GPUSHARE_TAINT_IPC, cuIpcOpenMemHandle, (CUdeviceptr * out, CUipcMemHandle handle, unsigned flags),
       (out, handle, flags))
TAINTS(GPUSHARE_TAINT_IPC, cuIpcOpenMemHandle_v2, (CUdeviceptr * out, CUipcMemHandle handle, unsigned flags),
       (out, handle, flags))
TAINTS(GPUSHARE_TAINT_IPC, cuIpcGetEventHandle, (CUipcEventHandle * out, CUevent event), (out, event))
TAINTS(GPUSHARE_TAINT_IPC, cuIpcOpenEventHandle, (CUevent * out, CUipcEventHandle handle), (out, handle))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuMemImportFromShareableHandle,
       (CUmemGenericAllocationHandle * out, void *shared, int type), (out, shared, type))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuMemPoolExportToShareableHandle,
       (void *out, CUmemoryPool pool, int type, unsigned long long flags), (out, pool, type, flags))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuMemPoolImportFromShareableHandle,
       (CUmemoryPool * out, void *shared, int type, unsigned long long flags), (out, shared, type, flags))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuImportExternalMemory, (void **out, const void *description), (out, description))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuLogicalEndpointExport, (void *out, unsigned endpoint, int type), (out, endpoint, type))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuLogicalEndpointImport, (unsigned endpoint, const void *handle, int type),
       (endpoint, handle, type))
/* A descriptor for another driver (dma-buf, GPUDirect RDMA): CUDA Driver API reference 13.0. */
TAINTS(GPUSHARE_TAINT_EXPORTED, cuMemGetHandleForAddressRange,
       (void *out, CUdeviceptr address, size_t bytes, int type, unsigned long long flags),
       (out, address, bytes, type, flags))
TAINTS(GPUSHARE_TAINT_PEER, cuCtxEnablePeerAccess, (CUcontext peer, unsigned flags), (peer, flags))
TAINTS(GPUSHARE_TAINT_PEER, cuMulticastCreate, (CUmemGenericAllocationHandle * out, const void *properties),
       (out, properties))

/* Memory, frames and events of graphics interfaces (cudaGL.h, cudaEGL.h and cudaVDPAU.h of 13.5), and semaphores
 * of these or of another process.  Contexts for graphics are in preload_memory.c. */
typedef struct CUgraphicsResource_st *CUgraphicsResource;
TAINTS(GPUSHARE_TAINT_EXPORTED, cuGraphicsGLRegisterBuffer, (CUgraphicsResource * out, unsigned buffer, unsigned flags),
       (out, buffer, flags))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuGraphicsGLRegisterImage,
       (CUgraphicsResource * out, unsigned image, unsigned target, unsigned flags), (out, image, target, flags))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuGLRegisterBufferObject, (unsigned buffer), (buffer))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuGraphicsEGLRegisterImage, (CUgraphicsResource * out, void *image, unsigned flags),
       (out, image, flags))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuGraphicsVDPAURegisterVideoSurface,
       (CUgraphicsResource * out, unsigned surface, unsigned flags), (out, surface, flags))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuGraphicsVDPAURegisterOutputSurface,
       (CUgraphicsResource * out, unsigned surface, unsigned flags), (out, surface, flags))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuGraphicsMapResources, (unsigned count, CUgraphicsResource *all, CUstream stream),
       (count, all, stream))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuGraphicsMapResources_ptsz, (unsigned count, CUgraphicsResource *all, CUstream stream),
       (count, all, stream))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuEGLStreamConsumerConnect, (void **out, void *frames), (out, frames))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuEGLStreamConsumerConnectWithFlags, (void **out, void *frames, unsigned flags),
       (out, frames, flags))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuEGLStreamProducerConnect, (void **out, void *frames, int width, int height),
       (out, frames, width, height))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuEventCreateFromEGLSync, (CUevent * out, void *sync, unsigned flags), (out, sync, flags))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuImportExternalSemaphore, (void **out, const void *description), (out, description))

/* Managed variables of modules (`__managed__`), when a program or its CUDA runtime asks for the address of one. */
TAINTS(GPUSHARE_TAINT_MANAGED, cuLibraryGetManaged, (CUdeviceptr * out, size_t *bytes, void *library, const char *name),
       (out, bytes, library, name))

API CUresult cuModuleGetGlobal_v2(CUdeviceptr *out, size_t *bytes, CUmodule module, const char *name)
{
    enum { IS_MANAGED = 8 };
    static void *_Atomic kept;
    unsigned managed = 0;
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuModuleGetGlobal_v2);
    CUresult result = real(out, bytes, module, name);
    if (result || !out || !lease_is_set())
        return result;
    CUresult (*ask)(void *, int, CUdeviceptr) = (CUresult(*)(void *, int, CUdeviceptr))plain_function(&kept, "cuPointerGetAttribute");
    return ask && !ask(&managed, IS_MANAGED, *out) && managed ? tainted_by(result, GPUSHARE_TAINT_MANAGED) : result;
}

/* CUPTI (cupti_callbacks.h, cupti_activity.h and cupti_profiler_target.h of 12.9): a process that it
 * traces cannot be checkpointed (github.com/NVIDIA/cuda-checkpoint issue 15).  PyTorch always links the
 * library, but calls these functions only when torch.profiler starts. */
enum { CUPTI_ERROR_NOT_INITIALIZED = 15 };

#define TRACES(name, parameters, arguments)                          \
    API CUresult name parameters                                     \
    {                                                                \
        lease_enter(LEASE_CALLS);                                    \
        __typeof__(&name) real = REAL(name);                         \
        CUresult result = real ? real arguments : (CUresult)CUPTI_ERROR_NOT_INITIALIZED; \
        return tainted_by(result, GPUSHARE_TAINT_TRACED);            \
    }
TRACES(cuptiSubscribe, (void **out, void *callback, void *data), (out, callback, data))
TRACES(cuptiActivityEnable, (int kind), (kind))
TRACES(cuptiActivityEnableContext, (CUcontext context, int kind), (context, kind))
TRACES(cuptiActivityEnableAndDump, (int kind), (kind))
TRACES(cuptiProfilerInitialize, (void *parameters), (parameters))

API CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *access, size_t count)
{
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuMemPoolSetAccess);
    CUresult result = real(pool, access, count);
    if (result || !has_peers())
        return result;
    struct pool_place place = place_of_pool(pool);
    bool opens = place.kind != POOL_OF_HOST && opens_to_peer(access, count, page_device(place.ordinal));
    return opens ? tainted_by(result, GPUSHARE_TAINT_PEER) : result;
}
