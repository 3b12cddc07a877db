/* What a library would do at the end of a turn, without that library: one thread records all that a
 * context has begun (cuCtxRecordEvent) and asks for that event, with pauses as in
 * native/preload/preload_turns.c, once or again and again.
 * In C, so that no interpreter's lock is measured with it. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

enum { DISABLE_TIMING = 2, NOT_READY = 600 };

static int (*set_current)(void *), (*create)(void **, unsigned), (*destroy)(void *);
static int (*record)(void *, void *), (*query)(void *);
static void *context;
static unsigned period_us;
static long most;
static _Atomic int ending;
static pthread_t thread;
static struct {
    double rounds, code, record_ns, drain_ns, cpu_ns, wall_ns; /* of the calls, of the last drain, of the thread */
} found;

static double now_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

static int wait_for(void *event, double since_ns)
{
    int code;
    while ((code = query(event)) == NOT_READY) {
        double pause_ns = (now_ns(CLOCK_MONOTONIC) - since_ns) / 16;
        pause_ns = pause_ns < 50e3 ? 50e3 : pause_ns > 1e6 ? 1e6 : pause_ns;
        nanosleep(&(struct timespec){0, (long)pause_ns}, NULL);
    }
    return code;
}

static void *record_and_wait(void *unused)
{
    void *event;
    struct timespec pause = {period_us / 1000000, period_us % 1000000 * 1000l};
    double began = now_ns(CLOCK_MONOTONIC);
    int code = set_current(context);
    code = code ? code : create(&event, DISABLE_TIMING);
    while (!code && !ending && (long)found.rounds < most) {
        double start = now_ns(CLOCK_MONOTONIC);
        code = record(context, event);
        double recorded = now_ns(CLOCK_MONOTONIC);
        code = code ? code : wait_for(event, recorded);
        found.record_ns += recorded - start;
        found.drain_ns = now_ns(CLOCK_MONOTONIC) - start;
        found.rounds++;
        if (period_us)
            nanosleep(&pause, NULL);
    }
    found.code = code;
    found.cpu_ns = now_ns(CLOCK_THREAD_CPUTIME_ID);
    found.wall_ns = now_ns(CLOCK_MONOTONIC) - began;
    if (!code)
        destroy(event);
    return unused;
}

/* Begin: `rounds` times, `us` microseconds apart.  -1: this driver has no cuCtxRecordEvent. */
int recorder_start(void *given, unsigned us, long rounds)
{
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    *(void **)&record = dlsym(cuda, "cuCtxRecordEvent");
    *(void **)&set_current = dlsym(cuda, "cuCtxSetCurrent");
    *(void **)&create = dlsym(cuda, "cuEventCreate");
    *(void **)&destroy = dlsym(cuda, "cuEventDestroy_v2");
    *(void **)&query = dlsym(cuda, "cuEventQuery");
    if (!record)
        return -1;
    context = given, period_us = us, most = rounds, ending = 0;
    found = (typeof(found)){0};
    return pthread_create(&thread, NULL, record_and_wait, NULL);
}

/* Wait for the last round; `at_once`: begin no other one.  Six numbers, as `found` has them. */
void recorder_end(int at_once, double *out)
{
    ending = at_once;
    pthread_join(thread, NULL);
    double all[] = {found.rounds, found.code, found.record_ns, found.drain_ns, found.cpu_ns, found.wall_ns};
    for (int i = 0; i < 6; i++)
        out[i] = all[i];
}
