/* A second preloaded library.  Its constructor, which runs before ours, starts threads that look functions up
 * and call the driver while ours is loaded.  They begin with different questions.
 *
 * The lease, if there is one, has 1 GiB of the device of small_driver.c.  Exit code 0, or 3 where an answer was
 * wrong: it is on stderr.  With the sources of our library it is a program (test_neighbours.py).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { THREADS = 8, QUESTIONS = 4 };

int cuMemAlloc_v2(uint64_t *, size_t); /* linked */

#ifdef GPUSHARE_DLSYM
void *GPUSHARE_DLSYM(void *, const char *);
#define dlsym GPUSHARE_DLSYM
#define FIRST 101 /* before the constructors without a priority */
int main(void) { return 0; }
#else
#define FIRST 65535
#endif

static pthread_t threads[THREADS];
static _Atomic int waiting, wrong;
static void *cuda, *nvml;
static const size_t too_much = (size_t)2 << 30, all_bytes = (size_t)80 << 30, lease_bytes = (size_t)1 << 30;

/* What is wrong with an answer, or NULL. */
static const char *answer(int question)
{
    const int refused = getenv("GPUSHARE_LEASE") ? 2 /* CUDA_ERROR_OUT_OF_MEMORY */ : 0;
    uint64_t address, sizes[3];
    if (question == 0)
        return (pid_t(*)(void))dlsym(RTLD_DEFAULT, "getpid") == getpid ? NULL : "dlsym finds another getpid";
    if (question == 1) {
        int (*allocate)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))dlsym(cuda, "cuMemAlloc_v2");
        return allocate && allocate(&address, too_much) == refused ? NULL : "the limit does not hold";
    }
    if (question == 2) {
        int (*measure)(void *, uint64_t *) = (int (*)(void *, uint64_t *))dlsym(nvml, "nvmlDeviceGetMemoryInfo");
        bool asked = measure && !measure(sizes, sizes);
        return asked && sizes[0] == (refused ? lease_bytes : all_bytes) ? NULL : "NVML has the wrong size";
    }
    return cuMemAlloc_v2(&address, too_much) == refused ? NULL : "the limit does not hold for a linked function";
}

static void *ask(void *number)
{
    for (waiting++; waiting < THREADS + 1;)
        ;
    for (int i = 0; i < QUESTIONS; i++) {
        const char *complaint = answer((int)(i + (intptr_t)number) % QUESTIONS);
        if (complaint && !atomic_exchange(&wrong, 1))
            fprintf(stderr, "%s\n", complaint);
    }
    return NULL;
}

__attribute__((constructor(FIRST))) static void begin(void)
{
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    for (intptr_t i = 0; cuda && nvml && i < THREADS; i++)
        pthread_create(&threads[i], NULL, ask, (void *)i);
    for (waiting++; waiting < THREADS + 1;)
        ;
}

__attribute__((destructor(FIRST))) static void end(void)
{
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    if (wrong)
        _exit(3);
}
