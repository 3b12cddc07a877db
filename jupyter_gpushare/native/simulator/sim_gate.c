/* The simulated libcuda.so.1: this process, its current context, and the gate of every call.
 *
 * Facts (CUDA Driver API reference 13.0; README of github.com/NVIDIA/cuda-checkpoint):
 *   - A child forked after cuInit cannot use CUDA: CUDA_ERROR_NOT_INITIALIZED.
 *   - Calls that launch work, manage resources or otherwise impact GPU state wait while the
 *     process is locked or checkpointed.  Pure queries about devices do not.
 *   - A call that needs a context answers CUDA_ERROR_INVALID_CONTEXT in a thread without one.  It is
 *     inferred that it does not wait first, because the context is a variable of the thread.
 *
 * Measured (H100 80GB HBM3, driver 580.159.04): cuCtxSynchronize, cuStreamSynchronize, cuStreamQuery,
 * cuEventSynchronize, cuEventQuery and cuEventElapsedTime do not wait either.  In a locked process they
 * answer at once; they end a checkpointed process with SIGSEGV.  In a checkpointed process cuMemGetInfo
 * answers 304, cuCtxSetCurrent is not affected, and cuCtxGetFlags waits.
 */
#define _GNU_SOURCE
#include "sim_gate.h"

#include <signal.h>

struct sim_process *sim_me;
pthread_mutex_t sim_local = PTHREAD_MUTEX_INITIALIZER;
_Thread_local CUcontext sim_context;

static _Atomic bool forked; /* the parent had called cuInit, so this child may not use CUDA */

void sim_gate_in_child(void)
{
    pthread_mutex_init(&sim_local, NULL);
    if (sim_me)
        atomic_store(&forked, true);
}

bool sim_was_forked(void)
{
    return atomic_load(&forked);
}

bool sim_is_initialized(void)
{
    return sim_me && !atomic_load_explicit(&forked, memory_order_relaxed);
}

static bool is_on_device(void)
{
    return sim_me->state == SIM_RUNNING || sim_me->state == SIM_LOCKED;
}

struct sim_call sim_enter(enum sim_need need, bool waits)
{
    struct sim_call call = {CUDA_ERROR_NOT_INITIALIZED, false};
    if (!sim_is_initialized())
        return call;
    call.error = CUDA_ERROR_INVALID_CONTEXT;
    if (need == SIM_NEED_CONTEXT && !sim_context)
        return call;
    for (;;) {
        atomic_fetch_add(&sim_me->inside, 1);
        uint32_t gate = atomic_load(&sim_me->gate);
        if (gate == SIM_GATE_OPEN)
            break;
        atomic_fetch_sub(&sim_me->inside, 1);
        call.error = CUDA_ERROR_UNKNOWN;
        if (gate == SIM_GATE_FAILED)
            return call;
        if (!waits) {
            call.error = is_on_device() ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
            return call;
        }
        sim_gate_wait(sim_me, gate, 100000000u);
        HOLD_STATE;
        if (atomic_load(&sim_me->gate) == gate)
            sim_sweep(); /* opens the gate if the caller of the move has died */
    }
    call.inside = true;
    call.error = CUDA_SUCCESS;
    if (atomic_load_explicit(&sim->fault_count, memory_order_acquire))
        sim_hang(SIM_FAULT_HANG_CALL, sim_me->pid, -1);
    if (sim_me->damaged)
        call.error = CUDA_ERROR_UNKNOWN;
    else if (need == SIM_NEED_CONTEXT && !sim_context->alive)
        call.error = CUDA_ERROR_INVALID_CONTEXT;
    else if (need == SIM_NEED_CONTEXT && sim_device_lost(sim_current_device()))
        call.error = CUDA_ERROR_DEVICE_UNAVAILABLE;
    if (call.error)
        sim_leave(&call);
    return call;
}

struct sim_call sim_poll(void)
{
    struct sim_call call = sim_enter(SIM_NEED_CONTEXT, false);
    while (call.error == CUDA_ERROR_OPERATING_SYSTEM)
        raise(SIGSEGV);
    return call;
}

void sim_leave(struct sim_call *call)
{
    if (call->inside)
        atomic_fetch_sub(&sim_me->inside, 1);
    call->inside = false;
}

int sim_physical(CUdevice ordinal)
{
    if (!sim_me || ordinal < 0 || ordinal >= (int)sim_me->visible_count)
        return -1;
    return sim_me->visible[ordinal];
}

uint32_t sim_current_device(void)
{
    return sim_me->visible[sim_context->device];
}
