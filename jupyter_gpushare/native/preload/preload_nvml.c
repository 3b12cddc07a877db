/* NVML in a lease: only the lease's devices, numbered as in CUDA, with the sizes of the lease.
 *
 * NVML answers as in a container without other devices, except that minor numbers and PCI addresses are
 * those of the device.  UUIDs are the names of the limit page.  So they match CUDA_VISIBLE_DEVICES, which
 * keeps the names, after the lease resumed on another device (torch.cuda.device_count compares the two).
 * A handle from before a resume refers to the device that the lease has now.
 * For a lease of a MIG instance, NVML shows the GPU that has the instance, and only this one of its instances
 * (nvmlDeviceGetMigDeviceHandleByIndex answers NOT_FOUND for an index without an instance: NVML API
 * reference r580).
 */
#include "lease_client.h"
#include "preload_devices.h"
#include "preload_driver.h"

enum { NVML_SUCCESS = 0, NVML_ERROR_UNINITIALIZED = 1, NVML_ERROR_INVALID_ARGUMENT = 2, NVML_ERROR_NOT_FOUND = 6 };

typedef int get_uuid(nvmlDevice_t, char *, unsigned);
typedef int get_handle(const char *, nvmlDevice_t *);
typedef int get_parent(nvmlDevice_t, nvmlDevice_t *);

/* Reads "GPU-" or "MIG-" and 16 bytes in hex, with dashes anywhere. */
static bool read_uuid(const char *text, uint8_t uuid[16])
{
    if (strlen(text) < 4)
        return false;
    text += 4;
    for (int i = 0; i < 32; i++) {
        static const char digits[] = "0123456789abcdef";
        text += *text == '-';
        const char *digit = *text ? strchr(digits, *text++ | 0x20) : NULL;
        if (!digit)
            return false;
        uuid[i / 2] = (uint8_t)(uuid[i / 2] << 4 | (digit - digits));
    }
    return *text == 0;
}

/* Returns the index in the limit page of a current device's UUID, else of a name, else -1. */
static int index_of_uuid(const char *text)
{
    uint8_t uuid[16];
    if (!read_uuid(text, uuid))
        return -1;
    int index = lease_device(uuid);
    return index >= 0 ? index : lease_named(uuid);
}

static bool ask_uuid(nvmlDevice_t device, char text[NVML_UUID_TEXT])
{
    get_uuid *ask = (get_uuid *)real_of(HOOK_nvmlDeviceGetUUID);
    return ask && !ask(device, text, NVML_UUID_TEXT);
}

static int index_of(nvmlDevice_t device)
{
    char text[NVML_UUID_TEXT];
    return ask_uuid(device, text) ? index_of_uuid(text) : -1;
}

/* Whether the lease left this device for another one: another lease may have it now. */
static bool was_left(nvmlDevice_t device)
{
    char text[NVML_UUID_TEXT];
    uint8_t uuid[16];
    return ask_uuid(device, text) && read_uuid(text, uuid) && lease_device(uuid) < 0 && lease_named(uuid) >= 0;
}

/* ---- the devices of the lease ---- */

/* Searches all GPUs of the machine for the one at an index of the limit page. */
static int search_gpu(uint32_t index, nvmlDevice_t *gpu)
{
    int (*ask_count)(unsigned *) = real_of(HOOK_nvmlDeviceGetCount_v2);
    int (*ask)(unsigned, nvmlDevice_t *) = real_of(HOOK_nvmlDeviceGetHandleByIndex_v2);
    unsigned count = 0;
    if (ask_count && ask && !ask_count(&count))
        for (unsigned i = 0; i < count; i++)
            if (!ask(i, gpu) && index_of(*gpu) == (int)index)
                return NVML_SUCCESS;
    return NVML_ERROR_NOT_FOUND;
}

/* Finds the GPU of the device at an index of the limit page.  A search by UUID may fail on another GPU that
 * this process may not open, so a search by index follows. */
static int find_gpu(uint32_t index, nvmlDevice_t *gpu)
{
    static void *_Atomic kept;
    char uuid[LEASE_UUID_BYTES];
    get_handle *ask = (get_handle *)real_of(HOOK_nvmlDeviceGetHandleByUUID);
    if (!ask)
        return NVML_ERROR_UNINITIALIZED;
    if (!lease_uuid(index, uuid))
        return NVML_ERROR_INVALID_ARGUMENT;
    int result = ask(uuid, gpu);
    if (*uuid != 'M')
        return result && !search_gpu(index, gpu) ? NVML_SUCCESS : result;
    get_parent *ask_parent = (get_parent *)plain_function(&kept, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle");
    return result || !ask_parent ? result : ask_parent(*gpu, gpu);
}

/* Writes the number of a GPU of the lease; returns false for a MIG instance and for other devices. */
static bool number_of(nvmlDevice_t device, unsigned *number)
{
    char uuid[LEASE_UUID_BYTES];
    nvmlDevice_t gpu;
    int index = index_of(device);
    if (index >= 0)
        return lease_uuid((uint32_t)index, uuid) && *uuid != 'M' && (*number = (unsigned)index, true);
    for (uint32_t i = 0; lease_uuid(i, uuid); i++)
        if (*uuid == 'M' && !find_gpu(i, &gpu) && gpu == device)
            return *number = i, true;
    return false;
}

/* Returns the result of a function that finds a device: NOT_FOUND if the device is not the lease's. */
static int found(int result, const nvmlDevice_t *device)
{
    unsigned number;
    bool is_foreign = !result && lease_is_set() &&
                      (was_left(*device) || (index_of(*device) < 0 && !number_of(*device, &number)));
    return is_foreign ? NVML_ERROR_NOT_FOUND : result;
}

#define FIND(name, type, wanted)                                                      \
    API int name(type wanted, nvmlDevice_t *device)                                   \
    {                                                                                 \
        int (*real)(type, nvmlDevice_t *) = real_of(HOOK_##name);                     \
        return real ? found(real(wanted, device), device) : NVML_ERROR_UNINITIALIZED; \
    }
FIND(nvmlDeviceGetHandleByPciBusId, const char *, address)
FIND(nvmlDeviceGetHandleByPciBusId_v2, const char *, address)
FIND(nvmlDeviceGetHandleBySerial, const char *, serial)

/* A name finds the device that the lease has now at its index. */
API int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    uint8_t name[16];
    char now[LEASE_UUID_BYTES];
    get_handle *real = (get_handle *)real_of(HOOK_nvmlDeviceGetHandleByUUID);
    int index = uuid && lease_is_set() && read_uuid(uuid, name) ? lease_named(name) : -1;
    if (index >= 0 && lease_uuid((uint32_t)index, now))
        uuid = now;
    return real ? found(real(uuid, device), device) : NVML_ERROR_UNINITIALIZED;
}

API int nvmlDeviceGetHandleByUUIDV(const void *uuid, nvmlDevice_t *device)
{
    int (*real)(const void *, nvmlDevice_t *) = real_of(HOOK_nvmlDeviceGetHandleByUUIDV);
    char text[NVML_UUID_TEXT];
    int result = real ? real(uuid, device) : NVML_ERROR_UNINITIALIZED;
    return !result && lease_is_set() && ask_uuid(*device, text) ? nvmlDeviceGetHandleByUUID(text, device) : result;
}

API int nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned bytes)
{
    get_uuid *real = (get_uuid *)real_of(HOOK_nvmlDeviceGetUUID);
    int result = real ? real(device, uuid, bytes) : NVML_ERROR_UNINITIALIZED;
    int index = !result && lease_is_set() ? index_of_uuid(uuid) : -1;
    if (index >= 0)
        lease_name((uint32_t)index, uuid); /* as long as the UUID that had space */
    return result;
}

API int nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *instance)
{
    int (*real)(nvmlDevice_t, unsigned, nvmlDevice_t *) = real_of(HOOK_nvmlDeviceGetMigDeviceHandleByIndex);
    return real ? found(real(device, index, instance), instance) : NVML_ERROR_UNINITIALIZED;
}

/* If NVML is not initialized, its error comes first. */
static int count_devices(enum hook hook, unsigned *count)
{
    int (*real)(unsigned *) = real_of(hook);
    char uuid[LEASE_UUID_BYTES];
    int result = real ? real(count) : NVML_ERROR_UNINITIALIZED;
    if (!result && lease_is_set())
        for (*count = 0; lease_uuid(*count, uuid);)
            ++*count;
    return result;
}

#define COUNTS(name) \
    API int name(unsigned *count) { return count_devices(HOOK_##name, count); }
COUNTS(nvmlDeviceGetCount)
COUNTS(nvmlDeviceGetCount_v2)

static int device_at(enum hook hook, unsigned index, nvmlDevice_t *device)
{
    int (*real)(unsigned, nvmlDevice_t *) = real_of(hook);
    unsigned count;
    if (!real || !lease_is_set())
        return real ? real(index, device) : NVML_ERROR_UNINITIALIZED;
    int result = nvmlDeviceGetCount_v2(&count);
    return result ? result : find_gpu(index, device);
}

#define FINDS_BY_INDEX(name) \
    API int name(unsigned index, nvmlDevice_t *device) { return device_at(HOOK_##name, index, device); }
FINDS_BY_INDEX(nvmlDeviceGetHandleByIndex)
FINDS_BY_INDEX(nvmlDeviceGetHandleByIndex_v2)

/* The index of a MIG instance is that on its GPU. */
API int nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index)
{
    int (*real)(nvmlDevice_t, unsigned *) = real_of(HOOK_nvmlDeviceGetIndex);
    int result = real ? real(device, index) : NVML_ERROR_UNINITIALIZED;
    if (result || !lease_is_set() || number_of(device, index))
        return result;
    return index_of(device) < 0 ? NVML_ERROR_INVALID_ARGUMENT : result;
}

/* ---- sizes ---- */

/* Returns false if a device is not the lease's.  A handle from before a resume becomes that of the device at
 * the same index now. */
static bool find_memory(nvmlDevice_t *device, struct lease_memory *lease)
{
    int index = lease_is_set() ? index_of(*device) : -1;
    char now[LEASE_UUID_BYTES], name[LEASE_UUID_BYTES];
    bool has_moved = lease_uuid((uint32_t)index, now) && lease_name((uint32_t)index, name) && strcmp(now, name);
    return (!has_moved || !find_gpu((uint32_t)index, device)) && lease_memory(index, lease);
}

#define SHOWS_MEMORY(name, type, ...)                                                    \
    API int name(nvmlDevice_t device, type *memory)                                      \
    {                                                                                    \
        int (*real)(nvmlDevice_t, type *) = real_of(HOOK_##name);                        \
        struct lease_memory lease;                                                       \
        uint64_t limit = real && find_memory(&device, &lease) ? lease.limit_bytes : UINT64_MAX; \
        int result = real ? real(device, memory) : NVML_ERROR_UNINITIALIZED;             \
        if (!result && limit < memory->total) {                                          \
            memory->total = limit;                                                       \
            memory->used = lease.used_bytes < limit ? lease.used_bytes : limit;          \
            memory->free = memory->total - memory->used;                                 \
            __VA_ARGS__;                                                                 \
        }                                                                                \
        return result;                                                                   \
    }
SHOWS_MEMORY(nvmlDeviceGetMemoryInfo, nvmlMemory_t, )
SHOWS_MEMORY(nvmlDeviceGetMemoryInfo_v2, nvmlMemory_v2_t, memory->reserved = 0)
