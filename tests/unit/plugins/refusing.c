/* SPDX-License-Identifier: Apache-2.0
 *
 * refusing.c: a plugin that takes no host, or none without a kernel that it was built for, and a device that says that
 * it cannot be used here.
 */
#include "kernels/kernels.h"
#include "runtime/plugin/coll.h"
#include "runtime/plugin/device.h"

#include <stdio.h>
#include <stdlib.h>

static peri_status probe(char *reason, size_t len)
{
    snprintf(reason, len, "the moon is in the wrong phase");
    return PERI_EUNSUPPORTED;
}

static const peri_device_vtab device = {
    .size = sizeof device, .abi = PERI_DEVICE_ABI, .name = "refusing", .work = peri_work_list, .probe = probe};

__attribute__((visibility("default"))) const peri_device_vtab *peri_device_entry_v1(const peri_plugin_host *host)
{
    return host ? &device : NULL;
}

__attribute__((visibility("default"))) const peri_coll_vtab *peri_coll_entry_v1(const peri_plugin_host *host)
{
    if (getenv("REFUSING_NEEDS")) (void)host->kernel(getenv("REFUSING_NEEDS"), 9);
    return NULL;
}
