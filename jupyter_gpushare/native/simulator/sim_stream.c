/* The simulated libcuda.so.1: streams, events, kernel launches.
 *
 * A launch changes the memory at once and makes its stream (and the device, for utilization)
 * busy for as long as the kernel says; a thread that synchronizes sleeps until then.
 *
 * Host functions (CUDA Driver API reference 13.0, cuLaunchHostFunc) run in a thread of the driver,
 * after the work enqueued before them; synchronizing waits for them, and so does Lock (README of
 * NVIDIA/cuda-checkpoint: "already-submitted CUDA work, including stream callbacks, are completed").
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "sim_pool.h"
#include "sim_stream.h"

enum { HOST_CALL_POLL_NS = 100000 };

struct CUstream_st {
    struct CUstream_st *next;
    CUcontext context;
    uint64_t done_ns;
};

struct CUevent_st {
    uint64_t done_ns; /* 0: never recorded, which counts as done */
    CUstream stream;
};

static struct CUstream_st *streams;
static struct CUstream_st default_stream[SIM_DEVICES];
static _Atomic uint64_t host_calls_begun, host_calls_ended; /* one after the other, in this order */

struct host_call {
    CUhostFn function;
    void *data;
    uint64_t number, from_ns;
};

/* ---- streams ---- */

/* 0, CU_STREAM_LEGACY (1) and CU_STREAM_PER_THREAD (2): the current device's default one. */
static struct CUstream_st *stream_of(CUstream stream)
{
    return (uintptr_t)stream > 2 ? stream : &default_stream[sim_context->device];
}

/* The default stream waits for all others of its device. */
uint64_t sim_stream_done_ns(CUstream stream)
{
    HOLD(&sim_local);
    struct CUstream_st *asked = stream_of(stream);
    uint64_t done = asked->done_ns;
    for (struct CUstream_st *at = streams; asked != stream && at; at = at->next)
        if (at->context && sim_context && at->context->device == sim_context->device && at->done_ns > done)
            done = at->done_ns;
    return done;
}

static void *run_host_call(void *given)
{
    struct host_call *call = given;
    sim_sleep_until(call->from_ns);
    while (atomic_load(&host_calls_ended) != call->number)
        sim_sleep_ns(HOST_CALL_POLL_NS);
    call->function(call->data);
    atomic_fetch_add(&host_calls_ended, 1);
    atomic_fetch_sub(&sim_me->inside, 1);
    free(call);
    return NULL;
}

static void wait_for_host_calls(void)
{
    for (uint64_t begun = atomic_load(&host_calls_begun); atomic_load(&host_calls_ended) < begun;)
        sim_sleep_ns(HOST_CALL_POLL_NS);
}

/* A default stream, which waits for all others, is synchronized as its context is.  Nothing is left to
 * release in a process that is locked. */
static void release_pools(const struct sim_call *call, CUstream stream)
{
    if (!call->inside)
        return;
    HOLD(&sim_local);
    sim_pools_release((uintptr_t)stream > 2 ? &stream : NULL, false);
}

API CUresult cuStreamCreate(CUstream *out, unsigned flags)
{
    ENTER(SIM_NEED_CONTEXT);
    (void)flags;
    struct CUstream_st *made = out ? calloc(1, sizeof *made) : NULL;
    if (!made)
        return out ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    made->context = sim_context;
    HOLD(&sim_local);
    made->next = streams;
    streams = made;
    *out = made;
    return CUDA_SUCCESS;
}

API CUresult cuStreamDestroy_v2(CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    HOLD(&sim_local);
    struct CUstream_st **at = &streams;
    while (*at && *at != stream)
        at = &(*at)->next;
    if (!*at)
        return CUDA_ERROR_INVALID_HANDLE;
    *at = stream->next;
    free(stream);
    return CUDA_SUCCESS;
}

API CUresult cuStreamSynchronize(CUstream stream)
{
    POLL;
    sim_sleep_until(sim_stream_done_ns(stream));
    wait_for_host_calls();
    release_pools(&sim_call_, stream);
    return CUDA_SUCCESS;
}

API CUresult cuStreamQuery(CUstream stream)
{
    POLL;
    bool calls_host = atomic_load(&host_calls_ended) < atomic_load(&host_calls_begun);
    return calls_host || sim_stream_done_ns(stream) > sim_now_ns() ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

API CUresult cuStreamIsCapturing(CUstream stream, int *status)
{
    ASK;
    (void)stream;
    *status = 0;
    return CUDA_SUCCESS;
}

API CUresult cuCtxSynchronize(void)
{
    POLL;
    sim_sleep_until(sim_stream_done_ns(NULL));
    wait_for_host_calls();
    release_pools(&sim_call_, NULL);
    return CUDA_SUCCESS;
}

/* ---- events ---- */

API CUresult cuEventCreate(CUevent *out, unsigned flags)
{
    ENTER(SIM_NEED_CONTEXT);
    (void)flags;
    struct CUevent_st *made = out ? calloc(1, sizeof *made) : NULL;
    if (!made)
        return out ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    *out = made;
    return CUDA_SUCCESS;
}

API CUresult cuEventDestroy_v2(CUevent event)
{
    ENTER(SIM_NEED_CONTEXT);
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    free(event);
    return CUDA_SUCCESS;
}

API CUresult cuEventRecord(CUevent event, CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    uint64_t done = sim_stream_done_ns(stream), now = sim_now_ns();
    event->done_ns = done > now ? done : now;
    event->stream = stream;
    return CUDA_SUCCESS;
}

API CUresult cuEventQuery(CUevent event)
{
    POLL;
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    return event->done_ns > sim_now_ns() ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

API CUresult cuEventSynchronize(CUevent event)
{
    POLL;
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    sim_sleep_until(event->done_ns);
    if (event->done_ns)
        release_pools(&sim_call_, event->stream);
    return CUDA_SUCCESS;
}

API CUresult cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end)
{
    POLL;
    if (!ms || !start || !end || !start->done_ns || !end->done_ns)
        return CUDA_ERROR_INVALID_HANDLE;
    *ms = (float)((double)(int64_t)(end->done_ns - start->done_ns) / 1e6);
    return CUDA_SUCCESS;
}

/* ---- launches ---- */

CUresult sim_launch(CUfunction function, CUstream stream, void **arguments)
{
    uint64_t busy_ns = 0;
    if (!function || !arguments)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t started = sim_now_ns();
    CUresult result = function->run(arguments, &busy_ns);
    if (result)
        return result;
    HOLD(&sim_local);
    struct CUstream_st *on = stream_of(stream);
    uint64_t from = on->done_ns > started ? on->done_ns : started, until = from + busy_ns, now = sim_now_ns();
    on->done_ns = until > now ? until : now; /* the work done above took time too */
    HOLD_STATE;
    sim_busy_add(&sim_me->busy[sim_current_device()], from, on->done_ns);
    return CUDA_SUCCESS;
}

API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **arguments,
                            void **extra)
{
    ENTER(SIM_NEED_CONTEXT);
    (void)shared_bytes;
    if (extra || !grid_x || !grid_y || !grid_z || !block_x || !block_y || !block_z)
        return CUDA_ERROR_INVALID_VALUE;
    return sim_launch(function, stream, arguments);
}

API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data)
{
    ENTER(SIM_NEED_CONTEXT);
    struct host_call *call = function ? malloc(sizeof *call) : NULL;
    if (!call)
        return function ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    uint64_t from_ns = sim_stream_done_ns(stream);
    HOLD(&sim_local);
    *call = (struct host_call){function, data, atomic_load(&host_calls_begun), from_ns};
    atomic_fetch_add(&sim_me->inside, 1); /* until it has run */
    pthread_t thread;
    if (pthread_create(&thread, NULL, run_host_call, call)) {
        atomic_fetch_sub(&sim_me->inside, 1);
        free(call);
        return CUDA_ERROR_UNKNOWN;
    }
    atomic_fetch_add(&host_calls_begun, 1);
    pthread_detach(thread);
    return CUDA_SUCCESS;
}

API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
    ENTER(SIM_NEED_CONTEXT);
    (void)flags;
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&sim_local);
    struct CUstream_st *waits = stream_of(stream);
    waits->done_ns = event->done_ns > waits->done_ns ? event->done_ns : waits->done_ns;
    pthread_mutex_unlock(&sim_local);
    return CUDA_SUCCESS;
}
