/* SPDX-License-Identifier: Apache-2.0
 *
 * indices.c (cpu): permutations, sums of segments, levels of bags and distinct ids: see kernels/sparse.h. Kernels whose
 * plain loops the compiler makes into vectors are ref's, compiled here for the instruction set.
 */

/* -- checks -------------------------------------------------------------------------------------------------------- */

#define CPU_EXTENT(name, X)                                                                                            \
    static cpu_extent name(const X *restrict x, int64_t n)                                                             \
    {                                                                                                                  \
        X min = x[0], max = x[0];                                                                                      \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            min = x[i] < min ? x[i] : min;                                                                             \
            max = x[i] > max ? x[i] : max;                                                                             \
        }                                                                                                              \
        return (cpu_extent){0, min, max};                                                                              \
    }
CPU_EXTENT(cpu_ends_i32, int32_t)
CPU_EXTENT(cpu_ends_i64, int64_t)

static void cpu_index_check(const void *args, int64_t begin, int64_t end)
{
    const peri_k_index_check_args *a = args;
    for (int64_t b = begin; b < end; b++) {
        int64_t i = b * PERI_JAGGED_BLOCK, n = ref_min(a->n - i, PERI_JAGGED_BLOCK);
        cpu_extent e = {0, INT64_MAX, INT64_MIN};
        if (n > 0)
            e = a->dtype == PERI_I32 ? cpu_ends_i32((const int32_t *)a->x + i, n)
                                     : cpu_ends_i64((const int64_t *)a->x + i, n);
        if (a->extent) a->extent[2 * b] = e.min;
        if (a->extent) a->extent[2 * b + 1] = e.max;
        if (a->bad) a->bad[b] = INT64_MAX;
        if (a->bad && n > 0 && (e.min < 0 || e.max >= a->limit)) {
            peri_k_index_check_args where = *a;
            where.extent = NULL;
            ref_index_check(&where, b, b + 1);
        }
    }
}

/* -- permutations -------------------------------------------------------------------------------------------------- */

#define CPU_COUNT_UP(name, X, U)                                                                                       \
    static inline void name(X *restrict out, int64_t n, int64_t first)                                                 \
    {                                                                                                                  \
        for (int64_t i = 0; i < n; i++) out[i] = (X)((U)first + (U)i);                                                 \
    }
CPU_COUNT_UP(cpu_count_i32, int32_t, uint32_t)
CPU_COUNT_UP(cpu_count_i64, int64_t, uint64_t)

#if defined(__AVX512F__)
/** first, first + 1, ... at out[0..n). */
static inline void cpu_count_up(void *out, int64_t at, int64_t n, int64_t first, int32_t dtype)
{
    if (dtype == PERI_I32) {
        cpu_count_i32((int32_t *)out + at, n, first);
        return;
    }
    int64_t *p = (int64_t *)out + at;
    __m512i v = _mm512_add_epi64(_mm512_set1_epi64(first), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
    const __m512i eight = _mm512_set1_epi64(8);
    for (; n >= 8; n -= 8, p += 8, v = _mm512_add_epi64(v, eight)) _mm512_storeu_si512(p, v);
    _mm512_mask_storeu_epi64(p, (__mmask8)((1u << n) - 1u), v);
}
#else
static inline void cpu_count_up(void *out, int64_t at, int64_t n, int64_t first, int32_t dtype)
{
    if (dtype == PERI_I32) cpu_count_i32((int32_t *)out + at, n, first);
    else cpu_count_i64((int64_t *)out + at, n, first);
}
#endif

static void cpu_jagged_places(const void *args, int64_t begin, int64_t end)
{
    const peri_k_jagged_places_args *a = args;
    if (a->segments == 0) return;
    end = ref_min(end, ref_offset(a->out_offsets, a->out_dtype, a->out_step, a->segments));
    if (begin >= end) return;
    int64_t t = ref_segment_of(a->out_offsets, a->out_dtype, a->out_step, a->segments, begin);
    for (int64_t row = begin; row < end; t++) {
        int64_t p = a->permute ? ref_int(a->permute, t, a->permute_dtype) : t;
        int64_t first = ref_offset(a->out_offsets, a->out_dtype, a->out_step, t);
        int64_t last = ref_min(ref_offset(a->out_offsets, a->out_dtype, a->out_step, t + 1), end);
        cpu_count_up(a->out, row, last - row, ref_offset(a->in_offsets, a->in_dtype, a->in_step, p) + row - first,
                     a->dtype);
        row = last;
    }
}

static void cpu_invert_permute(const void *args, int64_t begin, int64_t end)
{
    const peri_k_invert_permute_args *a = args;
    if (a->dtype == PERI_I32) {
        const int32_t *p = a->permute;
        int32_t *inverse = a->inverse;
        for (int64_t i = begin; i < end; i++)
            if ((uint32_t)p[i] < (uint64_t)a->n) __atomic_store_n(inverse + p[i], (int32_t)i, __ATOMIC_RELAXED);
    } else {
        const int64_t *p = a->permute;
        int64_t *inverse = a->inverse;
        for (int64_t i = begin; i < end; i++)
            if ((uint64_t)p[i] < (uint64_t)a->n) __atomic_store_n(inverse + p[i], i, __ATOMIC_RELAXED);
    }
}

/* -- sums of segments ---------------------------------------------------------------------------------------------- */

#if defined(__AVX512F__)
/** As ref adds: 16 partial sums, then in halves. */
static inline float cpu_segment_f32(const float *x, int64_t n)
{
    __m512 part = _mm512_setzero_ps();
    for (; n >= 16; n -= 16, x += 16) part = _mm512_add_ps(part, _mm512_loadu_ps(x));
    if (n > 0) {
        __mmask16 there = (__mmask16)((1u << n) - 1u);
        part = _mm512_mask_add_ps(part, there, part, _mm512_maskz_loadu_ps(there, x));
    }
    __m256 h8 = _mm256_add_ps(_mm512_castps512_ps256(part), _mm512_extractf32x8_ps(part, 1));
    __m128 h4 = _mm_add_ps(_mm256_castps256_ps128(h8), _mm256_extractf128_ps(h8, 1));
    __m128 h2 = _mm_add_ps(h4, _mm_movehl_ps(h4, h4));
    return _mm_cvtss_f32(_mm_add_ss(h2, _mm_shuffle_ps(h2, h2, 1)));
}
#else
static inline float cpu_segment_f32(const float *x, int64_t n)
{
    __m256 low = _mm256_setzero_ps(), high = _mm256_setzero_ps();
    for (; n >= 16; n -= 16, x += 16) {
        low = _mm256_add_ps(low, _mm256_loadu_ps(x));
        high = _mm256_add_ps(high, _mm256_loadu_ps(x + 8));
    }
    if (n > 0) { /* what is not there must not be added: -0 + 0 is 0 */
        __m256i first = k_mask(n), second = k_mask(n - 8);
        __m256 a = _mm256_add_ps(low, _mm256_maskload_ps(x, first)),
               b = _mm256_add_ps(high, _mm256_maskload_ps(x + 8, second));
        low = _mm256_blendv_ps(low, a, _mm256_castsi256_ps(first));
        high = _mm256_blendv_ps(high, b, _mm256_castsi256_ps(second));
    }
    __m256 h8 = _mm256_add_ps(low, high);
    __m128 h4 = _mm_add_ps(_mm256_castps256_ps128(h8), _mm256_extractf128_ps(h8, 1));
    __m128 h2 = _mm_add_ps(h4, _mm_movehl_ps(h4, h4));
    return _mm_cvtss_f32(_mm_add_ss(h2, _mm_shuffle_ps(h2, h2, 1)));
}
#endif

#define CPU_SUM_INTS(name, X, U)                                                                                       \
    static inline X name(const X *restrict x, int64_t n)                                                               \
    {                                                                                                                  \
        U sum = 0;                                                                                                     \
        for (int64_t i = 0; i < n; i++) sum += (U)x[i];                                                                \
        return (X)sum;                                                                                                 \
    }
CPU_SUM_INTS(cpu_segment_i32, int32_t, uint32_t)
CPU_SUM_INTS(cpu_segment_i64, int64_t, uint64_t)

static inline __attribute__((always_inline)) void cpu_segment_run(const peri_k_segment_sum_args *a, int64_t begin,
                                                                  int64_t end, int32_t offsets_dtype)
{
    int64_t first = ref_int(a->offsets, begin, offsets_dtype) * a->step;
    for (int64_t s = begin; s < end; s++) {
        int64_t last = ref_int(a->offsets, s + 1, offsets_dtype) * a->step, n = last - first;
        if (a->dtype == PERI_F32) ((float *)a->out)[s] = cpu_segment_f32((const float *)a->values + first, n);
        else if (a->dtype == PERI_I32) ((int32_t *)a->out)[s] = cpu_segment_i32((const int32_t *)a->values + first, n);
        else ((int64_t *)a->out)[s] = cpu_segment_i64((const int64_t *)a->values + first, n);
        first = last;
    }
}

static void cpu_segment_sum(const void *args, int64_t begin, int64_t end)
{
    const peri_k_segment_sum_args *a = args;
    if (begin >= end) return;
    if (a->dtype == PERI_F64) ref_segment_sum(args, begin, end);
    else if (a->offsets_dtype == PERI_I32) cpu_segment_run(a, begin, end, PERI_I32);
    else cpu_segment_run(a, begin, end, PERI_I64);
}

/* -- several levels of bags ---------------------------------------------------------------------------------------- */

/** Rows [begin, end) of dense below bag @bag of level @l, whose first row is @base; each member of the bag covers
 *  @rows[l] rows. @bag < 0: nothing is there. */
static void cpu_levels_fill(const peri_k_levels_args *a, int32_t l, int64_t bag, int64_t base, const int64_t *rows,
                            int64_t begin, int64_t end)
{
    int64_t size = rows[l] * a->max[l], from = base > begin ? base : begin, to = ref_min(base + size, end), first = 0,
            n = 0;
    if (from >= to) return;
    if (bag >= 0) {
        first = ref_int(a->offsets[l], bag, a->offsets_dtype);
        n = ref_min(ref_int(a->offsets[l], bag + 1, a->offsets_dtype) - first, a->max[l]);
    }
    if (l == a->levels - 1) {
        int64_t stop = base + n < from ? from : ref_min(base + n, to);
        char *dst = (char *)a->dense + from * a->width;
        cpu_move(dst, (const char *)a->values + (first + from - base) * a->width, (stop - from) * a->width);
        cpu_pad(dst + (stop - from) * a->width, (to - stop) * a->width, a->padding, a->element);
        return;
    }
    for (int64_t k = (from - base) / rows[l]; k < n && base + k * rows[l] < to; k++)
        cpu_levels_fill(a, l + 1, first + k, base + k * rows[l], rows, begin, end);
    int64_t rest = base + n * rows[l] > from ? base + n * rows[l] : from;
    if (rest < to) cpu_pad((char *)a->dense + rest * a->width, (to - rest) * a->width, a->padding, a->element);
}

static void cpu_levels_to_dense(const void *args, int64_t begin, int64_t end)
{
    const peri_k_levels_args *a = args;
    int64_t rows[PERI_MAX_LEVELS], all = 1;
    if (begin >= end) return;
    for (int32_t l = a->levels - 1; l >= 0; l--) {
        rows[l] = all;
        all *= a->max[l];
    }
    for (int64_t bag = begin / all; bag * all < end; bag++) cpu_levels_fill(a, 0, bag, bag * all, rows, begin, end);
}

/** The bags that hold the current value, from the last level up; they are found anew only when a level's bag has
 *  ended. What lies behind the last bag, where offsets were refused, counts as its. */
static void cpu_levels_from_dense(const void *args, int64_t begin, int64_t end)
{
    const peri_k_levels_args *a = args;
    int32_t last = a->levels - 1;
    for (int64_t row = begin; row < end;) {
        int64_t up = ref_segment_of(a->offsets[last], a->offsets_dtype, 0, a->bags[last], row), bag = up;
        int64_t at = row - ref_int(a->offsets[last], up, a->offsets_dtype), place = 0, scale = a->max[last];
        int64_t stop = up + 1 < a->bags[last] ? ref_min(ref_int(a->offsets[last], up + 1, a->offsets_dtype), end) : end;
        bool there = true;
        for (int32_t l = last - 1; l >= 0; l--) {
            int64_t parent = ref_segment_of(a->offsets[l], a->offsets_dtype, 0, a->bags[l], bag);
            int64_t k = bag - ref_int(a->offsets[l], parent, a->offsets_dtype);
            there = there && k < a->max[l];
            place += k * scale;
            scale *= a->max[l];
            bag = parent;
        }
        int64_t kept = there && at < a->max[last] ? ref_min(stop - row, a->max[last] - at) : 0;
        char *dst = (char *)a->values + row * a->width;
        if (kept > 0) cpu_move(dst, (const char *)a->dense + (bag * scale + place + at) * a->width, kept * a->width);
        if (row + kept < stop) memset(dst + kept * a->width, 0, (size_t)((stop - row - kept) * a->width));
        row = stop;
    }
}

/* -- distinct ids -------------------------------------------------------------------------------------------------- */

#define CPU_MARK(name, X)                                                                                              \
    static void name(const X *restrict x, uint64_t *restrict marks, int64_t base, int64_t begin, int64_t end)          \
    {                                                                                                                  \
        for (int64_t i = begin; i < end; i++) {                                                                        \
            uint64_t at = (uint64_t)((int64_t)x[i] - base);                                                            \
            marks[at / 64] |= (uint64_t)1 << (at % 64);                                                                \
        }                                                                                                              \
    }
CPU_MARK(cpu_mark_i32, int32_t)
CPU_MARK(cpu_mark_i64, int64_t)

static void cpu_mark_set(const void *args, int64_t begin, int64_t end)
{
    const peri_k_mark_args *a = args;
    int64_t words = (a->size + 63) / 64;
    for (int64_t p = begin; p < end; p++) {
        uint64_t *marks = a->marks + p * words;
        memset(marks, 0, sizeof *marks * (size_t)words);
        if (a->dtype == PERI_I32) cpu_mark_i32(a->x, marks, a->base, ref_mark_part(a, p), ref_mark_part(a, p + 1));
        else cpu_mark_i64(a->x, marks, a->base, ref_mark_part(a, p), ref_mark_part(a, p + 1));
    }
}

#define CPU_LOOKUP(name, X)                                                                                            \
    static inline __attribute__((always_inline)) void name(const peri_k_mark_args *a, int64_t p, bool inverted,        \
                                                           bool tallied)                                               \
    {                                                                                                                  \
        const X *restrict x = a->x;                                                                                    \
        const uint64_t *restrict words = a->words;                                                                     \
        const int32_t *restrict ranks = a->ranks;                                                                      \
        int64_t *restrict inverse = a->inverse, end = ref_mark_part(a, p + 1);                                         \
        uint32_t *restrict tallies = a->tallies + (tallied ? p * a->total : 0);                                        \
        for (int64_t i = ref_mark_part(a, p); i < end; i++) {                                                          \
            uint64_t at = (uint64_t)((int64_t)x[i] - a->base);                                                         \
            int64_t u = ranks[at / 64] + __builtin_popcountll(words[at / 64] & (((uint64_t)1 << (at % 64)) - 1));      \
            if (inverted) inverse[i] = u;                                                                              \
            if (tallied) tallies[u]++;                                                                                 \
        }                                                                                                              \
    }
CPU_LOOKUP(cpu_lookup_i32, int32_t)
CPU_LOOKUP(cpu_lookup_i64, int64_t)

static void cpu_mark_lookup(const void *args, int64_t begin, int64_t end)
{
    const peri_k_mark_args *a = args;
    for (int64_t p = begin; p < end; p++) {
        bool narrow = a->dtype == PERI_I32;
        if (a->tallies) memset(a->tallies + p * a->total, 0, sizeof *a->tallies * (size_t)a->total);
        if (narrow && a->tallies) cpu_lookup_i32(a, p, a->inverse != NULL, true);
        else if (narrow) cpu_lookup_i32(a, p, true, false);
        else if (a->tallies) cpu_lookup_i64(a, p, a->inverse != NULL, true);
        else cpu_lookup_i64(a, p, true, false);
    }
}

/* Places in sorted order are met at random in what they point at: it is asked for ahead. */
enum { CPU_FORWARD = 32 };

static void cpu_sort_keys(const void *args, int64_t begin, int64_t end)
{
    const peri_k_sort_keys_args *a = args;
    if (!a->order || a->dtype != PERI_I64) {
        ref_sort_keys(args, begin, end);
        return;
    }
    const int64_t *x = a->x;
    uint64_t mask = a->bits >= 64 ? UINT64_MAX : ((uint64_t)1 << a->bits) - 1;
    for (int64_t i = begin; i < end; i++) {
        if (i + CPU_FORWARD < end) __builtin_prefetch(x + a->order[i + CPU_FORWARD]);
        a->keys[i] = (((uint64_t)x[a->order[i]] - (uint64_t)a->base) >> a->shift & mask) << a->place_bits | (uint64_t)i;
    }
}

static void cpu_sort_order(const void *args, int64_t begin, int64_t end)
{
    const peri_k_sort_order_args *a = args;
    uint64_t mask = ((uint64_t)1 << a->place_bits) - 1;
    if (!a->order) {
        for (int64_t i = begin; i < end; i++) a->out[i] = (int64_t)(a->keys[i] & mask);
        return;
    }
    for (int64_t i = begin; i < end; i++) {
        if (i + CPU_FORWARD < end) __builtin_prefetch(a->order + (a->keys[i + CPU_FORWARD] & mask));
        a->out[i] = a->order[a->keys[i] & mask];
    }
}

#define CPU_UNIQUE(count, write, X)                                                                                    \
    static int64_t count(const X *restrict x, const int64_t *restrict order, X *restrict sorted, int64_t first,        \
                         int64_t end, int64_t n)                                                                       \
    {                                                                                                                  \
        int64_t sum = first == 0;                                                                                      \
        X before = first > 0 ? x[order[first - 1]] : x[order[0]];                                                      \
        for (int64_t i = first; i < end; i++) {                                                                        \
            if (i + CPU_FORWARD < n) __builtin_prefetch(x + order[i + CPU_FORWARD]);                                   \
            X now = x[order[i]];                                                                                       \
            sum += now != before;                                                                                      \
            sorted[i] = before = now;                                                                                  \
        }                                                                                                              \
        return sum;                                                                                                    \
    }                                                                                                                  \
    static void write(const peri_k_unique_args *a, int64_t first, int64_t end, int64_t u)                              \
    {                                                                                                                  \
        const X *restrict sorted = a->sorted;                                                                          \
        const int64_t *restrict order = a->order;                                                                      \
        int64_t *restrict inverse = a->inverse;                                                                        \
        X *restrict unique = a->unique;                                                                                \
        for (int64_t i = first; i < end; i++) {                                                                        \
            if (inverse && i + CPU_FORWARD < a->n) __builtin_prefetch(inverse + order[i + CPU_FORWARD], 1);            \
            if (i == 0 || sorted[i] != sorted[i - 1]) {                                                                \
                unique[++u] = sorted[i];                                                                               \
                if (a->starts) a->starts[u] = i;                                                                       \
            }                                                                                                          \
            if (inverse) inverse[order[i]] = u;                                                                        \
        }                                                                                                              \
        if (a->starts && end == a->n) a->starts[u + 1] = a->n;                                                         \
    }
CPU_UNIQUE(cpu_distinct_i32, cpu_write_i32, int32_t)
CPU_UNIQUE(cpu_distinct_i64, cpu_write_i64, int64_t)

static void cpu_unique_count(const void *args, int64_t begin, int64_t end)
{
    const peri_k_unique_args *a = args;
    for (int64_t b = begin; b < end; b++) {
        int64_t first = b * PERI_JAGGED_BLOCK, last = ref_min(a->n, first + PERI_JAGGED_BLOCK);
        a->sums[b] = a->dtype == PERI_I32 ? cpu_distinct_i32(a->x, a->order, a->sorted, first, last, a->n)
                                          : cpu_distinct_i64(a->x, a->order, a->sorted, first, last, a->n);
    }
}

static void cpu_unique_write(const void *args, int64_t begin, int64_t end)
{
    const peri_k_unique_args *a = args;
    for (int64_t b = begin; b < end; b++) {
        int64_t first = b * PERI_JAGGED_BLOCK, last = ref_min(a->n, first + PERI_JAGGED_BLOCK);
        if (a->dtype == PERI_I32) cpu_write_i32(a, first, last, a->sums[b] - 1);
        else cpu_write_i64(a, first, last, a->sums[b] - 1);
    }
}

#define K_CPU_INDICES                                                                                                  \
    [PERI_K_index_check] = cpu_index_check, [PERI_K_jagged_places] = cpu_jagged_places,                                \
    [PERI_K_invert_permute] = cpu_invert_permute, [PERI_K_segment_sum] = cpu_segment_sum,                              \
    [PERI_K_segment_spread] = ref_segment_spread, [PERI_K_levels_to_dense] = cpu_levels_to_dense,                      \
    [PERI_K_levels_from_dense] = cpu_levels_from_dense, [PERI_K_sort_keys] = cpu_sort_keys,                            \
    [PERI_K_sort_order] = cpu_sort_order, [PERI_K_unique_count] = cpu_unique_count,                                    \
    [PERI_K_unique_write] = cpu_unique_write, [PERI_K_unique_counts] = ref_unique_counts,                              \
    [PERI_K_mark_set] = cpu_mark_set, [PERI_K_mark_count] = ref_mark_count, [PERI_K_mark_write] = ref_mark_write,      \
    [PERI_K_mark_lookup] = cpu_mark_lookup, [PERI_K_mark_tally] = ref_mark_tally,
