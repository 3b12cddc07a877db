#ifndef GPUSHARE_SIM_CAPTURE_H
#define GPUSHARE_SIM_CAPTURE_H

#include "sim_gate.h"

typedef struct CUgraph_st *CUgraph;

/* CUstreamCaptureStatus */
enum { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1, CAPTURE_INVALIDATED = 2 };

/* The capture of a stream. */
struct capture {
    int status, mode;
    pthread_t thread;
    uint64_t id;
    CUgraph graph;
};

/* Each of these returns the error that the captures of this process cause for a call, and invalidates the
 * captures that conflict with it. */

/* For a wait for a stream or a query about it, or work that the simulator does not capture. */
CUresult sim_conflict(CUstream stream);
/* The same for all streams of a context, or for those that the legacy stream waits for. */
CUresult sim_conflict_with(CUcontext context, bool is_legacy);
/* For a call that is potentially unsafe. */
CUresult sim_unsafe(void);
/* For work in a stream: `graph` becomes the graph that captures it, or NULL if it runs. */
CUresult sim_captured_by(CUstream stream, CUgraph *graph);

#define REFUSE_IF(conflict)            \
    do {                               \
        CUresult conflict_ = conflict; \
        if (conflict_)                 \
            return conflict_;          \
    } while (0)

/* Graphs, within a call that is past the gate: make an empty one (or NULL), end one, add a node at its end. */
CUgraph sim_make_graph(void);
void sim_end_graph(CUgraph graph);
CUresult sim_add_kernel(CUgraph graph, CUfunction function, void **arguments);
CUresult sim_add_set(CUgraph graph, CUdeviceptr to, unsigned value, unsigned element_bytes, size_t count);

#endif
