/* SPDX-License-Identifier: Apache-2.0
 *
 * batch.c: the layouts of batches. The last few are kept, since batches of the same sizes come again, and found by what they were made
 * from.
 */
#include "module.h"

#include "../tensor/jagged_internal.h"

/* -- the home side ----------------------------------------------------------------------------------------------------------------- */

/** First entry of each feature in the inverse indices of a variable batch: *@inverse; NULL: it is none. */
static peri_status inverse_of(const peri_sharded *e, const peri_kjt *kjt, const peri_kjt_desc *desc, int64_t **inverse)
{
    *inverse = NULL;
    if (!desc->variable_stride) return PERI_OK;
    if (!desc->has_inverse)
        return peri__fail(PERI_EINVAL, "peri_sharded_input_dist: an input with a variable batch per feature needs inverse indices");
    int64_t *at = e->scratch + 2 * e->n_features + e->routes->n_strands;
    for (int32_t f = 0; f < e->n_features; f++) {
        int32_t row = peri_keys_find(peri_kjt_inverse_keys(kjt), e->feature_names[f]);
        if (row < 0)
            return peri__fail(PERI_EINVAL, "peri_sharded_input_dist: feature '%s' has no inverse indices", e->feature_names[f]);
        at[f] = row * desc->stride;
    }
    *inverse = at;
    return PERI_OK;
}

/** Ids by strand and feature. */
static peri_status count_ids(const peri_sharded *e, const peri__routing *r, peri__home_args *a)
{
    const int64_t *ids, *first;
    const int32_t *key = e->router.feature_key;
    int64_t *n = e->scratch, *at = n + e->n_features, *strands = at + e->n_features;
    PERI_TRY(peri__router_find(&((peri_sharded *)e)->router, peri_kjt_keys(r->args.kjt)));
    PERI_TRY(peri_kjt_length_per_key(r->args.kjt, &ids));
    PERI_TRY(peri_kjt_offset_per_key(r->args.kjt, &first));
    for (int32_t f = 0; f < e->n_features; f++) {
        n[f] = ids[key[f]];
        at[f] = first[key[f]];
    }
    for (int32_t w = 0; w < e->routes->n_strands; w++) strands[e->routes->wire[w]] = peri__routing_sent(r, w);
    a->feature_ids = n;
    a->first_ids = at;
    a->strand_ids = strands;
    if (!a->results_by_id) return PERI_OK;
    a->rows = 0;
    for (int32_t t = 0; t < e->n_tables; t++)
        for (int32_t f = 0; f < e->tables[t].n_features; f++) a->rows += n[e->tables[t].features[f]];
    return PERI_OK;
}

peri_status peri__batch_home(peri_sharded *e, const peri__routing *r, peri__rule rule, peri__home **out)
{
    peri_kjt_desc desc;
    int64_t *inverse = NULL;
    peri_kjt_describe(r->args.kjt, &desc);
    peri__home_args a = {.outbound = r->outbound, .rule = rule, .results_by_id = e->kind->by_id, .rows = desc.stride,
                         .divisor = e->divisor, .sent_divisor = e->divisor + e->n_tables, .mean = e->mean, .cols = e->cols};
    if (rule.by_id || rule.to_homes) PERI_TRY(count_ids(e, r, &a));
    if (!e->kind->by_id) PERI_TRY(inverse_of(e, r->args.kjt, &desc, &inverse));
    a.inverse = inverse;
    int32_t at = 0;
    while (at < PERI__KEPT && e->homes[at] && !peri__home_fits(e->routes, e->homes[at], &a)) at++;
    peri__home *h = at < PERI__KEPT ? e->homes[at] : NULL;
    if (h) {
        peri__kept_first((void **)e->homes, h, at);
    } else {
        PERI_TRY(peri__home_new(e->routes, e->rank, &a, e->kind->lay_out, e->device, &h));
        peri__home_release(peri__kept_first((void **)e->homes, h, -1));
    }
    peri__refs_add(&h->refs);
    *out = h;
    return PERI_OK;
}

/* -- both sides ---------------------------------------------------------------------------------------------------------------------- */

/** Block lists of all sets: their replicas over the input, their shards over what was received. */
static peri_status make_blocks(const peri_sharded *e, peri__batch_layout *l)
{
    const peri__routes *r = e->routes;
    const int32_t first_lookup = r->rank_lookup[e->rank], lookups = r->rank_lookup[e->rank + 1] - first_lookup;
    peri_tbe_block *blocks = peri__alloc(sizeof *blocks * (size_t)peri__max(1, (int64_t)l->owner->n_blocks + r->n_replicas));
    int64_t *next = peri__alloc_zero(sizeof *next * (size_t)(e->n_sets + 1)); /* where the next block of each set goes */
    peri_status status = blocks && next ? PERI_OK : PERI_ENOMEM;
    if (status < 0) goto out;
    for (int32_t i = 0; i < lookups; i++)
        if (e->lookup_place[i].set >= 0) next[e->lookup_place[i].set + 1] += e->world_size;
    for (int32_t i = 0; i < r->n_replicas; i++) next[e->lookup_place[lookups + i].set + 1]++;
    for (int32_t g = 0; g < e->n_sets; g++) next[g + 1] += next[g];
    for (int32_t k = 0; k < l->owner->n_blocks; k++) {
        const peri__block *b = &l->owner->blocks[k];
        const peri__place p = e->lookup_place[b->lookup - first_lookup];
        if (p.set < 0) continue; /* no rows: zeros in the sum */
        blocks[next[p.set]++] = (peri_tbe_block){.first_bag = b->first_bag, .bags = b->bags, .out_offset = b->out_offset,
                                                   .out_stride = b->out_stride, .table = p.table, .feature = r->lookups[b->lookup].feature};
    }
    for (int32_t k = 0; k < r->n_replicas; k++) {
        const peri__replica *x = &r->replicas[k];
        const peri__place p = e->lookup_place[lookups + k];
        const peri__home *h = l->home;
        const bool by_id = h->rule.by_id;
        blocks[next[p.set]++] = (peri_tbe_block){.first_bag = (by_id ? h->first_ids : h->feature_first)[x->feature],
                                                   .bags = (by_id ? h->feature_ids : h->feature_rows)[x->feature],
                                                   .out_offset = h->replica_offset[k], .out_stride = x->cols, .table = p.table,
                                                   .feature = x->feature};
    }
    for (int32_t g = 0; g < e->n_sets && status >= 0; g++) {
        int64_t begin = g ? next[g - 1] : 0; /* each has moved to where the next set's begin */
        status = peri_tbe_blocks_new(e->sets[g].tbe, blocks + begin, next[g] - begin, &l->blocks[g]);
    }
out:
    peri__free(blocks);
    peri__free(next);
    return status;
}

/** The numbers that the ways carry, and what their codecs make of them. */
static peri_status make_legs(const peri_sharded *e, peri__batch_layout *l)
{
    for (int32_t lane = 0; lane < PERI__LANES; lane++) {
        int32_t first = lane * e->world_size, exchange = lane == PERI__NODE_LANE;
        if (lane == PERI__NODE_LANE) l->legs[lane][0] = (peri__leg){.out = l->owner->sum_out, .in = l->owner->sum_in};
        l->legs[lane][exchange] = (peri__leg){.out = l->owner->source_out + first, .in = l->home->rank_out + first};
        PERI_TRY(peri__legs_init(&e->ways[lane], l->legs[lane]));
    }
    return PERI_OK;
}

peri_status peri__batch_layout_new(peri_sharded *e, peri__home *home, const int64_t *counts, const int64_t *ids, peri__batch_layout **out)
{
    int32_t strands = e->routes->rank_wire[e->rank + 1] - e->routes->rank_wire[e->rank];
    size_t bytes = sizeof *counts * (size_t)strands * (size_t)e->world_size;
    int32_t at = 0;
    peri__batch_layout *l = NULL;
    for (; at < PERI__KEPT && e->layouts[at]; at++) {
        l = e->layouts[at];
        if (l->home == home && !memcmp(l->owner->counts, counts, bytes) && !l->owner->ids == !ids &&
            (!ids || !memcmp(l->owner->ids, ids, bytes)))
            break;
        l = NULL;
    }
    if (l) {
        peri__kept_first((void **)e->layouts, l, at);
        peri__refs_add(&l->refs);
        *out = l;
        return PERI_OK;
    }
    l = peri__alloc_zero(sizeof *l);
    if (!l) return PERI_ENOMEM;
    peri__refs_init(&l->refs);
    peri__refs_add(&home->refs);
    l->home = home;
    l->n_sets = e->n_sets;
    l->blocks = peri__alloc_zero(sizeof *l->blocks * (size_t)peri__max(1, e->n_sets));
    peri_status status = l->blocks ? PERI_OK : PERI_ENOMEM;
    if (status >= 0) status = peri__owner_new(e->routes, e->rank, home->rule, counts, ids, home->own_out + home->replica_out, &l->owner);
    if (status >= 0) status = make_legs(e, l);
    if (status >= 0) status = make_blocks(e, l);
    if (status < 0) {
        peri__batch_layout_release(l);
        return status;
    }
    peri__refs_add(&l->refs);
    peri__batch_layout_release(peri__kept_first((void **)e->layouts, l, -1));
    *out = l;
    return PERI_OK;
}

void peri__batch_layout_release(peri__batch_layout *l)
{
    if (!l || !peri__refs_drop(&l->refs)) return;
    for (int32_t g = 0; l->blocks && g < l->n_sets; g++) peri_tbe_blocks_release(l->blocks[g]);
    peri__free(l->blocks);
    for (int32_t lane = 0; lane < PERI__LANES; lane++) peri__legs_fini(l->legs[lane]);
    peri__owner_free(l->owner);
    peri__home_release(l->home);
    peri__free(l);
}

void peri__batches_free(peri_sharded *e)
{
    for (int32_t i = 0; i < PERI__KEPT; i++) {
        peri__batch_layout_release(e->layouts[i]);
        peri__home_release(e->homes[i]);
    }
}
