/* Processes of a lease that are killed (-9) at random moments: what they leave in the account.
 *
 *   kill ROUNDS SEED       starts ROUNDS victims one after the other, three at a time, and kills each
 *   kill victim SEED       allocates and frees until killed
 *
 * The parent uses neither driver nor library.  A victim is killed somewhere between its first
 * instruction (the linker, the library's own start) and a few hundred allocations.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { AT_ONCE = 3, HELD = 16 };

static uint64_t seed;

static uint64_t chance(uint64_t below)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (seed >> 33) % below;
}

static int victim(void)
{
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *context;
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(cuda, "cuInit");
    int (*retain)(void **, int) = (int (*)(void **, int))dlsym(cuda, "cuDevicePrimaryCtxRetain");
    int (*current)(void *) = (int (*)(void *))dlsym(cuda, "cuCtxSetCurrent");
    int (*allocate)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))dlsym(cuda, "cuMemAlloc_v2");
    int (*release)(uint64_t) = (int (*)(uint64_t))dlsym(cuda, "cuMemFree_v2");
    uint64_t held[HELD] = {0};
    if (init(0) || retain(&context, 0) || current(context))
        return 3;
    for (;;) {
        uint64_t *at = &held[chance(HELD)];
        if (*at ? release(*at) : 0)
            return 4;
        *at = 0;
        int code = allocate(at, chance(2) ? 4096 : (size_t)(1 + chance(64)) << 25);
        if (code && code != 2)
            return 5;
        if (code)
            *at = 0;
    }
}

static pid_t start(const char *self)
{
    char word[32];
    snprintf(word, sizeof word, "%llu", (unsigned long long)chance(1u << 30));
    pid_t pid = fork();
    if (!pid) {
        setenv("LD_PRELOAD", getenv("VICTIM_PRELOAD"), 1);
        execl(self, self, "victim", word, (char *)NULL);
        _exit(3);
    }
    return pid;
}

int main(int count, char **words)
{
    if (count != 3)
        return 2;
    seed = strtoull(words[2], NULL, 10) * 2654435761u + 1;
    if (!strcmp(words[1], "victim"))
        return victim();
    pid_t running[AT_ONCE] = {0};
    long rounds = strtol(words[1], NULL, 10), killed = 0;
    for (long round = 0; round < rounds + AT_ONCE; round++) {
        pid_t *place = &running[round % AT_ONCE];
        int status;
        if (*place) {
            kill(*place, SIGKILL);
            if (waitpid(*place, &status, 0) != *place || !WIFSIGNALED(status))
                return 1; /* it ended by itself: wrong */
            killed++;
        }
        *place = round < rounds ? start(words[0]) : 0;
        /* Loading takes about as long as the longest sleep. */
        nanosleep(&(struct timespec){0, (long)chance(2500000)}, NULL);
    }
    printf("%ld\n", killed);
    return 0;
}
