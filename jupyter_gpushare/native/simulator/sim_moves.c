/* Moves of a process's memory between device and host, and its end, as numbers (the mutex is held).
 *
 * It is not documented how a move ends whose caller dies half-way.  With caller-dies=undone the process
 * returns to its state before the move.  With caller-dies=done the driver, which works in the process itself
 * (cuCheckpointProcessGetRestoreThreadId), completes the move, and calls about the process wait for that.
 * A killed caller may also leave driver and process out of step (NVIDIA in
 * github.com/checkpoint-restore/criu pull request 2547, 2024-12: "in the middle of operations").  It is not
 * documented either what the driver does then.  In the simulator the process stays in the middle of the move,
 * its calls wait for ever, and every later call about it never returns (caller-dies=hangs) or answers the
 * given code (999, 400).
 */
#define _GNU_SOURCE
#include "sim_gpu.h"

#include <string.h>

#include "sim_process.h"

void sim_note_each(const struct sim_process *process, const char *event, const uint64_t bytes[SIM_DEVICES])
{
    bool any = false;
    for (int d = 0; d < SIM_DEVICES; d++)
        if (bytes[d])
            any = true, sim_note(process, event, d, bytes[d]);
    if (!any)
        sim_note(process, event, -1, 0);
}

static bool is_target(const int32_t to[SIM_DEVICES], int device, int *from)
{
    for (int d = 0; d < SIM_DEVICES; d++)
        if (to[d] == device) {
            *from = d;
            return true;
        }
    return false;
}

/* Returns the device that stands for `device` after a move.  An unnamed device stays, unless another took its
 * place.  Then it becomes the device that is free, so that no two ordinals are the same device. */
static uint8_t device_after(const int32_t to[SIM_DEVICES], int device)
{
    if (to[device] >= 0)
        return (uint8_t)to[device];
    while (is_target(to, device, &device))
        ;
    return (uint8_t)device;
}

void sim_begin_move(struct sim_process *process, enum sim_move move, uint64_t takes_ns)
{
    process->mover_pid = sim_self();
    process->mover_start_ticks = process_start_ticks(process->mover_pid);
    process->move_ends_ns = sim_now_ns() + takes_ns;
    process->move = move;
    if (move == SIM_MOVE_CHECKPOINT) {
        memcpy(process->parked_used_bytes, process->used_bytes, sizeof process->used_bytes);
        memcpy(process->parked_context_bytes, process->context_bytes, sizeof process->context_bytes);
    }
}

void sim_end_lock(struct sim_process *process)
{
    process->move = SIM_MOVE_NONE;
    process->state = SIM_LOCKED;
    sim_note(process, "lock", -1, 0);
}

void sim_end_checkpoint(struct sim_process *process, bool fails)
{
    uint64_t bytes[SIM_DEVICES];
    for (uint32_t d = 0; d < SIM_DEVICES; d++)
        bytes[d] = sim_process_device_used(process, d);
    process->move = SIM_MOVE_NONE;
    memset(fails ? process->parked_used_bytes : process->used_bytes, 0, sizeof process->used_bytes);
    memset(fails ? process->parked_context_bytes : process->context_bytes, 0, sizeof process->context_bytes);
    if (!fails)
        process->state = SIM_CHECKPOINTED;
    sim_note_each(process, fails ? "checkpoint_failed" : "checkpoint", bytes);
}

/* From now on the devices have the bytes; the host keeps them until the end. */
void sim_begin_restore(struct sim_process *process, const int32_t to[SIM_DEVICES], uint64_t takes_ns)
{
    sim_begin_move(process, SIM_MOVE_RESTORE, takes_ns);
    memcpy(process->move_to, to, sizeof process->move_to);
    for (int d = 0; d < SIM_DEVICES; d++)
        if (to[d] >= 0) {
            process->used_bytes[to[d]] += process->parked_used_bytes[d];
            process->context_bytes[to[d]] += process->parked_context_bytes[d];
        }
    for (uint32_t d = 0; d < sim->device_count; d++) {
        uint64_t used = sim_device_used(d);
        sim->device[d].peak_bytes = used > sim->device[d].peak_bytes ? used : sim->device[d].peak_bytes;
    }
}

void sim_end_restore(struct sim_process *process)
{
    const int32_t *to = process->move_to;
    uint64_t bytes[SIM_DEVICES] = {0};
    uint32_t contexts = 0;
    uint8_t before[SIM_DEVICES];
    for (int d = 0; d < SIM_DEVICES; d++)
        if (to[d] >= 0) {
            bytes[to[d]] += process->parked_used_bytes[d] + process->parked_context_bytes[d];
            contexts |= (process->contexts >> d & 1u) << to[d];
        }
    memcpy(before, process->visible, sizeof before);
    for (uint32_t i = 0; i < process->visible_count; i++)
        process->visible[i] = device_after(to, process->visible[i]);
    sim_move_time(process, before);
    memset(process->parked_used_bytes, 0, sizeof process->parked_used_bytes);
    memset(process->parked_context_bytes, 0, sizeof process->parked_context_bytes);
    process->move = SIM_MOVE_NONE;
    process->state = SIM_LOCKED;
    process->contexts = contexts;
    for (int d = 0; d < SIM_DEVICES; d++)
        if (to[d] >= 0 && to[d] != d && bytes[to[d]])
            sim_note_move(process, d, to[d], bytes[to[d]]);
    sim_note_each(process, "restore", bytes);
    for (int d = 0; d < SIM_DEVICES && sim->growth_bytes && !process->grown; d++)
        if (contexts >> d & 1u) {
            process->context_bytes[d] += sim->growth_bytes;
            sim_note(process, "context", d, sim->growth_bytes);
        }
    process->grown = true;
}

/* ---- moves without a caller ---- */

bool sim_is_abandoned(const struct sim_process *process)
{
    return process->move && process_start_ticks(process->mover_pid) != process->mover_start_ticks;
}

static void undo(struct sim_process *process)
{
    if (process->move == SIM_MOVE_LOCK)
        sim_gate_set(process, SIM_GATE_OPEN);
    for (int d = 0; d < SIM_DEVICES; d++) {
        if (process->move == SIM_MOVE_CHECKPOINT)
            process->parked_used_bytes[d] = process->parked_context_bytes[d] = 0;
        if (process->move == SIM_MOVE_RESTORE)
            process->used_bytes[d] = process->context_bytes[d] = 0;
    }
    process->move = SIM_MOVE_NONE;
}

void sim_abandon(struct sim_process *process)
{
    uint64_t now = sim_now_ns();
    bool quiet = !atomic_load(&process->inside) && !sim_has_work(process);
    if (sim->abandoned == SIM_UNDONE)
        undo(process);
    else if (sim->abandoned != SIM_DONE)
        return;
    else if (process->move == SIM_MOVE_LOCK && quiet)
        sim_end_lock(process);
    else if (process->move == SIM_MOVE_CHECKPOINT && process->move_ends_ns <= now)
        sim_end_checkpoint(process, false);
    else if (process->move == SIM_MOVE_RESTORE && process->move_ends_ns <= now)
        sim_end_restore(process);
}

/* ---- processes that ended ---- */

static bool is_alive(const struct sim_process *process)
{
    return process_start_ticks(process->pid) == process->start_ticks;
}

static bool holds_memory(const struct sim_process *process)
{
    for (uint32_t d = 0; d < sim->device_count; d++)
        if (sim_process_device_used(process, d))
            return true;
    return false;
}

/* The driver frees the memory of a dead process when the last descriptor of its device files is closed.  A
 * process that it forked and that did not call exec, such as a worker of PyTorch's DataLoader, also has them
 * open: 51 descriptors, 1,135 MiB (github.com/NVIDIA-NeMo/Megatron-Bridge pull request 5984,
 * github.com/NVIDIA/Megatron-LM pull request 3684).
 *
 * The release takes some time: a program that starts right after another must wait for it
 * (github.com/vllm-project/vllm, tests/utils.py, wait_for_gpu_memory_to_clear). */
static void end_process(struct sim_process *process)
{
    uint64_t now = sim_now_ns(), bytes = 0;
    if (process->pid > 0) {
        process->pid = -process->pid;
        process->ends_ns = now + (holds_memory(process) ? sim->free_delay_ns : 0);
    }
    process->kept = sim_are_device_files_open(process);
    if (process->kept)
        process->ends_ns = now + sim->free_delay_ns;
    else
        sim_drop_work(process);
    if (process->kept || now < process->ends_ns)
        return;
    struct sim_process gone = *process;
    for (uint32_t d = 0; d < sim->device_count; d++)
        bytes += sim_process_device_used(process, d);
    gone.pid = -gone.pid;
    process->pid = 0;
    sim_note(&gone, "exit", -1, bytes);
}

void sim_sweep(void)
{
    for (int i = 0; i < SIM_PROCESSES; i++) {
        struct sim_process *process = &sim->process[i];
        if (process->pid < 0 || (process->pid && !is_alive(process)))
            end_process(process);
        else if (process->pid > 0 && sim_is_abandoned(process))
            sim_abandon(process);
    }
}
