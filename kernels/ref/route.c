/* SPDX-License-Identifier: Apache-2.0
 *
 * route.c (ref): see kernels/route.h.
 */

static int64_t ref_route_id(const void *ids, int64_t i, bool i32)
{
    return i32 ? ((const int32_t *)ids)[i] : ((const int64_t *)ids)[i];
}

/** Which part of @p has row (or bucket) @id. */
static int32_t ref_route_part(const peri_k_partition *p, const int64_t *bounds, int64_t id)
{
    int32_t part = 0;
    while (part + 1 < p->n_parts && id >= bounds[p->first_bound + part + 1]) part++;
    return part;
}

static void ref_route_count(const void *args, int64_t begin, int64_t end)
{
    const peri_k_route_count_args *a = args;
    for (int64_t block = begin; block < end; block++) {
        peri_k_route_report *reports = &a->reports[block * PERI_ROUTE_REPORTS];
        int64_t first = block * PERI_ROUTE_BLOCK;
        for (int64_t i = first; i < first + PERI_ROUTE_BLOCK && i < a->in.bags; i++) {
            const peri_k_partition *p = peri_k_route_find(a->in.partitions, a->in.n_partitions, i);
            int64_t bag = i - p->bag_start, from = a->in.offsets[p->first_bag + bag],
                    to = a->in.offsets[p->first_bag + bag + 1];
            for (int32_t s = 0; s < p->n_parts; s++) a->lengths[a->in.wire_bag[p->first_strand + s] + bag] = 0;
            for (int64_t k = from; k < to; k++) {
                int64_t id = ref_route_id(a->in.ids, k, a->in.ids_i32);
                int64_t key = peri_k_route_key(p, id);
                bool bad = key < -1 || key >= p->rows;
                peri_k_route_report *report = bad && p->check < PERI_ROUTE_REPORTS ? &reports[p->check] : NULL;
                if (report && report->bad++ == 0) report->where = i + 1, report->id = id, report->position = k - from;
                if (key >= 0 && !bad && p->n_parts)
                    a->lengths[a->in.wire_bag[p->first_strand + ref_route_part(p, a->in.bounds, key)] + bag]++;
            }
        }
    }
}

static void ref_route_totals(const void *args, int64_t begin, int64_t end)
{
    const peri_k_route_totals_args *a = args;
    for (int64_t i = begin; i < end; i++) a->totals[i] = a->positions[a->at[i]];
}

static void ref_route_mean(const void *args, int64_t begin, int64_t end)
{
    const peri_k_route_mean_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        const peri_k_partition *p = peri_k_route_find(a->in.partitions, a->in.n_partitions, i);
        int64_t bag = i - p->bag_start, n = a->in.offsets[p->first_bag + bag + 1] - a->in.offsets[p->first_bag + bag];
        for (int32_t s = 0; s < p->n_parts; s++)
            a->scale[a->in.wire_bag[p->first_strand + s] + bag] = 1.0f / (float)(n > 1 ? n : 1);
    }
}

static void ref_route_pack(const void *args, int64_t begin, int64_t end)
{
    const peri_k_route_pack_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        const peri_k_partition *p = peri_k_route_find(a->in.partitions, a->in.n_partitions, i);
        int64_t bag = i - p->bag_start, from = a->in.offsets[p->first_bag + bag],
                to = a->in.offsets[p->first_bag + bag + 1];
        int64_t *kept = a->places && p->n_parts > 0
                            ? a->places + a->place_first[p - a->in.partitions] - a->in.offsets[p->first_bag]
                            : NULL;
        for (int64_t k = from; k < to && p->n_parts > 0; k++) {
            int64_t id = ref_route_id(a->in.ids, k, a->in.ids_i32);
            if (kept) kept[k] = -1;
            int64_t key = peri_k_route_key(p, id);
            if (key < 0 || key >= p->rows) continue;
            int32_t part = ref_route_part(p, a->in.bounds, key), strand = p->first_strand + part;
            int64_t place = a->cursor[a->in.wire_bag[strand] + bag]++,
                    local = p->raw ? id : id - a->in.bounds[p->first_bound + part];
            if (a->out_i32) ((int32_t *)a->out)[place] = (int32_t)local;
            else ((int64_t *)a->out)[place] = local;
            if (a->weights) a->out_weights[place] = a->weights[k];
            if (kept) kept[k] = place;
            if (a->origins) a->origins[place] = (int32_t)(k - a->in.offsets[p->first_bag]);
        }
    }
}

static void ref_route_return(const void *args, int64_t begin, int64_t end)
{
    const peri_k_route_return_args *a = args;
    for (const peri_k_partition *p = a->in.partitions; p < a->in.partitions + a->in.n_partitions && begin < end; p++) {
        int64_t from = begin > p->first_bag ? begin : p->first_bag,
                to = end < p->first_bag + p->bags ? end : p->first_bag + p->bags;
        for (int64_t b = from; b < to && p->n_parts > 0; b++)
            for (int64_t k = a->in.offsets[b]; k < a->in.offsets[b + 1]; k++) {
                int64_t id = ref_route_id(a->in.ids, k, a->in.ids_i32);
                int64_t key = peri_k_route_key(p, id);
                if (key < 0 || key >= p->rows) continue;
                int64_t *at = &a->cursor[a->in.wire_bag[p->first_strand + ref_route_part(p, a->in.bounds, key)] + b -
                                         p->first_bag];
                float x = a->factor * a->back[(*at)++];
                a->out[k] += x;
            }
    }
}

static void ref_route_combine(const void *args, int64_t begin, int64_t end)
{
    const peri_k_route_combine_args *a = args;
    for (int32_t o = 0; o < a->n_outputs; o++) {
        const peri_k_output *out = &a->outputs[o];
        for (int64_t b = begin; b < end; b++) {
            int64_t bag = out->inverse >= 0 ? a->inverse[out->inverse + b] : b;
            for (int64_t c = 0; c < out->cols; c++) {
                float sum = 0;
                for (int64_t k = 0; k < out->n_pieces; k++) {
                    const peri_k_piece *piece = &a->pieces[out->first_piece + k];
                    float x = (piece->own ? a->own : a->received)[piece->offset + bag * out->cols + c];
                    sum = k ? sum + x : x;
                }
                a->out[b * a->stride + out->column + c] = sum;
            }
        }
    }
}

/** The bags [begin, end) of the pieces of one output. */
static void ref_route_spread_one(const peri_k_route_spread_args *a, int64_t o, int64_t begin, int64_t end)
{
    const peri_k_output *out = &a->outputs[o];
    bool direct = out->inverse < 0;
    int64_t stop = direct ? a->rows : a->bags[o];
    end = end < stop ? end : stop;
    for (int64_t k = 0; k < out->n_pieces && begin < end; k++) {
        const peri_k_piece *piece = &a->pieces[out->first_piece + k];
        float *to = (piece->own ? a->own : a->sent) + piece->offset,
              divisor = (float)(piece->own ? out->divisor : out->sent_divisor);
        if (!direct) memset(to + begin * out->cols, 0, sizeof *to * (size_t)((end - begin) * out->cols));
        for (int64_t b = direct ? begin : 0; b < (direct ? end : a->rows); b++) {
            int64_t bag = direct ? b : a->inverse[out->inverse + b];
            if (bag < begin || bag >= end) continue;
            for (int64_t c = 0; c < out->cols; c++) {
                float g = a->grad[b * a->stride + out->column + c] / divisor;
                if (direct) to[bag * out->cols + c] = g;
                else to[bag * out->cols + c] += g;
            }
        }
    }
}

static void ref_route_spread(const void *args, int64_t begin, int64_t end)
{
    const peri_k_route_spread_args *a = args;
    for (int64_t o = 0; o < a->n_outputs; o++) ref_route_spread_one(a, o, begin, end);
}

/** The piece of id @k of an output, and where its row begins there; -1: it has none. */
static int64_t ref_route_row(const peri_k_route_rows_args *a, const peri_k_rows *out, int64_t k,
                             const peri_k_piece **piece)
{
    int32_t part = 0;
    int64_t place = k;
    if (out->place_first >= 0) {
        place = a->places[out->place_first + k];
        if (place < 0) return -1;
        const peri_k_partition *p = &a->in.partitions[out->partition];
        part = ref_route_part(p, a->in.bounds,
                              peri_k_route_key(p, ref_route_id(a->in.ids, out->first_id + k, a->in.ids_i32)));
    }
    *piece = &a->pieces[out->first_piece + part];
    return (*piece)->offset + place * out->cols;
}

static void ref_route_rows_move(const peri_k_route_rows_args *a, int64_t begin, int64_t end, bool back)
{
    for (int32_t o = 0; o < a->n_outputs; o++) {
        const peri_k_rows *out = &a->outputs[o];
        for (int64_t row = begin > out->row ? begin : out->row; row < end && row < out->row + out->ids; row++) {
            const peri_k_piece *piece = NULL;
            int64_t at = ref_route_row(a, out, row - out->row, &piece);
            float *values = a->values + row * a->stride + out->column;
            if (at >= 0 && out->place_first >= 0 && (piece->own ? a->placed : a->direct)) continue;
            for (int64_t c = 0; c < out->cols; c++) {
                float *there = at < 0 ? NULL : (piece->own ? a->own : a->received) + at + c;
                if (!back) values[c] = there ? *there : 0;
                else if (there) *there = values[c] / (float)(piece->own ? out->divisor : out->sent_divisor);
            }
        }
    }
}

static void ref_route_rows(const void *args, int64_t begin, int64_t end)
{
    ref_route_rows_move(args, begin, end, false);
}
static void ref_route_rows_back(const void *args, int64_t begin, int64_t end)
{
    ref_route_rows_move(args, begin, end, true);
}

/** The row of id @i of the input in a pool; NULL: it has none. */
static const float *ref_route_pooled(const peri_k_route_pool_args *a, const peri_k_pool *pool, int64_t i)
{
    const peri_k_piece *piece = NULL;
    const peri_k_partition *p = &a->rows.in.partitions[pool->rows.partition];
    int64_t key = peri_k_route_key(p, ref_route_id(a->rows.in.ids, i, a->rows.in.ids_i32));
    if (key < 0 || key >= p->rows) return NULL;
    int64_t at = ref_route_row(&a->rows, &pool->rows, i - pool->rows.first_id, &piece);
    return at < 0 ? NULL : (piece->own ? a->rows.own : a->rows.received) + at;
}

static float ref_route_factor(const peri_k_pool *pool, int64_t length)
{
    return pool->mean && length > 0 ? 1.0f / (float)length : 1.0f;
}

static void ref_route_pool(const void *args, int64_t begin, int64_t end)
{
    const peri_k_route_pool_args *a = args;
    for (const peri_k_pool *pool = a->pools; pool < a->pools + a->n_pools; pool++)
        for (int64_t b = begin; b < end; b++) {
            int64_t bag = pool->first_bag + (pool->inverse >= 0 ? a->inverse[pool->inverse + b] : b);
            int64_t from = a->rows.in.offsets[bag], to = a->rows.in.offsets[bag + 1];
            float *out = a->rows.values + b * a->rows.stride + pool->rows.column,
                  factor = ref_route_factor(pool, to - from);
            for (int64_t c = 0; c < pool->rows.cols; c++) out[c] = 0;
            for (int64_t i = from; i < to; i++) {
                const float *row = ref_route_pooled(a, pool, i);
                for (int64_t c = 0; row && c < pool->rows.cols; c++)
                    out[c] = fmaf(a->weights ? a->weights[i] : 1, row[c], out[c]);
            }
            for (int64_t c = 0; c < pool->rows.cols; c++) out[c] *= factor;
        }
}

/** sum16 of the gradient of bag @bag times the row of id @i, over the blocks from @pool to the last of its table;
 *  *@any: it has a row. */
static float ref_route_pool_dot(const peri_k_route_pool_args *a, const peri_k_pool *pool, int64_t bag, int64_t i,
                                bool *any)
{
    float s[16] = {0};
    *any = false;
    for (bool last = false; !last; last = pool++->last) {
        const float *row = ref_route_pooled(a, pool, i), *grad = a->grad + pool->grad + bag * pool->grad_stride;
        *any = *any || row;
        for (int64_t c = 0; row && c < pool->rows.cols; c++)
            s[(pool->from + c) % 16] = fmaf(grad[c], row[c], s[(pool->from + c) % 16]);
    }
    for (int h = 8; h > 0; h /= 2)
        for (int l = 0; l < h; l++) s[l] += s[l + h];
    return s[0];
}

static void ref_route_pool_weights(const void *args, int64_t begin, int64_t end)
{
    const peri_k_route_pool_args *a = args;
    for (const peri_k_pool *pool = a->pools; pool < a->pools + a->n_pools; pool++)
        for (int64_t bag = begin; pool->from == 0 && bag < end && bag < pool->bags; bag++) {
            int64_t from = a->rows.in.offsets[pool->first_bag + bag],
                    to = a->rows.in.offsets[pool->first_bag + bag + 1];
            for (int64_t i = from; i < to; i++) {
                bool any;
                float dot = ref_route_pool_dot(a, pool, bag, i, &any);
                if (any) a->grad_weights[i] += dot * ref_route_factor(pool, to - from);
            }
        }
}

static void ref_route_place(const void *args, int64_t begin, int64_t end)
{
    const peri_k_route_place_args *a = args;
    int64_t lines = a->lines > 0 ? a->lines : 1;
    for (int64_t i = begin; i < end; i++) {
        const peri_k_run *r = &a->runs[i / lines];
        int64_t k = i % lines;
        int64_t at = r->from + k * (a->from_step ? a->from_step : r->n), to = r->to + k * (a->step ? a->step : r->n);
        const char *from = (const char *)(r->own ? a->own : a->received) + at * a->width;
        if (r->n > 0) memcpy((char *)a->dst + to * a->width, from, (size_t)(r->n * a->width));
    }
}

static void ref_route_lines(const void *args, int64_t begin, int64_t end)
{
    const peri_k_route_lines_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        float *apart = a->values + (a->index ? a->index[i] : i) * a->stride, *together = a->together + i * a->cols;
        for (int64_t c = 0; c < a->cols; c++) {
            if (a->back) together[c] = apart[c] / (float)a->divisor;
            else apart[c] = together[c];
        }
    }
}
