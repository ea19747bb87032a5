/* SPDX-License-Identifier: Apache-2.0
 *
 * stale_size.c: a device of today's contract, built when the arguments of one operation had another size.
 */
#include "kernels/jagged.h"

typedef struct longer_cumsum {
    peri_op_cumsum now;
    int64_t gone;
} longer_cumsum;
#undef PERI_OPS_JAGGED
#define PERI_OPS_JAGGED(X) X(cumsum, longer_cumsum) X(bags_report, peri_op_bags_report)

#include "kernels/kernels.h"
#include "runtime/plugin/device.h"

static const peri_device_vtab device = {
    .size = sizeof device, .abi = PERI_DEVICE_ABI, .name = "stale_size", .kernels = peri_kernels_hash};

__attribute__((visibility("default"))) const peri_device_vtab *peri_device_entry_v1(const peri_plugin_host *host)
{
    return host ? &device : NULL;
}
