/* The driver's functions, as the hooks of this library find them. */
#ifndef GPUSHARE_PRELOAD_DRIVER_H
#define GPUSHARE_PRELOAD_DRIVER_H

#include "../old_glibc.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "../cuda_types.h"
#include "preload_stubs.h"

#define API __attribute__((visibility("default")))

enum hook {
#define HOOK(kind, name, ...) HOOK_##name,
#include "hooks.h"
#undef HOOK
    HOOKS
};

typedef void *dlsym_function(void *, const char *);

/* glibc's dlsym, once `find_dlsym` has run; the function behind each hook, NULL while it is not known. */
extern dlsym_function *_Atomic gpushare_real_dlsym;
extern void *_Atomic gpushare_real[HOOKS + GPUSHARE_SPARES];

/* Threads may find it at once: each finds the same. */
dlsym_function *find_dlsym(void);

/* The driver's function behind a hook, and one without a hook (kept in `kept`); NULL while there is
 * none. */
void *real_of(unsigned hook);
void *plain_function(void *_Atomic *kept, const char *name);
/* Look up what hooks name of the driver, once: a comparison by address needs every one. */
void find_all(void);

#define REAL(name) ((__typeof__(&name))real_of(HOOK_##name))
/* In a wrapper: `real` is the driver's function of the same name. */
#define FIND_REAL(name)                    \
    __typeof__(&name) real = REAL(name);   \
    if (!real)                             \
    return CUDA_ERROR_NOT_INITIALIZED

#endif
