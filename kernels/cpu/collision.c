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
    if (m->spread == PERI_K_SPREAD_HASH)
        return &m->bucket[(int64_t)peri_k_high(mixed, (uint64_t)m->buckets) - m->first_bucket];
    return ref_bucket_of(m, id);
}

/* -- MCH ----------------------------------------------------------------------------------------------------------- */

/** The home line of @id. */
CPU_MAP_INLINE peri_k_mch_slot *cpu_mch_aim(const peri_k_collision_map *m, int64_t id)
{
    uint64_t mixed = peri_k_mix((uint64_t)id);
    const peri_k_collision_bucket *b = cpu_map_bucket(m, id, mixed);
    return &m->slots[(b->first_line + ref_mch_line(b, mixed)) * PERI_MCH_LINE];
}

#ifdef __AVX512DQ__
/** The high 64 bits of each number times @b < 2^32; @high, @low: its halves, each in the low half of a word. */
CPU_MAP_INLINE __m512i cpu_high8(__m512i high, __m512i low, __m512i b)
{
    return _mm512_srli_epi64(
        _mm512_add_epi64(_mm512_mul_epu32(high, b), _mm512_srli_epi64(_mm512_mul_epu32(low, b), 32)), 32);
}

/** As cpu_mch_aim, of eight ids spread by hash over less than 2^32 buckets. */
CPU_MAP_INLINE void cpu_mch_aim8(const peri_k_collision_map *m, const int64_t *ids, peri_k_mch_slot **home)
{
    enum { WORDS = sizeof(peri_k_collision_bucket) / 8 };
    __m512i x = _mm512_loadu_si512(ids); /* peri_k_mix */
    x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 33)),
                           _mm512_set1_epi64((int64_t)0xff51afd7ed558ccdu));
    x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 33)),
                           _mm512_set1_epi64((int64_t)0xc4ceb9fe1a85ec53u));
    x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 33));
    const __m512i high = _mm512_srli_epi64(x, 32);
    __m512i b = _mm512_sub_epi64(cpu_high8(high, x, _mm512_set1_epi64(m->buckets)), _mm512_set1_epi64(m->first_bucket));
    b = _mm512_mullo_epi64(b, _mm512_set1_epi64(WORDS));
    const __m512i first = _mm512_i64gather_epi64(b, &m->bucket->first_line, 8),
                  lines = _mm512_i64gather_epi64(b, &m->bucket->lines, 8);
    const __m512i line = _mm512_add_epi64(first, cpu_high8(x, high, lines));
    const __m512i bytes = _mm512_mullo_epi64(line, _mm512_set1_epi64(PERI_MCH_LINE * sizeof(peri_k_mch_slot)));
    _mm512_storeu_si512(home, _mm512_add_epi64(bytes, _mm512_set1_epi64((intptr_t)m->slots)));
}
#endif

/** The home lines of ids[n]. */
CPU_MAP_INLINE void cpu_mch_aims(const peri_k_collision_map *m, const int64_t *ids, int64_t n, peri_k_mch_slot **home)
{
    int64_t i = 0;
#ifdef __AVX512DQ__
    if (m->spread == PERI_K_SPREAD_HASH && m->buckets <= UINT32_MAX)
        for (; i + 8 <= n; i += 8) cpu_mch_aim8(m, ids + i, home + i);
#endif
    for (; i < n; i++) home[i] = cpu_mch_aim(m, ids[i]);
}

/** The same, not inlined: learning takes longer than a call, and there are many kinds of it. */
static __attribute__((noinline)) void cpu_mch_aims_called(const peri_k_collision_map *m, const int64_t *ids, int64_t n,
                                                          peri_k_mch_slot **home)
{
    cpu_mch_aims(m, ids, n, home);
}

/** Of the bits of a match, the slots, two bits each. */
enum { CPU_MATCH_PLACES = 0 | 2 << 2 | 1 << 4 | 3 << 6 };

/** Which slots of a line have @id, a bit each. Reads windows, too, to which others add meanwhile, and lets them be. */
static inline unsigned cpu_mch_match(const peri_k_mch_slot *s, int64_t id)
{
#ifdef __SANITIZE_THREAD__
    unsigned found = 0;
    for (int b = 0; b < PERI_MCH_LINE; b++) found |= (unsigned)(s[CPU_MATCH_PLACES >> 2 * b & 3].id == id) << b;
    return found;
#else
    const __m256i front = _mm256_load_si256((const __m256i *)s), back = _mm256_load_si256((const __m256i *)(s + 2));
    const __m256i ids = _mm256_unpacklo_epi64(front, back); /* of slots 0, 2, 1, 3 */
    return (unsigned)_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(ids, _mm256_set1_epi64x(id))));
#endif
}

/** The slot of @id, whose home is @line; NULL: it has none. */
CPU_MAP_INLINE peri_k_mch_slot *cpu_mch_slot(const peri_k_collision_map *m, peri_k_mch_slot *line, int64_t id)
{
    peri_k_mch_slot *s = line;
    unsigned found = cpu_mch_match(s, id);
    if (__builtin_expect(found != 0, 1)) s += CPU_MATCH_PLACES >> 2 * __builtin_ctz(found) & 3;
    else if (s[PERI_MCH_LINE - 1].row == UINT32_MAX || !(s = ref_mch_slot(m, ref_bucket_of(m, id), id))) return NULL;
    return s->row != UINT32_MAX ? s : NULL;
}

/** Who else adds to windows while a part does, and with it where it may add without locking the line, which takes 20
 *  cycles and more. */
typedef enum cpu_window_way {
    CPU_WINDOW_NONE,  /* nothing is added */
    CPU_WINDOW_ALONE, /* nobody */
    CPU_WINDOW_LOW,   /* one other part: each has a byte of the window */
    CPU_WINDOW_HIGH,
    CPU_WINDOW_SHARED
} cpu_window_way;

/** As ref_window_add, to byte @k of a window, which no one else adds to. */
CPU_MAP_INLINE int64_t cpu_window_byte(peri_k_mch_slot *slot, int k, int64_t when)
{
    uint8_t *byte = (uint8_t *)&slot->window + k, seen = __atomic_load_n(byte, __ATOMIC_RELAXED);
    uint16_t *last = (uint16_t *)&slot->window + 1; /* all parts write the same */
    if (when > UINT16_MAX) return 1;
    if (when > __atomic_load_n(last, __ATOMIC_RELAXED)) __atomic_store_n(last, (uint16_t)when, __ATOMIC_RELAXED);
    __atomic_store_n(byte, (uint8_t)(seen + 1), __ATOMIC_RELAXED);
    return seen == UINT8_MAX ? 256 : 0;
}
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "bytes of a window");

/** As ref_window_add. */
CPU_MAP_INLINE int64_t cpu_window_add(peri_k_mch_slot *slot, bool counted, int64_t when, const cpu_window_way way)
{
    if (way == CPU_WINDOW_SHARED && counted) return ref_window_add(slot, counted, when);
    if (way != CPU_WINDOW_ALONE && counted) return cpu_window_byte(slot, way == CPU_WINDOW_HIGH, when);
    uint32_t seen = __atomic_load_n(&slot->window, __ATOMIC_RELAXED), next; /* not counted: all parts write the same */
    int64_t more = peri_k_window_next(seen, 1, counted, when, &next);
    if (more != 1 && next != seen) __atomic_store_n(&slot->window, next, __ATOMIC_RELAXED);
    return more;
}

/** Two calls: clang wants a constant. */
CPU_MAP_INLINE void cpu_mch_prefetch(const void *slot, const bool written)
{
    if (written) __builtin_prefetch(slot, 1);
    else __builtin_prefetch(slot, 0);
}

/** Ids [begin, end); @out: their rows are wanted. While a block of ids is read, the homes of the next one are asked
 *  for. */
CPU_MAP_INLINE int64_t cpu_mch_range(const peri_k_collision_find_args *a, ref_logger *log, int64_t begin, int64_t end,
                                     const bool out, const cpu_window_way way)
{
    const peri_k_collision_map m = a->map;
    const int64_t *ids = a->ids;
    const bool learn = way != CPU_WINDOW_NONE;
    const int64_t when = peri_k_window_when(a);
    peri_k_mch_slot *homes[2][CPU_MAP_AHEAD] = {{NULL}}; /* gcc 14 takes them for unset where nothing is asked for */
    int64_t hits = 0, now = end - begin < CPU_MAP_AHEAD ? end - begin : CPU_MAP_AHEAD;
    if (learn) cpu_mch_aims_called(&a->map, ids + begin, now, homes[0]);
    else cpu_mch_aims(&m, ids + begin, now, homes[0]);
    for (int64_t k = 0; k < now; k++) cpu_mch_prefetch(homes[0][k], learn);
    for (int64_t at = begin, turn = 0; at < end; at += CPU_MAP_AHEAD, turn ^= 1) {
        const int64_t n = end - at < CPU_MAP_AHEAD ? end - at : CPU_MAP_AHEAD, left = end - at - n;
        const int64_t next = left < CPU_MAP_AHEAD ? left : CPU_MAP_AHEAD;
        if (learn) cpu_mch_aims_called(&a->map, ids + at + n, next, homes[!turn]);
        else cpu_mch_aims(&m, ids + at + n, next, homes[!turn]);
        for (int64_t k = 0; k < n; k++) {
            const int64_t i = at + k, id = ids[i];
            if (k < next) cpu_mch_prefetch(homes[!turn][k], learn);
            peri_k_mch_slot *slot = cpu_mch_slot(&m, homes[turn][k], id);
            if (learn && id != INT64_MAX) {
                int64_t times = slot ? cpu_window_add(slot, m.counted, when, way) : 1;
                if (__builtin_expect(times != 0, 0)) ref_log(log, id, a->now, times);
            }
            if (!out) continue;
            hits += slot != NULL;
            a->out[i] = slot ? slot->row : ref_miss(&m, ref_bucket_of(&m, id), id, a->first + i);
        }
    }
    return hits;
}

/** cpu_mch_range of each way as a function of its own: gcc takes longer where all are part of cpu_mch_find. */
#define CPU_MAP_APART __attribute__((noinline))
#define CPU_MCH_RANGE(name, way)                                                                                       \
    static CPU_MAP_APART int64_t cpu_mch_##name(const peri_k_collision_find_args *a, ref_logger *log, int64_t begin,   \
                                                int64_t end, bool out)                                                 \
    {                                                                                                                  \
        return out ? cpu_mch_range(a, log, begin, end, true, way) : cpu_mch_range(a, log, begin, end, false, way);     \
    }
CPU_MCH_RANGE(asks, CPU_WINDOW_NONE)
CPU_MCH_RANGE(alone, CPU_WINDOW_ALONE)
CPU_MCH_RANGE(low, CPU_WINDOW_LOW)
CPU_MCH_RANGE(high, CPU_WINDOW_HIGH)
CPU_MCH_RANGE(shared, CPU_WINDOW_SHARED)
#undef CPU_MCH_RANGE
#undef CPU_MAP_APART

CPU_MAP_INLINE int64_t cpu_mch_learn(const peri_k_collision_find_args *a, ref_logger *log, int64_t begin, int64_t end,
                                     const bool out, cpu_window_way way)
{
    switch (way) {
    case CPU_WINDOW_ALONE: return cpu_mch_alone(a, log, begin, end, out);
    case CPU_WINDOW_LOW: return cpu_mch_low(a, log, begin, end, out);
    case CPU_WINDOW_HIGH: return cpu_mch_high(a, log, begin, end, out);
    default: return cpu_mch_shared(a, log, begin, end, out);
    }
}

static void cpu_mch_find(const void *args, int64_t first_part, int64_t past_part)
{
    const peri_k_collision_find_args *a = args;
    ref_logger log = {.a = a};
    for (int64_t part = first_part; part < past_part; part++) {
        const cpu_window_way way = a->parts == 1  ? CPU_WINDOW_ALONE
                                   : a->parts > 2 ? CPU_WINDOW_SHARED
                                                  : CPU_WINDOW_LOW + part;
        const int64_t begin = a->n * part / a->parts, end = a->n * (part + 1) / a->parts;
        const int64_t learned = a->learn < begin ? begin : a->learn < end ? a->learn : end;
        if (!a->out) {
            if (begin < learned) cpu_mch_learn(a, &log, begin, learned, false, way);
            continue;
        }
        int64_t hits = begin < learned ? cpu_mch_learn(a, &log, begin, learned, true, way) : 0;
        if (learned < end) hits += cpu_mch_asks(a, &log, learned, end, true);
        ref_count(&a->map, hits, end - begin - hits);
    }
    if (log.n) ref_flush(&log);
}

/* -- hash maps ----------------------------------------------------------------------------------------------------- */

static inline cpu_map_aim cpu_hash_aim(const peri_k_collision_map *m, int64_t id)
{
    const peri_k_collision_bucket *b =
        cpu_map_bucket(m, id, m->spread == PERI_K_SPREAD_HASH ? peri_k_mix((uint64_t)id) : 0);
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
    for (int64_t i = begin; i < end && i < begin + CPU_MAP_AHEAD; i++)
        ring[i & (CPU_MAP_AHEAD - 1)] = cpu_hash_aim(m, a->ids[i]);
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
