/* SPDX-License-Identifier: Apache-2.0
 *
 * processors.c: how many processors this process may use: by its affinity mask, and by the quotas of its control
 * groups.
 */
#include "base_internal.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

int32_t peri__processors_of(pid_t pid)
{
    enum { MOST = 1 << 16 };
    for (int n = 1024; n <= MOST; n *= 2) { /* the kernel's mask may be larger than a cpu_set_t */
        cpu_set_t *set = CPU_ALLOC((size_t)n);
        if (!set) return 0;
        const size_t size = CPU_ALLOC_SIZE((size_t)n);
        const int count = sched_getaffinity(pid, size, set) == 0 ? CPU_COUNT_S(size, set) : 0;
        CPU_FREE(set);
        if (count > 0) return count;
    }
    return 0;
}

/** Processors that the file's quota is worth: "max 100000" or "150000 100000" in version 2; in version 1 the quota
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

/** The smallest quota of the control group @group, a path below @mount, and of those above it; 0: none. */
static double least_of(const char *mount, const char *group)
{
    char folder[4200];
    double least = 0;
    int n = snprintf(folder, sizeof folder, "%s%s", mount, group);
    const size_t root = strlen(mount);
    if (n < 0 || n >= (int)sizeof folder) return 0;
    for (;;) {
        const double quota = quota_in(folder);
        if (quota > 0 && (least == 0 || quota < least)) least = quota;
        char *slash = strrchr(folder + root, '/');
        if (!slash) return least;
        *slash = 0;
    }
}

int32_t peri__quota_of(const char *mount, const char *membership)
{
    char line[4200], place[4300];
    double least = 0;
    FILE *f = fopen(membership, "re");
    while (f && fgets(line, sizeof line, f)) { /* "0::/a/b"; in version 1 "4:cpu,cpuacct:/a/b" */
        line[strcspn(line, "\n")] = 0;
        char *names = strchr(line, ':'), *group = names ? strchr(names + 1, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        names++;
        if (*names && !strstr(names, "cpu")) continue;
        snprintf(place, sizeof place, "%s%s%s", mount, *names ? "/" : "", names);
        const double quota = least_of(place, strcmp(group, "/") ? group : "");
        if (quota > 0 && (least == 0 || quota < least)) least = quota;
    }
    if (f) fclose(f);
    return least > 0 ? (int32_t)peri__max(1, (int64_t)(least + 0.999)) : 0;
}
