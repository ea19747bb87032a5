/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange.c: any announcements and any lengths at the receiver of a KeyedJaggedTensor: an error with a message, or a
 * kjt whose numbers add up. About half of all inputs start as well-formed ones and are spoilt in a few places.
 *
 * inputs: 30000
 */
#include "../../runtime/comm/kjt_layout.h"
#include "choices.h"

#include <stdlib.h>

static int64_t extreme(void)
{
    static const int64_t values[] = {
        0, -1, 1, 2, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, INT64_C(1) << 31, INT64_C(1) << 48, -7, 100};
    return values[pick(12)];
}

static void spoil(int64_t *numbers, int64_t n)
{
    for (int64_t k = pick(3); k > 0 && n > 0; k--) numbers[pick(n)] = extreme();
}

enum { RANKS = 4, KEYS = 3, MOST = 256, WIDTH = PERI_ANNOUNCE_WORDS + 2 * KEYS };

/** What would have come: announcements and the lengths of all rows. */
typedef struct message {
    int64_t words[RANKS * WIDTH], lengths[MOST], bags, ids;
    int32_t ranks, rank, keys, stagger;
    bool variable;
} message;

static void make(message *m)
{
    static const int32_t staggers[RANKS + 1][2] = {{1, 1}, {1, 1}, {1, 2}, {1, 3}, {1, 2}};
    *m = (message){.ranks = 1 + (int32_t)pick(RANKS), .keys = (int32_t)pick(KEYS + 1), .variable = pick(2)};
    m->rank = (int32_t)pick(m->ranks);
    m->stagger = staggers[m->ranks][pick(2)];
    for (int32_t r = 0; r < m->ranks; r++) {
        int64_t *at = m->words + r * (PERI_ANNOUNCE_WORDS + 2 * m->keys), batch = pick(5);
        at[PERI_ANNOUNCE_STRIDE] = batch;
        for (int32_t k = 0; k < m->keys; k++) {
            int64_t rows = m->variable ? pick(5) : batch, ids = 0;
            for (int64_t i = 0; i < rows && m->bags < MOST; i++) ids += m->lengths[m->bags++] = pick(4);
            at[PERI_ANNOUNCE_WORDS + 2 * k] = rows;
            at[PERI_ANNOUNCE_WORDS + 2 * k + 1] = ids;
            m->ids += ids;
        }
    }
    if (pick(2)) spoil(m->words, m->ranks * (PERI_ANNOUNCE_WORDS + 2 * m->keys));
    if (pick(2)) spoil(m->lengths, m->bags);
}

static peri_tensor *numbers(peri_device *device, int64_t n, int32_t dtype, const int64_t *from)
{
    peri_tensor *wide = NULL, *t = NULL;
    int64_t *host = malloc(8 * (size_t)n + 8);
    require(host && peri_tensor_new(device, PERI_I64, 1, &n, &wide) == PERI_OK, "a tensor");
    for (int64_t i = 0; i < n; i++) host[i] = from ? from[i] : i;
    require(peri_tensor_write(wide, host, 8 * n) == PERI_OK && peri_tensor_to(wide, dtype, NULL, &t) == PERI_OK,
            "its numbers");
    peri_tensor_release(wide);
    free(host);
    return t;
}

/** Build from what the layout says has come: buffers of the announced sizes, the lengths any. */
static void build(const message *m, const peri__kjt_layout *l, peri_device *device)
{
    bool apart = (m->rank == 0 || m->rank == m->ranks - 1) && pick(2);
    int64_t own_rows = apart ? l->rank_rows[m->rank] : 0, own_ids = apart ? l->rank_ids[m->rank] : 0;
    int64_t own_first[2] = {apart ? pick(3) : -1, apart ? pick(3) : -1};
    bool weighted = pick(2);
    int32_t dtype = pick(2) ? PERI_I64 : PERI_I32;
    if (l->total_rows > MOST || l->total_ids > 1 << 12) return;
    peri_tensor *received[PERI_PARTS] = {0}, *own[PERI_PARTS] = {0};
    received[0] = numbers(device, l->total_rows - own_rows, dtype, m->lengths);
    received[1] = numbers(device, l->total_ids - own_ids, PERI_I64, NULL);
    own[0] = numbers(device, own_rows + (apart ? own_first[0] : 0), dtype, m->lengths);
    own[1] = numbers(device, own_ids + (apart ? own_first[1] : 0), PERI_I64, NULL);
    if (weighted) {
        received[2] = numbers(device, l->total_ids - own_ids, PERI_F32, NULL);
        own[2] = numbers(device, own_ids + (apart ? own_first[1] : 0), PERI_F32, NULL);
    }
    peri_kjt *k = NULL;
    if (peri__kjt_layout_build(l, received, own, own_first, false, &k) == PERI_OK) {
        peri_kjt_info desc = {.size = sizeof desc};
        const int64_t *offsets;
        peri_kjt_describe(k, &desc);
        require(desc.values == l->total_ids && desc.bags == l->total_rows && desc.keys == m->keys, "sizes");
        require(peri_kjt_offset_per_key(k, &offsets) == PERI_OK && offsets[m->keys] == l->total_ids,
                "ids of the keys add up");
        require(peri_kjt_validate(k) == PERI_OK, "the kjt is well formed");
        peri_kjt_release(k);
    } else {
        require(!k && *peri_error_message(), "a refused kjt has a message");
    }
    for (int i = 0; i < PERI_PARTS; i++) {
        peri_tensor_release(received[i]);
        peri_tensor_release(own[i]);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const names[KEYS] = {"a", "b", "long name with spaces"};
    peri_device *device;
    bytes = data;
    left = size;
    require(peri_device_get("cpu", &device) == PERI_OK, "the device");
    int64_t objects = peri_mem_objects();
    message m;
    make(&m);
    peri_keys *keys = NULL;
    peri__kjt_layout *layout = NULL;
    require(peri_keys_new(names, m.keys, &keys) == PERI_OK, "keys");
    /* The announcements in memory of their very size: reading behind them is seen by the address sanitizer. */
    size_t words = (size_t)m.ranks * (size_t)(PERI_ANNOUNCE_WORDS + 2 * m.keys);
    int64_t *exact = malloc(sizeof *exact * words);
    require(exact, "memory");
    memcpy(exact, m.words, sizeof *exact * words);
    if (peri__kjt_layout_new(keys, m.ranks, m.rank, m.stagger, m.variable, exact, &layout) == PERI_OK)
        build(&m, layout, device);
    else require(!layout && *peri_error_message(), "refused announcements have a message");
    free(exact);
    peri__kjt_layout_release(layout);
    peri_keys_release(keys);
    require(peri_mem_objects() == objects, "nothing is left behind");
    return 0;
}
