/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/perilune.h: all of the public C API but host.h, whose functions take functions of the program's. The Lua
 * declarations are made from this file.
 */
#ifndef PERILUNE_PERILUNE_H
#define PERILUNE_PERILUNE_H

#include <perilune/base.h>
#include <perilune/tune.h>
#include <perilune/device.h>
#include <perilune/tensor.h>
#include <perilune/ops.h>
#include <perilune/precision.h>
#include <perilune/graph.h>
#include <perilune/optim.h>
#include <perilune/jagged.h>
#include <perilune/sparse.h>
#include <perilune/quantize.h>
#include <perilune/retrieval.h>
#include <perilune/collision.h>
#include <perilune/comm.h>
#include <perilune/codec.h>
#include <perilune/exchange.h>
#include <perilune/embed.h>
#include <perilune/moment.h>
#include <perilune/shard.h>
#include <perilune/checkpoint.h>
#include <perilune/io.h>
#include <perilune/model.h>
#include <perilune/lua.h>

#endif
