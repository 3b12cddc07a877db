/* What a process of a lease can do with its GPU after its environment was changed.
 *
 *   variables CHANGES      runs itself once for each line "NAME CHANGE [VALUE]" of a file, with NAME missing,
 *                          emptied or replaced by VALUE, and prints what the changed process found
 *   variables look         is such a process: changed from its start
 *   variables change NAME CHANGE [VALUE]
 *                          is one that changes the variable itself before its first call, as a first cell does
 *
 * A process opens its first device, and allocates 1 GiB, and then more than the lease has.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LINE = 4096 };

static void apply(const char *name, const char *change, const char *value)
{
    if (!strcmp(change, "missing"))
        unsetenv(name);
    else
        setenv(name, strcmp(change, "emptied") ? value : "", 1);
}

static int look(void)
{
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *context;
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(cuda, "cuInit");
    int (*count)(int *) = (int (*)(int *))dlsym(cuda, "cuDeviceGetCount");
    int (*retain)(void **, int) = (int (*)(void **, int))dlsym(cuda, "cuDevicePrimaryCtxRetain");
    int (*current)(void *) = (int (*)(void *))dlsym(cuda, "cuCtxSetCurrent");
    int (*total)(size_t *, int) = (int (*)(size_t *, int))dlsym(cuda, "cuDeviceTotalMem_v2");
    int (*allocate)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))dlsym(cuda, "cuMemAlloc_v2");
    const size_t gib = (size_t)1 << 30;
    uint64_t at;
    size_t bytes = 0;
    int devices = 0, code = init(0);
    if (!code)
        code = count(&devices);
    if (!code)
        code = retain(&context, 0);
    if (!code)
        code = current(context) ? current(context) : total(&bytes, 0);
    int within = code ? code : allocate(&at, gib), beyond = code ? code : allocate(&at, 40 * gib);
    printf("devices=%d gib=%zu open=%d within=%d beyond=%d\n", devices, bytes / gib, code, within, beyond);
    return 0;
}

/* One process for a change that was made before it, and one that makes the change itself. */
static void run(char *self, const char *name, const char *change, const char *value)
{
    for (int itself = 0; itself < 2; itself++) {
        printf("%s %s %s: ", name, change, itself ? "itself" : "before");
        fflush(stdout);
        pid_t pid = fork();
        if (!pid) {
            if (!itself)
                apply(name, change, value);
            char *before[] = {self, "look", NULL};
            char *after[] = {self, "change", (char *)name, (char *)change, (char *)value, NULL};
            execv(self, itself ? after : before);
            _exit(127);
        }
        int status;
        if (waitpid(pid, &status, 0) < 0 || status)
            printf("ended with %d\n", status);
    }
}

int main(int count, char **words)
{
    if (count == 2 && !strcmp(words[1], "look"))
        return look();
    if (count >= 4 && !strcmp(words[1], "change")) {
        apply(words[2], words[3], count > 4 ? words[4] : "");
        return look();
    }
    FILE *changes = count == 2 ? fopen(words[1], "r") : NULL;
    char line[LINE], *rest;
    if (!changes)
        return 2;
    while (fgets(line, sizeof line, changes)) {
        line[strcspn(line, "\n")] = 0;
        const char *name = strtok_r(line, " ", &rest), *change = strtok_r(NULL, " ", &rest);
        run(words[0], name, change, rest ? rest : "");
    }
    return fclose(changes);
}
