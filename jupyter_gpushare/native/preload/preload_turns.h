/* Turns: leases that compute on one device share its time (gpu/turns). */
#ifndef GPUSHARE_PRELOAD_TURNS_H
#define GPUSHARE_PRELOAD_TURNS_H

#include "../cuda_types.h"
#include "lease_client.h"

/* The entry of a launch or copy: count it, wait while the lease is suspended, then while another lease has
 * its turn.  Queries, allocations and frees only count. */
void enter_launch(void);

/* A context of this process, in which it may launch. */
void turns_note(CUcontext context);
/* Before a context ends: nothing looks into any of them any more.  Those that go on are noted again. */
void turns_forget_contexts(void);

/* After fork, in the child. */
void turns_in_child(void);

#endif
