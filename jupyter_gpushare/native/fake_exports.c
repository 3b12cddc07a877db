/* cuGetProcAddress of the simulated libcuda: names, versions and per-thread variants.
 *
 * Facts (CUDA Driver API reference 13.0, "Driver Entry Point Access"; versions as in that
 * release's cudaTypedefs.h): a caller asks for a name without suffix and gets the newest
 * variant that is not newer than the version it names; with
 * CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM it gets the _ptsz or _ptds one where there is
 * one.  The addresses are those of the exported symbols.
 */
#include <string.h>

#include "fake_cuda.h"

#define EXPORT(base, name, since) CUresult name();
#define EXPORT_STREAM(base, name, since, suffix) CUresult name(), name##suffix();
#include "fake_exports.h"
#undef EXPORT
#undef EXPORT_STREAM

static const struct {
    const char *base;
    int since;
    void *function, *per_thread;
} exported[] = {
#define EXPORT(base, name, since) {#base, since, (void *)name, (void *)name},
#define EXPORT_STREAM(base, name, since, suffix) {#base, since, (void *)name, (void *)name##suffix},
#include "fake_exports.h"
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
    *function = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM ? exported[best].per_thread
                                                                      : exported[best].function;
    return CUDA_SUCCESS;
}

API CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
