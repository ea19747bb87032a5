/* SPDX-License-Identifier: Apache-2.0
 *
 * kjt_exchange.c: KeyedJaggedTensors from the ranks that read them to the ranks that look them up.
 *
 * Two phases. One message announces the sizes of all kjts of a call (rows and ids of every key); the tensors of each
 * kjt follow as soon as its receivers know them, whether anybody waits or not. The first and the last rank's own part
 * lies at an end of their tensors: it is left out of the exchange and placed from where it is.
 */
#include "announce.h"
#include "kjt_layout.h"
#include "transfer.h"
#include "../../kernels/route.h"

#include <perilune/exchange.h>

enum { SYNC, ANNOUNCE }; /* phases of sizes */

/** One kjt on its way. */
typedef struct item {
    peri_kjt *kjt;   /* retained */
    peri_keys *keys; /* of the result; retained */
    int32_t *first_key; /* W + 1: first key of each rank */
    int32_t stagger;
    uint64_t identity;
    peri_tensor *tensors[PERI_PARTS]; /* what is sent; NULL weights: none */
    peri__kjt_layout *layout; /* once the announcements are here */
} item;

/** The work of the announcements. */
typedef struct sizes {
    peri_work base;
    int32_t n, phase;
    item *items;
    peri__announce_numbers numbers;
    uint64_t parts;      /* first number of the tensors: PERI_PARTS an item */
    peri__announce *announce;
} sizes;

/** The work of one kjt's tensors. */
typedef struct tensors {
    peri_work base;
    sizes *sizes; /* retained */
    int32_t index;
    bool posted, used, placed; /* placed: the transport puts what comes where it belongs */
    peri__transfer parts[PERI_PARTS];
    int64_t own_first[2]; /* of lengths, of ids: as peri__kjt_layout_runs; -1: the own part is exchanged with the
                             others */
    peri_kjt *result;
} tensors;

static const char name[] = "peri_exchange_kjts";

/* -- announcements ------------------------------------------------------------------------------------------------- */

static int32_t key_count(const item *t, int32_t rank) { return t->first_key[rank + 1] - t->first_key[rank]; }

/** Words that this rank writes for item @t and rank @r; returns the end. */
static int64_t *write_sizes(const item *t, int32_t r, int64_t *at)
{
    peri_kjt *k = t->kjt;
    at[PERI_ANNOUNCE_STRIDE] = k->stride;
    at += PERI_ANNOUNCE_WORDS;
    for (int32_t i = t->first_key[r]; i < t->first_key[r + 1]; i++) {
        *at++ = k->stride_per_key[i];
        *at++ = k->length_per_key[i];
    }
    return at;
}

/** Words for rank @r of item @t. */
static int64_t word_count(const item *t, int32_t r) { return PERI_ANNOUNCE_WORDS + 2 * (int64_t)key_count(t, r); }

static peri_status explain_difference(void *sizes_, int32_t other, const char *texts, const int64_t *bytes)
{
    (void)texts, (void)bytes;
    const sizes *s = sizes_;
    return peri__fail(PERI_EMISMATCH,
                      "%s: rank %d exchanges something else than rank %d: keys, key splits, dtypes, weights, stagger "
                      "and the kind of batch "
                      "must be equal on all ranks",
                      name, other, s->base.group->rank);
}

static peri_status post_sizes(sizes *s)
{
    peri_group *g = s->base.group;
    PERI__SCRATCH int64_t *out = peri__alloc_zero(sizeof *out * (size_t)g->size);
    peri__announce_part all = {.agreement = {.ctx = s, .differ = explain_difference}, .out = out};
    if (!out) return PERI_ENOMEM;
    for (int32_t i = 0; i < s->n; i++) {
        all.agreement.hash = peri__hash_mix(all.agreement.hash, s->items[i].identity);
        for (int32_t r = 0; r < g->size; r++) out[r] += word_count(&s->items[i], r);
    }
    all.in = out[g->rank];
    PERI_TRY(peri__announce_new(name, g, &all, 1, &s->numbers, all.agreement.hash, &s->announce));
    for (int32_t r = 0; r < g->size; r++) {
        int64_t *at = peri__announce_to(s->announce, 0, r);
        for (int32_t i = 0; i < s->n; i++) at = write_sizes(&s->items[i], r, at);
    }
    return peri__announce_post(s->announce);
}

/** Deal the announcements to the items. */
static peri_status read_sizes(sizes *s)
{
    peri_group *g = s->base.group;
    int64_t most = 0, before = 0;
    for (int32_t i = 0; i < s->n; i++) most = peri__max(most, word_count(&s->items[i], g->rank));
    PERI__SCRATCH int64_t *words = peri__alloc(sizeof *words * (size_t)(g->size * most));
    if (!words) return PERI_ENOMEM;
    for (int32_t i = 0; i < s->n; i++) {
        item *t = &s->items[i];
        int64_t width = word_count(t, g->rank);
        for (int32_t r = 0; r < g->size; r++)
            memcpy(words + r * width, peri__announce_from(s->announce, 0, r) + before, sizeof *words * (size_t)width);
        PERI_TRY(peri__kjt_layout_new(t->keys, g->size, g->rank, t->stagger, t->kjt->ranks > 0, words, &t->layout));
        before += width;
    }
    return PERI_OK;
}

/** Whether lengths and offsets of all kjts are known to be well formed; PERI_PENDING: the device still checks some.
 *  Waiting for the own device counts as an event of the group, so that it is taken for no standstill of the ranks. */
static peri_status test_inputs(sizes *s)
{
    bool pending = false;
    for (int32_t i = 0; i < s->n; i++) {
        peri_status status = peri_kjt_sync_test(s->items[i].kjt);
        if (status < 0) return status;
        pending = pending || status == PERI_PENDING;
    }
    if (!pending) return PERI_OK;
    s->base.group->comm->events++;
    return PERI_PENDING;
}

static peri_status advance_phases(sizes *s)
{
    peri_status status;
    switch (s->phase) {
    case SYNC:
        if ((status = test_inputs(s)) != PERI_OK) return status;
        if (s->base.group->size == 1) return PERI_OK;
        PERI_TRY(post_sizes(s));
        s->phase = ANNOUNCE;
        /* fallthrough */
    default:
        if ((status = peri__announce_test(s->announce)) != PERI_OK) return status;
        return read_sizes(s);
    }
}

/** "'a', 'b' (2 keys)". */
static void keys_text(const peri_keys *keys, char *text, size_t len)
{
    size_t used = 0;
    for (int32_t i = 0; i < keys->count && i < 4 && used < len; i++)
        used += (size_t)snprintf(text + used, len - used, "%s'%.24s'", i ? ", " : "", keys->names[i]);
    if (used < len) snprintf(text + used, len - used, "%s (%d keys)", keys->count > 4 ? ", ..." : "", keys->count);
}

static peri_status sizes_step(peri_work *work)
{
    sizes *s = (sizes *)work;
    peri_status status = advance_phases(s);
    if (status >= 0) return status;
    char keys[160] = "none", cause[PERI_MESSAGE_MAX];
    if (s->n) keys_text(s->items[0].kjt->keys, keys, sizeof keys);
    snprintf(cause, sizeof cause, "%s", peri_error_message());
    peri__fail(status, "%s: keys %s on rank %d: %s", name, keys, work->group->rank, cause);
    return peri__group_fail(work->group, status);
}

static void item_fini(item *t)
{
    for (int i = 0; i < PERI_PARTS; i++) peri_tensor_release(t->tensors[i]);
    peri__kjt_layout_release(t->layout);
    peri_kjt_release(t->kjt);
    peri_keys_release(t->keys);
    peri__free(t->first_key);
}

static void sizes_fini(peri_work *work)
{
    sizes *s = (sizes *)work;
    peri__announce_release(s->announce);
    for (int32_t i = 0; s->items && i < s->n; i++) item_fini(&s->items[i]);
    peri__free(s->items);
}

static const peri__work_vtab sizes_vtab = {.name = "kjt sizes", .step = sizes_step, .fini = sizes_fini};

/* -- tensors ------------------------------------------------------------------------------------------------------- */

/** Number of the operation that carries a part. */
static uint64_t sequence_of_part(const tensors *w, int part)
{
    return w->sizes->parts + (uint64_t)w->index * PERI_PARTS + (uint64_t)part;
}

/** Post one part, of which @out[r] goes to rank r and @in[r] comes from it. @runs: room for keys x ranks. */
static peri_status post_part(tensors *w, const item *t, int part, const int64_t *out, const int64_t *in,
                             peri_k_run *runs)
{
    const peri_group *g = w->base.group;
    const peri__kjt_layout *l = t->layout;
    const bool ids = part != PERI_PART_LENGTHS;
    const int64_t sent = peri__sum(out, g->size);
    peri_tensor *whole = t->tensors[part];
    PERI__HELD peri_tensor *send = NULL, *to = NULL;
    peri__transfer_args a = {.kind = PERI_COLL_ALL_TO_ALL,
                             .channel = PERI_CHANNEL_IDS,
                             .sequence = sequence_of_part(w, part),
                             .out = out,
                             .in = in};
    int64_t skip = 0;
    if (w->own_first[ids] >= 0) { /* the first rank's own part is in front, the last one's at the end */
        skip = g->rank == 0 ? peri__numel(whole) - sent : 0;
        w->own_first[ids] = g->rank == 0 ? 0 : sent;
    }
    PERI_TRY(peri__tensor_view(whole, 1, &sent, NULL, whole->offset + skip, &send));
    if (w->placed) {
        PERI_TRY(peri_tensor_new(peri__device(whole), whole->dtype, 1, ids ? &l->total_ids : &l->total_rows, &to));
        peri__kjt_layout_runs(l, ids, -1, runs);
        a.to = to;
        a.runs = runs;
        a.n_runs = (int64_t)l->keys->count * l->ranks;
    }
    return peri__transfer_post(w->base.group, send, &a, &w->parts[part]);
}

static peri_status post_tensors(tensors *w)
{
    item *t = &w->sizes->items[w->index];
    peri_group *g = w->base.group;
    const peri_kjt *k = t->kjt;
    int64_t all = (int64_t)t->layout->keys->count * g->size;
    PERI__SCRATCH peri_k_run *runs = peri__alloc(sizeof *runs * (size_t)all + sizeof(int64_t) * 2 * (size_t)g->size);
    int64_t *counts = (int64_t *)(runs + all), *in = counts + g->size;
    if (!runs) return PERI_ENOMEM;
    w->placed = peri__stage_can_place(g->comm, peri__kjt_device(t->kjt));
    bool apart = !w->placed && (g->rank == 0 || g->rank == g->size - 1);
    w->own_first[0] = w->own_first[1] = apart ? 0 : -1;
    for (int part = 0; part < PERI_PARTS; part++) {
        bool lengths = part == PERI_PART_LENGTHS;
        const int64_t *at = lengths ? k->lengths_offset_per_key : k->offset_per_key;
        if (!t->tensors[part]) {
            peri__group_skip(g, PERI_CHANNEL_IDS, sequence_of_part(w, part));
            continue;
        }
        for (int32_t r = 0; r < g->size; r++) {
            bool left_out = apart && r == g->rank;
            counts[r] = left_out ? 0 : at[t->first_key[r + 1]] - at[t->first_key[r]];
            in[r] = left_out ? 0 : lengths ? t->layout->rank_rows[r] : t->layout->rank_ids[r];
        }
        PERI_TRY(post_part(w, t, part, counts, in, runs));
    }
    return PERI_OK;
}

static peri_status tensors_advance(tensors *w)
{
    item *t = &w->sizes->items[w->index];
    peri_status status = peri_work_test(&w->sizes->base);
    if (status != PERI_OK) return status;
    if (w->base.group->size == 1) {
        peri_kjt_retain(t->kjt);
        w->result = t->kjt;
        return PERI_OK;
    }
    if (!w->posted) PERI_TRY(post_tensors(w));
    w->posted = true;
    peri_tensor *received[PERI_PARTS];
    for (int part = 0; part < PERI_PARTS; part++) {
        if ((status = peri__transfer_test(&w->parts[part])) != PERI_OK) return status;
        received[part] = w->parts[part].numbers;
    }
    PERI_TRY(peri__kjt_layout_build(t->layout, received, t->tensors, w->own_first, w->placed, &w->result));
    for (int part = 0; part < PERI_PARTS; part++) peri__transfer_fini(&w->parts[part]);
    return PERI_OK;
}

static peri_status tensors_step(peri_work *work)
{
    peri_status status = tensors_advance((tensors *)work);
    return status < 0 ? peri__group_fail(work->group, status) : status;
}

static void tensors_fini(peri_work *work)
{
    tensors *w = (tensors *)work;
    for (int part = 0; part < PERI_PARTS; part++) peri__transfer_fini(&w->parts[part]);
    peri_kjt_release(w->result);
    if (w->sizes) peri_work_release(&w->sizes->base);
}

static const peri__work_vtab tensors_vtab = {.name = "kjt tensors", .step = tensors_step, .fini = tensors_fini};

/* -- the call ------------------------------------------------------------------------------------------------------ */

static peri_status check_item(peri_group *g, const peri_kjt_exchange_args *a)
{
    if (!a->kjt || !a->key_splits) return peri__fail(PERI_EINVAL, "%s: no %s", name, a->kjt ? "key_splits" : "kjt");
    int64_t sum = 0;
    for (int32_t r = 0; r < g->size; r++) {
        if (a->key_splits[r] < 0)
            return peri__fail(PERI_EINVAL, "%s: %d keys for rank %d, allowed: 0 and more", name, a->key_splits[r], r);
        sum += a->key_splits[r];
    }
    if (sum != a->kjt->keys->count)
        return peri__fail(PERI_EINVAL, "%s: the key splits sum to %lld, the kjt has %d keys", name, (long long)sum,
                          a->kjt->keys->count);
    if (peri__stagger(a->stagger) < 1 || g->size % peri__stagger(a->stagger))
        return peri__fail(PERI_EINVAL, "%s: stagger %d, allowed: divisors of the %d ranks", name, a->stagger, g->size);
    if (a->kjt->values->ndim != 1)
        return peri__fail(PERI_EINVAL, "%s: values of %d dimensions, allowed: 1", name, a->kjt->values->ndim);
    return PERI_OK;
}

/** Hash over what all ranks must agree on. */
static uint64_t agreement_hash(const peri_group *g, const peri_kjt_exchange_args *a, int32_t lengths_dtype)
{
    const peri_kjt *k = a->kjt;
    uint64_t h = peri__hash_mix(k->keys->hash, (uint64_t)peri__stagger(a->stagger));
    for (int32_t r = 0; r < g->size; r++) h = peri__hash_mix(h, (uint64_t)a->key_splits[r]);
    h = peri__hash_mix(h, (uint64_t)k->values->dtype | (uint64_t)lengths_dtype << 8 | (uint64_t)(k->ranks > 0) << 16);
    return peri__hash_mix(h, k->weights ? (uint64_t)k->weights->dtype + 1 : 0);
}

/** The keys that this rank gets: @given if it is that list. */
static peri_status keys_of_rank(const peri_keys *all, int32_t begin, int32_t end, peri_keys *given, peri_keys **out)
{
    bool same = given && given->count == end - begin;
    for (int32_t i = begin; same && i < end; i++) same = given->name_hash[i - begin] == all->name_hash[i];
    for (int32_t i = begin; same && i < end; i++) same = !strcmp(given->names[i - begin], all->names[i]);
    if (!same) return peri__keys_slice(all, begin, end, out);
    peri_keys_retain(given);
    *out = given;
    return PERI_OK;
}

static peri_status item_init(peri_group *g, const peri_kjt_exchange_args *a, item *t)
{
    peri_kjt *k = a->kjt;
    t->first_key = peri__alloc(sizeof *t->first_key * (size_t)(g->size + 1));
    if (!t->first_key) return PERI_ENOMEM;
    t->first_key[0] = 0;
    for (int32_t r = 0; r < g->size; r++) t->first_key[r + 1] = t->first_key[r] + a->key_splits[r];
    t->stagger = peri__stagger(a->stagger);
    peri_kjt_retain(k);
    t->kjt = k;
    PERI_TRY(keys_of_rank(k->keys, t->first_key[g->rank], t->first_key[g->rank + 1], a->keys, &t->keys));
    PERI_TRY(peri_kjt_sync_post(k));
    PERI_TRY(peri_kjt_lengths(k, &t->tensors[PERI_PART_LENGTHS]));
    PERI_TRY(peri_kjt_values(k, &t->tensors[PERI_PART_VALUES]));
    PERI_TRY(peri_kjt_weights(k, &t->tensors[PERI_PART_WEIGHTS]));
    t->identity = agreement_hash(g, a, t->tensors[PERI_PART_LENGTHS]->dtype);
    return PERI_OK;
}

/** Drop works that were made so far, with the error that stopped the making. */
static peri_status drop_works(peri_group *g, sizes *s, peri_work **out, int32_t made, peri_status status)
{
    for (int32_t i = 0; i < made; i++) {
        peri__work_drop(out[i], status);
        out[i] = NULL;
    }
    peri__work_drop(&s->base, status);
    return g->size > 1 ? peri__group_fail(g, status) : status;
}

peri_status peri_exchange_kjts(peri_group *g, const peri_kjt_exchange_args *args, int32_t n, peri_work **splits,
                               peri_work **out)
{
    PERI_NEED(args);
    peri_work *work;
    PERI_TRY(peri__group_check(name, g));
    if (n < 1) return peri__fail(PERI_EINVAL, "%s: %d kjts, at least one is needed", name, n);
    for (int32_t i = 0; i < n; i++) PERI_TRY(check_item(g, &args[i]));
    PERI_TRY(peri__work_new(sizeof(sizes), &sizes_vtab, g, peri__kjt_device(args[0].kjt), &work));
    sizes *s = (sizes *)work;
    s->items = peri__alloc_zero(sizeof *s->items * (size_t)n);
    s->n = s->items ? n : 0;
    peri_status status = s->items ? PERI_OK : PERI_ENOMEM;
    if (status >= 0 && g->size > 1) status = peri__announce_reserve(g, false, false, &s->numbers);
    if (status >= 0 && g->size > 1) status = peri__group_reserve(g, PERI_CHANNEL_IDS, n * PERI_PARTS, &s->parts);
    for (int32_t i = 0; i < n && status >= 0; i++) status = item_init(g, &args[i], &s->items[i]);
    if (status < 0) return drop_works(g, s, NULL, 0, status);
    for (int32_t i = 0; i < n; i++) {
        status = peri__work_new(sizeof(tensors), &tensors_vtab, g, peri__kjt_device(args[i].kjt), &out[i]);
        if (status < 0) return drop_works(g, s, out, i, status);
        tensors *w = (tensors *)out[i];
        peri_work_retain(work);
        w->sizes = s;
        w->index = i;
    }
    status = peri_work_test(work);
    if (status < 0) return drop_works(g, s, out, n, status);
    *splits = work;
    return PERI_OK;
}

peri_status peri_exchange_kjt_result(peri_work *exchange, peri_kjt **out)
{
    PERI_NEED(exchange, out);
    static const char f[] = "peri_exchange_kjt_result";
    tensors *w = (tensors *)exchange;
    if (exchange->vtab != &tensors_vtab) return peri__fail(PERI_EINVAL, "%s: this work is no exchange of a kjt", f);
    if (exchange->status != PERI_OK) return peri__fail(PERI_EINVAL, "%s: the exchange is not complete; wait for it", f);
    if (w->used) return peri__fail(PERI_EINVAL, "%s: this result was already taken", f);
    w->used = true;
    *out = w->result;
    w->result = NULL;
    return PERI_OK;
}

peri_status peri_exchange_kjt_splits(peri_work *exchange, int64_t *stride_per_rank, int64_t *input_splits,
                                     int64_t *output_splits)
{
    PERI_NEED(exchange, output_splits);
    static const char f[] = "peri_exchange_kjt_splits";
    tensors *w = (tensors *)exchange;
    if (exchange->vtab != &tensors_vtab) return peri__fail(PERI_EINVAL, "%s: this work is no exchange of a kjt", f);
    if (w->sizes->base.status != PERI_OK)
        return peri__fail(PERI_EINVAL, "%s: the sizes are not known yet; wait for them", f);
    const item *t = &w->sizes->items[w->index];
    const peri__kjt_layout *l = t->layout;
    for (int32_t r = 0; r < exchange->group->size; r++) {
        stride_per_rank[r] = l ? l->stride[r] : t->kjt->stride;
        input_splits[r] = t->kjt->offset_per_key[t->first_key[r + 1]] - t->kjt->offset_per_key[t->first_key[r]];
        output_splits[r] = l ? l->rank_ids[r] : input_splits[r];
    }
    return PERI_OK;
}
