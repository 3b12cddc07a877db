/* Memory pools of this process. */
#ifndef GPUSHARE_SIM_POOL_H
#define GPUSHARE_SIM_POOL_H

#include "sim_gate.h"

/* The current pool of an ordinal (takes sim_local); the ordinal of a pool. */
CUmemoryPool sim_pool_of(CUdevice ordinal);
CUdevice sim_pool_device(CUmemoryPool pool);

/* With sim_local held: bytes of a pool; what pools keep beyond their threshold (all of what is
 * unused, when the context ends). */
CUresult sim_pool_take(CUmemoryPool pool, uint64_t bytes);
void sim_pool_give(CUmemoryPool pool, uint64_t bytes);
void sim_pools_release(bool context_ends);

/* After fork, in the child. */
void sim_forget_pools(void);

#endif
