/* The two files of a lease, as shared by the preload library and the device helper.
 *
 *   <lease dir>/limit     written by the helper (pwrite), mapped read-only by the
 *                         processes of the lease; the user cannot write it
 *   <lease dir>/account   created by the helper for the user; mapped read-write by
 *                         the processes of the lease; the helper only preads it,
 *                         bounded and with O_NOFOLLOW, and never trusts it for
 *                         another tenant's safety
 *
 * Both have a fixed size.  `gpu/leases/files.py` reads and writes the same offsets
 * with `struct`; tests/native holds the two sides together.
 *
 * A process finds the directory in GPUSHARE_LEASE_DIR.  No directory, no page, a
 * wrong magic or version: every allocation is denied (fail closed).
 */
#ifndef GPUSHARE_LEASE_H
#define GPUSHARE_LEASE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#define GPUSHARE_LIMIT_MAGIC 0x4c535047u   /* "GPSL", little endian */
#define GPUSHARE_ACCOUNT_MAGIC 0x41535047u /* "GPSA" */
#define GPUSHARE_VERSION 5u
#define GPUSHARE_DEVICES 16
#define GPUSHARE_SLOTS 256

/* What the helper lets the processes of a lease do. */
enum gpushare_phase {
    GPUSHARE_RUNNING = 0,    /* allocate within the limit */
    GPUSHARE_SUSPENDING = 1, /* every counted call waits, and counts again while it does */
    GPUSHARE_SUSPENDED = 2,  /* same, until the lease runs again */
    GPUSHARE_PAUSED = 3,     /* new contexts and allocations wait, other calls go on: a restore beside it */
    GPUSHARE_REVOKED = 4,    /* everything is denied: the lease has ended */
};

/* Whether the processes of a lease launch now (gpu/turns/ring.py).  0: the lease has no turns.  Else the
 * lowest bit says whether launches are held, and the others count the changes: a new turn is a new word. */
enum { GPUSHARE_NO_TURNS = 0, GPUSHARE_HELD = 1 };

/* Things that make a process not suspendable. */
enum gpushare_taint {
    GPUSHARE_TAINT_MANAGED = 1,    /* cuMemAllocManaged, managed pools and variables */
    GPUSHARE_TAINT_IPC = 2,        /* cuIpcGetMemHandle, cuIpcOpenMemHandle, ... */
    GPUSHARE_TAINT_EXPORTED = 4,   /* cuMemExportToShareableHandle and the like, every import, graphics */
    GPUSHARE_TAINT_PEER = 8,       /* cuCtxEnablePeerAccess, cuMemSetAccess to another device, ... */
    GPUSHARE_TAINT_TRACED = 16,    /* cuptiSubscribe, cuptiActivityEnable, ...: torch.profiler */
    GPUSHARE_TAINT_FABRIC = 32,    /* memory with fabric handles (multi-node NVLink) */
};

struct gpushare_limit_device {
    uint8_t uuid[16];       /* of the device that the lease has now, as cuDeviceGetUuid_v2 answers */
    uint64_t limit_bytes;   /* of all processes of the lease together */
    uint64_t context_bytes; /* what NVML shows beyond the accounts (contexts), charged too */
    uint8_t name[16];       /* the UUID that was first here: processes of the lease know the device by it */
    _Atomic uint64_t kept_bytes; /* of the limit: another lease has them now; who wants them asks and waits */
};

struct gpushare_limit_page {
    uint32_t magic;
    uint32_t version;
    uint16_t device_count;
    uint16_t mig; /* bit i: device i is a MIG instance, whose UUID is written MIG-..., not GPU-... */
    _Atomic uint32_t ahead_us; /* work that a process may have in flight in a turn; 0: leases share no time here */
    _Alignas(8) _Atomic uint32_t phase; /* one load reads this and the next */
    _Atomic uint32_t turn; /* processes wait on it (futex) */
    struct gpushare_limit_device device[GPUSHARE_DEVICES];
};
_Static_assert(sizeof(struct gpushare_limit_page) == 24 + 56 * GPUSHARE_DEVICES, "layout");

struct gpushare_slot {
    _Atomic int32_t pid;      /* 0: free; written last */
    uint32_t taints;          /* enum gpushare_taint, or-ed */
    uint64_t start_ticks;     /* field 22 of /proc/PID/stat: a pid alone is reused */
    /* Driver functions entered; each call counts in one of the first three (see preload/hooks.h). */
    _Atomic uint64_t work;    /* launches, copies, allocations, synchronisation: the process works */
    _Atomic uint64_t calls;   /* every other one that may wait while the process is suspended */
    _Atomic uint64_t queries; /* those that programs poll: streams, events, pointers, contexts, captures */
    _Atomic uint64_t again;   /* calls that are in `work`, and waited since: now and then while they do, and at the end */
    _Atomic uint64_t wants_memory; /* grows while a thread waits for kept bytes */
    _Atomic uint64_t settled; /* `work` and `again` with which nothing of this process was left on a device */
    _Atomic uint32_t waiting; /* threads that wait for a turn */
    _Atomic uint32_t looking; /* its own thread is in the driver, to find that out */
    uint64_t used_bytes[GPUSHARE_DEVICES]; /* by index in the limit page */
};
_Static_assert(sizeof(struct gpushare_slot) == 72 + 8 * GPUSHARE_DEVICES, "layout");

struct gpushare_account {
    uint32_t magic;
    uint32_t version;
    uint64_t denied; /* allocations refused for the limit, ever */
    union {
        struct {
            pthread_mutex_t mutex; /* robust, process shared; guards slots, never held across a driver call */
            uint32_t slots_seen;   /* slots from this one on have never been used */
        };
        uint8_t pad[64];
    } lock;
    struct gpushare_slot slot[GPUSHARE_SLOTS];
};
_Static_assert(sizeof(struct gpushare_account) == 80 + GPUSHARE_SLOTS * (72 + 8 * GPUSHARE_DEVICES), "layout");

#endif
