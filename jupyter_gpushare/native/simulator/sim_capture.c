/* The simulated libcuda.so.1: capture of a stream's work into a graph.
 *
 * Facts (cuda.h 13.5; CUDA Programming Guide 13.0, "Stream Capture"):
 *   - Work in a capturing stream does not run: it becomes nodes of the graph that cuStreamEndCapture
 *     returns.  CU_STREAM_LEGACY cannot capture.
 *   - A wait for such a stream, or a query about it or its context, answers
 *     CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.  While a stream without CU_STREAM_NON_BLOCKING captures,
 *     use of the legacy stream answers CUDA_ERROR_STREAM_CAPTURE_IMPLICIT.
 *   - Such calls invalidate the captures that they conflict with; cuStreamIsCapturing does not.  The end of an
 *     invalidated capture answers CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, and its graph is NULL.
 *   - A capture that is not relaxed must end in the thread that began it.  It prohibits unsafe calls to that
 *     thread, and a global one to every thread whose mode is global (cuThreadExchangeStreamCaptureMode).
 *     cudaMalloc (cuda.h) and cudaEventQuery (github.com/pytorch/pytorch pull request 148594) are unsafe.
 * Inferred: cuMemFree and cuEventSynchronize are unsafe too.
 * The simulator captures kernels, sets and graphs.  Copies, events, stream-ordered memory and host functions
 * answer CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, and so does a capture of any default stream.
 */
#define _GNU_SOURCE
#include "sim_capture.h"

#include "sim_stream.h"

enum { MODE_GLOBAL = 0, MODE_THREAD_LOCAL = 1, MODE_RELAXED = 2 };

static _Thread_local int thread_mode = MODE_GLOBAL;
static uint64_t captures; /* the number begun; guarded by sim_local */

static bool is_default(CUstream stream)
{
    return (uintptr_t)stream <= 2;
}

static bool conflicts(const struct CUstream_st *stream, CUcontext context, bool is_legacy)
{
    return stream->capture.status && stream->context == context && !(is_legacy && stream->is_independent);
}

static bool is_prohibited_by(const struct capture *capture)
{
    if (!capture->status || thread_mode == MODE_RELAXED)
        return false;
    if (pthread_equal(capture->thread, pthread_self()))
        return capture->mode != MODE_RELAXED;
    return capture->mode == MODE_GLOBAL && thread_mode == MODE_GLOBAL;
}

CUresult sim_conflict_with(CUcontext context, bool is_legacy)
{
    CUresult result = CUDA_SUCCESS;
    HOLD(&sim_local);
    for (struct CUstream_st *stream = sim_streams; stream; stream = stream->next)
        if (conflicts(stream, context, is_legacy)) {
            stream->capture.status = CAPTURE_INVALIDATED;
            result = is_legacy ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    return result;
}

CUresult sim_conflict(CUstream stream)
{
    if (is_default(stream))
        return (uintptr_t)stream <= 1 ? sim_conflict_with(sim_context, true) : CUDA_SUCCESS;
    HOLD(&sim_local);
    if (!stream->capture.status)
        return CUDA_SUCCESS;
    stream->capture.status = CAPTURE_INVALIDATED;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult sim_unsafe(void)
{
    CUresult result = CUDA_SUCCESS;
    HOLD(&sim_local);
    for (struct CUstream_st *stream = sim_streams; stream; stream = stream->next)
        if (is_prohibited_by(&stream->capture)) {
            stream->capture.status = CAPTURE_INVALIDATED;
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    return result;
}

CUresult sim_captured_by(CUstream stream, CUgraph *graph)
{
    *graph = NULL;
    if (is_default(stream))
        return sim_conflict(stream);
    HOLD(&sim_local);
    if (stream->capture.status == CAPTURE_INVALIDATED)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    *graph = stream->capture.graph;
    return CUDA_SUCCESS;
}

API CUresult cuStreamBeginCapture_v2(CUstream stream, int mode)
{
    ENTER(SIM_NEED_CONTEXT);
    if (mode < MODE_GLOBAL || mode > MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    if (is_default(stream))
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    HOLD(&sim_local);
    if (stream->capture.status)
        return CUDA_ERROR_ILLEGAL_STATE;
    CUgraph graph = sim_make_graph();
    if (!graph)
        return CUDA_ERROR_OUT_OF_MEMORY;
    stream->capture = (struct capture){CAPTURE_ACTIVE, mode, pthread_self(), ++captures, graph};
    return CUDA_SUCCESS;
}

API CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
    ENTER(SIM_NEED_CONTEXT);
    if (!graph)
        return CUDA_ERROR_INVALID_VALUE;
    *graph = NULL;
    HOLD(&sim_local);
    if (is_default(stream) || !stream->capture.status)
        return CUDA_ERROR_ILLEGAL_STATE;
    struct capture ended = stream->capture;
    if (ended.mode != MODE_RELAXED && !pthread_equal(ended.thread, pthread_self()))
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    stream->capture = (struct capture){0};
    if (ended.status == CAPTURE_INVALIDATED) {
        sim_end_graph(ended.graph);
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    *graph = ended.graph;
    return CUDA_SUCCESS;
}

API CUresult cuStreamGetCaptureInfo_v2(CUstream stream, int *status, uint64_t *id, CUgraph *graph,
                                       const void **dependencies, size_t *count)
{
    ASK;
    if (!status)
        return CUDA_ERROR_INVALID_VALUE;
    if (dependencies || count)
        return CUDA_ERROR_NOT_SUPPORTED; /* not simulated */
    *status = CAPTURE_NONE;
    HOLD(&sim_local);
    for (const struct CUstream_st *at = sim_streams; is_default(stream) && at; at = at->next)
        if ((uintptr_t)stream <= 1 && conflicts(at, sim_context, true))
            return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    if (is_default(stream))
        return CUDA_SUCCESS;
    *status = stream->capture.status;
    if (id)
        *id = stream->capture.id;
    if (graph)
        *graph = stream->capture.graph;
    return CUDA_SUCCESS;
}

API CUresult cuStreamIsCapturing(CUstream stream, int *status)
{
    return cuStreamGetCaptureInfo_v2(stream, status, NULL, NULL, NULL, NULL);
}

API CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
    ASK;
    if (!mode || *mode < MODE_GLOBAL || *mode > MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
