/* SPDX-License-Identifier: Apache-2.0
 *
 * tensor/tensor_internal.h (L2): the structs behind the handles, and what the layers above use to launch kernels and
 * record gradients.
 */
#ifndef PERI_TENSOR_INTERNAL_H
#define PERI_TENSOR_INTERNAL_H

#include "../base/base_internal.h"
#include "../plugin/plugin_internal.h"

#include <perilune/device.h>
#include <perilune/tensor.h>

/* -- devices ------------------------------------------------------------------------------------------------------- */

struct peri_stream {
    peri__refs refs;
    peri_device *device;
    uint64_t number;            /* no two streams of a process have the same, also not one after the other */
    void *ctx;                  /* the backend's */
    void *freeing;              /* the backend's event: what of this stream comes before memory of another is freed */
    void *awaited;              /* the backend's event, made when the host first polls for the end of the stream; else
                                   NULL */
    peri_stream *next, *before; /* the device's list of streams */
};

struct peri_event {
    peri__refs refs;
    peri_device *device;
    void *ctx;
    uint64_t recorded; /* number of the stream that it marks; 0: none yet */
};

enum { PERI_MAX_DEVICES = 32 };

struct peri_device {
    const peri_device_vtab *vtab;
    const int32_t *work; /* the backend's numbers of kernels and operations by ours, -1: it has none; NULL: they are
                            ours */
    void *ctx;
    int32_t caps, id; /* PERI_DEVICE_*; place in the table of devices */
    char name[32], alias[32]; /* "cuda:1"; what was asked for, "cuda", if that is another word */
    peri_stream default_stream; /* never released; head of the list of streams, which device.c's stream_lock guards */
};

/** What @call of a backend returned; a failure about which the backend said nothing is put in words. */
peri_status peri__said(const peri_device *device, const char *call, peri_status status);

/** Wait until all has run that is queued on @stream, or on any stream of @device, now. The public functions that wait
 *  also tell what lookups found (late.c). */
peri_status peri__stream_dry(peri_stream *stream);
peri_status peri__device_dry(peri_device *device);
/** Close all devices, when no object is left; peri_device_get opens them again. */
void peri__devices_close(void);
/** The same, with a call of @before for each device that is still open. */
void peri__devices_end(void (*before)(peri_device *device));
/** Release the memory that is kept for reports of @device, or for its copies (pinned), while nobody uses it. */
void peri__reports_drop(const peri_device *device);
void peri__pinned_trim(const peri_device *device);

/** Queue kernel @kernel (PERI_K_*) over [0, n) on the current stream; n = 0 queues nothing. */
peri_status peri__launch(peri_device *device, int32_t kernel, const void *args, size_t args_size, int64_t n,
                         int64_t grain);
/** @args has to be a pointer to the kernel's own struct, and @name that of a kernel: steps have none here. */
#define PERI_LAUNCH(device, name, args, n, grain)                                                                      \
    peri__launch((device), PERI_K_##name, 1 ? (args) : (const peri_k_args_of_##name *)NULL, sizeof *(args), (n),       \
                 (grain))
/** Queue operation @op (PERI_OP_*) on the current stream, with the scratch that the device wants for it. */
peri_status peri__launch_op(peri_device *device, int32_t op, const void *args, size_t args_size);
#define PERI_RUN(device, name, args) \
    peri__launch_op((device), PERI_OP_##name, 1 ? (args) : (const peri_op_args_of_##name *)NULL, sizeof *(args))
/** PERI_EUNSUPPORTED, naming device and what is missing, unless the device has all of @work (PERI_K_*, PERI_OP_*; n
 *  numbers): asked by functions that change something by several launches. Single launches ask for themselves. */
peri_status peri__need_work(const char *function, peri_device *device, const int32_t *work, int32_t n);
#define PERI_NEED_WORK(function, device, ...)                                                                          \
    peri__need_work((function), (device), (const int32_t[]){__VA_ARGS__},                                              \
                    (int32_t)(sizeof(int32_t[]){__VA_ARGS__} / sizeof(int32_t)))

/** Queue a copy on the current stream; PERI_COPY_*. */
peri_status peri__copy(peri_device *device, void *dst, const void *src, int64_t bytes, int32_t kind);
/** Whether the host may work in the device's memory at any time: nothing is ever queued. */
static inline bool peri__immediate(const peri_device *device)
{
    const int32_t both = PERI_DEVICE_HOST_ACCESS | PERI_DEVICE_IMMEDIATE;
    return (device->caps & both) == both;
}
/** Wait until the backend's @event has been reached; exchanges move on meanwhile. */
peri_status peri__event_wait(const peri_device *device, void *event);
/** Host memory that may take part in queued copies; not counted as an object. */
peri_status peri__host_alloc(peri_device *device, int64_t bytes, void **out);
void peri__host_free(peri_device *device, void *p, int64_t bytes);
/** Whether kernels of the device can work in memory of the host. */
bool peri__reaches_host(const peri_device *device);

/* -- storage and tensors ------------------------------------------------------------------------------------------- */

typedef struct peri__report peri__report; /* report.h */

/** Somebody who wants to know before a caller's tensor is changed in place. */
typedef struct peri__storage_watch {
    void (*before)(void *ctx, const peri_tensor *t);
    void *ctx;
} peri__storage_watch;

/** PERI_OK, or an error that says why @t, a view of a storage, cannot be a leaf. */
typedef peri_status (*peri__leaf_fn)(const peri_tensor *t);

/** What somebody found out about the elements of a storage, kept with it so that it need not be found out again: see
 *  peri__note_take. The first member of what its maker keeps. */
typedef struct peri__note {
    uint64_t version; /* of the storage when the elements were looked at */
    void (*fini)(struct peri__note *note);
} peri__note;

/** How far lookups in something run ahead of the verdicts on their ids (late.c; its address is what these reports are
 *  about): as many lookups are judged behind as there were backward passes, so that only a loop that trains goes on
 *  without the verdict, and comes by again to hear it. */
typedef struct peri__unheard {
    atomic_int_least64_t passes; /* backward passes that have come to a lookup */
    atomic_int left;             /* lookups that may still be judged later */
} peri__unheard;

typedef struct peri__storage peri__storage;
typedef struct peri__node peri__node;

/** What is left to do at the end of a backward pass, once for each pass that reaches a leaf or node that has it. Part
 *  of an object that others hold through it. */
typedef struct peri__ending {
    peri__refs refs;
    peri_status (*finish)(struct peri__ending *ending); /* PERI_PENDING: call again */
    void (*fini)(struct peri__ending *ending);          /* the last reference is gone */
    /* a pass does not come, since the calling thread has just recorded an error in what leads to it; or NULL */
    void (*missed)(struct peri__ending *ending);
    uint64_t pass;                                      /* the last pass that has reached it */
} peri__ending;

/** Give up a reference; NULL is fine. */
void peri__ending_release(peri__ending *ending);

/** What optimizers have done to a parameter that ranks train alike: they compare it (comm/reducer.c). */
typedef struct peri__trained {
    uint64_t history;     /* a hash over all steps: of which optimizer, with which numbers and loaded states */
    peri_coll_facts step; /* the last one, for messages; without names: there was none. The last number is free */
} peri__trained;

#define PERI__ANY_VERSION UINT64_MAX

struct peri_tensor {
    peri__refs refs;
    int32_t dtype, ndim;
    int64_t shape[PERI_MAX_DIMS], stride[PERI_MAX_DIMS]; /* elements */
    int64_t offset;                                      /* elements from the start of the storage */
    peri__storage *storage;
    bool requires_grad;
    peri__node *node; /* what computed it (retained); NULL for leaves */
    int32_t output;   /* which of the node's outputs it is */
    uint64_t made;    /* the version of its storage of which the node's gradients are; PERI__ANY_VERSION: of all */
    peri_tensor *grad; /* leaves: accumulated gradient, or NULL */
    int64_t place;     /* leaves, during a backward pass: its gradient among those that are summed */
    /* Leaves: called when a backward pass has finished this tensor's gradient (data-parallel reduction). */
    void (*ready)(void *ctx, peri_tensor *leaf);
    /* With `ready`: whether a node of this pass may write the leaf's gradient straight to `grad_place`, which then is
     * the gradient. */
    peri_status (*offer)(void *ctx, peri_tensor *leaf, bool *free);
    peri_tensor *grad_place; /* with `ready`: where the gradient lies when the pass is over; borrowed */
    void *ready_ctx;
    peri__trained *trained; /* with `ready`: optimizers write here what they do; borrowed from who set it */
    peri__ending *ending; /* with `ready`: what ends a pass that reaches this leaf; borrowed from who set it */
};

/** A block of device memory. Its free is ordered by `home`, the stream that was current when it was made: work of other
 *  streams on it must be joined to home (peri_stream_wait) before the last release. */
struct peri__storage {
    peri__refs refs;
    peri_device *device;
    peri_stream *home;
    char *data;
    int64_t bytes;
    bool mapped; /* in the host's memory, where the device reaches it; not on devices whose memory that is anyway */
    void (*give_back)(void *data); /* to whom the data belong; NULL: they are the device's */
    void (*release)(void *ctx, void *data); /* the same of a program's own memory, with its `ctx`; or NULL */
    void *ctx;
    atomic_uint_least64_t version; /* grows when a caller's tensor is changed in place: see peri__changed */
    _Atomic(const peri__storage_watch *) watch; /* who is told before that; NULL: nobody. Borrowed: it sets and resets
                                                   it itself */
    atomic_uint_least64_t serial; /* see peri__storage_serial; 0: nobody has asked */
    atomic_bool exposed; /* a program has its address (peri_tensor_data, its own memory), and may write uncounted */
    _Atomic(peri__leaf_fn) leaf; /* whether a view of it may be a leaf, asked by peri_tensor_requires_grad_set; NULL:
                                    any may */
    _Atomic(peri__note *) note; /* or NULL: nothing is known, or somebody has taken it */
    peri__report *ahead; /* its number on the way to the host since a backward pass began from it (peri__item_ahead), or
                            NULL */
    peri__unheard unheard; /* of lookups in it as a matrix that is trained (peri_embedding_bag) */
    struct peri__storage *next, *before; /* of devices that can record graphs: the list of those that live */
    peri_tensor first; /* the tensor that the storage was made for: both are one block of the heap, which views of the
                          storage keep, too. Zeros if it was made for none */
};

/** @mapped: in the host's memory (peri__reaches_host). */
peri_status peri__storage_new(peri_device *device, int64_t bytes, bool mapped, peri__storage **out);
/** Add a reference, unless the last one is gone: false. */
bool peri__storage_hold(peri__storage *s);
/** All storages of @device that live, each with a reference more. @list new (peri__free); of devices that cannot record
 *  (plugin/device.h, graphs) it is empty. */
peri_status peri__storages_hold(const peri_device *device, peri__storage ***list, int64_t *n);
/** In memory that somebody lends, which @device can use: @data, given back in the end by @give_back, any thread's. */
peri_status peri__storage_lent(peri_device *device, int64_t bytes, void *data, void (*give_back)(void *data),
                               peri__storage **out);
/** Take the note of a storage away, if it is about the elements as they are now; else NULL. Whoever takes it puts it
 *  back or calls its fini; others find none meanwhile and look for themselves. */
peri__note *peri__note_take(peri__storage *s);
/** Put a note (taken) with the storage; where it cannot be kept, because elements may change uncounted or another note
 *  is there, it is gone. */
void peri__note_put(peri__storage *s, peri__note *note);
/** A number of this storage alone, from 1 on: its address may be another storage's later. */
uint64_t peri__storage_serial(peri__storage *s);
void peri__storage_release(peri__storage *storage);

/** First element's address on the device. */
static inline void *peri__data(const peri_tensor *t)
{
    return t->storage->data + t->offset * peri_dtype_size(t->dtype);
}
static inline peri_device *peri__device(const peri_tensor *t) { return t->storage->device; }
static inline int64_t peri__numel(const peri_tensor *t)
{
    int64_t n = 1;
    for (int32_t d = 0; d < t->ndim; d++) n *= t->shape[d];
    return n;
}
/** Bytes of the elements of @t, 0 for NULL. */
static inline int64_t peri__tensor_bytes(const peri_tensor *t)
{
    return t ? peri__numel(t) * peri_dtype_size(t->dtype) : 0;
}
/** Elements of one row, which an index of dimension 0 names. */
static inline int64_t peri__row_numel(const peri_tensor *t)
{
    int64_t n = 1;
    for (int32_t d = 1; d < t->ndim; d++) n *= t->shape[d];
    return n;
}
static inline int64_t peri__row_bytes(const peri_tensor *t) { return peri__row_numel(t) * peri_dtype_size(t->dtype); }
/** Rows of @width bytes that are worth a thread. */
static inline int64_t peri__row_grain(int64_t width)
{
    enum { BYTES = 1 << 19 };
    return peri__max(1, BYTES / peri__max(width, 1));
}
bool peri__contiguous(const peri_tensor *t);
/** A change that is recorded (capture.h): each launch of the recording makes it anew. */
void peri__capture_changed(const peri_tensor *t);
/** What the calling thread records (capture.h); NULL: nothing. */
extern _Thread_local struct peri__capture *peri__capturing;
/** Say that the elements of a caller's tensor are about to change in place, before what changes them is queued: a
 *  backward pass that saved them is an error from now on. */
static inline void peri__changed(const peri_tensor *t)
{
    if (peri__capturing) peri__capture_changed(t);
    atomic_fetch_add_explicit(&t->storage->version, 1, memory_order_relaxed);
    const peri__storage_watch *watch = atomic_load_explicit(&t->storage->watch, memory_order_acquire);
    if (watch) watch->before(watch->ctx, t);
}

/** Of a variable: the tensor that it holds then, if any, is released where its scope ends. Who gives the reference away
 *  takes it with peri__hand_over. What a call has failed to make must leave the variable NULL.
 *
 *      PERI__HELD peri_tensor *flat = NULL; */
#define PERI__HELD __attribute__((cleanup(peri__held_end)))
static inline void peri__held_end(peri_tensor **held) { peri_tensor_release(*held); }
static inline peri_tensor *peri__hand_over(peri_tensor **held)
{
    peri_tensor *t = *held;
    *held = NULL;
    return t;
}

/** peri_tensor_new, @mapped: in the host's memory, see peri__storage_new. */
peri_status peri__tensor_placed(peri_device *device, int32_t dtype, int32_t ndim, const int64_t *shape, bool mapped,
                                peri_tensor **out);
/** A tensor of @n elements of a valid dtype in memory that is lent (peri__storage_lent). */
peri_status peri__tensor_lent(peri_device *device, int32_t dtype, int64_t n, void *data, void (*give_back)(void *data),
                              peri_tensor **out);
/** A contiguous tensor in memory of the program's: @release (or NULL) gets @data back, from any thread. */
peri_status peri__tensor_host(peri_device *device, int32_t dtype, int32_t ndim, const int64_t *shape, void *data,
                              void (*release)(void *ctx, void *data), void *ctx, peri_tensor **out);
/** A tensor of the same device and dtype as @like with another shape, uninitialised. */
peri_status peri__tensor_like(const peri_tensor *like, int32_t ndim, const int64_t *shape, peri_tensor **out);
/** A tensor like @like with @rows rows. (row_segments.c) */
peri_status peri__rows_like(const peri_tensor *like, int64_t rows, peri_tensor **out);
/** A tensor with @like's dtype, shape, strides and offset in @s, whose reference is taken, also on failure. */
peri_status peri__tensor_in(peri__storage *s, const peri_tensor *like, peri_tensor **out);
/** A view of @base's storage without gradient recording. */
peri_status peri__tensor_view(peri_tensor *base, int32_t ndim, const int64_t *shape, const int64_t *stride,
                              int64_t offset, peri_tensor **out);
/** Give *@t, a contiguous tensor that the caller owns, a shape of as many elements: itself, if nobody else has it, or a
 *  view in its place. */
peri_status peri__shaped(peri_tensor **t, int32_t ndim, const int64_t *shape);
/** Bytes of a contiguous tensor of @dtype and @shape, or PERI_EINVAL if there is no such tensor. */
peri_status peri__shape_bytes(const char *function, int32_t dtype, int32_t ndim, const int64_t *shape, int64_t *bytes);
/** "f32 [3, 4]" for messages. */
const char *peri__tensor_text(const peri_tensor *t, char *buffer, size_t len);
typedef struct peri__words {
    char text[64];
} peri__words;
/** "the 1st tensor" of 0, "the 2nd tensor from the end" of -2: right whatever a caller's language counts from. */
const char *peri__place_text(int32_t place, const char *what, peri__words *words);
/** As peri__place_text, of a dimension. */
const char *peri__dim_text(int32_t dim, peri__words *words);
/** @t itself (a new reference) if contiguous, else a contiguous copy; not recorded. */
peri_status peri__contiguous_of(const peri_tensor *t, peri_tensor **out);
/** *out (a new reference, recorded) = @t with its dimension @d exchanged with the last one: @t itself if it is that. */
peri_status peri__exchange_last(peri_tensor *t, int32_t d, peri_tensor **out);
/** peri_tensor_copy into what has been said to change (peri__changed) when it was posted. */
peri_status peri__tensor_arrive(peri_tensor *dst, const peri_tensor *src);
/** Strides of @t when repeated to @shape[ndim]; PERI_EINVAL, naming @function, if it cannot be. */
peri_status peri__expanded(const char *function, const peri_tensor *t, int32_t ndim, const int64_t *shape,
                           int64_t *stride);
/** Fill @dst with zeros (queued). */
peri_status peri__tensor_zero(peri_tensor *dst);

/** Checks with a message that names @function and @what; PERI_EINVAL. @dtype < 0: any. */
peri_status peri__check_tensor(const char *function, const char *what, const peri_tensor *t, int32_t dtype,
                               int32_t ndim);
/** f32 or f64, for ops with gradients. */
peri_status peri__check_float(const char *function, const char *what, const peri_tensor *t);
/** f32, f64, f16 or bf16. */
peri_status peri__check_real(const char *function, const char *what, const peri_tensor *t);
peri_status peri__check_same_device(const char *function, const peri_tensor *a, const peri_tensor *b);
/** PERI_EINVAL if one of @list[n], a list of objects, is NULL; @what: "the tensors". */
peri_status peri__check_list(const char *function, const char *what, const void *list, int32_t n);

/* -- the gradient tape --------------------------------------------------------------------------------------------- */

/** What a backward may do. Nodes that post or wait run whenever the pass reaches them, also when no gradient did: other
 *  ranks wait for the exchange. They say which they do, so that a pass posts early, in the reverse of the order of
 *  recording, and waits late. */
enum {
    PERI__POSTS = 1,   /* posts an exchange, */
    PERI__WAITS = 2,   /* returns PERI_PENDING until one is complete */
    PERI__UPDATES = 4, /* changes tables that other nodes look up: such nodes keep the reverse of the order of
                          recording */
    PERI__CALLS = 8,   /* a hook: returns PERI_PENDING once, for whoever runs the pass (hook.c) */
    PERI__ONE = 16,    /* looks at node->of_one before it reads its gradient */
};

/** What a kind of node does. */
typedef struct peri__node_vtab {
    const char *name;
    int32_t acts; /* what its backward does beside computing gradients: PERI__POSTS | PERI__WAITS | PERI__UPDATES */
    /* Compute gradients of the inputs. @grad_out[i] (borrowed) is the gradient of output i, NULL where nothing flowed
     * back. Write new references into @grad_in[i] for inputs with needs[i]; leave NULL for none. May return
     * PERI_PENDING: it is called again with the same arguments until it does not. Must not modify grad_out, unless
     * peri__exclusive says that nobody else can see it. */
    peri_status (*backward)(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in);
    /* Release what `saved` cannot hold. (optional) */
    void (*fini)(peri__node *node);
} peri__node_vtab;

enum { PERI_NODE_SAVED = 6 /* at least */, PERI_NODE_KEPT = 2 + PERI_MAX_DIMS };

/** Where the gradient of an input goes: output number `output` of `node`, or `leaf` (both retained); neither:
 *  nowhere. */
typedef struct peri__edge {
    peri__node *node;
    int32_t output;
    peri_tensor *leaf;
} peri__edge;

/** The shape of a tensor that need not stay. */
typedef struct peri__shape {
    int32_t ndim;
    int64_t size[PERI_MAX_DIMS];
} peri__shape;

static inline peri__shape peri__shape_of(const peri_tensor *t)
{
    peri__shape shape = {.ndim = t->ndim};
    for (int32_t d = 0; d < t->ndim; d++) shape.size[d] = t->shape[d];
    return shape;
}

/** One recorded operation. Nodes are ordered by `sequence`, which grows with every recording of the process; a backward
 *  pass visits each after all that use its outputs, in the order that backward.c says. */
struct peri__node {
    peri__refs refs;
    const peri__node_vtab *vtab;
    uint64_t sequence;
    int32_t n_in, n_out, n_saved;
    peri__edge *in;      /* n_in; this and what follows lies behind the node */
    peri_tensor **saved; /* [n_saved], retained, or NULL: tensors that backward needs. PERI_NODE_SAVED, or n_in */
    uint64_t *version;   /* [n_saved]: of their storages when they were saved */
    const char *name;                    /* for messages: the vtab's, or more exactly the function's */
    double number[8]; /* parameters of the operation */
    int64_t kept[PERI_NODE_KEPT]; /* whole numbers that backward needs, by the KEPT_* that the operation's file gives
                                     them */
    peri__shape shape[2];         /* shapes that it needs without the tensors */
    void *state; /* for vtab->fini */
    peri__ending *ending; /* what ends a pass that reaches this node (retained), or NULL */
    /* During a backward pass: */
    peri_tensor **grad_out; /* n_out accumulated gradients */
    uint64_t pass; /* the pass that has seen it */
    int64_t place; /* its place in that pass, from the highest sequence to the lowest */
    bool spent;    /* a pass has used it up */
    bool of_one;   /* acts & PERI__ONE: its gradient is 1, which nobody has written to grad_out[0] */
};

/** The number of the backward pass whose node calls this, on this thread; 0: none does. */
uint64_t peri__backward_running(void);
/** As peri_grad_enabled_set, and returns the setting before. */
bool peri__grad_swap(bool on);
/** True when an operation on these inputs must be recorded: gradients are on and one of them requires grad. */
bool peri__recording(peri_tensor *const *in, int32_t n);

/** Record an operation: make a node with inputs @in (NULL entries allowed) and attach it to outputs @out (n_out
 *  tensors, which become non-leaves that require grad). @node borrowed; add saved tensors with peri__node_save. A node
 *  with n_in = 0 is legal: a module that updates its own weights in backward. @out NULL (n_out 1): the first half of an
 *  operation that is two nodes; @node new. An input that was computed, and changed in place since, is an error: what it
 *  was computed from would get gradients of elements that are gone. */
peri_status peri__record(const peri__node_vtab *vtab, peri_tensor *const *in, int32_t n_in, peri_tensor *const *out,
                         int32_t n_out, peri__node **node);
/** Record the second half of an operation whose first is @before (the caller's reference is taken). @node borrowed. */
peri_status peri__record_after(const peri__node_vtab *vtab, peri__node *before, peri_tensor *const *out, int32_t n_out,
                               peri__node **node);
/** Keep @t (retained) in saved[i] for backward. To save an output of the node itself, save peri__detached(t): else it
 *  is a cycle. */
void peri__node_save(peri__node *node, int32_t i, peri_tensor *t);
/** A view of the same storage outside the tape. @out new. */
peri_status peri__detached(peri_tensor *t, peri_tensor **out);
void peri__node_release(peri__node *node);
/** The id of a hook's node, if the pass has just come to it: once; else 0. */
int64_t peri__hook_ask(peri__node *node);
/** A pass is over with @node: release its gradients, what it keeps, and the pass's reference. */
void peri__node_spend(peri__node *node);
/** How often the elements of @t were changed in place. */
static inline uint64_t peri__version(const peri_tensor *t)
{
    return atomic_load_explicit(&t->storage->version, memory_order_relaxed);
}
/** An error that names @node if @t, which it keeps for its backward, was changed in place since it had @version. Nodes
 *  that keep tensors elsewhere than in `saved` ask for themselves. */
peri_status peri__check_version(const peri__node *node, const peri_tensor *t, uint64_t version);
/** Whether two tensors have one shape. */
bool peri__same_shape(const peri_tensor *a, const peri_tensor *b);
/** True if input @i of @node wants a gradient. */
static inline bool peri__needs(const peri__node *node, int32_t i) { return node->in[i].node || node->in[i].leaf; }
/** Memory for the gradient of input @i of @node. Of a parameter whose gradients a reducer averages it is the gradient's
 *  place in the bucket, if nothing is there yet and dtype and shape are the parameter's: then nobody has to copy it
 *  there. */
peri_status peri__grad_new(const peri__node *node, int32_t i, int32_t dtype, int32_t ndim, const int64_t *shape,
                           peri_tensor **out);
/** peri__record if the operation must be recorded; else *node = NULL. */
peri_status peri__attach(const peri__node_vtab *vtab, peri_tensor *const *in, int32_t n_in, peri_tensor *const *out,
                         int32_t n_out, peri__node **node);
/** peri__attach for @y, which was taken of @x along dimension @dim: kept[0] is @dim, saved[0] are the @places (i64) of
 *  its elements, and shape[0] is x's. */
peri_status peri__attach_places(const peri__node_vtab *vtab, peri_tensor *x, int32_t dim, peri_tensor *places,
                                peri_tensor *y);
/** Save the memory of one of the node's own outputs. */
peri_status peri__node_save_output(peri__node *node, int32_t i, peri_tensor *out);

/** True when nobody else can see the memory of @t, so that it may be changed in place. */
bool peri__exclusive(const peri_tensor *t);

/* -- the dtypes that operations compute in: autocast.c ------------------------------------------------------------- */

static inline bool peri__is_16(int32_t dtype) { return dtype == PERI_F16 || dtype == PERI_BF16; }
/** Floats of at most 32 bits: what rows of tables are made of, unless they are bytes. */
static inline bool peri__small_float(int32_t dtype) { return dtype == PERI_F32 || peri__is_16(dtype); }
static inline bool peri__is_float(int32_t dtype) { return dtype == PERI_F64 || peri__small_float(dtype); }
/** Whether @t has real numbers of floating point, of whatever width, and an operation on it is to be recorded. */
static inline bool peri__differentiable(peri_tensor *t)
{
    return peri__is_float(t->dtype) && peri__recording(&t, 1);
}
/** The dtype that products on @device are cast to in the autocast region that the thread is in; -1: it is in none. */
int32_t peri__autocast(const peri_device *device);
/** Whether products of f32 may round their factors to TF32. */
bool peri__tf32(void);
/** Whether the sums of products of f32 have one order, on this thread. */
bool peri_products_ordered(void);
/** @t with another dtype, not recorded; @t itself (a new reference) if it has it. */
peri_status peri__cast(peri_tensor *t, int32_t dtype, peri_tensor **out);
/** The gradient @grad contiguous and, where it has 16-bit numbers, in f32, in which gradients are added up. */
peri_status peri__summands(peri_tensor *grad, peri_tensor **out);
/** The same of an input of a product: what was cast of a weight (a leaf that wants a gradient) is kept until the region
 *  ends. */
peri_status peri__cast_weight(peri_tensor *t, int32_t dtype, peri_tensor **out);

/** What becomes of 16-bit inputs. */
typedef enum peri__dtype_rule {
    PERI__IN_OWN, /* the kernels take them: inputs of different dtypes, 16 bits or not, become the common one of
                     PyTorch's rules (peri__common_dtype), and so does the result */
    PERI__IN_ANY, /* the kernels do not: the inputs become f32, and the result, unless their dtypes differ, has
                     theirs */
    PERI__IN_F32, /* as PERI__IN_ANY, but in an autocast region the result stays f32 */
} peri__dtype_rule;

/** The inputs of an operation by such a rule, and its result:
 *    PERI_TRY(peri__widen_operands(&o, rule, inputs, n));
 *    return peri__narrow(&o, compute(o.in[0], ..., &o.out), out); */
typedef struct peri__operands {
    peri_tensor *in[4]; /* retained: the inputs, cast where the rule says so (recorded); NULL where they were */
    peri_tensor *out;
    int32_t n, back; /* back: the dtype that the result is cast to (recorded), -1: it stays as it is */
} peri__operands;
peri_status peri__widen_operands(peri__operands *o, peri__dtype_rule rule, peri_tensor *const *in, int32_t n);
/** Release the inputs; @status is that of the operation. @out: the result, unless it failed. */
peri_status peri__narrow(peri__operands *o, peri_status status, peri_tensor **out);

/* -- dtypes (dtypes.c), integers and bool (ops_integer.c) ---------------------------------------------------------- */

bool peri__is_integer(int32_t dtype);
/** Least number of an integer dtype or bool, and the one behind its largest. */
void peri__range_of(int32_t dtype, double *least, double *past);
/** An error if @value is no number that an element of @dtype can be (rounded, for floats). Of bool every number is
 *  one. */
peri_status peri__check_fits(const char *function, int32_t dtype, double value);
/** The dtype that @in (NULL: left out) become where they meet, by PyTorch's rules: of bool, integers and floats the
 *  last kind that is there counts, and within a kind the widest. Tensors without dimensions beside others lift them to
 *  another kind only. -1: there is none. */
int32_t peri__common_dtype(peri_tensor *const *in, int32_t n);
/** out = a op b (PERI_BINARY_*), recorded, where at least one of them is a float. */
peri_status peri__float_binary(const char *function, int32_t op, peri_tensor *a, peri_tensor *b, peri_tensor **out);
/** out = a op b (PERI_INTEGER_* of kernels/elements.h), both of one dtype of integers or bool; of x and a number, which
 *  fits its dtype. */
peri_status peri__integer(const char *function, int32_t op, peri_tensor *a, peri_tensor *b, peri_tensor **out);
peri_status peri__integer_with_number(const char *function, int32_t op, peri_tensor *x, double value,
                                      peri_tensor **out);
/** out = a op b (ADD to MIN without DIV, and POW), both of one dtype of integers or bool. */
peri_status peri__integer_binary(const char *function, int32_t op, peri_tensor *a, peri_tensor *b, peri_tensor **out);
/** Whether the function of one number (PERI_UNARY_*) has f32 for integers. */
bool peri__becomes_float(int32_t op, double a, double b);
/** out = f(x) of integers or bool, where peri__becomes_float says no. */
peri_status peri__integer_unary(const char *function, int32_t op, peri_tensor *x, double a, double b,
                                peri_tensor **out);

/* -- parts that dense operations share; nothing here is recorded --------------------------------------------------- */

enum { PERI_ELEMENT_GRAIN = 1 << 15 }; /* elements of a cheap kernel that are worth a thread */

/** @dim, counted from the end if negative, into 0..ndim-1. */
peri_status peri__dim(const char *function, const peri_tensor *t, int32_t dim, int32_t *out);
/** As peri__dim, for functions along a dimension: a tensor without dimensions is a line of its one element, whose
 *  dimension is 0 (PyTorch's rule). */
peri_status peri__along(const char *function, const peri_tensor *t, int32_t dim, int32_t *out);
/** The size of dimension @d of peri__along. */
static inline int64_t peri__along_size(const peri_tensor *t, int32_t d) { return t->ndim ? t->shape[d] : 1; }
/** [outer][n][inner] around dimension @dim of a contiguous tensor. */
void peri__around(const peri_tensor *t, int32_t dim, int64_t *outer, int64_t *n, int64_t *inner);
/** out = f(t), f = PERI_UNARY_*(a, b). */
peri_status peri__unary(peri_tensor *t, int32_t op, double a, double b, peri_tensor **out);
/** out = a op b, broadcast; op = PERI_BINARY_*. Messages name @function. */
peri_status peri__binary(const char *function, int32_t op, peri_tensor *a, peri_tensor *b, peri_tensor **out);
/** The shape that @a and @b broadcast to. */
peri_status peri__broadcast_shape(const char *function, const peri_tensor *a, const peri_tensor *b, int32_t *ndim,
                                  int64_t *shape);
/** Join dimensions of @shape[ndim] that lie behind each other in all of @operands arrays of strides, so that the
 *  kernel's rows are long. Returns how many are left. */
int32_t peri__fold(int32_t ndim, int64_t *shape, int64_t *const *stride, int32_t operands);
/** out = a op b (PERI_COMPARE_*), broadcast; @b NULL: the number @value, of integers @integer. Of one dtype and
 *  device. */
peri_status peri__compare(const char *function, int32_t op, peri_tensor *a, peri_tensor *b, double value,
                          int64_t integer, peri_tensor **out);
/** *out (new, recorded) = softmax of @scores along the last dimension; of rows that are all -infinity it is 0. */
peri_status peri__attention_weights(const char *function, peri_tensor *scores, peri_tensor **out);
/** out = condition (bool) ? a : b, broadcast; NULL stands for zeros; not both. */
peri_status peri__where(const char *function, peri_tensor *condition, peri_tensor *a, peri_tensor *b,
                        peri_tensor **out);
/** @scale times the sum over the dimensions whose bit is set in @mask; they stay, with size 1. */
peri_status peri__reduce(peri_tensor *t, uint32_t mask, double scale, peri_tensor **out);
/** *mask = a bit for each of the dimensions @dims[n] of @x; n = 0: all. */
peri_status peri__mask_of(const char *function, const peri_tensor *x, const int32_t *dims, int32_t n, uint32_t *mask);
/** Memory for partial sums of @dtype, one row for each of @rows blocks, of which peri__grad_sums makes the gradient of
 *  input @i of @node: a vector, such as a bias, in the parameter's shape and dtype @own. The partial sums of one block
 *  are the gradient already. */
peri_status peri__grad_partial(const peri__node *node, int32_t i, int32_t dtype, int64_t rows, int32_t own,
                               int32_t ndim, const int64_t *shape, peri_tensor **out);
peri_status peri__grad_sums(const peri__node *node, int32_t i, peri_tensor *partial, int32_t own, int32_t ndim,
                            const int64_t *shape, peri_tensor **out);
/** The sum of @t over what broadcasting @shape to t's shape repeats: the gradient of the broadcast. */
peri_status peri__sum_to(peri_tensor *t, int32_t ndim, const int64_t *shape, peri_tensor **out);
/** @t repeated to @shape: a view. */
peri_status peri__expand(peri_tensor *t, int32_t ndim, const int64_t *shape, peri_tensor **out);
/** c = op(a) op(b), or, @add, c += that; contiguous matrices. @ta, @tb exchange the dimensions of a and b, which are of
 *  one dtype; c is of it, or, of 16-bit floats, of f32. Products of 16-bit floats are added in f32, on devices that
 *  have no such products, too. */
peri_status peri__product(peri_tensor *c, peri_tensor *a, bool ta, peri_tensor *b, bool tb, bool add);
/** "f32 [3, 4] and f32 [5]" for messages. */
const char *peri__pair_text(const peri_tensor *a, const peri_tensor *b, char *buffer, size_t len);

#endif
