/* SPDX-License-Identifier: Apache-2.0
 *
 * test_cache.c: the policy of row caches against a model that keeps everything in plain lists, and what is left when
 * memory runs out.
 */
#include "tests/harness/check.h"

#include "runtime/embed/tier/cache.h"

#include <stdlib.h>

enum { ROWS = 60, SLOTS = 13, BATCHES = 4000, FLIGHT = 3, MOST = 4 };

/** A cache told in full: who is in which slot, since when idle, in which batch last, how often used. */
typedef struct model {
    int row[SLOTS]; /* -1: free */
    int slot[ROWS]; /* -1: not here */
    int pins[ROWS];
    int64_t idle_since[ROWS];
    uint32_t last[SLOTS];
    int uses[ROWS];
    int64_t clock;
    uint32_t batch;
    int algorithm, sets;
    int strayed, evicted, aged;
    bool full; /* some row has been used 255 times */
} model;

static uint64_t state = 7;
static int draw(int below)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int)((state >> 33) % (uint64_t)below);
}

/** Halve all uses. Idle rows that become equal leave in the order in which they would have left before. */
static void age(model *m)
{
    int64_t since[ROWS];
    for (int r = 0; r < ROWS; r++) {
        since[r] = m->clock + 1;
        for (int q = 0; q < ROWS; q++)
            since[r] += m->uses[q] != m->uses[r] ? m->uses[q] < m->uses[r] : m->idle_since[q] < m->idle_since[r];
    }
    memcpy(m->idle_since, since, sizeof since);
    m->clock += ROWS + 1;
    m->aged++;
    for (int r = 0; r < ROWS; r++) m->uses[r] /= 2;
}

static void begin(model *m)
{
    if (m->full) age(m);
    m->full = false;
    if (++m->batch != 0) return;
    memset(m->last, 0, sizeof m->last); /* once in 2^32 batches all are as old */
    m->batch = 1;
}

static void use(model *m, int slot)
{
    m->last[slot] = m->batch;
    if (m->algorithm == PERI__LFU && ++m->uses[m->row[slot]] == 255) m->full = true;
}

/** The first slot of set @i, or of the one behind the last. */
static int first_of(const model *m, int i)
{
    return i * (SLOTS / m->sets) + (i < SLOTS % m->sets ? i : SLOTS % m->sets);
}

/** Does the row of slot @a leave rather than that of @b? */
static bool sooner(const model *m, int a, int b)
{
    int x = m->row[a], y = m->row[b];
    if (m->uses[x] != m->uses[y]) return m->uses[x] < m->uses[y];
    if (m->sets == 0) return m->idle_since[x] < m->idle_since[y];
    return m->last[a] != m->last[b] ? m->last[a] < m->last[b] : a < b;
}

/** Of slots [from, end): one that is free, else the one whose row must leave; -1: all are pinned. */
static int choose(const model *m, int from, int end)
{
    int best = -1;
    for (int s = from; s < end; s++)
        if (m->row[s] < 0) return s;
    for (int s = from; s < end; s++)
        if (m->pins[m->row[s]] == 0 && (best < 0 || sooner(m, s, best))) best = s;
    return best;
}

/** The slot that @row must get; without sets any free one will do. */
static int slot_for(const model *m, int row, bool *strays)
{
    *strays = false;
    if (m->sets == 0) return choose(m, 0, SLOTS);
    int home = (int)(((peri__hash_mix(0, (uint64_t)row) >> 32) * (uint64_t)m->sets) >> 32);
    for (int k = 0; k < m->sets; k++) {
        int set = (home + k) % m->sets, found = choose(m, first_of(m, set), first_of(m, set + 1));
        *strays = k > 0;
        if (found >= 0) return found;
    }
    return -1;
}

typedef struct flight {
    int n, row[MOST];
    uint32_t slot[MOST];
} flight;

static void end_flight(peri__cache *c, model *m, flight *f)
{
    for (int i = 0; i < f->n; i++) {
        c->slot[f->slot[i]].flags &= (uint8_t)~PERI__SLOT_FILLING;
        if (c->listed || draw(2)) peri__cache_unpin(c, f->slot[i]);
        else c->n_idle += peri__cache_unpin_beside(c, f->slot[i]);
        if (--m->pins[f->row[i]] == 0) m->idle_since[f->row[i]] = ++m->clock;
    }
    f->n = 0;
}

/** As one thread pins, or as one of many does. */
static bool pin(peri__cache *c, uint32_t slot)
{
    int64_t woken = 0;
    if (c->listed || draw(2)) return peri__cache_pin(c, slot);
    bool first = peri__cache_pin_beside(c, slot, &woken);
    c->n_idle -= (int32_t)woken;
    return first;
}

static void bring(peri__cache *c, model *m, flight *f, int row)
{
    int64_t victim;
    uint8_t flags;
    uint32_t slot;
    bool strays;
    assert_true(peri__cache_rows_that_fit(c) > 0);
    int expected = slot_for(m, row, &strays);
    assert_int_equal(peri__cache_take(c, row, &slot, &victim, &flags), strays);
    assert_int_equal(victim, m->row[expected]);
    if (m->sets || victim >= 0) assert_int_equal(slot, expected);
    else assert_int_equal(m->row[slot], -1);
    if (victim >= 0) m->slot[victim] = -1;
    m->strayed += strays;
    m->evicted += victim >= 0;
    m->row[slot] = row;
    m->slot[row] = (int)slot;
    m->pins[row] = 1;
    use(m, (int)slot);
    f->row[f->n] = row;
    f->slot[f->n++] = slot;
}

static void run_batch(peri__cache *c, model *m, flight *f)
{
    int rows[MOST], n = 1 + draw(MOST), want[MOST], wants = 0;
    for (int i = 0; i < n; i++) rows[i] = draw(3) ? draw(10) : draw(ROWS);
    peri__cache_begin(c);
    begin(m);
    for (int i = 0; i < n; i++) {
        uint32_t place = peri__cache_find(c, rows[i]);
        bool seen = false;
        for (int k = 0; k < i; k++) seen = seen || rows[k] == rows[i];
        if (m->slot[rows[i]] >= 0) assert_int_equal(place, m->slot[rows[i]] + 1);
        else assert_true(!place || (place & PERI__WANTED));
        if (!place) {
            peri__cache_want(c, rows[i], (uint32_t)wants);
            want[wants++] = rows[i];
        } else if (place & PERI__WANTED) {
            assert_int_equal(want[place & ~PERI__WANTED], rows[i]);
        } else {
            assert_int_equal(c->slot[place - 1].row, rows[i]);
            assert_int_equal(pin(c, place - 1), !seen);
            if (seen) continue;
            m->pins[rows[i]]++;
            use(m, (int)place - 1);
            f->row[f->n] = rows[i];
            f->slot[f->n++] = place - 1;
        }
    }
    for (int i = 0; i < wants; i++) bring(c, m, f, want[i]);
}

/** Sets of 1, 2 or 3, 3 or 4, 4 or 5, 6 or 7, and of all slots; 0: no sets. */
static const struct { int ways, sets; } SHAPES[] = {{0, 0}, {1, 13}, {3, 5}, {4, 4}, {5, 3}, {7, 2}, {256, 1}};

static void evicts_as_the_model_does(void **unused)
{
    (void)unused;
    for (int k = 0; k < 2 * (int)(sizeof SHAPES / sizeof *SHAPES); k++) {
        peri__cache *c;
        model m = {.algorithm = k % 2 ? PERI__LFU : PERI__LRU, .sets = SHAPES[k / 2].sets, .batch = UINT32_MAX - 1000};
        flight flights[FLIGHT] = {{0}};
        memset(m.row, 0xff, sizeof m.row);
        memset(m.slot, 0xff, sizeof m.slot);
        assert_ok(peri__cache_new(ROWS, SLOTS, SHAPES[k / 2].ways, m.algorithm, &c));
        assert_int_equal(c->sets, m.sets);
        c->now = m.batch; /* batch numbers start over */
        for (int b = 0; b < BATCHES; b++) {
            flight *f = &flights[b % FLIGHT];
            end_flight(c, &m, f);
            run_batch(c, &m, f);
        }
        for (int i = 0; i < FLIGHT; i++) end_flight(c, &m, &flights[i]);
        assert_int_equal(peri__cache_rows_that_fit(c), SLOTS);
        assert_true(m.evicted > BATCHES / 4);
        assert_int_equal(m.strayed > 0, m.sets > 1);
        assert_int_equal(m.aged > 0, m.algorithm == PERI__LFU);
        for (int r = 0; r < ROWS; r++) {
            uint32_t place = peri__cache_find(c, r);
            int uses = place ? c->slot[place - 1].uses : c->uses ? c->uses[r] : 0;
            assert_int_equal(uses, m.uses[r]);
        }
        peri__cache_free(c);
    }
}

/** Rows that fit are all taken, and given back, whatever sets they belong to. */
static void sets_take_what_fits(void **unused)
{
    (void)unused;
    enum { N = 1000, WAYS = 32 };
    peri__cache *c;
    int64_t rows[N], victims[N];
    uint32_t slots[N];
    uint8_t flags[N];
    bool taken[N];
    assert_ok(peri__cache_new(100000, N, WAYS, PERI__LFU, &c));
    for (int round = 0; round < 4; round++) {
        int strayed = 0;
        peri__cache_begin(c);
        memset(taken, 0, sizeof taken);
        for (int i = 0; i < N; i++) {
            rows[i] = 7 + 37 * i + 40000 * (round % 2); /* all new, then all others, ... */
            strayed += peri__cache_take(c, rows[i], &slots[i], &victims[i], &flags[i]);
            assert_false(taken[slots[i]]);
            taken[slots[i]] = true;
            assert_int_equal(victims[i] < 0, round == 0);
        }
        assert_int_equal(peri__cache_rows_that_fit(c), 0);
        assert_true(strayed > 0 && strayed < N / 4);
        for (int i = 0; i < N; i++) {
            c->slot[slots[i]].flags = 0;
            peri__cache_unpin(c, slots[i]);
        }
    }
    peri__cache_begin(c);
    for (int i = 0; i < N; i++) peri__cache_take(c, 1 + i, &slots[i], &victims[i], &flags[i]);
    for (int i = N - 1; i >= 0; i--) peri__cache_untake(c, slots[i], victims[i], flags[i]);
    assert_int_equal(peri__cache_rows_that_fit(c), N);
    for (int i = 0; i < N; i++) {
        assert_int_equal(peri__cache_find(c, 1 + i), 0);
        assert_int_equal(c->slot[peri__cache_find(c, rows[i]) - 1].row, rows[i]);
    }
    peri__cache_free(c);
}

static void drops_what_never_arrived(void **unused)
{
    (void)unused;
    for (int ways = 0; ways < 3; ways++) {
        peri__cache *c;
        int64_t victim;
        uint8_t flags;
        uint32_t slot;
        assert_ok(peri__cache_new(10, 2, ways, PERI__LRU, &c));
        peri__cache_begin(c);
        assert_false(peri__cache_take(c, 5, &slot, &victim, &flags));
        peri__cache_begin(c);
        assert_int_equal(peri__cache_find(c, 5), slot + 1);
        assert_true(peri__cache_pin(c, slot));
        peri__cache_unpin(c, slot);
        assert_int_equal(peri__cache_find(c, 5), slot + 1); /* another batch still needs it */
        peri__cache_unpin(c, slot);
        assert_int_equal(peri__cache_find(c, 5), 0);
        assert_int_equal(peri__cache_rows_that_fit(c), 2);
        peri__cache_free(c);
        assert_ok(peri__cache_new(0, 0, ways, PERI__LFU, &c)); /* a shard may have no rows */
        assert_int_equal(peri__cache_rows_that_fit(c), 0);
        peri__cache_free(c);
    }
}

static void runs_out_of_memory(void **unused)
{
    (void)unused;
    int64_t live = peri_mem_live();
    for (int64_t k = 1;; k++) {
        peri__cache *c = NULL;
        assert_ok(peri_fault_arm("alloc", k));
        peri_status status = peri__cache_new(100, 10, 4, PERI__LFU, &c);
        assert_ok(peri_fault_arm("alloc", 0));
        if (status >= 0) {
            peri__cache_free(c);
            assert_true(k > 5);
            break;
        }
        assert_int_equal(status, PERI_ENOMEM);
        assert_null(c);
        assert_int_equal(peri_mem_live(), live);
    }
    assert_int_equal(peri_mem_live(), live);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(evicts_as_the_model_does),
    cmocka_unit_test(sets_take_what_fits),
    cmocka_unit_test(drops_what_never_arrived),
    cmocka_unit_test(runs_out_of_memory),
};

check_main(tests)
