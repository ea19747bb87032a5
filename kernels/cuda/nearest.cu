/* SPDX-License-Identifier: Apache-2.0
 *
 * nearest.cu: the largest products (kernels/nearest.h). A block has a part of the items and one query: by chunks, its
 * warps make the products, and the best of a chunk, one after the other, go into the list of the best so far, until one
 * is not better than the list's last. Then a block a query does the same with what the parts have found.
 */
#include "value.cuh"

#include "../nearest.h"

#include "scan.cuh"

#include "../order.h"
#include "../ref/scale.h"

namespace {

enum { CHUNK = 1024, EACH = (int)PERI_NEAREST_MOST / (int)PERI_BLOCK };
constexpr int64_t ITEMS_LEAST = 2048, PARTS_MOST = 512, BLOCKS = 2048;

/** Bits that order as scores do; 0 is below all. And back. */
__device__ __forceinline__ uint32_t ordered(float s) { return k_sort_key_f32(s == s ? s : -INFINITY); }
__device__ __forceinline__ float float_of_key(uint32_t u) { return k_float(u & 0x80000000u ? u & 0x7fffffffu : ~u); }

/** The best so far, the best first, in memory that the block shares. */
struct best {
    float *scores;
    int64_t *indices;
    int n, k;
};

/** Put (s, i) where it belongs: behind all that are as good. All threads call it. */
__device__ void insert(best &b, float s, int64_t i)
{
    float score[EACH];
    int64_t index[EACH];
    int at = 0; /* how many stay in front */
    for (int e = (int)threadIdx.x; e < b.n; e += PERI_BLOCK) at += b.scores[e] >= s;
    at = peri_block_combine(at, [](int x, int y) { return x + y; });
    for (int j = 0; j < EACH; j++) {
        const int e = (int)threadIdx.x + j * PERI_BLOCK;
        if (e < b.n) score[j] = b.scores[e], index[j] = b.indices[e];
    }
    __syncthreads();
    for (int j = 0; j < EACH; j++) {
        const int e = (int)threadIdx.x + j * PERI_BLOCK;
        if (e < b.n && e >= at && e + 1 < b.k) b.scores[e + 1] = score[j], b.indices[e + 1] = index[j];
    }
    if (threadIdx.x == 0 && at < b.k) b.scores[at] = s, b.indices[at] = i;
    if (b.n < b.k) b.n++;
    __syncthreads();
}

/** The best of keys[0..CHUNK) go into the list, as long as they are better than its last. A key: a score's bits, and
 *  2^32 - 1 - its place, so that of equal ones the first is the largest; 0: nothing. Places have number `first` +
 *  place, or indices[place]. */
__device__ void take(best &b, uint64_t *keys, int64_t first, const int64_t *indices)
{
    for (;;) {
        uint64_t top = 0;
        for (int e = (int)threadIdx.x; e < CHUNK; e += PERI_BLOCK) top = keys[e] > top ? keys[e] : top;
        const bool full = b.n == b.k;
        const uint32_t worst = full ? ordered(b.scores[b.k - 1]) : 0;
        top = peri_block_combine(top, [](uint64_t x, uint64_t y) { return x > y ? x : y; });
        if (top == 0 || (full && (uint32_t)(top >> 32) <= worst)) return;
        const uint32_t place = 0xffffffffu - (uint32_t)top;
        if (threadIdx.x == 0) keys[place] = 0;
        insert(b, float_of_key((uint32_t)(top >> 32)), indices ? indices[place] : first + place);
    }
}

__device__ __forceinline__ uint64_t key_of_score(float s, int place)
{
    return (uint64_t)ordered(s) << 32 | (0xffffffffu - (uint32_t)place);
}

/** Number @d of an item. */
__device__ __forceinline__ float number(const peri_op_nearest &a, const uint8_t *item, const k_scale &s, int64_t d)
{
    if (!a.format.bits) {
        if (a.dtype == PERI_F32) return ((const float *)item)[d];
        const uint16_t h = ((const uint16_t *)item)[d];
        return a.dtype == PERI_F16 ? k_f16_to_f32(h) : k_bf16_to_f32(h);
    }
    return k_row_number(&a.format, item, &s, d);
}

/** Room of a block: keys, then the list. */
__device__ best list_in(uint64_t *room, int64_t k)
{
    best b;
    b.indices = (int64_t *)(room + CHUNK);
    b.scores = (float *)(b.indices + k);
    b.n = 0;
    b.k = (int)k;
    return b;
}

__device__ void write_best(const best &b, float *scores, int64_t *indices)
{
    for (int e = (int)threadIdx.x; e < b.k; e += PERI_BLOCK) {
        scores[e] = e < b.n ? b.scores[e] : -INFINITY;
        indices[e] = e < b.n ? b.indices[e] : -1;
    }
    __syncthreads();
}

__global__ void __launch_bounds__(PERI_BLOCK) parts(peri_k_nearest_args a)
{
    PERI_SHARED_DYNAMIC(uint64_t, keys);
    const peri_op_nearest &op = a.op;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int64_t w = blockIdx.x; w < a.parts * op.n_queries; w += gridDim.x) {
        const int64_t p = w / op.n_queries, past = (p + 1) * op.n_items / a.parts;
        const float *query = op.queries + w % op.n_queries * op.dim;
        best b = list_in(keys, op.k);
        for (int64_t from = p * op.n_items / a.parts; from < past; from += CHUNK) {
            for (int e = warp; e < CHUNK; e += PERI_WARPS) {
                float sum = 0;
                if (from + e < past) {
                    const uint8_t *item = (const uint8_t *)op.items + (from + e) * op.stride;
                    const k_scale s = op.format.bits ? k_scale_load(&op.format, item) : k_scale_make(1, 0, 1);
                    for (int64_t d = lane; d < op.dim; d += 32) sum = fmaf(query[d], number(op, item, s, d), sum);
                }
                for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
                if (lane == 0) keys[e] = from + e < past ? key_of_score(sum, e) : 0;
            }
            __syncthreads();
            take(b, keys, from, NULL);
        }
        write_best(b, a.part_scores + w * op.k, a.part_indices + w * op.k);
    }
}

__global__ void __launch_bounds__(PERI_BLOCK) merge(peri_k_nearest_args a)
{
    PERI_SHARED_DYNAMIC(uint64_t, keys);
    const int64_t k = a.op.k;
    for (int64_t q = blockIdx.x; q < a.op.n_queries; q += gridDim.x) {
        best b = list_in(keys, k);
        for (int64_t p = 0; p < a.parts; p++) {
            const int64_t at = (p * a.op.n_queries + q) * k;
            for (int64_t from = 0; from < k; from += CHUNK) {
                for (int e = (int)threadIdx.x; e < CHUNK; e += PERI_BLOCK)
                    keys[e] = from + e < k && a.part_indices[at + from + e] >= 0
                                  ? key_of_score(a.part_scores[at + from + e], e)
                                  : 0;
                __syncthreads();
                take(b, keys, 0, a.part_indices + at + from);
            }
        }
        write_best(b, a.op.scores + q * k, a.op.indices + q * k);
    }
}

/** Parts that the items are cut into: enough blocks for the whole device, and not more than there are items for. */
int64_t parts_of(const peri_op_nearest *a)
{
    int64_t n = BLOCKS / (a->n_queries > 0 ? a->n_queries : 1), most = a->n_items / ITEMS_LEAST;
    n = n < PARTS_MOST ? n : PARTS_MOST;
    n = n < most ? n : most;
    return n > 1 ? n : 1;
}

unsigned blocks_for(int64_t n) { return (unsigned)(n < 1 << 20 ? n : 1 << 20); }

} // namespace

PERI_CUDA_SCRATCH(nearest) { return parts_of(a) * a->n_queries * a->k * 12; }

PERI_CUDA_OP(nearest)
{
    if (a->n_queries == 0) return cudaSuccess;
    peri_k_nearest_args n = {};
    n.op = *a;
    n.parts = parts_of(a);
    n.part_indices = (int64_t *)c->scratch;
    n.part_scores = (float *)(n.part_indices + n.parts * a->n_queries * a->k);
    const size_t shared = 8 * CHUNK + 12 * (size_t)a->k;
    PERI_CUDA_TRY(peri_cuda_launch(parts, dim3(blocks_for(n.parts * a->n_queries)), dim3(PERI_BLOCK), shared, c, n));
    return peri_cuda_launch(merge, dim3(blocks_for(a->n_queries)), dim3(PERI_BLOCK), shared, c, n);
}
