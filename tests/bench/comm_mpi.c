/* SPDX-License-Identifier: Apache-2.0
 *
 * comm_mpi.c: the bare Open MPI calls beside which tests/bench/comm.lua times Perilune's operations, in the same
 * process and run, on the same buffers. Built as build/bench/libcomm_mpi.so; MPI was initialised by Perilune's
 * transport.
 */
#include <mpi.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

enum {
    BARRIER,
    BROADCAST,
    ALL_REDUCE,
    ALL_GATHER,
    REDUCE_SCATTER,
    ALL_TO_ALL,
    ALL_TO_ALL_V,
    REDUCE_SCATTER_V,
    ALL_GATHER_V,
    ALL_TO_ALL_ROWS
};

static MPI_Comm comm = MPI_COMM_NULL;
static int rank, size;
static int counts[64], places[64], ones[64], columns = 1, bytes_at[64], column_at[64];
static MPI_Datatype types[64], blocks[64]; /* floats; blocks of columns */

int bare_open(void);
int bare_close(void);
double bare_now_us(void);
int bare_barrier(void);
int bare_max(double *values, int n);
int bare_columns(int n);
int bare_run(int op, void *recv, const void *send, int64_t count, int repeats);
int bare_post(int op, void *recv, const void *send, int64_t count);
int bare_wait(void);

/** A communicator of its own. Collective. */
int bare_open(void)
{
    int code = MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    return size > 64 ? -1 : code;
}

int bare_close(void) { return MPI_Comm_free(&comm); }

double bare_now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

int bare_barrier(void) { return MPI_Barrier(comm); }

/** Each of @n numbers becomes the largest over the ranks. */
int bare_max(double *values, int n) { return MPI_Allreduce(MPI_IN_PLACE, values, n, MPI_DOUBLE, MPI_MAX, comm); }

/** Columns of what a rank sends, where columns of all ranks are to lie side by side. */
int bare_columns(int n)
{
    columns = n;
    return n > 0 ? MPI_SUCCESS : -1;
}

/** All-to-all of @n floats per peer, rows of `columns`, what comes from rank i as columns i * columns of the result:
 *  one type per peer. */
static int make_blocks(int n)
{
    int code = MPI_Type_vector(n / columns, columns, columns * size, MPI_FLOAT, &blocks[0]);
    if (code == MPI_SUCCESS) code = MPI_Type_commit(&blocks[0]);
    for (int i = 0; i < size; i++) {
        blocks[i] = blocks[0];
        types[i] = MPI_FLOAT;
        ones[i] = 1;
        bytes_at[i] = i * n * (int)sizeof(float);
        column_at[i] = i * columns * (int)sizeof(float);
    }
    return code;
}

/** @repeats calls of @op in a row; @count floats per peer (the whole vector for broadcast and all_reduce). */
int bare_run(int op, void *recv, const void *send, int64_t count, int repeats)
{
    int n = (int)count, code = MPI_SUCCESS;
    for (int i = 0; i < size; i++) counts[i] = n, places[i] = n * i;
    if (op == ALL_TO_ALL_ROWS) code = make_blocks(n);
    for (int k = 0; k < repeats && code == MPI_SUCCESS; k++) switch (op) {
        case BARRIER: code = MPI_Barrier(comm); break;
        case BROADCAST: code = MPI_Bcast(recv, n, MPI_FLOAT, 0, comm); break;
        case ALL_REDUCE: code = MPI_Allreduce(MPI_IN_PLACE, recv, n, MPI_FLOAT, MPI_SUM, comm); break;
        case ALL_GATHER: code = MPI_Allgather(send, n, MPI_FLOAT, recv, n, MPI_FLOAT, comm); break;
        case REDUCE_SCATTER: code = MPI_Reduce_scatter_block(send, recv, n, MPI_FLOAT, MPI_SUM, comm); break;
        case ALL_TO_ALL: code = MPI_Alltoall(send, n, MPI_FLOAT, recv, n, MPI_FLOAT, comm); break;
        case ALL_TO_ALL_V:
            code = MPI_Alltoallv(send, counts, places, MPI_FLOAT, recv, counts, places, MPI_FLOAT, comm);
            break;
        case REDUCE_SCATTER_V: code = MPI_Reduce_scatter(send, recv, counts, MPI_FLOAT, MPI_SUM, comm); break;
        case ALL_GATHER_V: code = MPI_Allgatherv(send, n, MPI_FLOAT, recv, counts, places, MPI_FLOAT, comm); break;
        case ALL_TO_ALL_ROWS:
            code = MPI_Alltoallw(send, counts, bytes_at, types, recv, ones, column_at, blocks, comm);
            break;
        default: return -1;
        }
    if (op == ALL_TO_ALL_ROWS) MPI_Type_free(&blocks[0]);
    return code;
}

static MPI_Request posted = MPI_REQUEST_NULL;

/** The nonblocking form of some of them, to be waited for with bare_wait. */
int bare_post(int op, void *recv, const void *send, int64_t count)
{
    int n = (int)count;
    switch (op) {
    case BROADCAST: return MPI_Ibcast(recv, n, MPI_FLOAT, 0, comm, &posted);
    case ALL_REDUCE: return MPI_Iallreduce(MPI_IN_PLACE, recv, n, MPI_FLOAT, MPI_SUM, comm, &posted);
    case ALL_TO_ALL: return MPI_Ialltoall(send, n, MPI_FLOAT, recv, n, MPI_FLOAT, comm, &posted);
    default: return -1;
    }
}

int bare_wait(void) { return MPI_Wait(&posted, MPI_STATUS_IGNORE); }
