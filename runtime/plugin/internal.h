/* SPDX-License-Identifier: Apache-2.0
 *
 * plugin/internal.h (L1): finding backends by name.
 */
#ifndef PERI_PLUGIN_INTERNAL_H
#define PERI_PLUGIN_INTERNAL_H

#include "../base/internal.h"
#include "coll.h"
#include "device.h"
#include "host.h"

/** The core's table for backends. */
const peri_plugin_host *peri__plugin_host(void);

/** The vtab of device backend @name ("cuda"): built in, or from libperilune_<name>.so on the plugin path. Checked for ABI and size. */
peri_status peri__plugin_device(const char *name, const peri_device_vtab **out);
/** The vtab of transport @name ("mpi"). */
peri_status peri__plugin_coll(const char *name, const peri_coll_vtab **out);

#endif
