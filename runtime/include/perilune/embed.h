/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/embed.h: table batches: embedding tables, lookups, fused optimizers.
 */
#ifndef PERILUNE_EMBED_H
#define PERILUNE_EMBED_H

#include <perilune/jagged.h>

#endif
