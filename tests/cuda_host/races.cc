/* SPDX-License-Identifier: Apache-2.0
 *
 * races.cc: finds two threads of a launch that touch the same bytes, one of them by a plain store, or by a plain load what the other
 * changes by an atomic operation, where nothing says who is first. Built in with PERI_CUDA_HOST_RACES: build/cuda_host/races has a device of
 * that.
 *
 * There kernels/cuda is compiled with -fsanitize=thread: each access of memory calls one of the __tsan functions, which are these here
 * instead of the thread sanitizer's. Who is first is said by a barrier of the block, and by __syncwarp for the lanes of its mask; shuffles,
 * votes and matches order no memory, and nothing orders the blocks of a launch. Accesses by atomic operations and volatile ones go beside
 * each other.
 *
 * The same calls show three faults more, whatever the order of threads: what reaches past an allocation or an array of shared memory by less
 * than the page behind it is away; loads from device memory that nothing has written since it was allocated (a launch that sets
 * something up was left out); and kernels that follow a pointer into the host's memory where that is not page-locked.
 *
 * Of each word of 4 bytes (or byte, where single ones are touched) that a launch touches it is known who did each kind of access first, who
 * did it last, and who of the other threads did it last. Blocks run one after the other, so the first one shows what other blocks did;
 * within a block a third thread's load may have been forgotten, under one order of the threads.
 */
#include "cuda_host_internal.h"

#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <unordered_map>
#include <vector>

extern "C" __attribute__((visibility("hidden"))) char __ehdr_start, _end; /* the linker's: of the library that this is in */

namespace peri_cuda_host {

const moment *now;
uint16_t barriers;

#if !defined(PERI_CUDA_HOST_RACES)
void races_choose(bool) {}
void races_begin(const call &) {}
void races_block() {}
void races_end() {}
void races_work(bool) {}
extern const bool contents_matter = false;
void touch_atomic(const void *, size_t) {}
void touch_beside(const void *, size_t) {}
void touch_store(const void *, size_t) {}
} // namespace peri_cuda_host
#else

namespace {

enum what : uint8_t { LOAD, STORE, LOOK, CHANGE, KINDS }; /* LOOK and CHANGE: by atomic operations, and volatile */

/** Do accesses of these kinds want an order? */
const bool wants_order[KINDS][KINDS] = {{false, true, false, true}, {true, true, true, true}, {false, true}, {true, true}};

struct mark {
    uint32_t block, pc; /* pc: of the access, from `base` */
    uint16_t thread, barrier, clock;
    bool set;
    what kind;
};

/** Accesses of a kind. Stores: the last, which all before are ordered with, or there would have been words about it. */
struct trail {
    mark first, last, other;
};

/** What the launch has done to a word, or a byte. */
struct cell {
    uint64_t when;   /* of what follows; not that of its page: nothing */
    bool split;      /* its bytes are apart */
    trail *kinds[KINDS];
    cell *bytes;
};

enum : uintptr_t { PAGE = 512, WORDS = PAGE / 4, PAGES_MOST = 8192 };
enum memory_of : uint8_t { HOST, DEVICE, SHARED, CLOSED }; /* CLOSED: of the host, and no kernel reaches it */
struct page {
    uint64_t when; /* the launch that `of` is asked in: addresses come again */
    memory_of of;
    cell words[WORDS];
};

bool on = true, watching, working; /* watching: a kernel; working: a kernel, or what is compiled with them and runs on the device */
extent near, arguments; /* the last one that was touched; what the running launch keeps */
uint64_t whens, grid, block; /* numbers of the launch, and of the block: shared memory is another one then */
/* What is known of accesses lies in memory of its own: malloc may be the one of a test program, which takes two mappings a block. */
enum : size_t { PIECE = 1 << 20 };
struct piece {
    char *at;
    size_t bytes;
};
std::vector<piece> pieces;
size_t used; /* of the last one */

void *room(size_t bytes) /* zeros, until `forget` */
{
    bytes = (bytes + 15) / 16 * 16;
    if (pieces.empty() || used + bytes > pieces.back().bytes) {
        const size_t size = bytes > PIECE ? bytes : PIECE;
        pieces.push_back({(char *)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0), size});
        if (pieces.back().at == MAP_FAILED) abort();
        used = 0;
    }
    used += bytes;
    return pieces.back().at + used - bytes;
}

template <class T> struct in_room {
    typedef T value_type;
    in_room() {}
    template <class U> in_room(const in_room<U> &) {}
    T *allocate(size_t n) { return (T *)room(n * sizeof(T)); }
    void deallocate(T *, size_t) {}
    bool operator==(const in_room &) const { return true; }
    bool operator!=(const in_room &) const { return false; }
};
typedef std::unordered_map<uintptr_t, page *, std::hash<uintptr_t>, std::equal_to<uintptr_t>,
                           in_room<std::pair<const uintptr_t, page *>>> page_map;
page_map *pages; /* of the first launch after `forget` on */
uintptr_t near_key;
page *near_page;

/** Two accesses of the launch. */
struct {
    bool set;
    const void *at;
    size_t bytes;
    mark before, after;
} race;

const char *base() { return (const char *)&races_begin; }

bool ordered(const mark &m)
{
    if (m.block != now->block) return false;
    if (m.thread == now->thread || m.barrier < barriers) return true;
    return m.thread / 32 == now->thread / 32 && m.clock <= now->seen[m.thread % 32];
}

/** One of @t that nothing orders before the running thread; NULL: there is none. */
const mark *beside(const trail *t)
{
    for (const mark *m : {&t->last, &t->other, &t->first})
        if (m->set && !ordered(*m)) return m;
    return nullptr;
}

void follow(trail *t, const mark &m)
{
    if (!t->first.set) t->first = m;
    if (t->last.set && (t->last.thread != m.thread || t->last.block != m.block)) t->other = t->last;
    t->last = m;
}

void refresh(cell *c, uint64_t when)
{
    if (c->when == when) return;
    c->when = when;
    c->split = false;
    for (trail *t : c->kinds)
        if (t) *t = {};
}

void access(cell *c, uint64_t when, const mark &m, const void *at, size_t bytes)
{
    refresh(c, when);
    for (int kind = 0; kind < KINDS; kind++) {
        const mark *other = c->kinds[kind] && wants_order[m.kind][kind] ? beside(c->kinds[kind]) : nullptr;
        if (!other) continue;
        race.set = true;
        race.at = at;
        race.bytes = bytes;
        race.before = *other;
        race.after = m;
        watching = false;
        return;
    }
    if (!c->kinds[m.kind]) c->kinds[m.kind] = (trail *)room(sizeof(trail));
    follow(c->kinds[m.kind], m);
}

/** From now on the bytes of @c are apart. */
void split(cell *c, uint64_t when)
{
    refresh(c, when);
    if (c->split) return;
    if (!c->bytes) c->bytes = (cell *)room(4 * sizeof(cell));
    for (int i = 0; i < 4; i++) {
        refresh(&c->bytes[i], when);
        for (int kind = 0; kind < KINDS; kind++) {
            if (!c->kinds[kind]) continue;
            if (!c->bytes[i].kinds[kind]) c->bytes[i].kinds[kind] = (trail *)room(sizeof(trail));
            *c->bytes[i].kinds[kind] = *c->kinds[kind];
        }
    }
    c->split = true;
}

/** Constants are copied to a GPU with the kernels; here they lie in the library. */
bool of_kernels(const void *p) { return p >= &__ehdr_start && p < &_end; }

memory_of memory_at(const void *p)
{
    return on_device(p) ? DEVICE : is_shared(p) ? SHARED : of_kernels(p) || reachable(p) ? HOST : CLOSED;
}

page *page_of(uintptr_t at)
{
    uintptr_t key = at / PAGE;
    if (near_page && near_key == key) return near_page;
    page *&p = (*pages)[key];
    if (!p) p = (page *)room(sizeof(page));
    if (p->when != grid) {
        p->when = grid;
        p->of = memory_at((const void *)at);
    }
    near_page = p;
    near_key = key;
    return p;
}

/** The running thread, or task, did what it must not. */
void refuse(const std::string &text, const void *pc)
{
    if (!on) return;
    watching = false;
    const std::string all = text + ", at " + line_of(pc);
    if (here) give_up_kernel(all, cudaErrorIllegalAddress);
    found_wrong("a task of the device " + all, cudaErrorIllegalAddress);
}

/** Look at an access of device or shared memory. */
void look(const void *p, size_t bytes, bool loads, bool stores, const void *pc)
{
    const char *at = (const char *)p;
    if (at < near.from || at + bytes > near.to) {
        extent e;
        char text[160];
        if (on_device(p)) {
            const std::string why = refused(p, bytes);
            if (!why.empty()) return refuse(why, pc);
            extent_of(p, &e);
        } else if (!shared_extent(p, &e)) {
            return;
        } else if (at < e.from || at + bytes > e.to) {
            bool before = at < e.from;
            snprintf(text, sizeof text, "reaches %zu bytes %s shared memory of %zu bytes",
                     before ? (size_t)(e.from - at) : (size_t)(at + bytes - e.to), before ? "before the start of" : "past the end of",
                     (size_t)(e.to - e.from));
            return refuse(text, pc);
        }
        near = e;
    }
    if (!near.written) return;
    const size_t from = (size_t)(at - near.from);
    uint32_t bits, want = (uint32_t)((((uint64_t)1 << bytes) - 1) << from % 8);
    memcpy(&bits, near.written + from / 8, sizeof bits);
    if (loads && (bits & want) != want) {
        std::string text = "loads " + std::to_string(bytes) + " bytes of an allocation of " + std::to_string(near.to - near.from) +
                           " bytes, from byte " + std::to_string(from) + " on, that nothing has written";
        return refuse(text, pc);
    }
    bits |= want;
    if (stores) memcpy(near.written + from / 8, &bits, sizeof bits);
}

/** What each thread has for itself: its number, its arguments, its stack. */
bool of_thread(const void *p)
{
    if (here && p >= here && p < here + 1) return true;
    if (here && p >= arguments.from && p < arguments.to) return true;
    return now && (const char *)p >= now->stack && (const char *)p < now->stack_end;
}

/** While `working`. @changes: an atomic operation, which loads, too. */
void touch(const void *p, size_t bytes, what kind, const void *pc, bool changes = false)
{
    if (of_thread(p)) return;
    const memory_of of = watching ? page_of((uintptr_t)p)->of : memory_at(p);
    if (of == CLOSED && watching) return refuse("reaches for memory of the host that is not page-locked", pc);
    if (of == DEVICE || of == SHARED)
        for (size_t i = 0; i < bytes; i += 16)
            look((const char *)p + i, bytes - i < 16 ? bytes - i : 16, kind == LOAD || kind == LOOK || changes, kind == STORE || kind == CHANGE,
                 pc);
    if (!watching) return;
    mark m = {now->block, (uint32_t)((const char *)pc - base()), now->thread, barriers, now->clock, true, kind};
    for (uintptr_t at = (uintptr_t)p, end = at + bytes; at < end && watching;) {
        page *of = page_of(at);
        cell *c = &of->words[at % PAGE / 4];
        uint64_t when = of->of == SHARED ? block : grid;
        if (at % 4 == 0 && end - at >= 4 && !(c->when == when && c->split)) {
            access(c, when, m, p, bytes);
            at += 4;
            continue;
        }
        split(c, when);
        do access(&c->bytes[at % 4], when, m, p, bytes);
        while (++at < end && at % 4);
    }
}

/** Between launches: everything. */
void forget()
{
    delete pages;
    pages = nullptr;
    near_page = nullptr;
    for (const piece &p : pieces) munmap(p.at, p.bytes);
    pieces.clear();
}

std::string said(const mark &m)
{
    static const char *const did[KINDS] = {" loads", " stores", " loads, as a volatile or atomic access,",
                                           " stores, as a volatile or atomic access,"};
    return name_of(m.block, m.thread) + did[m.kind] + " at " + line_of(base() + (int32_t)m.pc);
}

} // namespace

void races_choose(bool choice) { on = choice; }

void races_begin(const call &kernel)
{
    arguments = {(const char *)kernel.kept.get(), (const char *)kernel.kept.get() + kernel.bytes, nullptr};
    if (pages && pages->size() > PAGES_MOST) forget();
    if (!pages) pages = new page_map;
    grid = ++whens;
    watching = on;
    working = true;
    near = {};
    near_page = nullptr;
}

void races_block()
{
    block = ++whens;
    near = {};
}

void races_work(bool begins)
{
    working = begins;
    near = {};
}

extern const bool contents_matter = true;

void races_end()
{
    watching = working = false;
    if (!race.set) return;
    race.set = false;
    std::string where = where_is(race.at);
    found_wrong("a race for " + std::to_string(race.bytes) + " bytes" + (where.empty() ? "" : " of " + where) + ": " + said(race.after) +
                    ", after " + said(race.before) + ", and nothing orders them" +
                    (race.before.block == race.after.block ? ": no __syncthreads or __syncwarp between them"
                                                           : ": blocks of a launch have no order"),
                cudaErrorLaunchFailure);
}

/* These are called by the functions of cuda_runtime.h, which are not inlined: the access is where those were called. */
#pragma GCC diagnostic ignored "-Wframe-address"
#define CALLER __builtin_return_address(1)
void touch_atomic(const void *p, size_t bytes)
{
    if (working) touch(p, bytes, CHANGE, CALLER, true);
}

void touch_store(const void *p, size_t bytes)
{
    if (working) touch(p, bytes, CHANGE, CALLER);
}

void touch_beside(const void *p, size_t bytes)
{
    if (working) touch(p, bytes, LOOK, CALLER);
}

} // namespace peri_cuda_host

/* -- what the compiler calls ----------------------------------------------------------------------------------------------------------- */

namespace host = peri_cuda_host;

#define ACCESS(name, bytes, kind) \
    void name(const void *p) \
    { \
        if (__builtin_expect(host::working, 0)) host::touch(p, bytes, host::kind, __builtin_return_address(0)); \
    }
#define ACCESSES(n) \
    ACCESS(__tsan_read##n, n, LOAD) ACCESS(__tsan_write##n, n, STORE) ACCESS(__tsan_volatile_read##n, n, LOOK) \
    ACCESS(__tsan_volatile_write##n, n, CHANGE) ACCESS(__tsan_unaligned_read##n, n, LOAD) ACCESS(__tsan_unaligned_write##n, n, STORE) \
    ACCESS(__tsan_unaligned_volatile_read##n, n, LOOK) ACCESS(__tsan_unaligned_volatile_write##n, n, CHANGE)

#pragma GCC diagnostic ignored "-Wmissing-declarations"
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}
ACCESSES(1) ACCESSES(2) ACCESSES(4) ACCESSES(8) ACCESSES(16)
void __tsan_read_range(const void *p, size_t bytes)
{
    if (host::working) host::touch(p, bytes, host::LOAD, __builtin_return_address(0));
}
void __tsan_write_range(const void *p, size_t bytes)
{
    if (host::working) host::touch(p, bytes, host::STORE, __builtin_return_address(0));
}
int __tsan_atomic32_fetch_add(volatile int *p, int by, int) { return __atomic_fetch_add(p, by, __ATOMIC_SEQ_CST); } /* of shared_ptr */
void *__tsan_memcpy(void *to, const void *from, size_t bytes)
{
    __tsan_read_range(from, bytes);
    __tsan_write_range(to, bytes);
    return memcpy(to, from, bytes);
}
void *__tsan_memmove(void *to, const void *from, size_t bytes)
{
    __tsan_read_range(from, bytes);
    __tsan_write_range(to, bytes);
    return memmove(to, from, bytes);
}
void *__tsan_memset(void *to, int value, size_t bytes)
{
    __tsan_write_range(to, bytes);
    return memset(to, value, bytes);
}
}
#endif
