/* A process's side of its lease: the limit page, the account, this process's slot.
 *
 * Rules.
 *   - A process is leased if it starts with GPUSHARE_LEASE, GPUSHARE_LEASE_DIR or GPUSHARE_MEMORY_LIMIT,
 *     with any value.  Without any of them these functions do nothing ("not leased").
 *   - A leased process without a valid page and account is denied everything (fail closed).
 *   - The account's mutex is held for arithmetic only, never across a driver call or a wait.
 *   - Sums are computed from the slots, so a process killed inside the mutex leaves no half sum.
 *   - A slot belongs to (pid, start time).  Slots of dead processes are swept when slots run out or memory
 *     is queried, after the driver has freed their memory; never at exit, which is before that.
 */
#ifndef GPUSHARE_LEASE_CLIENT_H
#define GPUSHARE_LEASE_CLIENT_H

#include <stdbool.h>

#include "../gpushare_lease.h"

struct lease_memory {
    uint64_t limit_bytes; /* for all processes of the lease together, contexts included */
    uint64_t used_bytes;  /* contexts included */
};

/* AGAIN counts calls that waited, for the helper; WANTS counts while a call waits for kept bytes. */
enum lease_counter { LEASE_WORK, LEASE_CALLS, LEASE_QUERIES, LEASE_AGAIN, LEASE_WANTS, LEASE_COUNTERS };

/* This process's counters, LEASE_COUNTERS in a row; NULL until the first call.  The stubs add to them. */
extern _Atomic uint64_t *_Atomic gpushare_counters;
/* The phase in the limit page, followed by the turn; a phase that is not RUNNING while the page is not mapped.
 * The stubs read both after they have counted. */
extern const _Atomic uint32_t *_Atomic gpushare_phase;

/* Whether the process belongs to a lease.  Read once, at the first call or at load. */
bool lease_is_set(void);
/* Called once, before the program runs.  Other threads may call all functions of this file before and meanwhile. */
void lease_load(void);
/* Called in the child after fork: the child is another process and claims its own slot when it needs one. */
void lease_in_child(void);

/* The entry of every call: counts it, then waits while the lease is suspended.  The driver makes only some
 * calls of a suspended process wait.  Of the others, those that check for completed work end the process
 * with SIGSEGV: cuCtxSynchronize, cuStreamSynchronize, cuEventSynchronize, cuStreamQuery, cuEventQuery and
 * cuEventElapsedTime (measured on an H100 with driver 580.159.04, docs/benchmarks.md). */
void lease_enter(enum lease_counter counter);

/* Waits while the lease is suspended, without first counting a call. */
void lease_wait_to_run(void);
/* The turn of the lease; GPUSHARE_NO_TURNS while the page is not mapped. */
static inline const _Atomic uint32_t *gpushare_turn(void)
{
    return atomic_load_explicit(&gpushare_phase, memory_order_acquire) + 1;
}

/* The limit page, and this process's slot in the account; NULL while there is none. */
const struct gpushare_limit_page *lease_page(void);
struct gpushare_slot *lease_slot(void);

void lease_taint(enum gpushare_taint taint);

/* Waits until new contexts and allocations are allowed; false if they never will be. */
bool lease_wait_to_allocate(void);

/* Whether this process began in a server without a GPU, which may get one while it runs: it has the
 * name or the folder of a lease, but no limit.  Read once, like `lease_is_set`. */
bool lease_is_reserved(void);
enum { LEASE_UUID_BYTES = 41 };
/* Write the UUID that the lease's device at an index of the limit page has now, or its name, as NVML writes
 * it; false beyond the last device and without a page.  The name is the first UUID at the index: it stays when
 * the lease resumes on another device with another UUID. */
bool lease_uuid(uint32_t index, char text[LEASE_UUID_BYTES]);
bool lease_name(uint32_t index, char text[LEASE_UUID_BYTES]);
/* Return the index in the limit page of a current device, or of a name; -1 if there is none. */
int lease_device(const uint8_t uuid[16]);
int lease_named(const uint8_t name[16]);
/* Takes bytes of a device for this process, all or nothing.  If they fit into the limit but another lease uses
 * kept bytes, waits until it no longer does; no lock may be held.  Only the limit denies. */
bool lease_take(int device, uint64_t bytes);
/* Waits until another lease uses no kept bytes of a device (-1: no device): the helper suspends that lease.
 * Returns whether there were any.  For calls that the driver refused for lack of memory. */
bool lease_get_kept(int device);
/* The same while the account exceeds the limit less the kept bytes: the driver took memory without a request. */
void lease_get_beyond(int device);
void lease_count_denial(void);
void lease_give(int device, uint64_t bytes);
/* Charges `after` in place of `before`, in pages, even beyond the limit: the driver already has the memory. */
void lease_change(int device, uint64_t before, uint64_t after);
/* False if there is no valid page. */
bool lease_memory(int device, struct lease_memory *memory);

#endif
