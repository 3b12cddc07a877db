#define _GNU_SOURCE
#include "../old_glibc.h"

#include "lease_files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../gpushare_lease.h"

enum { PATH_BYTES = 4096 };

static char folder[PATH_BYTES]; /* empty if none was named */

/* If the program changes the variable later, that only affects its children. */
bool keep_lease_folder(void)
{
    const char *named = getenv("GPUSHARE_LEASE_DIR");
    if (named && strlen(named) < PATH_BYTES)
        strcpy(folder, named);
    return named;
}

void complain_of_lease(const char *what, const char *why)
{
    static _Atomic bool is_reported;
    if (!atomic_exchange(&is_reported, true))
        fprintf(stderr, "gpushare: GPU memory cannot be allocated: %s: %s\n", what, why);
}

/* Only a process that finds a new account takes the file's lock, so no process waits for it later. */
static void init_account(int fd, struct gpushare_account *made)
{
    struct flock whole = {.l_type = F_WRLCK};
    if (__atomic_load_n(&made->magic, __ATOMIC_ACQUIRE) != 0)
        return;
    while (fcntl(fd, F_OFD_SETLKW, &whole) && errno == EINTR) {
    }
    if (__atomic_load_n(&made->magic, __ATOMIC_ACQUIRE) == 0) {
        pthread_mutexattr_t attributes;
        pthread_mutexattr_init(&attributes);
        pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&made->lock.mutex, &attributes);
        pthread_mutexattr_destroy(&attributes);
        made->version = GPUSHARE_VERSION;
        __atomic_store_n(&made->magic, GPUSHARE_ACCOUNT_MAGIC, __ATOMIC_RELEASE);
    }
    whole.l_type = F_UNLCK; /* close() would not unlock: the mapping keeps the description and its lock */
    fcntl(fd, F_OFD_SETLK, &whole);
}

/* Makes the system call directly, because its glibc function has another version since 2.33. */
static bool is_file_of(int fd, size_t bytes, struct stat *file)
{
    return !syscall(SYS_fstat, fd, file) && S_ISREG(file->st_mode) && file->st_size >= (off_t)bytes;
}

/* Returns false if the process has no lease directory. */
static bool path_of(const char *name, char path[PATH_BYTES])
{
    return *folder && (size_t)snprintf(path, PATH_BYTES, "%s/%s", folder, name) < PATH_BYTES;
}

static int open_file(const char *path, bool write)
{
    return open(path, (write ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
}

bool find_lease_file(const char *name, size_t bytes, struct stat *file)
{
    char path[PATH_BYTES];
    int fd = is_glibc() && path_of(name, path) ? open_file(path, false) : -1;
    bool found = fd >= 0 && is_file_of(fd, bytes, file);
    if (fd >= 0)
        close(fd);
    return found;
}

void *map_lease_file(const char *name, bool write, size_t bytes, bool may_be_missing, struct stat *file)
{
    char path[PATH_BYTES];
    if (!is_glibc()) {
        complain_of_lease("the C library of this program", "is not glibc");
        return NULL;
    }
    if (!path_of(name, path)) {
        complain_of_lease("GPUSHARE_LEASE_DIR", "names no lease");
        return NULL;
    }
    int fd = open_file(path, write);
    if (fd < 0) {
        if (errno != ENOENT || !may_be_missing)
            complain_of_lease(path, strerror(errno));
        return NULL;
    }
    void *at = MAP_FAILED;
    if (is_file_of(fd, bytes, file)) {
        at = mmap(NULL, bytes, write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
        if (write && at != MAP_FAILED)
            init_account(fd, at);
    }
    close(fd);
    if (at == MAP_FAILED)
        complain_of_lease(path, "is not a lease file");
    return at == MAP_FAILED ? NULL : at;
}
