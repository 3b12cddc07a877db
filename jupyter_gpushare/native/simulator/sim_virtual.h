#ifndef GPUSHARE_SIM_VIRTUAL_H
#define GPUSHARE_SIM_VIRTUAL_H

/* Called in the child after fork. */
void sim_forget_physical(void);

#endif
