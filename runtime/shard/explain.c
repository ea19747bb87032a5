/* SPDX-License-Identifier: Apache-2.0
 *
 * explain.c: the list of rows of a batch (rows.h) as text; docs/architecture.md has an example.
 */
#include "rows.h"

#include <stdio.h>

/** Who takes the rows of a line from one place to the other. */
static const char *who_moves(const peri__rows *r, const peri__line *x)
{
    const bool lane = x->space < PERI__LANES;
    if (peri__rows_in_place(r, x) && r->back) return lane ? "in place, by the transport" : "in place, by the update";
    if (peri__rows_in_place(r, x)) return lane ? "in place, by the transport" : "in place, by the lookup";
    if (x->pooled) return "through the buffer, pooled here";
    if (r->back || x->alone) return "through the buffer";
    return r->e->kind->by_id ? "the buffer is the result" : "through the buffer, added";
}

static void add_line(peri__buffer *t, const peri__rows *r, const peri__piece *piece, const peri__line *x)
{
    const peri_sharded *e = r->e;
    const peri__output *o = &e->routes->outputs[piece->output];
    char of[32], to[64];
    if (x->space == PERI__REPLICA_ROWS) snprintf(of, sizeof of, "replica");
    else if (x->space == PERI__OWN_ROWS) snprintf(of, sizeof of, "own");
    else if (x->space == PERI__NODE_LANE) snprintf(of, sizeof of, "node %d", e->routes->nodes->of[piece->rank]);
    else snprintf(of, sizeof of, "rank %d, lane %d", piece->rank, x->space);
    snprintf(to, sizeof to, "row %lld, column %lld%s", (long long)(r->back ? x->row : x->to), (long long)x->column,
             x->cut ? ", some" : "");
    peri__buffer_print(t, "  %-12s %-12s %6lld x %-5lld %-16s %8lld   %-28s %s\n", e->table_names[o->table],
                       e->feature_names[o->feature], (long long)x->n, (long long)x->cols, of, (long long)x->at, to,
                       who_moves(r, x));
}

void peri__explain(peri__buffer *t, const peri__rows *r)
{
    const peri__routes *routes = r->e->routes;
    const peri__home *h = r->layout->home;
    int64_t copied = 0, all = 0;
    peri__buffer_print(t, "%s of rank %d of %d, %lld rows of %lld columns\n", r->back ? "Gradients" : "Results",
                       r->e->rank, r->e->world_size, (long long)(r->back ? h->rows : h->joined_rows),
                       (long long)r->e->cols);
    peri__buffer_print(t, "  %-12s %-12s %14s %-16s %8s   %-28s %s\n", "table", "feature", "rows x columns", "of", "at",
                       "in the results", "how");
    for (int32_t p = 0; p < routes->n_pieces; p++) {
        const peri__line x = peri__home_line(h, p);
        if (x.space < 0) continue;
        const int64_t bytes = x.n * x.cols * (int64_t)sizeof(float);
        const bool result = !r->back && r->e->kind->by_id && !x.alone;
        all += bytes;
        if (!peri__rows_in_place(r, &x) && !result) copied += bytes;
        add_line(t, r, &routes->pieces[p], &x);
    }
    peri__buffer_print(t, "  %lld of %lld bytes are copied between buffers and %s\n", (long long)copied, (long long)all,
                       r->back ? "gradients" : "results");
}
