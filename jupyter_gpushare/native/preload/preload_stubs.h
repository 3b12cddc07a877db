/* Shared by preload.c and preload_stubs.S: spare hooks, bound at run time to variants of a function that
 * hooks.h does not name, for example of a newer driver.  There are 1024 (32 KiB), more than functions in
 * hooks.h, in case a driver's cuGetProcAddress answers other addresses than those of its symbols. */
#define GPUSHARE_SPARES 1024
#define GPUSHARE_SPARE_SHIFT 5
#define GPUSHARE_SPARE_BYTES 32
