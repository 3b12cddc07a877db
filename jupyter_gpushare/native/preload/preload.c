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
 *   - No lock of this library is held across a call of the driver.  No exit, no abort.
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
 * preload_visible.c, preload_taints.c, preload_sizes.c and preload_nvml.c; those that only count and
 * jump are made by preload_stubs.S.  Below them: preload_account.c takes and gives bytes,
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
#include "preload_virtual.h"
#include "preload_visible.h"

enum hook_kind { TYPED, WORK, CALL, QUERY, GATE, REFUSE };

#define HOOK(kind, name) CUresult name();
#include "hooks.h"
#undef HOOK

static const struct {
    const char *name;
    enum hook_kind kind;
    void *ours;
} hooks[HOOKS] = {
#define HOOK(kind, name) {#name, kind, (void *)name},
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
    lease_enter(kind == WORK ? LEASE_WORK : kind == QUERY ? LEASE_QUERIES : LEASE_CALLS);
    if ((kind == GATE && !lease_wait_for_turn()) || (kind == REFUSE && lease_is_set()))
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

/* Variants of the functions written out here, for a driver with a cuGetProcAddress that answers
 * other addresses than its symbols have. */
static const struct {
    const char *base;
    int since;
    enum hook plain, per_thread;
} typed[] = {
    {"cuInit", 2000, HOOK_cuInit, HOOK_cuInit},
    {"cuGetProcAddress", 11030, HOOK_cuGetProcAddress, HOOK_cuGetProcAddress},
    {"cuGetProcAddress", 12000, HOOK_cuGetProcAddress_v2, HOOK_cuGetProcAddress_v2},
    {"cuMemAlloc", 3020, HOOK_cuMemAlloc_v2, HOOK_cuMemAlloc_v2},
    {"cuMemAllocPitch", 3020, HOOK_cuMemAllocPitch_v2, HOOK_cuMemAllocPitch_v2},
    {"cuMemAllocManaged", 6000, HOOK_cuMemAllocManaged, HOOK_cuMemAllocManaged},
    {"cuMemFree", 3020, HOOK_cuMemFree_v2, HOOK_cuMemFree_v2},
    {"cuMemAllocAsync", 11020, HOOK_cuMemAllocAsync, HOOK_cuMemAllocAsync_ptsz},
    {"cuMemAllocFromPoolAsync", 11020, HOOK_cuMemAllocFromPoolAsync, HOOK_cuMemAllocFromPoolAsync_ptsz},
    {"cuMemPoolCreate", 11020, HOOK_cuMemPoolCreate, HOOK_cuMemPoolCreate},
    {"cuMemPoolDestroy", 11020, HOOK_cuMemPoolDestroy, HOOK_cuMemPoolDestroy},
    {"cuMemPoolTrimTo", 11020, HOOK_cuMemPoolTrimTo, HOOK_cuMemPoolTrimTo},
    {"cuMemPoolSetAttribute", 11020, HOOK_cuMemPoolSetAttribute, HOOK_cuMemPoolSetAttribute},
    {"cuMemGetDefaultMemPool", 13000, HOOK_cuMemGetDefaultMemPool, HOOK_cuMemGetDefaultMemPool},
    {"cuMemGetMemPool", 13000, HOOK_cuMemGetMemPool, HOOK_cuMemGetMemPool},
    {"cuMemSetMemPool", 13000, HOOK_cuMemSetMemPool, HOOK_cuMemSetMemPool},
    {"cuDeviceGraphMemTrim", 11040, HOOK_cuDeviceGraphMemTrim, HOOK_cuDeviceGraphMemTrim},
    {"cuGraphAddMemAllocNode", 11040, HOOK_cuGraphAddMemAllocNode, HOOK_cuGraphAddMemAllocNode},
    {"cuGraphAddNode", 12020, HOOK_cuGraphAddNode, HOOK_cuGraphAddNode},
    {"cuGraphAddNode", 12030, HOOK_cuGraphAddNode_v2, HOOK_cuGraphAddNode_v2},
    {"cuGraphAddNode", 13040, HOOK_cuGraphAddNode_v3, HOOK_cuGraphAddNode_v3},
    {"cuGraphLaunch", 10000, HOOK_cuGraphLaunch, HOOK_cuGraphLaunch_ptsz},
    {"cuGraphUpload", 11010, HOOK_cuGraphUpload, HOOK_cuGraphUpload_ptsz},
    {"cuStreamSynchronize", 2000, HOOK_cuStreamSynchronize, HOOK_cuStreamSynchronize_ptsz},
    {"cuStreamSynchronize", 7000, HOOK_cuStreamSynchronize, HOOK_cuStreamSynchronize_ptsz},
    {"cuCtxSynchronize", 2000, HOOK_cuCtxSynchronize, HOOK_cuCtxSynchronize},
    {"cuCtxSynchronize", 13000, HOOK_cuCtxSynchronize_v2, HOOK_cuCtxSynchronize_v2},
    {"cuEventSynchronize", 2000, HOOK_cuEventSynchronize, HOOK_cuEventSynchronize},
    {"cuCtxCreate", 3020, HOOK_cuCtxCreate_v2, HOOK_cuCtxCreate_v2},
    {"cuCtxCreate", 11040, HOOK_cuCtxCreate_v3, HOOK_cuCtxCreate_v3},
    {"cuCtxCreate", 12050, HOOK_cuCtxCreate_v4, HOOK_cuCtxCreate_v4},
    {"cuMemFreeAsync", 11020, HOOK_cuMemFreeAsync, HOOK_cuMemFreeAsync_ptsz},
    {"cuMemCreate", 10020, HOOK_cuMemCreate, HOOK_cuMemCreate},
    {"cuMemRelease", 10020, HOOK_cuMemRelease, HOOK_cuMemRelease},
    {"cuMemMap", 10020, HOOK_cuMemMap, HOOK_cuMemMap},
    {"cuMemUnmap", 10020, HOOK_cuMemUnmap, HOOK_cuMemUnmap},
    {"cuMemRetainAllocationHandle", 11000, HOOK_cuMemRetainAllocationHandle, HOOK_cuMemRetainAllocationHandle},
    {"cuArrayCreate", 3020, HOOK_cuArrayCreate_v2, HOOK_cuArrayCreate_v2},
    {"cuArray3DCreate", 3020, HOOK_cuArray3DCreate_v2, HOOK_cuArray3DCreate_v2},
    {"cuMipmappedArrayCreate", 5000, HOOK_cuMipmappedArrayCreate, HOOK_cuMipmappedArrayCreate},
    {"cuArrayDestroy", 2000, HOOK_cuArrayDestroy, HOOK_cuArrayDestroy},
    {"cuMipmappedArrayDestroy", 5000, HOOK_cuMipmappedArrayDestroy, HOOK_cuMipmappedArrayDestroy},
    {"cuMemGetInfo", 3020, HOOK_cuMemGetInfo_v2, HOOK_cuMemGetInfo_v2},
    {"cuDeviceTotalMem", 3020, HOOK_cuDeviceTotalMem_v2, HOOK_cuDeviceTotalMem_v2},
    {"cuDevicePrimaryCtxRetain", 7000, HOOK_cuDevicePrimaryCtxRetain, HOOK_cuDevicePrimaryCtxRetain},
    {"cuDevicePrimaryCtxRelease", 7000, HOOK_cuDevicePrimaryCtxRelease, HOOK_cuDevicePrimaryCtxRelease},
    {"cuDevicePrimaryCtxRelease", 11000, HOOK_cuDevicePrimaryCtxRelease_v2, HOOK_cuDevicePrimaryCtxRelease_v2},
    {"cuDevicePrimaryCtxReset", 7000, HOOK_cuDevicePrimaryCtxReset, HOOK_cuDevicePrimaryCtxReset},
    {"cuDevicePrimaryCtxReset", 11000, HOOK_cuDevicePrimaryCtxReset_v2, HOOK_cuDevicePrimaryCtxReset_v2},
    {"cuCtxDestroy", 2000, HOOK_cuCtxDestroy, HOOK_cuCtxDestroy},
    {"cuCtxDestroy", 4000, HOOK_cuCtxDestroy_v2, HOOK_cuCtxDestroy_v2},
    {"cuIpcGetMemHandle", 4010, HOOK_cuIpcGetMemHandle, HOOK_cuIpcGetMemHandle},
    {"cuIpcOpenMemHandle", 4010, HOOK_cuIpcOpenMemHandle, HOOK_cuIpcOpenMemHandle},
    {"cuIpcOpenMemHandle", 11000, HOOK_cuIpcOpenMemHandle_v2, HOOK_cuIpcOpenMemHandle_v2},
    {"cuIpcGetEventHandle", 4010, HOOK_cuIpcGetEventHandle, HOOK_cuIpcGetEventHandle},
    {"cuIpcOpenEventHandle", 4010, HOOK_cuIpcOpenEventHandle, HOOK_cuIpcOpenEventHandle},
    {"cuMemExportToShareableHandle", 10020, HOOK_cuMemExportToShareableHandle, HOOK_cuMemExportToShareableHandle},
    {"cuMemImportFromShareableHandle", 10020, HOOK_cuMemImportFromShareableHandle, HOOK_cuMemImportFromShareableHandle},
    {"cuMemPoolExportToShareableHandle", 11020, HOOK_cuMemPoolExportToShareableHandle,
     HOOK_cuMemPoolExportToShareableHandle},
    {"cuMemPoolImportFromShareableHandle", 11020, HOOK_cuMemPoolImportFromShareableHandle,
     HOOK_cuMemPoolImportFromShareableHandle},
    {"cuCtxEnablePeerAccess", 4000, HOOK_cuCtxEnablePeerAccess, HOOK_cuCtxEnablePeerAccess},
    {"cuMemSetAccess", 10020, HOOK_cuMemSetAccess, HOOK_cuMemSetAccess},
    {"cuMemPoolSetAccess", 11020, HOOK_cuMemPoolSetAccess, HOOK_cuMemPoolSetAccess},
    {"cuMulticastCreate", 12010, HOOK_cuMulticastCreate, HOOK_cuMulticastCreate},
    {"cuImportExternalMemory", 10000, HOOK_cuImportExternalMemory, HOOK_cuImportExternalMemory},
    {"cuLogicalEndpointExport", 13030, HOOK_cuLogicalEndpointExport, HOOK_cuLogicalEndpointExport},
    {"cuLogicalEndpointImport", 13030, HOOK_cuLogicalEndpointImport, HOOK_cuLogicalEndpointImport},
    {"cuMemGetHandleForAddressRange", 11070, HOOK_cuMemGetHandleForAddressRange, HOOK_cuMemGetHandleForAddressRange},
    {"cuLibraryGetManaged", 12000, HOOK_cuLibraryGetManaged, HOOK_cuLibraryGetManaged},
    {"cuModuleGetGlobal", 3020, HOOK_cuModuleGetGlobal_v2, HOOK_cuModuleGetGlobal_v2},
    {"cuImportExternalSemaphore", 10000, HOOK_cuImportExternalSemaphore, HOOK_cuImportExternalSemaphore},
    {"cuGraphicsGLRegisterBuffer", 3000, HOOK_cuGraphicsGLRegisterBuffer, HOOK_cuGraphicsGLRegisterBuffer},
    {"cuGraphicsGLRegisterImage", 3000, HOOK_cuGraphicsGLRegisterImage, HOOK_cuGraphicsGLRegisterImage},
    {"cuGLRegisterBufferObject", 2000, HOOK_cuGLRegisterBufferObject, HOOK_cuGLRegisterBufferObject},
    {"cuGLCtxCreate", 2000, HOOK_cuGLCtxCreate, HOOK_cuGLCtxCreate},
    {"cuGLCtxCreate", 3020, HOOK_cuGLCtxCreate_v2, HOOK_cuGLCtxCreate_v2},
    {"cuGraphicsEGLRegisterImage", 7000, HOOK_cuGraphicsEGLRegisterImage, HOOK_cuGraphicsEGLRegisterImage},
    {"cuEGLStreamConsumerConnect", 7000, HOOK_cuEGLStreamConsumerConnect, HOOK_cuEGLStreamConsumerConnect},
    {"cuEGLStreamConsumerConnectWithFlags", 8000, HOOK_cuEGLStreamConsumerConnectWithFlags,
     HOOK_cuEGLStreamConsumerConnectWithFlags},
    {"cuEGLStreamProducerConnect", 7000, HOOK_cuEGLStreamProducerConnect, HOOK_cuEGLStreamProducerConnect},
    {"cuEventCreateFromEGLSync", 9000, HOOK_cuEventCreateFromEGLSync, HOOK_cuEventCreateFromEGLSync},
    {"cuGraphicsVDPAURegisterVideoSurface", 3010, HOOK_cuGraphicsVDPAURegisterVideoSurface,
     HOOK_cuGraphicsVDPAURegisterVideoSurface},
    {"cuGraphicsVDPAURegisterOutputSurface", 3010, HOOK_cuGraphicsVDPAURegisterOutputSurface,
     HOOK_cuGraphicsVDPAURegisterOutputSurface},
    {"cuVDPAUCtxCreate", 3010, HOOK_cuVDPAUCtxCreate, HOOK_cuVDPAUCtxCreate},
    {"cuVDPAUCtxCreate", 3020, HOOK_cuVDPAUCtxCreate_v2, HOOK_cuVDPAUCtxCreate_v2},
    {"cuGraphicsMapResources", 3000, HOOK_cuGraphicsMapResources, HOOK_cuGraphicsMapResources_ptsz},
    {"cuGraphicsMapResources", 7000, HOOK_cuGraphicsMapResources, HOOK_cuGraphicsMapResources_ptsz},
};

static void *typed_for(const char *base, int version, bool per_thread, void *function)
{
    int best = -1;
    for (int i = 0; i < (int)(sizeof typed / sizeof *typed); i++)
        if (!strcmp(typed[i].base, base) && typed[i].since <= version &&
            real_of(per_thread ? typed[i].per_thread : typed[i].plain) &&
            (best < 0 || typed[i].since > typed[best].since))
            best = i;
    return best < 0 ? spare_for(function, CALL) : hooks[per_thread ? typed[best].per_thread : typed[best].plain].ours;
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
