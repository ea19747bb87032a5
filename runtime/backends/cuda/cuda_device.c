/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda_device.c: the device contract (runtime/plugin/device.h) on the CUDA runtime; kernels and operations are
 * kernels/cuda's. Memory comes from the device's stream-ordered pool, which keeps what is freed. Built against
 * tests/cuda_host it is the device `cuda_host`.
 */
#include "../../../kernels/cuda/blas.h"
#include "../../../kernels/cuda/table.h"
#include "../../plugin/fault.h"
#include "../../plugin/device.h"
#include "pinned_ring.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

static const peri_plugin_host *host;

#if defined(PERI_CUDA_HOST)
#define NAME "cuda_host"
#else
#define NAME "cuda"
#endif

/** A GPU that was opened. */
typedef struct gpu {
    int32_t index, processors;
    atomic_int mapped; /* blocks of the host's memory that its kernels work in */
    void *blas;
    peri__stage *stage; /* of copies from memory that is not known to be page-locked */
} gpu;

enum { GPUS_MOST = 64, LEAST_ARCH = 8 /* compute capability of the oldest kernels that are built */ };

static const char *const names[PERI_WORK_COUNT] = {
#define X(name, args) [PERI_K_##name] = #name,
    PERI_KERNELS(X)
#undef X
#define X(name, args) [PERI_OP_##name] = #name,
        PERI_OPS(X)
#undef X
};

/** A CUDA error as a status, with its name and words. @what: the call or the kernel. */
static peri_status failed(const gpu *g, cudaError_t error, const char *what)
{
    (void)cudaGetLastError(); /* else the next launch would report it again */
    peri_status status = error == cudaErrorMemoryAllocation ? PERI_ENOMEM : PERI_EINTERNAL;
    return PERI_HOST_FAIL(host, status, "%s:%d: %s: %s: %s", NAME, g ? g->index : 0, what, cudaGetErrorName(error),
                          cudaGetErrorString(error));
}

/**
 * The calling thread's later calls are for @g. Set anew at each call, which takes some 20 ns: the program around may
 * have chosen another device since. An error that other code left behind is forgotten: launches report the thread's
 * last error as theirs.
 */
static peri_status use(const gpu *g)
{
    (void)cudaGetLastError();
    cudaError_t error = cudaSetDevice(g->index);
    return error == cudaSuccess ? PERI_OK : failed(g, error, "cudaSetDevice");
}

/** Whether the calling thread is capturing a graph. */
static _Thread_local bool capturing;

/** A thread that captures may not take memory on any stream, nor launch a kernel for the first time, which loads it (a
 *  driver before CUDA 12.3 refuses that), unless it says that it knows what it does. @mode: Relaxed; call it again to
 *  take that back. */
static void excuse(enum cudaStreamCaptureMode *mode)
{
    if (capturing && cudaThreadExchangeStreamCaptureMode(mode) != cudaSuccess) (void)cudaGetLastError();
}

#define TRY(g, call) \
    do { \
        peri_status status_ = use(g); \
        cudaError_t error_ = status_ < 0 ? cudaSuccess : (call); \
        if (status_ < 0) return status_; \
        if (error_ != cudaSuccess) return failed(g, error_, #call); \
    } while (0)

/* -- opening ------------------------------------------------------------------------------------------------------- */

/** Is GPU @index, of which *p tells, one that the kernels run on? Else @reason says why not. */
static bool usable(int index, struct cudaDeviceProp *p, char *reason, size_t len)
{
    cudaError_t error = cudaGetDeviceProperties(p, index);
    int pools = 0;
    if (error != cudaSuccess) snprintf(reason, len, "GPU %d: %s", index, cudaGetErrorString(error));
    else if (p->major < LEAST_ARCH)
        snprintf(reason, len, "GPU %d (%s) has compute capability %d.%d, wanted %d.0 or later", index, p->name,
                 p->major, p->minor, LEAST_ARCH);
    else if (cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, index) != cudaSuccess || !pools)
        snprintf(
            reason, len,
            "GPU %d (%s) has no stream-ordered memory: its driver is too old or a mode of virtualization forbids it",
            index, p->name);
    else return true;
    (void)cudaGetLastError();
    return false;
}

/** "0: NVIDIA H200, 140 GiB, compute capability 9.0, reaches 1 2; 1: ...": what `perilune info` prints. Returns whether
 *  one of them can be used. */
static bool describe_all(int count, char *text, size_t len)
{
    bool any = false;
    size_t used = 0;
    for (int i = 0; i < count; i++) {
        struct cudaDeviceProp p;
        char why[400];
        used = used < len ? used : len; /* no room: it is cut off */
        if (!usable(i, &p, why, sizeof why)) {
            used += (size_t)snprintf(text + used, len - used, "%s%s", i ? "; " : "", why);
            continue;
        }
        any = true;
        used += (size_t)snprintf(text + used, len - used, "%s%d: %s, %.0f GiB, compute capability %d.%d", i ? "; " : "",
                                 i, p.name, (double)p.totalGlobalMem / (1 << 30), p.major, p.minor);
        for (int k = 0, links = 0; k < count && used < len; k++) {
            int can = 0;
            if (k != i && cudaDeviceCanAccessPeer(&can, i, k) != cudaSuccess) (void)cudaGetLastError();
            if (!can) continue;
            used += (size_t)snprintf(text + used, len - used, links++ ? " %d" : ", reaches %d", k);
        }
    }
    return any;
}

static peri_status device_probe(char *reason, size_t len)
{
    int count = 0, driver = 0, runtime = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    (void)cudaGetLastError();
    if (error != cudaSuccess && error != cudaErrorNoDevice) {
        (void)cudaDriverGetVersion(&driver);
        (void)cudaRuntimeGetVersion(&runtime);
        if (driver == 0) snprintf(reason, len, "no NVIDIA driver is installed (%s)", cudaGetErrorString(error));
        else
            snprintf(reason, len, "%s (the driver serves CUDA %d.%d, this is built with %d.%d)",
                     cudaGetErrorString(error), driver / 1000, driver / 10 % 100, runtime / 1000, runtime / 10 % 100);
        return PERI_EUNSUPPORTED;
    }
    if (error == cudaErrorNoDevice || count == 0) {
        snprintf(reason, len, "the driver sees no GPU (CUDA_VISIBLE_DEVICES hides them, if it is set)");
        return PERI_EUNSUPPORTED;
    }
    return describe_all(count, reason, len) ? PERI_OK : PERI_EUNSUPPORTED;
}

/** The GPU of a rank that asks for none by its number: the next one for each rank of the machine, round and round. */
static int32_t own_index(int count)
{
    static const char *const names_of_rank[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID",
                                                "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK"};
    for (size_t i = 0; i < sizeof names_of_rank / sizeof *names_of_rank; i++) {
        const char *text = secure_getenv(names_of_rank[i]);
        if (text && *text) return (int32_t)(atoi(text) > 0 ? atoi(text) % count : 0);
    }
    return 0;
}

static void device_close(void *device)
{
    gpu *g = device;
    if (use(g) == PERI_OK) peri__stage_delete(host, g->stage);
    peri_cuda_blas_delete(g->blas);
    host->free(g);
}

/** What an opened GPU needs. */
static peri_status prepare(gpu *g)
{
    cudaMemPool_t pool;
    uint64_t keep = UINT64_MAX;
    int processors = 0;
    TRY(g, cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, g->index));
    TRY(g, cudaDeviceGetDefaultMemPool(&pool, g->index));
    /* keep what is freed: a step asks for the same again */
    TRY(g, cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
    TRY(g, peri__stage_new(host, &g->stage));
    g->processors = processors;
    TRY(g, peri_cuda_blas_new(&g->blas));
    return PERI_OK;
}

static peri_status device_open(int32_t *number, void **device, int32_t *caps)
{
    char reason[400];
    struct cudaDeviceProp p;
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) (void)cudaGetLastError();
    int32_t index = *number < 0 && count > 0 ? own_index(count) : *number;
    if (index < 0 || index >= count || index >= GPUS_MOST)
        return PERI_HOST_FAIL(host, PERI_ENOTFOUND, "%s: device %d, allowed: 0 to %d", NAME, index, count - 1);
    if (!usable(index, &p, reason, sizeof reason))
        return PERI_HOST_FAIL(host, PERI_EUNSUPPORTED, "%s: %s", NAME, reason);
    gpu *g = host->alloc_zero(sizeof *g);
    if (!g) return PERI_ENOMEM;
    g->index = index;
    peri_status status = prepare(g);
    if (status < 0) return device_close(g), status;
    *number = index;
    *device = g;
    *caps = 0;
    return PERI_OK;
}

/* -- memory -------------------------------------------------------------------------------------------------------- */

static peri_status device_alloc(void *device, void *stream, int64_t bytes, void **out)
{
    if (host->fault(PERI_FAULT_device_alloc))
        return PERI_HOST_FAIL(host, PERI_ENOMEM, "%s: no memory for %lld bytes", NAME, (long long)bytes);
    gpu *g = device;
    peri_status status = use(g);
    if (status < 0) return status;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    excuse(&mode);
    cudaError_t error = cudaMallocAsync(out, (size_t)(bytes > 0 ? bytes : 1), stream);
    excuse(&mode);
    if (error == cudaSuccess) return PERI_OK;
    (void)cudaGetLastError();
    if (error != cudaErrorMemoryAllocation) return failed(g, error, "cudaMallocAsync");
    size_t free_bytes = 0, total = 0;
    if (cudaMemGetInfo(&free_bytes, &total) != cudaSuccess) (void)cudaGetLastError();
    return PERI_HOST_FAIL(host, PERI_ENOMEM, "%s:%d: no memory for %lld bytes (%zu of %zu are free)", NAME, g->index,
                          (long long)bytes, free_bytes, total);
}

static void device_free(void *device, void *stream, void *p, int64_t bytes)
{
    (void)bytes;
    if (use(device) == PERI_OK && cudaFreeAsync(p, stream) != cudaSuccess) (void)cudaGetLastError();
}

static peri_status device_host_alloc(void *device, int64_t bytes, void **out)
{
    gpu *g = device;
    TRY(g, cudaHostAlloc(out, (size_t)(bytes > 0 ? bytes : 1), cudaHostAllocPortable));
    return PERI_OK;
}

static void device_host_free(void *device, void *p, int64_t bytes)
{
    (void)bytes;
    if (use(device) == PERI_OK && cudaFreeHost(p) != cudaSuccess) (void)cudaGetLastError();
}

/** Memory of the host, pinned, which has one address for the host and for all GPUs. */
static peri_status device_mapped_alloc(void *device, void *stream, int64_t bytes, void **out)
{
    (void)stream;
    if (host->fault(PERI_FAULT_device_alloc))
        return PERI_HOST_FAIL(host, PERI_ENOMEM, "%s: no memory for %lld bytes", NAME, (long long)bytes);
    gpu *g = device;
    peri_status status = use(g);
    if (status < 0) return status;
    cudaError_t error =
        cudaHostAlloc(out, (size_t)(bytes > 0 ? bytes : 1), cudaHostAllocPortable | cudaHostAllocMapped);
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        return PERI_HOST_FAIL(host, PERI_ENOMEM, "%s:%d: the host has no memory that could be pinned for %lld bytes",
                              NAME, g->index, (long long)bytes);
    }
    if (error != cudaSuccess) return failed(g, error, "cudaHostAlloc");
    atomic_fetch_add(&g->mapped, 1);
    return PERI_OK;
}

static void device_mapped_free(void *device, void *stream, void *p, int64_t bytes)
{
    (void)bytes;
    gpu *g = device;
    if (use(g) != PERI_OK) return;
    if (cudaStreamSynchronize(stream) != cudaSuccess || cudaFreeHost(p) != cudaSuccess) (void)cudaGetLastError();
    atomic_fetch_sub(&g->mapped, 1);
}

/** What the driver has left, and what the pool keeps without using it. */
static peri_status device_memory(void *device, int64_t *available)
{
    gpu *g = device;
    cudaMemPool_t pool;
    size_t free_bytes = 0, total = 0;
    uint64_t kept = 0, used = 0;
    TRY(g, cudaMemGetInfo(&free_bytes, &total));
    TRY(g, cudaDeviceGetDefaultMemPool(&pool, g->index));
    TRY(g, cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &kept));
    TRY(g, cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used));
    *available = (int64_t)(free_bytes + kept - used);
    return PERI_OK;
}

static peri_status device_trim(void *device)
{
    gpu *g = device;
    cudaMemPool_t pool;
    TRY(g, cudaDeviceGetDefaultMemPool(&pool, g->index));
    TRY(g, cudaMemPoolTrimTo(pool, 0));
    return PERI_OK;
}

/** The address on the bus by which NCCL too tells GPUs apart. */
static peri_status device_place(void *device, char *text, size_t len)
{
    gpu *g = device;
    struct cudaDeviceProp p;
    TRY(g, cudaGetDeviceProperties(&p, g->index));
    snprintf(text, len, "%04x:%02x:%02x.0", (unsigned)p.pciDomainID, (unsigned)p.pciBusID, (unsigned)p.pciDeviceID);
    return PERI_OK;
}

/* -- streams and events -------------------------------------------------------------------------------------------- */

static peri_status stream_new(void *device, void **stream)
{
    gpu *g = device;
    TRY(g, cudaStreamCreateWithFlags((cudaStream_t *)stream, cudaStreamNonBlocking));
    return PERI_OK;
}

static void stream_delete(void *device, void *stream)
{
    if (use(device) == PERI_OK && cudaStreamDestroy(stream) != cudaSuccess) (void)cudaGetLastError();
}

static peri_status stream_sync(void *device, void *stream)
{
    gpu *g = device;
    TRY(g, cudaStreamSynchronize(stream));
    return PERI_OK;
}

static peri_status stream_wait(void *device, void *stream, void *event)
{
    gpu *g = device;
    TRY(g, cudaStreamWaitEvent(stream, event, 0));
    return PERI_OK;
}

static peri_status event_new(void *device, void **event)
{
    gpu *g = device;
    TRY(g, cudaEventCreateWithFlags((cudaEvent_t *)event, cudaEventDisableTiming));
    return PERI_OK;
}

static void event_delete(void *device, void *event)
{
    if (use(device) == PERI_OK && cudaEventDestroy(event) != cudaSuccess) (void)cudaGetLastError();
}

static peri_status event_record(void *device, void *event, void *stream)
{
    gpu *g = device;
    TRY(g, cudaEventRecord(event, stream));
    return PERI_OK;
}

static peri_status event_query(void *device, void *event)
{
    gpu *g = device;
    peri_status status = use(g);
    if (status < 0) return status;
    cudaError_t error = cudaEventQuery(event);
    if (error == cudaSuccess) return PERI_OK;
    (void)cudaGetLastError();
    return error == cudaErrorNotReady ? PERI_PENDING : failed(g, error, "cudaEventQuery");
}

static peri_status event_sync(void *device, void *event)
{
    gpu *g = device;
    TRY(g, cudaEventSynchronize(event));
    return PERI_OK;
}

/* -- work ---------------------------------------------------------------------------------------------------------- */

static peri_status device_copy(void *device, void *stream, void *dst, const void *src, int64_t bytes, int32_t kind)
{
    static const enum cudaMemcpyKind kinds[] = {[PERI_COPY_D2D] = cudaMemcpyDeviceToDevice,
                                                [PERI_COPY_H2D] = cudaMemcpyHostToDevice,
                                                [PERI_COPY_H2D_PINNED] = cudaMemcpyHostToDevice,
                                                [PERI_COPY_D2H] = cudaMemcpyDeviceToHost,
                                                [PERI_COPY_H2D_WORDS] = cudaMemcpyHostToDevice};
    gpu *g = device;
    /* With mapped memory about, a tensor of the device may lie on the host: the driver knows by its address. */
    enum cudaMemcpyKind direction = atomic_load(&g->mapped) ? cudaMemcpyDefault : kinds[kind];
    if (bytes <= 0) return PERI_OK;
    if (kind == PERI_COPY_H2D || kind == PERI_COPY_H2D_WORDS)
        TRY(g, peri__stage_copy(g->stage, dst, src, bytes, direction, stream));
    else TRY(g, cudaMemcpyAsync(dst, src, (size_t)bytes, direction, stream));
    return PERI_OK;
}

static peri_status device_launch(void *device, void *stream, int32_t kernel, const void *args, int64_t args_size,
                                 int64_t n, int64_t grain)
{
    (void)args_size, (void)grain;
    gpu *g = device;
    peri_status status = use(g);
    if (status < 0 || n <= 0) return status;
    peri_cuda_call call = {.stream = stream, .processors = g->processors, .blas = g->blas};
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    excuse(&mode);
    cudaError_t error = peri_cuda_table[kernel].kernel(args, 0, n, &call);
    excuse(&mode);
    return error == cudaSuccess ? PERI_OK : failed(g, error, names[kernel]);
}

static bool device_has(void *device, int32_t work, const void *args)
{
    if (work < 0 || work >= PERI_WORK_COUNT) return false;
    return work != PERI_OP_gemm || !args || (use(device) == PERI_OK && peri_cuda_has_gemm(args));
}

/** CUB's sizes depend on the current device. A size that could not be asked for has left its error with the thread. */
static int64_t device_scratch(void *device, int32_t op, const void *args)
{
    gpu *g = device;
    peri_status status = use(g);
    if (status < 0) return status;
    int64_t bytes = peri_cuda_table[op].scratch(args);
    cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? bytes : failed(g, error, names[op]);
}

static peri_status device_run(void *device, void *stream, int32_t op, const void *args, int64_t args_size,
                              void *scratch, int64_t scratch_bytes)
{
    (void)args_size;
    gpu *g = device;
    peri_status status = use(g);
    if (status < 0) return status;
    peri_cuda_call call = {
        .stream = stream, .scratch = scratch, .bytes = scratch_bytes, .processors = g->processors, .blas = g->blas};
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    excuse(&mode);
    cudaError_t error = peri_cuda_table[op].op(args, &call);
    excuse(&mode);
    return error == cudaSuccess ? PERI_OK : failed(g, error, names[op]);
}

/* -- graphs -------------------------------------------------------------------------------------------------------- */

/** Calls of this thread that could make a capture depend on what other streams do are errors meanwhile; other threads
 *  may do what they like (loaders pin memory). */
static peri_status capture_begin(void *device, void *stream)
{
    gpu *g = device;
    TRY(g, cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    capturing = true;
    return PERI_OK;
}

static peri_status capture_end(void *device, void *stream, void **graph)
{
    gpu *g = device;
    cudaGraph_t captured = NULL;
    cudaGraphExec_t made = NULL;
    capturing = false;
    TRY(g, cudaStreamEndCapture(stream, &captured));
    cudaError_t error = graph ? cudaGraphInstantiateWithFlags(&made, captured, 0) : cudaSuccess;
    if (cudaGraphDestroy(captured) != cudaSuccess) (void)cudaGetLastError();
    if (error != cudaSuccess) return failed(g, error, "cudaGraphInstantiateWithFlags");
    if (graph) *graph = made;
    return PERI_OK;
}

static peri_status graph_launch(void *device, void *graph, void *stream)
{
    gpu *g = device;
    TRY(g, cudaGraphLaunch(graph, stream));
    return PERI_OK;
}

static void graph_delete(void *device, void *graph)
{
    if (use(device) == PERI_OK && cudaGraphExecDestroy(graph) != cudaSuccess) (void)cudaGetLastError();
}

#if defined(PERI_CUDA_HOST)
static void device_seed(void *device, uint64_t seed)
{
    (void)device;
    peri_cuda_host_seed(seed);
}
#endif

static const peri_device_vtab vtab = {
    .size = sizeof vtab,
    .abi = PERI_DEVICE_ABI,
    .name = NAME,
    .work = peri_work_list,
    .probe = device_probe,
    .open = device_open,
    .close = device_close,
    .alloc = device_alloc,
    .free = device_free,
    .host_alloc = device_host_alloc,
    .host_free = device_host_free,
    .stream_new = stream_new,
    .stream_delete = stream_delete,
    .stream_sync = stream_sync,
    .stream_wait = stream_wait,
    .event_new = event_new,
    .event_delete = event_delete,
    .event_record = event_record,
    .event_query = event_query,
    .event_sync = event_sync,
    .copy = device_copy,
    .launch = device_launch,
    .has = device_has,
    .scratch = device_scratch,
    .run = device_run,
    .mapped_alloc = device_mapped_alloc,
    .mapped_free = device_mapped_free,
    .memory = device_memory,
    .place = device_place,
    .trim = device_trim,
    .capture_begin = capture_begin,
    .capture_end = capture_end,
    .graph_launch = graph_launch,
    .graph_delete = graph_delete,
#if defined(PERI_CUDA_HOST)
    .seed = device_seed,
#endif
};

/** A setting that the driver reads when a process first uses it; what the user has set stays. Streams share the
 *  driver's queues, 8 of them unless more are asked for, and a kernel of an exchange that waits for another rank would
 *  hold up whatever shares its queue. */
static void set_up_driver(void) { setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); }

__attribute__((visibility("default"))) const peri_device_vtab *peri_device_entry_v1(const peri_plugin_host *lent);
const peri_device_vtab *peri_device_entry_v1(const peri_plugin_host *lent)
{
    if (!peri_plugin_host_take(&host, lent)) return NULL;
    set_up_driver();
    return &vtab;
}
