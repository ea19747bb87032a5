/* SPDX-License-Identifier: Apache-2.0
 *
 * plugin/coll.h (L1): the transport contract: groups of ranks and the collective operations that they post.
 *
 * Laws of the contract
 * - post never blocks; test never blocks. All ranks of a group post the same operations in the same order.
 * - Buffers are the transport's from post until test returned something else than PERI_PENDING.
 * - Sums are made in rank order (rank 0 + rank 1 + ...), in f32 for 16-bit floats, so that the same input gives the same bits.
 * - Counts are int64; a transport whose library counts in int splits, and honours PERI_TEST_COUNT_LIMIT in its tests.
 * - A mismatch, a dead peer or a passed deadline is an error from test on every rank, never a wait without end; afterwards the group
 *   is of no more use (the core poisons it and calls abort).
 */
#ifndef PERI_PLUGIN_COLL_H
#define PERI_PLUGIN_COLL_H

#include "host.h"

enum { PERI_COLL_ABI = 1 };

/** Kinds of operations. Buffers are contiguous; counts are elements of op.dtype. W is the size of the group. */
enum {
    PERI_COLL_BARRIER = 0,
    PERI_COLL_BROADCAST = 1,      /* buffer recv[count] goes from rank root to all; in place */
    PERI_COLL_ALL_REDUCE = 2,     /* send[count] -> recv[count]; may be the same buffer */
    PERI_COLL_ALL_GATHER = 3,     /* send[send_counts[0]] -> recv, rank i's part of recv_counts[i] after part i-1 */
    PERI_COLL_REDUCE_SCATTER = 4, /* send of W parts, part i of send_counts[i] -> recv[send_counts[rank]] */
    PERI_COLL_ALL_TO_ALL = 5,     /* send of W parts (send_counts) -> recv of W parts (recv_counts) */
    PERI_COLL_KIND_COUNT = 6
};

/** Reduce operators. */
enum { PERI_REDUCE_SUM = 0, PERI_REDUCE_MIN = 1, PERI_REDUCE_MAX = 2, PERI_REDUCE_OP_COUNT = 3 };

/** What a transport can take. */
enum {
    PERI_COLL_HOST = 1,  /* buffers in host memory */
    PERI_COLL_CUDA = 2   /* buffers in CUDA memory, ordered by `stream` */
};

/** One posted operation. The struct and its count arrays are copied by post; the buffers are not. */
typedef struct peri_coll_op {
    int32_t kind;                /* PERI_COLL_* */
    int32_t dtype;               /* element type (PERI_U8 for packed bytes) */
    int32_t reduce;              /* PERI_REDUCE_*, for the reducing kinds */
    int32_t root;                /* broadcast */
    uint64_t sequence;           /* number of this operation in its group, from 1 */
    uint64_t signature;          /* hash over what all ranks must agree on (kind, dtype, reduce, root, symmetric counts, tag) */
    const void *send;            /* NULL where the kind has none */
    void *recv;
    int64_t count;               /* elements, for BROADCAST and ALL_REDUCE */
    const int64_t *send_counts;  /* int64[W], NULL where the kind has none */
    const int64_t *recv_counts;  /* int64[W], NULL where the kind has none */
    int64_t deadline_ns;         /* on the host->time_ns clock: test fails with PERI_ETIMEOUT after it */
    void *stream;                /* native stream for device buffers, else NULL */
    char text[96];               /* the operation in words for messages: "all_to_all f32 [3 4]" */
} peri_coll_op;

/** How ranks find each other. */
typedef struct peri_coll_open {
    const char *job;                /* name that all ranks of one sim world share; NULL otherwise */
    int32_t rank, size;             /* wanted place; -1: the transport knows (mpirun) */
    int64_t timeout_ns;             /* for opening */
    int32_t local_rank, local_size; /* out: place among the ranks of this node */
} peri_coll_open;

typedef struct peri_coll_vtab {
    uint32_t size, abi; /* sizeof this struct; PERI_COLL_ABI */
    const char *name;   /* "mpi" */
    int32_t takes;      /* PERI_COLL_HOST | ... */
    /* Usable here? PERI_OK, or PERI_EUNSUPPORTED and a sentence in @reason. Local. */
    peri_status (*probe)(char *reason, size_t len);
    /* Join the world; sets boot->rank and boot->size. Collective. */
    peri_status (*open)(peri_coll_open *boot, void **group);
    /* A group of the given ranks (of @group, ascending or not), which all members call in the same order. Collective over members;
     * must not block on ranks outside. @tag names the group (equal on all members). */
    peri_status (*subgroup)(void *group, const int32_t *ranks, int32_t n, uint64_t tag, void **sub);
    peri_status (*post)(void *group, const peri_coll_op *op, void **request);
    /* PERI_OK, PERI_PENDING or the error. */
    peri_status (*test)(void *request);
    /* Local; after test said done, or after abort. Buffers are free afterwards. */
    void (*drop)(void *request);
    /* Tell all ranks that the group is broken and why. Local, does not block, may be called twice. */
    void (*abort)(void *group, const char *message);
    /* Leave. Collective for healthy groups, local for aborted ones. */
    peri_status (*close)(void *group);
    /* Where rank @rank of the group was last seen, in words, for messages (optional: nothing known). */
    void (*describe)(void *group, int32_t rank, char *text, size_t len);
} peri_coll_vtab;

/** The one symbol that a transport plugin libperilune_<name>.so exports. */
typedef const peri_coll_vtab *(*peri_coll_entry_fn)(const peri_plugin_host *host);
#define PERI_COLL_ENTRY "peri_coll_entry_v1"

#endif
