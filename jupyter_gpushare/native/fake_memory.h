/* What the parts of the simulated libcuda that hold memory share: the table of address ranges. */
#ifndef GPUSHARE_FAKE_MEMORY_H
#define GPUSHARE_FAKE_MEMORY_H

#include "fake_cuda.h"

enum block_kind { BLOCK_PLAIN, BLOCK_MANAGED, BLOCK_RESERVED, BLOCK_MAPPED };

/* A range of addresses; the array is sorted by address, ranges do not overlap, except that
 * mappings lie inside their reservation (and come after it). */
struct block {
    uint64_t address, bytes;
    enum block_kind kind;
    CUdevice device;
    CUcontext context; /* whose end frees it; NULL for reservations and mappings */
    struct physical *physical;
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
/* This process did what cannot be checkpointed. */
void sim_hinder(enum sim_hindrance what);
/* fake_virtual.c: after fork, in the child. */
void sim_forget_physical(void);

#endif
