/* SPDX-License-Identifier: Apache-2.0
 *
 * input.c: ids to their owners: the first part of a batch's walk. Batches of several modules may set out together
 * (router.c).
 */
#include "rows.h"

#include "../tensor/jagged_internal.h"

/** What a module announces with every batch. */
enum { WORD_KIND, WORD_FILES, WORD_STAMP };
_Static_assert((int)WORD_STAMP < (int)PERI__ROUTING_WORDS, "words of a module");

/** Kind of the input: what must be alike on all ranks. */
enum { KIND_VARIABLE = 1, KIND_WEIGHTS_GRAD = 2, KIND_EVALUATION = 4 };

static peri_status check_words(void *dist, int32_t rank, const int64_t *words)
{
    const peri__input_dist *d = dist;
    const peri_sharded *e = d->ebc;
    const int64_t *own = d->routing.args.words;
    const char *f = e->router.function;
    if ((words[WORD_KIND] ^ own[WORD_KIND]) & KIND_VARIABLE)
        return peri__fail(PERI_EMISMATCH, "%s: the input of rank %d is%s of variable batch, that of rank %d is%s", f,
                          rank, words[WORD_KIND] & KIND_VARIABLE ? "" : " not", e->rank,
                          own[WORD_KIND] & KIND_VARIABLE ? "" : " not");
    if ((words[WORD_KIND] ^ own[WORD_KIND]) & KIND_EVALUATION)
        return peri__fail(PERI_EMISMATCH, "%s: rank %d is %s, rank %d %s; raw ids are learned by all ranks or by none",
                          f, rank, words[WORD_KIND] & KIND_EVALUATION ? "in evaluation" : "in training", e->rank,
                          own[WORD_KIND] & KIND_EVALUATION ? "in evaluation" : "in training");
    if (words[WORD_KIND] != own[WORD_KIND])
        return peri__fail(PERI_EMISMATCH, "%s: the per-sample weights of rank %d %s a gradient, those of rank %d %s", f,
                          rank, words[WORD_KIND] & KIND_WEIGHTS_GRAD ? "want" : "do not want", e->rank,
                          own[WORD_KIND] & KIND_WEIGHTS_GRAD ? "do" : "do not");
    if (words[WORD_FILES] && own[WORD_FILES] && words[WORD_STAMP] != own[WORD_STAMP])
        return peri__fail(PERI_EMISMATCH,
                          "%s: the row files of rank %d were of another flush, when they were opened, than those of "
                          "rank %d (flush %lld, "
                          "iteration %lld); they must be of the same flush",
                          f, rank, e->rank, (long long)e->found.number, (long long)e->found.iteration);
    return PERI_OK;
}

static const char *identity_text(void *dist, int64_t *bytes)
{
    const peri_sharded *e = ((const peri__input_dist *)dist)->ebc;
    *bytes = e->identity_bytes;
    return e->identity_text;
}

static peri_status explain_difference(void *dist, int32_t other, const char *texts, const int64_t *bytes)
{
    (void)other;
    const peri_sharded *e = ((const peri__input_dist *)dist)->ebc;
    return peri__identity_fail(e->router.function, e->world_size, texts, bytes);
}

/** Once it is known what others send. */
static peri_status lay_out_arrived(peri__input_dist *d)
{
    const peri__routing *r = &d->routing;
    peri_sharded *e = d->ebc;
    const bool by_id = e->kind->by_id;
    const int64_t *counts = by_id ? r->ids : r->counts;
    const peri__rule rule = {.by_id = by_id || peri__weights_at_home(d), .to_homes = e->two_rules};
    peri__home *home;
    if (!d->home) PERI_TRY(peri__batch_home(e, r, (peri__rule){.by_id = by_id}, &d->home));
    PERI_TRY(peri__batch_layout_new(e, d->home, counts, NULL, &d->layouts[PERI__TO_OWNERS]));
    if (rule.by_id == by_id && !rule.to_homes) {
        peri__refs_add(&d->layouts[PERI__TO_OWNERS]->refs);
        d->layouts[PERI__TO_HOMES] = d->layouts[PERI__TO_OWNERS];
        return PERI_OK;
    }
    PERI_TRY(peri__batch_home(e, r, rule, &home));
    peri_status status = peri__batch_layout_new(e, home, counts, by_id ? NULL : r->ids, &d->layouts[PERI__TO_HOMES]);
    peri__home_release(home);
    return status;
}

static peri_status input_step(peri_work *work)
{
    peri__input_dist *d = (peri__input_dist *)work;
    peri_status status = peri__routing_test(&d->routing), laid_out = PERI_OK;
    if (status >= 0 && d->routing.announced && !d->layouts[PERI__TO_HOMES]) laid_out = lay_out_arrived(d);
    if (laid_out < 0) status = laid_out;
    return status < 0 && d->ebc->world_size > 1 ? peri__group_fail(d->ebc->group, status) : status;
}

void peri__input_drop_lookups(peri__input_dist *d)
{
    for (int32_t way = 0; way < 2; way++) {
        for (int32_t g = 0; d->looks[way] && g < d->ebc->n_sets; g++) peri_tbe_batch_release(d->looks[way][g]);
        peri__free(d->looks[way]);
        d->looks[way] = NULL;
    }
    peri__repeats_free(d->repeats);
    d->repeats = NULL;
}

static void input_fini(peri_work *work)
{
    peri__input_dist *d = (peri__input_dist *)work;
    peri__input_drop_lookups(d);
    for (int32_t way = 0; way < 2; way++) {
        peri__batch_layout_release(d->layouts[way]);
        peri_tensor_release(d->id_offsets[way]);
    }
    peri__managed_batch_free(d->arrival);
    peri__input_done(d);
    peri__routing_fini(&d->routing);
    peri_tensor_release(d->inverse);
    peri__home_release(d->home);
    peri_sharded_release(d->ebc);
}

const peri__work_vtab peri__input_vtab = {.name = "input_dist", .step = input_step, .fini = input_fini};

static peri_status check_input(peri_sharded *e, peri_kjt *kjt)
{
    peri_kjt_info desc = {.size = sizeof desc};
    peri_kjt_describe(kjt, &desc);
    if (desc.device != e->device)
        return peri__fail(PERI_EINVAL, "%s: the input is on %s, the module on %s", e->router.function,
                          peri_device_name(desc.device), peri_device_name(e->device));
    if (desc.values_dtype != PERI_I64 && desc.values_dtype != PERI_I32)
        return peri__fail(PERI_EINVAL, "%s: ids are %s, allowed: i64, i32", e->router.function,
                          peri_dtype_name(desc.values_dtype));
    if (desc.weighted != e->weighted)
        return peri__fail(PERI_EINVAL, "%s: the input has %sweights, the module is %sweighted (is_weighted)",
                          e->router.function, desc.weighted ? "" : "no ", e->weighted ? "" : "not ");
    return PERI_OK;
}

/** Inverse indices @inverse (i64) name bags of their features. Where the host does not reach them nobody looks: see
 *  KeyedJaggedTensor's validate. */
static peri_status check_inverse(const peri__input_dist *d, const peri_tensor *inverse)
{
    const peri_sharded *e = d->ebc;
    const peri__home *h = d->home;
    if (!peri__immediate(e->device)) return PERI_OK;
    for (int32_t f = 0; f < e->n_features; f++) {
        const int64_t *at = (const int64_t *)peri__data(inverse) + h->feature_inverse[f];
        const uint64_t bags = (uint64_t)h->feature_rows[f];
        bool bad = false;
        for (int64_t s = 0; s < h->rows; s++) bad |= (uint64_t)at[s] >= bags;
        for (int64_t s = 0; bad && s < h->rows; s++)
            if ((uint64_t)at[s] >= bags && bags == 0)
                return peri__fail(PERI_ERANGE,
                                  "%s: feature '%s', sample %lld: inverse index %lld, but the feature has no bags",
                                  e->router.function, e->feature_names[f], (long long)s, (long long)at[s]);
            else if ((uint64_t)at[s] >= bags)
                return peri__fail(PERI_ERANGE, "%s: feature '%s', sample %lld: inverse index %lld, allowed: 0..%lld",
                                  e->router.function, e->feature_names[f], (long long)s, (long long)at[s],
                                  (long long)bags - 1);
    }
    return PERI_OK;
}

/** Start the routing of @kjt, and lay out what comes back of it. */
static peri_status take_input(peri__input_dist *d, peri_kjt *kjt)
{
    peri_sharded *e = d->ebc;
    PERI__HELD peri_tensor *weights = NULL, *inverse = NULL, *rows = NULL;
    PERI_TRY(peri_kjt_weights(kjt, &weights));
    bool want = weights && weights->requires_grad;
    if (want && e->frozen && peri_grad_enabled())
        return peri__fail(
            PERI_EINVAL,
            "%s: the input's weights want a gradient, which tables that are not trained do not give; look up "
            "without gradients (peri_grad_enabled_set)",
            e->router.function);
    want = want && !e->frozen;
    peri__routing_args a = {.kjt = kjt,
                            .ctx = d,
                            .check = check_words,
                            .by_bag = e->any_mean ? e->kind->by_bag : NULL,
                            .keep_lengths = want && !e->exact,
                            .by_id = e->kind->by_id,
                            .keep_origins = e->kind->by_id && e->cuts_rows && peri__immediate(e->device) && !e->exact &&
                                            !e->two_rules,
                            .keep_places = e->two_rules || (want && e->exact) || e->returns_rows,
                            .agreement = {.hash = peri__identity_hash(e),
                                          .bytes = e->identity_bytes,
                                          .ctx = d,
                                          .text = identity_text,
                                          .differ = explain_difference}};
    PERI_TRY(peri__routing_start(&d->routing, &e->router, &a));
    if (!e->kind->by_id) PERI_TRY(peri__batch_home(e, &d->routing, (peri__rule){0}, &d->home));
    bool variable = d->home && d->home->variable;
    int64_t *words = d->routing.args.words;
    words[WORD_KIND] = (variable ? KIND_VARIABLE : 0) | (want ? KIND_WEIGHTS_GRAD : 0) |
                       (e->n_managed && !d->training ? KIND_EVALUATION : 0);
    words[WORD_FILES] = e->found.files;
    words[WORD_STAMP] = (int64_t)e->found.stamp;
    if (!variable) return PERI_OK;
    PERI_TRY(peri_kjt_inverse_indices(kjt, &inverse));
    PERI_TRY(peri__contiguous_of(inverse, &rows));
    PERI_TRY(peri_tensor_to(rows, PERI_I64, NULL, &d->inverse));
    return check_inverse(d, d->inverse);
}

/** The work of one input; nothing of it is numbered yet. */
static peri_status start_input(const peri_sharded_input *in, peri_work **out)
{
    peri_sharded *e = in->module;
    peri_work *work;
    PERI_TRY(peri__group_check(e->router.function, e->group));
    PERI_TRY(check_input(e, in->kjt));
    PERI_TRY(peri__work_new(sizeof(peri__input_dist), &peri__input_vtab, e->group, e->device, &work));
    peri__input_dist *d = (peri__input_dist *)work;
    peri_sharded_retain(e);
    d->ebc = e;
    d->training = e->training;
    return peri__work_hand_out(work, take_input(d, in->kjt), out);
}

/** Those of @works (@n of them) that are of the group of the first of them set out, and are marked in @gone. */
static peri_status set_out_together(peri_work *const *works, int32_t n, bool *gone, peri__routing **list)
{
    int32_t k = 0;
    for (int32_t i = 0; i < n; i++) {
        if (gone[i] || works[i]->group != works[0]->group) continue;
        gone[i] = true;
        list[k++] = &((peri__input_dist *)works[i])->routing;
    }
    return peri__routings_set_out(list, k);
}

/** All of them, group by group; then each goes as far as it can. */
static peri_status begin_inputs(peri_work *const *works, int32_t n)
{
    PERI__SCRATCH peri__routing **list = peri__alloc_zero((sizeof *list + sizeof(bool)) * (size_t)n);
    if (!list) return PERI_ENOMEM;
    bool *gone = (bool *)(list + n);
    for (int32_t i = 0; i < n; i++)
        if (!gone[i]) PERI_TRY(set_out_together(works + i, n - i, gone + i, list));
    for (int32_t i = 0; i < n; i++) PERI_TRY(peri_work_test(works[i]));
    return PERI_OK;
}

peri_status peri_sharded_input_dists(const peri_sharded_input *inputs, int32_t n, peri_work **out)
{
    PERI_NEED(inputs, out);
    if (n < 1) return peri__fail(PERI_EINVAL, "peri_sharded_input_dists: %d inputs, at least one is needed", n);
    int32_t made = 0;
    for (int32_t i = 0; i < n; i++) {
        PERI_NEED(inputs[i].module);
        PERI_NEED(inputs[i].kjt);
    }
    peri_status status = PERI_OK;
    for (; made < n && status >= 0; made += status >= 0) status = start_input(&inputs[made], &out[made]);
    if (status >= 0) status = begin_inputs(out, n);
    if (status >= 0) return PERI_OK;
    for (int32_t i = 0; i < n; i++) {
        const peri_sharded *e = inputs[i].module;
        if (e->world_size > 1) peri__group_fail(e->group, status);
        if (i >= made) continue;
        peri__work_drop(out[i], status);
        out[i] = NULL;
    }
    return status;
}

peri_status peri_sharded_input_dist(peri_sharded *e, peri_kjt *kjt, peri_work **out)
{
    PERI_NEED(e, kjt);
    return peri_sharded_input_dists(&(peri_sharded_input){.module = e, .kjt = kjt}, 1, out);
}
