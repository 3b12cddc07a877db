/* The simulated libnvidia-ml.so.1 over the same devices.
 *
 * Facts it follows (NVML API reference r580): NVML sees every device, whatever
 * CUDA_VISIBLE_DEVICES says; a list that does not fit its buffer is answered with
 * INSUFFICIENT_SIZE and the number needed; a device that fell off the bus answers
 * GPU_IS_LOST.  MIG instances have handles of their own below their GPU's; events are the GPU's.
 * What is not here (NVLink, and cgroup limits unless the machine has them) answers NOT_SUPPORTED
 * or FUNCTION_NOT_FOUND.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_types.h"
#include "fake_gpu.h"

enum { SWEEP_NS = 2000000, EVENT_POLL_NS = 20000000 };

#define API __attribute__((visibility("default")))

typedef int nvmlReturn_t;
enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_FUNCTION_NOT_FOUND = 13,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_MEMORY = 20,
    NVML_ERROR_UNKNOWN = 999,
};
enum { NVML_TOPOLOGY_SYSTEM = 50, NVML_EVENT_TYPE_XID = 8, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1 };

static const char whole_uuid[] = "GPU-00000000-0000-4000-8000-0000000000f0";

struct nvmlDevice_st {
    uint32_t index;
};

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
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

typedef struct {
    const char *nameSpace;
    unsigned long long softLimit, hardLimit;
} nvmlSetMemoryLimits_v1_t;

struct nvmlEventSet_st {
    uint32_t devices; /* bit: registered */
    uint64_t seen[SIM_DEVICES];
};
typedef struct nvmlEventSet_st *nvmlEventSet_t;

static struct nvmlDevice_st handles[SIM_DEVICES];
static struct nvmlDevice_st whole; /* the GPU that is cut into MIG instances */
static _Atomic int users;
static _Atomic uint32_t started; /* the driver's start that this process's handles are from */

static bool is_open(void)
{
    return users && atomic_load(&started) == atomic_load(&sim->driver_starts);
}

static nvmlReturn_t enter(void)
{
    if (!is_open())
        return NVML_ERROR_UNINITIALIZED;
    sim_hang(SIM_FAULT_HANG_NVML, 0, SIM_DEVICES); /* no device's: a fault of one passes it by */
    return NVML_SUCCESS;
}

static nvmlReturn_t enter_device(nvmlDevice_t device)
{
    if (!is_open())
        return NVML_ERROR_UNINITIALIZED;
    if (sim->mig && device == &whole)
        return NVML_SUCCESS;
    if (device < handles || device >= handles + sim->device_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    sim_hang(SIM_FAULT_HANG_NVML, 0, (int32_t)device->index);
    return sim_device_lost(device->index) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

#define ENTER(device)                            \
    do {                                         \
        nvmlReturn_t error = enter_device(device); \
        if (error)                               \
            return error;                        \
    } while (0)

static nvmlReturn_t put_text(char *to, unsigned room, const char *text)
{
    if (!to)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) >= room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(to, text);
    return NVML_SUCCESS;
}

/* ---- the library and the system ---- */

API nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    if (sim_open())
        return NVML_ERROR_DRIVER_NOT_LOADED;
    for (uint32_t d = 0; d < SIM_DEVICES; d++)
        handles[d].index = d;
    atomic_store(&started, atomic_load(&sim->driver_starts));
    users++;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

API nvmlReturn_t nvmlInit(void)
{
    return nvmlInitWithFlags(0);
}

API nvmlReturn_t nvmlShutdown(void)
{
    if (!users)
        return NVML_ERROR_UNINITIALIZED;
    users--;
    return NVML_SUCCESS;
}

API const char *nvmlErrorString(nvmlReturn_t code)
{
    switch (code) {
    case NVML_SUCCESS: return "Success";
    case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
    case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
    case NVML_ERROR_NOT_FOUND: return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case NVML_ERROR_TIMEOUT: return "Timeout";
    case NVML_ERROR_FUNCTION_NOT_FOUND: return "Function Not Found";
    case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

API nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned room)
{
    nvmlReturn_t error = enter();
    return error ? error : put_text(text, room, "580.00.00-simulated");
}

API nvmlReturn_t nvmlSystemGetNVMLVersion(char *text, unsigned room)
{
    nvmlReturn_t error = enter();
    return error ? error : put_text(text, room, "13.580.00.00");
}

API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    *version = 13000;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    nvmlReturn_t error = enter();
    if (!error)
        *count = sim->mig ? 1 : sim->device_count;
    return error;
}

API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
    nvmlReturn_t error = enter();
    if (error)
        return error;
    if (index >= (sim->mig ? 1 : sim->device_count))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (sim->mig) {
        *device = &whole;
        return NVML_SUCCESS;
    }
    *device = &handles[index];
    return sim_device_lost(index) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    char text[SIM_UUID_TEXT];
    nvmlReturn_t error = enter();
    if (error)
        return error;
    if (sim->mig && !strcmp(uuid, whole_uuid)) {
        *device = &whole;
        return NVML_SUCCESS;
    }
    for (uint32_t d = 0; d < sim->device_count; d++) {
        sim_uuid_text(sim->device[d].uuid, text);
        if (!strcmp(text, uuid)) {
            *device = &handles[d];
            return sim_device_lost(d) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

/* ---- what a device is ---- */

API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index)
{
    ENTER(device);
    *index = device->index;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *number)
{
    return nvmlDeviceGetIndex(device, number);
}

API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned room)
{
    ENTER(device);
    return put_text(text, room, sim->device[device->index].name);
}

API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned room)
{
    char uuid[SIM_UUID_TEXT];
    ENTER(device);
    if (device == &whole)
        return put_text(text, room, whole_uuid);
    sim_uuid_text(sim->device[device->index].uuid, uuid);
    return put_text(text, room, uuid);
}

API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info)
{
    ENTER(device);
    memset(info, 0, sizeof *info);
    info->bus = device->index + 1;
    snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "0000:%02X:00.0", info->bus);
    snprintf(info->busId, sizeof info->busId, "00000000:%02X:00.0", info->bus);
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    ENTER(device);
    *major = 9;
    *minor = 0;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, unsigned *mode)
{
    ENTER(device);
    *mode = 1;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, unsigned *mode)
{
    ENTER(device);
    *mode = 0;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    ENTER(device);
    if (!sim->mig)
        return NVML_ERROR_NOT_SUPPORTED;
    *current = *pending = 1;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count)
{
    ENTER(device);
    *count = sim->mig && device == &whole ? sim->device_count : 0;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *instance)
{
    ENTER(device);
    if (device != &whole || index >= sim->device_count)
        return NVML_ERROR_NOT_FOUND;
    *instance = &handles[index];
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id)
{
    ENTER(device);
    *id = device->index + 1;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int kind, int counter, unsigned long long *count)
{
    ENTER(device);
    (void)counter;
    *count = kind == NVML_MEMORY_ERROR_TYPE_UNCORRECTED ? sim->device[device->index].uncorrected : 0;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t device, const nvmlSetMemoryLimits_v1_t *limits)
{
    ENTER(device);
    if (!sim->limits_cgroups)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    if (!limits || !limits->nameSpace || strlen(limits->nameSpace) >= SIM_GROUP_PATH ||
        limits->softLimit > limits->hardLimit)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (sim->mig)
        return NVML_ERROR_NOT_SUPPORTED;
    sim_lock();
    bool set = sim_group_set(limits->nameSpace, device->index, limits->softLimit, limits->hardLimit);
    sim_unlock();
    return set ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

API nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t device, nvmlDevice_t other, int *level)
{
    ENTER(device);
    ENTER(other);
    *level = device == other ? 0 : NVML_TOPOLOGY_SYSTEM;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, unsigned *active)
{
    ENTER(device);
    (void)link, (void)active;
    return NVML_ERROR_NOT_SUPPORTED;
}

/* ---- what it is doing ---- */

/* Looking whether every process still lives costs a read each, and one who measures asks four
 * questions of every device: what was seen this shortly ago is still true. */
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
    sim_lock();
    sweep();
    memory->total = sim->device[device->index].total_bytes;
    memory->used = sim_device_used(device->index);
    memory->free = memory->total - memory->used;
    sim_unlock();
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
    memory->used = plain.used;
    memory->reserved = 0;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates)
{
    ENTER(device);
    uint64_t now = sim_now_ns();
    unsigned percent = 0;
    sim_lock();
    sweep();
    for (int i = 0; i < SIM_PROCESSES; i++)
        if (sim->process[i].pid)
            percent += sim_busy_percent(&sim->process[i].busy[device->index], now);
    sim_unlock();
    rates->gpu = percent > 100 ? 100 : percent;
    rates->memory = rates->gpu / 2;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *list)
{
    ENTER(device);
    unsigned room = *count, found = 0;
    sim_lock();
    sweep();
    for (int i = 0; i < SIM_PROCESSES; i++) {
        const struct sim_process *process = &sim->process[i];
        uint64_t bytes = process->pid ? sim_process_device_used(process, device->index) : 0;
        if (bytes && found < room && list)
            list[found] = (nvmlProcessInfo_t){(unsigned)process->pid, bytes, ~0u, ~0u};
        found += bytes > 0;
    }
    sim_unlock();
    *count = found;
    return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *list)
{
    ENTER(device);
    (void)list;
    *count = 0;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *list)
{
    unsigned room = *count, found = 0;
    uint32_t unused;
    ENTER(device);
    for (int i = 0; i < SIM_PROCESSES; i++) {
        int32_t pid = sim->process[i].pid;
        if (!pid || !sim_strikes(SIM_FAULT_MPS, pid, (int32_t)device->index, &unused))
            continue;
        if (found < room && list)
            list[found] = (nvmlProcessInfo_t){(unsigned)pid, 0, ~0u, ~0u};
        found++;
    }
    *count = found;
    return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

/* One sample for each process that was busy in the last second; times are µs since boot. */
API nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
                                                 unsigned *count, unsigned long long since_us)
{
    ENTER(device);
    (void)since_us;
    uint64_t now = sim_now_ns();
    unsigned room = samples ? *count : 0, found = 0;
    sim_lock();
    sweep();
    for (int i = 0; i < SIM_PROCESSES; i++) {
        const struct sim_process *process = &sim->process[i];
        unsigned percent = process->pid ? sim_busy_percent(&process->busy[device->index], now) : 0;
        if (percent && found < room)
            samples[found] = (nvmlProcessUtilizationSample_t){(unsigned)process->pid, now / 1000, percent, 0, 0, 0};
        found += percent > 0;
    }
    sim_unlock();
    *count = found;
    if (!found)
        return NVML_ERROR_NOT_FOUND;
    return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

/* ---- events: XIDs ---- */

API nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    ENTER(device);
    *types = NVML_EVENT_TYPE_XID;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    nvmlReturn_t error = enter();
    if (error)
        return error;
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
    sim_lock();
    for (uint32_t d = 0; d < sim->device_count; d++)
        if (device == &handles[d] || device == &whole) {
            set->devices |= 1u << d;
            set->seen[d] = sim->device[d].xids;
        }
    sim_unlock();
    return NVML_SUCCESS;
}

static bool next_event(nvmlEventSet_t set, nvmlEventData_t *data)
{
    bool found = false;
    sim_lock();
    for (uint32_t d = 0; d < sim->device_count && !found; d++) {
        found = (set->devices >> d & 1u) && sim->device[d].xids > set->seen[d];
        if (found) {
            set->seen[d] = sim->device[d].xids;
            *data = (nvmlEventData_t){sim->mig ? &whole : &handles[d], NVML_EVENT_TYPE_XID, sim->device[d].xid,
                                      sim->mig ? d + 1 : ~0u, ~0u};
        }
    }
    sim_unlock();
    return found;
}

API nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms)
{
    nvmlReturn_t error = enter();
    if (error || !set || !data)
        return error ? error : NVML_ERROR_INVALID_ARGUMENT;
    uint64_t until = sim_now_ns() + (uint64_t)timeout_ms * 1000000u;
    while (!next_event(set, data)) {
        if (!is_open())
            return NVML_ERROR_UNINITIALIZED;
        if (sim_now_ns() >= until)
            return NVML_ERROR_TIMEOUT;
        sim_sleep_ns(EVENT_POLL_NS);
    }
    return NVML_SUCCESS;
}
