/* SPDX-License-Identifier: Apache-2.0
 *
 * bag.h: the sharded EmbeddingBagCollection from the inside: bag.c and tables.c make it, batch.c lays its batches out, input_dist.c and
 * output_dist.c (exchange.h) take them through it.
 */
#ifndef PERI_SHARD_BAG_H
#define PERI_SHARD_BAG_H

#include "internal.h"
#include "layout.h"

/** Tables of this rank that are looked up together: one optimizer, dense or fused, shards or replicas; shards: one pooling. */
typedef struct peri__group_of_tables {
    peri_tbe *tbe;
    int32_t optimizer; /* index into the configuration's; -1 for dense */
    int32_t dtype;
    bool dense, replica, cached;
    bool mean; /* shards of MEAN tables: their bags' factors come with the ids. (Replicas see whole bags and need none.) */
    int32_t n_tables;
    int32_t *slots_table; /* n_tables: module table */
    int32_t *slots_shard; /* n_tables: shard of it; -1: the whole */
    peri_tensor **leaves; /* n_tables, dense only: the tables' leaves */
} peri__group_of_tables;

/** A table of a group. */
typedef struct peri__place {
    int32_t group, table;
} peri__place;

/** How rows travel. */
typedef struct peri__lane {
    peri_codec *codec[2]; /* forward, backward: retained, or NULL */
    bool used;            /* some table's rows take it */
} peri__lane;

/** A codec on what this rank gets or gives as a home of batches, and as an owner of rows. */
enum { PERI__HOME_SIDE, PERI__OWNER_SIDE, PERI__SIDES };

/** The layouts of a batch with what the table batches made of them; kept for the next batch, which is usually alike. */
typedef struct peri__bag_layout {
    peri__refs refs;
    peri__home *home;
    peri__owner *owner;
    int32_t n_groups;
    peri_tbe_blocks **blocks; /* by group */
    peri_codec_context *contexts[PERI__LANES][2][PERI__SIDES]; /* forward, backward; NULL: no codec */
} peri__bag_layout;

/** Layouts that a module keeps: those of the last batches that differed. */
enum { PERI__KEPT = 8 };

/** What optimizer i is doing. */
typedef struct peri__rate {
    double rate;   /* the learning rate of now */
    int32_t table; /* the first fused table that it trains, for messages; -1: none */
} peri__rate;

struct peri_sharded_ebc {
    peri__refs refs;
    peri_group *group;
    peri_device *device;
    int32_t rank, world_size, n_tables, n_features, n_groups, n_local, n_optimizers, output_dtype;
    bool weighted, wire_i32, any_mean; /* any_mean: some shards are of a MEAN table */
    char *identity_text; /* what all ranks must agree on (identity.c) */
    int64_t identity_bytes, identity_fixed; /* of it; and of its part that never changes */
    uint64_t identity;  /* hash of that part */
    peri__rate *rates;  /* n_optimizers */
    bool compared;      /* an input_dist has begun: it compares identities before anything that depends on them */
    int64_t bad_ids;    /* found so far */
    char *text;         /* names */
    const char **table_names, **feature_names;
    double *divisor;    /* n_tables: of the gradients of rows that are here; then of those that travel */
    double division;    /* of gradients that travel, after their decoding; where there is a codec */
    peri__lane lanes[PERI__LANES];
    peri__route_table *tables; /* n_tables */
    int32_t *features;  /* backing of tables[].features */
    peri__routes *routes;
    peri__group_of_tables *groups;
    peri_local_shard *local; /* n_local */
    peri__place *slot_place; /* where the slots of this rank are looked up, and behind them the replicas */
    peri_flush_info found;   /* what the directories of tables in files held when the module was made */
    char *found_path;        /* backing of found.path, or NULL */
    peri__home *homes[PERI__KEPT];         /* of the last inputs, the last one first; NULL: none yet */
    peri__bag_layout *layouts[PERI__KEPT]; /* of the last lookups */
    uint64_t keys_hash;       /* of the input keys that feature_key is for; 0: none yet */
    int32_t *feature_key;     /* n_features: position of each feature among the input's keys */
    int64_t *scratch;         /* 3 x n_features */
};

/** Write down what all ranks must agree on (identity.c), once the tables are cut and the rates known; again, when a rate has changed. */
peri_status peri__identity_new(peri_sharded_ebc *ebc, const peri_sharded_ebc_config *config);
peri_status peri__identity_refresh(peri_sharded_ebc *ebc);
/** Hash of all that they must agree on now. */
uint64_t peri__identity_hash(const peri_sharded_ebc *ebc);
/** PERI_EMISMATCH in the name of @function, of the texts of all ranks one after the other, @bytes[world] long: what differs, and where. */
peri_status peri__identity_fail(const char *function, int32_t world, const char *texts, const int64_t *bytes);

/** Dtype of a table's weights. */
static inline int32_t peri__dtype_of(const peri_sharded_table *table) { return table->dtype ? table->dtype : PERI_F32; }

/** The table batches of this rank, once the routes are known; and their end. */
peri_status peri__tables_new(peri_sharded_ebc *ebc, const peri_sharded_ebc_config *config);
void peri__tables_free(peri_sharded_ebc *ebc);
/** The home layout for @kjt: one of the last if it fits, else a new one. PERI_EINVAL names the missing feature. @out new. */
peri_status peri__bag_home(peri_sharded_ebc *ebc, peri_kjt *kjt, peri__home **out);
/** The layout of a lookup: @counts as in peri__owner_new, taken on success. @out new. */
peri_status peri__bag_layout_new(peri_sharded_ebc *ebc, peri__home *home, int64_t *counts, peri__bag_layout **out);
/** Find out which flush the files of the module are of, as far as this rank sees them. PERI_EMISMATCH names two files that do not fit. */
peri_status peri__bag_files(peri_sharded_ebc *ebc, const peri_sharded_ebc_config *config);
void peri__bag_layout_release(peri__bag_layout *layout);
/** Give up the layouts that are kept. */
void peri__batches_free(peri_sharded_ebc *ebc);

#endif
