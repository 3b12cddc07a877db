/* The devices that a process of a lease sees: the lease's, numbered as in a container with no others.
 *
 * Rules.
 *   - The devices are those of the limit page, in its order.  Without a page there are none.
 *   - CUDA_VISIBLE_DEVICES chooses among them.  A number is an index in the page; a UUID, or its
 *     beginning, is one of the page's: a name, or where no name fits, a device that the lease has now.
 *     The list ends before the first other entry.
 *   - The variable keeps its names when the lease resumes on other devices.  A process that starts then
 *     gets those: what the driver reads has their UUIDs.
 *   - A process without the variable, or with an empty one from before its lease, sees all devices.
 *   - The driver reads the variable in cuInit.  While that call runs, the entry of the environment is
 *     replaced by one with UUIDs.  Of a UUID list the driver keeps the order, whatever CUDA_DEVICE_ORDER says.
 *     What another thread sets during the call counts for the driver as it is: a number is the machine's,
 *     and the library denies every allocation on a device that is not the lease's.
 *
 * Facts (CUDA Programming Guide 13.4, "CUDA Environment Variables"; torch/cuda/__init__.py,
 * _parse_visible_devices, from pytorch PR 84879 and 92315): the driver reads a number as strtoul(3)
 * does; numbers and UUIDs do not mix; a list that names a device twice is empty.  The last is left to
 * the driver: repeats are passed on.
 *
 * The texts lie in this library: setenv(3) may move the environment while another thread reads it. */
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
    MOST_ENTRIES = GPUSHARE_DEVICES + 1, /* so many name a device twice */
    LIST_BYTES = MOST_ENTRIES * LEASE_UUID_BYTES,
};

static char all[VALUE_AT + LIST_BYTES] = NAME;    /* the name of every device; stays in the environment */
static char chosen[VALUE_AT + LIST_BYTES] = NAME; /* those that the program chose; there while cuInit runs */

static pthread_mutex_t showing = PTHREAD_MUTEX_INITIALIZER; /* guards what follows and `chosen` */
static unsigned calls; /* of cuInit that run */
static char *replaced; /* the entry that `chosen` stands for */

static char **find_entry(void)
{
    for (char **at = __environ; at && *at; at++)
        if (!strncmp(*at, NAME, VALUE_AT))
            return at;
    return NULL;
}

/* Under `showing`, before the program runs or at a call of cuInit before that.  Not by putenv(3): a shell
 * with a function of that name is not ready for calls yet. */
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

/* A number as strtoul(3) reads it, GPUSHARE_DEVICES for each that is larger; -1: it is none. */
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

/* The index of the only device with a UUID that begins so; -1: none has, -2: several have. */
static int search(write_uuid *write, const char *entry, size_t length)
{
    char uuid[LEASE_UUID_BYTES];
    int found = -1;
    for (uint32_t d = 0; length >= strlen("GPU-") && write(d, uuid); d++)
        if (!strncmp(uuid, entry, length))
            found = found == -1 ? (int)d : -2;
    return found;
}

/* Writes the UUID that an entry of the list stands for; false where it is none of the lease's. */
static bool find_device(const char *entry, bool by_number, char uuid[LEASE_UUID_BYTES])
{
    size_t length = strcspn(entry, ",");
    int found = by_number ? read_number(entry) : search(lease_name, entry, length);
    if (!by_number && found == -1)
        found = search(lease_uuid, entry, length);
    return found >= 0 && lease_uuid((uint32_t)found, uuid);
}

/* Writes the UUIDs of what the program chose; the names of all devices where `wanted` is NULL. */
static void list_devices(const char *wanted, char list[LIST_BYTES])
{
    bool by_number = wanted && read_number(wanted) >= 0;
    char uuid[LEASE_UUID_BYTES];
    *list = 0;
    for (uint32_t n = 0; n < MOST_ENTRIES; n++) {
        if (wanted ? !find_device(wanted, by_number, uuid) : !lease_name(n, uuid))
            return;
        list += sprintf(list, "%s%s", n ? "," : "", uuid);
        if (!wanted)
            continue;
        wanted += strcspn(wanted, ",");
        if (!*wanted++)
            return;
    }
}

/* The first byte is written last: a reader finds no device, or all. */
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
        strcpy(chosen + VALUE_AT, "-1"); /* a child that starts meanwhile sees none either */
    putenv(chosen);
}

/* A program that has set the variable meanwhile keeps what it set. */
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

/* Not counted: it waits for nothing. */
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
