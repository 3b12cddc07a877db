/* The simulated libcuda.so.1: device memory, pools.
 *
 * Facts it follows (CUDA Driver API reference 13.0, "Memory Management" and "Stream Ordered
 * Memory Allocator"): device memory comes in pages of 2 MiB; allocations of at most 1 MiB share
 * pages.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fake_memory.h"

struct CUmemPoolHandle_st {
    CUdevice device;
    uint64_t release_threshold;
};

struct block *sim_blocks;
size_t sim_block_count;
static size_t block_room;
static uint64_t small_bytes[SIM_DEVICES]; /* by ordinal */
static struct CUmemPoolHandle_st default_pool[SIM_DEVICES];

static const uint64_t small_limit = (uint64_t)1 << 20;

void sim_forget_in_child(void)
{
    sim_blocks = NULL;
    sim_block_count = block_room = 0;
    sim_forget_physical();
}

/* ---- the device's account ---- */

static uint64_t pages(uint64_t bytes)
{
    return (bytes + SIM_PAGE_BYTES - 1) / SIM_PAGE_BYTES * SIM_PAGE_BYTES;
}

CUresult sim_charge(uint32_t device, uint64_t bytes, bool context, const char *event)
{
    sim_lock();
    uint64_t used = sim_device_used(device), total = sim->device[device].total_bytes;
    if (bytes > total - used || used + bytes > sim->device[device].peak_bytes) {
        sim_sweep(); /* before a peak is believed and before anybody is refused */
        used = sim_device_used(device);
    }
    bool denied = bytes > total - used || sim_group_denies(sim_me->pid, device, bytes);
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
    uint64_t cost = pages(bytes);
    if (bytes <= small_limit)
        cost = pages(small_bytes[ordinal] + bytes) - pages(small_bytes[ordinal]);
    CUresult result = sim_charge(sim_me->visible[ordinal], cost, false, "alloc");
    if (!result && bytes <= small_limit)
        small_bytes[ordinal] += bytes;
    return result;
}

void sim_give(CUdevice ordinal, uint64_t bytes)
{
    uint64_t cost = pages(bytes);
    if (bytes <= small_limit) {
        cost = pages(small_bytes[ordinal]) - pages(small_bytes[ordinal] - bytes);
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
    if (sim_block_count == block_room) {
        size_t room = block_room ? block_room * 2 : 64;
        struct block *larger = realloc(sim_blocks, room * sizeof *larger);
        if (!larger)
            return false;
        sim_blocks = larger;
        block_room = room;
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

/* ---- plain, pitched, managed, stream ordered ---- */

static CUresult allocate(CUdeviceptr *out, uint64_t bytes, CUdevice ordinal, enum block_kind kind)
{
    if (!out || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes > (uint64_t)1 << 46)
        return CUDA_ERROR_OUT_OF_MEMORY;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct block block = {(uint64_t)(uintptr_t)memory, bytes, kind, ordinal, sim_context, NULL, true};
    pthread_mutex_lock(&sim_local);
    CUresult result = sim_take(ordinal, bytes);
    if (!result && !sim_insert_block(block)) {
        sim_give(ordinal, bytes);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&sim_local);
    if (result)
        munmap(memory, bytes);
    else
        *out = block.address;
    return result;
}

static CUresult release(CUdeviceptr address)
{
    if (!address)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&sim_local);
    struct block *found = sim_find_block(address, BLOCK_PLAIN, BLOCK_MANAGED);
    if (found) {
        struct block block = *found;
        sim_remove_block((size_t)(found - sim_blocks));
        munmap((void *)(uintptr_t)block.address, block.bytes);
        sim_give(block.device, block.bytes);
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
            sim_give(block.device, block.bytes);
        }
}

API CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes)
{
    ENTER(SIM_NEED_CONTEXT);
    return allocate(out, bytes, sim_context->device, BLOCK_PLAIN);
}

API CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element)
{
    ENTER(SIM_NEED_CONTEXT);
    if (!pitch || (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    *pitch = (width + 511) / 512 * 512;
    return allocate(out, *pitch * height, sim_context->device, BLOCK_PLAIN);
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
    CUresult result = allocate(out, bytes, sim_context->device, BLOCK_MANAGED);
    if (!result)
        sim_hinder(SIM_HINDERED_MANAGED);
    return result;
}

API CUresult cuMemFree_v2(CUdeviceptr address)
{
    ENTER(SIM_NEED_CONTEXT);
    return release(address);
}

API CUresult cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    (void)stream;
    return allocate(out, bytes, sim_context->device, BLOCK_PLAIN);
}

API CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    (void)stream;
    return pool ? allocate(out, bytes, pool->device, BLOCK_PLAIN) : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    (void)stream;
    return address ? release(address) : CUDA_ERROR_INVALID_VALUE;
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
    CUresult result = allocate(&address, element * shape->NumChannels * shape->Width * (shape->Height ? shape->Height : 1),
                               sim_context->device, BLOCK_PLAIN);
    if (!result)
        *out = (CUarray)(uintptr_t)address;
    return result;
}

API CUresult cuArrayDestroy(CUarray array)
{
    ENTER(SIM_NEED_CONTEXT);
    return array ? release((uint64_t)(uintptr_t)array) : CUDA_ERROR_INVALID_HANDLE;
}

/* ---- pools ---- */

API CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice ordinal)
{
    if (sim_physical(ordinal) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    default_pool[ordinal].device = ordinal;
    *pool = &default_pool[ordinal];
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice ordinal)
{
    return cuDeviceGetDefaultMemPool(pool, ordinal);
}

API CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties)
{
    ENTER(SIM_NEED_INIT);
    if (!pool || !properties || properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        sim_physical(properties->location.id) < 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct CUmemPoolHandle_st *made = calloc(1, sizeof *made);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->device = properties->location.id;
    *pool = made;
    return CUDA_SUCCESS;
}

API CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    ENTER(SIM_NEED_INIT);
    if (!pool || pool == &default_pool[pool->device])
        return CUDA_ERROR_INVALID_VALUE;
    free(pool);
    return CUDA_SUCCESS;
}

/* Freed memory goes back at once, so the threshold has no effect; it is kept and answered. */
API CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    ENTER(SIM_NEED_INIT);
    if (pool && attribute == 4) /* CU_MEMPOOL_ATTR_RELEASE_THRESHOLD */
        memcpy(&pool->release_threshold, value, sizeof pool->release_threshold);
    return pool ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    ENTER(SIM_NEED_INIT);
    if (!pool || attribute != 4)
        return CUDA_ERROR_NOT_SUPPORTED;
    memcpy(value, &pool->release_threshold, sizeof pool->release_threshold);
    return CUDA_SUCCESS;
}

API CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *access, size_t count)
{
    ENTER(SIM_NEED_INIT);
    if (!pool || !access || !count)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (access[i].flags && access[i].location.id != pool->device)
            sim_hinder(SIM_HINDERED_PEER);
    return CUDA_SUCCESS;
}

API CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    ENTER(SIM_NEED_INIT);
    (void)keep;
    return pool ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* The per-thread default stream variants differ only in the stream that 0 names. */
#define ALSO(name, suffix) extern __typeof__(name) name##suffix __attribute__((alias(#name), visibility("default")))
ALSO(cuMemAllocAsync, _ptsz);
ALSO(cuMemAllocFromPoolAsync, _ptsz);
ALSO(cuMemFreeAsync, _ptsz);
