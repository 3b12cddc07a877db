/* The devices that a process of a lease sees: only the lease's, numbered as in a container without others.
 *
 * Rules.
 *   - The devices are those of the limit page, in its order.  Without a page there are none.
 *   - CUDA_VISIBLE_DEVICES selects from them.  A number is an index in the page.  A UUID, or its beginning,
 *     must be in the page: as a name, or if no name matches, as a device that the lease has now.
 *     The list ends before the first other entry.
 *   - The variable keeps the names when the lease resumes on other devices.  A process that starts afterwards
 *     gets these devices, because the driver reads their UUIDs.
 *   - A process without the variable, or with an empty one from before its lease, sees all devices.
 *   - The driver reads the variable in cuInit.  During that call, the entry of the environment is replaced by
 *     one with UUIDs.  The driver keeps the order of a UUID list, for any CUDA_DEVICE_ORDER.  If another thread
 *     sets the variable during the call, the driver reads that value: a number is then one of the machine,
 *     but the library denies every allocation on a device that is not the lease's.
 *
 * Facts (CUDA Programming Guide 13.4, "CUDA Environment Variables"; torch/cuda/__init__.py,
 * _parse_visible_devices, from pytorch PR 84879 and 92315): the driver reads a number like strtoul(3);
 * numbers and UUIDs do not mix; a list that names a device twice is empty.  The library leaves that to the
 * driver and passes repeats on.
 *
 * The texts are in this library, because setenv(3) may move the environment while another thread reads it. */
#define _GNU_SOURCE
#include "preload_visible.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "../hold.h"
#include "lease_client.h"
#include "preload_devices.h"
#include "preload_driver.h"

#define NAME "CUDA_VISIBLE_DEVICES="

enum {
    VALUE_AT = sizeof NAME - 1,
    MAX_ENTRIES = GPUSHARE_DEVICES + 1, /* this many entries name a device twice */
    LIST_BYTES = MAX_ENTRIES * LEASE_UUID_BYTES,
};

static char all[VALUE_AT + LIST_BYTES] = NAME;    /* the names of all devices; stays in the environment */
static char chosen[VALUE_AT + LIST_BYTES] = NAME; /* the program's selection; in the environment during cuInit */

static pthread_mutex_t showing = PTHREAD_MUTEX_INITIALIZER; /* guards the next variables and `chosen` */
static unsigned calls; /* of cuInit in progress */
static char *replaced; /* the entry that `chosen` replaces */

static char **find_entry(void)
{
    for (char **at = __environ; at && *at; at++)
        if (!strncmp(*at, NAME, VALUE_AT))
            return at;
    return NULL;
}

/* Under `showing`.  Called before the program runs, or by a cuInit before that.  It does not call putenv(3),
 * because a shell with its own function of that name may not be ready for calls. */
static void take_over(void)
{
    static bool done;
    char **at = !done && lease_is_reserved() ? find_entry() : NULL;
    if (at && !(*at)[VALUE_AT])
        *at = all;
    done = true;
}

void visible_load(void)
{
    HOLD(&showing);
    take_over();
}

/* Reads a number like strtoul(3); returns GPUSHARE_DEVICES for every larger number, -1 if there is none. */
static int read_number(const char *entry)
{
    int number = -1;
    entry += strspn(entry, " \t\n\v\f\r");
    entry += *entry == '+';
    for (; *entry >= '0' && *entry <= '9' && number < GPUSHARE_DEVICES; entry++)
        number = (number < 0 ? 0 : 10 * number) + (*entry - '0');
    return number < GPUSHARE_DEVICES ? number : GPUSHARE_DEVICES;
}

typedef bool write_uuid(uint32_t, char[LEASE_UUID_BYTES]);

/* Returns the index of the only device with a UUID that begins with `entry`; -1 if none does, -2 if several do. */
static int search(write_uuid *write, const char *entry, size_t length)
{
    char uuid[LEASE_UUID_BYTES];
    int found = -1;
    for (uint32_t d = 0; length >= strlen("GPU-") && write(d, uuid); d++)
        if (!strncmp(uuid, entry, length))
            found = found == -1 ? (int)d : -2;
    return found;
}

/* Writes the UUID of the device that an entry of the list names; false if it is not the lease's. */
static bool find_device(const char *entry, bool by_number, char uuid[LEASE_UUID_BYTES])
{
    size_t length = strcspn(entry, ",");
    int found = by_number ? read_number(entry) : search(lease_name, entry, length);
    if (!by_number && found == -1)
        found = search(lease_uuid, entry, length);
    return found >= 0 && lease_uuid((uint32_t)found, uuid);
}

/* Writes the UUIDs of the program's selection, or the names of all devices if `selection` is NULL. */
static void list_devices(const char *selection, char list[LIST_BYTES])
{
    bool by_number = selection && read_number(selection) >= 0;
    char uuid[LEASE_UUID_BYTES];
    *list = 0;
    for (uint32_t n = 0; n < MAX_ENTRIES; n++) {
        if (selection ? !find_device(selection, by_number, uuid) : !lease_name(n, uuid))
            return;
        list += sprintf(list, "%s%s", n ? "," : "", uuid);
        if (!selection)
            continue;
        selection += strcspn(selection, ",");
        if (!*selection++)
            return;
    }
}

/* Writes the first byte last, so that a reader finds no device or all. */
static void show_all(void)
{
    char list[LIST_BYTES];
    list_devices(NULL, list);
    if (!*list)
        return;
    memcpy(all + VALUE_AT + 1, list + 1, strlen(list));
    __atomic_store_n(all + VALUE_AT, *list, __ATOMIC_RELEASE);
}

static void show(void)
{
    char **at = find_entry();
    if (!at || *at == all) {
        if (!all[VALUE_AT])
            show_all();
        if (!at)
            putenv(all);
        replaced = all;
    } else if (*at != chosen) {
        replaced = *at;
    }
    list_devices(replaced + VALUE_AT, chosen + VALUE_AT);
    if (!chosen[VALUE_AT])
        strcpy(chosen + VALUE_AT, "-1"); /* a child that starts meanwhile also sees no device */
    putenv(chosen);
}

/* If the program has set the variable meanwhile, its value stays. */
static void put_back(void)
{
    char **at = find_entry(), *ours = chosen;
    if (at)
        __atomic_compare_exchange_n(at, &ours, replaced, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}

void visible_in_child(void)
{
    pthread_mutex_init(&showing, NULL);
    if (calls)
        put_back();
    calls = 0;
}

/* The call is not counted, because it never waits. */
API CUresult cuInit(unsigned flags)
{
    static _Atomic bool done; /* the driver reads the variable once */
    FIND_REAL(cuInit);
    if (!lease_is_set() || atomic_load(&done))
        return real(flags);
    pthread_mutex_lock(&showing);
    take_over();
    if (!calls++)
        show();
    pthread_mutex_unlock(&showing);
    CUresult result = real(flags);
    if (!result) {
        settle_devices();
        atomic_store(&done, true);
    }
    HOLD(&showing);
    if (!--calls)
        put_back();
    return result;
}
