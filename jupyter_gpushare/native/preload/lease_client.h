/* A process's side of its lease: the limit page, the account, this process's slot.
 *
 * Rules.
 *   - A process is leased if it starts with GPUSHARE_LEASE, GPUSHARE_LEASE_DIR or GPUSHARE_MEMORY_LIMIT,
 *     whatever their values.  Without any of them nothing here does anything ("not leased").
 *   - Leased, but without a valid page and account: everything is denied (fail closed).
 *   - The account's mutex is held for arithmetic only, never across a driver call or a wait.
 *   - Sums are made from the slots, so a process killed inside the mutex leaves no half sum.
 *   - A slot belongs to (pid, start time).  Slots of the dead are swept when slots are short or
 *     memory is asked about, after the driver has freed theirs: never at exit, which is before.
 */
#ifndef GPUSHARE_LEASE_CLIENT_H
#define GPUSHARE_LEASE_CLIENT_H

#include <stdbool.h>

#include "../gpushare_lease.h"

struct lease_memory {
    uint64_t limit_bytes; /* of all processes of the lease together, contexts included */
    uint64_t used_bytes;  /* contexts included */
};

/* A call that waited is counted AGAIN, for the helper; WANTS counts while one waits for kept bytes. */
enum lease_counter { LEASE_WORK, LEASE_CALLS, LEASE_QUERIES, LEASE_AGAIN, LEASE_WANTS, LEASE_COUNTERS };

/* This process's counters, LEASE_COUNTERS in a row; NULL until the first call.  The stubs add to them. */
extern _Atomic uint64_t *_Atomic gpushare_counters;
/* The phase in the limit page, or one that is not RUNNING while the page is not mapped, and the turn behind
 * it.  The stubs read them after they have counted. */
extern const _Atomic uint32_t *_Atomic gpushare_phase;

/* Whether the process belongs to a lease.  Read once, at load or at the first question before. */
bool lease_is_set(void);
/* Called once, before the program runs.  Other threads may use everything here before and meanwhile. */
void lease_load(void);
/* After fork, in the child: another process, which has its own slot, lazily. */
void lease_in_child(void);

/* The entry of every call: count it, then wait while the lease is suspended.  The driver holds only some
 * calls of a suspended process.  It lets others through, and those that look for completed work end
 * it with SIGSEGV: cuCtxSynchronize, cuStreamSynchronize, cuEventSynchronize, cuStreamQuery,
 * cuEventQuery and cuEventElapsedTime (measured on an H100 with driver 580.159.04, docs/benchmarks.md). */
void lease_enter(enum lease_counter counter);

/* Waits while the lease is suspended, without counting a call anew at once. */
void lease_wait_to_run(void);
/* The turn of the lease, or none while the page is not mapped. */
static inline const _Atomic uint32_t *gpushare_turn(void)
{
    return atomic_load_explicit(&gpushare_phase, memory_order_acquire) + 1;
}

/* The limit page, and this process's slot in the account; NULL while there is none. */
const struct gpushare_limit_page *lease_page(void);
struct gpushare_slot *lease_slot(void);

void lease_taint(enum gpushare_taint taint);

/* Wait until new contexts and allocations are allowed; false when they never will be. */
bool lease_wait_to_allocate(void);

/* Whether this process began in a server without a GPU, which may get one while it runs: it has the
 * name or the folder of a lease, and no limit.  Read once, as above. */
bool lease_is_reserved(void);
enum { LEASE_UUID_BYTES = 41 };
/* The UUID of the device that the lease has now at an index of the limit page, as NVML writes it; false
 * beyond the last, and while there is no lease.  A lease that resumed on another device has another UUID
 * there; its name, the first UUID, stays. */
bool lease_uuid(uint32_t index, char text[LEASE_UUID_BYTES]);
bool lease_name(uint32_t index, char text[LEASE_UUID_BYTES]);
/* Index in the limit page of a device that the lease has now, and of a name; or -1. */
int lease_device(const uint8_t uuid[16]);
int lease_named(const uint8_t name[16]);
/* Take bytes of a device for this process, all or nothing.  Where the limit has them, but another lease has
 * memory that is kept for it, waits until that is gone: no lock may be held.  Only the limit denies. */
bool lease_take(int device, uint64_t bytes);
/* Waits until nothing is kept on a device (-1: none) for another lease, which the helper then suspends; whether
 * anything was.  For calls that the driver refused for want of memory. */
bool lease_get_kept(int device);
/* The same while the account has more than the limit less what is kept: memory that the driver gave unasked. */
void lease_get_beyond(int device);
void lease_count_denial(void);
void lease_give(int device, uint64_t bytes);
/* Charge `after` in place of `before`, in pages and beyond the limit too: the driver has it already. */
void lease_change(int device, uint64_t before, uint64_t after);
/* False when there is no valid page. */
bool lease_memory(int device, struct lease_memory *memory);

#endif
