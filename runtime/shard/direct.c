/* SPDX-License-Identifier: Apache-2.0
 *
 * direct.c: rows between other ranks and where they belong at home, without a buffer of what travels. Rows that arrive would be written
 * there only to be moved to the results; gradients that leave would be moved there only to be sent. Where the transport can call functions
 * in place of a buffer (peri__transfer_direct), what arrives is written where the results want it, and what leaves is read where the
 * gradients of the results lie, a block at a time, while that is in the caches.
 *
 * A *segment* is what a lookup of another rank has for this one: its rows lie together as they travel, and apart at home. Rows that are
 * added up with others, or are a result as they are, still go to the buffer. Of a variable batch a bag's row is that of its first sample
 * (repeats.c). Layouts that differ by direction go the long way.
 */
#include "module.h"

#include "../base/tune.h"

#include <stdlib.h>

enum {
    /* Rows that are moved between ranks go past the caches from this part of the bytes on from which lookups write so: two processors have
     * to do with a line. Bags of 1 id, 2 and 4 ranks: as fast at 3.4 MB of a node, 0.85 to 0.93 times as long from 7 to 20 MB. */
    SOONER = 8,
    WINDOW = 128 << 10, /* bytes of rows that are read together: half of it and twice it take 1.0 times as long */
    STRETCHES = 64,     /* that are filled together */
    LINE = 64
};

typedef struct segment {
    int64_t first, n;     /* elements as they travel: as the buffer of the home would have them */
    int64_t cols, stride; /* of a row; from row to row at home */
    int64_t ground, column; /* of rows of ids: which they are parts of (the first one's number at home); first column of these */
    float *values;        /* at home: row 0, first column */
    const int32_t *index; /* row i at home; NULL: i */
    double divisor;
} segment;

struct peri__direct {
    peri__refs refs;
    bool back, past;
    bool by_rows; /* ranks have parts of the same rows */
    int32_t n, n_kept;
    segment *segments; /* by first */
    struct direct_lane {
        peri__direct *direct;
        int64_t begin, end; /* elements of its segments */
        bool on, useful;    /* useful: not all rows go to the buffer */
        peri__transfer_direct functions;
    } lanes[PERI__LANES];
    peri_tensor *kept[]; /* n_kept, retained */
};

static float *floats(const peri_tensor *t) { return peri__data(t); }

/* -- moving ------------------------------------------------------------------------------------------------------------------------ */

/** The segment that has element @at. */
static const segment *segment_at(const peri__direct *d, int64_t at)
{
    int32_t low = 0, high = d->n;
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        if (d->segments[middle].first <= at) low = middle;
        else high = middle;
    }
    return &d->segments[low];
}

/** Move what @n elements from @at of a segment, the first of @data, allow at once: whole rows, or a part of one. Returns how many. */
static int64_t move_some(const peri__direct *d, const segment *s, int64_t at, int64_t n, float *data, bool past)
{
    const int64_t row = (at - s->first) / s->cols, skip = (at - s->first) % s->cols, left = peri__min(n, s->first + s->n - at);
    const bool whole = skip == 0 && left >= s->cols;
    const int64_t cols = whole ? s->cols : peri__min(left, s->cols - skip), rows = whole ? left / cols : 1;
    peri_k_route_lines_args args = {.values = s->values + skip + (s->index ? 0 : row * s->stride), .together = data, .stride = s->stride,
                                    .cols = cols, .index = s->index ? s->index + row : NULL, .divisor = s->divisor, .back = d->back,
                                    .past = past};
    peri_kernels_get()->fn[PERI_K_route_lines](&args, 0, rows);
    return rows * cols;
}

static void move(const struct direct_lane *lane, int64_t from, int64_t n, float *data, bool past)
{
    const peri__direct *d = lane->direct;
    for (int64_t at = lane->begin + from, some; n > 0; at += some, data += some, n -= some)
        some = move_some(d, segment_at(d, at), at, n, data, past);
}

/** A stretch that is filled together with others: what is left of it, and the segment that this begins in. */
typedef struct cursor {
    int64_t at, n;
    float *data;
    const segment *s;
    int64_t rows; /* of the segment, in this window */
} cursor;

static int64_t row_of(const cursor *c) { return (c->at - c->s->first) / c->s->cols; }
static int64_t place_of(const cursor *c, int64_t row) { return c->s->index ? c->s->index[row] : row; }

static void advance(const peri__direct *d, cursor *c, int64_t some)
{
    c->at += some;
    c->data += some;
    c->n -= some;
    if (c->n > 0 && c->at >= c->s->first + c->s->n) c->s = segment_at(d, c->at);
}

/** Whole rows of a cursor's segment at home before row @past there, or one: rows go upwards. */
static int64_t rows_before(const cursor *c, int64_t past)
{
    const int64_t first = row_of(c), left = peri__min(c->n, c->s->first + c->s->n - c->at) / c->s->cols;
    int64_t low = 1, high = peri__max(1, peri__min(left, past - place_of(c, first)));
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (place_of(c, first + middle) < past) low = middle + 1;
        else high = middle;
    }
    return low;
}

/** Read rows [from, past) at home, so that their parts are in the caches: those of one rank alone lie apart, and hardware fetches in vain
 *  what lies between, or nothing ahead. */
static void read_rows(const segment *s, int64_t from, int64_t past)
{
    const char *at = (const char *)(s->values - s->column + from * s->stride);
    const char *end = at + (past - from) * s->stride * (int64_t)sizeof(float);
    for (; at < end; at += LINE) (void)*(const volatile char *)at;
}

/** The next rows of the cursors that have parts of those that come first at home. */
static void fill_window(const peri__direct *d, cursor *cursors, int32_t count)
{
    int64_t ground = INT64_MAX, first = INT64_MAX, past = 0, numbers = 0;
    const segment *s = NULL;
    int32_t n = 0;
    for (int32_t i = 0; i < count; i++)
        if (cursors[i].n > 0) ground = peri__min(ground, cursors[i].s->ground);
    for (int32_t i = 0; i < count; i++) {
        cursor *c = &cursors[i];
        if (c->n > 0 && c->s->ground == ground) first = peri__min(first, place_of(c, row_of(c)));
    }
    for (int32_t i = 0; i < count; i++) {
        cursor *c = &cursors[i];
        c->rows = 0;
        if (c->n == 0 || c->s->ground != ground) continue;
        s = c->s;
        const int64_t window = first + peri__max(1, WINDOW / (s->stride * (int64_t)sizeof(float))), row = row_of(c);
        if (place_of(c, row) >= window) continue;
        if ((c->at - s->first) % s->cols || c->n < s->cols) { /* a part of a row, at a stretch's ends */
            advance(d, c, move_some(d, s, c->at, c->n, c->data, d->past));
            continue;
        }
        c->rows = rows_before(c, window);
        past = peri__max(past, place_of(c, row + c->rows - 1) + 1);
        numbers += c->rows * s->cols;
        n++;
    }
    if (n > 1 && numbers * 2 >= (past - first) * s->stride) read_rows(s, first, past);
    for (int32_t i = 0; i < count; i++)
        if (cursors[i].rows > 0) {
            const int64_t some = cursors[i].rows * cursors[i].s->cols;
            move_some(d, cursors[i].s, cursors[i].at, some, cursors[i].data, d->past);
            advance(d, &cursors[i], some);
        }
}

static bool more(const cursor *cursors, int32_t count)
{
    for (int32_t i = 0; i < count; i++)
        if (cursors[i].n > 0) return true;
    return false;
}

static void fill(void *ctx, const peri_coll_stretch *stretches, int32_t count, bool stays)
{
    const struct direct_lane *lane = ctx;
    const peri__direct *d = lane->direct;
    cursor cursors[STRETCHES];
    const bool together = count > 1 && d->by_rows && stays;
    for (int32_t i = 0; !together && i < count; i++)
        move(lane, stretches[i].from, stretches[i].n, stretches[i].data, stays && d->past);
    for (int32_t i = 0; together && i < count; i += STRETCHES) {
        const int32_t n = count - i < STRETCHES ? count - i : STRETCHES;
        for (int32_t k = 0; k < n; k++) {
            const peri_coll_stretch *x = stretches + i + k;
            cursors[k] = (cursor){.at = lane->begin + x->from, .n = x->n, .data = x->data};
            cursors[k].s = segment_at(d, cursors[k].at);
        }
        while (more(cursors, n)) fill_window(d, cursors, n);
    }
}
/* The kernel of both directions has one argument for what it reads and writes; in this one it only reads. */
static void take(void *ctx, int64_t from, int64_t n, const void *data)
{
    const struct direct_lane *lane = ctx;
    move(lane, from, n, (float *)(uintptr_t)data, lane->direct->past);
}

static void retain(void *ctx) { peri__refs_add(&((struct direct_lane *)ctx)->direct->refs); }
static void release(void *ctx) { peri__direct_release(((struct direct_lane *)ctx)->direct); }

/* -- segments ---------------------------------------------------------------------------------------------------------------------- */

/** What segments are made of. */
typedef struct parts {
    const peri_sharded *e;
    const peri__home *h;
    const peri__given *given;
    const peri__direct_ends *ends;
    const int64_t *first_row; /* by result: its first row among those of all */
} parts;

static void add(peri__direct *d, const peri_k_piece *piece, int64_t rows, segment s)
{
    s.first = piece->offset + piece->first * s.cols;
    s.n = rows * s.cols;
    if (s.n > 0) d->segments[d->n++] = s;
}

/** The segments of bags: outputs of one piece are columns of the results; gradients of all pieces are. */
static bool add_bags(const parts *p, peri__direct *d)
{
    const peri_k_output *outputs = peri__upload_at(&p->h->up, p->h->outputs);
    const peri_k_piece *pieces = peri__upload_at(&p->h->up, p->h->pieces);
    const int64_t *bags = peri__upload_at(&p->h->up, p->h->output_bags);
    const int32_t *places = p->h->variable ? peri__data(peri__repeats_places(p->given->repeats)) : NULL;
    for (int32_t o = 0; o < p->h->n_outputs; o++)
        for (int64_t k = outputs[o].first_piece; k < outputs[o].first_piece + outputs[o].n_pieces; k++) {
            const bool there = d->back || outputs[o].n_pieces == 1;
            segment s = {.cols = outputs[o].cols, .stride = there ? p->e->cols : outputs[o].cols, .divisor = outputs[o].sent_divisor};
            s.values = there ? floats(p->ends->to[0]) + outputs[o].column : floats(p->ends->received) + pieces[k].offset;
            if (there && places) s.index = places + p->h->feature_first[p->h->output_feature[o]];
            if (!pieces[k].own) add(d, &pieces[k], bags[o], s);
        }
    return true;
}

/** The segments of rows of ids, which the results have in the order of the ids. False: nobody knows which ids a strand has. */
static bool add_ids(const parts *p, peri__direct *d)
{
    const peri_sharded *e = p->e;
    const peri_k_rows *outputs = peri__upload_at(&p->h->up, p->h->outputs);
    const peri_k_piece *pieces = peri__upload_at(&p->h->up, p->h->pieces);
    const int32_t *origins = p->given->origins ? peri__data(p->given->origins) : NULL;
    for (int32_t o = 0; o < p->h->n_outputs; o++) {
        const peri_k_rows *x = &outputs[o];
        const peri__wanted_rows *w = &p->h->wanted[o];
        const int64_t n = x->place_first < 0 ? 0 : e->routes->outputs[o].n_pieces;
        for (const peri_k_piece *piece = pieces + x->first_piece; piece < pieces + x->first_piece + n; piece++) {
            const bool there = d->back || w->joined >= 0;
            segment s = {.cols = x->cols, .stride = there ? e->cols : x->cols, .divisor = x->sent_divisor, .ground = x->row,
                         .column = there ? x->column : 0};
            if (piece->own || piece->n == 0) continue;
            if (!there) s.values = floats(p->ends->received) + piece->offset + piece->first * x->cols;
            else if (!d->back) s.values = floats(p->ends->to[0]) + w->joined * e->cols + x->column;
            else if (p->ends->apart) s.values = floats(p->ends->to[w->result]) + (x->row - p->first_row[w->result]) * e->cols + x->column;
            else s.values = floats(p->ends->to[0]) + x->row * e->cols + x->column;
            if (there && !x->all) {
                if (!origins) return false;
                s.index = origins + piece->first;
            }
            add(d, piece, piece->n, s);
        }
    }
    return true;
}

static int by_first(const void *a, const void *b)
{
    const segment *x = a, *y = b;
    return x->first < y->first ? -1 : x->first > y->first;
}

/** Whether the segments of a lane are all that travels in it, each element once. */
static bool covered(const peri__direct *d, struct direct_lane *lane, const float *received)
{
    int64_t at = lane->begin;
    for (int32_t i = 0; i < d->n; i++) {
        const segment *s = &d->segments[i];
        if (s->first < lane->begin || s->first >= lane->end) continue;
        if (s->first != at) return false;
        at += s->n;
        lane->useful = lane->useful || !received || s->values != received + s->first;
    }
    return at == lane->end;
}

/** Say which lanes can. False: none, or (rows of ids) not all. */
static bool make_lanes(const peri_sharded *e, const peri__home *h, peri__direct *d, const float *received)
{
    int64_t at = 0;
    bool any = false, all = true, useful = false;
    for (int32_t l = 0; l < PERI__LANES; l++) {
        struct direct_lane *lane = &d->lanes[l];
        *lane = (struct direct_lane){.direct = d, .begin = at, .end = at + h->lane_out[l]};
        at = lane->end;
        lane->functions = (peri__transfer_direct){.fill = d->back ? fill : NULL, .take = d->back ? NULL : take, .ctx = lane,
                                                  .retain = retain, .release = release};
        lane->on = peri__way_direct(&e->ways[l], d->back ? PERI__TO_OWNERS : PERI__TO_HOMES) && covered(d, lane, received);
        if (lane->begin == lane->end) continue;
        useful = useful || (lane->on && lane->useful);
        if (!e->kind->by_id) lane->on = lane->on && lane->useful;
        any = any || lane->on;
        all = all && lane->on;
    }
    return useful && (e->kind->by_id ? all : any);
}

static peri_status make_segments(const parts *p, peri__direct *d, bool *made)
{
    int64_t row = 0, *first = peri__alloc(sizeof *first * (size_t)peri__max(1, p->e->n_results));
    d->segments = peri__alloc(sizeof *d->segments * (size_t)peri__max(1, p->e->routes->n_pieces));
    peri_status status = first && d->segments ? PERI_OK : PERI_ENOMEM;
    parts x = *p;
    for (int32_t i = 0; i < p->e->n_results && status >= 0 && p->e->result_feature; i++) {
        first[i] = row;
        row += p->h->feature_rows[p->e->result_feature[i]];
    }
    x.first_row = first;
    if (status >= 0) {
        *made = p->e->kind->by_id ? add_ids(&x, d) : add_bags(&x, d);
        qsort(d->segments, (size_t)d->n, sizeof *d->segments, by_first);
        *made = *made && make_lanes(p->e, p->h, d, d->back ? NULL : floats(p->ends->received));
    }
    peri__free(first);
    return status;
}

/* -- the interface ----------------------------------------------------------------------------------------------------------------- */

peri_status peri__direct_new(const peri_sharded *e, const peri__home *h, const peri__given *given, const peri__direct_ends *ends, bool back,
                             peri__direct **out)
{
    int64_t past = 0;
    peri_tensor *sums = back && given->repeats ? peri__repeats_sums(given->repeats, &past) : NULL;
    *out = NULL;
    if (!e->places_own || e->world_size == 1 || h->n_pools || h->received_out == 0) return PERI_OK;
    if (!peri__stage_functions(e->group->comm, e->device)) return PERI_OK;
    if (h->variable && (!given->repeats || (back && !sums))) return PERI_OK;
    const int32_t n = ends->apart ? e->n_results : 1;
    peri__direct *d = peri__alloc_zero(sizeof *d + sizeof *d->kept * (size_t)(n + 4));
    if (!d) return PERI_ENOMEM;
    peri__refs_init(&d->refs);
    d->back = back;
    d->by_rows = e->kind->by_id;
    const int64_t least = peri__tune(PERI__TUNE_lookup_past), bytes = h->received_out * (int64_t)sizeof(float);
    d->past = least > 0 && bytes * e->node_group->size >= least / SOONER;
    for (int32_t i = 0; i < n; i++) d->kept[d->n_kept++] = ends->to[i];
    if (ends->received) d->kept[d->n_kept++] = ends->received;
    if (given->origins) d->kept[d->n_kept++] = given->origins;
    if (given->repeats) d->kept[d->n_kept++] = peri__repeats_places(given->repeats);
    if (sums) d->kept[d->n_kept++] = sums;
    for (int32_t i = 0; i < d->n_kept; i++) peri_tensor_retain(d->kept[i]);
    bool made = false;
    peri_status status = make_segments(&(parts){.e = e, .h = h, .given = given, .ends = ends}, d, &made);
    if (status >= 0 && made) *out = d;
    else peri__direct_release(d);
    return status;
}

void peri__direct_release(peri__direct *d)
{
    if (!d || !peri__refs_drop(&d->refs)) return;
    for (int32_t i = 0; i < d->n_kept; i++) peri_tensor_release(d->kept[i]);
    peri__free(d->segments);
    peri__free(d);
}

const peri__transfer_direct *peri__direct_lane(const peri__direct *d, int32_t lane)
{
    return d && d->lanes[lane].on ? &d->lanes[lane].functions : NULL;
}

bool peri__direct_has(const peri__direct *d, const peri_k_piece *piece)
{
    for (int32_t l = 0; d && !piece->own && l < PERI__LANES; l++)
        if (d->lanes[l].on && piece->offset >= d->lanes[l].begin && piece->offset < d->lanes[l].end) return true;
    return false;
}
