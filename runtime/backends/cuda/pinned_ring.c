/* SPDX-License-Identifier: Apache-2.0
 *
 * pinned_ring.c: page-locked memory that is used round and round. A copy of at most PIECE bytes takes the bytes
 * behind those of the copy before it; it gives them back when its event has passed, in the order in which they were
 * taken:
 *
 *     0          given % SIZE             taken % SIZE       SIZE
 *     |  free    | piece | piece | piece  |  free            |
 *
 * A piece that would reach over the end begins at 0 again, and the bytes that it leaves out are counted as its own.
 */
#include "pinned_ring.h"

#include <pthread.h>
#include <string.h>

enum { SIZE = 8 << 20, PIECE = 1 << 20, PIECES = 64, ALIGN = 256 };

struct peri__stage {
    pthread_mutex_t lock;
    char *memory;             /* [SIZE], page-locked */
    int64_t taken, given;     /* bytes since the beginning; taken - given <= SIZE */
    int64_t first, count;     /* pieces that may be under way: numbers first to first + count - 1, each modulo PIECES */
    int64_t end[PIECES];      /* `given` becomes this when the piece has been copied */
    cudaEvent_t event[PIECES]; /* recorded behind the piece's copy; made with the stage */
};

cudaError_t peri__stage_new(const peri_plugin_host *host, peri__stage **out)
{
    peri__stage *s = host->alloc_zero(sizeof *s);
    if (!s) return cudaErrorMemoryAllocation;
    pthread_mutex_init(&s->lock, NULL);
    cudaError_t error = cudaHostAlloc((void **)&s->memory, SIZE, cudaHostAllocPortable);
    for (int i = 0; error == cudaSuccess && i < PIECES; i++)
        error = cudaEventCreateWithFlags(&s->event[i], cudaEventDisableTiming);
    if (error == cudaSuccess) *out = s;
    else peri__stage_delete(host, s);
    return error;
}

void peri__stage_delete(const peri_plugin_host *host, peri__stage *s)
{
    if (!s) return;
    for (; s->count > 0; s->count--) (void)cudaEventSynchronize(s->event[s->first++ % PIECES]);
    for (int i = 0; i < PIECES; i++)
        if (s->event[i]) (void)cudaEventDestroy(s->event[i]);
    if (s->memory) (void)cudaFreeHost(s->memory);
    pthread_mutex_destroy(&s->lock);
    host->free(s);
}

/** Wait for the oldest piece, and take its bytes back. */
static cudaError_t give_back(peri__stage *s)
{
    const int64_t i = s->first % PIECES;
    cudaError_t error = cudaEventSynchronize(s->event[i]);
    if (error != cudaSuccess) return error;
    s->given = s->end[i];
    s->first++;
    s->count--;
    return cudaSuccess;
}

/** The copy of one piece. The lock is held. */
static cudaError_t copy_piece(peri__stage *s, void *dst, const void *src, int64_t bytes, enum cudaMemcpyKind kind,
                              cudaStream_t stream)
{
    const int64_t room = (bytes + ALIGN - 1) / ALIGN * ALIGN, left = SIZE - s->taken % SIZE;
    const int64_t from = room <= left ? s->taken : s->taken + left;
    cudaError_t error = cudaSuccess;
    while (error == cudaSuccess && (s->count == PIECES || from + room - s->given > SIZE)) error = give_back(s);
    if (error != cudaSuccess) return error;
    memcpy(s->memory + from % SIZE, src, (size_t)bytes);
    error = cudaMemcpyAsync(dst, s->memory + from % SIZE, (size_t)bytes, kind, stream);
    if (error != cudaSuccess) return error;
    const int64_t i = (s->first + s->count) % PIECES;
    error = cudaEventRecord(s->event[i], stream);
    if (error != cudaSuccess) return error;
    s->end[i] = s->taken = from + room;
    s->count++;
    return cudaSuccess;
}

cudaError_t peri__stage_copy(peri__stage *s, void *dst, const void *src, int64_t bytes, enum cudaMemcpyKind kind,
                             cudaStream_t stream)
{
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&s->lock);
    for (int64_t at = 0; error == cudaSuccess && at < bytes; at += PIECE)
        error = copy_piece(s, (char *)dst + at, (const char *)src + at, bytes - at < PIECE ? bytes - at : PIECE, kind,
                           stream);
    pthread_mutex_unlock(&s->lock);
    return error;
}
