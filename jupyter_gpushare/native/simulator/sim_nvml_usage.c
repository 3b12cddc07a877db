/* The simulated libnvidia-ml.so.1: usage of a device (memory, utilization, processes), and its events.
 *
 * Facts (NVML API reference r580): a list that does not fit its buffer answers INSUFFICIENT_SIZE and the
 * needed number; if no process was busy, the answer is NOT_FOUND; events are those of the GPU and name
 * the MIG instance.
 *   - A process that only called cuInit is listed with 0 bytes or NOT_AVAILABLE
 *     (github.com/llm-d-incubation/llm-d-rl-time-slicing pull request 148).
 *   - In a container with its own pid namespace usedGpuMemory is 0 for a pid that matches
 *     (github.com/Project-HAMi/HAMi-core issue 112, driver 560.35) or not available
 *     (github.com/NVIDIA/open-gpu-kernel-modules pull request 614): bytes=zero, bytes=unavailable.
 *   - Under WSL the query "active compute process" is not supported (CUDA on WSL User Guide,
 *     limitations): bytes=refused.
 *   - GB10 (DGX Spark) shares the host's memory: GetMemoryInfo and its _v2 answer NOT_SUPPORTED
 *     (github.com/XuehaiPan/nvitop pull request 208, driver 580.173.02).
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <time.h>

#include "sim_nvml.h"

enum { SWEEP_NS = 2000000, EVENT_POLL_NS = 20000000, NVML_EVENT_TYPE_XID = 8 };

typedef struct {
    unsigned gpu, memory;
} nvmlUtilization_t;

typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;

typedef struct {
    unsigned pid;
    unsigned long long timeStamp;
    unsigned smUtil, memUtil, encUtil, decUtil;
} nvmlProcessUtilizationSample_t;

typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

struct nvmlEventSet_st {
    uint32_t devices; /* bit: registered */
    uint64_t seen[SIM_DEVICES];
};
typedef struct nvmlEventSet_st *nvmlEventSet_t;

/* ---- usage ---- */

/* A sweep reads a file for each process, and a monitor makes four queries for each device, so the last
 * sweep is valid for SWEEP_NS. */
static void sweep(void)
{
    static uint64_t swept_ns; /* guarded by sim_lock */
    uint64_t now = sim_now_ns();
    if (now - swept_ns < SWEEP_NS)
        return;
    sim_sweep();
    swept_ns = now;
}

API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    ENTER(device);
    if (sim->device[device->index].shares_host_memory)
        return NVML_ERROR_NOT_SUPPORTED;
    HOLD_STATE;
    sweep();
    memory->total = sim->device[device->index].total_bytes;
    memory->used = sim_device_used(device->index) + sim->reserved_bytes;
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    nvmlMemory_t plain;
    nvmlReturn_t error = nvmlDeviceGetMemoryInfo(device, &plain);
    if (error)
        return error;
    memory->total = plain.total;
    memory->free = plain.free;
    memory->used = plain.used - sim->reserved_bytes; /* NVML API reference r590, nvmlMemory_v2_t */
    memory->reserved = sim->reserved_bytes;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates)
{
    ENTER(device);
    HOLD_STATE;
    sweep();
    sim_divide_time(device->index);
    rates->gpu = sim_busy_percent(&sim->schedule[device->index].busy_all, 0, sim_now_ns());
    rates->memory = rates->gpu / 2;
    return NVML_SUCCESS;
}

/* Whether NVML lists a process on a device.  It lists processes with a context (a checkpointed one has none:
 * README of cuda-checkpoint), and with listed=initialized those that only called cuInit.  For a dead process
 * whose memory a forked one keeps, nvidia-smi shows "memory against PIDs that are not in /proc"
 * (github.com/GaTech-RL2/EgoVerse pull request 682), or memory but no process (github.com/pytorch/pytorch
 * issue 5736): dead=unlisted. */
static bool is_listed(const struct sim_process *process, uint32_t device)
{
    if (process->pid < 0 && !(process->kept && sim->lists_dead))
        return false;
    if (process->pid && sim_process_device_used(process, device))
        return true;
    if (process->pid <= 0)
        return false;
    bool has_context = process->contexts >> device & 1u;
    bool moved = process->state != SIM_RUNNING && process->state != SIM_LOCKED;
    if (!sim->lists_initialized || moved)
        return false;
    for (uint32_t i = 0; !process->used_cuda && i < process->visible_count; i++)
        has_context = has_context || process->visible[i] == device;
    return has_context;
}

static unsigned long long shown_bytes(uint64_t bytes)
{
    return sim->shown_bytes == SIM_BYTES_SHOWN ? bytes : sim->shown_bytes == SIM_BYTES_ZERO ? 0 : ~0ull;
}

API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *list)
{
    ENTER(device);
    if (sim->shown_bytes == SIM_BYTES_REFUSED)
        return NVML_ERROR_NOT_SUPPORTED;
    unsigned capacity = *count, found = 0;
    HOLD_STATE;
    sweep();
    for (int i = 0; i < SIM_PROCESSES; i++) {
        const struct sim_process *process = &sim->process[i];
        if (!is_listed(process, device->index))
            continue;
        uint64_t bytes = sim_process_device_used(process, device->index);
        if (found < capacity && list)
            list[found] = (nvmlProcessInfo_t){(unsigned)abs(process->pid), shown_bytes(bytes), ~0u, ~0u};
        found++;
    }
    *count = found;
    return found > capacity ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *list)
{
    unsigned capacity = *count, found = 0;
    ENTER(device);
    for (int i = 0; i < SIM_PROCESSES; i++) {
        int32_t pid = sim->process[i].pid;
        if (pid <= 0 || !sim_strikes(SIM_FAULT_MPS, pid, (int32_t)device->index, NULL))
            continue;
        if (found < capacity && list)
            list[found] = (nvmlProcessInfo_t){(unsigned)pid, 0, ~0u, ~0u};
        found++;
    }
    *count = found;
    return found > capacity ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

/* Returns one sample for each process that was busy since the argument's time, at most in the last second.  Times
 * are in microseconds of the wall clock (NVML API reference r580, nvmlDeviceGetProcessUtilization: "CPU Timestamp
 * in microseconds"). */
API nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
                                                 unsigned *count, unsigned long long since_us)
{
    ENTER(device);
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    uint64_t wall_us = (uint64_t)wall.tv_sec * 1000000u + (uint64_t)wall.tv_nsec / 1000u, now = sim_now_ns();
    uint64_t ago_us = wall_us > since_us ? wall_us - since_us : 0;
    uint64_t since = ago_us < now / 1000u ? now - ago_us * 1000u : 0;
    unsigned capacity = samples ? *count : 0, found = 0;
    HOLD_STATE;
    sweep();
    sim_divide_time(device->index);
    for (int i = 0; ago_us && i < SIM_PROCESSES; i++) {
        const struct sim_process *process = &sim->process[i];
        const struct sim_schedule *schedule = &sim->schedule[device->index];
        unsigned percent = process->pid > 0 ? sim_busy_percent(&schedule->busy[i], since, now) : 0;
        if (percent && found < capacity)
            samples[found] = (nvmlProcessUtilizationSample_t){(unsigned)process->pid, wall_us, percent, 0, 0, 0};
        found += percent > 0;
    }
    *count = found;
    if (!found)
        return NVML_ERROR_NOT_FOUND;
    return found > capacity ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

/* ---- events: XIDs ---- */

API nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    ENTER_SYSTEM;
    *set = calloc(1, sizeof **set);
    return *set ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

API nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    free(set);
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    ENTER(device);
    if (!set)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (types & ~(unsigned long long)NVML_EVENT_TYPE_XID)
        return NVML_ERROR_NOT_SUPPORTED;
    HOLD_STATE;
    for (uint32_t d = 0; d < sim->device_count; d++)
        if (device == &sim_handles[d] || device == &sim_whole) {
            set->devices |= 1u << d;
            set->seen[d] = sim->device[d].xids;
        }
    return NVML_SUCCESS;
}

static bool next_event(nvmlEventSet_t set, nvmlEventData_t *data)
{
    HOLD_STATE;
    for (uint32_t d = 0; d < sim->device_count; d++)
        if ((set->devices >> d & 1u) && sim->device[d].xids > set->seen[d]) {
            set->seen[d] = sim->device[d].xids;
            *data = (nvmlEventData_t){sim->mig ? &sim_whole : &sim_handles[d], NVML_EVENT_TYPE_XID, sim->device[d].xid,
                                      sim->mig ? d + 1 : ~0u, ~0u};
            return true;
        }
    return false;
}

API nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms)
{
    ENTER_SYSTEM;
    if (!set || !data)
        return NVML_ERROR_INVALID_ARGUMENT;
    uint64_t until = sim_now_ns() + (uint64_t)timeout_ms * 1000000u;
    while (!next_event(set, data)) {
        if (!sim_nvml_is_open())
            return NVML_ERROR_UNINITIALIZED;
        if (sim_now_ns() >= until)
            return NVML_ERROR_TIMEOUT;
        sim_sleep_ns(EVENT_POLL_NS);
    }
    return NVML_SUCCESS;
}
