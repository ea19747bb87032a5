/* SPDX-License-Identifier: Apache-2.0
 *
 * test_serve_read.c: the forms of requests, and the rules for what does not fit in them, without a server.
 */
#include "tests/harness/check.h"

#include "serve_known.h"

#include <math.h>
#include <stdlib.h>

static peri_status read_into(peri__serve_batch *b, const peri__serve_rules *rules, bool v2, const char *text,
                             peri__serve_question *q)
{
    return peri__serve_read(b, rules, v2, text, (int64_t)strlen(text), -1, q);
}

/** A body is refused with a text that has @part, and leaves the batch as it was. */
static void refuses(const peri__serve_rules *rules, bool v2, const char *body, const char *part)
{
    peri__serve_batch b;
    peri__serve_question q;
    assert_ok(peri__serve_batch_init(&b, &facts));
    assert_ok(read_into(&b, &strict, false,
                        "{\"instances\":[{\"age\":1,\"point\":[2,3],\"clicked\":[4,5],\"user\":6}]}", &q));
    peri_status status = read_into(&b, rules, v2, body, &q);
    if (status != PERI_EFORMAT) fail_msg("%s: %s, wanted EFORMAT", body, peri_status_name(status));
    if (!strstr(peri_error_message(), part)) fail_msg("%s: \"%s\" lacks \"%s\"", body, peri_error_message(), part);
    assert_int_equal(b.samples, 1);
    for (int f = 0; f < N_INPUTS; f++) assert_int_equal(b.columns[f].n_samples, 1);
    assert_int_equal(b.columns[0].n_values, 1);
    assert_int_equal(b.columns[1].n_values, 2);
    assert_int_equal(b.columns[2].n_values, 2);
    assert_int_equal(b.columns[3].n_values, 1);
    assert_int_equal(b.columns[2].ids[1], 5);
    peri__serve_batch_fini(&b);
}

static void reads_three_forms_alike(void **state)
{
    static const char *const bodies[] = {
        "{\"instances\":[{\"age\":0.1,\"point\":[2,-3e0],\"clicked\":[4,\"5\"],\"user\":18446744073709551615},"
        "{\"user\":[],\"clicked\":999,\"point\":[1e-45,0],\"age\":[3]}],\"signature_name\":\"serving_default\"}",
        "{\"inputs\":{\"user\":[\"18446744073709551615\",[]],\"age\":[0.1,3],\"clicked\":[[4,5],[999]],\"point\":[[2,-"
        "3],[1e-45,0]]}}",
        "{\"id\":\"a\",\"outputs\":[{\"name\":\"score\"}],\"parameters\":{\"x\":[1]},\"inputs\":["
        "{\"data\":[18446744073709551615],\"shape\":[1],\"datatype\":\"UINT64\",\"name\":\"user\"},"
        "{\"name\":\"user.lengths\",\"shape\":[2],\"datatype\":\"INT32\",\"data\":[1,0]},"
        "{\"name\":\"age\",\"shape\":[2,1],\"datatype\":\"FP32\",\"data\":[0.1,3]},"
        "{\"name\":\"point\",\"shape\":[2,2],\"datatype\":\"FP64\",\"data\":[[2,-3],[1e-45,0]]},"
        "{\"name\":\"clicked\",\"shape\":[2,-1],\"datatype\":\"INT64\",\"data\":[[4,5],[999]]}]}",
    };
    (void)state;
    for (int i = 0; i < 3; i++) {
        peri__serve_batch b;
        peri__serve_question q;
        assert_ok(peri__serve_batch_init(&b, &facts));
        for (int k = 0; k < 2; k++) {
            assert_ok(read_into(&b, &strict, i == 2, bodies[i], &q));
            assert_int_equal(q.form, i);
            assert_int_equal(q.first, 2 * k);
            assert_int_equal(q.samples, 2);
            assert_true(b.columns[0].numbers[2 * k] == 0.1f && b.columns[0].numbers[2 * k + 1] == 3);
            assert_true(b.columns[1].numbers[4 * k + 1] == -3 && b.columns[1].numbers[4 * k + 2] == 1e-45f);
            assert_int_equal(b.columns[2].offsets[2 * k + 1], 3 * k + 2);
            assert_int_equal(b.columns[2].offsets[2 * k + 2], 3 * k + 3);
            assert_int_equal(b.columns[2].ids[3 * k + 2], 999);
            assert_true((uint64_t)b.columns[3].ids[k] == UINT64_MAX);
            assert_int_equal(b.columns[3].offsets[2 * k + 2], k + 1);
        }
        assert_int_equal(b.problems[3][PERI__SERVE_EMPTY], 2);
        assert_true(q.wanted[0] && q.wanted[1] == (i < 2));
        peri__serve_batch_fini(&b);
    }
}

static void names_what_does_not_fit(void **state)
{
    static const struct {
        const char *body, *part;
    } cases[] = {
        {"", "an object"},
        {"[]", "an object"},
        {"{}", "instances or inputs"},
        {"{\"instances\":[{}]}", "feature 'age' is missing"},
        {ROW("") "x", "something follows"},
        {"{\"instance\":[]}", "'instance' is no key"},
        {ROW(",\"age\":2"), "feature 'age' is there twice"},
        {ROW(",\"agee\":2"), "no feature 'agee'; it has age, point, clicked, user, shown"},
        {"{\"instances\":[{\"age\":NaN}]}", "feature 'age', sample 0"},
        {"{\"instances\":[{\"age\":-Infinity}]}", "feature 'age', sample 0: a number is wanted, and NaN"},
        {"{\"instances\":[{\"clicked\":[1,-Infinity]}]}", "feature 'clicked', sample 0: an id is wanted, and NaN"},
        {"{\"instances\":[{\"user\":-Infinity}]}", "feature 'user', sample 0: an id or a list of ids is wanted, and"},
        {"{\"instances\":[{\"point\":-1}]}", "-1, wanted: a list of numbers"},
        {"{\"instances\":[{\"age\":1e39}]}", "1e39 is too large for f32"},
        {"{\"instances\":[{\"age\":null}]}", "null, wanted: a number"},
        {"{\"instances\":[{\"age\":\"3\"}]}", "wanted: a number"},
        {"{\"instances\":[{\"age\":0x10}]}", "a comma or } is wanted"},
        {"{\"instances\":[{\"age\":[1,2]}]}", "2 numbers, wanted: 1"},
        {"{\"instances\":[{\"age\":01}]}", "a value is wanted"},
        {"{\"instances\":[{\"point\":[1]}]}", "1 numbers, wanted: 2"},
        {"{\"instances\":[{\"point\":1}]}", "a list of numbers"},
        {"{\"instances\":[{\"clicked\":1000}]}", "id 1000, allowed: 0 to 999"},
        {"{\"instances\":[{\"clicked\":[-1]}]}", "id -1, allowed"},
        {"{\"instances\":[{\"clicked\":[1.0]}]}", "a whole number"},
        {"{\"instances\":[{\"clicked\":[1e2]}]}", "a whole number"},
        {"{\"instances\":[{\"clicked\":[\"01\"]}]}", "a whole number"},
        {"{\"instances\":[{\"clicked\":[\"\"]}]}", "a whole number"},
        {"{\"instances\":[{\"user\":18446744073709551616}]}", "to 18446744073709551615"},
        {"{\"instances\":[{\"user\":[[1]]}]}", "wanted: an id"},
        {"{\"instances\":[{\"user\":true}]}", "wanted: an id"},
        {"{\"inputs\":{\"age\":[1,2],\"point\":[[1,2]],\"clicked\":[1],\"user\":[1]}}",
         "'point' has 1 samples, 'age' 2"},
        {"{\"inputs\":{\"age\":[1],\"age\":[1]}}", "'age' is there twice"},
        {"{\"inputs\":{},\"instances\":[]}", "missing"},
        {"{\"instances\":[{\"age\":[[[[1]]]]}]}", "wanted: a number"},
        {ROW("") "\n\n,", "something follows"},
        {"{\"signature_name\":\"x\"}", "allowed: serving_default"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) refuses(&strict, false, cases[i].body, cases[i].part);
    char *deep = malloc(200001);
    memset(deep, '[', 200000);
    deep[200000] = 0;
    memcpy(deep, "{\"instances\":[{\"age\":", 21);
    refuses(&strict, false, deep, "nested too deep");
    free(deep);
}

static void names_what_does_not_fit_in_v2(void **state)
{
    static const struct {
        const char *body, *part;
    } cases[] = {
        {"{}", "a request has inputs"},
        {"{\"inputs\":[],\"inputs\":[]}", "'inputs' is there twice"},
        {V2(""), "'clicked' is missing"},
        {"{\"inputs\":[],\"x\":1}", "'x' is no key"},
        {"{\"id\":\"a\xc3\xa9\xed\xa0\x80\",\"inputs\":[]}", "id is not UTF-8"}, /* half a pair, as UTF-8 */
        {"{\"id\":\"a\xc3\xa9\",\"inputs\":[]}", "is missing"},
        {V2(",{\"name\":\"clicked\"}"), "name, shape and datatype"},
        {V2("," T("clicked", "[1]", "FP32", "[1]")), "datatype FP32"},
        {V2("," T("clicked", "[1]", "INT9", "[1]")), "datatype: allowed"},
        {V2("," T("clicked", "[2]", "INT64", "[1]")), "1 values, wanted: 2"},
        {V2("," T("clicked", "[1]", "INT64", "[1,2]")), "more values"},
        {V2("," T("clicked", "[1,2]", "INT64", "[[1,2,3]]")), "3 ids, wanted: 2"},
        {V2("," T("clicked", "[2,2]", "INT64", "[[1,2,3],[4]]")), "3 ids, wanted: 2"},
        {V2("," T("clicked", "[2,-1]", "INT64", "[[1,2]]")), "1 samples, and its shape says 2"},
        {V2("," T("clicked", "[1,-1]", "INT64", "[1,2]")), "wanted: shape"},
        {V2("," T("clicked", "[2,-1]", "INT64", "[[1,2],[3]]")), "'clicked' has 2 samples, 'age' 1"},
        {V2("," T("clicked", "[2]", "INT64", "[1,2]") "," T("clicked.lengths", "[1]", "INT64", "[3]")),
         "add up to the 2 values"},
        {V2("," T("clicked", "[2]", "INT64", "[1,2]") "," T("clicked.lengths", "[2]", "INT64", "[3,-1]")),
         "add up to the 2 values"},
        {V2("," T("clicked.lengths", "[1]", "INT64", "[0]")), "'clicked' is missing, and its lengths are there"},
        {V2("," T("age.lengths", "[1]", "INT64", "[0]")), "no feature 'age.lengths'"},
        {V2("," T("age", "[1]", "FP32", "[1]")), "twice"},
        {V2("," T("clicked", "[101]", "INT64", "[]")), "more than 100 samples"},
        {V2("," T("clicked", "[1]", "INT64", "3")), "a list"},
        {V2("," T("clicked", "[99999999999]", "INT64", "[]")), "shape is out of range"},
        {V2(",{\"name\":\"clicked\",\"shape\":[1],\"datatype\":\"INT64\",\"parameters\":{\"binary_data_size\":8}}"),
         "0 are left"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) refuses(&strict, true, cases[i].body, cases[i].part);
}

static void does_what_the_model_says_about_the_rest(void **state)
{
    peri__serve_batch b;
    peri__serve_question q;
    (void)state;
    assert_ok(peri__serve_batch_init(&b, &facts));
    assert_ok(
        read_into(&b, &strict, false,
                  "{\"instances\":[{\"age\":1,\"point\":[2,3],\"clicked\":[],\"user\":-1,\"shown\":[10,7,-1,"
                  "18446744073709551615],"
                  "\"shown.weights\":[1,2,3,4]},{\"age\":1,\"point\":[2,3],\"clicked\":[],\"user\":1,\"hour\":[3]}]}",
                  &q));
    assert_int_equal(q.samples, 2);
    assert_int_equal(b.columns[4].n_values, 4); /* ids without a row stay, for weights to belong to their ids */
    assert_int_equal(b.columns[4].offsets[2], 4);
    assert_int_equal(b.columns[4].ids[1], 7);
    assert_int_equal(b.columns[3].ids[0], -1);
    assert_true(b.columns[6].numbers[0] == 0.25f && b.columns[6].numbers[1] == 3);
    assert_int_equal(b.problems[4][PERI__SERVE_RANGE], 3);
    assert_int_equal(b.problems[4][PERI__SERVE_MISSING], 1);
    assert_int_equal(b.problems[6][PERI__SERVE_MISSING], 1);
    assert_int_equal(b.problems[2][PERI__SERVE_EMPTY], 2);
    peri__serve_batch_fini(&b);
    refuses(&strict, false, ROW(",\"shown\":[1,2],\"shown.weights\":[1]"),
            "1 numbers, wanted: 2, one for each of 'shown'");
    refuses(&strict, false, ROW(",\"shown.weights\":1"), "1 numbers, wanted: 0, one for each of 'shown'");
    refuses(&strict, false, ROW(",\"shown\":[99999999999999999999]"), "allowed: 0 to 9");
    refuses(&strict, false, ROW(",\"hour\":NaN"), "NaN"); /* JSON has no word for it */
    refuses(&strict, false, "{\"instances\":[{\"user\":-9223372036854775809}]}",
            "allowed: -9223372036854775808 to 18446744073709551615");
}

static void reads_binary_tensors(void **state)
{
    static const char json[] =
        "{\"inputs\":[{\"name\":\"age\",\"shape\":[2],\"datatype\":\"FP32\",\"parameters\":{\"binary_data_size\":8}},"
        "{\"name\":\"clicked\",\"shape\":[3],\"datatype\":\"INT32\",\"parameters\":{\"binary_data_size\":12}},"
        "{\"name\":\"clicked.lengths\",\"shape\":[2],\"datatype\":\"INT64\",\"parameters\":{\"binary_data_size\":16}},"
        "{\"name\":\"point\",\"shape\":[2,2],\"datatype\":\"FP64\",\"parameters\":{\"binary_data_size\":32}},"
        "{\"name\":\"user\",\"shape\":[2,1],\"datatype\":\"UINT64\",\"parameters\":{\"binary_data_size\":16}}]}";
    struct __attribute__((packed)) {
        char json[sizeof json - 1];
        float age[2];
        int32_t clicked[3];
        int64_t lengths[2];
        double point[4];
        uint64_t user[2];
    } body = {
        .age = {0.5f, 2}, .clicked = {1, 2, 3}, .lengths = {0, 3}, .point = {1, 2, 3, 4}, .user = {UINT64_MAX, 5}};
    peri__serve_batch b;
    peri__serve_question q;
    (void)state;
    memcpy(body.json, json, sizeof body.json);
    assert_ok(peri__serve_batch_init(&b, &facts));
    assert_ok(peri__serve_read(&b, &strict, true, (char *)&body, sizeof body, sizeof body.json, &q));
    assert_int_equal(q.samples, 2);
    assert_int_equal(b.columns[2].offsets[1], 0);
    assert_int_equal(b.columns[2].ids[2], 3);
    assert_true(b.columns[1].numbers[3] == 4 && (uint64_t)b.columns[3].ids[0] == UINT64_MAX);
    assert_fails(peri__serve_read(&b, &strict, true, (char *)&body, sizeof body - 1, sizeof body.json, &q),
                 PERI_EFORMAT, "are left");
    assert_fails(peri__serve_read(&b, &strict, true, (char *)&body, sizeof body, sizeof body + 1, &q), PERI_EFORMAT,
                 "the body has");
    body.clicked[1] = -2;
    assert_fails(peri__serve_read(&b, &strict, true, (char *)&body, sizeof body, sizeof body.json, &q), PERI_EFORMAT,
                 "id -2, allowed");
    body.clicked[1] = 2;
    body.age[1] = (float)strtod("nan", NULL);
    assert_fails(peri__serve_read(&b, &strict, true, (char *)&body, sizeof body, sizeof body.json, &q), PERI_EFORMAT,
                 "is no number");
    assert_int_equal(b.samples, 2);
    assert_int_equal(b.problems[0][PERI__SERVE_NAN], 1);
    peri__serve_batch_fini(&b);
}

/** Binary BYTES are texts with four bytes of length in front of each. Any text that is no id, and any end but that of
 *  the last text, is an error. */
static void reads_binary_texts(void **state)
{
    static const struct {
        const char *texts;
        size_t bytes;
        const char *why; /* NULL: ids 2^64 - 1 and 5 */
    } cases[] = {
        {"\24\0\0\0"
         "18446744073709551615"
         "\1\0\0\0"
         "5",
         29, NULL},
        {"\24\0\0\0"
         "18446744073709551615"
         "\2\0\0\0"
         "5",
         29, "in the middle of a text"},
        {"\24\0\0\0"
         "18446744073709551615"
         "\1\0\0",
         27, "in the middle of a text"},
        {"\24\0\0\0"
         "18446744073709551615"
         "\1\0\0\0"
         "56",
         30, "more values than the 2"},
        {"\24\0\0\0"
         "18446744073709551615"
         "\377\377\377\377"
         "5",
         29, "in the middle of a text"},
        {"\24\0\0\0"
         "18446744073709551616"
         "\1\0\0\0"
         "5",
         29, "id 18446744073709551616, allowed"},
        {"\24\0\0\0"
         "18446744073709551615"
         "\0\0\0\0",
         28, "'', wanted: an id"},
        {"\24\0\0\0"
         "18446744073709551615"
         "\2\0\0\0"
         "5\0",
         30, "'5', wanted: an id"},
    };
    char body[1000];
    peri__serve_batch b;
    peri__serve_question q;
    (void)state;
    assert_ok(peri__serve_batch_init(&b, &facts));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int json = snprintf(
            body, sizeof body,
            "{\"inputs\":[" T("age", "[2]", "FP32", "[1,2]") "," T("point", "[2,2]", "FP32", "[1,2,3,4]") "," T(
                "clicked", "[2]", "INT64",
                "[1,2]") ",{\"name\":\"user\",\"shape\":[2],"
                         "\"datatype\":\"BYTES\",\"parameters\":{\"binary_data_size\":%zu}}]}",
            cases[i].bytes);
        memcpy(body + json, cases[i].texts, cases[i].bytes);
        const peri_status status = peri__serve_read(&b, &strict, true, body, json + (int64_t)cases[i].bytes, json, &q);
        if (cases[i].why) assert_fails(status, PERI_EFORMAT, cases[i].why);
        else assert_ok(status);
    }
    assert_int_equal(b.samples, 2);
    assert_true((uint64_t)b.columns[3].ids[0] == UINT64_MAX && b.columns[3].ids[1] == 5);
    peri__serve_batch_fini(&b);
}

/** Numbers of one to nine digits: those of the C library, bit for bit. */
static void reads_decimal_numbers(void **state)
{
    peri__serve_batch b;
    peri__serve_question q;
    uint32_t bits = 1;
    (void)state;
    assert_ok(peri__serve_batch_init(&b, &facts));
    for (int i = 0; i < 20000; i++) {
        char number[32], body[256];
        bits = bits * 1664525u + 1013904223u;
        const int behind = (int)(bits >> 8) % 6;
        const uint32_t whole = (bits >> 12) % 10000, part = (bits >> 3) % 100000;
        snprintf(number, sizeof number, behind ? "%s%u.%0*u" : "%s%u", bits >> 31 ? "-" : "", whole, behind, part);
        snprintf(body, sizeof body,
                 "{\"instances\":[{\"age\":%s,\"point\":[2,3],\"clicked\":[],\"user\":1}]}", number);
        peri__serve_batch_clear(&b);
        assert_ok(read_into(&b, &strict, false, body, &q));
        const float wanted = strtof(number, NULL);
        assert_memory_equal(&b.columns[0].numbers[0], &wanted, sizeof wanted);
    }
    peri__serve_batch_fini(&b);
}

static void prints_shortest_numbers(void **state)
{
    static const struct {
        float x;
        const char *text;
    } cases[] = {{0.1f, "0.1"},
                 {1, "1"},
                 {-0.0f, "-0.0"},
                 {16777216, "16777216"},
                 {-1e6f, "-1000000"},
                 {5354470, "5354470"},
                 {16777220, "1.677722e+07"},
                 {3.4028234663852886e38f, "3.4028235e+38"},
                 {1e-45f, "1e-45"},
                 {0.3f, "0.3"},
                 {1.1754943508222875e-38f, "1.1754944e-38"}};
    char text[32];
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        peri__serve_print(text, cases[i].x);
        assert_string_equal(text, cases[i].text);
    }
    uint32_t bits = 12345;
    for (int i = 0; i < 20000; i++) {
        float x;
        bits = bits * 1664525u + 1013904223u;
        memcpy(&x, &bits, 4);
        if (x != x || x - x != 0) continue;
        peri__serve_print(text, x);
        assert_true(strtof(text, NULL) == x);
    }
    for (int i = 0; i < 20000; i++) { /* from 5e-5 to 2e5, half of them powers of two and next to them */
        const uint32_t from = 0x3851b717, to = 0x48435000;
        float x;
        bits = bits * 1664525u + 1013904223u;
        uint32_t at = from + (bits >> 5) % (to - from);
        if (i % 2) at = (at & 0xff800000u) + (bits >> 5) % 9 - 4;
        memcpy(&x, &at, 4);
        if (x == floorf(x)) continue;
        char wanted[32];
        for (int digits = 1; digits <= 9; digits++) {
            snprintf(wanted, sizeof wanted, "%.*g", digits, (double)x);
            if (strtof(wanted, NULL) == x) break;
        }
        const int length = peri__serve_print(text, x);
        assert_int_equal(length, (int)strlen(text));
        if (!strchr(wanted, 'e')) assert_string_equal(text, wanted);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_three_forms_alike),       cmocka_unit_test(names_what_does_not_fit),
        cmocka_unit_test(names_what_does_not_fit_in_v2), cmocka_unit_test(does_what_the_model_says_about_the_rest),
        cmocka_unit_test(reads_binary_tensors),          cmocka_unit_test(reads_binary_texts),
        cmocka_unit_test(reads_decimal_numbers),
        cmocka_unit_test(prints_shortest_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
