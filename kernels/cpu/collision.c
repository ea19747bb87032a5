/* SPDX-License-Identifier: Apache-2.0
 *
 * collision.c: looking ids up in maps: about one cache line an id, which is asked for some ids before it is read.
 */

enum { CPU_MAP_AHEAD = 32 }; /* ids between asking and reading; a power of two */
#define CPU_MAP_INLINE static inline __attribute__((always_inline))

/** Where an id is looked for first. */
typedef struct cpu_map_aim {
    const peri_k_collision_bucket *bucket;
    int64_t at; /* MCH: line; hash: row */
} cpu_map_aim;

/** The bucket of @id, whose mix is @mixed. */
static inline const peri_k_collision_bucket *cpu_map_bucket(const peri_k_collision_map *m, int64_t id, uint64_t mixed)
{
    if (m->spread == PERI_K_SPREAD_HASH) return &m->bucket[(int64_t)peri_k_high(mixed, (uint64_t)m->buckets) - m->first_bucket];
    return ref_bucket_of(m, id);
}

/* -- MCH ------------------------------------------------------------------------------------------------------------------------------ */

/** The home line of @id, which is asked for. */
CPU_MAP_INLINE int64_t cpu_mch_aim(const peri_k_collision_map *m, int64_t id, const bool hashed)
{
    uint64_t mixed = peri_k_mix((uint64_t)id);
    const peri_k_collision_bucket *b =
        hashed ? &m->bucket[(int64_t)peri_k_high(mixed, (uint64_t)m->buckets) - m->first_bucket] : ref_bucket_of(m, id);
    int64_t line = b->first_line + ref_mch_line(b, mixed);
    __builtin_prefetch(&m->slots[line * PERI_MCH_LINE], 1);
    return line;
}

/** Which slots of a line have @id, a bit each. */
static inline unsigned cpu_mch_match(const peri_k_mch_slot *s, int64_t id)
{
    const __m256i front = _mm256_load_si256((const __m256i *)s), back = _mm256_load_si256((const __m256i *)(s + 2));
    const __m256i ids = _mm256_unpacklo_epi64(front, back); /* of slots 0, 2, 1, 3 */
    return (unsigned)_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(ids, _mm256_set1_epi64x(id))));
}

/** The slot of @id; NULL: it has none. */
CPU_MAP_INLINE peri_k_mch_slot *cpu_mch_slot(const peri_k_collision_map *m, int64_t line, int64_t id)
{
    enum { PLACES = 0 | 2 << 2 | 1 << 4 | 3 << 6 }; /* of the bits of a match, two bits each */
    peri_k_mch_slot *s = &m->slots[line * PERI_MCH_LINE];
    unsigned found = cpu_mch_match(s, id);
    if (__builtin_expect(found != 0, 1)) s += PLACES >> 2 * __builtin_ctz(found) & 3;
    else if (s[PERI_MCH_LINE - 1].row == UINT32_MAX || !(s = ref_mch_slot(m, ref_bucket_of(m, id), id))) return NULL;
    return s->row != UINT32_MAX ? s : NULL;
}

/** As ref_window_add. @alone: no other range adds to windows. */
CPU_MAP_INLINE bool cpu_window_add(peri_k_mch_slot *slot, int32_t count_bits, int64_t when, const bool alone)
{
    uint32_t seen = __atomic_load_n(&slot->window, __ATOMIC_RELAXED);
    if (count_bits < 32 || seen >= UINT32_MAX / 2) return ref_window_add(slot, count_bits, when);
    if (alone) slot->window = seen + 1;
    else __atomic_fetch_add(&slot->window, 1, __ATOMIC_RELAXED); /* never that many at once that it overflows */
    return true;
}

/** What is done with ids [begin, end): they are learned, their rows are wanted, no other range learns. A block of ids is asked for while
 *  the one before is read. */
CPU_MAP_INLINE int64_t cpu_mch_range(const peri_k_collision_find_args *a, ref_logger *log, int64_t begin, int64_t end, const bool hashed,
                                     const bool learn, const bool out, const bool alone)
{
    const peri_k_collision_map m = a->map;
    const int64_t *ids = a->ids;
    int64_t lines[2][CPU_MAP_AHEAD], hits = 0;
    for (int64_t i = begin; i < end && i < begin + CPU_MAP_AHEAD; i++) lines[0][i - begin] = cpu_mch_aim(&m, ids[i], hashed);
    for (int64_t block = begin, turn = 0; block < end; block += CPU_MAP_AHEAD, turn ^= 1) {
        const int64_t past = block + CPU_MAP_AHEAD < end ? block + CPU_MAP_AHEAD : end;
        for (int64_t i = past; i < end && i < past + CPU_MAP_AHEAD; i++) lines[!turn][i - past] = cpu_mch_aim(&m, ids[i], hashed);
        for (int64_t i = block; i < past; i++) {
            const int64_t id = ids[i];
            peri_k_mch_slot *slot = cpu_mch_slot(&m, lines[turn][i - block], id);
            if (learn && id != INT64_MAX && !(slot && cpu_window_add(slot, m.count_bits, a->now - a->window, alone)))
                ref_log(log, id, a->now, 0);
            if (!out) continue;
            hits += slot != NULL;
            a->out[i] = slot ? slot->row : ref_miss(&m, ref_bucket_of(&m, id), id, a->first + i);
        }
    }
    return hits;
}

CPU_MAP_INLINE int64_t cpu_mch_ids(const peri_k_collision_find_args *a, ref_logger *log, int64_t begin, int64_t end, const bool learn,
                                  const bool out, const bool alone)
{
    if (begin >= end) return 0;
    return a->map.spread == PERI_K_SPREAD_HASH ? cpu_mch_range(a, log, begin, end, true, learn, out, alone)
                                               : cpu_mch_range(a, log, begin, end, false, learn, out, alone);
}

static void cpu_mch_find(const void *args, int64_t begin, int64_t end)
{
    const peri_k_collision_find_args *a = args;
    const bool alone = begin == 0 && end >= a->learn; /* no other range learns */
    const int64_t learned = a->learn < begin ? begin : a->learn < end ? a->learn : end;
    ref_logger log = {.a = a};
    int64_t hits;
    if (!a->out) {
        if (alone) cpu_mch_ids(a, &log, begin, learned, true, false, true);
        else cpu_mch_ids(a, &log, begin, learned, true, false, false);
        hits = 0;
    } else {
        hits = alone ? cpu_mch_ids(a, &log, begin, learned, true, true, true) : cpu_mch_ids(a, &log, begin, learned, true, true, false);
        hits += cpu_mch_ids(a, &log, learned, end, false, true, true);
    }
    if (log.n) ref_flush(&log);
    if (a->out) ref_count(&a->map, hits, end - begin - hits);
}

/* -- hash maps ------------------------------------------------------------------------------------------------------------------------ */

static inline cpu_map_aim cpu_hash_aim(const peri_k_collision_map *m, int64_t id)
{
    const peri_k_collision_bucket *b = cpu_map_bucket(m, id, m->spread == PERI_K_SPREAD_HASH ? peri_k_mix((uint64_t)id) : 0);
    int64_t row = b->first_row + ref_hash_home(b, id);
    __builtin_prefetch(&m->rows[row], 1);
    return (cpu_map_aim){b, row};
}

/** The row of @id, -1: none. */
static inline int64_t cpu_hash_row(const peri_k_collision_map *m, cpu_map_aim aim, int64_t id)
{
    const peri_k_collision_bucket *b = aim.bucket;
    int64_t left = m->max_probe < b->usable ? m->max_probe : b->usable, row = aim.at, past = b->first_row + b->usable;
    if (id == -1) return -1;
    for (; left > 0; left--, row = row + 1 < past ? row + 1 : b->first_row) {
        int64_t found = m->rows[row].id;
        if (found == id) return row;
        if (found == -1 && !m->full) return -1;
    }
    return -1;
}

static void cpu_hash_map_find(const void *args, int64_t begin, int64_t end)
{
    const peri_k_collision_find_args *a = args;
    const peri_k_collision_map *m = &a->map;
    cpu_map_aim ring[CPU_MAP_AHEAD];
    ref_logger log = {.a = a};
    int64_t hits = 0, missed = 0;
    for (int64_t i = begin; i < end && i < begin + CPU_MAP_AHEAD; i++) ring[i & (CPU_MAP_AHEAD - 1)] = cpu_hash_aim(m, a->ids[i]);
    for (int64_t i = begin; i < end; i++) {
        int64_t id = a->ids[i];
        cpu_map_aim aim = ring[i & (CPU_MAP_AHEAD - 1)];
        if (i + CPU_MAP_AHEAD < end) ring[i & (CPU_MAP_AHEAD - 1)] = cpu_hash_aim(m, a->ids[i + CPU_MAP_AHEAD]);
        int64_t row = cpu_hash_row(m, aim, id);
        bool learn = i < a->learn && id != -1;
        if (row < 0 && learn) {
            ref_log(&log, id, a->expiry, a->first + i);
            continue;
        }
        if (row >= 0 && learn) ref_touch(m, row, a);
        hits += row >= 0;
        missed += row < 0;
        a->out[i] = row >= 0 ? row : ref_miss(m, aim.bucket, id, a->first + i);
    }
    if (log.n) ref_flush(&log);
    ref_count(m, hits, missed);
}

#define K_CPU_COLLISION [PERI_K_mch_find] = cpu_mch_find, [PERI_K_hash_map_find] = cpu_hash_map_find,
