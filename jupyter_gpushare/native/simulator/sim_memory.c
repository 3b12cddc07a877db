/* The simulated libcuda.so.1: device memory.  Pools are in sim_pool.c.
 *
 * Fact (CUDA Driver API reference 13.0, "Memory Management"): device memory comes in pages of 2 MiB; allocations of at most 1 MiB share
 * pages.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "sim_memory.h"

struct block *sim_blocks;
size_t sim_block_count;
static size_t block_capacity;
static uint64_t small_bytes[SIM_DEVICES]; /* by ordinal */

static const uint64_t small_limit = (uint64_t)1 << 20;

void sim_forget_in_child(void)
{
    sim_blocks = NULL;
    sim_block_count = block_capacity = 0;
    sim_forget_physical();
    sim_forget_pools();
}

/* ---- the device's account ---- */

uint64_t sim_pages(uint64_t bytes)
{
    return (bytes + SIM_PAGE_BYTES - 1) / SIM_PAGE_BYTES * SIM_PAGE_BYTES;
}

CUresult sim_charge(uint32_t device, uint64_t bytes, bool context, const char *event)
{
    sim_lock();
    /* Not all that is shown as free can be taken: the driver keeps some for itself and large pages
     * leave gaps (NVML API reference r580, nvmlMemory_v2_t `reserved`). */
    uint64_t used = sim_device_used(device), total = sim->device[device].total_bytes - sim->unusable_bytes;
    if (used > total || bytes > total - used || used + bytes > sim->device[device].peak_bytes) {
        sim_sweep(); /* before a peak is recorded and before a denial */
        used = sim_device_used(device);
    }
    bool denied = used > total || bytes > total - used || sim_group_denies(sim_me->pid, device, bytes);
    CUresult result = denied ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
    if (!result) {
        (context ? sim_me->context_bytes : sim_me->used_bytes)[device] += bytes;
        if (used + bytes > sim->device[device].peak_bytes)
            sim->device[device].peak_bytes = used + bytes;
        if (bytes || context)
            sim_note(sim_me, event, (int)device, bytes);
    }
    sim_unlock();
    return result;
}

void sim_refund(uint32_t device, uint64_t bytes, bool context, const char *event)
{
    sim_lock();
    uint64_t *held = (context ? sim_me->context_bytes : sim_me->used_bytes) + device;
    *held -= bytes < *held ? bytes : *held;
    if (bytes || context)
        sim_note(sim_me, event, (int)device, bytes);
    sim_unlock();
}

CUresult sim_take(CUdevice ordinal, uint64_t bytes)
{
    uint64_t cost = sim_pages(bytes);
    if (bytes <= small_limit)
        cost = sim_pages(small_bytes[ordinal] + bytes) - sim_pages(small_bytes[ordinal]);
    CUresult result = sim_charge(sim_me->visible[ordinal], cost, false, "alloc");
    if (!result && bytes <= small_limit)
        small_bytes[ordinal] += bytes;
    return result;
}

void sim_give(CUdevice ordinal, uint64_t bytes)
{
    uint64_t cost = sim_pages(bytes);
    if (bytes <= small_limit) {
        cost = sim_pages(small_bytes[ordinal]) - sim_pages(small_bytes[ordinal] - bytes);
        small_bytes[ordinal] -= bytes;
    }
    sim_refund(sim_me->visible[ordinal], cost, false, "free");
}

/* ---- the table of blocks (sim_local held) ---- */

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

/* The block with contents that holds an address. */
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

/* One copy may run over several mappings that lie side by side. */
static bool is_device(uint64_t address, uint64_t bytes)
{
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

bool sim_is_device_memory(CUdeviceptr address, size_t bytes)
{
    pthread_mutex_lock(&sim_local);
    bool yes = is_device(address, bytes);
    pthread_mutex_unlock(&sim_local);
    return yes;
}

/* ---- plain, pitched, managed ---- */

static void give_block(const struct block *block)
{
    if (block->pool)
        sim_pool_give(block->pool, block->bytes);
    else
        sim_give(block->device, block->bytes);
}

CUresult sim_allocate(CUdeviceptr *out, uint64_t bytes, CUdevice ordinal, enum block_kind kind, CUmemoryPool pool)
{
    if (!out || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes > (uint64_t)1 << 46)
        return CUDA_ERROR_OUT_OF_MEMORY;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct block block = {(uint64_t)(uintptr_t)memory, bytes, kind, ordinal, sim_context, NULL, pool, true};
    pthread_mutex_lock(&sim_local);
    CUresult result = pool ? sim_pool_take(pool, bytes) : sim_take(ordinal, bytes);
    if (!result && !sim_insert_block(block)) {
        give_block(&block);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&sim_local);
    if (result)
        munmap(memory, bytes);
    else
        *out = block.address;
    return result;
}

CUresult sim_release(CUdeviceptr address)
{
    if (!address)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&sim_local);
    struct block *found = sim_find_block(address, BLOCK_PLAIN, BLOCK_MANAGED);
    if (found) {
        struct block block = *found;
        sim_remove_block((size_t)(found - sim_blocks));
        munmap((void *)(uintptr_t)block.address, block.bytes);
        give_block(&block);
    }
    pthread_mutex_unlock(&sim_local);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void sim_drop_context_memory(CUcontext context)
{
    for (size_t at = sim_block_count; at > 0; at--)
        if (sim_blocks[at - 1].context == context) {
            struct block block = sim_blocks[at - 1];
            sim_remove_block(at - 1);
            munmap((void *)(uintptr_t)block.address, block.bytes);
            give_block(&block);
        }
    sim_pools_release(true);
}

API CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes)
{
    ENTER(SIM_NEED_CONTEXT);
    return sim_allocate(out, bytes, sim_context->device, BLOCK_PLAIN, NULL);
}

API CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element)
{
    ENTER(SIM_NEED_CONTEXT);
    if (!pitch || (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    *pitch = (width + 511) / 512 * 512;
    return sim_allocate(out, *pitch * height, sim_context->device, BLOCK_PLAIN, NULL);
}

void sim_hinder(enum sim_hindrance what)
{
    sim_lock();
    sim_me->hindrances |= what;
    sim_unlock();
}

API CUresult cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned flags)
{
    ENTER(SIM_NEED_CONTEXT);
    if (flags != 1 && flags != 2)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_allocate(out, bytes, sim_context->device, BLOCK_MANAGED, NULL);
    if (!result)
        sim_hinder(SIM_HINDERED_MANAGED);
    return result;
}

API CUresult cuMemFree_v2(CUdeviceptr address)
{
    ENTER(SIM_NEED_CONTEXT);
    return sim_release(address);
}

API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    ENTER(SIM_NEED_CONTEXT);
    uint32_t device = sim_current_device();
    sim_lock();
    sim_sweep();
    uint64_t total = sim->device[device].total_bytes, used = sim_device_used(device);
    sim_unlock();
    if (total_bytes)
        *total_bytes = total;
    if (free_bytes)
        *free_bytes = used < total ? total - used : 0;
    return CUDA_SUCCESS;
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address)
{
    ASK;
    pthread_mutex_lock(&sim_local);
    struct block *block = sim_holder_of(address);
    if (block && base)
        *base = block->address;
    if (block && bytes)
        *bytes = block->bytes;
    pthread_mutex_unlock(&sim_local);
    return block ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address)
{
    ASK;
    pthread_mutex_lock(&sim_local);
    struct block *block = sim_holder_of(address);
    CUresult result = block ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (block && attribute == 2) /* CU_POINTER_ATTRIBUTE_MEMORY_TYPE */
        *(unsigned *)data = 2;   /* CU_MEMORYTYPE_DEVICE */
    else if (block && attribute == 3)
        *(CUdeviceptr *)data = address;
    else if (block && attribute == 8) /* CU_POINTER_ATTRIBUTE_IS_MANAGED */
        *(unsigned *)data = block->kind == BLOCK_MANAGED;
    else if (block && attribute == 9) /* CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL */
        *(int *)data = block->device;
    else if (block)
        result = CUDA_ERROR_NOT_SUPPORTED;
    pthread_mutex_unlock(&sim_local);
    return result;
}

/* Arrays: memory with a shape, which nothing here looks into. */
API CUresult cuArrayCreate_v2(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *shape)
{
    ENTER(SIM_NEED_CONTEXT);
    if (!out || !shape || !shape->Width || shape->Width > 1u << 20 || shape->Height > 1u << 20)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t element = shape->Format == 1 || shape->Format == 8 ? 1 : shape->Format == 3 || shape->Format == 10 || shape->Format == 32 ? 4 : 2;
    CUdeviceptr address;
    CUresult result = sim_allocate(&address, element * shape->NumChannels * shape->Width * (shape->Height ? shape->Height : 1),
                               sim_context->device, BLOCK_PLAIN, NULL);
    if (!result)
        *out = (CUarray)(uintptr_t)address;
    return result;
}

API CUresult cuArrayDestroy(CUarray array)
{
    ENTER(SIM_NEED_CONTEXT);
    return array ? sim_release((uint64_t)(uintptr_t)array) : CUDA_ERROR_INVALID_HANDLE;
}
