/* The preload library: replaces functions of the GPU driver in the processes of a lease.
 *
 * A caller reaches the driver in three ways, all covered: by name at link time (the names
 * exported here come first), by dlsym on a handle, and by cuGetProcAddress, found by one of the
 * other two.  Each function that hooks.h names is answered with the one here, and only where
 * the driver itself has it.
 *
 * Rules.
 *   - Entry: count the call, before anything else, always; then wait while the lease is suspended.
 *   - Allocation: wait for the lease's turn, take from the account, then call the driver, and
 *     give back when it refuses.  A record is forgotten *before* the driver frees and put back
 *     when that fails, for the address may belong to another thread the moment it is free.
 *   - No lock of this library is held across a call of the driver, but by its own thread (preload_turns.c).
 *     No exit, no abort.
 *   - Without GPUSHARE_LEASE every function passes straight through.
 *   - Not charged here, only seen by the watchdog through NVML: what the driver takes for itself
 *     (contexts, code, printf buffers).
 *
 * Facts (CUDA Driver API reference 13.0): a physical allocation of cuMemCreate lives until it is
 * released and no longer mapped; destroying or resetting a context frees its memory; both exist
 * as the driver counts them, so the account does the same.
 *
 * Here: start-up, and which function a caller gets.  The functions themselves are in
 * preload_memory.c, preload_arrays.c, preload_pooled.c, preload_virtual.c (physical memory),
 * preload_visible.c, preload_taints.c, preload_sizes.c, preload_nvml.c and preload_turns.c (captures);
 * those that only count and jump are made by preload_stubs.S.  Below them: preload_account.c takes and gives bytes,
 * preload_records.c knows what this process holds, preload_pools.c what its pools reserve,
 * preload_devices.c its devices, and preload_driver.c finds the driver's functions.
 */
#define _GNU_SOURCE
#include "preload_driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

#include "lease_client.h"
#include "preload_pools.h"
#include "preload_records.h"
#include "preload_turns.h"
#include "preload_virtual.h"
#include "preload_visible.h"

enum hook_kind { TYPED, WORK, HOST, CALL, QUERY, GATE, REFUSE };

#define HOOK(kind, name, ...) CUresult name();
#include "hooks.h"
#undef HOOK

static const struct {
    const char *name;
    enum hook_kind kind;
    void *ours;
    int since; /* the CUDA version that brought it; 0: not asked for by that */
} hooks[HOOKS] = {
#define HOOK(kind, name, ...) {#name, kind, (void *)name, __VA_ARGS__ + 0},
#include "hooks.h"
#undef HOOK
};

extern const char gpushare_spares[];

static enum hook_kind spare_kind[GPUSHARE_SPARES];
static pthread_mutex_t binding = PTHREAD_MUTEX_INITIALIZER; /* guards the spare hooks */

/* ---- start-up ---- */

static void in_child(void)
{
    pthread_mutex_init(&binding, NULL);
    records_in_child();
    mappings_in_child();
    pools_in_child();
    turns_in_child();
    lease_in_child();
    visible_in_child();
}

/* What pthread_atfork of glibc calls: pthread_atfork itself is in each library by itself there. */
extern int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *) __attribute__((weak));
extern void *__dso_handle __attribute__((visibility("hidden")));
#pragma weak pthread_atfork

/* Other libraries' constructors, and threads that they start, may call all of this library before: each
 * part of it is found by the first that needs it. */
__attribute__((constructor)) static void load(void)
{
    if (__register_atfork)
        __register_atfork(NULL, NULL, in_child, __dso_handle);
    else if (pthread_atfork)
        pthread_atfork(NULL, NULL, in_child);
    find_dlsym();
    lease_load();
    visible_load();
}

/* ---- the functions behind the hooks ---- */

static CUresult function_is_missing(void)
{
    return CUDA_ERROR_NOT_FOUND;
}

static CUresult allocation_is_denied(void)
{
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Where a stub jumps to. */
void *gpushare_enter(unsigned index);
void *gpushare_enter(unsigned index)
{
    enum hook_kind kind = index < HOOKS ? hooks[index].kind : spare_kind[index - HOOKS];
    if (kind == WORK)
        enter_launch();
    else
        lease_enter(kind == HOST ? LEASE_WORK : kind == QUERY ? LEASE_QUERIES : LEASE_CALLS);
    if ((kind == GATE && !lease_wait_to_allocate()) || (kind == REFUSE && lease_is_set()))
        return (void *)allocation_is_denied;
    void *function = real_of(index);
    return function ? function : (void *)function_is_missing;
}

/* ---- routing ---- */

static int hook_named(const char *name)
{
    for (int i = 0; i < HOOKS; i++)
        if (!strcmp(hooks[i].name, name))
            return i;
    return -1;
}

void *gpushare_dlsym(void *handle, const char *name);
void *gpushare_dlsym(void *handle, const char *name)
{
    dlsym_function *real_dlsym = find_dlsym();
    if (handle == RTLD_NEXT || handle == RTLD_DEFAULT || !name || (strncmp(name, "cu", 2) && strncmp(name, "nvml", 4)) ||
        !lease_is_set())
        return NULL;
    int index = hook_named(name);
    if (index < 0)
        return NULL;
    void *found = real_dlsym(handle, name);
    return found && found == real_of((unsigned)index) ? hooks[index].ours : NULL;
}

/* Whether `name` is `base` with nothing but the suffixes of variants: _v2, _ptsz, _ptds. */
static bool is_variant(const char *name, const char *base)
{
    size_t length = strlen(base);
    if (strncmp(name, base, length))
        return false;
    name += length;
    if (!strncmp(name, "_v", 2) && name[2] >= '0' && name[2] <= '9')
        name += 3;
    return !*name || !strcmp(name, "_ptsz") || !strcmp(name, "_ptds");
}

/* The spare hook bound to a function; without a spare left the function itself, uncounted. */
static void *spare_for(void *function, enum hook_kind kind)
{
    static _Atomic bool told;
    void *ours = NULL;
    pthread_mutex_lock(&binding);
    for (int i = 0; i < GPUSHARE_SPARES; i++) {
        void *bound = atomic_load(&gpushare_real[HOOKS + i]);
        if (bound && bound != function)
            continue;
        if (!bound) /* a bound one may be in use */
            spare_kind[i] = kind;
        atomic_store(&gpushare_real[HOOKS + i], function);
        ours = (void *)(uintptr_t)(gpushare_spares + GPUSHARE_SPARE_BYTES * i);
        break;
    }
    pthread_mutex_unlock(&binding);
    if (!ours && !atomic_exchange(&told, true))
        fprintf(stderr, "gpushare: all %d spare hooks are taken: calls of further driver functions do not wake a "
                        "suspended session\n", GPUSHARE_SPARES);
    return ours ? ours : function;
}

/* A function written out here, for a driver with a cuGetProcAddress that answers other addresses than its
 * symbols have: the newest variant that is not newer than the version asked for.  Variants for per-thread
 * default streams come behind the others of their version. */
static void *typed_for(const char *base, int version, bool per_thread, void *function)
{
    int newest = 1;
    void *ours = NULL;
    for (int i = 0; i < HOOKS; i++) {
        bool is_for_all = per_thread || !strstr(hooks[i].name, "_ptsz");
        if (is_for_all && hooks[i].since >= newest && hooks[i].since <= version && is_variant(hooks[i].name, base) &&
            real_of((unsigned)i)) {
            newest = hooks[i].since;
            ours = hooks[i].ours;
        }
    }
    return ours ? ours : spare_for(function, CALL);
}

/* The function to answer instead of the one of the driver's cuGetProcAddress.  First by address:
 * then it is exactly a function that hooks.h names.  Else by name; a jumping hook is bound to
 * the very address answered, so it fits whatever variant that is. */
static void *route(const char *base, int version, uint64_t flags, void *function)
{
    int same_base = -1;
    if (!lease_is_set())
        return function;
    find_all();
    for (int i = 0; i < HOOKS; i++)
        if (atomic_load_explicit(&gpushare_real[i], memory_order_relaxed) == function)
            return hooks[i].ours;
    for (int i = 0; i < HOOKS; i++)
        if (is_variant(hooks[i].name, base) && (same_base < 0 || hooks[i].kind == TYPED))
            same_base = i;
    if (same_base < 0)
        return function;
    if (hooks[same_base].kind == TYPED)
        return typed_for(base, version, flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, function);
    return spare_for(function, hooks[same_base].kind);
}

API CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status)
{
    CUresult (*real)(const char *, void **, int, uint64_t, int *) = real_of(HOOK_cuGetProcAddress_v2);
    if (!real)
        return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = real(symbol, function, version, flags, status);
    if (!result && symbol && function && *function)
        *function = route(symbol, version, flags, *function);
    return result;
}

API CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags)
{
    CUresult (*real)(const char *, void **, int, uint64_t) = real_of(HOOK_cuGetProcAddress);
    if (!real)
        return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = real(symbol, function, version, flags);
    if (!result && symbol && function && *function)
        *function = route(symbol, version, flags, *function);
    return result;
}
