/* The simulated libcuda.so.1: streams, events, kernel launches.
 *
 * A launch changes the memory at once and gives its stream work of the kernel's duration; the device
 * divides its time between processes (sim_time.c).  A thread that synchronizes sleeps for the minimum
 * time that this can take, and checks again.
 *
 * A stream takes about 1000 unfinished launches; the next one waits for the oldest
 * (forums.developer.nvidia.com topic 68937).
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

enum { STREAM_NON_BLOCKING = 1 };
enum { EVENT_DISABLE_TIMING = 2, EVENT_INTERPROCESS = 4, EVENT_FLAGS = 7 }; /* 1: CU_EVENT_BLOCKING_SYNC */

struct CUevent_st {
    CUcontext context;
    bool has_time;
    uint64_t recorded_ns; /* 0 if never recorded, which counts as done */
    struct sim_mark mark;
    CUstream stream;
};

struct CUstream_st *sim_streams;
static struct CUstream_st default_stream[SIM_DEVICES];
static _Atomic uint64_t host_calls_begun, host_calls_ended; /* host calls run one at a time, in this order */

struct host_call {
    CUhostFn function;
    void *data;
    uint64_t number;
    struct sim_mark mark;
};

/* ---- streams ---- */

/* 0, CU_STREAM_LEGACY (1) and CU_STREAM_PER_THREAD (2) are the current device's default stream. */
static struct CUstream_st *stream_of(CUstream stream)
{
    if ((uintptr_t)stream > 2)
        return stream;
    default_stream[sim_context->device].mark.ordinal = sim_context->device;
    return &default_stream[sim_context->device];
}

static struct sim_work *work_on(CUdevice ordinal)
{
    sim_divide_time(sim_me->visible[ordinal]);
    return sim_work_on(sim_me, sim_me->visible[ordinal]);
}

static struct sim_mark all_of(CUdevice ordinal)
{
    HOLD_STATE;
    return (struct sim_mark){ordinal, work_on(ordinal)->until_ns};
}

/* The default stream waits for all others of its device. */
struct sim_mark sim_stream_mark(CUstream stream)
{
    if ((uintptr_t)stream <= 2)
        return all_of(sim_context->device);
    HOLD(&sim_local);
    return stream->mark;
}

static uint64_t time_left(struct sim_mark mark)
{
    HOLD_STATE;
    return sim_time_left(sim_me, sim_me->visible[mark.ordinal], mark.ns);
}

bool sim_is_done(struct sim_mark mark)
{
    return !time_left(mark);
}

void sim_wait_for(struct sim_mark mark)
{
    for (uint64_t left; (left = time_left(mark));)
        sim_sleep_ns(left);
}

void sim_occupy(CUstream stream, uint64_t ns)
{
    HOLD(&sim_local);
    struct sim_mark *mark = &stream_of(stream)->mark;
    HOLD_STATE;
    struct sim_work *work = work_on(mark->ordinal);
    uint64_t from = mark->ns > work->served_ns ? mark->ns : work->served_ns;
    mark->ns = ns < UINT64_MAX - from ? from + ns : UINT64_MAX;
    work->until_ns = mark->ns > work->until_ns ? mark->ns : work->until_ns;
}

static void wait_for_queue(CUstream stream)
{
    pthread_mutex_lock(&sim_local);
    const struct CUstream_st *at = stream_of(stream);
    struct sim_mark oldest = {at->mark.ordinal, at->queue[at->next_in_queue]};
    pthread_mutex_unlock(&sim_local);
    sim_wait_for(oldest);
}

static void note_in_queue(CUstream stream)
{
    HOLD(&sim_local);
    struct CUstream_st *at = stream_of(stream);
    at->queue[at->next_in_queue] = at->mark.ns;
    at->next_in_queue = (at->next_in_queue + 1) % SIM_QUEUE;
}

static void *run_host_call(void *given)
{
    struct host_call *call = given;
    sim_wait_for(call->mark);
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

/* The synchronisation of a default stream is that of its context, because it waits for all others.  A locked
 * process has nothing to release. */
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
    struct CUstream_st *made = out ? calloc(1, sizeof *made) : NULL;
    if (!made)
        return out ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    made->context = sim_context;
    made->is_independent = flags & STREAM_NON_BLOCKING;
    made->mark.ordinal = sim_context->device;
    HOLD(&sim_local);
    made->next = sim_streams;
    sim_streams = made;
    *out = made;
    return CUDA_SUCCESS;
}

API CUresult cuStreamDestroy_v2(CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    HOLD(&sim_local);
    struct CUstream_st **at = &sim_streams;
    while (*at && *at != stream)
        at = &(*at)->next;
    if (!*at)
        return CUDA_ERROR_INVALID_HANDLE;
    *at = stream->next;
    if (stream->capture.graph)
        sim_end_graph(stream->capture.graph);
    free(stream);
    return CUDA_SUCCESS;
}

API CUresult cuStreamSynchronize(CUstream stream)
{
    POLL;
    REFUSE_IF(sim_conflict(stream));
    sim_wait_for(sim_stream_mark(stream));
    wait_for_host_calls();
    release_pools(&sim_call_, stream);
    return CUDA_SUCCESS;
}

API CUresult cuStreamQuery(CUstream stream)
{
    POLL;
    REFUSE_IF(sim_conflict(stream));
    bool calls_host = atomic_load(&host_calls_ended) < atomic_load(&host_calls_begun);
    return calls_host || !sim_is_done(sim_stream_mark(stream)) ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

API CUresult cuCtxSynchronize(void)
{
    POLL;
    REFUSE_IF(sim_conflict_with(sim_context, false));
    sim_wait_for(sim_stream_mark(NULL));
    wait_for_host_calls();
    release_pools(&sim_call_, NULL);
    return CUDA_SUCCESS;
}

/* ---- events ---- */

API CUresult cuEventCreate(CUevent *out, unsigned flags)
{
    ENTER(SIM_NEED_CONTEXT);
    bool has_time = !(flags & EVENT_DISABLE_TIMING);
    if (!out || flags & ~(unsigned)EVENT_FLAGS || (flags & EVENT_INTERPROCESS && has_time))
        return CUDA_ERROR_INVALID_VALUE;
    struct CUevent_st *made = calloc(1, sizeof *made);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->context = sim_context;
    made->has_time = has_time;
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

static void record(CUevent event, struct sim_mark mark, CUstream stream)
{
    event->recorded_ns = sim_now_ns();
    event->mark = mark;
    event->stream = stream;
}

API CUresult cuEventRecord(CUevent event, CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    if (!event || event->context != ((uintptr_t)stream > 2 ? stream->context : sim_context))
        return CUDA_ERROR_INVALID_HANDLE;
    REFUSE_IF(sim_conflict(stream));
    record(event, sim_stream_mark(stream), stream);
    return CUDA_SUCCESS;
}

/* Records all work submitted to the context so far, and never waits.  In the simulator a process's contexts on one
 * device share their work. */
API CUresult cuCtxRecordEvent(CUcontext context, CUevent event)
{
    ENTER(SIM_NEED_INIT);
    if (!context || !context->alive)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!event || event->context != context)
        return CUDA_ERROR_INVALID_HANDLE;
    REFUSE_IF(sim_conflict_with(context, false));
    record(event, all_of(context->device), NULL);
    return CUDA_SUCCESS;
}

API CUresult cuEventQuery(CUevent event)
{
    POLL;
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    REFUSE_IF(sim_unsafe());
    return sim_is_done(event->mark) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API CUresult cuEventSynchronize(CUevent event)
{
    POLL;
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    REFUSE_IF(sim_unsafe());
    sim_wait_for(event->mark);
    if (event->recorded_ns)
        release_pools(&sim_call_, event->stream);
    return CUDA_SUCCESS;
}

/* Returns when an event that is done was reached. */
static uint64_t reached_ns(CUevent event)
{
    HOLD_STATE;
    uint64_t served = sim_time_of(sim_me, sim_me->visible[event->mark.ordinal], event->mark.ns);
    return served > event->recorded_ns ? served : event->recorded_ns;
}

API CUresult cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end)
{
    POLL;
    if (!ms || !start || !end || !start->recorded_ns || !end->recorded_ns || !start->has_time ||
        !end->has_time)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!sim_is_done(start->mark) || !sim_is_done(end->mark))
        return CUDA_ERROR_NOT_READY;
    *ms = (float)((double)(int64_t)(reached_ns(end) - reached_ns(start)) / 1e6);
    return CUDA_SUCCESS;
}

/* ---- launches ---- */

CUresult sim_launch(CUfunction function, CUstream stream, void **arguments)
{
    CUgraph graph;
    if (!function || (function->arguments && !arguments))
        return CUDA_ERROR_INVALID_VALUE;
    REFUSE_IF(sim_captured_by(stream, &graph));
    if (graph)
        return sim_add_kernel(graph, function, arguments);
    wait_for_queue(stream);
    CUresult result = function->run(function, arguments, stream);
    note_in_queue(stream);
    return result;
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
    REFUSE_IF(sim_conflict(stream));
    struct host_call *call = function ? malloc(sizeof *call) : NULL;
    if (!call)
        return function ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    struct sim_mark mark = sim_stream_mark(stream);
    HOLD(&sim_local);
    *call = (struct host_call){function, data, atomic_load(&host_calls_begun), mark};
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
    REFUSE_IF(sim_conflict(stream));
    pthread_mutex_lock(&sim_local);
    struct sim_mark *waits = &stream_of(stream)->mark;
    bool is_same = waits->ordinal == event->mark.ordinal;
    if (is_same && event->mark.ns > waits->ns)
        waits->ns = event->mark.ns;
    pthread_mutex_unlock(&sim_local);
    if (!is_same && event->recorded_ns)
        sim_wait_for(event->mark); /* two devices count separately, so the caller waits instead of the stream */
    return CUDA_SUCCESS;
}
