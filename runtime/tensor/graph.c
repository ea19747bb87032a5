/* SPDX-License-Identifier: Apache-2.0
 *
 * graph.c: functions that are captured once and replayed (perilune/graph.h).
 *
 * A captured function has a tape of its own, from its outputs back to the stand-ins for its inputs and to the leaves
 * that it uses. The caller's tape has one node for the whole of it:
 *
 *     caller's      inputs, leaves  <--  node "graph"  <--  results
 *     captured      stand-ins, leaves  <--  nodes of the function  <--  outputs
 *
 * The backward pass of the captured tape runs once, and is captured, when a pass first comes to the caller's node. Its
 * gradients go through the caller's node to where those of the function would have gone.
 */
#include "capture.h"

#include <perilune/graph.h>

enum { OTHER = -1 };

/** What a call returns, or a gradient. */
typedef struct result {
    peri_tensor *like;  /* dtype, shape, strides and offset; of an external's memory: what is returned a view of */
    peri__block *block; /* where it lies; NULL: in an external */
    bool wants;         /* an output: it wants a gradient */
} result;

/** A tensor that the graph was captured for. */
typedef struct used {
    peri_tensor *tensor; /* retained */
    const peri__storage *storage;
    int64_t offset;
    bool wants;
} used;

/** What decides how operations compute, beside their inputs. */
typedef struct setting {
    bool recording, tf32, ordered;
    int32_t autocast;
} setting;

struct peri_graph {
    peri__refs refs;
    peri_device *device;
    peri_stream *stream; /* retained: that it is captured and launched on */
    bool capturing, good;
    atomic_bool busy; /* the node of the last call is alive */
    uint64_t calls;
    setting setting;
    peri_tensor **in;     /* [n_in]: stand-ins */
    uint64_t *in_version; /* [n_in]: when they were made, and to the captured tape for ever */
    used *used;           /* [n_used] */
    peri_tensor **leaves; /* [n_leaves], retained: that want gradients */
    peri_tensor **saved;  /* [n_saved], retained: leaves and other tensors in externals that the backward pass reads */
    peri_tensor **roots;  /* [n_roots]: the outputs that want gradients, with their tape */
    int32_t n_in, n_used, n_leaves, n_saved, n_roots, n_out;
    result *out; /* [n_out] */
    peri__capture forward, backward;
    /* Of the backward pass, from its first on: */
    peri_tensor **upstream; /* [n_roots]: stand-ins for the gradients of the outputs */
    int32_t *holds;         /* [n_roots]: the number that all elements of upstream[i] are, 0 or 1, or OTHER */
    result *grads;          /* [n_in + n_leaves]; without `like`: none flows back there */
};

/** What the node of a call keeps. */
typedef struct call {
    peri_graph *graph;
    uint64_t number;
    uint64_t versions[]; /* of graph->saved */
} call;

bool peri_graph_supported(const peri_device *device) { return device && device->vtab->capture_begin; }

peri_status peri_graph_new(peri_device *device, peri_graph **out)
{
    PERI_NEED(device);
    PERI_NEED(out);
    if (!peri_graph_supported(device))
        return peri__fail(PERI_EUNSUPPORTED, "peri_graph_new: device %s cannot capture graphs", device->name);
    peri_graph *g = peri__alloc_zero(sizeof *g);
    if (!g) return PERI_ENOMEM;
    peri__refs_init(&g->refs);
    g->device = device;
    peri__object_count(1);
    *out = g;
    return PERI_OK;
}

static void release_list(peri_tensor **list, int32_t n)
{
    for (int32_t i = 0; list && i < n; i++) peri_tensor_release(list[i]);
    peri__free(list);
}

static void release_results(result *list, int32_t n)
{
    for (int32_t i = 0; list && i < n; i++) peri_tensor_release(list[i].like);
    peri__free(list);
}

void peri_graph_release(peri_graph *g)
{
    if (!g || !peri__refs_drop(&g->refs)) return;
    release_list(g->roots, g->n_roots);
    release_list(g->upstream, g->n_roots);
    release_list(g->in, g->n_in);
    release_list(g->leaves, g->n_leaves);
    release_list(g->saved, g->n_saved);
    release_results(g->out, g->n_out);
    release_results(g->grads, g->n_in + g->n_leaves);
    for (int32_t i = 0; i < g->n_used; i++) peri_tensor_release(g->used[i].tensor);
    peri__free(g->used);
    peri__free(g->in_version);
    peri__free(g->holds);
    peri__capture_fini(&g->backward);
    peri__capture_fini(&g->forward);
    peri_stream_release(g->stream);
    peri__object_count(-1);
    peri__free(g);
}

int64_t peri_graph_bytes(const peri_graph *g)
{
    int64_t bytes = 0;
    if (!g) return 0;
    const peri__capture *captures[] = {&g->forward, &g->backward};
    for (int i = 0; i < 2; i++)
        for (const peri__block *b = captures[i]->arena ? captures[i]->arena->blocks : NULL; b; b = b->next)
            bytes += b->bytes;
    return bytes;
}

/* -- capturing ----------------------------------------------------------------------------------------------------- */

static setting setting_of_thread(const peri_device *device)
{
    return (setting){.recording = peri_grad_enabled(), .tf32 = peri__tf32(), .ordered = peri_products_ordered(),
                     .autocast = peri__autocast(device)};
}

/** A new list of @n tensors, retained; NULL where memory is short, or n is 0. */
static peri_tensor **list_of(peri_tensor *const *tensors, int32_t n)
{
    peri_tensor **list = n > 0 ? peri__alloc(sizeof *list * (size_t)n) : NULL;
    for (int32_t i = 0; list && i < n; i++) peri_tensor_retain(list[i] = tensors[i]);
    return list;
}

static peri_status keep_used(peri_graph *g, peri_tensor *const *list, int32_t n)
{
    g->used = peri__alloc_zero(sizeof *g->used * (size_t)peri__max(n, 1));
    if (!g->used) return PERI_ENOMEM;
    for (int32_t i = 0; i < n; i++) {
        peri_tensor_retain(list[i]);
        g->used[g->n_used++] = (used){.tensor = list[i], .storage = list[i]->storage, .offset = list[i]->offset,
                                      .wants = list[i]->requires_grad};
    }
    return PERI_OK;
}

static peri_status make_stand_ins(peri_graph *g, peri__arena *arena, peri_tensor *const *inputs, int32_t n)
{
    g->in = peri__alloc_zero(sizeof *g->in * (size_t)peri__max(n, 1));
    g->in_version = peri__alloc_zero(sizeof *g->in_version * (size_t)peri__max(n, 1));
    if (!g->in || !g->in_version) return PERI_ENOMEM;
    for (; g->n_in < n; g->n_in++) {
        PERI_TRY(peri__arena_tensor(arena, inputs[g->n_in], &g->in[g->n_in]));
        g->in_version[g->n_in] = peri__version(g->in[g->n_in]);
        g->in[g->n_in]->requires_grad = g->setting.recording && inputs[g->n_in]->requires_grad;
    }
    return PERI_OK;
}

static peri_status check_begin_args(const peri_graph *g, peri_tensor *const *inputs, int32_t n,
                                    peri_tensor *const *list, int32_t n_used)
{
    PERI_NEED(g);
    PERI_NEED(g->device);
    if (n < 0 || n_used < 0)
        return peri__fail(PERI_EINVAL, "peri_graph_begin: %d inputs and %d tensors used, allowed: 0 and more", n,
                          n_used);
    PERI_TRY(peri__check_list("peri_graph_begin", "the inputs", inputs, n));
    PERI_TRY(peri__check_list("peri_graph_begin", "the tensors used", list, n_used));
    if (g->forward.device || g->good || g->in)
        return peri__fail(PERI_EINVAL, "peri_graph_begin: this graph was begun before; make another one");
    if (peri__capturing)
        return peri__fail(PERI_EUNSUPPORTED, "peri_graph_begin: this thread captures another graph, and a graph within "
                                             "a graph cannot be captured");
    for (int32_t i = 0; i < n; i++)
        if (peri__device(inputs[i]) != g->device)
            return peri__fail(PERI_EINVAL, "peri_graph_begin: input %d is on device %s, the graph on %s", i + 1,
                              peri__device(inputs[i])->name, g->device->name);
    return PERI_OK;
}

peri_status peri_graph_begin(peri_graph *g, peri_tensor *const *inputs, int32_t n, peri_tensor *const *list,
                             int32_t n_used, peri_tensor **out)
{
    PERI_NEED(out);
    PERI_TRY(check_begin_args(g, inputs, n, list, n_used));
    peri__arena *arena;
    peri_stream_retain(g->stream = peri_stream_current(g->device));
    g->setting = setting_of_thread(g->device);
    PERI_TRY(peri__said(g->device, "stream_new", peri__arena_new(g->stream, &arena)));
    peri_status status = keep_used(g, list, n_used);
    if (status >= 0) status = make_stand_ins(g, arena, inputs, n);
    if (status >= 0) status = peri__capture_begin(&g->forward, arena);
    peri__arena_release(arena);
    if (status < 0) return status;
    g->capturing = true;
    for (int32_t i = 0; i < n; i++) peri_tensor_retain(out[i] = g->in[i]);
    return PERI_OK;
}

/** A tensor of @like's kind, to be lent or shown again; what it is a part of has to stay where it is. */
static peri_status keep_result(const peri__arena *own, const peri__arena *other, peri_tensor *like, result *r)
{
    PERI_TRY(peri__detached(like, &r->like));
    r->wants = like->requires_grad;
    r->block = peri__arena_find(own, like->storage->data);
    if (!r->block && other) r->block = peri__arena_find(other, like->storage->data);
    if (r->block) r->block->used = r->block->kept = true;
    return PERI_OK;
}

/** A growing list. */
typedef struct growing {
    void **items;
    int32_t n, room;
} growing;

/** Add @item unless it is there. */
static peri_status add_once(growing *list, void *item)
{
    for (int32_t i = 0; i < list->n; i++)
        if (list->items[i] == item) return PERI_OK;
    if (list->n == list->room) {
        const int32_t room = list->room ? 2 * list->room : 32;
        void **more = peri__realloc(list->items, sizeof *more * (size_t)room);
        if (!more) return PERI_ENOMEM;
        list->items = more;
        list->room = room;
    }
    list->items[list->n++] = item;
    return PERI_OK;
}

/** All nodes of the captured tape into @nodes, and its leaves, but for the stand-ins, into @leaves. */
static peri_status walk(const peri_graph *g, growing *nodes, growing *leaves)
{
    for (int32_t i = 0; i < g->n_roots; i++) {
        peri_tensor *root = g->roots[i];
        PERI_TRY(root->node ? add_once(nodes, root->node) : add_once(leaves, root));
    }
    for (int32_t i = 0; i < nodes->n; i++) {
        const peri__node *node = nodes->items[i];
        for (int32_t k = 0; k < node->n_in; k++) {
            if (node->in[k].node) PERI_TRY(add_once(nodes, node->in[k].node));
            if (node->in[k].leaf) PERI_TRY(add_once(leaves, node->in[k].leaf));
        }
    }
    int32_t n = 0;
    for (int32_t i = 0; i < leaves->n; i++) {
        bool own = false;
        for (int32_t k = 0; k < g->n_in; k++) own = own || leaves->items[i] == g->in[k];
        if (!own) leaves->items[n++] = leaves->items[i];
    }
    leaves->n = n;
    return PERI_OK;
}

/** Tensors outside the arena that the nodes have saved. */
static peri_status find_saved(const peri_graph *g, const growing *nodes, growing *saved)
{
    for (int32_t i = 0; i < nodes->n; i++) {
        const peri__node *node = nodes->items[i];
        for (int32_t k = 0; k < node->n_saved; k++)
            if (node->saved[k] && !peri__arena_find(g->forward.arena, node->saved[k]->storage->data))
                PERI_TRY(add_once(saved, node->saved[k]));
    }
    return PERI_OK;
}

/** What changes its input would change the caller's tensor, and here changes the stand-in. */
static peri_status check_inputs(const peri_graph *g)
{
    for (int32_t i = 0; i < g->n_in; i++)
        if (peri__version(g->in[i]) != g->in_version[i])
            return peri__fail(PERI_EUNSUPPORTED, "peri_graph_end: the function changes input %d in place, which cannot "
                                                 "be captured; change a copy", i + 1);
    return PERI_OK;
}

static peri_status check_leaves(const peri_graph *g, const growing *leaves)
{
    char text[128];
    for (int32_t i = 0; i < leaves->n; i++) {
        const peri_tensor *leaf = leaves->items[i];
        bool known = false;
        for (int32_t k = 0; k < g->n_used; k++) known = known || g->used[k].tensor == leaf;
        if (!known)
            return peri__fail(PERI_EINVAL,
                              "peri_graph_end: the outputs depend on a leaf (%s) that wants a gradient and is not "
                              "among the tensors that the graph was begun for",
                              peri__tensor_text(leaf, text, sizeof text));
    }
    return PERI_OK;
}

/** What the tape of the outputs depends on. */
static peri_status keep_tape(peri_graph *g)
{
    growing nodes = {0}, leaves = {0}, saved = {0};
    peri_status status = walk(g, &nodes, &leaves);
    if (status >= 0) status = check_leaves(g, &leaves);
    if (status >= 0) status = find_saved(g, &nodes, &saved);
    if (status >= 0) {
        g->leaves = list_of((peri_tensor *const *)leaves.items, leaves.n);
        g->saved = list_of((peri_tensor *const *)saved.items, saved.n);
        g->n_leaves = g->leaves ? leaves.n : 0;
        g->n_saved = g->saved ? saved.n : 0;
        if (g->n_leaves < leaves.n || g->n_saved < saved.n) status = PERI_ENOMEM;
    }
    peri__free(nodes.items);
    peri__free(leaves.items);
    peri__free(saved.items);
    return status;
}

static peri_status keep_outputs(peri_graph *g, peri_tensor *const *outputs, int32_t m)
{
    g->out = peri__alloc_zero(sizeof *g->out * (size_t)peri__max(m, 1));
    g->roots = peri__alloc_zero(sizeof *g->roots * (size_t)peri__max(m, 1));
    if (!g->out || !g->roots) return PERI_ENOMEM;
    for (; g->n_out < m; g->n_out++) {
        if (peri__device(outputs[g->n_out]) != g->device)
            return peri__fail(PERI_EINVAL, "peri_graph_end: output %d is on device %s, the graph on %s", g->n_out + 1,
                              peri__device(outputs[g->n_out])->name, g->device->name);
        PERI_TRY(keep_result(g->forward.arena, NULL, outputs[g->n_out], &g->out[g->n_out]));
        if (g->setting.recording && g->out[g->n_out].wants)
            peri_tensor_retain(g->roots[g->n_roots++] = outputs[g->n_out]);
    }
    return PERI_OK;
}

peri_status peri_graph_end(peri_graph *g, peri_tensor *const *outputs, int32_t m)
{
    PERI_NEED(g);
    if (!g->capturing) return peri__fail(PERI_EINVAL, "peri_graph_end: nothing is being captured");
    peri_status status = peri__check_list("peri_graph_end", "the outputs", outputs, m);
    if (status >= 0 && m < 1) status = peri__fail(PERI_EINVAL, "peri_graph_end: no outputs, wanted 1 and more");
    if (status >= 0) status = keep_outputs(g, outputs, m);
    if (status >= 0) status = check_inputs(g);
    if (status >= 0) status = keep_tape(g);
    g->capturing = false;
    peri_status ended = peri__capture_end(&g->forward, status >= 0);
    if (status >= 0) status = ended;
    g->good = status >= 0;
    return status;
}

void peri_graph_cancel(peri_graph *g)
{
    if (!g || peri__border_refuses(__func__) || !g->capturing) return;
    g->capturing = false;
    (void)peri__capture_end(&g->forward, false);
}

/* -- the backward pass --------------------------------------------------------------------------------------------- */

/** What a backward pass does with a leaf, set aside while the captured tape has one of its own. */
typedef struct aside {
    peri_tensor *grad;
    void (*ready)(void *ctx, peri_tensor *leaf);
    peri_status (*offer)(void *ctx, peri_tensor *leaf, bool *free);
    peri__ending *ending;
    int64_t place;
} aside;

static peri_tensor *gradient_target(const peri_graph *g, int32_t i)
{
    return i < g->n_in ? g->in[i] : g->leaves[i - g->n_in];
}

static void set_aside(const peri_graph *g, aside *list)
{
    for (int32_t i = 0; i < g->n_in + g->n_leaves; i++) {
        peri_tensor *t = gradient_target(g, i);
        list[i] = (aside){
            .grad = t->grad, .ready = t->ready, .offer = t->offer, .ending = t->ending, .place = t->place};
        t->grad = NULL, t->ready = NULL, t->offer = NULL, t->ending = NULL;
    }
}

/** The gradients that the pass has made become the graph's, and leaves are as they were. */
static peri_status put_back(peri_graph *g, const aside *list, peri_status status)
{
    for (int32_t i = 0; i < g->n_in + g->n_leaves; i++) {
        peri_tensor *t = gradient_target(g, i);
        if (t->grad && status >= 0)
            status = keep_result(g->backward.arena, g->forward.arena, t->grad, &g->grads[i]);
        peri_tensor_release(t->grad);
        t->grad = list[i].grad, t->ready = list[i].ready, t->offer = list[i].offer, t->ending = list[i].ending;
        t->place = list[i].place;
    }
    return status;
}

/** Run the captured tape's pass, which is captured. */
static peri_status run_pass(const peri_graph *g)
{
    peri_backward *pass;
    PERI_TRY(peri_backward_new(g->roots, g->upstream, g->n_roots, &pass));
    peri_status status = peri_backward_step(pass);
    peri_backward_release(pass);
    if (status != PERI_PENDING) return status;
    return peri__cannot_capture(g->device, "a hook on a gradient, or an exchange in a backward pass,");
}

/** Leaves and others may have changed since the function was captured, but not since the call that a pass is for: that
 *  has been checked. */
static peri_status renew_versions(const peri_graph *g)
{
    growing nodes = {0}, leaves = {0};
    peri_status status = walk(g, &nodes, &leaves);
    for (int32_t i = 0; i < nodes.n && status >= 0; i++) {
        peri__node *node = nodes.items[i];
        for (int32_t k = 0; k < node->n_saved; k++)
            for (int32_t s = 0; s < g->n_saved && node->saved[k]; s++)
                if (node->saved[k] == g->saved[s]) node->version[k] = peri__version(g->saved[s]);
    }
    peri__free(nodes.items);
    peri__free(leaves.items);
    return status;
}

static peri_status capture_backward(peri_graph *g)
{
    const int32_t n = g->n_in + g->n_leaves;
    peri__arena *arena;
    aside *list = peri__alloc_zero(sizeof *list * (size_t)peri__max(n, 1));
    g->grads = peri__alloc_zero(sizeof *g->grads * (size_t)peri__max(n, 1));
    g->upstream = peri__alloc_zero(sizeof *g->upstream * (size_t)g->n_roots);
    g->holds = peri__alloc(sizeof *g->holds * (size_t)g->n_roots);
    for (int32_t i = 0; i < g->n_roots && g->holds; i++) g->holds[i] = OTHER;
    peri_status status = list && g->grads && g->upstream && g->holds ? renew_versions(g) : PERI_ENOMEM;
    PERI_TRY_GOTO(status, out);
    PERI_TRY_GOTO(peri__said(g->device, "stream_new", peri__arena_new(g->stream, &arena)), out);
    for (int32_t i = 0; i < g->n_roots && status >= 0; i++)
        status = peri__arena_tensor(arena, g->roots[i], &g->upstream[i]);
    if (status >= 0) status = peri__capture_begin(&g->backward, arena);
    peri__arena_release(arena);
    PERI_TRY_GOTO(status, out);
    set_aside(g, list);
    status = put_back(g, list, run_pass(g));
    peri_status ended = peri__capture_end(&g->backward, status >= 0);
    if (status >= 0) status = ended;
out:
    g->good = g->good && status >= 0;
    peri__free(list);
    return status;
}

/** On the graph's stream, behind what is queued on the current one, and back. */
static peri_status enter(const peri_graph *g, peri_stream **before)
{
    peri_stream *now = peri_stream_current(g->device);
    const peri_device_vtab *v = g->device->vtab;
    *before = NULL;
    if (now == g->stream) return PERI_OK;
    PERI_TRY(v->event_record(g->device->ctx, now->freeing, now->ctx));
    PERI_TRY(v->stream_wait(g->device->ctx, g->stream->ctx, now->freeing));
    peri_stream_retain(*before = now);
    return peri_stream_current_set(g->device, g->stream);
}

static peri_status leave_capture_stream(const peri_graph *g, peri_stream *before, peri_status status)
{
    if (!before) return status;
    const peri_device_vtab *v = g->device->vtab;
    peri_status back = v->event_record(g->device->ctx, g->stream->freeing, g->stream->ctx);
    if (back >= 0) back = v->stream_wait(g->device->ctx, before->ctx, g->stream->freeing);
    if (back >= 0) back = peri_stream_current_set(g->device, before);
    peri_stream_release(before);
    return status < 0 ? status : back;
}

/** The gradients of the outputs into their stand-ins: zeros where none flowed back, 1 where the pass begins here. */
static peri_status fill_upstream(peri_graph *g, const peri__node *node, peri_tensor *const *grad_out)
{
    for (int32_t i = 0; i < g->n_roots; i++) {
        const int32_t holds = !grad_out[i] ? 0 : node->of_one ? 1 : OTHER;
        if (holds != OTHER && holds == g->holds[i]) continue;
        if (holds != OTHER) PERI_TRY(peri_tensor_fill(g->upstream[i], holds));
        else PERI_TRY(peri_tensor_copy(g->upstream[i], grad_out[i]));
        g->holds[i] = holds;
    }
    return PERI_OK;
}

static peri_status replay_backward(peri_graph *g, const peri__node *node, peri_tensor *const *grad_out,
                                   peri_tensor **grad_in)
{
    peri_status status = PERI_OK;
    if (!g->backward.device) status = capture_backward(g);
    else if (!peri__capture_fits(&g->backward)) {
        g->good = false;
        return peri__fail(PERI_EINVAL, "peri_backward_step: a tensor that a graph uses has moved since its call");
    }
    PERI_TRY(status);
    PERI_TRY(peri__capture_ready(&g->backward));
    PERI_TRY(peri__arena_move_out(g->backward.arena));
    PERI_TRY(fill_upstream(g, node, grad_out));
    PERI_TRY(peri__capture_launch(&g->backward));
    for (int32_t i = 0; i < g->n_in + g->n_leaves; i++) {
        const result *r = &g->grads[i];
        if (!r->like || !peri__needs(node, i)) continue;
        if (r->block) PERI_TRY(peri__arena_lend(r->block, r->like, &grad_in[i]));
        else PERI_TRY(peri__detached(r->like, &grad_in[i]));
    }
    return PERI_OK;
}

static peri_status graph_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    const call *c = node->state;
    peri_graph *g = c->graph;
    peri_stream *before;
    for (int32_t i = 0; i < g->n_saved; i++) PERI_TRY(peri__check_version(node, g->saved[i], c->versions[i]));
    if (peri__device_is_captured(g->device))
        return peri__cannot_capture(g->device, "the backward pass of another graph");
    PERI_TRY(enter(g, &before));
    return leave_capture_stream(g, before, replay_backward(g, node, grad_out, grad_in));
}

static void graph_fini(peri__node *node)
{
    call *c = node->state;
    if (!c) return;
    if (c->number == c->graph->calls) atomic_store(&c->graph->busy, false);
    peri_graph_release(c->graph);
    peri__free(c);
    node->state = NULL;
}

static const peri__node_vtab graph_vtab = {
    .name = "graph", .acts = PERI__ONE, .backward = graph_backward, .fini = graph_fini};

/* -- calls --------------------------------------------------------------------------------------------------------- */

static bool is_like(const peri_graph *g, int32_t i, const peri_tensor *t)
{
    const peri_tensor *own = g->in[i];
    return t && peri__device(t) == g->device && t->dtype == own->dtype && peri__same_shape(t, own) &&
           (g->setting.recording && t->requires_grad) == own->requires_grad;
}

int32_t peri_graph_fits(const peri_graph *g, peri_tensor *const *inputs, int32_t n)
{
    if (!g || !g->good) return PERI_GRAPH_STALE;
    for (int32_t i = 0; i < g->n_used; i++) {
        const used *u = &g->used[i];
        if (u->tensor->storage != u->storage || u->tensor->offset != u->offset || u->tensor->requires_grad != u->wants)
            return PERI_GRAPH_STALE;
    }
    if (!peri__capture_fits(&g->forward)) return PERI_GRAPH_STALE;
    const setting now = setting_of_thread(g->device);
    bool same = n == g->n_in && now.recording == g->setting.recording && now.tf32 == g->setting.tf32 &&
                now.ordered == g->setting.ordered && now.autocast == g->setting.autocast;
    for (int32_t i = 0; i < n && same; i++) same = is_like(g, i, inputs[i]);
    if (!same) return PERI_GRAPH_OTHER;
    return atomic_load(&g->busy) ? PERI_GRAPH_BUSY : PERI_GRAPH_FITS;
}

/** Copy the inputs; to the captured tape, the stand-ins are what they were. */
static peri_status fill_inputs(peri_graph *g, peri_tensor *const *inputs)
{
    for (int32_t i = 0; i < g->n_in; i++) {
        PERI_TRY(peri_tensor_copy(g->in[i], inputs[i]));
        atomic_store_explicit(&g->in[i]->storage->version, g->in_version[i], memory_order_relaxed);
    }
    return PERI_OK;
}

static peri_status wrap_outputs(peri_graph *g, peri_tensor **results)
{
    for (int32_t i = 0; i < g->n_out; i++) {
        const result *r = &g->out[i];
        if (r->block) PERI_TRY(peri__arena_lend(r->block, r->like, &results[i]));
        else PERI_TRY(peri__detached(r->like, &results[i]));
    }
    return PERI_OK;
}

/** The node of the call on the caller's tape. */
static peri_status put_on_tape(peri_graph *g, peri_tensor *const *inputs, peri_tensor **results)
{
    const int32_t n = g->n_in + g->n_leaves;
    peri_tensor **from = peri__alloc(sizeof *from * (size_t)(n + g->n_roots)), **to = from + n;
    call *c = peri__alloc_zero(sizeof *c + sizeof *c->versions * (size_t)g->n_saved);
    peri__node *node;
    peri_status status = from && c ? PERI_OK : PERI_ENOMEM;
    int32_t roots = 0;
    for (int32_t i = 0; i < n && status >= 0; i++) from[i] = i < g->n_in ? inputs[i] : g->leaves[i - g->n_in];
    for (int32_t i = 0; i < g->n_out && status >= 0; i++)
        if (g->out[i].wants) to[roots++] = results[i];
    if (status >= 0) status = peri__record(&graph_vtab, from, n, to, roots, &node);
    if (status >= 0) {
        *c = (call){.graph = g, .number = g->calls};
        peri__refs_add(&g->refs);
        for (int32_t i = 0; i < g->n_saved; i++) c->versions[i] = peri__version(g->saved[i]);
        node->state = c;
        atomic_store(&g->busy, true);
    } else peri__free(c);
    peri__free(from);
    return status;
}

int32_t peri_graph_draws(const peri_graph *g) { return g ? g->forward.draws.n : 0; }

peri_status peri_graph_draw(peri_graph *g, int32_t i, uint64_t seed, uint64_t stream, uint64_t offset)
{
    PERI_NEED(g);
    if (i < 0 || i >= g->forward.draws.n)
        return peri__fail(PERI_EINVAL, "peri_graph_draw: number %d, allowed: 0 to %d", i, g->forward.draws.n - 1);
    uint64_t *words = g->forward.draws.words[i];
    words[0] = seed, words[1] = stream, words[2] = offset;
    g->forward.draws.sent = false;
    return PERI_OK;
}

static peri_status replay_forward(peri_graph *g, peri_tensor *const *inputs, peri_tensor **results)
{
    PERI_TRY(peri__capture_ready(&g->forward));
    PERI_TRY(peri__arena_move_out(g->forward.arena));
    PERI_TRY(fill_inputs(g, inputs));
    PERI_TRY(peri__capture_launch(&g->forward));
    g->calls++;
    PERI_TRY(wrap_outputs(g, results));
    return g->n_roots > 0 ? put_on_tape(g, inputs, results) : PERI_OK;
}

peri_status peri_graph_call(peri_graph *g, peri_tensor *const *inputs, int32_t n, peri_tensor **out)
{
    static const char *const why[] = {[PERI_GRAPH_OTHER] = "the inputs, or how operations compute, are not those that "
                                                           "it was captured for",
                                      [PERI_GRAPH_BUSY] = "its last call has not come to its backward pass",
                                      [PERI_GRAPH_STALE] = "it is stale"};
    peri_stream *before;
    PERI_NEED(g);
    PERI_NEED(out);
    PERI_TRY(peri__check_list("peri_graph_call", "the inputs", inputs, n));
    const int32_t fits = peri_graph_fits(g, inputs, n);
    if (fits != PERI_GRAPH_FITS) return peri__fail(PERI_EINVAL, "peri_graph_call: %s", why[fits]);
    PERI_TRY(peri__cannot_capture(g->device, "a call of another graph"));
    memset(out, 0, sizeof *out * (size_t)g->n_out);
    PERI_TRY(enter(g, &before));
    peri_status status = leave_capture_stream(g, before, replay_forward(g, inputs, out));
    for (int32_t i = 0; i < g->n_out && status < 0; i++) {
        peri_tensor_release(out[i]);
        out[i] = NULL;
    }
    return status;
}
