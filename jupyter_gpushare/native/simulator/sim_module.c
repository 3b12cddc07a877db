/* The simulated libcuda.so.1: modules, and the kernels in them.
 *
 * Two kernels are known by name: see `kernels`.  Any other kernel touches no memory and may state its
 * duration: `.entry NAME(...) { ... .pragma "gpushare busy_ns 1000000"; ... }`.  Fact (PTX ISA 9.0, 11.4.7):
 * the strings of .pragma are only for the compiler and do not change the meaning of a program, so the same
 * text is a kernel for a real GPU.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim_account.h"
#include "sim_blocks.h"
#include "sim_memory.h"
#include "sim_stream.h"

/* Both kernels take the address and the number of their words, and one more number. */
static uint64_t *words_of(void **arguments, uint64_t *count, uint64_t *number)
{
    uint64_t at;
    memcpy(&at, arguments[0], sizeof at);
    memcpy(count, arguments[1], sizeof *count);
    memcpy(number, arguments[2], sizeof *number);
    return *count <= UINT64_MAX / 8 && sim_is_device_memory(at, *count * 8) ? (uint64_t *)(uintptr_t)at : NULL;
}

/* gpu/driver/probe.py: the number is the first 4 bytes. */
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

/* demo_gpu.ptx: one step, which takes `number` nanoseconds; a lost or repeated step is visible. */
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

struct timed {
    struct timed *next;
    struct CUfunc_st kernel;
    char name[];
};

struct CUmod_st {
    unsigned entries; /* bit: kernel of that index is in the image */
    struct timed *timed;
    char managed[64]; /* the name of a __managed__ variable of 4 bytes, or "" */
    CUdeviceptr managed_at;
};

/* A __managed__ variable behaves like memory of cudaMallocManaged (CUDA C++ Programming Guide 11.8, "Unified
 * Memory Programming"); in PTX it has the attribute .managed. */
static CUresult allocate_managed(struct CUmod_st *module, const char *image)
{
    static const char attribute[] = ".attribute(.managed)";
    const char *at = strstr(image, attribute);
    if (!at || sscanf(at + strlen(attribute), " .align 4 .u32 %63[A-Za-z0-9_$]", module->managed) != 1)
        return at ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS; /* the simulator reads no other variables */
    sim_hinder(SIM_HINDERED_MANAGED);
    return sim_allocate(&module->managed_at, 4, sim_context->device, BLOCK_MANAGED);
}

static CUresult run_timed(CUfunction function, void **arguments, CUstream stream)
{
    (void)arguments;
    sim_occupy(stream, function->busy_ns);
    return CUDA_SUCCESS;
}

/* Returns the end of the next block in braces, or NULL. */
static const char *end_of_block(const char *at)
{
    int depth = 0;
    for (at += strcspn(at, "{"); *at; at++) {
        depth += (*at == '{') - (*at == '}');
        if (!depth)
            return at;
    }
    return NULL;
}

/* Reads the entries that state their duration. */
static CUresult read_timed(struct CUmod_st *module, const char *image)
{
    static const char entry[] = ".entry ", pragma[] = ".pragma \"gpushare busy_ns ";
    for (const char *at = image; (at = strstr(at, entry));) {
        const char *name = at + strlen(entry), *stated = strstr(name, pragma), *end = end_of_block(name);
        size_t length = strcspn(name, "( \t\r\n{");
        at = name;
        if (!stated || !end || stated > end)
            continue;
        char *behind;
        const char *number = stated + strlen(pragma);
        uint64_t busy_ns = strtoull(number, &behind, 10);
        if (*number < '0' || *number > '9' || strncmp(behind, "\";", 2))
            return CUDA_ERROR_INVALID_IMAGE;
        struct timed *made = malloc(sizeof *made + length + 1);
        if (!made)
            return CUDA_ERROR_OUT_OF_MEMORY;
        memcpy(made->name, name, length);
        made->name[length] = 0;
        made->kernel = (struct CUfunc_st){made->name, run_timed, 0, busy_ns};
        made->next = module->timed;
        module->timed = made;
    }
    return CUDA_SUCCESS;
}

static void free_module(struct CUmod_st *module)
{
    for (struct timed *timed = module ? module->timed : NULL, *next; timed; timed = next) {
        next = timed->next;
        free(timed);
    }
    free(module);
}

API CUresult cuModuleLoadData(CUmodule *out, const void *image)
{
    char entry[64];
    ENTER(SIM_NEED_CONTEXT);
    if (!out || !image)
        return CUDA_ERROR_INVALID_VALUE;
    if (!strstr(image, ".version")) /* the simulator reads only PTX text */
        return CUDA_ERROR_INVALID_IMAGE;
    struct CUmod_st *made = calloc(1, sizeof *made);
    /* Code takes device memory (CUDA C++ Programming Guide 13.0, "Lazy Loading"), in pages. */
    CUresult result = made && sim->context_bytes ? sim_charge(sim_current_device(), SIM_PAGE_BYTES, true, "context")
                                                 : CUDA_SUCCESS;
    if (made && !result)
        result = read_timed(made, image);
    if (made && !result)
        result = allocate_managed(made, image);
    if (!made || result) {
        free_module(made);
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
    free_module(module);
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
    for (struct timed *timed = module->timed; timed; timed = timed->next)
        if (!strcmp(timed->name, name)) {
            *out = &timed->kernel;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}

API CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned options, int *names, void **values)
{
    (void)options, (void)names, (void)values;
    return cuModuleLoadData(out, image);
}
