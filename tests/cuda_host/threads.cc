/* SPDX-License-Identifier: Apache-2.0
 *
 * threads.cc: the threads of a grid. Blocks run one after the other, in an order from the seed. The threads of a block are coroutines; one
 * runs until it meets others (a barrier of the block, an operation of a warp), ends, or is interrupted at an atomic operation; who is next,
 * the seed says: a result that depends on it lacks a barrier.
 *
 * A barrier opens when all threads of the block that have not ended are at it; an operation of a warp when all lanes of its mask that
 * have not ended brought theirs. When nobody can go on, the block is given up and `wrong` says who waits for what.
 */
#include "internal.h"

#include <cstdio>
#include <sys/mman.h>
#include <unordered_map>
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

enum : size_t { STACK = 256 << 10, SHARED_MOST = 227 << 10, GAP = 64 };
enum what { FREE, READY, AT_BARRIER, IN_WARP, ENDED };

struct meeting {
    unsigned mask = 0, arrived = 0;
    kind k = SYNC;
    uint64_t value[32], result[32];
    int source[32];
};

struct thread {
    place at;
    what state = FREE;
    char *stack = nullptr;
    void *sp = nullptr, *fake = nullptr;
#if !defined(__x86_64__)
    ucontext_t context;
#endif
    int warp = 0, lane = 0, brought = 0;
    uint64_t result = 0;
    const meeting *in = nullptr;
};

std::vector<thread *> threads; /* of the block; kept for the next one */
std::vector<std::vector<meeting *>> warps;
size_t count, ended_threads, at_barrier;
int barrier_sum, barrier_result;
thread *running;
bool broken;
const std::function<void()> *body;

void *main_sp;
#if defined(__SANITIZE_ADDRESS__)
void *main_fake;
const void *main_bottom;
size_t main_size;
#endif
#if !defined(__x86_64__)
ucontext_t main_context;
#endif

void to_main(bool for_good)
{
    thread *t = running;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(for_good ? nullptr : &t->fake, main_bottom, main_size);
#endif
    (void)for_good;
#if defined(__x86_64__)
    peri_cuda_host_switch(&t->sp, main_sp);
#else
    swapcontext(&t->context, &main_context);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(t->fake, nullptr, nullptr);
#endif
}

void end_of(thread *t);

void entry()
{
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &main_bottom, &main_size);
#endif
    (*body)();
    end_of(running);
    to_main(true);
}

void start(thread *t)
{
    if (!t->stack) {
        char *p = (char *)mmap(nullptr, STACK + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        mprotect(p, 4096, PROT_NONE);
        t->stack = p + 4096;
    }
    UNPOISON(t->stack, STACK);
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

void resume(thread *t)
{
    running = t;
    here = &t->at;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&main_fake, t->stack, STACK);
#endif
#if defined(__x86_64__)
    peri_cuda_host_switch(&main_sp, t->sp);
#else
    swapcontext(&main_context, &t->context);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(main_fake, nullptr, nullptr);
#endif
    here = nullptr;
}

std::string name_of(const thread *t)
{
    char text[120];
    snprintf(text, sizeof text, "thread (%u, %u, %u) of block (%u, %u, %u)", t->at.thread.x, t->at.thread.y, t->at.thread.z, t->at.block.x,
             t->at.block.y, t->at.block.z);
    return text;
}

const char *const kinds[] = {"__syncwarp", "a shuffle", "a vote", "a match", "a sum",
                             "a minimum",  "a maximum", "an and", "an or",   "an xor"};

[[noreturn]] void give_up(const std::string &text, cudaError_t error = cudaErrorLaunchFailure)
{
    found_wrong(text, error);
    broken = true;
    to_main(true);
    __builtin_unreachable();
}

void finish(meeting *m, int warp)
{
    uint64_t all = 0;
    bool first = true;
    for (int l = 0; l < 32; l++) {
        if (!(m->arrived >> l & 1)) continue;
        uint64_t v = m->value[l];
        if (first) all = m->k == BALLOT ? 0 : v;
        else if (m->k == ADD) all += v;
        else if (m->k == MIN) all = std::min(all, v);
        else if (m->k == MAX) all = std::max(all, v);
        else if (m->k == AND) all &= v;
        else if (m->k == OR) all |= v;
        else if (m->k == XOR) all ^= v;
        if (m->k == BALLOT && v) all |= (uint64_t)1 << l;
        first = false;
    }
    for (int l = 0; l < 32; l++) {
        m->result[l] = all;
        if (m->k == SHFL) {
            int from = m->source[l] & 31; /* of a lane that is not here: whatever */
            m->result[l] = (m->arrived >> l & 1) && (m->arrived >> from & 1) ? m->value[from] : 0xbadbadbadbadbadb;
        }
        if (m->k == MATCH) {
            m->result[l] = 0;
            for (int o = 0; o < 32; o++)
                if ((m->arrived >> o & 1) && m->value[o] == m->value[l]) m->result[l] |= (uint64_t)1 << o;
        }
    }
    for (size_t i = (size_t)warp * 32; i < std::min(count, (size_t)warp * 32 + 32); i++) {
        thread *t = threads[i];
        if (t->in != m) continue;
        t->result = m->result[t->lane];
        t->in = nullptr;
        if (t->state == IN_WARP) t->state = READY;
    }
}

unsigned ended_lanes(int warp)
{
    unsigned lanes = 0;
    for (size_t l = 0; l < 32; l++) {
        size_t i = (size_t)warp * 32 + l;
        if (i >= count || threads[i]->state == ENDED) lanes |= 1u << l;
    }
    return lanes;
}

void settle(int warp)
{
    auto &list = warps[(size_t)warp];
    unsigned gone = 0;
    bool looked = false;
    for (size_t i = 0; i < list.size();) {
        meeting *m = list[i];
        unsigned missing = m->mask & ~m->arrived;
        if (missing && !looked) gone = ended_lanes(warp), looked = true;
        if (missing & ~gone) {
            i++;
            continue;
        }
        list.erase(list.begin() + (long)i);
        finish(m, warp);
        delete m;
    }
}

void open_barrier()
{
    if (!at_barrier || at_barrier + ended_threads < count) return;
    at_barrier = 0;
    barrier_result = barrier_sum;
    barrier_sum = 0;
    for (size_t i = 0; i < count; i++)
        if (threads[i]->state == AT_BARRIER) threads[i]->state = READY, threads[i]->result = (uint64_t)barrier_result;
}

void end_of(thread *t)
{
    t->state = ENDED;
    ended_threads++;
    settle(t->warp);
    open_barrier();
}

/* -- shared memory: one buffer, with gaps between what has a name ------------------------------------------------------------------- */

alignas(128) char shared_memory[2 * SHARED_MOST];
size_t shared_used;
std::unordered_map<const void *, void *> shared_names;

void new_shared(size_t dynamic)
{
    UNPOISON(shared_memory, sizeof shared_memory);
    memset(shared_memory, (int)(draw() & 255), dynamic + 4096 + shared_used); /* what a block finds there is noise */
    POISON(shared_memory, sizeof shared_memory);
    UNPOISON(shared_memory, dynamic);
    shared_names.clear();
    shared_used = (dynamic + GAP + 127) / 128 * 128;
}

bool run_block()
{
    std::vector<size_t> order(count);
    for (size_t i = 0; i < count; i++) order[i] = i;
    for (uint64_t round = draw();; round = draw()) {
        if (round % 3 == 0) std::reverse(order.begin(), order.end());
        if (round % 3 == 1)
            for (size_t i = count; i > 1; i--) std::swap(order[i - 1], order[draw() % i]);
        bool moved = false;
        for (size_t i : order) {
            if (threads[i]->state != READY) continue;
            moved = true;
            resume(threads[i]);
            if (broken) return false;
        }
        if (ended_threads == count) return true;
        if (moved) continue;
        std::string text = "nobody can go on: ";
        const thread *waits[2] = {nullptr, nullptr};
        for (size_t i = 0; i < count; i++) {
            if (threads[i]->state == AT_BARRIER && !waits[0]) waits[0] = threads[i];
            if (threads[i]->state == IN_WARP && !waits[1]) waits[1] = threads[i];
        }
        if (waits[1]) {
            char mask[80];
            snprintf(mask, sizeof mask, " is in %s of mask %08x, of which %08x came", kinds[waits[1]->in->k], waits[1]->in->mask,
                     waits[1]->in->arrived);
            text += name_of(waits[1]) + mask;
        }
        if (waits[0]) text += (waits[1] ? "; " : "") + name_of(waits[0]) + " is at a barrier of the block";
        found_wrong(text, cudaErrorLaunchFailure);
        return false;
    }
}

} // namespace

uint64_t meet(kind k, unsigned mask, uint64_t value, int source)
{
    thread *t = running;
    unsigned bit = 1u << t->lane;
    if (!(mask & bit)) give_up(name_of(t) + " is not in the mask of its own " + kinds[k]);
    meeting *m = nullptr;
    for (meeting *x : warps[(size_t)t->warp])
        if (x->mask == mask && !(x->arrived & bit)) m = x;
    if (!m) {
        m = new meeting;
        m->mask = mask;
        m->k = k;
        warps[(size_t)t->warp].push_back(m);
    }
    if (m->k != k) give_up(name_of(t) + " comes with " + kinds[k] + " where other lanes of its mask have " + kinds[m->k]);
    m->arrived |= bit;
    m->value[t->lane] = value;
    m->source[t->lane] = source;
    t->in = m;
    t->state = IN_WARP;
    settle(t->warp);
    if (t->state == IN_WARP) to_main(false);
    return t->result;
}

int barrier_count(int predicate)
{
    thread *t = running;
    t->state = AT_BARRIER;
    at_barrier++;
    barrier_sum += predicate != 0;
    open_barrier();
    to_main(false);
    return (int)t->result;
}

void barrier() { barrier_count(0); }

void interrupt()
{
    if (draw() % 4 == 0) to_main(false);
}

void *shared(const void *key, size_t bytes, size_t align)
{
    auto known = shared_names.find(key);
    if (known != shared_names.end()) return known->second;
    shared_used = (shared_used + align - 1) / align * align;
    if (shared_used + bytes + GAP > sizeof shared_memory || bytes > SHARED_MOST) give_up(name_of(running) + ": too much shared memory");
    char *p = shared_memory + shared_used;
    UNPOISON(p, bytes);
    memset(p, (int)(draw() & 255), bytes);
    shared_used = (shared_used + bytes + GAP + 127) / 128 * 128;
    return shared_names[key] = p;
}

void *dynamic_shared() { return shared_memory; }

void give_up_kernel(const std::string &text, cudaError_t error) { give_up(name_of(running) + " " + text, error); }

std::string refused_shared(const void *) { return ""; }

bool run_grid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &kernel)
{
    count = (size_t)block.x * block.y * block.z;
    while (threads.size() < count) threads.push_back(new thread);
    body = &kernel;
    broken = false;
    size_t blocks = (size_t)grid.x * grid.y * grid.z;
    uint64_t way = draw() % 2;
    for (size_t n = 0; n < blocks; n++) {
        size_t b = way ? blocks - 1 - n : n;
        for (auto &list : warps) {
            for (meeting *m : list) delete m;
            list.clear();
        }
        warps.resize((count + 31) / 32);
        ended_threads = at_barrier = 0;
        barrier_sum = 0;
        new_shared(shared_bytes);
        for (size_t i = 0; i < count; i++) {
            thread *t = threads[i];
            t->at.thread = {(unsigned)(i % block.x), (unsigned)(i / block.x % block.y), (unsigned)(i / block.x / block.y)};
            t->at.block = {(unsigned)(b % grid.x), (unsigned)(b / grid.x % grid.y), (unsigned)(b / grid.x / grid.y)};
            t->at.threads = block;
            t->at.blocks = grid;
            t->warp = (int)(i / 32);
            t->lane = (int)(i % 32);
            t->in = nullptr;
            t->state = READY;
            start(t);
        }
        if (!run_block()) return false;
    }
    return true;
}

} // namespace peri_cuda_host

unsigned peri_cuda_host_active() { return ~peri_cuda_host::ended_lanes(peri_cuda_host::running->warp); }
