/* SPDX-License-Identifier: Apache-2.0
 *
 * comm/nodes.h (L3): ranks by node. Rows that lie on the ranks of one node are added up there; what crosses the network
 * to a home goes through one of that node's ranks, its gateway.
 */
#ifndef PERI_COMM_NODES_H
#define PERI_COMM_NODES_H

#include "comm_internal.h"

typedef struct peri__nodes {
    int32_t n;           /* nodes, in order of their first ranks */
    int32_t *of, *member; /* by rank: its node, and its number among the node's ranks */
    int32_t *first;      /* n + 1: where the ranks of each begin in `ranks` */
    int32_t *ranks;      /* by node, ascending */
} peri__nodes;

/** @node: any number for each of the @world_size ranks, equal for those of one node; NULL: one node. On failure @nodes
 *  is empty. */
peri_status peri__nodes_init(peri__nodes *nodes, const int32_t *node, int32_t world_size);
/** The nodes of the ranks of a group. On failure @nodes is empty. */
peri_status peri__nodes_of_group(peri__nodes *nodes, const peri_group *group);
void peri__nodes_fini(peri__nodes *nodes);

/** Ranks of node @i. */
static inline int32_t peri__node_size(const peri__nodes *nodes, int32_t i)
{
    return nodes->first[i + 1] - nodes->first[i];
}
/** Which member of node @i is the gateway through which rank @home gets what the node has for it: that of its own
 *  number, if the node has so many. */
static inline int32_t peri__gateway_member(const peri__nodes *nodes, int32_t i, int32_t home)
{
    return nodes->member[home] % peri__node_size(nodes, i);
}
static inline int32_t peri__gateway_rank(const peri__nodes *nodes, int32_t i, int32_t home)
{
    return nodes->ranks[nodes->first[i] + peri__gateway_member(nodes, i, home)];
}

#endif
