/* The simulated libcuda.so.1: device memory, virtual memory management, pools, copies.
 *
 * Facts it follows (CUDA Driver API reference 13.0, "Memory Management", "Virtual Memory
 * Management", "Stream Ordered Memory Allocator"):
 *   - Device memory comes in pages of 2 MiB; allocations of at most 1 MiB share pages.
 *   - A physical allocation (cuMemCreate) lives until it is released *and* no longer mapped.
 *   - A synchronous copy from the device waits for the work submitted before it.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake_cuda.h"

enum block_kind { BLOCK_PLAIN, BLOCK_MANAGED, BLOCK_RESERVED, BLOCK_MAPPED };

/* A physical allocation of cuMemCreate: a file, so that it can be mapped anywhere. */
struct physical {
    struct physical *next;
    int fd;
    uint64_t bytes;
    CUdevice device;
    unsigned holders, maps;
};

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

struct CUmemPoolHandle_st {
    CUdevice device;
    uint64_t release_threshold;
};

static struct block *blocks;
static size_t block_count, block_room;
static struct physical *physicals;
static uint64_t small_bytes[SIM_DEVICES]; /* by ordinal */
static struct CUmemPoolHandle_st default_pool[SIM_DEVICES];

static const uint64_t small_limit = (uint64_t)1 << 20;

void sim_forget_in_child(void)
{
    blocks = NULL;
    block_count = block_room = 0;
    physicals = NULL;
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

static CUresult take(CUdevice ordinal, uint64_t bytes)
{
    uint64_t cost = pages(bytes);
    if (bytes <= small_limit)
        cost = pages(small_bytes[ordinal] + bytes) - pages(small_bytes[ordinal]);
    CUresult result = sim_charge(sim_me->visible[ordinal], cost, false, "alloc");
    if (!result && bytes <= small_limit)
        small_bytes[ordinal] += bytes;
    return result;
}

static void give(CUdevice ordinal, uint64_t bytes)
{
    uint64_t cost = pages(bytes);
    if (bytes <= small_limit) {
        cost = pages(small_bytes[ordinal]) - pages(small_bytes[ordinal] - bytes);
        small_bytes[ordinal] -= bytes;
    }
    sim_refund(sim_me->visible[ordinal], cost, false, "free");
}

/* ---- the table of blocks (sim_local held) ---- */

static size_t first_at_or_after(uint64_t address)
{
    size_t low = 0, high = block_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle].address < address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool insert_block(struct block block)
{
    if (block_count == block_room) {
        size_t room = block_room ? block_room * 2 : 64;
        struct block *larger = realloc(blocks, room * sizeof *larger);
        if (!larger)
            return false;
        blocks = larger;
        block_room = room;
    }
    size_t at = first_at_or_after(block.address);
    while (at < block_count && blocks[at].address == block.address)
        at++;
    memmove(blocks + at + 1, blocks + at, (block_count - at) * sizeof *blocks);
    blocks[at] = block;
    block_count++;
    return true;
}

static void remove_block(size_t at)
{
    memmove(blocks + at, blocks + at + 1, (block_count - at - 1) * sizeof *blocks);
    block_count--;
}

static struct block *find_block(uint64_t address, enum block_kind low, enum block_kind high)
{
    for (size_t at = first_at_or_after(address); at < block_count && blocks[at].address == address; at++)
        if (blocks[at].kind >= low && blocks[at].kind <= high)
            return &blocks[at];
    return NULL;
}

/* The block with contents that holds an address. */
static struct block *holder_of(uint64_t address)
{
    for (size_t at = first_at_or_after(address + 1); at > 0; at--) {
        struct block *block = &blocks[at - 1];
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
        struct block *block = holder_of(address);
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
    CUresult result = take(ordinal, bytes);
    if (!result && !insert_block(block)) {
        give(ordinal, bytes);
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
    struct block *found = find_block(address, BLOCK_PLAIN, BLOCK_MANAGED);
    if (found) {
        struct block block = *found;
        remove_block((size_t)(found - blocks));
        munmap((void *)(uintptr_t)block.address, block.bytes);
        give(block.device, block.bytes);
    }
    pthread_mutex_unlock(&sim_local);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void sim_drop_context_memory(CUcontext context)
{
    for (size_t at = block_count; at > 0; at--)
        if (blocks[at - 1].context == context) {
            struct block block = blocks[at - 1];
            remove_block(at - 1);
            munmap((void *)(uintptr_t)block.address, block.bytes);
            give(block.device, block.bytes);
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

static void hinder(enum sim_hindrance what)
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
        hinder(SIM_HINDERED_MANAGED);
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
    struct block *block = holder_of(address);
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
    struct block *block = holder_of(address);
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
            hinder(SIM_HINDERED_PEER);
    return CUDA_SUCCESS;
}

API CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    ENTER(SIM_NEED_INIT);
    (void)keep;
    return pool ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- virtual memory management ---- */

API CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties, int option)
{
    (void)option;
    if (!granularity || !properties)
        return CUDA_ERROR_INVALID_VALUE;
    *granularity = SIM_PAGE_BYTES;
    return CUDA_SUCCESS;
}

static struct physical *find_physical(CUmemGenericAllocationHandle handle)
{
    struct physical *at = physicals;
    while (at && (uint64_t)(uintptr_t)at != handle)
        at = at->next;
    return at && at->holders ? at : NULL;
}

static void end_physical(struct physical *ended)
{
    if (ended->holders || ended->maps)
        return;
    struct physical **at = &physicals;
    while (*at != ended)
        at = &(*at)->next;
    *at = ended->next;
    close(ended->fd);
    give(ended->device, ended->bytes);
    free(ended);
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *properties,
                         unsigned long long flags)
{
    ENTER(SIM_NEED_INIT);
    if (!out || !bytes || bytes % SIM_PAGE_BYTES || flags || !properties ||
        properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE || sim_physical(properties->location.id) < 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct physical *made = calloc(1, sizeof *made);
    int fd = memfd_create("gpushare-sim", MFD_CLOEXEC);
    if (!made || fd < 0 || ftruncate(fd, (off_t)bytes)) {
        free(made);
        if (fd >= 0)
            close(fd);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *made = (struct physical){NULL, fd, bytes, properties->location.id, 1, 0};
    pthread_mutex_lock(&sim_local);
    CUresult result = take(made->device, bytes);
    if (!result)
        made->next = physicals, physicals = made;
    pthread_mutex_unlock(&sim_local);
    if (result) {
        close(fd);
        free(made);
    } else {
        *out = (uint64_t)(uintptr_t)made;
    }
    return result;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    ENTER(SIM_NEED_INIT);
    pthread_mutex_lock(&sim_local);
    struct physical *found = find_physical(handle);
    if (found) {
        found->holders--;
        end_physical(found);
    }
    pthread_mutex_unlock(&sim_local);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr near, unsigned long long flags)
{
    ENTER(SIM_NEED_INIT);
    (void)alignment, (void)near;
    if (!out || !bytes || bytes % SIM_PAGE_BYTES || flags)
        return CUDA_ERROR_INVALID_VALUE;
    void *range = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct block block = {(uint64_t)(uintptr_t)range, bytes, BLOCK_RESERVED, 0, NULL, NULL, false};
    pthread_mutex_lock(&sim_local);
    bool kept = insert_block(block);
    pthread_mutex_unlock(&sim_local);
    if (!kept) {
        munmap(range, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = block.address;
    return CUDA_SUCCESS;
}

static struct block *reservation_of(uint64_t address, uint64_t bytes)
{
    for (size_t i = first_at_or_after(address + 1); i > 0; i--)
        if (blocks[i - 1].kind == BLOCK_RESERVED && address - blocks[i - 1].address < blocks[i - 1].bytes)
            return blocks[i - 1].address + blocks[i - 1].bytes - address >= bytes ? &blocks[i - 1] : NULL;
    return NULL;
}

static bool any_mapping(uint64_t address, uint64_t bytes)
{
    for (size_t at = 0; at < block_count; at++)
        if (blocks[at].kind == BLOCK_MAPPED && blocks[at].address < address + bytes &&
            address < blocks[at].address + blocks[at].bytes)
            return true;
    return false;
}

API CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes)
{
    ENTER(SIM_NEED_INIT);
    pthread_mutex_lock(&sim_local);
    struct block *found = find_block(address, BLOCK_RESERVED, BLOCK_RESERVED);
    bool fits = found && found->bytes == bytes && !any_mapping(address, bytes);
    if (fits) {
        remove_block((size_t)(found - blocks));
        munmap((void *)(uintptr_t)address, bytes);
    }
    pthread_mutex_unlock(&sim_local);
    return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags)
{
    ENTER(SIM_NEED_INIT);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim_local);
    struct physical *physical = find_physical(handle);
    if (physical && !flags && bytes && bytes % SIM_PAGE_BYTES == 0 && offset <= physical->bytes &&
        bytes <= physical->bytes - offset && reservation_of(address, bytes) && !any_mapping(address, bytes)) {
        struct block block = {address, bytes, BLOCK_MAPPED, physical->device, NULL, physical, false};
        void *at = mmap((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, physical->fd,
                        (off_t)offset);
        result = at != MAP_FAILED && insert_block(block) ? CUDA_SUCCESS : CUDA_ERROR_MAP_FAILED;
        physical->maps += !result;
    }
    pthread_mutex_unlock(&sim_local);
    return result;
}

API CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    ENTER(SIM_NEED_INIT);
    bool any = false, peer = false;
    pthread_mutex_lock(&sim_local);
    for (size_t i = 0; access && count && i < block_count; i++) {
        struct block *block = &blocks[i];
        if (block->kind != BLOCK_MAPPED || block->address < address ||
            block->address + block->bytes > address + bytes)
            continue;
        any = true;
        for (size_t j = 0; j < count; j++)
            if (access[j].location.id == block->device)
                block->accessible = access[j].flags == 3;
            else
                peer = peer || access[j].flags;
    }
    pthread_mutex_unlock(&sim_local);
    if (peer)
        hinder(SIM_HINDERED_PEER);
    return any ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    ENTER(SIM_NEED_INIT);
    bool any = false;
    pthread_mutex_lock(&sim_local);
    for (size_t i = block_count; i > 0; i--) {
        struct block block = blocks[i - 1];
        if (block.kind != BLOCK_MAPPED || block.address < address || block.address + block.bytes > address + bytes)
            continue;
        any = true;
        remove_block(i - 1);
        (void)!mmap((void *)(uintptr_t)block.address, block.bytes, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        block.physical->maps--;
        end_physical(block.physical);
    }
    pthread_mutex_unlock(&sim_local);
    return any ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address)
{
    ENTER(SIM_NEED_INIT);
    pthread_mutex_lock(&sim_local);
    struct block *block = holder_of((uint64_t)(uintptr_t)address);
    bool mapped = out && block && block->kind == BLOCK_MAPPED;
    if (mapped) {
        block->physical->holders++;
        *out = (uint64_t)(uintptr_t)block->physical;
    }
    pthread_mutex_unlock(&sim_local);
    return mapped ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* A descriptor that nobody can import here: enough to be seen by the checkpoint. */
API CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type, unsigned long long flags)
{
    ENTER(SIM_NEED_INIT);
    if (!out || type != 1 || flags) /* CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR */
        return CUDA_ERROR_NOT_SUPPORTED;
    pthread_mutex_lock(&sim_local);
    struct physical *physical = find_physical(handle);
    int fd = physical ? dup(physical->fd) : -1;
    pthread_mutex_unlock(&sim_local);
    if (fd < 0)
        return CUDA_ERROR_INVALID_VALUE;
    *(int *)out = fd;
    hinder(SIM_HINDERED_EXPORT);
    return CUDA_SUCCESS;
}

/* Sharing between processes is announced, never carried out. */
API CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr address)
{
    ENTER(SIM_NEED_CONTEXT);
    if (!out || !sim_is_device_memory(address, 1))
        return CUDA_ERROR_INVALID_VALUE;
    memset(out, 0, sizeof *out);
    memcpy(out->reserved, &address, sizeof address);
    hinder(SIM_HINDERED_IPC);
    return CUDA_SUCCESS;
}

API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags)
{
    ENTER(SIM_NEED_CONTEXT);
    (void)out, (void)handle, (void)flags;
    return CUDA_ERROR_NOT_SUPPORTED;
}

/* ---- host memory ---- */

API CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned flags)
{
    ENTER(SIM_NEED_CONTEXT);
    (void)flags;
    if (!out || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    *out = malloc(bytes);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuMemAllocHost_v2(void **out, size_t bytes)
{
    return cuMemHostAlloc(out, bytes, 0);
}

API CUresult cuMemFreeHost(void *memory)
{
    ENTER(SIM_NEED_CONTEXT);
    free(memory);
    return CUDA_SUCCESS;
}

API CUresult cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags)
{
    ENTER(SIM_NEED_CONTEXT);
    (void)flags;
    return memory && bytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemHostUnregister(void *memory)
{
    ENTER(SIM_NEED_CONTEXT);
    return memory ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- copies and sets ---- */

static void wait_for(CUstream stream)
{
    uint64_t done = sim_stream_done_ns(stream), now = sim_now_ns();
    if (done > now)
        sim_sleep_ns(done - now);
}

static CUresult copy(uint64_t to, bool to_device, uint64_t from, bool from_device, size_t bytes)
{
    if ((to_device && !sim_is_device_memory(to, bytes)) || (from_device && !sim_is_device_memory(from, bytes)))
        return CUDA_ERROR_INVALID_VALUE;
    memmove((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
    return CUDA_SUCCESS;
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes)
{
    ENTER(SIM_NEED_CONTEXT);
    wait_for(NULL);
    return copy(to, true, (uint64_t)(uintptr_t)from, false, bytes);
}

API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes)
{
    ENTER(SIM_NEED_CONTEXT);
    wait_for(NULL);
    return copy((uint64_t)(uintptr_t)to, false, from, true, bytes);
}

API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    ENTER(SIM_NEED_CONTEXT);
    return copy(to, true, from, true, bytes);
}

API CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    ENTER(SIM_NEED_CONTEXT);
    wait_for(NULL);
    return copy(to, false, from, false, bytes);
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    (void)stream;
    return copy(to, true, (uint64_t)(uintptr_t)from, false, bytes);
}

API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    (void)stream;
    return copy((uint64_t)(uintptr_t)to, false, from, true, bytes);
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    (void)stream;
    return copy(to, true, from, true, bytes);
}

API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    (void)stream;
    return copy(to, false, from, false, bytes);
}

static CUresult set8(CUdeviceptr to, unsigned char value, size_t count)
{
    if (!sim_is_device_memory(to, count))
        return CUDA_ERROR_INVALID_VALUE;
    memset((void *)(uintptr_t)to, value, count);
    return CUDA_SUCCESS;
}

static CUresult set32(CUdeviceptr to, unsigned value, size_t count)
{
    if (to % sizeof value || !sim_is_device_memory(to, count * sizeof value))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        ((unsigned *)(uintptr_t)to)[i] = value;
    return CUDA_SUCCESS;
}

API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count)
{
    ENTER(SIM_NEED_CONTEXT);
    return set8(to, value, count);
}

API CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count)
{
    ENTER(SIM_NEED_CONTEXT);
    return set32(to, value, count);
}

API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    (void)stream;
    return set8(to, value, count);
}

API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    (void)stream;
    return set32(to, value, count);
}

/* The per-thread default stream variants differ only in the stream that 0 names. */
#define ALSO(name, suffix) extern __typeof__(name) name##suffix __attribute__((alias(#name), visibility("default")))
ALSO(cuMemAllocAsync, _ptsz);
ALSO(cuMemAllocFromPoolAsync, _ptsz);
ALSO(cuMemFreeAsync, _ptsz);
ALSO(cuMemcpyHtoD_v2, _ptds);
ALSO(cuMemcpyDtoH_v2, _ptds);
ALSO(cuMemcpyDtoD_v2, _ptds);
ALSO(cuMemcpy, _ptds);
ALSO(cuMemcpyHtoDAsync_v2, _ptsz);
ALSO(cuMemcpyDtoHAsync_v2, _ptsz);
ALSO(cuMemcpyDtoDAsync_v2, _ptsz);
ALSO(cuMemcpyAsync, _ptsz);
ALSO(cuMemsetD8_v2, _ptds);
ALSO(cuMemsetD32_v2, _ptds);
ALSO(cuMemsetD8Async, _ptsz);
ALSO(cuMemsetD32Async, _ptsz);
