/* Devices and contexts of this process, as the driver and the limit page name them. */
#ifndef GPUSHARE_PRELOAD_DEVICES_H
#define GPUSHARE_PRELOAD_DEVICES_H

#include <stdbool.h>
#include <stddef.h>

#include "../cuda_types.h"

/* Index in the limit page of an ordinal of this process, or -1. */
int page_device(CUdevice ordinal);
/* Looks up that of every ordinal, after cuInit. */
void settle_devices(void);
/* Whether a context or memory may be made on an ordinal of this process.  The driver moves no process without a
 * context, and of one that has some perhaps only the devices that it uses: what was not used before a move
 * is used only where the driver answers that it is the device that the lease has now in its place. */
bool may_use(CUdevice ordinal);
void note_use(CUdevice ordinal);
/* The current context's device, of which the use is noted, or -1; the current context, or NULL. */
CUdevice current_ordinal(void);
CUcontext current_context(void);
/* Of memory at a location of a device, its ordinal; -1: elsewhere. */
CUdevice ordinal_of_location(CUmemLocation location);
bool primary_is_active(CUdevice ordinal);

/* Whether this process sees more than one device, and whether one other than `home` (in the limit
 * page) is given access. */
bool has_peers(void);
bool opens_to_peer(const CUmemAccessDesc *access, size_t count, int home);

#endif
