/* Parses $GPUSHARE_SIMULATE: the devices, and the behaviour of the driver.
 *
 * Every behaviour that drivers are known to have is on by default; sim_checkpoint.c, sim_pool.c
 * and sim_nvml_usage.c name the source of each.  Inferred behaviour is off by default (README.md: amounts
 * are estimates).
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim_gpu.h"

/* "80GB", "512GiB", "0": bytes.  On devices GB means GiB, as on an 80GB H100 (81,559 MiB). */
static bool parse_size(const char **at, uint64_t *bytes)
{
    char *end;
    if (!isdigit((unsigned char)**at))
        return false;
    double number = strtod(*at, &end);
    static const struct { const char *name; double bytes; } unit[] = {
        {"GiB", 1073741824.0}, {"MiB", 1048576.0}, {"TiB", 1099511627776.0}, {"GB", 1073741824.0}, {"MB", 1048576.0},
    };
    for (size_t i = 0; i < sizeof unit / sizeof *unit; i++)
        if (!strncmp(end, unit[i].name, strlen(unit[i].name))) {
            *bytes = (uint64_t)(number * unit[i].bytes);
            *at = end + strlen(unit[i].name);
            return number < 1e6;
        }
    *bytes = 0;
    *at = end;
    return number <= 0;
}

static void make_uuid(uint8_t uuid[16], const char *name, uint32_t index)
{
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a, so that the same machine has the same UUIDs on every run */
    for (const char *c = name; *c; c++)
        hash = (hash ^ (uint8_t)*c) * 0x100000001b3u;
    for (int half = 0; half < 2; half++) {
        uint64_t mixed = (hash + index * 2u + (uint32_t)half) * 0x9e3779b97f4a7c15u;
        mixed = (mixed ^ (mixed >> 29)) * 0xbf58476d1ce4e5b9u;
        mixed ^= mixed >> 32;
        memcpy(uuid + 8 * half, &mixed, 8);
    }
    uuid[6] = (uint8_t)((uuid[6] & 0x0f) | 0x40);
    uuid[8] = (uint8_t)((uuid[8] & 0x3f) | 0x80);
}

static bool parse_devices(struct sim_state *state, const char **at)
{
    do {
        char *end;
        if (!isdigit((unsigned char)**at))
            return false;
        unsigned long count = strtoul(*at, &end, 10);
        size_t length = strcspn(end, ",+");
        if (*end != 'x' || count < 1 || count > SIM_DEVICES - state->device_count)
            return false;
        const char *name = end + 1, *dash = NULL;
        for (const char *c = name; c < end + length; c++)
            dash = *c == '-' ? c : dash;
        uint64_t bytes = 0;
        if (!dash || dash == name)
            return false;
        *at = dash + 1;
        if (!parse_size(at, &bytes) || bytes < SIM_PAGE_BYTES || *at != end + length)
            return false;
        const char *mig = memmem(name, length, " MIG ", 5); /* the name of a profile contains its size */
        for (; count; count--) {
            struct sim_device *device = &state->device[state->device_count];
            snprintf(device->name, sizeof device->name, "Simulated %.*s", (int)((mig ? dash : *at) - name), name);
            make_uuid(device->uuid, device->name, state->device_count++);
            device->total_bytes = bytes;
            device->shares_host_memory = strstr(device->name, "GB10") != NULL;
        }
    } while (**at == '+' && (*at)++);
    return true;
}

struct choice {
    const char *text;
    uint32_t value;
};

/* Reads the value of one of the words, up to the next comma. */
static bool parse_choice(const char **at, const struct choice *choices, uint32_t *value)
{
    size_t length = strcspn(*at, ",");
    for (; choices->text; choices++)
        if (strlen(choices->text) == length && !strncmp(choices->text, *at, length)) {
            *value = choices->value;
            *at += length;
            return true;
        }
    return false;
}

/* Reads a time of fewer than 60,000 units. */
static bool parse_time(const char **at, uint64_t unit_ns, uint64_t *ns)
{
    char *end;
    if (!isdigit((unsigned char)**at))
        return false;
    unsigned long units = strtoul(*at, &end, 10);
    *ns = units * unit_ns;
    *at = end;
    return units < 60000;
}

static bool parse_option(struct sim_state *state, const char *key, size_t length, const char **at)
{
    static const struct choice by[] = {{"root", SIM_BY_ROOT}, {"any-uid", SIM_BY_ANY_UID}, {"yama", SIM_BY_YAMA},
        {"none", SIM_BY_NONE}, {0}};
    static const struct choice lost[] = {{"checkpointed", SIM_LOST_CHECKPOINTED}, {"failed", SIM_LOST_FAILED}, {0}};
    static const struct choice shown[] = {
        {"shown", SIM_BYTES_SHOWN}, {"zero", SIM_BYTES_ZERO}, {"unavailable", SIM_BYTES_UNAVAILABLE},
        {"refused", SIM_BYTES_REFUSED}, {0}};
    static const struct choice listed[] = {{"allocated", 0}, {"initialized", 1}, {0}};
    static const struct choice dead[] = {{"unlisted", 0}, {"listed", 1}, {0}};
    static const struct choice points[] = {{"symbols", 0}, {"apart", 1}, {0}};
    static const struct choice queries[] = {{"answer", 0}, {"wait", 1}, {0}};
    static const struct choice restart[] = {{"any-time", 0}, {"unused", 1}, {0}};
    static const struct choice persistence[] = {{"on", 0}, {"off", 1}, {0}};
    static const struct choice pairs[] = {{"visible", 0}, {"used", 1}, {0}};
    static const struct choice moved[] = {{"new", 0}, {"old", 1}, {0}};
    static const struct choice abandoned[] = {{"undone", SIM_UNDONE}, {"done", SIM_DONE}, {"hangs", SIM_HANGS},
        {"999", SIM_ANSWERS_UNKNOWN}, {"400", SIM_ANSWERS_NO_HANDLE}, {0}};
    const struct {
        const char *name;
        const struct choice *choices;
        uint32_t *value;
        uint64_t *size;
    } options[] = {
        {"host", NULL, NULL, &state->host_total_bytes},
        {"context", NULL, NULL, &state->context_bytes},
        {"copy", NULL, NULL, &state->copy_bytes_per_s},
        {"growth", NULL, NULL, &state->growth_bytes},
        {"unusable", NULL, NULL, &state->unusable_bytes},
        {"reserved", NULL, NULL, &state->reserved_bytes},
        {"checkpoint", by, &state->checkpoint_by, NULL},
        {"lost", lost, &state->lost_state, NULL},
        {"bytes", shown, &state->shown_bytes, NULL},
        {"listed", listed, &state->lists_initialized, NULL},
        {"dead", dead, &state->lists_dead, NULL},
        {"entry-points", points, &state->entry_points_apart, NULL},
        {"queries", queries, &state->queries_wait, NULL},
        {"restart", restart, &state->restarts_unused_only, NULL},
        {"persistence", persistence, &state->lacks_persistence, NULL},
        {"pairs", pairs, &state->pairs_used_only, NULL},
        {"moved-uuid", moved, &state->shows_old_uuid, NULL},
        {"caller-dies", abandoned, &state->abandoned, NULL},
    };
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        if (strlen(options[i].name) == length && !strncmp(options[i].name, key, length)) {
            if (options[i].choices)
                return parse_choice(at, options[i].choices, options[i].value);
            if (!parse_size(at, options[i].size))
                return false;
            *at += options[i].size == &state->copy_bytes_per_s && !strncmp(*at, "/s", 2) ? 2 : 0;
            return true;
        }
    if (length == 10 && !strncmp("free-delay", key, length))
        return parse_time(at, 1000000u, &state->free_delay_ns);
    if (length == 5 && !strncmp("slice", key, length))
        return parse_time(at, 1000000u, &state->slice_ns) && state->slice_ns;
    if (length == 6 && !strncmp("switch", key, length))
        return parse_time(at, 1000u, &state->switch_ns);
    if (length == 6 && !strncmp("driver", key, length)) {
        size_t digits = strspn(*at, "0123456789.");
        snprintf(state->driver, sizeof state->driver, "%.*s-simulated", (int)(digits < 16 ? digits : 16), *at);
        *at += digits;
        return digits > 2 && digits <= 16;
    }
    return false;
}

/* Reads the devices and options of a spec; if false, *at is the first character that was not understood. */
bool sim_parse_spec(struct sim_state *state, const char **at)
{
    state->host_total_bytes = (uint64_t)512 << 30;
    state->context_bytes = (uint64_t)500 << 20;
    state->growth_bytes = UINT64_MAX;
    state->unusable_bytes = UINT64_MAX;
    state->free_delay_ns = SIM_FREE_DELAY_NS;
    state->slice_ns = SIM_SLICE_NS;
    state->switch_ns = SIM_SWITCH_NS;
    state->checkpoint_by = SIM_BY_DEFAULT;
    state->lost_state = SIM_LOST_DEFAULT;
    state->lists_initialized = SIM_LISTS_INITIALIZED;
    state->lists_dead = SIM_LISTS_DEAD;
    state->restarts_unused_only = SIM_RESTARTS_UNUSED_ONLY;
    snprintf(state->driver, sizeof state->driver, "580.00.00-simulated");
    if (!parse_devices(state, at))
        return false;
    while (**at == ',') {
        const char *key = ++*at;
        size_t length = strcspn(key, ",=");
        *at += length;
        if (**at != '=') {
            bool *flag = length == 6 && !strncmp(key, "cgroup", length) ? &state->limits_cgroups
                         : length == 3 && !strncmp(key, "mig", length)  ? &state->mig
                                                                        : NULL;
            if (!flag) {
                *at = key;
                return false;
            }
            *flag = true;
        } else {
            ++*at;
            if (!parse_option(state, key, length, at))
                return false;
        }
    }
    /* A machine whose contexts cost nothing is for round numbers, so nothing else is taken either. */
    if (state->unusable_bytes == UINT64_MAX)
        state->unusable_bytes = state->context_bytes ? SIM_UNUSABLE_BYTES : 0;
    if (state->growth_bytes == UINT64_MAX)
        state->growth_bytes = state->context_bytes ? SIM_GROWTH_BYTES : 0;
    for (uint32_t d = 0; d < state->device_count; d++)
        if (state->unusable_bytes + state->reserved_bytes >= state->device[d].total_bytes)
            return false;
    return **at == 0;
}
