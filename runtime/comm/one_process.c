/* SPDX-License-Identifier: Apache-2.0
 *
 * one_process.c: the exchanges of one process that has several devices: a batch goes to all of them, and what they made
 * of it to one.
 */
#include "comm_internal.h"

#include "../tensor/tensor_internal.h"

#include <perilune/exchange.h>
#include <perilune/ops.h>

static const char *const one_to_all = "peri_exchange_kjt_one_to_all", *const all_to_one = "peri_exchange_all_to_one";

peri_status peri_exchange_kjt_one_to_all(peri_kjt *kjt, const int32_t *key_splits, peri_device *const *devices,
                                         int32_t n, peri_kjt **out)
{
    PERI_NEED(kjt, key_splits, out);
    if (n < 1) return peri__fail(PERI_EINVAL, "%s: %d devices, allowed: 1 and more", one_to_all, n);
    peri_kjt **parts = peri__alloc_zero(sizeof *parts * (size_t)n);
    if (!parts) return PERI_ENOMEM;
    peri_status status = peri_kjt_split(kjt, key_splits, n, parts);
    for (int32_t i = 0; i < n && status >= 0 && devices; i++) {
        peri_kjt *there;
        status = peri_kjt_to(parts[i], devices[i], &there);
        if (status < 0) break;
        peri_kjt_release(parts[i]);
        parts[i] = there;
    }
    for (int32_t i = 0; i < n; i++) {
        if (status >= 0) out[i] = parts[i];
        else peri_kjt_release(parts[i]);
    }
    peri__free(parts);
    return status < 0 ? status : PERI_OK;
}

/** Parts that are added up are alike. */
static peri_status check_sum(peri_tensor *const *parts, int32_t n)
{
    char first[96], other[96];
    for (int32_t i = 1; i < n; i++) {
        bool same = parts[i]->dtype == parts[0]->dtype && parts[i]->ndim == parts[0]->ndim;
        for (int32_t d = 0; same && d < parts[0]->ndim; d++) same = parts[i]->shape[d] == parts[0]->shape[d];
        if (!same)
            return peri__fail(PERI_EINVAL, "%s: part %d is %s, part 0 %s; only equal shapes and dtypes are added up",
                              all_to_one, i, peri__tensor_text(parts[i], other, sizeof other),
                              peri__tensor_text(parts[0], first, sizeof first));
    }
    return PERI_OK;
}

/** The sum of @parts, one after the other. */
static peri_status sum_parts(peri_tensor *const *parts, int32_t n, peri_tensor **out)
{
    PERI_TRY(check_sum(parts, n));
    PERI__HELD peri_tensor *total = parts[0];
    peri_tensor_retain(total);
    for (int32_t i = 1; i < n; i++) {
        PERI__HELD peri_tensor *before = peri__hand_over(&total);
        PERI_TRY(peri_op_add(before, parts[i], &total));
    }
    *out = peri__hand_over(&total);
    return PERI_OK;
}

peri_status peri_exchange_all_to_one(peri_tensor *const *parts, int32_t n, peri_device *device, int32_t merge,
                                     int32_t dim, peri_tensor **out)
{
    PERI_NEED(parts, out);
    if (n < 1) return peri__fail(PERI_EINVAL, "%s: %d parts, allowed: 1 and more", all_to_one, n);
    if (merge < 0 || merge >= PERI_MERGE_COUNT)
        return peri__fail(PERI_EINVAL, "%s: merge %d, allowed: 0..%d (PERI_MERGE_*)", all_to_one, merge,
                          PERI_MERGE_COUNT - 1);
    for (int32_t i = 0; i < n; i++)
        if (!parts[i]) return peri__fail(PERI_EINVAL, "%s: part %d is NULL", all_to_one, i);
    peri_tensor **here = peri__alloc_zero(sizeof *here * (size_t)n);
    if (!here) return PERI_ENOMEM;
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < n && status >= 0; i++) status = peri_tensor_to(parts[i], -1, device, &here[i]);
    if (status >= 0 && merge == PERI_MERGE_CAT) status = peri_op_cat(here, n, dim, out);
    if (status >= 0 && merge == PERI_MERGE_SUM) status = sum_parts(here, n, out);
    bool keep = status >= 0 && merge == PERI_MERGE_EACH;
    for (int32_t i = 0; i < n; i++) {
        if (keep) out[i] = here[i];
        else peri_tensor_release(here[i]);
    }
    peri__free(here);
    return status < 0 ? status : PERI_OK;
}
