#define _GNU_SOURCE
#include "../old_glibc.h"

#include "lease_client.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../process_identity.h"
#include "../hold.h"
#include "lease_files.h"

enum { POLL_NS = 2000000, SWEEP_NS = 50000000, RECOUNT_POLLS = 25 };

static const _Alignas(8) _Atomic uint32_t unknown_phase[2] = {GPUSHARE_SUSPENDED, GPUSHARE_NO_TURNS};
static const _Alignas(8) _Atomic uint32_t unleased_phase[2] = {GPUSHARE_RUNNING, GPUSHARE_NO_TURNS};

_Atomic uint64_t *_Atomic gpushare_counters;
const _Atomic uint32_t *_Atomic gpushare_phase = unknown_phase;

/* The counters of a process without a lease. */
static _Atomic uint64_t unleased[LEASE_COUNTERS];

/* Set at the first call, because another library's constructor may start threads before ours has run. */
static _Atomic enum membership { UNKNOWN, WITHOUT_LEASE, LEASED, RESERVED } membership;
static const struct gpushare_limit_page *_Atomic page;
static struct gpushare_account *_Atomic account;
static struct gpushare_slot *_Atomic mine;
static pthread_mutex_t settling = PTHREAD_MUTEX_INITIALIZER; /* guards the first write of `membership` */
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static struct stat page_file; /* the file behind `page`; guarded by `opening` */
/* Bytes of allocations of at most 1 MiB, which share pages of the device, by device; guarded by the account's
 * mutex. */
static uint64_t small_bytes[GPUSHARE_DEVICES];

static const uint64_t page_bytes = (uint64_t)2 << 20, small_limit = (uint64_t)1 << 20;

/* A program that unsets some of the three variables still belongs to its lease. */
static enum membership find_membership(void)
{
    enum membership found = atomic_load_explicit(&membership, memory_order_acquire);
    if (found)
        return found;
    HOLD(&settling);
    if (atomic_load(&membership))
        return atomic_load(&membership);
    bool has_folder = keep_lease_folder();
    found = getenv("GPUSHARE_MEMORY_LIMIT")          ? LEASED
            : getenv("GPUSHARE_LEASE") || has_folder ? RESERVED
                                                     : WITHOUT_LEASE;
    if (found == WITHOUT_LEASE) {
        atomic_store(&gpushare_counters, unleased);
        atomic_store(&gpushare_phase, unleased_phase);
    }
    atomic_store(&membership, found);
    return found;
}

bool lease_is_set(void)
{
    return find_membership() != WITHOUT_LEASE;
}

bool lease_is_reserved(void)
{
    return find_membership() == RESERVED;
}

/* ---- the two files ---- */

static const struct gpushare_limit_page *get_page(void)
{
    const struct gpushare_limit_page *at = atomic_load_explicit(&page, memory_order_acquire);
    if (!at) {
        pthread_mutex_lock(&opening);
        at = atomic_load(&page);
        if (!at && (at = map_lease_file("limit", false, sizeof *at, lease_is_reserved(), &page_file)))
            atomic_store(&page, at);
        pthread_mutex_unlock(&opening);
    }
    if (at && at->magic == GPUSHARE_LIMIT_MAGIC && at->version == GPUSHARE_VERSION &&
        at->device_count <= GPUSHARE_DEVICES) {
        atomic_store_explicit(&gpushare_phase, &at->phase, memory_order_release);
        return at;
    }
    if (at)
        complain_of_lease("limit", "has an unknown format");
    return NULL;
}

/* Forgets the maps of files that the helper has created again: the old page would say SUSPENDED for ever.
 * The old files stay mapped, because other threads may read them. */
static void reopen_replaced_files(void)
{
    struct stat now;
    if (!find_lease_file("limit", sizeof(struct gpushare_limit_page), &now))
        return;
    HOLD(&opening);
    if (atomic_load(&page) &&
        (now.st_dev != page_file.st_dev || now.st_ino != page_file.st_ino)) {
        atomic_store(&gpushare_phase, unknown_phase);
        atomic_store(&gpushare_counters, NULL);
        atomic_store(&mine, NULL);
        atomic_store(&account, NULL);
        atomic_store(&page, NULL);
    }
}

static bool write_uuid(uint32_t index, bool first, char text[LEASE_UUID_BYTES])
{
    const struct gpushare_limit_page *at = get_page();
    if (!at || index >= at->device_count)
        return false;
    const uint8_t *uuid = first ? at->device[index].name : at->device[index].uuid;
    text += sprintf(text, at->mig >> index & 1 ? "MIG-" : "GPU-");
    for (int i = 0; i < 16; i++)
        text += sprintf(text, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
    return true;
}

bool lease_uuid(uint32_t index, char text[LEASE_UUID_BYTES])
{
    return write_uuid(index, false, text);
}

bool lease_name(uint32_t index, char text[LEASE_UUID_BYTES])
{
    return write_uuid(index, true, text);
}

static struct gpushare_account *get_account(void)
{
    struct gpushare_account *at = atomic_load_explicit(&account, memory_order_acquire);
    struct stat file;
    if (!at) {
        pthread_mutex_lock(&opening);
        at = atomic_load(&account);
        if (!at && (at = map_lease_file("account", true, sizeof *at, lease_is_reserved(), &file)))
            atomic_store(&account, at);
        pthread_mutex_unlock(&opening);
    }
    if (at && at->magic == GPUSHARE_ACCOUNT_MAGIC && at->version == GPUSHARE_VERSION)
        return at;
    if (at)
        complain_of_lease("account", "has an unknown format");
    return NULL;
}

static bool lock_account(struct gpushare_account *at)
{
    int result = pthread_mutex_lock(&at->lock.mutex);
    if (result == EOWNERDEAD)
        result = pthread_mutex_consistent(&at->lock.mutex);
    return result == 0;
}

static void unlock_account(struct gpushare_account *at)
{
    pthread_mutex_unlock(&at->lock.mutex);
}

/* ---- slots (mutex held) ---- */

static bool sweep(struct gpushare_account *at)
{
    bool any = false;
    for (int i = 0; i < GPUSHARE_SLOTS; i++) {
        struct gpushare_slot *slot = &at->slot[i];
        if (slot->pid && process_start_ticks(slot->pid) != slot->start_ticks) {
            memset(slot->used_bytes, 0, sizeof slot->used_bytes);
            slot->pid = 0;
            any = true;
        }
    }
    return any;
}

/* For callers that only read, because a sweep reads a file per process while the account is locked. */
static void sweep_now_and_then(struct gpushare_account *at)
{
    static int64_t swept_ns; /* guarded by the account's mutex */
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    int64_t now_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    if (swept_ns && now_ns - swept_ns < SWEEP_NS)
        return;
    swept_ns = now_ns;
    sweep(at);
}

static void clear(struct gpushare_slot *slot)
{
    memset(slot->used_bytes, 0, sizeof slot->used_bytes);
    memset(small_bytes, 0, sizeof small_bytes);
    slot->taints = 0;
}

/* Returns this process's slot.  An existing one is from before an exec: its memory is gone, but its
 * counters continue, because the helper compares them. */
static struct gpushare_slot *claim(struct gpushare_account *at)
{
    struct gpushare_slot *free_slot = NULL;
    int32_t pid = getpid();
    uint64_t ticks = process_start_ticks(pid);
    for (int i = 0; i < GPUSHARE_SLOTS; i++) {
        struct gpushare_slot *slot = &at->slot[i];
        if (slot->pid == pid && slot->start_ticks == ticks) {
            clear(slot);
            atomic_store(&slot->waiting, 0);
            atomic_store(&slot->looking, 0);
            return slot;
        }
        if (!slot->pid && !free_slot)
            free_slot = slot;
    }
    if (!free_slot)
        return NULL;
    clear(free_slot);
    atomic_store(&free_slot->work, 0);
    atomic_store(&free_slot->calls, 0);
    atomic_store(&free_slot->queries, 0);
    atomic_store(&free_slot->again, 0);
    atomic_store(&free_slot->wants_memory, 0);
    atomic_store(&free_slot->settled, 0);
    atomic_store(&free_slot->waiting, 0);
    atomic_store(&free_slot->looking, 0);
    free_slot->start_ticks = ticks;
    free_slot->pid = pid;
    uint32_t number = (uint32_t)(free_slot - at->slot);
    at->lock.slots_seen = number < at->lock.slots_seen ? at->lock.slots_seen : number + 1;
    return free_slot;
}

/* If the account was replaced meanwhile, only the call that claimed the slot uses it. */
static void keep_slot(const struct gpushare_account *at, struct gpushare_slot *slot)
{
    HOLD(&opening);
    if (atomic_load(&account) == at) {
        atomic_store(&mine, slot);
        atomic_store(&gpushare_counters, &slot->work);
    }
}

static struct gpushare_slot *get_slot(struct gpushare_account *at)
{
    struct gpushare_slot *slot = atomic_load_explicit(&mine, memory_order_acquire);
    if (slot || !lock_account(at))
        return slot;
    slot = atomic_load(&mine);
    bool is_new = !slot;
    if (is_new) {
        slot = claim(at);
        if (!slot && sweep(at))
            slot = claim(at);
    }
    unlock_account(at);
    if (is_new && slot)
        keep_slot(at, slot);
    return slot;
}

const struct gpushare_limit_page *lease_page(void)
{
    return get_page();
}

struct gpushare_slot *lease_slot(void)
{
    struct gpushare_account *at = get_account();
    return at ? get_slot(at) : NULL;
}

void lease_load(void)
{
    struct stat file;
    /* After an exec this process may still be charged for memory that the driver has freed. */
    if (!lease_is_set() || !find_lease_file("account", sizeof(struct gpushare_account), &file))
        return;
    struct gpushare_account *at = get_account();
    int32_t pid = getpid();
    for (int i = 0; at && i < GPUSHARE_SLOTS; i++)
        if (at->slot[i].pid == pid && at->slot[i].start_ticks == process_start_ticks(pid))
            get_slot(at);
}

void lease_in_child(void)
{
    pthread_mutex_init(&settling, NULL);
    pthread_mutex_init(&opening, NULL);
    atomic_store(&mine, NULL);
    atomic_store(&gpushare_counters, lease_is_set() ? NULL : unleased);
}

/* ---- the entry of a call ---- */

static void count(enum lease_counter counter)
{
    _Atomic uint64_t *counters = atomic_load_explicit(&gpushare_counters, memory_order_acquire);
    if (!counters) {
        struct gpushare_account *at = lease_is_set() ? get_account() : NULL;
        struct gpushare_slot *slot = at ? get_slot(at) : NULL;
        if (!at)
            return;
        /* Without a free slot any slot is fine, because the helper reacts to a change in any of them. */
        counters = slot ? &slot->work : &at->slot[0].work;
    }
    atomic_fetch_add_explicit(counters + counter, 1, memory_order_relaxed);
}

void lease_taint(enum gpushare_taint taint)
{
    struct gpushare_account *at = lease_is_set() ? get_account() : NULL;
    struct gpushare_slot *slot = at ? get_slot(at) : NULL;
    if (slot && lock_account(at)) {
        slot->taints |= (uint32_t)taint;
        unlock_account(at);
    }
}

/* Returns false if the lease allows nothing.  Counts again from time to time, so that a reader that first
 * read the counters after this call had counted still sees that a call waits. */
static bool wait_for_phase(enum lease_counter counter, bool allocates)
{
    const struct timespec poll = {0, POLL_NS};
    for (unsigned polls = 1;; polls++) {
        const struct gpushare_limit_page *limits = get_page();
        if (!limits)
            return false;
        uint32_t phase = atomic_load_explicit(&limits->phase, memory_order_acquire);
        bool waits = phase == GPUSHARE_SUSPENDING || phase == GPUSHARE_SUSPENDED ||
                     (phase == GPUSHARE_PAUSED && allocates);
        if (!waits)
            return phase == GPUSHARE_RUNNING || phase == GPUSHARE_PAUSED;
        if (polls % RECOUNT_POLLS == 0) {
            reopen_replaced_files();
            count(counter == LEASE_WORK ? LEASE_AGAIN : counter);
        }
        nanosleep(&poll, NULL);
    }
}

static void wait_to_run(enum lease_counter counter)
{
    if (atomic_load_explicit(atomic_load(&gpushare_phase), memory_order_acquire) != GPUSHARE_RUNNING && lease_is_set())
        wait_for_phase(counter, false);
}

/* Counts before it reads the phase.  The helper writes the phase before it reads the counters, so it sees
 * the call, or the call sees the phase. */
void lease_enter(enum lease_counter counter)
{
    count(counter);
    atomic_thread_fence(memory_order_seq_cst);
    wait_to_run(counter);
}

void lease_wait_to_run(void)
{
    wait_to_run(LEASE_WORK);
}

bool lease_wait_to_allocate(void)
{
    return !lease_is_set() || wait_for_phase(LEASE_CALLS, true);
}

/* ---- the account ---- */

int lease_device(const uint8_t uuid[16])
{
    const struct gpushare_limit_page *limits = get_page();
    for (uint32_t i = 0; limits && i < limits->device_count; i++)
        if (!memcmp(limits->device[i].uuid, uuid, sizeof limits->device[i].uuid))
            return (int)i;
    return -1;
}

int lease_named(const uint8_t name[16])
{
    const struct gpushare_limit_page *limits = get_page();
    for (uint32_t i = 0; limits && i < limits->device_count; i++)
        if (!memcmp(limits->device[i].name, name, sizeof limits->device[i].name))
            return (int)i;
    return -1;
}

static uint64_t pages(uint64_t bytes)
{
    return (bytes + page_bytes - 1) / page_bytes * page_bytes;
}

static uint64_t used_by_all(const struct gpushare_account *at, int device)
{
    uint64_t bytes = 0;
    uint32_t seen = at->lock.slots_seen < GPUSHARE_SLOTS ? at->lock.slots_seen : GPUSHARE_SLOTS;
    for (uint32_t i = 0; i < seen; i++)
        if (at->slot[i].pid)
            bytes += at->slot[i].used_bytes[device];
    return bytes;
}

static uint64_t without_contexts(const struct gpushare_limit_page *limits, int device)
{
    uint64_t limit = limits->device[device].limit_bytes, contexts = limits->device[device].context_bytes;
    return limit > contexts ? limit - contexts : 0;
}

static bool fits(const struct gpushare_account *at, int device, uint64_t limit, uint64_t bytes)
{
    uint64_t used = used_by_all(at, device);
    return used <= limit && bytes <= limit - used;
}

static uint64_t kept(const struct gpushare_limit_page *limits, int device)
{
    return limits && device >= 0 && device < GPUSHARE_DEVICES ? atomic_load(&limits->device[device].kept_bytes) : 0;
}

/* Whether bytes fit into a limit, if necessary after a sweep of processes that have ended. */
static bool fits_swept(struct gpushare_account *at, int device, uint64_t limit, uint64_t bytes)
{
    return fits(at, device, limit, bytes) || (sweep(at) && fits(at, device, limit, bytes));
}

static uint64_t beside_kept(const struct gpushare_limit_page *limits, int device)
{
    uint64_t limit = without_contexts(limits, device), others = kept(limits, device);
    return limit > others ? limit - others : 0;
}

enum taking { DENIED, TAKEN, KEPT };

/* The driver backs memory with pages of 2 MiB, which small allocations share; the account charges whole
 * pages.  The helper writes the kept bytes before it reads the account, so it sees the bytes taken, or the
 * second check of the kept bytes below sees its write. */
static enum taking take(int device, uint64_t bytes)
{
    const struct gpushare_limit_page *limits = get_page();
    struct gpushare_account *at = get_account();
    struct gpushare_slot *slot = at ? get_slot(at) : NULL;
    if (!limits || !slot || device < 0 || device >= GPUSHARE_DEVICES || bytes > UINT64_MAX / 4 || !lock_account(at))
        return DENIED;
    bool small = bytes <= small_limit;
    uint64_t cost = small ? pages(small_bytes[device] + bytes) - pages(small_bytes[device]) : pages(bytes);
    enum taking taking = cost == 0 ? TAKEN : DENIED;
    if (cost && fits_swept(at, device, without_contexts(limits, device), cost))
        taking = fits_swept(at, device, beside_kept(limits, device), cost) ? TAKEN : KEPT;
    if (taking == TAKEN) {
        __atomic_fetch_add(&slot->used_bytes[device], cost, __ATOMIC_SEQ_CST);
        if (cost && kept(limits, device) && !fits(at, device, beside_kept(limits, device), 0)) {
            slot->used_bytes[device] -= cost;
            taking = KEPT;
        }
    }
    if (taking == TAKEN && small)
        small_bytes[device] += bytes;
    unlock_account(at);
    return taking;
}

/* Asks for kept bytes and waits briefly, or longer while the lease moves.  Returns false if everything is
 * denied. */
static bool ask_for_kept(void)
{
    const struct timespec poll = {0, POLL_NS};
    count(LEASE_WANTS);
    nanosleep(&poll, NULL);
    return wait_for_phase(LEASE_WORK, true);
}

bool lease_take(int device, uint64_t bytes)
{
    enum taking taking;
    while ((taking = take(device, bytes)) == KEPT && ask_for_kept())
        ;
    return taking == TAKEN;
}

bool lease_get_kept(int device)
{
    bool any = false;
    while (device >= 0 && lease_is_set() && kept(get_page(), device)) {
        any = true;
        if (!ask_for_kept())
            return false;
    }
    return any;
}

static bool is_beyond(int device)
{
    const struct gpushare_limit_page *limits = get_page();
    struct gpushare_account *at = kept(limits, device) ? get_account() : NULL;
    if (!at || !lock_account(at))
        return false;
    bool beyond = !fits_swept(at, device, beside_kept(limits, device), 0);
    unlock_account(at);
    return beyond;
}

void lease_get_beyond(int device)
{
    while (is_beyond(device) && ask_for_kept())
        ;
}

void lease_count_denial(void)
{
    struct gpushare_account *at = get_account();
    if (!at || !lock_account(at))
        return;
    at->denied++;
    unlock_account(at);
}

void lease_give(int device, uint64_t bytes)
{
    struct gpushare_account *at = get_account();
    struct gpushare_slot *slot = at ? get_slot(at) : NULL;
    if (!slot || device < 0 || device >= GPUSHARE_DEVICES || !lock_account(at))
        return;
    uint64_t cost = pages(bytes);
    if (bytes <= small_limit) {
        uint64_t before = small_bytes[device], after = before > bytes ? before - bytes : 0;
        cost = pages(before) - pages(after);
        small_bytes[device] = after;
    }
    slot->used_bytes[device] -= cost < slot->used_bytes[device] ? cost : slot->used_bytes[device];
    unlock_account(at);
}

void lease_change(int device, uint64_t before, uint64_t after)
{
    struct gpushare_account *at = before != after ? get_account() : NULL;
    struct gpushare_slot *slot = at ? get_slot(at) : NULL;
    if (!slot || device < 0 || device >= GPUSHARE_DEVICES || !lock_account(at))
        return;
    uint64_t gone = before > after ? before - after : 0, held = slot->used_bytes[device];
    slot->used_bytes[device] = held - (gone < held ? gone : held) + (after > before ? after - before : 0);
    unlock_account(at);
}

bool lease_memory(int device, struct lease_memory *memory)
{
    const struct gpushare_limit_page *limits = get_page();
    struct gpushare_account *at = get_account();
    if (!limits || !at || device < 0 || device >= GPUSHARE_DEVICES || !lock_account(at))
        return false;
    sweep_now_and_then(at);
    memory->used_bytes = used_by_all(at, device) + limits->device[device].context_bytes;
    memory->limit_bytes = limits->device[device].limit_bytes;
    unlock_account(at);
    return true;
}
