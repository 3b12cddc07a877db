/* Permissions to checkpoint another process. */
#ifndef GPUSHARE_SIM_ACCESS_H
#define GPUSHARE_SIM_ACCESS_H

#include <stdbool.h>
#include <stdint.h>

/* Whether this process may checkpoint another one; whether calls about that one wait because of NCCL.
 * The mutex is not held. */
bool sim_may_checkpoint(int32_t pid);
bool sim_waits_for_nccl(int32_t pid);

#endif
