/* The simulated libcuda.so.1: start-up, the gate of every call, devices, errors.
 *
 * Facts (CUDA Driver API reference 13.0; CUDA C++ Programming Guide, "CUDA
 * Environment Variables"; README of github.com/NVIDIA/cuda-checkpoint):
 *   - CUDA_VISIBLE_DEVICES: a list of ordinals or UUIDs (a unique beginning is enough), read
 *     once at cuInit; everything from the first invalid entry on is ignored.
 *   - A child forked after cuInit cannot use CUDA: CUDA_ERROR_NOT_INITIALIZED.
 *   - Calls that launch work, manage resources or otherwise impact GPU state wait while the
 *     process is locked or checkpointed.  Pure queries about devices do not.
 */
#define _GNU_SOURCE
#include "sim_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sim_process.h"

struct sim_process *sim_me;
pthread_mutex_t sim_local = PTHREAD_MUTEX_INITIALIZER;

static _Atomic bool forked; /* the parent had called cuInit: this child may not use CUDA */

/* ---- the gate ---- */

static void in_child(void)
{
    pthread_mutex_init(&sim_local, NULL);
    if (sim_me)
        atomic_store(&forked, true);
    sim_forget_in_child();
}

static void reopen_if_abandoned(void)
{
    sim_lock();
    sim_sweep();
    sim_unlock();
}

bool sim_is_initialized(void)
{
    return sim_me && !atomic_load_explicit(&forked, memory_order_relaxed);
}

struct sim_call sim_enter(enum sim_need need)
{
    struct sim_call call = {CUDA_ERROR_NOT_INITIALIZED, false};
    if (!sim_is_initialized())
        return call;
    for (;;) {
        atomic_fetch_add(&sim_me->inside, 1);
        uint32_t gate = atomic_load(&sim_me->gate);
        if (gate == SIM_GATE_OPEN)
            break;
        atomic_fetch_sub(&sim_me->inside, 1);
        call.error = CUDA_ERROR_UNKNOWN;
        if (gate == SIM_GATE_FAILED)
            return call;
        sim_gate_wait(sim_me, gate, 100000000u);
        if (atomic_load(&sim_me->gate) == gate)
            reopen_if_abandoned();
    }
    call.inside = true;
    call.error = CUDA_SUCCESS;
    if (atomic_load_explicit(&sim->fault_count, memory_order_acquire))
        sim_hang(SIM_FAULT_HANG_CALL, sim_me->pid, -1);
    if (sim_me->damaged)
        call.error = CUDA_ERROR_UNKNOWN;
    else if (need == SIM_NEED_CONTEXT && (!sim_context || !sim_context->alive))
        call.error = CUDA_ERROR_INVALID_CONTEXT;
    else if (need == SIM_NEED_CONTEXT && sim_device_lost(sim_current_device()))
        call.error = CUDA_ERROR_DEVICE_UNAVAILABLE;
    if (call.error)
        sim_leave(&call);
    return call;
}

void sim_leave(struct sim_call *call)
{
    if (call->inside)
        atomic_fetch_sub(&sim_me->inside, 1);
    call->inside = false;
}

/* ---- start-up and visible devices ---- */

static int device_named(const char *word)
{
    char *end, text[SIM_UUID_TEXT];
    long ordinal = strtol(word, &end, 10);
    if (end != word && *end == 0)
        return ordinal >= 0 && ordinal < (long)sim->device_count ? (int)ordinal : -1;
    int found = -1;
    for (uint32_t d = 0; strlen(word) > 4 && d < sim->device_count; d++) {
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
    char text[2048], *rest = text, *word;
    process->visible_count = 0;
    if (!list) {
        for (uint32_t d = 0; d < sim->device_count; d++)
            process->visible[process->visible_count++] = (uint8_t)d;
        return;
    }
    snprintf(text, sizeof text, "%s", list);
    while ((word = strsep(&rest, ",")) && process->visible_count < SIM_DEVICES) {
        word += strspn(word, " ");
        word[strcspn(word, " ")] = 0;
        int device = device_named(word);
        for (uint32_t i = 0; device >= 0 && i < process->visible_count; i++)
            device = process->visible[i] == device ? -1 : device;
        if (device < 0)
            return;
        process->visible[process->visible_count++] = (uint8_t)device;
    }
}

int sim_physical(CUdevice ordinal)
{
    if (!sim_me || ordinal < 0 || ordinal >= (int)sim_me->visible_count)
        return -1;
    return sim_me->visible[ordinal];
}

API CUresult cuInit(unsigned flags)
{
    static bool hooked;
    CUresult result = CUDA_SUCCESS;
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (atomic_load(&forked))
        return CUDA_ERROR_NOT_INITIALIZED;
    if (sim_open())
        return CUDA_ERROR_NO_DEVICE;
    pthread_mutex_lock(&sim_local);
    if (!sim_me) {
        int32_t pid = sim_self();
        uint64_t ticks = process_start_ticks(pid);
        sim_lock();
        sim_sweep();
        struct sim_process *process = sim_add(pid, ticks);
        if (process)
            read_visible_devices(process);
        if (!process)
            result = CUDA_ERROR_OUT_OF_MEMORY;
        else if (!process->visible_count)
            process->pid = 0, result = CUDA_ERROR_NO_DEVICE;
        else
            sim_note(process, "start", -1, 0), sim_me = process;
        sim_unlock();
        if (!hooked)
            hooked = !pthread_atfork(NULL, NULL, in_child);
    }
    pthread_mutex_unlock(&sim_local);
    return result;
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

API CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice ordinal)
{
    KNOW(ordinal);
    if (length <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(text, (size_t)length, "0000:%02X:00.0", device_ + 1);
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
    *value = attribute == 33 ? device_ + 1 : 0; /* 33: PCI bus */
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].attribute == attribute)
            *value = known[i].value;
    return attribute > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuDeviceCanAccessPeer(int *can, CUdevice ordinal, CUdevice peer)
{
    KNOW(ordinal);
    if (sim_physical(peer) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    *can = ordinal != peer;
    return CUDA_SUCCESS;
}

/* ---- errors ---- */

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {CUDA_ERROR_MAP_FAILED, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
     "peer access is not supported between these two devices"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

API CUresult cuGetErrorName(CUresult code, const char **name)
{
    *name = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code)
            *name = errors[i].name;
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult code, const char **text)
{
    *text = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code)
            *text = errors[i].text;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
