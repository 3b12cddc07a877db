/* The simulated libcuda.so.1: the table of address ranges. */
#include "sim_blocks.h"

#include <stdlib.h>
#include <string.h>

struct block *sim_blocks;
size_t sim_block_count;
static size_t block_capacity;

void sim_forget_blocks(void)
{
    sim_blocks = NULL;
    sim_block_count = block_capacity = 0;
}

size_t sim_first_block(uint64_t address)
{
    size_t low = 0, high = sim_block_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (sim_blocks[middle].address < address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

bool sim_insert_block(struct block block)
{
    if (sim_block_count == block_capacity) {
        size_t capacity = block_capacity ? block_capacity * 2 : 64;
        struct block *larger = realloc(sim_blocks, capacity * sizeof *larger);
        if (!larger)
            return false;
        sim_blocks = larger;
        block_capacity = capacity;
    }
    size_t at = sim_first_block(block.address);
    while (at < sim_block_count && sim_blocks[at].address == block.address)
        at++;
    memmove(sim_blocks + at + 1, sim_blocks + at, (sim_block_count - at) * sizeof *sim_blocks);
    sim_blocks[at] = block;
    sim_block_count++;
    return true;
}

void sim_remove_block(size_t at)
{
    memmove(sim_blocks + at, sim_blocks + at + 1, (sim_block_count - at - 1) * sizeof *sim_blocks);
    sim_block_count--;
}

struct block *sim_find_block(uint64_t address, enum block_kind low, enum block_kind high)
{
    for (size_t at = sim_first_block(address); at < sim_block_count && sim_blocks[at].address == address; at++)
        if (sim_blocks[at].kind >= low && sim_blocks[at].kind <= high)
            return &sim_blocks[at];
    return NULL;
}

/* Returns the block with contents that has an address. */
struct block *sim_holder_of(uint64_t address)
{
    for (size_t at = sim_first_block(address + 1); at > 0; at--) {
        struct block *block = &sim_blocks[at - 1];
        if (block->kind != BLOCK_RESERVED)
            return address - block->address < block->bytes ? block : NULL;
        if (address - block->address >= block->bytes)
            return NULL;
    }
    return NULL;
}

bool sim_is_device_memory(CUdeviceptr address, size_t bytes)
{
    HOLD(&sim_local);
    while (bytes) {
        struct block *block = sim_holder_of(address);
        if (!block || !block->accessible)
            return false;
        uint64_t inside = block->address + block->bytes - address;
        if (inside >= bytes)
            return true;
        address += inside;
        bytes -= inside;
    }
    return true;
}
