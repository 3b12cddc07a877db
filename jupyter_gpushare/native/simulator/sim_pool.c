/* The simulated libcuda.so.1: memory pools.
 *
 * Facts (CUDA Driver API reference 13.0, "Stream Ordered Memory Allocator"; the comments of
 * CUmemPool_attribute, cuMemPoolCreate, cuMemPoolTrimTo and cuMemGetMemPool in cuda.h 13.5):
 *   - Freed memory stays reserved in its pool.  If a pool holds more than its release threshold
 *     (0 by default), the driver tries to give the excess back at the next synchronisation of a
 *     stream, an event or a context.
 *   - cuMemPoolTrimTo gives back unused memory until the given number of bytes remains.  A free whose
 *     completion the host has not observed "can count as outstanding": in the simulator it always does,
 *     until its stream is synchronized.
 *   - Such memory is available to other streams once their frees are complete (reuse policy 2), and before
 *     that only if the device has no more (policy 3): "failing to allocate and map more physical memory",
 *     CUDA Programming Guide 13.0, 4.3.4.4.  Events (policy 1) have no effect in the simulator.
 *   - RESERVED_MEM_CURRENT and USED_MEM_CURRENT report both amounts; the HIGH marks can be reset to 0.
 *     Allocation type and location are attributes since CUDA 13 (cuda.h 12.9 has no such attributes).
 *   - The allocations of a destroyed pool live until they are freed.
 *   - A pool has device memory, host memory (libcu++, "Memory Pools": since CUDA 12.6) or managed memory
 *     (since 13.0), and each location has a default and a current pool of each type.
 *   - It is not documented where managed pools keep their pages.  In the simulator each allocation takes
 *     them on its device, like cuMemAllocManaged, and the pool prevents a checkpoint from its creation on.
 * Frameworks set the largest threshold: PyTorch's backend:cudaMallocAsync (pull request 65365), RMM
 * (pull request 752), NCCL (init.cc).
 */
#include "sim_pool.h"

#include <stdlib.h>
#include <string.h>

#include "sim_account.h"

/* CUmemPool_attribute: 1 to 3 are reuse policies. */
enum { REUSE_FINISHED = 2, REUSE_BY_WAITING, THRESHOLD, RESERVED_CURRENT, RESERVED_HIGH, USED_CURRENT, USED_HIGH };
enum { ALLOCATION_TYPE = 9, LOCATION_TYPE = 12 };
enum { FIRST_WITH_MANAGED_POOLS = 580 };

/* Frees of a stream that the host has not seen complete; `how.mark` is that of the last one. */
struct freed {
    struct freed *next;
    struct sim_free how;
    uint64_t bytes;
};

struct CUmemPoolHandle_st {
    struct CUmemPoolHandle_st *next, *current; /* for a default pool, the current one of its place; NULL: itself */
    int allocation;
    CUmemLocation location;
    uint64_t threshold, reserved, used, reserved_high, used_high;
    int policy[THRESHOLD];
    struct freed *freed;
    unsigned live;
    bool is_default, is_destroyed;
};

static struct CUmemPoolHandle_st *pools;
static _Atomic unsigned questions, trims;

void sim_forget_pools(void)
{
    pools = NULL;
}

/* How often this process queried attributes of pools, and trimmed a pool: for tests. */
API unsigned gpushare_sim_pool_questions(void)
{
    return atomic_load(&questions);
}

API unsigned gpushare_sim_pool_trims(void)
{
    return atomic_load(&trims);
}

/* ---- kinds ---- */

static bool takes_device_memory(const struct CUmemPoolHandle_st *pool)
{
    return pool->allocation == CU_MEM_ALLOCATION_TYPE_PINNED && pool->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
}

CUdevice sim_pool_device(CUmemoryPool pool)
{
    return pool->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? pool->location.id : -1;
}

bool sim_pool_is_managed(CUmemoryPool pool)
{
    return pool->allocation == CU_MEM_ALLOCATION_TYPE_MANAGED;
}

static bool knows_managed_pools(void)
{
    return atoi(sim->driver) >= FIRST_WITH_MANAGED_POOLS;
}

/* Changes a place to the one that its pool reports; false if there can be no pool.  Simulated devices have one
 * domain. */
static bool settle_place(int allocation, CUmemLocation *place)
{
    bool managed = allocation == CU_MEM_ALLOCATION_TYPE_MANAGED && knows_managed_pools();
    if (allocation != CU_MEM_ALLOCATION_TYPE_PINNED && !managed)
        return false;
    if (place->type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN && !managed && place->id >> 8 == 0)
        place->type = CU_MEM_LOCATION_TYPE_DEVICE;
    if (place->type == CU_MEM_LOCATION_TYPE_DEVICE)
        return sim_physical(place->id) >= 0;
    if (place->type == CU_MEM_LOCATION_TYPE_HOST_NUMA)
        return place->id == 0;
    place->id = 0;
    return place->type == CU_MEM_LOCATION_TYPE_HOST || (managed && place->type == CU_MEM_LOCATION_TYPE_NONE);
}

static bool is_at(const struct CUmemPoolHandle_st *pool, int allocation, CUmemLocation place)
{
    return pool->allocation == allocation && pool->location.type == place.type && pool->location.id == place.id;
}

/* ---- bytes (sim_local held) ---- */

static uint64_t pool_bytes(uint64_t bytes)
{
    return (bytes + 511) / 512 * 512;
}

/* Returns the freed bytes whose free the host has not seen complete. */
static uint64_t outstanding(const struct CUmemPoolHandle_st *pool)
{
    uint64_t bytes = 0;
    for (const struct freed *at = pool->freed; at; at = at->next)
        bytes += at->bytes;
    return bytes;
}

/* Returns the part of these bytes that a stream cannot use without a wait. */
static uint64_t awaited(const struct CUmemPoolHandle_st *pool, CUstream stream)
{
    uint64_t bytes = 0;
    for (const struct freed *at = pool->freed; at; at = at->next)
        if (at->how.stream != stream && !(pool->policy[REUSE_FINISHED] && sim_is_done(at->how.mark)))
            bytes += at->bytes;
    return bytes;
}

/* An allocation reuses freed bytes, those of its own stream first. */
static void reuse(struct CUmemPoolHandle_st *pool, uint64_t bytes, CUstream stream)
{
    for (int others = 0; others < 2; others++)
        for (struct freed *at = pool->freed; at && bytes; at = at->next) {
            uint64_t part = at->how.stream != stream && !others ? 0 : at->bytes < bytes ? at->bytes : bytes;
            at->bytes -= part;
            bytes -= part;
        }
}

static CUresult grow(struct CUmemPoolHandle_st *pool, uint64_t bytes)
{
    uint64_t need = sim_pages(bytes), growth = need > pool->reserved ? need - pool->reserved : 0;
    CUresult result = CUDA_SUCCESS;
    if (growth && takes_device_memory(pool))
        result = sim_charge(sim_me->visible[pool->location.id], growth, false, "alloc");
    pool->reserved += result ? 0 : growth;
    return result;
}

CUresult sim_pool_take(CUmemoryPool pool, uint64_t bytes, CUstream stream)
{
    uint64_t used = pool->used + pool_bytes(bytes), before = pool->reserved;
    CUresult result = grow(pool, used + awaited(pool, stream));
    if (result && pool->policy[REUSE_BY_WAITING])
        result = grow(pool, used);
    if (result)
        return result;
    reuse(pool, bytes > pool->reserved - before ? bytes - (pool->reserved - before) : 0, stream);
    pool->used = used;
    pool->used_high = used > pool->used_high ? used : pool->used_high;
    pool->reserved_high = pool->reserved > pool->reserved_high ? pool->reserved : pool->reserved_high;
    pool->live++;
    return CUDA_SUCCESS;
}

static void trim(struct CUmemPoolHandle_st *pool, uint64_t keep)
{
    uint64_t least = pool->used + outstanding(pool);
    keep = keep > least ? keep : least;
    if (pool->reserved <= keep || pool->reserved <= (keep = sim_pages(keep)))
        return;
    if (takes_device_memory(pool))
        sim_refund(sim_me->visible[pool->location.id], pool->reserved - keep, false, "free");
    pool->reserved = keep;
}

static void observe(struct CUmemPoolHandle_st *pool, const CUstream *stream)
{
    for (struct freed **at = &pool->freed; *at;) {
        struct freed *freed = *at;
        if (stream && freed->how.stream != *stream) {
            at = &freed->next;
            continue;
        }
        *at = freed->next;
        free(freed);
    }
}

static void end_pool(struct CUmemPoolHandle_st *pool)
{
    if (!pool->is_destroyed || pool->live)
        return;
    struct CUmemPoolHandle_st **at = &pools;
    while (*at != pool)
        at = &(*at)->next;
    *at = pool->next;
    observe(pool, NULL);
    trim(pool, 0);
    free(pool);
}

static struct freed *freed_in(struct CUmemPoolHandle_st *pool, CUstream stream)
{
    struct freed *found = pool->freed;
    while (found && found->how.stream != stream)
        found = found->next;
    if (!found && (found = calloc(1, sizeof *found))) {
        found->next = pool->freed;
        pool->freed = found;
    }
    return found;
}

void sim_pool_give(CUmemoryPool pool, uint64_t bytes, const struct sim_free *how)
{
    struct freed *freed = how ? freed_in(pool, how->stream) : NULL;
    pool->used -= pool_bytes(bytes);
    pool->live--;
    if (freed) {
        freed->how = *how;
        freed->bytes += pool_bytes(bytes);
    }
    end_pool(pool);
}

void sim_pools_release(const CUstream *stream, bool context_ends)
{
    for (struct CUmemPoolHandle_st *pool = pools; pool; pool = pool->next) {
        observe(pool, stream);
        trim(pool, context_ends ? 0 : pool->threshold);
    }
}

/* ---- the pools of a place (sim_local held) ---- */

static CUmemoryPool make(int allocation, CUmemLocation place, bool is_default)
{
    struct CUmemPoolHandle_st *made = calloc(1, sizeof *made);
    if (!made)
        return NULL;
    made->allocation = allocation;
    made->location = place;
    made->is_default = is_default;
    for (int i = 1; i < THRESHOLD; i++)
        made->policy[i] = 1;
    made->next = pools;
    pools = made;
    if (sim_pool_is_managed(made))
        sim_hinder(SIM_HINDERED_MANAGED);
    return made;
}

static CUmemoryPool default_at(int allocation, CUmemLocation place)
{
    for (CUmemoryPool pool = pools; pool; pool = pool->next)
        if (pool->is_default && is_at(pool, allocation, place))
            return pool;
    return make(allocation, place, true);
}

static CUmemoryPool current_at(int allocation, CUmemLocation place)
{
    CUmemoryPool first = default_at(allocation, place);
    return first && first->current ? first->current : first;
}

static CUmemLocation on_device(CUdevice ordinal)
{
    return (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, ordinal};
}

CUmemoryPool sim_pool_of(CUdevice ordinal)
{
    HOLD(&sim_local);
    return current_at(CU_MEM_ALLOCATION_TYPE_PINNED, on_device(ordinal));
}

/* ---- which pool ---- */

static CUresult answer(CUmemoryPool *out, CUmemLocation place, int allocation, CUmemoryPool find(int, CUmemLocation))
{
    if (!out || !settle_place(allocation, &place))
        return CUDA_ERROR_INVALID_VALUE;
    HOLD(&sim_local);
    *out = find(allocation, place);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice ordinal)
{
    if (sim_physical(ordinal) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    return answer(pool, on_device(ordinal), CU_MEM_ALLOCATION_TYPE_PINNED, default_at);
}

API CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice ordinal)
{
    if (sim_physical(ordinal) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    return answer(pool, on_device(ordinal), CU_MEM_ALLOCATION_TYPE_PINNED, current_at);
}

API CUresult cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *place, int allocation)
{
    ENTER(SIM_NEED_INIT);
    return place ? answer(pool, *place, allocation, default_at) : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *place, int allocation)
{
    ENTER(SIM_NEED_INIT);
    return place ? answer(pool, *place, allocation, current_at) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult set_current(CUmemLocation place, int allocation, CUmemoryPool pool)
{
    if (!pool || !settle_place(allocation, &place) || !is_at(pool, allocation, place))
        return CUDA_ERROR_INVALID_VALUE;
    HOLD(&sim_local);
    CUmemoryPool first = default_at(allocation, place);
    if (first)
        first->current = pool;
    return first ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuMemSetMemPool(CUmemLocation *place, int allocation, CUmemoryPool pool)
{
    ENTER(SIM_NEED_INIT);
    return place ? set_current(*place, allocation, pool) : CUDA_ERROR_INVALID_VALUE;
}

/* ---- pools ---- */

API CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties)
{
    ENTER(SIM_NEED_INIT);
    if (!pool || !properties)
        return CUDA_ERROR_INVALID_VALUE;
    CUmemLocation place = properties->location;
    bool managed = properties->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED;
    if (!settle_place(properties->allocType, &place) || (managed && properties->maxSize) ||
        ((managed || place.type == CU_MEM_LOCATION_TYPE_HOST) && properties->handleTypes))
        return CUDA_ERROR_INVALID_VALUE;
    HOLD(&sim_local);
    *pool = make(properties->allocType, place, false);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    ENTER(SIM_NEED_INIT);
    if (!pool || pool->is_default)
        return CUDA_ERROR_INVALID_VALUE;
    HOLD(&sim_local);
    for (CUmemoryPool first = pools; first; first = first->next)
        first->current = first->current == pool ? NULL : first->current;
    pool->is_destroyed = true;
    end_pool(pool);
    return CUDA_SUCCESS;
}

API CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    ENTER(SIM_NEED_INIT);
    if (!pool)
        return CUDA_ERROR_INVALID_VALUE;
    atomic_fetch_add(&trims, 1);
    HOLD(&sim_local);
    trim(pool, keep);
    return CUDA_SUCCESS;
}

API CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    ENTER(SIM_NEED_INIT);
    uint64_t bytes = 0;
    if (!pool || !value || attribute < 1 || attribute > USED_HIGH)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute < THRESHOLD) {
        memcpy(&pool->policy[attribute], value, sizeof(int));
        return CUDA_SUCCESS;
    }
    memcpy(&bytes, value, sizeof bytes);
    if (attribute != THRESHOLD && (bytes || attribute == RESERVED_CURRENT || attribute == USED_CURRENT))
        return CUDA_ERROR_INVALID_VALUE;
    HOLD(&sim_local);
    *(attribute == THRESHOLD       ? &pool->threshold
      : attribute == RESERVED_HIGH ? &pool->reserved_high
                                   : &pool->used_high) = bytes;
    return CUDA_SUCCESS;
}

API CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    ENTER(SIM_NEED_INIT);
    atomic_fetch_add(&questions, 1);
    if (!pool || !value || attribute < 1 || attribute > (knows_managed_pools() ? LOCATION_TYPE : USED_HIGH))
        return CUDA_ERROR_INVALID_VALUE;
    HOLD(&sim_local);
    const uint64_t bytes[] = {pool->threshold, pool->reserved, pool->reserved_high, pool->used, pool->used_high};
    const int facts[] = {pool->allocation, 0, pool->location.id, pool->location.type};
    if (attribute < THRESHOLD)
        memcpy(value, &pool->policy[attribute], sizeof *pool->policy);
    else if (attribute < ALLOCATION_TYPE)
        memcpy(value, &bytes[attribute - THRESHOLD], sizeof *bytes);
    else
        memcpy(value, &facts[attribute - ALLOCATION_TYPE], sizeof *facts);
    return CUDA_SUCCESS;
}

API CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *access, size_t count)
{
    ENTER(SIM_NEED_INIT);
    if (!pool || !access || !count)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (access[i].flags && takes_device_memory(pool) && access[i].location.id != pool->location.id)
            sim_hinder(SIM_HINDERED_PEER);
    return CUDA_SUCCESS;
}
