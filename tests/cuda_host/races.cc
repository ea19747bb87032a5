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
 * Of each word of 4 bytes (or byte, where single ones are touched) that a launch touches it is known who did each kind of access first, who
 * did it last, and who of the other threads did it last. Blocks run one after the other, so the first one shows what other blocks did;
 * within a block a third thread's load may have been forgotten, under one order of the threads.
 */
#include "internal.h"

#include <cstdio>
#include <cstdlib>
#include <unordered_map>

namespace peri_cuda_host {

const moment *now;
uint16_t barriers;

#if !defined(PERI_CUDA_HOST_RACES)
void races_choose(bool) {}
void races_begin() {}
void races_block() {}
void races_end() {}
void touch_atomic(const void *, size_t) {}
void touch_beside(const void *, size_t) {}
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
struct page {
    bool shared;
    cell words[WORDS];
};

bool on = true, watching;
uint64_t whens, grid, block; /* numbers of the launch, and of the block: shared memory is another one then */
std::unordered_map<uintptr_t, page *> pages;
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
    if (!c->kinds[m.kind]) c->kinds[m.kind] = (trail *)calloc(1, sizeof(trail));
    follow(c->kinds[m.kind], m);
}

/** From now on the bytes of @c are apart. */
void split(cell *c, uint64_t when)
{
    refresh(c, when);
    if (c->split) return;
    if (!c->bytes) c->bytes = (cell *)calloc(4, sizeof(cell));
    for (int i = 0; i < 4; i++) {
        refresh(&c->bytes[i], when);
        for (int kind = 0; kind < KINDS; kind++) {
            if (!c->kinds[kind]) continue;
            if (!c->bytes[i].kinds[kind]) c->bytes[i].kinds[kind] = (trail *)malloc(sizeof(trail));
            *c->bytes[i].kinds[kind] = *c->kinds[kind];
        }
    }
    c->split = true;
}

cell *word_of(uintptr_t at)
{
    uintptr_t key = at / PAGE;
    if (!near_page || near_key != key) {
        page *&p = pages[key];
        if (!p) {
            p = (page *)calloc(1, sizeof(page));
            p->shared = is_shared((const void *)at);
        }
        near_page = p;
        near_key = key;
    }
    return &near_page->words[at % PAGE / 4];
}

/** While `watching`. */
void touch(const void *p, size_t bytes, what kind, const void *pc)
{
    if (((const char *)p >= now->stack && (const char *)p < now->stack_end)) return;
    mark m = {now->block, (uint32_t)((const char *)pc - base()), now->thread, barriers, now->clock, true, kind};
    for (uintptr_t at = (uintptr_t)p, end = at + bytes; at < end && watching;) {
        cell *c = word_of(at);
        uint64_t when = near_page->shared ? block : grid;
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
    for (const auto &p : pages) {
        for (cell &c : p.second->words) {
            for (int i = 0; c.bytes && i < 4; i++)
                for (trail *t : c.bytes[i].kinds) free(t);
            for (trail *t : c.kinds) free(t);
            free(c.bytes);
        }
        free(p.second);
    }
    pages.clear();
    near_page = nullptr;
}

std::string said(const mark &m)
{
    static const char *const did[KINDS] = {" loads", " stores", " loads, as a volatile or atomic access,",
                                           " stores, as a volatile or atomic access,"};
    return name_of(m.block, m.thread) + did[m.kind] + " at " + line_of(base() + (int32_t)m.pc);
}

} // namespace

void races_choose(bool choice) { on = choice; }

void races_begin()
{
    if (pages.size() > PAGES_MOST) forget();
    grid = ++whens;
    watching = on;
}

void races_block() { block = ++whens; }

void races_end()
{
    watching = false;
    if (!race.set) return;
    race.set = false;
    std::string where = where_is(race.at);
    found_wrong("a race for " + std::to_string(race.bytes) + " bytes" + (where.empty() ? "" : " of " + where) + ": " + said(race.after) +
                    ", after " + said(race.before) + ", and nothing orders them" +
                    (race.before.block == race.after.block ? ": no __syncthreads or __syncwarp between them"
                                                           : ": blocks of a launch have no order"),
                cudaErrorLaunchFailure);
}

void touch_atomic(const void *p, size_t bytes)
{
    if (watching) touch(p, bytes, CHANGE, __builtin_return_address(0));
}

void touch_beside(const void *p, size_t bytes)
{
    if (watching) touch(p, bytes, LOOK, __builtin_return_address(0));
}

} // namespace peri_cuda_host

/* -- what the compiler calls ----------------------------------------------------------------------------------------------------------- */

namespace host = peri_cuda_host;

#define ACCESS(name, bytes, kind) \
    void name(const void *p) \
    { \
        if (__builtin_expect(host::watching, 0)) host::touch(p, bytes, host::kind, __builtin_return_address(0)); \
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
    if (host::watching) host::touch(p, bytes, host::LOAD, __builtin_return_address(0));
}
void __tsan_write_range(const void *p, size_t bytes)
{
    if (host::watching) host::touch(p, bytes, host::STORE, __builtin_return_address(0));
}
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
