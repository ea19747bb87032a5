/* SPDX-License-Identifier: Apache-2.0
 *
 * pieces.h: what a rectangle and one piece share, from the piece's file to memory or to a view of a tensor.
 */
#ifndef PERI_CHECKPOINT_PIECES_H
#define PERI_CHECKPOINT_PIECES_H

#include "reader.h"

enum { PERI__READ_BLOCK = PERI__IO_HUGE - 2 * PERI__IO_PAGE }; /* bytes that are read at once */

/** Copying a rectangle between two memories that hold larger ones. All in elements of the tensor, strides in bytes. */
typedef struct peri__copying {
    int32_t ndim;
    int64_t size;                                            /* bytes of an element */
    int64_t low[PERI_MAX_DIMS], high[PERI_MAX_DIMS];         /* what is copied */
    int64_t from[PERI_MAX_DIMS], from_stride[PERI_MAX_DIMS]; /* where the source's memory begins */
    int64_t to[PERI_MAX_DIMS], to_stride[PERI_MAX_DIMS];     /* where the destination's begins */
} peri__copying;

/** A part of a rectangle that lies in memory of its own. */
typedef struct peri__file_share {
    peri__region want;
    char *memory;
} peri__file_share;

/** Where what is read goes: host memory that is laid out as the rectangle is, or a view of a tensor with the
 *  rectangle's shape. */
typedef struct peri__target {
    peri__region want;
    int32_t ndim, dtype; /* ndim: at least 1 */
    int64_t size;        /* bytes of an element */
    char *memory;        /* NULL: into the view */
    peri_tensor *view;
    const peri__file_share *shares; /* not NULL: `memory` is not one, but these are, n_shares of them within the
                                       rectangle; each has its part */
    int64_t n_shares;
    int64_t levels;      /* so many checkpoints of the chain are read; `memory` has what those below them have */
} peri__target;

/** Strides in bytes of a rectangle of @ndim sizes in row-major order; @bytes: of an element. */
static inline void peri__strides(int32_t ndim, const int64_t *size, int64_t bytes, int64_t *out)
{
    for (int32_t d = ndim - 1; d >= 0; d--) {
        out[d] = bytes;
        bytes *= size[d];
    }
}

/** What the rectangle and piece @p share. A piece that is read as a whole is compared with its checksum. */
peri_status peri__read_piece(peri_checkpoint *c, const peri__entry *e, const peri__stored_piece *p,
                             const peri__target *to);
/** Bytes [@at, @at + @bytes) of a piece. */
peri_status peri__piece_get(peri_checkpoint *c, const peri__stored_piece *p, int32_t dtype, void *out, int64_t bytes,
                            int64_t at);
/** The elements of @k from @from on to the target. @pack: memory for as many, where it is a view. */
peri_status peri__deliver(const peri__target *to, peri__copying *k, const char *from, char *pack);
/** c->tools->buffer has @bytes bytes. */
peri_status peri__need_buffer(peri_checkpoint *c, int64_t bytes);
/** The error of a piece whose bytes have another checksum. */
peri_status peri__damaged(const peri_checkpoint *c, const peri__entry *e, const peri__stored_piece *p);

#endif
