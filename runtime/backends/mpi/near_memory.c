/* SPDX-License-Identifier: Apache-2.0
 *
 * near_memory.c: the cells that the ranks of a group on one machine share (near.c).
 */
#include "mpi_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NEAR_CELLS = 32 }; /* per ordered pair of ranks: bits of mpi_group.used */

static size_t near_bytes(int32_t size)
{
    return sizeof(near_shared) + sizeof(near_cell) * (size_t)size * (size_t)size * NEAR_CELLS;
}

near_cell *peri__mpi_near_cell_at(const mpi_group *g, int32_t from, int32_t to, int32_t k)
{
    return &g->shared->cells[((int64_t)from * g->size + to) * NEAR_CELLS + k];
}

void peri__mpi_near_close(const mpi_group *g)
{
    for (const mpi_group *x = peri__mpi.groups; x; x = x->next) {
        const mpi_group *up = x;
        while (up && up != g) up = up->parent;
        if (!up || !x->shared || atomic_load(&x->shared->failed)) continue;
        atomic_store(&x->shared->failed, 1);
        for (int64_t i = 0, n = (int64_t)x->size * x->size * NEAR_CELLS; i < n; i++)
            atomic_fetch_or(&x->shared->cells[i].next, CLOSED);
    }
}

bool peri__mpi_near_quiet(const mpi_group *g)
{
    for (int64_t i = 0, n = (int64_t)g->size * g->size * NEAR_CELLS; i < n; i++) {
        uint64_t done = atomic_load(&g->shared->cells[i].done), next = atomic_load(&g->shared->cells[i].next);
        if (!(next & CLOSED)) return false; /* who failed first is closing them right now */
        if ((next & ~CLOSED) != done) return false;
    }
    return true;
}

/** Can this process reach the memory of the others, both ways? @ranks of the world on this node. */
static bool near_reach(const int32_t *ranks, const int64_t *words, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        const peer *p = &peri__mpi.peers[ranks[i]];
        int64_t copy = 0;
        struct iovec here = {&copy, sizeof copy}, there = {(void *)(uintptr_t)words[i], sizeof copy};
        if (p->machine != peri__mpi.peers[peri__mpi.rank].machine) return false;
        if (process_vm_readv((pid_t)p->pid, &here, 1, &there, 1, 0) != sizeof copy || copy != p->pid) return false;
        if (process_vm_writev((pid_t)p->pid, &here, 1, &there, 1, 0) != sizeof copy) return false;
    }
    return true;
}

/** A file without a name in this process's memory, and why there is none (an errno). Its pages are there from the
 *  start: one that the machine could not give later would be a bus error. */
static int near_file(size_t bytes, int *why)
{
    int fd = peri__mpi_memory_file("peri-cells", (int64_t)bytes);
    *why = fd < 0 ? errno : 0;
    if (fd < 0) return -1;
    *why = posix_fallocate(fd, 0, (off_t)bytes);
    if (!*why) return fd;
    close(fd);
    return -1;
}

/** Map what the first rank of the group made, which the others open by its process. Collective over @comm, like all of
 *  near_join. */
static void *near_map(MPI_Comm comm, int32_t rank, int32_t size, const peer *first)
{
    const size_t bytes = near_bytes(size);
    int from[2] = {-1, 0}, ok, all = 0; /* the first rank's file, and why it has none */
    if (rank == 0) from[0] = near_file(bytes, &from[1]);
    if (MPI_Bcast(from, 2, MPI_INT, 0, comm) != MPI_SUCCESS) return NULL;
    const bool refused = from[1] == EPERM || from[1] == EACCES || from[1] == ENOSYS; /* by a sandbox, as is meant */
    if (from[0] < 0 && rank == 0)
        peri__mpi_host->log(
            refused ? PERI_LOG_INFO : PERI_LOG_WARN,
            "%d ranks of this machine share no memory: %zu bytes wanted: %s; what they send each other is copied twice",
            (int)size, bytes, strerror(from[1]));
    int fd = rank == 0 || from[0] < 0 ? from[0] : peri__mpi_open_of(first, from[0]);
    void *block = fd < 0 ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ok = block != MAP_FAILED;
    int code = MPI_Allreduce(&ok, &all, 1, MPI_INT, MPI_MIN, comm);
    if (fd >= 0) close(fd);
    if (code == MPI_SUCCESS && all) return block;
    if (ok) munmap(block, bytes);
    return NULL;
}

void peri__mpi_near_join(mpi_group *g)
{
    static int64_t word; /* what the others read and write */
    if (!g->parent) { /* a message and a job look different to the receiver */
        peri__mpi.near_least = peri__mpi_host->copy_choice(PERI_HOST_COPY_NEAR);
        MPI_Bcast(&peri__mpi.near_least, 1, MPI_INT64_T, 0, g->comm);
    }
    if (g->size < 2 || g->size > NEAR_RANKS) return;
    const char *off = secure_getenv("PERI_MPI_NEAR");
    int64_t own = (int64_t)(uintptr_t)&word, words[NEAR_RANKS];
    word = getpid();
    int ok = MPI_Allgather(&own, 1, MPI_INT64_T, words, 1, MPI_INT64_T, g->comm) == MPI_SUCCESS, all = 0;
    ok = ok && !(off && strcmp(off, "0") == 0) && near_reach(g->ranks, words, g->size);
    if (MPI_Allreduce(&ok, &all, 1, MPI_INT, MPI_MIN, g->comm) != MPI_SUCCESS || !all) return;
    g->used = peri__mpi_host->alloc_zero(sizeof *g->used * (size_t)g->size);
    if (g->used) g->shared = near_map(g->comm, g->rank, g->size, &peri__mpi.peers[g->ranks[0]]);
    peri__mpi.near = peri__mpi.near || g->shared;
}

void peri__mpi_near_leave(mpi_group *g)
{
    if (g->shared) munmap(g->shared, near_bytes(g->size));
    g->shared = NULL;
    peri__mpi_host->free(g->used);
}
