/* SPDX-License-Identifier: Apache-2.0
 *
 * batch_layouts.c: the layouts of batches. The last few are kept, since batches of the same sizes come again, and
 * found by what they were made from.
 */
#include "module.h"
#include "../../kernels/tbe.h"

#include "../tensor/jagged_internal.h"

/* -- the home side ------------------------------------------------------------------------------------------------- */

/** First entry of each feature in the inverse indices of a variable batch. */
static peri_status find_inverse(const peri_sharded *e, const peri_kjt *kjt, const peri_kjt_info *desc, int64_t *first)
{
    if (!desc->has_inverse)
        return peri__fail(PERI_EINVAL, "%s: an input with a variable batch per feature needs inverse indices",
                          e->router.function);
    for (int32_t f = 0; f < e->n_features; f++) {
        int32_t row = peri_keys_find(peri_kjt_inverse_keys(kjt), e->feature_names[f]);
        if (row < 0)
            return peri__fail(PERI_EINVAL, "%s: feature '%s' has no inverse indices", e->router.function,
                              e->feature_names[f]);
        first[f] = row * desc->stride;
    }
    return PERI_OK;
}

/** Ids by feature and strand. */
static peri_status count_ids(peri_sharded *e, const peri__routing *r, int64_t *feature_ids, int64_t *first_ids,
                             int64_t *strand_ids)
{
    const int64_t *ids, *first;
    const int32_t *key = e->router.feature_key;
    PERI_TRY(peri__router_find(&e->router, peri_kjt_keys(r->args.kjt)));
    PERI_TRY(peri_kjt_length_per_key(r->args.kjt, &ids));
    PERI_TRY(peri_kjt_offset_per_key(r->args.kjt, &first));
    for (int32_t f = 0; f < e->n_features; f++) {
        feature_ids[f] = ids[key[f]];
        first_ids[f] = first[key[f]];
    }
    for (int32_t w = 0; w < e->routes->n_strands; w++) strand_ids[e->routes->wire[w]] = peri__routing_sent(r, w);
    return PERI_OK;
}

peri_status peri__batch_home(peri_sharded *e, const peri__routing *r, peri__rule rule, peri__home **out)
{
    peri_kjt_info desc = {.size = sizeof desc};
    peri_kjt_describe(r->args.kjt, &desc);
    const bool by_id = e->kind->by_id;
    int64_t *inverse = e->scratch, *ids = inverse + e->n_features, *first = ids + e->n_features;
    peri__home_args a = {.outbound = r->outbound,
                         .rule = rule,
                         .rows = by_id ? 0 : desc.stride,
                         .variable = !by_id && desc.variable_stride,
                         .counted = rule.by_id || rule.to_homes,
                         .numbers = inverse};
    memset(inverse, 0, sizeof *inverse * (size_t)peri__home_numbers(e->routes, a.counted));
    if (a.counted) PERI_TRY(count_ids(e, r, ids, first, first + e->n_features));
    if (a.variable) PERI_TRY(find_inverse(e, r->args.kjt, &desc, inverse));
    for (int32_t t = 0; t < e->n_tables && by_id; t++)
        for (int32_t f = 0; f < e->tables[t].n_features; f++) a.rows += ids[e->tables[t].features[f]];
    int32_t at = 0;
    while (at < PERI__KEPT && e->homes[at] && !peri__home_fits(e->homes[at], &a)) at++;
    peri__home *h = peri__recent_use((void **)e->homes, at);
    if (!h) {
        PERI_TRY(peri__home_new(e, &a, &h));
        peri__home_release(peri__recent_add((void **)e->homes, h));
    }
    peri__refs_add(&h->refs);
    *out = h;
    return PERI_OK;
}

/* -- both sides ---------------------------------------------------------------------------------------------------- */

/** The blocks of this rank's replicas, over the input. */
static void add_replicas(const peri_sharded *e, const peri__home *h, peri__next_block *next)
{
    const int64_t *first = h->rule.by_id ? h->first_ids : h->feature_first,
                  *bags = h->rule.by_id ? h->feature_ids : h->feature_rows;
    for (int32_t k = 0; k < e->routes->n_replicas; k++) {
        const peri__replica *x = &e->routes->replicas[k];
        const peri__set_table to = peri__set_table_of(e, x->table, -1);
        *next[to.set].line++ = x->piece;
        *next[to.set].block++ = (peri_k_tbe_block){.first_bag = first[x->feature],
                                                   .bags = bags[x->feature],
                                                   .out_offset = h->replica_offset[k],
                                                   .out_stride = x->cols,
                                                   .table = to.table,
                                                   .feature = x->feature};
    }
}

/** Room for the blocks of all sets. @next, @n: of sets; @next: where the first block of each goes. */
static peri_status make_room(const peri_sharded *e, peri__batch_layout *l, peri__next_block *next, int64_t *n)
{
    const peri__routes *r = e->routes;
    int64_t all = 0;
    for (int32_t i = r->rank_lookup[e->rank]; i < r->rank_lookup[e->rank + 1]; i++) {
        const int32_t set = peri__set_table_of(e, r->lookups[i].table, r->lookups[i].shard).set;
        if (set >= 0) n[set] += e->world_size;
    }
    for (int32_t i = 0; i < r->n_replicas; i++) n[peri__set_table_of(e, r->replicas[i].table, -1).set]++;
    for (int32_t g = 0; g < e->n_sets; g++) all += n[g];
    l->lines = peri__alloc(sizeof *l->lines * (size_t)peri__max(1, e->n_sets) + sizeof **l->lines * (size_t)all);
    if (!l->lines) return PERI_ENOMEM;
    int32_t *line = (int32_t *)(l->lines + peri__max(1, e->n_sets));
    for (int32_t g = 0; g < e->n_sets; g++) {
        PERI_TRY(peri__tbe_blocks_alloc(e->sets[g].tbe, n[g], &l->blocks[g]));
        l->lines[g] = line;
        line += n[g];
        next[g] = (peri__next_block){l->blocks[g]->block, l->lines[g]};
    }
    return PERI_OK;
}

/** Block lists of all sets: their replicas over the input, their shards over what was received. */
static peri_status make_blocks(const peri_sharded *e, peri__batch_layout *l)
{
    PERI__SCRATCH peri__next_block *next = peri__alloc_zero((sizeof *next + sizeof(int64_t)) * (size_t)e->n_sets);
    if (!next) return PERI_ENOMEM;
    PERI_TRY(make_room(e, l, next, (int64_t *)(next + e->n_sets)));
    PERI_TRY(peri__owner_layout_blocks(l->owner, l->home, next));
    add_replicas(e, l->home, next);
    for (int32_t g = 0; g < e->n_sets; g++) {
        PERI_TRY(peri__tbe_blocks_check(e->sets[g].tbe, l->blocks[g])); /* other ranks' numbers are not believed */
        PERI_TRY(peri__tbe_blocks_finish(e->sets[g].tbe, l->blocks[g]));
    }
    return PERI_OK;
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

/** @bytes: of the numbers. */
static bool layout_fits(const peri__batch_layout *l, const peri__home *home, const int64_t *counts, const int64_t *ids,
                        size_t bytes)
{
    return l->home == home && !memcmp(l->owner->counts, counts, bytes) && !l->owner->ids == !ids &&
           (!ids || !memcmp(l->owner->ids, ids, bytes));
}

peri_status peri__batch_layout_new(peri_sharded *e, peri__home *home, const int64_t *counts, const int64_t *ids,
                                   peri__batch_layout **out)
{
    int32_t strands = e->routes->rank_wire[e->rank + 1] - e->routes->rank_wire[e->rank];
    size_t bytes = sizeof *counts * (size_t)strands * (size_t)e->world_size;
    int32_t at = 0;
    while (at < PERI__KEPT && e->layouts[at] && !layout_fits(e->layouts[at], home, counts, ids, bytes)) at++;
    peri__batch_layout *l = *out = peri__recent_use((void **)e->layouts, at);
    if (l) {
        peri__refs_add(&l->refs);
        return PERI_OK;
    }
    l = peri__alloc_zero(sizeof *l);
    if (!l) return PERI_ENOMEM;
    peri__refs_init(&l->refs);
    peri__refs_add(&home->refs);
    l->home = home;
    l->n_sets = e->n_sets;
    l->blocks = peri__alloc_zero(sizeof *l->blocks * (size_t)peri__max(1, e->n_sets));
    l->there[0] = peri__alloc_zero(sizeof *l->there[0] * 2 * (size_t)peri__max(1, e->n_sets));
    l->there[1] = l->there[0] + e->n_sets;
    peri_status status = l->blocks && l->there[0] ? PERI_OK : PERI_ENOMEM;
    if (status >= 0) status = peri__owner_layout_new(e, home->rule, counts, ids, &l->owner);
    if (status >= 0) status = make_legs(e, l);
    if (status >= 0) status = make_blocks(e, l);
    if (status < 0) {
        peri__batch_layout_release(l);
        return status;
    }
    peri__refs_add(&l->refs);
    peri__batch_layout_release(peri__recent_add((void **)e->layouts, l));
    *out = l;
    return PERI_OK;
}

void peri__batch_layout_release(peri__batch_layout *l)
{
    if (!l || !peri__refs_drop(&l->refs)) return;
    for (int32_t g = 0; l->blocks && g < l->n_sets; g++) peri_tbe_blocks_release(l->blocks[g]);
    for (int32_t g = 0; l->there[0] && g < 2 * l->n_sets; g++) peri_tbe_blocks_release(l->there[0][g].blocks);
    peri__free(l->blocks);
    peri__free(l->there[0]);
    peri__free(l->lines);
    for (int32_t lane = 0; lane < PERI__LANES; lane++) peri__legs_fini(l->legs[lane]);
    peri__owner_layout_free(l->owner);
    peri__home_release(l->home);
    peri__free(l);
}

void peri__batch_layouts_free(peri_sharded *e)
{
    for (int32_t i = 0; i < PERI__KEPT; i++) {
        peri__batch_layout_release(e->layouts[i]);
        peri__home_release(e->homes[i]);
    }
}
