/* SPDX-License-Identifier: Apache-2.0
 *
 * groups.c: what the control groups of this process (those of a container, of a job) leave to it: processor time and
 * memory.
 */
#include "base_internal.h"

#include <stdio.h>
#include <stdlib.h>

/** Ask @ask about the folder of the control group @group, a path below @mount, and about those above it. */
static void ask_upwards(const char *mount, const char *group, peri__group_fn ask, void *ctx)
{
    char folder[4200];
    int n = snprintf(folder, sizeof folder, "%s%s", mount, group);
    const size_t root = strlen(mount);
    if (n < 0 || n >= (int)sizeof folder) return;
    for (;;) {
        ask(folder, ctx);
        char *slash = strrchr(folder + root, '/');
        if (!slash) return;
        *slash = 0;
    }
}

/** Whether @name is one of @names, "cpu,cpuacct". */
static bool listed(const char *names, const char *name)
{
    const size_t n = strlen(name);
    for (const char *at = names; at; at = strchr(at, ','), at = at ? at + 1 : NULL)
        if (!strncmp(at, name, n) && (at[n] == ',' || !at[n])) return true;
    return false;
}

/** Ask @ask about the folder of each control group that the process is in, as far as they are @controller's ("cpu"). */
static void groups_ask(const peri__groups *g, const char *controller, peri__group_fn ask, void *ctx)
{
    char line[4200], place[4300];
    FILE *f = fopen(g->membership, "re");
    while (f && fgets(line, sizeof line, f)) { /* "0::/a/b"; in version 1 "4:cpu,cpuacct:/a/b" */
        line[strcspn(line, "\n")] = 0;
        char *names = strchr(line, ':'), *group = names ? strchr(names + 1, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        names++;
        if (*names && !listed(names, controller)) continue;
        snprintf(place, sizeof place, "%s%s%s", g->mount, *names ? "/" : "", names);
        ask_upwards(place, strcmp(group, "/") ? group : "", ask, ctx);
    }
    if (f) fclose(f);
}

/* -- processor time ------------------------------------------------------------------------------------------------ */

/** Processors that the quota of a group is worth: "max 100000" or "150000 100000" in version 2; in version 1 the quota
 *  alone, and the period in a file beside it. 0: no quota. */
static double quota_in(const char *folder)
{
    char path[4300];
    long long quota = -1, period = 100000;
    snprintf(path, sizeof path, "%s/cpu.max", folder);
    FILE *f = fopen(path, "re");
    if (f) {
        if (fscanf(f, "%lld %lld", &quota, &period) < 1) quota = -1; /* "max" */
        fclose(f);
    } else {
        snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", folder);
        if (!(f = fopen(path, "re"))) return 0;
        if (fscanf(f, "%lld", &quota) != 1) quota = -1;
        fclose(f);
        snprintf(path, sizeof path, "%s/cpu.cfs_period_us", folder);
        if ((f = fopen(path, "re"))) {
            if (fscanf(f, "%lld", &period) != 1) period = 100000;
            fclose(f);
        }
    }
    return quota > 0 && period > 0 ? (double)quota / (double)period : 0;
}

static void least_quota(const char *folder, void *ctx)
{
    double *least = ctx, quota = quota_in(folder);
    if (quota > 0 && (*least == 0 || quota < *least)) *least = quota;
}

int32_t peri__quota_of(const peri__groups *groups)
{
    double least = 0;
    groups_ask(groups, "cpu", least_quota, &least);
    return least > 0 && least < INT32_MAX ? (int32_t)peri__max(1, (int64_t)(least + 0.999)) : 0;
}

/* -- memory -------------------------------------------------------------------------------------------------------- */

/** A number of bytes from the first line of the file @name in @folder that begins with @key; -1: there is none. */
static int64_t bytes_from(const char *folder, const char *name, const char *key, int64_t unit)
{
    char path[4400], line[256];
    long long value;
    int64_t found = -1;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "re");
    if (!file) return -1;
    while (found < 0 && fgets(line, sizeof line, file))
        if (!strncmp(line, key, strlen(key)) && sscanf(line + strlen(key), "%lld", &value) == 1)
            found = (int64_t)value * unit;
    fclose(file);
    return found;
}

typedef struct host_memory {
    int64_t total, available;
} host_memory;

/** What a group allows, and uses already; pages of files that nobody has looked at lately can be had. Version 2, and 1,
 *  where no limit is a number larger than any memory. */
static void least_memory(const char *folder, void *ctx)
{
    static const struct { const char *most, *used, *files; } versions[] = {
        {"memory.max", "memory.current", "inactive_file "},
        {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "},
    };
    host_memory *m = ctx;
    for (int i = 0; i < 2; i++) {
        const int64_t most = bytes_from(folder, versions[i].most, "", 1);
        if (most < 0) continue;
        m->total = peri__min(m->total, most);
        const int64_t used = bytes_from(folder, versions[i].used, "", 1),
                      files = bytes_from(folder, "memory.stat", versions[i].files, 1);
        if (used >= 0) m->available = peri__min(m->available, peri__max(0, most - (used - peri__max(0, files))));
    }
}

int64_t peri__memory_of(const peri__groups *groups, const char *proc, int64_t *available)
{
    host_memory m = {.total = bytes_from(proc, "meminfo", "MemTotal:", 1024),
                     .available = bytes_from(proc, "meminfo", "MemAvailable:", 1024)};
    if (m.total < 0) m.total = INT64_MAX;
    if (m.available < 0) m.available = m.total;
    groups_ask(groups, "memory", least_memory, &m);
    if (available) *available = peri__min(m.available, m.total);
    return m.total;
}

/* -- of this process ----------------------------------------------------------------------------------------------- */

const peri__groups peri__own_groups = {"/sys/fs/cgroup", "/proc/self/cgroup"};

int64_t peri_host_memory(int64_t *available) { return peri__memory_of(&peri__own_groups, "/proc", available); }

int64_t peri__available_memory(void)
{
    int64_t available;
    (void)peri_host_memory(&available);
    return available;
}
