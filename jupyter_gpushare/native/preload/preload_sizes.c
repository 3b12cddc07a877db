/* The preload library's answers about sizes: those of the lease, if it has less than the device. */
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

/* In a lease the account answers, not the driver: programs poll this function, and the driver's call may
 * wait while the process is locked.  The limits granted on a device never exceed its memory, so the whole
 * limit is usable.  A device outside the lease has nothing free. */
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
