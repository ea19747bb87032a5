/* SPDX-License-Identifier: Apache-2.0
 *
 * redirect.c: rows of a batch that lie elsewhere than its blocks say.
 */
#include "embed_internal.h"

peri_status peri__batch_redirect(peri_tbe_batch *b, peri_tbe_blocks *there, const peri__bag_places *places,
                                 bool *placed)
{
    /* else the sort's keys are too narrow */
    *placed = b->tbe->store->whole && !b->sorted && peri__tbe_keys_have_room(b->tbe, there->out_extent);
    if (!*placed) return PERI_OK;
    peri_tbe_blocks_retain(there);
    peri_tbe_blocks_release(b->there);
    b->there = there;
    b->bag_places = *places;
    return PERI_OK;
}

bool peri__may_redirect(const peri__node *node, const peri_tbe *tbe)
{
    return tbe->optimizer.kind != PERI_TBE_NONE && !tbe->accumulate && !peri__needs(node, 0);
}

bool peri__is_window(const peri_tensor *t, const peri_device *device)
{
    enum { WIDE = 16 / sizeof(float) };
    return t->dtype == PERI_F32 && t->ndim == 2 && !peri__contiguous(t) && peri__device(t) == device &&
           t->stride[1] == 1 && t->stride[0] >= t->shape[1] && t->stride[0] % WIDE == 0 && t->offset % WIDE == 0;
}

peri_status peri__batch_redirect_window(const peri__node *node, peri_tbe_batch *b, const peri_tensor *grad,
                                        bool *placed)
{
    peri_tbe_blocks *there;
    *placed = false;
    if (!peri__may_redirect(node, b->tbe) || !peri__is_window(grad, b->tbe->device)) return PERI_OK;
    PERI_TRY(peri__tbe_blocks_widened(b->tbe, b->in.blocks, grad->shape[1], grad->stride[0], &there));
    if (!there) return PERI_OK;
    peri_status status = peri__batch_redirect(b, there, &(peri__bag_places){0}, placed);
    peri_tbe_blocks_release(there);
    return status;
}
