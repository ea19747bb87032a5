/* SPDX-License-Identifier: Apache-2.0
 *
 * test_host_memory.c: the library as a guest in somebody else's process: memory that the host gives, that is short, and
 * that several processes share.
 */
#include "guest.h"

#include <malloc.h>
#include <sys/mman.h>

/* -- memory that the host gives ------------------------------------------------------------------------------------ */

static atomic_int_least64_t taken;

static void *take(size_t bytes, size_t alignment)
{
    void *p = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (p) atomic_fetch_add(&taken, (int64_t)bytes);
    return p;
}

static void give(void *p, size_t bytes)
{
    atomic_fetch_sub(&taken, (int64_t)bytes);
    free(p);
}

/** In a child, so that memory can still be given. */
static int stores_where_the_host_says(void *ctx)
{
    (void)ctx;
    guest g;
    if (peri_host_init() < 0 || peri_host_storage_set(take, NULL) != PERI_EINVAL) return 1;
    if (peri_host_storage_set(take, give) < 0) return 2;
    if (guest_new(&g, false, BATCH) < 0 || guest_use(&g) != BATCH * COLS || product(g.cpu) != 1) return 3;
    if (atomic_load(&taken) < ROWS * COLS * 4) return 4;
    for (int64_t n = 1000; n < 30000000; n *= 5) { /* of each way in which free memory is kept; not all zeros */
        peri_tensor *t;
        if (peri_tensor_full(g.cpu, PERI_F32, 1, &n, 7, &t) < 0) return 9;
        peri_tensor_release(t);
    }
    if (peri_host_storage_set(NULL, NULL) != PERI_EINVAL || !strstr(peri_error_message(), "are there already"))
        return 5;
    guest_free(&g);
    if (peri_device_trim(g.cpu) < 0) return 6;
    if (peri_host_shutdown() < 0 || atomic_load(&taken) != 0) return 7;
    return peri_host_storage_set(NULL, NULL) < 0 ? 8 : 0;
}

static void storage_is_where_the_host_says(void **state)
{
    (void)state;
#if defined(__SANITIZE_ADDRESS__)
    skip(); /* blocks come from the heap one by one there, for the sanitizer to see */
#endif
    assert_int_equal(in_child(stores_where_the_host_says, NULL), 0);
}

/* -- batches of all sizes ------------------------------------------------------------------------------------------ */

static int sizes(void *ctx)
{
    enum { MOST = 10000, WARM = 100 };
    guest g;
    int64_t live = 0, *zeros = calloc(MOST + 1, sizeof *zeros);
    size_t heap = 0;
    (void)ctx;
    if (!zeros || guest_new(&g, false, BATCH) < 0) return 1;
    for (int64_t i = 0; i < MOST; i++) {
        const int64_t n = i < WARM ? MOST - i : i - WARM + 1, ends = n + 1; /* the largest ones first */
        const peri_tbe_block block = {.bags = n, .out_stride = COLS, .feature = -1};
        const int64_t whole[2] = {n, COLS};
        peri_tbe_input in = {0};
        peri_tensor *out;
        if (peri_tensor_new(g.cpu, PERI_I64, 1, &n, &in.ids) < 0 || peri_tensor_write(in.ids, zeros, n * 8) < 0)
            return 2;
        if (peri_tensor_new(g.cpu, PERI_I64, 1, &ends, &in.offsets) < 0 ||
            peri_tensor_write(in.offsets, zeros, ends * 8) < 0)
            return 3;
        if (peri_tbe_blocks_new(g.tbe, &block, 1, &in.blocks) < 0 ||
            peri_tensor_new(g.cpu, PERI_F32, 2, whole, &out) < 0)
            return 4;
        if (peri_tbe_forward(g.tbe, &in, out) < 0) return 5;
        peri_tensor_release(in.ids);
        peri_tensor_release(in.offsets);
        peri_tensor_release(out);
        peri_tbe_blocks_release(in.blocks);
        if (i == WARM) {
            live = peri_mem_live();
            heap = mallinfo2().uordblks;
        }
    }
    if (peri_mem_live() > live + 4096) return 6;
    return mallinfo2().uordblks > heap + (256 << 10) ? 7 : 0;
}

static void memory_does_not_grow_with_the_sizes_of_batches(void **state)
{
    (void)state;
    if (SANITIZED) skip();
    assert_int_equal(in_child(sizes, NULL), 0);
}

/* -- memory that is short ------------------------------------------------------------------------------------------ */

static atomic_int_least64_t asked, refused_at; /* requests so far; the one that gets nothing, from 1 */

static bool refused(void) { return atomic_fetch_add(&asked, 1) + 1 == atomic_load(&refused_at); }
static void *short_alloc(size_t size) { return refused() ? NULL : malloc(size); }
static void *short_resize(void *p, size_t size) { return refused() ? NULL : realloc(p, size); }
static void *short_take(size_t bytes, size_t alignment) { return refused() ? NULL : take(bytes, alignment); }

/** All that a guest does once, from the library's beginning to its end. */
static peri_status whole_life(guest *g)
{
    peri_status status = guest_new(g, false, BATCH);
    if (status >= 0) status = peri_tbe_forward(g->tbe, &g->in, g->out);
    if (status >= 0) status = peri_tbe_backward(g->tbe, &g->in, g->grad, NULL);
    if (status >= 0 && product(g->cpu) != 1) status = peri_error_status();
    if (status >= 0) status = deal_and_write(g);
    return status;
}

/** In a child: each request for memory is refused in its turn. */
static int lives_with_little_memory(void *ctx)
{
    (void)ctx;
    if (peri_host_allocator_set(short_alloc, short_resize, free) < 0 || peri_host_storage_set(short_take, give) < 0)
        return 1;
    for (int64_t k = 1, whole = 0; !whole; k++) {
        guest g = {0};
        if (peri_host_init() < 0) return 2;
        atomic_store(&asked, 0);
        atomic_store(&refused_at, k);
        const peri_status status = whole_life(&g);
        whole = atomic_load(&asked) < k;
        atomic_store(&refused_at, 0);
        if (status < 0 && (status != PERI_ENOMEM || whole))
            return fprintf(stderr, "request %d: %s\n", (int)k, peri_error_message()), 3;
        guest_free(&g);
        const bool ended = peri_host_shutdown() >= 0;
        if (!ended || peri_mem_objects() != 0 || peri_mem_live() != 0 || atomic_load(&taken) != 0) {
            fprintf(stderr, "request %d: %s\n", (int)k, ended ? "memory is left" : peri_error_message());
            return 4;
        }
        if (whole && k < 50) return 5;
    }
    return 0;
}

static void a_refused_request_for_memory_is_an_error(void **state)
{
    (void)state;
    assert_int_equal(in_child(lives_with_little_memory, NULL), 0);
}

/* -- memory that processes share ----------------------------------------------------------------------------------- */

/** What several processes share: rows, which lie in memory of the program's. */
typedef struct shared_rows {
    float *rows;
    int released;
} shared_rows;

static void note_release(void *ctx, void *data) { ((shared_rows *)ctx)->released += data != NULL; }

/** A guest whose rows are @s. */
static peri_status guest_over(guest *g, shared_rows *s)
{
    static const int64_t n = ROWS * COLS;
    const peri_table_config table = {.size = sizeof table, .name = "t", .rows = ROWS, .cols = COLS};
    peri_tbe_optimizer_config sgd = {.size = sizeof sgd};
    peri_tensor *weights;
    PERI_TRY(guest_new(g, false, BATCH));
    peri_tbe_blocks_release(g->in.blocks);
    peri_tbe_release(g->tbe);
    g->in.blocks = NULL;
    g->tbe = NULL;
    PERI_TRY(peri_tbe_optimizer_default(PERI_TBE_SGD, &sgd));
    PERI_TRY(peri_host_tensor(g->cpu, PERI_F32, 1, &n, s->rows, note_release, s, &weights));
    peri_tbe_config config = {.size = sizeof config, .device = g->cpu, .n_tables = 1, .tables = &table};
    config.optimizer = &sgd;
    config.weights = weights;
    const peri_status status = peri_tbe_new(&config, &g->tbe);
    peri_tensor_release(weights);
    const peri_tbe_block block = {.bags = BATCH, .out_stride = COLS, .feature = -1};
    return status < 0 ? status : peri_tbe_blocks_new(g->tbe, &block, 1, &g->in.blocks);
}

static int child_updates_rows(void *ctx)
{
    guest g;
    if (guest_over(&g, ctx) < 0 || guest_use(&g) != 2.0 * BATCH * COLS) return 1;
    if (peri_tbe_backward(g.tbe, &g.in, g.grad, NULL) < 0) return 2;
    guest_free(&g);
    return ((shared_rows *)ctx)->released == 1 ? 0 : 3;
}

/** Rows in huge pages where the system has any reserved, in memory that may become such, and in plain pages. */
static void processes_share_rows(void **state)
{
    (void)state;
    const size_t bytes = 2 << 20;
    for (int way = 0; way < 3; way++) {
        void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | (way == 0 ? MAP_HUGETLB : 0),
                       -1, 0);
        if (p == MAP_FAILED && way == 0) continue;
        assert_true(p != MAP_FAILED);
        if (way == 1) (void)madvise(p, bytes, MADV_HUGEPAGE);
        shared_rows s = {.rows = p};
        guest g;
        for (int i = 0; i < ROWS * COLS; i++) s.rows[i] = 2;
        assert_ok(guest_over(&g, &s));
        assert_true(guest_use(&g) == 2.0 * BATCH * COLS);
        assert_int_equal(in_child(child_updates_rows, &s), 0);
        const double sum = guest_use(&g);
        assert_true(sum > 0 && sum < 2.0 * BATCH * COLS); /* the other process's update */
        guest_free(&g);
        assert_int_equal(s.released, 1);
        munmap(p, bytes);
    }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(storage_is_where_the_host_says),
    cmocka_unit_test(memory_does_not_grow_with_the_sizes_of_batches),
    cmocka_unit_test(a_refused_request_for_memory_is_an_error),
    cmocka_unit_test(processes_share_rows),
};

int main(void) { return cmocka_run_group_tests(tests, NULL, NULL); }
