/* SPDX-License-Identifier: Apache-2.0
 *
 * column_blocks.c: blocks of columns of some matrices copied or summed into others, in one kernel: a table of
 * addresses and strides is built on the host and travels with the launch.
 */
#include "jagged_internal.h"
#include "../../kernels/jagged.h"

peri_status peri__columns_init(peri__columns *t, int64_t items, int64_t sources)
{
    *t = (peri__columns){.room_items = items};
    t->words =
        peri__alloc(sizeof *t->words * (size_t)peri__max(1, items * PERI_ITEM_WORDS + sources * PERI_SOURCE_WORDS));
    return t->words ? PERI_OK : PERI_ENOMEM;
}

void peri__columns_fini(peri__columns *t) { peri__free(t->words); }

static int64_t column_address(const peri_tensor *t, int64_t column)
{
    return (int64_t)(intptr_t)((char *)peri__data(t) + column * peri_dtype_size(t->dtype));
}

void peri__columns_item(peri__columns *t, const peri_tensor *dst, int64_t column, int64_t columns)
{
    int64_t *w = t->words + t->items++ * PERI_ITEM_WORDS;
    w[PERI_ITEM_DST] = column_address(dst, column);
    w[PERI_ITEM_STRIDE] = dst->stride[0];
    w[PERI_ITEM_COLUMNS] = columns;
    w[PERI_ITEM_FIRST] = t->sources;
    w[PERI_ITEM_SOURCES] = 0;
}

void peri__columns_source(peri__columns *t, const peri_tensor *src, int64_t column)
{
    int64_t *w = t->words + t->room_items * PERI_ITEM_WORDS + t->sources++ * PERI_SOURCE_WORDS;
    w[PERI_SOURCE_ADDRESS] = column_address(src, column);
    w[PERI_SOURCE_STRIDE] = src->stride[0];
    t->words[(t->items - 1) * PERI_ITEM_WORDS + PERI_ITEM_SOURCES]++;
}

peri_status peri__columns_run(const peri__columns *t, peri_device *device, int32_t dtype, int64_t rows)
{
    peri_tensor *words;
    if (t->items == 0) return PERI_OK;
    PERI_TRY(
        peri__upload_i64(device, t->words, t->room_items * PERI_ITEM_WORDS + t->sources * PERI_SOURCE_WORDS, &words));
    const int64_t *data = peri__data(words);
    int64_t elements = 0;
    for (int64_t i = 0; i < t->items; i++) elements += t->words[i * PERI_ITEM_WORDS + PERI_ITEM_COLUMNS];
    peri_k_columns_sum_args args = {
        .items = data, .sources = data + t->room_items * PERI_ITEM_WORDS, .n_items = t->items, .dtype = dtype};
    peri_status status =
        PERI_LAUNCH(device, columns_sum, &args, rows, peri__max(1, (1 << 17) / peri__max(elements, 1)));
    peri_tensor_release(words);
    return status;
}

peri_status peri__columns_rows(peri_tensor *t, peri_tensor **out)
{
    if (t->stride[1] == 1 || t->shape[1] <= 1) {
        peri_tensor_retain(t);
        *out = t;
        return PERI_OK;
    }
    return peri_tensor_contiguous(t, out);
}
