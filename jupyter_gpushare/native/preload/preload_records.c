/* The preload library's records of the allocations of this process.  Their bytes are given back when they are
 * freed or their context ends.  Physical memory is recorded in preload_virtual.c. */
#include "preload_records.h"

#include "../old_glibc.h"

#include <pthread.h>
#include <stdlib.h>

#include "lease_client.h"
#include "preload_pools.h"

static pthread_mutex_t records_lock = PTHREAD_MUTEX_INITIALIZER;
static struct record *records; /* open addressing; the capacity is a power of two */
static size_t record_capacity, record_count;
static uint64_t last_serial;

/* Contexts of cuCtxCreate.  Every other context is a primary one, even if the CUDA runtime made it unseen,
 * through a table of cuGetExportTable. */
enum { OWN_CONTEXTS = 64 };
static CUcontext own_contexts[OWN_CONTEXTS];
static bool own_overflowed; /* after too many at once, no context is taken for a primary one any more */

/* The parent's memory is not the child's, so drop the records (the pages of the table are shared). */
void records_in_child(void)
{
    pthread_mutex_init(&records_lock, NULL);
    records = NULL;
    record_capacity = record_count = 0;
}

static struct record *place_in(struct record *table, size_t capacity, uint64_t key)
{
    size_t at = (size_t)(key * 0x9e3779b97f4a7c15u >> 20) & (capacity - 1);
    while (table[at].key && table[at].key != key)
        at = (at + 1) & (capacity - 1);
    return &table[at];
}

static bool grow_records(void)
{
    if ((record_count + 1) * 2 <= record_capacity)
        return true;
    size_t capacity = record_capacity ? record_capacity * 2 : 1024;
    struct record *old = records, *larger = calloc(capacity, sizeof *larger);
    if (!larger)
        return false;
    for (size_t i = 0; i < record_capacity; i++)
        if (old[i].key)
            *place_in(larger, capacity, old[i].key) = old[i];
    records = larger;
    record_capacity = capacity;
    free(old);
    return true;
}

void give_record(struct record record)
{
    if (record.key && record.pool)
        pool_freed(record.pool, record.bytes, NO_STREAM);
    else if (record.key)
        lease_give(record.device, record.bytes);
}

/* If there is no memory for the record, the bytes stay charged until the process ends.  An address that is
 * already recorded was freed unseen. */
void remember(struct record record)
{
    struct record before = {0};
    pthread_mutex_lock(&records_lock);
    if (record.key && grow_records()) {
        struct record *place = place_in(records, record_capacity, record.key);
        for (int i = 0; i < OWN_CONTEXTS; i++)
            record.in_own_context = record.in_own_context || (record.context && own_contexts[i] == record.context);
        before = *place;
        record_count += !before.key;
        record.serial = ++last_serial;
        *place = record;
    }
    pthread_mutex_unlock(&records_lock);
    give_record(before);
}

static void erase(struct record *place)
{
    place->key = 0;
    record_count--;
    for (size_t i = ((size_t)(place - records) + 1) & (record_capacity - 1); records[i].key; i = (i + 1) & (record_capacity - 1)) {
        struct record moved = records[i];
        records[i].key = 0;
        *place_in(records, record_capacity, moved.key) = moved;
    }
}

struct record forget(uint64_t key)
{
    struct record record = {0};
    HOLD(&records_lock);
    struct record *place = record_capacity && key ? place_in(records, record_capacity, key) : NULL;
    if (place && place->key) {
        record = *place;
        erase(place);
    }
    return record;
}

uint64_t last_record(void)
{
    HOLD(&records_lock);
    return last_serial;
}

/* Gives back the records of a context, or with context NULL those of an ordinal's primary context, in one
 * pass that moves the others into a new table. */
static void forget_records(CUcontext context, CUdevice ordinal, uint64_t last)
{
    pthread_mutex_lock(&records_lock);
    size_t capacity = record_capacity;
    struct record *old = records, *kept = record_count ? calloc(capacity, sizeof *kept) : NULL;
    for (size_t i = 0; kept && i < capacity; i++) {
        struct record *record = &old[i];
        bool ends = context ? record->context == context
                            : record->ordinal == ordinal && !record->in_own_context && !own_overflowed;
        if (!record->key || (ends && record->serial <= last))
            continue;
        *place_in(kept, capacity, record->key) = *record;
        record->key = 0;
    }
    for (size_t i = 0; kept && i < capacity; i++)
        record_count -= old[i].key != 0;
    records = kept ? kept : records;
    pthread_mutex_unlock(&records_lock);
    for (size_t i = 0; kept && i < capacity; i++)
        give_record(old[i]);
    if (kept)
        free(old);
}

void forget_context(CUcontext context, uint64_t last)
{
    forget_records(context, -1, last);
}

void forget_primary_context(CUdevice ordinal, uint64_t last)
{
    forget_records(NULL, ordinal, last);
}

bool forget_own_context(CUcontext context)
{
    HOLD(&records_lock);
    for (int i = 0; context && i < OWN_CONTEXTS; i++)
        if (own_contexts[i] == context) {
            own_contexts[i] = NULL;
            return true;
        }
    return false;
}

void remember_own_context(CUcontext context)
{
    int at = 0;
    HOLD(&records_lock);
    while (at < OWN_CONTEXTS && own_contexts[at])
        at++;
    if (at < OWN_CONTEXTS)
        own_contexts[at] = context;
    own_overflowed = own_overflowed || at == OWN_CONTEXTS;
}
