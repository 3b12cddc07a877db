/* Which process may checkpoint which. */
#ifndef GPUSHARE_SIM_ACCESS_H
#define GPUSHARE_SIM_ACCESS_H

#include <stdbool.h>
#include <stdint.h>

/* Whether this process may checkpoint another one, and whether NCCL keeps it from being asked now.
 * The mutex is not held. */
bool sim_may_checkpoint(int32_t pid);
bool sim_waits_for_nccl(int32_t pid);

#endif
