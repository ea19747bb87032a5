/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/tbe.h
 */
#ifndef PERI_KERNELS_TBE_H
#define PERI_KERNELS_TBE_H

#include <perilune/base.h>

#define PERI_KERNELS_TBE(X)

#endif
