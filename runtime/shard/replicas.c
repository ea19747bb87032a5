/* SPDX-License-Identifier: Apache-2.0
 *
 * replicas.c: tables that every rank has whole. Their rows do not travel, and their gradients do not before they are added up: so they are
 * written where the results want them, and read where those of the results lie. The sums are reduced over the ranks, to a mean, as
 * DistributedDataParallel makes it.
 */
#include "module.h"

bool peri__replicas_reduced(const peri__table_set *set) { return set->replica && !set->dense; }

/** Whether the gradients of its rows were divided (see gradient_divisor). */
static bool divided(const peri_sharded *e, const peri__table_set *set) { return e->divisor[set->module_table[0]] != 1; }

peri_status peri__replicas_reduce(const peri_sharded *e, const peri__table_set *set, peri_tensor *flat, peri_work **out)
{
    peri_k_divide_args args = {.dst = peri__data(flat), .src = peri__data(flat), .dtype = flat->dtype, .divisor = e->world_size};
    if (!divided(e, set)) PERI_TRY(PERI_LAUNCH(e->device, divide, &args, peri__numel(flat), PERI_ELEMENT_GRAIN));
    return peri__coll_sum_gradients(e->group, flat, 0, out);
}

/* -- in place ------------------------------------------------------------------------------------------------------------------------ */

/** What replicas of a set are placed by. */
typedef struct places {
    const peri_sharded *e;
    const peri__home *h;
    const peri__table_set *set;
    peri_tensor *const *grad;
    const peri_tensor *first; /* the lowest address of @grad, and of sums */
    const peri__repeats *repeats; /* of a variable batch; else NULL */
    int64_t past;             /* then: one past the last row of a bag */
} places;

static int64_t address(const peri_tensor *t) { return (int64_t)(uintptr_t)peri__data(t); }

/** peri__place_rows: columns of the one result. */
static int64_t place_columns(const void *ctx, const peri_tbe_batch *look, peri_k_tbe_block *block)
{
    (void)look;
    const places *p = ctx;
    const int64_t cols = p->e->tables[p->set->module_table[block->table]].cols;
    int32_t low = 0, high = p->e->routes->n_replicas; /* the last replica whose rows begin there: those before it have none */
    if (block->bags == 0) return 0;
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        if (p->h->replica_offset[middle] <= block->out_offset) low = middle;
        else high = middle;
    }
    if (p->h->replica_column[low] < 0) return -1;
    block->out_offset = p->h->replica_column[low] + (p->grad ? (address(p->grad[0]) - address(p->first)) / (int64_t)sizeof(float) : 0);
    block->out_stride = p->e->cols;
    return block->out_offset + ((p->repeats ? p->past : block->bags) - 1) * block->out_stride + cols;
}

/** peri__place_rows: a result each. */
static int64_t place_results(const void *ctx, const peri_tbe_batch *look, peri_k_tbe_block *block)
{
    (void)look;
    const places *p = ctx;
    const peri__route_table *t = &p->e->tables[p->set->module_table[block->table]];
    int32_t i = (int32_t)(t->features - p->e->features);
    while (p->e->features[i] != block->feature) i++;
    block->out_offset = (address(p->grad[i]) - address(p->first)) / (int64_t)sizeof(float);
    return block->out_offset + block->bags * p->e->cols;
}

void peri__replicas_unplace(const peri_sharded *e, peri_tbe_batch *const *looks)
{
    for (int32_t g = 0; g < e->n_sets; g++)
        if (e->sets[g].replica && looks[g]->placed) peri__batch_unplace(looks[g]);
}

/** Whether the gradients of all replicas can be read where they lie. */
static bool can_place_back(const peri_sharded *e)
{
    bool can = true;
    for (int32_t g = 0; g < e->n_sets; g++) can = can && (!e->sets[g].replica || (!e->sets[g].dense && !divided(e, &e->sets[g])));
    return can;
}

/** All sets of replicas, or none. */
static peri_status place(places *p, peri_tbe_batch *const *looks, peri__place_rows rows, bool *placed)
{
    const peri_sharded *e = p->e;
    peri_status status = PERI_OK;
    *placed = e->routes->n_replicas > 0 && peri__immediate(e->device) && (!p->grad || can_place_back(e));
    for (int32_t g = 0; g < e->n_sets && *placed && status >= 0; g++) {
        p->set = &e->sets[g];
        if (!p->set->replica) continue;
        if (p->repeats) peri__repeats_place(p->repeats, looks[g]);
        status = peri__batch_place(looks[g], rows, p, placed);
    }
    if (!*placed || status < 0) peri__replicas_unplace(e, looks);
    return status;
}

peri_status peri__replicas_place(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tbe_batch *const *looks,
                                 bool *placed)
{
    places p = {.e = e, .h = h, .past = h->rows + 1, .repeats = given->repeats};
    *placed = false;
    if (e->kind->by_id || !e->routes->n_replicas || !peri__immediate(e->device)) return PERI_OK;
    if (h->variable && !given->repeats) return PERI_OK;
    return place(&p, looks, place_columns, placed);
}

peri_status peri__replicas_place_back(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tbe_batch *const *looks,
                                      peri_tensor *const *grad, peri_tensor **first)
{
    places p = {.e = e, .h = h, .grad = grad, .repeats = given->repeats};
    bool placed;
    peri_tensor *lowest = grad[0], *sums;
    *first = NULL;
    for (int32_t i = 1; i < e->n_results; i++)
        if (address(grad[i]) < address(lowest)) lowest = grad[i];
    if (h->variable) {
        sums = p.repeats ? peri__repeats_sums(p.repeats, &p.past) : NULL;
        if (!sums || !can_place_back(e)) return PERI_OK;
        if (address(sums) < address(lowest)) lowest = sums;
    }
    p.first = lowest;
    PERI_TRY(place(&p, looks, e->kind->by_id ? place_results : place_columns, &placed));
    if (placed) *first = lowest;
    return PERI_OK;
}
