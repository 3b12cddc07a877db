/* The preload library's hooks of physical memory and its mappings (virtual memory management). */
#include "preload.h"

struct physical {
    struct physical *next;
    CUmemGenericAllocationHandle handle;
    uint64_t bytes;
    unsigned holders, maps;
    int device;
};

struct mapping {
    uint64_t address, bytes;
    struct physical *physical;
};

static pthread_mutex_t mappings_lock = PTHREAD_MUTEX_INITIALIZER;
static struct physical *physicals;
static struct mapping *mappings;
static size_t mapping_room, mapping_count;

/* The parent's memory is not the child's: forget it (the tables themselves are shared pages). */
void mappings_in_child(void)
{
    pthread_mutex_init(&mappings_lock, NULL);
    physicals = NULL;
    mappings = NULL;
    mapping_room = mapping_count = 0;
}

static struct physical *physical_with(CUmemGenericAllocationHandle handle)
{
    struct physical *at = physicals;
    while (at && (at->handle != handle || !at->holders))
        at = at->next;
    return at;
}

/* Under mappings_lock: take it out when the driver has freed it; the caller gives it back. */
static struct physical *ended(struct physical *candidate)
{
    if (!candidate || candidate->holders || candidate->maps)
        return NULL;
    struct physical **at = &physicals;
    while (*at != candidate)
        at = &(*at)->next;
    *at = candidate->next;
    return candidate;
}

static void give_physical(struct physical *gone)
{
    if (gone)
        lease_give(gone->device, gone->bytes);
    free(gone);
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *properties,
                         unsigned long long flags)
{
    lease_count_call();
    FIND_REAL(cuMemCreate);
    bool on_device = properties && properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    struct taken taken = {0, -1, true};
    if (on_device)
        taken = begin_allocation(properties->location.id, bytes);
    if (!taken.granted)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = real(out, bytes, properties, flags);
    struct physical *made = result || taken.device < 0 ? NULL : malloc(sizeof *made);
    if (result && taken.device >= 0)
        lease_give(taken.device, taken.bytes);
    if (made) {
        pthread_mutex_lock(&mappings_lock);
        *made = (struct physical){physicals, *out, taken.bytes, 1, 0, taken.device};
        physicals = made;
        pthread_mutex_unlock(&mappings_lock);
    }
    return result;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    lease_count_call();
    FIND_REAL(cuMemRelease);
    pthread_mutex_lock(&mappings_lock);
    struct physical *known = physical_with(handle), *gone = NULL;
    if (known)
        known->holders--;
    pthread_mutex_unlock(&mappings_lock);
    CUresult result = real(handle);
    pthread_mutex_lock(&mappings_lock);
    if (known && result)
        known->holders++;
    else
        gone = ended(known);
    pthread_mutex_unlock(&mappings_lock);
    give_physical(gone);
    return result;
}

API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address)
{
    lease_count_call();
    FIND_REAL(cuMemRetainAllocationHandle);
    CUresult result = real(out, address);
    uint64_t at = (uint64_t)(uintptr_t)address;
    pthread_mutex_lock(&mappings_lock);
    for (size_t i = 0; !result && i < mapping_count; i++)
        if (at - mappings[i].address < mappings[i].bytes) {
            mappings[i].physical->handle = *out;
            mappings[i].physical->holders++;
            break;
        }
    pthread_mutex_unlock(&mappings_lock);
    return result;
}

static bool make_mapping_room(void)
{
    if (mapping_count < mapping_room)
        return true;
    size_t room = mapping_room ? mapping_room * 2 : 64;
    struct mapping *larger = realloc(mappings, room * sizeof *larger);
    if (larger) {
        mappings = larger;
        mapping_room = room;
    }
    return larger != NULL;
}

API CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags)
{
    lease_count_call();
    FIND_REAL(cuMemMap);
    CUresult result = real(address, bytes, offset, handle, flags);
    pthread_mutex_lock(&mappings_lock);
    struct physical *known = result ? NULL : physical_with(handle);
    if (known) {
        known->maps++; /* without memory for the mapping it stays charged until the process ends */
        if (make_mapping_room())
            mappings[mapping_count++] = (struct mapping){address, bytes, known};
    }
    pthread_mutex_unlock(&mappings_lock);
    return result;
}

API CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    lease_count_call();
    FIND_REAL(cuMemUnmap);
    CUresult result = real(address, bytes);
    for (size_t i = 0; !result;) {
        struct physical *gone = NULL;
        pthread_mutex_lock(&mappings_lock);
        while (i < mapping_count && (mappings[i].address < address || mappings[i].address - address >= bytes))
            i++;
        bool found = i < mapping_count;
        if (found) {
            mappings[i].physical->maps--;
            gone = ended(mappings[i].physical);
            mappings[i] = mappings[--mapping_count];
        }
        pthread_mutex_unlock(&mappings_lock);
        give_physical(gone);
        if (!found)
            break;
    }
    return result;
}

/* Where mapped memory lies (in the limit page); -1: in the host, or not known. */
static int home_of(CUdeviceptr address, size_t bytes)
{
    int home = -1;
    pthread_mutex_lock(&mappings_lock);
    for (size_t i = 0; i < mapping_count && home < 0; i++)
        if (mappings[i].address - address < bytes || address - mappings[i].address < mappings[i].bytes)
            home = mappings[i].physical->device;
    pthread_mutex_unlock(&mappings_lock);
    return home;
}

/* How NCCL and PyTorch's expandable segments reach the memory of another GPU. */
API CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    lease_count_call();
    FIND_REAL(cuMemSetAccess);
    CUresult result = real(address, bytes, access, count);
    int home = !result && has_peers() ? home_of(address, bytes) : -1;
    return home >= 0 && opens_to_peer(access, count, home) ? tainted_by(result, GPUSHARE_TAINT_PEER) : result;
}
