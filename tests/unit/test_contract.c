/* SPDX-License-Identifier: Apache-2.0
 *
 * test_contract.c: programs that were built with older and with newer headers: structures that begin with their size,
 * and zeros.
 */
#include "tests/harness/check.h"

#include <perilune/perilune.h>
#include <stdlib.h>
#include <string.h>

static peri_device *cpu;

static int open_cpu(void **state)
{
    (void)state;
    return peri_device_get("cpu", &cpu) < 0;
}

static peri_tensor *numbers(int32_t dtype, int64_t n, const void *data)
{
    peri_tensor *t = NULL;
    assert_ok(peri_tensor_new(cpu, dtype, 1, &n, &t));
    assert_ok(peri_tensor_write(t, data, n * peri_dtype_size(dtype)));
    return t;
}

/** Memory of @n bytes; the compiler does not know how many. */
static void *room(size_t n)
{
    volatile size_t bytes = n;
    return malloc(bytes);
}

/** A caller of before: its structure ends with the values. What lies behind is other memory, which nobody may read. */
static void an_older_caller_has_a_shorter_structure(void **state)
{
    (void)state;
    const int64_t ids[4] = {1, 2, 3, 4}, lengths[2] = {1, 3};
    const size_t short_of = offsetof(peri_jt_config, offsets);
    peri_jt_config *args = room(short_of); /* the fence ends it there */
    peri_jt *jt = NULL;
    memset(args, 0, short_of);
    args->size = (int64_t)short_of;
    args->values = numbers(PERI_I64, 4, ids);
    args->lengths = numbers(PERI_I64, 2, lengths);
    assert_ok(peri_jt_new(args, &jt));
    assert_int_equal(peri_jt_bags(jt), 2);
    peri_jt_release(jt);
    peri_tensor_release(args->values);
    peri_tensor_release(args->lengths);
    free(args);
}

/** A caller of later has more; this library can serve it as long as the rest is zero. */
static void a_newer_caller_is_served_or_refused(void **state)
{
    (void)state;
    struct {
        peri_codec_config today;
        int64_t later;
    } config = {.today = {.size = sizeof config, .format = PERI_CODEC_FP16}};
    peri_codec *codec = NULL;
    assert_ok(peri_codec_new(&config.today, &codec));
    peri_codec_release(codec);
    codec = NULL;
    config.later = 1;
    assert_fails(peri_codec_new(&config.today, &codec), PERI_EUNSUPPORTED,
                 "peri_codec_new: a peri_codec_config of 56 bytes says something in byte 48; this library (" );
    assert_null(codec);
}

static void a_structure_without_its_size_is_refused(void **state)
{
    (void)state;
    peri_codec_config config = {.format = PERI_CODEC_FP16};
    peri_codec *codec = NULL;
    peri_tensor_info desc = {0};
    const float one = 1;
    peri_tensor *t = numbers(PERI_F32, 1, &one);
    assert_fails(
        peri_codec_new(&config, &codec), PERI_EINVAL,
        "peri_codec_new: the size of a peri_codec_config is 0: set it to sizeof(peri_codec_config), which is 48 here");
    config.size = -1;
    assert_fails(peri_codec_new(&config, &codec), PERI_EINVAL, "the size of a peri_codec_config is -1");
    config.size = (int64_t)1 << 40;
    assert_fails(peri_codec_new(&config, &codec), PERI_EINVAL, "the size of a peri_codec_config is 1099511627776");
    assert_fails(peri_codec_new(NULL, &codec), PERI_EINVAL, "peri_codec_new: the peri_codec_config is missing");
    assert_fails(peri_tensor_describe(t, &desc), PERI_EINVAL, "the size of a peri_tensor_info is 0");
    assert_fails(peri_tensor_describe(t, NULL), PERI_EINVAL, "the peri_tensor_info is missing");
    assert_fails(peri_tensor_describe(NULL, &desc), PERI_EINVAL, "t is missing");
    peri_tensor_release(t);
}

/** What the library fills in ends where the caller's structure ends; a longer one gets zeros. */
static void what_is_filled_in_has_the_callers_size(void **state)
{
    (void)state;
    const float two[2] = {1, 2};
    peri_tensor *t = numbers(PERI_F32, 2, two);
    const size_t short_of = offsetof(peri_tensor_info, numel);
    peri_tensor_info *old = room(short_of);
    struct {
        peri_tensor_info today;
        int64_t later;
    } new = {.today.size = sizeof new, .later = 7};
    memset(old, 0xee, short_of);
    old->size = (int64_t)short_of;
    assert_ok(peri_tensor_describe(t, old));
    assert_int_equal(old->size, short_of);
    assert_int_equal(old->dtype, PERI_F32);
    assert_int_equal(old->shape[0], 2);
    assert_ok(peri_tensor_describe(t, &new.today));
    assert_int_equal(new.today.numel, 2);
    assert_int_equal(new.later, 0);
    free(old);
    peri_tensor_release(t);
}

/** An array of the caller's has the caller's distances. */
static void arrays_are_as_far_apart_as_the_caller_says(void **state)
{
    (void)state;
    struct later {
        peri_table_config today;
        int64_t more[3];
    } tables[3];
    memset(tables, 0, sizeof tables);
    static const char *const names[3] = {"a", "b", "c"};
    for (int i = 0; i < 3; i++) {
        tables[i].today.size = sizeof tables[0];
        tables[i].today.name = names[i], tables[i].today.rows = 4 + i, tables[i].today.cols = 8;
    }
    peri_tbe_config config = {.size = sizeof config, .device = cpu, .n_tables = 3, .tables = &tables[0].today};
    peri_tbe *tbe = NULL;
    int64_t shape[2];
    assert_ok(peri_tbe_new(&config, &tbe));
    for (int i = 0; i < 3; i++) {
        assert_int_equal(peri_tbe_state_shape(tbe, i, "weight", shape), 2);
        assert_int_equal(shape[0], 4 + i);
    }
    peri_tbe_release(tbe);
    tables[2].more[1] = 5;
    tbe = NULL;
    assert_fails(peri_tbe_new(&config, &tbe), PERI_EUNSUPPORTED, "peri_tbe_new: a peri_table_config of");
    assert_null(tbe);
}

/** All but what cannot be missing is zero: what was a trap once. spec/zeros_spec.lua goes through all structures. */
static void zeros_are_the_defaults(void **state)
{
    (void)state;
    const int64_t ids[3] = {0, 1, 0}, lengths[4] = {1, 1, 0, 1}, offsets[3] = {0, 2, 3}, of_weight[2] = {2, 1};
    const float rows[2] = {10, 20};
    float sums[2];
    peri_tensor_info desc = {.size = sizeof desc};
    peri_tensor *t = NULL;

    /* element types: f32 */
    assert_ok(peri_tensor_new(cpu, 0, 1, of_weight, &t));
    assert_ok(peri_tensor_describe(t, &desc));
    assert_int_equal(desc.dtype, PERI_F32);
    peri_tensor_release(t);

    /* a KeyedJaggedTensor has the stride that its lengths say */
    static const char *const names[2] = {"a", "b"};
    peri_kjt_config kjt_args = {
        .size = sizeof kjt_args, .values = numbers(PERI_I64, 3, ids), .lengths = numbers(PERI_I64, 4, lengths)};
    peri_kjt_info kjt_desc = {.size = sizeof kjt_desc};
    peri_kjt *kjt = NULL;
    assert_ok(peri_keys_new(names, 2, &kjt_args.keys));
    assert_ok(peri_kjt_new(&kjt_args, &kjt));
    assert_ok(peri_kjt_describe(kjt, &kjt_desc));
    assert_int_equal(kjt_desc.stride, 2);
    peri_kjt_release(kjt);
    peri_keys_release(kjt_args.keys);
    peri_tensor_release(kjt_args.values);
    peri_tensor_release(kjt_args.lengths);

    /* no id is padding */
    peri_embedding_bag_args bag = {
        .size = sizeof bag, .ids = numbers(PERI_I64, 3, ids), .offsets = numbers(PERI_I64, 2, offsets)};
    assert_ok(peri_tensor_new(cpu, PERI_F32, 2, of_weight, &bag.weight));
    assert_ok(peri_tensor_write(bag.weight, rows, sizeof rows));
    assert_int_equal(bag.mode, PERI_POOLING_SUM);
    assert_ok(peri_embedding_bag(&bag, &t));
    assert_ok(peri_tensor_read(t, sums, sizeof sums));
    assert_true(sums[0] == 30 && sums[1] == 10);
    peri_tensor_release(t);
    peri_tensor_release(bag.ids);
    peri_tensor_release(bag.offsets);
    peri_tensor_release(bag.weight);

    /* tables of f32 that give f32, and a sharding that puts a table on rank 0 */
    const peri_table_config table = {.size = sizeof table, .name = "t", .rows = 2, .cols = 4};
    peri_tbe_config config = {.size = sizeof config, .device = cpu, .n_tables = 1, .tables = &table};
    peri_tbe_bytes bytes;
    assert_ok(peri_tbe_bytes_of(&config, false, &bytes));
    assert_in_range(bytes.device, 2 * 4 * 4, 2 * 4 * 4 + 64);
    const peri_sharding sharding = {.size = sizeof sharding, .world_size = 3, .rows = 2, .cols = 4};
    peri_shard shard;
    int32_t n = 0;
    assert_ok(peri_sharding_shards(&sharding, &shard, 1, &n));
    assert_int_equal(n, 1);
    assert_int_equal(shard.rank, 0);
    assert_string_equal(peri_sharding_type_name(0), "table_wise");
}

#if PERI_VERSION_MAJOR * 1000 + PERI_VERSION_MINOR < 2
#error "versions can be compared by the preprocessor"
#endif

static void versions_agree(void **state)
{
    (void)state;
    char text[64];
    snprintf(text, sizeof text, "%d.%d.%d", PERI_VERSION_MAJOR, PERI_VERSION_MINOR, PERI_VERSION_PATCH);
    assert_string_equal(peri_version(), text);
    assert_int_equal(peri_abi_version(), PERI_ABI_VERSION);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(an_older_caller_has_a_shorter_structure), cmocka_unit_test(a_newer_caller_is_served_or_refused),
    cmocka_unit_test(a_structure_without_its_size_is_refused), cmocka_unit_test(what_is_filled_in_has_the_callers_size),
    cmocka_unit_test(arrays_are_as_far_apart_as_the_caller_says),
    cmocka_unit_test(zeros_are_the_defaults),
    cmocka_unit_test(versions_agree),
};

int main(void) { return cmocka_run_group_tests(tests, open_cpu, NULL); }
