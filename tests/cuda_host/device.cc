/* SPDX-License-Identifier: Apache-2.0
 *
 * device.cc: the pretended GPU: memory, streams, events, copies. As unfriendly as CUDA allows:
 *
 * - its memory lies in one arena, to which the host has no access; it gets some while a task of the device runs (by mprotect: what else
 *   the process does meanwhile is not seen). Blocks have gaps between them, which the address sanitizer watches; new memory holds noise,
 *   freed memory too, once the free has run;
 * - streams run nothing until somebody waits, then in an order drawn from a seed, bound by stream order and events only;
 * - copies from pinned memory read it when they run; copies from other memory have read it at the call; those to memory that is not
 *   pinned have run when the call returns.
 *
 * One lock; tasks run in the thread that waits.
 */
#include "internal.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define POISON(p, n) ASAN_POISON_MEMORY_REGION(p, n)
#define UNPOISON(p, n) ASAN_UNPOISON_MEMORY_REGION(p, n)
#else
#define POISON(p, n) ((void)(p), (void)(n))
#define UNPOISON(p, n) ((void)(p), (void)(n))
#endif

namespace host = peri_cuda_host;

namespace {

enum : size_t { ARENA = (size_t)3 << 30, GAP = 256, ALIGN = 256, PAGE = 4096 };

std::recursive_mutex lock;
using hold = std::lock_guard<std::recursive_mutex>;

uint64_t state = 1;
int open_depth; /* > 0: a task runs, the arena can be used */
thread_local cudaError_t last;

cudaError_t say(cudaError_t e)
{
    if (e != cudaSuccess && e != cudaErrorNotReady) last = e;
    return e;
}

/* -- memory -------------------------------------------------------------------------------------------------------------------------- */

struct arena {
    char *at = nullptr, *top = nullptr, *open = nullptr; /* [at, open): the host had access to it some time */
    std::multimap<size_t, char *> holes; /* by size */
    std::map<char *, size_t> blocks;
    size_t used = 0;

    arena()
    {
        void *p = mmap(nullptr, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p != MAP_FAILED) at = top = (char *)p;
    }
};
arena &memory()
{
    static arena *a = new arena;
    return *a;
}

size_t rounded(size_t bytes) { return (bytes + GAP + ALIGN - 1) / ALIGN * ALIGN; }

char *end_of_use() { return (char *)(((uintptr_t)memory().top + PAGE - 1) / PAGE * PAGE); }

/** While a task runs. */
struct opened {
    opened()
    {
        if (open_depth++ == 0) mprotect(memory().at, (size_t)(end_of_use() - memory().at), PROT_READ | PROT_WRITE);
    }
    ~opened()
    {
        if (--open_depth == 0) mprotect(memory().at, (size_t)(end_of_use() - memory().at), PROT_NONE);
    }
};

cudaError_t take(void **out, size_t bytes)
{
    arena &a = memory();
    size_t need = rounded(bytes);
    char *p = nullptr;
    auto hole = a.holes.lower_bound(need);
    if (hole != a.holes.end() && hole->first <= 2 * need + (1 << 16)) {
        p = hole->second;
        need = hole->first; /* whole: blocks of a kind come again */
        a.holes.erase(hole);
    } else if (a.at && (size_t)(a.at + ARENA - a.top) >= need) {
        p = a.top;
        if (open_depth) mprotect((void *)((uintptr_t)p / PAGE * PAGE), (need + 2 * PAGE) / PAGE * PAGE, PROT_READ | PROT_WRITE);
        a.top += need;
    }
    if (!p) return cudaErrorMemoryAllocation;
    a.blocks[p] = need;
    a.used += need;
    opened all;
    UNPOISON(p, bytes);
    POISON(p + bytes, need - bytes);
    memset(p, (int)(host::draw() & 255), bytes < 4096 ? bytes : 4096); /* the rest holds zeros, or what was there before */
    *out = p;
    return cudaSuccess;
}

void give(void *at)
{
    arena &a = memory();
    auto block = a.blocks.find((char *)at);
    if (block == a.blocks.end()) return;
    opened all;
    UNPOISON(at, block->second);
    memset(at, 0xdd, block->second);
    POISON(at, block->second);
    a.used -= block->second;
    a.holes.emplace(block->second, (char *)at);
    a.blocks.erase(block);
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

bool on_device(const void *p) { return p >= memory().at && p < memory().at + ARENA; }

} // namespace

/* -- streams ------------------------------------------------------------------------------------------------------------------------- */

struct task {
    task *next = nullptr;
    std::function<void()> run;
    std::function<bool()> poll; /* instead: has it ended? Asked again and again, from when the stream gets there */
    peri_cuda_host_stream *until = nullptr; /* a wait: for this stream to have run `position` tasks */
    int64_t position = 0;
};

struct peri_cuda_host_stream {
    peri_cuda_host_stream *next = nullptr;
    task *head = nullptr, *tail = nullptr;
    int64_t queued = 0, run = 0;
    int refs = 1;
};

struct peri_cuda_host_event {
    peri_cuda_host_stream *stream = nullptr;
    int64_t position = 0;
};

namespace {

peri_cuda_host_stream *streams, first; /* `first`: the stream of number 0 */
cudaError_t sticky;

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

bool reached(const peri_cuda_host_stream *s, int64_t position) { return !s || s->run >= position; }
bool ready(const peri_cuda_host_stream *s) { return s->head && reached(s->head->until, s->head->position); }

task *enqueue(cudaStream_t on, std::function<void()> run, peri_cuda_host_stream *until = nullptr, int64_t position = 0)
{
    peri_cuda_host_stream *s = stream_of(on);
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
        opened all;
        if (t->poll && !t->poll()) {
            if (list.empty()) return WAITS;
            continue;
        }
        s->refs++;
        if (t->run) t->run();
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
    opened all; /* once, not for each task */
    for (uint64_t i = 0; i < most && !reached(s, position); i++)
        if (!step()) return say(cudaErrorUnknown);
    if (sticky != cudaSuccess) return say(sticky);
    return reached(s, position) ? cudaSuccess : cudaErrorNotReady;
}

} // namespace

uint64_t host::draw() /* xorshift64* */
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545f4914f6cdd1du;
}

cudaError_t host::launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, std::function<void()> kernel)
{
    size_t threads = (size_t)block.x * block.y * block.z, blocks = (size_t)grid.x * grid.y * grid.z;
    if (!threads || threads > 1024 || block.z > 64 || !blocks || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535 ||
        shared_bytes > (227u << 10))
        return say(cudaErrorInvalidConfiguration);
    hold h(lock);
    enqueue(stream, [=] {
        if (sticky == cudaSuccess && !host::run_grid(grid, block, shared_bytes, kernel)) sticky = cudaErrorLaunchFailure;
    });
    return cudaSuccess;
}

cudaError_t host::task(cudaStream_t stream, std::function<void()> work)
{
    hold h(lock);
    enqueue(stream, std::move(work));
    return cudaSuccess;
}

extern "C" __attribute__((visibility("default"))) void peri_cuda_host_poll(cudaStream_t stream, bool (*ended)(void *), void *data)
{
    hold h(lock);
    task *t = enqueue(stream, nullptr);
    t->poll = [=] { return ended(data); };
}

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
    sticky = last = cudaSuccess;
    host::wrong.clear();
}

const char *peri_cuda_host_wrong(void) { return host::wrong.c_str(); }

static int gpus(void)
{
    const char *text = getenv("PERI_CUDA_HOST_GPUS");
    return text ? atoi(text) : 1;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = gpus();
    if (*count < 0) return *count = 0, say(cudaErrorInsufficientDriver);
    return *count ? cudaSuccess : say(cudaErrorNoDevice);
}

static thread_local int current;
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
    out->totalGlobalMem = ARENA;
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

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    hold h(lock);
    *total = ARENA;
    *free_bytes = ARENA - memory().used;
    return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t e)
{
    switch (e) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    default: return "cudaErrorUnknown";
    }
}

const char *cudaGetErrorString(cudaError_t e)
{
    return e == cudaErrorLaunchFailure && !host::wrong.empty() ? host::wrong.c_str() : cudaGetErrorName(e);
}

cudaError_t cudaPeekAtLastError(void) { return last; }
cudaError_t cudaGetLastError(void)
{
    cudaError_t e = last;
    if (sticky == cudaSuccess) last = cudaSuccess;
    return e;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int) { return *pool = nullptr, cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, enum cudaMemPoolAttr, void *) { return cudaSuccess; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, enum cudaMemPoolAttr, void *value)
{
    hold h(lock);
    *(uint64_t *)value = memory().used; /* it keeps nothing that is not used */
    return cudaSuccess;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    hold h(lock);
    return say(take(out, bytes));
}

cudaError_t cudaFree(void *p)
{
    cudaDeviceSynchronize();
    hold h(lock);
    give(p);
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t) { return cudaMalloc(out, bytes); }

cudaError_t cudaFreeAsync(void *p, cudaStream_t stream)
{
    hold h(lock);
    enqueue(stream, [p] { give(p); });
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned)
{
    if (posix_memalign(out, PAGE, bytes ? bytes : 1) != 0) return say(cudaErrorMemoryAllocation);
    hold h(lock);
    pinned()[(const char *)*out] = bytes ? bytes : 1;
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *p)
{
    cudaDeviceSynchronize();
    hold h(lock);
    pinned().erase((const char *)p);
    free(p);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned)
{
    hold h(lock);
    auto *s = new peri_cuda_host_stream;
    s->next = streams;
    streams = s;
    *out = s;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    hold h(lock);
    unref(s);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t on)
{
    hold h(lock);
    auto *s = stream_of(on);
    return run_until(s, s->queued);
}

cudaError_t cudaStreamQuery(cudaStream_t on)
{
    hold h(lock);
    auto *s = stream_of(on);
    return run_until(s, s->queued, 1 + host::draw() % 8);
}

cudaError_t cudaDeviceSynchronize(void)
{
    hold h(lock);
    opened all;
    while (step()) {}
    for (auto *s = streams; s; s = s->next)
        if (s->head) return say(cudaErrorUnknown);
    return say(sticky);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned)
{
    hold h(lock);
    if (e->stream) enqueue(s, nullptr, e->stream, e->position);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned) { return *out = new peri_cuda_host_event, cudaSuccess; }

static void move_event(cudaEvent_t e, peri_cuda_host_stream *s)
{
    if (s) s->refs++;
    if (e->stream) unref(e->stream);
    e->stream = s;
    e->position = s ? s->queued : 0;
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
    move_event(e, stream_of(s));
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t e)
{
    hold h(lock);
    return run_until(e->stream, e->position, 1 + host::draw() % 8); /* polling gets somewhere, no faster than it must */
}

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    hold h(lock);
    return run_until(e->stream, e->position);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t, cudaEvent_t) { return *milliseconds = 0, cudaSuccess; }

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *data)
{
    hold h(lock);
    enqueue(stream, [=] { fn(data); });
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    hold h(lock);
    bool from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice,
         to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault && bytes && (from != on_device(src) || to != on_device(dst))) return say(cudaErrorInvalidValue);
    if (!on_device(src) && !is_pinned(src)) {
        auto *copy = new std::string((const char *)src, bytes);
        enqueue(stream, [=] { memcpy(dst, copy->data(), bytes), delete copy; });
    } else {
        enqueue(stream, [=] { memmove(dst, src, bytes); });
    }
    if (on_device(dst) || is_pinned(dst)) return cudaSuccess;
    auto *s = stream_of(stream);
    return run_until(s, s->queued);
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream)
{
    hold h(lock);
    enqueue(stream, [=] { memset(dst, value, bytes); });
    return cudaSuccess;
}

} /* extern "C" */
