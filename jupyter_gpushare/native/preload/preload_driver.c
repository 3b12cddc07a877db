/* The driver's functions behind the hooks, looked up by name when the driver is loaded.
 *
 * Addresses are kept here and in programs, so a library in which one was found is never unloaded again
 * (RTLD_NODELETE): a program that closes the driver and opens it again gets the same one.  Only the copy
 * with the name libcuda.so.1 that was loaded first is hooked.
 */
#define _GNU_SOURCE
#include "preload_driver.h"

#include <dlfcn.h>
#include <stdint.h>

#include "preload_symbols.h"

dlsym_function *_Atomic gpushare_real_dlsym;
void *_Atomic gpushare_real[HOOKS + GPUSHARE_SPARES];

static const char *const names[HOOKS] = {
#define HOOK(kind, name, ...) #name,
#include "hooks.h"
#undef HOOK
};

static void *no_symbol(void *handle, const char *name)
{
    (void)handle, (void)name;
    return NULL;
}

dlsym_function *find_dlsym(void)
{
    dlsym_function *found = atomic_load_explicit(&gpushare_real_dlsym, memory_order_acquire);
    if (!found) {
        if (dlvsym)
            found = (dlsym_function *)dlvsym(RTLD_NEXT, "dlsym", GPUSHARE_OLDEST);
        if (!found)
            found = (dlsym_function *)search_symbol("dlsym");
        if (!found)
            found = no_symbol;
        atomic_store(&gpushare_real_dlsym, found);
    }
    return found;
}

static bool is_nvml(const char *name)
{
    return name[0] == 'n';
}

static bool is_cupti(const char *name)
{
    return !strncmp(name, "cupti", 5);
}

static const char missing; /* in place of a function that the loaded driver does not have */

/* NULL where the library is not loaded. */
static void *keep_loaded(const char *file)
{
    void *library = dlopen(file, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
    if (library)
        dlclose(library); /* the reference of this call: it stays loaded without */
    return library;
}

/* NULL where the driver is not loaded. */
static void *look_up(const char *name)
{
    void *library = keep_loaded(is_nvml(name) ? "libnvidia-ml.so.1" : "libcuda.so.1");
    if (!library)
        return NULL;
    void *function = find_dlsym()(library, name);
    return function ? function : (void *)(uintptr_t)&missing;
}

static void *cupti_function(const char *name)
{
    Dl_info found;
    void *function = search_symbol(name);
    if (function && dladdr(function, &found))
        keep_loaded(found.dli_fname);
    return function;
}

static void *driver_function(const char *name)
{
    void *function = look_up(name);
    return function == &missing ? NULL : function;
}

void *real_of(unsigned index)
{
    void *function = atomic_load_explicit(&gpushare_real[index], memory_order_acquire);
    if (function || index >= HOOKS)
        return function;
    const char *name = names[index];
    function = is_cupti(name) ? cupti_function(name) : driver_function(name);
    if (function)
        atomic_store(&gpushare_real[index], function);
    return function;
}

/* All at once, when the driver is there for sure: a comparison by address needs every one. */
void find_all(void)
{
    static _Atomic bool done;
    if (atomic_load_explicit(&done, memory_order_acquire))
        return;
    for (unsigned i = 0; i < HOOKS; i++)
        if (!is_nvml(names[i]) && !is_cupti(names[i]))
            real_of(i);
    atomic_store(&done, true);
}

/* A function without a hook of its own, looked up once, also where an older driver lacks it. */
void *plain_function(void *_Atomic *kept, const char *name)
{
    void *function = atomic_load_explicit(kept, memory_order_acquire);
    if (!function && (function = look_up(name)))
        atomic_store(kept, function);
    return function == &missing ? NULL : function;
}
