/* SPDX-License-Identifier: Apache-2.0
 *
 * memory_estimate.c: what a table batch would take, by the sizes that making it goes by. Planners ask before there is a
 * device.
 */
#include "embed_internal.h"

/** Bytes of table @i, whose rows here (all of them, or the slots of its cache) are @rows: of the states that have rows,
 *  and of the others. */
static peri_status table_bytes(const peri_tbe_config *c, int64_t i, int64_t rows, double *of_rows, double *others)
{
    const peri_table_config *t = &c->tables[i];
    int64_t elements = peri__table_elements(c->dtype, rows, t->cols, PERI__TABLE_ALIGNMENT);
    if (elements < 0)
        return peri__fail(PERI_EINVAL, "peri_tbe_new: table '%s' of %lld x %lld makes the batch too large", t->name,
                          (long long)rows, (long long)t->cols);
    peri__state states[PERI__STATES];
    int32_t n = peri__states_of(c->dtype, c->optimizer, states);
    for (int32_t k = 0; k < n; k++) {
        int32_t geometry = states[k].geometry;
        bool has_rows = peri__has_rows(geometry);
        *(has_rows ? of_rows : others) +=
            (double)peri__state_elements(geometry, rows, t->cols, elements) * (double)peri_dtype_size(states[k].dtype);
    }
    if (peri__tbe_slot_rows(c)) *of_rows += (double)rows * (double)sizeof(int64_t);
    return PERI_OK;
}

static int64_t saturated_bytes(double bytes)
{
    return bytes < (double)(INT64_MAX / 2) ? (int64_t)bytes : INT64_MAX / 2;
}

/** The sum over all tables of @c, in bytes. @apart: the device has a memory of its own. Rows that are mapped from the
 *  host's memory then count as the host's. An estimate too large for an int64_t ends at INT64_MAX / 2. */
static peri_status add_up_tables(const peri_tbe_config *c, bool apart, peri_tbe_bytes *out)
{
    double of_rows = 0, others = 0, host = 0, files = 0;
    PERI_TRY(peri__tbe_check(c));
    for (int64_t i = 0; i < c->n_tables; i++) {
        int64_t rows = c->tables[i].rows;
        if (c->caches) PERI_TRY(peri__tier_bytes(c, i, apart, &rows, &host, &files));
        PERI_TRY(table_bytes(c, i, rows, &of_rows, &others));
    }
    bool mapped = c->mapped && apart;
    *out = (peri_tbe_bytes){.device = saturated_bytes(mapped ? others : of_rows + others),
                            .host = saturated_bytes(mapped ? host + of_rows : host),
                            .files = saturated_bytes(files)};
    return PERI_OK;
}

bool peri_tbe_width_is_common(int64_t cols)
{
#define COMMON(unused, width) || cols == (width)
    return false PERI_TBE_WIDTHS(COMMON, 0);
#undef COMMON
}

peri_status peri_tbe_bytes_of(const peri_tbe_config *given, bool apart, peri_tbe_bytes *out)
{
    peri_tbe_config c;
    PERI_NEED(out);
    PERI_TRY(peri__tbe_config_of_today(given, "peri_tbe_bytes_of", &c));
    peri_status status = add_up_tables(&c, apart, out);
    peri__tbe_config_free(&c);
    return status;
}
