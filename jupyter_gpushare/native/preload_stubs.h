/* Shared by preload.c and preload_stubs.S: hooks made at run time for variants of a function
 * that hooks.h does not name, for example of a driver newer than this library. */
#define GPUSHARE_SPARES 128
#define GPUSHARE_SPARE_SHIFT 5
#define GPUSHARE_SPARE_BYTES 32
