/* SPDX-License-Identifier: Apache-2.0
 *
 * placed.c: rows of this rank's own lookups that stay here. They are written where the results want them, and their gradients are read
 * where those of the results lie: through the buffers, in which rows travel, all of them would be read and written twice more.
 *
 * A lookup that alone makes up a block of columns has its place there, row by row. Where ids are cut by rows, its rows are some of those of
 * a feature: the router says which (peri__routing.origins). Of a variable batch a bag's row is that of its first sample (repeats.c). Sums
 * of several ranks' rows (but not their gradients), and layouts that differ by direction, go the long way. Gradients can be read in place
 * only if nothing divides them before they are added up: see peri_sharded.halvings.
 */
#include "module.h"

/** What is placed. */
typedef struct places {
    const peri_sharded *e;
    const peri__batch_layout *layout;
    peri_tensor *const *to; /* the results that are put together, one tensor; back: a gradient for each result */
    int64_t buffer, first;  /* element addresses: of the buffer that all other rows use; of what out_offset is counted from */
    bool back, scattered;   /* scattered: bags have places of their own */
    int64_t past;           /* of a variable batch: one past the last row of a bag; else 0 */
} places;

static int64_t address(const peri_tensor *t) { return (int64_t)((uintptr_t)peri__data(t) / sizeof(float)); }

/** The lookup whose rows begin at element @offset of the own buffer; those before it have none. */
static const peri__lookup *lookup_at(const places *p, int64_t offset)
{
    const peri__home *h = p->layout->home;
    int32_t low = 0, high = h->n_own;
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        if (h->own[middle].offset <= offset) low = middle;
        else high = middle;
    }
    return &p->e->routes->lookups[h->own[low].lookup];
}

/** Where output @o wants its rows, and has their gradients: the first of them, as an element address. False: nowhere but in the buffer. */
static bool wanted_at(const places *p, const peri__output *o, int64_t *at)
{
    const peri__home *h = p->layout->home;
    if (!h->wanted) {
        *at = address(p->to[0]) + o->column;
        return p->back || o->n_pieces == 1; /* of a sum only the gradient is there */
    }
    const peri__wanted_rows *w = &h->wanted[o - p->e->routes->outputs];
    if (!p->back && w->joined < 0) return false;
    *at = (p->back ? address(p->to[w->result]) : address(p->to[0]) + w->joined * p->e->cols) + o->column % p->e->cols;
    return true;
}

/** peri__place_rows. */
static int64_t place_block(const void *ctx, const peri_tbe_batch *look, peri_k_tbe_block *block)
{
    const places *p = ctx;
    const peri__home *h = p->layout->home;
    if (block->bags == 0) return 0;
    const bool own = block->out_offset < h->own_out;
    const peri__lookup *s = own ? lookup_at(p, block->out_offset) : NULL;
    int64_t at, rows = block->bags, cols = own ? s->cols : block->out_stride;
    const bool placed = p->past && block->first_bag >= look->first_placed && block->first_bag < look->first_placed + look->n_placed;
    if (own && s->output >= 0 && wanted_at(p, &p->e->routes->outputs[s->output], &at)) {
        rows = p->past ? p->past : h->feature_rows[s->feature];
        if (rows != block->bags && !p->scattered) return -1;
        block->out_offset = at - p->first;
        block->out_stride = p->e->cols;
    } else if (placed) {
        return -1; /* of a bag all rows are, that any of its lookups has */
    } else {
        block->out_offset += p->buffer - p->first;
    }
    return block->out_offset + (rows - 1) * block->out_stride + cols;
}

/** Whether gradients of a set can be read where they lie. */
static bool whole_gradients(const peri_sharded *e, const peri__table_set *set)
{
    bool whole = !set->dense && set->optimizer >= 0 && !set->tbe->accumulate;
    for (int32_t i = 0; i < set->n_tables && whole; i++) whole = e->divisor[set->module_table[i]] == 1;
    return whole;
}

void peri__own_unplace(const peri_sharded *e, peri_tbe_batch *const *looks)
{
    for (int32_t g = 0; looks && g < e->n_sets; g++)
        if (!e->sets[g].replica && looks[g] && looks[g]->placed) peri__batch_unplace(looks[g]);
}

/** The lowest of @n tensors and @buffer. */
static peri_tensor *lowest_of(peri_tensor *const *to, int32_t n, peri_tensor *buffer)
{
    peri_tensor *first = buffer;
    for (int32_t i = 0; i < n; i++)
        if (address(to[i]) < address(first)) first = to[i];
    return first;
}

peri_status peri__own_place(const peri_sharded *e, const peri__batch_layout *layout, peri__given *given, peri_tbe_batch *const *looks,
                            bool back, peri_tensor *buffer, peri_tensor *const *to, peri_tensor **first)
{
    const peri__home *h = layout->home;
    *first = NULL;
    if (!e->places_own || h->n_own == 0 || (h->variable && !given->repeats)) return PERI_OK;
    int64_t past = h->variable ? h->rows + 1 : 0;
    peri_tensor *lowest = lowest_of(to, back ? e->n_results : 1, buffer);
    if (h->variable && back) {
        peri_tensor *sums = peri__repeats_sums(given->repeats, &past);
        if (!sums) return PERI_OK;
        if (address(sums) < address(lowest)) lowest = sums;
    }
    if (h->variable) {
        peri_tensor_release(given->own_bags);
        given->own_bags = NULL;
        PERI_TRY(peri__repeats_own(given->repeats, &given->own_bags));
    }
    places p = {.e = e, .layout = layout, .to = to, .buffer = address(buffer), .first = address(lowest), .back = back, .past = past,
                .scattered = given->origins || h->variable};
    peri_status status = PERI_OK;
    bool placed = true;
    for (int32_t g = 0; g < e->n_sets && placed && status >= 0; g++) {
        const peri__table_set *set = &e->sets[g];
        if (set->replica) continue;
        placed = !back || whole_gradients(e, set);
        if (!placed) continue;
        looks[g]->places = given->origins ? (const int32_t *)peri__data(given->origins) + given->own_place : NULL;
        looks[g]->first_placed = given->first_own;
        looks[g]->n_placed = given->own_ids;
        if (h->variable) {
            looks[g]->places = peri__data(given->own_bags);
            looks[g]->first_placed = given->first_own_bag;
            looks[g]->n_placed = peri__numel(given->own_bags);
        }
        status = peri__batch_place(looks[g], place_block, &p, &placed);
    }
    if (placed && status >= 0) *first = lowest;
    else peri__own_unplace(e, looks);
    return status;
}
