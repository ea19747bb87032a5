/* SPDX-License-Identifier: Apache-2.0
 *
 * nodes.c: see nodes.h.
 */
#include "nodes.h"

peri_status peri__nodes_init(peri__nodes *x, const int32_t *node, int32_t world_size)
{
    *x = (peri__nodes){.of = peri__alloc_zero(sizeof(int32_t) * (4 * (size_t)world_size + 1))};
    if (!x->of) return PERI_ENOMEM;
    x->member = x->of + world_size;
    x->ranks = x->member + world_size;
    x->first = x->ranks + world_size;
    for (int32_t i = 0; i < world_size; i++) {
        int32_t mate = node && i > 0 && node[i - 1] == node[i] ? i - 1 : 0;
        while (node && node[mate] != node[i]) mate++;
        x->of[i] = mate < i ? x->of[mate] : x->n++;
        x->member[i] = x->first[x->of[i] + 1]++;
    }
    for (int32_t n = 0; n < x->n; n++) x->first[n + 1] += x->first[n];
    for (int32_t i = 0; i < world_size; i++) x->ranks[x->first[x->of[i]] + x->member[i]] = i;
    return PERI_OK;
}

peri_status peri__nodes_of_group(peri__nodes *x, const peri_group *group)
{
    const int32_t world = peri_group_size(group);
    PERI__SCRATCH int32_t *node = peri__alloc(sizeof *node * (size_t)world);
    if (!node) return PERI_ENOMEM;
    for (int32_t i = 0; i < world; i++) node[i] = peri_group_node(group, i);
    return peri__nodes_init(x, node, world);
}

void peri__nodes_fini(peri__nodes *x)
{
    peri__free(x->of);
    *x = (peri__nodes){0};
}
