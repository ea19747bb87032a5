/* SPDX-License-Identifier: Apache-2.0
 *
 * bad_abi.c: a plugin of another version of the contracts.
 */
#include "runtime/plugin/coll.h"
#include "runtime/plugin/device.h"

static const peri_device_vtab device = {.size = sizeof device, .abi = 42, .name = "bad_abi"};
static const peri_coll_vtab coll = {.size = 16, .abi = PERI_COLL_ABI, .name = "bad_abi"};

__attribute__((visibility("default"))) const peri_device_vtab *peri_device_entry_v1(const peri_plugin_host *host)
{
    return host ? &device : NULL;
}

__attribute__((visibility("default"))) const peri_coll_vtab *peri_coll_entry_v1(const peri_plugin_host *host)
{
    return host ? &coll : NULL;
}
