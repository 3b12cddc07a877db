/* The devices that a process of a lease sees. */
#ifndef GPUSHARE_PRELOAD_VISIBLE_H
#define GPUSHARE_PRELOAD_VISIBLE_H

/* Called once, before the program runs. */
void visible_load(void);
/* Called in the child after fork. */
void visible_in_child(void);

#endif
