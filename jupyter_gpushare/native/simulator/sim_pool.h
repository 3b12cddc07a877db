/* Memory pools of this process. */
#ifndef GPUSHARE_SIM_POOL_H
#define GPUSHARE_SIM_POOL_H

#include "sim_stream.h"

/* The current pool of an ordinal (takes sim_local); the ordinal of a pool, or -1 if it has none. */
CUmemoryPool sim_pool_of(CUdevice ordinal);
CUdevice sim_pool_device(CUmemoryPool pool);
bool sim_pool_is_managed(CUmemoryPool pool);

/* A free in the order of a stream, and the mark of the work before it. */
struct sim_free {
    CUstream stream;
    struct sim_mark mark;
};

/* The caller holds sim_local.  Take or give bytes of a pool; a free is outstanding until its stream is
 * synchronized (NULL: it is already done). */
CUresult sim_pool_take(CUmemoryPool pool, uint64_t bytes, CUstream stream);
void sim_pool_give(CUmemoryPool pool, uint64_t bytes, const struct sim_free *how);
/* Called after a stream was synchronized (NULL: every stream): pools give back unused bytes beyond their
 * threshold, or all unused bytes if the context ends. */
void sim_pools_release(const CUstream *stream, bool context_ends);

/* Called in the child after fork. */
void sim_forget_pools(void);

#endif
