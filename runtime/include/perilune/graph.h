/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/graph.h: computations that are captured once and then replayed, so that the host queues one launch where it
 * queued dozens (CUDA graphs). A graph stands for one function of tensors, called with inputs of the same dtypes and
 * shapes each time:
 *
 *   peri_graph_new(device, &graph);
 *   peri_graph_begin(graph, inputs, n, NULL, 0, stand_ins);    from here on nothing runs, all is captured
 *   ... compute outputs from stand_ins ...
 *   peri_graph_end(graph, outputs, m);
 *   for each batch, while peri_graph_fits(graph, inputs, n) says PERI_GRAPH_FITS:
 *       peri_graph_call(graph, inputs, n, results);            copies the inputs, and queues what was captured
 *
 * Calls give what the function would give, to the last bit, and are captured on the gradient tape as one operation. Its
 * backward pass is captured when a pass first comes to it, and replayed from then on; gradients of the leaves that the
 * function uses go to them as ever. Results are tensors of their own: the next call overwrites the memory of those that
 * nobody has any more, and copies the others out of its way first. Who uses a result on another stream joins that
 * stream to the current one before the next call.
 *
 * What cannot be captured is an error between begin and end (PERI_EUNSUPPORTED, with what it is): whatever the host
 * waits for or reads (items, verdicts on ids), copies from or to the host, events, exchanges, random numbers (their
 * seeds are numbers of the host; those of dropout are told to the graph), tables' lookups and optimizers' steps.
 *
 * Threads: a graph (peri_graph) is used by one thread at a time. While a thread captures, others may do what they like,
 * but for changing the tensors that the function uses.
 */
#ifndef PERILUNE_GRAPH_H
#define PERILUNE_GRAPH_H

#include <perilune/tensor.h>

typedef struct peri_graph peri_graph;

/** Whether a graph can be called now. */
enum {
    PERI_GRAPH_FITS = 0,  /* it can */
    PERI_GRAPH_OTHER = 1, /* the inputs have other shapes or dtypes, or want gradients where those that it was captured
                             with did not; or recording, autocast or the precision of products is another */
    PERI_GRAPH_BUSY = 2,  /* the results of its last call have not come to their backward pass: what that needs would
                             be overwritten */
    PERI_GRAPH_STALE = 3  /* it is not captured, failed to be, or a tensor that it uses is not what it was: in other
                             memory, or wants a gradient or not. Release it */
};

/** Whether @device can capture graphs. Local, never fails. */
PERI_API bool peri_graph_supported(const peri_device *device);
/** A graph with nothing in it. @out new. PERI_EUNSUPPORTED if @device cannot capture. */
PERI_API peri_status peri_graph_new(peri_device *device, peri_graph **out);
/** Give up a reference; NULL is fine. Results of its calls stay what they are, and can be taken through a backward
 *  pass. */
PERI_API void peri_graph_release(peri_graph *graph);
/** From now on, what the calling thread does on the graph's device is captured and does not run. @out[i] (new), the
 *  stand-in for @inputs[i]: what to compute from instead, with its dtype and shape; it wants a gradient if that does.
 *  @used: @n_used tensors, such as a module's parameters, that the graph is captured for: when one of them changes its
 *  memory or whether it wants a gradient, the graph is stale. */
PERI_API peri_status peri_graph_begin(peri_graph *graph, peri_tensor *const *inputs, int32_t n,
                                      peri_tensor *const *used, int32_t n_used, peri_tensor **out);
/** Stop capturing: @outputs[m] are what calls return. Leaves that want gradients and that the outputs depend on have to
 *  be among `used`. Whatever it returns, the thread does not capture any more. */
PERI_API peri_status peri_graph_end(peri_graph *graph, peri_tensor *const *outputs, int32_t m);
/** Stop capturing, and forget what was captured; if it does not capture: nothing. */
PERI_API void peri_graph_cancel(peri_graph *graph);
/** One of PERI_GRAPH_*: whether peri_graph_call would take these inputs. Local, never fails. */
PERI_API int32_t peri_graph_fits(const peri_graph *graph, peri_tensor *const *inputs, int32_t n);
/** Queue one call with these inputs, which fit. @out: as many as there were outputs, each new. */
PERI_API peri_status peri_graph_call(peri_graph *graph, peri_tensor *const *inputs, int32_t n, peri_tensor **out);
/** How often the function drops elements (peri_op_dropout), at most 64 times. */
PERI_API int32_t peri_graph_draws(const peri_graph *graph);
/** What number @i of these, in the order of the function, draws its mask by in the next calls: at first, and for ever
 *  unless it is told otherwise, what the function gave. */
PERI_API peri_status peri_graph_draw(peri_graph *graph, int32_t i, uint64_t seed, uint64_t stream, uint64_t offset);
/** Bytes of device memory that the graph keeps for itself. */
PERI_API int64_t peri_graph_bytes(const peri_graph *graph);

#endif
