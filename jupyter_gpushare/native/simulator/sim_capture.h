#ifndef GPUSHARE_SIM_CAPTURE_H
#define GPUSHARE_SIM_CAPTURE_H

#include "sim_gate.h"

typedef struct CUgraph_st *CUgraph;

/* CUstreamCaptureStatus */
enum { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1, CAPTURE_INVALIDATED = 2 };

/* Of a stream. */
struct capture {
    int status, mode;
    pthread_t thread;
    uint64_t id;
    CUgraph graph;
};

/* Each of these answers what a call has to answer beside the captures of this process, and invalidates
 * those that it conflicts with. */

/* A wait for a stream or a question about it, or work that is not captured here. */
CUresult sim_conflict(CUstream stream);
/* The same for all streams of a context, or for those that the legacy stream waits for. */
CUresult sim_conflict_with(CUcontext context, bool is_legacy);
/* A call that is potentially unsafe. */
CUresult sim_unsafe(void);
/* Work for a stream: the graph that captures it, NULL where it runs. */
CUresult sim_captured_by(CUstream stream, CUgraph *graph);

#define REFUSE_IF(conflict)            \
    do {                               \
        CUresult conflict_ = conflict; \
        if (conflict_)                 \
            return conflict_;          \
    } while (0)

/* Graphs, within a call that is past the gate: an empty one or NULL; a node at the end of one. */
CUgraph sim_make_graph(void);
void sim_end_graph(CUgraph graph);
CUresult sim_add_kernel(CUgraph graph, CUfunction function, void **arguments);
CUresult sim_add_set(CUgraph graph, CUdeviceptr to, unsigned value, unsigned element_bytes, size_t count);

#endif
