/* The simulated libcuda.so.1: whether a process may query or checkpoint another one now.
 *
 * Facts (numbered issues of github.com/NVIDIA/cuda-checkpoint):
 *   - The caller needs root or ptrace access to the target: 304 otherwise (issues 6, 25, 41).
 *     checkpoint=yama also allows what ptrace_scope 1 allows: a descendant of the caller with the
 *     same user (Linux, Documentation/admin-guide/LSM/Yama.rst).
 *   - On some GPUs root gets 304 as well, from every call (issue 37): checkpoint=none.
 *   - While one process that uses NCCL is locked or checkpointed, every action on another one,
 *     GetState included, waits until the first is unlocked (issue 30, driver 575.57.08; 45).
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "sim_process.h"
#include "sim_access.h"
#include "sim_gate.h"

/* ---- permission ---- */

bool sim_may_checkpoint(int32_t pid)
{
    enum { CAP_SYS_PTRACE = 19 }; /* linux/capability.h */
    int32_t self = sim_self();
    if (sim->checkpoint_by == SIM_BY_NONE)
        return false;
    if (sim->checkpoint_by == SIM_BY_ANY_UID || geteuid() == 0 || pid == self)
        return true;
    if (sim_status_of(self, "CapEff", 16) >> CAP_SYS_PTRACE & 1 || sim_status_of(pid, "TracerPid", 10) == (unsigned)self)
        return true;
    return sim->checkpoint_by == SIM_BY_YAMA && sim_status_of(pid, "Uid", 10) == geteuid() && sim_is_below(pid, &self, 1);
}

/* ---- NCCL ---- */

static bool uses_nccl(int32_t pid)
{
    char path[32], line[512];
    bool found = false;
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *file = fopen(path, "re");
    while (file && !found && fgets(line, sizeof line, file))
        found = strstr(line, "/libnccl") != NULL;
    if (file)
        fclose(file);
    return found;
}

/* Whether another process that uses NCCL is locked, so that calls about this one wait. */
bool sim_waits_for_nccl(int32_t pid)
{
    int32_t locked[SIM_PROCESSES];
    int count = 0;
    sim_lock();
    for (int i = 0; i < SIM_PROCESSES; i++)
        if (sim->process[i].pid > 0 && sim->process[i].pid != pid && sim->process[i].state != SIM_RUNNING &&
            process_start_ticks(sim->process[i].pid) == sim->process[i].start_ticks)
            locked[count++] = sim->process[i].pid;
    sim_unlock();
    bool waits = false;
    if (count && uses_nccl(pid))
        while (count && !waits)
            waits = uses_nccl(locked[--count]);
    return waits;
}
