/* The preload library: what the processes of a lease meet in front of the GPU driver.
 *
 * A caller reaches the driver in three ways, all covered: by name at link time (the names
 * exported here come first), by dlsym on a handle, and by cuGetProcAddress, found by one of the
 * other two.  Each function that hooks.h names is answered with the one here, and only where
 * the driver itself has it.
 *
 * Rules.
 *   - Entry: count the call, before anything else, always.
 *   - Allocation: wait for the lease's turn, take from the account, then call the driver, and
 *     give back when it refuses.  A record is forgotten *before* the driver frees and put back
 *     when that fails, for the address may be somebody else's the moment it is free.
 *   - No lock of this library is held across a call of the driver.  No exit, no abort.
 *   - Without GPUSHARE_LEASE every function passes straight through.
 *   - Not charged here, only seen by the watchdog through NVML: what the driver takes for itself
 *     (contexts, code, printf buffers), memory nodes of graphs, and pools that keep freed memory.
 *
 * Facts (CUDA Driver API reference 13.0): a physical allocation of cuMemCreate lives until it is
 * released and no longer mapped; destroying or resetting a context frees its memory; both exist
 * as the driver counts them, so the account does the same.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_types.h"
#include "lease_client.h"
#include "preload_stubs.h"

#define API __attribute__((visibility("default")))

enum hook_kind { TYPED, COUNT, QUERY, GATE, REFUSE };

enum hook {
#define HOOK(kind, name) HOOK_##name,
#include "hooks.h"
#undef HOOK
    HOOKS
};

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

typedef void *dlsym_function(void *, const char *);

dlsym_function *gpushare_real_dlsym;
void *_Atomic gpushare_real[HOOKS + GPUSHARE_SPARES];
extern const char gpushare_spares[];

static enum hook_kind spare_kind[GPUSHARE_SPARES];
static pthread_mutex_t binding = PTHREAD_MUTEX_INITIALIZER; /* guards the spare hooks */

/* ---- start-up ---- */

static void records_in_child(void);

static void in_child(void)
{
    pthread_mutex_init(&binding, NULL);
    records_in_child();
    lease_in_child();
}

/* Also called from dlsym, which other libraries' constructors may use before ours. */
__attribute__((constructor)) static void load(void)
{
    static _Atomic bool done;
    if (atomic_exchange(&done, true))
        return;
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
    for (size_t i = 0; !gpushare_real_dlsym && i < sizeof versions / sizeof *versions; i++)
        gpushare_real_dlsym = (dlsym_function *)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    lease_load();
    pthread_atfork(NULL, NULL, in_child);
}

/* ---- the functions behind the hooks ---- */

static bool is_nvml(const char *name)
{
    return name[0] == 'n';
}

static void *driver_function(const char *name)
{
    void *library = dlopen(is_nvml(name) ? "libnvidia-ml.so.1" : "libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    void *function = library && gpushare_real_dlsym ? gpushare_real_dlsym(library, name) : NULL;
    if (library)
        dlclose(library); /* NOLOAD took a reference; whoever loaded it keeps it */
    return function;
}

static void *real_of(unsigned index)
{
    void *function = atomic_load_explicit(&gpushare_real[index], memory_order_acquire);
    if (!function && index < HOOKS && (function = driver_function(hooks[index].name)))
        atomic_store(&gpushare_real[index], function);
    return function;
}

/* All at once, when the driver is there for sure: a comparison by address needs every one. */
static void find_all(void)
{
    static _Atomic bool done;
    if (atomic_load_explicit(&done, memory_order_acquire))
        return;
    for (unsigned i = 0; i < HOOKS; i++)
        if (!is_nvml(hooks[i].name))
            real_of(i);
    atomic_store(&done, true);
}

#define REAL(name) ((__typeof__(&name))real_of(HOOK_##name))
/* In a wrapper: `real` is the driver's function of the same name. */
#define FIND_REAL(name)                    \
    __typeof__(&name) real = REAL(name);   \
    if (!real)                             \
    return CUDA_ERROR_NOT_INITIALIZED

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
    if (kind == QUERY)
        lease_count_query();
    else
        lease_count_call();
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
    if (!gpushare_real_dlsym)
        load();
    if (!lease_is_set() || handle == RTLD_NEXT || handle == RTLD_DEFAULT || !name ||
        (strncmp(name, "cu", 2) && strncmp(name, "nvml", 4)))
        return NULL;
    int index = hook_named(name);
    if (index < 0)
        return NULL;
    void *found = gpushare_real_dlsym(handle, name);
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

static void *spare_for(void *function, enum hook_kind kind)
{
    void *ours = function; /* without a spare left it goes uncounted rather than wrong */
    pthread_mutex_lock(&binding);
    for (int i = 0; i < GPUSHARE_SPARES; i++) {
        void *bound = atomic_load(&gpushare_real[HOOKS + i]);
        if (bound && bound != function)
            continue;
        spare_kind[i] = kind;
        atomic_store(&gpushare_real[HOOKS + i], function);
        ours = (void *)(uintptr_t)(gpushare_spares + GPUSHARE_SPARE_BYTES * i);
        break;
    }
    pthread_mutex_unlock(&binding);
    return ours;
}

/* Variants of the functions written out here, for a driver whose cuGetProcAddress answers other
 * addresses than its symbols have. */
static const struct {
    const char *base;
    int since;
    enum hook plain, per_thread;
} typed[] = {
    {"cuGetProcAddress", 11030, HOOK_cuGetProcAddress, HOOK_cuGetProcAddress},
    {"cuGetProcAddress", 12000, HOOK_cuGetProcAddress_v2, HOOK_cuGetProcAddress_v2},
    {"cuMemAlloc", 3020, HOOK_cuMemAlloc_v2, HOOK_cuMemAlloc_v2},
    {"cuMemAllocPitch", 3020, HOOK_cuMemAllocPitch_v2, HOOK_cuMemAllocPitch_v2},
    {"cuMemAllocManaged", 6000, HOOK_cuMemAllocManaged, HOOK_cuMemAllocManaged},
    {"cuMemFree", 3020, HOOK_cuMemFree_v2, HOOK_cuMemFree_v2},
    {"cuMemAllocAsync", 11020, HOOK_cuMemAllocAsync, HOOK_cuMemAllocAsync_ptsz},
    {"cuMemAllocFromPoolAsync", 11020, HOOK_cuMemAllocFromPoolAsync, HOOK_cuMemAllocFromPoolAsync_ptsz},
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
};

static void *typed_for(const char *base, int version, bool per_thread, void *function)
{
    int best = -1;
    for (int i = 0; i < (int)(sizeof typed / sizeof *typed); i++)
        if (!strcmp(typed[i].base, base) && typed[i].since <= version && (best < 0 || typed[i].since > typed[best].since))
            best = i;
    if (best < 0)
        return function;
    enum hook hook = per_thread ? typed[best].per_thread : typed[best].plain;
    return real_of(hook) ? hooks[hook].ours : function;
}

/* What to hand out instead of what the driver's cuGetProcAddress answered.  First by address:
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

/* ---- records of what this process holds ---- */

struct record {
    uint64_t key; /* address, or array handle; 0: free */
    uint64_t bytes;
    CUcontext context; /* whose end frees it */
    int device;        /* in the limit page */
};

struct physical {
    struct physical *next;
    CUmemGenericAllocationHandle handle;
    uint64_t bytes;
    unsigned holders, maps;
    int device;
};

struct mapping {
    uint64_t address, bytes;
    struct physical *physical;
};

static pthread_mutex_t records_lock = PTHREAD_MUTEX_INITIALIZER;
static struct record *records; /* open addressing, a power of two */
static size_t record_room, record_count;
static struct physical *physicals;
static struct mapping *mappings;
static size_t mapping_room, mapping_count;
static CUcontext primary_context[GPUSHARE_DEVICES]; /* by ordinal */

/* The parent's memory is not the child's: forget it (the tables themselves are shared pages). */
static void records_in_child(void)
{
    pthread_mutex_init(&records_lock, NULL);
    records = NULL;
    physicals = NULL;
    mappings = NULL;
    record_room = record_count = mapping_room = mapping_count = 0;
}

static struct record *place_of(uint64_t key)
{
    size_t at = (size_t)(key * 0x9e3779b97f4a7c15u >> 20) & (record_room - 1);
    while (records[at].key && records[at].key != key)
        at = (at + 1) & (record_room - 1);
    return &records[at];
}

static bool make_room(void)
{
    if ((record_count + 1) * 2 <= record_room)
        return true;
    struct record *old = records, *larger = calloc(record_room ? record_room * 2 : 1024, sizeof *larger);
    size_t old_room = record_room;
    if (!larger)
        return false;
    records = larger;
    record_room = old_room ? old_room * 2 : 1024;
    for (size_t i = 0; i < old_room; i++)
        if (old[i].key)
            *place_of(old[i].key) = old[i];
    free(old);
    return true;
}

/* Without memory for the record the bytes stay charged until the process ends. */
static void remember(struct record record)
{
    pthread_mutex_lock(&records_lock);
    if (record.key && make_room()) {
        struct record *place = place_of(record.key);
        record_count += !place->key;
        *place = record;
    }
    pthread_mutex_unlock(&records_lock);
}

static void erase(struct record *place)
{
    place->key = 0;
    record_count--;
    for (size_t i = ((size_t)(place - records) + 1) & (record_room - 1); records[i].key; i = (i + 1) & (record_room - 1)) {
        struct record moved = records[i];
        records[i].key = 0;
        *place_of(moved.key) = moved;
    }
}

static struct record forget(uint64_t key)
{
    struct record record = {0};
    pthread_mutex_lock(&records_lock);
    struct record *place = record_room && key ? place_of(key) : NULL;
    if (place && place->key) {
        record = *place;
        erase(place);
    }
    pthread_mutex_unlock(&records_lock);
    return record;
}

static void forget_context(CUcontext context)
{
    for (;;) {
        struct record record = {0};
        pthread_mutex_lock(&records_lock);
        for (size_t i = 0; i < record_room && !record.key; i++)
            if (records[i].key && records[i].context == context) {
                record = records[i];
                erase(&records[i]);
            }
        pthread_mutex_unlock(&records_lock);
        if (!record.key)
            return;
        lease_give(record.device, record.bytes);
    }
}

/* ---- taking and giving ---- */

typedef CUresult get_uuid(CUuuid *, CUdevice);
typedef CUresult get_ordinal(CUdevice *);
typedef CUresult get_context(CUcontext *);

/* A function without a hook of its own, looked up once. */
static void *plain_function(void *_Atomic *kept, const char *name)
{
    void *function = atomic_load_explicit(kept, memory_order_acquire);
    if (!function && (function = driver_function(name)))
        atomic_store(kept, function);
    return function;
}

/* Index in the limit page of an ordinal of this process, or -1.  Found ones are kept: which
 * devices a process sees is settled at cuInit. */
static int page_device(CUdevice ordinal)
{
    static void *_Atomic newer, *_Atomic older;
    static _Atomic int known[GPUSHARE_DEVICES]; /* index + 1 */
    CUuuid uuid;
    bool keep = ordinal >= 0 && ordinal < GPUSHARE_DEVICES;
    int index = keep ? atomic_load_explicit(&known[ordinal], memory_order_relaxed) - 1 : -1;
    if (index >= 0)
        return index;
    get_uuid *ask = (get_uuid *)plain_function(&newer, "cuDeviceGetUuid_v2");
    if (!ask)
        ask = (get_uuid *)plain_function(&older, "cuDeviceGetUuid");
    index = ask && !ask(&uuid, ordinal) ? lease_device(uuid.bytes) : -1;
    if (keep && index >= 0)
        atomic_store(&known[ordinal], index + 1);
    return index;
}

static CUdevice current_ordinal(void)
{
    static void *_Atomic kept;
    CUdevice ordinal = -1;
    get_ordinal *ask = (get_ordinal *)plain_function(&kept, "cuCtxGetDevice");
    return ask && !ask(&ordinal) ? ordinal : -1;
}

static CUcontext current_context(void)
{
    static void *_Atomic kept;
    CUcontext context = NULL;
    get_context *ask = (get_context *)plain_function(&kept, "cuCtxGetCurrent");
    return ask && !ask(&context) ? context : NULL;
}

/* An allocation under way: from `begin` to `end`. */
struct taken {
    uint64_t bytes;
    int device;
    bool granted;
};

/* `ordinal` -1: the current context's device, and without one the driver's own answer. */
static struct taken begin(CUdevice ordinal, uint64_t bytes)
{
    struct taken taken = {0, -1, true};
    if (!lease_is_set())
        return taken;
    if (!lease_wait_for_turn()) {
        taken.granted = false;
        return taken;
    }
    if (ordinal < 0 && (ordinal = current_ordinal()) < 0)
        return taken;
    taken.device = page_device(ordinal);
    taken.bytes = bytes;
    taken.granted = lease_take(taken.device, bytes);
    return taken;
}

static CUresult end(struct taken taken, CUresult result, uint64_t key, CUcontext context)
{
    if (taken.device < 0)
        return result;
    if (result)
        lease_give(taken.device, taken.bytes);
    else
        remember((struct record){key, taken.bytes, context, taken.device});
    return result;
}

/* The bodies of the wrappers.  `call` names the driver's function `real`. */
#define ALLOCATE(name, ordinal, size, key, call)             \
    lease_count_call();                                      \
    FIND_REAL(name);                                         \
    struct taken taken = begin(ordinal, size);               \
    if (!taken.granted)                                      \
        return CUDA_ERROR_OUT_OF_MEMORY;                     \
    CUresult result = call;                                  \
    return end(taken, result, result ? 0 : (uint64_t)(key), current_context())

#define RELEASE(name, held, call)                            \
    lease_count_call();                                      \
    FIND_REAL(name);                                         \
    struct record record = forget((uint64_t)(held));         \
    CUresult result = call;                                  \
    if (record.key && result)                                \
        remember(record);                                    \
    else if (record.key)                                     \
        lease_give(record.device, record.bytes);             \
    return result

/* ---- memory ---- */

API CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes)
{
    ALLOCATE(cuMemAlloc_v2, -1, bytes, *out, real(out, bytes));
}

/* The pitch is the driver's choice, 512 bytes or less up to now; charged before it is known. */
API CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element)
{
    size_t row = width <= SIZE_MAX - 511 ? (width + 511) / 512 * 512 : width;
    size_t bytes = height && row > SIZE_MAX / height ? SIZE_MAX : row * height;
    ALLOCATE(cuMemAllocPitch_v2, -1, bytes, *out, real(out, pitch, width, height, element));
}

API CUresult cuMemFree_v2(CUdeviceptr address)
{
    RELEASE(cuMemFree_v2, address, real(address));
}

#define STREAM_ORDERED(suffix)                                                                                    \
    API CUresult cuMemAllocAsync##suffix(CUdeviceptr *out, size_t bytes, CUstream stream)                         \
    {                                                                                                             \
        ALLOCATE(cuMemAllocAsync##suffix, -1, bytes, *out, real(out, bytes, stream));                             \
    }                                                                                                             \
    API CUresult cuMemAllocFromPoolAsync##suffix(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream) \
    {                                                                                                             \
        ALLOCATE(cuMemAllocFromPoolAsync##suffix, -1, bytes, *out, real(out, bytes, pool, stream));               \
    }                                                                                                             \
    API CUresult cuMemFreeAsync##suffix(CUdeviceptr address, CUstream stream)                                     \
    {                                                                                                             \
        RELEASE(cuMemFreeAsync##suffix, address, real(address, stream));                                          \
    }
STREAM_ORDERED()
STREAM_ORDERED(_ptsz)

static uint64_t array_bytes(size_t width, size_t height, size_t depth, int format, unsigned channels)
{
    uint64_t element = format == 1 || format == 8 ? 1 : format == 3 || format == 10 || format == 32 ? 4 : 2;
    uint64_t bytes = element * (channels ? channels : 1);
    size_t sides[] = {width, height ? height : 1, depth ? depth : 1};
    for (int i = 0; i < 3; i++)
        if (__builtin_mul_overflow(bytes, sides[i], &bytes))
            return UINT64_MAX;
    return bytes;
}

API CUresult cuArrayCreate_v2(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *shape)
{
    uint64_t bytes = shape ? array_bytes(shape->Width, shape->Height, 0, shape->Format, shape->NumChannels) : 0;
    ALLOCATE(cuArrayCreate_v2, -1, bytes, (uintptr_t)*out, real(out, shape));
}

API CUresult cuArray3DCreate_v2(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
    uint64_t bytes =
        shape ? array_bytes(shape->Width, shape->Height, shape->Depth, shape->Format, shape->NumChannels) : 0;
    ALLOCATE(cuArray3DCreate_v2, -1, bytes, (uintptr_t)*out, real(out, shape));
}

/* All further levels together are less than half of the first (a quarter each of the one before). */
API CUresult cuMipmappedArrayCreate(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels)
{
    uint64_t bytes =
        shape ? array_bytes(shape->Width, shape->Height, shape->Depth, shape->Format, shape->NumChannels) : 0;
    if (levels > 1 && bytes <= UINT64_MAX / 2)
        bytes += bytes / 2;
    ALLOCATE(cuMipmappedArrayCreate, -1, bytes, (uintptr_t)*out, real(out, shape, levels));
}

API CUresult cuArrayDestroy(CUarray array)
{
    RELEASE(cuArrayDestroy, (uintptr_t)array, real(array));
}

API CUresult cuMipmappedArrayDestroy(CUarray array)
{
    RELEASE(cuMipmappedArrayDestroy, (uintptr_t)array, real(array));
}

/* ---- physical memory and its mappings ---- */

static struct physical *physical_with(CUmemGenericAllocationHandle handle)
{
    struct physical *at = physicals;
    while (at && (at->handle != handle || !at->holders))
        at = at->next;
    return at;
}

/* Under records_lock: take it out when the driver has freed it; the caller gives it back. */
static struct physical *ended(struct physical *candidate)
{
    if (!candidate || candidate->holders || candidate->maps)
        return NULL;
    struct physical **at = &physicals;
    while (*at != candidate)
        at = &(*at)->next;
    *at = candidate->next;
    return candidate;
}

static void give_physical(struct physical *gone)
{
    if (gone)
        lease_give(gone->device, gone->bytes);
    free(gone);
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *properties,
                         unsigned long long flags)
{
    lease_count_call();
    FIND_REAL(cuMemCreate);
    bool on_device = properties && properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    struct taken taken = {0, -1, true};
    if (on_device)
        taken = begin(properties->location.id, bytes);
    if (!taken.granted)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = real(out, bytes, properties, flags);
    struct physical *made = result || taken.device < 0 ? NULL : malloc(sizeof *made);
    if (result && taken.device >= 0)
        lease_give(taken.device, taken.bytes);
    if (made) {
        pthread_mutex_lock(&records_lock);
        *made = (struct physical){physicals, *out, taken.bytes, 1, 0, taken.device};
        physicals = made;
        pthread_mutex_unlock(&records_lock);
    }
    return result;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    lease_count_call();
    FIND_REAL(cuMemRelease);
    pthread_mutex_lock(&records_lock);
    struct physical *known = physical_with(handle), *gone = NULL;
    if (known)
        known->holders--;
    pthread_mutex_unlock(&records_lock);
    CUresult result = real(handle);
    pthread_mutex_lock(&records_lock);
    if (known && result)
        known->holders++;
    else
        gone = ended(known);
    pthread_mutex_unlock(&records_lock);
    give_physical(gone);
    return result;
}

API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address)
{
    lease_count_call();
    FIND_REAL(cuMemRetainAllocationHandle);
    CUresult result = real(out, address);
    uint64_t at = (uint64_t)(uintptr_t)address;
    pthread_mutex_lock(&records_lock);
    for (size_t i = 0; !result && i < mapping_count; i++)
        if (at - mappings[i].address < mappings[i].bytes) {
            mappings[i].physical->handle = *out;
            mappings[i].physical->holders++;
            break;
        }
    pthread_mutex_unlock(&records_lock);
    return result;
}

static bool make_mapping_room(void)
{
    if (mapping_count < mapping_room)
        return true;
    size_t room = mapping_room ? mapping_room * 2 : 64;
    struct mapping *larger = realloc(mappings, room * sizeof *larger);
    if (larger) {
        mappings = larger;
        mapping_room = room;
    }
    return larger != NULL;
}

API CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags)
{
    lease_count_call();
    FIND_REAL(cuMemMap);
    CUresult result = real(address, bytes, offset, handle, flags);
    pthread_mutex_lock(&records_lock);
    struct physical *known = result ? NULL : physical_with(handle);
    if (known) {
        known->maps++; /* without memory for the mapping it stays charged until the process ends */
        if (make_mapping_room())
            mappings[mapping_count++] = (struct mapping){address, bytes, known};
    }
    pthread_mutex_unlock(&records_lock);
    return result;
}

API CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    lease_count_call();
    FIND_REAL(cuMemUnmap);
    CUresult result = real(address, bytes);
    for (size_t i = 0; !result;) {
        struct physical *gone = NULL;
        pthread_mutex_lock(&records_lock);
        while (i < mapping_count && (mappings[i].address < address || mappings[i].address - address >= bytes))
            i++;
        bool found = i < mapping_count;
        if (found) {
            mappings[i].physical->maps--;
            gone = ended(mappings[i].physical);
            mappings[i] = mappings[--mapping_count];
        }
        pthread_mutex_unlock(&records_lock);
        give_physical(gone);
        if (!found)
            break;
    }
    return result;
}

/* ---- contexts ---- */

API CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice ordinal)
{
    lease_count_call();
    FIND_REAL(cuDevicePrimaryCtxRetain);
    if (!lease_wait_for_turn())
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = real(out, ordinal);
    if (!result && ordinal >= 0 && ordinal < GPUSHARE_DEVICES) {
        pthread_mutex_lock(&records_lock);
        primary_context[ordinal] = *out;
        pthread_mutex_unlock(&records_lock);
    }
    return result;
}

typedef CUresult get_state(CUdevice, unsigned *, int *);

static CUresult after_primary(CUresult result, CUdevice ordinal)
{
    static void *_Atomic kept;
    unsigned flags;
    int active = 1;
    get_state *ask = (get_state *)plain_function(&kept, "cuDevicePrimaryCtxGetState");
    if (!result && ordinal >= 0 && ordinal < GPUSHARE_DEVICES && ask && !ask(ordinal, &flags, &active) && !active) {
        pthread_mutex_lock(&records_lock);
        CUcontext context = primary_context[ordinal];
        primary_context[ordinal] = NULL;
        pthread_mutex_unlock(&records_lock);
        if (context)
            forget_context(context);
    }
    return result;
}

#define ENDS_PRIMARY(name)               \
    API CUresult name(CUdevice ordinal)  \
    {                                    \
        lease_count_call();              \
        FIND_REAL(name);                 \
        return after_primary(real(ordinal), ordinal); \
    }
ENDS_PRIMARY(cuDevicePrimaryCtxRelease)
ENDS_PRIMARY(cuDevicePrimaryCtxRelease_v2)
ENDS_PRIMARY(cuDevicePrimaryCtxReset)
ENDS_PRIMARY(cuDevicePrimaryCtxReset_v2)

#define ENDS_CONTEXT(name)               \
    API CUresult name(CUcontext context) \
    {                                    \
        lease_count_call();              \
        FIND_REAL(name);                 \
        CUresult result = real(context); \
        if (!result && context)          \
            forget_context(context);     \
        return result;                   \
    }
ENDS_CONTEXT(cuCtxDestroy)
ENDS_CONTEXT(cuCtxDestroy_v2)

/* ---- what makes a process impossible to suspend ---- */

static CUresult tainted_by(CUresult result, enum gpushare_taint taint)
{
    if (!result)
        lease_taint(taint);
    return result;
}

#define TAINTS(taint, name, parameters, arguments)           \
    API CUresult name parameters                             \
    {                                                        \
        lease_count_call();                                  \
        FIND_REAL(name);                                     \
        return tainted_by(real arguments, taint);            \
    }

typedef CUipcMemHandle CUipcEventHandle; /* 64 opaque bytes too */

TAINTS(GPUSHARE_TAINT_IPC, cuIpcGetMemHandle, (CUipcMemHandle * out, CUdeviceptr address), (out, address))
TAINTS(GPUSHARE_TAINT_IPC, cuIpcOpenMemHandle, (CUdeviceptr * out, CUipcMemHandle handle, unsigned flags),
       (out, handle, flags))
TAINTS(GPUSHARE_TAINT_IPC, cuIpcOpenMemHandle_v2, (CUdeviceptr * out, CUipcMemHandle handle, unsigned flags),
       (out, handle, flags))
TAINTS(GPUSHARE_TAINT_IPC, cuIpcGetEventHandle, (CUipcEventHandle * out, CUevent event), (out, event))
TAINTS(GPUSHARE_TAINT_IPC, cuIpcOpenEventHandle, (CUevent * out, CUipcEventHandle handle), (out, handle))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuMemExportToShareableHandle,
       (void *out, CUmemGenericAllocationHandle handle, int type, unsigned long long flags), (out, handle, type, flags))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuMemImportFromShareableHandle,
       (CUmemGenericAllocationHandle * out, void *shared, int type), (out, shared, type))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuMemPoolExportToShareableHandle,
       (void *out, CUmemoryPool pool, int type, unsigned long long flags), (out, pool, type, flags))
TAINTS(GPUSHARE_TAINT_EXPORTED, cuMemPoolImportFromShareableHandle,
       (CUmemoryPool * out, void *shared, int type, unsigned long long flags), (out, shared, type, flags))
TAINTS(GPUSHARE_TAINT_PEER, cuCtxEnablePeerAccess, (CUcontext peer, unsigned flags), (peer, flags))
TAINTS(GPUSHARE_TAINT_PEER, cuMulticastCreate, (CUmemGenericAllocationHandle * out, const void *properties),
       (out, properties))

typedef CUresult get_count(int *);

static bool has_peers(void)
{
    static void *_Atomic kept;
    int count = 0;
    get_count *ask = (get_count *)plain_function(&kept, "cuDeviceGetCount");
    return lease_is_set() && ask && !ask(&count) && count > 1;
}

/* Whether a device other than `home` (in the limit page) is given access. */
static bool opens_to_peer(const CUmemAccessDesc *access, size_t count, int home)
{
    for (size_t i = 0; i < count; i++)
        if (access[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE && access[i].flags &&
            page_device(access[i].location.id) != home)
            return true;
    return false;
}

/* Where mapped memory lies (in the limit page); -1: in the host, or not known. */
static int home_of(CUdeviceptr address, size_t bytes)
{
    int home = -1;
    pthread_mutex_lock(&records_lock);
    for (size_t i = 0; i < mapping_count && home < 0; i++)
        if (mappings[i].address - address < bytes || address - mappings[i].address < mappings[i].bytes)
            home = mappings[i].physical->device;
    pthread_mutex_unlock(&records_lock);
    return home;
}

/* How NCCL and PyTorch's expandable segments reach the memory of another GPU. */
API CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    lease_count_call();
    FIND_REAL(cuMemSetAccess);
    CUresult result = real(address, bytes, access, count);
    int home = !result && has_peers() ? home_of(address, bytes) : -1;
    return home >= 0 && opens_to_peer(access, count, home) ? tainted_by(result, GPUSHARE_TAINT_PEER) : result;
}

/* A pool's own device has access without being told: who is told is another one. */
API CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *access, size_t count)
{
    lease_count_call();
    FIND_REAL(cuMemPoolSetAccess);
    CUresult result = real(pool, access, count);
    return !result && has_peers() && opens_to_peer(access, count, -1) ? tainted_by(result, GPUSHARE_TAINT_PEER) : result;
}

API CUresult cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned flags)
{
    lease_count_call();
    FIND_REAL(cuMemAllocManaged);
    struct taken taken = begin(-1, bytes);
    if (!taken.granted)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = tainted_by(real(out, bytes, flags), GPUSHARE_TAINT_MANAGED);
    return end(taken, result, result ? 0 : *out, current_context());
}

/* ---- spoofed sizes ---- */

/* Clip what the driver says to the lease's share; a device that is not the lease's has no room. */
static void clip(int device, uint64_t *total, uint64_t *free_bytes)
{
    struct lease_room room;
    if (!lease_room(device, &room)) {
        *free_bytes = 0;
        return;
    }
    uint64_t left = room.limit_bytes > room.used_bytes ? room.limit_bytes - room.used_bytes : 0;
    *total = room.limit_bytes < *total ? room.limit_bytes : *total;
    *free_bytes = left < *free_bytes ? left : *free_bytes;
}

API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    lease_count_call();
    FIND_REAL(cuMemGetInfo_v2);
    size_t free_there = 0, total_there = 0;
    CUresult result = real(&free_there, &total_there);
    if (result)
        return result;
    uint64_t free_here = free_there, total_here = total_there;
    if (lease_is_set())
        clip(page_device(current_ordinal()), &total_here, &free_here);
    if (free_bytes)
        *free_bytes = free_here;
    if (total)
        *total = total_here;
    return result;
}

API CUresult cuDeviceTotalMem_v2(size_t *total, CUdevice ordinal)
{
    FIND_REAL(cuDeviceTotalMem_v2);
    struct lease_room room;
    CUresult result = real(total, ordinal);
    if (!result && lease_is_set() && lease_room(page_device(ordinal), &room) && room.limit_bytes < *total)
        *total = room.limit_bytes;
    return result;
}

typedef int nvml_get_uuid(nvmlDevice_t, char *, unsigned);

/* "GPU-" or "MIG-" and 16 bytes in hex, dashes anywhere. */
static bool read_uuid(const char *text, uint8_t uuid[16])
{
    if (strlen(text) < 4)
        return false;
    text += 4;
    for (int i = 0; i < 16; i++) {
        unsigned byte;
        text += *text == '-';
        if (sscanf(text, "%2x", &byte) != 1)
            return false;
        uuid[i] = (uint8_t)byte;
        text += 2;
    }
    return *text == 0;
}

/* Devices outside the lease are shown as they are: nothing of theirs can be allocated. */
static bool nvml_room(nvmlDevice_t device, struct lease_room *room)
{
    static void *_Atomic kept;
    char text[NVML_UUID_TEXT];
    uint8_t uuid[16];
    nvml_get_uuid *ask = (nvml_get_uuid *)plain_function(&kept, "nvmlDeviceGetUUID");
    return lease_is_set() && ask && !ask(device, text, sizeof text) && read_uuid(text, uuid) &&
           lease_room(lease_device(uuid), room);
}

enum { NVML_ERROR_UNINITIALIZED = 1 };

API int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    int (*real)(nvmlDevice_t, nvmlMemory_t *) = real_of(HOOK_nvmlDeviceGetMemoryInfo);
    struct lease_room room;
    int result = real ? real(device, memory) : NVML_ERROR_UNINITIALIZED;
    if (!result && nvml_room(device, &room) && room.limit_bytes < memory->total) {
        memory->total = room.limit_bytes;
        memory->used = room.used_bytes < room.limit_bytes ? room.used_bytes : room.limit_bytes;
        memory->free = memory->total - memory->used;
    }
    return result;
}

API int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    int (*real)(nvmlDevice_t, nvmlMemory_v2_t *) = real_of(HOOK_nvmlDeviceGetMemoryInfo_v2);
    struct lease_room room;
    int result = real ? real(device, memory) : NVML_ERROR_UNINITIALIZED;
    if (!result && nvml_room(device, &room) && room.limit_bytes < memory->total) {
        memory->total = room.limit_bytes;
        memory->reserved = 0;
        memory->used = room.used_bytes < room.limit_bytes ? room.used_bytes : room.limit_bytes;
        memory->free = memory->total - memory->used;
    }
    return result;
}
