/* SPDX-License-Identifier: Apache-2.0
 *
 * stale_order.c: a device and a transport of today's contract whose list of kernels has two of them in the other order: every number would
 * still be one of a kernel, but of another one.
 */
#include "kernels/cache.h"
#undef PERI_KERNELS_CACHE
#define PERI_KERNELS_CACHE(X) X(cache_spill, peri_k_cache_args) X(cache_fill, peri_k_cache_args)

#include "kernels/kernels.h"
#include "runtime/plugin/coll.h"
#include "runtime/plugin/device.h"

static const peri_device_vtab device = {
    .size = sizeof device, .abi = PERI_DEVICE_ABI, .name = "stale_order", .kernels = peri_kernels_hash};

__attribute__((visibility("default"))) const peri_device_vtab *peri_device_entry_v1(const peri_plugin_host *host)
{
    return host ? &device : NULL;
}

static const peri_coll_vtab transport = {
    .size = sizeof transport, .abi = PERI_COLL_ABI, .name = "stale_order", .kernels = peri_kernels_hash};

__attribute__((visibility("default"))) const peri_coll_vtab *peri_coll_entry_v1(const peri_plugin_host *host)
{
    return host ? &transport : NULL;
}
