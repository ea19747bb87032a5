/* SPDX-License-Identifier: Apache-2.0
 *
 * outbound.c: what a router keeps between batches, and how the ids of a batch lie on the wire (router.h).
 */
#include "router.h"
#include "../../kernels/route.h"

#include "../tensor/jagged_internal.h"

/* -- what is kept -------------------------------------------------------------------------------------------------- */

void *peri__recent_use(void **list, int32_t at)
{
    void *x = at < PERI__KEPT ? list[at] : NULL;
    if (!x) return NULL;
    memmove(list + 1, list, sizeof *list * (size_t)at);
    return list[0] = x;
}

void *peri__recent_add(void **list, void *x)
{
    void *last = list[PERI__KEPT - 1];
    memmove(list + 1, list, sizeof *list * (PERI__KEPT - 1));
    list[0] = x;
    return last;
}

peri_status peri__router_init(peri__router *o)
{
    o->feature_key = peri__alloc(sizeof *o->feature_key * (size_t)peri__max(1, o->routes->n_features));
    o->scratch = peri__alloc(sizeof *o->scratch * 2 * (size_t)peri__max(1, o->routes->n_features));
    return o->feature_key && o->scratch ? PERI_OK : PERI_ENOMEM;
}

void peri__router_fini(peri__router *o)
{
    for (int32_t i = 0; i < PERI__KEPT; i++) peri__outbound_release(o->kept[i]);
    peri__free(o->feature_key);
    peri__free(o->scratch);
}

peri_status peri__router_find(peri__router *o, const peri_keys *keys)
{
    uint64_t hash = peri_keys_hash(keys) | 1;
    if (hash == o->keys_hash) return PERI_OK;
    o->keys_hash = 0;
    for (int32_t f = 0; f < o->routes->n_features; f++) {
        o->feature_key[f] = peri_keys_find(keys, o->feature_names[f]);
        if (o->feature_key[f] < 0) {
            char known[300] = "";
            for (int32_t k = 0; k < peri_keys_count(keys) && strlen(known) < 200; k++) {
                if (k) strcat(known, ", ");
                strncat(known, peri_keys_name(keys, k), 60);
            }
            return peri__fail(PERI_EINVAL, "%s: feature '%s' is not among the keys of the input: %s%s", o->function,
                              o->feature_names[f], known, strlen(known) >= 200 ? ", ..." : "");
        }
    }
    o->keys_hash = hash;
    return PERI_OK;
}

/* -- on the wire --------------------------------------------------------------------------------------------------- */

static void write_partitions(const peri__routes *r, peri__outbound *h)
{
    peri_k_partition *out = (peri_k_partition *)(h->up.host + h->partitions);
    for (int32_t i = 0; i < r->n_partitions; i++) {
        const peri__partition *p = &r->partitions[i];
        out[i] = (peri_k_partition){.bag_start = h->bags,
                                    .first_bag = h->feature_first[p->feature],
                                    .bags = h->feature_bags[p->feature],
                                    .rows = p->rows,
                                    .first_bound = p->first_bound,
                                    .block = p->block,
                                    .n_parts = p->n_parts,
                                    .first_strand = p->first_strand,
                                    .check = p->bounds_check,
                                    .raw = p->raw,
                                    .bucket_ids = p->bucket_ids};
        h->bags += out[i].bags;
    }
    if (r->n_bounds) memcpy(h->up.host + h->bounds, r->bounds, sizeof *r->bounds * (size_t)r->n_bounds);
}

/** Where the bags of each strand begin on the wire: by strand, and in the order of the wire. */
static void write_wire(const peri__routes *r, peri__outbound *h)
{
    int64_t *by_strand = (int64_t *)(h->up.host + h->wire_bag), *at = (int64_t *)(h->up.host + h->at);
    for (int32_t rank = 0; rank < r->world_size; rank++) {
        h->rank_bags[rank] = h->wire_bags;
        for (int32_t w = r->rank_wire[rank]; w < r->rank_wire[rank + 1]; w++) {
            by_strand[r->wire[w]] = at[w] = h->wire_bags;
            h->wire_bags += h->feature_bags[r->wire_feature[w]];
        }
    }
    h->rank_bags[r->world_size] = at[r->n_strands] = h->wire_bags;
}

/** What kernels want to know about the bags. */
static peri_status write_arrays(const peri__routes *r, peri__outbound *h, peri_device *device)
{
    const int64_t word = sizeof(int64_t);
    h->partitions = peri__upload_add(&h->up, (int64_t)sizeof(peri_k_partition) * r->n_partitions);
    h->bounds = peri__upload_add(&h->up, (int64_t)sizeof *r->bounds * r->n_bounds);
    h->wire_bag = peri__upload_add(&h->up, word * r->n_strands);
    h->at = peri__upload_add(&h->up, word * (r->n_strands + 1));
    PERI_TRY(peri__upload_open(&h->up, device));
    write_partitions(r, h);
    write_wire(r, h);
    return peri__upload_send(&h->up);
}

void peri__outbound_release(peri__outbound *h)
{
    if (!h || !peri__refs_drop(&h->refs)) return;
    peri__upload_fini(&h->up);
    peri__free(h->feature_bags);
    peri__free(h);
}

/** @first, @bags: by feature. @out new. */
static peri_status outbound_new(const peri__router *o, const int64_t *first, const int64_t *bags, peri__outbound **out)
{
    const peri__routes *r = o->routes;
    const size_t n = (size_t)r->n_features;
    peri__outbound *h = peri__alloc_zero(sizeof *h);
    if (!h) return PERI_ENOMEM;
    peri__refs_init(&h->refs);
    h->feature_bags = peri__alloc(sizeof(int64_t) * (2 * n + (size_t)r->world_size + 1));
    peri_status status = h->feature_bags ? PERI_OK : PERI_ENOMEM;
    if (status < 0) goto out;
    h->feature_first = h->feature_bags + n;
    h->rank_bags = h->feature_first + n;
    memcpy(h->feature_bags, bags, sizeof *bags * n);
    memcpy(h->feature_first, first, sizeof *first * n);
    PERI_TRY_GOTO(write_arrays(r, h, o->device), out);
    *out = h;
out:
    if (status < 0) peri__outbound_release(h);
    return status;
}

peri_status peri__outbound_of(peri__router *o, const peri_kjt *kjt, peri__outbound **out)
{
    const int64_t *start = peri_kjt_lengths_offset_per_key(kjt), *stride = peri_kjt_stride_per_key(kjt);
    const int32_t n = o->routes->n_features;
    int64_t *first = o->scratch, *bags = first + n;
    for (int32_t f = 0; f < n; f++) {
        first[f] = start[o->feature_key[f]];
        bags[f] = stride[o->feature_key[f]];
    }
    const size_t bytes = sizeof *first * (size_t)n;
    int32_t at = 0;
    for (; at < PERI__KEPT && o->kept[at]; at++)
        if (!memcmp(o->kept[at]->feature_bags, bags, bytes) && !memcmp(o->kept[at]->feature_first, first, bytes)) break;
    peri__outbound *h = peri__recent_use((void **)o->kept, at);
    if (!h) {
        PERI_TRY(outbound_new(o, first, bags, &h));
        peri__outbound_release(peri__recent_add((void **)o->kept, h));
    }
    peri__refs_add(&h->refs);
    *out = h;
    return PERI_OK;
}
