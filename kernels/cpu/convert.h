/* SPDX-License-Identifier: Apache-2.0
 *
 * convert.h: what the unit of conversions does for other units.
 */
#ifndef PERI_KERNELS_CPU_CONVERT_H
#define PERI_KERNELS_CPU_CONVERT_H

#include "unit.h"

/** Convert one row of @n elements: dst[i * ds] of dtype @dd = src[i * ss] of dtype @sd. */
#define cpu_convert_row K_SHARED(cpu_convert_row)
K_HIDDEN void cpu_convert_row(void *dst, int32_t dd, int64_t ds, const void *src, int32_t sd, int64_t ss, int64_t n);

#endif
