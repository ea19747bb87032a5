/* SPDX-License-Identifier: Apache-2.0
 *
 * autocast.c: the dtypes that operations compute in: regions of autocast, and 16-bit floats outside of them.
 *
 * Kernels of elementwise operations and of linear layers take 16-bit floats; they compute in f32 and round once. Those
 * of other dense operations take f32 and f64: an operation on 16-bit floats casts its inputs to f32, computes, and
 * casts its result back.
 */
#include "tensor_internal.h"

#include <perilune/precision.h>
#include <string.h>

/* -- products of f32 ----------------------------------------------------------------------------------------------- */

static const char *const precisions[] = {"highest", "high", "medium"};
static atomic_int precision;

peri_status peri_float32_matmul_precision_set(const char *text)
{
    PERI__NOT_AT_BORDER;
    for (int i = 0; text && i < 3; i++)
        if (!strcmp(text, precisions[i])) {
            atomic_store(&precision, i);
            return PERI_OK;
        }
    return peri__fail(PERI_EINVAL, "peri_float32_matmul_precision_set: '%.40s', allowed: highest, high, medium",
                      text ? text : "");
}

const char *peri_float32_matmul_precision(void) { return precisions[atomic_load(&precision)]; }

bool peri__tf32(void) { return atomic_load_explicit(&precision, memory_order_relaxed) > 0; }

static _Thread_local bool ordered;

bool peri_products_ordered(void) { return ordered; }

peri_status peri_products_ordered_set(bool on)
{
    PERI__NOT_AT_BORDER;
    ordered = on;
    return PERI_OK;
}

/* -- regions ------------------------------------------------------------------------------------------------------- */

/** A weight, and what it was cast to. The cast is right as long as the weight was not changed in place, and on the
 *  stream that made it. */
typedef struct cached {
    peri_tensor *weight, *cast; /* retained */
    uint64_t version;
    const peri_stream *stream;
} cached;

struct peri_autocast {
    peri__refs refs;
    char device[32]; /* "cuda": the kind */
    int32_t dtype;   /* -1: nothing is cast */
    bool inside;
    peri_autocast *outer; /* while it is entered: the region around it, or NULL */
    cached *weights;
    int32_t n, room, next; /* next: the entry behind the one that was found last. Steps ask for their weights in the
                              same order */
};

static _Thread_local peri_autocast *innermost;

static void drop_casts(peri_autocast *region)
{
    for (int32_t i = 0; i < region->n; i++) {
        peri_tensor_release(region->weights[i].weight);
        peri_tensor_release(region->weights[i].cast);
    }
    peri__free(region->weights);
    region->weights = NULL;
    region->n = region->room = region->next = 0;
}

peri_status peri_autocast_new(const char *device, int32_t dtype, bool enabled, peri_autocast **out)
{
    PERI_NEED(device);
    PERI_NEED(out);
    if (dtype != PERI_BF16 && dtype != PERI_F16)
        return peri__fail(PERI_EINVAL, "peri_autocast_new: dtype %s, allowed: bf16, f16",
                          dtype >= 0 && dtype < PERI_DTYPE_COUNT ? peri_dtype_name(dtype) : "of an unknown number");
    peri_autocast *region = peri__alloc_zero(sizeof *region);
    if (!region) return PERI_ENOMEM;
    const size_t kind = strcspn(device, ":");
    if (kind >= sizeof region->device || kind == 0) {
        peri__free(region);
        return peri__fail(PERI_EINVAL,
                          "peri_autocast_new: device '%.40s', wanted the name of a kind of device: cpu, cuda", device);
    }
    peri__refs_init(&region->refs);
    memcpy(region->device, device, kind);
    region->dtype = enabled ? dtype : -1;
    peri__object_count(1);
    *out = region;
    return PERI_OK;
}

void peri_autocast_release(peri_autocast *region)
{
    if (!region || !peri__refs_drop(&region->refs)) return;
    drop_casts(region);
    peri__object_count(-1);
    peri__free(region);
}

peri_status peri_autocast_enter(peri_autocast *region)
{
    PERI_NEED(region);
    if (region->inside)
        return peri__fail(PERI_EINVAL, "peri_autocast_enter: this region is entered already; make another one");
    peri__refs_add(&region->refs);
    region->inside = true;
    region->outer = innermost;
    innermost = region;
    return PERI_OK;
}

peri_status peri_autocast_exit(peri_autocast *region)
{
    PERI_NEED(region);
    if (region != innermost)
        return peri__fail(PERI_EINVAL, "peri_autocast_exit: %s",
                          region->inside ? "a region inside of this one was not left" : "this region was not entered");
    innermost = region->outer;
    region->outer = NULL;
    region->inside = false;
    drop_casts(region);
    peri_autocast_release(region);
    return PERI_OK;
}

peri_autocast *peri_autocast_current(void) { return innermost; }

peri_status peri_autocast_current_set(peri_autocast *region)
{
    PERI__NOT_AT_BORDER;
    innermost = region;
    return PERI_OK;
}

/** The region of @device that the thread is in, or NULL. */
static peri_autocast *region_of(const peri_device *device)
{
    for (peri_autocast *r = innermost; r; r = r->outer) {
        const size_t n = strlen(r->device);
        if (!strncmp(device->name, r->device, n) && (device->name[n] == ':' || !device->name[n]))
            return r->dtype >= 0 ? r : NULL;
    }
    return NULL;
}

int32_t peri__autocast(const peri_device *device)
{
    const peri_autocast *region = innermost ? region_of(device) : NULL;
    return region ? region->dtype : -1;
}

/* -- casts --------------------------------------------------------------------------------------------------------- */

peri_status peri__cast(peri_tensor *t, int32_t dtype, peri_tensor **out)
{
    if (t->dtype == dtype) {
        peri_tensor_retain(t);
        *out = t;
        return PERI_OK;
    }
    peri_tensor *copy;
    PERI_TRY(peri_tensor_new(peri__device(t), dtype, t->ndim, t->shape, &copy));
    peri_status status = peri_tensor_copy(copy, t);
    if (status < 0) peri_tensor_release(copy);
    else *out = copy;
    return status;
}

peri_status peri__summands(peri_tensor *grad, peri_tensor **out)
{
    peri_tensor *wide;
    PERI_TRY(peri__cast(grad, peri__is_16(grad->dtype) ? PERI_F32 : grad->dtype, &wide));
    peri_status status = peri_tensor_contiguous(wide, out);
    peri_tensor_release(wide);
    return status;
}

/** The entry of a weight, or NULL. */
static cached *find(peri_autocast *region, const peri_tensor *weight)
{
    for (int32_t i = 0; i < region->n; i++) {
        const int32_t at = (region->next + i) % region->n;
        if (region->weights[at].weight != weight) continue;
        region->next = at + 1;
        return &region->weights[at];
    }
    return NULL;
}

static cached *add_cached_weight(peri_autocast *region)
{
    if (region->n == region->room) {
        const int32_t room = region->room ? 2 * region->room : 16;
        cached *more = peri__realloc(region->weights, sizeof *more * (size_t)room);
        if (!more) return NULL;
        region->weights = more;
        region->room = room;
    }
    cached *c = &region->weights[region->n++];
    memset(c, 0, sizeof *c);
    return c;
}

peri_status peri__cast_weight(peri_tensor *t, int32_t dtype, peri_tensor **out)
{
    peri_autocast *region = region_of(peri__device(t));
    if (!region || region->dtype != dtype || t->node || !t->requires_grad || t->dtype == dtype)
        return peri__cast(t, dtype, out);
    const peri_stream *stream = peri_stream_current(peri__device(t));
    cached *c = find(region, t);
    if (!c || c->version != peri__version(t) || c->stream != stream) {
        peri_tensor *cast;
        PERI_TRY(peri__cast(t, dtype, &cast));
        if (!c) c = add_cached_weight(region);
        if (!c) {
            peri_tensor_release(cast);
            return PERI_ENOMEM;
        }
        if (!c->weight) peri_tensor_retain(c->weight = t);
        peri_tensor_release(c->cast);
        c->cast = cast;
        c->version = peri__version(t);
        c->stream = stream;
    }
    peri_tensor_retain(c->cast);
    *out = c->cast;
    return PERI_OK;
}

/* -- operands ------------------------------------------------------------------------------------------------------ */

/** Inputs of different dtypes, by PyTorch's rules. A number beside 16-bit floats is not rounded to them: all are
 *  computed in f32, as one kernel would. */
static peri_status promote(peri__operands *o, peri_tensor *const *in, int32_t n)
{
    const int32_t common = peri__common_dtype(in, n);
    int32_t dtype = common;
    for (int32_t i = 0; i < n && peri__is_16(common); i++)
        if (in[i] && in[i]->dtype != common && !peri__is_integer(in[i]->dtype)) dtype = PERI_F32;
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < n && status >= 0; i++) {
        if (in[i] && common >= 0 && in[i]->dtype != dtype) status = peri_tensor_to(in[i], dtype, NULL, &o->in[i]);
        else if (in[i]) peri_tensor_retain(o->in[i] = in[i]);
    }
    if (dtype != common) o->back = common;
    if (status < 0) peri__narrow(o, status, NULL);
    return status;
}

peri_status peri__widen_operands(peri__operands *o, peri__dtype_rule rule, peri_tensor *const *in, int32_t n)
{
    *o = (peri__operands){.n = n, .back = -1};
    bool narrow = false, one = true;
    const peri_tensor *first = NULL;
    for (int32_t i = 0; i < n; i++) {
        if (!in[i]) continue;
        if (!first) first = in[i];
        narrow = narrow || peri__is_16(in[i]->dtype);
        one = one && in[i]->dtype == first->dtype;
    }
    if (rule == PERI__IN_OWN && !one) return promote(o, in, n);
    const bool own = rule == PERI__IN_OWN;
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < n && status >= 0; i++) {
        if (in[i] && peri__is_16(in[i]->dtype) && !own) status = peri_tensor_to(in[i], PERI_F32, NULL, &o->in[i]);
        else if (in[i]) peri_tensor_retain(o->in[i] = in[i]);
    }
    if (narrow && one && !own && !(rule == PERI__IN_F32 && peri__autocast(peri__device(first)) >= 0))
        o->back = first->dtype;
    if (status < 0) peri__narrow(o, status, NULL);
    return status;
}

peri_status peri__narrow(peri__operands *o, peri_status status, peri_tensor **out)
{
    for (int32_t i = 0; i < o->n; i++) peri_tensor_release(o->in[i]);
    if (status < 0) return status;
    if (o->back < 0) {
        *out = o->out;
        return status;
    }
    status = peri_tensor_to(o->out, o->back, NULL, out);
    peri_tensor_release(o->out);
    return status;
}
