#ifndef GPUSHARE_SIM_STREAM_H
#define GPUSHARE_SIM_STREAM_H

#include "sim_capture.h"

/* A kernel: keeps its stream busy (`sim_occupy`), and changes the memory. */
enum { SIM_KERNEL_ARGUMENTS = 3 }; /* the maximum; each has 8 bytes */
struct CUfunc_st {
    const char *name;
    CUresult (*run)(CUfunction function, void **arguments, CUstream stream);
    int arguments; /* the number of arguments that it reads */
    uint64_t busy_ns;
};

/* Work is done when this process has received this much of a device's time. */
struct sim_mark {
    CUdevice ordinal;
    uint64_t ns;
};

/* Returns the mark of all work submitted to a stream, or with NULL to the current device. */
struct sim_mark sim_stream_mark(CUstream stream);
bool sim_is_done(struct sim_mark mark);
void sim_wait_for(struct sim_mark mark);

enum { SIM_QUEUE = 1000 };
struct CUstream_st {
    struct CUstream_st *next;
    CUcontext context;   /* NULL for a default stream */
    bool is_independent; /* made with CU_STREAM_NON_BLOCKING */
    struct sim_mark mark;
    uint64_t queue[SIM_QUEUE]; /* marks of the last launches, a ring buffer */
    uint32_t next_in_queue;
    struct capture capture;
};
extern struct CUstream_st *sim_streams; /* guarded by sim_local */

/* Adds work that takes this much of the device's time to a stream. */
void sim_occupy(CUstream stream, uint64_t ns);

/* The work of a launch and of a set, for a call that is past the gate. */
CUresult sim_launch(CUfunction function, CUstream stream, void **arguments);
CUresult sim_set(CUstream stream, CUdeviceptr to, unsigned value, unsigned element_bytes, size_t count);

#endif
