/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/comm.h: groups of ranks, collective operations, works.
 */
#ifndef PERILUNE_COMM_H
#define PERILUNE_COMM_H

#include <perilune/tensor.h>

#endif
