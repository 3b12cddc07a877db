/* The simulated libcuda.so.1: modules, and the kernels in them.
 *
 * Only two kernels are known, by name: see `kernels`.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim_account.h"
#include "sim_blocks.h"
#include "sim_memory.h"
#include "sim_stream.h"

/* Both take the address and the number of their words, and one number more. */
static uint64_t *words_of(void **arguments, uint64_t *count, uint64_t *number)
{
    uint64_t at;
    memcpy(&at, arguments[0], sizeof at);
    memcpy(count, arguments[1], sizeof *count);
    memcpy(number, arguments[2], sizeof *number);
    return *count <= UINT64_MAX / 8 && sim_is_device_memory(at, *count * 8) ? (uint64_t *)(uintptr_t)at : NULL;
}

/* gpu/driver/probe.py: the number is the first 4 bytes */
static CUresult run_probe(CUfunction function, void **arguments, CUstream stream)
{
    (void)function;
    uint64_t count, number, *words = words_of(arguments, &count, &number);
    if (!words || !count)
        return CUDA_ERROR_INVALID_VALUE;
    sim_occupy(stream, 0);
    memcpy(words, &number, 4);
    return CUDA_SUCCESS;
}

/* demo_gpu.ptx: one step, which takes that many nanoseconds; a lost or repeated one shows */
static CUresult run_step(CUfunction function, void **arguments, CUstream stream)
{
    (void)function;
    uint64_t count, busy_ns, *words = words_of(arguments, &count, &busy_ns);
    if (!words)
        return CUDA_ERROR_INVALID_VALUE;
    sim_occupy(stream, busy_ns);
    for (uint64_t i = 0; i < count; i++)
        words[i] += 1ull << 32;
    return CUDA_SUCCESS;
}

static struct CUfunc_st kernels[] = {
    {"gpushare_probe", run_probe, SIM_KERNEL_ARGUMENTS, 0},
    {"gpushare_demo_step", run_step, SIM_KERNEL_ARGUMENTS, 0},
};

struct CUmod_st {
    unsigned entries; /* bit: kernel of that index is in the image */
    char managed[64]; /* the name of a __managed__ variable of 4 bytes, or "" */
    CUdeviceptr managed_at;
};

/* A __managed__ variable behaves as memory of cudaMallocManaged (CUDA C++ Programming Guide 11.8, "Unified
 * Memory Programming"); in PTX it has the attribute .managed. */
static CUresult allocate_managed(struct CUmod_st *module, const char *image)
{
    static const char attribute[] = ".attribute(.managed)";
    const char *at = strstr(image, attribute);
    if (!at || sscanf(at + strlen(attribute), " .align 4 .u32 %63[A-Za-z0-9_$]", module->managed) != 1)
        return at ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS; /* no other can be read here */
    sim_hinder(SIM_HINDERED_MANAGED);
    return sim_allocate(&module->managed_at, 4, sim_context->device, BLOCK_MANAGED);
}

API CUresult cuModuleLoadData(CUmodule *out, const void *image)
{
    char entry[64];
    ENTER(SIM_NEED_CONTEXT);
    if (!out || !image)
        return CUDA_ERROR_INVALID_VALUE;
    if (!strstr(image, ".version")) /* only PTX text can be read here */
        return CUDA_ERROR_INVALID_IMAGE;
    struct CUmod_st *made = calloc(1, sizeof *made);
    /* Code takes device memory (CUDA C++ Programming Guide 13.0, "Lazy Loading"), in pages. */
    CUresult result = made && sim->context_bytes ? sim_charge(sim_current_device(), SIM_PAGE_BYTES, true, "context")
                                                 : CUDA_SUCCESS;
    if (made && !result)
        result = allocate_managed(made, image);
    if (!made || result) {
        free(made);
        return made ? result : CUDA_ERROR_OUT_OF_MEMORY;
    }
    sim_me->modules++;
    for (unsigned i = 0; i < sizeof kernels / sizeof *kernels; i++) {
        snprintf(entry, sizeof entry, ".entry %s(", kernels[i].name);
        made->entries |= strstr(image, entry) ? 1u << i : 0;
    }
    *out = made;
    return CUDA_SUCCESS;
}

API CUresult cuModuleUnload(CUmodule module)
{
    ENTER(SIM_NEED_CONTEXT);
    if (!module)
        return CUDA_ERROR_INVALID_HANDLE;
    free(module);
    return CUDA_SUCCESS;
}

API CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *bytes, CUmodule module, const char *name)
{
    ENTER(SIM_NEED_CONTEXT);
    if (!module || !name)
        return CUDA_ERROR_INVALID_VALUE;
    if (!*name || strcmp(module->managed, name))
        return CUDA_ERROR_NOT_FOUND;
    if (address)
        *address = module->managed_at;
    if (bytes)
        *bytes = 4;
    return CUDA_SUCCESS;
}

API CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name)
{
    ENTER(SIM_NEED_CONTEXT);
    if (!out || !module || !name)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if ((module->entries >> i & 1u) && !strcmp(kernels[i].name, name)) {
            *out = &kernels[i];
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}

API CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned options, int *names, void **values)
{
    (void)options, (void)names, (void)values;
    return cuModuleLoadData(out, image);
}
