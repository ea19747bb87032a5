/* SPDX-License-Identifier: Apache-2.0
 *
 * collision.c: looking ids up in maps: about one cache line an id, which is asked for some ids before it is read.
 */

enum { CPU_MAP_AHEAD = 32 }; /* ids between asking and reading; a power of two */

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

static inline cpu_map_aim cpu_mch_aim(const peri_k_collision_map *m, int64_t id)
{
    uint64_t mixed = peri_k_mix((uint64_t)id);
    const peri_k_collision_bucket *b = cpu_map_bucket(m, id, mixed);
    int64_t line = b->first_line + (int64_t)peri_k_high(peri_k_mix(mixed), (uint64_t)b->lines);
    __builtin_prefetch(&m->slots[line * PERI_MCH_LINE], 1);
    return (cpu_map_aim){b, line};
}

/** The slot of @id; NULL: it has none. */
static inline peri_k_mch_slot *cpu_mch_slot(const peri_k_collision_map *m, cpu_map_aim aim, int64_t id)
{
    peri_k_mch_slot *s = &m->slots[aim.at * PERI_MCH_LINE];
    unsigned found = (unsigned)(s[0].id == id) | (unsigned)(s[1].id == id) << 1 | (unsigned)(s[2].id == id) << 2 |
                     (unsigned)(s[3].id == id) << 3;
    if (found) s += __builtin_ctz(found);
    else if (s[PERI_MCH_LINE - 1].row == UINT32_MAX || !(s = ref_mch_slot(m, aim.bucket, id))) return NULL;
    return s->row != UINT32_MAX ? s : NULL;
}

/** As ref_window_add, by the only range that adds to windows. */
static inline bool cpu_window_add(peri_k_mch_slot *slot, int32_t count_bits, int64_t when)
{
    if (count_bits < 32 || slot->window == UINT32_MAX) return ref_window_add(slot, count_bits, when);
    slot->window++;
    return true;
}

static void cpu_mch_find(const void *args, int64_t begin, int64_t end)
{
    const peri_k_collision_find_args *a = args;
    const peri_k_collision_map *m = &a->map;
    const bool alone = begin == 0 && end >= a->learn; /* no other range learns */
    cpu_map_aim ring[CPU_MAP_AHEAD];
    ref_logger log = {.a = a};
    int64_t hits = 0;
    for (int64_t i = begin; i < end && i < begin + CPU_MAP_AHEAD; i++) ring[i & (CPU_MAP_AHEAD - 1)] = cpu_mch_aim(m, a->ids[i]);
    for (int64_t i = begin; i < end; i++) {
        int64_t id = a->ids[i];
        cpu_map_aim aim = ring[i & (CPU_MAP_AHEAD - 1)];
        if (i + CPU_MAP_AHEAD < end) ring[i & (CPU_MAP_AHEAD - 1)] = cpu_mch_aim(m, a->ids[i + CPU_MAP_AHEAD]);
        peri_k_mch_slot *slot = cpu_mch_slot(m, aim, id);
        if (i < a->learn && id != INT64_MAX) {
            bool kept = slot && (alone ? cpu_window_add(slot, m->count_bits, a->now - a->window)
                                       : ref_window_add(slot, m->count_bits, a->now - a->window));
            if (!kept) ref_log(&log, id, a->now, 0);
        }
        if (!a->out) continue;
        hits += slot != NULL;
        a->out[i] = slot ? slot->row : ref_miss(m, aim.bucket, id, a->first + i);
    }
    if (log.n) ref_flush(&log);
    if (a->out) ref_count(m, hits, end - begin - hits);
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
