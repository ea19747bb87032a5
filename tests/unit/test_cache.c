/* SPDX-License-Identifier: Apache-2.0
 *
 * test_cache.c: the policy of row caches against a model that keeps everything in plain lists, and what is left when memory runs out.
 */
#include "tests/harness/check.h"

#include "runtime/embed/tier/cache.h"

#include <stdlib.h>

enum { ROWS = 60, SLOTS = 12, BATCHES = 4000, FLIGHT = 3, MOST = 4 };

/** A cache told in full: who is there, since when idle, how often used. */
typedef struct model {
    bool here[ROWS];
    int pins[ROWS];
    int64_t idle_since[ROWS];
    int uses[ROWS];
    int64_t clock;
    int algorithm;
} model;

static uint64_t state = 7;
static int draw(int below)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int)((state >> 33) % (uint64_t)below);
}

static void use(model *m, int row)
{
    if (m->uses[row] == 255)
        for (int r = 0; r < ROWS; r++) m->uses[r] /= 2;
    m->uses[row]++;
}

/** Who must leave; -1: nobody needs to. */
static int victim_of(const model *m)
{
    int here = 0, best = -1;
    for (int r = 0; r < ROWS; r++) here += m->here[r];
    if (here < SLOTS) return -1;
    for (int r = 0; r < ROWS; r++) {
        if (!m->here[r] || m->pins[r]) continue;
        bool less = best < 0 || (m->algorithm == PERI__LFU && m->uses[r] != m->uses[best] ? m->uses[r] < m->uses[best]
                                                                                        : m->idle_since[r] < m->idle_since[best]);
        if (less) best = r;
    }
    return best;
}

typedef struct flight {
    int n, row[MOST];
    uint32_t slot[MOST];
} flight;

static void end_flight(peri__cache *c, model *m, flight *f)
{
    for (int i = 0; i < f->n; i++) {
        c->slot[f->slot[i]].flags &= (uint8_t)~PERI__SLOT_FILLING;
        peri__cache_unpin(c, f->slot[i]);
        if (--m->pins[f->row[i]] == 0) m->idle_since[f->row[i]] = ++m->clock;
    }
    f->n = 0;
}

static void run_batch(peri__cache *c, model *m, flight *f)
{
    int rows[MOST], n = 1 + draw(MOST), want[MOST], wants = 0;
    for (int i = 0; i < n; i++) rows[i] = draw(3) ? draw(10) : draw(ROWS);
    peri__cache_begin(c);
    for (int i = 0; i < n; i++) {
        uint32_t place = peri__cache_find(c, rows[i]);
        bool seen = false;
        for (int k = 0; k < i; k++) seen = seen || rows[k] == rows[i];
        assert_int_equal(m->here[rows[i]], place && !(place & PERI__WANTED));
        if (!place) {
            peri__cache_want(c, rows[i], (uint32_t)wants);
            want[wants++] = rows[i];
        } else if (place & PERI__WANTED) {
            assert_int_equal(want[place & ~PERI__WANTED], rows[i]);
        } else {
            assert_int_equal(c->slot[place - 1].row, rows[i]);
            assert_int_equal(peri__cache_pin(c, place - 1), !seen);
            if (seen) continue;
            m->pins[rows[i]]++;
            use(m, rows[i]);
            f->row[f->n] = rows[i];
            f->slot[f->n++] = place - 1;
        }
    }
    for (int i = 0; i < wants; i++) {
        int64_t victim;
        uint8_t flags;
        assert_true(peri__cache_room(c) > 0);
        int expected = victim_of(m);
        uint32_t slot = peri__cache_take(c, want[i], &victim, &flags);
        assert_int_equal(victim, expected);
        if (victim >= 0) m->here[victim] = false;
        m->here[want[i]] = true;
        m->pins[want[i]] = 1;
        use(m, want[i]);
        f->row[f->n] = want[i];
        f->slot[f->n++] = slot;
    }
}

static void evicts_as_the_model_does(void **unused)
{
    (void)unused;
    for (int algorithm = PERI__LRU; algorithm <= PERI__LFU; algorithm++) {
        peri__cache *c;
        model m = {.algorithm = algorithm};
        flight flights[FLIGHT] = {{0}};
        assert_ok(peri__cache_new(ROWS, SLOTS, algorithm, &c));
        c->now = UINT32_MAX - 1000; /* batch numbers start over */
        for (int b = 0; b < BATCHES; b++) {
            flight *f = &flights[b % FLIGHT];
            end_flight(c, &m, f);
            run_batch(c, &m, f);
        }
        for (int i = 0; i < FLIGHT; i++) end_flight(c, &m, &flights[i]);
        assert_int_equal(peri__cache_room(c), SLOTS);
        for (int r = 0; r < ROWS && c->uses; r++) assert_int_equal(c->uses[r], m.uses[r]);
        peri__cache_free(c);
    }
}

static void drops_what_never_arrived(void **unused)
{
    (void)unused;
    peri__cache *c;
    int64_t victim;
    uint8_t flags;
    assert_ok(peri__cache_new(10, 2, PERI__LRU, &c));
    peri__cache_begin(c);
    uint32_t slot = peri__cache_take(c, 5, &victim, &flags);
    peri__cache_begin(c);
    assert_int_equal(peri__cache_find(c, 5), slot + 1);
    assert_true(peri__cache_pin(c, slot));
    peri__cache_unpin(c, slot);
    assert_int_equal(peri__cache_find(c, 5), slot + 1); /* another batch still needs it */
    peri__cache_unpin(c, slot);
    assert_int_equal(peri__cache_find(c, 5), 0);
    assert_int_equal(peri__cache_room(c), 2);
    peri__cache_free(c);
    assert_ok(peri__cache_new(0, 0, PERI__LFU, &c)); /* a shard may have no rows */
    assert_int_equal(peri__cache_room(c), 0);
    peri__cache_free(c);
}

static void runs_out_of_memory(void **unused)
{
    (void)unused;
    int64_t live = peri_mem_live();
    for (int64_t k = 1;; k++) {
        peri__cache *c = NULL;
        assert_ok(peri_fault_arm("alloc", k));
        peri_status status = peri__cache_new(100, 10, PERI__LFU, &c);
        assert_ok(peri_fault_arm("alloc", 0));
        if (status >= 0) {
            peri__cache_free(c);
            assert_true(k > 4);
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
    cmocka_unit_test(drops_what_never_arrived),
    cmocka_unit_test(runs_out_of_memory),
};

check_main(tests)
