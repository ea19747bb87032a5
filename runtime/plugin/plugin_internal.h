/* SPDX-License-Identifier: Apache-2.0
 *
 * plugin/plugin_internal.h (L1): finding backends by name.
 */
#ifndef PERI_PLUGIN_INTERNAL_H
#define PERI_PLUGIN_INTERNAL_H

#include "../base/base_internal.h"
#include "coll.h"
#include "device.h"
#include "host.h"

/** The core's table for backends. */
const peri_plugin_host *peri__plugin_host(void);

/** The vtab of device backend @name ("cuda"): built in, or from libperilune_<name>.so on the plugin path. Its contract
 *  is checked; members that a backend of an older one does not have are NULL. @work (or NULL): its numbers of kernels
 *  and operations by those of this library, -1: it has none; NULL: they are the same. */
peri_status peri__plugin_device(const char *name, const peri_device_vtab **out, const int32_t **work);
/** Look for plugins in these folders (colon-separated, each begins with /; NULL: none) before those of
 *  PERI_PLUGIN_PATH. */
peri_status peri__plugin_path_set(const char *path);
/** Symbol @symbol of libperilune_<name>.so, which is loaded if it was not, and stays. */
peri_status peri__plugin_symbol(const char *name, const char *symbol, void **out);
/** The vtab of transport @name ("mpi"). */
peri_status peri__plugin_coll(const char *name, const peri_coll_vtab **out);

#endif
