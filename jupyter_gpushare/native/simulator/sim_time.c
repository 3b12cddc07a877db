/* How a simulated device divides its time between the processes that have work for it.
 *
 * Facts:
 *   - Processes take turns, and each has "an equal share of time", whatever memory it holds (NVIDIA GPU
 *     Operator, "Time-Slicing GPUs in Kubernetes"; README of github.com/NVIDIA/k8s-device-plugin).
 *   - Slices rotate, and a process without work leaves its time to the others (arxiv.org/abs/2406.05221,
 *     on Jetson: "work-conserving round-robin").  A process that is alone continues.
 *   - Slices have one length for the whole GPU (github.com/NVIDIA/k8s-device-plugin issue 354:
 *     `nvidia-smi compute-policy --set-timeslice`, default, short, medium or long; no length is published).
 *     A longer kernel continues in the next slice (compute preemption, attribute 90 in cuda.h).
 * Inferred:
 *   - The streams of one process run side by side within its slices, at full speed.
 *   - The work of a dead process is gone when its device files are closed, like its memory (sim_moves.c);
 *     at the latest when it would get its next slice.
 * Estimates: the length of a slice (slice=MS; the open kernel modules of driver 580 give a group of channels
 * 1.024 ms, kfifoChannelGroupGetDefaultTimeslice_GV100) and the device time of each switch between
 * processes (switch=US).
 *
 * Nothing runs by itself: each query divides the time that has passed since the last one.  Each process
 * counts the time that it received of a device (`served_ns`).  Work has a mark on that count and is done when
 * the process has received that much.
 */
#define _GNU_SOURCE
#include "sim_gpu.h"

#include <string.h>

#include "sim_process.h"

static bool has_work(const struct sim_work *work)
{
    return work->served_ns < work->until_ns;
}

static uint64_t smaller(uint64_t one, uint64_t other)
{
    return one < other ? one : other;
}

static bool has_ended(const struct sim_process *process)
{
    bool is_alive = process->pid > 0 && process_start_ticks(process->pid) == process->start_ticks;
    return !is_alive && (!process->pid || !sim_are_device_files_open(process));
}

/* Gives the device to the next process with work; the holder is the last choice.  Returns false if none has work. */
static bool pass_on(struct sim_schedule *schedule, uint64_t now)
{
    for (uint32_t i = 1; i <= SIM_PROCESSES; i++) {
        uint32_t next = (schedule->holder + i) % SIM_PROCESSES;
        struct sim_work *work = &schedule->work[next];
        if (!has_work(work))
            continue;
        if (next == schedule->holder) { /* its slices follow each other */
            schedule->slice_ends_ns += ((now - schedule->slice_ends_ns) / sim->slice_ns + 1) * sim->slice_ns;
            return true;
        }
        if (has_ended(&sim->process[next])) {
            work->until_ns = work->served_ns;
            continue;
        }
        schedule->holder = next;
        schedule->slice_starts_ns = schedule->now_ns + sim->switch_ns;
        schedule->slice_ends_ns = schedule->slice_starts_ns + sim->slice_ns;
        return true;
    }
    return false;
}

/* Drops the least important stretch: the one that leaves the shortest gap for its age. */
static void drop_stretch(struct sim_history *history, uint64_t now)
{
    struct sim_stretch *stretch = history->stretch;
    double least = 1e300;
    uint32_t dropped = 1;
    for (uint32_t i = 1; i + 1 < history->count; i++) {
        double gap = (double)(stretch[i + 1].until_ns - stretch[i - 1].until_ns);
        double cost = gap / (double)(now - stretch[i + 1].until_ns + 1);
        if (cost < least)
            least = cost, dropped = i;
    }
    memmove(&stretch[dropped], &stretch[dropped + 1], (--history->count - dropped) * sizeof *stretch);
}

static void add_stretch(struct sim_history *history, uint64_t from_ns, struct sim_stretch stretch)
{
    if (history->count && history->stretch[history->count - 1].until_ns == from_ns)
        history->count--; /* the last stretch continues */
    else if (history->count == SIM_STRETCHES)
        drop_stretch(history, from_ns);
    history->stretch[history->count++] = stretch;
}

static void serve(struct sim_schedule *schedule, uint64_t ns)
{
    uint64_t from = schedule->now_ns;
    struct sim_work *work = &schedule->work[schedule->holder];
    work->served_ns += ns;
    schedule->now_ns += ns;
    add_stretch(&schedule->history[schedule->holder], from,
                (struct sim_stretch){work->served_ns, schedule->now_ns});
    sim_busy_add(&schedule->busy[schedule->holder], from, schedule->now_ns);
    sim_busy_add(&schedule->busy_all, from, schedule->now_ns);
}

void sim_divide_time(uint32_t device)
{
    struct sim_schedule *schedule = &sim->schedule[device];
    uint64_t now = sim_now_ns();
    while (schedule->now_ns < now) {
        struct sim_work *work = &schedule->work[schedule->holder];
        if (!has_work(work) || schedule->now_ns >= schedule->slice_ends_ns) {
            if (!pass_on(schedule, now))
                schedule->now_ns = now;
        } else if (schedule->now_ns < schedule->slice_starts_ns) {
            schedule->now_ns = smaller(schedule->slice_starts_ns, now);
        } else {
            uint64_t most = smaller(schedule->slice_ends_ns, now) - schedule->now_ns;
            serve(schedule, smaller(most, work->until_ns - work->served_ns));
        }
    }
}

struct sim_work *sim_work_on(const struct sim_process *process, uint32_t device)
{
    return &sim->schedule[device].work[process - sim->process];
}

uint64_t sim_time_left(const struct sim_process *process, uint32_t device, uint64_t mark_ns)
{
    sim_divide_time(device);
    const struct sim_schedule *schedule = &sim->schedule[device];
    const struct sim_work *work = sim_work_on(process, device), *held = &schedule->work[schedule->holder];
    if (work->served_ns >= mark_ns)
        return 0;
    uint64_t left = mark_ns - work->served_ns;
    if (work != held && has_work(held) && schedule->slice_ends_ns > schedule->now_ns)
        left += smaller(schedule->slice_ends_ns - schedule->now_ns, held->until_ns - held->served_ns);
    return smaller(left, SIM_POLL_NS);
}

uint64_t sim_time_of(const struct sim_process *process, uint32_t device, uint64_t mark_ns)
{
    const struct sim_history *history = &sim->schedule[device].history[process - sim->process];
    for (uint32_t i = 0; i < history->count; i++)
        if (history->stretch[i].served_ns >= mark_ns) {
            uint64_t before = history->stretch[i].served_ns - mark_ns, until = history->stretch[i].until_ns;
            uint64_t gap_ends = i ? history->stretch[i - 1].until_ns : 0;
            return until > gap_ends + before ? until - before : gap_ends;
        }
    return 0;
}

bool sim_has_work(const struct sim_process *process)
{
    for (uint32_t d = 0; d < sim->device_count; d++)
        if (has_work(sim_work_on(process, d))) {
            sim_divide_time(d);
            if (has_work(sim_work_on(process, d)))
                return true;
        }
    return false;
}

void sim_drop_work(const struct sim_process *process)
{
    for (uint32_t d = 0; d < sim->device_count; d++) {
        struct sim_work *work = sim_work_on(process, d);
        if (has_work(work))
            sim_divide_time(d);
        work->until_ns = work->served_ns;
    }
}

void sim_forget_time(const struct sim_process *process)
{
    const ptrdiff_t number = process - sim->process;
    sim_drop_work(process);
    for (uint32_t d = 0; d < sim->device_count; d++) {
        struct sim_schedule *schedule = &sim->schedule[d];
        schedule->work[number] = (struct sim_work){0};
        schedule->history[number].count = 0;
        memset(&schedule->busy[number], 0, sizeof *schedule->busy);
    }
}

void sim_move_time(const struct sim_process *process, const uint8_t from[SIM_DEVICES])
{
    const ptrdiff_t number = process - sim->process;
    struct sim_work work[SIM_DEVICES];
    struct sim_history history[SIM_DEVICES];
    for (uint32_t i = 0; i < process->visible_count; i++) {
        work[i] = sim->schedule[from[i]].work[number];
        history[i] = sim->schedule[from[i]].history[number];
    }
    for (uint32_t i = 0; i < process->visible_count; i++) {
        sim->schedule[process->visible[i]].work[number] = work[i];
        sim->schedule[process->visible[i]].history[number] = history[i];
    }
}
