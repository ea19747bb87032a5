/* SPDX-License-Identifier: Apache-2.0
 *
 * rows.c: see rows.h. Gradients can be read in place only if nothing divides them before they are added up: see
 * peri__route_table.halvings.
 */
#include "rows.h"
#include "../../kernels/tbe.h"

/* -- blocks whose rows are in place -------------------------------------------------------------------------------- */

/** Where the rows of the bags of a set's lookup are, if they do not follow each other. */
static peri__bag_places bag_places(const peri__rows *r, const peri__table_set *set)
{
    const peri__routing *x = &r->input->routing;
    const int32_t me = r->e->rank;
    if (set->replica) {
        const peri_tensor *all = r->past ? peri__repeats_rows(r->input->repeats) : NULL;
        return (peri__bag_places){all ? peri__data(all) : NULL, 0, all ? peri__numel(all) : 0};
    }
    if (r->past)
        return (peri__bag_places){peri__data(r->own_bags), peri__sum(x->source_bags, me), peri__numel(r->own_bags)};
    if (!x->origins) return (peri__bag_places){0};
    return (peri__bag_places){(const int32_t *)peri__data(x->origins) + x->rank_ids[me], peri__sum(x->source_ids, me),
                              x->source_ids[me]};
}

/** The lowest of the ends and the sums, or (@mixed) of these and the owner's buffer. */
static peri_tensor *lowest_address(const peri__rows *r, bool mixed)
{
    peri_tensor *t = r->ends[0];
    for (int32_t i = 1; i < r->n_ends; i++)
        if (peri__rows_address(r->ends[i]) < peri__rows_address(t)) t = r->ends[i];
    if (r->sums && peri__rows_address(r->sums) < peri__rows_address(t)) t = r->sums;
    return mixed && peri__rows_address(r->own) < peri__rows_address(t) ? r->own : t;
}

/** Where the rows of a set's blocks are. */
typedef struct spots {
    peri__spot *list;             /* by block */
    peri__bag_places places;
    int64_t base;                 /* the address that they are counted from */
    bool mixed, unknown;          /* some are in the owner's buffer; of some it cannot be told */
} spots;

/** Of a block whose rows are those of line @p; -1: of none. */
static peri__spot spot_of_block(const peri__rows *r, const peri_k_tbe_block *block, int32_t p, spots *s)
{
    const peri__line x = p >= 0 ? peri__home_line(r->layout->home, p) : (peri__line){.space = -1};
    peri__spot spot = {.offset = block->out_offset, .stride = block->out_stride};
    int64_t rows = block->bags, cols = block->out_stride;
    if (rows == 0) return spot;
    if (peri__rows_in_place(r, &x)) {
        spot.offset = peri__rows_end(r, &x) - s->base;
        spot.stride = r->stride;
        rows = r->past ? r->past : r->layout->home->feature_rows[x.feature];
        cols = x.cols;
        s->unknown = s->unknown || (rows != block->bags && !s->places.place);
    } else { /* of a bag of a variable batch all rows are in place, that any lookup has of it */
        const int64_t bag = block->first_bag - s->places.first;
        s->mixed = true;
        s->unknown = s->unknown || (r->past && bag >= 0 && bag < s->places.n);
        spot.offset += peri__rows_address(r->own) - s->base;
    }
    spot.past = spot.offset + (rows - 1) * spot.stride + cols;
    return spot;
}

static void find_spots(const peri__rows *r, int32_t g, spots *s)
{
    const peri__batch_layout *l = r->layout;
    const bool mixed = s->mixed;
    s->base = peri__rows_address(lowest_address(r, mixed));
    for (int64_t k = 0; k < l->blocks[g]->n; k++)
        s->list[k] = spot_of_block(r, &l->blocks[g]->block[k], l->lines[g][k], s);
    if (s->mixed && !mixed) find_spots(r, g, s);
}

/** The blocks of a set with its rows in place, for this batch. *out new; NULL: there are none. */
static peri_status make_blocks(const peri__rows *r, int32_t g, spots *s, peri_tbe_blocks **out)
{
    const peri_tbe_blocks *from = r->layout->blocks[g];
    *out = NULL;
    PERI__SCRATCH peri__spot *list = peri__alloc(sizeof *list * (size_t)peri__max(1, from->n));
    if (!list) return PERI_ENOMEM;
    s->list = list;
    find_spots(r, g, s);
    const bool can = !s->unknown && (peri__immediate(r->e->device) || (r->n_ends == 1 && !s->mixed));
    return can ? peri__tbe_blocks_moved(r->e->sets[g].tbe, from, list, out) : PERI_OK;
}

/** The same, kept: blocks of one end are good for all batches of the layout, if buffer and end lie as far apart where
 *  rows are in both. */
static peri_status blocks_in_place(const peri__rows *r, int32_t g, spots *s, peri_tbe_blocks **out)
{
    peri__blocks_there *kept = &r->layout->there[r->back][g];
    const int64_t away = peri__rows_address(r->own) - peri__rows_address(r->ends[0]);
    if (r->n_ends > 1 || r->sums) return make_blocks(r, g, s, out);
    if (!kept->blocks || kept->stride != r->stride || (kept->mixed && kept->away != away)) {
        PERI_TRY(make_blocks(r, g, s, out));
        if (!*out) return PERI_OK;
        peri_tbe_blocks_release(kept->blocks);
        *kept = (peri__blocks_there){*out, s->mixed, away, r->stride};
    }
    s->mixed = kept->mixed;
    peri_tbe_blocks_retain(*out = kept->blocks);
    return PERI_OK;
}

static peri_status redirect_set(const peri__rows *r, int32_t g, bool *placed)
{
    spots s = {.places = bag_places(r, &r->e->sets[g])};
    peri_tbe_blocks *there;
    PERI_TRY(blocks_in_place(r, g, &s, &there));
    *placed = there;
    peri_status status = there ? peri__batch_redirect(r->input->looks[r->back][g], there, &s.places, placed) : PERI_OK;
    if (status >= 0 && *placed) r->base[g] = lowest_address(r, s.mixed);
    peri_tbe_blocks_release(there);
    return status;
}

/* -- who takes what ------------------------------------------------------------------------------------------------ */

static bool set_is_of_space(const peri__rows *r, int32_t g, int32_t space)
{
    return r->e->sets[g].replica == (space == PERI__REPLICA_ROWS);
}

static void end_redirects(const peri__rows *r, int32_t space)
{
    for (int32_t g = 0; g < r->e->n_sets; g++) {
        if (!r->base[g] || !set_is_of_space(r, g, space)) continue;
        peri__batch_redirect_end(r->input->looks[r->back][g]);
        r->base[g] = NULL;
    }
}

/** Whether gradients of a set can be read where they lie. Those of replicas are added up over the ranks before the
 *  update. */
static bool whole_gradients(const peri_sharded *e, const peri__table_set *set)
{
    bool whole = !set->dense && (set->replica || (set->optimizer >= 0 && !set->tbe->accumulate));
    for (int32_t i = 0; i < set->n_tables && whole; i++) whole = e->tables[set->module_table[i]].divisor == 1;
    return whole;
}

static bool can_redirect(const peri__rows *r, int32_t space)
{
    const peri_sharded *e = r->e;
    const peri__home *h = r->layout->home;
    const uint32_t bit = 1u << space, alone = space == PERI__OWN_ROWS ? h->alone : h->alone & ~h->shared;
    if (!(bit & (r->back ? h->alone | h->shared : alone)) || (h->variable && !r->past)) return false;
    if (space == PERI__OWN_ROWS && (e->exact || e->two_rules)) return false;
    /* that of the ids' weights is made of own rows' gradients in the buffer */
    if (space == PERI__OWN_ROWS && r->back && peri__weights_want_grad(r->input)) return false;
    bool can = true;
    for (int32_t g = 0; g < e->n_sets && r->back; g++)
        can = can && (!set_is_of_space(r, g, space) || whole_gradients(e, &e->sets[g]));
    return can;
}

/** Have the lookups of a space's sets, all or none, write or read rows in place. */
static peri_status redirect_space(peri__rows *r, int32_t space)
{
    bool placed = can_redirect(r, space);
    peri_status status = PERI_OK;
    if (!placed) return PERI_OK;
    r->in_place |= 1u << space;
    for (int32_t g = 0; g < r->e->n_sets && placed && status >= 0; g++)
        if (set_is_of_space(r, g, space)) status = redirect_set(r, g, &placed);
    if (placed && status >= 0) return PERI_OK;
    r->in_place &= ~(1u << space);
    end_redirects(r, space);
    return status;
}

/** Of a variable batch: where bags have their rows. */
static peri_status find_bags(peri__rows *r)
{
    const peri__repeats *repeats = r->input->repeats;
    if (!repeats) return PERI_OK;
    r->past = r->layout->home->rows + 1;
    if (r->back && !(r->sums = peri__repeats_sums(repeats, &r->past))) r->past = 0;
    return peri__repeats_own(repeats, &r->own_bags);
}

/* -- the interface ------------------------------------------------------------------------------------------------- */

peri_status peri__rows_open(peri__rows *r, const peri__input_dist *input, int32_t direction)
{
    const peri__comm *comm = input->ebc->group->comm;
    const peri__home *h = input->layouts[direction]->home;
    r->e = input->ebc;
    r->layout = input->layouts[direction];
    r->input = input;
    r->back = direction == PERI__TO_OWNERS;
    PERI_TRY(peri__stage_tensor(comm, r->e->device, h->own_out + h->replica_out + r->layout->owner->sent_out, &r->own));
    return peri__stage_tensor(comm, r->e->device, h->received_out, &r->away);
}

peri_status peri__rows_bind(peri__rows *r, peri_tensor *const *ends, int32_t n)
{
    r->ends = peri__alloc_zero(sizeof *r->ends * (size_t)(n + r->e->n_sets));
    if (!r->ends) return PERI_ENOMEM;
    r->base = r->ends + n;
    for (; r->n_ends < n; r->n_ends++) peri_tensor_retain(r->ends[r->n_ends] = ends[r->n_ends]);
    r->stride = peri__contiguous(ends[0]) ? r->e->cols : ends[0]->stride[0];
    PERI_TRY(find_bags(r));
    PERI_TRY(redirect_space(r, PERI__REPLICA_ROWS));
    PERI_TRY(redirect_space(r, PERI__OWN_ROWS));
    return peri__unbuffered_new(r);
}

peri_tensor *peri__rows_of(const peri__rows *r, int32_t g) { return r->base[g] ? r->base[g] : r->own; }

void peri__rows_unbind(peri__rows *r)
{
    if (!r->base) return;
    end_redirects(r, PERI__REPLICA_ROWS);
    end_redirects(r, PERI__OWN_ROWS);
}

static void drop_ends(peri__rows *r)
{
    for (int32_t i = 0; i < r->n_ends; i++) peri_tensor_release(r->ends[i]);
    r->n_ends = 0;
}

void peri__rows_drop_ends(peri__rows *r)
{
    if (!r->base) return;
    end_redirects(r, PERI__REPLICA_ROWS);
    if (!(r->in_place >> PERI__OWN_ROWS & 1)) drop_ends(r);
}

void peri__rows_fini(peri__rows *r)
{
    peri__rows_unbind(r);
    drop_ends(r);
    peri__free(r->ends);
    peri_tensor_release(r->own);
    peri_tensor_release(r->away);
    peri_tensor_release(r->own_bags);
    peri__unbuffered_release(r->unbuffered);
    *r = (peri__rows){0};
}

/** The home's list of the outputs that are left, made anew unless the last one is of the same spaces. */
static peri_status list_left(const peri__rows *r, peri__left **kept)
{
    if (*kept && (*kept)->spaces == r->in_place) return PERI_OK;
    peri__left *left = peri__alloc_zero(sizeof *left);
    if (!left) return PERI_ENOMEM;
    left->spaces = r->in_place;
    peri_status status = r->e->kind->list(r, left);
    peri__left_free(status < 0 ? left : *kept);
    if (status >= 0) *kept = left;
    return status;
}

peri_status peri__rows_list_left(const peri__rows *r, peri__to_move *out)
{
    peri__home *h = r->layout->home;
    peri__left **kept = &h->left[r->back];
    if (r->in_place) PERI_TRY(list_left(r, kept));
    const peri__left *left = r->in_place ? *kept : NULL;
    const peri__upload *up = left ? &left->up : &h->up;
    *out = (peri__to_move){.outputs = peri__upload_at(up, left ? left->outputs : h->outputs),
                           .bags = peri__upload_at(up, left ? left->bags : h->output_bags),
                           .n = left ? left->n : h->n_outputs};
    return PERI_OK;
}
