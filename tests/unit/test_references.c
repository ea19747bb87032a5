/* SPDX-License-Identifier: Apache-2.0
 *
 * test_references.c: objects with counted references live as long as one is held, and end with the last; and functions
 * that neither examples nor Lua call do what their headers say.
 */
#include "tests/harness/check.h"

#include <perilune/perilune.h>

static peri_device *cpu(void)
{
    peri_device *device;
    assert_ok(peri_device_get("cpu", &device));
    return device;
}

static peri_tensor *numbers(int32_t dtype, int64_t n, const void *data)
{
    peri_tensor *t;
    assert_ok(peri_tensor_new(cpu(), dtype, 1, &n, &t));
    assert_ok(peri_tensor_write(t, data, n * peri_dtype_size(dtype)));
    return t;
}

/** The counted objects, before and after. */
static int64_t before;
static int begin(void **context) { (void)context, before = peri_mem_objects(); return 0; }
static void all_gone(void) { assert_int_equal(peri_mem_objects(), before); }

/** One more reference, one less: nothing is gone yet. */
#define HOLD(type, x)                                                                                                  \
    do {                                                                                                               \
        const int64_t live = peri_mem_objects();                                                                       \
        peri_##type##_retain(x);                                                                                       \
        peri_##type##_release(x);                                                                                      \
        assert_int_equal(peri_mem_objects(), live);                                                                    \
        peri_##type##_retain(NULL);                                                                                    \
        peri_##type##_release(NULL);                                                                                   \
    } while (0)

static void optimizers(void **context)
{
    (void)context;
    const float one = 1;
    peri_tensor *p = numbers(PERI_F32, 1, &one);
    peri_optim_config args = {.size = sizeof args};
    peri_optim *o;
    assert_ok(peri_tensor_requires_grad_set(p, true));
    assert_ok(peri_optim_default(PERI_OPTIM_ADAGRAD, &args));
    assert_ok(peri_optim_new(&args, &p, 1, &o));
    HOLD(optim, o);
    assert_ok(peri_optim_zero_grad(o));
    peri_optim_release(o);
    peri_tensor_release(p);
    all_gone();
}

static void codecs(void **context)
{
    (void)context;
    const int64_t split = 8;
    const peri_codec_config config = {.size = sizeof config, .format = PERI_CODEC_BF16};
    peri_codec *codec;
    peri_codec_context *c;
    assert_ok(peri_codec_new(&config, &codec));
    assert_ok(peri_codec_context_new(codec, &split, 1, &c));
    HOLD(codec, codec);
    HOLD(codec_context, c);
    peri_codec_release(codec); /* the context holds it */
    peri_codec_context_release(c);
    all_gone();
}

static void maps(void **context)
{
    (void)context;
    const int64_t ids[] = {70, 71, 70};
    const peri_collision_config config = {.size = sizeof config, .name = "t", .rows = 10, .kind = PERI_COLLISION_HASH};
    peri_tensor *in = numbers(PERI_I64, 3, ids), *out;
    peri_collision *c;
    int64_t rows[3];
    assert_ok(peri_collision_new(cpu(), &config, &c));
    HOLD(collision, c);
    assert_int_equal(peri_collision_rows(c), 10);
    assert_int_equal(peri_collision_rows(NULL), 0);
    assert_int_equal(peri_collision_first_row(c), 0);
    assert_ok(peri_collision_remap(c, &in, 1, true, &out));
    assert_ok(peri_tensor_read(out, rows, sizeof rows));
    assert_true(rows[0] == rows[2] && rows[0] != rows[1] && rows[0] >= 0 && rows[0] < peri_collision_rows(c));
    peri_tensor_release(in);
    peri_tensor_release(out);
    peri_collision_release(c);
    all_gone();
}

static void block_lists(void **context)
{
    (void)context;
    const peri_table_config table = {.size = sizeof table, .name = "t", .rows = 4, .cols = 4};
    const peri_tbe_config config = {
        .size = sizeof config, .device = cpu(), .dtype = PERI_F32, .n_tables = 1, .tables = &table};
    const peri_tbe_block block = {.bags = 2, .out_stride = 4, .feature = -1};
    peri_tbe *tbe;
    peri_tbe_blocks *blocks;
    assert_ok(peri_tbe_new(&config, &tbe));
    assert_ok(peri_tbe_blocks_new(tbe, &block, 1, &blocks));
    HOLD(tbe_blocks, blocks);
    peri_tbe_blocks_release(blocks);
    peri_tbe_release(tbe);
    all_gone();
}

static void regroupings(void **context)
{
    (void)context;
    static const char *const names[] = {"a", "b"};
    const float values[] = {1, 2, 3};
    const int64_t lengths[] = {1, 2}, shape[] = {1, 3};
    peri_keys *keys, *group;
    peri_tensor *flat = numbers(PERI_F32, 3, values), *t;
    peri_kt *kt;
    peri_regroup *r;
    assert_ok(peri_keys_new(names, 2, &keys));
    assert_ok(peri_keys_new(names + 1, 1, &group));
    assert_ok(peri_tensor_reshape(flat, 2, shape, &t));
    assert_ok(peri_kt_new(keys, lengths, 1, t, &kt));
    assert_ok(peri_regroup_new(&kt, 1, &group, 1, &r));
    HOLD(regroup, r);
    peri_regroup_release(r);
    peri_kt_release(kt);
    peri_tensor_release(t);
    peri_tensor_release(flat);
    peri_keys_release(keys);
    peri_keys_release(group);
    all_gone();
}

/** A table over one rank: the number of results, and that a group and a module live as long as somebody holds them. */
static void modules(void **context)
{
    (void)context;
    static const char *const features[] = {"f"};
    peri_group *group;
    peri_sharded *s;
    const peri_comm_config world = {.size = sizeof world, .transport = "self", .world_size = 1};
    assert_ok(peri_comm_open(&world, &group));
    HOLD(group, group);
    const peri_sharded_table table = {.size = sizeof table,
                                      .name = "t",
                                      .rows = 4,
                                      .cols = 4,
                                      .features = (int32_t[]){0},
                                      .n_features = 1,
                                      .sharding_type = PERI_TABLE_WISE,
                                      .compute_kernel = PERI_KERNEL_FUSED};
    peri_tbe_optimizer_config sgd = {.size = sizeof sgd};
    assert_ok(peri_tbe_optimizer_default(PERI_TBE_SGD, &sgd));
    const peri_sharded_config config = {.size = sizeof config,
                                        .group = group,
                                        .device = cpu(),
                                        .tables = &table,
                                        .n_tables = 1,
                                        .features = features,
                                        .n_features = 1,
                                        .optimizers = &sgd,
                                        .n_optimizers = 1};
    assert_ok(peri_sharded_new(&config, &s));
    HOLD(sharded, s);
    assert_int_equal(peri_sharded_results(s), 1);
    assert_int_equal(peri_sharded_results(NULL), 0);
    peri_sharded_release(s);
    peri_group_close(group);
    peri_group_release(group);
    all_gone();
}

/** What a batch says of itself comes to the host in two halves, and bad lengths are told by the second. */
static void batches(void **context)
{
    (void)context;
    static const char *const name = "f";
    const int64_t ids[] = {5, 6, 7}, lengths[] = {1, 2}, wrong[] = {1, 9};
    peri_keys *keys;
    assert_ok(peri_keys_new(&name, 1, &keys));
    for (int bad = 0; bad < 2; bad++) {
        peri_kjt_config args = {.size = sizeof args, .keys = keys, .values = numbers(PERI_I64, 3, ids),
                              .lengths = numbers(PERI_I64, 2, bad ? wrong : lengths)};
        peri_kjt *kjt = NULL;
        peri_status status = peri_kjt_new(&args, &kjt); /* on this device it looks at once */
        if (bad) assert_fails(status, PERI_EINVAL, "");
        else assert_ok(status);
        if (!bad) {
            assert_ok(peri_kjt_sync_post(kjt));
            while ((status = peri_kjt_sync_test(kjt)) == PERI_PENDING) continue;
            assert_ok(status);
        }
        peri_kjt_release(kjt);
        peri_tensor_release(args.values);
        peri_tensor_release(args.lengths);
    }
    peri_keys_release(keys);
    all_gone();
}

#define TEST(name) cmocka_unit_test_setup(name, begin)
static const struct CMUnitTest tests[] = {
    TEST(optimizers), TEST(codecs), TEST(maps), TEST(block_lists), TEST(regroupings), TEST(modules), TEST(batches),
};

check_main(tests)
