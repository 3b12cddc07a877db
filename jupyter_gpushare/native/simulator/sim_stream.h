#ifndef GPUSHARE_SIM_STREAM_H
#define GPUSHARE_SIM_STREAM_H

#include "sim_gate.h"

/* When everything submitted to a stream (or to all of this process's) is done. */
uint64_t sim_stream_done_ns(CUstream stream);

#endif
