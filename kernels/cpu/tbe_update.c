/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_update.c: the backward pass over sorted items: sum each row's gradient (tbe_runs.c), update the row (tbe_rows.c, tbe_batch.c).
 */

/** Update the rows of table @t whose runs begin in [e, last); returns the first item of another table, or of none. */
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
    for (int64_t i = 0; i < a->reach.ahead; i++) tbe_update_ahead(&u);
    while (e < last) {
        uint64_t linear = a->sorted[e] >> a->payload_bits;
        if (linear >= (uint64_t)a->rows.total_rows) {
            e++;
            tbe_update_ahead(&u);
            continue;
        }
        t = tbe_table_of(t, linear);
        tbe_batches *batches = kind == PERI_TBE_SGD || kind == PERI_TBE_ROWWISE_ADAGRAD ? tbe_batches_of(a, t) : NULL;
        e = batches ? batches(&u, t, e, last) : tbe_update_table(&u, t, e, last, kind);
    }
    __atomic_fetch_add(a->updated, u.runs, __ATOMIC_RELAXED);
}

/** Whose function updates the rows. */
static int32_t tbe_function_of(int32_t kind)
{
    return kind == PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER ? PERI_TBE_ROWWISE_RMSPROP_AR : kind;
}

/* One function each: every optimizer gets registers of its own. */
#define X(kind)                                                                                                                            \
    static __attribute__((noinline)) void tbe_update_##kind(const peri_k_tbe_update_args *a, int64_t begin, int64_t end)                   \
    {                                                                                                                                      \
        tbe_update_runs(a, begin, end, PERI_TBE_##kind);                                                                               \
    }
TBE_OPTIMIZERS(X) X(NONE)
#undef X

static void cpu_tbe_update(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_update_args *a = args;
    switch (tbe_function_of(a->optimizer.kind)) {
#define X(kind)                                                                                                                            \
    case PERI_TBE_##kind: tbe_update_##kind(a, begin, end); break;
        TBE_OPTIMIZERS(X) X(NONE)
#undef X
    default: break;
    }
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

static void cpu_tbe_dense_update(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_dense_update_args *a = args;
    switch (tbe_function_of(a->optimizer.kind)) {
#define X(kind)                                                                                                                            \
    case PERI_TBE_##kind: tbe_dense_rows(a, begin, end, PERI_TBE_##kind); break;
        TBE_OPTIMIZERS(X)
#undef X
    default: break;
    }
}

static void cpu_tbe_ema(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_ema_args *a = args;
    const peri_k_tbe_table *t = a->rows.tables;
    int64_t last = tbe_part(a->rows.total_rows, end, a->chunks);
    for (int64_t linear = tbe_part(a->rows.total_rows, begin, a->chunks); linear < last; linear++) {
        t = tbe_table_of(t, (uint64_t)linear);
        tbe_row_ema(a, t, linear - t->first_row, a->scratch + begin * a->scratch_stride);
    }
}

/** sum16 of grad[d] * weight row [d]. */
TBE_INLINE float tbe_weight_dot(const float *grad, const void *row, int64_t n, const int32_t dtype)
{
    v16 sum = v16_zero();
    for (int64_t d = 0; d < n; d += 16) sum = v16_fma(tbe_get(grad + d, n - d), tbe_get_weights(row, d, n - d, dtype), sum);
    return v16_sum(sum);
}

static void cpu_tbe_weight_gradient(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_weight_gradient_args *a = args;
    const peri_k_tbe_list *s = &a->list;
    int64_t from = tbe_part(s->n_ids, begin, a->chunks), to = tbe_part(s->n_ids, end, a->chunks);
    memset(a->grad_weights + from, 0, sizeof(float) * (size_t)(to - from));
    for (int64_t k = 0; k < s->n_blocks; k++) {
        const peri_k_tbe_block *b = &s->blocks[k];
        const peri_k_tbe_table *t = &s->tables[b->table];
        int64_t i = tbe_clamp(s->spans[k].first_id, from, to), stop = tbe_clamp(s->spans[k].first_id + tbe_items(s, k), from, to);
        if (i >= stop) continue;
        const char *ring[TBE_AHEAD_MOST];
        const tbe_source source = tbe_source_of(s, a->weight, a->weight_dtype, &a->reach);
        tbe_ahead h = tbe_ahead_start(&source, ring, k, i, stop - i, 0); /* the rows come from it: with nothing ahead, TBE_AHEAD_LEAST */
        for (int64_t j = tbe_bag_of(s, k, i); i < stop; j++) {
            int64_t first = tbe_bag_start(s, k, j), past = tbe_bag_start(s, k, j + 1);
            float factor = tbe_factor(s, t, b->first_bag + j, past - first);
            if (j + 1 >= b->bags) past = stop;
            for (; i < past && i < stop; i++) {
                const char **place = tbe_ahead_place(&h, ring), *row = *place;
                *place = tbe_ahead_step(&h, &source, 0);
                if (!row) continue;
                const float *grad = a->grad + b->out_offset + tbe_out_row(t, tbe_places(s, b), j, i) * b->out_stride;
                float dot = a->weight_dtype == PERI_F32   ? tbe_weight_dot(grad, row, t->cols, PERI_F32)
                            : a->weight_dtype == PERI_F16 ? tbe_weight_dot(grad, row, t->cols, PERI_F16)
                                                          : tbe_weight_dot(grad, row, t->cols, PERI_BF16);
                a->grad_weights[i] += dot * factor;
            }
        }
    }
}
