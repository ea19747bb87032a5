/* SPDX-License-Identifier: Apache-2.0
 *
 * batch.c: the layouts of batches. The last few are kept, since batches of the same sizes come again, and found by what they were made
 * from.
 */
#include "bag.h"

#include "../tensor/jagged_internal.h"

/* -- the home side ----------------------------------------------------------------------------------------------------------------- */

/** Where each feature stands among the input's keys. */
static peri_status find_features(peri_sharded_ebc *e, const peri_keys *keys)
{
    uint64_t hash = peri_keys_hash(keys) | 1;
    if (hash == e->keys_hash) return PERI_OK;
    e->keys_hash = 0;
    for (int32_t f = 0; f < e->n_features; f++) {
        e->feature_key[f] = peri_keys_find(keys, e->feature_names[f]);
        if (e->feature_key[f] < 0) {
            char known[300] = "";
            for (int32_t k = 0; k < peri_keys_count(keys) && strlen(known) < 200; k++) {
                if (k) strcat(known, ", ");
                strncat(known, peri_keys_name(keys, k), 60);
            }
            return peri__fail(PERI_EINVAL, "peri_sharded_ebc_input_dist: feature '%s' is not among the keys of the input: %s%s",
                              e->feature_names[f], known, strlen(known) >= 200 ? ", ..." : "");
        }
    }
    e->keys_hash = hash;
    return PERI_OK;
}

static bool same_home(const peri_sharded_ebc *e, const peri__home *h, const int64_t *first, const int64_t *bags, int64_t rows,
                      const int64_t *inverse)
{
    size_t bytes = sizeof *first * (size_t)e->n_features;
    return h->rows == rows && h->variable == (inverse != NULL) && !memcmp(h->feature_bags, bags, bytes) &&
           !memcmp(h->feature_first, first, bytes) && (!inverse || !memcmp(h->feature_inverse, inverse, bytes));
}

/** Put @x first in a list of PERI__KEPT; returns what falls off its end, or its own old place. @at: that place; -1: it is new. */
static void *put_first(void **list, void *x, int32_t at)
{
    int32_t last = at < 0 ? PERI__KEPT - 1 : at;
    void *old = list[last];
    memmove(list + 1, list, sizeof *list * (size_t)last);
    list[0] = x;
    return old;
}

peri_status peri__bag_home(peri_sharded_ebc *e, peri_kjt *kjt, peri__home **out)
{
    peri_kjt_desc desc;
    peri_kjt_describe(kjt, &desc);
    PERI_TRY(find_features(e, peri_kjt_keys(kjt)));
    if (desc.variable_stride && !desc.has_inverse)
        return peri__fail(PERI_EINVAL, "peri_sharded_ebc_input_dist: an input with a variable batch per feature needs inverse indices");
    int64_t *first = e->scratch, *bags = first + e->n_features, *inverse = desc.variable_stride ? bags + e->n_features : NULL;
    const int64_t *start = peri_kjt_lengths_offset_per_key(kjt), *stride = peri_kjt_stride_per_key(kjt);
    for (int32_t f = 0; f < e->n_features; f++) {
        first[f] = start[e->feature_key[f]];
        bags[f] = stride[e->feature_key[f]];
        if (!inverse) continue;
        int32_t row = peri_keys_find(peri_kjt_inverse_keys(kjt), e->feature_names[f]);
        if (row < 0)
            return peri__fail(PERI_EINVAL, "peri_sharded_ebc_input_dist: feature '%s' has no inverse indices", e->feature_names[f]);
        inverse[f] = row * desc.stride;
    }
    int32_t at = 0;
    while (at < PERI__KEPT && e->homes[at] && !same_home(e, e->homes[at], first, bags, desc.stride, inverse)) at++;
    peri__home *h = at < PERI__KEPT ? e->homes[at] : NULL;
    if (h) put_first((void **)e->homes, h, at);
    else {
        PERI_TRY(peri__home_new(e->routes, e->rank, first, bags, desc.stride, inverse, e->divisor, e->divisor + e->n_tables, e->device,
                                &h));
        peri__home_release(put_first((void **)e->homes, h, -1));
    }
    peri__refs_add(&h->refs);
    *out = h;
    return PERI_OK;
}

/* -- both sides ---------------------------------------------------------------------------------------------------------------------- */

/** Block lists of all groups: their replicas over the input, their shards over what was received. */
static peri_status make_blocks(const peri_sharded_ebc *e, peri__bag_layout *l)
{
    const peri__routes *r = e->routes;
    const int32_t first_slot = r->rank_slot[e->rank], slots = r->rank_slot[e->rank + 1] - first_slot;
    peri_tbe_block *blocks = peri__alloc(sizeof *blocks * (size_t)peri__max(1, (int64_t)l->owner->n_blocks + r->n_replicas));
    int64_t *next = peri__alloc_zero(sizeof *next * (size_t)(e->n_groups + 1)); /* where the next block of each group goes */
    peri_status status = blocks && next ? PERI_OK : PERI_ENOMEM;
    if (status < 0) goto out;
    for (int32_t i = 0; i < slots; i++) next[e->slot_place[i].group + 1] += e->world_size;
    for (int32_t i = 0; i < r->n_replicas; i++) next[e->slot_place[slots + i].group + 1]++;
    for (int32_t g = 0; g < e->n_groups; g++) next[g + 1] += next[g];
    for (int32_t k = 0; k < l->owner->n_blocks; k++) {
        const peri__block *b = &l->owner->blocks[k];
        const peri__place p = e->slot_place[b->slot - first_slot];
        blocks[next[p.group]++] = (peri_tbe_block){.first_bag = b->first_bag, .bags = b->bags, .out_offset = b->out_offset,
                                                   .out_stride = b->out_stride, .table = p.table, .feature = r->slots[b->slot].feature};
    }
    for (int32_t k = 0; k < r->n_replicas; k++) {
        const peri__replica *x = &r->replicas[k];
        const peri__place p = e->slot_place[slots + k];
        blocks[next[p.group]++] = (peri_tbe_block){.first_bag = l->home->feature_first[x->feature],
                                                   .bags = l->home->feature_bags[x->feature], .out_offset = l->home->replica_offset[k],
                                                   .out_stride = x->cols, .table = p.table, .feature = x->feature};
    }
    for (int32_t g = 0; g < e->n_groups && status >= 0; g++) {
        int64_t begin = g ? next[g - 1] : 0; /* each has moved to where the next group's begin */
        status = peri_tbe_blocks_new(e->groups[g].tbe, blocks + begin, next[g] - begin, &l->blocks[g]);
    }
out:
    peri__free(blocks);
    peri__free(next);
    return status;
}

/** What the codecs make of this batch's rows. */
static peri_status make_contexts(const peri_sharded_ebc *e, peri__bag_layout *l)
{
    for (int32_t lane = 0; lane < PERI__LANES; lane++)
        for (int way = 0; way < 2; way++)
            for (int side = 0; side < PERI__SIDES && e->lanes[lane].codec[way]; side++) {
                const int64_t *splits = side == PERI__HOME_SIDE ? l->home->rank_out : l->owner->source_out;
                PERI_TRY(peri_codec_context_new(e->lanes[lane].codec[way], splits + lane * e->world_size, e->world_size,
                                                &l->contexts[lane][way][side]));
            }
    return PERI_OK;
}

peri_status peri__bag_layout_new(peri_sharded_ebc *e, peri__home *home, int64_t *counts, peri__bag_layout **out)
{
    int32_t streams = e->routes->rank_wire[e->rank + 1] - e->routes->rank_wire[e->rank];
    size_t bytes = sizeof *counts * (size_t)streams * (size_t)e->world_size;
    int32_t at = 0;
    peri__bag_layout *l = NULL;
    for (; at < PERI__KEPT && e->layouts[at]; at++) {
        l = e->layouts[at];
        if (l->home == home && !memcmp(l->owner->counts, counts, bytes)) break;
        l = NULL;
    }
    if (l) {
        put_first((void **)e->layouts, l, at);
        peri__refs_add(&l->refs);
        peri__free(counts);
        *out = l;
        return PERI_OK;
    }
    l = peri__alloc_zero(sizeof *l);
    if (!l) return PERI_ENOMEM;
    peri__refs_init(&l->refs);
    peri__refs_add(&home->refs);
    l->home = home;
    l->n_groups = e->n_groups;
    l->blocks = peri__alloc_zero(sizeof *l->blocks * (size_t)peri__max(1, e->n_groups));
    peri_status status = l->blocks ? PERI_OK : PERI_ENOMEM;
    if (status >= 0) status = peri__owner_new(e->routes, e->rank, counts, home->own_out + home->replica_out, &l->owner);
    bool taken = status >= 0;
    if (status >= 0) status = make_contexts(e, l);
    if (status >= 0) status = make_blocks(e, l);
    if (status < 0) {
        if (taken) l->owner->counts = NULL; /* still the caller's */
        peri__bag_layout_release(l);
        return status;
    }
    peri__refs_add(&l->refs);
    peri__bag_layout_release(put_first((void **)e->layouts, l, -1));
    *out = l;
    return PERI_OK;
}

void peri__bag_layout_release(peri__bag_layout *l)
{
    if (!l || !peri__refs_drop(&l->refs)) return;
    for (int32_t g = 0; l->blocks && g < l->n_groups; g++) peri_tbe_blocks_release(l->blocks[g]);
    peri__free(l->blocks);
    for (int32_t i = 0; i < PERI__LANES * 2 * PERI__SIDES; i++) peri_codec_context_release((&l->contexts[0][0][0])[i]);
    peri__owner_free(l->owner);
    peri__home_release(l->home);
    peri__free(l);
}

void peri__batches_free(peri_sharded_ebc *e)
{
    for (int32_t i = 0; i < PERI__KEPT; i++) {
        peri__bag_layout_release(e->layouts[i]);
        peri__home_release(e->homes[i]);
    }
}
