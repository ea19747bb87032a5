/* SPDX-License-Identifier: Apache-2.0
 *
 * backward.c: backward passes over the tape.
 *
 * A pass visits each node once, after all that use what the node made. Within that law it runs in an order that lets
 * exchanges and computation overlap, in whatever order the forward pass was written: what an exchange of a gradient
 * needs goes first, so that it is posted early; then what needs no exchange; and what waits for one comes last.
 * Exchanges are posted in the reverse of the order of recording, whatever else is on the tape of a rank: on all ranks
 * the same. What updates tables keeps that order too.
 *
 * The order changes no bit: the gradients that reach one tensor are added up in the reverse of the order of recording.
 * One that comes before its turn is held until then.
 */
#include "../base/between.h"
#include "report.h"
#include "../../kernels/dense.h"

#include <stdlib.h>

static atomic_uint_least64_t passes;
static _Thread_local uint64_t running; /* the number of the pass whose node this thread is in, 0: none */

uint64_t peri__backward_running(void) { return running; }

/** What one input of a node gives to the sum of a gradient. */
typedef struct share {
    peri_tensor *grad; /* owned; held until its turn */
    int64_t total;     /* -1: the input wants none */
    int64_t next;      /* the share of the same sum whose turn is after it, -1: none */
    bool here;         /* its node has run */
} share;

/** The gradient of one output of a node, or of a leaf. */
typedef struct total {
    peri_tensor **to;  /* node->grad_out[i], leaf->grad */
    peri_tensor *leaf; /* NULL: of a node */
    int64_t turn;      /* the share that is added next, -1: it is complete */
    int64_t last;      /* while the pass is made: the last share so far */
} total;

struct peri_backward {
    peri__node **nodes; /* retained; NULL: over. In the order in which they run */
    int64_t n, capacity, at;
    share *shares;      /* of the inputs of node after node, from the highest sequence to the lowest */
    total *totals;
    int64_t *first;     /* by node->place: its first share */
    peri_tensor **grad_in; /* of nodes[at] */
    int32_t grad_in_size;  /* the most inputs of a node */
    int64_t n_shares, n_totals;
    uint64_t id;
    int64_t checked; /* nodes whose saved tensors were looked at */
    peri__ending **endings; /* retained; NULL: over */
    int64_t n_endings;
    bool strays; /* see peri_backward_strays */
};

/* -- making: what there is ----------------------------------------------------------------------------------------- */

static peri_status add_ending(peri_backward *pass, peri__ending *ending, uint64_t id)
{
    if (!ending || ending->pass == id) return PERI_OK;
    peri__ending **more = peri__realloc(pass->endings, sizeof *more * (size_t)(pass->n_endings + 1));
    if (!more) return PERI_ENOMEM;
    pass->endings = more;
    ending->pass = id;
    peri__refs_add(&ending->refs);
    more[pass->n_endings++] = ending;
    return PERI_OK;
}

static peri_status add_node(peri_backward *pass, peri__node *node, uint64_t id)
{
    if (node->pass == id) return PERI_OK;
    if (node->spent)
        return peri__fail(PERI_EINVAL, "peri_backward_new: the graph of node '%s' was already used by a backward pass",
                          node->name);
    if (pass->n == pass->capacity) {
        int64_t more = peri__max(64, pass->capacity * 2);
        peri__node **nodes = peri__realloc(pass->nodes, sizeof *nodes * (size_t)more);
        if (!nodes) return PERI_ENOMEM;
        pass->nodes = nodes;
        pass->capacity = more;
    }
    node->grad_out = peri__alloc_zero(sizeof *node->grad_out * (size_t)node->n_out);
    if (!node->grad_out) return PERI_ENOMEM;
    node->pass = id;
    peri__refs_add(&node->refs);
    pass->nodes[pass->n++] = node;
    return add_ending(pass, node->ending, id);
}

static int later_first(const void *a, const void *b)
{
    uint64_t x = (*(peri__node *const *)a)->sequence, y = (*(peri__node *const *)b)->sequence;
    return x < y ? 1 : x > y ? -1 : 0;
}

/** Whether @node takes a leaf that no reducer has, or updates tables that no other rank hears of. Leaves of nodes that
 *  exchange are parts of what the ranks have together. */
static bool strays(const peri__node *node)
{
    const int32_t acts = node->vtab->acts;
    bool updates = acts == PERI__UPDATES;
    if (acts & (PERI__POSTS | PERI__WAITS) && !(acts & PERI__CALLS)) return false;
    for (int32_t k = 0; k < node->n_in; k++) {
        if (node->in[k].leaf && !node->in[k].leaf->ending) return true;
        updates = updates && !node->in[k].leaf;
    }
    return updates;
}

/** All nodes below @roots, from the highest sequence to the lowest; @leaves: how often they use leaves. */
static peri_status collect(peri_backward *pass, peri_tensor *const *roots, int32_t n, uint64_t id, int64_t *leaves)
{
    for (int32_t r = 0; r < n; r++) {
        if (roots[r]->node) PERI_TRY(add_node(pass, roots[r]->node, id));
        else PERI_TRY(add_ending(pass, roots[r]->ending, id));
    }
    for (int64_t i = 0; i < pass->n; i++) {
        const peri__node *node = pass->nodes[i];
        pass->n_shares += node->n_in;
        pass->strays = pass->strays || strays(node);
        if (node->n_in > pass->grad_in_size) pass->grad_in_size = node->n_in;
        for (int32_t k = 0; k < node->n_in; k++) {
            const peri__edge *e = &node->in[k];
            if (e->leaf) {
                e->leaf->place = -1;
                ++*leaves;
                PERI_TRY(add_ending(pass, e->leaf->ending, id));
            }
            if (e->node) PERI_TRY(add_node(pass, e->node, id));
        }
    }
    if (pass->n > 0) qsort(pass->nodes, (size_t)pass->n, sizeof *pass->nodes, later_first);
    for (int64_t i = 0; i < pass->n; i++) pass->nodes[i]->place = i;
    return PERI_OK;
}

/** Where each share goes, and when. */
static peri_status link_shares(peri_backward *pass, int64_t leaves)
{
    int64_t n_totals = 0, at = 0;
    for (int64_t i = 0; i < pass->n; i++) n_totals += pass->nodes[i]->n_out;
    pass->shares = peri__alloc_zero(sizeof *pass->shares * (size_t)peri__max(pass->n_shares, 1));
    pass->totals = peri__alloc_zero(sizeof *pass->totals * (size_t)(n_totals + leaves));
    pass->first = peri__alloc(sizeof *pass->first * (size_t)pass->n);
    pass->grad_in = peri__alloc_zero(sizeof *pass->grad_in * (size_t)peri__max(pass->grad_in_size, 1));
    int64_t *outputs = peri__alloc(sizeof *outputs * (size_t)pass->n); /* by place: the sum of a node's first output */
    if (!pass->shares || !pass->totals || !pass->first || !pass->grad_in || !outputs) {
        peri__free(outputs);
        return PERI_ENOMEM;
    }
    for (int64_t i = 0; i < pass->n; i++) {
        outputs[i] = pass->n_totals;
        for (int32_t k = 0; k < pass->nodes[i]->n_out; k++)
            pass->totals[pass->n_totals++] = (total){.to = &pass->nodes[i]->grad_out[k], .turn = -1, .last = -1};
    }
    for (int64_t i = 0; i < pass->n; i++) {
        pass->first[i] = at;
        for (int32_t k = 0; k < pass->nodes[i]->n_in; k++, at++) {
            const peri__edge *e = &pass->nodes[i]->in[k];
            share *s = &pass->shares[at];
            s->next = s->total = -1;
            if (!e->node && !e->leaf) continue;
            if (e->leaf && e->leaf->place < 0) {
                e->leaf->place = pass->n_totals;
                pass->totals[pass->n_totals++] = (total){.to = &e->leaf->grad, .leaf = e->leaf, .turn = -1, .last = -1};
            }
            s->total = e->leaf ? e->leaf->place : outputs[e->node->place] + e->output;
            total *to = &pass->totals[s->total];
            if (to->last < 0) to->turn = at;
            else pass->shares[to->last].next = at;
            to->last = at;
        }
    }
    peri__free(outputs);
    return PERI_OK;
}

/* -- making: the order --------------------------------------------------------------------------------------------- */

/** When a node runs: by late, then exchange, then place. */
typedef struct turn {
    peri__node *node;
    bool late;        /* something that waits comes before it, or it waits itself */
    int64_t exchange; /* the first exchange that is posted after it, counted from the highest sequence; INT64_MAX:
                         none */
} turn;

static int by_turn(const void *a, const void *b)
{
    const turn *x = a, *y = b;
    if (x->late != y->late) return x->late ? 1 : -1;
    if (x->exchange != y->exchange) return x->exchange < y->exchange ? -1 : 1;
    return x->node->place < y->node->place ? -1 : 1;
}

/** Sort the nodes, which are in the order of their places. What posts runs after all with a higher sequence that post,
 *  and what updates after all with a higher sequence that update, as if they used one another: `late` and `exchange`
 *  are handed on accordingly. */
static peri_status sort_nodes(peri_backward *pass)
{
    int64_t exchanges = 0, next_update = INT64_MAX;
    bool waits = false, late_post = false, late_update = false;
    for (int64_t i = 0; i < pass->n; i++) {
        exchanges += (pass->nodes[i]->vtab->acts & PERI__POSTS) != 0;
        waits = waits || pass->nodes[i]->vtab->acts & PERI__WAITS;
    }
    if (!exchanges && !waits) return PERI_OK;
    turn *turns = peri__alloc_zero(sizeof *turns * (size_t)pass->n);
    if (!turns) return PERI_ENOMEM;
    for (int64_t i = 0; i < pass->n; i++) {
        peri__node *node = pass->nodes[i];
        turn *t = &turns[i];
        int32_t acts = node->vtab->acts;
        t->node = node;
        t->late =
            t->late || acts & PERI__WAITS || (acts & PERI__POSTS && late_post) || (acts & PERI__UPDATES && late_update);
        if (acts & PERI__POSTS) late_post = t->late;
        if (acts & PERI__UPDATES) late_update = t->late;
        for (int32_t k = 0; k < node->n_in && t->late; k++)
            if (node->in[k].node) turns[node->in[k].node->place].late = true;
    }
    for (int64_t i = pass->n - 1; i >= 0; i--) {
        const peri__node *node = pass->nodes[i];
        turn *t = &turns[i];
        t->exchange = node->vtab->acts & PERI__POSTS ? exchanges-- : INT64_MAX;
        for (int32_t k = 0; k < node->n_in; k++)
            if (node->in[k].node) t->exchange = peri__min(t->exchange, turns[node->in[k].node->place].exchange);
        if (node->vtab->acts & PERI__UPDATES) next_update = t->exchange = peri__min(t->exchange, next_update);
    }
    qsort(turns, (size_t)pass->n, sizeof *turns, by_turn);
    for (int64_t i = 0; i < pass->n; i++) pass->nodes[i] = turns[i].node;
    peri__free(turns);
    return PERI_OK;
}

/* -- running ------------------------------------------------------------------------------------------------------- */

peri_status peri__grad_new(const peri__node *node, int32_t i, int32_t dtype, int32_t ndim, const int64_t *shape,
                           peri_tensor **out)
{
    peri_tensor *leaf = node->in[i].leaf;
    bool free = false;
    if (leaf && leaf->offer && !leaf->grad && leaf->dtype == dtype && leaf->ndim == ndim &&
        !memcmp(leaf->shape, shape, sizeof *shape * (size_t)ndim))
        PERI_TRY(leaf->offer(leaf->ready_ctx, leaf, &free));
    if (!free) return peri_tensor_new(peri__device(leaf ? leaf : node->grad_out[0]), dtype, ndim, shape, out);
    peri_tensor_retain(leaf->grad_place);
    *out = leaf->grad_place;
    return PERI_OK;
}

/** *sum (owned, may be NULL) += @grad (taken). The sum of @leaf (NULL: of a node) becomes memory of its own, or its
 *  place in a bucket: optimizers change it in place. */
static peri_status accumulate(peri_tensor **sum, peri_tensor *grad, const peri_tensor *leaf)
{
    if (!*sum && (!leaf || grad == leaf->grad_place || peri__exclusive(grad))) {
        *sum = grad;
        return PERI_OK;
    }
    peri_status status = PERI_OK;
    if (!*sum) {
        status = peri__tensor_like(grad, grad->ndim, grad->shape, sum);
        if (status >= 0) status = peri_tensor_copy(*sum, grad);
        peri_tensor_release(grad);
        return status;
    }
    peri_tensor *flat = NULL, *into = *sum;
    bool before = peri__grad_swap(false);
    if (!peri__exclusive(into)) {
        PERI_TRY_GOTO(peri__tensor_like(into, into->ndim, into->shape, &into), out);
        status = peri_tensor_copy(into, *sum);
        peri_tensor_release(*sum);
        *sum = into;
        if (status < 0) goto out;
    }
    PERI_TRY_GOTO(peri_tensor_contiguous(grad, &flat), out);
    peri_k_axpy_args args = {.y = peri__data(into), .x = peri__data(flat), .dtype = into->dtype, .alpha = 1};
    status = PERI_LAUNCH(peri__device(into), axpy, &args, peri__numel(into), 1 << 15);
out:
    peri__grad_swap(before);
    peri_tensor_release(flat);
    peri_tensor_release(grad);
    return status;
}

/** Add what is here to a sum, as far as turns go; a leaf whose gradient is complete says so. */
static peri_status add_in_turn(peri_backward *pass, total *to)
{
    while (to->turn >= 0 && pass->shares[to->turn].here) {
        share *s = &pass->shares[to->turn];
        peri_tensor *g = s->grad;
        s->grad = NULL;
        to->turn = s->next;
        if (g) PERI_TRY(accumulate(to->to, g, to->leaf));
        if (to->turn < 0 && to->leaf && to->leaf->ready) to->leaf->ready(to->leaf->ready_ctx, to->leaf);
    }
    return PERI_OK;
}

/** Hand the gradients of one node's inputs on. */
static peri_status deliver(peri_backward *pass, peri__node *node)
{
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < node->n_in; i++) {
        share *s = &pass->shares[pass->first[node->place] + i];
        peri_tensor *g = pass->grad_in[i];
        pass->grad_in[i] = NULL;
        if (status < 0 || s->total < 0) {
            peri_tensor_release(g);
            continue;
        }
        s->grad = g;
        s->here = true;
        status = add_in_turn(pass, &pass->totals[s->total]);
    }
    return status;
}

peri_status peri__check_version(const peri__node *node, const peri_tensor *t, uint64_t version)
{
    char text[128];
    if (peri__version(t) == version) return PERI_OK;
    return peri__fail(PERI_EINVAL,
                      "peri_backward_step: %s needs a tensor (%s) that was changed in place after it (%llu changes); "
                      "change a copy, or "
                      "change it after the backward pass",
                      node->name, peri__tensor_text(t, text, sizeof text),
                      (unsigned long long)(peri__version(t) - version));
}

/** An error if a tensor that the node saved was changed in place since. */
static peri_status check_versions(const peri__node *node)
{
    for (int32_t i = 0; i < node->n_saved; i++)
        if (node->saved[i]) PERI_TRY(peri__check_version(node, node->saved[i], node->version[i]));
    return PERI_OK;
}

/** Advance all that is left to do, in no order: other ranks may reach it in another one. */
static peri_status finish_endings(peri_backward *pass)
{
    peri_status result = PERI_OK;
    for (int64_t i = 0; i < pass->n_endings; i++) {
        if (!pass->endings[i]) continue;
        peri_status status = pass->endings[i]->finish(pass->endings[i]);
        if (status < 0) return status;
        if (status == PERI_PENDING) {
            result = PERI_PENDING;
            continue;
        }
        peri__ending_release(pass->endings[i]);
        pass->endings[i] = NULL;
    }
    return result;
}

bool peri_backward_strays(const peri_backward *pass) { return pass && pass->strays && pass->n_endings > 0; }

peri_status peri_backward_step(peri_backward *pass)
{
    PERI_NEED(pass);
    while (pass->at < pass->n) {
        peri__node *node = pass->nodes[pass->at];
        bool any = node->vtab->acts & (PERI__POSTS | PERI__WAITS);
        for (int32_t i = 0; i < node->n_out; i++) any = any || node->grad_out[i];
        if (any && pass->checked <= pass->at) { /* once: a node that waits for other ranks is called again */
            PERI_TRY(check_versions(node));
            pass->checked = pass->at + 1;
        }
        if (any) {
            bool before = peri__grad_swap(false);
            uint64_t outer = running;
            running = pass->id;
            peri_status status = node->vtab->backward(node, node->grad_out, pass->grad_in);
            running = outer;
            peri__grad_swap(before);
            if (status != PERI_OK) return status;
        }
        PERI_TRY(deliver(pass, node));
        peri__between();
        pass->nodes[pass->at++] = NULL;
        peri__node_spend(node);
    }
    return finish_endings(pass);
}

peri_status peri_backward_hook(peri_backward *pass, int64_t *id, peri_tensor **grad)
{
    PERI_NEED(pass);
    PERI_NEED(id);
    PERI_NEED(grad);
    *grad = NULL;
    *id = pass->at < pass->n ? peri__hook_ask(pass->nodes[pass->at]) : 0;
    if (*id && pass->nodes[pass->at]->grad_out[0]) {
        *grad = pass->nodes[pass->at]->grad_out[0];
        peri_tensor_retain(*grad);
    }
    return PERI_OK;
}

static peri_status check_root(const peri_tensor *root, const peri_tensor *grad)
{
    char a[128], b[128];
    PERI_NEED(root);
    if (!root->requires_grad)
        return peri__fail(PERI_EINVAL, "peri_backward_new: %s does not require grad: no leaf of its computation does",
                          peri__tensor_text(root, a, sizeof a));
    if (!grad && peri__numel(root) != 1)
        return peri__fail(PERI_EINVAL,
                          "peri_backward_new: %s has more than one element; make one number of it (mean, sum), or give "
                          "its upstream gradient",
                          peri__tensor_text(root, a, sizeof a));
    if (grad && (!peri__same_shape(root, grad) || root->dtype != grad->dtype))
        return peri__fail(PERI_EINVAL, "peri_backward_new: the gradient is %s, the root %s",
                          peri__tensor_text(grad, a, sizeof a), peri__tensor_text(root, b, sizeof b));
    return PERI_OK;
}

bool peri_backward_reaches(const peri_backward *pass, const peri_tensor *leaf)
{
    if (!pass || !leaf) return false;
    int64_t place = leaf->place;
    return place >= 0 && place < pass->n_totals && pass->totals[place].leaf == leaf;
}

/** Begin the sum of a root's gradient with the upstream one. The 1 that a pass of one root begins with is not written
 *  where its node wants to be told instead: nothing else is added to it. */
static peri_status seed(const peri_backward *pass, peri_tensor *root, peri_tensor *grad, int32_t roots)
{
    peri_tensor *start = grad;
    if (grad) peri_tensor_retain(grad);
    else if (roots == 1 && root->node && root->node->vtab->acts & PERI__ONE) {
        PERI_TRY(peri__tensor_like(root, root->ndim, root->shape, &start));
        root->node->of_one = true;
    } else {
        PERI_TRY(peri_tensor_full(peri__device(root), root->dtype, root->ndim, root->shape, 1, &start));
    }
    if (root->node) return accumulate(&root->node->grad_out[root->output], start, NULL);
    PERI_TRY(accumulate(&root->grad, start, root));
    if (root->ready && !peri_backward_reaches(pass, root)) root->ready(root->ready_ctx, root);
    return PERI_OK;
}

peri_status peri_backward_new(peri_tensor *const *roots, peri_tensor *const *grads, int32_t n, peri_backward **out)
{
    PERI_NEED(roots);
    PERI_NEED(out);
    if (n < 1) return peri__fail(PERI_EINVAL, "peri_backward_new: %d roots, allowed: 1 and more", n);
    for (int32_t r = 0; r < n; r++) {
        PERI_TRY(check_root(roots[r], grads ? grads[r] : NULL));
        PERI_TRY(peri__late_on(peri__device(roots[r])));
    }
    peri_backward *pass = peri__alloc_zero(sizeof *pass);
    if (!pass) return PERI_ENOMEM;
    peri__object_count(1);
    peri_status status;
    int64_t leaves = 0;
    pass->id = atomic_fetch_add(&passes, 1) + 1;
    PERI_TRY_GOTO(collect(pass, roots, n, pass->id, &leaves), out);
    if (pass->n > 0) PERI_TRY_GOTO(link_shares(pass, leaves), out);
    PERI_TRY_GOTO(sort_nodes(pass), out);
    /* what others see, too, an exchange may have yet to write; a leaf stays and changes */
    for (int32_t r = 0; r < n; r++)
        if (roots[r]->node && peri__exclusive(roots[r])) PERI_TRY_GOTO(peri__item_ahead(roots[r]), out);
    for (int32_t r = 0; r < n; r++) PERI_TRY_GOTO(seed(pass, roots[r], grads ? grads[r] : NULL, n), out);
    *out = pass;
out:
    if (status < 0) peri_backward_release(pass);
    return status;
}

void peri_backward_release(peri_backward *pass)
{
    if (!pass || peri__border_refuses(__func__)) return;
    for (int64_t i = pass->at; i < pass->n; i++)
        if (pass->nodes[i]) peri__node_spend(pass->nodes[i]);
    for (int32_t i = 0; pass->grad_in && i < pass->grad_in_size; i++) peri_tensor_release(pass->grad_in[i]);
    for (int64_t i = 0; pass->shares && i < pass->n_shares; i++) peri_tensor_release(pass->shares[i].grad);
    for (int64_t i = 0; i < pass->n_endings; i++) peri__ending_release(pass->endings[i]);
    peri__free(pass->endings);
    peri__free(pass->grad_in);
    peri__free(pass->shares);
    peri__free(pass->totals);
    peri__free(pass->first);
    peri__free(pass->nodes);
    peri__object_count(-1);
    peri__free(pass);
}

peri_status peri_tensor_backward(peri_tensor *root, peri_tensor *grad)
{
    PERI_NEED(root);
    peri_backward *pass;
    PERI_TRY(peri_backward_new(&root, &grad, 1, &pass));
    peri_status status;
    for (int64_t round = 0; (status = peri_backward_step(pass)) == PERI_PENDING; round++) peri_pause(round);
    peri_backward_release(pass);
    return status;
}
