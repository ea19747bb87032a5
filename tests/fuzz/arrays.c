/* SPDX-License-Identifier: Apache-2.0
 *
 * arrays.c: any bytes as an npy or npz file, and its arrays as samples: an error with a sentence, or arrays that lie
 * within their file, and samples whose ids are below the rows of their tables. The bytes lie at the very end of their
 * block, so that reading behind it is caught.
 *
 * inputs: 200000
 */
#include "choices.h"

#include <perilune/perilune.h>

#include <string.h>

enum { ROWS = 40 };

/** Arrays of a file as samples with one dense feature and two sparse ones, which may fit or not. */
static void check_samples(const peri_arrays *a, uint8_t choice)
{
    static const int64_t table_rows[2] = {ROWS, ROWS};
    peri_columns_config o = {.size = sizeof o,
                             .table_rows = table_rows,
                             .dense_features = 1,
                             .sparse_features = 2,
                             .dense = choice % 3,
                             .ids = choice >> 2 & 1 ? PERI_IDS_MOD : PERI_IDS_EXACT,
                             .block_rows = choice >> 3 & 1 ? 3 : 0,
                             .blocks = 2,
                             .padded = choice >> 4 & 1,
                             .padding = -1};
    peri_columns *c = NULL;
    peri_batch *b = NULL;
    peri_array x[4];
    require(peri_columns_new(&o, &c) >= 0 && peri_batch_new(1, 2, 0, 0, &b) >= 0, "no columns");
    int32_t n = peri_arrays_count(a) < 4 ? peri_arrays_count(a) : 4;
    for (int32_t i = 0; i < n; i++) {
        x[i] = (peri_array){.size = sizeof *x};
        require(peri_arrays_get(a, i, &x[i]) >= 0, "no array");
    }
    const peri_array *last = &x[n - 1];
    peri_rows all = {.data = x[0].data, .stride = 1, .dtype = x[0].dtype, .count = 1};
    peri_rows ids[2] = {{.data = last->data, .stride = 1, .dtype = last->dtype, .count = 1},
                        {.data = last->data, .stride = 2, .dtype = last->dtype, .count = 2}};
    int64_t rows = x[0].elements < last->elements / 2 ? x[0].elements : last->elements / 2;
    peri_columns_part p = {.size = sizeof p, .name = "fuzz", .rows = rows, .dense = all, .labels = all, .ids = ids};
    if (n == 4 && x[1].dtype == PERI_I64 && x[1].elements > 0) { /* offsets, lengths, ids */
        p.offsets = x[1].data;
        p.lengths = (peri_rows){.data = x[2].data, .stride = 2, .dtype = x[2].dtype, .count = 2};
        p.values = ids[0];
        p.total = last->elements;
        p.rows = x[0].elements < x[1].elements - 1 ? x[0].elements : x[1].elements - 1;
        if (p.rows > x[2].elements / 2) p.rows = x[2].elements / 2;
    }
    if (peri_columns_add(c, &p) >= 0 && p.rows <= 4096) {
        if (peri_columns_fill(c, 0, p.rows, b) >= 0) {
            int64_t total = 0;
            for (int64_t i = 0; i < 2 * p.rows; i++) total += b->lengths[i];
            require(total == b->ids, "the lengths do not sum to the ids");
            for (int64_t i = 0; i < total; i++)
                require(b->values[i] >= 0 && b->values[i] < ROWS, "an id outside its table");
        } else require(strlen(peri_error_message()) > 10, "an error without a sentence");
    }
    peri_batch_release(b);
    peri_columns_release(c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const int64_t sizes[] = PERI_DTYPE_SIZES;
    peri_arrays *a = NULL;
    if (size < 2) return 0;
    size_t n = size - 1;
    char *own = malloc(n);
    require(own != NULL, "no memory");
    memcpy(own, data + 1, n);
    if (peri_arrays_open_memory("fuzz", own, (int64_t)n, &a) >= 0) {
        for (int32_t i = 0; i < peri_arrays_count(a); i++) {
            peri_array x = {.size = sizeof x};
            require(peri_arrays_get(a, i, &x) >= 0, "no array");
            volatile char sum = 0; /* all of it can be read */
            for (int64_t k = 0; k < x.elements * sizes[x.dtype]; k++) sum = (char)(sum + ((const char *)x.data)[k]);
        }
        check_samples(a, data[0]);
        peri_arrays_release(a);
    } else require(strlen(peri_error_message()) > 10, "an error without a sentence");
    free(own);
    return 0;
}
