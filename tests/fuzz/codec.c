/* SPDX-License-Identifier: Apache-2.0
 *
 * codec.c: any parameters and splits at the codecs: an error with a message, or a codec that decodes any bytes to as
 * many numbers as the splits say, and whose own messages come back as numbers again.
 *
 * inputs: 500000
 */
#include <perilune/perilune.h>

#include "choices.h"

#include <stdlib.h>
#include <string.h>

static int64_t odd(void)
{
    static const int64_t values[] = {0, -1, 1, INT32_MAX, INT64_MAX, INT64_MIN, INT64_C(1) << 61, 33, -7, 6};
    return values[pick(10)];
}

enum { MOST = 5 };

/** A tensor of bytes that repeat the rest of the input. */
static peri_tensor *message(peri_device *device, int32_t dtype, int64_t n)
{
    peri_tensor *t = NULL;
    int64_t size = n * peri_dtype_size(dtype);
    uint8_t *host = malloc((size_t)size + 1);
    require(host && peri_tensor_new(device, dtype, 1, &n, &t) == PERI_OK, "a tensor");
    for (int64_t i = 0; i < size; i++) host[i] = left ? bytes[(size_t)i % left] : 0x7f;
    require(peri_tensor_write(t, host, size) == PERI_OK, "a write");
    free(host);
    return t;
}

static int64_t numel(const peri_tensor *t)
{
    peri_tensor_info desc = {.size = sizeof desc};
    peri_tensor_describe(t, &desc);
    return desc.numel;
}

static void both_ways(peri_codec *codec, peri_codec_context *context, peri_device *device, const int64_t *splits,
                      int32_t n)
{
    int64_t numbers = 0, wire = 0;
    for (int32_t i = 0; i < n; i++) {
        int64_t taken = peri_codec_context_wire_splits(context)[i];
        require(taken == peri_codec_size(codec, splits[i]), "sizes agree");
        numbers += splits[i];
        wire += taken;
    }
    if (numbers > 1 << 12) return;
    peri_tensor *in = message(device, peri_codec_wire_dtype(codec), wire), *x = NULL, *again = NULL, *none = NULL;
    require(peri_codec_decode(context, in, &x) == PERI_OK && numel(x) == numbers, "any bytes decode");
    require(peri_codec_encode(context, x, &again) == PERI_OK && numel(again) == wire, "what was decoded encodes");
    peri_tensor *bad = message(device, peri_codec_wire_dtype(codec), wire + 1);
    require(peri_codec_decode(context, bad, &none) == PERI_EINVAL && !none, "a message of the wrong size is refused");
    peri_tensor_release(bad);
    peri_tensor_release(again);
    peri_tensor_release(x);
    peri_tensor_release(in);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    peri_device *device;
    bytes = data;
    left = size;
    require(peri_device_get("cpu", &device) == PERI_OK, "the device");
    int64_t objects = peri_mem_objects(), splits[MOST];
    peri_codec_config config = {
        .size = sizeof config, .format = (int32_t)pick(PERI_CODEC_COUNT), .seed = (uint64_t)pick(256)};
    if (pick(4) == 0) config.format = (int32_t)odd();
    if (pick(2)) config.rounding = (int32_t)pick(6);
    if (pick(2)) config.row_dim = pick(4) ? pick(70) : odd();
    if (pick(4) == 0) config.loss_scale = (double)pick(200) - 20;
    if (pick(4) == 0) config.exponent_bits = (int32_t)pick(8);
    if (pick(4) == 0) config.exponent_bias = (int32_t)pick(40) - 2;
    int32_t n = (int32_t)pick(MOST + 1);
    for (int32_t i = 0; i < n; i++) splits[i] = pick(12) ? pick(100) : odd();
    peri_codec *codec = NULL;
    peri_codec_context *context = NULL;
    if (peri_codec_new(&config, &codec) == PERI_OK) {
        if (peri_codec_context_new(codec, splits, n, &context) == PERI_OK) both_ways(codec, context, device, splits, n);
        else require(!context && *peri_error_message(), "a refused context has a message");
    } else {
        require(!codec && *peri_error_message(), "a refused codec has a message");
    }
    peri_codec_context_release(context);
    peri_codec_release(codec);
    require(peri_mem_objects() == objects, "nothing is left behind");
    return 0;
}
