#ifndef GPUSHARE_SIM_STREAM_H
#define GPUSHARE_SIM_STREAM_H

#include "sim_gate.h"

/* A kernel: what it does to memory, and how long it keeps its stream busy. */
struct CUfunc_st {
    const char *name;
    CUresult (*run)(void **arguments, uint64_t *busy_ns);
};

/* When everything submitted to a stream (or to all of this process's) is done. */
uint64_t sim_stream_done_ns(CUstream stream);

/* Work of a call that is past the gate: what a launch and a set do. */
enum { SIM_KERNEL_ARGUMENTS = 3 }; /* every known kernel has so many, of 8 bytes each */
CUresult sim_launch(CUfunction function, CUstream stream, void **arguments);
CUresult sim_set(CUdeviceptr to, unsigned value, unsigned element_bytes, size_t count);

#endif
