/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/optim.h
 */
#ifndef PERI_KERNELS_OPTIM_H
#define PERI_KERNELS_OPTIM_H

#include <perilune/base.h>

#define PERI_KERNELS_OPTIM(X)

#endif
