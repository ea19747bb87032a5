/* SPDX-License-Identifier: Apache-2.0
 *
 * reader.c: reading rectangles of tensors from the pieces that they meet (pieces.c). A piece of an increment that has
 * some rows only is laid over what the parent has.
 */
#include "../embed/embed_internal.h"
#include "pieces.h"

#include <stdio.h>
#include <xxhash.h>

/* -- some rows ----------------------------------------------------------------------------------------------------- */

/** Files of a parent are closed when they were read: chains may be long. */
static void close_files(peri_checkpoint *c)
{
    for (int k = 0; k < 2; k++) {
        peri__io_file_free(c->open[k]);
        c->open[k] = NULL;
        c->file[k] = -1;
    }
}

/** A piece of some rows. */
typedef struct listed {
    peri_checkpoint *c;
    const peri__entry *e;
    const peri__stored_piece *piece, *list; /* list: the piece that has their numbers */
    peri__region has;
    int64_t row, before; /* bytes of a row; the number before those that are read next, -1: unknown or none */
} listed;

/** Numbers [from, from + n) of the list: ascending, and rows of the piece. */
static peri_status list_numbers(listed *l, int64_t from, int64_t n, int64_t *out)
{
    PERI_TRY(peri__piece_get(l->c, l->list, PERI_I64, out, n * 8, from * 8));
    for (int64_t i = 0; i < n; i++) {
        const bool within = out[i] >= l->has.offset[0] && out[i] - l->has.offset[0] < l->has.size[0];
        if (within && out[i] > l->before) {
            l->before = out[i];
            continue;
        }
        return peri__fail(
            PERI_EFORMAT,
            "checkpoint '%.150s': the rows that it has of tensor '%.150s' %s: number %lld is %lld, allowed: "
            "ascending, %lld to %lld",
            l->c->folder, peri__entry_name(&l->c->m, l->e), within ? "are in disorder" : "are not those of its piece",
            (long long)(from + i), (long long)out[i], (long long)l->has.offset[0],
            (long long)(l->has.offset[0] + l->has.size[0] - 1));
    }
    return PERI_OK;
}

/** The first number of the list that is @row or more. */
static peri_status list_find(listed *l, int64_t row, int64_t *out)
{
    int64_t low = 0, high = l->piece->listed;
    while (low < high) {
        int64_t middle = low + (high - low) / 2, number;
        l->before = -1;
        PERI_TRY(list_numbers(l, middle, 1, &number));
        if (number < row) low = middle + 1;
        else high = middle;
    }
    l->before = -1;
    *out = low;
    return PERI_OK;
}

/** What the rectangle and the listed rows of piece @p share, over what is there. A piece that is read as a whole is
 *  compared with its checksum, and so is its list. */
static peri_status lay_over(peri_checkpoint *c, const peri__entry *e, const peri__stored_piece *p,
                            const peri__target *to)
{
    enum { NUMBERS = 1024 };
    int64_t at, numbers[NUMBERS], n;
    listed l = {.c = c, .e = e, .piece = p};
    peri__copying k = {.ndim = to->ndim, .size = to->size};
    bool whole = true;
    if (p->listed == 0) return PERI_OK;
    l.list = &c->m.pieces[peri__rows_entry(&c->m, p)->first_piece];
    peri__piece_region(&c->m, e, p, &l.has);
    for (int32_t d = 0; d < k.ndim; d++) {
        k.low[d] = peri__max(l.has.offset[d], to->want.offset[d]);
        k.high[d] = peri__min(l.has.offset[d] + l.has.size[d], to->want.offset[d] + to->want.size[d]);
        if (k.low[d] >= k.high[d]) return PERI_OK;
        whole = whole && k.high[d] - k.low[d] == l.has.size[d];
        k.from[d] = l.has.offset[d];
    }
    peri__strides(k.ndim, l.has.size, to->size, k.from_stride);
    l.row = k.from_stride[0];
    const int64_t first = k.low[0], past = k.high[0], step = peri__max(1, peri__min(NUMBERS, PERI__READ_BLOCK / l.row));
    PERI_TRY(list_find(&l, first, &at));
    PERI_TRY(peri__need_buffer(c, step * l.row));
    XXH3_state_t *hash = whole && p->checked ? XXH3_createState() : NULL, *list_hash = hash ? XXH3_createState() : NULL;
    peri_status status = whole && p->checked && !list_hash ? PERI_ENOMEM : PERI_OK;
    if (list_hash) XXH3_64bits_reset(hash), XXH3_64bits_reset(list_hash);
    for (bool more = true; status >= 0 && more && at < p->listed; at += n) {
        n = peri__min(step, p->listed - at);
        status = list_numbers(&l, at, n, numbers);
        while (status >= 0 && n > 0 && numbers[n - 1] >= past) n--, more = false;
        if (status >= 0 && n > 0) status = peri__piece_get(c, p, to->dtype, c->tools->buffer, n * l.row, at * l.row);
        if (status < 0 || n == 0) break;
        if (list_hash) {
            XXH3_64bits_update(list_hash, numbers, (size_t)n * 8);
            XXH3_64bits_update(hash, c->tools->buffer, (size_t)(n * l.row));
        }
        for (int64_t i = 0; status >= 0 && i < n; i++) {
            k.low[0] = k.from[0] = numbers[i];
            k.high[0] = numbers[i] + 1;
            status = peri__deliver(to, &k, c->tools->buffer + i * l.row, NULL);
        }
    }
    if (status >= 0 && list_hash && XXH3_64bits_digest(list_hash) != l.list->checksum)
        status = peri__damaged(c, peri__rows_entry(&c->m, p), l.list);
    if (status >= 0 && hash && XXH3_64bits_digest(hash) != p->checksum) status = peri__damaged(c, e, p);
    XXH3_freeState(hash);
    XXH3_freeState(list_hash);
    return status;
}

/* -- pieces of different columns ----------------------------------------------------------------------------------- */

/** Pieces [first, past) of one set of columns, and how many of the rectangle's columns are among them. */
typedef struct group {
    int64_t first, past, share;
} group;

/** The next group behind piece @first; false: there is none. */
static bool next_group(const peri__manifest *m, const peri__entry *e, const peri__region *want, int64_t first,
                       group *out)
{
    const int64_t stop = e->first_piece + e->n_pieces, at = 2 * e->ndim;
    if (first >= stop) return false;
    const int64_t *n = m->numbers + m->pieces[first].numbers + at;
    *out = (group){.first = first, .past = first + 1, .share = n[1] ? n[1] : 1};
    while (out->past < stop && memcmp(m->numbers + m->pieces[out->past].numbers + at, n, 2 * sizeof *n) == 0)
        out->past++;
    if (n[1] && want->columns)
        out->share = peri__max(0, peri__min(n[0] + n[1], want->column + want->columns) - peri__max(n[0], want->column));
    return true;
}

/** The group of @parent's pieces of a tensor that has the columns of piece @like of @c; pieces that lie over others lie
 *  over the same. */
static peri_status same_group(const peri_checkpoint *c, const peri__entry *e, int64_t like, const peri__entry **entry,
                              group *out)
{
    const peri_checkpoint *parent = c->parent;
    const char *name = peri__entry_name(&c->m, e);
    const int64_t *columns = c->m.numbers + c->m.pieces[like].numbers + 2 * e->ndim;
    const peri__region any = {0};
    if (!parent)
        return peri__fail(
            PERI_EINVAL,
            "checkpoint '%.200s' is an increment and was opened alone: it has only some rows of tensor '%.150s'",
            c->folder, name);
    PERI_TRY(peri__checkpoint_unfold(c->parent, name));
    *entry = peri__entry_named(&parent->m, name);
    if (!*entry || (*entry)->dtype != e->dtype || (*entry)->ndim != e->ndim ||
        memcmp(peri__entry_shape(&parent->m, *entry), peri__entry_shape(&c->m, e),
               (size_t)e->ndim * sizeof(int64_t)) != 0) /* it was there: check_parent in chain.c */
        return peri__fail(PERI_EFORMAT, "checkpoint '%.200s': its manifest was changed while it was open",
                          parent->folder);
    for (int64_t k = (*entry)->first_piece; next_group(&parent->m, *entry, &any, k, out); k = out->past)
        if (memcmp(parent->m.numbers + parent->m.pieces[k].numbers + 2 * e->ndim, columns, 2 * sizeof *columns) == 0)
            return PERI_OK;
    return peri__fail(PERI_EFORMAT,
                      "checkpoint '%.150s': tensor '%.150s' has some rows of columns %lld to %lld; its parent '%.150s' "
                      "is cut otherwise",
                      c->folder, name, (long long)columns[0], (long long)(columns[0] + columns[1]), parent->folder);
}

/** Whether a piece has something of the rectangle. */
static bool meets(const peri_checkpoint *c, const peri__entry *e, const peri__stored_piece *p, const peri__target *to)
{
    const int64_t *offset = c->m.numbers + p->numbers, *size = offset + e->ndim;
    for (int32_t d = 0; d < e->ndim; d++)
        if (offset[d] >= to->want.offset[d] + to->want.size[d] || to->want.offset[d] >= offset[d] + size[d])
            return false;
    return true;
}

/** Some rows of the pieces: first what the parent has, then these. */
static peri_status read_group(peri_checkpoint *c, const peri__entry *e, const group *g, const peri__target *to)
{
    peri_status status = PERI_OK;
    bool some = false;
    for (int64_t k = g->first; k < g->past && !some; k++) {
        const peri__entry *entry = NULL;
        group under;
        if (!c->m.pieces[k].rows || !meets(c, e, &c->m.pieces[k], to)) continue; /* whole ones cover the rest */
        some = true;
        if (to->levels == 1) continue;
        peri__target below = *to;
        below.levels--;
        PERI_TRY(same_group(c, e, k, &entry, &under));
        PERI_TRY(read_group(c->parent, entry, &under, &below));
    }
    for (int64_t k = g->first; status >= 0 && k < g->past; k++) {
        const peri__stored_piece *p = &c->m.pieces[k];
        status = p->rows ? lay_over(c, e, p, to) : peri__read_piece(c, e, p, to);
    }
    if (c->inner) close_files(c);
    return status;
}

static void add_scaled(double *sum, const char *values, int64_t n, int32_t dtype, double scale)
{
    for (int64_t i = 0; i < n; i++)
        sum[i] += scale * (dtype == PERI_F32 ? (double)((const float *)values)[i] : ((const double *)values)[i]);
}

/** The mean of several groups, weighted by their shares, for rows [row, row + n) of the rectangle; numbers that are not
 *  f32 or f64 must be equal. @memory: n rows of the rectangle twice; @sum: as many doubles. */
static peri_status mean_rows(peri_checkpoint *c, const peri__entry *e, const peri__target *to, int64_t row, int64_t n,
                             char *memory, double *sum)
{
    peri__target part = *to;
    group g;
    int64_t shares = 0, elements;
    part.memory = memory;
    part.want.offset[0] += row;
    part.want.size[0] = n;
    elements = peri__volume(part.ndim, part.want.size);
    char *first = memory + elements * to->size;
    const bool number = e->dtype == PERI_F32 || e->dtype == PERI_F64;
    memset(sum, 0, (size_t)elements * sizeof *sum);
    for (int64_t k = e->first_piece; next_group(&c->m, e, &to->want, k, &g); k = g.past) {
        if (!g.share) continue;
        PERI_TRY(read_group(c, e, &g, &part));
        if (number) add_scaled(sum, memory, elements, e->dtype, (double)g.share);
        else if (!shares) memcpy(first, memory, (size_t)(elements * to->size));
        else if (memcmp(first, memory, (size_t)(elements * to->size)) != 0)
            return peri__fail(
                PERI_EMISMATCH,
                "peri_checkpoint_read: tensor '%.200s': pieces of different columns differ, and %s has no mean",
                peri__entry_name(&c->m, e), peri_dtype_name(e->dtype));
        shares += g.share;
    }
    for (int64_t i = 0; number && i < elements; i++) {
        const double mean = sum[i] / (double)shares;
        if (e->dtype == PERI_F32) ((float *)memory)[i] = (float)mean;
        else ((double *)memory)[i] = mean;
    }
    if (to->memory) {
        memcpy(to->memory + row * (elements / n) * to->size, memory, (size_t)(elements * to->size));
        return PERI_OK;
    }
    peri_tensor *rows;
    PERI_TRY(peri_tensor_slice(to->view, 0, row, row + n, 1, &rows));
    peri_status status = peri_tensor_write(rows, memory, elements * to->size);
    peri_tensor_release(rows);
    return status;
}

static peri_status read_mean(peri_checkpoint *c, const peri__entry *e, const peri__target *to)
{
    const int64_t rows = to->want.size[0], width = peri__volume(to->ndim, to->want.size) / rows;
    const int64_t step = peri__max(1, peri__min(rows, (PERI__IO_BLOCK / 16) / width));
    double *sum = peri__alloc((size_t)(step * width) * sizeof *sum);
    char *memory = peri__alloc((size_t)(2 * step * width * to->size));
    peri_status status = sum && memory ? PERI_OK : PERI_ENOMEM;
    for (int64_t row = 0; status >= 0 && row < rows; row += step)
        status = mean_rows(c, e, to, row, peri__min(step, rows - row), memory, sum);
    peri__free(sum);
    peri__free(memory);
    return status;
}

/** Whether a group of pieces has some rows only. */
static bool has_lists(const peri_checkpoint *c, const group *g)
{
    for (int64_t k = g->first; k < g->past; k++)
        if (c->m.pieces[k].rows) return true;
    return false;
}

/** A group whose rows come from several checkpoints, into a view of a tensor that the host cannot write to: by blocks
 *  of rows. */
static peri_status read_blocks(peri_checkpoint *c, const peri__entry *e, const group *g, const peri__target *to)
{
    const int64_t rows = to->want.size[0], row = peri__volume(to->ndim, to->want.size) / rows * to->size;
    const int64_t step = peri__max(1, peri__min(rows, PERI__IO_BLOCK / row));
    char *memory = peri__alloc((size_t)(step * row));
    peri_status status = memory ? PERI_OK : PERI_ENOMEM;
    for (int64_t r = 0; status >= 0 && r < rows; r += step) {
        peri__target part = *to;
        peri_tensor *into;
        part.memory = memory;
        part.want.offset[0] += r;
        part.want.size[0] = peri__min(step, rows - r);
        status = read_group(c, e, g, &part);
        if (status >= 0) status = peri_tensor_slice(to->view, 0, r, r + part.want.size[0], 1, &into);
        if (status < 0) break;
        status = peri_tensor_write(into, memory, part.want.size[0] * row);
        peri_tensor_release(into);
    }
    peri__free(memory);
    return status;
}

/** By the groups that share columns with the rectangle. */
static peri_status read_all(peri_checkpoint *c, const peri__entry *e, const peri__target *to)
{
    group g, only = {0};
    int64_t groups = 0;
    for (int64_t k = e->first_piece; next_group(&c->m, e, &to->want, k, &g); k = g.past)
        if (g.share) groups++, only = g;
    if (groups == 1)
        return !to->memory && has_lists(c, &only) ? read_blocks(c, e, &only, to) : read_group(c, e, &only, to);
    if (groups > 1) return read_mean(c, e, to);
    return peri__fail(PERI_EMISMATCH, "peri_checkpoint_read: tensor '%.200s': no piece has columns %lld to %lld",
                      peri__entry_name(&c->m, e), (long long)to->want.column,
                      (long long)(to->want.column + to->want.columns));
}

/** The view of @out that has the rectangle's shape. */
static peri_status view_of(const peri__target *to, const peri_tensor_info *d, peri_tensor *out, peri_tensor **view)
{
    if (d->contiguous) return peri_tensor_reshape(out, to->ndim, to->want.size, view);
    if (d->ndim == to->ndim && memcmp(d->shape, to->want.size, (size_t)to->ndim * sizeof *d->shape) == 0) {
        peri_tensor_retain(out);
        *view = out;
        return PERI_OK;
    }
    return peri__fail(PERI_EINVAL, "peri_checkpoint_read: out is neither contiguous nor of the rectangle's shape");
}

/** Rectangle @region of a tensor, all of it. */
static peri__target target_of(const peri__entry *e, const peri__region *region)
{
    peri__target to = {.want = *region,
                       .ndim = e->ndim ? e->ndim : 1,
                       .dtype = e->dtype,
                       .size = peri_dtype_size(e->dtype),
                       .levels = INT64_MAX};
    if (e->ndim == 0) to.want.offset[0] = 0, to.want.size[0] = 1;
    return to;
}

/** Rows of a quantized table, in which @out lies, are stored as the checkpoint says, if it says something of them. */
static peri_status check_format(peri_checkpoint *c, const peri__entry *e, const peri_tensor *out, const char *function)
{
    const char *name = peri__entry_name(&c->m, e), *there;
    char here[PERI__FORMAT_ROOM];
    int64_t cols;
    const int32_t coded = e->dtype == PERI_U8 ? peri__tbe_coded_rows(out, &cols) : 0;
    if (!coded) return PERI_OK;
    PERI_TRY(peri__format_of(&c->formats, peri_checkpoint_values(c), name, &there));
    if (!there || strcmp(peri__format_text(coded, cols, here), there) == 0) return PERI_OK;
    return peri__fail(PERI_EMISMATCH, "%s: tensor '%.200s' has rows of %s here, and rows of %.60s in the checkpoint",
                      function, name, here, there);
}

peri_status peri_checkpoint_read(peri_checkpoint *c, int64_t index, const peri_checkpoint_region *region,
                                 peri_tensor *out)
{
    peri__region r;
    const peri__entry *e;
    peri_tensor_info d = {.size = sizeof d};
    int64_t elements;
    char what[PERI_MESSAGE_MAX];
    PERI_NEED(region);
    PERI_NEED(out);
    PERI_TRY(peri__entry_at(c, "peri_checkpoint_read", index, &e));
    snprintf(what, sizeof what, "peri_checkpoint_read: tensor '%.200s'", peri__entry_name(&c->m, e));
    PERI_TRY(peri__region_take(&r, region, __func__));
    PERI_TRY(peri__region_check(what, e->ndim, peri__entry_shape(&c->m, e), &r, &elements));
    peri_tensor_describe(out, &d);
    if (d.dtype != e->dtype || d.numel != elements)
        return peri__fail(PERI_EINVAL, "%s: out has %lld elements of %s, wanted: %lld of %s", what, (long long)d.numel,
                          peri_dtype_name(d.dtype), (long long)elements, peri_dtype_name(e->dtype));
    if (elements == 0) return PERI_OK;
    PERI_TRY(check_format(c, e, out, "peri_checkpoint_read"));
    peri__target to = target_of(e, &r);
    if (d.contiguous && peri__immediate(d.device)) {
        to.memory = peri__data(out);
        peri__changed(out);
        return read_all(c, e, &to);
    }
    const bool recording = peri__grad_swap(false);
    peri_status status = view_of(&to, &d, out, &to.view);
    if (status >= 0) status = read_all(c, e, &to);
    if (to.view) peri_tensor_release(to.view);
    peri__grad_swap(recording);
    return status;
}

/** The smallest rectangle that has all of several; false: they lie so far apart that most of it would be read for
 *  nobody. */
static bool joined(const peri__entry *e, const peri__file_share *shares, int64_t n, peri__region *all)
{
    int64_t elements = 0;
    *all = shares[0].want;
    for (int64_t i = 0; i < n; i++) {
        const peri__region *r = &shares[i].want;
        elements += peri__volume(e->ndim, r->size);
        for (int32_t d = 0; d < e->ndim; d++) {
            const int64_t past = peri__max(all->offset[d] + all->size[d], r->offset[d] + r->size[d]);
            all->offset[d] = peri__min(all->offset[d], r->offset[d]);
            all->size[d] = past - all->offset[d];
        }
    }
    return elements > peri__volume(e->ndim, all->size) / 2;
}

/** Several rectangles at once; *done false: they are not such as can be. */
static peri_status read_shares(peri_checkpoint *c, int64_t index, const peri_checkpoint_region *const *regions,
                               peri_tensor *const *outs, int64_t n, bool *done)
{
    static const char f[] = "peri_checkpoint_read_several";
    const peri__entry *e;
    group g;
    int64_t groups = 0, elements;
    peri__region all;
    *done = false;
    PERI_TRY(peri__entry_at(c, f, index, &e));
    if (n < 2 || e->ndim < 1) return PERI_OK;
    peri__file_share *shares = peri__alloc(sizeof *shares * (size_t)n);
    if (!shares) return PERI_ENOMEM;
    peri_status status = PERI_OK;
    bool fits = true;
    for (int64_t i = 0; status >= 0 && fits && i < n; i++) {
        peri_tensor_info d = {.size = sizeof d};
        peri_tensor_describe(outs[i], &d);
        status = peri__region_take(&shares[i].want, regions[i], f);
        if (status >= 0)
            status = peri__region_check(f, e->ndim, peri__entry_shape(&c->m, e), &shares[i].want, &elements);
        if (status >= 0) status = check_format(c, e, outs[i], f);
        fits = status >= 0 && d.dtype == e->dtype && d.numel == elements && elements > 0 && d.contiguous &&
               peri__immediate(d.device) && !shares[i].want.columns;
        shares[i].memory = fits ? peri__data(outs[i]) : NULL;
    }
    fits = fits && status >= 0 && joined(e, shares, n, &all);
    for (int64_t k = e->first_piece; fits && next_group(&c->m, e, &all, k, &g); k = g.past) groups++;
    if (groups == 1) {
        peri__target to = target_of(e, &all);
        to.memory = shares[0].memory;
        to.shares = shares;
        to.n_shares = n;
        for (int64_t i = 0; i < n; i++) peri__changed(outs[i]);
        status = read_all(c, e, &to);
        *done = true;
    }
    peri__free(shares);
    return status;
}

peri_status peri_checkpoint_read_several(peri_checkpoint *c, int64_t index,
                                         const peri_checkpoint_region *const *regions, peri_tensor *const *outs,
                                         int32_t n)
{
    bool done;
    PERI_NEED(regions);
    PERI_NEED(outs);
    if (n < 0) return peri__fail(PERI_EINVAL, "peri_checkpoint_read_several: %d rectangles", n);
    for (int64_t i = 0; i < n; i++)
        if (!regions[i] || !outs[i])
            return peri__fail(PERI_EINVAL, "peri_checkpoint_read_several: rectangle or tensor %lld is missing",
                              (long long)i);
    PERI_TRY(read_shares(c, index, regions, outs, n, &done));
    for (int64_t i = 0; !done && i < n; i++) PERI_TRY(peri_checkpoint_read(c, index, regions[i], outs[i]));
    return PERI_OK;
}

peri_status peri__checkpoint_read_host(peri_checkpoint *c, int64_t index, const peri__region *region, void *out)
{
    const peri__entry *e = &c->m.entries[index];
    peri__target to = target_of(e, region);
    to.memory = out;
    return read_all(c, e, &to);
}

/* -- what increments have ------------------------------------------------------------------------------------------ */

peri_status peri_checkpoint_read_since(peri_checkpoint *c, int64_t level, int64_t index,
                                       const peri_checkpoint_region *region, void *out)
{
    peri__region r;
    const peri__entry *e;
    int64_t elements, groups = 0;
    char what[PERI_MESSAGE_MAX];
    group g;
    PERI_NEED(region);
    PERI_NEED(out);
    PERI_TRY(peri__entry_at(c, "peri_checkpoint_read_since", index, &e));
    if (level < -1 || level >= peri_checkpoint_levels(c))
        return peri__fail(PERI_EINVAL, "peri_checkpoint_read_since: level %lld, allowed: -1 to %lld", (long long)level,
                          (long long)peri_checkpoint_levels(c) - 1);
    snprintf(what, sizeof what, "peri_checkpoint_read_since: tensor '%.200s'", peri__entry_name(&c->m, e));
    PERI_TRY(peri__region_take(&r, region, __func__));
    PERI_TRY(peri__region_check(what, e->ndim, peri__entry_shape(&c->m, e), &r, &elements));
    if (elements == 0 || level == 0) return PERI_OK;
    peri__target to = target_of(e, &r);
    to.memory = out;
    for (int64_t k = e->first_piece; next_group(&c->m, e, &to.want, k, &g); k = g.past) groups += g.share > 0;
    /* else numbers of several pieces make one, and all of them are read */
    if (level > 0 && groups == 1) to.levels = level;
    return read_all(c, e, &to);
}

/** The list of piece @piece of tensor @index. */
static peri_status listed_at(peri_checkpoint *c, const char *f, int64_t index, int64_t piece, listed *l)
{
    *l = (listed){.c = c, .before = -1};
    PERI_TRY(peri__piece_at(c, f, index, piece, &l->e, &l->piece));
    if (!l->piece->rows)
        return peri__fail(PERI_EINVAL, "%s: piece %lld of tensor '%.200s' has all its rows; allowed: one with a list",
                          f, (long long)piece, peri__entry_name(&c->m, l->e));
    l->list = &c->m.pieces[peri__rows_entry(&c->m, l->piece)->first_piece];
    peri__piece_region(&c->m, l->e, l->piece, &l->has);
    l->row = l->piece->listed ? l->piece->bytes / l->piece->listed : 0;
    return PERI_OK;
}

peri_status peri_checkpoint_piece_find(peri_checkpoint *c, int64_t index, int64_t piece, int64_t row, int64_t *out)
{
    listed l;
    PERI_NEED(c);
    PERI_NEED(out);
    PERI_TRY(listed_at(c, "peri_checkpoint_piece_find", index, piece, &l));
    return list_find(&l, row, out);
}

peri_status peri_checkpoint_piece_rows(peri_checkpoint *c, int64_t index, int64_t piece, int64_t from, int64_t many,
                                       int64_t *rows, void *values)
{
    static const char f[] = "peri_checkpoint_piece_rows";
    listed l;
    PERI_NEED(c);
    PERI_NEED(rows);
    PERI_NEED(values);
    PERI_TRY(listed_at(c, f, index, piece, &l));
    const peri__entry *e = l.e;
    const peri__stored_piece *p = l.piece;
    if (from < 0 || many < 0 || many > p->listed || from > p->listed - many)
        return peri__fail(
            PERI_EINVAL,
            "%s: %lld rows from number %lld on, allowed: within the %lld that piece %lld of tensor '%.150s' has", f,
            (long long)many, (long long)from, (long long)p->listed, (long long)piece, peri__entry_name(&c->m, e));
    if (many == 0) return PERI_OK;
    PERI_TRY(list_numbers(&l, from, many, rows));
    return peri__piece_get(c, p, e->dtype, values, many * l.row, from * l.row);
}

static peri_status verify_all(peri_checkpoint *c)
{
    PERI_TRY(peri_checkpoint_verify_headers(c));
    for (int64_t i = 0; i < c->m.n_entries; i++)
        for (int64_t k = 0; k < c->m.entries[i].n_pieces; k++) PERI_TRY(peri_checkpoint_verify(c, i, k));
    return PERI_OK;
}

peri_status peri_checkpoint_verify_since(peri_checkpoint *c, int64_t level)
{
    PERI_NEED(c);
    peri_status status = PERI_OK;
    for (; c && level != 0 && status >= 0; c = c->parent, level--) {
        if (c->inner) PERI_TRY(peri__checkpoint_unfold_all(c));
        status = verify_all(c);
        if (c->inner) close_files(c);
        if (c->inner && peri__manifest_fold(&c->m) < 0) return PERI_ENOMEM;
    }
    return status;
}
