/* The simulated libcuda.so.1: virtual memory management, and memory shared with other processes.
 *
 * Fact (CUDA Driver API reference 13.0, "Virtual Memory Management"; cuda.h 13.5, cuMemRelease): a
 * physical allocation (cuMemCreate) lives until it is released *and* no longer mapped *and* its shareable
 * counterparts are released, wherever they are.
 *
 * Not simulated: memory that outlives its process because another one has a counterpart.
 */
#define _GNU_SOURCE
#include "sim_virtual.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sim_account.h"
#include "sim_blocks.h"

/* A physical allocation of cuMemCreate is a file, so that it can be mapped anywhere.  A shareable counterpart is
 * another open file description, with a lock that lasts until its last descriptor is closed. */
struct physical {
    struct physical *next;
    int fd;
    uint64_t bytes;
    CUdevice device;
    unsigned holders, maps;
};

static struct physical *physicals;

/* Makes the system call directly, because glibc has a function for it only since 2.27. */
static int memory_file(const char *name)
{
    return (int)syscall(SYS_memfd_create, name, MFD_CLOEXEC);
}

void sim_forget_physical(void)
{
    physicals = NULL;
}

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

static int share(const struct physical *physical)
{
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", physical->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || !flock(fd, LOCK_SH))
        return fd;
    close(fd);
    return -1;
}

static bool is_shared(const struct physical *physical)
{
    return flock(physical->fd, LOCK_EX | LOCK_NB) || flock(physical->fd, LOCK_UN);
}

static void end_physical(struct physical *ended)
{
    if (ended->holders || ended->maps || is_shared(ended))
        return;
    struct physical **at = &physicals;
    while (*at != ended)
        at = &(*at)->next;
    *at = ended->next;
    close(ended->fd);
    sim_give(ended->device, ended->bytes);
    free(ended);
}

/* The next allocation notices that a descriptor was closed. */
static void end_all(void)
{
    for (struct physical *next, *at = physicals; at; at = next) {
        next = at->next;
        end_physical(at);
    }
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *properties,
                         unsigned long long flags)
{
    ENTER(SIM_NEED_INIT);
    if (!out || !bytes || bytes % SIM_PAGE_BYTES || flags || !properties ||
        properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE || sim_physical(properties->location.id) < 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct physical *made = calloc(1, sizeof *made);
    int fd = memory_file("gpushare-sim");
    if (!made || fd < 0 || ftruncate(fd, (off_t)bytes)) {
        free(made);
        if (fd >= 0)
            close(fd);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *made = (struct physical){NULL, fd, bytes, properties->location.id, 1, 0};
    HOLD(&sim_local);
    end_all();
    CUresult result = sim_take(made->device, bytes);
    if (result) {
        close(fd);
        free(made);
        return result;
    }
    made->next = physicals;
    physicals = made;
    *out = (uint64_t)(uintptr_t)made;
    return CUDA_SUCCESS;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    ENTER(SIM_NEED_INIT);
    HOLD(&sim_local);
    struct physical *found = find_physical(handle);
    if (!found)
        return CUDA_ERROR_INVALID_VALUE;
    found->holders--;
    end_physical(found);
    return CUDA_SUCCESS;
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
    struct block block = {(uint64_t)(uintptr_t)range, bytes, BLOCK_RESERVED, 0, NULL, NULL, NULL, false};
    HOLD(&sim_local);
    if (!sim_insert_block(block)) {
        munmap(range, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = block.address;
    return CUDA_SUCCESS;
}

static struct block *reservation_of(uint64_t address, uint64_t bytes)
{
    for (size_t i = sim_first_block(address + 1); i > 0; i--)
        if (sim_blocks[i - 1].kind == BLOCK_RESERVED && address - sim_blocks[i - 1].address < sim_blocks[i - 1].bytes)
            return sim_blocks[i - 1].address + sim_blocks[i - 1].bytes - address >= bytes ? &sim_blocks[i - 1] : NULL;
    return NULL;
}

static bool any_mapping(uint64_t address, uint64_t bytes)
{
    for (size_t at = 0; at < sim_block_count; at++)
        if (sim_blocks[at].kind == BLOCK_MAPPED && sim_blocks[at].address < address + bytes &&
            address < sim_blocks[at].address + sim_blocks[at].bytes)
            return true;
    return false;
}

API CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes)
{
    ENTER(SIM_NEED_INIT);
    HOLD(&sim_local);
    struct block *found = sim_find_block(address, BLOCK_RESERVED, BLOCK_RESERVED);
    if (!found || found->bytes != bytes || any_mapping(address, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    sim_remove_block((size_t)(found - sim_blocks));
    munmap((void *)(uintptr_t)address, bytes);
    return CUDA_SUCCESS;
}

API CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags)
{
    ENTER(SIM_NEED_INIT);
    HOLD(&sim_local);
    struct physical *physical = find_physical(handle);
    if (!physical || flags || !bytes || bytes % SIM_PAGE_BYTES || offset > physical->bytes ||
        bytes > physical->bytes - offset || !reservation_of(address, bytes) || any_mapping(address, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    struct block block = {address, bytes, BLOCK_MAPPED, physical->device, NULL, physical, NULL, false};
    void *at = mmap((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, physical->fd,
                    (off_t)offset);
    if (at == MAP_FAILED || !sim_insert_block(block))
        return CUDA_ERROR_MAP_FAILED;
    physical->maps++;
    return CUDA_SUCCESS;
}

API CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    ENTER(SIM_NEED_INIT);
    bool any = false, peer = false;
    HOLD(&sim_local);
    for (size_t i = 0; access && count && i < sim_block_count; i++) {
        struct block *block = &sim_blocks[i];
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
    if (peer)
        sim_hinder(SIM_HINDERED_PEER);
    return any ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    ENTER(SIM_NEED_INIT);
    bool any = false;
    HOLD(&sim_local);
    for (size_t i = sim_block_count; i > 0; i--) {
        struct block block = sim_blocks[i - 1];
        if (block.kind != BLOCK_MAPPED || block.address < address || block.address + block.bytes > address + bytes)
            continue;
        any = true;
        sim_remove_block(i - 1);
        (void)!mmap((void *)(uintptr_t)block.address, block.bytes, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        block.physical->maps--;
        end_physical(block.physical);
    }
    return any ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address)
{
    ENTER(SIM_NEED_INIT);
    HOLD(&sim_local);
    struct block *block = sim_holder_of((uint64_t)(uintptr_t)address);
    if (!out || !block || block->kind != BLOCK_MAPPED)
        return CUDA_ERROR_INVALID_VALUE;
    block->physical->holders++;
    *out = (uint64_t)(uintptr_t)block->physical;
    return CUDA_SUCCESS;
}

/* The descriptor cannot be imported in the simulator; only the checkpoint notices it. */
API CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type, unsigned long long flags)
{
    ENTER(SIM_NEED_INIT);
    if (!out || type != 1 || flags) /* CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR */
        return CUDA_ERROR_NOT_SUPPORTED;
    HOLD(&sim_local);
    struct physical *physical = find_physical(handle);
    int fd = physical ? share(physical) : -1;
    if (fd < 0)
        return CUDA_ERROR_INVALID_VALUE;
    *(int *)out = fd;
    sim_hinder(SIM_HINDERED_EXPORT);
    return CUDA_SUCCESS;
}

/* As above, for a descriptor for another driver (cuda.h 11.7: 1 is CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD). */
API CUresult cuMemGetHandleForAddressRange(void *out, CUdeviceptr address, size_t bytes, int type,
                                           unsigned long long flags)
{
    ENTER(SIM_NEED_CONTEXT);
    if (!out || type != 1 || flags || !sim_is_device_memory(address, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    int fd = memory_file("gpushare-sim-dma-buf");
    if (fd < 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *(int *)out = fd;
    sim_hinder(SIM_HINDERED_EXPORT);
    return CUDA_SUCCESS;
}

/* Sharing between processes is recorded, but never happens. */
API CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr address)
{
    ENTER(SIM_NEED_CONTEXT);
    if (!out || !sim_is_device_memory(address, 1))
        return CUDA_ERROR_INVALID_VALUE;
    memset(out, 0, sizeof *out);
    memcpy(out->reserved, &address, sizeof address);
    sim_hinder(SIM_HINDERED_IPC);
    return CUDA_SUCCESS;
}

API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags)
{
    ENTER(SIM_NEED_CONTEXT);
    (void)out, (void)handle, (void)flags;
    return CUDA_ERROR_NOT_SUPPORTED;
}
