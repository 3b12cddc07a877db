/* The simulated libcuda.so.1: checkpointing a process from another one.
 *
 * Facts (CUDA Driver API reference 13.0, "CUDA Checkpointing"; README and numbered issues of
 * github.com/NVIDIA/cuda-checkpoint):
 *
 *     RUNNING --Lock--> LOCKED --Checkpoint--> CHECKPOINTED --Restore--> LOCKED --Unlock--> RUNNING
 *
 *   - Lock waits until calls in progress and submitted work are done; on timeout the process
 *     stays RUNNING.  0 means no timeout.
 *   - Checkpoint needs host memory for everything on the device, contexts included.  The target
 *     allocates it (issue 33), so its memory cgroup is charged and the kernel may kill it.
 *   - Restore may move to other devices, from driver 580 on (release notes of CUDA 13.0).  The pairs "must
 *     contain all checkpointed devices" (help of the tool, 580.65.06, in issues 18, 35 and 46).  A new device
 *     has the same chip and enough memory (issue 18).  Persistence mode is on, or the caller called cuInit.
 *     Any other list answers 1 and changes nothing (issues 35, 46).  It is not documented whether a visible
 *     but unused device must be named.  It is in github.com/checkpoint-restore/criu pull request 2836 and
 *     github.com/kubernetes/enhancements pull request 6275 (pairs=visible); with pairs=used a list that names
 *     one answers 1.  It is not documented either that free memory is checked first: without enough memory
 *     the process is lost, as by any other Restore.
 *   - Before driver 580 the bytes of the pairs are reserved (cuda.h 12.8): Restore answers 1.  A driver may
 *     ignore them instead and restore "on the wrong devices" (github.com/google/gvisor pull request 14817).
 *   - After a move the process sees the new UUID and the old PCI bus id (issue 48: moved to another node).
 *     For a move within one node that is not known, so moved-uuid=old shows the old UUID.
 *   - A Restore that runs out of device memory answers 2 and leaves the process CHECKPOINTED;
 *     from then on Restore answers 304 and Unlock 401, and its calls never return (issue 44,
 *     driver 580.95.05, T4).  With lost=failed it is FAILED, as cuda.h names that state.
 *   - Checkpoint of a process on a MIG instance answers 2 (issue 42, A100).
 *   - Checkpoint of a PyTorch process answers 801 with driver 570.86.15 and 570.158.01, after a
 *     Lock that succeeds; a program without loaded modules passes (issue 34).
 *   - Checkpoint of a process on a GB10 answers 801 (issue 51, driver 580.142).
 *   - Without persistence mode a checkpoint answers 800 (issue 25, driver 565.57.01, A100).  The command of
 *     the issue did Lock and Checkpoint; in the simulator Checkpoint answers it.
 *   - Managed memory, IPC and peer access answer 801 at Checkpoint (README, "Functionality"); so
 *     does a process that CUPTI traces (issue 15: not supported).
 *   - A process that only called cuInit answers 3, CUDA_ERROR_NOT_INITIALIZED
 *     (github.com/llm-d-incubation/llm-d-rl-time-slicing pull request 148).
 *   - The driver "does not attempt to keep the process in a good state if an error (such as the
 *     presence of a UVM allocation) is encountered during checkpoint" (README, driver 570): after a
 *     Checkpoint that fails or is refused, the process's CUDA calls fail.
 *   - Lock may end the target with SIGSEGV (issue 58, driver 610.57.04, H100; issue 5):
 *     SIM_FAULT_LOCK_KILLS and the like.
 * Two behaviours are guesses: the growth of a context by its first restore (growth=SIZE), and the end of a
 * move whose caller dies (sim_moves.c).
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sim_process.h"
#include "sim_access.h"
#include "sim_gate.h"

static const uint64_t poll_ns = 100000;
enum { FIRST_DRIVER_WITH_PAIRS = 580 };

struct target {
    struct sim_process *process;
    int32_t pid;
    uint64_t start_ticks;
};

/* ---- the target ---- */

/* On success the mutex is held. */
static CUresult aim(int pid, struct target *target)
{
    if (!sim_me)
        return CUDA_ERROR_NOT_INITIALIZED;
    sim_hang(SIM_FAULT_HANG_CHECKPOINT, pid, -1);
    for (uint32_t cleared = atomic_load(&sim->faults_cleared);
         sim_waits_for_nccl(pid) && atomic_load(&sim->faults_cleared) == cleared;)
        sim_sleep_ns(10000000u);
    bool allowed = sim_may_checkpoint(pid);
    for (;;) {
        sim_lock();
        struct sim_process *process = sim_find(pid);
        if (!process || process_start_ticks(pid) != process->start_ticks) {
            sim_sweep();
            sim_unlock();
            return CUDA_ERROR_INVALID_VALUE;
        }
        if (!process->used_cuda || !allowed) {
            sim_unlock();
            return allowed ? CUDA_ERROR_NOT_INITIALIZED : CUDA_ERROR_OPERATING_SYSTEM;
        }
        if (sim_is_abandoned(process))
            sim_abandon(process);
        if (!sim_is_abandoned(process)) {
            *target = (struct target){process, pid, process->start_ticks};
            return CUDA_SUCCESS;
        }
        sim_unlock(); /* the driver still works on the move of a dead caller, or never ends it */
        if (sim->abandoned >= SIM_ANSWERS_UNKNOWN)
            return sim->abandoned == SIM_ANSWERS_UNKNOWN ? CUDA_ERROR_UNKNOWN : CUDA_ERROR_INVALID_HANDLE;
        sim_sleep_ns(poll_ns);
    }
}

static CUresult aim_in_state(int pid, struct target *target, enum sim_process_state state)
{
    CUresult result = aim(pid, target);
    if (result)
        return result;
    if (target->process->state == state && !target->process->move)
        return CUDA_SUCCESS;
    sim_unlock();
    return CUDA_ERROR_ILLEGAL_STATE;
}

/* Kills the target with SIGSEGV, as the driver does, if this fault strikes; the mutex is not held. */
static bool kills(enum sim_fault_kind kind, int pid)
{
    if (!sim_me || !sim_strikes(kind, pid, -1, NULL))
        return false;
    kill(pid, SIGSEGV);
    while (process_start_ticks(pid))
        sim_sleep_ns(poll_ns);
    return true;
}

/* The target has ended.  Releases the mutex. */
static CUresult gone(void)
{
    sim_sweep();
    sim_unlock();
    return CUDA_ERROR_INVALID_VALUE;
}

static bool still_there(const struct target *target)
{
    return target->process->pid == target->pid && target->process->start_ticks == target->start_ticks &&
           process_start_ticks(target->pid) == target->start_ticks;
}

/* Returns the duration of a copy. */
static uint64_t copy_ns(uint64_t bytes)
{
    uint64_t rate = sim->copy_bytes_per_s;
    return rate ? bytes / rate * 1000000000u + bytes % rate * 1000000000u / rate : 0;
}

/* Lets the time of a copy pass without the mutex.  Returns false if the process died meanwhile. */
static bool wait_for_copy(const struct target *target, uint64_t ns)
{
    sim_unlock();
    if (ns)
        sim_sleep_ns(ns);
    sim_lock();
    return still_there(target);
}

API CUresult cuCheckpointProcessGetState(int pid, int *state)
{
    struct target target;
    CUresult result = state ? aim(pid, &target) : CUDA_ERROR_INVALID_VALUE;
    if (result)
        return result;
    *state = (int)target.process->state;
    sim_unlock();
    return CUDA_SUCCESS;
}

API CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args)
{
    struct target target;
    uint32_t timeout_ms = args ? args->timeoutMs : 0;
    if (kills(SIM_FAULT_LOCK_KILLS, pid))
        return CUDA_ERROR_OPERATING_SYSTEM;
    CUresult result = aim_in_state(pid, &target, SIM_RUNNING);
    if (result)
        return result;
    sim_begin_move(target.process, SIM_MOVE_LOCK, 0);
    sim_gate_set(target.process, SIM_GATE_CLOSED);
    sim_unlock();
    bool in_time = !sim_strikes(SIM_FAULT_LOCK_TIMEOUT, pid, -1, NULL);
    uint64_t until = sim_now_ns() + (uint64_t)timeout_ms * 1000000u;
    for (;;) {
        bool quiet = !atomic_load(&target.process->inside);
        sim_lock();
        quiet = quiet && !sim_has_work(target.process);
        if (!still_there(&target))
            return gone();
        if (in_time && quiet)
            break;
        if (!in_time || (timeout_ms && sim_now_ns() >= until)) {
            target.process->move = SIM_MOVE_NONE;
            sim_gate_set(target.process, SIM_GATE_OPEN);
            sim_note(target.process, "lock_timeout", -1, 0);
            sim_unlock();
            return CUDA_ERROR_NOT_READY;
        }
        sim_unlock();
        sim_sleep_ns(poll_ns);
    }
    sim_end_lock(target.process);
    sim_unlock();
    return CUDA_SUCCESS;
}

API CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args)
{
    struct target target;
    (void)args;
    CUresult result = aim_in_state(pid, &target, SIM_LOCKED);
    if (result)
        return result;
    sim_unlock();
    if (sim_strikes(SIM_FAULT_UNLOCK_FAILS, pid, -1, NULL))
        return CUDA_ERROR_UNKNOWN;
    result = aim_in_state(pid, &target, SIM_LOCKED);
    if (result)
        return result;
    target.process->state = SIM_RUNNING;
    sim_note(target.process, "unlock", -1, 0);
    sim_gate_set(target.process, SIM_GATE_OPEN);
    sim_unlock();
    return CUDA_SUCCESS;
}

/* Whether a memory cgroup of the target cannot hold this many more bytes. */
static bool exceeds_host_group(const struct sim_process *process, uint64_t bytes)
{
    for (int g = 0; g < SIM_GROUPS; g++) {
        const struct sim_group *group = &sim->group[g];
        if (!group->path[0] || group->device != SIM_HOST || !sim_in_group(group->path, process->pid))
            continue;
        uint64_t used = 0;
        for (int i = 0; i < SIM_PROCESSES; i++) {
            const struct sim_process *other = &sim->process[i];
            for (int d = 0; other->pid > 0 && sim_in_group(group->path, other->pid) && d < SIM_DEVICES; d++)
                used += other->parked_used_bytes[d] + other->parked_context_bytes[d];
        }
        if (used > group->hard_bytes || bytes > group->hard_bytes - used)
            return true;
    }
    return false;
}

static CUresult refusal(const struct sim_process *process, uint64_t bytes)
{
    uint64_t host = sim_host_used();
    if (sim->lacks_persistence)
        return CUDA_ERROR_NOT_PERMITTED;
    for (uint32_t d = 0; d < sim->device_count; d++)
        if (process->contexts >> d & 1u && sim->device[d].shares_host_memory)
            return CUDA_ERROR_NOT_SUPPORTED;
    if (process->hindrances || (process->modules && !strncmp(sim->driver, "570.", 4)))
        return CUDA_ERROR_NOT_SUPPORTED;
    if (sim->mig || host > sim->host_total_bytes || bytes > sim->host_total_bytes - host)
        return CUDA_ERROR_OUT_OF_MEMORY;
    return CUDA_SUCCESS;
}

API CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args)
{
    struct target target;
    uint64_t all = 0;
    (void)args;
    if (kills(SIM_FAULT_CHECKPOINT_KILLS, pid))
        return CUDA_ERROR_OPERATING_SYSTEM;
    bool damages = sim && sim_strikes(SIM_FAULT_CHECKPOINT_FAILS, pid, -1, NULL);
    bool fails = damages || (sim && sim_strikes(SIM_FAULT_CHECKPOINT_FAILS_UNHARMED, pid, -1, NULL));
    CUresult result = aim_in_state(pid, &target, SIM_LOCKED);
    if (result)
        return result;
    struct sim_process *process = target.process;
    for (uint32_t d = 0; d < SIM_DEVICES; d++)
        all += sim_process_device_used(process, d);
    result = refusal(process, all);
    if (!result && exceeds_host_group(process, all)) {
        sim_note(process, "out_of_host_memory", -1, all);
        kill(pid, SIGKILL); /* as the kernel does */
        result = CUDA_ERROR_OPERATING_SYSTEM;
    }
    if (result) {
        process->damaged = true;
        sim_unlock();
        return result;
    }
    uint64_t ns = copy_ns(all);
    sim_begin_move(process, SIM_MOVE_CHECKPOINT, ns);
    if (!wait_for_copy(&target, fails ? ns / 2 : ns))
        return gone();
    process->damaged = process->damaged || damages;
    sim_end_checkpoint(process, fails);
    sim_unlock();
    return fails ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

static int device_with(const CUuuid *uuid)
{
    for (uint32_t d = 0; d < sim->device_count; d++)
        if (!memcmp(sim->device[d].uuid, uuid->bytes, sizeof uuid->bytes))
            return (int)d;
    return -1;
}

/* Returns the devices that pairs must name, as bits; no other may be named. */
static uint32_t to_be_named(const struct sim_process *process)
{
    uint32_t named = process->contexts;
    for (int d = 0; d < SIM_DEVICES; d++)
        named |= (uint32_t)(process->parked_used_bytes[d] + process->parked_context_bytes[d] > 0) << d;
    for (uint32_t i = 0; !sim->pairs_used_only && i < process->visible_count; i++)
        named |= 1u << process->visible[i];
    return named;
}

/* Returns the length of the chip's name in a device's name, CHIP-SIZE. */
static size_t chip_length(const struct sim_device *device)
{
    const char *dash = strrchr(device->name, '-');
    return dash ? (size_t)(dash - device->name) : strlen(device->name);
}

/* Whether a device can stand in for another. */
static bool can_replace(int from, int to)
{
    const struct sim_device *old = &sim->device[from], *new = &sim->device[to];
    size_t length = chip_length(old);
    return length == chip_length(new) && !strncmp(old->name, new->name, length) && new->total_bytes >= old->total_bytes;
}

/* Reads to which device each device's bytes go.  Returns false if the driver refuses the pairs. */
static bool read_pairs(const struct sim_process *process, const CUcheckpointRestoreArgs *args, int32_t to[SIM_DEVICES])
{
    unsigned count = args ? args->gpuPairsCount : 0;
    uint32_t unnamed = to_be_named(process), taken = 0;
    for (int d = 0; d < SIM_DEVICES; d++)
        to[d] = count ? -1 : d;
    if (!count)
        return true;
    if (!args->gpuPairs || atoi(sim->driver) < FIRST_DRIVER_WITH_PAIRS)
        return false;
    for (unsigned i = 0; i < count; i++) {
        int from = device_with(&args->gpuPairs[i].oldUuid), target = device_with(&args->gpuPairs[i].newUuid);
        if (from < 0 || target < 0 || !(unnamed >> from & 1u) || taken >> target & 1u || !can_replace(from, target))
            return false;
        to[from] = target;
        unnamed &= ~(1u << from);
        taken |= 1u << target;
    }
    return !unnamed;
}

/* The restore found no memory, so the process is lost.  Releases the mutex. */
static CUresult lose(struct sim_process *process, const uint64_t bytes[SIM_DEVICES])
{
    sim_note_each(process, "poison", bytes);
    process->lost = true;
    if (sim->lost_state == SIM_LOST_FAILED) {
        process->state = SIM_FAILED;
        sim_gate_set(process, SIM_GATE_FAILED);
    }
    sim_unlock();
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Computes the bytes needed on each device; returns false if a device has too few. */
static bool has_memory(const struct sim_process *process, const int32_t to[SIM_DEVICES], uint64_t need[SIM_DEVICES])
{
    bool enough = true;
    for (int d = 0; d < SIM_DEVICES; d++)
        if (to[d] >= 0) {
            need[to[d]] += process->parked_used_bytes[d] + process->parked_context_bytes[d];
            need[to[d]] += !process->grown && process->contexts >> d & 1u ? sim->growth_bytes : 0;
        }
    sim_sweep();
    for (uint32_t d = 0; d < sim->device_count; d++)
        enough = enough && !(need[d] && sim_device_lost(d)) &&
                 (!need[d] || sim_device_used(d) + need[d] <= sim_device_usable(d));
    return enough;
}

API CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args)
{
    struct target target;
    int32_t to[SIM_DEVICES];
    uint64_t need[SIM_DEVICES] = {0}, all = 0;
    if (kills(SIM_FAULT_RESTORE_KILLS, pid))
        return CUDA_ERROR_OPERATING_SYSTEM;
    bool loses = sim && sim_strikes(SIM_FAULT_RESTORE_POISONS, pid, -1, NULL);
    bool fails = sim && sim_strikes(SIM_FAULT_RESTORE_FAILS, pid, -1, NULL);
    CUresult result = aim_in_state(pid, &target, SIM_CHECKPOINTED);
    if (result)
        return result;
    struct sim_process *process = target.process;
    if (process->lost || fails || !read_pairs(process, args, to)) {
        sim_note(process, "restore_failed", -1, 0);
        result = process->lost ? CUDA_ERROR_OPERATING_SYSTEM : fails ? CUDA_ERROR_UNKNOWN : CUDA_ERROR_INVALID_VALUE;
        sim_unlock();
        return result;
    }
    if (!has_memory(process, to, need) || loses)
        return lose(process, need);
    for (int d = 0; d < SIM_DEVICES; d++)
        all += need[d];
    uint64_t ns = copy_ns(all);
    sim_begin_restore(process, to, ns);
    if (!wait_for_copy(&target, ns))
        return gone();
    sim_end_restore(process);
    sim_unlock();
    return CUDA_SUCCESS;
}
