/* SPDX-License-Identifier: Apache-2.0
 *
 * lifetime.c: the last references. A tensor holds the node that made it and a node the tensors that it saved, so they
 * go together.
 */
#include "tensor_internal.h"

void peri__ending_release(peri__ending *ending)
{
    if (ending && peri__refs_drop(&ending->refs)) ending->fini(ending);
}

/** Drop what the node keeps; nodes that lose their last reference through it go onto the chain, so that long tapes need
 *  no deep stack. */
static void node_clear(peri__node *node, peri__node **chain)
{
    for (int32_t i = 0; i < node->n_saved; i++) {
        peri_tensor_release(node->saved[i]);
        node->saved[i] = NULL;
    }
    if (node->vtab->fini) node->vtab->fini(node);
    peri__ending_release(node->ending);
    node->ending = NULL;
    for (int32_t i = 0; i < node->n_in; i++) {
        peri__edge *e = &node->in[i];
        peri_tensor_release(e->leaf);
        if (e->node && peri__refs_drop(&e->node->refs)) {
            e->node->grad_out = (peri_tensor **)*chain; /* the field is free between passes */
            *chain = e->node;
        }
        *e = (peri__edge){0};
    }
    node->n_in = 0;
}

/** Free nodes without references, linked through grad_out. */
static void node_drain(peri__node *chain)
{
    while (chain) {
        peri__node *dead = chain;
        chain = (peri__node *)dead->grad_out;
        node_clear(dead, &chain);
        peri__object_count(-1);
        peri__free(dead);
    }
}

void peri__node_release(peri__node *node)
{
    if (!node || !peri__refs_drop(&node->refs)) return;
    node->grad_out = NULL;
    node_drain(node);
}

void peri__node_spend(peri__node *node)
{
    if (node->grad_out)
        for (int32_t i = 0; i < node->n_out; i++) peri_tensor_release(node->grad_out[i]);
    peri__free(node->grad_out);
    node->grad_out = NULL;
    node->spent = true;
    peri__node *chain = NULL;
    node_clear(node, &chain);
    node_drain(chain);
    peri__node_release(node);
}

void peri_tensor_retain(peri_tensor *t) { if (t) peri__refs_add(&t->refs); }

void peri_tensor_release(peri_tensor *t)
{
    if (!t || !peri__refs_drop(&t->refs)) return;
    peri__node_release(t->node);
    peri_tensor_release(t->grad);
    peri__storage *storage = t->storage;
    peri__object_count(-1);
    if (t != &storage->first) peri__free(t);
    peri__storage_release(storage);
}
