/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/shard.h: sharding types as geometry, and sharded embedding modules.
 *
 * Threads: a sharded module (peri_sharded), the group that it is over, and all else of that group's world are used by
 * one thread at a time (perilune/comm.h). So is a plan (peri_plan).
 */
#ifndef PERILUNE_SHARD_H
#define PERILUNE_SHARD_H

#include <perilune/collision.h>
#include <perilune/embed.h>
#include <perilune/exchange.h>

/** Sharding types (TorchRec's ShardingType); names: peri_sharding_type_name. */
enum {
    PERI_TABLE_WISE = 0,    /* the whole table on one rank */
    PERI_ROW_WISE = 1,      /* contiguous blocks of rows over ranks */
    PERI_COLUMN_WISE = 2,   /* blocks of columns over ranks */
    PERI_TABLE_ROW_WISE = 3,    /* blocks of rows over the ranks of one node, which add their parts up before these
                                   cross the network */
    PERI_TABLE_COLUMN_WISE = 4, /* blocks of columns over the ranks of one node */
    PERI_GRID_SHARD = 5,        /* blocks of columns over nodes, each table-row-wise within its node */
    PERI_DATA_PARALLEL = 6,     /* every rank has the whole table and the gradients are reduced */
    PERI_SHARDING_TYPE_COUNT = 7
};

/** Facts of a sharding type, as bits (peri_sharding_type_facts). What depends on a type asks for these, not for its
 *  name. */
enum {
    PERI_SHARDING_CUTS_ROWS = 1,    /* rows of one column may lie on several ranks: pooled rows of their parts are added
                                       up */
    PERI_SHARDING_CUTS_COLUMNS = 2, /* a row may lie on several ranks */
    PERI_SHARDING_IN_NODE = 4,      /* the table, or each block of columns if rows are cut too, lies on one node. If
                                       rows are cut, all ranks of the node have a shard, and add their parts up before
                                       these leave the node */
    PERI_SHARDING_REPLICA = 8       /* every rank has the whole table: no ids travel, and gradients are reduced */
};

/** One piece of a table: rows [row_offset, row_offset + rows) of columns [col_offset, col_offset + cols) on a rank. */
typedef struct peri_shard {
    int64_t row_offset, rows, col_offset, cols;
    int32_t rank;
    int32_t index; /* its place among the shards of the table */
} peri_shard;

/** How one table is cut: what a plan says of it. */
typedef struct peri_sharding {
    int64_t size; /* sizeof(peri_sharding) */
    int32_t type;                   /* PERI_TABLE_WISE, ... */
    int32_t world_size;             /* ranks */
    int32_t n_ranks;                /* 0: the type's default */
    const int32_t *nodes;           /* int32[world_size]: the node of each rank, any numbers; NULL: one node */
    const int32_t *ranks;           /* int32[n_ranks]. Table-wise: the one rank. Row-wise: the ranks in order of their
                                       blocks of rows, each once. Column-wise: a rank for each block of columns, in
                                       order, repeats are fine. Data-parallel: all or none. Table-row-wise,
                                       table-column-wise: as row-wise and column-wise, all of one node. Grid: the ranks
                                       of the first block of columns, those of the second, ...; a block begins where the
                                       node changes or a rank of the block comes again. Default: table-wise rank 0;
                                       table-row-wise and table-column-wise all ranks of rank 0's node; grid all, node
                                       after node; else all */
    const int64_t *sizes;           /* int64[n_ranks] rows ([table-]row-wise, grid) or columns ([table-]column-wise) of
                                       each shard; NULL: even */
    const char *table;              /* name, for messages */
    int64_t rows, cols;             /* of the whole table */
    const int64_t *segments;        /* int64[buckets + 1] rows where shards of rows may begin, and the end; even is by
                                       buckets then. NULL: anywhere */
    int32_t buckets;
} peri_sharding;

/** "table_wise", ...; "?" for an unknown type. Static text, borrowed. */
PERI_API const char *peri_sharding_type_name(int32_t type);
/** What a sharding type does to a table: PERI_SHARDING_CUTS_ROWS, ... added up; 0 for the whole table on one rank. -1:
 *  unknown type. */
PERI_API int32_t peri_sharding_type_facts(int32_t type);
/** The shards of a table, in order of their offsets; none for data-parallel. @out has room for @room (NULL: they
 *  are only counted); *@n gets their number. Where rows lie within a node, all ranks of the node have a shard, some
 *  maybe of no rows. PERI_EINVAL names the table and says what is allowed. Local. */
PERI_API peri_status peri_sharding_shards(const peri_sharding *sharding, peri_shard *out, int32_t room, int32_t *n);

/* -- names and plans ----------------------------------------------------------------------------------------------- */

/** The value of option @option ("sharding_type", "optimizer", "pooling", "bounds_check", "cache_algorithm",
 *  "compute_kernel", "weight_decay_mode", "counter_weight_decay_mode", "learning_rate_mode", "codec", "data_type") that
 *  configurations and plans call @name, in *@out. PERI_EINVAL names what is allowed, and leaves *@out as it is.
 *  Local. */
PERI_API peri_status peri_option_value(const char *option, const char *name, int32_t *out);
/** Name @i, from 0, of an option, and its value in *@value (or NULL); NULL behind the last one, or for what is no
 *  option. Static text. */
PERI_API const char *peri_option_name(const char *option, int32_t i, int32_t *value);

/** A plan that was made before (by a planner, by hand) and written as JSON (docs/plans.md): how the tables of a model's
 *  modules are cut. */
typedef struct peri_plan peri_plan;

struct peri_sharded_table;
/** Read a plan out of a file. PERI_ENOTFOUND, PERI_EIO; PERI_EFORMAT: no JSON, or no plan; PERI_EINVAL names module,
 *  table, and what is allowed. Local. @out new. */
PERI_API peri_status peri_plan_read(const char *path, peri_plan **out);
/** The same out of @text [@bytes], which messages call @name. Both are borrowed. */
PERI_API peri_status peri_plan_parse(const char *name, const char *text, int64_t bytes, peri_plan **out);
/** Add a reference. */
PERI_API void peri_plan_retain(peri_plan *plan);
/** Give up a reference; NULL is fine. Local. */
PERI_API void peri_plan_release(peri_plan *plan);
/** Put what the plan says of the tables of module @module ("sparse.ebc", as the plan has it) into @tables [@n]: their
 *  sharding_type, compute_kernel, mapped, cache, ranks, n_ranks and sizes, which lie in the plan until it is released,
 *  or put into tables of another group. Names, rows and cols are there already. All are checked first, with rows,
 *  columns, and the ranks and nodes of @group: after PERI_EINVAL, which names the table and what is allowed, nothing
 *  was changed. The plan has all tables, the module no others. Local. */
PERI_API peri_status peri_plan_apply(peri_plan *plan, const char *module, const peri_group *group,
                                     struct peri_sharded_table *tables, int32_t n);

/* -- sharded modules ----------------------------------------------------------------------------------------------- */

/** Kinds of sharded modules. */
enum {
    PERI_SHARDED_EBC = 0, /* EmbeddingBagCollection: a pooled row for each bag */
    PERI_SHARDED_EC = 1,  /* EmbeddingCollection: a row for each id */
    PERI_SHARDED_KIND_COUNT = 2
};

typedef struct peri_sharded peri_sharded;

/** Who trains a table: the module itself in the backward pass, or a dense optimizer through leaf tensors; or nobody:
 *  rows that are written once and looked up (all tables of a module, or none). Such a module records nothing, and its
 *  rows may be bytes. */
enum { PERI_KERNEL_FUSED = 0, PERI_KERNEL_DENSE = 1, PERI_KERNEL_QUANT = 2 };

/** Managed collision of a table (perilune/collision.h): its ids are raw, and become rows by maps. All but @map is alike
 *  on every rank. */
typedef struct peri_sharded_collision {
    int64_t size; /* sizeof(peri_sharded_collision) */
    peri_collision *map;     /* of this rank's buckets: just the rows of its shard; retained. NULL where it has none */
    const int64_t *segments; /* int64[buckets + 1]: rows where buckets begin, and the end; shards begin at some of
                                them */
    int64_t input_hash_size; /* PERI_SPREAD_RANGE */
    int32_t buckets, spread; /* of the whole table; PERI_SPREAD_* */
    const char *agreed;      /* what else ranks must agree on: lines "name<tab>value"; NULL: nothing */
} peri_sharded_collision;

/** One table and its plan entry. */
typedef struct peri_sharded_table {
    int64_t size; /* sizeof(peri_sharded_table) */
    const char *name;
    int64_t rows, cols;     /* of the whole table */
    double init_a, init_b;
    const int32_t *features; /* int32[n_features], indices into config.features */
    const int32_t *ranks;   /* as in peri_sharding */
    const int64_t *sizes;
    int32_t n_features, n_ranks;
    int32_t pooling, init;  /* PERI_POOLING_* (SUM or MEAN; EC: NONE), PERI_INIT_* */
    int32_t sharding_type, compute_kernel;
    int32_t optimizer;      /* index into config.optimizers; for PERI_KERNEL_FUSED */
    int32_t dtype;          /* of the weights: PERI_F32, PERI_F16, PERI_BF16; PERI_KERNEL_DENSE: f32; PERI_KERNEL_QUANT:
                               also PERI_ROWS_*, and `init` is PERI_INIT_NONE: rows of bytes start as zeros */
    int32_t bounds_check;   /* PERI_BOUNDS_*: ids are checked at home, before they are routed; of tables with one route,
                               the strictest */
    bool mapped;            /* shards in the host's memory, as in peri_tbe_config (TorchRec's fused_uvm, quant_uvm); not
                               dense ones */
    const peri_cache_config *cache; /* NULL: shards in memory; else behind a cache (TorchRec's fused_uvm_caching; fused,
                                       no replicas) */
    const peri_sharded_collision *collision; /* NULL: ids are rows. Else raw: fused, table-wise or row-wise, without
                                                index_dedup */
} peri_sharded_table;

/** What pooled rows and their gradients are between ranks; NULL: f32. Rows that a rank returns to itself are f32
 *  whatever the codec. */
typedef struct peri_sharded_codecs {
    peri_codec *forward, *backward; /* retained */
} peri_sharded_codecs;

typedef struct peri_sharded_config {
    int64_t size; /* sizeof(peri_sharded_config) */
    peri_group *group;      /* retained; every member makes the same module */
    peri_device *device;
    const peri_sharded_table *tables; /* copied, in the order of the module */
    const char *const *features;      /* distinct feature names; copied */
    const peri_tbe_optimizer_config *optimizers;
    uint64_t seed;
    int32_t n_tables, n_features, n_optimizers;
    bool weighted;          /* every input has per-sample weights, or none has */
    int32_t gradient_division; /* PERI_DIVISION_*: whether gradients that come back are divided by the size of the group
                                  (mean over ranks); DEFAULT: as exchanges of the group are when the module is made */
    int32_t output_dtype;   /* PERI_F32, PERI_F16, PERI_BF16: sums are f32, and rounded to nearest even at last */
    peri_sharded_codecs all_to_all;     /* of rows of table-wise and column-wise shards, of those that were added up
                                           within a node, and of all rows of an EC */
    peri_sharded_codecs reduce_scatter; /* of row-wise shards, and of those within a node; they are added up in f32,
                                           when they are here */
    int32_t kind;           /* PERI_SHARDED_* */
    bool index_dedup;       /* equal ids of the batches that come were taken out before: nothing but what ranks must
                               agree on */
    int32_t places;         /* 0 or 1: shards are cut over the ranks of the group. More (a group of one rank): over so
                               many places of this process, which the plan numbers as if they were ranks; the tables of
                               each place are looked up together */
    bool returns_rows;      /* the rows that raw ids became come home too: peri_sharded_rows */
    const char *name;       /* of the module, for messages; NULL: it has none; copied */
} peri_sharded_config;

/** Whether modules can shard and keep @table like that: its sharding_type, compute_kernel, dtype, cache and mapped,
 *  trained (with the compute kernel fused) by @optimizer. Planners ask it. Errors are those of peri_sharded_new:
 *  PERI_EUNSUPPORTED names what is allowed. */
PERI_API peri_status peri_sharded_table_check(const peri_sharded_table *table,
                                              const peri_tbe_optimizer_config *optimizer);

/** Allocate and initialise this rank's shards. Collective: all members with the same configuration and plan; every
 *  exchange compares them, with the learning rates of that moment, and PERI_EMISMATCH says on all ranks what differs on
 *  which. (Not compared: the algorithm of caches, how much memory they leave, and where their files are.) Does not
 *  communicate. Errors name the table. @out new. */
PERI_API peri_status peri_sharded_new(const peri_sharded_config *config, peri_sharded **out);
/** Add a reference. */
PERI_API void peri_sharded_retain(peri_sharded *module);
/** Give up a reference; NULL is fine. Local. */
PERI_API void peri_sharded_release(peri_sharded *module);

/** Send the ids of @kjt to the ranks that own their rows. Posts and returns; advance it with peri_work_test. Needs
 *  every feature of the module among the keys of @kjt, in any order; ids out of range are an error that names table,
 *  feature, sample and id, on this rank, and poisons the group. Collective. @kjt retained. @out new. */
PERI_API peri_status peri_sharded_input_dist(peri_sharded *module, peri_kjt *kjt, peri_work **out);

/** One module's input. */
typedef struct peri_sharded_input {
    peri_sharded *module;
    peri_kjt *kjt;
} peri_sharded_input;

/** The same for @n modules at once: what they tell other ranks before the ids travel is one message
 *  for all of a group instead of one each (TorchRec's FusedKJTListSplitsAwaitable). @out: room for @n, new; each is a
 *  work as of peri_sharded_input_dist. All ranks list the same modules in the same order. On failure nothing was made,
 *  and the groups of several ranks are poisoned. Collective. */
PERI_API peri_status peri_sharded_input_dists(const peri_sharded_input *inputs, int32_t n, peri_work **out);
/** Look up what arrived and send the pooled rows back. @dist is a complete work of peri_sharded_input_dist, used once;
 *  posts and returns. Collective. PERI_PENDING: as peri_sharded_prefetch; nothing was posted. @out new. */
PERI_API peri_status peri_sharded_compute_and_output_dist(peri_sharded *module, peri_work *dist, peri_work **out);
/** Whether batches whose input_dist starts from now on teach the maps of tables with raw ids (at first: yes); else
 *  these ids are only looked up. On all ranks alike: input_dist compares it. Local. */
PERI_API peri_status peri_sharded_training_set(peri_sharded *module, bool training);
/** What time it is for the map of table @table from the next input_dist on (peri_collision_time_set), also where this
 *  rank has no bucket of it. On all ranks alike: input_dist compares it. Local. */
PERI_API peri_status peri_sharded_time_set(peri_sharded *module, const char *table, int64_t now);
/** Bring the rows that @dist, a complete work of peri_sharded_input_dist not yet looked up, will need from files into
 *  memory, in the background (peri_tbe_batch_prefetch). Local. Raw ids become rows here, or else in the lookup, batch
 *  by batch in the order of these calls; rows that get another id start again right before the lookup of the batch that
 *  brought it. PERI_PENDING: a map of policy USER wants scores (peri_collision_candidates); give them, and call
 *  again. */
PERI_API peri_status peri_sharded_prefetch(peri_sharded *module, peri_work *dist);
/** Before the state of a module is read: an error (PERI_EINVAL) while it is of no one moment: peri_tbe_settled of its
 *  tables; and of a module with raw ids, while its maps and rows are of different moments, since maps have learned from
 *  batches that were prefetched, or looked up ahead, and whose output nobody has taken. If such batches were released
 *  instead, the rows that got other ids start again now. Local. */
PERI_API peri_status peri_sharded_settle(peri_sharded *module);
/** How many batches the maps of raw ids of @module have learned from ahead of training, as peri_sharded_settle counts
 *  them; 0 without maps. Local. */
PERI_API int64_t peri_sharded_ahead(const peri_sharded *module);
/** What the directories of tables in files held when the module was made: the flush of this rank's files or, where it
 *  has none, of those that it sees of other ranks' shards. All ranks (with files) must find the same number and stamp
 *  before they go on; the stamps are compared again with every input_dist. Local. */
PERI_API peri_status peri_sharded_files_found(const peri_sharded *module, peri_flush_info *out);
/** A flush is one event of the module on all ranks: each prepares; when none has failed, all commit with the same
 *  number (one more than the highest of their flush_info) and stamp; see peri_tbe_flush_prepare. Each is local and
 *  blocks; agreeing is the caller's. */
PERI_API peri_status peri_sharded_flush_info(const peri_sharded *module, peri_flush_info *out);
PERI_API peri_status peri_sharded_flush_prepare(peri_sharded *module);
PERI_API peri_status peri_sharded_flush_commit(peri_sharded *module, int64_t number, uint64_t stamp);
/** How the rows of a batch go between buffers and results on this rank, and its gradients back: the list of a complete
 *  work of peri_sharded_input_dist, which may still be looked up, as text. Local. @out new, freed with
 *  peri_sharded_explain_release. */
PERI_API peri_status peri_sharded_explain(peri_sharded *module, peri_work *dist, char **out);
/** Free it; NULL is fine. */
PERI_API void peri_sharded_explain_release(char *text);
/** Tensors that a batch becomes: 1, or (EC) one for each feature of each table. */
PERI_API int32_t peri_sharded_results(const peri_sharded *sharded);
/** What became of a complete work of peri_sharded_compute_and_output_dist, used once, in config.output_dtype: the
 *  pooled rows [batch, columns]; or (EC), feature after feature of each table in the module's order, the rows [ids,
 *  columns] of the feature's ids, in their order, zeros for ids of -1. All have the columns of the widest table: what
 *  is behind a table's own may be anything. Recorded on the tape when gradients were on at the lookup: the backward
 *  pass exchanges the gradient and updates the shards. Local. @out: room for peri_sharded_results(); new references. */
PERI_API peri_status peri_sharded_output(peri_sharded *module, peri_work *output, peri_tensor **out);

/** The values of the input of a complete work of peri_sharded_compute_and_output_dist, of a module that returns_rows,
 *  with the row of the whole table in the place of each raw id; -1: it has none. Once, before or after
 *  peri_sharded_output. Waits for the device. @out new, i64. */
PERI_API peri_status peri_sharded_rows(peri_sharded *module, peri_work *output, peri_tensor **out);

/** A piece of a table that lives on this rank: a shard, or a whole replica. */
typedef struct peri_local_shard {
    peri_shard shard;       /* rank: this one */
    peri_tbe *tbe;          /* borrowed: weights and state through peri_tbe_state, and peri_tbe_leaf if `dense` */
    int64_t tbe_table;      /* its number there */
    int32_t table;          /* index into config.tables */
    int32_t place;          /* of config.places, from 0 */
    bool dense, replica;
} peri_local_shard;

/** Number of pieces on this rank, and the i-th, in order of tables and offsets. */
PERI_API int32_t peri_sharded_local_shards(const peri_sharded *module);
PERI_API peri_status peri_sharded_local_shard(peri_sharded *module, int32_t i, peri_local_shard *out);
/** Learning rate of optimizer @optimizer (index into config.optimizers) from now on; on all ranks alike. */
PERI_API peri_status peri_sharded_learning_rate_set(peri_sharded *module, int32_t optimizer, double learning_rate);
/** What all ranks must agree on, with the learning rates of now: lines "subject <tab> property <tab> value". Borrowed
 *  from the module, until a rate or a time is set. NULL: "". Local. */
PERI_API const char *peri_sharded_identity(const peri_sharded *module);
/** Backward passes of the module so far, which are as many on all ranks. NULL: 0. Local. */
PERI_API int64_t peri_sharded_passes(const peri_sharded *module);
/** A number that is another one after the weights of this rank's shards have changed: by updates, by peri_tbe_write and
 *  peri_tbe_rows_reset, through views (but not through peri_tensor_data). Rows that were looked up before are old then.
 *  NULL: 0. Local. */
PERI_API int64_t peri_sharded_changes(const peri_sharded *module);
/** Updates that all fused tables count as made so far (peri_tbe_iteration_set); on all ranks alike. Local. */
PERI_API peri_status peri_sharded_iteration_set(peri_sharded *module, int64_t iteration);

#endif
