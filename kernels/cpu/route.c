/* SPDX-License-Identifier: Apache-2.0
 *
 * route.c (cpu): see kernels/route.h. The common shapes have loops of their own: a partition of one part (ids pass
 * through a range check), a part found by one division of even blocks, rows of one piece copied.
 */

/** Loops for a number of columns that is a constant. */
#define ROUTE_INLINE static inline __attribute__((always_inline))

static inline int64_t cpu_route_id(const void *ids, int64_t i, bool i32) { return ref_route_id(ids, i, i32); }

/** Which part has row (or bucket) @id: a guess by even blocks put right by the boundaries, or a binary search. */
static inline int32_t cpu_route_part(const peri_k_partition *p, const int64_t *bounds, double inverse_block, int64_t id)
{
    const int64_t *b = bounds + p->first_bound;
    if (p->n_parts == 2) return id >= b[1];
    if (p->block > 0) {
        int32_t part = (int32_t)((double)id * inverse_block);
        if (part >= p->n_parts) part = p->n_parts - 1;
        while (id < b[part]) part--;
        while (part + 1 < p->n_parts && id >= b[part + 1]) part++;
        return part;
    }
    int32_t low = 0, high = p->n_parts - 1;
    while (low < high) {
        int32_t middle = (low + high + 1) / 2;
        if (b[middle] <= id) low = middle;
        else high = middle - 1;
    }
    return low;
}

/** Number of ids of [from, to) that are -1, if all others are in [0, rows); -1 if one is not. Raw ids: 0 if all are
 *  legal; else -1 (or nobody looked). */
static int64_t cpu_route_pruned(const peri_k_partition *p, const void *ids, bool i32, int64_t from, int64_t to)
{
    int64_t pruned = 0;
    uint64_t limit = (uint64_t)p->rows, bad = 0;
    if (p->raw) return p->raw - 1 == PERI_K_SPREAD_RANGE ? -1 : 0;
    if (i32) {
        const int32_t *x = ids;
        for (int64_t k = from; k < to; k++) {
            uint64_t shifted = (uint64_t)((int64_t)x[k] + 1); /* 0 for -1 */
            bad |= shifted > limit;
            pruned += shifted == 0;
        }
    } else {
        const int64_t *x = ids;
        for (int64_t k = from; k < to; k++) {
            uint64_t shifted = (uint64_t)x[k] + 1;
            bad |= shifted > limit;
            pruned += shifted == 0;
        }
    }
    return bad ? -1 : pruned;
}

enum { ROUTE_CHUNK = 512, ROUTE_PARTS = 32 }; /* ids whose parts are found together; parts for which that is done */

/** Whether the parts of ids are found by comparing many of them with one boundary after the other, instead of one by
 *  one. */
static inline bool cpu_route_many(const peri_k_partition *p)
{
    return p->n_parts > 1 && p->n_parts <= ROUTE_PARTS && !p->raw;
}

/** parts[k] = the part of id @from + k, n_parts for one that has none; x[k] = that id. */
static void cpu_route_parts(const peri_k_partition *p, const int64_t *bounds, const void *ids, bool i32, int64_t from,
                            int64_t n, int64_t *x, int64_t *parts)
{
    const int64_t *b = bounds + p->first_bound;
    if (i32)
        for (int64_t k = 0; k < n; k++) x[k] = ((const int32_t *)ids)[from + k];
    else
        for (int64_t k = 0; k < n; k++) x[k] = ((const int64_t *)ids)[from + k];
    for (int64_t k = 0; k < n; k++) parts[k] = x[k] >= b[1];
    for (int32_t j = 2; j < p->n_parts; j++)
        for (int64_t k = 0; k < n; k++) parts[k] += x[k] >= b[j];
    for (int64_t k = 0; k < n; k++) parts[k] = (uint64_t)x[k] < (uint64_t)p->rows ? parts[k] : p->n_parts;
}

/** Report the ids of range index @i that are not legal. */
static void cpu_route_report(const peri_k_route_count_args *a, const peri_k_partition *p, int64_t block, int64_t i,
                             int64_t from, int64_t to)
{
    peri_k_route_report *report = &a->reports[block * PERI_ROUTE_REPORTS + p->check];
    for (int64_t at = from; at < to && p->check < PERI_ROUTE_REPORTS; at++) {
        const int64_t id = cpu_route_id(a->in.ids, at, a->in.ids_i32), key = peri_k_route_key(p, id);
        if (key >= -1 && key < p->rows) continue;
        report->bad++;
        if (!report->where) report->where = i + 1, report->id = id, report->position = at - from;
    }
}

/** Bags [bag, bag + n) of a partition, @offsets being theirs, from range index @i on. */
static void cpu_route_count_many(const peri_k_route_count_args *a, const peri_k_partition *p, int64_t block, int64_t i,
                                 int64_t bag, int64_t n, const int64_t *offsets)
{
    const int64_t *wire = a->in.wire_bag + p->first_strand;
    int64_t x[ROUTE_CHUNK], parts[ROUTE_CHUNK], k = 0;
    int32_t counts[ROUTE_PARTS + 1] = {0};
    for (int64_t at = offsets[0], many; k < n; at += many) {
        many = offsets[n] - at < ROUTE_CHUNK ? offsets[n] - at : ROUTE_CHUNK;
        cpu_route_parts(p, a->in.bounds, a->in.ids, a->in.ids_i32, at, many, x, parts);
        for (int64_t here = at; k < n; k++) {
            const int64_t stop = offsets[k + 1] < at + many ? offsets[k + 1] : at + many;
            for (; here < stop; here++) counts[parts[here - at]]++;
            if (offsets[k + 1] > at + many) break; /* goes on in the next chunk */
            for (int32_t s = 0; s < p->n_parts; s++) a->lengths[wire[s] + bag + k] = counts[s];
            if (counts[p->n_parts]) cpu_route_report(a, p, block, i + k, offsets[k], offsets[k + 1]);
            memset(counts, 0, sizeof *counts * (size_t)(p->n_parts + 1));
        }
    }
}

static void cpu_route_count(const void *args, int64_t begin, int64_t end)
{
    const peri_k_route_count_args *a = args;
    for (int64_t block = begin; block < end; block++) {
        int64_t i = block * PERI_ROUTE_BLOCK,
                stop = i + PERI_ROUTE_BLOCK < a->in.bags ? i + PERI_ROUTE_BLOCK : a->in.bags;
        while (i < stop) {
            const peri_k_partition *p = peri_k_route_find(a->in.partitions, a->in.n_partitions, i);
            int64_t bag = i - p->bag_start, n = p->bags - bag < stop - i ? p->bags - bag : stop - i;
            const int64_t *offsets = a->in.offsets + p->first_bag + bag;
            int64_t pruned =
                p->n_parts <= 1 ? cpu_route_pruned(p, a->in.ids, a->in.ids_i32, offsets[0], offsets[n]) : -1;
            if (pruned == 0) { /* every id goes to the one strand */
                int32_t *lengths = p->n_parts ? a->lengths + a->in.wire_bag[p->first_strand] + bag : NULL;
                for (int64_t k = 0; k < n && lengths; k++) lengths[k] = (int32_t)(offsets[k + 1] - offsets[k]);
                i += n;
                continue;
            }
            if (cpu_route_many(p)) {
                cpu_route_count_many(a, p, block, i, bag, n, offsets);
                i += n;
                continue;
            }
            double inverse_block = p->block > 0 ? 1.0 / (double)p->block : 0;
            const int64_t *wire = a->in.wire_bag + p->first_strand;
            for (int32_t s = 0; s < p->n_parts; s++)
                memset(a->lengths + wire[s] + bag, 0, sizeof *a->lengths * (size_t)n);
            for (int64_t k = 0; k < n; k++, i++)
                for (int64_t at = offsets[k]; at < offsets[k + 1]; at++) {
                    const int64_t id = cpu_route_id(a->in.ids, at, a->in.ids_i32), key = peri_k_route_key(p, id);
                    if (key < -1 || key >= p->rows) {
                        if (p->check >= PERI_ROUTE_REPORTS) continue;
                        peri_k_route_report *report = &a->reports[block * PERI_ROUTE_REPORTS + p->check];
                        report->bad++;
                        if (!report->where) report->where = i + 1, report->id = id, report->position = at - offsets[k];
                        continue;
                    }
                    if (key >= 0 && p->n_parts > 0)
                        a->lengths[wire[cpu_route_part(p, a->in.bounds, inverse_block, key)] + bag + k]++;
                }
        }
    }
}

static inline void cpu_route_put(const peri_k_route_pack_args *a, int64_t place, int64_t local, int64_t k)
{
    if (a->out_i32) ((int32_t *)a->out)[place] = (int32_t)local;
    else ((int64_t *)a->out)[place] = local;
    if (a->weights) a->out_weights[place] = a->weights[k];
}

/** Ids of bags [bag, bag + n) that several strands share: which one is a coin's toss, so nothing branches on it. The
 *  bags of a strand follow each other on the wire. */
static void cpu_route_pack_many(const peri_k_route_pack_args *a, const peri_k_partition *p, const int64_t *offsets,
                                int64_t bag, int64_t n, int64_t *kept)
{
    const int64_t *wire = a->in.wire_bag + p->first_strand, *b = a->in.bounds + p->first_bound,
                  first = a->in.offsets[p->first_bag];
    int64_t x[ROUTE_CHUNK], parts[ROUTE_CHUNK], cursor[ROUTE_PARTS + 1];
    int32_t *origins = a->origins;
    for (int32_t s = 0; s < p->n_parts; s++) cursor[s] = a->cursor[wire[s] + bag];
    for (int64_t at = offsets[0], many; at < offsets[n]; at += many) {
        many = offsets[n] - at < ROUTE_CHUNK ? offsets[n] - at : ROUTE_CHUNK;
        cpu_route_parts(p, a->in.bounds, a->in.ids, a->in.ids_i32, at, many, x, parts);
        for (int64_t k = 0; k < many; k++) {
            const int64_t s = parts[k], place = s < p->n_parts ? cursor[s]++ : -1;
            if (kept) kept[at + k] = place;
            if (place < 0) continue;
            if (origins) origins[place] = (int32_t)(at + k - first);
            cpu_route_put(a, place, x[k] - b[s], at + k);
        }
    }
}

static void cpu_route_pack(const void *args, int64_t begin, int64_t end)
{
    const peri_k_route_pack_args *a = args;
    for (int64_t i = begin; i < end;) {
        const peri_k_partition *p = peri_k_route_find(a->in.partitions, a->in.n_partitions, i);
        int64_t bag = i - p->bag_start, n = p->bags - bag < end - i ? p->bags - bag : end - i;
        const int64_t *offsets = a->in.offsets + p->first_bag + bag, *wire = a->in.wire_bag + p->first_strand;
        if (p->n_parts == 0) {
            i += n;
            continue;
        }
        int64_t *kept =
            a->places ? a->places + a->place_first[p - a->in.partitions] - a->in.offsets[p->first_bag] : NULL;
        if (p->n_parts == 1 && cpu_route_pruned(p, a->in.ids, a->in.ids_i32, offsets[0], offsets[n]) == 0) {
            /* The bags of one strand follow each other on the wire as they do here. */
            int64_t from = offsets[0], count = offsets[n] - from, place = a->cursor[wire[0] + bag];
            if (!a->in.ids_i32 && a->out_i32) {
                const int64_t *ids = (const int64_t *)a->in.ids + from;
                int32_t *out = (int32_t *)a->out + place;
                for (int64_t k = 0; k < count; k++) out[k] = (int32_t)ids[k];
            } else {
                for (int64_t k = 0; k < count; k++) {
                    int64_t id = cpu_route_id(a->in.ids, from + k, a->in.ids_i32);
                    if (a->out_i32) ((int32_t *)a->out)[place + k] = (int32_t)id;
                    else ((int64_t *)a->out)[place + k] = id;
                }
            }
            if (a->weights && count)
                memcpy(a->out_weights + place, a->weights + from, sizeof *a->weights * (size_t)count);
            for (int64_t k = 0; k < count && kept; k++) kept[from + k] = place + k;
            for (int64_t k = 0; k < count && a->origins; k++)
                a->origins[place + k] = (int32_t)(from - a->in.offsets[p->first_bag] + k);
        } else if (cpu_route_many(p)) {
            cpu_route_pack_many(a, p, offsets, bag, n, kept);
        } else {
            double inverse_block = p->block > 0 ? 1.0 / (double)p->block : 0;
            for (int64_t k = 0; k < n; k++)
                for (int64_t at = offsets[k]; at < offsets[k + 1]; at++) {
                    const int64_t id = cpu_route_id(a->in.ids, at, a->in.ids_i32), key = peri_k_route_key(p, id);
                    if (kept) kept[at] = -1;
                    if (key < 0 || key >= p->rows) continue;
                    int32_t part = p->n_parts == 1 ? 0 : cpu_route_part(p, a->in.bounds, inverse_block, key);
                    int64_t place = a->cursor[wire[part] + bag + k]++;
                    if (kept) kept[at] = place;
                    if (a->origins) a->origins[place] = (int32_t)(at - a->in.offsets[p->first_bag]);
                    cpu_route_put(a, place, p->raw ? id : id - a->in.bounds[p->first_bound + part], at);
                }
        }
        i += n;
    }
}

static void cpu_route_return(const void *args, int64_t begin, int64_t end)
{
    const peri_k_route_return_args *a = args;
    for (const peri_k_partition *p = a->in.partitions; p < a->in.partitions + a->in.n_partitions && begin < end; p++) {
        int64_t from = begin > p->first_bag ? begin : p->first_bag,
                to = end < p->first_bag + p->bags ? end : p->first_bag + p->bags;
        double inverse_block = p->block > 0 ? 1.0 / (double)p->block : 0;
        for (int64_t b = from; b < to && p->n_parts > 0; b++)
            for (int64_t k = a->in.offsets[b]; k < a->in.offsets[b + 1]; k++) {
                const int64_t key = peri_k_route_key(p, cpu_route_id(a->in.ids, k, a->in.ids_i32));
                if (key < 0 || key >= p->rows) continue;
                int32_t part = p->n_parts == 1 ? 0 : cpu_route_part(p, a->in.bounds, inverse_block, key);
                int64_t *at = &a->cursor[a->in.wire_bag[p->first_strand + part] + b - p->first_bag];
                float x = a->factor * a->back[(*at)++];
                a->out[k] += x;
            }
    }
}

/* A vector is stored past the caches, to an address that it fills a whole number of times. */
#ifdef __AVX512F__
static inline void cpu_route_stream(float *p, k_vec v) { _mm512_stream_ps(p, (__m512)v); }
#else
static inline void cpu_route_stream(float *p, k_vec v) { _mm256_stream_ps(p, (__m256)v); }
#endif

/** Whether rows begin and end where lines do. */
static inline bool cpu_route_whole_lines(const float *first, int64_t stride, int64_t cols)
{
    enum { LINE = 16 };
    return (uintptr_t)first % (LINE * sizeof *first) == 0 && stride % LINE == 0 && cols % LINE == 0;
}

/** Ask for a row that is read in a while. */
static inline void cpu_route_ask(const float *row, int64_t cols)
{
    for (int64_t c = 0; c < cols; c += 16) _mm_prefetch((const char *)(row + c), _MM_HINT_T1);
}

enum { ROUTE_ROWS = 16 }; /* of each output in turn */

/** Rows [b, stop) of an output, of [b, end). The same rows of all others come before its next ones, which are asked for
 *  meanwhile: hardware does not guess as many streams. */
ROUTE_INLINE void cpu_route_combine_rows(const peri_k_route_combine_args *a, const peri_k_output *out, int64_t b,
                                         int64_t stop, int64_t end, const int64_t cols, const bool streams)
{
    const peri_k_piece *pieces = a->pieces + out->first_piece;
    for (; b < stop; b++) {
        const int64_t bag = out->inverse >= 0 ? a->inverse[out->inverse + b] : b;
        float *to = a->out + b * a->stride + out->column;
        const float *from = (pieces[0].own ? a->own : a->received) + pieces[0].offset + bag * cols;
        if (b + ROUTE_ROWS < end) {
            const int64_t next = out->inverse >= 0 ? a->inverse[out->inverse + b + ROUTE_ROWS] : b + ROUTE_ROWS;
            for (int32_t k = 0; k < out->n_pieces; k++)
                cpu_route_ask((pieces[k].own ? a->own : a->received) + pieces[k].offset + next * cols, cols);
        }
        for (int64_t c = 0; c < cols; c += K_LANES) {
            const int64_t left = cols - c;
            k_vec sum = left >= K_LANES ? k_load(from + c) : k_load_part(from + c, left);
            for (int64_t k = 1; k < out->n_pieces; k++) {
                const float *more = (pieces[k].own ? a->own : a->received) + pieces[k].offset + bag * cols + c;
                sum += left >= K_LANES ? k_load(more) : k_load_part(more, left);
            }
            if (streams) cpu_route_stream(to + c, sum);
            else if (left >= K_LANES) k_store(to + c, sum);
            else k_store_part(to + c, sum, left);
        }
    }
}

/** A few rows of all outputs at a time: rows are written as they lie, and their pages once. */
static void cpu_route_combine(const void *args, int64_t begin, int64_t end)
{
    const peri_k_route_combine_args *a = args;
    for (int64_t b = begin; b < end; b += ROUTE_ROWS)
        for (int32_t o = 0; o < a->n_outputs; o++) {
            const peri_k_output *out = &a->outputs[o];
            const int64_t stop = b + ROUTE_ROWS < end ? b + ROUTE_ROWS : end, cols = out->cols;
            const bool streams = a->past && cpu_route_whole_lines(a->out + out->column, a->stride, cols);
#define ROUTE_COMBINE(n)                                                                                               \
    if (streams) cpu_route_combine_rows(a, out, b, stop, end, n, true);                                                \
    else cpu_route_combine_rows(a, out, b, stop, end, n, false)
            switch (cols) {
            case 16: ROUTE_COMBINE(16); break;
            case 32: ROUTE_COMBINE(32); break;
            case 64: ROUTE_COMBINE(64); break;
            case 128: ROUTE_COMBINE(128); break;
            default: ROUTE_COMBINE(cols);
            }
#undef ROUTE_COMBINE
        }
    if (a->past) _mm_sfence();
}

/** What gradients are divided by. Those of a power of two are multiplied by its inverse instead: the bits are the
 *  same. */
typedef struct route_divisor {
    k_vec by;
    float divisor;
    bool multiplies;
} route_divisor;

static inline route_divisor cpu_route_divisor(double divisor)
{
    const float d = (float)divisor;
    int exponent;
    const bool multiplies = frexpf(d, &exponent) == 0.5f && exponent > -100 && exponent < 100;
    return (route_divisor){k_set(multiplies ? 1 / d : d), d, multiplies};
}

ROUTE_INLINE void cpu_route_divide(float *restrict to, const float *restrict from, const int64_t cols,
                                   const route_divisor *d)
{
    int64_t c = 0;
    if (d->multiplies)
        for (; c + K_LANES <= cols; c += K_LANES) k_store(to + c, k_load(from + c) * d->by);
    for (; c + K_LANES <= cols; c += K_LANES) k_store(to + c, k_load(from + c) / d->by);
    if (c < cols) k_store_part(to + c, k_load_part(from + c, cols - c) / k_set(d->divisor), cols - c);
}

/** A row past the caches, times @by: lines are not read first only to be written. @to: whole lines. */
ROUTE_INLINE void cpu_route_past(float *restrict to, const float *restrict from, int64_t cols, k_vec by)
{
    for (int64_t c = 0; c < cols; c += K_LANES) cpu_route_stream(to + c, k_load(from + c) * by);
}

ROUTE_INLINE void cpu_route_spread_rows(const route_divisor *d, float *to, const float *grad, int64_t stride, int64_t n,
                                        int64_t more, const int64_t cols, const bool streams)
{
    for (int64_t i = 0; i < n; i++, to += cols, grad += stride) {
        if (i < more) cpu_route_ask(grad + ROUTE_ROWS * stride, cols);
        if (streams) cpu_route_past(to, grad, cols, d->by);
        else cpu_route_divide(to, grad, cols, d);
    }
}

/** Rows [begin, end) of an output's gradient, of [begin, last), divided, to one piece. */
static inline void cpu_route_spread_piece(const peri_k_route_spread_args *a, const peri_k_output *out,
                                          const peri_k_piece *piece, int64_t begin, int64_t end, int64_t last)
{
    const route_divisor d = cpu_route_divisor(piece->own ? out->divisor : out->sent_divisor);
    const int64_t more = last - begin - ROUTE_ROWS; /* rows that others follow which will be read */
    float *to = (piece->own ? a->own : a->sent) + piece->offset + begin * out->cols;
    const float *grad = a->grad + begin * a->stride + out->column;
    const bool streams = a->past && d.multiplies && cpu_route_whole_lines(to, out->cols, out->cols);
#define ROUTE_SPREAD(n)                                                                                                \
    if (streams) cpu_route_spread_rows(&d, to, grad, a->stride, end - begin, more, n, true);                           \
    else cpu_route_spread_rows(&d, to, grad, a->stride, end - begin, more, n, false)
    switch (out->cols) {
    case 16: ROUTE_SPREAD(16); break;
    case 32: ROUTE_SPREAD(32); break;
    case 64: ROUTE_SPREAD(64); break;
    case 128: ROUTE_SPREAD(128); break;
    default: ROUTE_SPREAD(out->cols);
    }
#undef ROUTE_SPREAD
}

/** to += from / divisor. */
ROUTE_INLINE void cpu_route_add_divided(float *restrict to, const float *restrict from, const int64_t cols,
                                        const route_divisor *d)
{
    int64_t c = 0;
    if (d->multiplies)
        for (; c + K_LANES <= cols; c += K_LANES) k_store(to + c, k_load(to + c) + k_load(from + c) * d->by);
    for (; c + K_LANES <= cols; c += K_LANES) k_store(to + c, k_load(to + c) + k_load(from + c) / d->by);
    if (c < cols)
        k_store_part(to + c, k_load_part(to + c, cols - c) + k_load_part(from + c, cols - c) / k_set(d->divisor),
                     cols - c);
}

/** Add each of @n rows of a gradient, divided, to the bag that @inverse names for it; bags outside [begin, end) belong
 *  to other threads. The first @more rows also ask for the memory of the row that is ROUTE_ROWS behind them. */
ROUTE_INLINE void cpu_route_spread_inverse(const route_divisor *d, float *to, const float *grad, int64_t stride,
                                           const int64_t *inverse, int64_t n, int64_t more, int64_t begin, int64_t end,
                                           const int64_t cols)
{
    for (int64_t i = 0; i < n; i++, grad += stride) {
        const int64_t bag = inverse[i];
        if (i < more) {
            cpu_route_ask(grad + ROUTE_ROWS * stride, cols);
            cpu_route_ask(to + inverse[i + ROUTE_ROWS] * cols, cols);
        }
        if (bag >= begin && bag < end) cpu_route_add_divided(to + bag * cols, grad, cols, d);
    }
}

/** Bags [begin, end) of a piece of an output with an inverse: add what rows [b, stop) of its gradient have for them, of
 *  [b, last). */
static inline void cpu_route_spread_sums(const peri_k_route_spread_args *a, const peri_k_output *out,
                                         const peri_k_piece *piece, int64_t begin, int64_t end, int64_t b, int64_t stop,
                                         int64_t last)
{
    const route_divisor d = cpu_route_divisor(piece->own ? out->divisor : out->sent_divisor);
    float *to = (piece->own ? a->own : a->sent) + piece->offset;
    const float *grad = a->grad + b * a->stride + out->column;
    const int64_t *inverse = a->inverse + out->inverse + b, more = last - b - ROUTE_ROWS;
#define ROUTE_SUMS(n) cpu_route_spread_inverse(&d, to, grad, a->stride, inverse, stop - b, more, begin, end, n)
    switch (out->cols) {
    case 16: ROUTE_SUMS(16); break;
    case 32: ROUTE_SUMS(32); break;
    case 64: ROUTE_SUMS(64); break;
    case 128: ROUTE_SUMS(128); break;
    default: ROUTE_SUMS(out->cols);
    }
#undef ROUTE_SUMS
}

/** Sums begin with zeros. Returns whether there are any. */
static bool cpu_route_spread_zeros(const peri_k_route_spread_args *a, int64_t begin, int64_t end)
{
    bool any = false;
    for (int32_t o = 0; o < a->n_outputs; o++) {
        const peri_k_output *out = &a->outputs[o];
        const int64_t stop = end < a->bags[o] ? end : a->bags[o];
        if (out->inverse < 0) continue;
        any = true;
        for (const peri_k_piece *k = a->pieces + out->first_piece;
             k < a->pieces + out->first_piece + out->n_pieces && begin < stop; k++) {
            float *to = (k->own ? a->own : a->sent) + k->offset;
            memset(to + begin * out->cols, 0, sizeof *to * (size_t)((stop - begin) * out->cols));
        }
    }
    return any;
}

/** A few rows of all outputs at a time: rows of the gradient are read as they lie, and their pages once. */
static void cpu_route_spread(const void *args, int64_t begin, int64_t end)
{
    const peri_k_route_spread_args *a = args;
    const bool sums = cpu_route_spread_zeros(a, begin, end);
    for (int64_t b = sums ? 0 : begin, last = sums || end > a->rows ? a->rows : end; b < last; b += ROUTE_ROWS)
        for (int32_t o = 0; o < a->n_outputs; o++) {
            const peri_k_output *out = &a->outputs[o];
            const peri_k_piece *pieces = a->pieces + out->first_piece;
            const int64_t from = b < begin ? begin : b, stop = b + ROUTE_ROWS < last ? b + ROUTE_ROWS : last,
                          to = stop < end ? stop : end;
            for (int64_t k = 0; k < out->n_pieces; k++) {
                if (out->inverse >= 0)
                    cpu_route_spread_sums(a, out, &pieces[k], begin, end < a->bags[o] ? end : a->bags[o], b, stop,
                                          last);
                else if (from < to) cpu_route_spread_piece(a, out, &pieces[k], from, to, last < end ? last : end);
            }
        }
    if (a->past) _mm_sfence();
}

/** Where the row of id @k of an output lies; NULL: it is in no strand. */
static inline float *cpu_route_row(const peri_k_route_rows_args *a, const peri_k_rows *out, double inverse_block,
                                   int64_t k, bool *own)
{
    const peri_k_piece *piece = a->pieces + out->first_piece;
    if (out->place_first >= 0) {
        const peri_k_partition *p = &a->in.partitions[out->partition];
        int64_t place = a->places[out->place_first + k];
        if (place < 0) return NULL;
        if (p->n_parts > 1) {
            int64_t key = peri_k_route_key(p, ref_route_id(a->in.ids, out->first_id + k, a->in.ids_i32));
            piece += cpu_route_part(p, a->in.bounds, inverse_block, key);
        }
        k = place;
    }
    *own = piece->own;
    return (piece->own ? a->own : a->received) + piece->offset + k * out->cols;
}

/** How rows are moved: what they are multiplied by, or divided by; past the caches. */
typedef struct route_mover {
    route_divisor d;
    bool copies, past; /* copies: the divisor is 1 */
} route_mover;

static inline route_mover cpu_route_mover_of(double divisor, int64_t cols, bool past)
{
    enum { LINE = 64 }; /* bytes: parts of lines are slower past the caches */
    const route_divisor d = cpu_route_divisor(divisor);
    return (route_mover){d, d.divisor == 1, past && (size_t)cols * sizeof(float) % LINE == 0 && d.multiplies};
}

static inline route_mover cpu_route_mover(const peri_k_route_rows_args *a, const peri_k_rows *out, bool own, bool back)
{
    return cpu_route_mover_of(back ? own ? out->divisor : out->sent_divisor : 1, out->cols, a->past);
}

ROUTE_INLINE void cpu_route_move(const route_mover *m, float *restrict to, const float *restrict from,
                                 const int64_t cols)
{
    if (m->past && (uintptr_t)to % 64 == 0) cpu_route_past(to, from, cols, m->d.by);
    else if (m->copies) memcpy(to, from, sizeof *to * (size_t)cols);
    else cpu_route_divide(to, from, cols, &m->d);
}

/** Rows [begin, end) of one output, one by one. */
static inline void cpu_route_rows_any(const peri_k_route_rows_args *a, const peri_k_rows *out, int64_t begin,
                                      int64_t end, bool back)
{
    const int64_t block = out->place_first >= 0 ? a->in.partitions[out->partition].block : 0;
    const double inverse_block = block > 0 ? 1.0 / (double)block : 0;
    const route_mover mine = cpu_route_mover(a, out, true, back), sent = cpu_route_mover(a, out, false, back);
    for (int64_t row = begin; row < end; row++) {
        bool own = false;
        float *values = a->values + row * a->stride + out->column,
              *there = cpu_route_row(a, out, inverse_block, row - out->row, &own);
        if (there && out->place_first >= 0 && (own ? a->placed : a->direct)) continue;
        if (there) cpu_route_move(own ? &mine : &sent, back ? there : values, back ? values : there, out->cols);
        else if (!back) memset(values, 0, sizeof *values * (size_t)out->cols);
    }
}

/** Ask for the row that is read AHEAD rows from now: where a row has other columns too, it is not what hardware
 *  guesses. */
static inline void cpu_route_ahead(const float *row, int64_t cols)
{
    for (int64_t c = 0; c < cols; c += 16) _mm_prefetch((const char *)(row + c), _MM_HINT_T0);
}

enum { ROUTE_AHEAD = 16 };

/** @n rows that follow each other on both sides. */
ROUTE_INLINE void cpu_route_rows_together(const route_mover *m, float *values, int64_t stride, float *there,
                                          const int64_t cols, int64_t n, bool back)
{
    for (int64_t i = 0; i < n; i++, values += stride, there += cols) {
        if (back && stride != cols && i + ROUTE_AHEAD < n) cpu_route_ahead(values + ROUTE_AHEAD * stride, cols);
        cpu_route_move(m, back ? there : values, back ? values : there, cols);
    }
}

/** Rows of a piece at places [i, end), as they lie there. */
ROUTE_INLINE void cpu_route_rows_placed(const route_mover *m, float *values, int64_t stride, float *there,
                                        const int32_t *origins, const int64_t cols, int64_t i, int64_t end, bool back)
{
    for (; i < end; i++) {
        float *row = values + origins[i] * stride;
        const int64_t next = i + ROUTE_AHEAD;
        if (next < end) cpu_route_ahead(back ? values + origins[next] * stride : there + next * cols, cols);
        cpu_route_move(m, back ? there + i * cols : row, back ? row : there + i * cols, cols);
    }
}

/** The first place of [from, past) whose id is not before id @k of its feature. */
static int64_t cpu_route_place_of(const int32_t *origins, int64_t from, int64_t past, int64_t k)
{
    while (from < past) {
        int64_t middle = from + (past - from) / 2;
        if (origins[middle] < k) from = middle + 1;
        else past = middle;
    }
    return from;
}

/** Rows of ids [begin, end) of an output that one of its pieces has. */
static void cpu_route_rows_piece(const peri_k_route_rows_args *a, const peri_k_rows *out, const peri_k_piece *piece,
                                 int64_t begin, int64_t end, bool back)
{
    const route_mover m = cpu_route_mover(a, out, piece->own, back);
    float *values = a->values + out->row * a->stride + out->column,
          *there = (piece->own ? a->own : a->received) + piece->offset;
    if (out->place_first < 0 || out->all) {
        const int64_t place = out->all ? piece->first : 0, cols = out->cols;
        float *first = values + begin * a->stride, *with = there + (place + begin) * cols;
#define ROUTE_TOGETHER(n) cpu_route_rows_together(&m, first, a->stride, with, n, end - begin, back)
        if (cols == 32) ROUTE_TOGETHER(32);
        else if (cols == 64) ROUTE_TOGETHER(64);
        else if (cols == 128) ROUTE_TOGETHER(128);
        else ROUTE_TOGETHER(cols);
#undef ROUTE_TOGETHER
        return;
    }
    const int64_t past = piece->first + piece->n, from = cpu_route_place_of(a->origins, piece->first, past, begin);
    const int64_t to = cpu_route_place_of(a->origins, from, past, end), cols = out->cols;
#define ROUTE_PLACED(n) cpu_route_rows_placed(&m, values, a->stride, there, a->origins, n, from, to, back)
    if (cols == 32) ROUTE_PLACED(32);
    else if (cols == 64) ROUTE_PLACED(64);
    else if (cols == 128) ROUTE_PLACED(128);
    else ROUTE_PLACED(cols);
#undef ROUTE_PLACED
}

/** Zeros for ids [begin, end) of an output that are in no strand. */
static void cpu_route_rows_none(const peri_k_route_rows_args *a, const peri_k_rows *out, int64_t begin, int64_t end)
{
    const int64_t *places = a->places + out->place_first;
    for (int64_t k = begin; k < end; k++)
        if (places[k] < 0)
            memset(a->values + (out->row + k) * a->stride + out->column, 0, sizeof *a->values * (size_t)out->cols);
}

/** Rows [begin, end) of one output. */
static void cpu_route_rows_one(const peri_k_route_rows_args *a, const peri_k_rows *out, int64_t begin, int64_t end,
                               bool back)
{
    const peri_k_piece *pieces = a->pieces + out->first_piece;
    const int32_t n = out->place_first < 0 || out->all ? 1 : a->in.partitions[out->partition].n_parts;
    int64_t ids = 0;
    if (out->place_first >= 0 && !out->all && !a->origins) {
        cpu_route_rows_any(a, out, begin, end, back);
        return;
    }
    for (int32_t k = 0; k < n; k++) {
        ids += pieces[k].n;
        if (out->place_first >= 0 && (pieces[k].own ? a->placed : a->direct)) continue;
        cpu_route_rows_piece(a, out, &pieces[k], begin - out->row, end - out->row, back);
    }
    if (!back && ids < out->ids && out->place_first >= 0) cpu_route_rows_none(a, out, begin - out->row, end - out->row);
}

/** Blocks of columns of the same rows take turns, a few rows at a time: each line of the values is fetched once. */
static inline void cpu_route_rows_move(const peri_k_route_rows_args *a, int64_t begin, int64_t end, bool back)
{
    enum { ROWS = 128 };
    for (int32_t o = 0, past; o < a->n_outputs; o = past) {
        const peri_k_rows *out = &a->outputs[o];
        for (past = o + 1; past < a->n_outputs && a->outputs[past].row == out->row && a->outputs[past].ids == out->ids;
             past++) {
        }
        const int64_t first = begin > out->row ? begin : out->row,
                      stop = end < out->row + out->ids ? end : out->row + out->ids;
        const int64_t step = past == o + 1 ? stop - first : ROWS;
        for (int64_t row = first; row < stop; row += step)
            for (int32_t k = o; k < past; k++)
                cpu_route_rows_one(a, &a->outputs[k], row, row + step < stop ? row + step : stop, back);
    }
    if (a->past) _mm_sfence();
}

static void cpu_route_rows(const void *args, int64_t begin, int64_t end)
{
    cpu_route_rows_move(args, begin, end, false);
}
static void cpu_route_rows_back(const void *args, int64_t begin, int64_t end)
{
    cpu_route_rows_move(args, begin, end, true);
}

static void cpu_route_lines(const void *args, int64_t begin, int64_t end)
{
    const peri_k_route_lines_args *a = args;
    const route_mover m = cpu_route_mover_of(a->back ? a->divisor : 1, a->cols, a->past);
    float *values = a->values + (a->index ? 0 : begin * a->stride),
          *together = a->together + (a->index ? 0 : begin * a->cols);
#define ROUTE_LINES(n)                                                                                                 \
    if (a->index) cpu_route_rows_placed(&m, values, a->stride, together, a->index, n, begin, end, a->back);            \
    else cpu_route_rows_together(&m, values, a->stride, together, n, end - begin, a->back)
    switch (a->cols) {
    case 16: ROUTE_LINES(16); break;
    case 32: ROUTE_LINES(32); break;
    case 64: ROUTE_LINES(64); break;
    case 128: ROUTE_LINES(128); break;
    default: ROUTE_LINES(a->cols);
    }
#undef ROUTE_LINES
    if (m.past) _mm_sfence();
}

static void cpu_route_pool(const void *args, int64_t begin, int64_t end)
{
    const peri_k_route_pool_args *a = args;
    for (const peri_k_pool *pool = a->pools; pool < a->pools + a->n_pools; pool++) {
        const int64_t cols = pool->rows.cols, whole = cols / K_LANES * K_LANES;
        const peri_k_partition *p = &a->rows.in.partitions[pool->rows.partition];
        const double inverse_block = p->block > 0 ? 1.0 / (double)p->block : 0;
        for (int64_t b = begin; b < end; b++) {
            int64_t bag = pool->first_bag + (pool->inverse >= 0 ? a->inverse[pool->inverse + b] : b);
            int64_t from = a->rows.in.offsets[bag], to = a->rows.in.offsets[bag + 1];
            float *out = a->rows.values + b * a->rows.stride + pool->rows.column,
                  factor = ref_route_factor(pool, to - from);
            memset(out, 0, sizeof *out * (size_t)cols);
            for (int64_t i = from; i < to; i++) {
                bool own = false;
                int64_t key = peri_k_route_key(p, ref_route_id(a->rows.in.ids, i, a->rows.in.ids_i32));
                if (key < 0 || key >= p->rows) continue;
                const float *row = cpu_route_row(&a->rows, &pool->rows, inverse_block, i - pool->rows.first_id, &own);
                const k_vec w = k_set(a->weights ? a->weights[i] : 1);
                if (!row) continue;
                for (int64_t c = 0; c < whole; c += K_LANES)
                    k_store(out + c, k_fma(w, k_load(row + c), k_load(out + c)));
                if (whole < cols)
                    k_store_part(
                        out + whole,
                        k_fma(w, k_load_part(row + whole, cols - whole), k_load_part(out + whole, cols - whole)),
                        cols - whole);
            }
            for (int64_t c = 0; c < cols; c++) out[c] *= factor;
        }
    }
}

/** memcpy past the caches: what is written is larger than they are, and reading its lines first would be for
 *  nothing. */
static void cpu_copy_past(char *restrict to, const char *restrict from, int64_t bytes)
{
    enum { AHEAD = 2 << 10 }; /* the rows of a source follow each other: what comes next is often theirs too */
    int64_t head = (int64_t)(-(uintptr_t)to & 63);
    head = head < bytes ? head : bytes;
    memcpy(to, from, (size_t)head);
    int64_t i = head;
    for (; i + 64 <= bytes; i += 64) {
        _mm_prefetch(from + i + AHEAD, _MM_HINT_T0);
        for (int k = 0; k < 64; k += 32)
            _mm256_stream_si256((__m256i *)(to + i + k), _mm256_loadu_si256((const __m256i *)(from + i + k)));
    }
    memcpy(to + i, from + i, (size_t)(bytes - i));
}

/** memcpy of a line: for 1 to 4 KiB the call takes up to a tenth longer, for long ones it is as fast. */
static inline void cpu_copy_line(char *restrict to, const char *restrict from, int64_t bytes)
{
    enum { LONG = 16 << 10, VECTORS = 8 };
    int64_t i = 0;
    for (; bytes < LONG && i + 32 * VECTORS <= bytes; i += 32 * VECTORS) {
        __m256i v[VECTORS];
        for (int k = 0; k < VECTORS; k++) v[k] = _mm256_loadu_si256((const __m256i *)(from + i + 32 * k));
        for (int k = 0; k < VECTORS; k++) _mm256_storeu_si256((__m256i *)(to + i + 32 * k), v[k]);
    }
    if (i < bytes) memcpy(to + i, from + i, (size_t)(bytes - i));
}

static void cpu_route_place(const void *args, int64_t begin, int64_t end)
{
    enum { SHORT = 512 }; /* bytes of a line that is copied through the caches all the same */
    const peri_k_route_place_args *a = args;
    int64_t lines = a->lines > 0 ? a->lines : 1;
    for (int64_t i = begin, stop; i < end; i = stop) {
        const peri_k_run *r = &a->runs[i / lines];
        int64_t k = i % lines, bytes = r->n * a->width, step = a->step ? a->step * a->width : bytes;
        int64_t from_step = a->from_step ? a->from_step * a->width : bytes;
        const char *from = (const char *)(r->own ? a->own : a->received) + r->from * a->width + k * from_step;
        char *to = (char *)a->dst + r->to * a->width + k * step;
        stop = i + lines - k < end ? i + lines - k : end;
        if (a->past && bytes >= SHORT)
            for (int64_t n = stop - i; n > 0; n--, from += from_step, to += step) cpu_copy_past(to, from, bytes);
        else if (bytes > 0)
            for (int64_t n = stop - i; n > 0; n--, from += from_step, to += step) cpu_copy_line(to, from, bytes);
    }
    if (a->past) _mm_sfence();
}

#define K_CPU_ROUTE                                                                                                    \
    [PERI_K_route_count] = cpu_route_count, [PERI_K_route_pack] = cpu_route_pack,                                      \
    [PERI_K_route_return] = cpu_route_return, [PERI_K_route_combine] = cpu_route_combine,                              \
    [PERI_K_route_spread] = cpu_route_spread, [PERI_K_route_rows] = cpu_route_rows,                                    \
    [PERI_K_route_rows_back] = cpu_route_rows_back, [PERI_K_route_pool] = cpu_route_pool,                              \
    [PERI_K_route_pool_weights] = ref_route_pool_weights, [PERI_K_route_place] = cpu_route_place,                      \
    [PERI_K_route_lines] = cpu_route_lines,
