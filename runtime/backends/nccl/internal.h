/* SPDX-License-Identifier: Apache-2.0
 *
 * internal.h: what the files of the transport nccl know of each other, from the lowest to those that call it. nccl.c, above them all,
 * says what
 * the transport does.
 */
#ifndef PERI_BACKENDS_NCCL_INTERNAL_H
#define PERI_BACKENDS_NCCL_INTERNAL_H

#include "../../../kernels/kernels.h"
#include "../../plugin/coll.h"
#include "../../plugin/device.h"

#include <nccl.h>

enum { HISTORY = 256 /* operations of a group that a rank can still tell others about */ };

#define STALL_NS ((int64_t)50000000) /* without an end for so long, a rank asks */
#define ASK_NS ((int64_t)200000000)  /* and asks again after so long */

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

enum { NOTE_ID = 1, NOTE_SPLIT, NOTE_POSTED, NOTE_QUERY, NOTE_ANSWER, NOTE_POISON };

/** A note that came before what it is about. */
typedef struct early {
    struct early *next;
    int32_t from; /* rank in the world */
    note note;
} early;

enum { REQUEST_WAITS, REQUEST_STARTS, REQUEST_RUNS, REQUEST_ENDED };

struct nccl_request {
    nccl_request *next; /* of its channel, in the order of the posts */
    nccl_group *group;
    peri_coll_op op;
    int32_t state, phase;    /* phase: parts of the operation that NCCL has taken */
    peri_status status;
    char *message;           /* of the failure */
    void *ready, *done;      /* events: what the poster queued before; all of the operation */
    void *scratch;           /* parts received before they are summed, then the list of their addresses */
    int64_t scratch_bytes;
    int64_t began_ns, asked_ns;
};

enum { COMM_NONE, COMM_WANTED, COMM_MADE, COMM_READY };

/** A communicator of a group: for one channel, or the base, of which those are split. */
typedef struct communicator {
    ncclComm_t comm;
    int32_t state;
    void *stream;                 /* of a channel: on which its operations run */
    nccl_request *first, **last;  /* of a channel: not ended, in the order of the posts */
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
    communicator base, channels[PERI_CHANNEL_COUNT];
    int8_t splits[PERI_CHANNEL_COUNT]; /* channels in the order in which the first member had them split */
    int32_t n_splits, split;           /* of them, so many are done */
    ncclUniqueId id;
    bool has_id, left;
    uint64_t last;         /* highest number posted */
    peri_coll_op *history; /* HISTORY, by number; of counts only an all_to_all's, in a block that the entry owns (send_counts) */
    member *members;       /* size */
    early *early;
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
} nccl_world;

#pragma GCC visibility push(hidden)

extern const peri_plugin_host *peri__nccl_host;
extern nccl_library peri__nccl;

#define FAIL(status, ...) PERI_HOST_FAIL(peri__nccl_host, status, __VA_ARGS__)
#define TRY(expr)                                                                                                                     \
    do {                                                                                                                              \
        peri_status try_ = (expr);                                                                                                    \
        if (try_ < 0) return try_;                                                                                                    \
    } while (0)

/* -- library.c ------------------------------------------------------------------------------------------------------------------------- */

/** Load libnccl.so.2, once. False: @reason says why not. */
bool peri__nccl_load(char *reason, size_t len);
/** The failure of NCCL's call @what. */
peri_status peri__nccl_fail(const char *what, ncclResult_t result);

/* -- notes.c --------------------------------------------------------------------------------------------------------------------------- */

/** The group, or one that it was made from, that has failed; NULL while all are sound. */
const nccl_group *peri__nccl_broken(const nccl_group *g);
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
/** An operation was posted: tell the next member, and look at what its predecessor said about it. */
void peri__nccl_posted(nccl_group *g, const peri_coll_op *op);
/** It takes long: ask the others, and look who is gone. */
void peri__nccl_ask(nccl_request *r);
/** The contract's function. */
void peri__nccl_blame(void *request, char *text, size_t len);

/* -- operations.c ---------------------------------------------------------------------------------------------------------------------- */

/** Make the communicators that are wanted, as far as that goes now. */
peri_status peri__nccl_communicators(nccl_group *g);
/** What NCCL says of a communicator: PERI_OK; PERI_PENDING: busy with a call; or a failure, also one of an operation that runs. */
peri_status peri__nccl_well(const communicator *x);
/** Give the next parts of @r to NCCL. PERI_PENDING: NCCL is busy with it; PERI_OK: it has all, and @r->done is recorded. */
peri_status peri__nccl_start(nccl_request *r);

#pragma GCC visibility pop

#endif
