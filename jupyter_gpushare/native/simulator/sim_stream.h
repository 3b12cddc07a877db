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

#endif
