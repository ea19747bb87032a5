/* SPDX-License-Identifier: Apache-2.0
 *
 * long_table.c: a device that was built with the headers of a later version, whose table has more members, and that
 * needs no more than today's contract.
 */
#include "kernels/kernels.h"
#include "runtime/plugin/device.h"

static const struct {
    peri_device_vtab today;
    int64_t later[2];
} device = {.today = {.size = sizeof device, .abi = PERI_DEVICE_ABI, .name = "long_table", .work = peri_work_list},
            .later = {1, 2}};

__attribute__((visibility("default"))) const peri_device_vtab *peri_device_entry_v1(const peri_plugin_host *host)
{
    return host ? &device.today : NULL;
}
