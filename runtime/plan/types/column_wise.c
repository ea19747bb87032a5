/* SPDX-License-Identifier: Apache-2.0
 *
 * column_wise.c: blocks of columns, all rows each. ranks: one per block in column order, a rank may hold several;
 * default all ranks. Blocks are of the given sizes; or even over the given ranks; or, without ranks, as even as they
 * can be: the first ranks have a step more, and ranks beyond the last step none. A block has a multiple of 4 columns
 * (rows are read 16 bytes at a time), unless it is the only one. Unlike TorchRec no rank that the plan names is dropped
 * silently: what does not divide is an error.
 */
#include "../plan_internal.h"

#include <stdio.h>

enum {
    STEP = 4,
    MOST = 1024 /* numbers of blocks that a message looks at */
};

/** The first numbers of even blocks that a table of @cols columns can have: "1, 2, 4". */
static const char *allowed(int64_t cols, char *text, size_t len)
{
    size_t used = (size_t)snprintf(text, len, "1");
    for (int64_t k = 2; k <= MOST && k <= cols / STEP && used + 12 < len; k++)
        if (cols % k == 0 && cols / k % STEP == 0)
            used += (size_t)snprintf(text + used, len - used, ", %lld", (long long)k);
    return text;
}

int64_t peri__block_cols(const peri_sharding *s, int32_t i, int32_t count)
{
    if (s->n_ranks || count == 1) return s->cols / count;
    int64_t steps = s->cols / STEP;
    return (steps / count + (i < steps % count)) * STEP;
}

peri_status peri__check_blocks(const peri_sharding *s, int32_t count, const peri__cut *cut)
{
    char text[160];
    const char *type = cut->type->name;
    /* whose rows are cut over the ranks of a node each */
    const bool blocks = cut->type->facts & PERI_SHARDING_CUTS_ROWS;
    if (count == 1) return PERI_OK;
    if (s->n_ranks && (s->cols % count || s->cols / count % STEP))
        return peri__fail(PERI_EINVAL,
                          "table '%s': %s cannot cut %lld columns into %d even blocks of a multiple of %d, allowed "
                          "numbers of %s: %s%s",
                          s->table, type, (long long)s->cols, count, STEP, blocks ? "blocks" : "ranks",
                          allowed(s->cols, text, sizeof text), blocks ? "" : "; or ranks with sizes");
    if (s->cols % STEP)
        return peri__fail(
            PERI_EINVAL,
            "table '%s': %s cannot cut %lld columns over %d %s, allowed: a multiple of %d columns, or one %s", s->table,
            type, (long long)s->cols, count, blocks ? "nodes" : "ranks", STEP, blocks ? "node" : "rank");
    return PERI_OK;
}

peri_status peri__cut_columns(const peri_sharding *s, const int32_t *ranks, int32_t count, peri__cut *cut)
{
    const char *type = cut->type->name;
    if (!s->sizes) PERI_TRY(peri__check_blocks(s, count, cut));
    int64_t at = 0;
    for (int32_t i = 0; i < count; i++) {
        int64_t cols = s->sizes ? s->sizes[i] : peri__block_cols(s, i, count);
        if (cols == 0 && !s->n_ranks) break;
        if (cols < 1 || cols > s->cols - at || (count > 1 && cols % STEP))
            return peri__fail(
                PERI_EINVAL,
                "table '%s': %s block %d of %lld columns starts at column %lld, allowed: positive multiples of %d that "
                "add up to %lld",
                s->table, type, i, (long long)cols, (long long)at, STEP, (long long)s->cols);
        PERI_TRY(peri__shard_add(
            s, cut, (peri_shard){.rows = s->rows, .col_offset = at, .cols = cols, .rank = ranks ? ranks[i] : i}));
        at += cols;
    }
    if (at != s->cols)
        return peri__fail(PERI_EINVAL, "table '%s': %s blocks have %lld columns together, the table has %lld", s->table,
                          type, (long long)at, (long long)s->cols);
    return PERI_OK;
}

static peri_status column_wise_shards(const peri_sharding *s, peri__cut *cut)
{
    return peri__cut_columns(s, s->n_ranks ? s->ranks : NULL, s->n_ranks ? s->n_ranks : s->world_size, cut);
}

const peri__sharding_type peri__column_wise = {
    .name = "column_wise", .facts = PERI_SHARDING_CUTS_COLUMNS, .shards = column_wise_shards};
