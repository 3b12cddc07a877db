/* A lease that a process gets after its start. */
#ifndef GPUSHARE_PRELOAD_GAIN_H
#define GPUSHARE_PRELOAD_GAIN_H

/* Called once, before the program runs. */
void gain_load(void);

#endif
