/* SPDX-License-Identifier: Apache-2.0
 *
 * router.h: ids from the ranks that have them (homes) to the ranks that own their rows (owners), for any module. The
 * router knows routes and a group; what becomes of the ids, and what else is announced and travels with them, is the
 * module's.
 */
#ifndef PERI_SHARD_ROUTER_H
#define PERI_SHARD_ROUTER_H

#include "../comm/announce.h"
#include "../comm/transfer.h"
#include "../tensor/upload.h"
#include "routes.h"
#include "../../kernels/route.h"

/* -- the router of a module ---------------------------------------------------------------------------------------- */

/** Layouts that are kept for batches that are like one of the last: of what leaves, and of what a module makes of
 *  it. */
enum { PERI__KEPT = 8 };
/** Entry @at of a list of PERI__KEPT, which becomes the first one; NULL: there is none, or @at is PERI__KEPT. */
void *peri__recent_use(void **list, int32_t at);
/** Put @x first; returns what falls off the end, or NULL. */
void *peri__recent_add(void **list, void *x);

/** How the ids of a batch lie before and on the wire: the compiled routes with the numbers of bags filled in, for
 *  kernels. */
typedef struct peri__outbound {
    peri__refs refs;
    peri__upload up;
    int64_t *feature_bags, *feature_first; /* host, n_features: bags, and first bag in the input */
    int64_t bags;        /* of all partitions: the range of route_count and route_pack */
    int64_t wire_bags;   /* bags on the wire */
    int64_t *rank_bags;  /* host, world_size + 1: wire bags before each rank */
    int64_t partitions, bounds, wire_bag, at; /* offsets in `up` */
} peri__outbound;

void peri__outbound_release(peri__outbound *outbound);

typedef struct peri__router {
    peri_group *group;   /* borrowed, as is all down to feature_names: the module lives longer */
    peri_device *device;
    const peri__routes *routes;
    const char *function; /* of messages */
    const char *const *table_names, *const *feature_names;
    bool wire_i32;       /* ids travel as i32: no shard has more rows */
    bool begun;          /* there was a batch */
    int64_t bad_ids;     /* found so far */
    peri__outbound *kept[PERI__KEPT]; /* of the last inputs, the last one first; NULL: none yet */
    uint64_t keys_hash;  /* of the input keys that feature_key is for; 0: none yet */
    int32_t *feature_key; /* n_features: position of each feature among the input's keys */
    int64_t *scratch;    /* 2 x n_features */
} peri__router;

/** The fields that are borrowed are set; the rest is zero. */
peri_status peri__router_init(peri__router *router);
void peri__router_fini(peri__router *router);
/** How the ids of @kjt leave: as those of one of the last batches, or new. Needs peri__router_find. @out: a new
 *  reference. */
peri_status peri__outbound_of(peri__router *router, const peri_kjt *kjt, peri__outbound **out);
/** Position of each feature among @keys, in router->feature_key; PERI_EINVAL names one that is not there. */
peri_status peri__router_find(peri__router *router, const peri_keys *keys);

/* -- one batch ----------------------------------------------------------------------------------------------------- */

/** What travels from homes to owners, one exchange each: lengths of bags; ids; the weight of each id; a number of the
 *  module's for each bag. */
enum { PERI__LENGTHS, PERI__IDS, PERI__WEIGHTS, PERI__BY_BAG, PERI__PAYLOADS };

/** Words that a module may announce to every rank. */
enum { PERI__ROUTING_WORDS = 4 };

typedef struct peri__routing peri__routing;

/** What a module asks of the router for one batch. */
typedef struct peri__routing_args {
    peri_kjt *kjt;           /* retained */
    peri__agreement agreement;
    void *ctx;               /* of check; lives as long as the routing */
    int64_t words[PERI__ROUTING_WORDS]; /* announced to every rank */
    /* What rank @rank announced: PERI_EMISMATCH if this rank cannot go on with it. */
    peri_status (*check)(void *ctx, int32_t rank, const int64_t *words);
    /* Queue the writing of @out (f32, [outbound->wire_bags]): a number for each bag on the wire. (optional) */
    peri_status (*by_bag)(const peri__routing *routing, peri_tensor *out);
    bool by_id;              /* to owners each id is a bag of its own: no lengths travel, and `places` are kept */
    bool keep_places;        /* see `places` below */
    bool keep_lengths;       /* wire_lengths stay */
    bool keep_origins;       /* see `origins` below; with by_id */
} peri__routing_args;

struct peri__routing {
    peri__router *router;
    peri__routing_args args;
    peri__outbound *outbound;
    int32_t phase;
    int32_t part;            /* which one of the announcement is its own */
    uint64_t payload;        /* number of its first payload; the others follow */
    peri_tensor *values, *weights, *offsets_in; /* the input as kernels take it: weights or NULL; offsets i64 */
    peri_tensor *cursor;     /* i64: where each bag of the wire begins, while ids are packed */
    peri_tensor *wire_lengths; /* i32 [wire_bags], of what this rank sends; NULL again at the end, unless it is kept */
    struct peri__report *report; /* ids before each strand of the wire, and what the check found */
    peri__announce *announce; /* shared with the routings that set out together; NULL: there are no other ranks */
    peri_tensor *send[PERI__PAYLOADS]; /* NULL: none, or gone where they belong */
    peri__transfer transfers[PERI__PAYLOADS];
    /* Known to both sides once `announced`: */
    bool announced;
    int64_t *rank_ids;       /* world_size + 1: ids on the wire before each rank */
    int64_t *counts, *ids;   /* world_size x strands of this rank: bags, and ids, that each rank sends for each strand;
                                behind rank_ids */
    int64_t *source_bags, *source_ids; /* world_size: their sums by rank */
    int64_t *sent_bags, *sent_ids;     /* world_size: bags, and ids, that this rank sends to each */
    /* At the end: */
    peri_tensor *received[PERI__PAYLOADS]; /* by source rank, strand, bag; no lengths, and NULL where there is none */
    peri_tensor *offsets;    /* i64: of the bags that were received */
    peri_tensor *own_offsets; /* i64: of the bags of the input, for tables that are here whole; as offsets_in, but
                                 by_id */
    /* Where each id went (keep_places, by_id): i64, partition after partition of the routes, the ids of its feature in
     * their order; the place of the id among all that this rank sends, as rank_ids counts them; -1: it is -1 or out of
     * range and travels nowhere. */
    peri_tensor *places;
    int64_t *place_first;    /* n_partitions + 1: first entry of each partition; a partition that is not routed has
                                none */
    /* i32, for each id that this rank sends: its place among the ids of its feature; NULL: not kept, or beyond an
     * i32. */
    peri_tensor *origins;
};

/** Take the input. Its words may still be changed. On failure @r is empty. */
peri_status peri__routing_start(peri__routing *r, peri__router *router, const peri__routing_args *args);
/** @n routings of one group set out together: take the numbers of their operations, which are announced in one message.
 *  Posts nothing yet. All ranks list the same routers in the same order. On failure they are still to be ended. */
peri_status peri__routings_set_out(peri__routing *const *r, int32_t n);
/** PERI_PENDING until all that others send is here; `announced` may be true before. */
peri_status peri__routing_test(peri__routing *r);
/** Post a number for each id that was received (@numbers: contiguous, as the ids lie) back to the rank that has sent
 *  it, on the channel of rows. Those that arrive lie as this rank's ids did when it sent them. */
peri_status peri__routing_return(const peri__routing *r, peri_tensor *numbers, peri__transfer *back);
/** The input and how it is cut, as kernels are told. */
peri_k_routed peri__routing_ids(const peri__routing *r);
/** Nobody will ask for the input again: give it up. What was made of it stays. */
void peri__routing_drop_input(peri__routing *r);
void peri__routing_fini(peri__routing *r);
/** Ids of this rank's that place @w of the wire takes, once they are counted. */
int64_t peri__routing_sent(const peri__routing *r, int32_t w);

/** Streams that @rank owns. */
static inline int32_t peri__strands_of(const peri__routes *r, int32_t rank)
{
    return r->rank_wire[rank + 1] - r->rank_wire[rank];
}

#endif
