/* SPDX-License-Identifier: Apache-2.0
 *
 * pooled.c: the stages of a sharded EmbeddingBagCollection, whose owners return one pooled row for each bag.
 *
 * A bag of mean pooling may be cut between owners, of whom each sees some of its ids only. So its home sends the factor of its mean with
 * it, and owners pool sums of rows times that factor.
 */
#include "module.h"

static peri_status mean_factors(const peri__routing *r, peri_tensor *out)
{
    const peri__router *o = r->router;
    const peri__outbound *h = r->outbound;
    peri_k_route_mean_args args = {.scale = peri__data(out), .offsets = peri__data(r->offsets_in),
                                   .partitions = peri__upload_at(&h->up, h->partitions), .wire_bag = peri__upload_at(&h->up, h->wire_bag),
                                   .n_partitions = o->routes->n_partitions};
    return PERI_LAUNCH(o->device, route_mean, &args, h->bags, 1 << 13);
}

static peri_status lay_out(const peri__routes *r, peri__home *h, int32_t rank, const int64_t *at, const peri__home_args *a)
{
    h->outputs = peri__upload_add(&h->up, NULL, (int64_t)sizeof(peri_k_output) * r->n_outputs);
    h->pieces = peri__upload_add(&h->up, NULL, (int64_t)sizeof(peri_k_piece) * r->n_pieces);
    h->output_bags = peri__upload_add(&h->up, NULL, (int64_t)sizeof(int64_t) * r->n_outputs);
    if (h->outputs < 0 || h->pieces < 0 || h->output_bags < 0) return PERI_ENOMEM;
    for (int32_t i = 0; i < r->n_outputs; i++) {
        const peri__output *o = &r->outputs[i];
        h->most_bags = peri__max(h->most_bags, h->feature_rows[o->feature]);
        peri_k_output k = {.column = o->column, .cols = o->cols, .first_piece = o->first_piece, .n_pieces = o->n_pieces,
                           .inverse = a->inverse ? a->inverse[o->feature] : -1, .divisor = a->divisor[o->table],
                           .sent_divisor = a->sent_divisor[o->table]};
        memcpy(h->up.host + h->outputs + (int64_t)sizeof k * i, &k, sizeof k);
        memcpy(h->up.host + h->output_bags + (int64_t)sizeof(int64_t) * i, &h->feature_rows[o->feature], sizeof(int64_t));
        for (int32_t p = o->first_piece; p < o->first_piece + o->n_pieces; p++) {
            peri_k_piece piece = peri__home_piece(r, h, rank, at, r->pieces[p]);
            memcpy(h->up.host + h->pieces + (int64_t)sizeof piece * p, &piece, sizeof piece);
        }
    }
    return PERI_OK;
}

static peri_status combine(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tensor *own, peri_tensor *received,
                           peri_tensor **out)
{
    peri_tensor *inverse = given->inverse;
    int64_t shape[2] = {h->rows, e->routes->out_cols};
    PERI_TRY(peri_tensor_new(e->device, PERI_F32, 2, shape, out));
    peri_k_route_combine_args args = {.out = peri__data(*out), .stride = e->routes->out_cols, .received = peri__data(received),
                                      .own = peri__data(own), .outputs = peri__upload_at(&h->up, h->outputs),
                                      .pieces = peri__upload_at(&h->up, h->pieces), .inverse = inverse ? peri__data(inverse) : NULL,
                                      .n_outputs = e->routes->n_outputs};
    peri_status status = PERI_LAUNCH(e->device, route_combine, &args, h->rows, 64);
    if (status < 0) peri_tensor_release(*out);
    return status;
}

/** Bags that one thread takes at a time; with a variable batch each of them looks through all rows. */
static int64_t spread_grain(const peri__home *h)
{
    enum { LEAST = 64, MOST_PARTS = 16 };
    return h->variable ? peri__max(LEAST, peri__ceil_div(h->most_bags, MOST_PARTS)) : LEAST;
}

static peri_status spread(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tensor *grad, peri_tensor *own,
                          peri_tensor *sent)
{
    peri_tensor *inverse = given->inverse;
    peri_k_route_spread_args args = {.grad = peri__data(grad), .stride = e->routes->out_cols, .rows = h->rows, .sent = peri__data(sent),
                                     .own = peri__data(own), .outputs = peri__upload_at(&h->up, h->outputs),
                                     .pieces = peri__upload_at(&h->up, h->pieces), .bags = peri__upload_at(&h->up, h->output_bags),
                                     .inverse = inverse ? peri__data(inverse) : NULL, .n_outputs = e->routes->n_outputs};
    return PERI_LAUNCH(e->device, route_spread, &args, h->most_bags, spread_grain(h));
}

const peri__kind peri__pooled = {.name = "EmbeddingBagCollection", .lay_out = lay_out, .by_bag = mean_factors, .combine = combine,
                                 .spread = spread};
