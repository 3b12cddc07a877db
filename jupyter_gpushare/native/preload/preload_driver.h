/* Finds the driver's functions behind the hooks. */
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

/* glibc's dlsym, after `find_dlsym` has run; the function behind each hook, NULL while unknown. */
extern dlsym_function *_Atomic gpushare_real_dlsym;
extern void *_Atomic gpushare_real[HOOKS + GPUSHARE_SPARES];

/* Several threads may call this at once: all find the same function. */
dlsym_function *find_dlsym(void);

/* Return the driver's function behind a hook, or one without a hook (cached in `kept`); NULL while there is
 * none. */
void *real_of(unsigned hook);
void *plain_function(void *_Atomic *kept, const char *name);
/* Looks up all hooked functions of the driver once, because a comparison by address needs all of them. */
void find_all(void);

#define REAL(name) ((__typeof__(&name))real_of(HOOK_##name))
/* In a wrapper, `real` becomes the driver's function of the same name. */
#define FIND_REAL(name)                    \
    __typeof__(&name) real = REAL(name);   \
    if (!real)                             \
    return CUDA_ERROR_NOT_INITIALIZED

#endif
