/* Functions that a real libcuda does not have: switches and readings for tests and the demo.
 *
 * All start with gpushare_sim_ and may be called without cuInit.  Device numbers are those of the
 * machine (as in NVML), not of a process.  0 is success; -1 means a wrong argument or no simulated
 * machine.
 */
#define _GNU_SOURCE
#include <string.h>

#include "sim_process.h"
#include "sim_account.h"
#include "sim_context.h"

/* Uses the state at `path` instead of $GPUSHARE_SIM_STATE, for a test with several machines. */
API int gpushare_sim_attach(const char *path)
{
    return sim_attach(path);
}

/* A kernel module in use cannot be removed: rmmod refuses while a process has /dev/nvidia* open, that is
 * from cuInit or nvmlInit until its end or nvmlShutdown (rmmod(8): "in use"). */
static bool is_in_use(void)
{
    sim_sweep();
    for (int i = 0; i < SIM_PROCESSES; i++)
        if (sim->process[i].pid > 0 || sim->process[i].kept)
            return true;
    for (int i = 0; i < SIM_NVML_CLIENTS; i++)
        if (sim->nvml_client[i].pid &&
            process_start_ticks(sim->nvml_client[i].pid) == sim->nvml_client[i].start_ticks)
            return true;
    return false;
}

/* Makes a fault strike `count` times (-1: until cleared).  pid 0 is any process, device -1 any device. */
API int gpushare_sim_fault(int kind, int pid, int device, int count, unsigned value)
{
    if (sim_open() || kind <= SIM_FAULT_NONE || kind >= SIM_FAULT_KINDS || count == 0 || count < -1 || pid < 0 ||
        device < -1 || device >= (int)sim->device_count)
        return -1;
    HOLD_STATE;
    struct sim_device *at = device >= 0 ? &sim->device[device] : NULL;
    if (!at && (kind == SIM_FAULT_XID || kind == SIM_FAULT_ECC || kind == SIM_FAULT_RECOVERY_ACTION))
        return -1;
    switch (kind) {
    case SIM_FAULT_XID:
        at->xid = value;
        at->xids++;
        return 0;
    case SIM_FAULT_ECC:
        at->uncorrected += value;
        return 0;
    case SIM_FAULT_RECOVERY_ACTION:
        at->recovery_action = value;
        return 0;
    case SIM_FAULT_DRIVER_RESTART:
        if (sim->restarts_unused_only && is_in_use())
            return -1;
        atomic_fetch_add(&sim->driver_starts, 1);
        return 0;
    }
    for (int i = 0; i < SIM_FAULTS; i++)
        if (sim->fault[i].kind == SIM_FAULT_NONE) {
            sim->fault[i] = (struct sim_fault){(uint32_t)kind, pid, device, count, value};
            atomic_fetch_add(&sim->fault_count, 1);
            return 0;
        }
    return -1;
}

API int gpushare_sim_clear_faults(void)
{
    if (sim_open())
        return -1;
    HOLD_STATE;
    memset(sim->fault, 0, sizeof sim->fault);
    atomic_store(&sim->fault_count, 0);
    atomic_fetch_add(&sim->faults_cleared, 1);
    return 0;
}

/* A stand-in for CUPTI calls this when it traces this process. */
API int gpushare_sim_trace(void)
{
    if (sim_open() || !sim_me)
        return -1;
    sim_hinder(SIM_HINDERED_TRACE);
    return 0;
}

/* Creates the primary context of an ordinal of this process as libcudart does: through a table of the driver
 * (cuGetExportTable), without a symbol.  Returns the driver's code, or -1. */
API int gpushare_sim_retain_unseen(int ordinal)
{
    CUcontext context;
    return sim_open() ? -1 : (int)cuDevicePrimaryCtxRetain(&context, ordinal) ?: (int)cuCtxSetCurrent(context);
}

/* Returns the number of faults that will still strike; -1 if there is no machine. */
API int gpushare_sim_faults_left(void)
{
    int left = 0;
    if (sim_open())
        return -1;
    HOLD_STATE;
    for (int i = 0; i < SIM_FAULTS; i++)
        left += sim->fault[i].kind != SIM_FAULT_NONE && sim->fault[i].remaining != 0;
    return left;
}

API int gpushare_sim_host_memory(uint64_t *total, uint64_t *available)
{
    if (sim_open())
        return -1;
    HOLD_STATE;
    sim_sweep();
    uint64_t used = sim_host_used();
    *total = sim->host_total_bytes;
    *available = used < *total ? *total - used : 0;
    return 0;
}

API int gpushare_sim_set_host_memory(uint64_t total)
{
    if (sim_open())
        return -1;
    HOLD_STATE;
    sim->host_total_bytes = total;
    return 0;
}

API int gpushare_sim_device_memory(int device, uint64_t *used, uint64_t *peak, uint64_t *total)
{
    if (sim_open() || device < 0 || device >= (int)sim->device_count)
        return -1;
    HOLD_STATE;
    sim_sweep();
    *used = sim_device_used((uint32_t)device);
    *peak = sim->device[device].peak_bytes;
    *total = sim->device[device].total_bytes;
    return 0;
}

API int gpushare_sim_uuid(int device, char text[SIM_UUID_TEXT])
{
    if (sim_open() || device < 0 || device >= (int)sim->device_count)
        return -1;
    sim_uuid_text(sim->device[device].uuid, text);
    return 0;
}

/* Limits the host memory of a cgroup, like memory.max; UINT64_MAX is no limit. */
API int gpushare_sim_host_group(const char *path, uint64_t max_bytes)
{
    if (sim_open() || strlen(path) >= SIM_GROUP_PATH)
        return -1;
    HOLD_STATE;
    return sim_group_set(path, SIM_HOST, 0, max_bytes) ? 0 : -1;
}

/* Reads the limits of a cgroup on a device; returns 0, or -1 if none is set. */
API int gpushare_sim_group(int device, const char *path, uint64_t *soft, uint64_t *hard)
{
    if (sim_open())
        return -1;
    HOLD_STATE;
    for (int g = 0; g < SIM_GROUPS; g++)
        if ((int)sim->group[g].device == device && !strcmp(sim->group[g].path, path)) {
            *soft = sim->group[g].soft_bytes;
            *hard = sim->group[g].hard_bytes;
            return 0;
        }
    return -1;
}

/* Returns a process's checkpoint state (as CUprocessState), or -1 if it does not use CUDA. */
API int gpushare_sim_process_state(int pid)
{
    if (sim_open())
        return -1;
    HOLD_STATE;
    sim_sweep();
    struct sim_process *process = sim_find(pid);
    return process ? (int)process->state : -1;
}

/* Reads the time that a process has received of a device, in nanoseconds of that device. */
API int gpushare_sim_served(int pid, int device, uint64_t *ns)
{
    if (sim_open() || device < 0 || device >= (int)sim->device_count)
        return -1;
    HOLD_STATE;
    struct sim_process *process = sim_find(pid);
    if (!process)
        return -1;
    sim_divide_time((uint32_t)device);
    *ns = sim_work_on(process, (uint32_t)device)->served_ns;
    return 0;
}
