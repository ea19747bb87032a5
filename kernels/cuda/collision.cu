/* SPDX-License-Identifier: Apache-2.0
 *
 * collision.cu: kernels/collision.h: looking ids up, and the log of those that have none. A thread has an id, and looks
 * at one line of the index, or at rows one after the other. What all threads write to (the end of the log, the sums,
 * the window of an id that comes often) a warp writes once for all its lanes, sums a block once.
 */
#include "collision.cuh"

namespace {

template <class F> __global__ void __launch_bounds__(PERI_BLOCK) rounds_kernel(F f, int64_t begin, int64_t end)
{
    int64_t hits = 0, missed = 0;
    end = f.stop(end);
    for (int64_t i = begin + peri_grid_thread(); i - peri_lane() < end; i += peri_grid_threads())
        f(i, i < end, hits, missed);
    f.finish(hits, missed);
}

/** f(i, here, hits, missed) for i in [begin, f.stop(end)) by whole warps: @here is false for lanes beyond. */
template <class F> cudaError_t each_round(int64_t begin, int64_t end, const peri_cuda_call *c, F f)
{
    if (begin >= end) return cudaSuccess;
    return peri_cuda_launch(rounds_kernel<F>, peri_cuda_grid(end - begin, PERI_BLOCK, c), PERI_BLOCK, 0, c, f, begin,
                            end);
}

__device__ __forceinline__ unsigned lanes_before() { return (1u << peri_lane()) - 1; }

struct check_one {
    peri_k_collision_find_args a;
    __device__ void operator()(int64_t i) const
    {
        const peri_k_collision_map &m = a.map;
        const int64_t bucket = peri_k_bucket(a.ids[i], m.spread, m.buckets, m.block);
        if (bucket >= m.first_bucket && bucket < m.first_bucket + (int64_t)m.n_buckets) return;
        int64_t *bad = &m.head[PERI_COLLISION_BAD];
        if (a.first + i < *bad) peri_atomic_min(bad, a.first + i);
    }
};

/* -- looking up ---------------------------------------------------------------------------------------------------- */

/** What an id without a row gets. */
__device__ int64_t miss(const peri_k_collision_map &m, const peri_k_collision_bucket &b, int64_t id, int64_t place)
{
    if (m.on_miss == PERI_K_MISS_ROW) return b.first_row + b.rows - 1;
    if (m.on_miss == PERI_K_MISS_HASH) return b.first_row + peri_hash_home(b, peri_k_murmur((uint64_t)id, 0, 0));
    if (m.on_miss == PERI_K_MISS_ERROR) peri_atomic_min(&m.head[PERI_COLLISION_BAD], place);
    return -1;
}

/** Add @n < 256 to a slot's window; how many the log must have: 0, @n or 256. */
__device__ int window_add(peri_k_mch_slot *slot, int n, bool counted, int64_t when)
{
    uint32_t seen = *(volatile uint32_t *)&slot->window, next = seen;
    for (;;) {
        const int more = peri_k_window_next(seen, n, counted, when, &next);
        if (more == n || next == seen) return more;
        const uint32_t found = atomicCAS(&slot->window, seen, next);
        if (found == seen) return more;
        seen = found;
    }
}

/** Lanes that come with @wants write an entry each behind the log. A whole warp. */
__device__ void log_entry(const peri_k_collision_find_args &a, bool wants, int64_t id, int64_t when, int64_t place)
{
    const unsigned those = __ballot_sync(PERI_WARP, wants);
    if (!those) return;
    const int leader = __ffs((int)those) - 1;
    int64_t at = 0;
    if (peri_lane() == leader) at = peri_atomic_add(&a.map.head[PERI_COLLISION_LOGGED], __popc(those));
    at = __shfl_sync(PERI_WARP, at, leader) + __popc(those & lanes_before());
    if (wants) a.log[at].id = id, a.log[at].when = when, a.log[at].place = place;
}

__device__ void count_found(const peri_k_collision_map &m, int64_t hits, int64_t missed)
{
    peri_head_add(m.head, PERI_COLLISION_IDS, hits + missed);
    peri_head_add(m.head, PERI_COLLISION_HITS, hits);
    peri_head_add(m.head, PERI_COLLISION_MISSED, missed);
}

struct mch_look {
    peri_k_collision_find_args a;
    __device__ int64_t stop(int64_t end) const { return end; }
    /** How many of the lane's id the log must have: 0, 1 or 256; @slot: NULL where there is none. Lanes with one slot
     *  add together. */
    __device__ int unseen(peri_k_mch_slot *slot) const
    {
        const unsigned same = __match_any_sync(PERI_WARP, (uint64_t)(uintptr_t)slot);
        const int leader = __ffs((int)same) - 1, n = __popc(same);
        int more = 0;
        if (slot && peri_lane() == leader) more = window_add(slot, n, a.map.counted, peri_k_window_when(&a));
        more = __shfl_sync(PERI_WARP, more, leader);
        return !slot || more == n ? 1 : peri_lane() == leader ? more : 0;
    }
    __device__ void operator()(int64_t i, bool here, int64_t &hits, int64_t &missed) const
    {
        const peri_k_collision_map &m = a.map;
        const int64_t id = here ? a.ids[i] : 0;
        const peri_k_collision_bucket *b = here ? peri_bucket_of(m, id) : nullptr;
        peri_k_mch_slot *slot = here ? peri_mch_slot(m, *b, id) : nullptr;
        const bool learn = here && i < a.learn && id != INT64_MAX;
        const int times = unseen(learn ? slot : nullptr);
        log_entry(a, learn && times, id, a.now, times);
        if (!here || !a.out) return;
        hits += slot != nullptr;
        missed += slot == nullptr;
        a.out[i] = slot ? slot->row : miss(m, *b, id, a.first + i);
    }
    __device__ void finish(int64_t hits, int64_t missed) const
    {
        if (a.out) count_found(a.map, hits, missed);
    }
};

struct hash_look {
    peri_k_collision_find_args a;
    __device__ int64_t stop(int64_t end) const { return end; }
    /** Row @row was met. */
    __device__ void touch(int64_t row) const
    {
        if (a.map.policy == PERI_K_EVICT_NONE) return;
        peri_k_hash_row *r = &a.map.rows[row];
        if (peri_load_beside(&r->touched) != (uint32_t)a.now) *(volatile uint32_t *)&r->touched = (uint32_t)a.now;
        if (peri_load_beside(&r->expiry) < (int32_t)a.expiry) atomicMax(&r->expiry, (int32_t)a.expiry);
    }
    __device__ void operator()(int64_t i, bool here, int64_t &hits, int64_t &missed) const
    {
        const peri_k_collision_map &m = a.map;
        const int64_t id = here ? a.ids[i] : 0;
        const peri_k_collision_bucket *b = here ? peri_bucket_of(m, id) : nullptr;
        const int64_t row = here ? peri_hash_row(m, *b, id) : -1;
        const bool learn = here && i < a.learn && id != -1;
        log_entry(a, learn && row < 0, id, a.expiry, a.first + i);
        if (!here || (learn && row < 0)) return;
        if (learn) touch(row);
        hits += row >= 0;
        missed += row < 0;
        a.out[i] = row >= 0 ? row : miss(m, *b, id, a.first + i);
    }
    __device__ void finish(int64_t hits, int64_t missed) const { count_found(a.map, hits, missed); }
};

/* -- the log ------------------------------------------------------------------------------------------------------- */

/** Entries of the log that there are, of those before @end. */
__device__ __forceinline__ int64_t log_stop(const peri_k_collision_map &m, int64_t end)
{
    const int64_t logged = m.head[PERI_COLLISION_LOGGED];
    return end < logged ? end : logged;
}

struct hash_look_again {
    peri_k_collision_find_args a;
    __device__ int64_t stop(int64_t end) const { return log_stop(a.map, end); }
    __device__ void operator()(int64_t e, bool here, int64_t &hits, int64_t &missed) const
    {
        if (!here) return;
        const int64_t id = a.log[e].id, place = a.log[e].place;
        const peri_k_collision_bucket *b = peri_bucket_of(a.map, id);
        const int64_t row = peri_hash_row(a.map, *b, id);
        hits += row >= 0;
        missed += row < 0;
        a.out[place] = row >= 0 ? row : miss(a.map, *b, id, place);
    }
    __device__ void finish(int64_t hits, int64_t missed) const { count_found(a.map, hits, missed); }
};

/** sizes[bucket] grows by one a lane; where the lane's own lies: the size before it. A whole warp. */
__device__ int64_t bucket_add(const peri_k_collision_group_args &a, int64_t bucket, bool here)
{
    const unsigned same = __match_any_sync(PERI_WARP, here ? bucket : -1);
    const int leader = __ffs((int)same) - 1;
    int64_t at = 0;
    if (here && peri_lane() == leader) at = peri_atomic_add(&a.sizes[bucket], __popc(same));
    return __shfl_sync(PERI_WARP, at, leader) + __popc(same & lanes_before());
}

struct count_entry {
    peri_k_collision_group_args a;
    __device__ int64_t stop(int64_t end) const { return log_stop(a.map, end); }
    __device__ void operator()(int64_t e, bool here, int64_t &, int64_t &) const
    {
        bucket_add(a, here ? peri_bucket_of(a.map, a.log[e].id) - a.map.bucket : 0, here);
    }
    __device__ void finish(int64_t, int64_t) const {}
};

struct group_entry {
    peri_k_collision_group_args a;
    __device__ int64_t stop(int64_t end) const { return log_stop(a.map, end); }
    __device__ void operator()(int64_t e, bool here, int64_t &, int64_t &) const
    {
        const int64_t id = here ? a.log[e].id : 0, when = here ? a.log[e].when : 0, times = here ? a.log[e].place : 0;
        const int64_t at = bucket_add(a, here ? peri_bucket_of(a.map, id) - a.map.bucket : 0, here);
        if (!here) return;
        uint64_t *word = a.records[at].word;
        const bool hash = a.map.rows != nullptr;
        word[0] = hash ? peri_k_murmur((uint64_t)id, 0, 0) : peri_sortable(id);
        word[1] = hash ? peri_sortable(id) : (uint64_t)times;
        word[2] = (uint64_t)when;
        word[3] = 0;
    }
    __device__ void finish(int64_t, int64_t) const {}
};

/** One block: a thread has neighbouring buckets. */
struct starts_of {
    peri_k_collision_group_args a;
    __device__ void operator()(int64_t) const
    {
        PERI_SHARED(int64_t, sums, PERI_BLOCK);
        const int64_t n = a.map.n_buckets, each = (n + PERI_BLOCK - 1) / PERI_BLOCK, from = (int64_t)threadIdx.x * each;
        const int64_t to = from + each < n ? from + each : n;
        int64_t sum = 0;
        for (int64_t b = from; b < to; b++) sum += a.sizes[b];
        sums[threadIdx.x] = sum;
        __syncthreads();
        sum = 0;
        for (int t = 0; t < (int)threadIdx.x; t++) sum += sums[t];
        for (int64_t b = from; b < to; b++) {
            const int64_t size = a.sizes[b];
            a.starts[b] = a.sizes[b] = sum;
            sum += size;
        }
        if (threadIdx.x == PERI_BLOCK - 1) a.starts[n] = sum;
    }
};

template <class F, class A> cudaError_t each_entry(const A *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    return each_round(begin * PERI_COLLISION_BLOCK, end * PERI_COLLISION_BLOCK, c, F{*a});
}

} // namespace

PERI_CUDA_KERNEL(collision_check) { return each(begin, end, c, check_one{*a}); }
PERI_CUDA_KERNEL(mch_find) { return each_round(a->n * begin / a->parts, a->n * end / a->parts, c, mch_look{*a}); }
PERI_CUDA_KERNEL(hash_map_find) { return each_round(begin, end, c, hash_look{*a}); }
PERI_CUDA_KERNEL(hash_map_again) { return each_entry<hash_look_again>(a, begin, end, c); }
PERI_CUDA_KERNEL(collision_count) { return each_entry<count_entry>(a, begin, end, c); }
PERI_CUDA_KERNEL(collision_starts) { return peri_each_bucket(begin, end < 1 ? end : 1, c, starts_of{*a}); }
PERI_CUDA_KERNEL(collision_group) { return each_entry<group_entry>(a, begin, end, c); }
