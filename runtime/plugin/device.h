/* SPDX-License-Identifier: Apache-2.0
 *
 * plugin/device.h (L1): the device contract: memory, streams, events, copies, kernels, operations.
 *
 * Laws of the contract
 * - Work queued on one stream runs in order; between streams only events order it. Nothing that is queued need have run
 *   when the call returns. The core never assumes more, and the device `opaque` never gives more.
 * - Device pointers are only ever dereferenced by kernels and copies of their device.
 * - Arguments of kernels and operations are plain structs, copied at launch, which hold device pointers and numbers:
 * never host pointers.
 * - The core launches kernels and operations (kernels/kernels.h), never the steps of another device's operations. How
 *   an operation is split, and what memory that takes, the device alone knows: the core asks for the bytes and lends
 *   them for the call.
 * - alloc and free are ordered by a stream: memory may be reused as soon as the stream has passed the free.
 * - Calls on one device may come from several threads; calls on one stream come from one thread at a time.
 */
#ifndef PERI_PLUGIN_DEVICE_H
#define PERI_PLUGIN_DEVICE_H

#include "host.h"

enum {
    PERI_DEVICE_ABI = 7,       /* of this header */
    PERI_DEVICE_ABI_LOWEST = 7 /* the oldest contract whose backends this core still takes */
};

/** Capabilities. */
enum {
    PERI_DEVICE_HOST_ACCESS = 1, /* the host may read and write this device's memory whenever its streams are idle */
    PERI_DEVICE_IMMEDIATE = 2    /* queued work has run when the call returns */
};

/** What a copy connects. */
enum {
    PERI_COPY_D2D = 0,
    PERI_COPY_H2D = 1,        /* @src is ordinary host memory, consumed before the call returns */
    PERI_COPY_H2D_PINNED = 2, /* @src comes from host_alloc and must stay unchanged until the copy has run */
    PERI_COPY_D2H = 3,        /* @dst (any host memory) is valid once the copy has run, and must live until then */
    /* As H2D; @src are 64-bit words, and some may be addresses in the device's memory, such as a list of tensors' data
     * that a kernel follows. Addresses reach device memory by this kind only, so that a device whose kernels see its
     * memory elsewhere can translate them on the way; any other kind copies bytes as they are. */
    PERI_COPY_H2D_WORDS = 4
};

struct peri_work_entry;

typedef struct peri_device_vtab {
    uint32_t size, abi; /* sizeof this struct, of which the core takes no more; the lowest contract that the backend
                           needs */
    const char *name;   /* "cpu" */
    /* What it was compiled with: &peri_work_list of kernels/kernels.h. The numbers of kernels and operations that it is
     * called with are those of this list. What has another name here, or other arguments, the device has not. */
    const struct peri_work_entry *(*work)(int32_t *count);
    /* Usable here? PERI_OK, and in @reason what there is, if there is more to say than that; or PERI_EUNSUPPORTED and a
     * sentence in it. Local. */
    peri_status (*probe)(char *reason, size_t len);
    /* Open device number *@index; -1: none was named: the backend's choice, which becomes *@index where devices of this
     * kind have numbers (ranks that share a machine then take one each). Where there is only one, it becomes -1:
     * "cpu:0" is "cpu". @caps gets PERI_DEVICE_* flags. */
    peri_status (*open)(int32_t *index, void **device, int32_t *caps);
    void (*close)(void *device);

    /* Memory. alloc never returns NULL with PERI_OK, also for 0 bytes; at least 64-byte aligned; not cleared. */
    peri_status (*alloc)(void *device, void *stream, int64_t bytes, void **out);
    void (*free)(void *device, void *stream, void *p, int64_t bytes);
    /* Host memory that copies can use while queued (pinned). (optional: the core's heap) */
    peri_status (*host_alloc)(void *device, int64_t bytes, void **out);
    void (*host_free)(void *device, void *p, int64_t bytes);

    /* Streams and events. stream_delete and event_delete let queued work finish on its own. */
    peri_status (*stream_new)(void *device, void **stream);
    void (*stream_delete)(void *device, void *stream);
    peri_status (*stream_sync)(void *device, void *stream); /* blocks */
    peri_status (*stream_wait)(void *device, void *stream, void *event);
    peri_status (*event_new)(void *device, void **event);
    void (*event_delete)(void *device, void *event);
    peri_status (*event_record)(void *device, void *event, void *stream);
    peri_status (*event_query)(void *device, void *event); /* PERI_OK or PERI_PENDING */
    peri_status (*event_sync)(void *device, void *event);  /* blocks */

    /* Work. */
    peri_status (*copy)(void *device, void *stream, void *dst, const void *src, int64_t bytes, int32_t kind);
    /* Run kernel @kernel (PERI_K_*) over [0, n), splitting it into ranges of at least @grain; @args is copied. */
    peri_status (*launch)(void *device, void *stream, int32_t kernel, const void *args, int64_t args_size, int64_t n,
                          int64_t grain);
    /* Whether the device has kernel or operation @work (PERI_K_*, PERI_OP_*) for @args, of which it looks at numbers
     * only; NULL: for some. The core asks before every launch, and before it changes anything by several. Local. */
    bool (*has)(void *device, int32_t work, const void *args);
    /* Bytes of device memory that operation @op wants for a call with @args, of which it looks at numbers only;
     * negative: a peri_status, with the error set: the device could not say. Local. */
    int64_t (*scratch)(void *device, int32_t op, const void *args);
    /* Run operation @op (PERI_OP_*); @args is copied. @scratch: memory of `scratch_bytes`, as `scratch` said when it
     * was asked for these arguments, not cleared; the operation's until it has run. NULL where that is 0. */
    peri_status (*run)(void *device, void *stream, int32_t op, const void *args, int64_t args_size, void *scratch,
                       int64_t scratch_bytes);
    /* Choose orders from @seed (optional: nothing to choose). */
    void (*seed)(void *device, uint64_t seed);
    /* Memory of the host that kernels and copies of the device work in as if it were the device's own: what alloc and
     * free say holds for it too. Slower, and there is more of it. (optional, both or none: kernels do not reach the
     * host's memory) */
    peri_status (*mapped_alloc)(void *device, void *stream, int64_t bytes, void **out);
    void (*mapped_free)(void *device, void *stream, void *p, int64_t bytes);
    /* Bytes of the device's memory that alloc could still give. (optional: it does not know) */
    peri_status (*memory)(void *device, int64_t *available);
    /* Which piece of hardware it is, in words that are the same in all processes of a machine, whatever numbers they
     * give their devices: "0000:3b:00.0". (optional) */
    peri_status (*place)(void *device, char *text, size_t len);
    /* Give memory back that is kept for later allocations and not used, so that others who allocate for themselves find
     * it. (optional: nothing is kept) */
    peri_status (*trim)(void *device);

    /* Graphs: work that is captured once and then queued again by one call. (optional, all four or none: nothing is
     * captured) Between capture_begin and capture_end the kernels, operations and copies that the calling thread queues
     * on @stream do not run; they are kept with their arguments, addresses among them. Meanwhile the thread may
     * allocate on other streams, and copy from device to device (PERI_COPY_D2D); it must not queue frees, other copies,
     * events or waits, nor wait for the device. Other threads and streams are free. */
    peri_status (*capture_begin)(void *device, void *stream);
    /* Stop capturing. @graph: what was captured, for graph_launch; @graph NULL: forget it. If it fails, nothing is
     * being captured any more. */
    peri_status (*capture_end)(void *device, void *stream, void **graph);
    /* Queue all that was captured on @stream, in its order. A graph is launched by one thread at a time. */
    peri_status (*graph_launch)(void *device, void *graph, void *stream);
    /* Queued launches still run. */
    void (*graph_delete)(void *device, void *graph);
} peri_device_vtab;

/** What every backend has: the members up to `run`. */
enum { PERI_DEVICE_SIZE_LOWEST = offsetof(peri_device_vtab, seed) };

/** The one symbol that a device plugin libperilune_<name>.so exports; built-in devices have the same function under
 *  another name. */
typedef const peri_device_vtab *(*peri_device_entry_fn)(const peri_plugin_host *host);
#define PERI_DEVICE_ENTRY "peri_device_entry_v1"

#endif
