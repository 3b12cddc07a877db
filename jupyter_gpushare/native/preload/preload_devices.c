/* Devices and contexts of this process, from calls of the driver that no hook counts. */
#include "preload_devices.h"

#include "lease_client.h"
#include "preload_driver.h"

typedef CUresult get_uuid(CUuuid *, CUdevice);
typedef CUresult get_ordinal(CUdevice *);
typedef CUresult get_context(CUcontext *);

/* Returns the index in the limit page of the device that the driver names for an ordinal now, or -1. */
static int ask_device(CUdevice ordinal)
{
    static void *_Atomic newer, *_Atomic older;
    CUuuid uuid;
    get_uuid *ask = (get_uuid *)plain_function(&newer, "cuDeviceGetUuid_v2");
    if (!ask)
        ask = (get_uuid *)plain_function(&older, "cuDeviceGetUuid");
    return ask && !ask(&uuid, ordinal) ? lease_device(uuid.bytes) : -1;
}

/* Known indices are cached, because cuInit settles which devices a process sees.  After a resume on other
 * devices the index in the page is the same, but it is not known which UUID the driver answers. */
int page_device(CUdevice ordinal)
{
    static _Atomic int known[GPUSHARE_DEVICES]; /* index + 1 */
    bool keep = ordinal >= 0 && ordinal < GPUSHARE_DEVICES;
    int index = keep ? atomic_load_explicit(&known[ordinal], memory_order_relaxed) - 1 : -1;
    if (index >= 0)
        return index;
    index = ask_device(ordinal);
    if (keep && index >= 0)
        atomic_store(&known[ordinal], index + 1);
    return index;
}

void settle_devices(void)
{
    for (CUdevice ordinal = 0; ordinal < GPUSHARE_DEVICES; ordinal++)
        page_device(ordinal);
}

static _Atomic uint32_t used_ordinals; /* a bit for each ordinal */

bool may_use(CUdevice ordinal)
{
    if (!lease_is_set())
        return true;
    int index = ordinal < GPUSHARE_DEVICES ? page_device(ordinal) : -1;
    return index >= 0 && (atomic_load_explicit(&used_ordinals, memory_order_acquire) >> ordinal & 1u ||
                          ask_device(ordinal) == index);
}

void note_use(CUdevice ordinal)
{
    if (ordinal >= 0 && ordinal < GPUSHARE_DEVICES)
        atomic_fetch_or_explicit(&used_ordinals, 1u << ordinal, memory_order_release);
}

CUdevice current_ordinal(void)
{
    static void *_Atomic kept;
    CUdevice ordinal = -1;
    get_ordinal *ask = (get_ordinal *)plain_function(&kept, "cuCtxGetDevice");
    if (!ask || ask(&ordinal))
        return -1;
    /* The context may have been made unseen.  It exists before the page is read, so a later move includes it. */
    if (lease_is_set() && may_use(ordinal))
        note_use(ordinal);
    return ordinal;
}

CUcontext current_context(void)
{
    static void *_Atomic kept;
    CUcontext context = NULL;
    get_context *ask = (get_context *)plain_function(&kept, "cuCtxGetCurrent");
    return ask && !ask(&context) ? context : NULL;
}

CUdevice ordinal_of_location(CUmemLocation location)
{
    if (location.type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN)
        return location.id & 0xff;
    return location.type == CU_MEM_LOCATION_TYPE_DEVICE ? location.id : -1;
}

typedef CUresult get_state(CUdevice, unsigned *, int *);

bool primary_is_active(CUdevice ordinal)
{
    static void *_Atomic kept;
    unsigned flags;
    int active = 1;
    get_state *ask = (get_state *)plain_function(&kept, "cuDevicePrimaryCtxGetState");
    return !ask || ask(ordinal, &flags, &active) || active;
}

typedef CUresult get_count(int *);

bool has_peers(void)
{
    static void *_Atomic kept;
    int count = 0;
    get_count *ask = (get_count *)plain_function(&kept, "cuDeviceGetCount");
    return lease_is_set() && ask && !ask(&count) && count > 1;
}

bool opens_to_peer(const CUmemAccessDesc *access, size_t count, int home)
{
    for (size_t i = 0; i < count; i++)
        if (ordinal_of_location(access[i].location) >= 0 && access[i].flags &&
            page_device(ordinal_of_location(access[i].location)) != home)
            return true;
    return false;
}
