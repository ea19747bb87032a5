/* SPDX-License-Identifier: Apache-2.0
 *
 * nccl_internal.h: what the files of the transport nccl know of each other, from the lowest to those that call it.
 * nccl.c, above them all, says what the transport does.
 */
#ifndef PERI_BACKENDS_NCCL_INTERNAL_H
#define PERI_BACKENDS_NCCL_INTERNAL_H

#include "../../plugin/coll.h"
#include "../../plugin/device.h"

#include <nccl.h>
#include <pthread.h>
#include <stdatomic.h>

enum {
    HISTORY = 256, /* operations of a group that a rank can still tell others about */
    AHEAD = 16,    /* operations on the device with which a rank may go on without waiting: some two steps of
                      training */
    SPARE = 64     /* events that are kept for later requests */
};

#define STALL_NS ((int64_t)50000000) /* without an end for so long, a rank asks */
#define ASK_NS ((int64_t)200000000)  /* and asks again after so long */
#define LOOK_NS ((int64_t)20000)     /* the device is asked what has ended no more often than this */

/** NCCL's functions, found at run time. */
typedef struct nccl_library {
    ncclResult_t (*GetVersion)(int *);
    ncclResult_t (*GetUniqueId)(ncclUniqueId *);
    ncclResult_t (*CommInitRankConfig)(ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *);
    ncclResult_t (*CommSplit)(ncclComm_t, int, int, ncclComm_t *, ncclConfig_t *);
    ncclResult_t (*CommGetAsyncError)(ncclComm_t, ncclResult_t *);
    ncclResult_t (*CommDestroy)(ncclComm_t);
    ncclResult_t (*CommAbort)(ncclComm_t);
    const char *(*GetErrorString)(ncclResult_t);
    const char *(*GetLastError)(ncclComm_t);
    ncclResult_t (*GroupStart)(void);
    ncclResult_t (*GroupEnd)(void);
    ncclResult_t (*Send)(const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
    ncclResult_t (*Recv)(void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
    ncclResult_t (*AllReduce)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t);
    ncclResult_t (*AllGather)(const void *, void *, size_t, ncclDataType_t, ncclComm_t, cudaStream_t);
    ncclResult_t (*ReduceScatter)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t);
    ncclResult_t (*Broadcast)(const void *, void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
} nccl_library;

typedef struct nccl_group nccl_group;
typedef struct nccl_request nccl_request;

/** What this rank sends another, beside the data. At most PERI_COLL_NOTE bytes. */
typedef struct note {
    int32_t kind, channel;
    uint64_t group, sequence, signature;
    int64_t send, recv; /* QUERY about all_to_all: elements for and expected from the receiver of the note; else -1 */
    int32_t status;     /* POISON; ANSWER: has the answering rank posted the operation? */
    char text[400];     /* words; ID: the identity */
} note;
_Static_assert(sizeof(note) <= PERI_COLL_NOTE, "a note is what the host's transport takes");

enum { NOTE_ID = 1, NOTE_ORDER, NOTE_QUERY, NOTE_ANSWER, NOTE_POISON };

/** A note that is kept: of a group that is not made yet, or an ORDER whose operation is not launched yet. */
typedef struct early {
    struct early *next;
    int32_t from; /* rank in the world */
    note note;
} early;

/** The life of a request. WAITS: posted. STARTS: it is this operation's turn, and NCCL has some of its parts. RUNS:
 *  NCCL has all of it, and `done` is recorded behind it. */
enum { REQUEST_WAITS, REQUEST_STARTS, REQUEST_RUNS, REQUEST_ENDED };

struct nccl_request {
    nccl_request *next; /* in the list that has it: `posted` of its group, then `first` of its lane */
    nccl_group *group;
    peri_coll_op op;
    int32_t state, phase;    /* phase: parts of the operation that NCCL has taken */
    bool joined;             /* the poster's stream waits for `done` */
    peri_status status;
    char *message;           /* of the failure */
    void *ready, *done;      /* events: what the poster queued before; all of the operation */
    void *scratch;           /* parts received before they are summed, then the list of their addresses */
    int64_t scratch_bytes;
    int64_t began_ns, asked_ns;
};

/** COMM_MADE: NCCL was asked for it, and has not said that it is ready. */
enum { COMM_NONE, COMM_MADE, COMM_READY };

/** Communicators of a group on which operations run. Each channel belongs to one of them (peri__nccl_lane). */
enum { LANES = 3 };

/** A communicator of a group with its stream: a lane, or the base, of which the lanes are split. */
typedef struct communicator {
    ncclComm_t comm;
    int32_t state;
    void *stream;
    nccl_request *first, **last; /* of a lane: what runs, in the order of the launches */
} communicator;

/** What is known of another member. */
typedef struct member {
    int64_t answered_ns;
    uint64_t about;  /* number of the operation that it was asked about */
    bool posted;     /* and whether it has posted it */
    char answer[160];
} member;

struct nccl_group {
    nccl_group *next, *parent;
    struct nccl_world *world;
    uint64_t tag;
    int32_t rank, size;
    int32_t *ranks; /* size: ranks in the world */
    peri_status failed;
    char message[PERI_MESSAGE_MAX];
    peri_status guarded;  /* why nccl_guard.c has aborted the communicators; PERI_OK: it has not */
    char guard_text[200];
    communicator base, lanes[LANES];
    nccl_request *posted, **last_posted; /* not launched yet, in the order of the posts */
    early *order, **last_order;          /* what the first member has launched and this one has not, in its order */
    ncclUniqueId id;
    bool has_id, left;
    uint64_t last;         /* highest number posted */
    peri_coll_op *history; /* HISTORY, by number; of counts only an all_to_all's, in a block that the entry owns
                              (send_counts) */
    const peri_coll_numbers *numbers; /* what they are taken for; NULL: not known */
    member *members;       /* size */
};

/** The world of one device. */
typedef struct nccl_world {
    const peri_device_vtab *vtab; /* of the device */
    void *device;
    const peri_coll_vtab *host;
    void *host_group;
    int32_t rank, size;
    nccl_group *groups;
    early *unknown; /* notes of groups that are not made yet */
    int32_t handles;
    atomic_int running;  /* operations that NCCL has and that have not ended, of all groups */
    int64_t moved_ns;    /* when operations were last moved on */
    int64_t looked_ns;   /* when the device was last asked what has ended */
    void *spare[SPARE];  /* events that no request uses */
    int32_t n_spare;
    int64_t timeout_ns;            /* of the world */
    pthread_mutex_t lock;          /* for all of it, but what follows; held in each call of the transport */
    atomic_int_least64_t seen_ns;  /* when the rank's thread last came by */
    pthread_t guard;               /* nccl_guard.c's thread, if has_guard */
    pthread_mutex_t guard_lock;
    pthread_cond_t guard_wake;
    bool has_guard, guard_ends;    /* guard_ends: under guard_lock */
} nccl_world;

#pragma GCC visibility push(hidden)

extern const peri_plugin_host *peri__nccl_host;
extern nccl_library peri__nccl;

#define FAIL(status, ...) PERI_HOST_FAIL(peri__nccl_host, status, __VA_ARGS__)
#define TRY(expr)                                                                                                      \
    do {                                                                                                               \
        peri_status try_ = (expr);                                                                                     \
        if (try_ < 0) return try_;                                                                                     \
    } while (0)

/* -- library.c ----------------------------------------------------------------------------------------------------- */

/** Load libnccl.so.2, once. False: @reason says why not. */
bool peri__nccl_load(char *reason, size_t len);
/** The failure of NCCL's call @what. */
peri_status peri__nccl_fail(const char *what, ncclResult_t result);

/* -- notes.c ------------------------------------------------------------------------------------------------------- */

/** The lane of a channel. */
communicator *peri__nccl_lane(nccl_group *g, int32_t channel);
/** The group, or one that it was made from, that has failed; NULL while all are sound. */
const nccl_group *peri__nccl_broken(const nccl_group *g);
/** Abort the group's communicators: ends what runs on the device. */
void peri__nccl_abort(nccl_group *g);
/** Mark the group as failed, stop what runs; nothing happens if it has failed. @tell: the other members too. */
void peri__nccl_group_fail(nccl_group *g, peri_status status, const char *message, bool tell);
/** The same for what NCCL said to this rank: the others hear of whom it is. */
void peri__nccl_lost(nccl_group *g, peri_status status, const char *message);
/** Send @n to member @to. */
void peri__nccl_tell(nccl_group *g, int32_t to, note *n);
/** Read all notes that have come to the world. */
void peri__nccl_hear(nccl_world *w);
/** Notes about @g that came before it was made. */
void peri__nccl_hear_early(nccl_group *g);
/** An operation was posted: compare it with what the first member said about it. The first member tells the others of
 *  it: they launch in its order. */
void peri__nccl_posted(nccl_group *g, const peri_coll_op *op);
/** Forget the oldest entry of the order: it was launched. */
void peri__nccl_ordered(nccl_group *g);
/** It takes long: ask the others, and look who is gone. */
void peri__nccl_ask(nccl_request *r);
/** The contract's function. */
void peri__nccl_blame(void *request, char *text, size_t len);

/* -- operations.c -------------------------------------------------------------------------------------------------- */

/** Make the base, as far as that goes now, if its identity is known or @wanted. PERI_OK: it is ready. */
peri_status peri__nccl_base(nccl_group *g, bool wanted);
/** Make the lane, as far as that goes now; all members make lanes in the same order. PERI_OK: it is ready. */
peri_status peri__nccl_split(nccl_group *g, communicator *lane);
/** What NCCL says of a communicator: PERI_OK; PERI_PENDING: busy with a call; or a failure, also one of an operation
 *  that runs. */
peri_status peri__nccl_well(const communicator *x);
/** Give the next parts of @r to NCCL. PERI_PENDING: NCCL is busy with it; PERI_OK: it has all, and @r->done is
 *  recorded. */
peri_status peri__nccl_start(nccl_request *r);

/* -- nccl_guard.c -------------------------------------------------------------------------------------------------- */

/** The lock of a world, and its thread where there are other ranks to wait for. */
peri_status peri__nccl_guard_init(nccl_world *w);
/** End the thread. */
void peri__nccl_guard_fini(nccl_world *w);

#pragma GCC visibility pop

#endif
