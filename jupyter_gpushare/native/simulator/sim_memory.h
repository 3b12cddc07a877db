/* Device memory of this process: bytes of a device, or of a pool, at addresses of its own. */
#ifndef GPUSHARE_SIM_MEMORY_H
#define GPUSHARE_SIM_MEMORY_H

#include "sim_blocks.h"

/* Takes sim_local. */
CUresult sim_allocate(CUdeviceptr *out, uint64_t bytes, CUdevice ordinal, enum block_kind kind);
CUresult sim_release(CUdeviceptr address);
/* With sim_local held. */
void sim_drop_context_memory(CUcontext context);

#endif
