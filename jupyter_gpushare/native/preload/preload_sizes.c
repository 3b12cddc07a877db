/* The preload library's answers about sizes: those of the lease, where it has less than the device. */
#include "lease_client.h"
#include "preload_devices.h"
#include "preload_driver.h"

API CUresult cuDeviceTotalMem_v2(size_t *total, CUdevice ordinal)
{
    FIND_REAL(cuDeviceTotalMem_v2);
    struct lease_memory lease;
    CUresult result = real(total, ordinal);
    if (!result && lease_is_set() && lease_memory(page_device(ordinal), &lease) && lease.limit_bytes < *total)
        *total = lease.limit_bytes;
    return result;
}

/* In a lease the account answers, not the driver: the driver's call may wait while the process is
 * locked, and programs poll it.  What is granted on a device never exceeds what it has, so the
 * limit is free to use.  A device outside the lease has nothing free. */
API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    FIND_REAL(cuMemGetInfo_v2);
    size_t all = 0;
    struct lease_memory lease = {0, 0};
    CUdevice ordinal = lease_is_set() ? current_ordinal() : -1;
    if (ordinal < 0) {
        lease_enter(LEASE_QUERIES);
        return real(free_bytes, total);
    }
    CUresult result = cuDeviceTotalMem_v2(&all, ordinal);
    if (result)
        return result;
    lease_memory(page_device(ordinal), &lease);
    uint64_t limit = lease.limit_bytes < all ? lease.limit_bytes : all;
    if (free_bytes)
        *free_bytes = limit > lease.used_bytes ? limit - lease.used_bytes : 0;
    if (total)
        *total = all;
    return CUDA_SUCCESS;
}

typedef int nvml_get_uuid(nvmlDevice_t, char *, unsigned);

/* "GPU-" or "MIG-" and 16 bytes in hex, dashes anywhere. */
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

/* Devices outside the lease are shown as they are: nothing of theirs can be allocated. */
static bool nvml_lease_memory(nvmlDevice_t device, struct lease_memory *lease)
{
    static void *_Atomic kept;
    char text[NVML_UUID_TEXT];
    uint8_t uuid[16];
    nvml_get_uuid *ask = (nvml_get_uuid *)plain_function(&kept, "nvmlDeviceGetUUID");
    return lease_is_set() && ask && !ask(device, text, sizeof text) && read_uuid(text, uuid) &&
           lease_memory(lease_device(uuid), lease);
}

enum { NVML_ERROR_UNINITIALIZED = 1 };

API int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    int (*real)(nvmlDevice_t, nvmlMemory_t *) = real_of(HOOK_nvmlDeviceGetMemoryInfo);
    struct lease_memory lease;
    int result = real ? real(device, memory) : NVML_ERROR_UNINITIALIZED;
    if (!result && nvml_lease_memory(device, &lease) && lease.limit_bytes < memory->total) {
        memory->total = lease.limit_bytes;
        memory->used = lease.used_bytes < lease.limit_bytes ? lease.used_bytes : lease.limit_bytes;
        memory->free = memory->total - memory->used;
    }
    return result;
}

API int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    int (*real)(nvmlDevice_t, nvmlMemory_v2_t *) = real_of(HOOK_nvmlDeviceGetMemoryInfo_v2);
    struct lease_memory lease;
    int result = real ? real(device, memory) : NVML_ERROR_UNINITIALIZED;
    if (!result && nvml_lease_memory(device, &lease) && lease.limit_bytes < memory->total) {
        memory->total = lease.limit_bytes;
        memory->reserved = 0;
        memory->used = lease.used_bytes < lease.limit_bytes ? lease.used_bytes : lease.limit_bytes;
        memory->free = memory->total - memory->used;
    }
    return result;
}
