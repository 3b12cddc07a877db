/* Times `launches THREADS LOOPS`: nanoseconds of one cuLaunchKernel of a driver that does nothing,
 * which shows what the preload library adds, by a number of threads that launch at once. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { MOST_THREADS = 64 };
static int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
static pthread_barrier_t ready;
static long loops;

static void *run(void *took)
{
    struct timespec from, to;
    launch(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    pthread_barrier_wait(&ready);
    clock_gettime(CLOCK_MONOTONIC, &from);
    for (long i = 0; i < loops; i++)
        launch(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    clock_gettime(CLOCK_MONOTONIC, &to);
    *(double *)took = (1e9 * (double)(to.tv_sec - from.tv_sec) + (double)(to.tv_nsec - from.tv_nsec)) / (double)loops;
    return NULL;
}

int main(int count, char **words)
{
    pthread_t thread[MOST_THREADS];
    double took[MOST_THREADS], slowest = 0;
    int threads = count == 3 ? atoi(words[1]) : 0;
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    loops = count == 3 ? strtol(words[2], NULL, 10) : 0;
    if (!cuda || threads < 1 || threads > MOST_THREADS || loops < 1)
        return 1;
    *(void **)&launch = dlsym(cuda, "cuLaunchKernel");
    pthread_barrier_init(&ready, NULL, (unsigned)threads);
    for (int i = 0; i < threads; i++)
        pthread_create(&thread[i], NULL, run, &took[i]);
    for (int i = 0; i < threads; i++) {
        pthread_join(thread[i], NULL);
        slowest = took[i] > slowest ? took[i] : slowest;
    }
    printf("%.2f\n", slowest);
    return 0;
}
