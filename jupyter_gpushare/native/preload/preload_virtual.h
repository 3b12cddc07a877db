#ifndef GPUSHARE_PRELOAD_VIRTUAL_H
#define GPUSHARE_PRELOAD_VIRTUAL_H

/* Called in the child after fork. */
void mappings_in_child(void);

#endif
