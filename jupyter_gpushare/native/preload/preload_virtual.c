/* The preload library's hooks of physical memory and its mappings (virtual memory management).
 *
 * Rules.
 *   - A call of the driver that names a physical allocation holds a use of its record from before
 *     the call until the result is recorded, so that no other thread ends the record meanwhile.
 *   - cuMemUnmap marks what it ends before the call: afterwards another thread may have mapped other
 *     memory at the same address.
 *   - Exported memory stays charged until the process ends: the driver frees it when its shareable
 *     counterparts are released too (cuda.h 13.5, cuMemRelease), and those may be in other processes.
 *     What is imported is not charged: the process that exported it is.
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
    unsigned uses;          /* calls of the driver under way */
    int device;
    bool exported;
};

struct mapping {
    uint64_t address, bytes;
    struct physical *physical;
    const void *ends_in; /* the call of cuMemUnmap that ends it; NULL: none */
};

static pthread_mutex_t mappings_lock = PTHREAD_MUTEX_INITIALIZER;
static struct physical *physicals;
static struct mapping *mappings;
static size_t mapping_capacity, mapping_count;

/* The parent's memory is not the child's: forget it (the tables themselves are shared pages). */
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

/* Under mappings_lock: ends a use, and takes the record out when this process holds the memory no more.
 * Ended records are collected in a list, which the caller gives back. */
static void end_use(struct physical *known, struct physical **gone)
{
    if (!known || --known->uses || known->holders || known->maps)
        return;
    struct physical **at = &physicals;
    while (*at != known)
        at = &(*at)->next;
    *at = known->next;
    known->next = *gone;
    *gone = known;
}

static struct physical *use(struct physical *known)
{
    if (known)
        known->uses++;
    return known;
}

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

static void give_physicals(struct physical *gone)
{
    while (gone) {
        struct physical *next = gone->next;
        if (!gone->exported)
            lease_give(gone->device, gone->bytes);
        free(gone);
        gone = next;
    }
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
    struct physical *made = result || taken.device < 0 ? NULL : malloc(sizeof *made);
    if (result && taken.device >= 0)
        lease_give(taken.device, taken.bytes);
    if (!result && properties && properties->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC)
        lease_taint(GPUSHARE_TAINT_FABRIC);
    if (made) {
        pthread_mutex_lock(&mappings_lock);
        *made = (struct physical){physicals, *out, taken.bytes, 1, 0, 0, taken.device, false};
        physicals = made;
        pthread_mutex_unlock(&mappings_lock);
    }
    return result;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuMemRelease);
    struct physical *gone = NULL;
    pthread_mutex_lock(&mappings_lock);
    struct physical *known = use(physical_with(handle));
    if (known)
        known->holders--;
    pthread_mutex_unlock(&mappings_lock);
    CUresult result = real(handle);
    pthread_mutex_lock(&mappings_lock);
    if (known && result)
        known->holders++;
    end_use(known, &gone);
    pthread_mutex_unlock(&mappings_lock);
    give_physicals(gone);
    return result;
}

API CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type,
                                          unsigned long long flags)
{
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuMemExportToShareableHandle);
    struct physical *gone = NULL;
    pthread_mutex_lock(&mappings_lock);
    struct physical *known = use(physical_with(handle));
    pthread_mutex_unlock(&mappings_lock);
    CUresult result = tainted_by(real(out, handle, type, flags), GPUSHARE_TAINT_EXPORTED);
    pthread_mutex_lock(&mappings_lock);
    if (known && !result)
        known->exported = true;
    end_use(known, &gone);
    pthread_mutex_unlock(&mappings_lock);
    give_physicals(gone);
    return result;
}

API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address)
{
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuMemRetainAllocationHandle);
    struct physical *gone = NULL;
    pthread_mutex_lock(&mappings_lock);
    struct physical *known = use(mapped_at((uint64_t)(uintptr_t)address));
    pthread_mutex_unlock(&mappings_lock);
    CUresult result = real(out, address);
    pthread_mutex_lock(&mappings_lock);
    if (known && !result) {
        known->handle = *out;
        known->holders++;
    }
    end_use(known, &gone);
    pthread_mutex_unlock(&mappings_lock);
    give_physicals(gone);
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
    struct physical *gone = NULL;
    pthread_mutex_lock(&mappings_lock);
    struct physical *known = use(physical_with(handle));
    pthread_mutex_unlock(&mappings_lock);
    CUresult result = real(address, bytes, offset, handle, flags);
    pthread_mutex_lock(&mappings_lock);
    if (known && !result) {
        known->maps++; /* without memory for the mapping it stays charged until the process ends */
        if (grow_mappings())
            mappings[mapping_count++] = (struct mapping){address, bytes, known, NULL};
    }
    end_use(known, &gone);
    pthread_mutex_unlock(&mappings_lock);
    give_physicals(gone);
    return result;
}

API CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuMemUnmap);
    struct physical *gone = NULL;
    pthread_mutex_lock(&mappings_lock);
    for (size_t i = 0; i < mapping_count; i++)
        if (mappings[i].address - address < bytes && !mappings[i].ends_in)
            mappings[i].ends_in = &gone;
    pthread_mutex_unlock(&mappings_lock);
    CUresult result = real(address, bytes);
    pthread_mutex_lock(&mappings_lock);
    for (size_t i = mapping_count; i > 0; i--) {
        struct mapping *mapping = &mappings[i - 1];
        if (mapping->ends_in != &gone)
            continue;
        mapping->ends_in = NULL;
        if (result)
            continue;
        struct physical *physical = mapping->physical;
        *mapping = mappings[--mapping_count];
        physical->maps--;
        end_use(use(physical), &gone);
    }
    pthread_mutex_unlock(&mappings_lock);
    give_physicals(gone);
    return result;
}

/* The device of mapped memory (in the limit page); -1: the host, or not known. */
static int home_of(CUdeviceptr address, size_t bytes)
{
    int home = -1;
    pthread_mutex_lock(&mappings_lock);
    for (size_t i = 0; i < mapping_count; i++) {
        const struct mapping *at = &mappings[i];
        if ((home < 0 || !at->ends_in) && (at->address - address < bytes || address - at->address < at->bytes))
            home = at->physical->device;
    }
    pthread_mutex_unlock(&mappings_lock);
    return home;
}

/* How NCCL and PyTorch's expandable segments reach the memory of another GPU. */
API CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    lease_enter(LEASE_CALLS);
    FIND_REAL(cuMemSetAccess);
    CUresult result = real(address, bytes, access, count);
    int home = !result && has_peers() ? home_of(address, bytes) : -1;
    return home >= 0 && opens_to_peer(access, count, home) ? tainted_by(result, GPUSHARE_TAINT_PEER) : result;
}
