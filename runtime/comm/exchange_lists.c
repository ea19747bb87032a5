/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange_lists.c: all-to-all of lists of tensors, and of blocks of a tensor along a dimension (TPU AllToAll): whose
 * parts these are. Both write tensors that the caller has already.
 */
#include "exchange.h"

#include <stdio.h>

/* -- lists --------------------------------------------------------------------------------------------------------- */

static peri_status check_lists(const char *f, peri_group *group, peri_tensor *const *outputs,
                               peri_tensor *const *inputs, bool recorded)
{
    char a[128], what[48];
    PERI_TRY(peri__group_check(f, group));
    PERI_TRY(peri__check_tensor(f, "input 0", inputs[0], -1, -1));
    for (int32_t i = 0; i < 2 * group->size; i++) {
        bool output = i >= group->size;
        const peri_tensor *t = output ? outputs[i - group->size] : inputs[i];
        bool on_tape = output && recorded && t && t->requires_grad;
        if (t && t->dtype == inputs[0]->dtype && peri__device(t) == peri__device(inputs[0]) && !on_tape) continue;
        snprintf(what, sizeof what, "%s %d", output ? "output" : "input", output ? i - group->size : i);
        PERI_TRY(peri__check_tensor(f, what, t, inputs[0]->dtype, -1));
        PERI_TRY(peri__check_same_device(f, inputs[0], t));
        if (on_tape)
            return peri__fail(PERI_EINVAL,
                              "%s: %s (%s) is on the tape already; a recorded exchange makes it a result of its own", f,
                              what, peri__tensor_text(t, a, sizeof a));
    }
    int32_t r = group->rank;
    if (peri__numel(inputs[r]) != peri__numel(outputs[r]))
        return peri__fail(PERI_EINVAL, "%s: rank %d has %lld elements for itself and expects %lld", f, r,
                          (long long)peri__numel(inputs[r]), (long long)peri__numel(outputs[r]));
    return PERI_OK;
}

peri_status peri_coll_all_to_all_list(peri_group *group, peri_tensor *const *outputs, peri_tensor *const *inputs,
                                      bool recorded, uint64_t tag, peri_work **out)
{
    PERI_NEED(outputs, inputs, out);
    PERI_TRY(check_lists("peri_coll_all_to_all_list", group, outputs, inputs, recorded));
    peri__exchange *x;
    const peri__exchange_call c = {.function = "peri_coll_all_to_all_list", .group = group, .input = inputs[0],
                                   .kind = PERI_COLL_ALL_TO_ALL, .dims = {PERI__LIST, PERI__LIST},
                                   .division = PERI_DIVISION_OFF, .collective = true, .alike = tag};
    PERI_TRY(peri__exchange_new(&c, &x));
    for (int32_t i = 0; i < group->size; i++) {
        x->sides[1].shapes[i] = peri__shape_of(outputs[i]);
        peri__changed(outputs[i]);
    }
    return peri__exchange_post(x, inputs, outputs, recorded, out);
}

/* -- blocks along a dimension -------------------------------------------------------------------------------------- */

/** Check that the assignment is a partition of the group, and find this rank's row. */
static peri_status find_row(const char *f, const peri_group *group, const peri_tpu_all_to_all_args *args,
                            const int32_t **row)
{
    const int32_t *a = args->group_assignment;
    if (args->groups < 1 || args->replicas < 1 || (int64_t)args->groups * args->replicas != group->size)
        return peri__fail(PERI_EINVAL,
                          "%s: a group_assignment of %d x %d for the %d ranks of group '%s', allowed: each rank once",
                          f, args->groups, args->replicas, group->size, group->name);
    for (int32_t i = 0; i < group->size; i++) {
        if (a[i] < 0 || a[i] >= group->size)
            return peri__fail(PERI_EINVAL, "%s: rank %d in group_assignment, allowed: 0..%d", f, a[i], group->size - 1);
        for (int32_t k = 0; k < i; k++)
            if (a[k] == a[i])
                return peri__fail(PERI_EINVAL, "%s: rank %d twice in group_assignment, allowed: each rank once", f,
                                  a[i]);
        if (a[i] == group->rank) *row = a + i / args->replicas * args->replicas;
    }
    return PERI_OK;
}

peri_status peri_coll_tpu_all_to_all(peri_group *group, peri_tensor *input, const peri_tpu_all_to_all_args *args,
                                     peri_tensor **output, peri_work **out)
{
    PERI_NEED(group, input, args, output, out);
    static const char f[] = "peri_coll_tpu_all_to_all";
    char text[128];
    peri__words words;
    int32_t n = args->split_count, split, concat;
    const int32_t *row = NULL;
    PERI_TRY(peri__group_check(f, group));
    PERI_TRY(peri__check_tensor(f, "the input", input, -1, -1));
    PERI_TRY(find_row(f, group, args, &row));
    if (n != args->replicas)
        return peri__fail(PERI_EINVAL, "%s: split_count is %d, allowed: the %d ranks of a row of group_assignment", f,
                          n, args->replicas);
    PERI_TRY(peri__dim(f, input, args->split_dimension, &split));
    PERI_TRY(peri__dim(f, input, args->concat_dimension, &concat));
    if (input->shape[split] % n != 0)
        return peri__fail(PERI_EINVAL, "%s: %s of the input %s does not divide by split_count %d", f,
                          peri__dim_text(split, &words), peri__tensor_text(input, text, sizeof text), n);
    int64_t shape[PERI_MAX_DIMS];
    memcpy(shape, input->shape, sizeof shape);
    shape[split] /= n;
    shape[concat] *= n;
    /* All ranks must agree on the shape and on who is where. */
    uint64_t tag = peri__hash_mix(args->tag, (uint64_t)split << 32 | (uint64_t)concat);
    for (int32_t d = 0; d < input->ndim; d++) tag = peri__hash_mix(tag, (uint64_t)input->shape[d]);
    for (int32_t i = 0; i < group->size; i++) tag = peri__hash_mix(tag, (uint64_t)args->group_assignment[i]);
    PERI__HELD peri_tensor *result = NULL;
    peri__exchange *x;
    const peri__exchange_call c = {.function = f, .group = group, .input = input, .kind = PERI_COLL_ALL_TO_ALL,
                                   .dims = {split, concat}, .division = PERI_DIVISION_OFF, .collective = true,
                                   .alike = tag};
    PERI_TRY(peri_tensor_new(peri__device(input), input->dtype, input->ndim, shape, &result));
    PERI_TRY(peri__exchange_new(&c, &x));
    x->sides[1].shapes[0] = peri__shape_of(result);
    for (int32_t k = 0; k < n; k++) {
        peri__side_add_piece(&x->sides[0], row[k], input->shape[split] / n);
        peri__side_add_piece(&x->sides[1], row[k], shape[concat] / n);
    }
    PERI_TRY(peri__exchange_post(x, &input, &result, true, out));
    *output = peri__hand_over(&result);
    return PERI_OK;
}
