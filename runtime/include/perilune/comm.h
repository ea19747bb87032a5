/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/comm.h: groups of ranks, collective operations, works.
 *
 * An operation is posted by all ranks of its group, in the same order on every rank, and returns a *work*: test it, or
 * wait for it. No function here waits for other ranks, except peri_work_wait, and peri_comm_open, peri_group_new and
 * peri_group_close where a comment says so; all of these end by a deadline. A group is healthy or *poisoned*: after its
 * first failure (a mismatch between ranks, a dead peer, a deadline, an abort) every later call on it returns
 * PERI_EABORTED and quotes the first message.
 *
 * Ranks count from 0.
 *
 * Threads: all groups (peri_group), works (peri_work) and reducers (peri_reducer) of one world together are used by one
 * thread at a time, since a call about one of them moves the operations of the others on, too.
 */
#ifndef PERILUNE_COMM_H
#define PERILUNE_COMM_H

#include <perilune/tensor.h>

typedef struct peri_group peri_group;
typedef struct peri_work peri_work;
typedef struct peri_reducer peri_reducer;

/* -- worlds and groups --------------------------------------------------------------------------------------------- */

/** How to join a world. All zero is the usual choice. */
typedef struct peri_comm_config {
    int64_t size; /* sizeof(peri_comm_config) */
    const char *transport; /* "self", "sim", "mpi" or another plugin; NULL or "auto": mpi if launched as one of several
                              ranks, else self */
    const char *job;       /* sim: the name that the ranks of one world share */
    int32_t rank, world_size; /* sim: the place of this rank; elsewhere the transport knows, and a size other than 0
                                 must agree with it */
    int32_t local_size;    /* ranks of a node: 0 as found; else nodes are imposed, `local_size` consecutive ranks each,
                              the last maybe of fewer (tests) */
    double timeout_s;      /* default deadline of operations in seconds; 0: PERI_COMM_TIMEOUT_S, else 300 */
    /* A second one, for tensors of `device`: they travel without copies through host memory. NULL: none; "auto": chosen
     * as peri_comm_use_device does */
    const char *device_transport;
    const char *device;    /* name of the device of the device transport (a device name as peri_device_get takes) */
    /* The world is of these ranks, numbered as there: a pointer to the program's MPI_Comm, which is duplicated and
     * stays the program's; it may free it while the world is open.
     * NULL: all ranks that were launched. Ranks outside of it take no part: they call nothing here. The transport is
     * mpi. The program has initialised MPI with MPI_THREAD_SERIALIZED or more, MULTIPLE where it calls MPI itself
     * during calls of this library, and finalizes it after peri_group_close. Whoever does not come is then found out by
     * the deadline alone */
    const void *communicator;
} peri_comm_config;

/** Join the world of all ranks. Collective: every rank, once. May block until the others are there. A process is in one
 *  world of the transport mpi at a time (PERI_EINVAL); once it has closed that, it may join another, also one of other
 *  ranks. @config NULL: all zero. @out new. */
PERI_API peri_status peri_comm_open(const peri_comm_config *config, peri_group **out);
/** All ranks of @world are going to exchange tensors of the device @name. If the world was joined with the
 *  device_transport "auto", the device is cuda (or cuda:<number>), and each rank has a GPU of its own, nccl carries
 *  them from now on, in the world and in groups made from now on; else they go through host memory.
 *  peri_group_transports says what was chosen and why. Only the first GPU that is named counts. Of a group that is not
 *  the world nothing changes: it keeps what it was made with. Collective; waits for the others. */
PERI_API peri_status peri_comm_use_device(peri_group *world, const char *name);
/** Whether transport @name could run here; if not, @reason (of @size bytes) says why. Local, never fails. */
PERI_API bool peri_comm_probe(const char *name, char *reason, int64_t size);

/** A group of the given ranks of @parent (distinct, in the order that the new group numbers them). Collective over the
 *  members, who all give the same list and @name, and make their groups in the same order; may block until the members
 *  are there. Other ranks may call it too and get NULL. @out new. */
PERI_API peri_status peri_group_new(peri_group *parent, const int32_t *ranks, int32_t n, const char *name,
                                    peri_group **out);
/** The ranks of @parent that run on this rank's node, in their order. Collective like peri_group_new. @out new. */
PERI_API peri_status peri_group_intra_node(peri_group *parent, peri_group **out);
/** The ranks of @parent with this rank's place on their nodes, in the order of the nodes; PERI_EINVAL when the nodes
 *  hold different numbers of ranks. Collective like peri_group_new. @out new. */
PERI_API peri_status peri_group_cross_node(peri_group *parent, peri_group **out);
/** Add a reference. */
PERI_API void peri_group_retain(peri_group *group);
/** Give up a reference; NULL is fine. Local: leaving in order is peri_group_close. */
PERI_API void peri_group_release(peri_group *group);
/** Leave the group; closing the world leaves all groups made from it and the transport. Collective; nothing may be in
 *  flight (peri_group_pending) unless the group is poisoned. Blocks, within the default deadline, where the transport
 *  needs the others to leave. Twice is fine; the handle must still be released. */
PERI_API peri_status peri_group_close(peri_group *group);

/** This rank's number in the group. */
PERI_API int32_t peri_group_rank(const peri_group *group);
/** Number of ranks of the group. */
PERI_API int32_t peri_group_size(const peri_group *group);
/** This rank's place among the group's ranks on its node, and how many those are. */
PERI_API int32_t peri_group_local_rank(const peri_group *group);
PERI_API int32_t peri_group_local_size(const peri_group *group);
/** The rank in the world of rank @rank of the group; -1 if there is no such rank. */
PERI_API int32_t peri_group_global_rank(const peri_group *group, int32_t rank);
/** The node of rank @rank of the group; -1 if there is no such rank. */
PERI_API int32_t peri_group_node(const peri_group *group, int32_t rank);
/** Name given at construction, "world" for the world. Borrowed. */
PERI_API const char *peri_group_name(const peri_group *group);
/** Name of the transport. Static text, borrowed. */
PERI_API const char *peri_group_transport(const peri_group *group);
/** Name of the transport that carries tensors of @device, without being copied through host memory where it is a device
 *  transport. */
PERI_API const char *peri_group_transport_of(const peri_group *group, const peri_device *device);
/** The transports of the world in words, with the reason where they were chosen for tensors of a GPU. Borrowed. */
PERI_API const char *peri_group_transports(const peri_group *group);
/** Whether sums over the ranks of tensors on @device are made in rank order (rank 0 + rank 1 + ...): then they have the
 *  same bits on every transport of which that is true. */
PERI_API bool peri_group_rank_order(const peri_group *group, const peri_device *device);
/** Seconds after which a wait on the group's operations fails (> 0), from now on. Time in which nobody tests does not
 *  count. */
PERI_API peri_status peri_group_timeout_set(peri_group *group, double seconds);
PERI_API double peri_group_timeout(const peri_group *group);
/** PERI_OK, or PERI_EABORTED quoting the failure that poisoned the group (or a group that it was made from), here or,
 *  as far as word of it has come, on another rank. Local. */
PERI_API peri_status peri_group_healthy(peri_group *group);
/** Poison the group, and every group made from it, on all ranks: their waits fail and quote @message. Local, does not
 *  block. */
PERI_API void peri_group_abort(peri_group *group, const char *message);
/** Post this rank's operations on @channel (PERI_CHANNEL_*) from now on, those of the peri_coll_* functions; new groups
 *  have PERI_CHANNEL_DENSE. A channel's operations reach the transport one after the other, in the order of their
 *  posts; those of two channels may overtake each other. All ranks alike. Embedding exchanges and sharded modules use
 *  the channels of their kinds of data. Local. */
PERI_API peri_status peri_group_channel_set(peri_group *group, int32_t channel);
/** The channel in use. */
PERI_API int32_t peri_group_channel(const peri_group *group);
/** The name of a channel ("dense", "ids", ..., "own1", ...); NULL if there is no such channel. */
PERI_API const char *peri_channel_name(int32_t channel);
/** Let the group's operations carry a fingerprint (kind, dtype, counts, tag; the default), or none: for measuring what
 *  they cost. All ranks alike, and before the first operation. Local. */
PERI_API peri_status peri_group_fingerprints_set(peri_group *group, bool on);
/** The last (at most 256) operations of the group on this rank, one a line, oldest first, in @text of @size bytes (cut
 *  if longer). */
PERI_API void peri_group_record(const peri_group *group, char *text, int64_t size);

/** A collective operation of this rank that has ended while its world was watched. */
typedef struct peri_watched_op {
    uint64_t group;     /* a mark of its group, equal on all members */
    uint64_t sequence;  /* its number in the group, equal on all members */
    int64_t posted_ns, done_ns; /* peri_time_ns: when the transport got it; when it was found complete */
    int64_t bytes;      /* that this rank sent */
    int32_t channel, reserved;
} peri_watched_op;

/** A stretch of time in which this rank could not go on. */
typedef struct peri_watched_wait {
    int64_t from_ns, to_ns;
    int64_t op;         /* index of the operation whose end ended it */
} peri_watched_wait;

/** Note every operation that ends in the world of @group, and when this rank waits for one, until @on is false; what
 *  was noted stays until it is true again. Local. */
PERI_API peri_status peri_group_watch_set(peri_group *group, bool on);
/** What was noted: @ops and @waits, in the order of their ends; borrowed until the next call of peri_group_watch_set or
 *  the next operation. */
PERI_API void peri_group_watched(const peri_group *group, const peri_watched_op **ops, int64_t *ops_noted,
                                 const peri_watched_wait **waits, int64_t *waits_noted);
/** For loops that test by themselves: this rank cannot go on now; and what it tests, if it is a work. Notes it while
 *  the world is watched. (peri_work_wait does so itself.) Local. */
PERI_API void peri_group_waits(peri_group *group);
PERI_API void peri_work_waits(peri_work *work);

/** Move this rank's operations on, in all groups of its world; returns a count that grows whenever one of them got
 *  further. */
PERI_API int64_t peri_group_progress(peri_group *group);
/** This rank's unfinished operations in all groups of its world. */
PERI_API int64_t peri_group_pending(const peri_group *group);
/** Treat the deadlines of this rank's operations as passed, in all groups of its world: for schedulers that know that
 *  nothing will happen any more. */
PERI_API void peri_group_expire(peri_group *group);

/* -- works --------------------------------------------------------------------------------------------------------- */

/** PERI_OK when the work is complete (its results are ordered before later work on the caller's current streams),
 *  PERI_PENDING, or its error, which sticks. Does not block. Moves this rank's other operations on when it is
 *  pending. */
PERI_API peri_status peri_work_test(peri_work *work);
/** Test until it is complete or failed. Blocks, within the deadlines of its operations. Not for ranks of a sim world,
 *  which share a thread: they test. */
PERI_API peri_status peri_work_wait(peri_work *work);
/** Add a reference. */
PERI_API void peri_work_retain(peri_work *work);
/** Give up a reference; NULL is fine. A pending work goes on without its handle. */
PERI_API void peri_work_release(peri_work *work);

/* -- collective operations ----------------------------------------------------------------------------------------- */

/* All of them: collective over @group, same order on all ranks; local calls that do not block. Tensors are borrowed by
 * the call and retained by the work; inputs must stay unchanged and outputs unread until it is complete. Outputs are
 * contiguous, inputs may be views; all are on one device, of one dtype, and take no part in the tape. @tag: 0, or a
 * number on which the ranks must agree (a mark of the caller's own). @out new. */

/** Complete when all ranks have posted it. */
PERI_API peri_status peri_coll_barrier(peri_group *group, uint64_t tag, peri_work **out);
/** @tensor of rank @root to all ranks, in place. */
PERI_API peri_status peri_coll_broadcast(peri_group *group, peri_tensor *tensor, int32_t root, uint64_t tag,
                                         peri_work **out);
/** Combine @tensor over the ranks, in place; PERI_REDUCE_*. Sums are made in rank order (but for transports that
 *  cannot, peri_group_rank_order), of 16-bit floats in f32. */
PERI_API peri_status peri_coll_all_reduce(peri_group *group, peri_tensor *tensor, int32_t reduce, uint64_t tag,
                                          peri_work **out);
/** @output gets @input of every rank, one after the other along dimension 0; all inputs have the same shape. */
PERI_API peri_status peri_coll_all_gather(peri_group *group, peri_tensor *output, peri_tensor *input, uint64_t tag,
                                          peri_work **out);
/** The same with @rows[i] (int64[size], copied, equal on all ranks) rows from rank i. */
PERI_API peri_status peri_coll_all_gather_v(peri_group *group, peri_tensor *output, peri_tensor *input,
                                            const int64_t *rows, uint64_t tag, peri_work **out);
/** Cut @input along dimension 0 into equal parts; @output gets part `rank`, combined over the ranks. */
PERI_API peri_status peri_coll_reduce_scatter(peri_group *group, peri_tensor *output, peri_tensor *input,
                                              int32_t reduce, uint64_t tag, peri_work **out);
/** The same with part i of @rows[i] (int64[size], copied, equal on all ranks) rows. */
PERI_API peri_status peri_coll_reduce_scatter_v(peri_group *group, peri_tensor *output, peri_tensor *input,
                                                const int64_t *rows, int32_t reduce, uint64_t tag, peri_work **out);
/** Cut @input along dimension 0 into equal parts, part i goes to rank i; @output has the parts received, by rank. */
PERI_API peri_status peri_coll_all_to_all(peri_group *group, peri_tensor *output, peri_tensor *input, uint64_t tag,
                                          peri_work **out);
/** The same with @send_rows[i] rows to rank i and @recv_rows[i] rows from rank i (int64[size], copied). */
PERI_API peri_status peri_coll_all_to_all_v(peri_group *group, peri_tensor *output, peri_tensor *input,
                                            const int64_t *recv_rows, const int64_t *send_rows, uint64_t tag,
                                            peri_work **out);

/* -- all-to-all of lists and of blocks ----------------------------------------------------------------------------- */

/** @inputs[i] goes to rank i, @outputs[i] gets what rank i has for this rank (both size(group) tensors, of one dtype
 *  and device; views are fine). Sizes may differ between ranks; the two ranks of a pair must agree on the number of
 *  elements. @recorded: while gradients are recorded, f32 and f64 outputs become results of an operation whose backward
 *  pass sends their gradients back, whether or not an input of this rank requires grad (all ranks alike). Collective
 *  like the operations above. @out new. */
PERI_API peri_status peri_coll_all_to_all_list(peri_group *group, peri_tensor *const *outputs,
                                               peri_tensor *const *inputs, bool recorded, uint64_t tag,
                                               peri_work **out);

/** TensorFlow's TPU AllToAll. */
typedef struct peri_tpu_all_to_all_args {
    const int32_t *group_assignment; /* [groups x replicas] ranks: each rank of the group once; a row exchanges among
                                        itself. Borrowed */
    int32_t groups, replicas;
    int32_t concat_dimension, split_dimension; /* from 0; negative counts from the end */
    int32_t split_count;                       /* must be `replicas` */
    uint64_t tag;                              /* a number on which the ranks must agree */
} peri_tpu_all_to_all_args;

/** Cut @input (of one shape and dtype on all ranks) into split_count blocks along split_dimension, block k goes to the
 *  k-th rank of this rank's row; @output has the blocks received, by their ranks' places in the row, along
 *  concat_dimension. f32 and f64 are recorded while gradients are. Collective over all ranks of @group. @output new,
 *  uninitialised until the work is complete; @out new. */
PERI_API peri_status peri_coll_tpu_all_to_all(peri_group *group, peri_tensor *input,
                                              const peri_tpu_all_to_all_args *args, peri_tensor **output,
                                              peri_work **out);

/* -- data-parallel gradients --------------------------------------------------------------------------------------- */

/** Average the gradients of @params (n leaves of f32 or f64, retained; their order equal on all ranks) over @group, in
 *  buckets of about
 *  @bucket_bytes (0: 25 MiB; at most a quarter of all, or 512 KiB) that travel while the backward pass still computes
 *  the rest: buckets are filled from the last parameter to the first and posted in that order. Each backward pass that
 *  reaches one of them ends when all are averages: peri_backward_step is collective then, and every rank must run a
 *  pass that reaches a parameter, or a watched tensor, or call peri_reducer_finish instead. A parameter without a
 *  gradient counts as zeros where another rank has one; one that no rank has a gradient of gets none. Gradients
 *  accumulate: what is averaged is the whole gradient. One reducer per parameter. @out new. */
PERI_API peri_status peri_reducer_new(peri_group *group, peri_tensor *const *params, int32_t n, int64_t bucket_bytes,
                                      peri_reducer **out);
/** Take part in the averages without a backward pass, on a rank that has none while others have; or after passes with
 *  the reducer disabled. PERI_PENDING: call again. Collective, does not block. Without ranks to average with, or
 *  disabled, it does nothing. */
PERI_API peri_status peri_reducer_finish(peri_reducer *reducer);
/** Let backward passes through the operation that made @t end with the averages too, whether or not they reach a
 *  parameter: for what a model returns, since a loss may need a parameter on some ranks only. Leaves and other tensors
 *  that no operation made are left alone. */
PERI_API peri_status peri_reducer_watch(peri_reducer *reducer, peri_tensor *t);
/** Average gradients at the end of backward passes (the default) or not (accumulation over several passes: all but the
 *  last). All ranks alike. */
PERI_API peri_status peri_reducer_enabled_set(peri_reducer *reducer, bool on);
/** While on, backward passes end when the averages have set out; peri_reducer_finish waits for them, before the next
 *  pass. All ranks alike.
 */
PERI_API peri_status peri_reducer_deferred_set(peri_reducer *reducer, bool on);
/** Let go of all parameters, which may be in another reducer from now on: between two passes. Later passes, also those
 *  through what was watched, average nothing with this one. Local, on all ranks alike. */
PERI_API void peri_reducer_detach(peri_reducer *reducer);
/** Give up a reference; NULL is fine. */
PERI_API void peri_reducer_release(peri_reducer *reducer);

#endif
