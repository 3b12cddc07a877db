#ifndef GPUSHARE_PRELOAD_SYMBOLS_H
#define GPUSHARE_PRELOAD_SYMBOLS_H

/* The first definition of a name in the process outside this library; NULL: none. */
void *search_symbol(const char *name);

#endif
