/* SPDX-License-Identifier: Apache-2.0
 *
 * module.h: a sharded module from the inside: module.c and tables.c make it, batch.c lays its batches out, walk.c takes them through it:
 * ids by its router, lookups in its tables, rows by its ways. What is particular to a kind of module are the stages that it fills in.
 *
 * A layout says where the rows of one batch lie in the buffers of this rank; it depends on numbers of bags, not on ids, and so is kept and
 * used again. There are two: as the home of a batch (what comes back for its own samples) and as an owner (what it looks up for all).
 * Rows of one table all travel in one lane; the buffers have one stretch for each lane, and each lane goes its own way (way.h), because
 * rows of different lanes have other codecs or other hops.
 */
#ifndef PERI_SHARD_MODULE_H
#define PERI_SHARD_MODULE_H

#include "internal.h"
#include "layout.h"
#include "way.h"

/** Tables of this rank that are looked up together: one optimizer, dense or fused or none, shards or replicas; shards: one pooling and
 *  one place. */
typedef struct peri__table_set {
    peri_tbe *tbe;
    int32_t optimizer; /* index into the configuration's; -1: none (dense, quantized) */
    int32_t place;     /* of the configuration's places */
    int32_t part;      /* that of their lanes */
    int32_t dtype;
    bool dense, replica, cached, mapped;
    bool by_id; /* of tables whose rows go home one by one */
    bool mean; /* shards of MEAN tables: their bags' factors come with the ids. (Replicas see whole bags and need none.) */
    int32_t n_tables;
    int32_t *module_table; /* n_tables: module table */
    int32_t *module_shard; /* n_tables: shard of it; -1: the whole, a replica or a copy */
    peri_tensor **leaves; /* n_tables, dense only: the tables' leaves */
} peri__table_set;

/** The layouts of a batch with what the table batches made of them; kept for the next batch, which is usually alike. */
typedef struct peri__batch_layout {
    peri__refs refs;
    peri__home *home;
    peri__owner *owner;
    int32_t n_sets;
    peri_tbe_blocks **blocks; /* by set */
    peri__leg legs[PERI__LANES][PERI__HOPS]; /* of the ways */
} peri__batch_layout;

typedef struct peri__repeats peri__repeats; /* which samples of a variable batch share a bag (repeats.c) */

/** What a home keeps of its input until the backward pass. */
typedef struct peri__given {
    peri_tensor *inverse; /* i64: of a variable batch; NULL: none */
    peri_tensor *ids, *places; /* where rows are of ids: the input's, and where they went (peri__routing.places); else NULL */
    peri_tensor *offsets, *weights; /* of the input, where bags of such rows are pooled here; weights: or NULL */
    peri_tensor *origins; /* as peri__routing.origins, or NULL */
    peri__repeats *repeats; /* of a variable batch some of whose rows may be where the results lie; else NULL */
    int64_t first_own, own_place, own_ids; /* ids that were received before this rank's own; where these are on its wire; how many */
    int64_t first_own_bag;  /* bags that were received before this rank's own */
    peri_tensor *own_bags;  /* peri__repeats_own of the direction that rows go in, or NULL */
} peri__given;

/** Rows that need not be moved between the buffers and the results: they were written, or will be read, where those lie. */
enum { PERI__REPLICAS_THERE = 1, PERI__OWN_THERE = 2 };

typedef struct peri__direct peri__direct;

/** The ends of rows that travel without a buffer at home. */
typedef struct peri__direct_ends {
    peri_tensor *const *to; /* the results that are put together, one tensor; gradients: of all results, or (apart) of each. All are
                               contiguous f32 */
    bool apart;
    peri_tensor *received;  /* the buffer of rows that are moved all the same; gradients: NULL */
} peri__direct_ends;

/** What takes the rows of other ranks to where they belong (@back: fills what leaves from the gradients) as they travel (direct.c). *out
 *  NULL: nothing can. It keeps all that it needs. */
peri_status peri__direct_new(const peri_sharded *e, const peri__home *h, const peri__given *given, const peri__direct_ends *ends, bool back,
                             peri__direct **out);
/** NULL is fine, here and below. */
void peri__direct_release(peri__direct *direct);
/** The functions of a lane; NULL: its rows go through the buffer. Of rows of ids: of all lanes, or of none. */
const peri__transfer_direct *peri__direct_lane(const peri__direct *direct, int32_t lane);
/** Whether it moves the rows of a piece. */
bool peri__direct_has(const peri__direct *direct, const peri_k_piece *piece);

/** A kind of module: its stages. */
typedef struct peri__kind {
    const char *name;
    bool by_id; /* rows are of ids, else of bags */
    peri__lay_out lay_out;
    /* Before the ids leave: what else the owner of each bag needs to know, as peri__routing_args.by_bag. */
    peri_status (*by_bag)(const peri__routing *routing, peri_tensor *out);
    /* Once rows are back: the results @out (f32) that are put together, of what this rank looked up for itself and what it received;
     * @there: PERI__*_THERE (replicas: those that could be, peri__home.replica_column); @direct: what it has moved is there too. */
    peri_status (*combine)(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tensor *own, peri_tensor *received,
                           int there, const peri__direct *direct, peri_tensor *out);
    /* Its adjoint: the gradient of the results to that of the rows, which is divided on its way (peri__home.divisor). */
    peri_status (*spread)(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tensor *grad, peri_tensor *own,
                          peri_tensor *sent, int there, const peri__direct *direct);
    /* The same, from gradients that lie apart: contiguous f32, one for each result, on an immediate device. NULL: they are joined. */
    peri_status (*spread_parts)(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tensor *const *grad,
                                peri_tensor *own, peri_tensor *sent, int there, const peri__direct *direct);
} peri__kind;

extern const peri__kind peri__pooled, peri__sequence;

/** The gradient of the ids' weights, of results that @h (all rows by id) pooled here of @own and @received: f32 [ids]. @out new. */
peri_status peri__pooled_weights(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tensor *grad, peri_tensor *own,
                                 peri_tensor *received, peri_tensor **out);

/** Replicas (replicas.c): whether the gradient of a set is added up over the ranks here, and that: @flat becomes the mean. */
bool peri__replicas_reduced(const peri__table_set *set);
peri_status peri__replicas_reduce(const peri_sharded *e, const peri__table_set *set, peri_tensor *flat, peri_work **out);
/** Make the lookups (by set) of all replicas write where the results want their rows; *placed false: they cannot. With a variable batch
 *  @given->repeats is wanted: what repeats is to be copied (peri__repeats_copy), and results need room for a row more, which nobody reads.
 *  Until peri__replicas_unplace, which is for any lookups. */
peri_status peri__replicas_place(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tbe_batch *const *looks,
                                 bool *placed);
/** Make them read their gradients where @grad (contiguous f32, one for each result) lie. *first: what their updates take for the
 *  gradient, borrowed; NULL: they cannot. */
peri_status peri__replicas_place_back(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tbe_batch *const *looks,
                                      peri_tensor *const *grad, peri_tensor **first);
void peri__replicas_unplace(const peri_sharded *e, peri_tbe_batch *const *looks);

/** Which samples of a variable batch have a bag that one before them has too. @e, @h and @inverse live as long. *out new, NULL: there are
 *  more samples than are counted. */
peri_status peri__repeats_new(const peri_sharded *e, const peri__home *h, const peri_tensor *inverse, peri__repeats **out);
void peri__repeats_free(peri__repeats *repeats);
/** Before @look, of replicas, is placed: a bag's row is that of its first sample, in the result, or behind its last row if it has none; its
 *  gradient, after peri__repeats_add_up, in a row of the result's gradient or of the sums. */
void peri__repeats_place(const peri__repeats *repeats, peri_tbe_batch *look);
/** Copy rows in the one result from the first sample of each bag to the others. @there: by output of the home, for which. */
void peri__repeats_copy(peri__repeats *repeats, const bool *there, peri_tensor *rows);
/** Add the gradients of bags up that several samples have. Once. */
peri_status peri__repeats_add_up(peri__repeats *repeats, peri_tensor *grad);
/** Then: the sums, borrowed; NULL: they lie too far from @grad. *past: one past the last row that a bag may have. */
peri_tensor *peri__repeats_sums(const peri__repeats *repeats, int64_t *past);
/** i32, borrowed, by bag of the input: its row, as in peri__repeats_place. */
peri_tensor *peri__repeats_places(const peri__repeats *repeats);
/** The same by bag that this rank receives from itself. @out new. */
peri_status peri__repeats_own(const peri__repeats *repeats, peri_tensor **out);

/** Own rows (placed.c): make the lookups (by set) of all but replicas write own rows to the results @to[0], or (@back) read them in the
 *  gradients @to, by result; all other rows stay in @buffer. All are contiguous f32. *first: what the lookups then take for either,
 *  borrowed; NULL: they cannot. Until peri__own_unplace, which is for any lookups, NULL too. */
peri_status peri__own_place(const peri_sharded *e, const peri__batch_layout *layout, peri__given *given, peri_tbe_batch *const *looks,
                            bool back, peri_tensor *buffer, peri_tensor *const *to, peri_tensor **first);
void peri__own_unplace(const peri_sharded *e, peri_tbe_batch *const *looks);

typedef struct peri__managed peri__managed; /* a table of raw ids (managed.c) */

/** What optimizer i is doing. */
typedef struct peri__rate {
    double rate;   /* the learning rate of now */
    int32_t table; /* the first fused table that it trains, for messages; -1: none */
} peri__rate;

/** What time it is for a table of raw ids (peri_sharded_time). */
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
    bool places_own; /* own rows may be placed (placed.c) */
    bool cuts_rows;  /* ids of some feature go to several ranks */
    bool *mean;     /* n_tables: pooled by the mean */
    int32_t *halvings; /* n_tables: how often the sums of its gradients are halved by the update, instead of divided before */
    bool training, returns_rows; /* of tables of raw ids: see peri_sharded_train; their rows go home too */
    int64_t passes; /* backward passes so far */
    bool frozen; /* no table is trained (PERI_KERNEL_QUANT), and nothing is recorded */
    int32_t places; /* of the configuration, 1 or more */
    bool hollow; /* this rank takes part in sums to which it adds nothing */
    char *identity_text; /* what all ranks must agree on (identity.c) */
    int64_t identity_bytes, identity_fixed; /* of it; and of its part that never changes */
    uint64_t identity;  /* hash of that part */
    peri__rate *rates;  /* n_optimizers */
    peri__time *times;  /* n_times */
    int32_t n_times;
    char *text;         /* names */
    char *function;     /* backing of router.function */
    const char **table_names, **feature_names;
    double *divisor;    /* n_tables: of the gradients of rows that are here; then of those that travel */
    double division;    /* of gradients that travel */
    int32_t *nodes;     /* world_size: the node of each rank */
    peri_group *node_group; /* the ranks of this rank's node; borrowed from `group` */
    int32_t parts;     /* of the tables whose rows are exchanged, 1 or more */
    peri__way ways[PERI__LANES]; /* of rows: an exchange each; in the node lane a sum within the node before, if there are several nodes */
    peri__route_table *tables; /* n_tables */
    int32_t *features;  /* backing of tables[].features */
    peri__routes *routes;
    peri__router router;
    peri__table_set *sets;
    peri_local_shard *local; /* n_local */
    peri__place *lookup_place; /* where the lookups of this rank are looked up (set -1: nowhere, its shard has no rows), and behind them the
                                replicas */
    peri_flush_info found;   /* what the directories of tables in files held when the module was made */
    char *found_path;        /* backing of found.path, or NULL */
    peri__home *homes[PERI__KEPT];         /* of the last inputs, the last one first; NULL: none yet */
    peri__batch_layout *layouts[PERI__KEPT]; /* of the last lookups */
    int64_t cols;             /* of a row of the output */
    int32_t n_results;        /* tensors that a batch becomes */
    int32_t *result_feature;  /* n_results: whose rows each has; NULL: all rows are one result */
    int64_t *scratch;         /* 3 x n_features + strands */
    peri__managed *managed;   /* n_managed */
    int32_t n_managed;        /* tables of raw ids */
    int64_t arrived;          /* batches whose raw ids have become rows */
    bool stored;              /* some table, on whatever rank, has its rows in a file or in the host's memory, under a cache */
    int64_t in_flight;        /* of these, batches that maps have learned from, and whose output nobody has taken yet */
};

/** Tables of raw ids (managed.c): what a configuration may say of one; once the tables are there; their end. */
peri_status peri__managed_check(const char *function, const peri_sharded_config *config, const peri_sharded_table *table);
peri_status peri__managed_new(peri_sharded *ebc, const peri_sharded_config *config);
void peri__managed_free(peri_sharded *ebc);
/** Before a flush: rows and maps are of one moment, which the files are to say. */
peri_status peri__managed_flush(peri_sharded *ebc);

/** Write down what all ranks must agree on (identity.c), once the tables are cut and the rates known; again, when a rate
 *  or a time has changed. */
peri_status peri__identity_new(peri_sharded *ebc, const peri_sharded_config *config);
peri_status peri__identity_refresh(peri_sharded *ebc);
/** Hash of all that they must agree on now. */
uint64_t peri__identity_hash(const peri_sharded *ebc);
/** PERI_EMISMATCH in the name of @function, of the texts of all ranks one after the other, @bytes[world] long: what differs, and where. */
peri_status peri__identity_fail(const char *function, int32_t world, const char *texts, const int64_t *bytes);

/** The table batches of this rank, once the routes are known; and their end. */
peri_status peri__tables_new(peri_sharded *ebc, const peri_sharded_config *config);
void peri__tables_free(peri_sharded *ebc);
/** The home layout for the input of @routing: one of the last if it fits, else a new one. Where rows are of ids, the router
 *  must have counted them. @out new. */
peri_status peri__batch_home(peri_sharded *ebc, const peri__routing *routing, peri__rule rule, peri__home **out);
/** The layout of a lookup, by the rule of its home: @counts and @ids as in peri__owner_new. @out new. */
peri_status peri__batch_layout_new(peri_sharded *ebc, peri__home *home, const int64_t *counts, const int64_t *ids,
                                   peri__batch_layout **out);
/** Find out which flush the files of the module are of, as far as this rank sees them. PERI_EMISMATCH names two files that do not fit. */
peri_status peri__files_of_module(peri_sharded *ebc, const peri_sharded_config *config);
void peri__batch_layout_release(peri__batch_layout *layout);
/** Give up the layouts that are kept. */
void peri__batches_free(peri_sharded *ebc);

#endif
