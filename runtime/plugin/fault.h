/* SPDX-License-Identifier: Apache-2.0
 *
 * plugin/fault.h (L1): the numbers of the fault points, for backends that have some: what peri_plugin_host.fault takes.
 */
#ifndef PERI_PLUGIN_FAULT_H
#define PERI_PLUGIN_FAULT_H

#include "../base/fault.h"

#endif
