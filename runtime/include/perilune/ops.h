/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/ops.h: dense operations with gradients, losses, random layers.
 */
#ifndef PERILUNE_OPS_H
#define PERILUNE_OPS_H

#include <perilune/tensor.h>

#endif
