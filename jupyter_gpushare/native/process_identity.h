/* The identity of a process: its pid and start time, because a pid alone is reused.
 *
 * proc(5): /proc/PID/stat, field 3 state, 20 num_threads, 22 starttime.  The driver
 * frees a process's memory before it becomes a zombie, so a zombie counts as gone.
 * A leader that ended before its other threads is not a zombie (num_threads > 1).
 */
#ifndef GPUSHARE_PROCESS_IDENTITY_H
#define GPUSHARE_PROCESS_IDENTITY_H

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#ifndef PROC_FOLDER
#define PROC_FOLDER "/proc"
#endif
enum { PROC_PATH_BYTES = 256 };

/* Returns the start time in clock ticks, or 0 if there is no such living process. */
static inline uint64_t process_start_ticks(int32_t pid)
{
    char path[PROC_PATH_BYTES], text[1024];
    snprintf(path, sizeof path, "%s/%d/stat", PROC_FOLDER, pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0)
        return 0;
    text[got] = 0;
    const char *at = strrchr(text, ')'); /* the name may contain anything, so start after its end */
    if (!at || at[1] != ' ' || !at[2])
        return 0;
    char state = at[2];
    uint64_t threads = 0, start = 0;
    at += 2;
    for (int field = 4; field <= 22; field++) { /* no sscanf: see old_glibc.h */
        uint64_t number = 0;
        if (!(at = strchr(at, ' ')))
            return 0;
        for (at++; *at >= '0' && *at <= '9'; at++)
            number = number * 10 + (uint64_t)(*at - '0');
        threads = field == 20 ? number : threads;
        start = field == 22 ? number : start;
    }
    if (state == 'X' || (state == 'Z' && threads <= 1))
        return 0;
    return start;
}

#endif
