/* SPDX-License-Identifier: Apache-2.0
 *
 * module.h: a sharded module from the inside: module.c and tables.c make it, batch_layouts.c lays its batches out,
 * module_batch.c takes them through it: ids by its router, lookups in its tables, rows by its ways. What is particular
 * to a kind of module are the stages that it fills in.
 *
 * A layout says where the rows of one batch lie in the buffers of this rank; it depends on numbers of bags, not on ids,
 * and so is kept and used again. There are two: as the home of a batch (what comes back for its own samples) and as an
 * owner (what it looks up for all). Rows of one table all travel in one lane; the buffers have one stretch for each
 * lane, and each lane goes its own way (way.h), because rows of different lanes have other codecs or other hops.
 */
#ifndef PERI_SHARD_MODULE_H
#define PERI_SHARD_MODULE_H

#include "../plan/plan_internal.h"
#include "layout.h"
#include "way.h"
#include "../../kernels/route.h"

/** Tables of this rank that are looked up together: one optimizer, dense or fused or none, shards or replicas; shards:
 *  one pooling and one place. */
typedef struct peri__table_set {
    peri_tbe *tbe;
    int32_t optimizer; /* index into the configuration's; -1: none (dense, quantized) */
    int32_t place;     /* of the configuration's places */
    int32_t part;      /* that of their lanes */
    int32_t dtype;
    bool dense, replica, cached, mapped;
    bool by_id; /* of tables whose rows go home one by one */
    bool mean; /* shards of MEAN tables: their bags' factors come with the ids. (Replicas see whole bags and need
                  none.) */
    int32_t n_tables;
    int32_t *module_table; /* n_tables: module table */
    int32_t *module_shard; /* n_tables: shard of it; -1: the whole, a replica or a copy */
    peri_tensor **leaves; /* n_tables, dense only: the tables' leaves */
} peri__table_set;

/** A set's blocks with rows in place, as they were made for a batch of one end (rows.c), and are good for others. */
typedef struct peri__blocks_there {
    peri_tbe_blocks *blocks; /* NULL: none yet */
    bool mixed;              /* some rows are in the owner's buffer, */
    int64_t away;            /* which began as many elements behind the end; */
    int64_t stride;          /* peri__rows.stride */
} peri__blocks_there;

/** The layouts of a batch with what the table batches made of them; kept for the next batch, which is usually alike. */
typedef struct peri__batch_layout {
    peri__refs refs;
    peri__home *home;
    peri__owner *owner;
    int32_t n_sets;
    peri_tbe_blocks **blocks; /* by set: their rows lie in the buffer of the owner */
    int32_t **lines;          /* by set: of each block, the home's line of its rows, or -1 */
    peri__blocks_there *there[2]; /* by direction and set */
    peri__leg legs[PERI__LANES][PERI__HOPS]; /* of the ways */
} peri__batch_layout;

typedef struct peri__rows peri__rows; /* one direction of a batch (rows.h) */

/** A kind of module: its stages. */
typedef struct peri__kind {
    const char *name;
    bool by_id; /* rows are of ids, else of bags */
    /* Open the upload of a home, with room for the pieces of the routes, and write its outputs for kernels. */
    peri_status (*lay_out)(peri__home *home);
    /* Before the ids leave: what else the owner of each bag needs to know, as peri__routing_args.by_bag. */
    peri_status (*by_bag)(const peri__routing *routing, peri_tensor *out);
    /* What of the outputs goes through the buffers, if some spaces' rows do not (peri__rows_list_left). */
    peri_status (*list)(const peri__rows *rows, peri__left *left);
    /* Once rows are back: what goes through the buffers to the results that are put together. */
    peri_status (*combine)(const peri__rows *rows);
    /* Its adjoint: the gradient of the results to that of the rows, which is divided on its way
     * (peri__line.divisor). */
    peri_status (*spread)(const peri__rows *rows);
} peri__kind;

extern const peri__kind peri__pooled, peri__sequence;

typedef struct peri__managed peri__managed; /* a table of raw ids (managed.c) */

/** What optimizer i is doing. */
typedef struct peri__rate {
    double rate;   /* the learning rate of now */
    int32_t table; /* the first fused table that it trains, for messages; -1: none */
} peri__rate;

/** What time it is for a table of raw ids (peri_sharded_time_set). */
typedef struct peri__time {
    int64_t now;
    int32_t table;
} peri__time;

struct peri_sharded {
    peri__refs refs;
    const peri__kind *kind;
    peri_group *group;
    peri_device *device;
    int32_t rank, world_size, n_tables, n_features, n_sets, n_local, n_optimizers, output_dtype;
    bool weighted, any_mean; /* any_mean: some shards are of a MEAN table */
    bool exact;     /* some fused table wants sums that do not depend on the plan (fused_params.exact) */
    bool two_rules; /* rows home are others than gradients to owners: see peri__rule */
    bool cuts_rows;  /* ids of some feature go to several ranks */
    bool training, returns_rows; /* of tables of raw ids: see peri_sharded_training_set; their rows go home too */
    int64_t passes; /* backward passes so far */
    bool frozen; /* no table is trained (PERI_KERNEL_QUANT), and nothing is recorded */
    int32_t places; /* of the configuration, 1 or more */
    bool hollow; /* this rank takes part in sums to which it adds nothing */
    char *identity_text; /* what all ranks must agree on (identity.c) */
    int64_t identity_bytes, identity_fixed; /* of it; and of its part that never changes */
    uint64_t identity;  /* hash of that part */
    peri__rate *rates;  /* n_optimizers */
    char *text;         /* names */
    char *function;     /* backing of router.function */
    const char **table_names, **feature_names;
    double division;    /* of gradients that travel */
    peri__nodes nodes;  /* of the group */
    peri_group *node_group; /* the ranks of this rank's node; borrowed from `group` */
    int32_t parts;     /* of the tables whose rows are exchanged, 1 or more */
    int32_t n_lanes, lanes[PERI__LANES]; /* those that rows of some table travel in */
    peri__way ways[PERI__LANES]; /* of rows: an exchange each; in the node lane a sum within the node before, if there
                                    are several nodes */
    peri__route_table *tables; /* n_tables */
    int32_t *features;  /* backing of tables[].features */
    peri__routes *routes;
    peri__router router;
    peri__table_set *sets;
    peri_local_shard *local; /* n_local */
    peri_flush_info found;   /* what the directories of tables in files held when the module was made */
    char *found_path;        /* backing of found.path, or NULL */
    peri__home *homes[PERI__KEPT];         /* of the last inputs, the last one first; NULL: none yet */
    peri__batch_layout *layouts[PERI__KEPT]; /* of the last lookups */
    int64_t cols;             /* of a row of the output */
    int32_t n_results;        /* tensors that a batch becomes */
    int32_t *result_feature;  /* n_results: whose rows each has; NULL: all rows are one result */
    int64_t *scratch;         /* peri__home_numbers of them, while a home is looked for */
    peri__managed *managed;   /* n_managed */
    int32_t n_managed;        /* tables of raw ids */
    int64_t arrived;          /* batches whose raw ids have become rows */
    bool stored;              /* some table, on whatever rank, has its rows in a file or in the host's memory, under a
                                 cache */
    int64_t in_flight;        /* of these, batches that maps have learned from, and whose output nobody has taken yet */
};

/** Where shard @shard of a table is on this rank (-1: the whole of it, a replica or a copy); set -1: nowhere, or it has
 *  no rows. */
static inline peri__set_table peri__set_table_of(const peri_sharded *e, int32_t table, int32_t shard)
{
    return e->tables[table].here[1 + shard];
}

/** Tables of raw ids (managed.c): what a configuration may say of one; once the tables are there; their end. */
peri_status peri__managed_check(const char *function, const peri_sharded_config *config,
                                const peri_sharded_table *table);
peri_status peri__managed_new(peri_sharded *ebc, const peri_sharded_config *config);
void peri__managed_free(peri_sharded *ebc);
/** What time it is for the table of raw ids @i. */
peri__time peri__managed_time(const peri_sharded *ebc, int32_t i);
peri_status peri__managed_time_set(peri_sharded *ebc, int32_t i, int64_t now);
/** Before a flush: rows and maps are of one moment, which the files are to say. */
peri_status peri__managed_flush(peri_sharded *ebc);

/** Write down what all ranks must agree on (identity.c), once the tables are cut and the rates known; again, when a
 *  rate or a time has changed. */
peri_status peri__identity_new(peri_sharded *ebc, const peri_sharded_config *config);
peri_status peri__identity_refresh(peri_sharded *ebc);
/** Hash of all that they must agree on now. */
uint64_t peri__identity_hash(const peri_sharded *ebc);
/** PERI_EMISMATCH in the name of @function, of the texts of all ranks one after the other, @bytes[world] long: what
 *  differs, and where. */
peri_status peri__identity_fail(const char *function, int32_t world, const char *texts, const int64_t *bytes);

/** The table batches of this rank, once the routes are known; and their end. */
peri_status peri__tables_new(peri_sharded *ebc, const peri_sharded_config *config);
void peri__tables_free(peri_sharded *ebc);
/** The home layout for the input of @routing: one of the last if it fits, else a new one. Where rows are of ids, the
 *  router must have counted them. @out new. */
peri_status peri__batch_home(peri_sharded *ebc, const peri__routing *routing, peri__rule rule, peri__home **out);
/** The layout of a lookup, by the rule of its home: @counts and @ids as in peri__owner_layout_new. @out new. */
peri_status peri__batch_layout_new(peri_sharded *ebc, peri__home *home, const int64_t *counts, const int64_t *ids,
                                   peri__batch_layout **out);
/** Find out which flush the files of the module are of, as far as this rank sees them. PERI_EMISMATCH names two files
 *  that do not fit. */
peri_status peri__module_files_check(peri_sharded *ebc, const peri_sharded_config *config);
void peri__batch_layout_release(peri__batch_layout *layout);
/** Give up the layouts that are kept. */
void peri__batch_layouts_free(peri_sharded *ebc);

#endif
