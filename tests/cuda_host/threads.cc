/* SPDX-License-Identifier: Apache-2.0
 *
 * threads.cc: the threads of a grid. Blocks run one after the other. The threads of a block are coroutines; one runs until it meets others
 * (a barrier of the block, an operation of a warp), ends, or is interrupted at an atomic operation. Who is next:
 *
 *   PERI_CUDA_HOST_ORDER=forward | backward | random | varied
 *
 * (random: another order each round; varied, the default: another of the three each launch, or each round). A result that depends on it
 * lacks a barrier.
 *
 * A barrier opens when all threads of the block that have not ended are at it; an operation of a warp when all lanes of its mask that have
 * not ended brought theirs. All of them must have come from the same place in the code, by the same calls (places.cc): a GPU takes two
 * places for two barriers and may wait at each for ever. When they have not, or when nobody can go on, the block is given up and `wrong`
 * says who is where.
 *
 * Each array of shared memory ends where a page without access begins.
 */
#include "cuda_host_internal.h"

#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

/* Save the stack pointer to *@from and go on where @to was saved. */
#if defined(__x86_64__)
extern "C" void peri_cuda_host_switch(void **from, void *to);
asm(".text\n"
    ".hidden peri_cuda_host_switch\n"
    ".globl peri_cuda_host_switch\n"
    ".type peri_cuda_host_switch,@function\n"
    "peri_cuda_host_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n"
    ".size peri_cuda_host_switch,.-peri_cuda_host_switch\n");
#else
#include <ucontext.h>
#endif

namespace peri_cuda_host {

place *here;

namespace {

enum : size_t { STACK = 256 << 10, SHARED_MOST = 227 << 10, SHARED_USUAL = 48 << 10, THREADS_MOST = 1024 };
enum what : uint8_t { READY, AT_BARRIER, IN_WARP, ENDED };

struct meeting {
    unsigned mask, arrived;
    kind k;
    uint64_t path; /* of the first who came */
    int first;     /* its number */
    uint64_t value[32];
    int source[32];
};

struct thread {
    place at;
    moment m;
    char *stack = nullptr;
    void *sp = nullptr, *fake = nullptr;
    const void *bottom = nullptr, *frame = nullptr; /* of its first function, and of the call by which it waits: for places.cc */
    bool spoiled = false; /* it was given up, or is being run: its stack may hold what the address sanitizer watches */
#if !defined(__x86_64__)
    ucontext_t context;
#endif
    int number = 0, warp = 0, lane = 0;
    uint64_t result = 0;
};

struct warp {
    unsigned gone = 0; /* lanes that ended, or never were */
    std::vector<meeting *> open;
};

/* Lists live as long as the process, so that what they hold is not lost at its end. */
auto &threads = *new std::vector<thread *>; /* of the block; kept for the next one */
what state[THREADS_MOST];
auto &warps = *new std::vector<warp>;
auto &spare = *new std::vector<meeting *>;
size_t count, ended_threads, at_barrier;
int barrier_sum, barrier_result;
uint64_t barrier_path;  /* of the first thread that is at the barrier, */
thread *barrier_first;  /* and that thread */
thread *running;
bool broken;
const call *body;

/* -- from one to another -------------------------------------------------------------------------------------------------------------- */

void *main_sp;
#if defined(__SANITIZE_ADDRESS__)
void *main_fake;
const void *main_bottom;
size_t main_size;
#endif
#if !defined(__x86_64__)
ucontext_t main_context;
#endif

/** Go on with @to, from @from, which comes back here unless it leaves @for_good. NULL: what is no thread. */
void go(thread *from, thread *to, bool for_good)
{
    running = to;
    here = to ? &to->at : nullptr;
    now = to ? &to->m : nullptr;
    (void)for_good;
#if defined(__SANITIZE_ADDRESS__)
    void **fake = from ? &from->fake : &main_fake;
    __sanitizer_start_switch_fiber(for_good ? nullptr : fake, to ? to->stack : main_bottom, to ? STACK : main_size);
#endif
#if defined(__x86_64__)
    peri_cuda_host_switch(from ? &from->sp : &main_sp, to ? to->sp : main_sp);
#else
    swapcontext(from ? &from->context : &main_context, to ? &to->context : &main_context);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(*fake, nullptr, nullptr);
#endif
}

enum way { FORWARD, BACKWARD, RANDOM, VARIED };
way launch_way, asked_way = VARIED;
uint16_t order[THREADS_MOST];
size_t at_order;
bool moved; /* somebody ran in this round */

void new_round()
{
    uint64_t w = launch_way == VARIED ? draw() % 3 : (uint64_t)launch_way;
    if (w == FORWARD)
        for (size_t i = 0; i < count; i++) order[i] = (uint16_t)i;
    else if (w == BACKWARD)
        for (size_t i = 0; i < count; i++) order[i] = (uint16_t)(count - 1 - i);
    else
        for (size_t i = count; i > 1; i--) std::swap(order[i - 1], order[draw() % i]);
    at_order = 0;
    moved = false;
}

/** Who runs next; NULL: nobody can. */
thread *pick()
{
    for (;; new_round()) {
        while (at_order < count) {
            size_t i = order[at_order++];
            if (state[i] != READY) continue;
            moved = true;
            return threads[i];
        }
        if (!moved || ended_threads == count) return nullptr;
    }
}

/** The running thread waits, or lets others run. */
void leave()
{
    thread *t = running, *next = pick();
    if (next != t) go(t, next, false);
}

void end_of(thread *t);

void entry()
{
#if defined(__SANITIZE_ADDRESS__)
    const void *bottom;
    size_t size;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
    if (!main_bottom) main_bottom = bottom, main_size = size; /* the first thread ever is gone to from there */
#endif
    running->bottom = __builtin_frame_address(0);
    body->run(body->kept.get());
    thread *t = running;
    end_of(t);
    t->spoiled = false;
    go(t, pick(), true);
}

void start(thread *t)
{
    if (!t->stack) {
        size_t page = (size_t)sysconf(_SC_PAGESIZE);
        char *p = (char *)mmap(nullptr, STACK + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        mprotect(p, page, PROT_NONE);
        t->stack = p + page;
    }
    if (t->spoiled) UNPOISON(t->stack, STACK);
    t->spoiled = true;
#if defined(__x86_64__)
    void **top = (void **)(t->stack + STACK);
    *--top = nullptr;
    *--top = (void *)entry;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    t->sp = top;
#else
    getcontext(&t->context);
    t->context.uc_stack.ss_sp = t->stack;
    t->context.uc_stack.ss_size = STACK;
    t->context.uc_link = &main_context;
    makecontext(&t->context, entry, 0);
#endif
}

/* -- what is wrong --------------------------------------------------------------------------------------------------------------------- */

std::string name_of(uint3 thread, uint3 block)
{
    char text[120];
    snprintf(text, sizeof text, "thread (%u, %u, %u) of block (%u, %u, %u)", thread.x, thread.y, thread.z, block.x, block.y, block.z);
    return text;
}
std::string name_of(const thread *t) { return name_of(t->at.thread, t->at.block); }
uint3 in_grid(size_t b, dim3 grid) { return {(unsigned)(b % grid.x), (unsigned)(b / grid.x % grid.y), (unsigned)(b / grid.x / grid.y)}; }

const char *const kinds[] = {"__syncwarp", "a shuffle", "a vote", "a match", "a sum",
                             "a minimum",  "a maximum", "an and", "an or",   "an xor"};

[[noreturn]] void give_up(const std::string &text, cudaError_t error = cudaErrorLaunchFailure)
{
    found_wrong(text, error);
    broken = true;
    go(running, nullptr, true);
    __builtin_unreachable();
}

/** The running thread is in @what (a barrier, a shuffle) elsewhere than @other, which waits in one of its kind. */
[[noreturn]] void give_up_elsewhere(const char *what, const thread *other)
{
    const thread *t = running;
    std::string mine, others;
    tell_apart(walk{t->frame, t->bottom}, walk{other->frame, other->bottom}, &mine, &others);
    give_up(name_of(t) + " is " + what + mine + ", and " + name_of(other) + ", which should be there, too, is " + what + others +
            ": a GPU takes these for different ones, and may wait for ever");
}

/** Nobody can go on. */
void say_stuck()
{
    std::string text = "nobody can go on: ";
    const thread *waits[2] = {nullptr, nullptr};
    for (size_t i = 0; i < count; i++) {
        if (state[i] == AT_BARRIER && !waits[0]) waits[0] = threads[i];
        if (state[i] == IN_WARP && !waits[1]) waits[1] = threads[i];
    }
    if (waits[1]) {
        for (const meeting *m : warps[(size_t)waits[1]->warp].open) {
            char mask[80];
            if (!(m->arrived >> waits[1]->lane & 1)) continue;
            snprintf(mask, sizeof mask, " of mask %08x, of which %08x came", m->mask, m->arrived);
            text += name_of(waits[1]) + " is in " + kinds[m->k] + mask + ", at " + told(walk{waits[1]->frame, waits[1]->bottom});
        }
    }
    if (waits[0])
        text += (waits[1] ? "; " : "") + name_of(waits[0]) + " is at the barrier of " + told(walk{waits[0]->frame, waits[0]->bottom});
    found_wrong(text, cudaErrorLaunchFailure);
}

/* -- meetings -------------------------------------------------------------------------------------------------------------------------- */

uint64_t outcome(const meeting *m)
{
    uint64_t all = 0;
    bool first = true;
    for (unsigned left = m->arrived; left; left &= left - 1) {
        int l = __builtin_ctz(left);
        uint64_t v = m->value[l];
        if (m->k == BALLOT) all |= v ? (uint64_t)1 << l : 0;
        else if (first) all = v;
        else if (m->k == ADD) all += v;
        else if (m->k == MIN) all = std::min(all, v);
        else if (m->k == MAX) all = std::max(all, v);
        else if (m->k == AND) all &= v;
        else if (m->k == OR) all |= v;
        else if (m->k == XOR) all ^= v;
        first = false;
    }
    return all;
}

uint64_t matches(const meeting *m, int lane)
{
    uint64_t all = 0;
    for (unsigned left = m->arrived; left; left &= left - 1) {
        int l = __builtin_ctz(left);
        if (m->value[l] == m->value[lane]) all |= (uint64_t)1 << l;
    }
    return all;
}

/** What the lanes of a __syncwarp did before it comes before what they do after it. */
void come_before(const meeting *m, int warp)
{
    uint16_t seen[32] = {};
    for (unsigned left = m->arrived; left; left &= left - 1) {
        const moment &x = threads[(size_t)(warp * 32 + __builtin_ctz(left))]->m;
        for (int l = 0; l < 32; l++) seen[l] = std::max(seen[l], x.seen[l]);
        seen[__builtin_ctz(left)] = x.clock;
    }
    for (unsigned left = m->arrived; left; left &= left - 1) {
        moment &x = threads[(size_t)(warp * 32 + __builtin_ctz(left))]->m;
        memcpy(x.seen, seen, sizeof seen);
        x.clock++;
    }
}

void finish(const meeting *m, int warp)
{
    if (m->k == SYNC) come_before(m, warp);
    uint64_t all = m->k == SYNC || m->k == SHFL || m->k == MATCH ? 0 : outcome(m);
    for (unsigned left = m->arrived; left; left &= left - 1) {
        int l = __builtin_ctz(left);
        thread *t = threads[(size_t)(warp * 32 + l)];
        if (m->k == SHFL) {
            int from = m->source[l] & 31; /* of a lane that is not here: whatever */
            t->result = m->arrived >> from & 1 ? m->value[from] : 0xbadbadbadbadbadb;
        } else {
            t->result = m->k == MATCH ? matches(m, l) : all;
        }
        state[t->number] = READY;
    }
}

/** Finish what waits only for lanes that ended. */
void settle(int number)
{
    warp &w = warps[(size_t)number];
    for (size_t i = 0; i < w.open.size();) {
        meeting *m = w.open[i];
        if (m->mask & ~m->arrived & ~w.gone) {
            i++;
            continue;
        }
        w.open[i] = w.open.back();
        w.open.pop_back();
        finish(m, number);
        spare.push_back(m);
    }
}

void open_barrier()
{
    if (!at_barrier || at_barrier + ended_threads < count) return;
    at_barrier = 0;
    barriers++;
    barrier_result = barrier_sum;
    barrier_sum = 0;
    for (size_t i = 0; i < count; i++)
        if (state[i] == AT_BARRIER) state[i] = READY, threads[i]->result = (uint64_t)barrier_result;
}

void end_of(thread *t)
{
    state[t->number] = ENDED;
    ended_threads++;
    warps[(size_t)t->warp].gone |= 1u << t->lane;
    if (!warps[(size_t)t->warp].open.empty()) settle(t->warp);
    if (at_barrier) open_barrier();
}

/* -- shared memory --------------------------------------------------------------------------------------------------------------------- */

/** Pages, and one more without access; what is in use are the last bytes of them. */
struct region {
    char *base, *end, *at;
    size_t bytes;
};
auto &regions = *new std::vector<region *>;
region *dynamic;
uint64_t block_number; /* of all blocks that ever ran */
size_t shared_static, shared_allowed; /* of the block: its arrays; what a launch may ask for (run_grid) */

region *new_region(size_t most)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (most + page - 1) / page * page;
    char *p = (char *)mmap(nullptr, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    mprotect(p + room, page, PROT_NONE);
    regions.push_back(new region{p, p + room, p + room, 0});
    return regions.back();
}

/** Use @bytes of it; what a block finds there is noise. */
void lay(region *r, size_t bytes, size_t align)
{
    r->at = r->end - (bytes + align - 1) / align * align;
    r->bytes = bytes;
    UNPOISON(r->base, (size_t)(r->end - r->base));
    memset(r->at, (int)(draw() & 255), (size_t)(r->end - r->at));
    POISON(r->base, (size_t)(r->at - r->base));
    POISON(r->at + bytes, (size_t)(r->end - (r->at + bytes)));
}

} // namespace

uint64_t meet(kind k, unsigned mask, uint64_t value, int source, bool places)
{
    thread *t = running;
    unsigned bit = 1u << t->lane;
    t->frame = __builtin_frame_address(0);
    uint64_t path = places ? path_of(walk{t->frame, t->bottom}) : 0;
    if (!(mask & bit)) give_up(name_of(t) + " is not in the mask of its own " + kinds[k]);
    warp &w = warps[(size_t)t->warp];
    meeting *m = nullptr;
    for (meeting *x : w.open)
        if (x->mask == mask) m = x;
    if (!m) {
        if (spare.empty()) spare.push_back(new meeting);
        m = spare.back();
        spare.pop_back();
        m->mask = mask;
        m->arrived = 0;
        m->k = k;
        m->path = path;
        m->first = t->number;
        w.open.push_back(m);
    }
    if (m->k != k) give_up(name_of(t) + " comes with " + kinds[k] + " where other lanes of its mask have " + kinds[m->k]);
    if (m->path != path) give_up_elsewhere((std::string("in ") + kinds[k] + " at ").c_str(), threads[(size_t)m->first]);
    m->arrived |= bit;
    m->value[t->lane] = value;
    m->source[t->lane] = source;
    state[t->number] = IN_WARP;
    if (!(mask & ~m->arrived & ~w.gone)) settle(t->warp);
    if (state[t->number] == IN_WARP) leave();
    return t->result;
}

int barrier_count(int predicate, bool places)
{
    thread *t = running;
    t->frame = __builtin_frame_address(0);
    uint64_t path = places ? path_of(walk{t->frame, t->bottom}) : 0;
    if (!at_barrier) barrier_path = path, barrier_first = t;
    else if (path != barrier_path) give_up_elsewhere("at the barrier of ", barrier_first);
    state[t->number] = AT_BARRIER;
    at_barrier++;
    barrier_sum += predicate != 0;
    open_barrier();
    leave();
    return (int)t->result;
}

void interrupt()
{
    if (draw() % 4 == 0) leave();
}

void *shared(slot *s, size_t bytes, size_t align)
{
    if (s->block == block_number) return s->at;
    shared_static += bytes;
    size_t all = shared_static + dynamic->bytes;
    if (shared_static > SHARED_USUAL)
        give_up(name_of(running) + " has arrays of " + std::to_string(shared_static) + " bytes of shared memory, allowed: " +
                std::to_string(SHARED_USUAL) + " (more of it is dynamic)", cudaErrorInvalidConfiguration);
    if (all > (shared_allowed ? SHARED_MOST : SHARED_USUAL))
        give_up(name_of(running) + " has " + std::to_string(all) + " bytes of shared memory, arrays and dynamic, allowed: " +
                std::to_string(shared_allowed ? SHARED_MOST : SHARED_USUAL) +
                (shared_allowed ? "" : " without cudaFuncSetAttribute"), cudaErrorInvalidConfiguration);
    if (!s->at) s->place = new_region(bytes);
    lay((region *)s->place, bytes, align);
    s->block = block_number;
    return s->at = ((region *)s->place)->at;
}

void *dynamic_shared() { return dynamic->at; }

void give_up_kernel(const std::string &text, cudaError_t error) { give_up(name_of(running) + " " + text, error); }

std::string refused_shared(const void *p)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char text[120];
    for (const region *r : regions) {
        if (p < r->end || p >= r->end + page) continue;
        snprintf(text, sizeof text, "reaches %zu bytes past the end of shared memory of %zu bytes",
                 (size_t)((const char *)p - r->at) + 1 - r->bytes, r->bytes);
        return text;
    }
    return "";
}

void choose_order(const char *name)
{
    static const char *const names[] = {"forward", "backward", "random", "varied"};
    for (int i = 0; i < 4; i++)
        if (!strcmp(name, names[i])) return (void)(asked_way = (way)i);
    fprintf(stderr, "PERI_CUDA_HOST_ORDER is '%s', allowed: forward, backward, random, varied\n", name);
    abort();
}

std::string name_of(uint32_t block, uint32_t thread)
{
    const place &p = threads[thread]->at;
    return name_of(p.thread, in_grid(block, p.blocks));
}

bool shared_extent(const void *p, extent *out)
{
    for (const region *r : regions)
        if (p >= r->base && p < r->end) return *out = {r->at, r->at + r->bytes, nullptr}, true;
    return false;
}

bool is_shared(const void *p)
{
    return std::any_of(regions.begin(), regions.end(), [=](const region *r) { return p >= r->base && p < r->end; });
}

static bool run_blocks(dim3 grid, dim3 block, size_t shared_bytes, const call &kernel)
{
    static bool asked;
    const char *text = asked ? nullptr : getenv("PERI_CUDA_HOST_ORDER");
    if (text) choose_order(text);
    asked = true;
    launch_way = asked_way == VARIED ? (way)(draw() % 4) : asked_way;
    count = (size_t)block.x * block.y * block.z;
    while (threads.size() < count) {
        threads.push_back(new thread);
        threads.back()->number = (int)threads.size() - 1;
        threads.back()->warp = threads.back()->number / 32;
        threads.back()->lane = threads.back()->number % 32;
    }
    if (!dynamic) dynamic = new_region(SHARED_MOST);
    body = &kernel;
    broken = false;
    size_t blocks = (size_t)grid.x * grid.y * grid.z;
    bool last_first = launch_way == BACKWARD || (launch_way >= RANDOM && draw() % 2);
    for (size_t i = 0; i < count; i++) {
        order[i] = (uint16_t)i;
        threads[i]->at.thread = {(unsigned)(i % block.x), (unsigned)(i / block.x % block.y), (unsigned)(i / block.x / block.y)};
        threads[i]->at.threads = block;
        threads[i]->at.blocks = grid;
    }
    for (size_t n = 0; n < blocks; n++) {
        size_t b = last_first ? blocks - 1 - n : n;
        uint3 at = in_grid(b, grid);
        for (warp &w : warps) {
            spare.insert(spare.end(), w.open.begin(), w.open.end());
            w.open.clear();
            w.gone = 0;
        }
        warps.resize((count + 31) / 32);
        if (count % 32) warps.back().gone = ~0u << count % 32;
        ended_threads = at_barrier = 0;
        barrier_sum = 0;
        barriers = 0;
        races_block();
        block_number++;
        lay(dynamic, shared_bytes, 16);
        shared_static = 0;
        for (size_t i = 0; i < count; i++) {
            threads[i]->at.block = at;
            threads[i]->m = {(uint32_t)b, (uint16_t)i, 1, {}, nullptr, nullptr};
            state[i] = READY;
            start(threads[i]);
            threads[i]->m.stack = threads[i]->stack;
            threads[i]->m.stack_end = threads[i]->stack + STACK;
        }
        new_round();
        if (thread *t = pick()) go(nullptr, t, false);
        if (!broken && ended_threads < count) say_stuck();
        if (broken || ended_threads < count) return false;
    }
    return true;
}

bool run_grid(dim3 grid, dim3 block, size_t shared_bytes, size_t allowed, const call &kernel)
{
    shared_allowed = allowed;
    races_begin(kernel);
    bool fine = run_blocks(grid, block, shared_bytes, kernel);
    races_end();
    return fine;
}

} // namespace peri_cuda_host

unsigned peri_cuda_host_active() { return ~peri_cuda_host::warps[(size_t)peri_cuda_host::running->warp].gone; }

extern "C" __attribute__((visibility("default"))) void peri_cuda_host_races(int on) { peri_cuda_host::races_choose(on != 0); }
extern "C" void peri_cuda_host_order(const char *name) { peri_cuda_host::choose_order(name); }
