/* SPDX-License-Identifier: Apache-2.0
 *
 * short_table.c: a device of the lowest contract: its table ends before the members that came later, and something else
 * lies behind it.
 */
#include "kernels/kernels.h"
#include "runtime/plugin/device.h"

static peri_status probe(char *reason, size_t len)
{
    (void)reason, (void)len;
    return PERI_OK;
}

static peri_status something_else(void *device)
{
    (void)device;
    return PERI_EINTERNAL;
}

static const peri_device_vtab device = {.size = PERI_DEVICE_SIZE_LOWEST,
                                        .abi = PERI_DEVICE_ABI_LOWEST,
                                        .name = "short_table",
                                        .work = peri_work_list,
                                        .probe = probe,
                                        .trim = something_else};

__attribute__((visibility("default"))) const peri_device_vtab *peri_device_entry_v1(const peri_plugin_host *host)
{
    return host ? &device : NULL;
}
