#ifndef GPUSHARE_SIM_VIRTUAL_H
#define GPUSHARE_SIM_VIRTUAL_H

/* After fork, in the child. */
void sim_forget_physical(void);

#endif
