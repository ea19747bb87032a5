/* SPDX-License-Identifier: Apache-2.0
 *
 * opaque.c: the test device. It computes with the cpu backend's kernels, but behaves like the worst GPU that the
 * contract allows:
 *
 * - its addresses are mapped without access, for good: a host that dereferences one dies at once. The bytes lie
 *   elsewhere, at a fixed distance that only this file knows; it moves the device pointers in the arguments of a task
 *   when the task runs;
 * - its streams run nothing until somebody waits, and then in a random order (seeded), bound by stream order and events
 * only:
 *   a forgotten event shows as a wrong result;
 * - freed memory is overwritten when the free runs: a use after free shows as well. The scratch of an operation holds
 *   noise before and after, another one each time: what comes out must not depend on it, and nobody else can make use
 *   of it.
 *
 * It is slow on purpose and single-file: one mutex, tasks run in the thread that waits.
 */
#include "../../kernels/kernels.h"
#include "../plugin/fault.h"
#include "../plugin/device.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

const peri_device_vtab *peri__cpu_entry(const peri_plugin_host *host);

static const peri_plugin_host *host;
static const peri_device_vtab *cpu;

typedef struct stream stream;

/** A mark in a stream: reached when the stream has run `position` tasks. */
typedef struct mark {
    stream *stream; /* NULL: always reached */
    int64_t position;
} mark;

enum { TASK_COPY, TASK_LAUNCH, TASK_RUN, TASK_FREE, TASK_WAIT };

typedef struct task {
    struct task *next;
    int32_t kind;
    bool words; /* COPY: 64-bit words, with addresses among them */
    mark until; /* WAIT */
    void *dst;  /* COPY; FREE: the block */
    const void *src;
    int64_t bytes;
    int32_t kernel; /* LAUNCH, RUN */
    int64_t n, grain;
    void *scratch; /* RUN */
    int64_t scratch_bytes;
    char data[]; /* LAUNCH, RUN: the arguments; COPY from ordinary host memory: the bytes */
} task;

struct stream {
    stream *next; /* all streams of the device */
    task *head, *tail;
    int64_t queued, run; /* tasks ever queued and ever run */
    int32_t refs;        /* its handle, and each event and queued wait that points at it */
};

typedef struct event {
    mark mark;
} event;

/** A free range of addresses. */
typedef struct hole {
    struct hole *next;
    char *at;
    int64_t bytes;
} hole;

/** Addresses lie where the low 32 bits, as a signed number, are large and negative. An argument struct has padding
 *  beside its 32-bit members, where compilers leave what the stack held, often the upper half of some address: with a
 *  count or a dtype for a lower half it must not look like one of ours. */
static const size_t ARENA_BYTES = (size_t)3 << 29;
static const uintptr_t ARENA_LOW = 0x90000000u;

static struct {
    pthread_mutex_t lock;
    char *arena, *top, *end; /* addresses that are given out, without access */
    ptrdiff_t distance;      /* from there to the bytes */
    hole *holes;
    stream *streams;
    uint64_t state; /* of the order generator */
    int64_t page;
} dev = {.lock = PTHREAD_MUTEX_INITIALIZER, .state = 1};

/** Where the bytes of a device address lie; other pointers (host memory) stay. */
static void *bytes_of(const void *p)
{
    uintptr_t x = (uintptr_t)p;
    bool ours = x >= (uintptr_t)dev.arena && x < (uintptr_t)dev.end;
    return (char *)x + (ours ? dev.distance : 0);
}

/** Move the device pointers in a task's arguments: every aligned word that is one of the addresses. (A number that is
 *  one by chance, such as a hash, has odds of one in 2^33.) */
static void move_pointers(char *data, int64_t bytes)
{
    for (int64_t i = 0; i + (int64_t)sizeof(void *) <= bytes; i += (int64_t)sizeof(void *)) {
        void *p;
        memcpy(&p, data + i, sizeof p);
        p = bytes_of(p);
        memcpy(data + i, &p, sizeof p);
    }
}

static uint64_t draw(void) /* xorshift64* */
{
    dev.state ^= dev.state >> 12;
    dev.state ^= dev.state << 25;
    dev.state ^= dev.state >> 27;
    return dev.state * 0x2545f4914f6cdd1du;
}

static int64_t whole_pages(int64_t bytes)
{
    int64_t n = (bytes + dev.page - 1) / dev.page * dev.page;
    return n ? n : dev.page;
}

/* -- streams and marks --------------------------------------------------------------------------------------------- */

static bool mark_is_reached(const mark *m) { return !m->stream || m->stream->run >= m->position; }

static void stream_unref(stream *s)
{
    if (--s->refs > 0 || s->head) return; /* with work left, the last task to run comes back here */
    for (stream **p = &dev.streams; *p; p = &(*p)->next)
        if (*p == s) {
            *p = s->next;
            break;
        }
    host->free(s);
}

static void mark_set(mark *m, stream *s)
{
    stream *old = m->stream;
    *m = (mark){s, s ? s->queued : 0};
    if (s) s->refs++;
    if (old) stream_unref(old);
}

/** Return a range: holes lie by address, and those that touch become one. */
static void give_back(char *at, int64_t bytes)
{
    hole **place = &dev.holes, *before = NULL;
    while (*place && (*place)->at < at) before = *place, place = &(*place)->next;
    hole *after = *place;
    if (before && before->at + before->bytes == at) {
        before->bytes += bytes;
    } else {
        hole *h = host->alloc(sizeof *h);
        if (!h) return; /* the range is lost, nothing else */
        *h = (hole){after, at, bytes};
        *place = before = h;
    }
    if (!after || before->at + before->bytes != after->at) return;
    before->bytes += after->bytes;
    before->next = after->next;
    host->free(after);
}

/** The first hole that has room; NULL: none. */
static char *take_hole(int64_t bytes)
{
    for (hole **place = &dev.holes; *place; place = &(*place)->next) {
        hole *h = *place;
        if (h->bytes < bytes) continue;
        char *p = h->at;
        h->at += bytes;
        h->bytes -= bytes;
        if (h->bytes == 0) {
            *place = h->next;
            host->free(h);
        }
        return p;
    }
    return NULL;
}

static void run_operation(task *t)
{
    char *scratch = t->scratch ? bytes_of(t->scratch) : NULL;
    int noise = (int)(draw() & 255);
    move_pointers(t->data, t->bytes);
    if (scratch) memset(scratch, noise, (size_t)t->scratch_bytes);
    cpu->run(NULL, NULL, t->kernel, t->data, t->bytes, scratch, t->scratch_bytes);
    if (scratch) memset(scratch, ~noise, (size_t)t->scratch_bytes);
}

/** Run the head of @s, which is not a wait for something that has not happened. */
static void run_head(stream *s)
{
    task *t = s->head;
    switch (t->kind) {
    case TASK_COPY:
        if (t->words) move_pointers(t->data, t->bytes);
        memmove(bytes_of(t->dst), t->src ? bytes_of(t->src) : t->data, (size_t)t->bytes);
        break;
    case TASK_LAUNCH:
        move_pointers(t->data, t->bytes);
        cpu->launch(NULL, NULL, t->kernel, t->data, t->bytes, t->n, t->grain);
        break;
    case TASK_RUN: run_operation(t); break;
    case TASK_FREE: memset(bytes_of(t->dst), 0xdd, (size_t)t->bytes); break;
    default: break;
    }
    if (t->kind == TASK_FREE) give_back(t->dst, t->bytes);
    s->head = t->next;
    if (!s->head) s->tail = NULL;
    s->run++;
    s->refs++; /* hold it: the wait below may be what kept it */
    if (t->kind == TASK_WAIT) mark_set(&t->until, NULL);
    host->free(t);
    stream_unref(s);
}

/** Run one task of a randomly chosen stream that can go on; false if none can. */
static bool run_one(void)
{
    int64_t ready = 0;
    for (stream *s = dev.streams; s; s = s->next)
        ready += s->head && (s->head->kind != TASK_WAIT || mark_is_reached(&s->head->until));
    if (!ready) return false;
    int64_t pick = (int64_t)(draw() % (uint64_t)ready);
    for (stream *s = dev.streams; s; s = s->next) {
        if (!s->head || (s->head->kind == TASK_WAIT && !mark_is_reached(&s->head->until)) || pick-- > 0) continue;
        run_head(s);
        return true;
    }
    return false;
}

/** Run tasks until @m is reached, at most @most of them; PERI_PENDING if that was not enough. */
static peri_status run_until(const mark *m, uint64_t most)
{
    if (mark_is_reached(m)) return PERI_OK;
    peri_status status = PERI_OK;
    for (uint64_t i = 0; i < most && !mark_is_reached(m) && status == PERI_OK; i++)
        if (!run_one()) status = PERI_HOST_FAIL(host, PERI_EINTERNAL, "opaque: streams wait for each other");
    return status < 0 || mark_is_reached(m) ? status : PERI_PENDING;
}

static task *task_new(int32_t kind, const void *data, int64_t bytes)
{
    task *t = host->alloc_zero(sizeof *t + (size_t)(data ? bytes : 0));
    if (!t) return NULL;
    t->kind = kind;
    t->bytes = bytes;
    if (data) memcpy(t->data, data, (size_t)bytes);
    return t;
}

static void enqueue_task(stream *s, task *t)
{
    pthread_mutex_lock(&dev.lock);
    if (s->tail) s->tail->next = t;
    else s->head = t;
    s->tail = t;
    s->queued++;
    pthread_mutex_unlock(&dev.lock);
}

/* -- the contract -------------------------------------------------------------------------------------------------- */

static peri_status opaque_probe(char *reason, size_t len)
{
    (void)reason, (void)len;
    return PERI_OK;
}

static peri_status opaque_open(int32_t *index, void **device, int32_t *caps)
{
    if (*index > 0) return PERI_HOST_FAIL(host, PERI_ENOTFOUND, "opaque: device %d, there is only device 0", *index);
    *index = -1;
    if (!dev.arena) {
        /* Room enough for the right low bits to come by; the rest stays unused. */
        size_t room = ARENA_BYTES + ((size_t)1 << 32);
        char *p = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        char *memory =
            mmap(NULL, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED || memory == MAP_FAILED)
            return PERI_HOST_FAIL(host, PERI_ENOMEM, "opaque: no address space for its arena");
        p += (ARENA_LOW - (uintptr_t)p) & UINT32_MAX;
        dev.distance = memory - p;
        dev.page = sysconf(_SC_PAGESIZE);
        dev.arena = dev.top = p;
        dev.end = dev.arena + ARENA_BYTES;
        const char *seed = secure_getenv("PERI_OPAQUE_SEED");
        if (seed && atoll(seed) != 0) dev.state = (uint64_t)atoll(seed);
    }
    *device = &dev;
    *caps = 0;
    return PERI_OK;
}

static void opaque_close(void *device) { (void)device; }

static peri_status opaque_alloc(void *device, void *on, int64_t bytes, void **out)
{
    (void)device, (void)on;
    int64_t need = whole_pages(bytes);
    char *p = NULL;
    if (!host->fault(PERI_FAULT_device_alloc)) {
        pthread_mutex_lock(&dev.lock);
        p = take_hole(need);
        if (!p && dev.end - dev.top >= need) p = dev.top, dev.top += need;
        pthread_mutex_unlock(&dev.lock);
    }
    if (!p) return PERI_HOST_FAIL(host, PERI_ENOMEM, "opaque: no memory for %lld bytes", (long long)bytes);
    *out = p;
    return PERI_OK;
}

static void opaque_free(void *device, void *on, void *p, int64_t bytes)
{
    (void)device;
    task *t = task_new(TASK_FREE, NULL, whole_pages(bytes));
    if (!t) return;
    t->dst = p;
    enqueue_task(on, t);
}

/** Room that no block has: holes, and what was never given out. */
static peri_status opaque_memory(void *device, int64_t *available)
{
    (void)device;
    pthread_mutex_lock(&dev.lock);
    *available = dev.end - dev.top;
    for (hole *h = dev.holes; h; h = h->next) *available += h->bytes;
    pthread_mutex_unlock(&dev.lock);
    return PERI_OK;
}

static peri_status opaque_stream_new(void *device, void **out)
{
    (void)device;
    stream *s = host->alloc_zero(sizeof *s);
    if (!s) return PERI_ENOMEM;
    s->refs = 1;
    pthread_mutex_lock(&dev.lock);
    s->next = dev.streams;
    dev.streams = s;
    pthread_mutex_unlock(&dev.lock);
    *out = s;
    return PERI_OK;
}

static void opaque_stream_delete(void *device, void *s)
{
    (void)device;
    pthread_mutex_lock(&dev.lock);
    stream_unref(s);
    pthread_mutex_unlock(&dev.lock);
}

static peri_status opaque_stream_sync(void *device, void *on)
{
    (void)device;
    stream *s = on;
    pthread_mutex_lock(&dev.lock);
    peri_status status = run_until(&(mark){s, s->queued}, UINT64_MAX);
    pthread_mutex_unlock(&dev.lock);
    return status;
}

static peri_status opaque_stream_wait(void *device, void *on, void *for_event)
{
    (void)device;
    event *e = for_event;
    if (!e->mark.stream) return PERI_OK;
    task *t = task_new(TASK_WAIT, NULL, 0);
    if (!t) return PERI_ENOMEM;
    pthread_mutex_lock(&dev.lock);
    t->until = e->mark;
    t->until.stream->refs++;
    pthread_mutex_unlock(&dev.lock);
    enqueue_task(on, t);
    return PERI_OK;
}

static peri_status opaque_event_new(void *device, void **out)
{
    (void)device;
    event *e = host->alloc_zero(sizeof *e);
    if (!e) return PERI_ENOMEM;
    *out = e;
    return PERI_OK;
}

static void opaque_event_delete(void *device, void *p)
{
    (void)device;
    event *e = p;
    pthread_mutex_lock(&dev.lock);
    mark_set(&e->mark, NULL);
    pthread_mutex_unlock(&dev.lock);
    host->free(e);
}

static peri_status opaque_event_record(void *device, void *p, void *on)
{
    (void)device;
    event *e = p;
    pthread_mutex_lock(&dev.lock);
    mark_set(&e->mark, on);
    pthread_mutex_unlock(&dev.lock);
    return PERI_OK;
}

static peri_status opaque_event_query(void *device, void *p)
{
    (void)device;
    event *e = p;
    pthread_mutex_lock(&dev.lock);
    peri_status status = run_until(&e->mark, 1 + draw() % 8); /* polling must get somewhere, but no faster than it
                                                                 must */
    pthread_mutex_unlock(&dev.lock);
    return status;
}

static peri_status opaque_event_sync(void *device, void *p)
{
    (void)device;
    event *e = p;
    pthread_mutex_lock(&dev.lock);
    peri_status status = run_until(&e->mark, UINT64_MAX);
    pthread_mutex_unlock(&dev.lock);
    return status;
}

static peri_status opaque_copy(void *device, void *on, void *dst, const void *src, int64_t bytes, int32_t kind)
{
    (void)device;
    bool snapshot = kind == PERI_COPY_H2D || kind == PERI_COPY_H2D_WORDS;
    task *t = task_new(TASK_COPY, snapshot ? src : NULL, bytes);
    if (!t) return PERI_ENOMEM;
    t->dst = dst;
    t->src = snapshot ? NULL : src;
    t->words = kind == PERI_COPY_H2D_WORDS;
    enqueue_task(on, t);
    return PERI_OK;
}

static peri_status opaque_launch(void *device, void *on, int32_t kernel, const void *args, int64_t args_size, int64_t n,
                                 int64_t grain)
{
    (void)device;
    task *t = task_new(TASK_LAUNCH, args, args_size);
    if (!t) return PERI_ENOMEM;
    t->kernel = kernel;
    t->n = n;
    t->grain = grain;
    enqueue_task(on, t);
    return PERI_OK;
}

static bool opaque_has(void *device, int32_t work, const void *args)
{
    (void)device;
    return cpu->has(NULL, work, args);
}

static int64_t opaque_scratch(void *device, int32_t op, const void *args)
{
    (void)device;
    return cpu->scratch(NULL, op, args);
}

static peri_status opaque_run(void *device, void *on, int32_t op, const void *args, int64_t args_size, void *scratch,
                              int64_t bytes)
{
    (void)device;
    task *t = task_new(TASK_RUN, args, args_size);
    if (!t) return PERI_ENOMEM;
    t->kernel = op;
    t->scratch = scratch;
    t->scratch_bytes = bytes;
    enqueue_task(on, t);
    return PERI_OK;
}

static void opaque_seed(void *device, uint64_t seed)
{
    (void)device;
    dev.state = seed ? seed : 1;
}

static const peri_device_vtab vtab = {
    .size = sizeof vtab,
    .abi = PERI_DEVICE_ABI,
    .name = "opaque",
    .work = peri_work_list,
    .probe = opaque_probe,
    .open = opaque_open,
    .close = opaque_close,
    .alloc = opaque_alloc,
    .free = opaque_free,
    .stream_new = opaque_stream_new,
    .stream_delete = opaque_stream_delete,
    .stream_sync = opaque_stream_sync,
    .stream_wait = opaque_stream_wait,
    .event_new = opaque_event_new,
    .event_delete = opaque_event_delete,
    .event_record = opaque_event_record,
    .event_query = opaque_event_query,
    .event_sync = opaque_event_sync,
    .copy = opaque_copy,
    .launch = opaque_launch,
    .has = opaque_has,
    .scratch = opaque_scratch,
    .run = opaque_run,
    .seed = opaque_seed,
    .mapped_alloc = opaque_alloc, /* all its memory is the host's; that the host must not touch it holds for this too */
    .mapped_free = opaque_free,
    .memory = opaque_memory,
};

const peri_device_vtab *peri__opaque_entry(const peri_plugin_host *lent);
const peri_device_vtab *peri__opaque_entry(const peri_plugin_host *lent)
{
    if (host) return &vtab; /* who has the table reads both */
    host = lent;
    cpu = peri__cpu_entry(lent);
    return &vtab;
}
