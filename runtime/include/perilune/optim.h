/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/optim.h: optimizers of the dense part, gradient clipping.
 */
#ifndef PERILUNE_OPTIM_H
#define PERILUNE_OPTIM_H

#include <perilune/tensor.h>

#endif
