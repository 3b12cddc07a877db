/* The simulated libcuda.so.1: device memory.  Bytes are in sim_account.c, addresses in sim_blocks.c,
 * pools in sim_pool.c. */
#define _GNU_SOURCE
#include "sim_memory.h"

#include <sys/mman.h>

#include "sim_account.h"
#include "sim_pool.h"
#include "sim_stream.h"

/* ---- plain, pitched, managed ---- */

/* A managed pool takes device memory for each of its allocations. */
static void give_block(const struct block *block, const struct sim_free *how)
{
    if (block->pool)
        sim_pool_give(block->pool, block->bytes, how);
    if (!block->pool || block->kind == BLOCK_MANAGED)
        sim_give(block->device, block->bytes);
}

static CUresult take_block(const struct block *block, CUstream stream)
{
    if (block->pool && block->kind != BLOCK_MANAGED)
        return sim_pool_take(block->pool, block->bytes, stream);
    CUresult result = sim_take(block->device, block->bytes);
    return result || !block->pool ? result : sim_pool_take(block->pool, block->bytes, stream);
}

static CUresult allocate(CUdeviceptr *out, uint64_t bytes, CUdevice ordinal, enum block_kind kind, CUmemoryPool pool,
                         CUstream stream)
{
    if (!out || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes > (uint64_t)1 << 46)
        return CUDA_ERROR_OUT_OF_MEMORY;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct block block = {(uint64_t)(uintptr_t)memory, bytes, kind, ordinal, sim_context, NULL, pool, true};
    HOLD(&sim_local);
    CUresult result = take_block(&block, stream);
    if (!result && !sim_insert_block(block)) {
        give_block(&block, NULL);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result)
        munmap(memory, bytes);
    else
        *out = block.address;
    return result;
}

CUresult sim_allocate(CUdeviceptr *out, uint64_t bytes, CUdevice ordinal, enum block_kind kind)
{
    return allocate(out, bytes, ordinal, kind, NULL, NULL);
}

static void end_block(size_t at, const struct sim_free *how)
{
    struct block block = sim_blocks[at];
    sim_remove_block(at);
    munmap((void *)(uintptr_t)block.address, block.bytes);
    give_block(&block, how);
}

static CUresult release(CUdeviceptr address, const struct sim_free *how)
{
    if (!address)
        return CUDA_SUCCESS;
    HOLD(&sim_local);
    struct block *found = sim_find_block(address, BLOCK_PLAIN, BLOCK_MANAGED);
    if (!found)
        return CUDA_ERROR_INVALID_VALUE;
    end_block((size_t)(found - sim_blocks), how);
    return CUDA_SUCCESS;
}

CUresult sim_release(CUdeviceptr address)
{
    return release(address, NULL);
}

void sim_drop_context_memory(CUcontext context)
{
    for (size_t at = sim_block_count; at > 0; at--)
        if (sim_blocks[at - 1].context == context)
            end_block(at - 1, NULL);
    sim_pools_release(NULL, true);
}

API CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes)
{
    ENTER(SIM_NEED_CONTEXT);
    REFUSE_IF(sim_unsafe());
    return sim_allocate(out, bytes, sim_context->device, BLOCK_PLAIN);
}

API CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element)
{
    ENTER(SIM_NEED_CONTEXT);
    REFUSE_IF(sim_unsafe());
    if (!pitch || (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    *pitch = (width + 511) / 512 * 512;
    return sim_allocate(out, *pitch * height, sim_context->device, BLOCK_PLAIN);
}

API CUresult cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned flags)
{
    ENTER(SIM_NEED_CONTEXT);
    REFUSE_IF(sim_unsafe());
    if (flags != 1 && flags != 2)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_allocate(out, bytes, sim_context->device, BLOCK_MANAGED);
    if (!result)
        sim_hinder(SIM_HINDERED_MANAGED);
    return result;
}

API CUresult cuMemFree_v2(CUdeviceptr address)
{
    ENTER(SIM_NEED_CONTEXT);
    REFUSE_IF(sim_unsafe());
    return sim_release(address);
}

/* ---- stream ordered ---- */

/* Returns the stream in whose order a pool works; NULL (the order of every stream) for 0 to 2, the default
 * streams, which wait for each other in the simulator. */
static CUstream ordered_by(CUstream stream)
{
    return (uintptr_t)stream > 2 ? stream : NULL;
}

API CUresult cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    REFUSE_IF(sim_conflict(stream));
    CUmemoryPool pool = sim_pool_of(sim_context->device);
    return pool ? allocate(out, bytes, sim_context->device, BLOCK_PLAIN, pool, ordered_by(stream)) : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    REFUSE_IF(sim_conflict(stream));
    if (!pool)
        return CUDA_ERROR_INVALID_VALUE;
    CUdevice ordinal = sim_pool_device(pool) < 0 ? sim_context->device : sim_pool_device(pool);
    return allocate(out, bytes, ordinal, sim_pool_is_managed(pool) ? BLOCK_MANAGED : BLOCK_PLAIN, pool, ordered_by(stream));
}

API CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    REFUSE_IF(sim_conflict(stream));
    struct sim_free how = {ordered_by(stream), sim_stream_mark(stream)};
    return address ? release(address, &how) : CUDA_ERROR_INVALID_VALUE;
}

/* ---- queries ---- */

API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    ENTER_BY(sim_enter(SIM_NEED_CONTEXT, false));
    uint32_t device = sim_current_device();
    HOLD_STATE;
    sim_sweep();
    uint64_t total = sim->device[device].total_bytes, used = sim_device_used(device) + sim->reserved_bytes;
    if (total_bytes)
        *total_bytes = total;
    if (free_bytes)
        *free_bytes = used < total ? total - used : 0;
    return CUDA_SUCCESS;
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address)
{
    ASK;
    HOLD(&sim_local);
    struct block *block = sim_holder_of(address);
    if (block && base)
        *base = block->address;
    if (block && bytes)
        *bytes = block->bytes;
    return block ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address)
{
    ASK;
    HOLD(&sim_local);
    struct block *block = sim_holder_of(address);
    if (!block)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute == 2) /* CU_POINTER_ATTRIBUTE_MEMORY_TYPE: 1 is host, 2 is device */
        *(unsigned *)data = block->pool && sim_pool_device(block->pool) < 0 && block->kind == BLOCK_PLAIN ? 1 : 2;
    else if (attribute == 3)
        *(CUdeviceptr *)data = address;
    else if (attribute == 8) /* CU_POINTER_ATTRIBUTE_IS_MANAGED */
        *(unsigned *)data = block->kind == BLOCK_MANAGED;
    else if (attribute == 9) /* CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL */
        *(int *)data = block->device;
    else
        return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

/* Arrays: memory with a shape, whose contents the simulator never reads. */
API CUresult cuArrayCreate_v2(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *shape)
{
    ENTER(SIM_NEED_CONTEXT);
    if (!out || !shape || !shape->Width || shape->Width > 1u << 20 || shape->Height > 1u << 20)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t element = shape->Format == 1 || shape->Format == 8 ? 1 : shape->Format == 3 || shape->Format == 10 || shape->Format == 32 ? 4 : 2;
    CUdeviceptr address;
    CUresult result = sim_allocate(&address, element * shape->NumChannels * shape->Width * (shape->Height ? shape->Height : 1),
                               sim_context->device, BLOCK_PLAIN);
    if (!result)
        *out = (CUarray)(uintptr_t)address;
    return result;
}

API CUresult cuArrayDestroy(CUarray array)
{
    ENTER(SIM_NEED_CONTEXT);
    return array ? sim_release((uint64_t)(uintptr_t)array) : CUDA_ERROR_INVALID_HANDLE;
}
