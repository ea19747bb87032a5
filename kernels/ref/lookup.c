/* SPDX-License-Identifier: Apache-2.0
 *
 * lookup.c (ref): see kernels/lookup.h.
 */
#include "value.h"

/* -- ids of several tables ----------------------------------------------------------------------------------------- */

static void ref_table_rows(const void *args, int64_t begin, int64_t end)
{
    const peri_k_table_rows_args *a = args;
    int64_t bags = a->tables * a->step;
    for (int64_t b = begin; b < end; b++) {
        int64_t bad = INT64_MAX, stop = ref_min(a->n, (b + 1) * PERI_JAGGED_BLOCK);
        for (int64_t i = b * PERI_JAGGED_BLOCK; i < stop; i++) {
            int64_t bag = ref_segment_of(a->offsets, a->offsets_dtype, 1, bags, i), t = bag / a->step;
            int64_t start = ref_int(a->starts, t, a->starts_dtype),
                    size = ref_int(a->starts, t + 1, a->starts_dtype) - start;
            int64_t id = ref_int(a->ids, i, a->ids_dtype), out = -1;
            bool whole = a->remap && size == 0, good = id >= 0 && (id < size || whole);
            if (good) out = whole ? id : a->remap ? ref_int(a->remap, start + id, a->remap_dtype) : start + id;
            if (!good && !(a->remap && id == -1)) bad = ref_min(bad, i);
            ref_int_set(a->out, i, a->out_dtype, out);
            if (a->bag) a->bag[i] = bag;
        }
        a->bad[b] = bad;
    }
}

/* -- rows of several matrices -------------------------------------------------------------------------------------- */

/** The last matrix whose word is at most @x. */
static const int64_t *ref_select_matrix(const peri_k_batch_select_args *a, int word, int64_t x)
{
    int64_t m = a->matrices - 1;
    while (m > 0 && a->table[m * PERI_SELECT_WORDS + word] > x) m--;
    return a->table + m * PERI_SELECT_WORDS;
}

/** Where the row of index @k of matrix @m begins in the result. */
static int64_t ref_select_to(const peri_k_batch_select_args *a, const int64_t *m, int64_t k)
{
    return m[PERI_SELECT_TO] + (k - m[PERI_SELECT_PLACE]) * (a->pitch ? a->pitch : m[PERI_SELECT_COLUMNS]);
}

static void ref_batch_select(const void *args, int64_t begin, int64_t end)
{
    const peri_k_batch_select_args *a = args;
    for (int64_t k = begin; k < end; k++) {
        const int64_t *m = ref_select_matrix(a, PERI_SELECT_PLACE, k);
        int64_t from = m[PERI_SELECT_FROM] + (a->rows[k] - m[PERI_SELECT_ROW]) * m[PERI_SELECT_COLUMNS];
        memcpy(a->result + ref_select_to(a, m, k) * a->element, a->matrix + from * a->element,
               (size_t)(m[PERI_SELECT_COLUMNS] * a->element));
    }
}

static void ref_batch_select_sum(const void *args, int64_t begin, int64_t end)
{
    const peri_k_batch_select_args *a = args;
    for (int64_t r = begin; r < end; r++) {
        const int64_t *m = ref_select_matrix(a, PERI_SELECT_ROW, r);
        int64_t at = m[PERI_SELECT_FROM] + (r - m[PERI_SELECT_ROW]) * m[PERI_SELECT_COLUMNS],
                first = a->list_offsets[r];
        for (int64_t c = 0; c < m[PERI_SELECT_COLUMNS]; c++) {
            double wide = 0;
            float narrow = 0;
            for (int64_t j = first; j < a->list_offsets[r + 1]; j++) {
                const char *p =
                    a->result +
                    (ref_select_to(a, ref_select_matrix(a, PERI_SELECT_PLACE, a->list[j]), a->list[j]) + c) *
                        a->element;
                if (a->element == 8)
                    wide = j == first ? *(const double *)(const void *)p : wide + *(const double *)(const void *)p;
                else narrow = j == first ? *(const float *)(const void *)p : narrow + *(const float *)(const void *)p;
            }
            memcpy(a->matrix + (at + c) * a->element, a->element == 8 ? (void *)&wide : (void *)&narrow,
                   (size_t)a->element);
        }
    }
}

/* -- numbers by id ------------------------------------------------------------------------------------------------- */

static void ref_unary_sum(const void *args, int64_t begin, int64_t end)
{
    const peri_k_unary_sum_args *a = args;
    for (int64_t bag = begin; bag < end; bag++) {
        int64_t first = ref_int(a->offsets, bag, a->offsets_dtype),
                last = ref_int(a->offsets, bag + 1, a->offsets_dtype);
        int64_t t = bag / a->batch, b = bag % a->batch;
        for (int64_t task = 0; task < a->tasks; task++) {
            int64_t to = (task * a->batch + b) * a->tables + t;
            double wide = 0;
            float narrow = 0;
            for (int64_t i = first; i < last; i++) {
                if (a->dtype == PERI_F64) wide += ((const double *)a->weight)[task * a->width + a->rows[i]];
                else narrow += ((const float *)a->weight)[task * a->width + a->rows[i]];
            }
            if (a->dtype == PERI_F64) ((double *)a->out)[to] = wide;
            else ((float *)a->out)[to] = narrow;
        }
    }
}

static void ref_unary_sum_back(const void *args, int64_t begin, int64_t end)
{
    const peri_k_unary_sum_args *a = args;
    for (int64_t r = begin; r < end; r++)
        for (int64_t task = 0; task < a->tasks; task++) {
            double wide = 0;
            float narrow = 0;
            for (int64_t j = a->list_offsets[r]; j < a->list_offsets[r + 1]; j++) {
                int64_t bag = a->bag[a->list[j]],
                        from = (task * a->batch + bag % a->batch) * a->tables + bag / a->batch;
                if (a->dtype == PERI_F64) wide += ((const double *)a->out)[from];
                else narrow += ((const float *)a->out)[from];
            }
            if (a->dtype == PERI_F64) ((double *)a->weight)[task * a->width + r] = wide;
            else ((float *)a->weight)[task * a->width + r] = narrow;
        }
}

static void ref_weights_by_id(const void *args, int64_t begin, int64_t end)
{
    const peri_k_weights_by_id_args *a = args;
    int64_t size = a->dtype == PERI_F64 ? 8 : 4;
    if (!a->weights) {
        int64_t *count = a->out;
        memset(count + begin, 0, (size_t)(end - begin) * sizeof *count);
        for (int64_t i = 0; i < a->n; i++) {
            int64_t u = ref_int(a->ids, i, a->ids_dtype);
            if (u >= begin && u < end) count[u]++;
        }
        return;
    }
    memset((char *)a->out + 2 * begin * size, 0, (size_t)(2 * (end - begin) * size));
    for (int64_t i = 0; i < a->n; i++) {
        int64_t u = ref_int(a->ids, i, a->ids_dtype);
        if (u < begin || u >= end) continue;
        if (a->dtype == PERI_F64) {
            ((double *)a->out)[2 * u] += ((const double *)a->weights)[i];
            ((double *)a->out)[2 * u + 1] += 1;
        } else {
            ((float *)a->out)[2 * u] += ((const float *)a->weights)[i];
            ((float *)a->out)[2 * u + 1] += 1;
        }
    }
}

/* -- rows picked --------------------------------------------------------------------------------------------------- */

static void ref_mask_sums(const void *args, int64_t begin, int64_t end)
{
    const peri_k_mask_args *a = args;
    for (int64_t b = begin; b < end; b++) {
        int64_t stop = ref_min(a->n, (b + 1) * PERI_JAGGED_BLOCK), sum = 0;
        for (int64_t i = b * PERI_JAGGED_BLOCK; i < stop; i++) sum += a->mask[i] != 0;
        a->sums[b] = sum;
    }
}

static void ref_mask_pick(const void *args, int64_t begin, int64_t end)
{
    const peri_k_mask_args *a = args;
    for (int64_t b = begin; b < end; b++) {
        int64_t stop = ref_min(a->n, (b + 1) * PERI_JAGGED_BLOCK), at = a->sums[b];
        for (int64_t i = b * PERI_JAGGED_BLOCK; i < stop; i++)
            if (a->mask[i]) memcpy(a->kept + at++ * a->width, a->all + i * a->width, (size_t)a->width);
    }
}

static void ref_mask_spread(const void *args, int64_t begin, int64_t end)
{
    const peri_k_mask_args *a = args;
    for (int64_t b = begin; b < end; b++) {
        int64_t stop = ref_min(a->n, (b + 1) * PERI_JAGGED_BLOCK), at = a->sums[b];
        for (int64_t i = b * PERI_JAGGED_BLOCK; i < stop; i++) {
            if (a->mask[i]) memcpy(a->all + i * a->width, a->kept + at++ * a->width, (size_t)a->width);
            else memset(a->all + i * a->width, 0, (size_t)a->width);
        }
    }
}

static void ref_mask_places(const void *args, int64_t begin, int64_t end)
{
    const peri_k_mask_args *a = args;
    for (int64_t b = begin; b < end; b++) {
        int64_t stop = ref_min(a->n, (b + 1) * PERI_JAGGED_BLOCK), at = a->sums[b];
        for (int64_t i = b * PERI_JAGGED_BLOCK; i < stop; i++)
            ref_int_set(a->places, i, a->places_dtype, a->mask[i] ? at++ : -1);
    }
}

static void ref_mask_lengths(const void *args, int64_t begin, int64_t end)
{
    const peri_k_mask_args *a = args;
    for (int64_t b = begin; b < end; b++) {
        int64_t sum = 0, last = ref_int(a->offsets, b + 1, a->offsets_dtype);
        for (int64_t i = ref_int(a->offsets, b, a->offsets_dtype); i < last; i++) sum += a->mask[i] != 0;
        ref_int_set(a->lengths, b, a->lengths_dtype, sum);
    }
}

static void ref_slice_bounds(const void *args, int64_t begin, int64_t end)
{
    const peri_k_slice_bounds_args *a = args;
    for (int64_t block = begin; block < end; block++) {
        int64_t bad = INT64_MAX, stop = ref_min(a->bags, (block + 1) * PERI_JAGGED_BLOCK);
        for (int64_t b = block * PERI_JAGGED_BLOCK; b < stop; b++) {
            int64_t first = ref_int(a->offsets, b, a->offsets_dtype),
                    members = ref_int(a->offsets, b + 1, a->offsets_dtype) - first;
            int64_t start = ref_int(a->start, b, a->start_dtype);
            bool good = start >= 0 && start <= members;
            if (!good) bad = ref_min(bad, b);
            a->starts[b] = first + (good ? start : 0);
            ref_int_set(a->lengths, b, a->lengths_dtype, good ? ref_min(a->length, members - start) : 0);
        }
        a->bad[block] = bad;
    }
}

/* -- pruned tables ------------------------------------------------------------------------------------------------- */

static void ref_prune_mark(const void *args, int64_t begin, int64_t end)
{
    const peri_k_prune_mark_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        double x = a->indicator[i];
        a->mask[i] = (a->magnitude ? fabs(x) : x) > a->threshold;
    }
}

static uint32_t ref_mix_32(uint32_t h)
{
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    return h ^ h >> 16;
}

/** Where @id is first looked for among @slots. */
static uint64_t ref_slot_of(int64_t id, int32_t dtype, int64_t slots)
{
    return dtype == PERI_I32 ? ref_mix_32((uint32_t)id) % (uint64_t)slots : peri_k_mix((uint64_t)id) % (uint64_t)slots;
}

/** The slot of @id or the free one where it would be put, -1 if there is none; the table's slots begin at @first. */
static int64_t ref_probe(const peri_k_hash_args *a, int64_t id, int64_t first, int64_t slots, int64_t slot)
{
    for (int64_t seen = 0; seen < slots; seen++, slot = slot + 1 < slots ? slot + 1 : 0) {
        int64_t found = ref_int(a->pairs, 2 * (first + slot), a->ids_dtype);
        if (found == id || found == -1) return first + slot;
    }
    return -1;
}

static void ref_hash_insert(const void *args, int64_t begin, int64_t end)
{
    const peri_k_hash_args *a = args;
    for (int64_t t = begin; t < end; t++) {
        int64_t first = ref_int(a->slots, t, a->slots_dtype), slots = ref_int(a->slots, t + 1, a->slots_dtype) - first;
        int64_t i = ref_int(a->offsets, t * a->step, a->offsets_dtype),
                last = ref_int(a->offsets, (t + 1) * a->step, a->offsets_dtype);
        a->bad[t] = INT64_MAX;
        for (; i < last && slots > 0; i++) {
            int64_t id = ref_int(a->ids, i, a->ids_dtype), row = ref_int(a->rows, i, a->rows_dtype), slot = -1;
            if (row == -1 && id >= 0) continue;
            if (row >= 0 && id >= 0)
                slot = ref_probe(a, id, first, slots, (int64_t)ref_slot_of(id, a->ids_dtype, slots));
            if (slot < 0) {
                a->bad[t] = i;
                break;
            }
            ref_int_set(a->pairs, 2 * slot, a->ids_dtype, id);
            ref_int_set(a->pairs, 2 * slot + 1, a->ids_dtype, row);
        }
    }
}

static void ref_hash_find(const void *args, int64_t begin, int64_t end)
{
    const peri_k_hash_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        int64_t t = ref_segment_of(a->offsets, a->offsets_dtype, 1, a->tables * a->step, i) / a->step;
        int64_t first = ref_int(a->slots, t, a->slots_dtype), slots = ref_int(a->slots, t + 1, a->slots_dtype) - first;
        int64_t id = ref_int(a->ids, i, a->ids_dtype), slot = -1, row = -1;
        if (slots == 0) row = id;
        else if (id >= 0) slot = ref_probe(a, id, first, slots, (int64_t)ref_slot_of(id, a->ids_dtype, slots));
        if (slot >= 0) row = ref_int(a->pairs, 2 * slot + 1, a->ids_dtype);
        ref_int_set(a->rows, i, a->rows_dtype, row);
    }
}

/* -- hashes and calibration ---------------------------------------------------------------------------------------- */

static void ref_murmur_hash3(const void *args, int64_t begin, int64_t end)
{
    const peri_k_murmur_hash3_args *a = args;
    for (int64_t i = begin; i < end; i++)
        a->out[i] = (int64_t)peri_k_murmur((uint64_t)a->x[i], (uint64_t)(a->y ? a->y[i] : a->y_number),
                                           (uint64_t)(a->seed ? a->seed[i] : a->seed_number));
}

/** The segment of bins of logit @i. */
static int64_t ref_calibration_segment(const peri_k_calibrate_args *a, int64_t i)
{
    int64_t first = ref_int(a->segment_ends, i, a->ends_dtype);
    if (ref_int(a->segment_ends, i + 1, a->ends_dtype) - first != 1) return 0;
    int64_t value = ref_int(a->segment_values, first, a->values_dtype);
    return value >= 0 && value < a->segments ? value + 1 : 0;
}

/** The calibrated prediction of logit @i, @x; *bin_at: its bin. */
static inline double ref_calibrated(const peri_k_calibrate_args *a, double width, double x, int64_t i, int64_t *bin_at)
{
    double e = exp(-fabs(x)), p = (x < 0 ? e : 1) / (1 + e), place = ceil((p - a->lower) / width) - 1;
    *bin_at = -1;
    if (!(p == p)) return p;
    int64_t bin = place > 0 ? place < (double)(a->bins - 1) ? (int64_t)place : a->bins - 1 : 0;
    if (a->segment_ends) bin += a->bins * ref_calibration_segment(a, i);
    *bin_at = bin;
    if (!(a->examples[bin] > (double)a->in_use_after)) return p;
    return fma(a->weight, a->positives[bin] / a->examples[bin], (1 - a->weight) * p);
}

static void ref_calibrate(const void *args, int64_t begin, int64_t end)
{
    const peri_k_calibrate_args *a = args;
    double width = (a->upper - a->lower) / (double)a->bins;
    for (int64_t i = begin; i < end; i++) {
        double out = ref_calibrated(a, width, ref_load(a->logit, i, a->dtype).re + a->shift, i, &a->bin[i]);
        ref_store(a->out, i, a->dtype, (ref_value){.re = out});
    }
}
