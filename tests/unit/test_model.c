/* SPDX-License-Identifier: Apache-2.0
 *
 * test_model.c: a model file that C writes and C opens: several threads answer at once and allocate nothing, a sample
 * that is refused writes nothing, inputs that may be missing, lists, files that are replaced or written to while they
 * are open, and operations that are not as they may be.
 */
#include "../harness/check.h"

#include <perilune/model.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { THREADS = 4, CALLS = 200, SAMPLES = 300 };

static char path[] = "/tmp/perilune-model-XXXXXX";

/** y = relu(2 a - b + 1/2) + the sum of the rows of the ids, of a table with the rows 0, 10, 20, 30. `a` and `b` are
 *  one dense input. */
static void write_model(float half)
{
    static const float weight[2] = {2, -1}, rows[4] = {0, 10, 20, 30};
    const float bias[1] = {half};
    char header[2000];
    peri_model_writer *w;
    peri_model_writer_place p[3];
    int32_t section;
    assert_ok(peri_model_writer_new(path, &w));
    assert_ok(peri_model_writer_begin(w, &section));
    assert_ok(peri_model_writer_panels(w, weight, 1, 2));
    assert_ok(peri_model_writer_begin(w, &section));
    assert_ok(peri_model_writer_put(w, bias, sizeof bias));
    assert_ok(peri_model_writer_begin(w, &section));
    assert_ok(peri_model_writer_put(w, rows, sizeof rows));
    assert_int_equal(section, 2);
    for (int32_t i = 0; i < 3; i++) assert_ok(peri_model_writer_section(w, i, &p[i]));
    int n = snprintf(
        header, sizeof header,
        "{\"name\":\"test\",\"future\":[{\"x\":null}],\"inputs\":[{\"name\":\"x\",\"kind\":\"dense\",\"columns\":2,"
        "\"finite\":1},"
        "{\"name\":\"ids\",\"kind\":\"ids\",\"rows\":4,\"optional\":1}],"
        "\"tables\":[{\"name\":\"t\",\"dtype\":\"f32\",\"rows\":4,\"columns\":1,\"section\":2}],"
        "\"values\":[{\"columns\":2,\"input\":0},{\"columns\":1,\"section\":1},{\"columns\":1},{\"columns\":1},{"
        "\"columns\":1}],"
        "\"operations\":[{\"op\":\"linear\",\"in\":[0,1],\"out\":2,\"weight\":0,\"function\":\"relu\",\"sizes\":[2,1]},"
        "{\"op\":\"lookup\",\"in\":[],\"out\":3,\"bags\":[{\"input\":1,\"table\":0,\"pooling\":\"sum\"}]},"
        "{\"op\":\"binary\",\"function\":\"add\",\"in\":[2,3],\"out\":4,\"sizes\":[1,1,1,1]}],"
        "\"outputs\":[{\"name\":\"y\",\"value\":4}],\"sections\":[");
    for (int i = 0; i < 3; i++)
        n += snprintf(header + n, sizeof header - (size_t)n,
                      "%s{\"offset\":%lld,\"bytes\":%lld,\"checksum\":\"%016llx\"}", i ? "," : "",
                      (long long)p[i].offset, (long long)p[i].bytes, (unsigned long long)p[i].checksum);
    n += snprintf(header + n, sizeof header - (size_t)n, "]}");
    assert_ok(peri_model_writer_finish(w, header, n));
    assert_ok(peri_model_writer_publish(w));
    peri_model_writer_release(w);
}

/** Values of SAMPLES samples: sample b has x = (b, 1) and the ids 0 .. b mod 4 - 1. */
static float dense[SAMPLES * 2];
static int64_t ids[SAMPLES * 4], offsets[SAMPLES + 1];

static float answer(int64_t b) { return (float)(2 * b - 1) + 0.5f > 0 ? (float)(2 * b - 1) + 0.5f : 0; }
static float rows_of(int64_t b) { return b % 4 == 3 ? 30 : b % 4 == 2 ? 10 : 0; }

static void make_values(void)
{
    int64_t n = 0;
    for (int64_t b = 0; b < SAMPLES; b++) {
        dense[2 * b] = (float)b, dense[2 * b + 1] = 1;
        offsets[b] = n;
        for (int64_t i = 0; i < b % 4; i++) ids[n++] = i;
    }
    offsets[SAMPLES] = n;
}

static void *serve(void *model)
{
    static const peri_model_values values[2] = {{.dense = dense}, {.ids = ids, .offsets = offsets}};
    float y[SAMPLES], *out[1] = {y};
    peri_model_context *c;
    if (peri_model_context_new(model, SAMPLES, 0, &c) < 0) return "no context";
    for (int k = 0; k < CALLS; k++) {
        const int64_t n = 1 + (k * 37) % SAMPLES;
        if (peri_model_predict(c, n, values, out) < 0) return "refused";
        for (int64_t b = 0; b < n; b++)
            if (y[b] != answer(b) + rows_of(b)) return "another answer";
    }
    peri_model_context_release(c);
    return NULL;
}

static void threads_answer_at_once(void **state)
{
    (void)state;
    pthread_t threads[THREADS];
    peri_model *m;
    write_model(0.5f);
    make_values();
    assert_ok(peri_model_open(path, PERI_MODEL_VERIFY, &m));
    for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_create(&threads[i], NULL, serve, m), 0);
    for (int i = 0; i < THREADS; i++) {
        void *said;
        pthread_join(threads[i], &said);
        if (said) fail_msg("a thread: %s", (const char *)said);
    }
    peri_model_release(m);
}

static void calls_allocate_nothing_and_refuse_whole(void **state)
{
    (void)state;
    peri_model *m;
    peri_model_context *c;
    float y[3] = {-7, -7, -7}, *out[1] = {y};
    assert_ok(peri_model_open(path, 0, &m));
    assert_ok(peri_model_context_new(m, 3, 2, &c));
    const int64_t live = peri_mem_live(), objects = peri_mem_objects(), takes = peri_model_context_bytes(c);
    assert_true(takes > 0 && takes <= live); /* all of it was taken when it was made: calls allocate nothing */
    int64_t bad_ids[] = {1, 4, 2}, one_each[] = {0, 1, 2, 3}, long_list[] = {0, 0, 0, 3}, skipped = 0;
    peri_model_values v[2] = {{.dense = dense}, {.ids = bad_ids, .offsets = one_each}};
    assert_fails(peri_model_predict(c, 3, v, out), PERI_ERANGE, "input 'ids', sample 1: id 4, allowed: 0..3");
    assert_true(y[0] == -7 && y[2] == -7);
    assert_fails(peri_model_check(m, 3, v, &skipped), PERI_ERANGE, "id 4");
    bad_ids[1] = 3, v[1].offsets = long_list;
    assert_fails(peri_model_predict(c, 3, v, out), PERI_ERANGE, "a list of 3 ids, allowed: up to 2");
    v[1] = (peri_model_values){0}; /* optional */
    assert_ok(peri_model_predict(c, 3, v, out));
    for (int64_t b = 0; b < 3; b++) assert_true(y[b] == answer(b));
    v[0].dense = NULL;
    assert_fails(peri_model_predict(c, 3, v, out), PERI_EINVAL, "input 'x' is missing");
    assert_ok(peri_model_predict(c, 0, v, out));
    v[0].dense = dense, v[1].spare[1] = 1;
    assert_fails(peri_model_predict(c, 3, v, out), PERI_EUNSUPPORTED,
                 "the values of input 'ids' say something that this library");
    v[1].spare[1] = 0;
    peri_model_info info = {0};
    assert_fails(peri_model_describe(m, &info), PERI_EINVAL, "the size of a peri_model_info is 0");
    info.size = sizeof info;
    assert_ok(peri_model_describe(m, &info));
    assert_int_equal(info.inputs, 2);
    assert_fails(peri_model_predict(c, 4, v, out), PERI_EINVAL, "4 samples, allowed with this context: 0..3");
    assert_int_equal(peri_mem_live(), live);
    assert_int_equal(peri_mem_objects(), objects);
    peri_model_context_release(c);
    peri_model_release(m);
}

static void on_bus(int number) { (void)number; }

/** No handler is replaced unasked; the one that was asked for stands in for parts of the file that are gone. */
static void only_a_guard_has_a_signal_handler(void **state)
{
    (void)state;
    peri_model *m;
    peri_model_context *c;
    float y[1], *out[1] = {y};
    peri_model_values v[2] = {{.dense = dense + 2}, {0}};
    struct sigaction own = {.sa_handler = on_bus}, now;
    assert_int_equal(sigaction(SIGBUS, &own, NULL), 0);
    for (int guard = 0; guard < 2; guard++) {
        write_model(0.5f);
        assert_ok(peri_model_open(path, guard ? PERI_MODEL_GUARD : 0, &m));
        assert_int_equal(sigaction(SIGBUS, NULL, &now), 0);
        assert_int_equal(now.sa_handler == on_bus, !guard);
        assert_ok(peri_model_context_new(m, 1, 0, &c));
        assert_int_equal(truncate(path, 0), 0);
        assert_fails(peri_model_predict(c, 1, v, out), PERI_EIO, "while it was mapped");
        assert_fails(peri_model_verify(m), PERI_EIO, guard ? "cannot be read" : "while it was mapped");
        peri_model_context_release(c);
        peri_model_release(m);
    }
    assert_fails(peri_model_open(path, 8, &m), PERI_EINVAL,
                 "allowed: PERI_MODEL_VERIFY | PERI_MODEL_COPY | PERI_MODEL_GUARD");
    own.sa_handler = SIG_DFL;
    sigaction(SIGBUS, &own, NULL);
    write_model(0.5f);
}

static void files_may_be_replaced_while_they_are_open(void **state)
{
    (void)state;
    peri_model *before, *after;
    peri_model_context *c;
    float y[1], *out[1] = {y};
    peri_model_values v[2] = {{.dense = dense + 2}, {0}}; /* 2 - 1 + 1/2 */
    assert_ok(peri_model_open(path, 0, &before));
    write_model(1.5f);
    assert_ok(peri_model_changed(before));
    assert_ok(peri_model_open(path, 0, &after));
    assert_ok(peri_model_context_new(before, 1, 0, &c));
    peri_model_release(before); /* the context keeps it */
    assert_ok(peri_model_predict(c, 1, v, out));
    assert_true(y[0] == 1.5f);
    peri_model_context_release(c);
    assert_ok(peri_model_context_new(after, 1, 0, &c));
    assert_ok(peri_model_predict(c, 1, v, out));
    assert_true(y[0] == 2.5f);
    assert_int_equal(truncate(path, 64), 0);
    assert_fails(peri_model_changed(after), PERI_EIO, "while it was mapped");
    assert_fails(peri_model_predict(c, 1, v, out), PERI_EIO, "while it was mapped");
    peri_model_context_release(c);
    peri_model_release(after);
    assert_fails(peri_model_open(path, 0, &after), PERI_EFORMAT, "it is not whole");
    unlink(path);
    assert_fails(peri_model_open(path, 0, &after), PERI_ENOTFOUND, "it cannot be opened");
    assert_int_equal(peri_mem_objects(), 0);
}

/** y: a list of twice the rows of the ids 0 to 3, which are 0, 10, 20, 30, of those ids whose times are so long before
 *  the last one that sqrt(difference / 3) is 1 or more. n: how many ids the input `one` has, which is 1. */
static void write_lists(void)
{
    static const float rows[4] = {0, 10, 20, 30};
    char header[2000];
    peri_model_writer *w;
    peri_model_writer_place p;
    int32_t section;
    assert_ok(peri_model_writer_new(path, &w));
    assert_ok(peri_model_writer_begin(w, &section));
    assert_ok(peri_model_writer_put(w, rows, sizeof rows));
    assert_ok(peri_model_writer_section(w, 0, &p));
    const int n = snprintf(
        header, sizeof header,
        "{\"inputs\":[{\"name\":\"ids\",\"kind\":\"ids\",\"rows\":4},{\"name\":\"times\",\"kind\":\"whole\"},"
        "{\"name\":\"one\",\"kind\":\"ids\",\"rows\":4,\"length\":1}],\"lists\":[{\"inputs\":[0,1]},{\"of\":0}],"
        "\"tables\":[{\"name\":\"t\",\"dtype\":\"f32\",\"rows\":4,\"columns\":1,\"section\":0}],\"values\":[{"
        "\"columns\":1,\"list\":0},"
        "{\"columns\":1,\"list\":0},{\"columns\":1,\"list\":0},{\"columns\":1,\"list\":1},{\"columns\":1}],"
        "\"operations\":[{\"op\":\"members\",\"in\":[],\"out\":0,\"bags\":[{\"input\":0,\"table\":0}]},"
        "{\"op\":\"binary\",\"function\":\"add\",\"in\":[0,0],\"out\":1,\"sizes\":[1,1,1,1]},"
        "{\"op\":\"times\",\"in\":[],\"out\":2,\"input\":1,\"function\":\"sqrt\",\"sizes\":[1],\"numbers\":["
        "\"4008000000000000\"]},"
        "{\"op\":\"select\",\"in\":[1,2],\"out\":3},{\"op\":\"lengths\",\"in\":[],\"out\":4,\"bags\":[{\"input\":2,"
        "\"table\":0}]}],"
        "\"outputs\":[{\"name\":\"y\",\"value\":3},{\"name\":\"n\",\"value\":4}],\"sections\":[{\"offset\":%lld,"
        "\"bytes\":%lld,"
        "\"checksum\":\"%016llx\"}]}",
        (long long)p.offset, (long long)p.bytes, (unsigned long long)p.checksum);
    assert_ok(peri_model_writer_finish(w, header, n));
    assert_ok(peri_model_writer_publish(w));
    peri_model_writer_release(w);
}

static void answers_are_lists(void **state)
{
    static int64_t times[SAMPLES * 4], first[SAMPLES + 1], begins[SAMPLES + 1], expected;
    static float y[SAMPLES * 4], n[SAMPLES];
    float *out[2] = {y, n};
    int64_t *const ends[2] = {begins, NULL};
    peri_model *m;
    peri_model_context *c;
    (void)state;
    make_values();
    for (int64_t b = 0; b <= SAMPLES; b++) first[b] = b;
    for (int64_t i = 0; i < offsets[SAMPLES]; i++) times[i] = 2 * i; /* 4 before the last one are enough, 2 are not */
    write_lists();
    assert_ok(peri_model_open(path, PERI_MODEL_VERIFY, &m));
    assert_ok(peri_model_context_new(m, SAMPLES, 4, &c));
    assert_int_equal(peri_model_output_list(m, 0), 0);
    assert_int_equal(peri_model_output_list(m, 1), -1);
    assert_false(peri_model_output_best(m, 0));
    peri_model_input_rules rules = {.size = sizeof rules};
    assert_ok(peri_model_input_describe(m, 1, &rules));
    assert_true(rules.like == 0 && rules.length == 0 && rules.counts == -1);
    assert_fails(peri_model_input_describe(m, 3, &rules), PERI_EINVAL, "input 3, allowed: 0..2");
    peri_model_values v[3] = {
        {.ids = ids, .offsets = offsets}, {.ids = times, .offsets = offsets}, {.ids = ids, .offsets = first}};
    assert_fails(peri_model_predict(c, SAMPLES, v, out), PERI_EUNSUPPORTED, "output 'y' is a list of each sample");
    assert_fails(peri_model_predict_lists(c, SAMPLES, v, out, (int64_t *const[2]){NULL}), PERI_EINVAL,
                 "its offsets are missing");
    assert_ok(peri_model_predict_lists(c, SAMPLES, v, out, ends));
    for (int64_t b = 0, at = 0; b < SAMPLES; b++) {
        assert_int_equal(begins[b], at);
        const int64_t length = b % 4;
        for (int64_t i = 0; i + 2 < length; i++, at++, expected++) assert_true(y[at] == (float)(20 * i));
        assert_int_equal(begins[b + 1], at);
        assert_true(n[b] == 1);
    }
    assert_int_equal(expected, SAMPLES / 4);
    v[1].offsets = first;
    assert_fails(peri_model_predict_lists(c, 3, v, out, ends), PERI_ERANGE,
                 "input 'times', sample 0: a list of 1, allowed: 0, the length of its list 'ids'");
    v[1].offsets = v[2].offsets = offsets;
    assert_fails(peri_model_predict_lists(c, 3, v, out, ends), PERI_ERANGE,
                 "input 'one', sample 0: a list of 0, allowed: 1");
    peri_model_context_release(c);
    peri_model_release(m);
    unlink(path);
}

/** A file of the one operation @text, of six numbers x, which has a result of @columns. */
static void write_operation(const char *text, int columns)
{
    char header[1000];
    peri_model_writer *w;
    const int n = snprintf(header, sizeof header,
                           "{\"inputs\":[{\"name\":\"x\",\"kind\":\"dense\",\"columns\":6}],\"tables\":[],"
                           "\"values\":[{\"columns\":6,\"input\":0},{\"columns\":%d}],\"operations\":[{\"out\":1,%s}],"
                           "\"outputs\":[{\"name\":\"y\",\"value\":1}],\"sections\":[]}",
                           columns, text);
    assert_ok(peri_model_writer_new(path, &w));
    assert_ok(peri_model_writer_finish(w, header, n));
    assert_ok(peri_model_writer_publish(w));
    peri_model_writer_release(w);
}

#define EXTREME "\"op\":\"extreme\",\"in\":[0],\"function\":\"largest\",\"sizes\":"
#define ORDER "\"op\":\"order\",\"in\":[0],\"function\":\"mode\",\"sizes\":"
#define PUT "\"op\":\"put\",\"in\":[0,0,0],\"function\":\"sum\",\"sizes\":"

/** What docs/model_file.md does not allow of these operations is refused by name; NULL: it is allowed. */
static void operations_say_what_is_wrong_with_them(void **state)
{
    static const struct {
        const char *text;
        int columns;
        const char *words;
    } cases[] = {
        {EXTREME "[2,3,1]", 12, NULL},
        {EXTREME "[1,1,6]", 12, NULL},
        {EXTREME "[2,3]", 12, "its sizes are not those of its value"},
        {EXTREME "[2,3,2]", 12, "its sizes are not those of its value"},
        {EXTREME "[-2,-3,1]", 12, "its sizes are not those of its value"},
        {EXTREME "[2,3,1]", 6, "its sizes are not those of its result"},
        {EXTREME "[2,3,1]", 13, "its sizes are not those of its result"},
        {"\"op\":\"extreme\",\"in\":[0],\"function\":\"least\",\"sizes\":[2,3,1]", 12,
         "its function is unknown, allowed: largest, smallest"},
        {ORDER "[3,0,1]", 4, NULL},
        {ORDER "[3,1,1]", 4, "its first is not 0, or its k not 1"},
        {ORDER "[3,0,2]", 8, "its first is not 0, or its k not 1"},
        {ORDER "[4,0,1]", 2, "n is not that of its value"},
        {ORDER "[3,0,1]", 5, "its sizes are not those of its result"},
        {"\"op\":\"order\",\"in\":[0],\"function\":\"rising\",\"sizes\":[3,2,2]", 8,
         "it finds elements that its lines do not have, or none"},
        {"\"op\":\"order\",\"in\":[0],\"function\":\"median\",\"sizes\":[3,0,1]", 4,
         "its function is unknown, allowed: rising, falling, rising_or_nan, mode"},
        {PUT "[6,1,1,6,0]", 6, NULL},
        {PUT "[3,1,2,2,3,3,0]", 6, NULL},
        {PUT "[6,1,1,6,1]", 6, "its strides lead out of its value"},
        {PUT "[7,1,1,6,0]", 6, "its strides lead out of its value"},
        {PUT "[0,1,1,6,0]", 6, "its strides lead out of its value"},
        {PUT "[1,1,1,6,-1]", 6, "its strides lead out of its value"},
        {PUT "[4611686018427387905,4,1,6,0]", 6, "its strides lead out of its value"},
        {PUT "[6,1,1,5,0]", 6, "its shape is not that of its places and of what it puts there"},
        {PUT "[6,1,2,-2,-3,0,0]", 6, "its shape is not that of its places and of what it puts there"},
        {PUT "[6,1,2,6,0]", 6, "it wants the sizes n, stride, dimensions, shape, strides"},
        {PUT "[6,1]", 6, "it wants the sizes n, stride, dimensions, shape, strides"},
        {PUT "[6,1,1,6,0]", 7, "its result has other columns than its value"},
        {"\"op\":\"put\",\"in\":[0,0],\"function\":\"sum\",\"sizes\":[6,1,1,6,0]", 6, "operation 0"},
        {"\"op\":\"put\",\"in\":[0,0,0],\"function\":\"first\",\"sizes\":[6,1,1,6,0]", 6,
         "its function is unknown, allowed: last, sum"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        peri_model *m;
        write_operation(cases[i].text, cases[i].columns);
        if (cases[i].words) {
            assert_fails(peri_model_open(path, 0, &m), PERI_EFORMAT, cases[i].words);
            continue;
        }
        assert_ok(peri_model_open(path, 0, &m));
        peri_model_release(m);
    }
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_answer_at_once),
        cmocka_unit_test(calls_allocate_nothing_and_refuse_whole),
        cmocka_unit_test(only_a_guard_has_a_signal_handler),
        cmocka_unit_test(files_may_be_replaced_while_they_are_open),
        cmocka_unit_test(answers_are_lists),
        cmocka_unit_test(operations_say_what_is_wrong_with_them),
    };
    close(mkstemp(path));
    return cmocka_run_group_tests_name("model files", tests, NULL, NULL);
}
