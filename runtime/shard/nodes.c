/* SPDX-License-Identifier: Apache-2.0
 *
 * nodes.c: see nodes.h.
 */
#include "nodes.h"

peri_status peri__nodes_init(peri__nodes *x, const int32_t *node, int32_t world_size)
{
    *x = (peri__nodes){.of = peri__alloc(sizeof(int32_t) * (4 * (size_t)world_size + 1))};
    if (!x->of) return PERI_ENOMEM;
    x->place = x->of + world_size;
    x->ranks = x->place + world_size;
    x->first = x->ranks + world_size;
    for (int32_t i = 0; i < world_size; i++) {
        int32_t mate = 0;
        while (node && node[mate] != node[i]) mate++;
        x->of[i] = mate < i ? x->of[mate] : x->n++;
    }
    int32_t at = 0;
    for (int32_t n = 0; n < x->n; n++) {
        x->first[n] = at;
        for (int32_t i = 0; i < world_size; i++) {
            if (x->of[i] != n) continue;
            x->place[i] = at - x->first[n];
            x->ranks[at++] = i;
        }
    }
    x->first[x->n] = at;
    return PERI_OK;
}

void peri__nodes_fini(peri__nodes *x)
{
    peri__free(x->of);
    *x = (peri__nodes){0};
}
