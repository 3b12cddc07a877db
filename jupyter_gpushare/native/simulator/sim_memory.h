/* Device memory of this process: bytes of a device or a pool, at addresses of the process. */
#ifndef GPUSHARE_SIM_MEMORY_H
#define GPUSHARE_SIM_MEMORY_H

#include "sim_blocks.h"

/* Takes sim_local. */
CUresult sim_allocate(CUdeviceptr *out, uint64_t bytes, CUdevice ordinal, enum block_kind kind);
CUresult sim_release(CUdeviceptr address);
/* The caller holds sim_local. */
void sim_drop_context_memory(CUcontext context);

#endif
