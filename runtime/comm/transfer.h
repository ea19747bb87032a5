/* SPDX-License-Identifier: Apache-2.0
 *
 * comm/transfer.h (L3): numbers on their way in one direction (encoded, posted, decoded, summed, divided), and the two
 * nodes on the tape of numbers whose gradients take the same way back.
 */
#ifndef PERI_COMM_TRANSFER_H
#define PERI_COMM_TRANSFER_H

#include "comm_internal.h"

/* -- one direction ------------------------------------------------------------------------------------------------- */

/** Functions of the caller's in place of the buffer of one end (peri_coll_op.fill, take), where peri__stage_can_call
 *  says that they can be; one of them is NULL. @ctx keeps what they need until it is released. */
typedef struct peri__transfer_direct {
    void (*fill)(void *ctx, const peri_coll_stretch *stretches, int32_t count, bool stays);
    void (*take)(void *ctx, int64_t from, int64_t n, const void *data);
    void *ctx;
    void (*retain)(void *ctx), (*release)(void *ctx);
} peri__transfer_direct;

/** What travels and how. Everything is borrowed until the post returns, but for @contexts: until the transfer is
 *  over. */
typedef struct peri__transfer_args {
    int32_t kind;            /* PERI_COLL_ALL_TO_ALL, _REDUCE_SCATTER (sums f32 or f64) or _ALL_GATHER */
    int32_t channel;         /* PERI_CHANNEL_* */
    uint64_t sequence, tag;  /* as in peri_coll_op; sequence 0: the channel's next */
    const int64_t *out, *in; /* group size each: numbers for each rank, and from it. reduce_scatter: all in[i] are
                                out[rank]; all_gather: all out[i] are in[rank] */
    peri_codec *codec;       /* of what travels, f32; NULL: it travels as it is */
    peri_codec_context *const *contexts; /* of that codec over @out and @in, [2]; NULL: made here */
    peri_tensor *to;         /* where numbers belong, contiguous (all that arrive, or, placed by @runs, more); NULL: a
                                new one */
    const struct peri_k_run *runs; /* as peri_coll_op.recv_runs: of an all_to_all without codec into @to; NULL: in order
                                      of ranks */
    int64_t n_runs, lines, step; /* as peri_coll_op.n_recv_runs, recv_lines, recv_step */
    double divisor;          /* numbers are divided by it once they are here; 0, 1: they are not */
    const peri__transfer_direct *direct; /* f32, of an all_to_all or an all_gather without codec, divisor and runs;
                                            NULL: buffers */
} peri__transfer_args;

/** One direction on its way. Zeroed: none. */
typedef struct peri__transfer {
    peri_work *work;              /* NULL: none, or complete */
    peri_tensor *numbers;         /* where they arrive, or are decoded to; NULL with a codec: nowhere yet */
    peri_tensor *wire;            /* their codes as they arrive; NULL: no codec, or decoded */
    peri_codec_context *decoding; /* of the codes */
    double divisor;               /* 1: nothing is left to divide */
    int32_t parts;                /* codes: parts to be added up after decoding; 1: none. A codec's numbers are not
                                     summed on their way: a reduce_scatter sends each part to its rank, which decodes
                                     them all and adds them up in f32 */
} peri__transfer;

/** Post @src (contiguous, of any shape: its numbers in row-major order; NULL: @args->direct fills it). On failure @t is
 *  empty. */
peri_status peri__transfer_post(peri_group *group, peri_tensor *src, const peri__transfer_args *args,
                                peri__transfer *t);
/** PERI_OK at once and ever after when all is here, decoded, summed and divided; else PERI_PENDING, or the error. */
peri_status peri__transfer_test(peri__transfer *t);
/** The numbers of a complete transfer, which becomes empty: the caller's reference (of one dimension if they are new);
 *  NULL: they were taken. */
peri_tensor *peri__transfer_numbers(peri__transfer *t);
void peri__transfer_fini(peri__transfer *t);

/** Hash over what the two ends of a wire must agree on of a codec; 0: none. */
uint64_t peri__codec_hash(const peri_codec *codec);
/** What gradients that travel over @group are divided by: its size or 1, as @division (PERI_DIVISION_*) says or leaves
 *  open. */
double peri__gradient_divisor(const peri_group *group, int32_t division);

/* -- there and back on the tape ------------------------------------------------------------------------------------ */

/** Numbers that travel now and whose gradients travel back: two nodes that share it. The later one, *arrive*, lets the
 *  gradient set out in its backward; the earlier one, *leave*, waits for it in its own. Whatever was recorded between
 *  them is differentiated while the gradient travels. Embed it as the first member. */
typedef struct peri__trip peri__trip;

typedef struct peri__trip_vtab {
    peri__node_vtab leave, arrive; /* PERI__TRIP_NODES */
    /* Let the gradient set out: @grad_out[i] (borrowed) is that of output i of arrive, NULL where nothing flowed back.
     * Does not wait. */
    peri_status (*set_out)(peri__trip *trip, peri_tensor *const *grad_out);
    /* Wait for it without blocking (PERI_PENDING: called again), and write the gradients of leave's inputs. */
    peri_status (*come_back)(peri__trip *trip, const peri__node *leave, peri_tensor **grad_in);
    /* The last reference is gone: free it. */
    void (*fini)(peri__trip *trip);
} peri__trip_vtab;

struct peri__trip {
    peri__refs refs;
    const peri__trip_vtab *vtab;
    peri_group *group; /* retained; poisoned if the gradient cannot set out */
    bool out;          /* it has set out; else the results took no part in the loss, on any rank */
};

/** The nodes of a trip's table, by their names, and what come_back does beside waiting (PERI__UPDATES, or 0). */
#define PERI__TRIP_NODES(leave_name, arrive_name, does)                                                                \
    .leave = {.name = (leave_name),                                                                                    \
              .acts = PERI__WAITS | (does),                                                                            \
              .backward = peri__trip_leave_backward,                                                                   \
              .fini = peri__trip_node_fini},                                                                           \
    .arrive = {.name = (arrive_name),                                                                                  \
               .acts = PERI__POSTS,                                                                                    \
               .backward = peri__trip_arrive_backward,                                                                 \
               .fini = peri__trip_node_fini}

/** One reference, the caller's. */
void peri__trip_init(peri__trip *trip, const peri__trip_vtab *vtab, peri_group *group);
void peri__trip_release(peri__trip *trip);
/** Record that @inputs leave. @leave: the caller's reference, for peri__trip_arrives. */
peri_status peri__trip_leaves(peri__trip *trip, peri_tensor *const *inputs, int32_t n, peri__node **leave);
/** Record that @outputs arrived; takes *@leave, which becomes NULL. */
peri_status peri__trip_arrives(peri__trip *trip, peri__node **leave, peri_tensor *const *outputs, int32_t n);
peri_status peri__trip_leave_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in);
peri_status peri__trip_arrive_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in);
void peri__trip_node_fini(peri__node *node);

#endif
