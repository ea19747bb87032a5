/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_update.c: the backward pass over sorted items: sum each row's gradient (tbe_runs.c), update the row (tbe_rows.c,
 * tbe_batch.c).
 */
#include "tbe_update.h"

/** Rows of the gradient may be kept in @floats floats from @room on. */
static void tbe_kept_room(tbe_updater *u, float *room, int64_t floats)
{
    if (u->a->reach.kept > 0 && floats > 0) u->kept = (tbe_kept){.rows = room, .room = floats};
}

void tbe_kept_enter(tbe_updater *u, const peri_k_tbe_table *t, int64_t e)
{
    enum { LEAST = 8 }; /* copies that it takes to begin */
    const peri_k_tbe_update_args *a = u->a;
    tbe_kept *k = &u->kept;
    k->shift = 0;
    if (!k->room) return;
    k->n = 0;
    k->first = e;
    k->table = t;
    k->cols = t->cols;
    k->stride = (t->cols + 15) / 16 * 16;
    k->most = LEAST / 2;
    const int64_t bytes = a->reach.kept / (int64_t)sizeof(float), row = k->stride + 8;
    const int64_t most = tbe_clamp(bytes < k->room ? bytes / k->stride : k->room / row, 0, 1 << (TBE_COPY_BITS - 1));
    const uint64_t beyond = (uint64_t)(t->first_row + t->rows);
    while (2 * k->most <= most && e + TBE_KEPT_READ * k->most < u->n &&
           a->sorted[e + TBE_KEPT_READ * k->most] >> a->payload_bits < beyond)
        k->most *= 2;
    if (k->most < LEAST || k->most * row > k->room) return;
    k->shift = 62 - __builtin_ctzll((uint64_t)k->most);
    k->places = (uint64_t *)(k->rows + k->most * k->stride);
    memset(k->places, 0xff, sizeof *k->places * (size_t)k->most * 4);
}

const float *tbe_kept_add(tbe_updater *u, uint64_t at, uint64_t place)
{
    tbe_kept *k = &u->kept;
    const float *row = u->a->grad + at;
    if (k->n == k->most) return row;
    float *copy = k->rows + k->n * k->stride;
    for (int64_t d = 0; d < k->cols; d += 16) {
        if (k->cols - d >= 16) v16_store(copy + d, v16_load(row + d));
        else v16_store_part(copy + d, v16_load_part(row + d, k->cols - d), k->cols - d);
    }
    k->places[place] = at << TBE_COPY_BITS | (uint64_t)k->n++;
    return copy;
}

/** A tbe_batches of one row at a time. */
TBE_INLINE int64_t tbe_update_table(tbe_updater *u, const peri_k_tbe_table *t, int64_t e, int64_t last, const int kind)
{
    const peri_k_tbe_update_args *a = u->a;
    uint64_t linear;
    for (int64_t past; tbe_in_table(u, t, e, last, &linear); e = past, u->runs++) {
        past = tbe_run_end(u, e, linear);
        int64_t row = (int64_t)linear - t->first_row;
        const float *g = tbe_sum(u, e, past, t->cols, u->room);
        if (kind == PERI_TBE_NONE && a->run_values) {
            memcpy(a->run_values + u->next_run * a->run_stride, g, sizeof *g * (size_t)t->cols);
            a->run_rows[u->next_run++] = (int64_t)linear;
        } else if (kind == PERI_TBE_NONE) {
            memcpy(a->dense + t->offset + row * t->stride, g, sizeof *g * (size_t)t->cols);
            a->touched[linear] = 1;
        } else {
            tbe_row(&a->rows, &a->optimizer, t, row, g, u->room + (t->cols + 15) / 16 * 16, kind);
        }
    }
    return e;
}

TBE_INLINE void tbe_update_runs(const peri_k_tbe_update_args *a, int64_t begin, int64_t end, const int kind)
{
    tbe_updater u = {.a = a, .n = *a->n, .payload_mask = ((uint64_t)1 << a->payload_bits) - 1, .near = a->reach.near,
                     .ahead_row = UINT64_MAX};
    int64_t e = tbe_part(u.n, begin, a->chunks), last = tbe_part(u.n, end, a->chunks);
    if (e > 0) /* the run that lies across the begin belongs to an earlier chunk */
        while (e < last && a->sorted[e] >> a->payload_bits == a->sorted[e - 1] >> a->payload_bits) e++;
    if (e >= last) return;
    const peri_k_tbe_table *t = a->rows.tables;
    u.next_run = kind == PERI_TBE_NONE && a->run_values ? a->run_starts[begin] : 0;
    u.room = a->scratch + begin * a->scratch_stride;
    tbe_kept_room(&u, u.room + a->scratch_stride, (end - begin - 1) * a->scratch_stride);
    u.ahead = a->reach.ahead > 0 ? e : u.n;
    if (tbe_has_full1(kind)) u.full[0] = a->rows.momentum1;
    if (tbe_has_full2(kind)) u.full[1] = a->rows.momentum2;
    if (tbe_has_row1(kind)) u.row[0] = a->rows.momentum1;
    if (tbe_has_row2(kind)) u.row[1] = a->rows.momentum2;
    if (kind == PERI_TBE_ROWWISE_RMSPROP_AR) {
        u.row[1] = a->rows.row_counter;
        u.prev = a->rows.prev_iter;
    }
    tbe_update_enter(&u, t);
    for (int64_t i = 0; i < a->reach.ahead; i++) tbe_update_ahead_rarely(&u);
    while (e < last) {
        uint64_t linear = a->sorted[e] >> a->payload_bits;
        if (linear >= (uint64_t)a->rows.total_rows) {
            e++;
            tbe_update_ahead_rarely(&u);
            continue;
        }
        t = tbe_table_of(t, linear);
        tbe_kept_enter(&u, t, e);
        tbe_batches *batches = kind == PERI_TBE_SGD || kind == PERI_TBE_ROWWISE_ADAGRAD ? tbe_batches_of(a, t) : NULL;
        e = batches ? batches(&u, t, e, last) : tbe_update_table(&u, t, e, last, kind);
    }
    __atomic_fetch_add(a->updated, u.runs, __ATOMIC_RELAXED);
}

TBE_INLINE void tbe_dense_rows(const peri_k_tbe_dense_update_args *a, int64_t begin, int64_t end, const int kind)
{
    const peri_k_tbe_table *t = a->rows.tables;
    int64_t last = tbe_part(a->rows.total_rows, end, a->chunks);
    float *room = a->scratch + begin * a->scratch_stride;
    for (int64_t linear = tbe_part(a->rows.total_rows, begin, a->chunks); linear < last; linear++) {
        if (a->touched[linear] == 0) continue;
        t = tbe_table_of(t, (uint64_t)linear);
        int64_t row = linear - t->first_row;
        tbe_row(&a->rows, &a->optimizer, t, row, a->dense + t->offset + row * t->stride, room, kind);
    }
}

/* One function each: every optimizer gets registers of its own. */
#define TBE_SUMS(kind)                                                                                                 \
    void K_SHARED(tbe_update_##kind)(const peri_k_tbe_update_args *a, int64_t begin, int64_t end)                      \
    {                                                                                                                  \
        tbe_update_runs(a, begin, end, PERI_TBE_##kind);                                                               \
    }
#define X(kind)                                                                                                        \
    TBE_SUMS(kind)                                                                                                     \
    void K_SHARED(tbe_dense_##kind)(const peri_k_tbe_dense_update_args *a, int64_t begin, int64_t end)                 \
    {                                                                                                                  \
        tbe_dense_rows(a, begin, end, PERI_TBE_##kind);                                                                \
    }
TBE_KINDS(X, TBE_SUMS)
#undef X
#undef TBE_SUMS
