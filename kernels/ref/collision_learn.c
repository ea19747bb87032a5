/* SPDX-License-Identifier: Apache-2.0
 *
 * collision_learn.c: what a bucket of a map learns, and which of its rows it gives up for it.
 */

/* -- sorting records ----------------------------------------------------------------------------------------------- */

static inline bool ref_record_less(const peri_k_collision_record *a, const peri_k_collision_record *b)
{
    for (int w = 0; w < 3; w++)
        if (a->word[w] != b->word[w]) return a->word[w] < b->word[w];
    return a->word[3] < b->word[3];
}

static inline void ref_record_swap(peri_k_collision_record *a, peri_k_collision_record *b)
{
    peri_k_collision_record t = *a;
    *a = *b;
    *b = t;
}

/** Split r[n], n > 1, about one of its records: [0, *left) are at most it, [*right, n) at least it, all between equal
 *  to it. */
static void ref_split(peri_k_collision_record *r, int64_t n, int64_t *left, int64_t *right)
{
    peri_k_collision_record middle = r[peri_k_high(peri_k_mix((uint64_t)n), (uint64_t)n)];
    int64_t i = 0, j = n - 1;
    while (i <= j) {
        while (ref_record_less(&r[i], &middle)) i++;
        while (ref_record_less(&middle, &r[j])) j--;
        if (i > j) break;
        ref_record_swap(&r[i++], &r[j--]);
    }
    *left = j + 1;
    *right = i;
}

static void ref_record_sort(peri_k_collision_record *r, int64_t n)
{
    while (n > 16) {
        int64_t left, right;
        ref_split(r, n, &left, &right);
        if (left < n - right) {
            ref_record_sort(r, left);
            r += right;
            n -= right;
        } else {
            ref_record_sort(r + right, n - right);
            n = left;
        }
    }
    for (int64_t i = 1; i < n; i++)
        for (int64_t j = i; j > 0 && ref_record_less(&r[j], &r[j - 1]); j--) ref_record_swap(&r[j], &r[j - 1]);
}

/** The @k least of r[n] come first, in any order. */
static void ref_record_select(peri_k_collision_record *r, int64_t n, int64_t k)
{
    while (k > 0 && k < n && n > 1) {
        int64_t left, right;
        ref_split(r, n, &left, &right);
        if (k <= left) {
            n = left;
        } else if (k >= right) {
            r += right;
            n -= right;
            k -= right;
        } else {
            return;
        }
    }
}

/* -- what was seen since the last eviction ------------------------------------------------------------------------- */

/** What a slot's window says. */
static inline int64_t ref_window_count(const peri_k_collision_map *m, uint32_t window)
{
    return m->counted ? peri_k_window_count(window) : 0;
}
static inline int64_t ref_window_last(const peri_k_collision_learn_args *a, uint32_t window)
{
    return a->window + (int64_t)(a->map.counted ? window >> 16 : window);
}

static int64_t ref_id_of(uint64_t word) { return (int64_t)(word ^ (uint64_t)1 << 63); }

/** Records (id, times, when) of a bucket, sorted, become (id, count, last, 1 + place of the id's slot or 0); how
 *  many. */
static int64_t ref_merge(const peri_k_collision_map *m, const peri_k_collision_bucket *b, peri_k_collision_record *r,
                         int64_t n)
{
    int64_t ids = 0;
    ref_record_sort(r, n);
    for (int64_t i = 0, next; i < n; i = next) {
        uint64_t times = 0, last = 0;
        for (next = i; next < n && r[next].word[0] == r[i].word[0]; next++) {
            times += r[next].word[1];
            if (r[next].word[2] > last) last = r[next].word[2];
        }
        peri_k_mch_slot *slot = ref_mch_slot(m, b, ref_id_of(r[i].word[0]));
        uint64_t place = slot && slot->row != UINT32_MAX ? (uint64_t)(slot - m->slots) + 1 : 0;
        r[ids++] = (peri_k_collision_record){{r[i].word[0], times, last, place}};
    }
    return ids;
}

/** The filter for a bucket's window of @n ids seen @sum times. */
typedef struct ref_filter {
    const peri_k_collision_learn_args *a;
    float threshold, rest;
} ref_filter;

static ref_filter ref_filter_of(const peri_k_collision_learn_args *a, int64_t n, int64_t sum)
{
    ref_filter f = {.a = a, .rest = (float)(1 - a->filter_arg)};
    if (a->filter == PERI_K_FILTER_DYNAMIC) f.threshold = (float)(1.0 / (double)n * a->filter_arg) * (float)sum;
    if (a->filter == PERI_K_FILTER_AVERAGE) f.threshold = (float)sum / (float)n;
    return f;
}

static bool ref_passes(const ref_filter *f, int64_t id, int64_t count)
{
    if (f->a->filter == PERI_K_FILTER_NONE) return true;
    if (f->a->filter != PERI_K_FILTER_PROBABILISTIC) return (float)count > f->threshold;
    uint64_t lot = peri_k_mix(peri_k_mix((uint64_t)id ^ f->a->seed) + (uint64_t)f->a->now);
    return 1 - (float)pow((double)f->rest, (double)count) > (float)(lot >> 40) * 0x1p-24f;
}

/** Row @row was seen @count more times, the last time in iteration @last. */
static void ref_seen(const peri_k_collision_map *m, int64_t row, int64_t count, int64_t last)
{
    if (m->counts) m->counts[row] += count;
    if (m->last && last > m->last[row]) m->last[row] = last;
}

static void ref_coalesce(const peri_k_collision_learn_args *a, int64_t bucket)
{
    const peri_k_collision_map *m = &a->map;
    const peri_k_collision_bucket *b = &m->bucket[bucket];
    peri_k_collision_record *r = a->records + a->starts[bucket];
    peri_k_mch_slot *slots = m->slots + b->first_line * PERI_MCH_LINE, *end = slots + b->lines * PERI_MCH_LINE;
    int64_t logged = ref_merge(m, b, r, a->starts[bucket + 1] - a->starts[bucket]), n = 0, sum = 0, kept = 0;
    const bool by_mean = a->filter == PERI_K_FILTER_DYNAMIC || a->filter == PERI_K_FILTER_AVERAGE;
    for (peri_k_mch_slot *s = slots; s < end && by_mean; s++)
        if (s->row != UINT32_MAX && s->window) {
            n++;
            sum += ref_window_count(m, s->window);
        }
    for (int64_t i = 0; i < logged && by_mean; i++) {
        sum += (int64_t)r[i].word[1];
        n += !r[i].word[3] || !m->slots[r[i].word[3] - 1].window;
    }
    ref_filter filter = ref_filter_of(a, n, sum);
    for (int64_t i = 0; i < logged; i++) {
        peri_k_mch_slot *s = r[i].word[3] ? &m->slots[r[i].word[3] - 1] : NULL;
        int64_t id = ref_id_of(r[i].word[0]), count = (int64_t)r[i].word[1], last = (int64_t)r[i].word[2];
        if (s) {
            count += ref_window_count(m, s->window);
            if (ref_window_last(a, s->window) > last) last = ref_window_last(a, s->window);
            s->window = 0;
        }
        if (!ref_passes(&filter, id, count)) continue;
        if (s) ref_seen(m, s->row, count, last);
        else r[kept++] = (peri_k_collision_record){{r[i].word[0], r[i].word[1], r[i].word[2], 0}};
    }
    enum { AHEAD = 32 }; /* slots; their rows lie anywhere */
    for (peri_k_mch_slot *s = slots; s < end; s++) {
        if (end - s > AHEAD && s[AHEAD].window && m->counts) __builtin_prefetch(&m->counts[s[AHEAD].row], 1);
        if (end - s > AHEAD && s[AHEAD].window && m->last) __builtin_prefetch(&m->last[s[AHEAD].row], 1);
        if (s->row == UINT32_MAX || !s->window) continue;
        int64_t count = ref_window_count(m, s->window);
        if (ref_passes(&filter, s->id, count)) ref_seen(m, s->row, count, ref_window_last(a, s->window));
        s->window = 0;
    }
    a->news[bucket] = kept;
    if (m->counts) m->counts[b->first_row + b->rows - 1] = INT64_MAX;
    if (m->last) m->last[b->first_row + b->rows - 1] = a->now;
}

static void ref_mch_coalesce(const void *args, int64_t begin, int64_t end)
{
    for (int64_t b = begin; b < end; b++) ref_coalesce(args, b);
}

/* -- rows that change their ids ------------------------------------------------------------------------------------ */

/** Say that @row of @bucket got another id; @had: it had one before. */
static void ref_changed(const peri_k_collision_map *m, int64_t bucket, int64_t row, bool had)
{
    ref_head_add(&m->head[PERI_COLLISION_INSERTED], 1);
    ref_head_add(&m->head[had ? PERI_COLLISION_EVICTED : PERI_COLLISION_OCCUPIED], 1);
    if (m->is_changed[row]) return;
    m->is_changed[row] = 1;
    m->changed[m->bucket[bucket].first_row + m->n_changed[bucket]++] = row;
    ref_head_add(&m->head[PERI_COLLISION_CHANGED], 1);
}

/** Put @id, which the index has not, into it. */
static void ref_mch_put(const peri_k_collision_map *m, const peri_k_collision_bucket *b, int64_t id, int64_t row)
{
    *ref_mch_slot(m, b, id) = (peri_k_mch_slot){id, (uint32_t)row, 0};
}

/** Take @id, which the index has, out of it: what stands in a later line because this one was full moves up. */
static void ref_mch_drop(const peri_k_collision_map *m, const peri_k_collision_bucket *b, int64_t id)
{
    peri_k_mch_slot *hole = ref_mch_slot(m, b, id), *slots = m->slots + b->first_line * PERI_MCH_LINE;
    int64_t line = (hole - slots) / PERI_MCH_LINE;
    for (int64_t seen = 1; seen < b->lines; seen++) {
        int64_t next = (line + seen) % b->lines;
        peri_k_mch_slot *s = slots + next * PERI_MCH_LINE, *moved = NULL;
        for (int k = 0; k < PERI_MCH_LINE && !moved && s[k].row != UINT32_MAX; k++)
            if ((next - ref_mch_home(b, s[k].id) + b->lines) % b->lines >= seen) moved = &s[k];
        bool ends = s[PERI_MCH_LINE - 1].row == UINT32_MAX;
        if (moved) {
            *hole = *moved;
            hole = moved;
            line = next;
            seen = 0;
        }
        if (ends) break;
    }
    /* The slots of a line fill from the first on: looks end at the first free one. */
    peri_k_mch_slot *last = slots + ((hole - slots) / PERI_MCH_LINE + 1) * PERI_MCH_LINE - 1;
    while (last > hole && last->row == UINT32_MAX) last--;
    *hole = *last;
    *last = (peri_k_mch_slot){INT64_MAX, UINT32_MAX, 0};
}

/* -- eviction ------------------------------------------------------------------------------------------------------ */

static uint64_t ref_float_key(double score)
{
    uint64_t bits;
    score += 0.0; /* -0 is 0 */
    memcpy(&bits, &score, sizeof bits);
    return bits >> 63 ? ~bits : bits | (uint64_t)1 << 63;
}

static float ref_power(int64_t x, double d)
{
    float f = (float)x;
    if (d == 1) return f;
    if (d == 3) return f * f * f;
    return (float)pow((double)f, (double)(float)d);
}

/** A number that orders as the score of an id does. */
static uint64_t ref_score(const peri_k_collision_learn_args *a, int64_t count, int64_t last)
{
    if (a->map.policy == PERI_K_EVICT_LFU) return ref_sortable(count);
    float age = ref_power(a->now - last + 1, a->decay);
    return ref_float_key(a->map.policy == PERI_K_EVICT_LRU ? -age : (float)count / age);
}

static uint64_t ref_row_score(const peri_k_collision_learn_args *a, int64_t row)
{
    const peri_k_collision_map *m = &a->map;
    if (m->policy == PERI_K_EVICT_USER) return m->ids[row] == INT64_MAX ? 0 : ref_float_key(a->row_scores[row]);
    return ref_score(a, m->counts ? m->counts[row] : 0, m->last ? m->last[row] : 0);
}

/** The news of @bucket, the best first: (turned score, turned count, id, place among the records). */
static void ref_rank_news(const peri_k_collision_learn_args *a, int64_t bucket, peri_k_collision_record *rank)
{
    const peri_k_collision_record *r = a->records + a->starts[bucket];
    for (int64_t i = 0; i < a->news[bucket]; i++) {
        uint64_t score = a->map.policy == PERI_K_EVICT_USER
                             ? ref_float_key(a->new_scores[a->starts[bucket] + i])
                             : ref_score(a, (int64_t)r[i].word[1], (int64_t)r[i].word[2]);
        rank[i] = (peri_k_collision_record){{~score, ~r[i].word[1], r[i].word[0], (uint64_t)i}};
    }
    ref_record_sort(rank, a->news[bucket]);
}

/** The @n worst usable rows of @bucket, the worst first: (score, turned id, turned row, row). @rank has room for 2
 *  n. */
static void ref_rank_rows(const peri_k_collision_learn_args *a, int64_t bucket, peri_k_collision_record *rank,
                          int64_t n)
{
    const peri_k_collision_map *m = &a->map;
    const peri_k_collision_bucket *b = &m->bucket[bucket];
    int64_t have = 0;
    uint64_t most[2] = {UINT64_MAX, UINT64_MAX}; /* first words of the best of n rows that are worse than all others so
                                                    far */
    for (int64_t row = b->first_row + b->usable - 1; row >= b->first_row; row--) { /* those on top are free first */
        const uint64_t score = ref_row_score(a, row);
        if (score > most[0]) continue;
        const uint64_t id = ~ref_sortable(m->ids[row]);
        if (score == most[0] && id >= most[1]) continue; /* the same number, a free row: rows above it go first */
        rank[have++] = (peri_k_collision_record){{score, id, ~(uint64_t)row, (uint64_t)row}};
        if (have < 2 * n) continue;
        ref_record_select(rank, have, n);
        have = n;
        most[0] = most[1] = 0;
        for (int64_t i = 0; i < n; i++) {
            if (rank[i].word[0] < most[0] || (rank[i].word[0] == most[0] && rank[i].word[1] < most[1])) continue;
            most[0] = rank[i].word[0];
            most[1] = rank[i].word[1];
        }
    }
    ref_record_select(rank, have, n);
    ref_record_sort(rank, n);
}

static void ref_evict(const peri_k_collision_learn_args *a, int64_t bucket)
{
    const peri_k_collision_map *m = &a->map;
    const peri_k_collision_bucket *b = &m->bucket[bucket];
    const peri_k_collision_record *r = a->records + a->starts[bucket];
    int64_t most = a->news[bucket] < b->usable ? a->news[bucket] : b->usable, taken = 0;
    if (most == 0) return;
    peri_k_collision_record *news = a->scratch + 3 * a->starts[bucket], *rows = news + a->news[bucket];
    ref_rank_news(a, bucket, news);
    ref_rank_rows(a, bucket, rows, most);
    while (taken < most && ~news[taken].word[0] > rows[taken].word[0]) taken++;
    for (int64_t k = 0; k < taken; k++) {
        const peri_k_collision_record *from = &r[news[k].word[3]];
        int64_t row = (int64_t)rows[taken - 1 - k].word[3], before = m->ids[row];
        if (before != INT64_MAX) ref_mch_drop(m, b, before);
        m->ids[row] = ref_id_of(from->word[0]);
        if (m->counts) m->counts[row] = (int64_t)from->word[1];
        if (m->last) m->last[row] = (int64_t)from->word[2];
        ref_mch_put(m, b, m->ids[row], row);
        ref_changed(m, bucket, row, before != INT64_MAX);
    }
}

static void ref_mch_evict(const void *args, int64_t begin, int64_t end)
{
    for (int64_t b = begin; b < end; b++) ref_evict(args, b);
}

/* -- hash maps ----------------------------------------------------------------------------------------------------- */

/** Where an id with murmur @hash is put: a place in the bucket, or -1. */
static int64_t ref_hash_place(const peri_k_collision_learn_args *a, const peri_k_collision_bucket *b, uint64_t hash)
{
    const peri_k_collision_map *m = &a->map;
    int64_t most = m->max_probe < b->usable ? m->max_probe : b->usable, oldest = -1;
    if (most == 0) return -1;
    int64_t at = (int64_t)peri_k_rest(hash, (uint64_t)b->usable, b->reciprocal);
    if (m->rows[b->first_row + at].id != -1) ref_head_add(&m->head[PERI_COLLISION_COLLISIONS], 1);
    for (int64_t seen = 0; seen < most; seen++, at = at + 1 < b->usable ? at + 1 : 0) {
        const peri_k_hash_row *r = &m->rows[b->first_row + at];
        if (r->id == -1) return at;
        if (m->policy == PERI_K_EVICT_NONE || r->touched == (uint32_t)a->call) continue;
        if (m->policy == PERI_K_EVICT_TTL && r->expiry < a->now) return at;
        if (m->policy == PERI_K_EVICT_PROBE_LRU && (oldest < 0 || r->expiry < m->rows[b->first_row + oldest].expiry))
            oldest = at;
    }
    return oldest;
}

static void ref_insert(const peri_k_collision_learn_args *a, int64_t bucket)
{
    const peri_k_collision_map *m = &a->map;
    const peri_k_collision_bucket *b = &m->bucket[bucket];
    peri_k_collision_record *r = a->records + a->starts[bucket];
    int64_t n = a->starts[bucket + 1] - a->starts[bucket];
    ref_record_sort(r, n);
    for (int64_t i = 0; i < n; i++) {
        if (i + 1 < n && r[i + 1].word[1] == r[i].word[1]) continue; /* the last of an id's expires last */
        int64_t place = ref_hash_place(a, b, r[i].word[0]);
        if (place < 0) continue;
        peri_k_hash_row *row = &m->rows[b->first_row + place];
        ref_changed(m, bucket, b->first_row + place, row->id != -1);
        *row = (peri_k_hash_row){ref_id_of(r[i].word[1]), m->policy == PERI_K_EVICT_NONE ? -1 : (int32_t)r[i].word[2],
                                 (uint32_t)a->call};
    }
}

static void ref_hash_map_insert(const void *args, int64_t begin, int64_t end)
{
    for (int64_t b = begin; b < end; b++) ref_insert(args, b);
}
