#ifndef GPUSHARE_SIM_STREAM_H
#define GPUSHARE_SIM_STREAM_H

#include "sim_gate.h"

/* A kernel: keeps its stream busy (`sim_occupy`), and changes the memory. */
struct CUfunc_st {
    const char *name;
    CUresult (*run)(void **arguments, CUstream stream);
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

/* Work that takes so much of the device's time, after what the stream has. */
void sim_occupy(CUstream stream, uint64_t ns);

/* Work of a call that is past the gate: what a launch and a set do. */
enum { SIM_KERNEL_ARGUMENTS = 3 }; /* every known kernel has so many, of 8 bytes each */
CUresult sim_launch(CUfunction function, CUstream stream, void **arguments);
CUresult sim_set(CUdeviceptr to, unsigned value, unsigned element_bytes, size_t count);

#endif
