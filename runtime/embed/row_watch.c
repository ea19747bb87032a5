/* SPDX-License-Identifier: Apache-2.0
 *
 * row_watch.c: telling watches which rows change, and bitmaps of rows. See row_watch.h.
 */
#include "row_watch.h"

/* -- telling ------------------------------------------------------------------------------------------------------- */

peri_status peri__tbe_tell_watches(peri_tbe *tbe, const peri__row_change *change)
{
    if (change->form == PERI__ROWS_RANGE && change->count == 0) return PERI_OK;
    for (peri__row_watch *w = tbe->watches; w; w = w->next) PERI_TRY(w->before(w, tbe, change));
    return PERI_OK;
}

/** The elements of its storage that @t has lie in [*low, *high]. */
static void extent_of(const peri_tensor *t, int64_t *low, int64_t *high)
{
    *low = *high = t->offset;
    for (int32_t d = 0; d < t->ndim; d++) {
        int64_t reach = (t->shape[d] - 1) * t->stride[d];
        if (reach < 0) *low += reach;
        else *high += reach;
    }
}

/** Tell the rows of state @part that lie in elements [low, high] of its flat tensor. */
static peri_status tell_elements(peri_tbe *tbe, int32_t part, int64_t low, int64_t high)
{
    const peri__state *s = &tbe->state[part];
    for (int64_t i = 0; i < tbe->n_tables; i++) {
        const peri_k_tbe_table *t = &tbe->layout[i];
        const int64_t begin = peri__state_offset(tbe, s, i), stride = s->geometry == PERI_STATE_ROW ? 1 : t->stride;
        if (t->rows == 0 || high < begin || low >= begin + t->rows * stride) continue;
        const int64_t first = peri__max(low - begin, 0) / stride,
                      last = peri__min((high - begin) / stride, t->rows - 1);
        PERI_TRY(peri__tbe_tell_range(tbe, i, part, first, last - first + 1));
    }
    return PERI_OK;
}

/** peri__storage_watch: a caller writes to @t, a view of weights or of a state. The write cannot be stopped: a watch
 *  that fails here keeps its error itself. */
static void view_written(void *ctx, const peri_tensor *t)
{
    peri_tbe *tbe = ctx;
    const bool inside = peri__tbe_in_call_alone(tbe);
    int64_t low, high;
    /* not entered: the device is lost, and all it had */
    if (peri__numel(t) == 0 || (!inside && peri__tbe_enter(tbe, true) < 0)) return;
    extent_of(t, &low, &high);
    for (int32_t i = 0; i < tbe->n_states; i++)
        if (tbe->state[i].flat->storage == t->storage) (void)tell_elements(tbe, i, low, high);
    if (!inside) (void)peri__tbe_leave(tbe, true, PERI_OK);
}

/** Listen to writes through views, or no longer. Tables behind a cache have no views of rows: what lies in their flat
 *  tensors is slots. */
static void watch_views(peri_tbe *tbe, bool on)
{
    tbe->writes_watch = (peri__storage_watch){.before = view_written, .ctx = tbe};
    for (int32_t i = 0; i < tbe->n_states && tbe->store->whole; i++) {
        if (!peri__has_rows(tbe->state[i].geometry)) continue;
        atomic_store_explicit(&tbe->state[i].flat->storage->watch, on ? &tbe->writes_watch : NULL,
                              memory_order_release);
    }
}

peri_status peri__tbe_watch(peri_tbe *tbe, peri__row_watch *watch)
{
    PERI_TRY(peri__tbe_enter(tbe, true));
    if (!tbe->watches) watch_views(tbe, true);
    watch->next = tbe->watches;
    tbe->watches = watch;
    return peri__tbe_leave(tbe, true, PERI_OK);
}

void peri__tbe_unwatch(peri_tbe *tbe, peri__row_watch *watch)
{
    const bool alone = peri__tbe_enter(tbe, true) >= 0; /* else the device is lost, and nothing changes any more */
    for (peri__row_watch **w = &tbe->watches; *w; w = &(*w)->next) {
        if (*w != watch) continue;
        *w = watch->next;
        break;
    }
    if (!tbe->watches) watch_views(tbe, false);
    if (alone) (void)peri__tbe_leave(tbe, true, PERI_OK);
}

void peri__tbe_unwatch_all(peri_tbe *tbe)
{
    if (tbe->watches) watch_views(tbe, false);
    for (peri__row_watch *w = tbe->watches, *next; w; w = next) {
        next = w->next;
        if (w->gone) w->gone(w, tbe);
    }
    tbe->watches = NULL;
}

/* -- bitmaps ------------------------------------------------------------------------------------------------------- */

int64_t peri__first_row(const peri_tbe *tbe, int64_t table)
{
    int64_t first = 0;
    if (tbe->store->whole) return table < tbe->n_tables ? tbe->layout[table].first_row : tbe->total_rows;
    for (int64_t t = 0; t < table; t++) first += tbe->tables[t].config.rows;
    return first;
}

peri_status peri__row_bits_init(const peri_tbe *tbe, peri__row_bits *bits)
{
    peri_device *device = tbe->device;
    *bits = (peri__row_bits){.rows = peri__first_row(tbe, tbe->n_tables)};
    int64_t words = peri__max(1, peri__ceil_div(bits->rows, 64));
    if (!tbe->store->whole) PERI_TRY(peri_device_get("cpu", &device));
    return peri_tensor_full(device, PERI_I64, 1, &words, 0, &bits->words);
}

void peri__row_bits_fini(peri__row_bits *bits)
{
    peri_tensor_release(bits->words);
    peri_tensor_release(bits->fresh);
    peri_tensor_release(bits->n_fresh);
    *bits = (peri__row_bits){0};
}

/** Room for @most fresh rows; their number is 0. */
static peri_status fresh_room(peri__row_bits *bits, int64_t most, peri_k_tbe_mark_args *args)
{
    peri_device *device = peri__device(bits->words);
    int64_t one = 1;
    if (bits->fresh && peri__numel(bits->fresh) < most) {
        peri_tensor_release(bits->fresh);
        bits->fresh = NULL;
    }
    if (!bits->fresh) PERI_TRY(peri_tensor_new(device, PERI_I64, 1, &most, &bits->fresh));
    if (!bits->n_fresh) PERI_TRY(peri_tensor_new(device, PERI_I64, 1, &one, &bits->n_fresh));
    PERI_TRY(peri_tensor_fill(bits->n_fresh, 0));
    args->fresh = peri__data(bits->fresh);
    args->n_fresh = peri__data(bits->n_fresh);
    return PERI_OK;
}

/** Rows that the host lists, as keys on the device. */
static peri_status mark_list(const peri_tbe *tbe, const peri__row_change *c, peri_k_tbe_mark_args *args)
{
    enum { GRAIN = 4096 };
    peri_tensor *keys;
    const int64_t words = c->count + 1, first = peri__first_row(tbe, c->table);
    int64_t *host = peri__alloc(sizeof *host * (size_t)words);
    if (!host) return PERI_ENOMEM;
    host[0] = c->count;
    for (int64_t i = 0; i < c->count; i++) host[i + 1] = first + c->rows[i];
    peri_status status = peri_tensor_new(tbe->device, PERI_I64, 1, &words, &keys);
    if (status >= 0) status = peri_tensor_write(keys, host, words * (int64_t)sizeof *host);
    peri__free(host);
    PERI_TRY(status);
    args->n = peri__data(keys);
    args->sorted = (const uint64_t *)args->n + 1;
    status = PERI_LAUNCH(tbe->device, tbe_mark, args, c->count, GRAIN);
    peri_tensor_release(keys);
    return status;
}

/** Set the bits of the rows of @c on the host, where the bitmap lies for tables behind a cache. */
static void mark_here(const peri_tbe *tbe, const peri__row_change *c, const peri_k_tbe_mark_args *args)
{
    const int64_t first = peri__first_row(tbe, c->table) + (c->form == PERI__ROWS_RANGE ? c->first : 0);
    for (int64_t i = 0; i < c->count; i++) {
        const int64_t row = first + (c->form == PERI__ROWS_LIST ? c->rows[i] : i);
        const uint64_t bit = (uint64_t)1 << row % 64;
        uint64_t *word = &args->bits[row / 64];
        if (args->fresh && !(*word & bit)) args->fresh[args->n_fresh[0]++] = row;
        *word |= bit;
    }
}

peri_status peri__row_bits_mark(const peri_tbe *tbe, peri__row_bits *bits, const peri__row_change *c, bool list)
{
    enum { GRAIN = 8192 };
    peri_k_tbe_mark_args args = {
        .total_rows = bits->rows, .first = bits->passed, .bits = peri__data(bits->words)};
    const int64_t most = c->form == PERI__ROWS_SORTED ? peri__min(c->capacity, bits->rows)
                         : c->form == PERI__ROWS_TOUCHED ? bits->rows : c->count;
    if (list) PERI_TRY(fresh_room(bits, peri__max(most, 1), &args));
    if (!tbe->store->whole) return mark_here(tbe, c, &args), PERI_OK;
    switch (c->form) {
    case PERI__ROWS_SORTED:
        args.sorted = c->sorted;
        args.n = c->n;
        args.payload_bits = c->payload_bits;
        return PERI_LAUNCH(tbe->device, tbe_mark, &args, c->capacity, GRAIN);
    case PERI__ROWS_TOUCHED:
        args.touched = c->touched;
        return PERI_LAUNCH(tbe->device, tbe_mark, &args, bits->rows, GRAIN);
    case PERI__ROWS_LIST: return mark_list(tbe, c, &args);
    default:
        args.first = peri__first_row(tbe, c->table) + c->first;
        return PERI_LAUNCH(tbe->device, tbe_mark, &args, c->count, GRAIN);
    }
}
