/* The preload library's hooks of memory and contexts: taken from the account before the driver is
 * called, given back when it refuses or frees.  Physical memory is preload_virtual.c's. */
#include "preload.h"

/* ---- records of what this process holds ---- */

struct record {
    uint64_t key; /* address, or array handle; 0: free */
    uint64_t bytes;
    CUcontext context; /* whose end frees it */
    int device;        /* in the limit page */
};

static pthread_mutex_t records_lock = PTHREAD_MUTEX_INITIALIZER;
static struct record *records; /* open addressing, a power of two */
static size_t record_room, record_count;
static CUcontext primary_context[GPUSHARE_DEVICES]; /* by ordinal */

/* The parent's memory is not the child's: forget it (the table itself is shared pages). */
void records_in_child(void)
{
    pthread_mutex_init(&records_lock, NULL);
    records = NULL;
    record_room = record_count = 0;
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

/* Index in the limit page of an ordinal of this process, or -1.  Found ones are kept: which
 * devices a process sees is settled at cuInit. */
int page_device(CUdevice ordinal)
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

CUdevice current_ordinal(void)
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

struct taken begin_allocation(CUdevice ordinal, uint64_t bytes)
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

static CUresult end_allocation(struct taken taken, CUresult result, uint64_t key, CUcontext context)
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
    struct taken taken = begin_allocation(ordinal, size);               \
    if (!taken.granted)                                      \
        return CUDA_ERROR_OUT_OF_MEMORY;                     \
    CUresult result = call;                                  \
    return end_allocation(taken, result, result ? 0 : (uint64_t)(key), current_context())

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

API CUresult cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned flags)
{
    lease_count_call();
    FIND_REAL(cuMemAllocManaged);
    struct taken taken = begin_allocation(-1, bytes);
    if (!taken.granted)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = tainted_by(real(out, bytes, flags), GPUSHARE_TAINT_MANAGED);
    return end_allocation(taken, result, result ? 0 : *out, current_context());
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
