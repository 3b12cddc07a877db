/* The two files of a lease, as shared by the preload library and the device helper.
 *
 *   <lease dir>/limit     written by the helper (pwrite), mapped read-only by the
 *                         processes of the lease; the user cannot write it
 *   <lease dir>/account   created by the helper for the user; mapped read-write by
 *                         the processes of the lease; the helper reads it only with
 *                         a bounded pread and O_NOFOLLOW, and never trusts it for
 *                         another tenant's safety
 *
 * Both have a fixed size.  `gpu/leases/files.py` reads and writes the same offsets
 * with `struct`; tests/native checks that the two sides agree.
 *
 * A process finds the directory in GPUSHARE_LEASE_DIR.  Without a directory or a page, or with a
 * wrong magic or version, every allocation is denied (fail closed).
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
    GPUSHARE_SUSPENDING = 1, /* every counted call waits, and is counted again while it waits */
    GPUSHARE_SUSPENDED = 2,  /* the same, until the lease runs again */
    GPUSHARE_PAUSED = 3,     /* new contexts and allocations wait for another lease's restore; other calls run */
    GPUSHARE_REVOKED = 4,    /* everything is denied, because the lease has ended */
};

/* Whether the processes of a lease may launch now (gpu/turns/ring.py).  0: the lease has no turns.  Otherwise
 * the lowest bit says whether launches are held, and the others count the changes, so that a new turn is a new
 * word. */
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
    uint64_t limit_bytes;   /* for all processes of the lease together */
    uint64_t context_bytes; /* bytes that NVML shows in addition to the accounts (contexts); charged too */
    uint8_t name[16];       /* the first UUID at this index, by which processes of the lease know the device */
    _Atomic uint64_t kept_bytes; /* part of the limit that another lease uses now; a process asks for it and waits */
};

struct gpushare_limit_page {
    uint32_t magic;
    uint32_t version;
    uint16_t device_count;
    uint16_t mig; /* bit i: device i is a MIG instance, whose UUID is written MIG-..., not GPU-... */
    _Atomic uint32_t ahead_us; /* work that a process may have in flight in a turn; 0 if leases share no time */
    _Alignas(8) _Atomic uint32_t phase; /* one load reads this field and the next */
    _Atomic uint32_t turn; /* processes wait on it (futex) */
    struct gpushare_limit_device device[GPUSHARE_DEVICES];
};
_Static_assert(sizeof(struct gpushare_limit_page) == 24 + 56 * GPUSHARE_DEVICES, "layout");

struct gpushare_slot {
    _Atomic int32_t pid;      /* 0 if the slot is free; written last */
    uint32_t taints;          /* a bit set of enum gpushare_taint */
    uint64_t start_ticks;     /* field 22 of /proc/PID/stat, because a pid alone is reused */
    /* Driver functions entered; each call counts in one of the first three (see preload/hooks.h). */
    _Atomic uint64_t work;    /* launches, copies, allocations, synchronisation: the process works */
    _Atomic uint64_t calls;   /* all other calls that may wait while the process is suspended */
    _Atomic uint64_t queries; /* calls that programs poll: streams, events, pointers, contexts, captures */
    _Atomic uint64_t again;   /* calls in `work` that waited: counted from time to time while they wait, and at the end */
    _Atomic uint64_t wants_memory; /* grows while a thread waits for kept bytes */
    _Atomic uint64_t settled; /* the sum of `work` and `again` when all work of this process was done */
    _Atomic uint32_t waiting; /* threads that wait for a turn */
    _Atomic uint32_t looking; /* 1 while the library's own thread is in the driver to check for that */
    uint64_t used_bytes[GPUSHARE_DEVICES]; /* by index in the limit page */
};
_Static_assert(sizeof(struct gpushare_slot) == 72 + 8 * GPUSHARE_DEVICES, "layout");

struct gpushare_account {
    uint32_t magic;
    uint32_t version;
    uint64_t denied; /* allocations denied because of the limit, in total */
    union {
        struct {
            pthread_mutex_t mutex; /* robust, process shared; guards slots; never held across a driver call */
            uint32_t slots_seen;   /* slots with this index or a higher one have never been used */
        };
        uint8_t pad[64];
    } lock;
    struct gpushare_slot slot[GPUSHARE_SLOTS];
};
_Static_assert(sizeof(struct gpushare_account) == 80 + GPUSHARE_SLOTS * (72 + 8 * GPUSHARE_DEVICES), "layout");

#endif
