/* SPDX-License-Identifier: Apache-2.0
 *
 * route.cu: kernels/route.h: ids on their way to the ranks that own their rows. A bag of a partition is 8 lanes': they
 * read 8 ids at a time, one after the other in memory, and place them among themselves by a match of their strands.
 */
#include "route.cuh"

namespace {

enum { IDS = 8 }; /* lanes of a bag */

/** A bag of a partition. */
struct bag_of {
    const peri_k_partition *p;
    int64_t bag, from, to; /* its number in the partition; its ids */
    __device__ bag_of(const peri_k_routed &in, int64_t i)
        : p(peri_k_route_find(in.partitions, in.n_partitions, i)), bag(i - p->bag_start),
          from(in.offsets[p->first_bag + bag]), to(in.offsets[p->first_bag + bag + 1])
    {
    }
};

/** Lengths, and of bad ids their number and, in `where`, INT64_MAX less the least range index. */
struct count_bag {
    peri_k_route_count_args a;
    __device__ void operator()(int64_t i, int lane, unsigned mask) const
    {
        const bag_of b(a.in, i);
        const int64_t *wire = a.in.wire_bag + b.p->first_strand;
        int64_t bad = 0, mine = 0;
        if (b.p->n_parts > 1) {
            for (int32_t s = lane; s < b.p->n_parts; s += IDS) a.lengths[wire[s] + b.bag] = 0;
            __syncwarp(mask);
        }
        for (int64_t k = b.from + lane; k < b.to; k += IDS) {
            const int64_t key = peri_k_route_key(b.p, peri_routed_id(a.in, k));
            if (key < -1 || key >= b.p->rows) bad++;
            else if (key >= 0 && b.p->n_parts > 1)
                atomicAdd(&a.lengths[wire[peri_route_part(b.p, a.in.bounds, key)] + b.bag], 1);
            else mine += key >= 0;
        }
        if (b.p->n_parts == 1) {
            mine = peri_group_sum<IDS>(mine, mask);
            if (lane == 0) a.lengths[wire[0] + b.bag] = (int32_t)mine;
        }
        bad = peri_group_sum<IDS>(bad, mask);
        if (bad == 0 || lane != 0 || b.p->check >= PERI_ROUTE_REPORTS) return;
        peri_k_route_report *report = &a.reports[i / PERI_ROUTE_BLOCK * PERI_ROUTE_REPORTS + b.p->check];
        peri_atomic_add(&report->bad, bad);
        peri_atomic_max(&report->where, INT64_MAX - i);
    }
};

/** A report says which id was bad first. */
struct tell_report {
    peri_k_route_count_args a;
    __device__ void operator()(int64_t r) const
    {
        peri_k_route_report *report = &a.reports[r];
        if (report->bad == 0) return;
        const int64_t i = INT64_MAX - report->where;
        const bag_of b(a.in, i);
        for (int64_t k = b.from; k < b.to; k++) {
            const int64_t id = peri_routed_id(a.in, k), key = peri_k_route_key(b.p, id);
            if (key >= -1 && key < b.p->rows) continue;
            report->where = i + 1;
            report->id = id;
            report->position = k - b.from;
            return;
        }
    }
};

struct total_one {
    peri_k_route_totals_args a;
    __device__ void operator()(int64_t i) const { a.totals[i] = a.positions[a.at[i]]; }
};

struct mean_bag {
    peri_k_route_mean_args a;
    __device__ void operator()(int64_t i) const
    {
        const bag_of b(a.in, i);
        const int64_t n = b.to - b.from;
        const float scale = 1.0f / (float)(n > 1 ? n : 1);
        for (int32_t s = 0; s < b.p->n_parts; s++) a.scale[a.in.wire_bag[b.p->first_strand + s] + b.bag] = scale;
    }
};

/** The place on the wire of an id of each lane, all of one bag, whose strands' cursors move on; -1: it is in no strand.
 *  @part: of the lane's id, -1: none; @bag: in the partition. All lanes of @mask call it. */
__device__ __forceinline__ int64_t next_place(int64_t *cursor, const int64_t *wire, int64_t bag, int32_t part,
                                              int32_t n_parts, unsigned mask)
{
    const unsigned here = __ballot_sync(mask, part >= 0), same = n_parts > 1 ? __match_any_sync(mask, part) : here;
    const unsigned before = (1u << peri_lane()) - 1;
    int64_t place = -1;
    if (part >= 0) place = cursor[wire[part] + bag] + __popc(same & before);
    __syncwarp(mask); /* all have read the cursors */
    if (part >= 0 && (same & before) == 0) cursor[wire[part] + bag] = place + __popc(same);
    __syncwarp(mask);
    return place;
}

struct pack_bag {
    peri_k_route_pack_args a;
    __device__ void operator()(int64_t i, int lane, unsigned mask) const
    {
        const bag_of b(a.in, i);
        if (b.p->n_parts == 0) return;
        const int64_t *wire = a.in.wire_bag + b.p->first_strand;
        int64_t *kept =
            a.places ? a.places + a.place_first[b.p - a.in.partitions] - a.in.offsets[b.p->first_bag] : nullptr;
        for (int64_t first = b.from; first < b.to; first += IDS) {
            const int64_t k = first + lane, id = k < b.to ? peri_routed_id(a.in, k) : 0;
            const int32_t part = k < b.to ? peri_route_strand(b.p, a.in.bounds, id) : -1;
            const int64_t place = next_place(a.cursor, wire, b.bag, part, b.p->n_parts, mask);
            if (k < b.to && kept) kept[k] = place;
            if (place < 0) continue;
            peri_set_index(a.out, place, a.out_i32 ? PERI_I32 : PERI_I64,
                           b.p->raw ? id : id - a.in.bounds[b.p->first_bound + part]);
            if (a.weights) a.out_weights[place] = a.weights[k];
            if (a.origins) a.origins[place] = (int32_t)(k - a.in.offsets[b.p->first_bag]);
        }
    }
};

/** Bag i of the input, in each partition of it in their order; those are found 8 at a time. */
struct return_bag {
    peri_k_route_return_args a;
    __device__ void add(const peri_k_partition *p, int64_t i, int lane, unsigned mask) const
    {
        const int64_t *wire = a.in.wire_bag + p->first_strand, from = a.in.offsets[i], to = a.in.offsets[i + 1];
        for (int64_t first = from; first < to; first += IDS) {
            const int64_t k = first + lane, id = k < to ? peri_routed_id(a.in, k) : 0;
            const int32_t part = k < to ? peri_route_strand(p, a.in.bounds, id) : -1;
            const int64_t place = next_place(a.cursor, wire, i - p->first_bag, part, p->n_parts, mask);
            if (place >= 0) a.out[k] += a.factor * a.back[place];
        }
    }
    __device__ void operator()(int64_t i, int lane, unsigned mask) const
    {
        const int shift = __ffs((int)mask) - 1;
        for (int32_t first = 0; first < a.in.n_partitions; first += IDS) {
            const peri_k_partition *p = a.in.partitions + first + lane;
            const bool mine =
                first + lane < a.in.n_partitions && p->n_parts > 0 && i >= p->first_bag && i < p->first_bag + p->bags;
            for (unsigned those = __ballot_sync(mask, mine) >> shift; those; those &= those - 1)
                add(a.in.partitions + first + __ffs((int)those) - 1, i, lane, mask);
        }
    }
};

} // namespace

PERI_CUDA_KERNEL(route_count)
{
    const int64_t last = end * PERI_ROUTE_BLOCK < a->in.bags ? end * PERI_ROUTE_BLOCK : a->in.bags;
    PERI_CUDA_TRY(each_group<IDS>(begin * PERI_ROUTE_BLOCK, last, c, count_bag{*a}));
    return each(begin * PERI_ROUTE_REPORTS, end * PERI_ROUTE_REPORTS, c, tell_report{*a});
}

PERI_CUDA_KERNEL(route_totals) { return each(begin, end, c, total_one{*a}); }
PERI_CUDA_KERNEL(route_mean) { return each(begin, end, c, mean_bag{*a}); }
PERI_CUDA_KERNEL(route_pack) { return each_group<IDS>(begin, end, c, pack_bag{*a}); }
PERI_CUDA_KERNEL(route_return) { return each_group<IDS>(begin, end, c, return_bag{*a}); }
