/* The driver's functions behind the hooks, looked up by name once the driver is loaded.
 *
 * This library and programs keep the addresses, so a library in which one was found is never unloaded
 * (RTLD_NODELETE): a program that closes the driver and opens it again gets the same one.  Only the first
 * loaded copy with the name libcuda.so.1 is hooked.
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

static const char missing; /* stands for a function that the loaded driver lacks */

/* Returns NULL if the library is not loaded. */
static void *keep_loaded(const char *file)
{
    void *library = dlopen(file, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
    if (library)
        dlclose(library); /* drops the reference of this call; the library stays loaded */
    return library;
}

/* Returns NULL if the driver is not loaded. */
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

/* Called once the driver is surely loaded. */
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

/* Looks a function without a hook up once, even if an older driver lacks it. */
void *plain_function(void *_Atomic *kept, const char *name)
{
    void *function = atomic_load_explicit(kept, memory_order_acquire);
    if (!function && (function = look_up(name)))
        atomic_store(kept, function);
    return function == &missing ? NULL : function;
}
