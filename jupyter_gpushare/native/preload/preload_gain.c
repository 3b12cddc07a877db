/* Show the devices of a lease to processes that began before it, in a server without a GPU.
 *
 * Such a process has an empty CUDA_VISIBLE_DEVICES and no GPUSHARE_MEMORY_LIMIT.  The driver reads
 * the variable in cuInit (CUDA Programming Guide, "CUDA Environment Variables").  A program that set
 * it itself keeps what it set, and so does one of a lease whose user hid all devices.
 *
 * The text lies in this library from the start of the process: setenv(3) may move the environment
 * while another thread reads it.  Its first byte is written last, so that a reader finds no device,
 * or all. */
#define _GNU_SOURCE
#include "preload_gain.h"

#include <stdio.h>
#include <unistd.h>

#include "lease_client.h"
#include "preload_driver.h"

#define NAME "CUDA_VISIBLE_DEVICES="

enum { UUID_BYTES = 42 };

static char visible[sizeof NAME + GPUSHARE_DEVICES * UUID_BYTES] = NAME;

/* Not by putenv(3): a shell with a function of that name is not ready for calls yet. */
void gain_load(void)
{
    for (char **at = lease_is_reserved() ? environ : NULL; at && *at; at++)
        if (!strcmp(*at, NAME))
            *at = visible;
}

static void show_devices(void)
{
    char list[sizeof visible] = "", *end = list, *shown = visible + strlen(NAME);
    uint8_t uuid[16];
    for (uint32_t d = 0; lease_uuid(d, uuid); d++) {
        end += sprintf(end, "%sGPU-", d ? "," : "");
        for (int i = 0; i < 16; i++)
            end += sprintf(end, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
    }
    if (!*list)
        return;
    memcpy(shown + 1, list + 1, (size_t)(end - list));
    __atomic_store_n(shown, *list, __ATOMIC_RELEASE);
}

/* Not counted: it waits for nothing. */
API CUresult cuInit(unsigned flags)
{
    if (lease_is_reserved() && !visible[strlen(NAME)])
        show_devices();
    FIND_REAL(cuInit);
    return real(flags);
}
