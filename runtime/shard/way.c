/* SPDX-License-Identifier: Apache-2.0
 *
 * way.c: see way.h.
 */
#include "way.h"

void peri__way_fini(peri__way *way)
{
    for (int32_t h = 0; h < PERI__HOPS; h++)
        for (int d = 0; d < 2; d++) peri_codec_release(way->hops[h].codec[d]);
    *way = (peri__way){0};
}

static bool has_codec(const peri__way *way, int32_t direction)
{
    bool any = false;
    for (int32_t h = 0; h < PERI__HOPS; h++) any = any || way->hops[h].codec[direction];
    return any;
}

double peri__way_divides_first(const peri__way *way) { return has_codec(way, PERI__TO_OWNERS) ? 1 : way->division; }

peri_status peri__legs_init(const peri__way *way, peri__leg *legs)
{
    for (int32_t h = 0; h < way->n; h++)
        for (int d = 0; d < 2; d++) {
            peri_codec *codec = way->hops[h].codec[d];
            const int64_t *numbers[2] = {d ? legs[h].in : legs[h].out, d ? legs[h].out : legs[h].in};
            if (!codec || way->hops[h].sums) continue; /* the one part of an all_gather has another context */
            for (int end = 0; end < 2; end++)
                PERI_TRY(
                    peri_codec_context_new(codec, numbers[end], way->hops[h].group->size, &legs[h].contexts[d][end]));
        }
    return PERI_OK;
}

void peri__legs_fini(peri__leg *legs)
{
    for (int32_t h = 0; h < PERI__HOPS; h++)
        for (int d = 0; d < 2; d++)
            for (int end = 0; end < 2; end++) peri_codec_context_release(legs[h].contexts[d][end]);
}

bool peri__way_direct(const peri__way *way, int32_t direction)
{
    const peri__hop *home = &way->hops[way->n - 1];
    return way->n > 0 && home->group->size > 1 && !has_codec(way, direction) &&
           !(home->sums && direction == PERI__TO_HOMES);
}

/** Where numbers rest between two hops: of hop @h, towards @direction. */
static peri_status new_buffer_between_hops(const peri__way_transfer *j, int32_t h, peri_tensor *from, peri_tensor **out)
{
    const peri__hop *hop = &j->way->hops[h];
    const peri__leg *leg = &j->legs[h];
    const bool back = j->direction == PERI__TO_OWNERS;
    const int64_t n =
        hop->sums && !back ? leg->out[hop->group->rank] : peri__sum(back ? leg->out : leg->in, hop->group->size);
    return peri__stage_tensor(hop->group->comm, peri__device(from), n, out);
}

/** Set out on the hop that is next. */
static peri_status start_next_hop(peri__way_transfer *j, peri_tensor *from)
{
    const peri__hop *hop = &j->way->hops[j->hop];
    const peri__leg *leg = &j->legs[j->hop];
    const bool back = j->direction == PERI__TO_OWNERS, last = j->hop == (back ? 0 : j->way->n - 1),
               home = j->hop == j->way->n - 1;
    peri_tensor *rest = NULL;
    peri__transfer_args a = {.kind = !hop->sums ? PERI_COLL_ALL_TO_ALL
                                     : back     ? PERI_COLL_ALL_GATHER
                                                : PERI_COLL_REDUCE_SCATTER,
                             .channel = PERI_CHANNEL_ROWS,
                             .sequence = j->sequence[j->hop],
                             .out = back ? leg->in : leg->out,
                             .in = back ? leg->out : leg->in,
                             .codec = hop->codec[j->direction],
                             .direct = home ? j->direct : NULL,
                             .contexts = leg->contexts[j->direction][0] ? leg->contexts[j->direction] : NULL};
    if (last && back && has_codec(j->way, PERI__TO_OWNERS)) a.divisor = j->way->division;
    if (!last && !a.codec) PERI_TRY(new_buffer_between_hops(j, j->hop, from ? from : j->to, &rest));
    a.to = last ? j->to : rest;
    peri_status status = peri__transfer_post(hop->group, from, &a, &j->transfer);
    peri_tensor_release(rest);
    return status;
}

peri_status peri__way_transfer_start(peri__way_transfer *j, const peri__way *way, const peri__leg *legs,
                                     int32_t direction, peri_tensor *from, peri_tensor *to,
                                     const peri__transfer_direct *direct)
{
    *j = (peri__way_transfer){.way = way,
                         .legs = legs,
                         .direction = direction,
                         .hop = direction == PERI__TO_OWNERS ? way->n - 1 : 0,
                         .to = to,
                         .direct = direct};
    if (to) peri_tensor_retain(to);
    peri_status status = PERI_OK;
    for (int32_t h = 0; h < way->n && way->n > 1 && status >= 0; h++)
        status = peri__group_reserve(way->hops[h].group, PERI_CHANNEL_ROWS, 1, &j->sequence[h]);
    if (status >= 0) status = start_next_hop(j, from);
    if (status < 0) peri__way_transfer_fini(j);
    return status;
}

peri_status peri__way_transfer_test(peri__way_transfer *j)
{
    while (j->way) {
        peri_status status = peri__transfer_test(&j->transfer);
        if (status != PERI_OK) return status;
        peri_tensor *here = peri__transfer_numbers(&j->transfer);
        j->hop += j->direction == PERI__TO_OWNERS ? -1 : 1;
        if (j->hop < 0 || j->hop == j->way->n) peri__way_transfer_fini(j);
        else status = start_next_hop(j, here);
        peri_tensor_release(here);
        PERI_TRY(status);
    }
    return PERI_OK;
}

void peri__way_transfer_fini(peri__way_transfer *j)
{
    peri__transfer_fini(&j->transfer);
    peri_tensor_release(j->to);
    *j = (peri__way_transfer){0};
}
