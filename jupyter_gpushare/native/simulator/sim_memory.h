/* What the parts of the simulated libcuda that hold memory share: the table of address ranges. */
#ifndef GPUSHARE_SIM_MEMORY_H
#define GPUSHARE_SIM_MEMORY_H

#include "sim_cuda.h"

enum block_kind { BLOCK_PLAIN, BLOCK_MANAGED, BLOCK_RESERVED, BLOCK_MAPPED };

/* A range of addresses; the array is sorted by address, ranges do not overlap, except that
 * mappings lie inside their reservation (and come after it). */
struct block {
    uint64_t address, bytes;
    enum block_kind kind;
    CUdevice device;
    CUcontext context; /* its end frees the block; NULL for reservations and mappings */
    struct physical *physical;
    CUmemoryPool pool; /* NULL: none */
    bool accessible;
};

/* All of these want sim_local held. */
extern struct block *sim_blocks;
extern size_t sim_block_count;
size_t sim_first_block(uint64_t address); /* index of the first at or after it */
bool sim_insert_block(struct block block);
void sim_remove_block(size_t at);
struct block *sim_find_block(uint64_t address, enum block_kind low, enum block_kind high);
struct block *sim_holder_of(uint64_t address);

/* Bytes of the device's account, with a line in the ledger. */
CUresult sim_take(CUdevice ordinal, uint64_t bytes);
void sim_give(CUdevice ordinal, uint64_t bytes);
/* Memory of its own, or of a pool, with a table entry (takes sim_local). */
CUresult sim_allocate(CUdeviceptr *out, uint64_t bytes, CUdevice ordinal, enum block_kind kind, CUmemoryPool pool);
CUresult sim_release(CUdeviceptr address);
uint64_t sim_pages(uint64_t bytes);

/* sim_pool.c, with sim_local held: bytes of a pool; what pools keep beyond their threshold (all of
 * what is unused, when the context ends). */
CUresult sim_pool_take(CUmemoryPool pool, uint64_t bytes);
void sim_pool_give(CUmemoryPool pool, uint64_t bytes);
void sim_pools_release(bool context_ends);
void sim_forget_pools(void);

/* This process did what cannot be checkpointed. */
void sim_hinder(enum sim_hindrance what);
/* sim_virtual.c: after fork, in the child. */
void sim_forget_physical(void);

#endif
