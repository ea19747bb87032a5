/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/shard.h: sharded embedding modules.
 */
#ifndef PERILUNE_SHARD_H
#define PERILUNE_SHARD_H

#include <perilune/comm.h>

#endif
