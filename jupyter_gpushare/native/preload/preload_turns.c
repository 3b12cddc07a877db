/* Turns: launches wait while another lease has its turn, and a thread checks when all submitted work is done.
 *
 * The helper writes the turn into the limit page (gpushare_lease.h); gpu/turns/ring.py decides it.
 *
 *   - A launch waits while the turn is held, like an allocation while a lease moves, but wakes at once
 *     (futex).  If the helper writes nothing for GONE_NS, it is gone, and launches continue.
 *   - In a turn a process runs at most `ahead_us` ahead of the device, so that the device is free soon
 *     after the turn: a launch waits while more is in flight.  The duration of launches is measured.
 *   - While there are turns, a thread of this library repeatedly waits for all submitted work.  It records
 *     an event of the whole context (cuCtxRecordEvent, CUDA 12.5), which affects no stream, and queries it
 *     with pauses.  A call is counted before it reaches the driver, so the process is settled when two
 *     checks in a row find the same count.
 *   - The thread does nothing during a stream capture: an event of a context with a capture is an error and
 *     ends the capture (CUDA Driver API reference 13.0, cuCtxRecordEvent).  Launches of a capture run
 *     nothing and are not held.
 *   - cuEventQuery ends a process that is checkpointed (lease_client.h).  So the thread sets `looking` in
 *     the account during a check, and the helper waits for it before a checkpoint.
 *   - Only the `checking` lock is held across calls of the driver, and none of them waits for the device.
 *     Only a thread that ends a context or begins a capture waits for this lock, because work on the device
 *     may wait for that very thread.
 */
#define _GNU_SOURCE
#include "preload_turns.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../hold.h"
#include "preload_devices.h"
#include "preload_driver.h"

enum {
    CONTEXTS = 16,
    ORIGINS = 64,
    HELD_WAIT_NS = 20000000,     /* a wake-up may get lost */
    REST_NS = 2000000000,
    IDLE_NS = 10000000,          /* calls that only synchronise or allocate do not wake the thread */
    BLIND_NS = 5000000,
    AGAIN_NS = 1000000,          /* between two checks with the same count */
    AGAIN_WHEN_HELD_NS = 200000, /* only launches that had passed the page can begin then */
    MIN_PAUSE_NS = 50000,        /* between two queries of an event ... */
    MAX_PAUSE_NS = 1000000,
    PAUSE_PART = 16,             /* ... 1/PAUSE_PART of the wait so far */
    SUBMIT_NS = 100000,          /* from the count of a launch until the driver has it */
    FULL_WAIT_NS = 5000000,
    FULL_WAITS = 200,
    MAX_DEPENDENT = 16,          /* launches let through because one may wait for another */
    MAX_LAUNCHES = 1024,         /* in flight; about the maximum of the driver itself */
    PAIR_NS = 10000000,          /* of shorter launches, at least two may be in flight */
};
#define GONE_NS ((int64_t)3000000000)
#define CAPTURE_NS ((int64_t)10000000000) /* a program has forgotten a longer capture */

typedef struct CUgraph_st *CUgraph;

struct watched_context {
    CUcontext _Atomic context;
    CUevent event; /* NULL if not created yet */
};

static pthread_mutex_t checking = PTHREAD_MUTEX_INITIALIZER;  /* no context ends during a call of the thread */
static pthread_mutex_t noting = PTHREAD_MUTEX_INITIALIZER;    /* only one thread at a time adds to `contexts` */
static pthread_mutex_t recording = PTHREAD_MUTEX_INITIALIZER; /* no capture begins while an event is recorded */
static struct watched_context contexts[CONTEXTS];
static _Atomic uint32_t context_count;
static uint32_t forgotten; /* number of times that contexts were forgotten; guarded by `checking` */

static _Atomic bool has_thread;
static bool relaxed; /* used by the thread alone: its calls do not disturb captures of others */
static _Atomic uint32_t launches, done; /* numbers of launches in turns: entered, and known to be done */
static _Atomic uint32_t max_in_flight = 2;
static _Atomic uint32_t min_in_flight = 1; /* fewer may wait for one that is not launched yet */
static _Atomic uint32_t checks;         /* a futex: the number of checks that have ended */
static _Atomic uint32_t sleeps;         /* a futex: 1 while the thread has nothing to check */
static _Atomic bool is_blind;           /* the last check was not possible */

static _Atomic uint32_t abandoned; /* a turn that was held so long that its helper must be gone */

static _Atomic uint32_t captures;
static _Atomic int64_t capture_ns; /* when the last one began */
static CUstream origins[ORIGINS];  /* streams in which captures began; NULL if free; guarded by `recording` */

/* ---- waiting ---- */

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void wait_on(const _Atomic uint32_t *word, uint32_t seen, int64_t ns, bool shared)
{
    struct timespec timeout = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    syscall(SYS_futex, word, shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, seen, &timeout, NULL, 0);
}

static void wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0);
}

static void sleep_ns(long ns)
{
    nanosleep(&(struct timespec){0, ns}, NULL);
}

/* ---- the thread ---- */

static bool captures_now(void)
{
    return atomic_load(&captures) && now_ns() - atomic_load(&capture_ns) < CAPTURE_NS;
}

typedef CUresult set_current(CUcontext);
typedef CUresult create_event(CUevent *, unsigned);
typedef CUresult record_event(CUcontext, CUevent);
typedef CUresult query_event(CUevent);
typedef CUresult exchange_mode(int *);

/* Called with `checking` and `recording`.  Records an event after all work submitted to a context. */
static bool record(struct watched_context *at, set_current *enter, create_event *create, record_event *record_in)
{
    enum { DISABLE_TIMING = 2 };
    if (atomic_load(&captures) || enter(at->context))
        return false;
    if (!at->event && create(&at->event, DISABLE_TIMING))
        at->event = NULL;
    return at->event && !record_in(at->context, at->event);
}

static bool may_check(const struct gpushare_limit_page *page)
{
    uint32_t phase = atomic_load(&page->phase);
    return phase == GPUSHARE_RUNNING || phase == GPUSHARE_PAUSED;
}

/* Called with `checking`, which it releases between two queries.  Returns false if the event does not come. */
static bool wait_for_event(const struct watched_context *at, set_current *enter, query_event *query,
                           const struct gpushare_limit_page *page)
{
    uint32_t before = forgotten;
    int64_t began_ns = now_ns();
    for (;;) {
        CUresult result = enter(at->context);
        if (!result)
            result = query(at->event);
        enter(NULL);
        if (result != CUDA_ERROR_NOT_READY)
            return !result;
        int64_t pause_ns = (now_ns() - began_ns) / PAUSE_PART;
        pause_ns = pause_ns < MIN_PAUSE_NS ? MIN_PAUSE_NS : pause_ns;
        pthread_mutex_unlock(&checking);
        sleep_ns(pause_ns < MAX_PAUSE_NS ? pause_ns : MAX_PAUSE_NS);
        pthread_mutex_lock(&checking);
        if (forgotten != before || !may_check(page))
            return false;
    }
}

/* Waits for all submitted work; returns false if that is not possible. */
static bool check_done(const struct gpushare_limit_page *page)
{
    static void *_Atomic kept_record, *_Atomic kept_mode;
    record_event *record_in = (record_event *)plain_function(&kept_record, "cuCtxRecordEvent");
    exchange_mode *exchange = (exchange_mode *)plain_function(&kept_mode, "cuThreadExchangeStreamCaptureMode");
    set_current *enter = (set_current *)real_of(HOOK_cuCtxSetCurrent);
    create_event *create = (create_event *)real_of(HOOK_cuEventCreate);
    query_event *query = (query_event *)real_of(HOOK_cuEventQuery);
    int mode = 2; /* relaxed */
    if (!record_in || !enter || !create || !query || !exchange)
        return false;
    if (!relaxed)
        relaxed = !exchange(&mode);
    HOLD(&checking);
    uint32_t count = atomic_load(&context_count);
    bool all = relaxed && count && count < CONTEXTS; /* a full table may lack a context */
    pthread_mutex_lock(&recording);
    for (uint32_t i = 0; all && i < count; i++)
        all = record(&contexts[i], enter, create, record_in);
    pthread_mutex_unlock(&recording);
    enter(NULL);
    for (uint32_t i = 0; all && i < count; i++)
        all = wait_for_event(&contexts[i], enter, query, page);
    return all;
}

/* One check, if the lease runs; the helper checkpoints nothing meanwhile. */
static bool check_safely(struct gpushare_slot *slot, const struct gpushare_limit_page *page)
{
    atomic_store(&slot->looking, 1);
    bool all = may_check(page) && atomic_load(&page->turn) && check_done(page);
    atomic_store(&slot->looking, 0);
    return all;
}

/* Measures the time of a launch from those that a check covered, and sets how many fit into `ahead_us`. */
static void pace(const struct gpushare_limit_page *page, uint32_t count, int64_t took_ns)
{
    static int64_t launch_ns; /* used by the thread alone */
    if (!count)
        return;
    int64_t measured_ns = took_ns / count + 1;
    launch_ns = launch_ns ? (launch_ns + measured_ns) / 2 : measured_ns;
    int64_t fit = (int64_t)atomic_load(&page->ahead_us) * 1000 / launch_ns, min = launch_ns < PAIR_NS ? 2 : 1;
    uint32_t devices = atomic_load(&context_count);
    min = devices > 1 ? 2 * devices : min; /* kernels of several devices wait for each other */
    int64_t max = 2 * (int64_t)atomic_load(&max_in_flight); /* a check may have come before its launch */
    fit = fit < max ? fit : max;
    fit = fit < min ? min : fit;
    atomic_store(&max_in_flight, (uint32_t)(fit > MAX_LAUNCHES ? MAX_LAUNCHES : fit));
}

/* The count of work that must be done: calls, and calls that continued after a wait. */
static uint64_t entered_work(const struct gpushare_slot *slot)
{
    return atomic_load(&slot->work) + atomic_load(&slot->again);
}

static void *keep_checking(void *unused)
{
    int64_t checked_ns = 0; /* when the last check ended, while more work was submitted */
    uint64_t found = 0;     /* the count of that check */
    (void)unused;
    for (;;) {
        const struct gpushare_limit_page *page = lease_page();
        struct gpushare_slot *slot = page ? lease_slot() : NULL;
        uint32_t turn = page ? atomic_load(&page->turn) : GPUSHARE_NO_TURNS;
        if (!slot || !turn) {
            if (page)
                wait_on(&page->turn, turn, REST_NS, true);
            else
                nanosleep(&(struct timespec){REST_NS / 1000000000, 0}, NULL);
            atomic_store(&is_blind, page && !slot); /* all slots of the account are taken */
            checked_ns = 0;
            continue;
        }
        uint64_t work = entered_work(slot);
        if (work == atomic_load(&slot->settled)) {
            atomic_store(&sleeps, 1);
            if (work == entered_work(slot))
                wait_on(&sleeps, 1, IDLE_NS, false);
            atomic_store(&sleeps, 0);
            checked_ns = 0;
            if (work == entered_work(slot))
                continue;
        }
        work = entered_work(slot);
        uint32_t entered = atomic_load(&launches);
        int64_t began_ns = checked_ns ? checked_ns : now_ns();
        if (entered != atomic_load(&done))
            sleep_ns(SUBMIT_NS); /* a launch that the driver does not have yet would seem to take no time */
        bool all = check_safely(slot, page);
        atomic_store(&is_blind, !all);
        checked_ns = now_ns();
        if (all) {
            pace(page, entered - atomic_load(&done), checked_ns - began_ns);
            atomic_store(&done, entered);
        }
        atomic_fetch_add(&checks, 1);
        wake(&checks);
        if (all && work == found && work == entered_work(slot))
            atomic_store(&slot->settled, work);
        else if (!all || work == entered_work(slot))
            sleep_ns(!all ? BLIND_NS : turn & GPUSHARE_HELD ? AGAIN_WHEN_HELD_NS : AGAIN_NS);
        found = all ? work : 0;
    }
    return NULL;
}

static void start_thread(void)
{
    sigset_t every, before;
    pthread_t thread;
    if (atomic_exchange(&has_thread, true))
        return;
    sigfillset(&every);
    sigdelset(&every, SIGSEGV); /* a fault of the thread is reported like any other */
    sigdelset(&every, SIGBUS);
    pthread_sigmask(SIG_BLOCK, &every, &before); /* signals are for the program's own threads */
    if (pthread_create(&thread, NULL, keep_checking, NULL)) {
        atomic_store(&is_blind, true); /* until there is a thread that checks */
        atomic_store(&has_thread, false);
    } else {
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* ---- launches ---- */

static bool has_room_for_launch(void)
{
    uint32_t in_flight = atomic_load(&launches) - atomic_load(&done);
    return in_flight < atomic_load(&max_in_flight) || in_flight < atomic_load(&min_in_flight);
}

/* Waits in a turn while too much is in flight; returns whether it waited.  The wait is limited, because the work
 * in flight may wait for this very launch (a collective of several devices).  If the limit is reached, more
 * launches are let through from then on. */
static bool wait_for_device(uint32_t turn)
{
    uint32_t seen = atomic_load(&checks), min = atomic_load(&min_in_flight);
    int waits = 0;
    while (waits < FULL_WAITS && !has_room_for_launch() && !atomic_load(&is_blind) &&
           atomic_load(gpushare_turn()) == turn) {
        wait_on(&checks, seen, FULL_WAIT_NS, false);
        seen = atomic_load(&checks);
        waits++;
    }
    if (waits == FULL_WAITS && min < MAX_DEPENDENT)
        atomic_compare_exchange_strong(&min_in_flight, &min, 2 * min);
    return waits > 0;
}

/* A launch that has waited is counted again: checks may have settled its first count meanwhile, and the
 * helper may have begun to suspend the lease (lease_enter). */
static void wait_for_turn(void)
{
    uint32_t held = GPUSHARE_NO_TURNS;
    int64_t since_ns = 0;
    bool has_room = false, waited = false;
    start_thread();
    turns_note(current_context());
    for (;;) {
        const struct gpushare_limit_page *page = lease_page();
        uint32_t turn = page ? atomic_load(&page->turn) : GPUSHARE_NO_TURNS;
        bool is_held = turn & GPUSHARE_HELD;
        if (is_held && turn != held) {
            held = turn;
            since_ns = now_ns();
        } else if (is_held && now_ns() - since_ns > GONE_NS) {
            atomic_store(&abandoned, turn);
        }
        if (!turn || captures_now() || turn == atomic_load(&abandoned) || (!is_held && has_room)) {
            if (!waited)
                break;
            waited = false;
            lease_enter(LEASE_AGAIN);
            continue;
        }
        if (is_held) {
            struct gpushare_slot *slot = lease_slot();
            if (slot)
                atomic_fetch_add(&slot->waiting, 1);
            wait_on(&page->turn, turn, HELD_WAIT_NS, true);
            if (slot)
                atomic_fetch_sub(&slot->waiting, 1);
            waited = true;
        } else {
            waited |= wait_for_device(turn);
            has_room = true; /* if the lease still has its turn */
        }
        lease_wait_to_run();
    }
    atomic_fetch_add(&launches, 1);
    if (atomic_exchange(&sleeps, 0))
        wake(&sleeps);
}

void enter_launch(void)
{
    lease_enter(LEASE_WORK);
    if (atomic_load(gpushare_turn()) != GPUSHARE_NO_TURNS)
        wait_for_turn();
}

/* ---- contexts ---- */

void turns_note(CUcontext context)
{
    const struct gpushare_limit_page *page = lease_is_set() && context ? lease_page() : NULL;
    if (!page || !atomic_load_explicit(&page->ahead_us, memory_order_relaxed))
        return;
    uint32_t count = atomic_load(&context_count);
    for (uint32_t i = 0; i < count; i++)
        if (contexts[i].context == context)
            return;
    start_thread();
    HOLD(&noting);
    count = atomic_load(&context_count);
    for (uint32_t i = 0; i < count; i++)
        if (contexts[i].context == context)
            return;
    if (count == CONTEXTS)
        return;
    atomic_store(&contexts[count].context, context);
    contexts[count].event = NULL;
    atomic_store(&context_count, count + 1);
}

void turns_forget_contexts(void)
{
    if (!atomic_load(&context_count))
        return;
    typedef CUresult destroy_event(CUevent);
    destroy_event *destroy = (destroy_event *)real_of(HOOK_cuEventDestroy_v2);
    CUevent events[CONTEXTS];
    HOLD(&checking);
    forgotten++;
    pthread_mutex_lock(&noting);
    uint32_t count = atomic_exchange(&context_count, 0);
    for (uint32_t i = 0; i < count; i++)
        events[i] = contexts[i].event;
    pthread_mutex_unlock(&noting);
    for (uint32_t i = 0; i < count; i++)
        if (events[i] && destroy)
            destroy(events[i]);
}

void turns_in_child(void)
{
    pthread_mutex_init(&checking, NULL);
    pthread_mutex_init(&noting, NULL);
    pthread_mutex_init(&recording, NULL);
    atomic_store(&context_count, 0);
    atomic_store(&has_thread, false);
    relaxed = false;
    atomic_store(&captures, 0);
    memset(origins, 0, sizeof origins);
    atomic_store(&launches, 0);
    atomic_store(&done, 0);
    atomic_store(&sleeps, 0);
}

/* ---- captures ---- */

/* Replaces a stream in the first entry of `origins` that has it; returns false if none has. */
static bool change_origin(CUstream before, CUstream after)
{
    HOLD(&recording);
    for (int i = 0; i < ORIGINS; i++)
        if (origins[i] == before) {
            origins[i] = after;
            return true;
        }
    return false;
}

static void begin_capture(void)
{
    if (!lease_is_set())
        return;
    HOLD(&recording);
    atomic_store(&capture_ns, now_ns());
    atomic_fetch_add(&captures, 1);
}

static void forget_capture(void)
{
    uint32_t left = atomic_load(&captures);
    while (left && !atomic_compare_exchange_weak(&captures, &left, left - 1))
        ;
}

static CUresult has_begun(CUresult result, CUstream stream)
{
    if (result)
        forget_capture();
    else if (stream && lease_is_set())
        change_origin(NULL, stream);
    return result;
}

/* Errors of captures are 900 to 908.  An invalidated capture is also over; one that began in another stream or
 * thread (UNMATCHED, WRONG_THREAD) continues. */
static CUresult has_ended(CUresult result, CUstream stream)
{
    if (!result || (result >= 900 && result <= 907 && result != 903)) {
        if (stream)
            change_origin(stream, NULL);
        forget_capture();
    }
    return result;
}

#define BEGINS_CAPTURE(name, parameters, arguments) \
    API CUresult name parameters                    \
    {                                               \
        lease_enter(LEASE_CALLS);                   \
        FIND_REAL(name);                            \
        begin_capture();                            \
        return has_begun(real arguments, stream);   \
    }
#define ENDS_CAPTURE(name, parameters, arguments) \
    API CUresult name parameters                  \
    {                                             \
        lease_enter(LEASE_CALLS);                 \
        FIND_REAL(name);                          \
        return has_ended(real arguments, stream); \
    }
/* A capture also ends with its stream. */
#define ENDS_STREAM(name)                                                                            \
    API CUresult name(CUstream stream)                                                               \
    {                                                                                                \
        lease_enter(LEASE_CALLS);                                                                    \
        FIND_REAL(name);                                                                             \
        bool captured = stream && atomic_load(&captures) && change_origin(stream, NULL);             \
        CUresult result = real(stream);                                                              \
        if (captured && result)                                                                      \
            change_origin(NULL, stream);                                                             \
        else if (captured)                                                                           \
            forget_capture();                                                                        \
        return result;                                                                               \
    }
#define FOR_BOTH_STREAMS(macro, name, parameters, arguments) \
    macro(name, parameters, arguments)                       \
    macro(name##_ptsz, parameters, arguments)

FOR_BOTH_STREAMS(BEGINS_CAPTURE, cuStreamBeginCapture, (CUstream stream), (stream))
FOR_BOTH_STREAMS(BEGINS_CAPTURE, cuStreamBeginCapture_v2, (CUstream stream, int mode), (stream, mode))
FOR_BOTH_STREAMS(BEGINS_CAPTURE, cuStreamBeginCaptureToCig, (CUstream stream, void *parameters), (stream, parameters))
FOR_BOTH_STREAMS(BEGINS_CAPTURE, cuStreamBeginCaptureToGraph,
                 (CUstream stream, CUgraph graph, const void *dependencies, const void *edges, size_t count, int mode),
                 (stream, graph, dependencies, edges, count, mode))
FOR_BOTH_STREAMS(BEGINS_CAPTURE, cuStreamBeginRecaptureToGraph,
                 (CUstream stream, int mode, CUgraph graph, void *callback, void *data),
                 (stream, mode, graph, callback, data))
FOR_BOTH_STREAMS(ENDS_CAPTURE, cuStreamEndCapture, (CUstream stream, CUgraph *graph), (stream, graph))
FOR_BOTH_STREAMS(ENDS_CAPTURE, cuStreamEndCaptureToCig, (CUstream stream), (stream))
ENDS_STREAM(cuStreamDestroy)
ENDS_STREAM(cuStreamDestroy_v2)
