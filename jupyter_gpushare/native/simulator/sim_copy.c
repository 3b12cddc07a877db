/* The simulated libcuda.so.1: host memory, copies and sets.
 *
 * Fact (CUDA Driver API reference 13.0, "Memory Management"): a synchronous copy from
 * the device waits for the work submitted before it.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "sim_blocks.h"
#include "sim_stream.h"

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

/* ---- copies and sets ---- */

/* With `waits`, waits for all work submitted before. */
static CUresult copy(CUstream stream, uint64_t to, bool to_device, uint64_t from, bool from_device, size_t bytes, bool waits)
{
    REFUSE_IF(sim_conflict(stream));
    if (waits)
        sim_wait_for(sim_stream_mark(NULL));
    if ((to_device && !sim_is_device_memory(to, bytes)) || (from_device && !sim_is_device_memory(from, bytes)))
        return CUDA_ERROR_INVALID_VALUE;
    memmove((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
    return CUDA_SUCCESS;
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes)
{
    ENTER(SIM_NEED_CONTEXT);
    return copy(NULL, to, true, (uint64_t)(uintptr_t)from, false, bytes, true);
}

API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes)
{
    ENTER(SIM_NEED_CONTEXT);
    return copy(NULL, (uint64_t)(uintptr_t)to, false, from, true, bytes, true);
}

API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    ENTER(SIM_NEED_CONTEXT);
    return copy(NULL, to, true, from, true, bytes, false);
}

API CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    ENTER(SIM_NEED_CONTEXT);
    return copy(NULL, to, false, from, false, bytes, true);
}

CUresult sim_set(CUstream stream, CUdeviceptr to, unsigned value, unsigned element_bytes, size_t count)
{
    CUgraph graph;
    REFUSE_IF(sim_captured_by(stream, &graph));
    if (graph)
        return sim_add_set(graph, to, value, element_bytes, count);
    if (to % element_bytes || count > SIZE_MAX / element_bytes || !sim_is_device_memory(to, count * element_bytes))
        return CUDA_ERROR_INVALID_VALUE;
    unsigned char *at = (unsigned char *)(uintptr_t)to;
    for (size_t i = 0; element_bytes > 1 && i < count; i++)
        memcpy(at + i * element_bytes, &value, element_bytes);
    if (element_bytes == 1)
        memset(at, (int)(value & 0xff), count);
    return CUDA_SUCCESS;
}

API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count)
{
    ENTER(SIM_NEED_CONTEXT);
    return sim_set(NULL, to, value, 1, count);
}

API CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count)
{
    ENTER(SIM_NEED_CONTEXT);
    return sim_set(NULL, to, value, sizeof value, count);
}

API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    return sim_set(stream, to, value, 1, count);
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

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    return copy(stream, to, true, (uint64_t)(uintptr_t)from, false, bytes, false);
}

API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    return copy(stream, (uint64_t)(uintptr_t)to, false, from, true, bytes, false);
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    return copy(stream, to, true, from, true, bytes, false);
}

API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream)
{
    ENTER(SIM_NEED_CONTEXT);
    return sim_set(stream, to, value, sizeof value, count);
}
