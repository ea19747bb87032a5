/* SPDX-License-Identifier: Apache-2.0
 *
 * base/fault.h (L0): the numbers of the fault points, for the core and for plugins: a new point in fault.def moves
 * those behind it.
 */
#ifndef PERI_BASE_FAULT_H
#define PERI_BASE_FAULT_H

enum {
#define FAULT(name, text) PERI_FAULT_##name,
#include "fault.def"
#undef FAULT
    PERI_FAULT_COUNT
};

#endif
