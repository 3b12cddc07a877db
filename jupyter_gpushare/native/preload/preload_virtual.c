/* The preload library's hooks of physical memory and its mappings (virtual memory management).
 *
 * Rules.
 *   - A driver call that names a physical allocation holds a use of its record from before the call until
 *     the result is recorded, so that no other thread removes the record meanwhile.
 *   - cuMemUnmap marks the mappings that it ends before the call, because afterwards another thread may have
 *     mapped other memory at the same address.
 *   - Exported memory stays charged until the process ends: the driver frees it only when its shareable
 *     counterparts are released too (cuda.h 13.5, cuMemRelease), and they may be in other processes.
 *     Imported memory is not charged to this process, but to its exporter.
 */
#include "preload_virtual.h"

#include <pthread.h>
#include <stdlib.h>

#include "preload_account.h"
#include "preload_devices.h"

struct physical {
    struct physical *next;
    CUmemGenericAllocationHandle handle;
    uint64_t bytes;
    unsigned holders, maps; /* as the driver counts them */
    unsigned uses;          /* driver calls in progress */
    int device;
    bool exported;
};

struct mapping {
    uint64_t address, bytes;
    struct physical *physical;
    const void *ends_in; /* identifies the call of cuMemUnmap that ends it; NULL if there is none */
};

static pthread_mutex_t mappings_lock = PTHREAD_MUTEX_INITIALIZER;
static struct physical *physicals;
static struct mapping *mappings;
static size_t mapping_capacity, mapping_count;

/* The parent's memory is not the child's, so forget it (the pages of the tables are shared). */
void mappings_in_child(void)
{
    pthread_mutex_init(&mappings_lock, NULL);
    physicals = NULL;
    mappings = NULL;
    mapping_capacity = mapping_count = 0;
}

static struct physical *physical_with(CUmemGenericAllocationHandle handle)
{
    struct physical *at = physicals;
    while (at && (at->handle != handle || !at->holders))
        at = at->next;
    return at;
}

/* Under mappings_lock, like the next two functions. */
static struct physical *mapped_at(uint64_t address)
{
    struct physical *ending = NULL;
    for (size_t i = 0; i < mapping_count; i++) {
        if (address - mappings[i].address >= mappings[i].bytes)
            continue;
        if (!mappings[i].ends_in)
            return mappings[i].physical;
        ending = mappings[i].physical;
    }
    return ending;
}

static struct physical *use(struct physical *known)
{
    if (known)
        known->uses++;
    return known;
}

/* Ends a use, and removes the record if this process no longer holds the memory. */
static void end_use(struct physical *known)
{
    if (!known || --known->uses || known->holders || known->maps)
        return;
    struct physical **at = &physicals;
    while (*at != known)
        at = &(*at)->next;
    *at = known->next;
    if (!known->exported)
        lease_give(known->device, known->bytes);
    free(known);
}

static struct physical *use_handle(CUmemGenericAllocationHandle handle)
{
    HOLD(&mappings_lock);
    return use(physical_with(handle));
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *properties,
                         unsigned long long flags)
{
    lease_enter(LEASE_WORK);
    FIND_REAL(cuMemCreate);
    CUdevice ordinal = properties ? ordinal_of_location(properties->location) : -1;
    struct taken taken = {0, -1, -1, true};
    if (ordinal >= 0)
        taken = begin_allocation(ordinal, bytes);
    if (!taken.granted)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = real(out, bytes, properties, flags);
    if (has_more(result, taken.device))
        result = real(out, bytes, properties, flags);
    struct physical *made = result || taken.device < 0 ? NULL : malloc(sizeof *made);
    if (result && taken.device >= 0)
        lease_give(taken.device, taken.bytes);
    if (!result && properties && properties->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC)
        lease_taint(GPUSHARE_TAINT_FABRIC);
    if (made) {
        HOLD(&mappings_lock);
        *made = (struct physical){physicals, *out, taken.bytes, 1, 0, 0, taken.device, false};
        physicals = made;
    }
    return result;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuMemRelease);
    pthread_mutex_lock(&mappings_lock);
    struct physical *known = use(physical_with(handle));
    if (known)
        known->holders--;
    pthread_mutex_unlock(&mappings_lock);
    CUresult result = real(handle);
    HOLD(&mappings_lock);
    if (known && result)
        known->holders++;
    end_use(known);
    return result;
}

API CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type,
                                          unsigned long long flags)
{
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuMemExportToShareableHandle);
    struct physical *known = use_handle(handle);
    CUresult result = tainted_by(real(out, handle, type, flags), GPUSHARE_TAINT_EXPORTED);
    HOLD(&mappings_lock);
    if (known && !result)
        known->exported = true;
    end_use(known);
    return result;
}

API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address)
{
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuMemRetainAllocationHandle);
    pthread_mutex_lock(&mappings_lock);
    struct physical *known = use(mapped_at((uint64_t)(uintptr_t)address));
    pthread_mutex_unlock(&mappings_lock);
    CUresult result = real(out, address);
    HOLD(&mappings_lock);
    if (known && !result) {
        known->handle = *out;
        known->holders++;
    }
    end_use(known);
    return result;
}

static bool grow_mappings(void)
{
    if (mapping_count < mapping_capacity)
        return true;
    size_t capacity = mapping_capacity ? mapping_capacity * 2 : 64;
    struct mapping *larger = realloc(mappings, capacity * sizeof *larger);
    if (larger) {
        mappings = larger;
        mapping_capacity = capacity;
    }
    return larger != NULL;
}

API CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags)
{
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuMemMap);
    struct physical *known = use_handle(handle);
    CUresult result = real(address, bytes, offset, handle, flags);
    HOLD(&mappings_lock);
    if (known && !result) {
        known->maps++; /* if there is no memory for the mapping, it stays charged until the process ends */
        if (grow_mappings())
            mappings[mapping_count++] = (struct mapping){address, bytes, known, NULL};
    }
    end_use(known);
    return result;
}

API CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuMemUnmap);
    pthread_mutex_lock(&mappings_lock);
    for (size_t i = 0; i < mapping_count; i++)
        if (mappings[i].address - address < bytes && !mappings[i].ends_in)
            mappings[i].ends_in = &address;
    pthread_mutex_unlock(&mappings_lock);
    CUresult result = real(address, bytes);
    HOLD(&mappings_lock);
    for (size_t i = mapping_count; i > 0; i--) {
        struct mapping *mapping = &mappings[i - 1];
        if (mapping->ends_in != &address)
            continue;
        mapping->ends_in = NULL;
        if (result)
            continue;
        struct physical *physical = mapping->physical;
        *mapping = mappings[--mapping_count];
        physical->maps--;
        end_use(use(physical));
    }
    return result;
}

/* Returns the device of mapped memory (in the limit page); -1 for the host or if unknown. */
static int home_of(CUdeviceptr address, size_t bytes)
{
    int home = -1;
    HOLD(&mappings_lock);
    for (size_t i = 0; i < mapping_count; i++) {
        const struct mapping *at = &mappings[i];
        if ((home < 0 || !at->ends_in) && (at->address - address < bytes || address - at->address < at->bytes))
            home = at->physical->device;
    }
    return home;
}

/* NCCL and PyTorch's expandable segments reach the memory of another GPU this way. */
API CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuMemSetAccess);
    CUresult result = real(address, bytes, access, count);
    int home = !result && has_peers() ? home_of(address, bytes) : -1;
    return home >= 0 && opens_to_peer(access, count, home) ? tainted_by(result, GPUSHARE_TAINT_PEER) : result;
}
