/* SPDX-License-Identifier: Apache-2.0
 *
 * mpi_internal.h: what the files of the transport mpi know of each other, from the lowest to those that call it. mpi.c,
 * above them all, says what the transport does. Everything here is hidden: the plugin exports its entry only.
 */
#ifndef PERI_BACKENDS_MPI_INTERNAL_H
#define PERI_BACKENDS_MPI_INTERNAL_H

#include "../../../kernels/route.h"
#include "../../../kernels/work.h"
#include "../../plugin/coll.h"

#include <mpi.h>
#include <pthread.h>
#include <stdatomic.h>

enum {
    SEQUENCE_BITS = 10, /* of an operation's number, in tags */
    HISTORY = 256,      /* operations of a group that a rank can still tell others about */
    PIECE_REST = 16 << 10 /* bytes that the last claim of a job takes more rather than leave them (near_copy.c) */
};

#define STALL_NS ((int64_t)50000000) /* without news for so long, a rank asks */
#define ASK_NS ((int64_t)200000000)  /* and asks again after so long */
#define LOOK_NS ((int64_t)1000000)   /* no longer without a look at the notes: a test may take long on a machine with
                                        other work */
#define CLOSED ((uint64_t)1 << 63)   /* of near_cell.next */

typedef struct mpi_group mpi_group;
typedef struct mpi_request mpi_request;

/** Where a message of a request comes from or goes to. */
typedef struct slot {
    int peer; /* rank in the group */
    int bytes;
    bool receive, note; /* note: a descriptor of near.c */
} slot;

struct mpi_request {
    mpi_request *next, *previous; /* of the group, while it is in progress */
    mpi_group *group;
    peri_coll_op op;
    peri_status status;
    char *message;           /* of the failure */
    int32_t phase, stage;    /* steps made; all_reduce: 0 scatter, 1 gather */
    int32_t n, room;         /* messages of this phase; how many fit */
    MPI_Request *requests;
    slot *slots;
    MPI_Status *statuses;
    char *scratch;           /* parts received before they are summed */
    int64_t scratch_bytes;
    struct near_state *near; /* copies between processes; NULL: messages only */
    int64_t given_up_ns;     /* dropped while the others may still copy */
    int64_t quiet_ns, asked_ns; /* since when nothing came; when the others were asked last */
    int64_t looked_ns;          /* when notes were looked at last */
    int32_t polls;
    bool past;               /* results are written past the caches */
    int64_t rows;            /* how short rows are received: PERI_HOST_COPY_ROWS; 0 while there are few of them */
    bool deferred;           /* not begun: waits for a free cell */
    bool stalled, dropped;   /* fault points */
    bool cancelled;          /* receives were cancelled after a failure */
};

struct mpi_group {
    mpi_group *next, *parent;
    MPI_Comm comm;
    int32_t rank, size;
    int32_t *ranks;          /* size: ranks in the world */
    uint64_t tag;
    peri_status failed;
    char message[PERI_MESSAGE_MAX];
    mpi_request *active;
    uint64_t last;           /* highest number posted */
    peri_coll_op *history;   /* HISTORY, by number */
    const peri_coll_numbers *numbers; /* what they are taken for; NULL: not known */
    mpi_request *spare;      /* kept between operations, with its room for messages */
    char *scratch;           /* also kept */
    int64_t scratch_bytes;
    struct near_shared *shared; /* cells of its copies; NULL: messages only */
    uint32_t *used;          /* own cells in use, by peer: bits */
    bool left;
};

/** Where the memory of a rank lies that others of its machine can map (near_heap.c). */
typedef struct heap_place {
    uint64_t base, bytes; /* its addresses in the rank's process; 0 bytes: it has none */
    int32_t fd;           /* of its file, there */
} heap_place;

/** What is known of another rank of the world. */
typedef struct peer {
    int64_t pid;
    heap_place heap;         /* of a rank of this machine */
    char *mapped;            /* it, here; NULL: not yet, or */
    bool unreachable;        /* not to be had */
    uint64_t machine;        /* hash of host and process-id space: equal where pids can be compared */
    char host[48];           /* name of its machine */
    int32_t node;
    int32_t left;            /* worlds that it has left */
    uint64_t averaged, trained; /* what it said of its models when it left (peri_coll_numbers) */
    int64_t answered_ns;
    int32_t crossed;         /* answers in a row by which it waits for this rank, and this rank for it: see control.c */
    char answer[PERI_MESSAGE_MAX + 16]; /* once it has left: what failed there first, if anything did */
} peer;

#pragma GCC visibility push(hidden)

/** The state of the process. */
extern struct mpi_state {
    bool started, ours, open, broken; /* ours: MPI_Init was called here; broken: the world has failed, and cannot be
                                         left in good order */
    bool loose;                       /* a group of some ranks has failed, or could not be made: messages may be under
                                         way for ever */
    bool over;                        /* MPI was finalized, or given up: no call of it any more */
    bool crowded;                     /* this machine has more ranks than processors */
    bool near;                        /* there is a group whose ranks copy from memory to memory */
    int32_t rank, size;
    int32_t epoch;                    /* the world's number, greater than those of worlds before it; as on its other
                                         ranks */
    int32_t worlds;                   /* of all ranks that were launched, opened here */
    char why[PERI_MESSAGE_MAX];       /* what failed here first */
    MPI_Comm world, control;
    MPI_Comm base;                    /* whose duplicates they are */
    bool orphan;                      /* the program has freed that, and left them to this world */
    bool guest;                       /* that is a communicator of the program's, not all ranks that were launched */
    int hash_bits;
    int64_t piece;                    /* bytes of the largest message */
    int64_t timeout_ns;
    peer *peers;                      /* of the world that is open, or was last */
    int32_t n_peers;
    mpi_group *groups;
    const mpi_group *making;          /* the group that this rank makes, and waits for its other members; else NULL */
    int64_t near_least;               /* bytes above which a message is a job of near.c; the same on all ranks */
    char *bounce;                     /* a block of near_copy.c; NULL: not needed so far */
} peri__mpi;

/** What the core lends. */
extern const peri_plugin_host *peri__mpi_host;
/** The core's kernels `reduce` and `route_place`. */
extern peri_kernel_fn peri__mpi_reduce, peri__mpi_place;

/** Record a failure and return its status. */
#define FAIL(status, ...) PERI_HOST_FAIL(peri__mpi_host, status, __VA_ARGS__)

/** Pass an error on. */
#define TRY(expr)                                                                                                      \
    do {                                                                                                               \
        peri_status try_ = (expr);                                                                                     \
        if (try_ < 0) return try_;                                                                                     \
    } while (0)

/* -- mpi_guard.c --------------------------------------------------------------------------------------------------- */

/** MPI_Testall, MPI_Test and MPI_Isend (of bytes), each of which the thread of the guard sees begin and return. */
int peri__mpi_test_all(int n, MPI_Request *requests, int *flag, MPI_Status *statuses);
int peri__mpi_test_one(MPI_Request *request, int *flag, MPI_Status *status);
int peri__mpi_send(const void *data, int bytes, int to, int tag, MPI_Comm comm, MPI_Request *request);

/** From now on a call of these that takes @timeout_ns, but 5 to 15 s, or 4 s of processor time, ends the process with a
 *  line of it. */
peri_status peri__mpi_guard_start(int64_t timeout_ns);

enum { NEAR_RANKS = 64 }; /* largest group that has cells */

/* -- near_memory.c ------------------------------------------------------------------------------------------------- */

typedef struct near_cell {
    _Alignas(64) atomic_uint_least64_t next; /* bytes claimed since ever; CLOSED: no more */
    atomic_uint_least64_t done;              /* of these, bytes copied */
} near_cell;

/** Memory shared by a group: a header, then a cell for each (from, to, k). Reductions use the cells of (owner,
 *  owner). */
typedef struct near_shared {
    _Alignas(64) atomic_int failed; /* a copy failed or a rank gave up: complete jobs prove nothing */
    near_cell cells[];
} near_shared;

/** Give a new group its cells if all its ranks can reach each other. Blocks; collective over the members. Without
 *  cells, everything goes by messages. */
void peri__mpi_near_join(mpi_group *g);
void peri__mpi_near_leave(mpi_group *g);
near_cell *peri__mpi_near_cell_at(const mpi_group *g, int32_t from, int32_t to, int32_t k);
/** Nobody may claim anything of @g and of the groups made from it any more. */
void peri__mpi_near_close(const mpi_group *g);
/** After peri__mpi_near_close: true when no copy of the group is under way. */
bool peri__mpi_near_quiet(const mpi_group *g);

/* -- mpi_process.c ------------------------------------------------------------------------------------------------- */

/** The failure of MPI's call @what, which returned @code. */
peri_status peri__mpi_fail(const char *what, int code);
/** The group, or one that it was made from, that has failed; NULL while all are sound. */
const mpi_group *peri__mpi_broken(const mpi_group *g);
typedef struct world_rank {
    char text[40]; /* "rank 3 of the world, ", or "" */
} world_rank;
/** Member @i's rank in the world, where it differs from that in the group: for messages, which name both. */
world_rank peri__mpi_world_rank(const mpi_group *g, int32_t i);
/** An operation that was posted, for those who ask about its number. g->history is there. */
void peri__mpi_remember(mpi_group *g, const peri_coll_op *op);
/** Mark the group as failed, for this rank; nothing happens if it is. */
void peri__mpi_group_fail(mpi_group *g, peri_status status, const char *message);

/* -- messages.c ---------------------------------------------------------------------------------------------------- */

/** Places and sizes of the parts of a buffer, in bytes. */
typedef struct layout {
    int64_t *at, *bytes;
    int64_t fixed[64];
} layout;

/** Where what comes belongs, as in peri_coll_op; lines of at least one. */
typedef struct places {
    const peri_k_run *runs;
    int64_t n, lines, step;
} places;

/** Free a request and its room for messages; NULL: nothing. */
void peri__mpi_free_request(mpi_request *r);
/** Start one message of any size, in pieces that MPI can count. */
peri_status peri__mpi_message(mpi_request *r, bool receive, int other, const void *data, int64_t bytes);
peri_status peri__mpi_layout_init(layout *l, int32_t size);
void peri__mpi_layout_fini(layout *l);
/** Consecutive parts of counts[i] elements; returns the bytes of all. */
int64_t peri__mpi_layout_parts(layout *l, const int64_t *counts, int32_t size, int64_t element);
/** A part for each of @size ranks, all of them the @bytes from @at on. */
void peri__mpi_layout_same(layout *l, int32_t size, int64_t at, int64_t bytes);
/** The first run that reaches beyond element @x of what comes; p->n: none. */
int64_t peri__mpi_first_run(const places *p, int64_t x);
/** The first element of the part of rank @other, of what is filled or taken. */
int64_t peri__mpi_first_of(const peri_coll_op *op, int32_t other);
/** The places of what comes from rank @from. */
places peri__mpi_places_of(const peri_coll_op *op, int32_t from);
/** Run the kernel route_place over [begin, end). */
void peri__mpi_place_range(void *ctx, int64_t begin, int64_t end);
/** Copy @bytes; @past: past the caches. */
void peri__mpi_put(void *dst, const void *src, int64_t bytes, bool past);
/** Copy the part of rank @from, which lies in one piece at @src, to where it belongs. */
void peri__mpi_place_part(const mpi_request *r, int32_t from, const void *src);
/** Copy what lies in one piece at both ends, unless it is in its place already. */
void peri__mpi_place_own(const mpi_request *r, void *dst, const void *src, int64_t bytes);
/** dst = sum over the ranks, in their order, of own (this rank's) and the others' vectors in @scratch, `stride` bytes
 *  apart. */
peri_status peri__mpi_sum_up(mpi_request *r, void *dst, const void *own, const char *scratch, int64_t count,
                             int64_t stride);
/** dst = sum over the vectors at @src, one of each rank, in their order. */
void peri__mpi_sum_of(const mpi_request *r, void *dst, const void *const *src, int64_t count);
/** Room for @bytes in r->scratch, from the group's spare block if that is large enough. */
peri_status peri__mpi_take_scratch(mpi_request *r, int64_t bytes);
void peri__mpi_give_scratch(mpi_request *r);

/* -- near_heap.c --------------------------------------------------------------------------------------------------- */

/** A file of @bytes in memory, @name for who looks at this process; -1 and errno. */
int peri__mpi_memory_file(const char *name, int64_t bytes);
/** Open file @fd of a process of this machine; -1 and errno. */
int peri__mpi_open_of(const peer *p, int fd);
/** Make this rank's heap, unless it is there. Where that fails, or is forbidden, it has none. */
void peri__mpi_heap_open(void);
/** Where it is; without bytes if it is not. */
heap_place peri__mpi_heap_own(void);
/** The contract's functions (plugin/coll.h). Any thread's. */
void *peri__mpi_heap_lend(int64_t bytes);
void peri__mpi_heap_return(void *data);
/** Where this process has @bytes at @address of rank @rank of the world, of this machine; NULL: nowhere. */
char *peri__mpi_heap_at(int32_t rank, uint64_t address, uint64_t bytes);
/** Unmap the heaps of @n peers. */
void peri__mpi_heap_forget(peer *peers, int32_t n);

/* -- near_copy.c --------------------------------------------------------------------------------------------------- */

/** What a rank tells another about an operation. */
typedef struct descriptor {
    uint64_t send, recv;             /* addresses in its process */
    uint64_t send_bytes, recv_bytes; /* to and from the receiver of this note */
    places places;                   /* of its data, recv being where runs count from; runs: an address in its process;
                                        n = 0: none */
    uint64_t base;                   /* of the cell that it chose for its job */
    int32_t cell;                    /* -1: it has no job */
    int32_t direct;                  /* it has a function for what it sends (DIRECT_FILL), or receives (DIRECT_TAKE),
                                        here; 0: neither */
    uint32_t mark;
} descriptor;

enum { DIRECT_FILL = 1, DIRECT_TAKE = 2 };

/** A copy, or a sum, that several ranks may work on. */
typedef struct near_job {
    near_cell *cell;
    uint64_t base, bytes;
    int32_t from, to; /* ranks of the group; sums: both the owner of the part */
    uint64_t at;      /* sums: first byte of the part in the vectors */
    uint64_t most;    /* bytes of a claim, but for PIECE_REST */
    bool own;         /* this rank should do it: it receives, and sends about as much, which its peer does */
    bool alone, others; /* this rank alone can do it, or its peer alone: by a function */
    bool joined;        /* which fills together what it fills for several peers */
} near_job;

/** Of a request. */
struct near_state {
    near_job *jobs;
    int32_t n, cursor;       /* jobs; the first that may have something to claim */
    int32_t waited;          /* steps that found nothing to do */
    uint32_t *held;          /* own cells in use, by peer: bits */
    descriptor *mine, *theirs;
    peri_k_run **fetched;    /* by peer: its runs, read when this rank first helps it */
};

/** Bytes of each vector that are summed at once. */
int64_t peri__mpi_near_sum_piece(int32_t size);
/** Copy a piece of what is left. PERI_OK: the operation is complete; *@idle: there is nothing left to claim. */
peri_status peri__mpi_near_step(mpi_request *r, bool *idle);
/** Find the jobs that this rank fills together; they are all there. */
void peri__mpi_near_together(mpi_request *r);
/** Mark the ranks on which unfinished jobs depend. */
void peri__mpi_near_waited_for(const mpi_request *r, bool *members);

static inline bool has_copies_left(const mpi_request *r) { return r->near && r->near->n > 0; }

/* -- near.c -------------------------------------------------------------------------------------------------------- */

/** Do so many bytes between two ranks of a group with cells make a job? */
static inline bool near_large(int64_t bytes) { return bytes > peri__mpi.near_least; }
/** Every rank receives and sends about @bytes together, which may only run through the caches of the machine: choose
 *  how. */
void peri__mpi_past_caches(mpi_request *r, int64_t bytes);
/** Start an exchange with everybody: small data themselves, a descriptor where either direction is large. */
peri_status peri__mpi_near_exchange(mpi_request *r, char *recv, const int64_t *recv_at, const int64_t *recv_bytes,
                                    const char *send, const int64_t *send_at, const int64_t *send_bytes);
/** Start a broadcast from the root to everybody: a pair each. */
peri_status peri__mpi_near_broadcast(mpi_request *r, uint64_t bytes);
/** The descriptors of an exchange or a broadcast are here: make the jobs, this rank's own first, each rank beginning
 *  with another one. */
peri_status peri__mpi_near_pairs(mpi_request *r);
/** Start a reduction: everybody learns where all vectors are, and may sum any part. */
peri_status peri__mpi_near_reduce(mpi_request *r, uint64_t bytes);
/** The descriptors of a reduction are here; part i is [begin[i], end[i]) elements. */
peri_status peri__mpi_near_parts(mpi_request *r, const int64_t *begin, const int64_t *end);
/** Forget the request's copies, which are complete or closed. */
void peri__mpi_near_give(mpi_request *r);

/* -- phases.c ------------------------------------------------------------------------------------------------------ */

/** Go on until messages or copies are under way or the operation is complete. */
peri_status peri__mpi_advance(mpi_request *r);

/* -- control.c ----------------------------------------------------------------------------------------------------- */

/** Begin and end to receive notes. The end comes after all ranks have left the world. */
void peri__mpi_control_open(void);
void peri__mpi_control_close(void);
/** Read the notes that have come, and forget those that have gone. */
void peri__mpi_control_poll(void);

/** Ask a member of @g, which this rank makes, whether it comes: if it waits for this rank elsewhere, neither goes on,
 *  and the group that @g is made from fails. */
void peri__mpi_ask_to_make(const mpi_group *g, int32_t rank);
/** Tell the other members that the group is broken. */
void peri__mpi_poison(const mpi_group *g, peri_status status, const char *message);
/** True when the process of rank @rank of the world is known to be gone. */
bool peri__mpi_gone(int32_t rank);
/** A member of @g is gone. What it said of the group before it ended tells more than its end, and has come by now: that
 *  failure, or PERI_OK where it said nothing. */
peri_status peri__mpi_last_words(const mpi_group *g);
/** Nothing has come for a while: ask, and look who is gone. PERI_PENDING or the failure. */
peri_status peri__mpi_ask(mpi_request *r);
/** The contract's functions (plugin/coll.h). */
void peri__mpi_note_send(void *group, int32_t to, const void *data, int32_t bytes);
int32_t peri__mpi_note_take(void *group, int32_t *from, void *data);
void peri__mpi_elsewhere(void *group, const peri_coll_op *op);
void peri__mpi_numbers(void *group, const peri_coll_numbers *numbers);
peri_status peri__mpi_check(void *group);
bool peri__mpi_rank_gone(void *group, int32_t rank, char *text, size_t len);
void peri__mpi_blame(void *request, char *text, size_t len);
/** Say goodbye and wait until everybody has, MPI may be finalized then. Not true: somebody failed, or the deadline
 *  passed. */
bool peri__mpi_leave_world(int64_t timeout_ns);
/** After a failure, when this rank has said goodbye: has everybody, within so long? */
bool peri__mpi_all_left(int64_t timeout_ns);

/* -- join.c -------------------------------------------------------------------------------------------------------- */

/** Ranks of the world that this process was launched into; 1 when it was launched alone. */
int32_t peri__mpi_launched(void);
/** Tell the ranks of this machine that this one has come. */
void peri__mpi_join_announce(void);
/** Run @run, which calls MPI and may wait there, in a thread. @g: the group whose members it waits for, NULL: all
 *  ranks, which join. After a failure what it uses must stay, since the thread may be in it, and MPI is over. */
peri_status peri__mpi_within(const mpi_group *g, const char *what, int64_t timeout_ns, void (*run)(void));
/** A copy of the environment's variables that belong to MPI, and, when MPI_Init has returned, the environment as it was
 *  before: the copy is freed. NULL: no memory. */
char **peri__mpi_environment_keep(void);
void peri__mpi_environment_restore(char **kept);
/** State of a process, and its name without brackets in @name[16], which may be NULL; 0: it has ended, whether its
 *  parent has collected it or not. */
char peri__mpi_process_state(int64_t pid, char *name);

/* -- mpi_world.c --------------------------------------------------------------------------------------------------- */

/** The contract's functions (plugin/coll.h) about worlds and groups. */
peri_status peri__mpi_open(peri_coll_open *boot, void **group);
int32_t peri__mpi_node(void *group, int32_t rank);
peri_status peri__mpi_subgroup(void *group, const int32_t *ranks, int32_t n, uint64_t tag, void **sub);
peri_status peri__mpi_close(void *group);
void peri__mpi_release(void *group);

#pragma GCC visibility pop

#endif
