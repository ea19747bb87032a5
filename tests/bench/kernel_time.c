/* SPDX-License-Identifier: Apache-2.0
 *
 * kernel_time.c: the time that the device cpu's kernels, operations and copies take, for tests/bench/calls.lua. `make
 * bench-calls` links a launcher with it: whoever asks there for the device's table of functions
 * (-Wl,--wrap=peri__cpu_entry) gets a copy whose `launch`, `run` and `copy` read the clock. What programs use has none
 * of this.
 */
#include "../../runtime/plugin/device.h"

#include <time.h>

static const peri_device_vtab *cpu; /* the device's own table */
static bool counting;
static int64_t spent, empty; /* nanoseconds: spent since bench_kernel_time was called; what reading the clock takes */

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/** What @call returned; the time since @from is added to `spent`. */
static peri_status spend(int64_t from, peri_status call)
{
    spent += now() - from - empty;
    return call;
}

static peri_status launch(void *device, void *stream, int32_t kernel, const void *args, int64_t args_size, int64_t n,
                          int64_t grain)
{
    if (!counting) return cpu->launch(device, stream, kernel, args, args_size, n, grain);
    const int64_t from = now();
    return spend(from, cpu->launch(device, stream, kernel, args, args_size, n, grain));
}

static peri_status run(void *device, void *stream, int32_t op, const void *args, int64_t args_size, void *scratch,
                       int64_t bytes)
{
    if (!counting) return cpu->run(device, stream, op, args, args_size, scratch, bytes);
    const int64_t from = now();
    return spend(from, cpu->run(device, stream, op, args, args_size, scratch, bytes));
}

static peri_status copy(void *device, void *stream, void *dst, const void *src, int64_t bytes, int32_t kind)
{
    if (!counting) return cpu->copy(device, stream, dst, src, bytes, kind);
    const int64_t from = now();
    return spend(from, cpu->copy(device, stream, dst, src, bytes, kind));
}

const peri_device_vtab *__real_peri__cpu_entry(const peri_plugin_host *lent);
const peri_device_vtab *__wrap_peri__cpu_entry(const peri_plugin_host *lent);
const peri_device_vtab *__wrap_peri__cpu_entry(const peri_plugin_host *lent)
{
    static peri_device_vtab timed;
    cpu = __real_peri__cpu_entry(lent);
    timed = *cpu;
    timed.launch = launch;
    timed.run = run;
    timed.copy = copy;
    return &timed;
}

/** Nanoseconds that were spent since the last call of this function; from now on the clock is read, or not (@on). */
__attribute__((visibility("default"))) double bench_kernel_time(bool on);
double bench_kernel_time(bool on)
{
    int64_t took = spent;
    if (on && !empty) {
        enum { READINGS = 1000 };
        int64_t from = now();
        for (int i = 1; i < READINGS; i++) now();
        empty = (now() - from) / READINGS;
    }
    spent = 0;
    counting = on;
    return (double)took;
}
