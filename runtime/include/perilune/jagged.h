/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/jagged.h: JaggedTensor, KeyedJaggedTensor, KeyedTensor.
 */
#ifndef PERILUNE_JAGGED_H
#define PERILUNE_JAGGED_H

#include <perilune/tensor.h>

#endif
