/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/tensor.h: tensors: strided views of counted device memory, and the gradient tape.
 *
 * A tensor is a counted handle. Views share storage. Operations queue on the current stream of the tensor's device and
 * return at once; only peri_tensor_read waits. Sizes and strides count elements. Unless a comment says otherwise a
 * function is local, does not communicate, returns tensors that are *new*, and borrows its arguments; on failure
 * outputs are untouched.
 *
 * Threads: any thread may add and give up references of a tensor (peri_tensor), and any number of threads may read one
 * at once. Who changes one in place (fill, write, copy, a gradient, an optimizer) does so while nobody else uses its
 * memory. Recording is switched for each thread. A backward pass (peri_backward), and the tape that it walks, are used
 * by one thread at a time.
 */
#ifndef PERILUNE_TENSOR_H
#define PERILUNE_TENSOR_H

#include <perilune/base.h>
#include <perilune/device.h>

typedef struct peri_tensor peri_tensor;

/** What a tensor looks like. */
typedef struct peri_tensor_info {
    int64_t size; /* sizeof(peri_tensor_info) */
    int32_t dtype, ndim;
    int64_t shape[PERI_MAX_DIMS];
    int64_t stride[PERI_MAX_DIMS]; /* elements */
    int64_t numel;                 /* product of shape */
    peri_device *device;           /* borrowed */
    bool contiguous, requires_grad, leaf;
    bool mapped;                   /* a device's tensor in the host's memory, where the device's kernels reach it */
} peri_tensor_info;

/* -- making and reading -------------------------------------------------------------------------------------------- */

/** An uninitialised tensor of @shape[ndim] (0 <= ndim <= PERI_MAX_DIMS) on @device. */
PERI_API peri_status peri_tensor_new(peri_device *device, int32_t dtype, int32_t ndim, const int64_t *shape,
                                     peri_tensor **out);
/** The same, every element @value (complex: real part), which must fit the dtype as in peri_tensor_fill. */
PERI_API peri_status peri_tensor_full(peri_device *device, int32_t dtype, int32_t ndim, const int64_t *shape,
                                      double value, peri_tensor **out);
/** Uniform numbers in [low, high), which are finite and in this order, from the counter-based generator: element i
 *  depends on (@seed, @stream, i) only. f32 or f64. */
PERI_API peri_status peri_tensor_uniform(peri_device *device, int32_t dtype, int32_t ndim, const int64_t *shape,
                                         double low, double high, uint64_t seed, uint64_t stream, peri_tensor **out);
/** Uniform numbers of more bits than one f32 has, in [0, 1): f64 sums of @words (1 to 3) numbers as peri_tensor_uniform
 *  draws them as f32, the first one from @stream, each other one from the stream after, times 2^-24 of the one before.
 *  A sum of three is rounded, and may be 1. */
PERI_API peri_status peri_tensor_uniform_words(peri_device *device, int32_t ndim, const int64_t *shape, int32_t words,
                                               uint64_t seed, uint64_t stream, peri_tensor **out);
/** Normal numbers by the same generator (Box-Muller on its uniforms); @deviation: 0 and more. f32 or f64. */
PERI_API peri_status peri_tensor_normal(peri_device *device, int32_t dtype, int32_t ndim, const int64_t *shape,
                                        double mean, double deviation, uint64_t seed, uint64_t stream,
                                        peri_tensor **out);
/** @start, @start + @step, ...: @length numbers. f32, f64, i64 or i32; of integers @start and @step are whole and below
 *  2^53. */
PERI_API peri_status peri_tensor_arange(peri_device *device, int32_t dtype, double start, double step, int64_t length,
                                        peri_tensor **out);
/** The places (row, column), from 0, of a matrix of @rows x @columns on its diagonal @k (so many places right of the
 *  main one) and above it (@upper) or below it, row by row: i64 [2, number of them]. */
PERI_API peri_status peri_tensor_triangle_places(peri_device *device, int64_t rows, int64_t columns, int64_t k,
                                                 bool upper, peri_tensor **out);
/** An uninitialised tensor of device cpu in *pinned* memory: @device can copy from it while the copy is only queued
 *  (peri_tensor_upload). Pinned memory is taken from the system once and then kept: when the tensor is gone, others get
 *  its memory, after all copies that were queued from it have run. PERI_EINVAL if @device uses the host's own memory
 *  (cpu). */
PERI_API peri_status peri_tensor_new_pinned(peri_device *device, int32_t dtype, int32_t ndim, const int64_t *shape,
                                            peri_tensor **out);
/** A copy of @t, which is in memory that the host can access, in pinned memory. */
PERI_API peri_status peri_tensor_pin(const peri_tensor *t, peri_device *device, peri_tensor **out);
/** Whether @t is in pinned memory. */
PERI_API bool peri_tensor_is_pinned(const peri_tensor *t);
/** Add a reference. */
PERI_API void peri_tensor_retain(peri_tensor *t);
/** Give up a reference; NULL is fine. */
PERI_API void peri_tensor_release(peri_tensor *t);
/** Describe @t. @out: its `size` is set. */
PERI_API peri_status peri_tensor_describe(const peri_tensor *t, peri_tensor_info *out);
/** Copy all elements of @t, in row-major order, from host memory @src of @bytes = numel * element size. @src is
 *  consumed at once. */
PERI_API peri_status peri_tensor_write(peri_tensor *t, const void *src, int64_t bytes);
/** Copy all elements of @t, in row-major order, to host memory @dst of @bytes. Blocks until they are computed. */
PERI_API peri_status peri_tensor_read(const peri_tensor *t, void *dst, int64_t bytes);
/** Element at flat row-major position @index as a number (complex: real part; i64 from 2^53 on is rounded,
 *  peri_tensor_read does not). Blocks like peri_tensor_read. */
PERI_API peri_status peri_tensor_item(const peri_tensor *t, int64_t index, double *out);
/** The address of element 0 of a contiguous tensor whose device the host can access; PERI_EUNSUPPORTED otherwise.
 *  Borrowed. */
PERI_API peri_status peri_tensor_data(peri_tensor *t, void **out);
/** dst[...] = src[...], cast to dst's dtype (the rules of kernels/convert.h), across devices too. @src broadcasts; it
 *  may be part of the same memory: it is read before @dst is written. Not recorded. */
PERI_API peri_status peri_tensor_copy(peri_tensor *dst, const peri_tensor *src);
/** Set every element to @value; PERI_ERANGE if the dtype cannot hold it: integers take whole numbers of their range
 *  (i64 below 2^53 only: a double that is larger may be a rounded one), floats what does not become an infinity, bool
 *  everything (0 is false). Not recorded. */
PERI_API peri_status peri_tensor_fill(peri_tensor *t, double value);

/* -- views and layout (recorded) ----------------------------------------------------------------------------------- */

/** The same elements in another shape; one entry may be -1 (inferred). A view if @t is contiguous, else a copy. */
PERI_API peri_status peri_tensor_reshape(peri_tensor *t, int32_t ndim, const int64_t *shape, peri_tensor **out);
/** A view with dimensions @a and @b exchanged (negative counts from the end). */
PERI_API peri_status peri_tensor_transpose(peri_tensor *t, int32_t a, int32_t b, peri_tensor **out);
/** A view of [start, stop) of dimension @dim, every @step-th (> 0); 0 <= start <= stop <= size. */
PERI_API peri_status peri_tensor_slice(peri_tensor *t, int32_t dim, int64_t start, int64_t stop, int64_t step,
                                       peri_tensor **out);
/** A view of element @index of dimension @dim (negative: from its end), without that dimension. */
PERI_API peri_status peri_tensor_select(peri_tensor *t, int32_t dim, int64_t index, peri_tensor **out);
/** A view without dimension @dim, if that has size 1; all of it otherwise. */
PERI_API peri_status peri_tensor_squeeze(peri_tensor *t, int32_t dim, peri_tensor **out);
/** A view with a new dimension @dim of size 1 (negative: from the end of the result). */
PERI_API peri_status peri_tensor_unsqueeze(peri_tensor *t, int32_t dim, peri_tensor **out);
/** A view that repeats dimensions of size 1 (or missing in front) to @shape. */
PERI_API peri_status peri_tensor_expand(peri_tensor *t, int32_t ndim, const int64_t *shape, peri_tensor **out);
/** A contiguous copy of @t. */
PERI_API peri_status peri_tensor_clone(peri_tensor *t, peri_tensor **out);
/** @t itself (a new reference) if contiguous, else a contiguous copy. */
PERI_API peri_status peri_tensor_contiguous(peri_tensor *t, peri_tensor **out);
/** A copy with another dtype (-1: the same) and device (NULL: the same); @t itself if both are the same. */
PERI_API peri_status peri_tensor_to(peri_tensor *t, int32_t dtype, peri_device *device, peri_tensor **out);
/** The same without waiting, where @t is in pinned memory of @device: the copy is queued on the device's current
 *  stream, and may read @t until that stream has come past it. Nobody may change @t before; releasing it is fine. In
 *  all other cases it is peri_tensor_to. */
PERI_API peri_status peri_tensor_upload(peri_tensor *t, int32_t dtype, peri_device *device, peri_tensor **out);

/** How often the memory that @t is in has been changed in place: by fill, write, copy, collectives, optimizers and
 *  tables, through whatever view. What kernels of a caller's own write is not counted. 0 for NULL. */
PERI_API int64_t peri_tensor_version(const peri_tensor *t);

/* -- the gradient tape --------------------------------------------------------------------------------------------- */

/** Whether operations on this thread are recorded (default: true). */
PERI_API bool peri_grad_enabled(void);
/** Record operations on this thread from now on, or not. */
PERI_API peri_status peri_grad_enabled_set(bool on);
/** Make a leaf want a gradient, or not. f32 or f64 leaves only. */
PERI_API peri_status peri_tensor_requires_grad_set(peri_tensor *leaf, bool on);
/** The accumulated gradient of a leaf, NULL if there is none. @out new. */
PERI_API peri_status peri_tensor_grad(peri_tensor *leaf, peri_tensor **out);
/** Replace the gradient of a leaf (NULL: drop it). @grad retained; must have the leaf's shape, dtype and device. */
PERI_API peri_status peri_tensor_grad_set(peri_tensor *leaf, peri_tensor *grad);
/** The same elements outside the tape. */
PERI_API peri_status peri_tensor_detach(peri_tensor *t, peri_tensor **out);

/** A backward pass in progress. */
typedef struct peri_backward peri_backward;

/** Prepare the backward pass from @n roots, each with its upstream gradient in @grads (NULL there, or @grads NULL: 1,
 *  for one-element roots). A root may be there twice, or be part of another one's computation. Each recorded node runs
 *  once, after those that use its outputs: exchanges of gradients are posted as soon as they can be, on all ranks in
 *  the reverse of the order of recording, and waited for when nothing else is left to do. Gradients of leaves
 *  accumulate, and are summed in the reverse of the order of recording, behind the upstream ones. Collective if modules
 *  on the tape are, or leaves belong to a reducer (perilune/comm.h). */
PERI_API peri_status peri_backward_new(peri_tensor *const *roots, peri_tensor *const *grads, int32_t n,
                                       peri_backward **out);
/** Whether the pass, before its first step, reaches something that is averaged (a reducer, perilune/comm.h) and beside
 *  it something that nobody averages: a leaf that is in no reducer and no part of a sharded table, or tables of this
 *  process alone that update themselves. A model over ranks that has got a parameter since its reducer was made has
 *  such a leaf; an input that wants a gradient is one, too. */
PERI_API bool peri_backward_strays(const peri_backward *pass);
/** Whether the pass hands @leaf a gradient. */
PERI_API bool peri_backward_reaches(const peri_backward *pass, const peri_tensor *leaf);
/** Run until the pass is over (PERI_OK) or a node waits for other ranks (PERI_PENDING: call again). Does not block. The
 *  recorded nodes are spent afterwards. PERI_EINVAL if a tensor that an operation needs now was changed in place after
 *  it (by peri_tensor_copy, fill or write, an exchange, an optimizer; what is written through peri_tensor_data is not
 *  seen). */
PERI_API peri_status peri_backward_step(peri_backward *pass);
/** The same elements, with a hook on the tape: a pass that has their gradient, and before it goes on to what made them,
 *  lets peri_backward_step return PERI_PENDING once, so that the caller can do something inside the pass. On all ranks
 *  in the reverse of the order of recording, as exchanges are posted; also where no gradient flowed back. @id: above 0,
 *  the caller's. Of a tensor that is not recorded: a view. */
PERI_API peri_status peri_tensor_hooked(peri_tensor *t, int64_t id, peri_tensor **out);
/** After peri_backward_step returned PERI_PENDING: the hook that it stands at, once: @id and the gradient @grad (new,
 *  NULL if none flowed back). @id 0: it waits for other ranks, or the hook was asked for already. */
PERI_API peri_status peri_backward_hook(peri_backward *pass, int64_t *id, peri_tensor **grad);
/** Give the pass up, also in the middle; NULL is fine. */
PERI_API void peri_backward_release(peri_backward *pass);
/** peri_backward_new from one root, step to the end, release. Blocks, within the deadlines of the exchanges on the
 *  tape. */
PERI_API peri_status peri_tensor_backward(peri_tensor *root, peri_tensor *grad);

#endif
