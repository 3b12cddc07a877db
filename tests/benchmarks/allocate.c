/* Allocates and frees 1 MiB of GPU memory in a loop; prints nanoseconds per pair.
 * `allocate LOOPS 1` does so in the order of a stream (cuMemAllocAsync).  See preload_overhead.py. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef int (*init_fn)(unsigned);
typedef int (*device_fn)(int *, int);
typedef int (*retain_fn)(void **, int);
typedef int (*current_fn)(void *);
typedef int (*alloc_fn)(unsigned long long *, size_t);
typedef int (*free_fn)(unsigned long long);
typedef int (*alloc_async_fn)(unsigned long long *, size_t, void *);
typedef int (*free_async_fn)(unsigned long long, void *);

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

int main(int argc, char **argv) {
    int loops = argc > 1 ? atoi(argv[1]) : 10000, in_stream = argc > 2, device = 0;
    void *context = NULL, *lib = dlopen("libcuda.so.1", RTLD_NOW);
    if (lib == NULL) { fprintf(stderr, "%s\n", dlerror()); return 1; }
    init_fn init = (init_fn)dlsym(lib, "cuInit");
    device_fn get = (device_fn)dlsym(lib, "cuDeviceGet");
    retain_fn retain = (retain_fn)dlsym(lib, "cuDevicePrimaryCtxRetain");
    current_fn set = (current_fn)dlsym(lib, "cuCtxSetCurrent");
    alloc_fn alloc = (alloc_fn)dlsym(lib, "cuMemAlloc_v2");
    free_fn release = (free_fn)dlsym(lib, "cuMemFree_v2");
    alloc_async_fn alloc_async = (alloc_async_fn)dlsym(lib, "cuMemAllocAsync");
    free_async_fn release_async = (free_async_fn)dlsym(lib, "cuMemFreeAsync");
    if (init(0) || get(&device, 0)) { fprintf(stderr, "no device\n"); return 1; }
    unsigned long long held = 0, memory = 0;
    if (retain(&context, device) || set(context) || alloc(&held, 64u << 20)) {
        fprintf(stderr, "no memory\n");
        return 1;
    }
    double best = 1e18;
    for (int repetition = 0; repetition < 7; repetition++) {
        double start = now_ns();
        for (int i = 0; i < loops; i++) {
            if (in_stream ? alloc_async(&memory, 1u << 20, NULL) || release_async(memory, NULL)
                          : alloc(&memory, 1u << 20) || release(memory)) {
                fprintf(stderr, "failed\n");
                return 1;
            }
        }
        double took = (now_ns() - start) / loops;
        if (took < best) best = took;
    }
    printf("%.2f\n", best);
    return release(held);
}
