/* SPDX-License-Identifier: Apache-2.0
 *
 * kjt.c: any lengths, offsets, keys and strides at the constructors of jagged containers: an error with a message, or a
 * container whose numbers add up and whose operations work. The bytes are read as small choices; about half of all
 * inputs start as well-formed ones and are spoilt in a few places.
 */
#include <perilune/perilune.h>

#include "choices.h"

#include <stdlib.h>
#include <string.h>

/* -- choices ------------------------------------------------------------------------------------------------------- */

static int64_t extreme(void)
{
    static const int64_t values[] = {
        0, -1, 1, 2, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, INT64_C(1) << 31, INT64_C(1) << 50, -7, 100};
    return values[pick(12)];
}

enum { MOST = 64 };

static int32_t int_dtype(void) { return pick(3) ? PERI_I64 : PERI_I32; }

/** A tensor of @n numbers, in [n] or now and then in a wrong shape or dtype. */
static peri_tensor *tensor_of(peri_device *device, const int64_t *numbers, int64_t n, int32_t dtype)
{
    peri_tensor *wide = NULL, *t = NULL;
    int64_t shape[2] = {n, 1};
    if (pick(40) == 39) dtype = PERI_F32;
    require(peri_tensor_new(device, PERI_I64, pick(60) == 59 ? 2 : 1, shape, &wide) == PERI_OK, "a tensor");
    require(peri_tensor_write(wide, numbers, 8 * n) == PERI_OK, "a write");
    require(peri_tensor_to(wide, dtype, NULL, &t) == PERI_OK, "a cast");
    peri_tensor_release(wide);
    return t;
}

/* -- inputs -------------------------------------------------------------------------------------------------------- */

typedef struct input {
    peri_kjt_config args;
    int64_t strides[MOST];
} input;

static peri_keys *random_keys(void)
{
    static const char *const names[] = {"a", "b", "c", "long name with spaces", "d", "a", "e"};
    const char *list[4];
    int32_t n = (int32_t)pick(5);
    int64_t first = pick(4);
    for (int32_t i = 0; i < n; i++) list[i] = names[pick(30) == 29 ? 5 : (first + i) % 5];
    peri_keys *keys = NULL;
    require(peri_keys_new(list, n, &keys) == PERI_OK, "keys");
    return keys;
}

/** Spoil some of n numbers. */
static void spoil(int64_t *numbers, int64_t n)
{
    for (int64_t k = pick(4); k > 0 && n > 0; k--) numbers[pick(n)] = extreme();
}

static void make_input(input *in, peri_device *device)
{
    int64_t lengths[MOST], offsets[MOST + 1] = {0}, values[4 * MOST], bags;
    bool bad = pick(2);
    *in = (input){.args = {.size = sizeof in->args, .stride = pick(4) ? 0 : pick(9) - 2, .keys = random_keys()}};
    int64_t keys = peri_keys_count(in->args.keys), batch = pick(9);
    bags = bad && pick(4) == 0 ? pick(MOST) : keys * batch;
    if (bags > MOST) bags = MOST;
    if (pick(3) == 0) { /* a variable batch */
        int32_t ranks = (int32_t)pick(4) + (bad && pick(8) == 0 ? -1 : 1);
        int64_t sum = 0;
        for (int64_t i = 0; i < keys * (ranks > 0 ? ranks : 0) && i < MOST; i++) sum += in->strides[i] = pick(4);
        if (bad) spoil(in->strides, keys * ranks < MOST ? keys * (ranks > 0 ? ranks : 0) : MOST);
        else bags = sum > MOST ? MOST : sum;
        in->args.ranks = ranks;
        in->args.stride_per_key_per_rank = in->strides;
    }
    for (int64_t i = 0; i < bags; i++) {
        lengths[i] = pick(4);
        offsets[i + 1] = offsets[i] + lengths[i];
    }
    int64_t n = offsets[bags];
    if (bad && pick(3) == 0) n = pick(3 * MOST);
    for (int64_t i = 0; i < n; i++) values[i] = pick(256);
    if (bad) spoil(lengths, bags);
    if (bad) spoil(offsets, bags + 1);
    int64_t which = pick(8);
    if (which != 6) in->args.lengths = tensor_of(device, lengths, bags - (bad && bags && pick(16) == 0), int_dtype());
    if (which >= 5) in->args.offsets = tensor_of(device, offsets, bags + 1 - (bad && pick(16) == 0), int_dtype());
    in->args.values = tensor_of(device, values, n, int_dtype());
    if (pick(3) == 0) {
        peri_tensor *weights = tensor_of(device, values, n - (bad && n && pick(8) == 0), PERI_I64);
        require(peri_tensor_to(weights, pick(5) ? PERI_F32 : PERI_I64, NULL, &in->args.weights) == PERI_OK, "weights");
        peri_tensor_release(weights);
    }
    if (pick(6) == 0) {
        in->args.inverse_keys = random_keys();
        int64_t rows = peri_keys_count(in->args.inverse_keys), shape[2] = {rows, pick(5)};
        require(peri_tensor_full(device, PERI_I64, 2, shape, (double)pick(3), &in->args.inverse_indices) == PERI_OK,
                "inverse indices");
    }
}

static void drop_input(input *in)
{
    peri_keys_release(in->args.keys);
    peri_keys_release(in->args.inverse_keys);
    peri_tensor_release(in->args.values);
    peri_tensor_release(in->args.weights);
    peri_tensor_release(in->args.lengths);
    peri_tensor_release(in->args.offsets);
    peri_tensor_release(in->args.inverse_indices);
}

/* -- what must hold ------------------------------------------------------------------------------------------------ */

static void check_tensor(peri_tensor *t)
{
    peri_tensor_info d = {.size = sizeof d};
    peri_tensor_describe(t, &d);
    void *host = malloc((size_t)(d.numel * peri_dtype_size(d.dtype) + 1));
    require(host && peri_tensor_read(t, host, d.numel * peri_dtype_size(d.dtype)) == PERI_OK, "a read");
    free(host);
    peri_tensor_release(t);
}

static void check_sums(peri_kjt *k)
{
    const int64_t *length = NULL, *offset = NULL, *strides = peri_kjt_stride_per_key(k),
                  *bags = peri_kjt_lengths_offset_per_key(k);
    peri_kjt_info d = {.size = sizeof d};
    peri_tensor *t = NULL;
    peri_kjt_describe(k, &d);
    require(peri_kjt_length_per_key(k, &length) == PERI_OK && peri_kjt_offset_per_key(k, &offset) == PERI_OK,
            "sizes of a good kjt");
    for (int32_t i = 0; i < d.keys; i++) {
        require(length[i] >= 0 && offset[i + 1] == offset[i] + length[i], "offset_per_key");
        require(strides[i] >= 0 && bags[i + 1] == bags[i] + strides[i], "lengths_offset_per_key");
    }
    require(offset[d.keys] == d.values && bags[d.keys] == d.bags, "totals");
    require(peri_kjt_lengths(k, &t) == PERI_OK, "lengths");
    check_tensor(t);
    require(peri_kjt_offsets(k, &t) == PERI_OK, "offsets");
    check_tensor(t);
    peri_kjt_release(k);
}

/** Operations on a well-formed kjt must work, and give well-formed ones. */
static void operate(peri_kjt *k)
{
    peri_kjt_info d = {.size = sizeof d};
    peri_kjt *out = NULL, *parts[5];
    peri_jt *jt = NULL;
    peri_tensor *t = NULL;
    int32_t index[6], n = (int32_t)pick(6), segments[2];
    int64_t blocks[4];
    peri_kjt_describe(k, &d);
    for (int32_t i = 0; i < n; i++) index[i] = (int32_t)pick(d.keys);
    if (d.keys == 0) n = 0;
    require(peri_kjt_permute(k, index, n, &out) == PERI_OK, "permute");
    check_sums(out);
    segments[0] = (int32_t)pick(d.keys + 1);
    segments[1] = d.keys - segments[0];
    require(peri_kjt_split(k, segments, 2, parts) == PERI_OK, "split");
    require(peri_kjt_concat(parts, 2, &out) == PERI_OK, "concat");
    bool same = false;
    require(d.weighted || d.lengths_dtype != PERI_I64 || peri_kjt_equal(out, k, &same) == PERI_OK, "equal");
    check_sums(out);
    check_sums(parts[0]);
    check_sums(parts[1]);
    if (d.keys > 0) {
        require(peri_kjt_get(k, (int32_t)pick(d.keys), &jt) == PERI_OK, "get");
        require(peri_jt_to_padded_dense(jt, pick(5) - 1, 1, false, &t) == PERI_OK, "to padded");
        check_tensor(t);
        peri_jt_release(jt);
    }
    peri_bucket_args b = {
        .buckets = (int32_t)pick(5) + 1, .n_features = d.keys, .block_sizes = blocks, .sequence = true};
    for (int32_t i = 0; i < d.keys; i++) blocks[i] = pick(100);
    peri_tensor_info v = {.size = sizeof v};
    require(peri_kjt_values(k, &t) == PERI_OK, "values");
    peri_tensor_describe(t, &v);
    peri_tensor_release(t);
    if (v.ndim == 1 && v.dtype != PERI_F32) {
        require(peri_kjt_bucketize(k, &b, &out, &t) == PERI_OK, "bucketize");
        check_tensor(t);
        check_sums(out);
    }
}

/** Received buffers with the same numbers. */
static void receive(const input *in)
{
    int64_t strides[4];
    for (int i = 0; i < 4; i++) strides[i] = pick(5) == 4 ? extreme() : pick(4);
    peri_kjt_dist_args a = {.keys = in->args.keys,
                            .lengths = in->args.lengths,
                            .values = in->args.values,
                            .weights = in->args.weights,
                            .stride_per_rank = strides,
                            .ranks = (int32_t)pick(5),
                            .stagger = (int32_t)pick(3) + 1};
    peri_kjt *k = NULL;
    if (peri_kjt_dist_init(&a, &k) < 0) return;
    peri_tensor *t = NULL; /* also before anybody has looked at the lengths: the values are in bounds whatever those
                              say */
    require(peri_kjt_values(k, &t) == PERI_OK, "received values");
    check_tensor(t);
    if (peri_kjt_sync(k) == PERI_OK) check_sums(k);
    else peri_kjt_release(k);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    bytes = data;
    left = size;
    int64_t before = peri_mem_objects();
    peri_device *device = NULL;
    require(peri_device_get(pick(4) ? "cpu" : "opaque", &device) == PERI_OK, "a device");
    input in;
    make_input(&in, device);
    peri_kjt *k = NULL;
    peri_error_clear();
    peri_status status = peri_kjt_new(&in.args, &k);
    if (status >= 0) {
        if (pick(2)) { /* derived before anything was checked */
            peri_tensor *t = NULL;
            require(peri_kjt_offsets(k, &t) == PERI_OK, "early offsets");
            peri_tensor_release(t);
        }
        status = peri_kjt_sync(k);
        if (status >= 0) operate(k);
    }
    if (status < 0) require(strlen(peri_error_message()) > 10, "an error without a message");
    peri_kjt_release(k);
    if (in.args.lengths) receive(&in);
    drop_input(&in);
    require(peri_mem_objects() == before, "something was not released");
    return 0;
}
