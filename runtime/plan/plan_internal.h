/* SPDX-License-Identifier: Apache-2.0
 *
 * plan/plan_internal.h (L4.5): what a plan says of a table, and how a sharding type cuts it. Nothing here knows a
 * sharded module: those are made of what plans say (runtime/shard).
 */
#ifndef PERI_PLAN_INTERNAL_H
#define PERI_PLAN_INTERNAL_H

#include "../comm/nodes.h"
#include "../embed/embed_internal.h"

#include <perilune/shard.h>

/** A table that is being cut, and where its shards go. */
typedef struct peri__cut {
    const struct peri__sharding_type *type;
    peri_shard *out;  /* NULL: they are only counted */
    int32_t capacity, n;
    peri__nodes nodes; /* of the world, where the sharding type keeps within nodes */
} peri__cut;

/** A sharding type: a pure function from a plan entry to shards, and what others ask of it. One file each, in
 *  types/. */
typedef struct peri__sharding_type {
    const char *name; /* TorchRec's: "table_wise" */
    int32_t facts;    /* PERI_SHARDING_*, added up */
    /* The shards of the table in order of offsets. Ranks were checked to be in range. */
    peri_status (*shards)(const peri_sharding *s, peri__cut *cut);
} peri__sharding_type;

/** Names of the types that have the facts @facts (PERI_SHARDING_*) of those in @asked, in @text: "table_wise,
 *  row_wise". Returns @text. */
const char *peri__sharding_types_text(int32_t asked, int32_t facts, char *text, size_t len);

extern const peri__sharding_type peri__data_parallel, peri__table_wise, peri__row_wise, peri__column_wise,
    peri__table_row_wise, peri__table_column_wise, peri__grid_shard;

/** Name of a value of an option (peri_option_name); "?": there is no such value. */
const char *peri__option_text(const char *option, int32_t value);
/** A compute kernel as plans name it, which say with it where the rows are. */
typedef struct peri__kernel {
    const char *name;    /* "fused_uvm" */
    int32_t kernel;      /* PERI_KERNEL_* */
    bool mapped, cached; /* as in peri_sharded_table */
} peri__kernel;

/** The kernel called @name; NULL: there is none. */
const peri__kernel *peri__kernel_of(const char *name);
/** What a table's kernel is called; "?": there is no such kernel. */
const char *peri__kernel_name(const peri_sharded_table *table);

/* -- what types have in common (types/cut.c; the files of row_wise, column_wise, table_row_wise) ------------------- */

/** Append one shard; PERI_EINVAL when there is no room. */
peri_status peri__shard_add(const peri_sharding *s, peri__cut *cut, peri_shard shard);
/** Cut the rows of the columns of @block over @ranks (NULL: 0, 1, ...), @count of them: of @sizes, or even. */
peri_status peri__cut_rows(const peri_sharding *s, const int32_t *ranks, const int64_t *sizes, int32_t count,
                           peri_shard block, peri__cut *cut);
/** Columns of block @i of @count, not of given sizes: even if the plan names ranks, else as even as they can be, and
 *  maybe none. */
int64_t peri__block_cols(const peri_sharding *s, int32_t i, int32_t count);
/** Whether the columns can be cut so. */
peri_status peri__check_blocks(const peri_sharding *s, int32_t count, const peri__cut *cut);
/** Cut columns over @ranks (NULL: 0, 1, ...), @count of them. */
peri_status peri__cut_columns(const peri_sharding *s, const int32_t *ranks, int32_t count, peri__cut *cut);

static inline int32_t peri__node_number(const peri_sharding *s, int32_t rank) { return s->nodes ? s->nodes[rank] : 0; }
/** PERI_EINVAL unless @ranks are all of one node. */
peri_status peri__check_one_node(const peri_sharding *s, const int32_t *ranks, int32_t count, const peri__cut *cut);
/** Cut the rows of @block over @ranks, @count of them, which must be of one node. The node's other ranks get a shard
 *  of no rows. */
peri_status peri__cut_in_node(const peri_sharding *s, const int32_t *ranks, const int64_t *sizes, int32_t count,
                              peri_shard block, peri__cut *cut);

#endif
