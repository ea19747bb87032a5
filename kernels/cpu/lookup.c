/* SPDX-License-Identifier: Apache-2.0
 *
 * lookup.c (cpu): see kernels/lookup.h. Kernels that are bound by memory at random places, or small, are ref's.
 */

/* -- ids of several tables ----------------------------------------------------------------------------------------- */

/** Ids [i, stop) of one bag of a table of @size rows from @start on; the first bad one, or INT64_MAX. */
static int64_t cpu_table_run(const peri_k_table_rows_args *a, int64_t i, int64_t stop, int64_t start, int64_t size)
{
    int64_t bad = INT64_MAX;
    bool whole = a->remap && size == 0;
    for (; i < stop; i++) {
        int64_t id = ref_int(a->ids, i, a->ids_dtype), out = -1;
        if (whole && id >= 0) out = id;
        else if ((uint64_t)id < (uint64_t)size)
            out = a->remap ? ref_int(a->remap, start + id, a->remap_dtype) : start + id;
        else if (!a->remap || id != -1) bad = ref_min(bad, i);
        ref_int_set(a->out, i, a->out_dtype, out);
    }
    return bad;
}

static void cpu_table_rows(const void *args, int64_t begin, int64_t end)
{
    const peri_k_table_rows_args *a = args;
    int64_t bags = a->tables * a->step, bag = -1;
    for (int64_t b = begin; b < end; b++) {
        int64_t i = b * PERI_JAGGED_BLOCK, stop = ref_min(a->n, i + PERI_JAGGED_BLOCK);
        a->bad[b] = INT64_MAX;
        if (i >= stop) continue;
        if (bag < 0) bag = ref_segment_of(a->offsets, a->offsets_dtype, 1, bags, i);
        while (i < stop) {
            while (ref_int(a->offsets, bag + 1, a->offsets_dtype) <= i) bag++;
            int64_t last = ref_min(stop, ref_int(a->offsets, bag + 1, a->offsets_dtype)), t = bag / a->step;
            int64_t start = ref_int(a->starts, t, a->starts_dtype),
                    size = ref_int(a->starts, t + 1, a->starts_dtype) - start;
            a->bad[b] = ref_min(a->bad[b], cpu_table_run(a, i, last, start, size));
            if (a->bag)
                for (int64_t k = i; k < last; k++) a->bag[k] = bag;
            i = last;
        }
    }
}

/* -- rows of several matrices -------------------------------------------------------------------------------------- */

/** As ref_select_matrix, by halving. */
static const int64_t *cpu_select_matrix(const peri_k_batch_select_args *a, int word, int64_t x)
{
    int64_t low = 0, high = a->matrices;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (a->table[middle * PERI_SELECT_WORDS + word] <= x) low = middle;
        else high = middle;
    }
    return a->table + low * PERI_SELECT_WORDS;
}

static void cpu_batch_select(const void *args, int64_t begin, int64_t end)
{
    enum { AHEAD = 8 };
    const peri_k_batch_select_args *a = args;
    for (int64_t k = begin; k < end;) {
        const int64_t *m = cpu_select_matrix(a, PERI_SELECT_PLACE, k);
        int64_t last = ref_min(end, m[PERI_SELECT_WORDS + PERI_SELECT_PLACE]),
                width = m[PERI_SELECT_COLUMNS] * a->element;
        const char *from = a->matrix + m[PERI_SELECT_FROM] * a->element;
        for (; k < last; k++) {
            if (k + AHEAD < last) __builtin_prefetch(from + (a->rows[k + AHEAD] - m[PERI_SELECT_ROW]) * width);
            cpu_move(a->result + ref_select_to(a, m, k) * a->element, from + (a->rows[k] - m[PERI_SELECT_ROW]) * width,
                     width);
        }
    }
}

/** dst[0..n) = the sum of the rows of the result that list @j..@stop names. */
#define CPU_SELECT_SUM(name, X)                                                                                        \
    static void name(const peri_k_batch_select_args *a, X *restrict dst, int64_t n, int64_t j, int64_t stop)           \
    {                                                                                                                  \
        for (int64_t first = j; j < stop; j++) {                                                                       \
            const int64_t k = a->list[j], *m = cpu_select_matrix(a, PERI_SELECT_PLACE, k);                             \
            const X *restrict src = (const X *)(const void *)a->result + ref_select_to(a, m, k);                       \
            if (j == first) memcpy(dst, src, sizeof *dst *(size_t)n);                                                  \
            else                                                                                                       \
                for (int64_t c = 0; c < n; c++) dst[c] += src[c];                                                      \
        }                                                                                                              \
    }
CPU_SELECT_SUM(cpu_select_sum_f32, float)
CPU_SELECT_SUM(cpu_select_sum_f64, double)

static void cpu_batch_select_sum(const void *args, int64_t begin, int64_t end)
{
    const peri_k_batch_select_args *a = args;
    for (int64_t r = begin; r < end; r++) {
        const int64_t *m = cpu_select_matrix(a, PERI_SELECT_ROW, r);
        int64_t at = m[PERI_SELECT_FROM] + (r - m[PERI_SELECT_ROW]) * m[PERI_SELECT_COLUMNS],
                n = m[PERI_SELECT_COLUMNS];
        int64_t first = a->list_offsets[r], last = a->list_offsets[r + 1];
        if (first == last) memset(a->matrix + at * a->element, 0, (size_t)(n * a->element));
        else if (a->element == 8) cpu_select_sum_f64(a, (double *)(void *)a->matrix + at, n, first, last);
        else cpu_select_sum_f32(a, (float *)(void *)a->matrix + at, n, first, last);
    }
}

/* -- sums by id, rows picked --------------------------------------------------------------------------------------- */

/** Ids of other parts of the range add to places of their own, so that no branch depends on them; several, so that no
 *  sum waits for the one before. */
#define CPU_WEIGHTS(name, X, I)                                                                                        \
    static void name(const X *restrict weights, const I *restrict ids, int64_t n, X *out, int64_t begin, int64_t end)  \
    {                                                                                                                  \
        X other[16] = {0};                                                                                             \
        uint64_t size = (uint64_t)(end - begin);                                                                       \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            uint64_t u = (uint64_t)ids[i] - (uint64_t)begin;                                                           \
            uintptr_t own = (uintptr_t)(out + 2 * ids[i]), none = (uintptr_t)(other + 2 * (i & 7)),                    \
                      mine = -(uintptr_t)(u < size);                                                                   \
            X *to = (X *)(none ^ ((own ^ none) & mine)); /* a choice that compilers do not make a branch */            \
            to[0] += weights[i];                                                                                       \
            to[1] += 1;                                                                                                \
        }                                                                                                              \
    }
CPU_WEIGHTS(cpu_weights_f32_i32, float, int32_t)
CPU_WEIGHTS(cpu_weights_f32_i64, float, int64_t)
CPU_WEIGHTS(cpu_weights_f64_i32, double, int32_t)
CPU_WEIGHTS(cpu_weights_f64_i64, double, int64_t)

/** How often each id of the whole range is there. */
#define CPU_COUNTS(name, I)                                                                                            \
    static void name(const I *restrict ids, int64_t n, int64_t *restrict count)                                        \
    {                                                                                                                  \
        for (int64_t i = 0; i < n; i++) count[ids[i]]++;                                                               \
    }
CPU_COUNTS(cpu_counts_i32, int32_t)
CPU_COUNTS(cpu_counts_i64, int64_t)

static void cpu_weights_by_id(const void *args, int64_t begin, int64_t end)
{
    const peri_k_weights_by_id_args *a = args;
    int64_t size = a->dtype == PERI_F64 ? 8 : 4;
    if (!a->weights && (begin > 0 || end < a->numbers)) {
        ref_weights_by_id(args, begin, end);
        return;
    }
    if (!a->weights) {
        memset(a->out, 0, (size_t)end * sizeof(int64_t));
        if (a->ids_dtype == PERI_I32) cpu_counts_i32(a->ids, a->n, a->out);
        else cpu_counts_i64(a->ids, a->n, a->out);
        return;
    }
    memset((char *)a->out + 2 * begin * size, 0, (size_t)(2 * (end - begin) * size));
    if (a->dtype == PERI_F32 && a->ids_dtype == PERI_I32)
        cpu_weights_f32_i32(a->weights, a->ids, a->n, a->out, begin, end);
    else if (a->dtype == PERI_F32) cpu_weights_f32_i64(a->weights, a->ids, a->n, a->out, begin, end);
    else if (a->ids_dtype == PERI_I32) cpu_weights_f64_i32(a->weights, a->ids, a->n, a->out, begin, end);
    else cpu_weights_f64_i64(a->weights, a->ids, a->n, a->out, begin, end);
}

#if defined(__AVX512F__)
/** Rows of 4 or 8 bytes of one block, sixteen or eight at a time: those that are kept are pressed together and
 *  stored. */
static void cpu_pick_vector(const peri_k_mask_args *a, int64_t i, int64_t stop, int64_t at)
{
    int64_t lanes = a->width == 4 ? 16 : 8;
    for (; i < stop; i += lanes) {
        __mmask16 live = (__mmask16)(stop - i >= lanes ? (1u << lanes) - 1u : (1u << (stop - i)) - 1u);
        __mmask16 here = _mm_test_epi8_mask(_mm_maskz_loadu_epi8(live, a->mask + i), _mm_set1_epi8(-1));
        unsigned count = (unsigned)__builtin_popcount(here);
        if (lanes == 16) {
            __m512i v = _mm512_maskz_compress_epi32(here, _mm512_maskz_loadu_epi32(live, a->all + i * 4));
            _mm512_mask_storeu_epi32(a->kept + at * 4, (__mmask16)((1u << count) - 1u), v);
        } else {
            __m512i v =
                _mm512_maskz_compress_epi64((__mmask8)here, _mm512_maskz_loadu_epi64((__mmask8)live, a->all + i * 8));
            _mm512_mask_storeu_epi64(a->kept + at * 8, (__mmask8)((1u << count) - 1u), v);
        }
        at += count;
    }
}

/** How many of mask[i .. last) are not 0. */
static int64_t cpu_mask_count(const uint8_t *mask, int64_t i, int64_t last)
{
    int64_t sum = 0;
    for (; i < last; i += 64) {
        __mmask64 live = last - i >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << (last - i)) - 1;
        sum +=
            __builtin_popcountll(_mm512_test_epi8_mask(_mm512_maskz_loadu_epi8(live, mask + i), _mm512_set1_epi8(-1)));
    }
    return sum;
}

static void cpu_mask_sums(const void *args, int64_t begin, int64_t end)
{
    const peri_k_mask_args *a = args;
    for (int64_t b = begin; b < end; b++)
        a->sums[b] = cpu_mask_count(a->mask, b * PERI_JAGGED_BLOCK, ref_min(a->n, (b + 1) * PERI_JAGGED_BLOCK));
}

static void cpu_mask_lengths(const void *args, int64_t begin, int64_t end)
{
    const peri_k_mask_args *a = args;
    int64_t i = begin < end ? ref_int(a->offsets, begin, a->offsets_dtype) : 0;
    for (int64_t b = begin; b < end; b++) {
        int64_t last = ref_int(a->offsets, b + 1, a->offsets_dtype);
        ref_int_set(a->lengths, b, a->lengths_dtype, cpu_mask_count(a->mask, i, last));
        i = last;
    }
}
#else
#define cpu_mask_lengths ref_mask_lengths
#define cpu_mask_sums ref_mask_sums
#endif

static void cpu_mask_pick(const void *args, int64_t begin, int64_t end)
{
    const peri_k_mask_args *a = args;
    for (int64_t b = begin; b < end; b++) {
        int64_t i = b * PERI_JAGGED_BLOCK, stop = ref_min(a->n, i + PERI_JAGGED_BLOCK), at = a->sums[b];
#if defined(__AVX512F__)
        if (a->width == 4 || a->width == 8) {
            cpu_pick_vector(a, i, stop, at);
            continue;
        }
#endif
        for (; i < stop; i++) {
            if (!a->mask[i]) continue;
            if (a->width == 4) memcpy(a->kept + at * 4, a->all + i * 4, 4);
            else cpu_move(a->kept + at * a->width, a->all + i * a->width, a->width);
            at++;
        }
    }
}

/* -- hashes -------------------------------------------------------------------------------------------------------- */

/** Ids [begin, end) of one table: slots are asked for a group ahead of their comparison. */
static void cpu_find_run(const peri_k_hash_args *a, int64_t begin, int64_t end, int64_t first, int64_t slots)
{
    enum { GROUP = 32 };
    int64_t slot[GROUP], width = a->ids_dtype == PERI_I32 ? 8 : 16;
    for (; begin < end; begin += GROUP) {
        int64_t n = ref_min(GROUP, end - begin);
        for (int64_t k = 0; k < n; k++) {
            slot[k] = (int64_t)ref_slot_of(ref_int(a->ids, begin + k, a->ids_dtype), a->ids_dtype, slots);
            __builtin_prefetch((const char *)a->pairs + (first + slot[k]) * width);
        }
        for (int64_t k = 0; k < n; k++) {
            int64_t id = ref_int(a->ids, begin + k, a->ids_dtype),
                    at = id >= 0 ? ref_probe(a, id, first, slots, slot[k]) : -1;
            ref_int_set(a->rows, begin + k, a->rows_dtype, at >= 0 ? ref_int(a->pairs, 2 * at + 1, a->ids_dtype) : -1);
        }
    }
}

static void cpu_hash_find(const void *args, int64_t begin, int64_t end)
{
    const peri_k_hash_args *a = args;
    if (begin >= end) return;
    int64_t t = ref_segment_of(a->offsets, a->offsets_dtype, 1, a->tables * a->step, begin) / a->step;
    for (int64_t i = begin; i < end; t++) {
        int64_t last = ref_min(end, ref_int(a->offsets, (t + 1) * a->step, a->offsets_dtype));
        if (last <= i) continue;
        int64_t first = ref_int(a->slots, t, a->slots_dtype), slots = ref_int(a->slots, t + 1, a->slots_dtype) - first;
        if (slots > 0) cpu_find_run(a, i, last, first, slots);
        else
            for (int64_t k = i; k < last; k++) ref_int_set(a->rows, k, a->rows_dtype, ref_int(a->ids, k, a->ids_dtype));
        i = last;
    }
}

/** Made into vectors by the compiler. */
static inline __attribute__((always_inline)) void cpu_murmur_run(const peri_k_murmur_hash3_args *a, int64_t begin,
                                                                 int64_t end, bool ys, bool seeds)
{
    const int64_t *restrict x = a->x, *restrict y = a->y, *restrict seed = a->seed;
    int64_t *restrict out = a->out;
    const int64_t one_y = a->y_number, one_seed = a->seed_number;
    for (int64_t i = begin; i < end; i++)
        out[i] = (int64_t)peri_k_murmur((uint64_t)x[i], (uint64_t)(ys ? y[i] : one_y),
                                        (uint64_t)(seeds ? seed[i] : one_seed));
}

static void cpu_murmur_hash3(const void *args, int64_t begin, int64_t end)
{
    const peri_k_murmur_hash3_args *a = args;
    if (a->y && a->seed) cpu_murmur_run(a, begin, end, true, true);
    else if (a->y) cpu_murmur_run(a, begin, end, true, false);
    else if (a->seed) cpu_murmur_run(a, begin, end, false, true);
    else cpu_murmur_run(a, begin, end, false, false);
}

static void cpu_calibrate(const void *args, int64_t begin, int64_t end)
{
    /* a copy that stores into outputs cannot change */
    const peri_k_calibrate_args a = *(const peri_k_calibrate_args *)args;
    double width = (a.upper - a.lower) / (double)a.bins;
    if (a.dtype != PERI_F32) {
        ref_calibrate(args, begin, end);
        return;
    }
    for (int64_t i = begin; i < end; i++)
        ((float *)a.out)[i] =
            (float)ref_calibrated(&a, width, (double)((const float *)a.logit)[i] + a.shift, i, &a.bin[i]);
}

#define K_CPU_LOOKUP                                                                                                   \
    [PERI_K_table_rows] = cpu_table_rows, [PERI_K_batch_select] = cpu_batch_select,                                    \
    [PERI_K_batch_select_sum] = cpu_batch_select_sum, [PERI_K_slice_bounds] = ref_slice_bounds,                        \
    [PERI_K_prune_mark] = ref_prune_mark, [PERI_K_mask_sums] = cpu_mask_sums, [PERI_K_mask_pick] = cpu_mask_pick,      \
    [PERI_K_mask_spread] = ref_mask_spread, [PERI_K_mask_places] = ref_mask_places,                                    \
    [PERI_K_mask_lengths] = cpu_mask_lengths, [PERI_K_weights_by_id] = cpu_weights_by_id,                              \
    [PERI_K_hash_find] = cpu_hash_find, [PERI_K_murmur_hash3] = cpu_murmur_hash3, [PERI_K_calibrate] = cpu_calibrate,
