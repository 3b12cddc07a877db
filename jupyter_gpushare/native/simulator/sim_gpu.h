/* The simulated GPUs: the state that both simulated libraries share and every process maps.
 *
 *   $GPUSHARE_SIM_STATE          the shared state (struct sim_state), created by the first process
 *   $GPUSHARE_SIM_STATE.ledger   every event, one JSON object a line, append only
 *   $GPUSHARE_SIMULATE           the hardware of the machine; read only by the process that creates the state:
 *                                COUNTxNAME-SIZE[+COUNTxNAME-SIZE...][,OPTION...]
 *                                for example 2xH100-80GB,host=512GiB,checkpoint=any-uid
 *
 *   A device with GB10 in its NAME has no memory of its own, and NVML does not report its size.
 *
 *     host=SIZE context=SIZE copy=SIZE/s   host memory, size of a context, speed of a checkpoint
 *     cgroup                    the driver limits cgroups (r615)
 *     mig                       the devices are MIG instances of one GPU, named "... MIG PROFILE"
 *     driver=VERSION            570.x cannot checkpoint a process with modules
 *     checkpoint=root|any-uid|yama|none   which processes may checkpoint another
 *     persistence=on|off        persistence mode of the devices
 *     lost=checkpointed|failed  state of a process after a restore that found no memory
 *     listed=initialized|allocated   which processes NVML lists
 *     bytes=shown|zero|unavailable|refused   how NVML reports each process's memory
 *     growth=SIZE               growth of a context by its first restore
 *     unusable=SIZE             part of the free memory that no process can take
 *     reserved=SIZE             memory of each device that the driver keeps for itself and shows as used
 *     free-delay=MS             time during which the memory of a dead process stays taken
 *     slice=MS switch=US        length of a process's slice of a device's time, and cost of a switch between processes
 *     dead=listed|unlisted      whether NVML lists a dead process whose memory a forked one keeps
 *     entry-points=symbols|apart     where cuGetProcAddress points
 *     queries=answer|wait       whether pointer, context and capture queries wait while locked
 *     restart=unused|any-time   when the driver may restart
 *     pairs=visible|used        the devices that a move must name: those that its process sees, or only those it uses
 *     moved-uuid=new|old        the UUID that a moved process sees
 *     caller-dies=undone|done|hangs|999|400   the end of a move whose caller dies half-way
 *
 * Rules.  A process is identified by its pid and start time.  The mutex is robust and is never
 * held during a wait.  Sums are always computed from the processes' entries, so a process that
 * dies inside the mutex leaves nothing half counted.  A dead process is swept when a process
 * queries the state or memory is short.  Sizes are in bytes.
 *
 * Device files.  The state file stands for /dev/nvidia*: it stays open in every process that uses it.
 * cuInit opens it once more, with a lock on a byte behind its end, one for each process (struct sim_process).
 */
#ifndef GPUSHARE_SIM_GPU_H
#define GPUSHARE_SIM_GPU_H

#include "../old_glibc.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../hold.h"

enum {
    SIM_DEVICES = 16,
    SIM_PROCESSES = 256,
    SIM_FAULTS = 32,
    SIM_GROUPS = 64,
    SIM_HOST = SIM_DEVICES, /* in place of a device */
    SIM_GROUP_PATH = 256,
    SIM_BUCKETS = 64,           /* of utilization history ... */
    SIM_BUCKET_NS = 20000000,   /* ... 20 ms each ... */
    SIM_WINDOW_BUCKETS = 50,    /* ... of which the last second is reported */
    SIM_UUID_TEXT = 41,         /* "GPU-" + 36 characters + 0 */
    SIM_STRETCHES = 256,
    SIM_POLL_NS = 1000000000,   /* the longest wait before the next check */
};
#define SIM_MAGIC (0x31555047u ^ (uint32_t)sizeof(struct sim_state)) /* "GPU1", changed with the layout */
#define SIM_PAGE_BYTES ((uint64_t)2 << 20)
#define SIM_LEDGER_MAX_BYTES ((uint64_t)64 << 20)

/* CUprocessState of cuda.h 13.0 */
enum sim_process_state { SIM_RUNNING = 0, SIM_LOCKED = 1, SIM_CHECKPOINTED = 2, SIM_FAILED = 3 };

/* Every CUDA call of a process passes its gate; calls wait on it while it is closed (futex). */
enum sim_gate { SIM_GATE_OPEN = 0, SIM_GATE_CLOSED = 1, SIM_GATE_FAILED = 2 };

/* The checkpoint call in progress, so that it can be undone if its caller dies. */
enum sim_move { SIM_MOVE_NONE = 0, SIM_MOVE_LOCK = 1, SIM_MOVE_CHECKPOINT = 2, SIM_MOVE_RESTORE = 3 };

/* Reasons for which the driver refuses to checkpoint a process. */
enum sim_hindrance {
    SIM_HINDERED_MANAGED = 1,
    SIM_HINDERED_IPC = 2,
    SIM_HINDERED_PEER = 4,
    SIM_HINDERED_EXPORT = 8,
    SIM_HINDERED_TRACE = 16,
};

/* Which processes may checkpoint another; see sim_checkpoint.c. */
enum sim_by { SIM_BY_ROOT = 0, SIM_BY_ANY_UID = 1, SIM_BY_YAMA = 2, SIM_BY_NONE = 3 };
enum sim_abandoned { SIM_UNDONE = 0, SIM_DONE = 1, SIM_HANGS = 2, SIM_ANSWERS_UNKNOWN = 3, SIM_ANSWERS_NO_HANDLE = 4 };
enum sim_lost { SIM_LOST_CHECKPOINTED = 0, SIM_LOST_FAILED = 1 };
enum sim_shown { SIM_BYTES_SHOWN = 0, SIM_BYTES_ZERO = 1, SIM_BYTES_UNAVAILABLE = 2, SIM_BYTES_REFUSED = 3 };

/* Defaults. */
enum {
    SIM_BY_DEFAULT = SIM_BY_ROOT,
    SIM_LOST_DEFAULT = SIM_LOST_CHECKPOINTED,
    SIM_LISTS_INITIALIZED = 1,
    SIM_LISTS_DEAD = 1,
    SIM_RESTARTS_UNUSED_ONLY = 1,
    SIM_FREE_DELAY_NS = 200000000,
    SIM_SLICE_NS = 2000000,
    SIM_SWITCH_NS = 50000,
    SIM_UNUSABLE_BYTES = 64 << 20,
    SIM_GROWTH_BYTES = 16 << 20,
    SIM_NVML_CLIENTS = 64,
};

enum sim_fault_kind {
    SIM_FAULT_NONE = 0,
    SIM_FAULT_LOCK_TIMEOUT = 1,     /* cuCheckpointProcessLock times out */
    SIM_FAULT_CHECKPOINT_FAILS = 2, /* half-way: it stays locked, its memory stays, its CUDA calls fail from then on */
    SIM_FAULT_RESTORE_POISONS = 3,  /* as without device memory: the process is lost for ever */
    SIM_FAULT_RESTORE_FAILS = 4,    /* changes nothing: it stays checkpointed */
    SIM_FAULT_UNLOCK_FAILS = 5,     /* it stays locked */
    SIM_FAULT_DEVICE_LOST = 6,      /* the device fell off the bus, until the fault is cleared */
    SIM_FAULT_HANG_CALL = 7,        /* a process's next CUDA call takes `value` ms */
    SIM_FAULT_HANG_NVML = 8,        /* the next NVML query takes `value` ms */
    SIM_FAULT_HANG_CHECKPOINT = 9,  /* the next checkpoint call takes `value` ms */
    SIM_FAULT_XID = 10,             /* the device reports XID `value` once */
    SIM_FAULT_ECC = 11,             /* the device counts `value` more uncorrectable memory errors */
    SIM_FAULT_DRIVER_RESTART = 12,  /* NVML must be initialized again */
    SIM_FAULT_MPS = 13,             /* the process is shown as a client of MPS */
    SIM_FAULT_CHECKPOINT_FAILS_UNHARMED = 14, /* as CHECKPOINT_FAILS, but the process keeps working */
    SIM_FAULT_LOCK_KILLS = 15,         /* the process ends with SIGSEGV in the call */
    SIM_FAULT_CHECKPOINT_KILLS = 16,
    SIM_FAULT_RESTORE_KILLS = 17,
    SIM_FAULT_RECOVERY_ACTION = 18, /* the device requests recovery action `value`; 0 for none */
    SIM_FAULT_KINDS
};

struct sim_fault {
    uint32_t kind;
    int32_t pid;       /* 0: any process */
    int32_t device;    /* -1: any device */
    int32_t remaining; /* the number of times it will still strike; -1: always */
    uint32_t value;
};

struct sim_device {
    char name[48];
    uint8_t uuid[16];
    uint64_t total_bytes;
    uint64_t peak_bytes;
    uint64_t xids; /* the number so far */
    uint64_t xid;  /* the last one */
    uint64_t uncorrected;
    uint32_t recovery_action; /* nvmlDeviceGpuRecoveryAction_t */
    bool shares_host_memory;  /* a GB10 */
};

/* A limit of a cgroup on a device, or on host memory; unused without a path. */
struct sim_group {
    char path[SIM_GROUP_PATH];
    uint64_t soft_bytes, hard_bytes;
    uint32_t device; /* SIM_HOST for host memory */
};

/* When a process was computing on a device: the current stretch, and the history. */
struct sim_busy {
    uint64_t from_ns, until_ns;
    uint64_t bucket;                /* number of the newest filled bucket */
    uint32_t busy_ns[SIM_BUCKETS];
};

struct sim_process {
    int32_t pid; /* 0 if free; negative if dead: its memory is free again at `ends_ns` */
    uint32_t state;
    uint64_t start_ticks;
    uint64_t ends_ns;
    bool kept;             /* dead, and a process that it forked has its device files open */
    bool used_cuda;        /* ever had a context */
    bool lost, damaged;    /* see sim_checkpoint.c */
    bool grown;            /* a restore has grown its contexts */
    uint32_t modules;
    uint32_t contexts;     /* bit: the process has a context on this device */
    _Atomic uint32_t gate;
    _Atomic uint32_t inside; /* CUDA calls past the gate */
    uint32_t hindrances;
    uint32_t move;
    int32_t mover_pid;
    uint32_t visible_count;
    uint64_t mover_start_ticks;
    uint64_t move_ends_ns; /* when its copy is done */
    int32_t move_to[SIM_DEVICES]; /* for a restore: the device that gets each device's bytes, or -1 */
    uint8_t visible[SIM_DEVICES]; /* ordinal -> device; a restore onto other devices changes it */
    uint8_t first_visible[SIM_DEVICES]; /* as cuInit found them */
    uint64_t used_bytes[SIM_DEVICES];
    uint64_t context_bytes[SIM_DEVICES];
    uint64_t parked_used_bytes[SIM_DEVICES]; /* in host memory */
    uint64_t parked_context_bytes[SIM_DEVICES];
};

/* The device time that a process has received, and the time that it will have received when all its work is done. */
struct sim_work {
    uint64_t served_ns, until_ns;
};

/* A stretch that ended at `until_ns`, in which a process had the device without a pause, and the time received by then. */
struct sim_stretch {
    uint64_t served_ns, until_ns;
};

struct sim_history {
    uint32_t count;
    struct sim_stretch stretch[SIM_STRETCHES]; /* the latest; of older ones, more and more are missing */
};

/* The process that has a device, and those that had it (sim_time.c), by their number in the table. */
struct sim_schedule {
    uint64_t now_ns; /* the time up to here is divided */
    uint64_t slice_starts_ns, slice_ends_ns;
    uint32_t holder;
    struct sim_busy busy_all;
    struct sim_work work[SIM_PROCESSES];
    struct sim_busy busy[SIM_PROCESSES];
    struct sim_history history[SIM_PROCESSES];
};

struct sim_state {
    _Atomic uint32_t magic;
    uint32_t device_count;
    pthread_mutex_t mutex;
    uint64_t host_total_bytes;
    uint64_t context_bytes;  /* the size of one context on its device */
    uint64_t copy_bytes_per_s; /* 0: checkpoint and restore take no time */
    uint64_t ledger_bytes;
    uint64_t growth_bytes, unusable_bytes, reserved_bytes, free_delay_ns, slice_ns, switch_ns;
    uint32_t checkpoint_by, lost_state, shown_bytes, lists_initialized, lists_dead, entry_points_apart, queries_wait;
    uint32_t restarts_unused_only, abandoned, lacks_persistence, pairs_used_only, shows_old_uuid;
    char driver[40];
    bool limits_cgroups, mig;
    struct {
        int32_t pid;
        uint64_t start_ticks;
    } nvml_client[SIM_NVML_CLIENTS];
    _Atomic uint32_t driver_starts;
    _Atomic uint32_t fault_count;
    _Atomic uint32_t faults_cleared; /* the number of clears; a clear ends hanging calls */
    struct sim_fault fault[SIM_FAULTS];
    struct sim_device device[SIM_DEVICES];
    struct sim_group group[SIM_GROUPS];
    struct sim_process process[SIM_PROCESSES]; /* not written from here on until the state is complete */
    struct sim_schedule schedule[SIM_DEVICES];
};

extern struct sim_state *sim;

/* Map the state of $GPUSHARE_SIM_STATE (or of `path`), and create it if it does not exist.  Return 0, or -1
 * with one line on stderr, which sim_failure returns afterwards ("" before). */
const char *sim_failure(void);
int sim_open(void);
int sim_attach(const char *path);
bool sim_parse_spec(struct sim_state *state, const char **at);

uint64_t sim_now_ns(void);
void sim_sleep_ns(uint64_t ns);
void sim_lock(void);
void sim_unlock(void);
#define HOLD_STATE HELD *held_state_ = (sim_lock(), &sim->mutex)

/* The device files of a process (see above): open them for this process; whether any process has them open. */
void sim_open_device_files(const struct sim_process *process);
bool sim_are_device_files_open(const struct sim_process *process);

/* The caller of all of these holds the mutex. */
struct sim_process *sim_find(int32_t pid);
struct sim_process *sim_add(int32_t pid, uint64_t start_ticks);
uint64_t sim_device_used(uint32_t device);
uint64_t sim_device_usable(uint32_t device); /* bytes that all processes together can have */
uint64_t sim_host_used(void);
uint64_t sim_process_device_used(const struct sim_process *process, uint32_t device);
void sim_note(const struct sim_process *process, const char *event, int device, uint64_t bytes);
void sim_note_move(const struct sim_process *process, int from, int to, uint64_t bytes);
void sim_busy_add(struct sim_busy *busy, uint64_t from_ns, uint64_t until_ns);
uint32_t sim_busy_percent(const struct sim_busy *busy, uint64_t since_ns, uint64_t now_ns);
bool sim_device_lost(uint32_t device);
bool sim_group_denies(int32_t pid, uint32_t device, uint64_t bytes);
bool sim_in_group(const char *path, int32_t pid);
/* Whether a process is one of `ancestors` or descends from one. */
bool sim_is_below(int32_t pid, const int32_t *ancestors, int count);
/* A number of /proc/PID/status, or 0. */
unsigned long long sim_status_of(int32_t pid, const char *field, int base);
bool sim_group_set(const char *path, uint32_t device, uint64_t soft_bytes, uint64_t hard_bytes);

/* sim_time.c: how a device divides its time.  A mark is an amount of device time that a process has received. */
void sim_divide_time(uint32_t device); /* up to now */
struct sim_work *sim_work_on(const struct sim_process *process, uint32_t device);
uint64_t sim_time_left(const struct sim_process *process, uint32_t device, uint64_t mark_ns); /* the minimum; 0 if done */
uint64_t sim_time_of(const struct sim_process *process, uint32_t device, uint64_t mark_ns); /* 0 if unknown */
bool sim_has_work(const struct sim_process *process);
void sim_drop_work(const struct sim_process *process);
void sim_forget_time(const struct sim_process *process);
void sim_move_time(const struct sim_process *process, const uint8_t from[SIM_DEVICES]); /* visible before */

/* sim_moves.c: moves of a process's memory, ended processes, and callers that ended half-way in a move. */
void sim_sweep(void);
void sim_begin_move(struct sim_process *process, enum sim_move move, uint64_t takes_ns);
void sim_end_lock(struct sim_process *process);
void sim_end_checkpoint(struct sim_process *process, bool fails);
void sim_begin_restore(struct sim_process *process, const int32_t to[SIM_DEVICES], uint64_t takes_ns);
void sim_end_restore(struct sim_process *process);
void sim_note_each(const struct sim_process *process, const char *event, const uint64_t bytes[SIM_DEVICES]);
bool sim_is_abandoned(const struct sim_process *process);
void sim_abandon(struct sim_process *process);

/* Whether a fault strikes now (which counts as one strike), and its value (unless NULL); takes the mutex itself. */
bool sim_strikes(enum sim_fault_kind kind, int32_t pid, int32_t device, uint32_t *value);
void sim_hang(enum sim_fault_kind kind, int32_t pid, int32_t device);

/* Futex wake-up and wait on a process's gate. */
void sim_gate_set(struct sim_process *process, enum sim_gate gate);
void sim_gate_wait(struct sim_process *process, uint32_t seen, uint64_t at_most_ns);

void sim_uuid_text(const uint8_t uuid[16], char text[SIM_UUID_TEXT]);

#endif
