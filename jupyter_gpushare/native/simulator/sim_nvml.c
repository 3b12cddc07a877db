/* The simulated libnvidia-ml.so.1 for the same devices: start-up, and the properties of a device.
 * Usage and events of a device are in sim_nvml_usage.c.
 *
 * Facts (NVML API reference r580): NVML sees every device, for any CUDA_VISIBLE_DEVICES; a device that
 * fell off the bus answers GPU_IS_LOST.  MIG instances have their own handles below their GPU's.
 * Functions that the simulator lacks (NVLink, and cgroup limits unless the machine has them) answer
 * NOT_SUPPORTED or FUNCTION_NOT_FOUND.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "sim_process.h"
#include "sim_nvml.h"

enum { NVML_TOPOLOGY_SYSTEM = 50, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1 };

static const char whole_uuid[] = "GPU-00000000-0000-4000-8000-0000000000f0";

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

typedef struct {
    const char *nameSpace;
    unsigned long long softLimit, hardLimit;
} nvmlSetMemoryLimits_v1_t;

struct nvmlDevice_st sim_handles[SIM_DEVICES];
struct nvmlDevice_st sim_whole;
static _Atomic int users;
static _Atomic uint32_t started; /* the number of the driver's start when this process initialized NVML */

bool sim_nvml_is_open(void)
{
    return users && atomic_load(&started) == atomic_load(&sim->driver_starts);
}

nvmlReturn_t sim_nvml_enter(void)
{
    if (!sim_nvml_is_open())
        return NVML_ERROR_UNINITIALIZED;
    sim_hang(SIM_FAULT_HANG_NVML, 0, SIM_DEVICES); /* SIM_DEVICES is no device, so faults of one device do not apply */
    return NVML_SUCCESS;
}

nvmlReturn_t sim_nvml_enter_device(nvmlDevice_t device)
{
    if (!sim_nvml_is_open())
        return NVML_ERROR_UNINITIALIZED;
    if (sim->mig && device == &sim_whole)
        return NVML_SUCCESS;
    if (device < sim_handles || device >= sim_handles + sim->device_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    sim_hang(SIM_FAULT_HANG_NVML, 0, (int32_t)device->index);
    return sim_device_lost(device->index) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

static nvmlReturn_t put_text(char *to, unsigned size, const char *text)
{
    if (!to)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) >= size)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(to, text);
    return NVML_SUCCESS;
}

/* ---- the library and the system ---- */

/* A driver with clients cannot be restarted (sim_control.c). */
static void register_client(bool is_client)
{
    int32_t self = sim_self();
    HOLD_STATE;
    for (int i = 0; i < SIM_NVML_CLIENTS; i++) {
        int32_t pid = sim->nvml_client[i].pid;
        bool is_free = !pid || process_start_ticks(pid) != sim->nvml_client[i].start_ticks;
        if (is_client ? !is_free : pid != self)
            continue;
        sim->nvml_client[i].pid = is_client ? self : 0;
        sim->nvml_client[i].start_ticks = process_start_ticks(self);
        break;
    }
}

API nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    if (sim_open())
        return NVML_ERROR_DRIVER_NOT_LOADED;
    for (uint32_t d = 0; d < SIM_DEVICES; d++)
        sim_handles[d].index = d;
    atomic_store(&started, atomic_load(&sim->driver_starts));
    if (users++ == 0)
        register_client(true);
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
    if (--users == 0)
        register_client(false);
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
    case NVML_ERROR_DRIVER_NOT_LOADED: return *sim_failure() ? sim_failure() : "Driver Not Loaded";
    case NVML_ERROR_TIMEOUT: return "Timeout";
    case NVML_ERROR_FUNCTION_NOT_FOUND: return "Function Not Found";
    case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

API nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned size)
{
    ENTER_SYSTEM;
    return put_text(text, size, sim->driver);
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
    ENTER_SYSTEM;
    *count = sim->mig ? 1 : sim->device_count;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
    ENTER_SYSTEM;
    if (index >= (sim->mig ? 1 : sim->device_count))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (sim->mig) {
        *device = &sim_whole;
        return NVML_SUCCESS;
    }
    *device = &sim_handles[index];
    return sim_device_lost(index) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    char text[SIM_UUID_TEXT];
    ENTER_SYSTEM;
    if (sim->mig && !strcmp(uuid, whole_uuid)) {
        *device = &sim_whole;
        return NVML_SUCCESS;
    }
    for (uint32_t d = 0; d < sim->device_count; d++) {
        sim_uuid_text(sim->device[d].uuid, text);
        if (!strcmp(text, uuid)) {
            *device = &sim_handles[d];
            return sim_device_lost(d) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

/* The domain has 4 or 8 digits. */
API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *address, nvmlDevice_t *device)
{
    ENTER_SYSTEM;
    for (uint32_t d = 0; d < (sim->mig ? 1 : sim->device_count); d++) {
        char text[32];
        snprintf(text, sizeof text, "00000000:%02X:00.0", d + 1);
        if (!strcasecmp(address, text) || !strcasecmp(address, text + 4))
            return nvmlDeviceGetHandleByIndex_v2(d, device);
    }
    return NVML_ERROR_NOT_FOUND;
}

/* ---- properties of a device ---- */

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

API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned size)
{
    ENTER(device);
    return put_text(text, size, sim->device[device->index].name);
}

API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned size)
{
    char uuid[SIM_UUID_TEXT];
    ENTER(device);
    if (device == &sim_whole)
        return put_text(text, size, whole_uuid);
    sim_uuid_text(sim->device[device->index].uuid, uuid);
    return put_text(text, size, uuid);
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

API nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, unsigned *mode)
{
    ENTER(device);
    *mode = !sim->lacks_persistence;
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
    *count = sim->mig && device == &sim_whole ? sim->device_count : 0;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *instance)
{
    ENTER(device);
    if (device != &sim_whole || index >= sim->device_count)
        return NVML_ERROR_NOT_FOUND;
    *instance = &sim_handles[index];
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t instance, nvmlDevice_t *device)
{
    ENTER(instance);
    if (!sim->mig || instance == &sim_whole)
        return NVML_ERROR_INVALID_ARGUMENT;
    *device = &sim_whole;
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

/* The call succeeds if any field was filled; each field has its own code (NVML API reference, "Field Value
 * Queries").  The recovery action is that of the whole GPU. */
API nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    ENTER(device);
    if (!values || count < 1)
        return NVML_ERROR_INVALID_ARGUMENT;
    bool any = false;
    for (int i = 0; i < count; i++) {
        bool known = values[i].fieldId == NVML_FI_DEV_GET_GPU_RECOVERY_ACTION && (!sim->mig || device == &sim_whole);
        values[i].nvmlReturn = known ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
        values[i].valueType = 1; /* NVML_VALUE_TYPE_UNSIGNED_INT */
        values[i].value.ullVal = 0;
        values[i].value.uiVal = known ? sim->device[device == &sim_whole ? 0 : device->index].recovery_action : 0;
        any = any || known;
    }
    return any ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
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
    HOLD_STATE;
    bool set = sim_group_set(limits->nameSpace, device->index, limits->softLimit, limits->hardLimit);
    return set ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

API nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t device, nvmlDevice_t other, int *level)
{
    ENTER(device);
    ENTER(other);
    *level = device == other ? 0 : NVML_TOPOLOGY_SYSTEM;
    return NVML_SUCCESS;
}
