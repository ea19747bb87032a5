/* SPDX-License-Identifier: Apache-2.0
 *
 * comm/comm_internal.h (L3): groups and works from the inside: what the layers above use to build protocols of several
 * phases that are works themselves.
 *
 * How to write one: embed peri_work as the first member, make it with peri__work_new, and give it a step function that
 * advances as far as it can and returns PERI_PENDING until it is done. A phase that exchanges something makes an inner
 * work and tests it in step; one that is made before the first step is made between peri__parts_begin and
 * peri__parts_end.
 * Operations are numbered per group, and numbers must be taken in the same order on all ranks although later phases are
 * posted at times that differ between ranks. So a protocol takes the numbers of all its phases when it is made
 * (peri__group_reserve), hands them to its posts, and returns those that turn out not to be needed (peri__group_skip).
 * Each number is for one channel, and operations of a channel reach the transport in the order of their numbers: one
 * that is ready before its turn waits. So phases that wait for different things take numbers of different channels, or
 * the first of two protocols would hold up the second.
 */
#ifndef PERI_COMM_INTERNAL_H
#define PERI_COMM_INTERNAL_H

#include "../base/between.h"
#include "../tensor/tensor_internal.h"

#include <perilune/codec.h>
#include <perilune/comm.h>

enum { PERI_RECORD_MOST = 256, PERI_RECORD_LINE = 320, PERI_GROUP_NAME = 48, PERI_COMM_DEVICES = 8 };

/* -- works --------------------------------------------------------------------------------------------------------- */

typedef struct peri__comm peri__comm;

typedef struct peri__work_vtab {
    const char *name;
    /* Advance as far as possible without blocking: PERI_OK (done), PERI_PENDING (call again) or an error (recorded with
     * peri__fail). Never called again after OK or an error. Runs with the work's stream as the current one. */
    peri_status (*step)(peri_work *work);
    /* Release everything the work holds. Local; runs once, when the last reference is gone, and not while it is
     * pending. (optional) */
    void (*fini)(peri_work *work);
    /* After OK or an error: give up what is needed for progress only, such as requests. PERI_PENDING: not possible yet,
     * call again; the work lives on until it is. (optional) */
    peri_status (*settle)(peri_work *work);
} peri__work_vtab;

struct peri_work {
    peri__refs refs;              /* one of them is the list's while the work is in flight */
    const peri__work_vtab *vtab;
    peri_group *group;            /* retained */
    peri_status status;           /* PERI_PENDING until the step said otherwise */
    bool stepping, listed;        /* its step is running (it may not test itself); in the list of the world */
    bool inner;                   /* a part of another one, which tests it */
    int64_t ended_by;             /* the operation whose end ended it, as the watch of its world counts them; 0: not
                                     known (wait_log.c) */
    bool expired;                 /* its deadline counts as passed (peri_group_expire) */
    char *message;                /* of the failure */
    peri_device *device;          /* NULL: host only; else results are ordered on `stream` */
    peri_stream *stream;          /* current one of `device` when the work was made (retained); its steps queue there */
    peri_event *joined;           /* joins other consumers' streams (made when needed) */
    peri_work *previous, *next;   /* in flight, in the order of making */
};

/** A new work of @size bytes (zeroed, a peri_work first) of @group, in flight at once. @device: where its results are,
 *  NULL for none.
 *  @out new: one reference for the caller beside the list's own. */
peri_status peri__work_new(size_t size, const peri__work_vtab *vtab, peri_group *group, peri_device *device,
                           peri_work **out);
/** Release a work that its maker could not finish making. It ends with @status (an error), which is returned, and is
 *  never stepped again. */
peri_status peri__work_drop(peri_work *work, peri_status status);
/** Hand a new work out in *out; if @status is an error, drop it. */
peri_status peri__work_hand_out(peri_work *work, peri_status status, peri_work **out);
/** A work that is complete already, its results (if any) ordered on the current stream of @device. @out new. */
peri_status peri__work_done(peri_group *group, peri_device *device, peri_work **out);

/* -- groups -------------------------------------------------------------------------------------------------------- */

/** Numbers of a channel that were taken and are neither posted nor skipped. */
typedef struct peri__channel {
    uint64_t *taken; /* n of room, ascending: [0] is the next one to be posted */
    int32_t n, room;
} peri__channel;

/** One line of the recorder. */
typedef struct peri__coll_record {
    peri_coll_op op;          /* its pointers are not used, except for their being NULL */
    int64_t send_sum, recv_sum; /* elements */
    int64_t posted_ns, done_ns; /* 0: not yet */
    peri_status status;
} peri__coll_record;

/** The first operation that the group's recorder has; the last is group->sequence. */
uint64_t peri__record_first(const peri_group *group);
/** The recorder's line about operation @sequence at the time @now_ns, in @text. Returns whether it has ended. */
bool peri__record_line(const peri_group *group, uint64_t sequence, int64_t now_ns, char *text, size_t len);

struct peri_group {
    peri__refs refs;
    peri__comm *comm;   /* retained */
    peri_group *parent; /* retained, but by `node` of a parent that others retain; NULL for the world */
    peri_group *node;   /* of this rank's node, once peri__group_node has made it; lives as long as others retain this
                           group, or longer */
    void *ctx;          /* the transport's */
    void *device_ctx;   /* the device transport's; NULL: there is none */
    char name[PERI_GROUP_NAME];
    uint64_t tag;       /* equal on all members, distinct among the groups of a world */
    int32_t rank, size, local_rank, local_size;
    int32_t *ranks;     /* size: rank in the world */
    uint64_t sequence;  /* operations numbered so far */
    peri_coll_numbers numbers; /* the same with what they are for; the transports see it */
    peri__channel channels[PERI_CHANNEL_COUNT];
    int32_t channel;    /* of operations whose poster names none */
    int64_t timeout_ns;
    int32_t division;   /* PERI_DIVISION_* of gradients (transfer.c) */
    bool closed, unsigned_ops; /* unsigned_ops: no fingerprints */
    peri_status failed; /* PERI_OK while healthy; first failure wins */
    char *failure;      /* its message */
    peri__coll_record *records; /* ring of PERI_RECORD_MOST, by sequence; made at the first operation */
    struct peri__birth *births; /* how often groups were made from this one, by (ranks, name) */
};

/** A group object of @n ranks of @parent (of the world, where that is NULL); takes over nothing on failure. @out
 *  new. */
peri_status peri__group_make(peri__comm *comm, peri_group *parent, const int32_t *ranks, int32_t n, const char *name,
                             peri_group **out);
void peri__comm_release(peri__comm *comm);
/** Take the numbers of the next @n operations of the group, all for @channel; @first gets the first of them, the others
 *  follow it. Every rank must reserve the same in the same order. Each must be posted or skipped: later ones of the
 *  channel wait for it. */
peri_status peri__group_reserve(peri_group *group, int32_t channel, int32_t n, uint64_t *first);
/** Give a reserved number back that no rank is going to post. */
void peri__group_skip(peri_group *group, int32_t channel, uint64_t sequence);
/** The transport has the operation of that number: the next one's turn. */
void peri__group_posted(peri_group *group, int32_t channel, uint64_t sequence);
/** The number that @channel posts next; 0: none is taken. */
static inline uint64_t peri__group_next(const peri_group *group, int32_t channel)
{
    const peri__channel *c = &group->channels[channel];
    return c->n ? c->taken[0] : 0;
}
/** Show the group's transports, which have made it, what its numbers are taken for. */
void peri__group_show_numbers(peri_group *group);
/** PERI_OK, or PERI_EABORTED / PERI_ECLOSED in the name of @function. */
peri_status peri__group_check(const char *function, peri_group *group);
/** Poison the group with this thread's error record (and tell the other ranks); returns @status, which must be an
 *  error. */
peri_status peri__group_fail(peri_group *group, peri_status status);

/** The members of @group that are on this rank's node, as a group: @group itself if all are, else one that is made at
 *  the first call, which is collective, and shares its fate. Borrowed. */
peri_status peri__group_node(peri_group *group, peri_group **out);

/** Post an operation on HOST buffers: @op is copied with its count arrays (int64[size]) and runs, buffers are borrowed
 *  until complete; op->sequence: a reserved number, or 0 to take the next. signature is computed. On failure nothing is
 *  posted; if a number had been taken the group is poisoned.
 *  @keep_release(@keep) runs when the transport is done with the buffers (NULL: nothing to do); also when this call
 *  fails. @out new. */
peri_status peri__coll_post_host(peri_group *group, const peri_coll_op *op, void *keep,
                                 void (*keep_release)(void *keep), peri_work **out);

/** Post an operation on tensors of any device: op->send, recv are ignored, the tensors' elements are used (contiguous;
 *  NULL where the kind has none; retained until complete). Otherwise as peri__coll_post_host. */
peri_status peri__coll_post(peri_group *group, const peri_coll_op *op, peri_tensor *send, peri_tensor *recv,
                            peri_work **out);
/** The sum over the ranks of gradients of dense parameters, in place, on their channel whatever the group's current one
 *  is. @facts: as in peri_coll_op; copied. */
peri_status peri__coll_sum_gradients(peri_group *group, peri_tensor *tensor, uint64_t tag, const peri_coll_facts *facts,
                                     peri_work **out);

/* -- codecs -------------------------------------------------------------------------------------------------------- */

/** peri_codec_decode into @x: f32, contiguous, as many elements as the splits sum to. */
peri_status peri__codec_decode_to(peri_codec_context *context, peri_tensor *wire, peri_tensor *x);

/* -- the world of one rank ----------------------------------------------------------------------------------------- */

/** Host memory that takes part in queued copies; kept for reuse. */
typedef struct peri__pinned {
    struct peri__pinned *next;
    peri_device *device;
    peri_event *event; /* copies that use it are done when this is reached */
    char *data;
    int64_t bytes;
} peri__pinned;

/** What a world keeps per device whose memory its transport cannot take. */
typedef struct peri__stage {
    peri_device *device;
    peri_stream *stream;      /* of the copies */
    peri__pinned *free;       /* not in use */
    peri__pinned *retiring;   /* in use by a copy to the device; `event` says when it is done */
    int64_t free_bytes;
} peri__stage;

/** What a rank notes while its world is watched (peri_group_watch_set). Operations are counted from 1 on, those of
 *  earlier watches too. */
typedef struct peri__watch {
    bool on;
    bool within;        /* the step of what the rank waits for is running */
    int64_t from;       /* since when the rank waits; 0: it does not */
    const peri_work *awaited; /* for what; NULL: not said. Compared only */
    int64_t seen;       /* the last of the operations that tests in the running step found complete; 0: none */
    int64_t before;     /* operations of earlier watches */
    peri_watched_op *ops;
    peri_watched_wait *waits;
    int64_t n_ops, n_waits, room_ops, room_waits;
} peri__watch;

struct peri__comm {
    peri__refs refs;
    const peri_coll_vtab *vtab;
    const peri_coll_vtab *device_vtab; /* of the transport for tensors of `device`; NULL: there is none */
    peri_device *device;
    int32_t rank, size;
    int32_t forks;            /* peri__forks of the process that opened it */
    int32_t *node;            /* size: node of each rank */
    peri_reducer *reducers;   /* whose parameters are averaged over ranks of the world */
    /* Set with `reducers`: of a world that is left, what they have kept alike, and what became of it, into @numbers. */
    void (*sum_up)(const struct peri__comm *comm, peri_coll_numbers *numbers);
    peri_work *first, *last;  /* in flight, and ended ones that still have to settle */
    peri_work *cursor;        /* the next one that work.c steps when it steps all */
    int64_t pending;          /* works in flight that have not ended */
    peri_coll_numbers *shown; /* the world's, while it lives */
    int64_t events;           /* steps forward so far */
    int64_t outer;            /* works in the list that are no inner ones */
    int32_t within;           /* calls of peri__parts_begin without their end */
    bool stepping;
    int32_t on_device;        /* operations that the device transport has and has not given back */
    void *device_world;       /* the device transport's world; NULL: there is none */
    bool chooses;             /* the transport for tensors of a GPU is still to be chosen, when one is named */
    char transports[320];     /* what carries tensors, in words */
    int64_t timeout_ns;       /* the world's when it was joined */
    peri_status lost;         /* failure of one whose results the poster had been promised, until somebody is told; else
                                 PERI_OK */
    uint64_t lost_tag;        /* its group's tag */
    char *lost_message;
    peri__watch watch;
    peri__stage stages[PERI_COMM_DEVICES];
};

/** An operation of @group whose results the poster has been promised has failed with @status, this thread's error. */
void peri__comm_note_lost(peri_group *group, peri_status status);
/** The program is told that @group, or one that it was made from, has failed: it need not be told again. */
void peri__comm_told(const peri_group *group);
/** PERI_OK, or such a failure, which nobody was told of. */
peri_status peri__comm_lost_status(peri__comm *comm);
/** What the thread of @comm, a world of processes, does between operations and before it blocks for a device. */
extern const peri__between_vtab peri__comm_between;

/** The rank cannot go on before @awaited (NULL: not said) has. */
void peri__watch_waits(peri__comm *comm, const peri_work *awaited);
/** An operation has ended that the transport got at @posted_ns. Returns its number; 0: it is not noted. */
int64_t peri__watch_ended(peri_group *group, uint64_t sequence, int32_t channel, int64_t bytes, int64_t posted_ns);
/** A test has found @work complete. */
void peri__watch_found(peri__comm *comm, const peri_work *work);
static inline void peri__watch_seen(peri__comm *comm, const peri_work *work)
{
    if (comm->watch.on) peri__watch_found(comm, work);
}
void peri__watch_fini(peri__watch *watch);

/** Works that are made between these two are parts of another one, whose step tests them. A step itself lies between
 *  them. */
static inline void peri__parts_begin(peri_group *group) { group->comm->within++; }
static inline void peri__parts_end(peri_group *group) { group->comm->within--; }

/** True when the device transport carries tensors of @device. */
static inline bool peri__by_device(const peri_group *g, const peri_device *device)
{
    return g->device_ctx && g->comm->device == device;
}
/** True when the transport can use tensors of @device where they are. */
bool peri__stage_not_needed(const peri__comm *comm, const peri_device *device);
/** True when, besides, an all_to_all can place what comes (recv_runs). */
bool peri__stage_can_place(const peri__comm *comm, const peri_device *device);
/** True when, besides, an all_to_all or an all_gather can have functions instead of a buffer (fill, take). */
bool peri__stage_can_call(const peri__comm *comm, const peri_device *device);
/** A tensor of @n f32 numbers, which nobody has set, for operations of @comm: in memory in which these are fastest, if
 *  there is any. */
peri_status peri__stage_tensor(const peri__comm *comm, peri_device *device, int64_t n, peri_tensor **out);
peri_status peri__stage_of_device(peri__comm *comm, peri_device *device, peri__stage **out);
peri_status peri__stage_buffer_get(peri__stage *stage, int64_t bytes, peri__pinned **out);
/** Give a buffer back; @retire: when its event is reached, else at once. */
void peri__stage_buffer_put(peri__stage *stage, peri__pinned *buffer, bool retire);
/** Look which retiring buffers are free; @block waits for all. */
void peri__stage_sweep(peri__stage *stage, bool block);
void peri__stage_fini(peri__stage *stage);

#endif
