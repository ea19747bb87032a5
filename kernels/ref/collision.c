/* SPDX-License-Identifier: Apache-2.0
 *
 * collision.c: maps from ids to rows: looking ids up, and the log of those that have none.
 */

/** The bucket of @id among the map's own. */
static inline const peri_k_collision_bucket *ref_bucket_of(const peri_k_collision_map *m, int64_t id)
{
    return &m->bucket[peri_k_bucket(id, m->spread, m->buckets, m->block) - m->first_bucket];
}

static inline void ref_head_add(int64_t *word, int64_t n)
{
    if (n) __atomic_fetch_add(word, n, __ATOMIC_RELAXED);
}

static inline void ref_lower(int64_t *word, int64_t value)
{
    int64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);
    while (value < seen && !__atomic_compare_exchange_n(word, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        continue;
}

static void ref_collision_check(const void *args, int64_t begin, int64_t end)
{
    const peri_k_collision_find_args *a = args;
    const peri_k_collision_map *m = &a->map;
    int64_t last = m->first_bucket + (int64_t)m->n_buckets;
    for (int64_t i = begin; i < end; i++) {
        int64_t bucket = peri_k_bucket(a->ids[i], m->spread, m->buckets, m->block);
        if (bucket >= m->first_bucket && bucket < last) continue;
        ref_lower(&m->head[PERI_COLLISION_BAD], a->first + i);
        return;
    }
}

/* -- looking up ---------------------------------------------------------------------------------------------------- */

/** The home line of an id, whose mix is @mixed, among its bucket's. */
static inline int64_t ref_mch_line(const peri_k_collision_bucket *b, uint64_t mixed)
{
    return (int64_t)peri_k_high(peri_k_rotate(mixed, 32), (uint64_t)b->lines);
}

static inline int64_t ref_mch_home(const peri_k_collision_bucket *b, int64_t id)
{
    return ref_mch_line(b, peri_k_mix((uint64_t)id));
}

/** The slot of @id, or the free one where it would go; NULL: neither, which only an id that no row can have meets. */
static inline peri_k_mch_slot *ref_mch_slot(const peri_k_collision_map *m, const peri_k_collision_bucket *b, int64_t id)
{
    int64_t line = ref_mch_home(b, id);
    for (int64_t seen = 0; seen < b->lines; seen++, line = line + 1 < b->lines ? line + 1 : 0) {
        peri_k_mch_slot *slot = &m->slots[(b->first_line + line) * PERI_MCH_LINE];
        for (int k = 0; k < PERI_MCH_LINE; k++)
            if (slot[k].id == id || slot[k].row == UINT32_MAX) return &slot[k];
    }
    return NULL;
}

static inline int64_t ref_hash_home(const peri_k_collision_bucket *b, int64_t id)
{
    uint64_t most = b->usable > 0 ? (uint64_t)b->usable : 1;
    return (int64_t)peri_k_rest(peri_k_murmur((uint64_t)id, 0, 0), most, b->reciprocal);
}

/** The row of @id, -1: none. */
static inline int64_t ref_hash_row(const peri_k_collision_map *m, const peri_k_collision_bucket *b, int64_t id)
{
    if (id == -1) return -1;
    int64_t most = m->max_probe < b->usable ? m->max_probe : b->usable, at = ref_hash_home(b, id);
    for (int64_t seen = 0; seen < most; seen++, at = at + 1 < b->usable ? at + 1 : 0) {
        int64_t found = m->rows[b->first_row + at].id;
        if (found == id) return b->first_row + at;
        if (found == -1 && !m->full) return -1;
    }
    return -1;
}

static inline int64_t ref_miss(const peri_k_collision_map *m, const peri_k_collision_bucket *b, int64_t id,
                               int64_t place)
{
    if (m->on_miss == PERI_K_MISS_ROW) return b->first_row + b->rows - 1;
    if (m->on_miss == PERI_K_MISS_HASH) return b->first_row + ref_hash_home(b, id);
    if (m->on_miss == PERI_K_MISS_ERROR) ref_lower(&m->head[PERI_COLLISION_BAD], place);
    return -1;
}

/** Add one to @slot's window; how many the log must have. */
static inline int64_t ref_window_add(peri_k_mch_slot *slot, bool counted, int64_t when)
{
    uint32_t seen = __atomic_load_n(&slot->window, __ATOMIC_RELAXED), next = seen;
    int64_t more;
    do {
        more = peri_k_window_next(seen, 1, counted, when, &next);
        if (more == 1) return 1;
    } while (next != seen &&
             !__atomic_compare_exchange_n(&slot->window, &seen, next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return more;
}

/** Entries on their way into the log: few at a time, so that ranges seldom meet at its end. */
typedef struct ref_logger {
    const peri_k_collision_find_args *a;
    int64_t n;
    peri_k_collision_entry entry[256];
} ref_logger;

static void ref_flush(ref_logger *l)
{
    int64_t at = __atomic_fetch_add(&l->a->map.head[PERI_COLLISION_LOGGED], l->n, __ATOMIC_RELAXED);
    memcpy(l->a->log + at, l->entry, (size_t)l->n * sizeof *l->entry);
    l->n = 0;
}

static inline void ref_log(ref_logger *l, int64_t id, int64_t when, int64_t place)
{
    l->entry[l->n++] = (peri_k_collision_entry){id, when, place};
    if (l->n == (int64_t)(sizeof l->entry / sizeof *l->entry)) ref_flush(l);
}

static inline void ref_count(const peri_k_collision_map *m, int64_t hits, int64_t missed)
{
    ref_head_add(&m->head[PERI_COLLISION_IDS], hits + missed);
    ref_head_add(&m->head[PERI_COLLISION_HITS], hits);
    ref_head_add(&m->head[PERI_COLLISION_MISSED], missed);
}

static void ref_mch_find(const void *args, int64_t begin, int64_t end)
{
    const peri_k_collision_find_args *a = args;
    const peri_k_collision_map *m = &a->map;
    begin = a->n * begin / a->parts;
    end = a->n * end / a->parts;
    ref_logger log = {.a = a};
    int64_t hits = 0;
    for (int64_t i = begin; i < end; i++) {
        int64_t id = a->ids[i];
        const peri_k_collision_bucket *b = ref_bucket_of(m, id);
        peri_k_mch_slot *slot = ref_mch_slot(m, b, id);
        bool hit = slot && slot->row != UINT32_MAX;
        int64_t times =
            i < a->learn && id != INT64_MAX ? hit ? ref_window_add(slot, m->counted, peri_k_window_when(a)) : 1 : 0;
        if (times) ref_log(&log, id, a->now, times);
        if (!a->out) continue;
        hits += hit;
        a->out[i] = hit ? slot->row : ref_miss(m, b, id, a->first + i);
    }
    if (log.n) ref_flush(&log);
    if (a->out) ref_count(m, hits, end - begin - hits);
}

/** Row @row was met. */
static inline void ref_touch(const peri_k_collision_map *m, int64_t row, const peri_k_collision_find_args *a)
{
    if (m->policy == PERI_K_EVICT_NONE) return;
    peri_k_hash_row *r = &m->rows[row];
    __atomic_store_n(&r->touched, (uint32_t)a->now, __ATOMIC_RELAXED);
    int32_t seen = __atomic_load_n(&r->expiry, __ATOMIC_RELAXED), next = (int32_t)a->expiry;
    while (seen < next &&
           !__atomic_compare_exchange_n(&r->expiry, &seen, next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        continue;
}

static void ref_hash_map_find(const void *args, int64_t begin, int64_t end)
{
    const peri_k_collision_find_args *a = args;
    const peri_k_collision_map *m = &a->map;
    ref_logger log = {.a = a};
    int64_t hits = 0, missed = 0;
    for (int64_t i = begin; i < end; i++) {
        int64_t id = a->ids[i];
        const peri_k_collision_bucket *b = ref_bucket_of(m, id);
        int64_t row = ref_hash_row(m, b, id);
        bool learn = i < a->learn && id != -1;
        if (row < 0 && learn) {
            ref_log(&log, id, a->expiry, a->first + i);
            continue;
        }
        if (row >= 0 && learn) ref_touch(m, row, a);
        hits += row >= 0;
        missed += row < 0;
        a->out[i] = row >= 0 ? row : ref_miss(m, b, id, a->first + i);
    }
    if (log.n) ref_flush(&log);
    ref_count(m, hits, missed);
}

/** Entries [*first, return) of block @block of the log. */
static inline int64_t ref_log_block(const peri_k_collision_map *m, int64_t block, int64_t *first)
{
    int64_t logged = m->head[PERI_COLLISION_LOGGED], past = (block + 1) * PERI_COLLISION_BLOCK;
    *first = block * PERI_COLLISION_BLOCK;
    return past < logged ? past : logged;
}

static void ref_hash_map_again(const void *args, int64_t begin, int64_t end)
{
    const peri_k_collision_find_args *a = args;
    const peri_k_collision_map *m = &a->map;
    int64_t hits = 0, missed = 0;
    for (int64_t block = begin; block < end; block++) {
        int64_t e, past = ref_log_block(m, block, &e);
        for (; e < past; e++) {
            int64_t id = a->log[e].id, place = a->log[e].place;
            const peri_k_collision_bucket *b = ref_bucket_of(m, id);
            int64_t row = ref_hash_row(m, b, id);
            hits += row >= 0;
            missed += row < 0;
            a->out[place] = row >= 0 ? row : ref_miss(m, b, id, place);
        }
    }
    ref_count(m, hits, missed);
}

/* -- the log by bucket --------------------------------------------------------------------------------------------- */

static inline uint64_t ref_sortable(int64_t x) { return (uint64_t)x ^ (uint64_t)1 << 63; }

static void ref_collision_count(const void *args, int64_t begin, int64_t end)
{
    const peri_k_collision_group_args *a = args;
    const peri_k_collision_map *m = &a->map;
    for (int64_t block = begin; block < end; block++) {
        int64_t e, past = ref_log_block(m, block, &e);
        for (; e < past; e++) ref_head_add(&a->sizes[ref_bucket_of(m, a->log[e].id) - m->bucket], 1);
    }
}

static void ref_collision_starts(const void *args, int64_t begin, int64_t end)
{
    const peri_k_collision_group_args *a = args;
    if (begin >= end) return;
    int64_t sum = 0;
    for (int32_t b = 0; b < a->map.n_buckets; b++) {
        a->starts[b] = sum;
        sum += a->sizes[b];
        a->sizes[b] = a->starts[b];
    }
    a->starts[a->map.n_buckets] = sum;
}

static void ref_collision_group(const void *args, int64_t begin, int64_t end)
{
    const peri_k_collision_group_args *a = args;
    const peri_k_collision_map *m = &a->map;
    for (int64_t block = begin; block < end; block++) {
        int64_t e, past = ref_log_block(m, block, &e);
        for (; e < past; e++) {
            const peri_k_collision_entry *from = &a->log[e];
            int64_t at = __atomic_fetch_add(&a->sizes[ref_bucket_of(m, from->id) - m->bucket], 1, __ATOMIC_RELAXED);
            uint64_t id = ref_sortable(from->id), when = (uint64_t)from->when;
            if (m->rows)
                a->records[at] = (peri_k_collision_record){{peri_k_murmur((uint64_t)from->id, 0, 0), id, when, 0}};
            else a->records[at] = (peri_k_collision_record){{id, (uint64_t)from->place, when, 0}};
        }
    }
}
