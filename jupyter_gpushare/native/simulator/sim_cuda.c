/* The simulated libcuda.so.1: start-up, devices, errors.
 *
 * Facts, CUDA Programming Guide 13.4, "CUDA Environment Variables": CUDA_VISIBLE_DEVICES is a list of
 * ordinals or UUIDs (a unique beginning is enough), read once at cuInit; everything from the first
 * invalid entry on is ignored.  Ordinals go from the fastest device to the slowest ("a simple
 * heuristic", which is not published; the simulator orders by memory), or with
 * CUDA_DEVICE_ORDER=PCI_BUS_ID as in NVML.
 * torch/cuda/__init__.py, _parse_visible_devices (pytorch PR 84879 and 92315): an ordinal is read as
 * by strtoul(3), so "1gpu" is 1; ordinals and UUIDs do not mix; if a device is named twice, there is none.
 * MIG User Guide, "Device Enumeration": a process sees only one MIG instance, even if several are named; an
 * ordinal is that of a GPU and stands for its first instance.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sim_blocks.h"
#include "sim_gate.h"
#include "sim_pool.h"
#include "sim_process.h"
#include "sim_virtual.h"

/* ---- start-up and visible devices ---- */

static void in_child(void)
{
    sim_gate_in_child();
    sim_forget_blocks();
    sim_forget_physical();
    sim_forget_pools();
}

static int number_of(const char *word)
{
    char *end;
    unsigned long number = strtoul(word, &end, 10);
    return end == word || number >= SIM_DEVICES ? -1 : (int)number;
}

/* Returns the device of an ordinal.  In MIG mode there is one GPU. */
static int device_at(int ordinal)
{
    const char *by = getenv("CUDA_DEVICE_ORDER");
    bool by_bus = by && !strcmp(by, "PCI_BUS_ID");
    if (ordinal < 0 || ordinal >= (int)(sim->mig ? 1 : sim->device_count))
        return -1;
    for (int d = 0; !by_bus && !sim->mig && d < (int)sim->device_count; d++) {
        int faster = 0;
        for (int other = 0; other < (int)sim->device_count; other++)
            faster += sim->device[other].total_bytes > sim->device[d].total_bytes ||
                      (sim->device[other].total_bytes == sim->device[d].total_bytes && other < d);
        if (faster == ordinal)
            return d;
    }
    return ordinal;
}

static int device_named(const char *word)
{
    char text[SIM_UUID_TEXT];
    int found = -1;
    for (uint32_t d = 0; strlen(word) >= 4 && d < sim->device_count; d++) {
        sim_uuid_text(sim->device[d].uuid, text);
        if (!strncmp(text, word, strlen(word))) {
            if (found >= 0)
                return -1; /* not unique */
            found = (int)d;
        }
    }
    return found;
}

static void read_visible_devices(struct sim_process *process)
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    uint32_t most = sim->mig ? 1 : SIM_DEVICES;
    char text[2048], *rest = text, *word;
    process->visible_count = 0;
    for (int device; !list && (device = device_at((int)process->visible_count)) >= 0;)
        process->visible[process->visible_count++] = (uint8_t)device;
    if (!list)
        return;
    bool by_number = number_of(list) >= 0;
    snprintf(text, sizeof text, "%s", list);
    while ((word = strsep(&rest, ",")) && process->visible_count < most) {
        int device = by_number ? device_at(number_of(word)) : device_named(word);
        if (device < 0)
            return;
        for (uint32_t i = 0; i < process->visible_count; i++)
            if (process->visible[i] == device) {
                process->visible_count = 0;
                return;
            }
        process->visible[process->visible_count++] = (uint8_t)device;
    }
}

API CUresult cuInit(unsigned flags)
{
    static bool hooked;
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (sim_was_forked())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (sim_open())
        return CUDA_ERROR_NO_DEVICE;
    HOLD(&sim_local);
    if (sim_me)
        return CUDA_SUCCESS;
    if (!hooked)
        hooked = !pthread_atfork(NULL, NULL, in_child);
    int32_t pid = sim_self();
    uint64_t ticks = process_start_ticks(pid);
    HOLD_STATE;
    sim_sweep();
    struct sim_process *process = sim_add(pid, ticks);
    if (!process)
        return CUDA_ERROR_OUT_OF_MEMORY;
    read_visible_devices(process);
    if (!process->visible_count) {
        process->pid = 0;
        return CUDA_ERROR_NO_DEVICE;
    }
    memcpy(process->first_visible, process->visible, sizeof process->visible);
    sim_open_device_files(process);
    sim_note(process, "start", -1, 0);
    sim_me = process;
    return CUDA_SUCCESS;
}

API CUresult cuDriverGetVersion(int *version)
{
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = 13000;
    return CUDA_SUCCESS;
}

/* ---- devices: queries, never blocked ---- */

API CUresult cuDeviceGetCount(int *count)
{
    if (!sim_is_initialized())
        return CUDA_ERROR_NOT_INITIALIZED;
    *count = (int)sim_me->visible_count;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *out, int ordinal)
{
    KNOW(ordinal);
    *out = ordinal;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char *name, int length, CUdevice ordinal)
{
    KNOW(ordinal);
    if (length <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(name, (size_t)length, "%s", device->name);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice ordinal)
{
    KNOW(ordinal);
    if (sim->shows_old_uuid)
        device = &sim->device[sim_me->first_visible[ordinal]];
    memcpy(uuid->bytes, device->uuid, sizeof uuid->bytes);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice ordinal)
{
    return cuDeviceGetUuid_v2(uuid, ordinal);
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice ordinal)
{
    KNOW(ordinal);
    *bytes = device->total_bytes;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice ordinal)
{
    static const struct { int attribute, value; } known[] = {
        {1, 1024},   /* max threads per block */
        {2, 1024},   {3, 1024}, {4, 64},        /* max block dimensions */
        {5, 2147483647}, {6, 65535}, {7, 65535}, /* max grid dimensions */
        {8, 49152},  /* shared memory per block */
        {10, 32},    /* warp size */
        {13, 1980000}, /* clock, kHz */
        {16, 132},   /* multiprocessors */
        {31, 1},     /* concurrent kernels */
        {32, 1},     /* ECC */
        {39, 2048},  /* threads per multiprocessor */
        {41, 1},     /* unified addressing */
        {75, 9}, {76, 0}, /* compute capability */
        {78, 1},     /* stream priorities */
        {83, 1}, {89, 1}, /* managed memory */
        {90, 1},     /* compute preemption */
        {95, 1},     /* cooperative launch */
        {102, 1},    /* virtual memory management */
        {103, 1},    /* POSIX file descriptor handles */
        {115, 1},    /* memory pools */
    };
    KNOW(ordinal);
    *value = attribute == 33 ? sim_me->first_visible[ordinal] + 1 : 0; /* 33: PCI bus */
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].attribute == attribute)
            *value = known[i].value;
    return attribute > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- errors ---- */

API CUresult cuGetErrorName(CUresult code, const char **name)
{
    *name = NULL;
#define CUDA_CODE(known, value) *name = code == known ? #known : *name;
    CUDA_CODES
#undef CUDA_CODE
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice ordinal)
{
    KNOW(ordinal);
    if (length <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(text, (size_t)length, "0000:%02X:00.0", sim_me->first_visible[ordinal] + 1);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceCanAccessPeer(int *can, CUdevice ordinal, CUdevice peer)
{
    KNOW(ordinal);
    if (sim_physical(peer) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    *can = ordinal != peer;
    return CUDA_SUCCESS;
}
