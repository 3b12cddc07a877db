/* The simulated libcuda.so.1: memory pools.
 *
 * Facts (CUDA Driver API reference 13.0, "Stream Ordered Memory Allocator", and the comments of
 * CUmemPool_attribute in cuda.h 13.5):
 *   - Freed memory stays in its pool, reserved.  When a pool holds more than its release threshold
 *     (0 by default), the driver tries to give the rest back at the next synchronisation of a
 *     stream, an event or a context.
 *   - cuMemPoolTrimTo gives back what is not in use until so many bytes are left.
 *   - RESERVED_MEM_CURRENT and USED_MEM_CURRENT tell both amounts; the HIGH marks can be reset to 0.
 *   - The allocations of a destroyed pool live on until they are freed.
 * Frameworks set the largest threshold: PyTorch's backend:cudaMallocAsync (pull request 65365), RMM
 * (pull request 752), NCCL (init.cc).
 */
#include "sim_pool.h"

#include <stdlib.h>
#include <string.h>

#include "sim_account.h"

struct CUmemPoolHandle_st {
    struct CUmemPoolHandle_st *next;
    CUdevice device;
    uint64_t threshold, reserved, used, reserved_high, used_high;
    unsigned live;
    bool is_default, is_destroyed;
};

static struct CUmemPoolHandle_st default_pool[SIM_DEVICES]; /* by ordinal */
static CUmemoryPool current_pool[SIM_DEVICES];              /* NULL: the default one */
static struct CUmemPoolHandle_st *created;

void sim_forget_pools(void)
{
    memset(default_pool, 0, sizeof default_pool);
    memset(current_pool, 0, sizeof current_pool);
    created = NULL;
}

/* ---- bytes (sim_local held) ---- */

static uint64_t pool_bytes(uint64_t bytes)
{
    return (bytes + 511) / 512 * 512;
}

CUresult sim_pool_take(CUmemoryPool pool, uint64_t bytes)
{
    uint64_t used = pool->used + pool_bytes(bytes), need = sim_pages(used);
    uint64_t growth = need > pool->reserved ? need - pool->reserved : 0;
    CUresult result = growth ? sim_charge(sim_me->visible[pool->device], growth, false, "alloc") : CUDA_SUCCESS;
    if (result)
        return result;
    pool->used = used;
    pool->reserved += growth;
    pool->used_high = used > pool->used_high ? used : pool->used_high;
    pool->reserved_high = pool->reserved > pool->reserved_high ? pool->reserved : pool->reserved_high;
    pool->live++;
    return CUDA_SUCCESS;
}

static void trim(struct CUmemPoolHandle_st *pool, uint64_t keep)
{
    keep = keep > pool->used ? keep : pool->used;
    if (pool->reserved <= keep || pool->reserved <= (keep = sim_pages(keep)))
        return;
    sim_refund(sim_me->visible[pool->device], pool->reserved - keep, false, "free");
    pool->reserved = keep;
}

static void end_pool(struct CUmemPoolHandle_st *pool)
{
    if (!pool->is_destroyed || pool->live)
        return;
    struct CUmemPoolHandle_st **at = &created;
    while (*at != pool)
        at = &(*at)->next;
    *at = pool->next;
    trim(pool, 0);
    free(pool);
}

void sim_pool_give(CUmemoryPool pool, uint64_t bytes)
{
    pool->used -= pool_bytes(bytes);
    pool->live--;
    end_pool(pool);
}

void sim_pools_release(bool context_ends)
{
    for (uint32_t i = 0; i < SIM_DEVICES; i++)
        trim(&default_pool[i], context_ends ? 0 : default_pool[i].threshold);
    for (struct CUmemPoolHandle_st *pool = created; pool; pool = pool->next)
        trim(pool, context_ends ? 0 : pool->threshold);
}

CUmemoryPool sim_pool_of(CUdevice ordinal)
{
    pthread_mutex_lock(&sim_local);
    default_pool[ordinal].device = ordinal;
    default_pool[ordinal].is_default = true;
    CUmemoryPool pool = current_pool[ordinal] ? current_pool[ordinal] : &default_pool[ordinal];
    pthread_mutex_unlock(&sim_local);
    return pool;
}

CUdevice sim_pool_device(CUmemoryPool pool)
{
    return pool->device;
}

/* ---- pools ---- */

API CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice ordinal)
{
    if (sim_physical(ordinal) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    sim_pool_of(ordinal);
    *pool = &default_pool[ordinal];
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice ordinal)
{
    if (sim_physical(ordinal) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    *pool = sim_pool_of(ordinal);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceSetMemPool(CUdevice ordinal, CUmemoryPool pool)
{
    ENTER(SIM_NEED_INIT);
    if (sim_physical(ordinal) < 0 || !pool || pool->device != ordinal)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim_local);
    current_pool[ordinal] = pool;
    pthread_mutex_unlock(&sim_local);
    return CUDA_SUCCESS;
}

API CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties)
{
    ENTER(SIM_NEED_INIT);
    if (!pool || !properties || properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        sim_physical(properties->location.id) < 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct CUmemPoolHandle_st *made = calloc(1, sizeof *made);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->device = properties->location.id;
    pthread_mutex_lock(&sim_local);
    made->next = created;
    created = made;
    pthread_mutex_unlock(&sim_local);
    *pool = made;
    return CUDA_SUCCESS;
}

API CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    ENTER(SIM_NEED_INIT);
    if (!pool || pool->is_default)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim_local);
    if (current_pool[pool->device] == pool)
        current_pool[pool->device] = NULL;
    pool->is_destroyed = true;
    end_pool(pool);
    pthread_mutex_unlock(&sim_local);
    return CUDA_SUCCESS;
}

API CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    ENTER(SIM_NEED_INIT);
    if (!pool)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim_local);
    trim(pool, keep);
    pthread_mutex_unlock(&sim_local);
    return CUDA_SUCCESS;
}

/* CUmemPool_attribute: 1 to 3 are switches of reuse, which change nothing here. */
enum { THRESHOLD = 4, RESERVED_CURRENT = 5, RESERVED_HIGH = 6, USED_CURRENT = 7, USED_HIGH = 8 };

API CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    ENTER(SIM_NEED_INIT);
    uint64_t bytes = 0;
    if (!pool || !value || attribute < 1 || attribute > USED_HIGH)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute < THRESHOLD)
        return CUDA_SUCCESS;
    memcpy(&bytes, value, sizeof bytes);
    if (attribute != THRESHOLD && (bytes || attribute == RESERVED_CURRENT || attribute == USED_CURRENT))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim_local);
    *(attribute == THRESHOLD       ? &pool->threshold
      : attribute == RESERVED_HIGH ? &pool->reserved_high
                                   : &pool->used_high) = bytes;
    pthread_mutex_unlock(&sim_local);
    return CUDA_SUCCESS;
}

API CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    ENTER(SIM_NEED_INIT);
    static const int enabled = 1;
    if (!pool || !value || attribute < 1 || attribute > USED_HIGH)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim_local);
    const uint64_t values[] = {pool->threshold, pool->reserved, pool->reserved_high, pool->used, pool->used_high};
    if (attribute < THRESHOLD)
        memcpy(value, &enabled, sizeof enabled);
    else
        memcpy(value, &values[attribute - THRESHOLD], sizeof *values);
    pthread_mutex_unlock(&sim_local);
    return CUDA_SUCCESS;
}

API CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *access, size_t count)
{
    ENTER(SIM_NEED_INIT);
    if (!pool || !access || !count)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (access[i].flags && access[i].location.id != pool->device)
            sim_hinder(SIM_HINDERED_PEER);
    return CUDA_SUCCESS;
}
