/* SPDX-License-Identifier: Apache-2.0
 *
 * unbuffered.c: rows between other ranks and the results, without a buffer at home for what travels. Rows that arrive
 * would be written there only to be moved to the results; gradients that leave would be moved there only to be sent.
 * Where the transport can call functions in place of a buffer (peri__transfer_direct), what arrives is written where
 * the results want it, and what leaves is read where the gradients of the results lie, a block at a time, while that is
 * in the caches.
 *
 * A *segment* is a line of the list (peri__line) with the addresses of a batch: rows that lie together as they travel,
 * and apart at home. Rows that are added up with others, or are a result as they are, still go to the buffer.
 */
#include "rows.h"
#include "../../kernels/route.h"
#include "../base/floats.h"

#include "../base/tune.h"

enum {
    /* Rows that are moved between ranks go past the caches from this part of the bytes on from which lookups write so:
     * two processors have to do with a line. Bags of 1 id, 2 and 4 ranks: as fast at 3.4 MB of a node, 0.85 to 0.93
     * times as long from 7 to 20 MB. */
    SOONER = 8,
    WINDOW = 128 << 10, /* bytes of rows that are read together: half of it and twice it take 1.0 times as long */
    STRETCHES = 64,     /* that are filled together */
    LINE = 64
};

typedef struct segment {
    int64_t first, n;     /* elements as they travel: as the buffer of the home would have them */
    int64_t cols, stride; /* of a row; from row to row at home */
    int64_t ground, column; /* of rows of ids: which they are parts of (the first one's number at home); first column of
                               these */
    float *values;        /* at home: row 0, first column */
    const int32_t *index; /* row i at home; NULL: i */
    double divisor;
} segment;

/** What the transport needs of a batch until it is done. */
struct peri__unbuffered {
    peri__refs refs;
    bool back, past;
    bool by_rows; /* ranks have parts of the same rows */
    int32_t n, n_kept;
    int64_t cols; /* of a whole row at home */
    segment *segments; /* by first */
    struct unbuffered_lane {
        peri__unbuffered *unbuffered;
        int64_t begin; /* the first element of its segments */
        peri__transfer_direct functions;
    } lanes[PERI__LANES];
    peri_tensor *kept[]; /* n_kept, retained */
};

/* -- moving -------------------------------------------------------------------------------------------------------- */

/** The segment that has element @at. */
static const segment *segment_at(const peri__unbuffered *d, int64_t at)
{
    int32_t low = 0, high = d->n;
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        if (d->segments[middle].first <= at) low = middle;
        else high = middle;
    }
    return &d->segments[low];
}

/** Move what @n elements from @at of a segment, the first of @data, allow at once: whole rows, or a part of one.
 *  Returns how many. */
static int64_t move_some(const peri__unbuffered *d, const segment *s, int64_t at, int64_t n, float *data, bool past)
{
    const int64_t row = (at - s->first) / s->cols, skip = (at - s->first) % s->cols,
                  left = peri__min(n, s->first + s->n - at);
    const bool whole = skip == 0 && left >= s->cols;
    const int64_t cols = whole ? s->cols : peri__min(left, s->cols - skip), rows = whole ? left / cols : 1;
    peri_k_route_lines_args args = {.values = s->values + skip + (s->index ? 0 : row * s->stride),
                                    .together = data,
                                    .stride = s->stride,
                                    .cols = cols,
                                    .index = s->index ? s->index + row : NULL,
                                    .divisor = s->divisor,
                                    .back = d->back,
                                    .past = past};
    PERI__OWN_FLOATS;
    peri_kernels_get()->fn[PERI_K_route_lines](&args, 0, rows);
    return rows * cols;
}

static void move_numbers(const struct unbuffered_lane *lane, int64_t from, int64_t n, float *data, bool past)
{
    const peri__unbuffered *d = lane->unbuffered;
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

static int64_t cursor_row(const cursor *c) { return (c->at - c->s->first) / c->s->cols; }
static int64_t cursor_place(const cursor *c, int64_t row) { return c->s->index ? c->s->index[row] : row; }

static void advance_cursor(const peri__unbuffered *d, cursor *c, int64_t some)
{
    c->at += some;
    c->data += some;
    c->n -= some;
    if (c->n > 0 && c->at >= c->s->first + c->s->n) c->s = segment_at(d, c->at);
}

/** Whole rows of a cursor's segment at home before row @past there, or one: rows go upwards. */
static int64_t rows_before(const cursor *c, int64_t past)
{
    const int64_t first = cursor_row(c), left = peri__min(c->n, c->s->first + c->s->n - c->at) / c->s->cols;
    int64_t low = 1, high = peri__max(1, peri__min(left, past - cursor_place(c, first)));
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (cursor_place(c, first + middle) < past) low = middle + 1;
        else high = middle;
    }
    return low;
}

/** Read rows [from, past) at home, so that their parts are in the caches: those of one rank alone lie apart, and
 *  hardware fetches in vain what lies between, or nothing ahead. */
static void read_rows(const peri__unbuffered *d, const segment *s, int64_t from, int64_t past)
{
    const char *at = (const char *)(s->values - s->column + from * s->stride);
    const char *end = at + ((past - from - 1) * s->stride + d->cols) * (int64_t)sizeof(float);
    for (; at < end; at += LINE) (void)*(const volatile char *)at;
}

/** The next rows of the cursors that have parts of those that come first at home. */
static void fill_window(const peri__unbuffered *d, cursor *cursors, int32_t count)
{
    int64_t ground = INT64_MAX, first = INT64_MAX, past = 0, numbers = 0;
    const segment *s = NULL;
    int32_t n = 0;
    for (int32_t i = 0; i < count; i++)
        if (cursors[i].n > 0) ground = peri__min(ground, cursors[i].s->ground);
    for (int32_t i = 0; i < count; i++) {
        cursor *c = &cursors[i];
        if (c->n > 0 && c->s->ground == ground) first = peri__min(first, cursor_place(c, cursor_row(c)));
    }
    for (int32_t i = 0; i < count; i++) {
        cursor *c = &cursors[i];
        c->rows = 0;
        if (c->n == 0 || c->s->ground != ground) continue;
        s = c->s;
        const int64_t window = first + peri__max(1, WINDOW / (s->stride * (int64_t)sizeof(float))), row = cursor_row(c);
        if (cursor_place(c, row) >= window) continue;
        if ((c->at - s->first) % s->cols || c->n < s->cols) { /* a part of a row, at a stretch's ends */
            advance_cursor(d, c, move_some(d, s, c->at, c->n, c->data, d->past));
            continue;
        }
        c->rows = rows_before(c, window);
        past = peri__max(past, cursor_place(c, row + c->rows - 1) + 1);
        numbers += c->rows * s->cols;
        n++;
    }
    if (n > 1 && numbers * 2 >= (past - first) * s->stride) read_rows(d, s, first, past);
    for (int32_t i = 0; i < count; i++)
        if (cursors[i].rows > 0) {
            const int64_t some = cursors[i].rows * cursors[i].s->cols;
            move_some(d, cursors[i].s, cursors[i].at, some, cursors[i].data, d->past);
            advance_cursor(d, &cursors[i], some);
        }
}

static bool any_left(const cursor *cursors, int32_t count)
{
    for (int32_t i = 0; i < count; i++)
        if (cursors[i].n > 0) return true;
    return false;
}

static void fill_stretches(void *ctx, const peri_coll_stretch *stretches, int32_t count, bool stays)
{
    const struct unbuffered_lane *lane = ctx;
    const peri__unbuffered *d = lane->unbuffered;
    cursor cursors[STRETCHES];
    const bool together = count > 1 && d->by_rows && stays;
    for (int32_t i = 0; !together && i < count; i++)
        move_numbers(lane, stretches[i].from, stretches[i].n, stretches[i].data, stays && d->past);
    for (int32_t i = 0; together && i < count; i += STRETCHES) {
        const int32_t n = count - i < STRETCHES ? count - i : STRETCHES;
        for (int32_t k = 0; k < n; k++) {
            const peri_coll_stretch *x = stretches + i + k;
            cursors[k] = (cursor){.at = lane->begin + x->from, .n = x->n, .data = x->data};
            cursors[k].s = segment_at(d, cursors[k].at);
        }
        while (any_left(cursors, n)) fill_window(d, cursors, n);
    }
}
/* The kernel of both directions has one argument for what it reads and writes; in this one it only reads. */
static void take(void *ctx, int64_t from, int64_t n, const void *data)
{
    const struct unbuffered_lane *lane = ctx;
    move_numbers(lane, from, n, (float *)(uintptr_t)data, lane->unbuffered->past);
}

static void retain_unbuffered(void *ctx) { peri__refs_add(&((struct unbuffered_lane *)ctx)->unbuffered->refs); }
static void release_unbuffered(void *ctx) { peri__unbuffered_release(((struct unbuffered_lane *)ctx)->unbuffered); }

/* -- segments ------------------------------------------------------------------------------------------------------ */

/** Lanes of a batch, as bits, whose rows functions can move. Of rows of ids all, or none: their kernels know no
 *  others. */
static uint32_t lanes_of(const peri__rows *r)
{
    const peri__home *h = r->layout->home;
    uint32_t lanes = 0, full = 0;
    for (int32_t l = 0; l < PERI__LANES; l++) {
        if (h->lane_out[l]) full |= 1u << l;
        if (h->lane_out[l] && peri__way_direct(&r->e->ways[l], r->back ? PERI__TO_OWNERS : PERI__TO_HOMES))
            lanes |= 1u << l;
    }
    lanes &= h->covered;
    const uint32_t useful = r->back ? lanes : lanes & h->alone;
    return r->e->kind->by_id ? (lanes == full && useful ? lanes : 0) : useful;
}

/** Whether functions can move the rows of a batch at all. */
static bool can(const peri__rows *r)
{
    const peri_sharded *e = r->e;
    const peri__home *h = r->layout->home;
    if (e->world_size == 1 || e->exact || e->two_rules || h->n_pools ||
        !peri__stage_can_call(e->group->comm, e->device))
        return false;
    return !h->variable || r->past > 0;
}

/** The segment of a line; returns its lane. Below 0: nobody knows which ids it has. */
static int32_t segment_of(const peri__rows *r, int32_t p, segment *s)
{
    const peri__home *h = r->layout->home;
    const peri__line line = peri__home_line(h, p), *x = &line;
    *s = (segment){.first = x->at,
                   .n = x->n * x->cols,
                   .cols = x->cols,
                   .stride = x->cols,
                   .ground = x->row,
                   .divisor = x->divisor};
    s->values = (float *)peri__data(r->away) + x->at;
    if (!peri__rows_in_place(r, x)) return x->space;
    s->values = (float *)(uintptr_t)(peri__rows_end(r, x) * (int64_t)sizeof(float));
    s->stride = r->stride;
    s->column = x->column;
    if (h->variable)
        s->index = (const int32_t *)peri__data(peri__repeats_rows(r->input->repeats)) + h->feature_first[x->feature];
    if (x->cut && r->input->routing.origins)
        s->index = (const int32_t *)peri__data(r->input->routing.origins) + x->first;
    return x->cut && !s->index ? -1 : x->space;
}

static void keep_tensor(peri__unbuffered *d, peri_tensor *t)
{
    if (!t) return;
    peri_tensor_retain(t);
    d->kept[d->n_kept++] = t;
}

/** Everything that the functions will touch stays as long as they do. */
static peri_status unbuffered_new(const peri__rows *r, peri__unbuffered **out)
{
    const peri_sharded *e = r->e;
    const peri__home *h = r->layout->home;
    const int64_t least = peri__tune(PERI__TUNE_lookup_past), bytes = h->received_out * (int64_t)sizeof(float);
    peri__unbuffered *d = peri__alloc_zero(sizeof *d + sizeof *d->kept * (size_t)(r->n_ends + 4));
    if (!d) return PERI_ENOMEM;
    peri__refs_init(&d->refs);
    d->back = r->back;
    d->by_rows = e->kind->by_id;
    d->cols = e->cols;
    d->past = least > 0 && bytes * e->node_group->size >= least / SOONER;
    for (int32_t i = 0; i < r->n_ends; i++) keep_tensor(d, r->ends[i]);
    if (!r->back) keep_tensor(d, r->away);
    keep_tensor(d, r->sums);
    keep_tensor(d, r->input->routing.origins);
    if (r->input->repeats) keep_tensor(d, peri__repeats_rows(r->input->repeats));
    d->segments = peri__alloc(sizeof *d->segments * (size_t)peri__max(1, h->n_travelling));
    if (!d->segments) {
        peri__unbuffered_release(d);
        return PERI_ENOMEM;
    }
    *out = d;
    return PERI_OK;
}

/* -- the interface ------------------------------------------------------------------------------------------------- */

peri_status peri__unbuffered_new(peri__rows *r)
{
    const peri__home *h = r->layout->home;
    const uint32_t before = r->in_place, lanes = can(r) ? lanes_of(r) : 0;
    if (!lanes) return PERI_OK;
    peri__unbuffered *d;
    PERI_TRY(unbuffered_new(r, &d));
    bool known = true;
    r->in_place |= lanes;
    for (int32_t i = 0; i < h->n_travelling && known; i++) {
        segment *s = &d->segments[d->n];
        const int32_t lane = segment_of(r, h->travelling[i], s);
        known = lane >= 0;
        d->n += known && lanes >> lane & 1 && s->n > 0;
    }
    int64_t begin = 0;
    for (int32_t l = 0; l < PERI__LANES; l++) {
        d->lanes[l] = (struct unbuffered_lane){.unbuffered = d, .begin = begin};
        d->lanes[l].functions = (peri__transfer_direct){.fill = d->back ? fill_stretches : NULL,
                                                        .take = d->back ? NULL : take,
                                                        .ctx = &d->lanes[l],
                                                        .retain = retain_unbuffered,
                                                        .release = release_unbuffered};
        begin += h->lane_out[l];
    }
    if (known) {
        r->unbuffered = d;
    } else {
        r->in_place = before;
        peri__unbuffered_release(d);
    }
    return PERI_OK;
}

void peri__unbuffered_release(peri__unbuffered *d)
{
    if (!d || !peri__refs_drop(&d->refs)) return;
    for (int32_t i = 0; i < d->n_kept; i++) peri_tensor_release(d->kept[i]);
    peri__free(d->segments);
    peri__free(d);
}

const peri__transfer_direct *peri__unbuffered_lane(const peri__rows *r, int32_t lane)
{
    return r->unbuffered && r->in_place >> lane & 1 ? &r->unbuffered->lanes[lane].functions : NULL;
}
