/* The bytes of a device that this process holds, with a line in the ledger for each change. */
#ifndef GPUSHARE_SIM_ACCOUNT_H
#define GPUSHARE_SIM_ACCOUNT_H

#include "sim_gate.h"

CUresult sim_charge(uint32_t device, uint64_t bytes, bool context, const char *event);
void sim_refund(uint32_t device, uint64_t bytes, bool context, const char *event);
/* The same for allocations, of which small ones share pages; sim_local is held. */
CUresult sim_take(CUdevice ordinal, uint64_t bytes);
void sim_give(CUdevice ordinal, uint64_t bytes);
uint64_t sim_pages(uint64_t bytes);

/* Records that this process did something that prevents a checkpoint. */
void sim_hinder(enum sim_hindrance what);

#endif
