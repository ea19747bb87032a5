/* SPDX-License-Identifier: Apache-2.0
 *
 * test_io.c: readers, synthetic data, logistic regression and metrics from C: every allocation may fail, nothing leaks,
 * refusals.
 */
#include "tests/harness/check.h"

#include "runtime/base/base_internal.h"

#include <perilune/device.h>
#include <perilune/io.h>

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static const int64_t rows[3] = {50, 60, 70};
static const int32_t least[3] = {0, 1, 2}, most[3] = {3, 1, 2};

static peri_synthetic_args synthetic(void)
{
    return (peri_synthetic_args){.size = sizeof(peri_synthetic_args),
                                   .table_rows = rows,
                                   .bag_min = least,
                                   .bag_max = most,
                                   .dense_features = 2,
                                   .sparse_features = 3,
                                   .seed = 4,
                                   .alpha = 1.05,
                                   .signal = 1,
                                   .interaction = 1};
}

static const char text[] = "1\t5\t\t1f\t\t3\n0\t\t-7\t2\t4\t\n1\t1\t2\t3\t4\t5\n";

static peri_criteo_config criteo(void)
{
    return (peri_criteo_config){.size = sizeof(peri_criteo_config),
                                .path = "text",
                                .table_rows = rows,
                                .dense_features = 2,
                                .sparse_features = 3,
                                .dense = PERI_DENSE_LOG,
                                .world = 1,
                                .batch_rows = 2,
                                .end = 1};
}

/* -- deeds: each makes what it needs and gives it back ------------------------------------------------------------- */

static peri_status fill_synthetic(void)
{
    peri_synthetic_args o = synthetic();
    peri_batch *b = NULL;
    PERI_TRY(peri_batch_new(2, 3, 0, 0, &b));
    peri_status status = peri_synthetic_fill(&o, 0, 100, b);
    peri_batch_release(b);
    return status;
}

/** Two batches of `text`: of memory, or of the file of @path. */
static peri_status read_two(const char *path)
{
    peri_criteo_config o = criteo();
    peri_criteo *r = NULL;
    peri_batch *b = NULL;
    if (path) o.path = path;
    peri_status status = path ? peri_criteo_open(&o, &r) : peri_criteo_open_memory(&o, text, sizeof text - 1, &r);
    if (status >= 0) status = peri_batch_new(2, 3, 1, 1, &b);
    if (status >= 0) status = peri_criteo_next(r, b);
    if (status >= 0) status = peri_criteo_next(r, b);
    peri_batch_release(b);
    peri_criteo_release(r);
    return status;
}

static peri_status read_criteo(void) { return read_two(NULL); }

static peri_status read_criteo_file(void)
{
    char path[32];
    int file = memfd_create("criteo", 0);
    assert_int_equal(write(file, text, sizeof text - 1), sizeof text - 1);
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    peri_status status = read_two(path);
    close(file);
    return status;
}

/** Two ranks' batches of columns with a header, from two files. */
static peri_status read_csv(void)
{
    static const char csv[] = "y,x,ids\n1,2.5,\"7 \"\"\"\n0,,3 4\n";
    static const peri_csv_column columns[] = {{.size = sizeof *columns,
                                               .name = "ids",
                                               .kind = PERI_COLUMN_IDS,
                                               .ids = PERI_IDS_TEXT,
                                               .table_rows = 9,
                                               .separator = ' '},
                                              {.size = sizeof *columns, .name = "y", .kind = PERI_COLUMN_LABEL}};
    char path[32];
    const char *paths[] = {path, path};
    int file = memfd_create("csv", 0);
    assert_int_equal(write(file, csv, sizeof csv - 1), sizeof csv - 1);
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    peri_csv_config o = {.size = sizeof o,
                         .paths = paths,
                         .n_paths = 2,
                         .columns = columns,
                         .n_columns = 2,
                         .header = true,
                         .batch_rows = 3};
    peri_criteo *r = NULL;
    peri_batch *b = NULL;
    peri_status status = peri_csv_open(&o, &r);
    if (status >= 0) status = peri_batch_new(0, 1, 0, 0, &b);
    if (status >= 0) status = peri_criteo_next(r, b);
    if (status >= 0) assert_int_equal(b->ids, 2 + 2 + 2);
    if (status >= 0) status = peri_criteo_next(r, b);
    if (status >= 0) assert_int_equal(b->global_rows, 1);
    peri_batch_release(b);
    peri_criteo_release(r);
    close(file);
    return status;
}

/** Samples written into a folder, and read from there, shuffled. */
static peri_status write_columns(void)
{
    static const char *const names[] = {"dense", "labels", "lengths", "offsets", "ids"};
    char folder[] = "/tmp/perilune_columns_XXXXXX", inner[64], path[96];
    assert_non_null(mkdtemp(folder));
    snprintf(inner, sizeof inner, "%s/a", folder);
    peri_synthetic_args so = synthetic();
    peri_columns_config co = {.size = sizeof co,
                              .table_rows = rows,
                              .dense_features = 2,
                              .sparse_features = 3,
                              .ids = PERI_IDS_EXACT,
                              .block_rows = 3,
                              .blocks = 2};
    peri_columns_writer *w = NULL;
    peri_columns *c = NULL;
    peri_arrays *files[5] = {NULL};
    peri_array a[5];
    peri_batch *b = NULL;
    peri_status status = peri_batch_new(2, 3, 10, 100, &b);
    if (status >= 0) status = peri_synthetic_fill(&so, 0, 10, b);
    if (status >= 0) status = peri_columns_writer_new(inner, 2, 3, false, &w);
    if (status >= 0) status = peri_columns_writer_add(w, b);
    if (status >= 0) status = peri_columns_writer_finish(w, "samples");
    for (int i = 0; i < 5; i++) {
        a[i] = (peri_array){.size = sizeof *a};
        snprintf(path, sizeof path, "%s/%s.npy", inner, names[i]);
        if (status >= 0) status = peri_arrays_open(path, &files[i]);
        if (status >= 0) status = peri_arrays_get(files[i], 0, &a[i]);
    }
    peri_columns_part p = {.size = sizeof p,
                           .name = "a",
                           .rows = 10,
                           .dense = {a[0].data, 2, PERI_F32, 2},
                           .labels = {a[1].data, 1, PERI_F32, 1},
                           .lengths = {a[2].data, 3, PERI_I16, 3},
                           .offsets = a[3].data,
                           .values = {a[4].data, 1, PERI_I32, 1},
                           .total = a[4].elements};
    if (status >= 0) status = peri_columns_new(&co, &c);
    if (status >= 0) status = peri_columns_add(c, &p);
    if (status >= 0) status = peri_columns_fill(c, 2, 8, b);
    if (status >= 0) assert_int_equal(b->rows, 8);
    peri_columns_release(c);
    for (int i = 0; i < 5; i++) peri_arrays_release(files[i]);
    peri_columns_writer_release(w);
    peri_batch_release(b);
    snprintf(path, sizeof path, "rm -r %s", folder);
    assert_int_equal(system(path), 0);
    return status;
}

static peri_status train_logistic(void)
{
    peri_synthetic_args o = synthetic();
    peri_logistic_config lo = {
        .size = sizeof lo, .table_rows = rows, .dense_features = 2, .sparse_features = 3, .learning_rate = 0.1};
    peri_logistic *m = NULL;
    peri_batch *b = NULL;
    double loss;
    peri_status status = peri_logistic_new(&lo, &m);
    if (status >= 0) status = peri_batch_new(2, 3, 10, 100, &b);
    if (status >= 0) status = peri_synthetic_fill(&o, 0, 10, b);
    if (status >= 0) status = peri_logistic_train(m, b, &loss);
    peri_batch_release(b);
    peri_logistic_release(m);
    return status;
}

static peri_status areas(void)
{
    double p[4] = {0.1, 0.4, 0.35, 0.8}, y[4] = {0, 0, 1, 1}, out;
    peri_metric_samples s = {.predictions = p, .labels = y, .n = 4};
    PERI_TRY(peri_metric_auc(&s, &out));
    PERI_TRY(peri_metric_auprc(&s, &out));
    return peri_metric_rauc(&s, &out);
}

/* A thread that hands over numbers 0, 1, ... in parcels that each have one object, so many; `bytes` of each is a copy
 * of its number. */
typedef struct numbers {
    peri_feed *feed;
    peri_tensor *tensor;
    int64_t n;
    peri_status status; /* of the last put */
} numbers;

static int32_t hand_over(void *state, int32_t n_args, int32_t n_results, int32_t handler)
{
    numbers *work = state;
    (void)n_results;
    (void)handler;
    for (int64_t i = 0; i < work->n; i++) {
        peri_tensor_retain(work->tensor);
        peri_feed_object object = {.ptr = work->tensor, .kind = PERI_FEED_TENSOR};
        work->status = peri_feed_put(work->feed, &(peri_feed_parcel){(const char *)&i, sizeof i, &object, 1});
        if (work->status < 0) break;
    }
    return n_args;
}

static atomic_int closed;
static void close_numbers(void *state)
{
    (void)state;
    atomic_fetch_add(&closed, 1);
}

/** Take @taken of @n numbers. */
static peri_status feed(int64_t n, int64_t taken)
{
    numbers work = {.n = n};
    peri_device *cpu;
    peri_feed_thread thread = {.state = &work, .n_args = 7, .run = hand_over, .close = close_numbers};
    assert_ok(peri_device_get("cpu", &cpu));
    peri_status status = peri_tensor_full(cpu, PERI_F32, 1, &(int64_t){3}, 1, &work.tensor);
    if (status >= 0) status = peri_feed_new(2, &work.feed);
    if (status >= 0) status = peri_feed_start(work.feed, &thread);
    for (int64_t i = 0; i < taken && status >= 0; i++) {
        peri_feed_parcel parcel;
        while ((status = peri_feed_take(work.feed, 1000, &parcel)) == PERI_PENDING) {}
        if (status < 0) break;
        assert_memory_equal(parcel.bytes, &i, sizeof i);
        assert_int_equal(parcel.n_objects, 1);
        assert_ptr_equal(parcel.objects[0].ptr, work.tensor);
        peri_tensor_release(parcel.objects[0].ptr);
    }
    if (status == PERI_ECLOSED && work.status < 0) status = work.status;
    if (status == PERI_ECLOSED) assert_int_equal(peri_feed_result(work.feed), 7);
    peri_feed_release(work.feed);
    peri_tensor_release(work.tensor); /* the last reference: objects are counted by who calls */
    return status;
}

static peri_status feed_three(void) { return feed(3, 3); }

/* -- tests --------------------------------------------------------------------------------------------------------- */

static void every_allocation_may_fail(void **state)
{
    (void)state;
    peri_status (*const deeds[])(void) = {fill_synthetic, read_criteo, read_criteo_file, read_csv, write_columns,
                                          train_logistic, areas,       feed_three};
    for (size_t d = 0; d < sizeof deeds / sizeof *deeds; d++) {
        int64_t objects = peri_mem_objects(), live = peri_mem_live();
        int failures = 0;
        for (int k = 1;; k++) {
            assert_ok(peri_fault_arm("alloc", k));
            peri_status status = deeds[d]();
            bool untouched = peri_fault_passed("alloc") < k;
            assert_ok(peri_fault_arm("alloc", 0));
            assert_int_equal(peri_mem_objects(), objects);
            assert_int_equal(peri_mem_live(), live);
            if (untouched) {
                assert_int_equal(status, PERI_OK);
                break;
            }
            assert_int_equal(status, PERI_ENOMEM);
            failures++;
        }
        assert_true(failures >= 3);
    }
}

static void a_feed_gives_everything_back(void **state)
{
    (void)state;
    int64_t objects = peri_mem_objects(), live = peri_mem_live();
    int before = atomic_load(&closed);
    for (int64_t taken = 0; taken < 6; taken++) assert_ok(feed(1000, taken)); /* the thread is stopped in the middle */
    assert_int_equal(feed(3, 4), PERI_ECLOSED);
    assert_int_equal(atomic_load(&closed) - before, 7);
    peri_feed *f = NULL;
    assert_fails(peri_feed_new(0, &f), PERI_EINVAL, "0 parcels ahead, allowed: 1..4194304");
    assert_ok(peri_feed_new(1, &f));
    peri_feed_parcel parcel;
    assert_fails(peri_feed_take(f, 0, &parcel), PERI_ECLOSED, "no more parcels");
    assert_fails(peri_feed_put(f, &(peri_feed_parcel){.length = 3}), PERI_EINVAL,
                 "3 bytes and 0 objects, with no bytes");
    assert_fails(peri_feed_put(f, &(peri_feed_parcel){.objects = &(peri_feed_object){.kind = 9}, .n_objects = 1}),
                 PERI_EINVAL, "object 0 is of kind 9, allowed: 0..3");
    assert_ok(peri_feed_stop(f, 0));
    peri_feed_release(f);
    peri_feed_release(NULL);
    assert_int_equal(peri_mem_objects(), objects);
    assert_int_equal(peri_mem_live(), live);
}

static void a_batch_grows_and_keeps_its_ids(void **state)
{
    (void)state;
    peri_batch *b = NULL;
    assert_ok(peri_batch_new(0, 1, 4, 2, &b));
    b->values[0] = 7;
    b->values[1] = 8;
    assert_ok(peri_batch_reserve(b, 1000));
    assert_int_equal(b->values[0], 7);
    assert_int_equal(b->values[1], 8);
    assert_true(b->value_capacity >= 1000);
    assert_fails(peri_batch_reserve(b, -1), PERI_EINVAL, "-1 ids");
    peri_batch_release(b);
    peri_batch_release(NULL);
    b = NULL;
    assert_fails(peri_batch_new(-1, 0, 0, 0, &b), PERI_EINVAL, "-1 dense");
    assert_fails(peri_batch_new(0, 0, -1, 0, &b), PERI_EINVAL, "-1 rows");
    assert_null(b);
}

static void shares_cover_every_row_once(void **state)
{
    (void)state;
    for (int64_t n = 0; n < 40; n++)
        for (int32_t world = 1; world < 12; world++) {
            int64_t at = 0;
            for (int32_t rank = 0; rank < world; rank++) {
                int64_t begin, end;
                peri_batch_share(n, rank, world, &begin, &end);
                assert_int_equal(begin, at);
                assert_true(end >= begin && end - begin <= n / world + 1);
                at = end;
            }
            assert_int_equal(at, n);
        }
}

static void a_reader_refuses_a_batch_of_other_features(void **state)
{
    (void)state;
    peri_criteo_config o = criteo();
    peri_criteo *r = NULL;
    peri_batch *b = NULL;
    assert_ok(peri_criteo_open_memory(&o, text, sizeof text - 1, &r));
    assert_ok(peri_batch_new(2, 4, 1, 1, &b));
    assert_fails(peri_criteo_next(r, b), PERI_EINVAL, "made for 2 dense and 4 sparse features, wanted 2 and 3");
    assert_int_equal(peri_criteo_count(r), 3);
    peri_batch_release(b);
    peri_criteo_release(r);
    peri_criteo_release(NULL);
    assert_fails(peri_criteo_open_memory(&o, NULL, 0, &r), PERI_EINVAL, "no text");
    o.rank = 1;
    assert_fails(peri_criteo_open_memory(&o, text, 1, &r), PERI_EINVAL, "rank 1 of 1");
    o = criteo();
    o.dense = 9;
    assert_fails(peri_criteo_open_memory(&o, text, 1, &r), PERI_EINVAL, "dense = 9");
    o = criteo();
    o.begin = NAN;
    assert_fails(peri_criteo_open_memory(&o, text, 1, &r), PERI_EINVAL, "the part from nan");
    o = criteo();
    o.path = NULL;
    assert_fails(peri_criteo_open(&o, &r), PERI_EINVAL, "no path");
}

static void a_reader_never_reads_behind_its_text(void **state)
{
    (void)state;
    /* Every prefix of the text, in a block of exactly that size: valgrind and the sanitizer watch the end. */
    for (int64_t size = 1; size < (int64_t)sizeof text; size++) {
        char *copy = malloc((size_t)size);
        memcpy(copy, text, (size_t)size);
        peri_criteo_config o = criteo();
        peri_criteo *r = NULL;
        peri_batch *b = NULL;
        assert_ok(peri_criteo_open_memory(&o, copy, size, &r));
        assert_ok(peri_batch_new(2, 3, 0, 0, &b));
        int64_t read = 0;
        while (peri_criteo_next(r, b) == PERI_OK && b->global_rows) read += b->rows;
        assert_true(read <= 3);
        peri_batch_release(b);
        peri_criteo_release(r);
        free(copy);
    }
}

/** Lines of many lengths, some ended by CR LF, together many times as long as what is read at once. */
static char *long_text(int64_t lines, int64_t *size)
{
    char *whole = malloc((size_t)lines * 64), *p = whole;
    for (int64_t i = 0; i < lines; i++) {
        uint64_t word = (uint64_t)(peri_random_uniform(5, 6, (uint64_t)i) * 0x1p53);
        p += sprintf(p, "%d\t", (int)(word & 1));
        if (word & 2) p += sprintf(p, "%lld", (long long)(word >> 20));
        *p++ = '\t';
        p += sprintf(p, "-%d\t%llx\t", (int)(word >> 4 & 255), (unsigned long long)word >> (word >> 12 & 31));
        if (word & 4) p += sprintf(p, "%08x", (unsigned)(word >> 8));
        p += sprintf(p, "\t%x%s", (unsigned)word, i == lines - 1 ? "" : word & 8 ? "\r\n" : "\n");
    }
    *size = p - whole;
    return whole;
}

/** Both readers give the same batches, and together all lines of the part. */
static void same_batches(peri_criteo *a, peri_criteo *b)
{
    peri_batch *x = NULL, *y = NULL;
    assert_ok(peri_batch_new(2, 3, 0, 0, &x));
    assert_ok(peri_batch_new(2, 3, 0, 0, &y));
    int64_t lines = 0;
    do {
        assert_ok(peri_criteo_next(a, x));
        assert_ok(peri_criteo_next(b, y));
        assert_int_equal(x->rows, y->rows);
        assert_int_equal(x->global_rows, y->global_rows);
        assert_int_equal(x->global_row, y->global_row);
        assert_int_equal(x->ids, y->ids);
        assert_memory_equal(x->labels, y->labels, sizeof *x->labels * (size_t)x->rows);
        assert_memory_equal(x->dense, y->dense, sizeof *x->dense * 2 * (size_t)x->rows);
        assert_memory_equal(x->lengths, y->lengths, sizeof *x->lengths * 3 * (size_t)x->rows);
        assert_memory_equal(x->values, y->values, sizeof *x->values * (size_t)x->ids);
        lines += x->global_rows;
    } while (x->global_rows);
    assert_int_equal(lines, peri_criteo_count(a));
    assert_int_equal(lines, peri_criteo_count(b));
    peri_batch_release(x);
    peri_batch_release(y);
}

static void a_file_reads_like_memory(void **state)
{
    (void)state;
    enum { LINES = 20000 };
    int64_t size;
    char *whole = long_text(LINES, &size), path[] = "/tmp/perilune_test_io_XXXXXX";
    int file = mkstemp(path);
    assert_int_equal(write(file, whole, (size_t)size), size);
    static const int64_t batches[] = {7, 3000, LINES, LINES * 3};
    static const double parts[][2] = {{0, 1}, {0, 0.3}, {0.3, 0.9}, {0.9, 1}, {0.5, 0.5}};
    for (size_t k = 0; k < sizeof batches / sizeof *batches; k++)
        for (size_t p = 0; p < sizeof parts / sizeof *parts; p++)
            for (int32_t world = 1; world <= 3; world += 2) {
                peri_criteo_config o = criteo();
                o.path = path;
                o.batch_rows = batches[k];
                o.world = world;
                o.rank = world / 2;
                o.begin = parts[p][0];
                o.end = parts[p][1];
                peri_criteo *a = NULL, *b = NULL;
                assert_ok(peri_criteo_open_memory(&o, whole, size, &a));
                assert_ok(peri_criteo_open(&o, &b));
                same_batches(a, b);
                peri_criteo_rewind(a);
                peri_criteo_rewind(b);
                same_batches(a, b);
                peri_criteo_release(a);
                peri_criteo_release(b);
            }
    close(file);
    unlink(path);
    free(whole);
}

/* One of several readers that take turns at the batches of a file. */
typedef struct turn {
    pthread_t thread;
    peri_criteo_config options;
    int64_t *index;
    int32_t first, step; /* its batches: first, first + step, ... */
    double *sums;        /* of each batch, by its number */
    int64_t *found; /* and its rows */
    peri_status status;
} turn;

static double sum_of(const peri_batch *b)
{
    double sum = (double)b->global_row + 3 * (double)b->global_rows + 7 * (double)b->rows;
    for (int64_t i = 0; i < b->rows; i++)
        sum += (double)(i + 1) * (b->labels[i] + b->dense[2 * i] - 2 * b->dense[2 * i + 1]);
    for (int64_t i = 0; i < 3 * b->rows; i++) sum += (double)(i % 11) * b->lengths[i];
    for (int64_t i = 0; i < b->ids; i++) sum += (double)(i % 13) * (double)b->values[i];
    return sum;
}

static void *take_turns(void *arg)
{
    turn *t = arg;
    peri_criteo *r = NULL;
    peri_batch *b = NULL;
    int64_t n = 1;
    t->status = peri_criteo_open(&t->options, &r);
    if (t->status >= 0) t->status = peri_batch_new(2, 3, 0, 0, &b);
    if (t->status >= 0 && t->index) t->status = peri_criteo_share(r, t->index);
    for (int32_t at = 0; t->status >= 0 && n > 0; at++) {
        if (at % t->step != t->first) t->status = peri_criteo_skip(r, &n);
        else {
            t->status = peri_criteo_next(r, b);
            n = b->global_rows;
            t->sums[at] = sum_of(b);
            t->found[at] = n;
        }
    }
    peri_batch_release(b);
    peri_criteo_release(r);
    return NULL;
}

static void readers_on_several_threads_find_each_other_s_lines(void **state)
{
    (void)state;
    enum { LINES = 30000, MOST = 5000, READERS = 4 };
    int64_t size;
    char *whole = long_text(LINES, &size), path[] = "/tmp/perilune_test_io_XXXXXX";
    int file = mkstemp(path);
    assert_int_equal(write(file, whole, (size_t)size), size);
    static double sums[2][MOST];
    static int64_t found[2][MOST];
    static const int64_t batches[] = {7, 1000, LINES, LINES * 3};
    static const double parts[][2] = {{0, 1}, {0.3, 0.9}, {0.5, 0.5}};
    for (size_t k = 0; k < sizeof batches / sizeof *batches; k++)
        for (size_t p = 0; p < sizeof parts / sizeof *parts; p++)
            for (int32_t readers = 1; readers <= READERS; readers++) {
                peri_criteo_config o = criteo();
                o.path = path;
                o.batch_rows = batches[k];
                o.world = 3;
                o.rank = readers % 3;
                o.begin = parts[p][0];
                o.end = parts[p][1];
                memset(sums, 0, sizeof sums);
                memset(found, 0, sizeof found);
                turn alone = {.options = o, .step = 1, .sums = sums[0], .found = found[0]}, turns[READERS];
                take_turns(&alone);
                assert_ok(alone.status);
                peri_criteo *r = NULL;
                assert_ok(peri_criteo_open(&o, &r));
                int64_t *index = malloc(sizeof *index * (size_t)peri_criteo_index_words(r));
                assert_ok(peri_criteo_index(r, index));
                peri_criteo_release(r);
                for (int32_t i = 0; i < readers; i++) {
                    turns[i] = alone;
                    turns[i].index = index;
                    turns[i].first = i;
                    turns[i].step = readers;
                    turns[i].sums = sums[1];
                    turns[i].found = found[1];
                    assert_int_equal(pthread_create(&turns[i].thread, NULL, take_turns, &turns[i]), 0);
                }
                for (int32_t i = 0; i < readers; i++) {
                    pthread_join(turns[i].thread, NULL);
                    assert_ok(turns[i].status);
                }
                for (int64_t i = 0; i == 0 || found[0][i - 1] > 0; i++) {
                    assert_int_equal(found[0][i], found[1][i]);
                    assert_true(found[0][i] == 0 || sums[0][i] == sums[1][i]);
                }
                free(index);
            }
    close(file);
    unlink(path);
    free(whole);
}

/* A thread that hands over 0, 1, 2 each time that they are wanted. */
static int32_t hand_over_again(void *state, int32_t n_args, int32_t n_results, int32_t handler)
{
    numbers *work = state;
    (void)n_results;
    (void)handler;
    do {
        work->status = PERI_OK;
        for (int64_t i = 0; i < 3 && work->status == PERI_OK; i++)
            work->status = peri_feed_put(work->feed, &(peri_feed_parcel){(const char *)&i, sizeof i, NULL, 0});
        if (work->status == PERI_OK) work->status = peri_feed_end(work->feed);
    } while (work->status >= 0);
    return n_args;
}

static void a_feed_begins_again_wherever_it_is(void **state)
{
    (void)state;
    numbers work = {.n = 3};
    peri_feed_thread thread = {.state = &work, .run = hand_over_again};
    assert_ok(peri_feed_new(2, &work.feed));
    assert_ok(peri_feed_start(work.feed, &thread));
    for (int64_t round = 0; round < 2000; round++) {
        peri_feed_parcel parcel;
        peri_status status = PERI_OK;
        for (int64_t i = 0; i < round % 5; i++) {
            while ((status = peri_feed_take(work.feed, 1000, &parcel)) == PERI_PENDING) {}
            assert_int_equal(status, i < 3 ? PERI_OK : PERI_ECLOSED);
            if (i < 3) assert_memory_equal(parcel.bytes, &i, sizeof i);
        }
        assert_ok(peri_feed_restart(work.feed));
    }
    assert_ok(peri_feed_stop(work.feed, 5000000));
    assert_int_equal(work.status, PERI_ECLOSED);
    assert_fails(peri_feed_restart(work.feed), PERI_ECLOSED, "a thread is over");
    peri_feed_release(work.feed);
}

/* Several threads make numbers 0 .. n - 1, each those whose turn it gets; thread `slow` sleeps before each. */
typedef struct making {
    peri_feed *feed;
    int64_t n, fails_at; /* there its run returns 9; -1: nowhere */
    bool slow;
} making;

static int32_t make_in_turns(void *state, int32_t n_args, int32_t n_results, int32_t handler)
{
    making *t = state;
    (void)n_args;
    (void)n_results;
    (void)handler;
    for (;;) {
        int64_t i;
        peri_status status = peri_feed_next(t->feed, &i);
        if (status == PERI_OK) status = peri_feed_next(t->feed, &i); /* the same */
        if (status == PERI_PENDING) continue;
        if (status < 0) return 0;
        if (i == t->fails_at) return 9;
        if (t->slow) usleep(2000);
        if (i < t->n) (void)peri_feed_put(t->feed, &(peri_feed_parcel){(const char *)&i, sizeof i, NULL, 0});
        else (void)peri_feed_end(t->feed);
    }
}

/** The next number, -1 at the end. */
static int64_t next_number(peri_feed *feed)
{
    peri_feed_parcel parcel;
    peri_status status;
    int64_t i;
    while ((status = peri_feed_take(feed, 1000, &parcel)) == PERI_PENDING) {}
    if (status == PERI_ECLOSED) return -1;
    assert_ok(status);
    memcpy(&i, parcel.bytes, sizeof i);
    return i;
}

static void threads_of_a_feed_take_turns(void **state)
{
    (void)state;
    enum { THREADS = 4, N = 200, FAILS = 57 };
    for (int fails = 0; fails < 2; fails++) {
        making t[THREADS] = {0};
        int64_t objects = peri_mem_objects(), live = peri_mem_live(), last = fails ? FAILS : N;
        peri_feed *feed = NULL;
        assert_ok(peri_feed_new(3, &feed));
        for (int i = 0; i < THREADS; i++) {
            t[i] = (making){.feed = feed, .n = N, .fails_at = fails ? FAILS : -1, .slow = i == 0};
            assert_ok(peri_feed_start(feed, &(peri_feed_thread){.state = &t[i], .run = make_in_turns}));
        }
        for (int64_t round = 0; round < 100; round++) {
            for (int64_t i = 0; i < round % 7; i++) assert_int_equal(next_number(feed), i);
            assert_ok(peri_feed_restart(feed));
        }
        assert_int_equal(peri_feed_result(feed), 0);
        assert_null(peri_feed_failed(feed));
        for (int64_t i = 0; i < last; i++) assert_int_equal(next_number(feed), i);
        for (int i = 0; i < 3; i++) assert_int_equal(next_number(feed), -1);
        assert_int_equal(peri_feed_result(feed), fails ? 9 : 0);
        assert_int_equal(peri_feed_failed(feed) != NULL, fails);
        assert_ok(peri_feed_stop(feed, 5000000));
        assert_int_equal(peri_feed_result(feed), fails ? 9 : 0);
        peri_feed_release(feed);
        assert_int_equal(peri_mem_objects(), objects);
        assert_int_equal(peri_mem_live(), live);
    }
}

static void uniform_numbers_are_uniform(void **state)
{
    (void)state;
    double sum = 0, square = 0;
    enum { N = 100000 };
    for (uint64_t i = 0; i < N; i++) {
        double u = peri_random_uniform(3, 4, i);
        assert_true(u >= 0 && u < 1);
        sum += u;
        square += u * u;
    }
    assert_true(fabs(sum / N - 0.5) < 0.005);
    assert_true(fabs(square / N - 1.0 / 3) < 0.005);
    assert_true(peri_random_uniform(3, 4, 0) != peri_random_uniform(4, 3, 0));
}

static void metrics_refuse_what_is_no_number(void **state)
{
    (void)state;
    double p[2] = {0.5, NAN}, y[2] = {0, 1}, out = 7;
    peri_metric_samples s = {.predictions = p, .labels = y, .n = 2};
    assert_fails(peri_metric_auc(&s, &out), PERI_EINVAL, "sample 1");
    assert_true(out == 7);
    s.n = -1;
    assert_fails(peri_metric_auc(&s, &out), PERI_EINVAL, "-1 samples");
    s = (peri_metric_samples){.n = 1};
    assert_fails(peri_metric_rauc(&s, &out), PERI_EINVAL, "no predictions");
}

/** What anybody computes by hand of four samples; sums of parts are sums of all. */
static void metrics_of_sums_have_names(void **state)
{
    (void)state;
    double p[] = {0.25, 0.5, 0.5, 0.75}, y[] = {0, 1, 0, 1}, w[] = {1, 1, 2, 4}, out;
    const struct {
        const char *name;
        double value;
    } cases[] = {{"calibration", (0.25 + 0.5 + 1 + 3) / 5},
                 {"ctr", 5.0 / 8},
                 {"accuracy", (1.0 + 1 + 4) / 8},
                 {"recall", 1},
                 {"precision", 5.0 / 7},
                 {"mse", (0.0625 + 0.25 + 0.5 + 0.25) / 8},
                 {"mae", (0.25 + 0.5 + 1 + 1) / 8},
                 {"logloss", (-log2(0.75) + 1 + 2 - 4 * log2(0.75)) / 8},
                 {"ne", (-log2(0.75) + 1 + 2 - 4 * log2(0.75)) / (-5 * log2(5.0 / 8) - 3 * log2(3.0 / 8))}};
    peri_metric_sums sums = {0};
    for (int64_t i = 0; i < 4; i += 2) {
        peri_metric_sums part = {0};
        const peri_metric_samples two = {.predictions = p + i, .labels = y + i, .weights = w + i, .n = 2};
        assert_ok(peri_metric_check(&two, peri_metric_needs("ne"), "ne"));
        assert_ok(peri_metric_add(&two, 0.5, &part));
        assert_ok(peri_metric_merge(&part, &sums));
    }
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_ok(peri_metric_value(&sums, cases[i].name, &out));
        assert_true(fabs(out - cases[i].value) < 1e-12);
    }
    for (int32_t i = 0; peri_metric_name(i); i++) assert_ok(peri_metric_value(&sums, peri_metric_name(i), &out));
    assert_fails(peri_metric_value(&sums, "nee", &out), PERI_EINVAL, "metric 'nee', allowed: ne, logloss, ne_positive");
    assert_fails(peri_metric_needs("nee"), PERI_EINVAL, "metric 'nee'");
}

static void metrics_refuse_what_they_do_not_speak_of(void **state)
{
    (void)state;
    double p[2] = {0.5, 1.5}, y[2] = {0, 1}, w[2] = {1, -1}, out = 7;
    peri_metric_samples s = {.predictions = p, .labels = y, .n = 2};
    peri_metric_sums sums = {0};
    assert_fails(peri_metric_check(&s, PERI_METRIC_PROBABILITIES, "ne"), PERI_EINVAL,
                 "ne: sample 1: prediction 1.5, allowed: prob");
    assert_ok(peri_metric_check(&s, PERI_METRIC_RATES | PERI_METRIC_LABELS_OF_CLASSES, "ctr"));
    assert_fails(peri_metric_check(&s, 1 << 10, "ne"), PERI_EINVAL, "needs 1024");
    assert_ok(peri_metric_add(&s, 0.5, &sums));
    assert_true(isnan(sums.cross_entropy) && isnan(sums.plain_cross_entropy) && sums.square_error == 0.5);
    s.weights = w;
    assert_fails(peri_metric_add(&s, 0.5, &sums), PERI_EINVAL,
                 "sample 1: weight -1, allowed: finite numbers, 0 or more");
    assert_true(sums.n == 2);
    w[1] = 0;
    y[0] = 2;
    assert_fails(peri_metric_auc(&s, &out), PERI_EINVAL, "sample 0: label 2, allowed: 0..1");
    assert_ok(peri_metric_rauc(&s, &out));
    assert_true(isnan(out)); /* one sample has weight */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_allocation_may_fail),
        cmocka_unit_test(a_feed_gives_everything_back), cmocka_unit_test(a_batch_grows_and_keeps_its_ids),
        cmocka_unit_test(shares_cover_every_row_once),
        cmocka_unit_test(a_reader_refuses_a_batch_of_other_features),
        cmocka_unit_test(a_reader_never_reads_behind_its_text),
        cmocka_unit_test(a_file_reads_like_memory),
        cmocka_unit_test(readers_on_several_threads_find_each_other_s_lines),
        cmocka_unit_test(a_feed_begins_again_wherever_it_is),
        cmocka_unit_test(threads_of_a_feed_take_turns),
        cmocka_unit_test(uniform_numbers_are_uniform),
        cmocka_unit_test(metrics_refuse_what_is_no_number), cmocka_unit_test(metrics_of_sums_have_names),
        cmocka_unit_test(metrics_refuse_what_they_do_not_speak_of),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
