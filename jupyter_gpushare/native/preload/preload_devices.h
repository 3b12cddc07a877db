/* Devices and contexts of this process, by the names of the driver and of the limit page. */
#ifndef GPUSHARE_PRELOAD_DEVICES_H
#define GPUSHARE_PRELOAD_DEVICES_H

#include <stdbool.h>
#include <stddef.h>

#include "../cuda_types.h"

/* Returns the index in the limit page of an ordinal of this process, or -1. */
int page_device(CUdevice ordinal);
/* Looks up the index of every ordinal, after cuInit. */
void settle_devices(void);
/* Whether this process may create a context or memory on an ordinal.  The driver does not move a process
 * without a context, and perhaps moves only the used devices of one with contexts.  So an ordinal that was not
 * used before a move may be used only if the driver answers with the device that the lease has now. */
bool may_use(CUdevice ordinal);
void note_use(CUdevice ordinal);
/* Return the current context's device, noting its use, or -1; the current context, or NULL. */
CUdevice current_ordinal(void);
CUcontext current_context(void);
/* Returns the ordinal of a location on a device; -1 for other locations. */
CUdevice ordinal_of_location(CUmemLocation location);
bool primary_is_active(CUdevice ordinal);

/* Whether this process sees more than one device; whether `access` allows a device other than `home` (an
 * index in the limit page). */
bool has_peers(void);
bool opens_to_peer(const CUmemAccessDesc *access, size_t count, int home);

#endif
