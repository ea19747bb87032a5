/* SPDX-License-Identifier: Apache-2.0
 *
 * processors.c: how many processors the affinity mask leaves to a process.
 */
#include "base_internal.h"

#include <sched.h>

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
