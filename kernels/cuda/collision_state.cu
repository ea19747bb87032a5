/* SPDX-License-Identifier: Apache-2.0
 *
 * collision_state.cu: kernels/collision.h: what a map has learned, written out and read back. A block has a bucket; its
 * threads have rows.
 */
#include "collision.cuh"

namespace {

struct changed_rows {
    enum { FEW = 1 << 15 };
    peri_k_collision_changed_args a;
    __device__ void operator()(int64_t bucket) const
    {
        const peri_k_collision_map &m = a.map;
        const peri_k_collision_bucket b = m.bucket[bucket];
        const int64_t n = a.n_before[bucket], *list = m.changed + b.first_row;
        int64_t at = 0;
        for (int64_t other = threadIdx.x; other < bucket; other += PERI_BLOCK) at += a.n_before[other];
        at = peri_block_sum(at);
        if (n < FEW && n * n <= 16 * b.rows) { /* a row's place is the number of lesser ones in the list */
            for (int64_t i = threadIdx.x; i < n; i += PERI_BLOCK) {
                int64_t less = 0;
                for (int64_t j = 0; j < n; j++) less += list[j] < list[i];
                a.out[at + less] = list[i];
                m.is_changed[list[i]] = 0;
            }
        } else { /* all flags in order */
            int total;
            for (int64_t first = 0; first < b.rows; first += PERI_BLOCK, at += total) {
                const int64_t row = b.first_row + first + threadIdx.x;
                const bool changed = first + threadIdx.x < b.rows && m.is_changed[row];
                const int place = peri_block_place(changed, &total);
                if (changed) a.out[at + place] = row, m.is_changed[row] = 0;
            }
        }
        if (threadIdx.x != 0) return;
        m.n_changed[bucket] = 0;
        peri_atomic_add(&m.head[PERI_COLLISION_CHANGED], -n);
    }
};

struct reset {
    peri_k_collision_state_args a;
    __device__ void operator()(int64_t k) const
    {
        const peri_k_collision_map &m = a.map;
        const peri_k_collision_bucket b = m.bucket[k];
        int64_t occupied = 0;
        for (int64_t row = b.first_row + threadIdx.x; row < b.first_row + b.rows; row += PERI_BLOCK) {
            m.is_changed[row] = 0;
            if (m.rows) {
                occupied += !a.blank && m.rows[row].id != -1;
                if (!a.rows_stay) m.rows[row] = {-1, -1, 0};
                continue;
            }
            occupied += !a.blank && m.ids[row] != INT64_MAX;
            if (a.rows_stay) continue;
            m.ids[row] = INT64_MAX;
            if (m.counts) m.counts[row] = 0;
            if (m.last) m.last[row] = 0;
        }
        const int64_t first = b.first_line * PERI_MCH_LINE, n = b.lines * PERI_MCH_LINE;
        for (int64_t s = first + threadIdx.x; s < first + n; s += PERI_BLOCK) m.slots[s] = {INT64_MAX, UINT32_MAX, 0};
        peri_head_add(m.head, PERI_COLLISION_OCCUPIED, -occupied);
        if (threadIdx.x != 0) return;
        if (!a.blank) peri_atomic_add(&m.head[PERI_COLLISION_CHANGED], -m.n_changed[k]);
        m.n_changed[k] = 0;
    }
};

/** Whether @id belongs to bucket @k of the map. */
__device__ bool at_home(const peri_k_collision_map &m, int64_t id, int64_t k)
{
    return peri_k_bucket(id, m.spread, m.buckets, m.block) == m.first_bucket + k;
}

__device__ void report_fault(const peri_k_collision_state_args &a, int64_t k, int64_t fault, int64_t id, int64_t row,
                             int64_t value)
{
    int64_t *report = a.report + k * PERI_COLLISION_FAULT_WORDS;
    report[PERI_COLLISION_FAULT] = fault;
    report[PERI_COLLISION_FAULT_ID] = id;
    report[PERI_COLLISION_FAULT_ROW] = row;
    report[PERI_COLLISION_FAULT_VALUE] = value;
}

/* -- MCH ----------------------------------------------------------------------------------------------------------- */

struct write_sorted {
    peri_k_collision_state_args a;
    __device__ void operator()(int64_t k) const
    {
        const peri_k_collision_map &m = a.map;
        const peri_k_collision_bucket b = m.bucket[k];
        peri_k_collision_record *r = a.scratch + b.first_row;
        /* that of the last row stays last: its row is the greatest */
        for (int64_t i = threadIdx.x; i < b.rows; i += PERI_BLOCK)
            r[i] = {{peri_sortable(m.ids[b.first_row + i]), (uint64_t)(b.first_row + i), 0, 0}};
        peri_sort_records(r, b.rows);
        for (int64_t i = threadIdx.x; i < b.rows; i += PERI_BLOCK) {
            const int64_t row = (int64_t)r[i].word[1], to = b.first_row + i - a.state_row;
            a.sorted[to] = m.ids[row];
            a.mapping[to] = a.first_row + row;
            if (m.counts) a.counts[to] = m.counts[row];
            if (m.last) a.last[to] = m.last[row];
        }
    }
};

/** The first fault in the order of the state. */
struct validate_sorted {
    peri_k_collision_state_args a;
    /** That of place @i, and of a number *value. first[row]: the first place that has the row of the bucket. */
    __device__ int64_t fault(const peri_k_collision_bucket &b, const peri_k_collision_record *first, int64_t k,
                             int64_t i, int64_t *value) const
    {
        const int64_t *ids = a.sorted + b.first_row - a.state_row, id = ids[i];
        const int64_t row = a.mapping[b.first_row - a.state_row + i] - a.first_row - b.first_row;
        const bool last = i == b.rows - 1;
        if (row < 0 || row >= b.rows || (int64_t)first[row].word[0] < i) return PERI_COLLISION_ROW_OUT;
        if (last != (row == b.rows - 1) || (last && id != INT64_MAX)) return PERI_COLLISION_LAST;
        if (i > 0 && id < ids[i - 1]) return PERI_COLLISION_ORDER;
        const int64_t number = peri_k_mch_numbers(&a, b.first_row - a.state_row + i, last, value);
        if (number != PERI_COLLISION_SOUND) return number;
        if (id == INT64_MAX) return PERI_COLLISION_SOUND;
        if (i > 0 && id == ids[i - 1]) return PERI_COLLISION_TWICE;
        return at_home(a.map, id, k) ? PERI_COLLISION_SOUND : PERI_COLLISION_STRAY;
    }
    __device__ void operator()(int64_t k) const
    {
        const peri_k_collision_bucket b = a.map.bucket[k];
        const int64_t *mapping = a.mapping + b.first_row - a.state_row;
        peri_k_collision_record *first = a.scratch + b.first_row;
        for (int64_t i = threadIdx.x; i < b.rows; i += PERI_BLOCK) first[i].word[0] = INT64_MAX;
        __syncthreads();
        for (int64_t i = threadIdx.x; i < b.rows; i += PERI_BLOCK) {
            const int64_t row = mapping[i] - a.first_row - b.first_row;
            if (row >= 0 && row < b.rows) peri_atomic_min((int64_t *)&first[row].word[0], i);
        }
        __syncthreads();
        int64_t worst = INT64_MAX, value = 0;
        for (int64_t i = threadIdx.x; i < b.rows && worst == INT64_MAX; i += PERI_BLOCK)
            if (fault(b, first, k, i, &value) != PERI_COLLISION_SOUND) worst = i;
        worst = peri_block_min(worst);
        if (threadIdx.x != 0) return;
        value = 0;
        if (worst == INT64_MAX) return report_fault(a, k, PERI_COLLISION_SOUND, 0, 0, 0);
        const int64_t found = fault(b, first, k, worst, &value);
        report_fault(a, k, found, a.sorted[b.first_row - a.state_row + worst], mapping[worst], value);
    }
};

struct load_sorted {
    peri_k_collision_state_args a;
    __device__ void operator()(int64_t k) const
    {
        const peri_k_collision_map &m = a.map;
        const peri_k_collision_bucket b = m.bucket[k];
        int64_t occupied = 0;
        for (int64_t i = threadIdx.x; i < b.rows; i += PERI_BLOCK) {
            const int64_t from = b.first_row + i - a.state_row, row = a.mapping ? a.mapping[from] - a.first_row : from;
            const int64_t id = a.sorted[from];
            occupied += id != INT64_MAX;
            m.ids[row] = id;
            if (m.counts) m.counts[row] = a.counts[from];
            if (m.last) m.last[row] = a.last[from];
            if (id != INT64_MAX) peri_mch_put(m, b, id, row);
        }
        peri_head_add(m.head, PERI_COLLISION_OCCUPIED, occupied);
    }
};

/* -- hash maps ----------------------------------------------------------------------------------------------------- */

struct write_rows {
    peri_k_collision_state_args a;
    __device__ void operator()(int64_t k) const
    {
        const peri_k_collision_bucket b = a.map.bucket[k];
        for (int64_t row = b.first_row + threadIdx.x; row < b.first_row + b.rows; row += PERI_BLOCK) {
            a.sorted[row - a.state_row] = a.map.rows[row].id;
            if (a.expiries) a.expiries[row - a.state_row] = a.map.rows[row].expiry;
        }
    }
};

/** The first fault in the order of rows; if there is none, the last hole. */
struct validate_rows {
    peri_k_collision_state_args a;
    /** Of row @i of the bucket, whose identities are @ids. *hole: a free row comes before the id's. */
    __device__ int64_t fault(const peri_k_collision_bucket &b, const int64_t *ids, int64_t k, int64_t i,
                             bool *hole) const
    {
        const peri_k_collision_map &m = a.map;
        const int64_t id = ids[i], most = m.max_probe < b.usable ? m.max_probe : b.usable;
        *hole = false;
        if (!peri_k_hash_expiry(&a, b.first_row - a.state_row + i)) return PERI_COLLISION_EXPIRY;
        if (id == -1) return PERI_COLLISION_SOUND;
        if (i >= b.usable) return PERI_COLLISION_LAST;
        if (!at_home(m, id, k)) return PERI_COLLISION_STRAY;
        const int64_t home = peri_hash_home(b, peri_k_murmur((uint64_t)id, 0, 0));
        int64_t at = home, times = 0;
        for (int64_t seen = 0; seen < most; seen++, at = at + 1 < b.usable ? at + 1 : 0) {
            times += ids[at] == id;
            *hole = *hole || (!times && ids[at] == -1);
        }
        if ((i >= home ? i - home : i - home + b.usable) >= m.max_probe) return PERI_COLLISION_FAR;
        return times > 1 ? PERI_COLLISION_TWICE : PERI_COLLISION_SOUND;
    }
    __device__ void operator()(int64_t k) const
    {
        const peri_k_collision_bucket b = a.map.bucket[k];
        const int64_t *ids = a.sorted + b.first_row - a.state_row, row = a.first_row + b.first_row;
        int64_t worst = INT64_MAX, last_hole = -1;
        bool hole;
        for (int64_t i = threadIdx.x; i < b.rows && worst == INT64_MAX; i += PERI_BLOCK) {
            if (fault(b, ids, k, i, &hole) != PERI_COLLISION_SOUND) worst = i;
            else if (hole) last_hole = i;
        }
        worst = peri_block_min(worst);
        last_hole = -peri_block_min(-last_hole);
        if (threadIdx.x != 0) return;
        if (worst < INT64_MAX) {
            const int64_t found = fault(b, ids, k, worst, &hole);
            const int64_t value = found == PERI_COLLISION_EXPIRY ? a.expiries[b.first_row - a.state_row + worst] : 0;
            report_fault(a, k, found, ids[worst], row + worst, value);
        } else if (last_hole >= 0) report_fault(a, k, PERI_COLLISION_HOLE, ids[last_hole], row + last_hole, 0);
        else report_fault(a, k, PERI_COLLISION_SOUND, 0, 0, 0);
    }
};

struct load_rows {
    peri_k_collision_state_args a;
    __device__ void operator()(int64_t k) const
    {
        const peri_k_collision_bucket b = a.map.bucket[k];
        int64_t occupied = 0;
        for (int64_t row = b.first_row + threadIdx.x; row < b.first_row + b.rows; row += PERI_BLOCK) {
            const int64_t id = a.sorted[row - a.state_row];
            occupied += id != -1;
            a.map.rows[row] = {id, a.expiries ? a.expiries[row - a.state_row] : -1, 0};
        }
        peri_head_add(a.map.head, PERI_COLLISION_OCCUPIED, occupied);
    }
};

/** Bucket from + i for i in the range. */
template <class F>
cudaError_t each_from(const peri_k_collision_state_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    return peri_each_bucket(a->from + begin, a->from + end, c, F{*a});
}

} // namespace

PERI_CUDA_KERNEL(collision_changed) { return peri_each_bucket(begin, end, c, changed_rows{*a}); }
PERI_CUDA_KERNEL(collision_reset) { return each_from<reset>(a, begin, end, c); }
PERI_CUDA_KERNEL(mch_sorted) { return each_from<write_sorted>(a, begin, end, c); }
PERI_CUDA_KERNEL(mch_validate) { return each_from<validate_sorted>(a, begin, end, c); }
PERI_CUDA_KERNEL(mch_load) { return each_from<load_sorted>(a, begin, end, c); }
PERI_CUDA_KERNEL(hash_map_read) { return each_from<write_rows>(a, begin, end, c); }
PERI_CUDA_KERNEL(hash_map_validate) { return each_from<validate_rows>(a, begin, end, c); }
PERI_CUDA_KERNEL(hash_map_load) { return each_from<load_rows>(a, begin, end, c); }
