/* Times single driver calls: `calls LAUNCHES` prints the nanoseconds of one kernel launch, one
 * cuMemGetInfo and one dlsym, each the best of several repetitions.  An empty kernel; on a real
 * driver a launch is asynchronous and its queue is drained between repetitions. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { REPETITIONS = 7, DRAIN_EVERY = 512, INFOS = 1000, SYMBOLS = 10000 };

typedef int call_fn();

static const char kernel[] = ".version 7.0\n.target sm_75\n.address_size 64\n"
                             ".visible .entry gpushare_probe(.param .u64 a, .param .u64 b, .param .u64 c)\n"
                             "{\n    ret;\n}\n";

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

int main(int count, char **words)
{
    long loops = count > 1 ? strtol(words[1], NULL, 10) : 100000;
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *context, *module, *function;
    if (!cuda)
        return 1;
    call_fn *init = (call_fn *)dlsym(cuda, "cuInit"), *retain = (call_fn *)dlsym(cuda, "cuDevicePrimaryCtxRetain");
    call_fn *current = (call_fn *)dlsym(cuda, "cuCtxSetCurrent"), *load = (call_fn *)dlsym(cuda, "cuModuleLoadData");
    call_fn *get = (call_fn *)dlsym(cuda, "cuModuleGetFunction"), *drain = (call_fn *)dlsym(cuda, "cuCtxSynchronize");
    call_fn *allocate = (call_fn *)dlsym(cuda, "cuMemAlloc_v2");
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **) =
        (int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                 void **))dlsym(cuda, "cuLaunchKernel");
    int (*info)(size_t *, size_t *) = (int (*)(size_t *, size_t *))dlsym(cuda, "cuMemGetInfo_v2");
    unsigned long long memory = 0, one = 1, extra = 0;
    size_t free_bytes, total;
    if (init(0) || retain(&context, 0) || current(context) || load(&module, kernel) ||
        get(&function, module, "gpushare_probe") || allocate(&memory, (size_t)1 << 21))
        return 1;
    void *arguments[] = {&memory, &one, &extra};
    double best[3] = {1e18, 1e18, 1e18};
    for (int repetition = 0; repetition < REPETITIONS; repetition++) {
        double in_launches = 0;
        for (long i = 0; i < loops / REPETITIONS; i += DRAIN_EVERY) {
            double start = now_ns();
            for (int j = 0; j < DRAIN_EVERY; j++)
                if (launch(function, 1, 1, 1, 1, 1, 1, 0, NULL, arguments, NULL))
                    return 1;
            in_launches += now_ns() - start;
            if (drain())
                return 1;
        }
        long made = (loops / REPETITIONS + DRAIN_EVERY - 1) / DRAIN_EVERY * DRAIN_EVERY;
        double start = now_ns();
        for (int i = 0; i < INFOS; i++)
            if (info(&free_bytes, &total))
                return 1;
        double infos = now_ns() - start;
        start = now_ns();
        for (int i = 0; i < SYMBOLS; i++)
            if (!dlsym(cuda, "cuMemAlloc_v2"))
                return 1;
        double symbols = now_ns() - start;
        double took[3] = {in_launches / (double)made, infos / INFOS, symbols / SYMBOLS};
        for (int i = 0; i < 3; i++)
            best[i] = took[i] < best[i] ? took[i] : best[i];
    }
    printf("%.1f %.1f %.1f\n", best[0], best[1], best[2]);
    return 0;
}
