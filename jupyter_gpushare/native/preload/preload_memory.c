/* The preload library's hooks of memory and contexts.  Bytes are taken from the account before the driver
 * is called, and given back when it refuses or frees.  Physical memory is in preload_virtual.c, pools and
 * graphs in preload_pooled.c, arrays in preload_arrays.c. */
#include "preload_account.h"
#include "preload_devices.h"
#include "preload_pools.h"
#include "preload_turns.h"

/* ---- memory ---- */

API CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes)
{
    ALLOCATE(cuMemAlloc_v2, -1, bytes, *out, real(out, bytes));
}

/* The driver chooses the alignment of the pitch, so far 512 bytes or less; this charges 512 in advance. */
API CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element)
{
    size_t row = width <= SIZE_MAX - 511 ? (width + 511) / 512 * 512 : width;
    size_t bytes = height && row > SIZE_MAX / height ? SIZE_MAX : row * height;
    ALLOCATE(cuMemAllocPitch_v2, -1, bytes, *out, real(out, pitch, width, height, element));
}

API CUresult cuMemFree_v2(CUdeviceptr address)
{
    RELEASE(cuMemFree_v2, address, real(address));
}

API CUresult cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned flags)
{
    ALLOCATE(cuMemAllocManaged, -1, bytes, *out, tainted_by(real(out, bytes, flags), GPUSHARE_TAINT_MANAGED));
}

/* ---- contexts ---- */

API CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice ordinal)
{
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuDevicePrimaryCtxRetain);
    if (!lease_wait_to_allocate() || !may_use(ordinal))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = real(out, ordinal);
    if (has_more(result, page_device(ordinal)))
        result = real(out, ordinal);
    if (!result)
        note_use(ordinal);
    return result;
}

/* The runtime creates primary contexts unseen, through a private table of the driver, and then calls this. */
API CUresult cuCtxSetCurrent(CUcontext context)
{
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuCtxSetCurrent);
    CUresult result = real(context);
    if (!result && context && lease_is_set()) {
        current_ordinal();
        turns_note(context);
    }
    return result;
}

#define CREATES_CONTEXT(taint, name, parameters, arguments)  \
    API CUresult name parameters                             \
    {                                                        \
        lease_enter(LEASE_CALLS);                            \
        FIND_REAL(name);                                     \
        if (!lease_wait_to_allocate() || !may_use(ordinal)) \
            return CUDA_ERROR_OUT_OF_MEMORY;                 \
        CUresult result = real arguments;                    \
        if (has_more(result, page_device(ordinal)))          \
            result = real arguments;                         \
        if (!result) {                                       \
            note_use(ordinal);                                  \
            remember_own_context(*out);                      \
            turns_note(*out);                                \
        }                                                    \
        return tainted_by(result, taint);                    \
    }
CREATES_CONTEXT(0, cuCtxCreate, (CUcontext * out, unsigned flags, CUdevice ordinal), (out, flags, ordinal))
CREATES_CONTEXT(0, cuCtxCreate_v2, (CUcontext * out, unsigned flags, CUdevice ordinal), (out, flags, ordinal))
CREATES_CONTEXT(0, cuCtxCreate_v3, (CUcontext * out, void *affinity, int count, unsigned flags, CUdevice ordinal),
                (out, affinity, count, flags, ordinal))

/* CUctxCreateParams of cuda.h 13.5: with `graphics` the context shares data with Vulkan. */
struct context_parameters {
    void *affinity;
    int affinity_count;
    void *graphics;
};
CREATES_CONTEXT(parameters && parameters->graphics ? GPUSHARE_TAINT_EXPORTED : 0, cuCtxCreate_v4,
                (CUcontext * out, struct context_parameters *parameters, unsigned flags, CUdevice ordinal),
                (out, parameters, flags, ordinal))

/* For OpenGL and VDPAU (cudaGL.h, cudaVDPAU.h). */
CREATES_CONTEXT(GPUSHARE_TAINT_EXPORTED, cuGLCtxCreate, (CUcontext * out, unsigned flags, CUdevice ordinal),
                (out, flags, ordinal))
CREATES_CONTEXT(GPUSHARE_TAINT_EXPORTED, cuGLCtxCreate_v2, (CUcontext * out, unsigned flags, CUdevice ordinal),
                (out, flags, ordinal))
CREATES_CONTEXT(GPUSHARE_TAINT_EXPORTED, cuVDPAUCtxCreate,
                (CUcontext * out, unsigned flags, CUdevice ordinal, unsigned display, void *find),
                (out, flags, ordinal, display, find))
CREATES_CONTEXT(GPUSHARE_TAINT_EXPORTED, cuVDPAUCtxCreate_v2,
                (CUcontext * out, unsigned flags, CUdevice ordinal, unsigned display, void *find),
                (out, flags, ordinal, display, find))

static CUresult after_primary(CUresult result, CUdevice ordinal, uint64_t last)
{
    if (!result && lease_is_set() && !primary_is_active(ordinal)) {
        forget_primary_context(ordinal, last);
        ask_pools(ordinal);
    }
    return result;
}

#define ENDS_PRIMARY(name)                                  \
    API CUresult name(CUdevice ordinal)                     \
    {                                                       \
        lease_enter(LEASE_CALLS);                           \
        FIND_REAL(name);                                    \
        uint64_t last = last_record();                      \
        turns_forget_contexts();                            \
        return after_primary(real(ordinal), ordinal, last); \
    }
ENDS_PRIMARY(cuDevicePrimaryCtxRelease)
ENDS_PRIMARY(cuDevicePrimaryCtxRelease_v2)
ENDS_PRIMARY(cuDevicePrimaryCtxReset)
ENDS_PRIMARY(cuDevicePrimaryCtxReset_v2)

#define ENDS_CONTEXT(name)                          \
    API CUresult name(CUcontext context)            \
    {                                               \
        lease_enter(LEASE_CALLS);                   \
        FIND_REAL(name);                            \
        uint64_t last = last_record();              \
        bool is_own = forget_own_context(context);  \
        turns_forget_contexts();                    \
        CUresult result = real(context);            \
        if (!result && context) {                   \
            forget_context(context, last);          \
            ask_pools(-1); /* this call does not synchronize */ \
        } else if (is_own) {                        \
            remember_own_context(context);          \
        }                                           \
        return result;                              \
    }
ENDS_CONTEXT(cuCtxDestroy)
ENDS_CONTEXT(cuCtxDestroy_v2)

/* The memory of these contexts belongs to the primary context of their device, so nothing is given back. */
#define MAY_END_CONTEXT(name, type)     \
    API CUresult name(type context)     \
    {                                   \
        lease_enter(LEASE_CALLS);       \
        FIND_REAL(name);                \
        turns_forget_contexts();        \
        return real(context);           \
    }
MAY_END_CONTEXT(cuCtxDetach, CUcontext)
MAY_END_CONTEXT(cuGreenCtxDestroy, void *)

/* ---- other calls that take device memory: code, stacks and printf buffers, graphs ---- */

/* Launches that load code or grow stacks also take memory, but are not covered, because they jump.  The
 * reserve that no lease is granted is for them, with or without a guest. */
#define LOADS(name, parameters, arguments)                            \
    API CUresult name parameters                                      \
    {                                                                 \
        lease_enter(LEASE_CALLS);                                     \
        FIND_REAL(name);                                              \
        CUresult result = real arguments;                             \
        if (result == CUDA_ERROR_OUT_OF_MEMORY &&                     \
            has_more(result, page_device(current_ordinal())))         \
            result = real arguments;                                  \
        return result;                                                \
    }
LOADS(cuModuleLoad, (void **out, const char *file), (out, file))
LOADS(cuModuleLoadData, (void **out, const void *image), (out, image))
LOADS(cuModuleLoadDataEx, (void **out, const void *image, unsigned count, void *options, void **values),
      (out, image, count, options, values))
LOADS(cuModuleLoadFatBinary, (void **out, const void *image), (out, image))
LOADS(cuModuleGetFunction, (void **out, void *module, const char *name), (out, module, name))
LOADS(cuFuncLoad, (void *function), (function))
LOADS(cuLibraryLoadData,
      (void **out, const void *code, void *options, void **values, unsigned count, void *more, void **more_values,
       unsigned more_count),
      (out, code, options, values, count, more, more_values, more_count))
LOADS(cuLibraryLoadFromFile,
      (void **out, const char *file, void *options, void **values, unsigned count, void *more, void **more_values,
       unsigned more_count),
      (out, file, options, values, count, more, more_values, more_count))
LOADS(cuCtxSetLimit, (int limit, size_t value), (limit, value))
LOADS(cuGraphInstantiateWithFlags, (void **out, void *graph, unsigned long long flags), (out, graph, flags))
