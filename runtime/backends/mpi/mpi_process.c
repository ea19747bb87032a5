/* SPDX-License-Identifier: Apache-2.0
 *
 * mpi_process.c: what the process knows, and failures.
 */
#include "mpi_internal.h"

struct mpi_state peri__mpi;
const peri_plugin_host *peri__mpi_host;
peri_kernel_fn peri__mpi_reduce, peri__mpi_place;

peri_status peri__mpi_fail(const char *what, int code)
{
    char text[MPI_MAX_ERROR_STRING];
    int len = 0;
    MPI_Error_string(code, text, &len);
    return FAIL(PERI_EPEER, "%s: %.*s", what, len, text);
}

const mpi_group *peri__mpi_broken(const mpi_group *g)
{
    while (g && g->failed == PERI_OK) g = g->parent;
    return g;
}

world_rank peri__mpi_world_rank(const mpi_group *g, int32_t i)
{
    world_rank w = {""};
    if (g->ranks[i] != i) snprintf(w.text, sizeof w.text, "rank %d of the world, ", g->ranks[i]);
    return w;
}

void peri__mpi_group_fail(mpi_group *g, peri_status status, const char *message)
{
    if (g->failed != PERI_OK) return;
    peri__mpi_near_close(g);
    g->failed = status;
    snprintf(g->message, sizeof g->message, "%s", message);
    if (!peri__mpi.why[0]) snprintf(peri__mpi.why, sizeof peri__mpi.why, "%s", message);
    if (g->parent) peri__mpi.loose = true;
    else peri__mpi.broken = true;
}

void peri__mpi_remember(mpi_group *g, const peri_coll_op *op)
{
    peri_coll_op *h = &g->history[op->sequence % HISTORY];
    *h = *op;
    h->send_counts = h->recv_counts = NULL;
    h->recv_runs = NULL;
    h->fill = NULL;
    h->take = NULL;
    h->ctx = NULL;
    h->facts = NULL;
    if (op->sequence > g->last) g->last = op->sequence;
}
