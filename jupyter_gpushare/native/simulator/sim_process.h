/* Processes by the pids that a driver knows: those of the machine's first pid namespace.
 *
 * A real driver is in the kernel and has these pids everywhere.  For processes in another pid namespace,
 * $GPUSHARE_SIM_PROC names a folder where the machine's first /proc is mounted.
 */
#ifndef GPUSHARE_SIM_PROCESS_H
#define GPUSHARE_SIM_PROCESS_H

#include "../old_glibc.h"

#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

static inline const char *sim_proc(void)
{
    const char *given = getenv("GPUSHARE_SIM_PROC");
    return given && *given ? given : "/proc";
}

#define PROC_FOLDER sim_proc()
#include "../process_identity.h"

/* Returns the pid of this process. */
static inline int32_t sim_self(void)
{
    char path[PROC_PATH_BYTES], pid[16] = "";
    if (!getenv("GPUSHARE_SIM_PROC"))
        return getpid();
    snprintf(path, sizeof path, "%s/self", sim_proc());
    ssize_t got = readlink(path, pid, sizeof pid - 1);
    return got > 0 ? atoi(pid) : getpid();
}

#endif
