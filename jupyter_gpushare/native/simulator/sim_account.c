/* The simulated libcuda.so.1: the bytes of a device that this process holds.
 *
 * Fact (CUDA Driver API reference 13.0, "Memory Management"): device memory comes in pages of 2 MiB;
 * allocations of at most 1 MiB share pages.
 */
#include "sim_account.h"

static uint64_t small_bytes[SIM_DEVICES]; /* by ordinal */

static const uint64_t small_limit = (uint64_t)1 << 20;

uint64_t sim_pages(uint64_t bytes)
{
    return (bytes + SIM_PAGE_BYTES - 1) / SIM_PAGE_BYTES * SIM_PAGE_BYTES;
}

CUresult sim_charge(uint32_t device, uint64_t bytes, bool context, const char *event)
{
    HOLD_STATE;
    uint64_t used = sim_device_used(device), total = sim_device_usable(device);
    if (used > total || bytes > total - used || used + bytes > sim->device[device].peak_bytes) {
        sim_sweep(); /* before a peak is recorded and before a denial */
        used = sim_device_used(device);
    }
    bool denied = used > total || bytes > total - used || sim_group_denies(sim_me->pid, device, bytes);
    CUresult result = denied ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
    if (!result) {
        (context ? sim_me->context_bytes : sim_me->used_bytes)[device] += bytes;
        if (used + bytes > sim->device[device].peak_bytes)
            sim->device[device].peak_bytes = used + bytes;
        if (bytes || context)
            sim_note(sim_me, event, (int)device, bytes);
    }
    return result;
}

void sim_refund(uint32_t device, uint64_t bytes, bool context, const char *event)
{
    HOLD_STATE;
    uint64_t *held = (context ? sim_me->context_bytes : sim_me->used_bytes) + device;
    *held -= bytes < *held ? bytes : *held;
    if (bytes || context)
        sim_note(sim_me, event, (int)device, bytes);
}

CUresult sim_take(CUdevice ordinal, uint64_t bytes)
{
    uint64_t cost = sim_pages(bytes);
    if (bytes <= small_limit)
        cost = sim_pages(small_bytes[ordinal] + bytes) - sim_pages(small_bytes[ordinal]);
    CUresult result = sim_charge(sim_me->visible[ordinal], cost, false, "alloc");
    if (!result && bytes <= small_limit)
        small_bytes[ordinal] += bytes;
    return result;
}

void sim_give(CUdevice ordinal, uint64_t bytes)
{
    uint64_t cost = sim_pages(bytes);
    if (bytes <= small_limit) {
        cost = sim_pages(small_bytes[ordinal]) - sim_pages(small_bytes[ordinal] - bytes);
        small_bytes[ordinal] -= bytes;
    }
    sim_refund(sim_me->visible[ordinal], cost, false, "free");
}

void sim_hinder(enum sim_hindrance what)
{
    HOLD_STATE;
    sim_me->hindrances |= what;
}
