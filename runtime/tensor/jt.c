/* SPDX-License-Identifier: Apache-2.0
 *
 * jt.c: JaggedTensor.
 */
#include "jagged_internal.h"

#include <stdio.h>

static void bag_text(const void *owner, int64_t bag, char *text, size_t len)
{
    (void)owner;
    snprintf(text, len, "bag %lld", (long long)bag);
}

void peri_jt_retain(peri_jt *jt) { if (jt) peri__refs_add(&jt->refs); }

void peri_jt_release(peri_jt *jt)
{
    if (!jt || !peri__refs_drop(&jt->refs)) return;
    peri_tensor_release(jt->values);
    peri_tensor_release(jt->weights);
    peri__bags_fini(&jt->bags);
    peri__free(jt->host_offsets);
    peri__object_count(-1);
    peri__free(jt);
}

static peri_jt *empty_jt(void)
{
    peri_jt *jt = peri__alloc_zero(sizeof *jt);
    if (!jt) return NULL;
    peri__refs_init(&jt->refs);
    peri__object_count(1);
    return jt;
}

/** Forget what was known of bags that the caller has changed since; whether they are to be checked at once, as new ones
 *  are where the host can. */
static bool look(peri_jt *jt)
{
    if (!peri__bags_changed(&jt->bags)) return false;
    peri__free(jt->host_offsets);
    jt->host_offsets = NULL;
    return peri_device_host_access(peri__device(jt->values));
}

/** Check and bring the longest bag to the host. */
static peri_status sync(peri_jt *jt, const char *function)
{
    look(jt);
    if (jt->bags.longest >= 0) return PERI_OK;
    jt->bags.checked = false; /* only a check finds the longest */
    PERI_TRY(peri__bags_post(&jt->bags, NULL, 0, 0));
    peri_status status = peri__report_wait(jt->bags.report);
    if (status >= 0) status = peri__bags_judge(&jt->bags, function, bag_text, jt);
    peri__report_return(jt->bags.report);
    jt->bags.report = NULL;
    return status;
}

peri_status peri_jt_new(const peri_jt_config *a, peri_jt **out)
{
    PERI_TAKE(peri_jt_config, a);
    PERI_NEED(out);
    char text[128];
    if (!a->values) return peri__fail(PERI_EINVAL, "peri_jt_new: values are missing");
    if (a->values->ndim < 1)
        return peri__fail(PERI_EINVAL, "peri_jt_new: values are a scalar, wanted at least 1 dimension");
    if (a->weights) {
        if (a->weights->ndim < 1 || a->weights->shape[0] != a->values->shape[0])
            return peri__fail(PERI_EINVAL, "peri_jt_new: weights are %s for %lld values, wanted one per value",
                              peri__tensor_text(a->weights, text, sizeof text), (long long)a->values->shape[0]);
        PERI_TRY(peri__check_same_device("peri_jt_new", a->weights, a->values));
    }
    peri_jt *jt = empty_jt();
    if (!jt) return PERI_ENOMEM;
    peri_status status;
    PERI_TRY_GOTO(peri__bags_init("peri_jt_new", &jt->bags, a->lengths, a->offsets, a->values), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(a->values, &jt->values), out);
    if (a->weights) PERI_TRY_GOTO(peri_tensor_contiguous(a->weights, &jt->weights), out);
    if (peri_device_host_access(peri__device(jt->values))) PERI_TRY_GOTO(sync(jt, "peri_jt_new"), out);
    *out = jt;
out:
    if (status < 0) peri_jt_release(jt);
    return status < 0 ? status : PERI_OK;
}

peri_status peri__jt_adopt(peri_tensor *values, peri_tensor *weights, peri_tensor *lengths, peri_tensor *offsets,
                           peri_jt **out)
{
    peri_jt *jt = empty_jt();
    if (!jt) return PERI_ENOMEM;
    jt->values = values;
    jt->weights = weights;
    peri_tensor_retain(values);
    if (weights) peri_tensor_retain(weights);
    peri__bags_adopt(&jt->bags, lengths, offsets, lengths ? lengths->shape[0] : offsets->shape[0] - 1,
                     values->shape[0]);
    *out = jt;
    return PERI_OK;
}

int64_t peri_jt_bags(const peri_jt *jt) { return jt ? jt->bags.bags : 0; }

int64_t peri_jt_version(const peri_jt *j)
{
    return j ? peri_tensor_version(j->values) + peri_tensor_version(j->weights) + peri__bags_version(&j->bags) : 0;
}

peri_status peri_jt_values(peri_jt *jt, peri_tensor **out)
{
    PERI_NEED(jt);
    PERI_NEED(out);
    return peri__share(jt->values, out);
}
peri_status peri_jt_weights(peri_jt *jt, peri_tensor **out)
{
    PERI_NEED(jt);
    PERI_NEED(out);
    return peri__share(jt->weights, out);
}

peri_status peri_jt_lengths(peri_jt *jt, peri_tensor **out)
{
    PERI_NEED(jt);
    PERI_NEED(out);
    if (look(jt)) PERI_TRY(sync(jt, "peri_jt_lengths"));
    PERI_TRY(peri__bags_lengths(&jt->bags));
    return peri__share(jt->bags.lengths, out);
}

peri_status peri_jt_offsets(peri_jt *jt, peri_tensor **out)
{
    PERI_NEED(jt);
    PERI_NEED(out);
    if (look(jt)) PERI_TRY(sync(jt, "peri_jt_offsets"));
    PERI_TRY(peri__bags_offsets(&jt->bags));
    return peri__share(jt->bags.offsets, out);
}

peri_status peri_jt_validate(peri_jt *jt)
{
    PERI_NEED(jt);
    jt->bags.longest = -1;
    return sync(jt, "peri_jt_validate");
}

peri_status peri_jt_longest(peri_jt *jt, int64_t *out)
{
    PERI_NEED(jt);
    PERI_NEED(out);
    PERI_TRY(sync(jt, "peri_jt_longest"));
    *out = jt->bags.longest;
    return PERI_OK;
}

peri_status peri_jt_offsets_on_host(peri_jt *jt, const int64_t **out)
{
    PERI_NEED(jt);
    PERI_NEED(out);
    look(jt);
    if (!jt->host_offsets) {
        peri_tensor *wide = NULL;
        int64_t n = jt->bags.bags + 1, *host = NULL;
        PERI_TRY(sync(jt, "peri_jt_offsets_on_host"));
        PERI_TRY(peri__bags_offsets(&jt->bags));
        PERI_TRY(peri_tensor_to(jt->bags.offsets, PERI_I64, NULL, &wide));
        host = peri__alloc(sizeof *host * (size_t)n);
        peri_status status = host ? peri_tensor_read(wide, host, n * 8) : PERI_ENOMEM;
        peri_tensor_release(wide);
        if (status < 0) {
            peri__free(host);
            return status;
        }
        jt->host_offsets = host;
    }
    *out = jt->host_offsets;
    return PERI_OK;
}
