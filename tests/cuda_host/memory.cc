/* SPDX-License-Identifier: Apache-2.0
 *
 * memory.cc: the memory of the pretended GPU. Its addresses are without access; while the device works, what it touches is opened by the
 * signal that the touch raises, up to the end of that work, so that the cost is that of what is touched. The signal tells as well what
 * must not be touched at all, in words:
 *
 * - by the host: anything;
 * - by the device: what lies beside an allocation (each ends, but for its alignment, where a page without access begins), what was freed,
 *   and what its stream has not come to allocate yet.
 *
 * Addresses that are no multiples of what the accessed type asks for (a vector of 16 bytes at a multiple of 4) are told by the compiler.
 *
 * What remains of the first and the last page of an allocation holds noise that must stay; the address sanitizer watches it where there is
 * one, and races.cc where it is told of every access. New memory holds noise, or what was there before.
 */
#include "cuda_host_internal.h"

#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

namespace peri_cuda_host {

namespace {

enum : size_t { ADDRESSES = (size_t)16 << 30, ALIGN = 256, NOISE_MOST = 1 << 20, KEPT_BACK = 4 << 20, WINDOW = 64 };

/** Pages of the arena, from a first one that is the key in `blocks`; one more follows that is never opened. */
struct block {
    size_t pages, bytes;
    char *at;             /* of the user: so that `bytes` end with the last page, but for the alignment */
    bool live, filled, whole; /* whole: all pages are open */
    unsigned touched;     /* how often it was opened in this batch of work */
    int noise;
    std::function<bool()> ready;
    unsigned char *written; /* of extent_of */
};

struct range {
    char *base, *from, *to;
};

struct arena {
    char *at = nullptr, *top = nullptr;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), used = 0, freed = 0;
    std::map<char *, block> blocks; /* freed ones too */
    std::multimap<size_t, char *> holes; /* freed ones, by pages */
    std::vector<range> open;

    arena()
    {
        void *p = mmap(nullptr, ADDRESSES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p != MAP_FAILED) at = top = (char *)p;
    }
};
arena &memory()
{
    static arena *a = new arena;
    return *a;
}

thread_local int depth; /* > 0: this thread plays the device */
thread_local sigjmp_buf *escape;

/* -- what must not be -------------------------------------------------------------------------------------------------------------- */

/** The first page that an allocation uses; those before are what its size was rounded up by. */
char *first_page(const block &b) { return (char *)((uintptr_t)b.at / memory().page * memory().page); }

#if defined(__SANITIZE_ADDRESS__)
void check_margins(const range &) {} /* it has told already */
#else
/** The first byte of [@p, @end) that is not @noise; @end: there is none. */
char *other_than(char noise, char *p, char *end)
{
    uint64_t same, word;
    memset(&same, noise, sizeof same);
    for (; end - p >= (ptrdiff_t)sizeof word; p += sizeof word) {
        memcpy(&word, p, sizeof word);
        if (word != same) break;
    }
    while (p < end && *p == noise) p++;
    return p;
}

void check_margins(const range &r)
{
    const block &b = memory().blocks[r.base];
    char *base = first_page(b), *end = r.base + b.pages * memory().page, text[160];
    if (!b.live) return;
    char noise = (char)b.noise, *past = b.at + b.bytes;
    for (char *p = r.to == end ? other_than(noise, past, end) : end; p < end; p = other_than(noise, p + 1, end)) {
        snprintf(text, sizeof text, "something wrote %zu bytes past the end of an allocation of %zu bytes",
                 (size_t)(p - b.at) + 1 - b.bytes, b.bytes);
        found_wrong(text, cudaErrorIllegalAddress);
        *p = noise;
    }
    for (char *p = r.from == base ? other_than(noise, base, b.at) : b.at; p < b.at; p = other_than(noise, p + 1, b.at)) {
        snprintf(text, sizeof text, "something wrote %zu bytes before an allocation of %zu bytes", (size_t)(b.at - p), b.bytes);
        found_wrong(text, cudaErrorIllegalAddress);
        *p = noise;
    }
}
#endif

/** The block whose pages hold @p, or that lies before the unused page that does; end(): none. */
std::map<char *, block>::iterator block_of(const void *p)
{
    auto &blocks = memory().blocks;
    auto b = blocks.upper_bound((char *)p);
    return b == blocks.begin() ? blocks.end() : --b;
}

/** May the device touch [@from, @to)? "": yes. */
std::string refused(std::map<char *, block>::iterator found, const char *from, const char *to)
{
    char text[200];
    if (found == memory().blocks.end()) return "reaches for device memory that was never allocated";
    const block &b = found->second;
    if (!b.live) snprintf(text, sizeof text, "reaches for device memory after its free (of an allocation of %zu bytes)", b.bytes);
    else if (from < b.at)
        snprintf(text, sizeof text, "reaches %zu bytes before an allocation of %zu bytes", (size_t)(b.at - from), b.bytes);
    else if (to > b.at + b.bytes)
        snprintf(text, sizeof text, "reaches %zu bytes past the end of an allocation of %zu bytes", (size_t)(to - b.at) - b.bytes, b.bytes);
    else if (b.ready && !b.ready())
        snprintf(text, sizeof text, "reaches for device memory (%zu bytes) that its stream has not come to allocate", b.bytes);
    else return "";
    return text;
}

/* -- opening and closing ----------------------------------------------------------------------------------------------------------- */

void open_range(char *key, block &b, char *from, char *to)
{
    if (mprotect(from, (size_t)(to - from), PROT_READ | PROT_WRITE) != 0) {
        perror("tests/cuda_host: mprotect");
        abort();
    }
    memory().open.push_back({key, from, to});
    b.touched++;
}

/** Open pages around @at, more of them each time. */
void open_block(char *key, block &b, char *at)
{
    size_t page = memory().page;
    char *base = first_page(b), *end = key + b.pages * page;
    if (b.whole) return;
    bool small = (size_t)(end - base) <= WINDOW * page;
    if (!b.filled) {
        size_t noise = b.bytes < NOISE_MOST ? b.bytes : NOISE_MOST;
        b.noise = (int)(draw() & 255);
        b.filled = true;
        small = small || b.bytes <= NOISE_MOST;
        if (!small) {
            open_range(key, b, base, base + (NOISE_MOST / page + 1) * page);
            open_range(key, b, end - page, end);
        } else {
            open_range(key, b, base, end);
            b.whole = true;
        }
        memset(b.at, b.noise, noise);
#if !defined(__SANITIZE_ADDRESS__)
        memset(base, b.noise, (size_t)(b.at - base));
        memset(b.at + b.bytes, b.noise, (size_t)(end - (b.at + b.bytes)));
#endif
        if (b.whole) return;
    }
    if (small) {
        open_range(key, b, base, end);
        b.whole = true;
        return;
    }
    size_t window = (WINDOW << (b.touched < 10 ? b.touched : 10)) * page;
    size_t first = (size_t)(at - base) / window * window;
    char *to = base + first + window;
    open_range(key, b, base + first, to < end ? to : end);
}

void close_ranges()
{
    arena &a = memory();
    for (const range &r : a.open) check_margins(r);
    for (const range &r : a.open) {
        block &b = a.blocks[r.base];
        mprotect(r.from, (size_t)(r.to - r.from), PROT_NONE);
        b.touched = 0;
        b.whole = false;
    }
    a.open.clear();
}

/* -- the signal ----------------------------------------------------------------------------------------------------------------------- */

struct sigaction before;

void touched(int number, siginfo_t *info, void *context)
{
    char *at = (char *)info->si_addr;
    std::string why;
    bool ours = on_device(at);
    if (ours && depth > 0) {
        auto b = block_of(at);
        why = refused(b, at, at + 1);
        if (why.empty()) {
            open_block(b->first, b->second, at);
            return;
        }
    } else if (ours) {
        fprintf(stderr, "tests/cuda_host: the host touches device memory at %p\n", (void *)at);
    } else if (depth > 0) {
        why = refused_shared(at);
    }
    if (!why.empty()) {
        if (here) give_up_kernel(why, cudaErrorIllegalAddress);
        found_wrong("a task of the device " + why, cudaErrorIllegalAddress);
        if (escape) siglongjmp(*escape, 1);
        fprintf(stderr, "tests/cuda_host: %s\n", wrong.c_str());
    }
    /* Not for us: as if we were not here. */
    if (before.sa_flags & SA_SIGINFO) before.sa_sigaction(number, info, context);
    else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) before.sa_handler(number);
    else signal(number, SIG_DFL);
}

/** Others set handlers too, test programs before each test: ours goes before them when work begins. */
void listen()
{
    struct sigaction now, ours = {};
    if (sigaction(SIGSEGV, nullptr, &now) != 0 || ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == touched)) return;
    before = now;
    ours.sa_sigaction = touched;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigaction(SIGSEGV, &ours, nullptr);
}

} // namespace

opened::opened()
{
    if (depth++ == 0) listen();
}
opened::~opened()
{
    if (--depth == 0) close_ranges();
}

closed::closed() : was(depth)
{
    close_ranges();
    depth = 0;
}
closed::~closed() { depth = was; }

bool guarded(const std::function<void()> &work)
{
    sigjmp_buf buffer, *outer = escape;
    bool fine = sigsetjmp(buffer, 0) == 0;
    if (fine) {
        escape = &buffer;
        work();
    }
    escape = outer;
    return fine;
}

bool on_device(const void *p) { return p >= memory().at && p < memory().at + ADDRESSES; }
size_t memory_used() { return memory().used; }

/* -- allocations ----------------------------------------------------------------------------------------------------------------------- */

cudaError_t take(void **out, size_t bytes, std::function<bool()> ready)
{
    arena &a = memory();
    size_t room = (bytes + ALIGN - 1) / ALIGN * ALIGN, pages = (room + a.page - 1) / a.page;
    if (room < bytes || a.used + room > MEMORY) return cudaErrorMemoryAllocation;
    char *base = nullptr;
    bool fresh = a.at && (size_t)(a.at + ADDRESSES - a.top) >= (pages + 1) * a.page;
    auto hole = a.freed > KEPT_BACK || !fresh ? a.holes.lower_bound(pages) : a.holes.end(); /* the oldest of them */
    if (hole != a.holes.end() && (hole->first <= pages + pages / 4 || !fresh)) {
        base = hole->second;
        pages = hole->first; /* whole: blocks of a kind come again */
        a.freed -= pages * a.page;
        a.holes.erase(hole);
    } else if (fresh) {
        base = a.top;
        a.top += (pages + 1) * a.page;
    }
    if (!base) return cudaErrorMemoryAllocation;
    char *end = base + pages * a.page;
    block b = {pages, bytes, end - room, true, false, false, 0, 0, std::move(ready), nullptr};
    if (contents_matter) b.written = (unsigned char *)calloc(bytes / 8 + 8, 1); /* a look takes 8 of them at once */
    POISON(base, (size_t)(b.at - base));
    UNPOISON(b.at, bytes);
    POISON(b.at + bytes, (size_t)(end + a.page - (b.at + bytes)));
    *out = b.at;
    a.blocks[base] = std::move(b);
    a.used += room;
    return cudaSuccess;
}

bool is_allocation(const void *p)
{
    auto found = block_of(p);
    return found != memory().blocks.end() && found->second.live && found->second.at == p;
}

void give(void *p)
{
    arena &a = memory();
    auto found = block_of(p);
    if (found == a.blocks.end() || !found->second.live || found->second.at != p) {
        found_wrong("a free of what is no allocation, or not any longer", cudaErrorInvalidValue);
        return;
    }
    block &b = found->second;
    for (const range &r : a.open)
        if (r.base == found->first) check_margins(r);
    for (const range &r : a.open)
        if (r.base == found->first) mprotect(r.from, (size_t)(r.to - r.from), PROT_NONE);
    a.open.erase(std::remove_if(a.open.begin(), a.open.end(), [&](const range &r) { return r.base == found->first; }), a.open.end());
    a.used -= (b.bytes + ALIGN - 1) / ALIGN * ALIGN;
    a.freed += b.pages * a.page;
    POISON(b.at, b.bytes);
    b.live = b.whole = false;
    b.ready = nullptr;
    free(b.written);
    b.written = nullptr;
    b.touched = 0;
    a.holes.emplace(b.pages, found->first);
}

std::string where_is(const void *p)
{
    if (is_shared(p)) return "shared memory";
    auto found = on_device(p) ? block_of(p) : memory().blocks.end();
    if (found == memory().blocks.end()) return "";
    return "an allocation of " + std::to_string(found->second.bytes) + " bytes, from byte " +
           std::to_string((const char *)p - found->second.at) + " on";
}

bool extent_of(const void *p, extent *out)
{
    auto found = on_device(p) ? block_of(p) : memory().blocks.end();
    if (found == memory().blocks.end() || !found->second.live) return false;
    const block &b = found->second;
    *out = {b.at, b.at + b.bytes, b.written};
    return true;
}

std::string refused(const void *p, size_t bytes) { return refused(block_of(p), (const char *)p, (const char *)p + bytes); }

void wrote(const void *p, size_t bytes, const void *from)
{
    extent to, of;
    if (!contents_matter || !extent_of(p, &to)) return;
    const bool all = !from || !extent_of(from, &of); /* what the host copies is its own business */
    for (size_t i = 0, at = (size_t)((const char *)p - to.from); i < bytes;) {
        if (all && at % 8 == 0 && bytes - i >= 8) {
            const size_t whole = (bytes - i) / 8;
            memset(to.written + at / 8, 0xff, whole);
            i += 8 * whole, at += 8 * whole;
            continue;
        }
        const size_t source = all ? 0 : (size_t)((const char *)from - of.from) + i;
        const int is = all || (of.written[source / 8] >> source % 8 & 1);
        to.written[at / 8] = (unsigned char)((to.written[at / 8] & ~(1 << at % 8)) | is << at % 8);
        i++, at++;
    }
}

bool reach(const void *p, size_t bytes)
{
    if (!on_device(p) || !bytes) return true;
    auto found = block_of(p);
    std::string why = refused(found, (const char *)p, (const char *)p + bytes);
    if (!why.empty()) return found_wrong("a copy " + why, cudaErrorIllegalAddress), false;
    open_block(found->first, found->second, (char *)p);
    return true;
}

} // namespace peri_cuda_host

/* -- alignment ------------------------------------------------------------------------------------------------------------------------- */

/** What the compiler hands over (-fsanitize=alignment): the start of it. */
struct peri_cuda_host_mismatch {
    const char *file;
    uint32_t line, column;
    const void *type;
    unsigned char log_align, kind;
};

/** The compiler calls it before an access at an address that is no multiple of what the accessed type asks for. A GPU ends the kernel there,
 *  while processors with x86's instructions go on. What the host does by itself, between launches, is its own business. */
extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(const peri_cuda_host_mismatch *m, uintptr_t at)
{
    using namespace peri_cuda_host;
    if (!here && depth == 0) return;
    const unsigned align = 1u << m->log_align;
    const std::string text = "reaches for memory " + std::to_string(at % align) + " bytes past a multiple of " + std::to_string(align) +
                             ", at " + line_of(__builtin_return_address(0));
    if (here) give_up_kernel(text, cudaErrorMisalignedAddress);
    found_wrong("a task of the device " + text, cudaErrorMisalignedAddress);
}
