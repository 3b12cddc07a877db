#ifndef GPUSHARE_PRELOAD_SYMBOLS_H
#define GPUSHARE_PRELOAD_SYMBOLS_H

/* Returns the first definition of a name in the process outside this library, or NULL. */
void *search_symbol(const char *name);

#endif
