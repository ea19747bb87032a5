/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/jagged.h
 */
#ifndef PERI_KERNELS_JAGGED_H
#define PERI_KERNELS_JAGGED_H

#include <perilune/base.h>

#define PERI_KERNELS_JAGGED(X)

#endif
