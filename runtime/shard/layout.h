/* SPDX-License-Identifier: Apache-2.0
 *
 * layout.h: where the pooled rows of one batch lie: the compiled plan with the numbers of bags filled in, as arrays in
 * device memory. The home side follows from this rank's input; the owner side from what the other ranks sent. Both stay
 * the same from batch to batch as long as the batch sizes and the order of the keys do, and are then used again. Making
 * them takes time linear in features x ranks.
 */
#ifndef PERI_SHARD_LAYOUT_H
#define PERI_SHARD_LAYOUT_H

#include "router.h"
#include "../../kernels/route.h"
#include "../../kernels/tbe.h"

/** Which rows a layout is of. Where sums must not depend on the plan rows go home one by one, while gradients come of
 *  bags: then each direction has a layout of its own. */
typedef struct peri__rule {
    bool by_id;    /* rows of ids, else of bags */
    bool to_homes; /* of the way home alone: rows of ids in partitions that say so, and from each copy of a table its
                      own rank's only */
} peri__rule;

static inline bool peri__rows_by_id(peri__rule rule, const peri__partition *p)
{
    return rule.by_id || (rule.to_homes && p->by_id);
}
/** Whether rows of a partition of rank @owner are none of rank @home's. */
static inline bool peri__rows_absent(peri__rule rule, const peri__partition *p, int32_t owner, int32_t home)
{
    return rule.to_homes && p->copied && owner != home;
}

/** What a home is made for, beside its module. Everything is borrowed. */
typedef struct peri__home_args {
    peri__outbound *outbound;   /* of the ids; retained by the home */
    peri__rule rule;
    int64_t rows;               /* of the output */
    bool variable;              /* a variable batch: samples find their bags by inverse indices */
    bool counted;               /* ids were counted, as rows of ids need it */
    const int64_t *numbers;     /* peri__home_numbers of them, 0 where nobody asks: first entry of each feature in the
                                   inverse indices; ids of each feature; the first of these among the input's; and, if
                                   they were counted, ids of each strand that travel */
} peri__home_args;

static inline int64_t peri__home_numbers(const peri__routes *r, bool counted)
{
    return 3 * (int64_t)r->n_features + (counted ? r->n_strands : 0);
}

/** The spaces that rows of a batch lie in: a lane each for those of other ranks; this rank's own lookups; its
 *  replicas. */
enum { PERI__OWN_ROWS = PERI__LANES, PERI__REPLICA_ROWS };

/** Where the rows of an output are in the results, which have a row for each id. */
typedef struct peri__end {
    int64_t row, to; /* as in peri__line */
    int32_t result;
    bool alone, cut;
} peri__end;

/** One line of a home's list of rows: those that one lookup has for one block of columns. Row i of `n` lies at element
 *  `at` + i * cols of the space's buffer. In the results it is (or is added to) columns [column, column + cols) of one
 *  row:
 *
 *      results have a row for each sample              row + i, or of a variable batch any sample that has bag i
 *                                                      (repeats.c)
 *      results have a row for each id                  row + i, or if `cut`  row + origins[first + i]
 *                                                      (peri__routing.origins)
 *
 *  rows.c says who takes rows from one place to the other: the lookup, the transport, or a copy through the buffer. */
typedef struct peri__line {
    int32_t space;   /* -1: this home has no such rows */
    int32_t feature; /* whose bags or ids they are */
    int32_t result;  /* whose rows they are */
    bool alone;      /* the results that are put together have these rows as they are: nothing is added to them */
    bool pooled;     /* rows of ids that are pooled here: they are columns of no result */
    bool cut;        /* rows of some ids of the feature */
    int64_t at, n, cols, first;
    int64_t row;     /* of the gradients of all results, one behind the other */
    int64_t to;      /* alone: as `row`, of the results that are put together */
    int64_t column;
    double divisor;  /* of their gradient */
} peri__line;

/** What is left of a home's outputs if the rows of some spaces need no copy, as arrays for kernels: made once for a
 *  batch like the last. */
typedef struct peri__left {
    uint32_t spaces;  /* bits of the spaces that need none */
    peri__upload up;
    int64_t outputs, bags; /* offsets in `up`: peri_k_output, and the number of bags of each */
    int32_t n;
} peri__left;

/** NULL is fine. */
void peri__left_free(peri__left *left);

/** What this rank gets back. */
typedef struct peri__home {
    peri__refs refs;
    const peri_sharded *e;    /* whose batch it is; borrowed */
    peri__outbound *outbound; /* of the ids; retained */
    peri__upload up;
    int64_t *feature_inverse, *feature_ids, *first_ids, *strand_ids; /* host, as peri__home_args.numbers has them; the
                                                                        first is the block of all, and what follows */
    /* Of no use unless ids were counted: */
    int64_t *strand_first;    /* n_strands: ids of this rank on the wire before each */
    int64_t *partition_first; /* n_partitions: as peri__routing.place_first; -1: not routed */
    const int64_t *feature_rows, *feature_first; /* host, n_features: rows of each (a bag, or an id, each), and the
                                                    first one's place among the bags, or ids, of the input */
    peri__rule rule;
    int64_t *rank_out;  /* host, lanes x world_size: elements that come back from each rank; 0 for this one, but in the
                           node lane, where they come from the gateways of all nodes */
    int64_t lane_out[PERI__LANES]; /* their sums */
    int64_t own_out;     /* elements of this rank's own lookups, without those of the node lane */
    int64_t *at;         /* host, by lookup of the routes: the element of its buffer where its rows begin on this
                            rank */
    int64_t *lookup_rows; /* by lookup, behind `at`: how many these are */
    int32_t *travelling; /* host, n_travelling: pieces of the routes whose rows come back from other ranks, in the order
                            in which the buffer has them */
    int32_t n_travelling;
    uint32_t covered;    /* bits of lanes: these are all that come back in it */
    peri__end *ends;     /* host, by output of the routes, where results have a row for each id; else NULL */
    uint32_t alone, shared; /* bits of spaces: some line is alone; some is not */
    int64_t replica_out; /* elements of its replicas; they lie behind its own lookups' */
    int64_t received_out; /* elements that come back: lane after lane, in each rank after rank */
    int64_t *replica_offset; /* host, n_replicas: of each replica's rows in the own buffer */
    int64_t rows;       /* of the output: the batch */
    int64_t most_bags;  /* of an output: the range of route_spread */
    int32_t n_outputs, n_pools; /* of arrays for kernels; pools: outputs whose rows are of ids and are added up here */
    int64_t bag_out;    /* elements of a gradient for each bag of the pools */
    peri_k_piece *whole; /* host, by result: where its rows lie as they are to be; offset < 0: they do not; NULL: none
                            do */
    int64_t joined_rows; /* of the other results, which are put together */
    int32_t n_joined;    /* their outputs */
    peri__left *left[2]; /* by direction: outputs that are left to be copied; the last one that was asked for, or
                            NULL */
    int32_t *output_feature; /* host, n_outputs, where rows are of bags: the feature of each; else NULL */
    /* Offsets in `up`: */
    int64_t outputs, pieces, joined, output_bags, pools, bag_outputs, bag_pieces, bag_numbers;
    bool variable, counted; /* as in peri__home_args */
} peri__home;

/** @out new. */
peri_status peri__home_new(const peri_sharded *e, const peri__home_args *args, peri__home **out);
/** Whether a home is what peri__home_new would make for @args. */
bool peri__home_fits(const peri__home *home, const peri__home_args *args);
/** Line @p of the list of rows: those of piece @p of the routes. */
peri__line peri__home_line(const peri__home *h, int32_t p);
/** Where rows of ids are for kernels: the ids of output @o; of a copy: of its piece @copy, else -1. */
peri_k_rows peri__home_rows(const peri__home *h, const peri__output *o, int32_t copy);
/** By which the ids of its feature went to piece @p. */
const peri__partition *peri__piece_partition(const peri__routes *r, int32_t p);
/** Whether each id of the feature of output @o is in its one piece. */
bool peri__home_has_all_ids(const peri__home *h, const peri__output *o);
void peri__home_release(peri__home *home);

/** What this rank looks up for all ranks. */
typedef struct peri__owner {
    const peri_sharded *e; /* borrowed */
    peri__rule rule;
    int64_t *counts;     /* host, world_size x strands of this rank: as they were given */
    int64_t *ids;        /* likewise; NULL: none were */
    int64_t *source_out; /* host, lanes x world_size: elements that go back to each rank; 0 for this one. Node lane:
                            what is left after the sum, for the ranks whose gateway this one is */
    int64_t lane_out[PERI__LANES]; /* elements of each lane in the buffer */
    int64_t sent_out;    /* their sum; in the buffer they follow this rank's own, lane after lane. Node lane: for all
                            ranks, by gateway */
    int64_t *sum_out, *sum_in; /* host, ranks of the node each: elements of the node lane by gateway, those for this
                                  rank */
    int64_t *sum_at;     /* host, world_size: where those for each rank begin in the node lane: by gateway, then by
                            rank */
} peri__owner;

/** @counts: int64[world_size x strands of this rank]: bags that each rank sends, as the lookups' offsets count them.
 *  @ids: likewise, where some rows of @rule are of ids, and their lookups have an offset for each id; else NULL.
 *  Copied. */
peri_status peri__owner_layout_new(const peri_sharded *e, peri__rule rule, const int64_t *counts, const int64_t *ids,
                            peri__owner **out);

/** Where the next block of a set goes, and the number of the line of its rows: -1, they stay in the buffer. */
typedef struct peri__next_block {
    peri_k_tbe_block *block;
    int32_t *line;
} peri__next_block;

/** The blocks of an owner's lookups, by source rank, then lookup, for rows in a buffer that begins with those of @home.
 *  @next: by set, where its next block goes, which moves on. */
peri_status peri__owner_layout_blocks(const peri__owner *owner, const peri__home *home, peri__next_block *next);
void peri__owner_layout_free(peri__owner *owner);

#endif
