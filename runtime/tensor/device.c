/* SPDX-License-Identifier: Apache-2.0
 *
 * device.c: the table of open devices, streams, events; queueing kernels and copies.
 */
#include "capture.h"

#include "../../kernels/work.h"
#include "../base/between.h"
#include "../base/floats.h"
#include "../base/tune.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t stream_lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void fork_locks(void)
{
    peri__fork_lock(&lock, PERI__FORK_DEVICES);
    peri__fork_lock(&stream_lock, PERI__FORK_STREAMS);
}

static peri_device devices[PERI_MAX_DEVICES];
static atomic_int device_count;

/** Each thread's current streams by device; NULL: the default stream. */
static _Thread_local peri_stream *current[PERI_MAX_DEVICES];

peri_status peri__said(const peri_device *device, const char *call, peri_status status)
{
    if (status >= 0 || peri_error_status() == status) return status;
    return peri__fail(status, "device %s: %s failed: %s", device->name, call, peri_status_text(status));
}

/** The backend's parts of a stream whose device is set. */
static peri_status stream_open(peri_stream *s)
{
    static atomic_uint_least64_t streams;
    const peri_device *d = s->device;
    s->number = atomic_fetch_add(&streams, 1) + 1;
    PERI_TRY(peri__said(d, "stream_new", d->vtab->stream_new(d->ctx, &s->ctx)));
    peri_status status = peri__said(d, "event_new", d->vtab->event_new(d->ctx, &s->freeing));
    if (status < 0) d->vtab->stream_delete(d->ctx, s->ctx);
    return status;
}

static peri_status open_device(const char *name, peri_device *d)
{
    char backend[32], reason[256] = "";
    const char *colon = strchr(name, ':');
    size_t n = colon ? (size_t)(colon - name) : strlen(name);
    if (!n || n >= sizeof backend || strlen(name) >= sizeof d->name)
        return peri__fail(PERI_ENOTFOUND, "peri_device_get: '%.40s' is no device; known: cpu, opaque, cuda:<number>",
                          name);
    memcpy(backend, name, n);
    backend[n] = 0;
    long number = -1;
    if (colon) { /* digits, without a sign, blanks, or zeros before them: a device has one name */
        size_t digits = strspn(colon + 1, "0123456789");
        bool plain = digits && digits <= 4 && !colon[1 + digits] && (digits == 1 || colon[1] != '0');
        number = plain ? atol(colon + 1) : 1025;
    }
    if (number > 1024)
        return peri__fail(PERI_ENOTFOUND, "peri_device_get: '%s': '%s' is no device number", name, colon + 1);
    PERI_TRY(peri__plugin_device(backend, &d->vtab, &d->work));
    if (d->vtab->probe(reason, sizeof reason) < 0)
        return peri__fail(PERI_EUNSUPPORTED, "peri_device_get: device '%s' cannot be used here: %s", name, reason);
    snprintf(d->name, sizeof d->name, "%s", name);
    peri_error_clear(); /* what a backend says, or does not say, is about this call */
    int32_t index = (int32_t)number;
    PERI_TRY(peri__said(d, "open", d->vtab->open(&index, &d->ctx, &d->caps)));
    /* one that stands in for another keeps the other's name */
    if (!colon == (index >= 0) && !strcmp(backend, d->vtab->name)) {
        memcpy(d->alias, d->name, sizeof d->alias);
        if (colon) snprintf(d->name, sizeof d->name, "%s", backend);
        else snprintf(d->name, sizeof d->name, "%.20s:%d", backend, index);
    }
    peri__refs_init(&d->default_stream.refs);
    d->default_stream.device = d;
    return stream_open(&d->default_stream);
}

static void close_device(peri_device *d)
{
    d->vtab->event_delete(d->ctx, d->default_stream.freeing);
    if (d->default_stream.awaited) d->vtab->event_delete(d->ctx, d->default_stream.awaited);
    d->vtab->stream_delete(d->ctx, d->default_stream.ctx);
    d->vtab->close(d->ctx);
}

/** The place of the device of this name, or that this name was given to; -1: it is not open. */
static int known(const char *name, int n)
{
    for (int i = 0; *name && i < n; i++) /* "" is the alias of every device that has none */
        if (!strcmp(devices[i].name, name) || !strcmp(devices[i].alias, name)) return i;
    return -1;
}

/** Variables whose values are words, and the words, each between ", ". Their users read them later, and some without a
 *  way to fail. */
static const struct {
    const char *name, *words;
} word_variables[] = {
    {"PERI_BLAS", "onednn, openblas"},
    {"PERI_MPI_NEAR", "0, 1"},
    {"PERI_ROW_IO", "auto, uring, threads"},
    {"PERI_TRACEBACK", "0, 1"},
};

static bool is_word_of(const char *text, const char *words)
{
    size_t n = strlen(text);
    for (const char *at = words; at; at = strstr(at, ", ") ? strstr(at, ", ") + 2 : NULL)
        if (!strncmp(at, text, n) && (at[n] == ',' || !at[n])) return true;
    return false;
}

/** What the environment asks for must exist: nothing is computed before a device is open. */
static peri_status check_environment(void)
{
    peri__stay_loaded();
    PERI_TRY(peri__threads_check());
    PERI_TRY(peri__log_check());
    PERI_TRY(peri__tune_check());
    PERI_TRY(peri__caches_check());
    for (size_t i = 0; i < sizeof word_variables / sizeof *word_variables; i++) {
        const char *text = secure_getenv(word_variables[i].name), *words = word_variables[i].words;
        if (text && *text && !is_word_of(text, words))
            return peri__fail(PERI_EINVAL, "%s is '%.40s', allowed: %s", word_variables[i].name, text, words);
    }
    if (secure_getenv("PERI_CUDA_TF32"))
        return peri__fail(PERI_EINVAL,
                          "PERI_CUDA_TF32 is not read any more; call peri.set_float32_matmul_precision \"high\" (in C: "
                          "peri_float32_matmul_precision_set), and unset it");
    const char *isa = peri_kernels_unknown();
    return isa ? peri__fail(PERI_EINVAL, "PERI_CPU_ISA is '%.40s', allowed: ref, avx2, avx512", isa) : PERI_OK;
}

peri_status peri_device_get(const char *name, peri_device **out)
{
    PERI_NEED(out);
    if (!name) return peri__fail(PERI_EINVAL, "peri_device_get: no name");
    int at = known(name, atomic_load_explicit(&device_count, memory_order_acquire));
    if (at >= 0) {
        *out = &devices[at];
        return PERI_OK;
    }
    peri_status status = PERI_OK;
    pthread_mutex_lock(&lock);
    int now = atomic_load(&device_count), found = known(name, now);
    if (found < 0 && now == PERI_MAX_DEVICES)
        status = peri__fail(PERI_EUNSUPPORTED, "peri_device_get: more than %d devices", PERI_MAX_DEVICES);
    else if (found < 0) {
        devices[now].id = now;
        status = check_environment();
        if (status >= 0) status = open_device(name, &devices[now]);
        /* "cuda" may be the "cuda:0" that is open, "cpu:0" is "cpu" */
        if (status >= 0) found = known(devices[now].name, now);
        if (status >= 0 && found >= 0) {
            memcpy(devices[found].alias, devices[now].alias, sizeof devices[now].alias);
            close_device(&devices[now]);
        } else if (status >= 0) {
            found = now;
            atomic_store_explicit(&device_count, now + 1, memory_order_release);
        }
        if (found != now) memset(&devices[now], 0, sizeof devices[now]);
    }
    pthread_mutex_unlock(&lock);
    if (status >= 0) *out = &devices[found];
    return status < 0 ? status : PERI_OK;
}

void peri__devices_end(void (*before)(peri_device *device))
{
    pthread_mutex_lock(&lock);
    const int n = atomic_load(&device_count);
    atomic_store_explicit(&device_count, 0, memory_order_release);
    for (int i = 0; i < n; i++) {
        (void)devices[i].vtab->stream_sync(devices[i].ctx, devices[i].default_stream.ctx);
        before(&devices[i]);
        close_device(&devices[i]);
        memset(&devices[i], 0, sizeof devices[i]);
    }
    pthread_mutex_unlock(&lock);
}

const char *peri_device_name(const peri_device *device) { return device ? device->name : NULL; }
bool peri_device_host_access(const peri_device *device)
{
    return device && (device->caps & PERI_DEVICE_HOST_ACCESS);
}

bool peri_device_probe(const char *name, char *reason, int64_t size)
{
    const peri_device_vtab *vtab;
    char why[512] = "";
    bool ok = name && !peri__border_refuses(__func__) && peri__plugin_device(name, &vtab, NULL) >= 0;
    if (!name) snprintf(why, sizeof why, "no name");
    else if (!ok) snprintf(why, sizeof why, "%.250s", peri_error_message());
    else ok = vtab->probe(why, sizeof why) >= 0;
    if (reason && size > 0) snprintf(reason, (size_t)size, "%s", why);
    return ok;
}

const char *peri_cpu_isa(void) { return peri_kernels_get()->isa; }

/** What is queued on a stream at the first question. */
typedef struct dry {
    peri_stream *stream;
    bool marked; /* stream->awaited stands at its end */
} dry;

static peri_status is_dry(void *ctx)
{
    dry *d = ctx;
    const peri_device *device = d->stream->device;
    if (!d->stream->awaited)
        PERI_TRY(peri__said(device, "event_new", device->vtab->event_new(device->ctx, &d->stream->awaited)));
    if (!d->marked) PERI_TRY(device->vtab->event_record(device->ctx, d->stream->awaited, d->stream->ctx));
    d->marked = true;
    return device->vtab->event_query(device->ctx, d->stream->awaited);
}

peri_status peri__stream_dry(peri_stream *s)
{
    PERI_TRY(peri__cannot_capture(s->device, "a wait of the host for the device"));
    dry d = {.stream = s};
    peri_status status;
    return peri__between_poll(is_dry, &d, &status) ? status : s->device->vtab->stream_sync(s->device->ctx, s->ctx);
}

peri_status peri__device_dry(peri_device *device)
{
    /* Streams are held, not locked, while they run: releasing one must not wait. */
    enum { SOME = 64 };
    PERI_TRY(peri__cannot_capture(device, "a wait of the host for the device"));
    peri_stream *few[SOME], **held = few;
    int64_t n = 0, count = 0;
    pthread_mutex_lock(&stream_lock);
    for (peri_stream *s = &device->default_stream; s; s = s->next) count++;
    if (count > SOME) held = peri__alloc(sizeof *held * (size_t)count);
    for (peri_stream *s = &device->default_stream; s && held; s = s->next)
        if (peri__refs_try(&s->refs)) held[n++] = s;
    pthread_mutex_unlock(&stream_lock);
    if (!held) return PERI_ENOMEM;
    peri_status status = PERI_OK;
    for (int64_t i = 0; i < n; i++) {
        if (status >= 0) status = peri__stream_dry(held[i]);
        peri_stream_release(held[i]);
    }
    if (held != few) peri__free(held);
    return status;
}

peri_status peri_device_trim(peri_device *device)
{
    PERI_NEED(device);
    return device->vtab->trim ? peri__said(device, "trim", device->vtab->trim(device->ctx)) : PERI_OK;
}

peri_status peri_device_seed(peri_device *device, uint64_t seed)
{
    PERI_NEED(device);
    if (device->vtab->seed) device->vtab->seed(device->ctx, seed);
    return PERI_OK;
}

/* -- streams and events -------------------------------------------------------------------------------------------- */

peri_status peri_stream_new(peri_device *device, peri_stream **out)
{
    PERI_NEED(device);
    PERI_NEED(out);
    peri_stream *s = peri__alloc_zero(sizeof *s);
    if (!s) return PERI_ENOMEM;
    peri__refs_init(&s->refs);
    s->device = device;
    peri_status status = stream_open(s);
    if (status < 0) {
        peri__free(s);
        return status;
    }
    pthread_mutex_lock(&stream_lock);
    peri_stream *head = &device->default_stream;
    s->next = head->next;
    s->before = head;
    if (head->next) head->next->before = s;
    head->next = s;
    pthread_mutex_unlock(&stream_lock);
    peri__object_count(1);
    *out = s;
    return PERI_OK;
}

/** A device's default stream lives as long as the device, so that nobody counts who holds it. */
static bool is_default(const peri_stream *s) { return s == &s->device->default_stream; }

void peri_stream_retain(peri_stream *s) { if (s && !is_default(s)) peri__refs_add(&s->refs); }
peri_device *peri_stream_device(const peri_stream *s) { return s ? s->device : NULL; }

void peri_stream_release(peri_stream *s)
{
    if (!s || peri__border_refuses("a release") || is_default(s) || !peri__refs_drop(&s->refs)) return;
    pthread_mutex_lock(&stream_lock);
    s->before->next = s->next;
    if (s->next) s->next->before = s->before;
    pthread_mutex_unlock(&stream_lock);
    s->device->vtab->event_delete(s->device->ctx, s->freeing);
    if (s->awaited) s->device->vtab->event_delete(s->device->ctx, s->awaited);
    s->device->vtab->stream_delete(s->device->ctx, s->ctx);
    peri__object_count(-1);
    peri__free(s);
}

peri_stream *peri_stream_current(peri_device *device)
{
    if (!device) return NULL;
    peri_stream *s = current[device->id];
    return s ? s : &device->default_stream;
}

peri_status peri_stream_current_set(peri_device *device, peri_stream *stream)
{
    PERI_NEED(device);
    if (stream && stream->device != device)
        return peri__fail(PERI_EINVAL, "peri_stream_current_set: a stream of %s on device %s", stream->device->name,
                          device->name);
    if (stream && is_default(stream)) stream = NULL;
    if (stream) peri_stream_retain(stream);
    peri_stream_release(current[device->id]);
    current[device->id] = stream;
    return PERI_OK;
}

peri_status peri_stream_wait(peri_stream *stream, peri_event *event)
{
    PERI_NEED(stream);
    PERI_NEED(event);
    if (stream->device != event->device)
        return peri__fail(PERI_EINVAL, "peri_stream_wait: a stream of %s and an event of %s", stream->device->name,
                          event->device->name);
    if (event->recorded == stream->number) return PERI_OK; /* a stream runs in order anyway */
    PERI_TRY(peri__cannot_capture(stream->device, "a wait for another stream"));
    return stream->device->vtab->stream_wait(stream->device->ctx, stream->ctx, event->ctx);
}

peri_status peri_event_new(peri_device *device, peri_event **out)
{
    PERI_NEED(device);
    PERI_NEED(out);
    peri_event *e = peri__alloc_zero(sizeof *e);
    if (!e) return PERI_ENOMEM;
    peri__refs_init(&e->refs);
    e->device = device;
    peri_status status = peri__said(device, "event_new", device->vtab->event_new(device->ctx, &e->ctx));
    if (status < 0) {
        peri__free(e);
        return status;
    }
    peri__object_count(1);
    *out = e;
    return PERI_OK;
}

void peri_event_release(peri_event *e)
{
    if (!e || !peri__refs_drop(&e->refs)) return;
    e->device->vtab->event_delete(e->device->ctx, e->ctx);
    peri__object_count(-1);
    peri__free(e);
}

peri_device *peri_event_device(const peri_event *e) { return e ? e->device : NULL; }

peri_status peri_event_record(peri_event *event, peri_stream *stream)
{
    PERI_NEED(event);
    PERI_NEED(stream);
    if (stream->device != event->device)
        return peri__fail(PERI_EINVAL, "peri_event_record: an event of %s and a stream of %s", event->device->name,
                          stream->device->name);
    PERI_TRY(peri__cannot_capture(event->device, "an event, such as an exchange needs,"));
    event->recorded = stream->number;
    return event->device->vtab->event_record(event->device->ctx, event->ctx, stream->ctx);
}

peri_status peri_event_query(peri_event *event)
{
    PERI_NEED(event);
    PERI_TRY(peri__cannot_capture(event->device, "a question about an event"));
    return event->device->vtab->event_query(event->device->ctx, event->ctx);
}

typedef struct queued_event {
    const peri_device *device;
    void *event;
} queued_event;

static peri_status is_reached(void *ctx)
{
    const queued_event *e = ctx;
    return e->device->vtab->event_query(e->device->ctx, e->event);
}

peri_status peri__event_wait(const peri_device *device, void *event)
{
    PERI_TRY(peri__cannot_capture(device, "a wait of the host for the device"));
    queued_event e = {device, event};
    peri_status status;
    return peri__between_poll(is_reached, &e, &status) ? status : device->vtab->event_sync(device->ctx, event);
}

peri_status peri_event_synchronize(peri_event *event)
{
    PERI_NEED(event);
    return peri__event_wait(event->device, event->ctx);
}

/* -- work ---------------------------------------------------------------------------------------------------------- */

/** The error about a kernel or an operation that a device has not, at all or for the arguments of a launch. */
static peri_status lacks(const char *function, const peri_device *device, int32_t work, bool args)
{
    return peri__fail(PERI_EUNSUPPORTED, "%s: device %s has no %s %s%s", function, device->name,
                      work < PERI_OP_FIRST ? "kernel" : "operation", peri_kernel_names[work],
                      args ? " for these arguments" : "");
}

/** The backend's number of @work, PERI_K_* or PERI_OP_*, if it has it for @args (NULL: for some); else -1. */
static int32_t number_of(const peri_device *device, int32_t work, const void *args)
{
    const int32_t number = device->work ? device->work[work] : work;
    return number >= 0 && device->vtab->has(device->ctx, number, args) ? number : -1;
}

peri_status peri__launch(peri_device *device, int32_t kernel, const void *args, size_t args_size, int64_t n,
                         int64_t grain)
{
    if (n <= 0) return PERI_OK;
    const int32_t number = number_of(device, kernel, args);
    if (number < 0) return lacks("launch", device, kernel, true);
    if (peri__device_is_captured(device))
        PERI_TRY(peri__capture_work(peri_stream_current(device), kernel, args, args_size));
    void *stream = peri_stream_current(device)->ctx;
    PERI__OWN_FLOATS;
    return peri__said(device, "launch",
                      device->vtab->launch(device->ctx, stream, number, args, (int64_t)args_size, n, grain));
}

peri_status peri__launch_op(peri_device *device, int32_t op, const void *args, size_t args_size)
{
    const int32_t number = number_of(device, op, args);
    if (number < 0) return lacks("launch", device, op, true);
    void *stream = peri_stream_current(device)->ctx, *scratch = NULL;
    peri__block *block = NULL; /* of a recording */
    if (peri__device_is_captured(device))
        PERI_TRY(peri__capture_work(peri_stream_current(device), op, args, args_size));
    PERI__OWN_FLOATS;
    int64_t bytes = device->vtab->scratch(device->ctx, number, args);
    if (bytes < 0) return peri__said(device, "scratch", (peri_status)bytes);
    if (bytes > 0 && peri__device_is_captured(device)) {
        PERI_TRY(peri__said(device, "alloc", peri__arena_take(peri__capturing->arena, bytes, false, &block)));
        scratch = block->data;
    } else if (bytes > 0)
        PERI_TRY(peri__said(device, "alloc", device->vtab->alloc(device->ctx, stream, bytes, &scratch)));
    peri_status status = device->vtab->run(device->ctx, stream, number, args, (int64_t)args_size, scratch, bytes);
    if (block) peri__block_release(block);
    else if (scratch) device->vtab->free(device->ctx, stream, scratch, bytes);
    return peri__said(device, "run", status);
}

peri_status peri__need_work(const char *function, peri_device *device, const int32_t *work, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        if (number_of(device, work[i], NULL) < 0) return lacks(function, device, work[i], false);
    return PERI_OK;
}

/** A copy is about to be captured. */
static peri_status captured_copy(peri_device *device, const void *dst, const void *src, int32_t kind)
{
    const void *const addresses[] = {dst, src};
    if (kind == PERI_COPY_D2D)
        return peri__capture_work(peri_stream_current(device), -1, addresses, sizeof addresses);
    return peri__cannot_capture(device, kind == PERI_COPY_D2H
                                            ? "a copy to the host, such as reading an element or checking ids,"
                                            : "a copy from the host");
}

peri_status peri__copy(peri_device *device, void *dst, const void *src, int64_t bytes, int32_t kind)
{
    if (bytes <= 0) return PERI_OK;
    if (peri__device_is_captured(device)) PERI_TRY(captured_copy(device, dst, src, kind));
    return peri__said(device, "copy",
                      device->vtab->copy(device->ctx, peri_stream_current(device)->ctx, dst, src, bytes, kind));
}

/* Calls of a backend that may wait for all that runs on a device come after what exchanges have queued there: if a rank
 * is lost, only this thread can end that. */

peri_status peri__host_alloc(peri_device *device, int64_t bytes, void **out)
{
    PERI_TRY(peri__cannot_capture(device, "memory of the host"));
    if (device->vtab->host_alloc) PERI_TRY(peri__between_idle());
    if (device->vtab->host_alloc)
        return peri__said(device, "host_alloc", device->vtab->host_alloc(device->ctx, bytes, out));
    void *p = peri__alloc((size_t)(bytes ? bytes : 1));
    if (!p) return PERI_ENOMEM;
    *out = p;
    return PERI_OK;
}

void peri__host_free(peri_device *device, void *p, int64_t bytes)
{
    if (!p) return;
    if (device->vtab->host_free) (void)peri__between_idle();
    if (device->vtab->host_free) device->vtab->host_free(device->ctx, p, bytes);
    else peri__free(p);
}

/* -- memory -------------------------------------------------------------------------------------------------------- */

bool peri__reaches_host(const peri_device *device)
{
    return peri_device_host_access(device) || device->vtab->mapped_alloc;
}

peri_status peri_device_memory(peri_device *device, int64_t *available)
{
    PERI_NEED(device);
    PERI_NEED(available);
    *available = -1;
    return device->vtab->memory ? peri__said(device, "memory", device->vtab->memory(device->ctx, available)) : PERI_OK;
}
