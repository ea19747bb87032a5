/* SPDX-License-Identifier: Apache-2.0
 *
 * routes.h: a compiled plan: which id goes to which rank, and where its pooled row comes back. Computed once per module
 * from tables, plan entries and the size of the world, the same on every rank; nothing here depends on a batch, a
 * device or a transport.
 *
 * Order is a function of the configuration alone: tables in the module's order, the shards of a table by offset, the
 * features of a table as configured. Each rank numbers the strands it receives and the lookups it looks up in that
 * order.
 */
#ifndef PERI_SHARD_ROUTES_H
#define PERI_SHARD_ROUTES_H

#include "../comm/nodes.h"

#include <perilune/shard.h>

/** Pooled rows travel in lanes: two kinds for rows that are exchanged, which may have codecs of their own; one for rows
 *  that are added up within their node before, where a node's ranks have the same lookups, in the same order; one for
 *  the gradients of copies, without codec.
 *
 *  The two kinds have a lane for each of several parts of the tables: rows of the first part are on their way while
 *  those of the next are looked up, and its tables are updated while gradients of the next are still to come. */
enum {
    PERI__PARTS = 8,
    PERI__SUMMED_LANE = PERI__PARTS,
    PERI__NODE_LANE = 2 * PERI__PARTS,
    PERI__COPY_LANE,
    PERI__LANES
};

/** The part of the tables whose rows are in a lane. */
static inline int32_t peri__lane_part(int32_t lane) { return lane < PERI__NODE_LANE ? lane % PERI__PARTS : 0; }

/** Where a shard, or a whole table, is on this rank: a table of a set (module.h). */
typedef struct peri__set_table {
    int32_t set, table; /* set -1: nowhere */
} peri__set_table;

/** One table of a sharded module, as the routes see it. */
typedef struct peri__route_table {
    int64_t rows, cols;
    int32_t n_features;
    const int32_t *features; /* indices into the module's feature list */
    bool data_parallel;
    bool by_id;  /* no rows of it are added up before they are home: they travel there one by one */
    bool copied; /* data-parallel, and each rank is an owner that learns from the ids and gradients of all ranks */
    int32_t raw, buckets; /* raw ids (kernels/route.h), and the table's buckets; 0: ids are rows */
    int64_t bucket_ids;
    const int64_t *segments; /* buckets + 1: where buckets begin; shards begin at some of them */
    int32_t lane; /* of its rows; in the node lane each rank of a node has a shard of a block of columns that lies
                     there */
    int32_t bounds_check; /* PERI_BOUNDS_* */
    int32_t n_shards;
    peri_shard *shards;
    /* Not for the routes: */
    bool mean;                    /* pooled by the mean */
    double divisor, sent_divisor; /* of the gradients of rows that are here, and of those that travel */
    int32_t halvings;  /* how often the sums of its gradients are halved by the update, instead of divided before */
    int32_t *places;   /* n_shards: where on its rank each is */
    peri__set_table
        *here; /* n_shards + 1: where on this rank the whole table is, as a replica or a copy; and each shard */
} peri__route_table;

/** One feature cut by one table's boundaries of rows, or of buckets: see kernels/route.h. */
typedef struct peri__partition {
    int32_t feature, table; /* table: the first that asked for it with this bounds_check, for messages */
    int32_t bounds_check;   /* the strictest of its tables' */
    int64_t rows, block; /* raw ids: buckets */
    int64_t bucket_ids;
    int32_t raw;
    int32_t n_parts, first_strand, first_bound;
    bool by_id, copied; /* as of its tables; copied: to one of the ranks, which all get these ids */
} peri__partition;

/** One part of a partition on its way to one rank. */
typedef struct peri__strand {
    int32_t partition, part, rank;
    int32_t index; /* among the strands of its rank */
} peri__strand;

/** One lookup on a rank: a feature in a shard. */
typedef struct peri__lookup {
    int32_t table, shard, feature; /* shard -1: a copy */
    int32_t strand;                /* whose ids it looks up */
    int32_t lane;           /* that of the table */
    int32_t piece;          /* its rows in an output; -1: none, others stand for it */
    int64_t cols;
} peri__lookup;

/** One block of output columns and the lookups whose rows add up to it. */
typedef struct peri__output {
    int32_t table, feature;
    int64_t column, cols;
    int64_t col_offset; /* where the block begins within its table */
    int32_t first_piece, n_pieces; /* in pieces */
} peri__output;

/** A lookup of a rank, or (rank -1) a replica: its ids stay at home. Rows that were added up within a node: that of its
 *  first rank. */
typedef struct peri__piece {
    int32_t rank, lookup, output;
} peri__piece;

/** A data-parallel lookup, if it is not of copies. */
typedef struct peri__replica {
    int32_t table, feature;
    int32_t partition; /* by which its ids are checked */
    int32_t piece;
    int64_t cols;
} peri__replica;

typedef struct peri__routes {
    int32_t world_size, n_tables, n_features;
    int32_t n_partitions, n_strands, n_bounds, n_outputs, n_pieces, n_replicas;
    peri__partition *partitions;
    peri__strand *strands;
    int64_t *bounds;
    const peri__nodes *nodes; /* of the world; borrowed */
    int32_t *wire;            /* n_strands: strands in wire order, by rank and index */
    int32_t *wire_feature; /* n_strands: whose bags each place of the wire takes */
    int32_t *rank_wire;   /* world_size + 1: first wire position of each rank */
    peri__lookup *lookups;    /* of all ranks; those of a rank by lane */
    int32_t *rank_lookup;   /* world_size + 1: first lookup of each rank */
    peri__output *outputs;
    peri__piece *pieces;
    peri__replica *replicas;
    int64_t out_cols; /* columns of the module's output */
} peri__routes;

/** Compile. @nodes live as long. @out new, freed with peri__routes_free. */
peri_status peri__routes_new(const peri__nodes *nodes, const peri__route_table *tables, int32_t n_tables,
                             int32_t n_features, peri__routes **out);
void peri__routes_free(peri__routes *routes);

#endif
