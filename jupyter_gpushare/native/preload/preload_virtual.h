#ifndef GPUSHARE_PRELOAD_VIRTUAL_H
#define GPUSHARE_PRELOAD_VIRTUAL_H

/* After fork, in the child. */
void mappings_in_child(void);

#endif
