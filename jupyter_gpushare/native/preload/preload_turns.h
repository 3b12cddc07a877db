/* Turns: leases that compute on the same device share its time (gpu/turns). */
#ifndef GPUSHARE_PRELOAD_TURNS_H
#define GPUSHARE_PRELOAD_TURNS_H

#include "../cuda_types.h"
#include "lease_client.h"

/* The entry of a launch or copy: counts it, waits while the lease is suspended, then while another lease has
 * its turn.  Queries, allocations and frees are only counted. */
void enter_launch(void);

/* Notes a context of this process in which it may launch. */
void turns_note(CUcontext context);
/* Forgets all contexts before one ends, so that the thread uses none of them.  The others are noted again. */
void turns_forget_contexts(void);

/* Called in the child after fork. */
void turns_in_child(void);

#endif
