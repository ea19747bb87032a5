/* SPDX-License-Identifier: Apache-2.0
 *
 * tensor/capture.h (L2): what a thread does on a device, captured by the backend (plugin/device.h, graphs), and the
 * memory that a capture keeps for itself.
 *
 * While a thread captures, memory for new tensors comes from the capture's arena, whose blocks stay where they are
 * until nobody needs the capture any more: launches of it use the same addresses each time.
 *
 *     arena    | block: of a tensor that is gone, free for the next one | block: kept | block: a result, lent out |
 *
 * All other storages that captured work reaches are kept too (externals): the capture looks for their addresses in
 * the arguments of kernels.
 */
#ifndef PERI_TENSOR_CAPTURE_H
#define PERI_TENSOR_CAPTURE_H

#include "tensor_internal.h"

#include <perilune/precision.h>
#include <pthread.h>

enum { PERI__DRAWS_MOST = 64 }; /* dropouts in a capture */

typedef struct peri__arena peri__arena;
typedef struct peri__capture peri__capture;

/** A piece of an arena. */
typedef struct peri__block {
    struct peri__block *next;
    peri__arena *arena;
    char *data;
    int64_t bytes;
    bool used;           /* a tensor of the capture has it, or it is kept: no new tensor gets it */
    bool kept;           /* for ever */
    peri__storage *lent; /* the storage of a call's result that lies here, or NULL */
} peri__block;

/** The memory of a capture. Counted: by the capture, and by each storage that lies in it. */
struct peri__arena {
    peri__refs refs;
    peri_device *device;
    const peri_stream *work;    /* captured and launched on it; whoever counts the arena holds it too */
    void *queue, *memory;       /* the backend's streams: of `work`, and the one in whose order blocks are taken and
                                   freed, since one that captures cannot */
    void *mark;                 /* the backend's event, to put one behind the other */
    pthread_mutex_t lock;       /* of the blocks' flags: storages are released by any thread */
    peri__block *blocks;
    peri__arena *dead; /* the next one that went while its thread was capturing */
};

/** A storage that is not of the arena. */
typedef struct peri__external {
    peri__storage *storage; /* retained */
    char *data;             /* as it was captured */
    bool reached;           /* captured work has its address */
} peri__external;

/** Words of the host that captured work reads from a block: the same each time. */
typedef struct peri__constant {
    struct peri__constant *next;
    peri__block *block;
    int64_t n, words[];
} peri__constant;

struct peri__capture {
    peri_device *device; /* NULL: nothing was captured */
    void *graph;         /* the backend's, or NULL */
    peri__arena *arena;
    peri__external *externals; /* by address */
    int64_t n_externals;
    peri_tensor **changed; /* retained: tensors in externals that are changed in place, in order, once each time */
    int64_t n_changed;
    peri__constant *constants;
    struct {
        peri_tensor *table; /* [MOST][3] i64, or NULL: what captured dropout draws its masks by, see peri_graph_draw */
        int32_t n;
        bool sent; /* the table holds the words */
        uint64_t words[PERI__DRAWS_MOST][3]; /* seed, stream, offset */
    } draws;
    bool ready;            /* peri__capture_ready was called: blocks are taken, and constants there */
    bool lacks_memory;     /* not all of `changed` could be noted */
    peri_autocast *region; /* while it captures: a region of autocast of its own, whose casts no other capture gets */
};

static inline bool peri__device_is_captured(const peri_device *device)
{
    return peri__capturing && peri__capturing->device == device;
}
/** PERI_EUNSUPPORTED, naming @what, if the calling thread captures on @device. */
peri_status peri__cannot_capture(const peri_device *device, const char *what);
/** A launch of @work (-1: a copy) with these arguments on @stream is about to be captured: keep what they point at. An
 *  error if this work, or this stream, cannot be captured. */
peri_status peri__capture_work(const peri_stream *stream, int32_t work, const void *args, size_t bytes);
/** Keep the storages whose addresses are among these words. */
void peri__capture_words(const void *words, size_t bytes);
/** @t (i64) with @words, which captured work finds there each time. */
peri_status peri__capture_constant(const int64_t *words, int64_t n, peri_tensor **out);

/** Where dropout that is captured finds @seed, @stream and @offset, or others in later launches. */
peri_status peri__capture_draw(uint64_t seed, uint64_t stream, uint64_t offset, const uint64_t **out);

peri_status peri__arena_new(const peri_stream *work, peri__arena **out);
void peri__arena_release(peri__arena *arena);
/** A capture of this thread is over: delete the arenas that went meanwhile. */
void peri__arenas_end(void);
/** A block of at least @bytes; @kept: no other tensor gets it later. What the backend says is not put in words. */
peri_status peri__arena_take(peri__arena *arena, int64_t bytes, bool kept, peri__block **out);
/** The owner of a block needs it no more: other tensors of the capture may get it, unless it is kept. */
void peri__block_release(peri__block *block);
/** A storage in a block (taken), which it gives back: storage.c. */
peri_status peri__storage_in(peri__block *block, int64_t bytes, peri__storage **out);
/** A contiguous tensor of @like's dtype and shape in a block that is kept: for inputs of the capture. */
peri_status peri__arena_tensor(peri__arena *arena, const peri_tensor *like, peri_tensor **out);
/** The block that holds @p, or NULL. */
peri__block *peri__arena_find(const peri__arena *arena, const char *p);
/** Copies each result of the last call that somebody still holds into memory of its own, so that the next call may
 *  write the arena's blocks. The copies are queued on the arena's stream, which has to be current. */
peri_status peri__arena_move_out(peri__arena *arena);
/** A tensor like the given one in a block, whose memory is the tensor's until it is released, or moved out. */
peri_status peri__arena_lend(peri__block *block, const peri_tensor *like, peri_tensor **out);

/** Capture on the arena's stream, which is current, from now on. */
peri_status peri__capture_begin(peri__capture *r, peri__arena *arena);
/** Capture no more; @keep false: forget what was. */
peri_status peri__capture_end(peri__capture *r, bool keep);
/** Whether all that the capture reaches is where it was. */
bool peri__capture_fits(const peri__capture *r);
/** Let the arena's stream wait until its blocks are taken; once. Before anything is put into them. */
peri_status peri__capture_ready(peri__capture *r);
/** Queue it on the arena's stream, which is current. It is ready. */
peri_status peri__capture_launch(peri__capture *r);
void peri__capture_fini(peri__capture *r);

#endif
