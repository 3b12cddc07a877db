/* cuGetProcAddress of the simulated libcuda: names, versions and per-thread variants.
 *
 * Facts (CUDA Driver API reference 13.0, "Driver Entry Point Access"; versions as in that
 * release's cudaTypedefs.h): a caller requests a name without suffix and gets the newest variant
 * up to its version; with CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM it gets the _ptsz or _ptds
 * variant if there is one.  It is not documented whether the addresses are those of the exported
 * symbols: with entry-points=apart each is a jump to its symbol, at another address.
 */
#include <string.h>

#include "sim_gate.h"

#if defined __x86_64__
#define JUMP(from, to) __asm__(".text\n.p2align 4\n" #from ": endbr64\njmp " #to "@PLT");
#elif defined __aarch64__
#define JUMP(from, to) __asm__(".text\n.p2align 4\n" #from ": bti c\nb " #to);
#endif
#define APART(name) \
    CUresult name(); \
    extern const char apart_##name[] __attribute__((visibility("hidden"))); \
    JUMP(apart_##name, name)
/* The per-thread variants differ only in the meaning of stream 0, and the simulator has only one default stream. */
#define PER_THREAD(variant, name) \
    __asm__(".globl " #variant "\n.type " #variant ", %function"); \
    JUMP(variant, name)
#define EXPORT(base, name, since) APART(name)
#define EXPORT_STREAM(base, name, since, suffix) APART(name) APART(name##suffix) PER_THREAD(name##suffix, name)
#include "sim_exports.h"
#undef EXPORT
#undef EXPORT_STREAM

static const struct {
    const char *base;
    int since;
    void *function, *per_thread;
    const char *function_apart, *per_thread_apart;
} exported[] = {
#define EXPORT(base, name, since) {#base, since, (void *)name, (void *)name, apart_##name, apart_##name},
#define EXPORT_STREAM(base, name, since, suffix) \
    {#base, since, (void *)name, (void *)name##suffix, apart_##name, apart_##name##suffix},
#include "sim_exports.h"
#undef EXPORT
#undef EXPORT_STREAM
};

API CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status)
{
    int best = -1, known = 0;
    if (!symbol || !function)
        return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < (int)(sizeof exported / sizeof *exported); i++)
        if (!strcmp(exported[i].base, symbol)) {
            known = 1;
            if (exported[i].since <= version && (best < 0 || exported[i].since > exported[best].since))
                best = i;
        }
    *function = NULL;
    if (status)
        *status = best >= 0 ? CU_PROC_ADDRESS_FOUND : known ? CU_PROC_ADDRESS_TOO_OLD : CU_PROC_ADDRESS_NOT_FOUND;
    if (best < 0)
        return CUDA_ERROR_NOT_FOUND;
    bool per_thread = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    *function = per_thread ? exported[best].per_thread : exported[best].function;
    if (!sim_open() && sim->entry_points_apart)
        *function = (void *)(uintptr_t)(per_thread ? exported[best].per_thread_apart : exported[best].function_apart);
    return CUDA_SUCCESS;
}

API CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
