/* The address ranges of this process's device memory. */
#ifndef GPUSHARE_SIM_BLOCKS_H
#define GPUSHARE_SIM_BLOCKS_H

#include "sim_gate.h"

enum block_kind { BLOCK_PLAIN, BLOCK_MANAGED, BLOCK_RESERVED, BLOCK_MAPPED };

/* A range of addresses.  The array is sorted by address.  Ranges do not overlap, except that mappings
 * are inside their reservation (and come after it). */
struct block {
    uint64_t address, bytes;
    enum block_kind kind;
    CUdevice device;
    CUcontext context; /* its end frees the block; NULL for reservations and mappings */
    struct physical *physical;
    CUmemoryPool pool; /* NULL if it has none */
    bool accessible;
};

/* The caller of all of these holds sim_local. */
extern struct block *sim_blocks;
extern size_t sim_block_count;
size_t sim_first_block(uint64_t address); /* index of the first block at or after the address */
bool sim_insert_block(struct block block);
void sim_remove_block(size_t at);
struct block *sim_find_block(uint64_t address, enum block_kind low, enum block_kind high);
struct block *sim_holder_of(uint64_t address);

/* Takes sim_local.  One copy may span several adjacent mappings. */
bool sim_is_device_memory(CUdeviceptr address, size_t bytes);
/* Called in the child after fork. */
void sim_forget_blocks(void);

#endif
