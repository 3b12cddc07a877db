#ifndef GPUSHARE_SIM_STREAM_H
#define GPUSHARE_SIM_STREAM_H

#include "sim_capture.h"

/* A kernel: keeps its stream busy (`sim_occupy`), and changes the memory. */
enum { SIM_KERNEL_ARGUMENTS = 3 }; /* at most, of 8 bytes each */
struct CUfunc_st {
    const char *name;
    CUresult (*run)(CUfunction function, void **arguments, CUstream stream);
    int arguments; /* how many of them it reads */
    uint64_t busy_ns;
};

/* Work is done when this process has received so much of a device's time. */
struct sim_mark {
    CUdevice ordinal;
    uint64_t ns;
};

/* Of everything submitted to a stream, or by NULL to the current device. */
struct sim_mark sim_stream_mark(CUstream stream);
bool sim_is_done(struct sim_mark mark);
void sim_wait_for(struct sim_mark mark);

enum { SIM_QUEUE = 1000 };
struct CUstream_st {
    struct CUstream_st *next;
    CUcontext context;   /* NULL: a default one */
    bool is_independent; /* made with CU_STREAM_NON_BLOCKING */
    struct sim_mark mark;
    uint64_t queue[SIM_QUEUE]; /* marks of the last launches, round and round */
    uint32_t next_in_queue;
    struct capture capture;
};
extern struct CUstream_st *sim_streams; /* guarded by sim_local */

/* Work that takes so much of the device's time, after what the stream has. */
void sim_occupy(CUstream stream, uint64_t ns);

/* Work of a call that is past the gate: what a launch and a set do. */
CUresult sim_launch(CUfunction function, CUstream stream, void **arguments);
CUresult sim_set(CUstream stream, CUdeviceptr to, unsigned value, unsigned element_bytes, size_t count);

#endif
