/* SPDX-License-Identifier: Apache-2.0
 *
 * own_way.c: the device of own_way.h, with today's list of kernels.
 */
#include "own_way.h"
