/* The simulated libcuda.so.1: contexts, the current one of each thread, and peer access.
 *
 * Facts (CUDA Driver API reference 13.0): a context costs device memory of its own, once per process and
 * device; its end frees the memory allocated in it; all that retain a primary context share it.
 */
#include "sim_context.h"

#include <stdlib.h>

#include "sim_account.h"
#include "sim_memory.h"

static struct CUctx_st primary[SIM_DEVICES];
static unsigned own_contexts[SIM_DEVICES]; /* made by cuCtxCreate; they share one charge with a primary context */

static CUresult hold_context(CUdevice ordinal)
{
    uint32_t device = sim_me->visible[ordinal];
    if (sim_device_lost(device))
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    if (primary[ordinal].holders || own_contexts[ordinal])
        return CUDA_SUCCESS;
    CUresult result = sim_charge(device, sim->context_bytes, true, "context");
    if (!result) {
        sim_me->used_cuda = true;
        sim_me->contexts |= 1u << device;
    }
    return result;
}

static void drop_context(CUdevice ordinal)
{
    uint32_t device = sim_me->visible[ordinal];
    if (primary[ordinal].holders || own_contexts[ordinal])
        return;
    sim_me->contexts &= ~(1u << device);
    /* Includes its growth. */
    sim_refund(device, sim_me->context_bytes[device], true, "context_end");
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice ordinal)
{
    ENTER(SIM_NEED_INIT);
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (sim_physical(ordinal) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    HOLD(&sim_local);
    struct CUctx_st *context = &primary[ordinal];
    CUresult result = hold_context(ordinal);
    if (result)
        return result;
    if (!context->holders++) {
        context->device = ordinal;
        context->primary = context->alive = true;
    }
    *out = context;
    return CUDA_SUCCESS;
}

static CUresult end_primary(CUdevice ordinal, bool at_once)
{
    if (sim_physical(ordinal) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    HOLD(&sim_local);
    struct CUctx_st *context = &primary[ordinal];
    bool ends = context->holders && (at_once || context->holders == 1);
    CUresult result = context->holders || at_once ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    if (ends) {
        context->alive = false;
        context->peers = 0;
        sim_drop_context_memory(context);
    }
    if (context->holders)
        context->holders = ends ? 0 : context->holders - 1;
    if (ends)
        drop_context(ordinal);
    return result;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal)
{
    ENTER(SIM_NEED_INIT);
    return end_primary(ordinal, false);
}

API CUresult cuDevicePrimaryCtxReset_v2(CUdevice ordinal)
{
    ENTER(SIM_NEED_INIT);
    return end_primary(ordinal, true);
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned *flags, int *active)
{
    KNOW(ordinal);
    *flags = 0;
    *active = primary[ordinal].holders > 0;
    return CUDA_SUCCESS;
}

static CUresult create_context(CUcontext *out, CUdevice ordinal)
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (sim_physical(ordinal) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    struct CUctx_st *context = calloc(1, sizeof *context);
    if (!context)
        return CUDA_ERROR_OUT_OF_MEMORY;
    HOLD(&sim_local);
    CUresult result = hold_context(ordinal);
    if (result) {
        free(context);
        return result;
    }
    context->device = ordinal;
    context->alive = true;
    own_contexts[ordinal]++;
    sim_context = *out = context;
    return CUDA_SUCCESS;
}

API CUresult cuCtxCreate_v2(CUcontext *out, unsigned flags, CUdevice ordinal)
{
    ENTER(SIM_NEED_INIT);
    (void)flags;
    return create_context(out, ordinal);
}

API CUresult cuCtxCreate_v3(CUcontext *out, void *affinity, int affinities, unsigned flags, CUdevice ordinal)
{
    ENTER(SIM_NEED_INIT);
    (void)affinity, (void)affinities, (void)flags;
    return create_context(out, ordinal);
}

API CUresult cuCtxCreate_v4(CUcontext *out, void *parameters, unsigned flags, CUdevice ordinal)
{
    ENTER(SIM_NEED_INIT);
    (void)parameters, (void)flags;
    return create_context(out, ordinal);
}

/* The structure itself stays: another thread may still have it as its current context. */
API CUresult cuCtxDestroy_v2(CUcontext context)
{
    ENTER(SIM_NEED_INIT);
    if (!context || context->primary || !context->alive)
        return CUDA_ERROR_INVALID_CONTEXT;
    HOLD(&sim_local);
    context->alive = false;
    sim_drop_context_memory(context);
    own_contexts[context->device]--;
    drop_context(context->device);
    if (sim_context == context)
        sim_context = NULL;
    return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context)
{
    if (!sim_is_initialized())
        return CUDA_ERROR_NOT_INITIALIZED;
    sim_context = context;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *context)
{
    if (!sim_is_initialized())
        return CUDA_ERROR_NOT_INITIALIZED;
    *context = sim_context;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *ordinal)
{
    if (!sim_is_initialized())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!sim_context)
        return CUDA_ERROR_INVALID_CONTEXT;
    *ordinal = sim_context->device;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetFlags(unsigned *flags)
{
    ENTER(SIM_NEED_INIT); /* measured (sim_gate.c) */
    *flags = 0;
    return sim_context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    ASK;
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return CUDA_SUCCESS;
}

/* Peer access: only its visible effects, and that the process cannot be checkpointed. */
API CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags)
{
    ENTER(SIM_NEED_CONTEXT);
    if (!peer || flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (peer->device == sim_context->device)
        return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    if (sim_context->peers >> peer->device & 1u)
        return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    sim_context->peers |= 1u << peer->device;
    sim_hinder(SIM_HINDERED_PEER);
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice ordinal, unsigned flags)
{
    KNOW(ordinal);
    (void)flags;
    return CUDA_SUCCESS;
}

/* Frameworks need a stack of one for push and pop; deeper pushes work up to a maximum per thread. */
static _Thread_local CUcontext pushed[16];
static _Thread_local unsigned pushes;

API CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    ENTER(SIM_NEED_INIT);
    if (!context || pushes == sizeof pushed / sizeof *pushed)
        return CUDA_ERROR_INVALID_VALUE;
    pushed[pushes++] = sim_context;
    sim_context = context;
    return CUDA_SUCCESS;
}

API CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    ENTER(SIM_NEED_INIT);
    if (!sim_context)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (context)
        *context = sim_context;
    sim_context = pushes ? pushed[--pushes] : NULL;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetApiVersion(CUcontext context, unsigned *version)
{
    (void)context;
    *version = 13000;
    return CUDA_SUCCESS;
}

API CUresult cuCtxDisablePeerAccess(CUcontext peer)
{
    ENTER(SIM_NEED_CONTEXT);
    if (!peer || !(sim_context->peers >> peer->device & 1u))
        return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    sim_context->peers &= ~(1u << peer->device);
    return CUDA_SUCCESS;
}
