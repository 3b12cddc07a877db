/* The files of a lease are replaced while one thread is in the middle of its first call and another waits for
 * its turn (test_account.py).  PROC_FOLDER is a folder of the test's: the first thread reads the start time of
 * its process there, from a pipe, for as long as this program says nothing into it.
 *
 *   replaced LIMIT ACCOUNT PIPE     the two files that replace the first two are called FILE.new
 *
 * Exit code 0, or the line of what was wrong.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "preload/lease_client.h"

enum { CALLS = 5 };

#define MUST(condition)                                                      \
    do {                                                                     \
        if (!(condition)) {                                                  \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);  \
            return __LINE__ & 255;                                           \
        }                                                                    \
    } while (0)

static void *call(void *nothing) { lease_enter(LEASE_CALLS); return nothing; }
static void *wait_to_allocate(void *nothing) { lease_wait_to_allocate(); return nothing; }

static struct gpushare_account *map(const char *path)
{
    int fd = open(path, O_RDWR);
    return mmap(NULL, sizeof(struct gpushare_account), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
}

static int replace(const char *path)
{
    char with[4096];
    snprintf(with, sizeof with, "%s.new", path);
    return rename(with, path);
}

static uint64_t calls_in(const struct gpushare_account *account)
{
    uint64_t calls = 0;
    for (int i = 0; i < GPUSHARE_SLOTS; i++)
        calls += account->slot[i].calls;
    return calls;
}

int main(int count, char **path)
{
    static const char stat_line[] = "1 (x) R 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 0 77 0\n";
    char own[4096], uuid[LEASE_UUID_BYTES];
    pthread_t first, second;
    MUST(count == 4 && lease_uuid(0, uuid)); /* maps the page, which says SUSPENDED */
    snprintf(own, sizeof own, PROC_FOLDER "/%d", getpid());
    MUST(!mkdir(own, 0700));
    snprintf(own, sizeof own, PROC_FOLDER "/%d/stat", getpid());
    MUST(!mkfifo(path[3], 0600) && !link(path[3], own));

    struct gpushare_account *old = map(path[2]);
    pthread_create(&first, NULL, call, NULL);
    for (int busy = 0; !busy; nanosleep(&(struct timespec){0, 1000000}, NULL)) {
        busy = old->magic && pthread_mutex_trylock(&old->lock.mutex) == EBUSY;
        if (old->magic && !busy)
            pthread_mutex_unlock(&old->lock.mutex);
    }
    int fd = open(PROC_FOLDER "/stat", O_WRONLY | O_CREAT, 0600);
    MUST(write(fd, stat_line, sizeof stat_line - 1) > 0 && !close(fd) && !rename(PROC_FOLDER "/stat", own));
    MUST(!replace(path[1]) && !replace(path[2]));
    pthread_create(&second, NULL, wait_to_allocate, NULL);
    pthread_join(second, NULL);
    struct gpushare_account *account = map(path[2]);
    MUST(calls_in(old) == 0 && calls_in(account) > 0);

    fd = open(path[3], O_WRONLY);
    MUST(write(fd, stat_line, sizeof stat_line - 1) > 0 && !close(fd));
    pthread_join(first, NULL);
    uint64_t before = calls_in(account);
    for (int i = 0; i < CALLS; i++)
        lease_enter(LEASE_CALLS);
    MUST(calls_in(account) == before + CALLS);
    return 0;
}
