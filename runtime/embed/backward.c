/* SPDX-License-Identifier: Apache-2.0
 *
 * backward.c: the backward pass with the optimizer, in memory: sums by row for the optimizers that work row by row, or Shampoo.
 */
#include "internal.h"

peri_status peri__tbe_backward(peri_tbe_batch *b, peri_tensor *grad, peri_tensor *grad_weights)
{
    peri_tbe *tbe = b->tbe;
    PERI_TRY(peri__tbe_ema_alone(tbe));
    if (grad_weights) PERI_TRY(peri__tbe_weight_gradient(b, grad, grad_weights));
    if (tbe->optimizer.kind == PERI_TBE_NONE) return PERI_OK;
    PERI_TRY(peri__counter_refresh(tbe, tbe->iteration + 1));
    tbe->iteration++;
    peri_status status = tbe->optimizer.kind == PERI_TBE_SHAMPOO ? peri__tbe_shampoo(b, grad) : peri__tbe_update(b, grad, NULL, NULL);
    if (status < 0) tbe->iteration--;
    else tbe->updates++;
    return status;
}
