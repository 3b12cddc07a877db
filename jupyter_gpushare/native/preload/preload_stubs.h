/* Shared by preload.c and preload_stubs.S: hooks made at run time for variants of a function
 * that hooks.h does not name, for example of a driver newer than this library.  1024 (32 KiB) are
 * more than hooks.h has functions, for a driver with a cuGetProcAddress that answers other
 * addresses than its symbols have. */
#define GPUSHARE_SPARES 1024
#define GPUSHARE_SPARE_SHIFT 5
#define GPUSHARE_SPARE_BYTES 32
