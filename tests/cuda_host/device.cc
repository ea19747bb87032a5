/* SPDX-License-Identifier: Apache-2.0
 *
 * device.cc: the pretended GPU: streams, events, copies. As unfriendly as CUDA allows:
 *
 * - streams run nothing until somebody waits, then in an order drawn from a seed, bound by stream order and events only;
 * - copies from pinned memory read it when they run; copies from other memory have read it at the call; those to memory that is not
 *   pinned have run when the call returns;
 * - a stream or an event is its device's: kernels and records go there while that is the thread's current device only, and sizes of CUB's
 *   scratch differ from device to device;
 * - the thread's last error stays until somebody takes it, and every launch reports it;
 * - after a kernel or a copy that did what it must not, every call that has to do with the device is that error, and nothing runs any more;
 * - a stream that records a graph runs nothing; what could depend on time (waits, questions about events, memory, a kernel's first launch,
 *   which loads it) is an error of the thread that records, and spoils what it has recorded: from then on nothing can be recorded there. A
 *   real driver lets some of it pass. It makes one graph of several streams that wait for each other and are joined at the end; here the
 *   first such wait is an error.
 *
 * One lock; tasks run in the thread that waits. Memory: memory.cc.
 */
#include "cuda_host_internal.h"

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <unistd.h>
#include <vector>

namespace host = peri_cuda_host;

namespace {

std::recursive_mutex lock;
using hold = std::lock_guard<std::recursive_mutex>;

uint64_t seed_of(const char *text) { return text && strtoull(text, nullptr, 10) ? strtoull(text, nullptr, 10) : 1; }

/** What is wrong with the variables of the pretended GPU; "": nothing. */
const std::string &misset()
{
    static const struct {
        const char *name;
        long least, most;
        const char *allowed;
    } numbers[] = {{"PERI_CUDA_HOST_GPUS", -1, 64, "0 to 64 GPUs, or -1: the driver is too old"},
                   {"PERI_CUDA_HOST_LAZY", 0, 1, "0 and 1"},
                   {"PERI_CUDA_HOST_SEED", 0, 0x7fffffffffffffff, "0 to 2^63 - 1"}};
    static const std::string found = [] {
        for (const auto &n : numbers) {
            const char *text = getenv(n.name);
            char *end = nullptr;
            errno = 0;
            long value = text ? strtol(text, &end, 10) : n.least;
            if (text && (end == text || *end || errno || value < n.least || value > n.most))
                return std::string(n.name) + " is '" + std::string(text).substr(0, 40) + "', allowed: " + n.allowed;
        }
        return std::string();
    }();
    return found;
}
uint64_t state = seed_of(getenv("PERI_CUDA_HOST_SEED"));
thread_local cudaError_t last;
thread_local int current; /* the device */
bool pageable_reachable; /* kernels reach all memory of the host (the attribute pageableMemoryAccess of some machines) */

cudaError_t say(cudaError_t e)
{
    if (e != cudaSuccess && e != cudaErrorNotReady) last = e;
    return e;
}

std::map<const char *, size_t> &pinned()
{
    static auto *blocks = new std::map<const char *, size_t>;
    return *blocks;
}

bool is_pinned(const void *p)
{
    auto after = pinned().upper_bound((const char *)p);
    if (after == pinned().begin()) return false;
    --after;
    return (const char *)p < after->first + after->second;
}

} // namespace

namespace {

/** What the host has asked of the device since the process began: peri_cuda_host_counts. LAST: of WAITED and AWAITED, the events with no launch,
 *  copy or product queued behind them on their stream, which then has nothing to do. */
enum counted {
    LAUNCHES, PRODUCTS, EXCHANGES, COPIES_ON, UP_PAGEABLE, UP_PINNED, COPIES_DOWN, RECORDS, STREAM_WAITS, EVENTS, ALLOCATIONS, FREES, PINNED,
    BLOCKED, AWAITED, ASKED, WAITED, GRAPHS, LAST, COUNTED
};
int64_t counts[COUNTED];

} // namespace

/* -- streams ------------------------------------------------------------------------------------------------------------------------- */

struct task {
    task *next = nullptr;
    std::function<void()> run;
    std::function<bool()> poll; /* instead: has it ended? Asked again and again, from when the stream gets there */
    peri_cuda_host_stream *until = nullptr; /* a wait: for this stream to have run `position` tasks */
    int64_t position = 0;
};

/** What was recorded: what launches, products, copies and settings of memory do. */
struct peri_cuda_host_graph {
    std::vector<std::function<void()>> work;
};
struct peri_cuda_host_exec : peri_cuda_host_graph {
    int gpu = 0;
};

struct peri_cuda_host_stream {
    peri_cuda_host_graph *recorded = nullptr; /* it records; else NULL */
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    std::thread::id by;   /* who records */
    bool spoiled = false; /* something happened that must not while it records */
    peri_cuda_host_stream *next = nullptr;
    task *head = nullptr, *tail = nullptr;
    int64_t queued = 0, run = 0;
    int64_t counted = 0; /* launches, copies and products that were queued */
    int refs = 1, gpu = 0;
    bool blocking = false; /* waits for stream 0, and that for it */
};

struct peri_cuda_host_event {
    peri_cuda_host_stream *stream = nullptr;
    int64_t position = 0, counted = 0; /* of the stream, when it was recorded */
    int gpu = 0;
    bool waited = false; /* the host has asked for it since it was recorded, and it had not been reached */
    bool in_graph = false; /* recorded on a stream that records: nobody may ask or wait for it outside */
};

namespace {

peri_cuda_host_stream *streams, first; /* `first`: the stream of number 0 */

peri_cuda_host_stream *stream_of(cudaStream_t s)
{
    if (s) return s;
    if (!streams || first.refs == 1) { /* in the list from its first use */
        for (auto *x = streams; x; x = x->next)
            if (x == &first) return &first;
        first.next = streams;
        streams = &first;
        first.refs = 2;
    }
    return &first;
}

void unref(peri_cuda_host_stream *s)
{
    if (--s->refs > 0 || s->head) return;
    for (auto **p = &streams; *p; p = &(*p)->next)
        if (*p == s) {
            *p = s->next;
            break;
        }
    delete s;
}

void move_event(cudaEvent_t e, peri_cuda_host_stream *s)
{
    if (s) s->refs++;
    if (e->stream) unref(e->stream);
    e->stream = s;
    e->position = s ? s->queued : 0;
    e->counted = s ? s->counted : 0;
}

thread_local cudaStreamCaptureMode own_mode = cudaStreamCaptureModeGlobal; /* of the calls that this thread makes */

/** A call on this stream: an error where it records what is spoiled, or is stream 0 and would wait for a stream that records. */
cudaError_t usable(cudaStream_t on)
{
    auto *s = stream_of(on);
    if (host::sticky != cudaSuccess) return say(host::sticky);
    if (s->recorded && s->spoiled) return say(cudaErrorStreamCaptureInvalidated);
    cudaError_t error = cudaSuccess;
    for (auto *x = streams; s == &first && x; x = x->next)
        if (x->recorded && x->blocking) x->spoiled = true, error = cudaErrorStreamCaptureImplicit;
    return say(error);
}

/** A call on this stream that may not be recorded; success: the stream does not record. */
cudaError_t unrecordable(cudaStream_t on)
{
    auto *s = stream_of(on);
    if (usable(on) != cudaSuccess) return last;
    if (!s->recorded) return cudaSuccess;
    s->spoiled = true;
    return say(cudaErrorStreamCaptureUnsupported);
}

/** A call that may wait for other work: not while this thread records, unless it has said that it knows. */
cudaError_t unsafe()
{
    if (host::sticky != cudaSuccess) return say(host::sticky);
    if (own_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
    cudaError_t error = cudaSuccess;
    for (auto *s = streams; s; s = s->next) {
        if (!s->recorded || s->mode == cudaStreamCaptureModeRelaxed) continue;
        const bool own = s->by == std::this_thread::get_id();
        if (!own && !(own_mode == cudaStreamCaptureModeGlobal && s->mode == cudaStreamCaptureModeGlobal)) continue;
        s->spoiled = true;
        error = cudaErrorStreamCaptureUnsupported;
    }
    return say(error);
}

/** Count what the host asks for now; what is recorded is not. */
void count(cudaStream_t on, counted what)
{
    auto *s = stream_of(on);
    counts[what] += !s->recorded;
    s->counted += !s->recorded;
}

bool reached(const peri_cuda_host_stream *s, int64_t position) { return !s || s->run >= position; }
bool ready(const peri_cuda_host_stream *s) { return s->head && reached(s->head->until, s->head->position); }

task *enqueue(cudaStream_t on, std::function<void()> run, peri_cuda_host_stream *until = nullptr, int64_t position = 0)
{
    peri_cuda_host_stream *s = stream_of(on);
    if (s->recorded) return s->recorded->work.push_back(std::move(run)), nullptr;
    task *t = new task;
    t->run = std::move(run);
    t->until = until;
    t->position = position;
    if (until) until->refs++;
    (s->tail ? s->tail->next : s->head) = t;
    s->tail = t;
    s->queued++;
    return t;
}

enum progress { NONE, WAITS, MOVED };

/** Run the first task of a stream that can go on. WAITS: all that could wait for somebody else's process. */
progress run_one()
{
    std::vector<peri_cuda_host_stream *> list;
    for (auto *s = streams; s; s = s->next)
        if (ready(s)) list.push_back(s);
    while (!list.empty()) {
        size_t pick = host::draw() % list.size();
        peri_cuda_host_stream *s = list[pick];
        list.erase(list.begin() + (long)pick);
        task *t = s->head;
        host::opened all;
        bool ended = true;
        if (t->poll) host::guarded([&] { ended = t->poll(); });
        if (!ended) {
            if (list.empty()) return WAITS;
            continue;
        }
        s->refs++;
        if (t->run) host::guarded(t->run);
        s->head = t->next;
        if (!s->head) s->tail = nullptr;
        s->run++;
        if (t->until) unref(t->until);
        delete t;
        unref(s);
        return MOVED;
    }
    return NONE;
}

/** Go on; false: nothing can. */
bool step()
{
    progress p = run_one();
    if (p == WAITS) usleep(20);
    return p != NONE;
}

cudaError_t run_until(peri_cuda_host_stream *s, int64_t position, uint64_t most = UINT64_MAX)
{
    host::opened all; /* once, not for each task */
    for (uint64_t i = 0; i < most && !reached(s, position); i++)
        if (!step()) return say(cudaErrorUnknown);
    if (host::sticky != cudaSuccess) return say(host::sticky);
    return reached(s, position) ? cudaSuccess : cudaErrorNotReady;
}

} // namespace

std::string host::wrong;
cudaError_t host::sticky = cudaSuccess;

void host::found_wrong(const std::string &text, cudaError_t error)
{
    if (wrong.empty()) wrong = text;
    if (sticky == cudaSuccess) sticky = error;
}

uint64_t host::draw() /* xorshift64* */
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545f4914f6cdd1du;
}

/** Kernels that have been launched: a kernel is loaded at its first launch. With PERI_CUDA_HOST_LAZY=1 that waits for all that runs, as
 *  page-locked memory does then. */
static std::set<const void *> &loaded()
{
    static auto *kernels = new std::set<const void *>;
    return *kernels;
}
static bool loads_late()
{
    static const bool late = getenv("PERI_CUDA_HOST_LAZY") && !strcmp(getenv("PERI_CUDA_HOST_LAZY"), "1");
    return late;
}

static std::map<const void *, int> &allowed_shared()
{
    static auto *bytes = new std::map<const void *, int>;
    return *bytes;
}

cudaError_t host::allow_shared(const void *kernel, int bytes)
{
    hold h(lock);
    if (bytes < 0 || bytes > 227 << 10) return say(cudaErrorInvalidValue);
    allowed_shared()[kernel] = bytes;
    return cudaSuccess;
}

std::shared_ptr<void> host::copied(const void *from, size_t bytes, size_t align)
{
    std::align_val_t edge = std::align_val_t(align);
    void *to = memcpy(::operator new(bytes, edge), from, bytes);
    return {to, [edge](void *p) { ::operator delete(p, edge); }};
}

cudaError_t host::launch(const void *kernel, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, call work)
{
    size_t threads = (size_t)block.x * block.y * block.z, blocks = (size_t)grid.x * grid.y * grid.z;
    if (!threads || threads > 1024 || block.z > 64 || !blocks || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535)
        return say(cudaErrorInvalidConfiguration);
    hold h(lock);
    if (stream && stream->gpu != current) return say(cudaErrorInvalidResourceHandle);
    size_t allowed = (size_t)allowed_shared()[kernel];
    if (shared_bytes > 48 << 10 && allowed < shared_bytes) return say(cudaErrorInvalidValue);
    if (usable(stream) != cudaSuccess) return last;
    if (!loaded().count(kernel)) {
        if (unsafe() != cudaSuccess) return last;
        loaded().insert(kernel);
        opened all;
        while (loads_late() && step()) {}
    }
    count(stream, LAUNCHES);
    enqueue(stream, [=] {
        if (sticky == cudaSuccess) run_grid(grid, block, shared_bytes, allowed, work);
    });
    return last; /* cudaPeekAtLastError behind the launch: an older error, too */
}

bool host::reachable(const void *p) { return pageable_reachable || is_pinned(p); }

static std::atomic<int> sizes_fail; /* so many times */

cudaError_t host::size(size_t *bytes, size_t want)
{
    if (sizes_fail > 0 && sizes_fail-- > 0) return *bytes = 0, say(cudaErrorInvalidDevice);
    return *bytes = want + 512 * (size_t)current, cudaSuccess;
}

cudaError_t host::task(cudaStream_t stream, std::function<void()> work)
{
    hold h(lock);
    if (stream && stream->gpu != current) return say(cudaErrorInvalidResourceHandle);
    if (usable(stream) != cudaSuccess) return last;
    count(stream, PRODUCTS);
    enqueue(stream, [=] {
        races_work(true);
        work();
        races_work(false);
    });
    return last;
}

extern "C" __attribute__((visibility("default"))) void peri_cuda_host_poll(cudaStream_t stream, bool (*ended)(void *), void *data)
{
    hold h(lock);
    counts[EXCHANGES]++;
    if (unrecordable(stream) != cudaSuccess) return;
    task *t = enqueue(stream, nullptr);
    t->poll = [=] { return ended(data); };
}

/** A library beside (nccl.cc) has written these bytes. */
extern "C" __attribute__((visibility("default"))) void peri_cuda_host_wrote(const void *p, size_t bytes) { host::wrote(p, bytes); }

/* -- the functions ------------------------------------------------------------------------------------------------------------------- */

extern "C" {

void peri_cuda_host_seed(uint64_t seed)
{
    hold h(lock);
    state = seed ? seed : 1;
}

void peri_cuda_host_forget(void)
{
    hold h(lock);
    host::sticky = last = cudaSuccess;
    host::wrong.clear();
}

/** From now on kernels reach all memory of the host. */
void peri_cuda_host_reach_pageable(void) { pageable_reachable = true; }

/** The counts, in the order of `counted`, into @out; returns how many there are. */
__attribute__((visibility("default"))) int peri_cuda_host_counts(int64_t *out, int most)
{
    hold h(lock);
    for (int i = 0; i < COUNTED && i < most; i++) out[i] = counts[i];
    return COUNTED;
}

/** Run all that is queued, which counts as no call: a device that is as far as the host. */
__attribute__((visibility("default"))) void peri_cuda_host_catch_up(void)
{
    hold h(lock);
    host::opened all;
    while (step()) {}
}

const char *peri_cuda_host_wrong(void) { return host::wrong.c_str(); }

/** Read once: cudaSetDevice, which every call of the runtime begins with, asks. */
static int gpus(void)
{
    static const int number = [] {
        const char *text = getenv("PERI_CUDA_HOST_GPUS");
        return text ? atoi(text) : 1;
    }();
    return number;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    if (!misset().empty()) return *count = 0, say(cudaErrorInitializationError);
    *count = gpus();
    if (*count < 0) return *count = 0, say(cudaErrorInsufficientDriver);
    return *count ? cudaSuccess : say(cudaErrorNoDevice);
}

__attribute__((visibility("default"))) int peri_cuda_host_gpu(void) { return current; }

/** What a program around may do between two calls: choose another device, and leave an error behind. */
__attribute__((visibility("default"))) void peri_cuda_host_meddle(int gpu)
{
    current = gpu;
    last = cudaErrorInvalidValue;
}
/** The next @times questions for the size of CUB's scratch fail. */
__attribute__((visibility("default"))) void peri_cuda_host_fail_sizes(int times) { sizes_fail = times; }
/** Page-locked memory of the program around. */
__attribute__((visibility("default"))) void *peri_cuda_host_pinned(size_t bytes)
{
    void *p = nullptr;
    return cudaHostAlloc(&p, bytes, 0) == cudaSuccess ? p : nullptr;
}
cudaError_t cudaGetDevice(int *device) { return *device = current, cudaSuccess; }
cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= gpus()) return say(cudaErrorInvalidDevice);
    return current = device, cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device)
{
    if (device < 0 || device >= gpus()) return say(cudaErrorInvalidDevice);
    *out = cudaDeviceProp();
    snprintf(out->name, sizeof out->name, "pretended GPU");
    out->totalGlobalMem = host::MEMORY;
    out->sharedMemPerBlock = 48 << 10;
    out->sharedMemPerBlockOptin = 227 << 10;
    out->multiProcessorCount = 2;
    out->major = 9;
    out->maxThreadsPerBlock = 1024;
    out->pciBusID = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int)
{
    *value = attribute == cudaDevAttrMultiProcessorCount ? 2 : attribute == cudaDevAttrMemoryPoolsSupported ? 1 : 227 << 10;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = 13000, cudaSuccess; }

/** What the pool has taken from the driver: it keeps what is freed, until it is trimmed. */
static size_t pool_most;
static size_t pool_has(void) { return pool_most = std::max(pool_most, host::memory_used()); }

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    hold h(lock);
    *total = host::MEMORY;
    *free_bytes = host::MEMORY - pool_has();
    return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t e)
{
    switch (e) {
#define NAME(error) case error: return #error;
    NAME(cudaSuccess) NAME(cudaErrorInvalidValue) NAME(cudaErrorMemoryAllocation) NAME(cudaErrorInvalidDevice) NAME(cudaErrorNoDevice)
    NAME(cudaErrorInitializationError) NAME(cudaErrorInsufficientDriver) NAME(cudaErrorNotReady) NAME(cudaErrorInvalidResourceHandle)
    NAME(cudaErrorInvalidConfiguration) NAME(cudaErrorLaunchFailure) NAME(cudaErrorMisalignedAddress) NAME(cudaErrorIllegalAddress)
    NAME(cudaErrorStreamCaptureUnsupported) NAME(cudaErrorStreamCaptureInvalidated) NAME(cudaErrorStreamCaptureImplicit)
    NAME(cudaErrorStreamCaptureIsolation) NAME(cudaErrorStreamCaptureWrongThread) NAME(cudaErrorCapturedEvent) NAME(cudaErrorIllegalState)
#undef NAME
    default: return "cudaErrorUnknown";
    }
}

const char *cudaGetErrorString(cudaError_t e)
{
    if (e == cudaErrorInitializationError) return misset().c_str();
    return e == host::sticky && !host::wrong.empty() ? host::wrong.c_str() : cudaGetErrorName(e);
}

cudaError_t cudaPeekAtLastError(void) { return last; }
cudaError_t cudaGetLastError(void)
{
    cudaError_t e = last;
    if (host::sticky == cudaSuccess) last = cudaSuccess;
    return e;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int) { return *pool = nullptr, cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, enum cudaMemPoolAttr, void *) { return cudaSuccess; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, enum cudaMemPoolAttr a, void *value)
{
    hold h(lock);
    *(uint64_t *)value = a == cudaMemPoolAttrUsedMemCurrent ? host::memory_used() : pool_has();
    return cudaSuccess;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t)
{
    hold h(lock);
    if (unsafe() != cudaSuccess) return last;
    return pool_most = host::memory_used(), cudaSuccess;
}

/** Could another library of the process allocate so many bytes for itself? */
__attribute__((visibility("default"))) bool peri_cuda_host_other_fits(size_t bytes)
{
    hold h(lock);
    return bytes <= host::MEMORY - pool_has();
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    hold h(lock);
    if (unsafe() != cudaSuccess) return last;
    return say(host::take(out, bytes, nullptr));
}

/** What frees memory at once waits for all that runs. */
static cudaError_t wait_for_all(void)
{
    if (unsafe() != cudaSuccess) return last;
    host::opened all;
    while (step()) {}
    for (auto *s = streams; s; s = s->next)
        if (s->head) return say(cudaErrorUnknown);
    return say(host::sticky);
}

cudaError_t cudaFree(void *p)
{
    hold h(lock);
    if (wait_for_all() == cudaErrorStreamCaptureUnsupported) return last;
    if (p && !host::is_allocation(p)) return say(cudaErrorInvalidValue);
    if (p) host::give(p);
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream)
{
    hold h(lock);
    if (unrecordable(stream) != cudaSuccess || unsafe() != cudaSuccess) return last; /* the real one would allocate within the graph */
    counts[ALLOCATIONS]++;
    enqueue(stream, nullptr); /* the pool may let the stream wait for what another stream frees */
    peri_cuda_host_event here; /* the memory is there from here on in the stream, and after what waits for it */
    move_event(&here, stream_of(stream));
    std::shared_ptr<peri_cuda_host_event> mark(new peri_cuda_host_event(here), [](peri_cuda_host_event *e) {
        move_event(e, nullptr);
        delete e;
    });
    auto ready = [=] { return reached(mark->stream, mark->position); };
    cudaError_t error = host::take(out, bytes, ready);
    if (error == cudaErrorMemoryAllocation) { /* the real one has it follow frees that are queued on any stream */
        host::opened all;
        while (run_one() == MOVED) {}
        error = host::take(out, bytes, ready);
    }
    (void)pool_has();
    return say(error);
}

cudaError_t cudaFreeAsync(void *p, cudaStream_t stream)
{
    hold h(lock);
    if (unrecordable(stream) != cudaSuccess || unsafe() != cudaSuccess) return last;
    counts[FREES]++;
    if (p && !host::is_allocation(p)) return say(cudaErrorInvalidValue);
    if (p) enqueue(stream, [p] { host::give(p); });
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned)
{
    hold h(lock);
    if (unsafe() != cudaSuccess) return last;
    if (posix_memalign(out, 4096, bytes ? bytes : 1) != 0) return say(cudaErrorMemoryAllocation);
    counts[PINNED]++;
    if (loads_late()) { /* a GPU may stop for it */
        host::opened all;
        while (step()) {}
    }
    pinned()[(const char *)*out] = bytes ? bytes : 1;
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *p)
{
    hold h(lock);
    if (wait_for_all() == cudaErrorStreamCaptureUnsupported) return last;
    pinned().erase((const char *)p);
    free(p);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags)
{
    hold h(lock);
    if (unsafe() != cudaSuccess) return last;
    auto *s = new peri_cuda_host_stream;
    s->gpu = current;
    s->blocking = !(flags & cudaStreamNonBlocking);
    s->next = streams;
    streams = s;
    *out = s;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    hold h(lock);
    if (unrecordable(s) != cudaSuccess || unsafe() != cudaSuccess) return last;
    unref(s);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t on)
{
    hold h(lock);
    if (unrecordable(on) != cudaSuccess || unsafe() != cudaSuccess) return last;
    counts[BLOCKED]++;
    auto *s = stream_of(on);
    return run_until(s, s->queued);
}

cudaError_t cudaStreamQuery(cudaStream_t on)
{
    hold h(lock);
    if (unrecordable(on) != cudaSuccess || unsafe() != cudaSuccess) return last;
    auto *s = stream_of(on);
    return run_until(s, s->queued, 1 + host::draw() % 8);
}

cudaError_t cudaDeviceSynchronize(void)
{
    hold h(lock);
    for (auto *s = streams; s; s = s->next) /* whoever asks, and in whatever mode */
        if (s->recorded && s->gpu == current) return unrecordable(s);
    return wait_for_all();
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned)
{
    hold h(lock);
    auto *waiting = stream_of(s);
    if (usable(s) != cudaSuccess) return last;
    if (waiting->recorded || e->in_graph) { /* the real one could make one graph of several streams */
        for (auto *x = streams; x; x = x->next) x->spoiled = x->spoiled || x == waiting || e->in_graph;
        return say(cudaErrorStreamCaptureIsolation);
    }
    counts[STREAM_WAITS]++;
    if (e->stream) enqueue(s, nullptr, e->stream, e->position);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned)
{
    hold h(lock);
    counts[EVENTS]++;
    *out = new peri_cuda_host_event;
    (*out)->gpu = current;
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    hold h(lock);
    move_event(e, nullptr);
    delete e;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    hold h(lock);
    if (s && s->gpu != e->gpu) return say(cudaErrorInvalidResourceHandle);
    if (usable(s) != cudaSuccess) return last;
    e->in_graph = stream_of(s)->recorded != nullptr;
    if (e->in_graph) return cudaSuccess;
    counts[RECORDS]++;
    e->waited = false;
    move_event(e, stream_of(s));
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t e)
{
    hold h(lock);
    if (e->in_graph) return say(cudaErrorCapturedEvent);
    if (unsafe() != cudaSuccess) return last;
    counts[ASKED]++;
    const cudaError_t error = run_until(e->stream, e->position, 1 + host::draw() % 8); /* polling gets somewhere, no faster than it must */
    if (error == cudaErrorNotReady && !e->waited) counts[WAITED]++, counts[LAST] += e->counted == e->stream->counted;
    e->waited = e->waited || error == cudaErrorNotReady;
    return error;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    hold h(lock);
    if (e->in_graph) return say(cudaErrorCapturedEvent);
    if (unsafe() != cudaSuccess) return last;
    if (!reached(e->stream, e->position)) /* of one that has passed the host goes on at once */
        counts[AWAITED]++, counts[LAST] += e->counted == e->stream->counted;
    return run_until(e->stream, e->position);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *data)
{
    hold h(lock);
    if (usable(stream) != cudaSuccess) return last;
    enqueue(stream, [=] {
        host::closed all;
        fn(data);
    });
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    hold h(lock);
    bool from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice,
         to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault && bytes && (from != host::on_device(src) || to != host::on_device(dst))) return say(cudaErrorInvalidValue);
    const bool pageable = (!host::on_device(src) && !is_pinned(src)) || (!host::on_device(dst) && !is_pinned(dst));
    if (usable(stream) != cudaSuccess) return last;
    if (pageable && (unrecordable(stream) != cudaSuccess || unsafe() != cudaSuccess)) return last;
    count(stream, host::on_device(src) ? (host::on_device(dst) ? COPIES_ON : COPIES_DOWN) : is_pinned(src) ? UP_PINNED : UP_PAGEABLE);
    if (!host::on_device(src) && !is_pinned(src)) {
        auto *copy = new std::string((const char *)src, bytes);
        enqueue(stream, [=] {
            if (host::reach(dst, bytes)) memcpy(dst, copy->data(), bytes), host::wrote(dst, bytes);
            delete copy;
        });
    } else {
        enqueue(stream, [=] {
            if (host::reach(src, bytes) && host::reach(dst, bytes)) memmove(dst, src, bytes), host::wrote(dst, bytes, src);
        });
    }
    if (host::on_device(dst) || is_pinned(dst)) return cudaSuccess;
    counts[BLOCKED]++;
    auto *s = stream_of(stream);
    return run_until(s, s->queued);
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream)
{
    hold h(lock);
    if (!host::on_device(dst) && !host::reachable(dst)) return say(cudaErrorInvalidValue);
    if (usable(stream) != cudaSuccess) return last;
    enqueue(stream, [=] {
        if (host::reach(dst, bytes)) memset(dst, value, bytes), host::wrote(dst, bytes);
    });
    return cudaSuccess;
}

/* -- graphs -------------------------------------------------------------------------------------------------------------------------- */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    hold h(lock);
    if (!stream) return say(cudaErrorStreamCaptureUnsupported);
    if (stream->gpu != current) return say(cudaErrorInvalidResourceHandle);
    if (stream->recorded) return say(cudaErrorIllegalState);
    stream->recorded = new peri_cuda_host_graph;
    stream->mode = mode;
    stream->by = std::this_thread::get_id();
    stream->spoiled = false;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    hold h(lock);
    *graph = nullptr;
    if (!stream || !stream->recorded) return say(cudaErrorIllegalState);
    if (stream->mode != cudaStreamCaptureModeRelaxed && stream->by != std::this_thread::get_id()) return say(cudaErrorStreamCaptureWrongThread);
    std::swap(*graph, stream->recorded);
    if (!stream->spoiled) return cudaSuccess;
    delete *graph;
    *graph = nullptr;
    return say(cudaErrorStreamCaptureInvalidated);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    std::swap(*mode, own_mode);
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long)
{
    hold h(lock);
    if (!graph) return say(cudaErrorInvalidValue);
    auto *exec = new peri_cuda_host_exec;
    exec->work = graph->work;
    exec->gpu = current;
    return *out = exec, cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    hold h(lock);
    if (!exec || (stream && stream->gpu != current) || exec->gpu != current) return say(cudaErrorInvalidResourceHandle);
    if (unrecordable(stream) != cudaSuccess) return last;
    counts[GRAPHS]++;
    for (const auto &work : exec->work) enqueue(stream, work);
    return say(host::sticky);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return graph ? cudaSuccess : say(cudaErrorInvalidValue);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    hold h(lock);
    delete exec;
    return exec ? cudaSuccess : say(cudaErrorInvalidValue);
}

} /* extern "C" */
