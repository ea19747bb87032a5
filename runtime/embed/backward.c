/* SPDX-License-Identifier: Apache-2.0
 *
 * backward.c: the backward pass with the optimizer, in memory: sums by row for the optimizers that work row by row, or Shampoo.
 */
#include "internal.h"

peri_status peri__tbe_backward(peri_tbe *tbe, const peri_tbe_input *in, peri_tensor *grad, peri_tensor *grad_weights)
{
    peri_k_tbe_stream stream;
    PERI_TRY(peri__tbe_average(tbe));
    PERI_TRY(peri__tbe_enter(tbe));
    PERI_TRY(peri__tbe_stream(tbe, in, false, &stream));
    if (grad_weights) PERI_TRY(peri__tbe_weight_gradient(tbe, in, &stream, grad, grad_weights));
    if (tbe->optimizer.kind == PERI_TBE_NONE) return peri__tbe_leave(tbe);
    PERI_TRY(peri__counter_refresh(tbe, tbe->iteration + 1));
    tbe->iteration++;
    bool shampoo = tbe->optimizer.kind == PERI_TBE_SHAMPOO;
    peri_status status = shampoo ? peri__tbe_shampoo(tbe, in, grad) : peri__tbe_update(tbe, in, &stream, grad, NULL, NULL);
    if (status < 0) {
        tbe->iteration--;
        return status;
    }
    tbe->updates++;
    return peri__tbe_leave(tbe);
}
