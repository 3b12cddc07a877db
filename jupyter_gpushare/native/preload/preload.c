/* The preload library: replaces functions of the GPU driver in the processes of a lease.
 *
 * A caller reaches the driver in three ways, and the library covers all of them: by name at link time (the
 * names exported by this library come first), by dlsym on a handle, and by cuGetProcAddress, which is found
 * by one of the other two.  Each function that hooks.h names is replaced, but only if the driver has it.
 *
 * Rules.
 *   - Entry: always count the call first, then wait while the lease is suspended.
 *   - Allocation: wait until the lease may allocate, take bytes from the account, then call the driver, and
 *     give the bytes back if it refuses.  A record is forgotten *before* the driver frees and put back if
 *     that fails, because the address may belong to another thread as soon as it is free.
 *   - No lock of this library is held across a call of the driver, except by its own thread (preload_turns.c).
 *     There is no exit and no abort.
 *   - In a process without a lease every function passes straight through.
 *   - Memory that the driver takes for itself (contexts, code, printf buffers) is not charged; only the
 *     watchdog sees it, through NVML.
 *
 * Facts (CUDA Driver API reference 13.0): a physical allocation of cuMemCreate lives until it is
 * released and no longer mapped; destroying or resetting a context frees its memory.  The driver counts
 * references to both, so the account does the same.
 *
 * This file has the start-up and decides which function a caller gets.  The functions are in
 * preload_memory.c, preload_arrays.c, preload_pooled.c, preload_virtual.c (physical memory),
 * preload_visible.c, preload_taints.c, preload_sizes.c, preload_nvml.c and preload_turns.c (captures);
 * preload_stubs.S makes those that only count and jump.  They use preload_account.c, which takes and gives
 * bytes, preload_records.c, which knows what this process holds, preload_pools.c (what its pools reserve),
 * preload_devices.c (its devices) and preload_driver.c, which finds the driver's functions.
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
    int since; /* the CUDA version that added it; 0 if cuGetProcAddress does not have it */
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

/* glibc's pthread_atfork calls this; pthread_atfork itself is linked into each library separately. */
extern int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *) __attribute__((weak));
extern void *__dso_handle __attribute__((visibility("hidden")));
#pragma weak pthread_atfork

/* Constructors of other libraries, and threads that they start, may call this library before this one, so
 * each part of it is initialized at its first use. */
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

/* Returns the address that a stub jumps to. */
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

/* Whether `name` is `base` with no other suffixes than those of variants: _v2, _ptsz, _ptds. */
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

/* Returns the spare hook bound to a function; if all are taken, the function itself, uncounted. */
static void *spare_for(void *function, enum hook_kind kind)
{
    static _Atomic bool is_reported;
    void *ours = NULL;
    pthread_mutex_lock(&binding);
    for (int i = 0; i < GPUSHARE_SPARES; i++) {
        void *bound = atomic_load(&gpushare_real[HOOKS + i]);
        if (bound && bound != function)
            continue;
        if (!bound) /* a bound hook may be in use */
            spare_kind[i] = kind;
        atomic_store(&gpushare_real[HOOKS + i], function);
        ours = (void *)(uintptr_t)(gpushare_spares + GPUSHARE_SPARE_BYTES * i);
        break;
    }
    pthread_mutex_unlock(&binding);
    if (!ours && !atomic_exchange(&is_reported, true))
        fprintf(stderr, "gpushare: all %d spare hooks are taken: calls of further driver functions do not wake a "
                        "suspended session\n", GPUSHARE_SPARES);
    return ours ? ours : function;
}

/* Returns a typed function for a driver whose cuGetProcAddress answers other addresses than those of its
 * symbols: the newest variant up to the requested version.  Variants for per-thread default streams come
 * after the others of their version. */
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

/* Returns the function to answer instead of the one from the driver's cuGetProcAddress.  The first search is
 * by address: a match is exactly a function that hooks.h names.  The second is by name: a jumping hook is
 * bound to the answered address, so it fits any variant. */
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
