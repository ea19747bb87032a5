/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda_host_internal.h: between device.cc (streams, events, copies), memory.cc and threads.cc (the threads of a grid).
 */
#ifndef PERI_CUDA_HOST_INTERNAL_H
#define PERI_CUDA_HOST_INTERNAL_H

#include "cuda_runtime.h"

#include <algorithm>
#include <string>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define POISON(p, n) ASAN_POISON_MEMORY_REGION(p, n)
#define UNPOISON(p, n) ASAN_UNPOISON_MEMORY_REGION(p, n)
#else
#define POISON(p, n) ((void)(p), (void)(n))
#define UNPOISON(p, n) ((void)(p), (void)(n))
#endif

namespace peri_cuda_host {

/** The next number of the seed's sequence. */
uint64_t draw();

/** What the device did wrong first, in words and as the error that the calls return from then on. */
extern std::string wrong;
extern cudaError_t sticky;
void found_wrong(const std::string &text, cudaError_t error);

/* -- threads.cc ---------------------------------------------------------------------------------------------------- */

/** Run all blocks of a grid. False: the kernel did something that `wrong` tells. @allowed: dynamic shared memory that
 *  cudaFuncSetAttribute has allowed its kernel; 0: it was not asked. */
bool run_grid(dim3 grid, dim3 block, size_t shared_bytes, size_t allowed, const call &kernel);
/** The running thread of a kernel did @text: its grid ends here. */
[[noreturn]] void give_up_kernel(const std::string &text, cudaError_t error);
/** Why the running thread must not touch @p, which is shared memory; "": it is not. */
std::string refused_shared(const void *p);

/** Of a thread of the block that runs, or ran last. */
std::string name_of(uint32_t block, uint32_t thread);
/** "shared memory", or "". */
bool is_shared(const void *p);

/** An allocation of the device, or an array of shared memory. */
struct extent {
    const char *from, *to;
    unsigned char *written; /* a bit for each byte: something has written it since it was allocated; NULL: nobody takes
                               notes */
};
/** The array of shared memory whose pages hold @p; false: none. */
bool shared_extent(const void *p, extent *out);

/* -- places.cc ----------------------------------------------------------------------------------------------------- */

/** The calls by which a thread came where it is: frames of functions, from the inner one up to the outer one. */
struct walk {
    const void *frame, *bottom;
};
/** A number of them all: that of another thread is the same only if it came by the same calls. */
uint64_t path_of(walk w);
/** "sparse.cu:123", and from where that was called, if it is inlined. @after: the instruction after a call, or an
 *  access. */
std::string line_of(const void *after);
/** The place of a thread in words: "scan.cuh:17 of mask.cu:45". */
std::string told(walk w);
/** The places of two threads in words that differ. */
void tell_apart(walk a, walk b, std::string *in_a, std::string *in_b);

/* -- races.cc ------------------------------------------------------------------------------------------------------ */

/** What orders the accesses of a thread. */
struct moment {
    uint32_t block;
    uint16_t thread, clock; /* clock: goes on at each __syncwarp */
    uint16_t seen[32];      /* the clock until which accesses of each lane of its warp come before its own */
    const char *stack, *stack_end;
};
extern const moment *now; /* of the running thread */
extern uint16_t barriers; /* of the running block, that opened */

/** May kernels touch this memory of the host, which is no constant of theirs? device.cc. */
bool reachable(const void *p);
/** Look for races, or not; where that is built in it does, until this is called. */
void races_choose(bool on);
/** Around a launch, and before each of its blocks. */
void races_begin(const call &kernel);
void races_block();
void races_end();
/** Around what the device does beside kernels, by code that is compiled with them. */
void races_work(bool begins);
/** Does anybody ask what was written? Where races are built in. */
extern const bool contents_matter;

/* -- memory.cc ----------------------------------------------------------------------------------------------------- */

enum : size_t { MEMORY = (size_t)3 << 30 };

/** While it lives, the calling thread plays the device. */
struct opened {
    opened();
    ~opened();
};
/** And for so long it is the host again. */
struct closed {
    closed();
    ~closed();
    int was;
};
/** Run @work; false: it touched what it must not (`wrong` tells). */
bool guarded(const std::function<void()> &work);

/** @ready: has the stream come to it? (Empty: yes.) */
cudaError_t take(void **out, size_t bytes, std::function<bool()> ready);
void give(void *p);
bool is_allocation(const void *p);
bool on_device(const void *p);
size_t memory_used();
/** The allocation whose pages hold @p; false: none that lives. */
bool extent_of(const void *p, extent *out);
/** Why the device must not touch these bytes; "": it may. */
std::string refused(const void *p, size_t bytes);
/** The device, or a copy, has written these bytes; @from: it has copied them, with what they are. */
void wrote(const void *p, size_t bytes, const void *from = nullptr);
/** "an allocation of 24 bytes, at byte 8"; "": not of the device. */
std::string where_is(const void *p);
/** Open memory of the device for a copy; host memory needs nothing. False: not all of it is there. */
bool reach(const void *p, size_t bytes);

} // namespace peri_cuda_host

#endif
