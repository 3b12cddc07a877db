/* Allocations: bytes of the lease's account, and the records that give them back. */
#include "preload_account.h"

#include "preload_devices.h"
#include "preload_pools.h"

/* Takes bytes of a device.  Before a denial it gives back the bytes of primary contexts that ended unseen,
 * and trims this process's pools.  It does not trim before it asks for kept bytes: a host would lose the free
 * memory of its pools again and again for its guest. */
bool take_or_trim(int device, uint64_t bytes)
{
    if (lease_take(device, bytes))
        return true;
    for (CUdevice ordinal = 0; ordinal < GPUSHARE_DEVICES && page_device(ordinal) >= 0; ordinal++) {
        uint64_t last = last_record();
        if (!primary_is_active(ordinal))
            forget_primary_context(ordinal, last);
    }
    trim_pools(device);
    bool granted = lease_take(device, bytes);
    if (!granted)
        lease_count_denial();
    return granted;
}

struct taken begin_allocation(CUdevice ordinal, uint64_t bytes)
{
    struct taken taken = {0, -1, -1, true};
    if (!lease_is_set())
        return taken;
    if (!lease_wait_to_allocate()) {
        taken.granted = false;
        return taken;
    }
    if (ordinal < 0 && (ordinal = current_ordinal()) < 0)
        return taken;
    taken.ordinal = ordinal;
    taken.device = may_use(ordinal) ? page_device(ordinal) : -1;
    taken.bytes = bytes;
    taken.granted = take_or_trim(taken.device, bytes);
    return taken;
}

CUresult end_allocation(struct taken taken, CUresult result, uint64_t key)
{
    if (taken.device < 0)
        return result;
    if (result) {
        lease_give(taken.device, taken.bytes);
    } else {
        note_use(taken.ordinal);
        remember((struct record){.key = key,
                                 .bytes = taken.bytes,
                                 .context = current_context(),
                                 .ordinal = taken.ordinal,
                                 .device = taken.device});
    }
    return result;
}
