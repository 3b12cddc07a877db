#define _GNU_SOURCE
#include "sim_gpu.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "sim_process.h"

struct sim_state *sim;

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static char state_path[PATH_MAX];
static int state_fd = -1, ledger_fd = -1;

/* ---- time and waiting ---- */

uint64_t sim_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void sim_sleep_ns(uint64_t ns)
{
    ns += sim_now_ns();
    struct timespec at = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR) {
    }
}

void sim_gate_set(struct sim_process *process, enum sim_gate gate)
{
    atomic_store(&process->gate, (uint32_t)gate);
    syscall(SYS_futex, &process->gate, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void sim_gate_wait(struct sim_process *process, uint32_t seen, uint64_t at_most_ns)
{
    struct timespec wait = {.tv_sec = (time_t)(at_most_ns / 1000000000u), .tv_nsec = (long)(at_most_ns % 1000000000u)};
    syscall(SYS_futex, &process->gate, FUTEX_WAIT, seen, &wait, NULL, 0);
}

void sim_lock(void)
{
    if (pthread_mutex_lock(&sim->mutex) == EOWNERDEAD)
        pthread_mutex_consistent(&sim->mutex);
}

void sim_unlock(void)
{
    pthread_mutex_unlock(&sim->mutex);
}

/* ---- opening ---- */

static void init_mutex(pthread_mutex_t *mutex)
{
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
}

/* Opens without O_CREAT first, because in a sticky folder the kernel refuses O_CREAT on another user's
 * file (fs.protected_regular). */
static int open_shared(const char *path, int flags)
{
    int fd = open(path, flags | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) {
        fd = open(path, flags | O_CLOEXEC | O_CREAT | O_EXCL, 0666);
        if (fd >= 0)
            (void)!fchmod(fd, 0666); /* processes of several users share it, with any umask */
        else if (errno == EEXIST)
            fd = open(path, flags | O_CLOEXEC);
    }
    return fd;
}

static char failure[512]; /* why there is no state; "" if there is one or none was opened */

const char *sim_failure(void)
{
    return failure;
}

static int fail(const char *path, const char *why)
{
    snprintf(failure, sizeof failure, "%.200s: %.300s", path, why);
    fprintf(stderr, "gpushare: simulated driver: %s: %s\n", path, why);
    return -1;
}

static struct sim_state *map_state(int fd, const char *path)
{
    off_t size = lseek(fd, 0, SEEK_END);
    if (size < 0 || (size < (off_t)sizeof(struct sim_state) && ftruncate(fd, sizeof(struct sim_state)))) {
        fail(path, strerror(errno));
        return NULL;
    }
    struct sim_state *state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (state == MAP_FAILED) {
        fail(path, strerror(errno));
        return NULL;
    }
    uint32_t magic = atomic_load(&state->magic);
    if (magic == SIM_MAGIC)
        return state;
    if (magic) {
        fail(path, "is the state of another version: remove it");
        munmap(state, sizeof *state);
        return NULL;
    }
    const char *spec = getenv("GPUSHARE_SIMULATE");
    memset(state, 0, offsetof(struct sim_state, process));
    if (spec && sim_parse_spec(state, &spec)) {
        init_mutex(&state->mutex);
        atomic_store(&state->magic, SIM_MAGIC);
        return state;
    }
    char why[256] = "GPUSHARE_SIMULATE is not set";
    if (spec)
        snprintf(why, sizeof why, "GPUSHARE_SIMULATE is wrong at \"%.80s\": it must read like 2xH100-80GB,host=512GiB "
            "(+ before more devices, a comma before each option)", spec);
    fail(path, why);
    munmap(state, sizeof *state);
    return NULL;
}

static int attach(const char *path)
{
    int fd = strlen(path) + sizeof ".ledger" < sizeof state_path ? open_shared(path, O_RDWR) : -1;
    if (fd < 0)
        return fail(path, strerror(errno));
    struct flock whole = {.l_type = F_WRLCK, .l_len = sizeof(struct sim_state)};
    while (fcntl(fd, F_OFD_SETLKW, &whole) && errno == EINTR) {
    }
    struct sim_state *state = map_state(fd, path);
    whole.l_type = F_UNLCK;
    fcntl(fd, F_OFD_SETLK, &whole);
    if (!state) {
        close(fd);
        return -1;
    }
    if (sim)
        munmap(sim, sizeof *sim);
    if (state_fd >= 0)
        close(state_fd);
    if (ledger_fd >= 0)
        close(ledger_fd);
    state_fd = fd;
    ledger_fd = -1;
    strcpy(state_path, path);
    sim = state;
    return 0;
}

int sim_attach(const char *path)
{
    HOLD(&opening);
    return sim && !strcmp(path, state_path) ? 0 : attach(path);
}

int sim_open(void)
{
    if (sim)
        return 0;
    const char *path = getenv("GPUSHARE_SIM_STATE");
    return path && *path ? sim_attach(path) : fail("GPUSHARE_SIM_STATE", "is not set");
}

/* ---- device files ---- */

static struct flock byte_of(const struct sim_process *process)
{
    off_t at = (off_t)(sizeof *sim + (size_t)(process - sim->process));
    return (struct flock){.l_type = F_WRLCK, .l_start = at, .l_len = 1};
}

/* Opens through /proc, because this process may no longer reach the state by its path. */
void sim_open_device_files(const struct sim_process *process)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%.*s/self/fd/%d", PATH_MAX - 64, sim_proc(), state_fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct flock byte = byte_of(process);
    if (fd < 0 || fcntl(fd, F_OFD_SETLK, &byte))
        fail(path, strerror(errno));
}

/* A lock of an open file description lasts until the last process has closed it (fcntl(2)). */
bool sim_are_device_files_open(const struct sim_process *process)
{
    struct flock byte = byte_of(process);
    return !fcntl(state_fd, F_OFD_GETLK, &byte) && byte.l_type != F_UNLCK;
}

/* ---- sums and processes ---- */

uint64_t sim_process_device_used(const struct sim_process *process, uint32_t device)
{
    return process->used_bytes[device] + process->context_bytes[device];
}

uint64_t sim_device_used(uint32_t device)
{
    uint64_t bytes = 0;
    for (int i = 0; i < SIM_PROCESSES; i++)
        if (sim->process[i].pid)
            bytes += sim_process_device_used(&sim->process[i], device);
    return bytes;
}

/* Memory that the driver keeps for itself is shown as used (reserved; NVML API reference r590, nvmlMemory_t:
 * "Sum of Reserved and Allocated device memory ... always sets aside a small amount of memory for
 * bookkeeping").  Not all of the memory shown as free can be taken (unusable), because large pages leave gaps. */
uint64_t sim_device_usable(uint32_t device)
{
    return sim->device[device].total_bytes - sim->reserved_bytes - sim->unusable_bytes;
}

uint64_t sim_host_used(void)
{
    uint64_t bytes = 0;
    for (int i = 0; i < SIM_PROCESSES; i++)
        for (int d = 0; sim->process[i].pid > 0 && d < SIM_DEVICES; d++)
            bytes += sim->process[i].parked_used_bytes[d] + sim->process[i].parked_context_bytes[d];
    return bytes;
}

struct sim_process *sim_find(int32_t pid)
{
    for (int i = 0; pid > 0 && i < SIM_PROCESSES; i++)
        if (sim->process[i].pid == pid)
            return &sim->process[i];
    return NULL;
}

struct sim_process *sim_add(int32_t pid, uint64_t start_ticks)
{
    for (int i = 0; i < SIM_PROCESSES; i++)
        if (!sim->process[i].pid) {
            struct sim_process *process = &sim->process[i];
            memset(process, 0, sizeof *process);
            sim_forget_time(process);
            process->start_ticks = start_ticks;
            process->pid = pid;
            return process;
        }
    return NULL;
}

/* ---- utilization ---- */

static void fill_buckets(struct sim_busy *busy, uint64_t from_ns, uint64_t until_ns)
{
    uint64_t last = until_ns / SIM_BUCKET_NS, first = from_ns / SIM_BUCKET_NS;
    if (last >= SIM_BUCKETS && first < last - (SIM_BUCKETS - 1))
        first = last - (SIM_BUCKETS - 1), from_ns = first * SIM_BUCKET_NS;
    for (uint64_t b = busy->bucket + 1; b <= last && b <= busy->bucket + SIM_BUCKETS; b++)
        busy->busy_ns[b % SIM_BUCKETS] = 0;
    busy->bucket = last > busy->bucket ? last : busy->bucket;
    for (uint64_t b = first; b <= last; b++) {
        uint64_t start = b * SIM_BUCKET_NS, end = start + SIM_BUCKET_NS;
        uint64_t part = (until_ns < end ? until_ns : end) - (from_ns > start ? from_ns : start);
        busy->busy_ns[b % SIM_BUCKETS] += (uint32_t)part;
    }
}

void sim_busy_add(struct sim_busy *busy, uint64_t from_ns, uint64_t until_ns)
{
    if (from_ns <= busy->until_ns) { /* adjacent or overlapping: one stretch */
        busy->until_ns = until_ns > busy->until_ns ? until_ns : busy->until_ns;
        return;
    }
    if (busy->until_ns > busy->from_ns)
        fill_buckets(busy, busy->from_ns, busy->until_ns);
    busy->from_ns = from_ns;
    busy->until_ns = until_ns;
}

/* Returns the busy share of the time since `since_ns`, at most the last second, 0 to 100. */
uint32_t sim_busy_percent(const struct sim_busy *busy, uint64_t since_ns, uint64_t now_ns)
{
    const uint64_t most_ns = (uint64_t)SIM_WINDOW_BUCKETS * SIM_BUCKET_NS;
    uint64_t since = now_ns > most_ns ? now_ns - most_ns : 0, total = 0;
    since = since_ns > since && since_ns < now_ns ? since_ns : since;
    const uint64_t window_ns = now_ns - since;
    uint64_t from = busy->from_ns > since ? busy->from_ns : since;
    uint64_t until = busy->until_ns < now_ns ? busy->until_ns : now_ns;
    if (until > from)
        total = until - from;
    uint64_t oldest = since / SIM_BUCKET_NS + 1;
    for (uint64_t b = oldest; b <= busy->bucket && b < oldest + SIM_BUCKETS; b++)
        if (busy->bucket - b < SIM_BUCKETS)
            total += busy->busy_ns[b % SIM_BUCKETS];
    uint64_t percent = (total * 100 + window_ns / 2) / window_ns;
    return percent > 100 ? 100 : (uint32_t)percent;
}

/* ---- the ledger ---- */

/* `more`: further fields, each with a comma before it. */
static void add_line(const struct sim_process *process, const char *event, int device, uint64_t bytes, const char *more)
{
    static const char full[] = "{\"event\":\"ledger_full\"}\n";
    char path[PATH_MAX], line[320];
    if (sim->ledger_bytes > SIM_LEDGER_MAX_BYTES)
        return;
    if (ledger_fd < 0) {
        snprintf(path, sizeof path, "%.*s.ledger", (int)(sizeof path - sizeof ".ledger"), state_path);
        ledger_fd = open_shared(path, O_WRONLY | O_APPEND);
    }
    uint64_t used = device >= 0 ? sim_device_used((uint32_t)device) : 0;
    int length = snprintf(line, sizeof line,
                          "{\"ns\":%llu,\"pid\":%d,\"event\":\"%s\",\"device\":%d,\"bytes\":%llu,"
                          "\"device_used\":%llu,\"host_used\":%llu%s}\n",
                          (unsigned long long)sim_now_ns(), process->pid, event, device, (unsigned long long)bytes,
                          (unsigned long long)used, (unsigned long long)sim_host_used(), more);
    sim->ledger_bytes += (uint64_t)length;
    if (sim->ledger_bytes > SIM_LEDGER_MAX_BYTES)
        (void)!write(ledger_fd, full, sizeof full - 1);
    else
        (void)!write(ledger_fd, line, (size_t)length);
}

void sim_note(const struct sim_process *process, const char *event, int device, uint64_t bytes)
{
    add_line(process, event, device, bytes, "");
}

void sim_note_move(const struct sim_process *process, int from, int to, uint64_t bytes)
{
    char more[32];
    snprintf(more, sizeof more, ",\"from_device\":%d", from);
    add_line(process, "move", to, bytes, more);
}

/* ---- faults ---- */

static bool fits(const struct sim_fault *fault, enum sim_fault_kind kind, int32_t pid, int32_t device)
{
    return fault->kind == kind && fault->remaining != 0 && (fault->pid == 0 || fault->pid == pid) &&
           (fault->device < 0 || device < 0 || fault->device == device);
}

bool sim_device_lost(uint32_t device)
{
    if (!atomic_load_explicit(&sim->fault_count, memory_order_acquire))
        return false;
    for (int i = 0; i < SIM_FAULTS; i++)
        if (fits(&sim->fault[i], SIM_FAULT_DEVICE_LOST, 0, (int32_t)device))
            return true;
    return false;
}

bool sim_strikes(enum sim_fault_kind kind, int32_t pid, int32_t device, uint32_t *value)
{
    if (!atomic_load_explicit(&sim->fault_count, memory_order_acquire))
        return false;
    HOLD_STATE;
    for (int i = 0; i < SIM_FAULTS; i++) {
        struct sim_fault *fault = &sim->fault[i];
        if (!fits(fault, kind, pid, device))
            continue;
        if (value)
            *value = fault->value;
        if (fault->remaining > 0 && --fault->remaining == 0) {
            fault->kind = SIM_FAULT_NONE;
            atomic_fetch_sub(&sim->fault_count, 1);
        }
        return true;
    }
    return false;
}

enum { HANG_STEP_MS = 10 };

/* Hangs until the fault's time is over or the faults are cleared. */
void sim_hang(enum sim_fault_kind kind, int32_t pid, int32_t device)
{
    uint32_t ms = 0, cleared = atomic_load(&sim->faults_cleared);
    if (sim_strikes(kind, pid, device, &ms))
        for (uint32_t slept = 0; slept < ms && atomic_load(&sim->faults_cleared) == cleared; slept += HANG_STEP_MS)
            sim_sleep_ns((uint64_t)(ms - slept < HANG_STEP_MS ? ms - slept : HANG_STEP_MS) * 1000000u);
}

void sim_uuid_text(const uint8_t uuid[16], char text[SIM_UUID_TEXT])
{
    int at = snprintf(text, SIM_UUID_TEXT, sim->mig ? "MIG-" : "GPU-");
    for (int i = 0; i < 16; i++)
        at += snprintf(text + at, (size_t)(SIM_UUID_TEXT - at), i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x",
                       uuid[i]);
}
