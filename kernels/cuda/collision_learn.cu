/* SPDX-License-Identifier: Apache-2.0
 *
 * collision_learn.cu: kernels/collision.h: what a bucket of a map learns, and which of its rows it gives up for it. A
 * block has a bucket. Records are sorted by the block; where results go one after the other, tile by tile; ids are put
 * into a hash map in order, by a warp that looks at 32 rows at a time.
 */
#include "collision.cuh"

namespace {

/** What learning of a block adds to the head, summed over threads. */
struct sums {
    int64_t inserted, evicted, occupied, changed;
};

__device__ void add_sums(int64_t *head, const sums &s)
{
    peri_head_add(head, PERI_COLLISION_INSERTED, s.inserted);
    peri_head_add(head, PERI_COLLISION_EVICTED, s.evicted);
    peri_head_add(head, PERI_COLLISION_OCCUPIED, s.occupied);
    peri_head_add(head, PERI_COLLISION_CHANGED, s.changed);
}

/** @row of @bucket got another id; @had: it had one before. */
__device__ void changed(const peri_k_collision_map &m, int64_t bucket, int64_t row, bool had, sums &s)
{
    s.inserted++;
    (had ? s.evicted : s.occupied)++;
    if (m.is_changed[row]) return;
    m.is_changed[row] = 1;
    m.changed[m.bucket[bucket].first_row + peri_atomic_add(&m.n_changed[bucket], 1)] = row;
    s.changed++;
}

/* -- what was seen since the last eviction ------------------------------------------------------------------------- */

__device__ __forceinline__ int64_t window_count(const peri_k_collision_map &m, uint32_t window)
{
    return m.counted ? peri_k_window_count(window) : 0;
}

__device__ __forceinline__ int64_t window_last(const peri_k_collision_learn_args &a, uint32_t window)
{
    return a.window + (int64_t)(a.map.counted ? window >> 16 : window);
}

/** The filter for a bucket's window of n ids seen sum times. */
struct filter {
    float threshold, rest;
    __device__ filter(const peri_k_collision_learn_args &a, int64_t n, int64_t sum)
        : threshold(0), rest((float)(1 - a.filter_arg))
    {
        if (a.filter == PERI_K_FILTER_DYNAMIC) threshold = (float)(1.0 / (double)n * a.filter_arg) * (float)sum;
        if (a.filter == PERI_K_FILTER_AVERAGE) threshold = (float)sum / (float)n;
    }
    __device__ bool passes(const peri_k_collision_learn_args &a, int64_t id, int64_t count) const
    {
        if (a.filter == PERI_K_FILTER_NONE) return true;
        if (a.filter != PERI_K_FILTER_PROBABILISTIC) return (float)count > threshold;
        const uint64_t lot = peri_k_mix(peri_k_mix((uint64_t)id ^ a.seed) + (uint64_t)a.now);
        return 1 - (float)pow((double)rest, (double)count) > (float)(lot >> 40) * 0x1p-24f;
    }
};

/** Row @row was seen @count more times, the last time in iteration @last. */
__device__ __forceinline__ void seen(const peri_k_collision_map &m, int64_t row, int64_t count, int64_t last)
{
    if (m.counts) m.counts[row] += count;
    if (m.last && last > m.last[row]) m.last[row] = last;
}

/** Behind the run of record @i: the first whose word @word is another, below @n. */
__device__ int64_t run_end(const peri_k_collision_record *r, int64_t i, int64_t n, int word)
{
    int64_t step = 1, low = i; /* low: in the run; first by steps that double, for runs are short */
    while (low + step < n && r[low + step].word[word] == r[i].word[word]) low += step, step *= 2;
    int64_t high = low + step < n ? low + step : n;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (r[middle].word[word] == r[i].word[word]) low = middle;
        else high = middle;
    }
    return high;
}

struct coalesce {
    peri_k_collision_learn_args a;
    /** Records (id, times, when), sorted, become (id, count, last, 1 + place of the id's slot or 0); how many. */
    __device__ int64_t merge(const peri_k_collision_bucket &b, peri_k_collision_record *r, int64_t n) const
    {
        PERI_SHARED(uint64_t, edge, 1); /* the id before the tile, whose record may be another by now */
        int64_t ids = 0;
        peri_sort_records(r, n);
        for (int64_t tile = 0; tile < n; tile += PERI_BLOCK) {
            const int64_t i = tile + threadIdx.x, stop = tile + PERI_BLOCK < n ? tile + PERI_BLOCK : n;
            peri_k_collision_record merged = {{0, 0, 0, 0}};
            uint64_t next_edge = r[stop - 1].word[0];
            bool first = false;
            if (i < n) {
                merged.word[0] = r[i].word[0];
                first = i == 0 || (i == tile ? *edge : r[i - 1].word[0]) != merged.word[0];
            }
            if (first) {
                const int64_t end = run_end(r, i, n, 0), same = run_end(r, i, end, 1); /* seen once; 256 times */
                const peri_k_mch_slot *slot = peri_mch_slot(a.map, b, peri_id_of(merged.word[0]));
                merged.word[1] = (uint64_t)(same - i) * r[i].word[1] + (uint64_t)(end - same) * r[end - 1].word[1];
                merged.word[2] = r[same - 1].word[2] > r[end - 1].word[2] ? r[same - 1].word[2] : r[end - 1].word[2];
                merged.word[3] = slot ? (uint64_t)(slot - a.map.slots) + 1 : 0;
            }
            int total;
            const int64_t at = ids + peri_block_place(first, &total);
            if (first) r[at] = merged;
            if (threadIdx.x == 0) *edge = next_edge;
            ids += total;
            __syncthreads();
        }
        return ids;
    }
    __device__ filter filter_of(const peri_k_collision_record *r, int64_t logged, const peri_k_mch_slot *slots,
                                int64_t n_slots) const
    {
        int64_t n = 0, sum = 0;
        if (a.filter == PERI_K_FILTER_DYNAMIC || a.filter == PERI_K_FILTER_AVERAGE) {
            for (int64_t s = threadIdx.x; s < n_slots; s += PERI_BLOCK)
                if (slots[s].row != UINT32_MAX && slots[s].window) n++, sum += window_count(a.map, slots[s].window);
            for (int64_t i = threadIdx.x; i < logged; i += PERI_BLOCK) {
                sum += (int64_t)r[i].word[1];
                n += !r[i].word[3] || !a.map.slots[r[i].word[3] - 1].window;
            }
            n = peri_block_sum(n);
            sum = peri_block_sum(sum);
        }
        return filter(a, n, sum);
    }
    /** Of the ids of the log, those with rows are seen, and the others that pass stay; how many. */
    __device__ int64_t keep(const filter &f, peri_k_collision_record *r, int64_t logged) const
    {
        int64_t kept = 0;
        for (int64_t tile = 0; tile < logged; tile += PERI_BLOCK) {
            const int64_t i = tile + threadIdx.x;
            peri_k_collision_record x = {{0, 0, 0, 0}};
            bool stays = false;
            if (i < logged) {
                x = r[i];
                peri_k_mch_slot *s = x.word[3] ? &a.map.slots[x.word[3] - 1] : nullptr;
                int64_t count = (int64_t)x.word[1], last = (int64_t)x.word[2];
                if (s) {
                    count += window_count(a.map, s->window);
                    if (window_last(a, s->window) > last) last = window_last(a, s->window);
                    s->window = 0;
                }
                const bool passes = f.passes(a, peri_id_of(x.word[0]), count);
                if (s && passes) seen(a.map, s->row, count, last);
                stays = passes && !s;
            }
            int total;
            const int64_t at = kept + peri_block_place(stays, &total);
            x.word[3] = 0;
            if (stays) r[at] = x;
            kept += total;
        }
        return kept;
    }
    __device__ void operator()(int64_t bucket) const
    {
        const peri_k_collision_map &m = a.map;
        const peri_k_collision_bucket b = m.bucket[bucket];
        peri_k_collision_record *r = a.records + a.starts[bucket];
        peri_k_mch_slot *slots = m.slots + b.first_line * PERI_MCH_LINE;
        const int64_t n_slots = b.lines * PERI_MCH_LINE, logged = merge(b, r, a.starts[bucket + 1] - a.starts[bucket]);
        const filter f = filter_of(r, logged, slots, n_slots);
        __syncthreads(); /* windows are read */
        const int64_t kept = keep(f, r, logged);
        __syncthreads();
        for (int64_t s = threadIdx.x; s < n_slots; s += PERI_BLOCK) {
            if (slots[s].row == UINT32_MAX || !slots[s].window) continue;
            const int64_t count = window_count(m, slots[s].window);
            if (f.passes(a, slots[s].id, count)) seen(m, slots[s].row, count, window_last(a, slots[s].window));
            slots[s].window = 0;
        }
        if (threadIdx.x != 0) return;
        a.news[bucket] = kept;
        if (m.counts) m.counts[b.first_row + b.rows - 1] = INT64_MAX;
        if (m.last) m.last[b.first_row + b.rows - 1] = a.now;
    }
};

/* -- eviction ------------------------------------------------------------------------------------------------------ */

__device__ uint64_t float_key(double score)
{
    score += 0.0; /* -0 is 0 */
    uint64_t bits;
    memcpy(&bits, &score, sizeof bits);
    return bits >> 63 ? ~bits : bits | (uint64_t)1 << 63;
}

__device__ float power_of_age(int64_t x, double d)
{
    const float f = (float)x;
    if (d == 1) return f;
    if (d == 3) return f * f * f;
    return (float)pow((double)f, (double)(float)d);
}

/** A number that orders as the score of an id does. */
__device__ uint64_t score_of(const peri_k_collision_learn_args &a, int64_t count, int64_t last)
{
    if (a.map.policy == PERI_K_EVICT_LFU) return peri_sortable(count);
    const float age = power_of_age(a.now - last + 1, a.decay);
    return float_key(a.map.policy == PERI_K_EVICT_LRU ? -age : (float)count / age);
}

struct evict {
    peri_k_collision_learn_args a;
    /** The news, the best first: (turned score, turned count, id, place among the records). */
    __device__ void rank_news(int64_t bucket, peri_k_collision_record *rank) const
    {
        const peri_k_collision_record *r = a.records + a.starts[bucket];
        const int64_t n = a.news[bucket];
        for (int64_t i = threadIdx.x; i < n; i += PERI_BLOCK) {
            const uint64_t score = a.map.policy == PERI_K_EVICT_USER
                                       ? float_key(a.new_scores[a.starts[bucket] + i])
                                       : score_of(a, (int64_t)r[i].word[1], (int64_t)r[i].word[2]);
            rank[i] = {{~score, ~r[i].word[1], r[i].word[0], (uint64_t)i}};
        }
        peri_sort_records(rank, n);
    }
    /** A row's rank: (score, turned id, turned row, row). */
    __device__ peri_k_collision_record rank_of(int64_t row) const
    {
        const peri_k_collision_map &m = a.map;
        const int64_t id = m.ids[row];
        uint64_t score;
        if (m.policy == PERI_K_EVICT_USER) score = id == INT64_MAX ? 0 : float_key(a.row_scores[row]);
        else score = score_of(a, m.counts ? m.counts[row] : 0, m.last ? m.last[row] : 0);
        return {{score, ~peri_sortable(id), ~(uint64_t)row, (uint64_t)row}};
    }
    /** The order of the first @digits bytes of the first three words: below, equal, above: -1, 0, 1. */
    __device__ static int compare(const peri_k_collision_record &x, const uint64_t *limit, int digits)
    {
        PERI_UNROLL /* words have fixed places: they stay in registers */
        for (int w = 0; w < 3; w++) {
            if (digits <= 8 * w) return 0;
            const int drop = digits >= 8 * w + 8 ? 0 : 64 - 8 * (digits - 8 * w);
            if (x.word[w] >> drop != limit[w] >> drop) return x.word[w] >> drop < limit[w] >> drop ? -1 : 1;
        }
        return 0;
    }
    __device__ static uint64_t at_word(const uint64_t *words, int word)
    {
        return word == 0 ? words[0] : word == 1 ? words[1] : words[2];
    }
    /** The byte @digit of the rank of the last of the @left worst rows that equal *limit before it; *left: how many of
     *  these it counts. */
    __device__ bool next_digit(const peri_k_collision_bucket &b, uint64_t *limit, int digit, int64_t *left) const
    {
        PERI_SHARED(uint32_t, bins, 256);
        const int word = digit / 8, shift = 56 - 8 * (digit % 8);
        bins[threadIdx.x] = 0; /* as many as threads */
        __syncthreads();
        for (int64_t first = 0; first < b.usable; first += PERI_BLOCK) {
            const int64_t row = first + threadIdx.x;
            const peri_k_collision_record x = row < b.usable ? rank_of(b.first_row + row) : peri_k_collision_record{};
            const int bin =
                row < b.usable && compare(x, limit, digit) == 0 ? (int)(at_word(x.word, word) >> shift & 255) : -1;
            const unsigned same = __match_any_sync(PERI_WARP, bin); /* many rows have one count */
            if (bin >= 0 && peri_lane() == __ffs((int)same) - 1) atomicAdd(&bins[bin], (uint32_t)__popc(same));
        }
        __syncthreads();
        int at = 0;
        for (; bins[at] < *left; at++) *left -= bins[at];
        PERI_UNROLL
        for (int w = 0; w < 3; w++)
            if (w == word) limit[w] |= (uint64_t)at << shift;
        const bool exact = bins[at] == *left;
        __syncthreads();
        return exact;
    }
    /** The @n worst usable rows, the worst first: byte by byte the rank of the last of them is found, then all up to it
     *  are taken. */
    __device__ void rank_rows(const peri_k_collision_bucket &b, peri_k_collision_record *rank, int64_t n) const
    {
        PERI_SHARED(unsigned, have, 1);
        uint64_t limit[3] = {0, 0, 0};
        int64_t left = n;
        int digits = 0;
        while (!next_digit(b, limit, digits++, &left)) continue;
        if (threadIdx.x == 0) *have = 0;
        __syncthreads();
        for (int64_t row = b.first_row + threadIdx.x; row < b.first_row + b.usable; row += PERI_BLOCK) {
            const peri_k_collision_record x = rank_of(row);
            if (compare(x, limit, digits) <= 0) rank[atomicAdd(have, 1u)] = x;
        }
        peri_sort_records(rank, n);
    }
    /** The first @n of news take the rows of the first n of rows, the best that of the best. */
    __device__ void take(int64_t bucket, const peri_k_collision_record *news, const peri_k_collision_record *rows,
                         int64_t n) const
    {
        const peri_k_collision_map &m = a.map;
        const peri_k_collision_record *r = a.records + a.starts[bucket];
        sums s = {};
        for (int64_t k = threadIdx.x; k < n; k += PERI_BLOCK) {
            const peri_k_collision_record from = r[news[k].word[3]];
            const int64_t row = (int64_t)rows[n - 1 - k].word[3], before = m.ids[row];
            m.ids[row] = peri_id_of(from.word[0]);
            if (m.counts) m.counts[row] = (int64_t)from.word[1];
            if (m.last) m.last[row] = (int64_t)from.word[2];
            changed(m, bucket, row, before != INT64_MAX, s);
        }
        add_sums(m.head, s);
    }
    /** The index anew, for many ids leave and come: all windows are empty, and the threads of a block put ids in
     *  together. */
    __device__ void index(const peri_k_collision_bucket &b) const
    {
        const peri_k_collision_map &m = a.map;
        const int64_t first = b.first_line * PERI_MCH_LINE, n = b.lines * PERI_MCH_LINE;
        for (int64_t s = first + threadIdx.x; s < first + n; s += PERI_BLOCK) m.slots[s] = {INT64_MAX, UINT32_MAX, 0};
        __syncthreads();
        for (int64_t row = b.first_row + threadIdx.x; row < b.first_row + b.usable; row += PERI_BLOCK)
            if (m.ids[row] != INT64_MAX) peri_mch_put(m, b, m.ids[row], row);
    }
    __device__ void operator()(int64_t bucket) const
    {
        const peri_k_collision_bucket b = a.map.bucket[bucket];
        const int64_t n = a.news[bucket], most = n < b.usable ? n : b.usable;
        if (most == 0) return;
        peri_k_collision_record *news = a.scratch + 3 * a.starts[bucket], *rows = news + n;
        rank_news(bucket, news);
        rank_rows(b, rows, most);
        int64_t taken = most; /* scores of news descend, those of rows ascend */
        for (int64_t k = threadIdx.x; k < taken; k += PERI_BLOCK)
            if (~news[k].word[0] <= rows[k].word[0]) taken = k;
        taken = peri_block_min(taken);
        if (taken == 0) return;
        take(bucket, news, rows, taken);
        index(b);
    }
};

/* -- hash maps ----------------------------------------------------------------------------------------------------- */

struct insert {
    peri_k_collision_learn_args a;
    /** Where an id with murmur @hash is put: a place in the bucket, or -1. By a warp. *taken: whether its home is
     *  another id's. */
    __device__ int64_t place_of(const peri_k_collision_bucket &b, uint64_t hash, bool *taken) const
    {
        const peri_k_collision_map &m = a.map;
        const int64_t most = m.max_probe < b.usable ? m.max_probe : b.usable, home = peri_hash_home(b, hash);
        int64_t oldest = INT64_MAX; /* (expiry, rows from home): PROBE_LRU */
        *taken = false;
        for (int64_t first = 0; first < most; first += 32) {
            const int64_t seen = first + peri_lane(),
                          at = home + seen < b.usable ? home + seen : home + seen - b.usable;
            bool takes = false, here = false; /* here: the row has an id */
            int64_t age = INT64_MAX;
            if (seen < most) {
                const peri_k_hash_row r = m.rows[b.first_row + at];
                const bool idle = r.touched != (uint32_t)a.call;
                here = r.id != -1;
                takes = !here || (m.policy == PERI_K_EVICT_TTL && idle && r.expiry < a.now);
                if (m.policy == PERI_K_EVICT_PROBE_LRU && idle)
                    age = (int64_t)((uint64_t)(int64_t)r.expiry << 32) | seen;
            }
            if (first == 0) *taken = __shfl_sync(PERI_WARP, (int)here, 0) != 0;
            const unsigned those = __ballot_sync(PERI_WARP, takes);
            if (those) return __shfl_sync(PERI_WARP, at, __ffs((int)those) - 1);
            age = peri_group_min<32>(age, PERI_WARP);
            oldest = age < oldest ? age : oldest;
        }
        if (oldest == INT64_MAX) return -1;
        const int64_t at = home + (oldest & UINT32_MAX);
        return at < b.usable ? at : at - b.usable;
    }
    __device__ void operator()(int64_t bucket) const
    {
        const peri_k_collision_map &m = a.map;
        const peri_k_collision_bucket b = m.bucket[bucket];
        peri_k_collision_record *r = a.records + a.starts[bucket];
        const int64_t n = a.starts[bucket + 1] - a.starts[bucket];
        sums s = {};
        int64_t collisions = 0;
        peri_sort_records(r, n);
        for (int64_t i = 0; i < n && threadIdx.x < 32 && b.usable > 0; i++) {
            if (i + 1 < n && r[i + 1].word[1] == r[i].word[1]) continue; /* the last of an id's expires last */
            bool taken;
            const int64_t place = place_of(b, r[i].word[0], &taken);
            if (peri_lane() == 0) collisions += taken;
            __syncwarp(); /* all have read the rows */
            if (place >= 0 && peri_lane() == 0) {
                peri_k_hash_row *row = &m.rows[b.first_row + place];
                changed(m, bucket, b.first_row + place, row->id != -1, s);
                const int32_t expiry = m.policy == PERI_K_EVICT_NONE ? -1 : (int32_t)r[i].word[2];
                *row = {peri_id_of(r[i].word[1]), expiry, (uint32_t)a.call};
            }
            __syncwarp();
        }
        add_sums(m.head, s);
        peri_head_add(m.head, PERI_COLLISION_COLLISIONS, collisions);
    }
};

} // namespace

PERI_CUDA_KERNEL(mch_coalesce) { return peri_each_bucket(begin, end, c, coalesce{*a}); }
PERI_CUDA_KERNEL(mch_evict) { return peri_each_bucket(begin, end, c, evict{*a}); }
PERI_CUDA_KERNEL(hash_map_insert) { return peri_each_bucket(begin, end, c, insert{*a}); }
