/* Limits of cgroups in the simulated driver ("MPS v3 Memory Partitioning", docs.nvidia.com): the
 * processes of a cgroup together may not allocate more of a device than its hard limit.
 *
 * A process is in a cgroup if `cgroup.procs` lists it or an ancestor.  In a real cgroup the kernel
 * lists children itself.  Tests without a cgroup file system use a plain folder, so ancestors count.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim_gpu.h"

enum { MOST_LISTED = 1024, MOST_GENERATIONS = 64 };

struct members {
    int32_t pid[MOST_LISTED];
    int count;
};

static void read_members(const char *path, struct members *members)
{
    char procs[SIM_GROUP_PATH + sizeof "/cgroup.procs"], line[32];
    snprintf(procs, sizeof procs, "%s/cgroup.procs", path);
    FILE *file = fopen(procs, "re");
    members->count = 0;
    while (file && members->count < MOST_LISTED && fgets(line, sizeof line, file))
        members->pid[members->count++] = (int32_t)strtol(line, NULL, 10);
    if (file)
        fclose(file);
}

unsigned long long sim_status_of(int32_t pid, const char *field, int base)
{
    char path[32], line[256];
    unsigned long long value = 0;
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, field, strlen(field)) && line[strlen(field)] == ':')
            value = strtoull(line + strlen(field) + 1, NULL, base);
    if (file)
        fclose(file);
    return value;
}

bool sim_is_below(int32_t pid, const int32_t *ancestors, int count)
{
    for (int generation = 0; pid > 1 && generation < MOST_GENERATIONS; generation++) {
        for (int i = 0; i < count; i++)
            if (ancestors[i] == pid)
                return true;
        pid = (int32_t)sim_status_of(pid, "PPid", 10);
    }
    return false;
}

bool sim_in_group(const char *path, int32_t pid)
{
    static struct members members; /* guarded by sim_lock */
    read_members(path, &members);
    return sim_is_below(pid, members.pid, members.count);
}

/* Whether a cgroup's hard limit forbids this many more bytes (mutex held). */
bool sim_group_denies(int32_t pid, uint32_t device, uint64_t bytes)
{
    static struct members members; /* guarded by sim_lock */
    for (int g = 0; g < SIM_GROUPS; g++) {
        const struct sim_group *group = &sim->group[g];
        if (!group->path[0] || group->device != device || group->hard_bytes == UINT64_MAX)
            continue;
        read_members(group->path, &members);
        if (!sim_is_below(pid, members.pid, members.count))
            continue;
        uint64_t used = 0;
        for (int i = 0; i < SIM_PROCESSES; i++)
            if (sim_is_below(sim->process[i].pid, members.pid, members.count))
                used += sim_process_device_used(&sim->process[i], device);
        if (used > group->hard_bytes || bytes > group->hard_bytes - used)
            return true;
    }
    return false;
}

/* Sets limits, or forgets them with soft 0 and hard UINT64_MAX (mutex held); false if the table is full. */
bool sim_group_set(const char *path, uint32_t device, uint64_t soft_bytes, uint64_t hard_bytes)
{
    struct sim_group *place = NULL;
    for (int g = 0; g < SIM_GROUPS; g++) {
        struct sim_group *group = &sim->group[g];
        if (group->device == device && !strcmp(group->path, path)) {
            place = group;
            break;
        }
        if (!group->path[0] && !place)
            place = group;
    }
    if (!place)
        return false;
    memset(place, 0, sizeof *place);
    if (soft_bytes == 0 && hard_bytes == UINT64_MAX)
        return true;
    snprintf(place->path, sizeof place->path, "%s", path);
    place->device = device;
    place->soft_bytes = soft_bytes;
    place->hard_bytes = hard_bytes;
    return true;
}
