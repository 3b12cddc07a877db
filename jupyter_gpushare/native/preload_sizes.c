/* The preload library's answers about sizes: those of the lease, where it has less than the device. */
#include <stdio.h>

#include "preload.h"

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
