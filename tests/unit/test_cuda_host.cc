/* SPDX-License-Identifier: Apache-2.0
 *
 * test_cuda_host.cc: the pretended GPU (tests/cuda_host) finds what it is for. Each case is a small program of the device, right, and with
 * one fault in it; the right one gives the right result under every order of threads, and the fault is found: by its name, or by another
 * result under some order.
 * deadline: 120 s
 */
#include "kernels/cuda/cuda.h"

#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>
extern "C" {
#include <cmocka.h>
}

namespace {

enum { N = 256, WAYS = 4, SEEDS = 12 };
const char *const ways[WAYS] = {"forward", "backward", "random", "varied"};

/* -- a program of the device: in a process of its own ---------------------------------------------------------------------------------- */

cudaStream_t stream, other;
bool faulty;

peri_cuda_call on(cudaStream_t s)
{
    peri_cuda_call c = {};
    c.stream = s;
    c.processors = 2;
    return c;
}

template <class... P, class... A> void launch(void (*kernel)(P...), unsigned blocks, unsigned threads, size_t shared, A... args)
{
    peri_cuda_call c = on(stream);
    cudaError_t e = peri_cuda_launch(kernel, dim3(blocks), dim3(threads), shared, &c, args...);
    if (e != cudaSuccess) printf("launch: %s\n", cudaGetErrorName(e));
}

template <class T> T *room(size_t n, cudaStream_t s = nullptr)
{
    void *p = nullptr;
    if (cudaMallocAsync(&p, n * sizeof(T), s ? s : stream) != cudaSuccess) abort();
    return (T *)p;
}

template <class T> T *pinned(size_t n)
{
    void *p = nullptr;
    if (cudaHostAlloc(&p, n * sizeof(T), 0) != cudaSuccess) abort();
    return (T *)p;
}

/** Memory of the device that holds 0, 1, 2, ... */
int *numbers(size_t n)
{
    int *p = room<int>(n), *x = new int[n];
    for (size_t i = 0; i < n; i++) x[i] = (int)i;
    cudaMemcpyAsync(p, x, n * sizeof *x, cudaMemcpyHostToDevice, stream);
    delete[] x;
    return p;
}

bool holds(const int *p, int want)
{
    int got = 0;
    return cudaMemcpyAsync(&got, p, sizeof got, cudaMemcpyDeviceToHost, stream) == cudaSuccess && got == want;
}

void done()
{
    if (cudaDeviceSynchronize() != cudaSuccess) printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}

/** What became of a program. */
struct outcome {
    bool right, died;
    std::string text;
};

outcome run(bool (*program)(), bool with_fault, bool with_races, const char *way, int seed)
{
    int ends[2];
    if (pipe(ends) != 0) abort();
    fflush(nullptr);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 1);
        dup2(ends[1], 2);
        close(ends[0]);
        signal(SIGSEGV, SIG_DFL); /* cmocka catches them */
        signal(SIGABRT, SIG_DFL);
        alarm(60);
        peri_cuda_host_seed((uint64_t)seed);
        peri_cuda_host_order(way);
        peri_cuda_host_races(with_races);
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
        cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
        faulty = with_fault;
        bool right = program();
        done();
        if (cudaDeviceSynchronize() != cudaSuccess) right = false;
        fflush(stdout);
        _exit(right ? 0 : 1);
    }
    close(ends[1]);
    outcome o = {false, false, ""};
    char part[4096];
    for (ssize_t n; (n = read(ends[0], part, sizeof part)) > 0;) o.text.append(part, (size_t)n);
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    o.died = !WIFEXITED(status) || WEXITSTATUS(status) > 1;
    o.right = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    return o;
}

/** The right program is right under all orders, and nobody finds a race in it. */
void expect_right(bool (*program)())
{
    for (int w = 0; w < WAYS; w++)
        for (int seed = 1; seed <= 3; seed++) {
            outcome o = run(program, false, true, ways[w], seed);
            if (!o.right) fail_msg("without the fault, order %s, seed %d: %s", ways[w], seed, o.text.c_str());
        }
}

/** The right program is right; the faulty one is found, each time with all the words @named (but for the sanitizer, which is before us), or
 *  when there are none, by another result at one of the seeds. */
void expect_all(bool (*program)(), const std::vector<const char *> &named)
{
    int found = 0;
    expect_right(program);
    for (int seed = 1; seed <= SEEDS; seed++) {
        outcome o = run(program, true, false, "varied", seed);
        for (const char *words : named)
            if (o.right || (o.text.find(words) == std::string::npos && o.text.find("AddressSanitizer") == std::string::npos))
                fail_msg("with the fault, seed %d, wanted \"%s\": %s", seed, words, o.text.c_str());
        if (named.empty() && o.died) fail_msg("with the fault, seed %d: %s", seed, o.text.c_str());
        found += !o.right;
    }
    if (!found) fail_msg("the fault is not found");
}
void expect(bool (*program)(), const char *named) { expect_all(program, named ? std::vector<const char *>{named} : std::vector<const char *>{}); }

/** The right program is right, and the race in the faulty one is found under every order of threads, with all the words @named; @seen: by
 *  its result, too, at one of the seeds. */
void expect_race(bool (*program)(), bool seen, const std::vector<const char *> &named)
{
#if defined(PERI_CUDA_HOST_RACES)
    int wrong = 0;
    expect_right(program);
    for (int seed = 1; seed <= SEEDS; seed++) {
        outcome o = run(program, true, true, ways[seed % WAYS], seed);
        for (const char *words : named)
            if (o.right || o.text.find(words) == std::string::npos)
                fail_msg("with the fault, order %s, seed %d, wanted \"%s\": %s", ways[seed % WAYS], seed, words, o.text.c_str());
        wrong += !run(program, true, false, ways[seed % WAYS], seed).right;
    }
    if ((wrong > 0) != seen) fail_msg("without looking for races, the fault is found at %d of %d seeds", wrong, (int)SEEDS);
#else
    (void)program, (void)seen, (void)named;
    skip(); /* this sanitizer has the accesses */
#endif
}

/** The right program is right, and the fault is told with these words whatever the order of threads, where every access is looked at. */
void expect_told(bool (*program)(), const char *named)
{
#if defined(PERI_CUDA_HOST_RACES)
    expect_right(program);
    for (int seed = 1; seed <= WAYS; seed++) {
        outcome o = run(program, true, true, ways[seed % WAYS], seed);
        if (o.right || o.text.find(named) == std::string::npos)
            fail_msg("with the fault, order %s, seed %d, wanted \"%s\": %s", ways[seed % WAYS], seed, named, o.text.c_str());
    }
#else
    (void)program, (void)named;
    skip(); /* this sanitizer has the accesses */
#endif
}

#define TOLD(name, words) void name(void **) { expect_told(name##_program, words); }
#define CASE(name, words) void name(void **) { expect(name##_program, words); }
#define RACE_OF(name, seen, ...) void race_of_##name(void **) { expect_race(name##_program, seen, {"a race for ", __VA_ARGS__}); }
#define RACE(name, seen, ...) void name(void **) { expect_race(name##_program, seen, {"a race for ", __VA_ARGS__}); }

/* -- barriers of the block ------------------------------------------------------------------------------------------------------------- */

__global__ void block_sum(const int *x, int *y, bool fault)
{
    PERI_SHARED(int, s, N);
    int t = (int)threadIdx.x;
    s[t] = x[t];
    __syncthreads();
    for (int by = N / 2; by > 0; by /= 2) {
        if (t < by) s[t] += s[t + by];
        if (!fault) __syncthreads();
    }
    if (t == 0) *y = s[0];
}
bool missing_barrier_program()
{
    int *x = numbers(N), *y = room<int>(1);
    launch(block_sum, 1, N, 0, x, y, faulty);
    return holds(y, N * (N - 1) / 2);
}
CASE(missing_barrier, nullptr)

/** Two rounds through one buffer. */
__global__ void exchange(const int *x, int *y, bool fault)
{
    PERI_SHARED(int, s, N);
    int t = (int)threadIdx.x, sum = 0;
    for (int round = 0; round < 2; round++) {
        s[t] = x[t] * (round + 1);
        __syncthreads();
        sum += s[N - 1 - t];
        if (!fault) __syncthreads();
    }
    atomicAdd(y, sum == 3 * (N - 1 - t));
}
bool missing_barrier_before_reuse_program()
{
    int *x = numbers(N), *y = room<int>(1);
    cudaMemsetAsync(y, 0, sizeof *y, stream);
    launch(exchange, 1, N, 0, x, y, faulty);
    return holds(y, N);
}
CASE(missing_barrier_before_reuse, nullptr)

__global__ void diverge(int *y, bool fault)
{
    if (fault && threadIdx.x >= 100) __syncthreads();
    else
        __syncthreads();
    if (threadIdx.x == 0) *y = 7;
}
bool divergent_barriers_program()
{
    int *y = room<int>(1);
    launch(diverge, 1, N, 0, y, faulty);
    return holds(y, 7);
}
CASE(divergent_barriers, "is at the barrier of test_cuda_host.cc:")

__global__ void half_waits(int *y, bool fault)
{
    if (!fault || threadIdx.x % 2) __syncthreads();
    int all = __all_sync(0xffffffffu, 1);
    if (threadIdx.x == 0) *y = all;
}
bool barrier_of_some_threads_program()
{
    int *y = room<int>(1);
    launch(half_waits, 1, N, 0, y, faulty);
    return holds(y, 1);
}
CASE(barrier_of_some_threads, "nobody can go on")

/* -- operations of the warp ------------------------------------------------------------------------------------------------------------ */

__global__ void warp_sum(const int *x, int *y, bool fault)
{
    PERI_SHARED(int, s, 32);
    int t = (int)threadIdx.x;
    s[t] = x[t];
    __syncwarp();
    for (int by = 16; by > 0; by /= 2) {
        int mine = t < by ? s[t] + s[t + by] : 0;
        if (!fault) __syncwarp();
        if (t < by) s[t] = mine;
        if (!fault) __syncwarp();
    }
    if (t == 0) *y = s[0];
}
bool missing_syncwarp_program()
{
    int *x = numbers(32), *y = room<int>(1);
    launch(warp_sum, 1, 32, 0, x, y, faulty);
    return holds(y, 32 * 31 / 2);
}
CASE(missing_syncwarp, nullptr)

__global__ void shuffled_sum(int *y, unsigned mask)
{
    int x = (int)threadIdx.x;
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(mask, x, by);
    if (threadIdx.x == 0) *y = x;
}
bool mask_without_the_lane_program()
{
    int *y = room<int>(1);
    launch(shuffled_sum, 1, 32, 0, y, faulty ? 0x0000ffffu : 0xffffffffu);
    return holds(y, 32 * 31 / 2);
}
CASE(mask_without_the_lane, "is not in the mask of its own a shuffle")

/** The lanes of one half only. */
__global__ void half_shuffled(int *y, bool fault)
{
    int x = (int)threadIdx.x, t = x;
    if (t < 16)
        for (int by = 8; by > 0; by /= 2) x += __shfl_xor_sync(fault ? 0xffffffffu : 0x0000ffffu, x, by);
    __syncwarp();
    if (t == 0) *y = x;
}
bool mask_of_lanes_elsewhere_program()
{
    int *y = room<int>(1);
    launch(half_shuffled, 1, 32, 0, y, faulty);
    return holds(y, 16 * 15 / 2);
}
CASE(mask_of_lanes_elsewhere, "where other lanes of its mask have")

__global__ void from_a_lane_outside(int *y, bool fault)
{
    int t = (int)threadIdx.x, x = t;
    if (t < 16) x = __shfl_sync(0x0000ffffu, t + 1, fault ? 16 : 15);
    if (t == 0) *y = x;
}
bool shuffle_from_outside_the_mask_program()
{
    int *y = room<int>(1);
    launch(from_a_lane_outside, 1, 32, 0, y, faulty);
    return holds(y, faulty ? 17 : 16);
}
CASE(shuffle_from_outside_the_mask, nullptr)

/* -- places in the code: threads that should meet, and come from two of them ------------------------------------------------------------ */

/** What a thread does with others: each kind of it. */
enum { SYNCTHREADS, SYNCTHREADS_COUNT, SYNCWARP, SHUFFLE, BALLOT_OF, ANY, MATCH_OF, REDUCE };
template <int KIND> __device__ __forceinline__ int together(int x)
{
    const unsigned all = 0xffffffffu;
    if (KIND == SYNCTHREADS) __syncthreads();
    if (KIND == SYNCTHREADS_COUNT) x = __syncthreads_count(x);
    if (KIND == SYNCWARP) __syncwarp();
    if (KIND == SHUFFLE) x = __shfl_xor_sync(all, x, 0);
    if (KIND == BALLOT_OF) x = __ballot_sync(all, x) != 0;
    if (KIND == ANY) x = __any_sync(all, x);
    if (KIND == MATCH_OF) x = __match_any_sync(all, x) != 0;
    if (KIND == REDUCE) x = __reduce_or_sync(all, (unsigned)x) != 0;
    return x;
}
/** Two places in one line. */
const std::string fault_line = " of test_cuda_host.cc:" + std::to_string(__LINE__ + 4);
template <int KIND> __global__ void from_two_places(int *y, bool fault)
{
    int odd = threadIdx.x % 2, x = 1;
    if (fault) x = odd ? together<KIND>(1) : together<KIND>(1) + 0;
    else x = together<KIND>(1);
    if (threadIdx.x == 0) *y = x != 0;
}
template <int KIND> bool from_two_places_program()
{
    int *y = room<int>(1);
    launch(from_two_places<KIND>, 1, 64, 0, y, faulty);
    return holds(y, 1);
}
#define TWO_PLACES(name, KIND, words) \
    void two_places_of_##name(void **) { expect_all(from_two_places_program<KIND>, {words, fault_line.c_str(), " (before 0x"}); }
TWO_PLACES(syncthreads, SYNCTHREADS, "is at the barrier of test_cuda_host.cc:")
TWO_PLACES(syncthreads_count, SYNCTHREADS_COUNT, "is at the barrier of test_cuda_host.cc:")
TWO_PLACES(syncwarp, SYNCWARP, "is in __syncwarp at test_cuda_host.cc:")
TWO_PLACES(shuffle, SHUFFLE, "is in a shuffle at test_cuda_host.cc:")
TWO_PLACES(ballot, BALLOT_OF, "is in a vote at test_cuda_host.cc:")
TWO_PLACES(any, ANY, "is in a vote at test_cuda_host.cc:")
TWO_PLACES(match, MATCH_OF, "is in a match at test_cuda_host.cc:")
TWO_PLACES(reduce, REDUCE, "is in an or at test_cuda_host.cc:")

/** A function that is not inlined is one place only for those who called it at one place. */
__device__ __attribute__((noinline)) int scanned(int x)
{
    PERI_UNROLL
    for (int by = 1; by < 32; by *= 2) {
        int before = __shfl_up_sync(0xffffffffu, x, (unsigned)by);
        if (peri_lane() >= by) x += before;
    }
    return x;
}
__global__ void scan_of_picked(int *y, bool fault)
{
    bool picked = threadIdx.x % 3 == 0;
    int place = -1;
    if (!fault) {
        int upto = scanned(picked);
        if (picked) place = upto - 1;
    } else if (picked) {
        place = scanned(1) - 1;
    } else {
        scanned(0);
    }
    y[threadIdx.x] = place;
}
bool scan_at_two_places_program()
{
    int *y = room<int>(32);
    launch(scan_of_picked, 1, 32, 0, y, faulty);
    return holds(y + 30, 10) && holds(y + 31, -1);
}
CASE(scan_at_two_places, ", which should be there, too, is in a shuffle at test_cuda_host.cc:")

/** Groups of a warp that meet by themselves may be anywhere. */
__global__ void halves_apart(int *y)
{
    int t = (int)threadIdx.x, x = t;
    if (t < 16) x = __shfl_sync(0x0000ffffu, x, 3);
    else x = __shfl_sync(0xffff0000u, x, 19);
    y[t] = x;
}
bool groups_at_their_places_program()
{
    int *y = room<int>(32);
    launch(halves_apart, 1, 32, 0, y);
    return holds(y, 3) && holds(y + 31, 19);
}
void groups_at_their_places(void **) { expect_right(groups_at_their_places_program); }

/* -- shared memory --------------------------------------------------------------------------------------------------------------------- */

__global__ void shared_reader(int *y, int at)
{
    PERI_SHARED(int, s, 33);
    s[threadIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x == 0) *y = s[at];
}
bool past_shared_program()
{
    int *y = room<int>(1);
    launch(shared_reader, 1, 32, 0, y, faulty ? 33 : 31);
    return holds(y, 1);
}
CASE(past_shared, "past the end of shared memory of 132 bytes")

__global__ void dynamic_writer(int *y, int n)
{
    PERI_SHARED_DYNAMIC(int, s);
    for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) s[i] = i;
    __syncthreads();
    if (threadIdx.x == 0) *y = s[63];
}
bool past_dynamic_shared_program()
{
    int *y = room<int>(1);
    launch(dynamic_writer, 1, 32, 64 * sizeof(int), y, faulty ? 65 : 64);
    return holds(y, 63);
}
CASE(past_dynamic_shared, "past the end of shared memory of 256 bytes")

/** Within the 16 bytes that the end of dynamic shared memory is aligned to. */
bool shared_short_by_a_few_bytes_program()
{
    int *y = room<int>(1);
    launch(dynamic_writer, 1, 32, (faulty ? 65 : 66) * sizeof(int), y, 66);
    return holds(y, 63);
}
TOLD(shared_short_by_a_few_bytes, "reaches 4 bytes past the end of shared memory of 260 bytes, at test_cuda_host.cc:")

template <int N_> __global__ void arrays_of_shared(int *y)
{
    PERI_SHARED(int, s, N_);
    s[threadIdx.x] = 63;
    __syncthreads();
    if (threadIdx.x == 0) *y = s[31];
}
bool arrays_too_large_program()
{
    int *y = room<int>(1);
    launch(faulty ? arrays_of_shared<13 << 10> : arrays_of_shared<12 << 10>, 1, 32, 0, y);
    return holds(y, 63);
}
CASE(arrays_too_large, "has arrays of 53248 bytes of shared memory, allowed: 49152")

/** 40 KiB of arrays leave 8 of the 48 that need no word. */
bool arrays_and_dynamic_program()
{
    int *y = room<int>(1);
    launch(arrays_of_shared<10 << 10>, 1, 32, faulty ? 9 << 10 : 8 << 10, y);
    return holds(y, 63);
}
CASE(arrays_and_dynamic, "has 50176 bytes of shared memory, arrays and dynamic, allowed: 49152 without cudaFuncSetAttribute")
bool arrays_and_allowed_program()
{
    int *y = room<int>(1);
    auto kernel = arrays_of_shared<10 << 10>;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10) != cudaSuccess) return false;
    launch(kernel, 1, 32, (faulty ? 188 : 187) << 10, y);
    return holds(y, 63);
}
CASE(arrays_and_allowed, "has 233472 bytes of shared memory, arrays and dynamic, allowed: 232448")

bool too_much_shared_program()
{
    int *y = room<int>(1);
    if (!faulty && cudaFuncSetAttribute(dynamic_writer, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10) != cudaSuccess) return false;
    launch(dynamic_writer, 1, 32, 64 << 10, y, 64);
    return holds(y, 63);
}
CASE(too_much_shared, "launch: cudaErrorInvalidValue")

__global__ void reads_what_nobody_wrote(int *y, bool fault)
{
    PERI_SHARED(int, s, 4);
    if (!fault) s[0] = 0;
    *y = s[0];
}
bool shared_memory_of_noise_program()
{
    int *y = room<int>(1);
    launch(reads_what_nobody_wrote, 1, 1, 0, y, faulty);
    return holds(y, 0);
}
CASE(shared_memory_of_noise, nullptr)

/* -- memory of the device -------------------------------------------------------------------------------------------------------------- */

__global__ void sum_of(const int *x, int *y, int n)
{
    int sum = 0;
    for (int i = 0; i < n; i++) sum += x[i];
    *y = sum;
}
bool past_an_allocation_program()
{
    int *x = numbers(64), *y = room<int>(1);
    launch(sum_of, 1, 1, 0, x, y, faulty ? 65 : 64);
    return holds(y, 64 * 63 / 2);
}
CASE(past_an_allocation, "past the end of an allocation of 256 bytes")

__global__ void fill(int *y, int from, int n)
{
    for (int i = from; i < n; i++) y[i] = 1;
}
/** Within the alignment: found when the work has ended. */
bool write_past_an_odd_allocation_program()
{
    int *y = room<int>(50);
    launch(fill, 1, 1, 0, y, 0, faulty ? 51 : 50);
    return holds(y, 1);
}
CASE(write_past_an_odd_allocation, "bytes past the end of an allocation of 200 bytes")

bool write_before_an_allocation_program()
{
    int *y = room<int>(64);
    launch(fill, 1, 1, 0, y, faulty ? -1 : 0, 64);
    return holds(y, 1);
}
CASE(write_before_an_allocation, "bytes before an allocation of 256 bytes")

/** Within the alignment of what follows: no page is touched that is away, and nothing is written. */
bool read_past_an_odd_allocation_program()
{
    int *x = numbers(50), *y = room<int>(1);
    launch(sum_of, 1, 1, 0, x, y, faulty ? 51 : 50);
    return holds(y, 50 * 49 / 2);
}
TOLD(read_past_an_odd_allocation, "reaches 4 bytes past the end of an allocation of 200 bytes, at test_cuda_host.cc:")

/** A vector load of a row whose last one has less. */
__global__ void sum_of_vectors(const int *x, int *y, int rows, bool fault)
{
    int sum = 0;
    for (int r = 0; r < rows; r++) {
        const int *row = x + 6 * r;
        for (int c = 0; c + 2 <= (fault ? 8 : 6); c += 2) {
            const int2 v = *(const int2 *)(row + c);
            sum += c < 6 ? v.x + v.y : 0;
        }
    }
    *y = sum;
}
bool vector_past_the_last_row_program()
{
    int *x = numbers(18), *y = room<int>(1);
    launch(sum_of_vectors, 1, 1, 0, (const int *)x, y, 3, faulty);
    return holds(y, 18 * 17 / 2);
}
TOLD(vector_past_the_last_row, "reaches 8 bytes past the end of an allocation of 72 bytes, at test_cuda_host.cc:")

bool copy_too_long_program()
{
    int *x = numbers(64), got[65];
    cudaMemcpyAsync(got, x, (faulty ? 65 : 64) * sizeof *got, cudaMemcpyDeviceToHost, stream);
    return got[63] == 63;
}
CASE(copy_too_long, "past the end of an allocation of 256 bytes")

/** Four words from word @at on, as one vector. */
__global__ void load_vector(const int *x, int *y, int at) { *y = ((const int4 *)(x + at))->w; }
bool vector_at_an_odd_address_program()
{
    int *x = numbers(64), *y = room<int>(1);
    launch(load_vector, 1, 1, 0, x, y, faulty ? 5 : 4);
    return holds(y, 7);
}
CASE(vector_at_an_odd_address, "reaches for memory 4 bytes past a multiple of 16, at test_cuda_host.cc:")

__global__ void store_long(char *x, int at) { *(long long *)(x + at) = 7; }
bool word_at_an_odd_address_program()
{
    int *x = numbers(4);
    launch(store_long, 1, 1, 0, (char *)x, faulty ? 2 : 8);
    return holds(x + 2, 7);
}
CASE(word_at_an_odd_address, "reaches for memory 2 bytes past a multiple of 8, at test_cuda_host.cc:")

/** A pointer of the host is handed to a kernel: to memory that is not page-locked. */
bool pointer_of_the_host_program()
{
    int *page_locked = pinned<int>(1), *y = room<int>(1);
    std::vector<int> ordinary(1, 7);
    *page_locked = 7;
    launch(sum_of, 1, 1, 0, (const int *)(faulty ? ordinary.data() : page_locked), y, 1);
    return holds(y, 7);
}
TOLD(pointer_of_the_host, "reaches for memory of the host that is not page-locked, at test_cuda_host.cc:")

/** After a kernel has failed every call is its error, and nothing runs. */
bool failed_program()
{
    int *x = numbers(1), *locked = pinned<int>(1), *more;
    void *p = nullptr;
    cudaEvent_t event;
    cudaStream_t another;
    cudaEventCreateWithFlags(&event, 0);
    launch(load_vector, 1, 1, 0, (const int *)x, x, 1024); /* where nothing lies */
    bool right = cudaStreamSynchronize(stream) == cudaErrorIllegalAddress;
    const peri_cuda_call call = on(stream);
    const std::vector<std::function<cudaError_t()>> calls = {
        [&] { return cudaMallocAsync((void **)&more, 4, stream); },
        [&] { return cudaMalloc(&p, 4); },
        [&] { return cudaHostAlloc(&p, 4, 0); },
        [&] { return cudaMemcpyAsync(locked, x, 4, cudaMemcpyDeviceToHost, other); },
        [&] { return cudaMemsetAsync(x, 0, 4, other); },
        [&] { return cudaEventRecord(event, other); },
        [&] { return cudaEventQuery(event); },
        [&] { return cudaStreamWaitEvent(other, event, 0); },
        [&] { return cudaStreamCreateWithFlags(&another, cudaStreamNonBlocking); },
        [&] { return cudaLaunchHostFunc(other, [](void *) { abort(); }, nullptr); },
        [&] { return peri_cuda_launch(sum_of, dim3(1), dim3(1), 0, &call, (const int *)x, x, 1); },
        [&] { return cudaFreeAsync(x, stream); },
        [&] { return cudaDeviceSynchronize(); },
    };
    for (size_t i = 0; i < calls.size(); i++) {
        const cudaError_t error = calls[i]();
        if (error == cudaErrorIllegalAddress) continue;
        printf("call %zu: %s\n", i, cudaGetErrorName(error));
        right = false;
    }
    peri_cuda_host_forget();
    return right;
}
void failed(void **) { expect_right(failed_program); }

/** What a launch and a fill must not be asked. */
bool refused_calls_program()
{
    int *x = numbers(1), here = 0;
    const peri_cuda_call call = on(stream);
    const auto shape = [&](dim3 grid, dim3 block) { return peri_cuda_launch(sum_of, grid, block, 0, &call, (const int *)x, x, 1); };
    const struct {
        cudaError_t got, want;
    } cases[] = {
        {shape(dim3(1, 65536), 1), cudaErrorInvalidConfiguration},
        {shape(dim3(1, 1, 65536), 1), cudaErrorInvalidConfiguration},
        {shape(dim3(0), 1), cudaErrorInvalidConfiguration},
        {shape(dim3(1), dim3(1, 1, 65)), cudaErrorInvalidConfiguration},
        {shape(dim3(1), dim3(1025)), cudaErrorInvalidConfiguration},
        {cudaMemsetAsync(&here, 0, sizeof here, stream), cudaErrorInvalidValue},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (cases[i].got != cases[i].want) return printf("call %zu: %s\n", i, cudaGetErrorName(cases[i].got)), false;
    (void)cudaGetLastError();
    return holds(x, 0);
}
void refused_calls(void **) { expect_right(refused_calls_program); }

struct words_of_4_kib {
    int64_t of[512];
};
static_assert(peri_cuda_fits<words_of_4_kib> && !peri_cuda_fits<words_of_4_kib, char>, "arguments of a launch are counted together");

bool use_after_free_program()
{
    int *x = numbers(64), *y = room<int>(1);
    if (faulty) cudaFreeAsync(x, stream);
    launch(sum_of, 1, 1, 0, x, y, 64);
    if (!faulty) cudaFreeAsync(x, stream);
    return holds(y, 64 * 63 / 2);
}
CASE(use_after_free, "after its free")

bool free_twice_program()
{
    int *x = numbers(64);
    cudaFreeAsync(x, stream);
    if (faulty) cudaFreeAsync(x, stream);
    return true;
}
CASE(free_twice, "a free of what is no allocation")

/** Memory of one stream, used by another one. */
bool use_before_allocation_program()
{
    numbers(64); /* something that comes first */
    int *x = room<int>(1);
    cudaEvent_t there;
    cudaEventCreateWithFlags(&there, cudaEventDisableTiming);
    cudaEventRecord(there, stream);
    if (!faulty) cudaStreamWaitEvent(other, there, 0);
    cudaMemsetAsync(x, 0, sizeof *x, other);
    return cudaStreamSynchronize(other) == cudaSuccess;
}
CASE(use_before_allocation, nullptr)

/* -- graphs ---------------------------------------------------------------------------------------------------------------------------- */

__global__ void count_by(int *x, int by) { *x += by; }
__global__ void never_before(int *x) { *x = 0; }

/** What is captured runs when it is launched, each time with the arguments of its capture, and not before. */
bool captured_program()
{
    int *x = numbers(1), by = 3;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    launch(count_by, 1, 1, 0, x, 0); /* loads it */
    bool right = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess;
    launch(count_by, 1, 1, 0, x, by);
    cudaMemcpyAsync(x + 0, x, sizeof *x, cudaMemcpyDeviceToDevice, stream);
    launch(count_by, 1, 1, 0, x, 10);
    by = 1000;
    right = right && cudaStreamEndCapture(stream, &graph) == cudaSuccess && holds(x, 0);
    right = right && cudaGraphInstantiateWithFlags(&exec, graph, 0) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess;
    for (int i = 0; i < 2; i++) right = right && cudaGraphLaunch(exec, stream) == cudaSuccess;
    right = cudaGraphExecDestroy(exec) == cudaSuccess && right; /* what is launched still runs */
    return right && holds(x, 26);
}
void captured(void **) { expect_right(captured_program); }

/** Each call that must not be made while a stream captures is an error, and spoils the capture. */
bool spoiled_program()
{
    int *x = numbers(1), host[1];
    void *p = nullptr;
    cudaEvent_t before, within;
    cudaStream_t blocking = nullptr;
    const peri_cuda_call call = on(stream);
    cudaEventCreateWithFlags(&before, cudaEventDisableTiming);
    cudaEventCreateWithFlags(&within, cudaEventDisableTiming);
    cudaEventRecord(before, stream);
    const std::vector<std::function<cudaError_t()>> calls = {
        [&] { return cudaStreamSynchronize(stream); },
        [&] { return cudaStreamQuery(stream); },
        [&] { return cudaDeviceSynchronize(); },
        [&] { return cudaStreamSynchronize(other); },
        [&] { return cudaEventQuery(before); },
        [&] { return cudaEventSynchronize(before); },
        [&] { return cudaStreamWaitEvent(stream, before, 0); },
        [&] { return cudaEventRecord(within, stream) == cudaSuccess ? cudaStreamWaitEvent(other, within, 0) : cudaSuccess; },
        [&] { return cudaMalloc(&p, 4); },
        [&] { return cudaHostAlloc(&p, 4, 0); },
        [&] { return cudaMallocAsync(&p, 4, stream); },
        [&] { return cudaMallocAsync(&p, 4, other); },
        [&] { return cudaFreeAsync(x, stream); },
        [&] { return cudaMemcpyAsync(x, host, 4, cudaMemcpyHostToDevice, stream); },
        [&] { return cudaMemcpyAsync(host, x, 4, cudaMemcpyDeviceToHost, stream); },
        [&] { return cudaFreeAsync(x, other); },
        [&] { return cudaStreamCreateWithFlags(&blocking, cudaStreamNonBlocking); },
        [&] { return cudaStreamDestroy(stream); },
        [&] { return cudaMemPoolTrimTo(nullptr, 0); },
        [&] { return peri_cuda_launch(never_before, dim3(1), dim3(1), 0, &call, x); },
        [&] { return cudaStreamSynchronize(other) == cudaSuccess ? cudaSuccess : cudaMemsetAsync(x, 0, 4, stream); },
    };
    for (size_t i = 0; i < calls.size(); i++) {
        cudaGraph_t graph = nullptr;
        if (cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess) return false;
        const cudaError_t error = calls[i](), end = cudaStreamEndCapture(stream, &graph);
        (void)cudaGetLastError();
        if (error == cudaSuccess || end != cudaErrorStreamCaptureInvalidated || graph) {
            printf("call %zu: %s, the end %s\n", i, cudaGetErrorName(error), cudaGetErrorName(end));
            return false;
        }
    }
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed; /* who says that he knows may take memory on another stream */
    cudaGraph_t graph = nullptr;
    bool right = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess;
    cudaThreadExchangeStreamCaptureMode(&mode);
    right = right && cudaMallocAsync(&p, 4, other) == cudaSuccess;
    right = right && peri_cuda_launch(never_before, dim3(1), dim3(1), 0, &call, x) == cudaSuccess;
    cudaThreadExchangeStreamCaptureMode(&mode);
    right = cudaStreamEndCapture(stream, &graph) == cudaSuccess && right;
    return right && cudaGraphDestroy(graph) == cudaSuccess && cudaStreamBeginCapture(nullptr, mode) != cudaSuccess &&
           cudaGetLastError() == cudaErrorStreamCaptureUnsupported;
}
void spoiled(void **) { expect_right(spoiled_program); }

/** What a thread may do while another one captures, by how that one began, and whether it spoils the capture; stream 0 beside a stream that
 *  waits for it. */
bool beside_program()
{
    int *x = numbers(1);
    void *p = nullptr, *was = nullptr;
    cudaStream_t blocking;
    cudaStreamCreateWithFlags(&blocking, 0);
    const std::vector<std::function<cudaError_t()>> calls = {
        [&] { return cudaHostAlloc(&p, 4, 0); },
        [&] { return cudaFreeHost(was); },
        [&] { return cudaMemsetAsync(x, 1, 4, nullptr); },
        [&] { return cudaDeviceSynchronize(); },
    };
    const struct {
        cudaStream_t on;
        cudaStreamCaptureMode mode;
        std::vector<cudaError_t> errors; /* of the calls */
    } cases[] = {
        {stream, cudaStreamCaptureModeThreadLocal, {cudaSuccess, cudaSuccess, cudaSuccess, cudaErrorStreamCaptureUnsupported}},
        {stream, cudaStreamCaptureModeRelaxed, {cudaSuccess, cudaSuccess, cudaSuccess, cudaErrorStreamCaptureUnsupported}},
        {blocking, cudaStreamCaptureModeThreadLocal, {cudaSuccess, cudaSuccess, cudaErrorStreamCaptureImplicit, cudaErrorStreamCaptureUnsupported}},
        {stream, cudaStreamCaptureModeGlobal,
         {cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureUnsupported, cudaSuccess, cudaErrorStreamCaptureUnsupported}},
    };
    for (const auto &c : cases)
        for (size_t i = 0; i < calls.size(); i++) {
            cudaGraph_t graph = nullptr;
            cudaError_t error = cudaSuccess;
            was = pinned<int>(1);
            if (cudaStreamBeginCapture(c.on, c.mode) != cudaSuccess) return false;
            std::thread([&] { error = calls[i](); }).join();
            const cudaError_t end = cudaStreamEndCapture(c.on, &graph);
            (void)cudaGetLastError();
            if (error != c.errors[i] || end != (error == cudaSuccess ? cudaSuccess : cudaErrorStreamCaptureInvalidated)) {
                printf("mode %d, call %zu: %s, the end %s\n", c.mode, i, cudaGetErrorName(error), cudaGetErrorName(end));
                return false;
            }
            if (graph) cudaGraphDestroy(graph);
        }
    return true;
}
void beside(void **) { expect_right(beside_program); }

bool host_touches_program()
{
    int *x = numbers(64);
    cudaStreamSynchronize(stream);
    return faulty ? *(volatile int *)x == 0 : holds(x, 0);
}
CASE(host_touches, "the host touches device memory")

void touch(void *x) { *(volatile int *)x = 1; }
bool host_function_touches_program()
{
    int *x = numbers(64);
    static int mine;
    cudaLaunchHostFunc(stream, touch, faulty ? (void *)x : (void *)&mine);
    return cudaStreamSynchronize(stream) == cudaSuccess && mine == !faulty;
}
CASE(host_function_touches, "the host touches device memory")

/* -- memory that nothing has written --------------------------------------------------------------------------------------------------- */

__global__ void count_up(int *y, int n) { atomicAdd(&y[threadIdx.x % n], 1); }
bool counters_not_cleared_program()
{
    int *y = room<int>(4);
    if (!faulty) cudaMemsetAsync(y, 0, 4 * sizeof *y, stream);
    launch(count_up, 1, 64, 0, y, 4);
    return holds(y + 3, 16);
}
TOLD(counters_not_cleared, "loads 4 bytes of an allocation of 16 bytes, from byte ")

/** Scratch that comes again, at the same place and with what was left in it. */
bool scratch_not_cleared_program()
{
    for (int round = 0; round < 40; round++) {
        int *y = room<int>(1 << 20);
        if (!faulty || round == 0) cudaMemsetAsync(y, 0, 4 * sizeof *y, stream);
        launch(count_up, 1, 64, 0, y, 4);
        if (!holds(y + 3, 16)) return false;
        cudaFreeAsync(y, stream);
        cudaStreamSynchronize(stream);
    }
    return true;
}
TOLD(scratch_not_cleared, "that nothing has written, at test_cuda_host.cc:")

/** Only a part of an array is set up, and copied with the rest. */
bool part_not_written_program()
{
    int *x = room<int>(64), *y = room<int>(64), *sum = room<int>(1);
    launch(fill, 1, 1, 0, x, 0, faulty ? 63 : 64);
    cudaMemcpyAsync(y, x, 64 * sizeof *x, cudaMemcpyDeviceToDevice, stream);
    launch(sum_of, 1, 1, 0, y, sum, 64);
    return holds(sum, 64);
}
TOLD(part_not_written, "loads 4 bytes of an allocation of 256 bytes, from byte 252 on, that nothing has written")

/* -- streams --------------------------------------------------------------------------------------------------------------------------- */

bool copy_without_event_program()
{
    int *x = numbers(N), *y = room<int>(1), *got = pinned<int>(1);
    cudaDeviceSynchronize();
    cudaEvent_t summed;
    cudaEventCreateWithFlags(&summed, cudaEventDisableTiming);
    launch(block_sum, 1, N, 0, x, y, false);
    cudaEventRecord(summed, stream);
    if (!faulty) cudaStreamWaitEvent(other, summed, 0);
    cudaMemcpyAsync(got, y, sizeof *got, cudaMemcpyDeviceToHost, other);
    cudaStreamSynchronize(other);
    return *got == N * (N - 1) / 2;
}
CASE(copy_without_event, nullptr)

bool pinned_memory_changed_too_early_program()
{
    int *x = room<int>(1), *from = pinned<int>(1);
    *from = 4;
    cudaMemcpyAsync(x, from, sizeof *x, cudaMemcpyHostToDevice, stream);
    if (!faulty) cudaStreamSynchronize(stream);
    *from = 5;
    return holds(x, 4);
}
CASE(pinned_memory_changed_too_early, nullptr)

bool pinned_memory_read_too_early_program()
{
    int *x = numbers(64), *to = pinned<int>(1);
    *to = -1;
    cudaMemcpyAsync(to, x + 9, sizeof *to, cudaMemcpyDeviceToHost, stream);
    if (!faulty) cudaStreamSynchronize(stream);
    return *to == 9;
}
CASE(pinned_memory_read_too_early, nullptr)

/* -- races ----------------------------------------------------------------------------------------------------------------------------- */

int *zeros(size_t n)
{
    int *p = room<int>(n);
    cudaMemsetAsync(p, 0, n * sizeof *p, stream);
    return p;
}

__global__ void count_threads(int *y, bool fault)
{
    if (threadIdx.x % 64) return;
    if (fault) ++*y;
    else atomicAdd(y, 1);
}
bool counter_of_blocks_program()
{
    int *y = zeros(1);
    launch(count_threads, 5, 64, 0, y, faulty);
    launch(count_threads, 1, 64, 0, y, false); /* launches of a stream follow each other */
    return holds(y, 6);
}
RACE(counter_of_blocks, false, "4 bytes of an allocation of 4 bytes, from byte 0 on: thread (0, 0, 0) of block (",
     "blocks of a launch have no order", "loads at test_cuda_host.cc:", "stores at test_cuda_host.cc:")
bool counter_of_warps_program()
{
    int *y = zeros(1);
    launch(count_threads, 1, 256, 0, y, faulty);
    return holds(y, 4);
}
RACE(counter_of_warps, false, "of block (0, 0, 0)", "no __syncthreads or __syncwarp between them")

/** A histogram in shared memory, whose bins several lanes of a warp meet in. */
__global__ void histogram(const int *x, int *y, bool fault)
{
    PERI_SHARED(int, bins, 8);
    int t = (int)threadIdx.x;
    if (t < 8) bins[t] = 0;
    __syncwarp();
    if (fault) bins[x[t] % 8]++;
    else atomicAdd(&bins[x[t] % 8], 1);
    __syncwarp();
    if (t < 8) y[t] = bins[t];
}
/** Blocks write the same result to the same place. */
bool one_histogram_program()
{
    int *x = numbers(32), *y = room<int>(8);
    launch(histogram, faulty ? 2 : 1, 32, 0, x, y, false);
    return holds(y + 3, 4);
}
RACE(one_histogram, false, "from byte ", "blocks of a launch have no order")
bool histogram_of_one_warp_program()
{
    int *x = numbers(32), *y = room<int>(8);
    launch(histogram, 1, 32, 0, x, y, faulty);
    return holds(y + 3, 4);
}
RACE(histogram_of_one_warp, false, "4 bytes of shared memory", "no __syncthreads or __syncwarp between them")

RACE_OF(missing_barrier, true, "of shared memory", "no __syncthreads")
RACE_OF(missing_barrier_before_reuse, true, "of shared memory", "no __syncthreads")
RACE_OF(missing_syncwarp, true, "of shared memory", "no __syncthreads or __syncwarp")

/** A shuffle between store and load, which orders no memory, though all lanes meet there. */
__global__ void neighbours(int *y, bool fault)
{
    PERI_SHARED(int, s, 32);
    int t = (int)threadIdx.x;
    s[t] = t;
    if (fault) t = __shfl_sync(0xffffffffu, t, t);
    else __syncwarp();
    y[t] = s[(t + 1) % 32];
}
bool shuffle_instead_of_syncwarp_program()
{
    int *y = room<int>(32);
    launch(neighbours, 1, 32, 0, y, faulty);
    return holds(y + 31, 0);
}
RACE(shuffle_instead_of_syncwarp, false, "loads at", "after thread (", "no __syncthreads or __syncwarp")

/** The lanes of two halves wait for their own only. */
__global__ void halves(int *y, bool fault)
{
    PERI_SHARED(int, s, 32);
    int t = (int)threadIdx.x;
    unsigned half = t < 16 ? 0x0000ffffu : 0xffff0000u;
    s[t] = t;
    __syncwarp(half);
    y[t] = s[fault ? 31 - t : t ^ 15];
}
bool syncwarp_of_other_lanes_program()
{
    int *y = room<int>(32);
    launch(halves, 1, 32, 0, y, faulty);
    return holds(y + 20, faulty ? 11 : 27);
}
RACE(syncwarp_of_other_lanes, false, "no __syncthreads or __syncwarp")

/** A sum by atomic operations is read where all may not have added yet. */
__global__ void total(int *y, bool fault)
{
    PERI_SHARED(int, sum, 1);
    if (threadIdx.x == 0) *sum = 0;
    __syncthreads();
    atomicAdd(sum, 1);
    if (!fault) __syncthreads();
    if (threadIdx.x == 40) *y = *sum;
}
bool sum_read_too_early_program()
{
    int *y = room<int>(1);
    launch(total, 1, N, 0, y, faulty);
    return holds(y, N);
}
RACE(sum_read_too_early, true, "as a volatile or atomic access,", "no __syncthreads")

/** Least of what all see, with a look before: volatile loads and peri_load_beside go beside atomic operations; a plain store does not. */
__global__ void least(const int *x, int *y, int *z, bool fault)
{
    int t = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (*(volatile int *)y > x[t]) atomicMin(y, x[t]);
    if (peri_load_beside(z) < x[t]) {
        if (fault) *z = x[t] > *z ? x[t] : *z;
        else atomicMax(z, x[t]);
    }
}
bool look_before_atomic_program()
{
    int *x = numbers(N), *y = room<int>(1), *z = zeros(1);
    cudaMemcpyAsync(y, x + 77, sizeof *y, cudaMemcpyDeviceToDevice, stream);
    launch(least, 4, N / 4, 0, (const int *)x, y, z, faulty);
    return holds(y, 0) && holds(z, N - 1);
}
RACE(look_before_atomic, false, "of an allocation of 4 bytes")

/** Neighbouring bytes are threads' own; the same byte is not. */
__global__ void bytes(unsigned char *y, bool fault)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    y[fault && i == 200 ? 9 : i] = (unsigned char)i;
}
bool one_byte_program()
{
    unsigned char *y = room<unsigned char>(N);
    launch(bytes, 2, N / 2, 0, y, faulty);
    unsigned char got = 0;
    cudaMemcpyAsync(&got, y + 5, 1, cudaMemcpyDeviceToHost, stream);
    return cudaStreamSynchronize(stream) == cudaSuccess && got == 5;
}
RACE(one_byte, false, "a race for 1 bytes of an allocation of 256 bytes, from byte 9 on", "blocks of a launch have no order")

/** 16 bytes at once, and two of them by somebody else. */
__global__ void wide_and_narrow(float4 *y, bool fault)
{
    const float4 x = make_float4(1, 2, 3, 4); /* the result of a call goes into memory unseen, where nothing is optimized */
    unsigned short *narrow = (unsigned short *)y;
    if (blockIdx.x == 0) y[threadIdx.x] = x;
    else narrow[8 * (threadIdx.x + (fault ? 0 : 32)) + 5] = 7;
}
bool wide_and_narrow_program()
{
    float4 *y = room<float4>(64);
    launch(wide_and_narrow, 2, 32, 0, y, faulty);
    return cudaStreamSynchronize(stream) == cudaSuccess;
}
RACE(wide_and_narrow, false, "bytes of an allocation of 1024 bytes", "blocks of a launch have no order")

} // namespace

int main(void)
{
    const CMUnitTest tests[] = {
        cmocka_unit_test(missing_barrier),
        cmocka_unit_test(missing_barrier_before_reuse),
        cmocka_unit_test(divergent_barriers),
        cmocka_unit_test(barrier_of_some_threads),
        cmocka_unit_test(missing_syncwarp),
        cmocka_unit_test(mask_without_the_lane),
        cmocka_unit_test(mask_of_lanes_elsewhere),
        cmocka_unit_test(shuffle_from_outside_the_mask),
        cmocka_unit_test(two_places_of_syncthreads),
        cmocka_unit_test(two_places_of_syncthreads_count),
        cmocka_unit_test(two_places_of_syncwarp),
        cmocka_unit_test(two_places_of_shuffle),
        cmocka_unit_test(two_places_of_ballot),
        cmocka_unit_test(two_places_of_any),
        cmocka_unit_test(two_places_of_match),
        cmocka_unit_test(two_places_of_reduce),
        cmocka_unit_test(scan_at_two_places),
        cmocka_unit_test(groups_at_their_places),
        cmocka_unit_test(past_shared),
        cmocka_unit_test(past_dynamic_shared),
        cmocka_unit_test(too_much_shared),
        cmocka_unit_test(shared_short_by_a_few_bytes),
        cmocka_unit_test(arrays_too_large),
        cmocka_unit_test(arrays_and_dynamic),
        cmocka_unit_test(arrays_and_allowed),
        cmocka_unit_test(shared_memory_of_noise),
        cmocka_unit_test(past_an_allocation),
        cmocka_unit_test(write_past_an_odd_allocation),
        cmocka_unit_test(write_before_an_allocation),
        cmocka_unit_test(read_past_an_odd_allocation),
        cmocka_unit_test(vector_past_the_last_row),
        cmocka_unit_test(copy_too_long),
        cmocka_unit_test(vector_at_an_odd_address),
        cmocka_unit_test(word_at_an_odd_address),
        cmocka_unit_test(pointer_of_the_host),
        cmocka_unit_test(failed),
        cmocka_unit_test(refused_calls),
        cmocka_unit_test(use_after_free),
        cmocka_unit_test(free_twice),
        cmocka_unit_test(use_before_allocation),
        cmocka_unit_test(captured),
        cmocka_unit_test(beside),
        cmocka_unit_test(spoiled),
        cmocka_unit_test(host_touches),
        cmocka_unit_test(host_function_touches),
        cmocka_unit_test(counters_not_cleared),
        cmocka_unit_test(scratch_not_cleared),
        cmocka_unit_test(part_not_written),
        cmocka_unit_test(copy_without_event),
        cmocka_unit_test(pinned_memory_changed_too_early),
        cmocka_unit_test(pinned_memory_read_too_early),
        cmocka_unit_test(counter_of_blocks),
        cmocka_unit_test(counter_of_warps),
        cmocka_unit_test(one_histogram),
        cmocka_unit_test(histogram_of_one_warp),
        cmocka_unit_test(race_of_missing_barrier),
        cmocka_unit_test(race_of_missing_barrier_before_reuse),
        cmocka_unit_test(race_of_missing_syncwarp),
        cmocka_unit_test(shuffle_instead_of_syncwarp),
        cmocka_unit_test(syncwarp_of_other_lanes),
        cmocka_unit_test(sum_read_too_early),
        cmocka_unit_test(look_before_atomic),
        cmocka_unit_test(one_byte),
        cmocka_unit_test(wide_and_narrow),
    };
    return cmocka_run_group_tests(tests, nullptr, nullptr);
}
