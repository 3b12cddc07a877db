/* A call that enters while the lock is being taken: its wake-up must never be lost.
 *
 *   race victim SHARED                 in a lease: makes one call a round when told
 *   race observer SHARED ACCOUNT PID ROUNDS PATIENCE_MS
 *
 * A round: the observer reads the counters (the decision to suspend), tells the victim to go,
 * locks it after a random moment, and then looks at the counters as the device helper does,
 * by pread.  The victim makes its call after another random moment, so the call comes before,
 * inside or after the lock.  Either way the counters must differ from the first look soon; if
 * they never do, the call waits for ever on a process that is never resumed: exit code 1.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "gpushare_lease.h"

struct shared {
    _Atomic uint32_t round;    /* the victim makes its call of this round */
    _Atomic uint32_t finished; /* and has come back from it */
    _Atomic uint32_t ready;
};

/* Sleeping, not spinning: on a busy machine a spinning process takes the CPU from the one that it waits for. */
static void wait_until(_Atomic uint32_t *word, uint32_t value)
{
    uint32_t seen;
    while ((seen = atomic_load(word)) < value)
        syscall(SYS_futex, word, FUTEX_WAIT, seen, NULL, NULL, 0);
}

static void tell(_Atomic uint32_t *word, uint32_t value)
{
    atomic_store(word, value);
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void spin(uint64_t *seed, uint64_t most_ns)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    uint64_t until = now_ns() + (*seed >> 33) % most_ns;
    while (now_ns() < until) {
    }
}

static void *find(const char *name)
{
    static void *cuda;
    if (!cuda)
        cuda = dlopen("libcuda.so.1", RTLD_NOW);
    void *found = cuda ? dlsym(cuda, name) : NULL;
    if (!found)
        exit(3);
    return found;
}

static int victim(struct shared *shared)
{
    int (*init)(unsigned) = (int (*)(unsigned))find("cuInit");
    int (*retain)(void **, int) = (int (*)(void **, int))find("cuDevicePrimaryCtxRetain");
    int (*current)(void *) = (int (*)(void *))find("cuCtxSetCurrent");
    int (*synchronize)(void) = (int (*)(void))find("cuCtxSynchronize");
    int (*allocate)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))find("cuMemAlloc_v2");
    int (*release)(uint64_t) = (int (*)(uint64_t))find("cuMemFree_v2");
    void *context;
    uint64_t at, seed = 1;
    if (init(0) || retain(&context, 0) || current(context) || allocate(&at, 1 << 21))
        return 3;
    tell(&shared->ready, 1);
    for (uint32_t round = 1;; round++) {
        wait_until(&shared->round, round);
        spin(&seed, 40000);
        /* By turns a function that is only counted, and two with an account. */
        if (round % 3 == 0 ? synchronize() : round % 3 == 1 ? release(at) : allocate(&at, 1 << 21))
            return 4;
        tell(&shared->finished, round);
    }
}

/* The sum over all slots: what the helper compares, in one number. */
static uint64_t counters(int account)
{
    static struct gpushare_account copy;
    uint64_t sum = 0;
    if (pread(account, &copy, sizeof copy, 0) != (ssize_t)sizeof copy)
        exit(3);
    for (int i = 0; i < GPUSHARE_SLOTS; i++)
        sum += copy.slot[i].work + copy.slot[i].calls;
    return sum;
}

static int observer(struct shared *shared, int account, int pid, uint64_t rounds, uint64_t patience_ms)
{
    int (*init)(unsigned) = (int (*)(unsigned))find("cuInit");
    int (*lock)(int, void *) = (int (*)(int, void *))find("cuCheckpointProcessLock");
    int (*unlock)(int, void *) = (int (*)(int, void *))find("cuCheckpointProcessUnlock");
    uint64_t arguments[8] = {1000}, seed = 2, caught_waiting = 0;
    if (init(0))
        return 3;
    wait_until(&shared->ready, 1);
    for (uint32_t round = 1; round <= rounds; round++) {
        uint64_t decided = counters(account);
        tell(&shared->round, round);
        spin(&seed, 60000);
        if (lock(pid, arguments))
            return 4;
        caught_waiting += atomic_load(&shared->finished) < round;
        uint64_t patience = now_ns() + patience_ms * 1000000u;
        while (counters(account) == decided) {
            nanosleep(&(struct timespec){0, 20000}, NULL);
            if (now_ns() > patience) {
                printf("round %u: the wake-up was lost\n", round);
                return 1;
            }
        }
        if (unlock(pid, NULL))
            return 4;
        wait_until(&shared->finished, round);
    }
    printf("%llu\n", (unsigned long long)caught_waiting);
    return 0;
}

int main(int count, char **words)
{
    int fd = count > 2 ? open(words[2], O_RDWR) : -1;
    struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (shared == MAP_FAILED)
        return 3;
    if (!strcmp(words[1], "victim"))
        return victim(shared);
    if (count != 7)
        return 2;
    return observer(shared, open(words[3], O_RDONLY), atoi(words[4]), strtoull(words[5], NULL, 10),
                    strtoull(words[6], NULL, 10));
}
