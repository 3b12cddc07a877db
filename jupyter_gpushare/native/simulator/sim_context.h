#ifndef GPUSHARE_SIM_CONTEXT_H
#define GPUSHARE_SIM_CONTEXT_H

#include "sim_gate.h"

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice ordinal);
CUresult cuCtxSetCurrent(CUcontext context);

#endif
