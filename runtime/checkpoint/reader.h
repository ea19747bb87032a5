/* SPDX-License-Identifier: Apache-2.0
 *
 * reader.h: an open checkpoint. One that is an increment has the checkpoint that it is an increment of open, and so on,
 * up to a full one:
 *
 *     c   save-3  increment 2 of the chain       what the caller has
 *      parent ->  save-2  increment 1
 *      parent ->  save-1  full
 *
 * Everything that a checkpoint says of itself (names, shapes, values) is said by the last of the chain. Only rows that
 * it does not have are read from its parent, and of its parent's manifest only what it says of the tensor that is read
 * is in memory (folded.c).
 */
#ifndef PERI_CHECKPOINT_READER_H
#define PERI_CHECKPOINT_READER_H

#include "../tensor/tensor_internal.h"
#include "formats.h"
#include "file_jobs.h"
#include "manifest.h"
#include "shared.h"

enum {
    PERI__READ_AHEAD = 8, /* blocks that are read before they are wanted */
    PERI__READ_RING = PERI__READ_AHEAD * PERI__IO_HUGE
};

/** What reading needs beside the files; those of a chain share them. */
typedef struct peri__tools {
    char meeting[72];     /* the name by which processes of this machine meet (peri_checkpoint_share) */
    int64_t processes;    /* how many; 0: nobody else reads the same */
    peri__shared *shared; /* what they share; NULL: nothing that all read has been read yet, or it cannot be had */
    bool sought;          /* it was asked for */
    peri__io *io;       /* NULL until something is read that is larger than a block */
    char *ring;         /* PERI__READ_AHEAD buffers of PERI__IO_HUGE bytes */
    char *buffer;       /* of the larger of PERI__IO_BLOCK and what a run of elements needed */
    int64_t buffer_bytes;
} peri__tools;

struct peri_checkpoint {
    peri__manifest m;
    char *folder; /* its path, for errors */
    int dir;      /* The folder, open and locked, so that nobody removes it. Files are opened in it and not by the path,
                     which may name the * checkpoint that replaced this one. -1: a single safetensors file. */
    /* The files that were read last: [0] as usual, [1] past the page cache. Their numbers; -1: none. */
    peri__io_file *open[2];
    int32_t file[2];
    peri__tools own, *tools;
    peri__formats formats;   /* of rows of quantized tables */
    peri_checkpoint *parent; /* NULL: this one is full, or was opened alone */
    bool inner;              /* It is the parent of one. Chains may be long: its files are closed when something was
                                read, and its manifest is folded. */
};

/** Tensor @index of @c; PERI_EINVAL names @function. */
peri_status peri__entry_at(const peri_checkpoint *c, const char *function, int64_t index, const peri__entry **out);
/** Piece @piece of it. */
peri_status peri__piece_at(const peri_checkpoint *c, const char *function, int64_t index, int64_t piece,
                           const peri__entry **e, const peri__stored_piece **p);
/** Open the checkpoint in folder @path alone, or a safetensors file; @what: for errors. Files that its manifest lists
 *  and that come late are waited for until @until (peri_time_ns; 0: not waited for). @out new. */
peri_status peri__checkpoint_open_alone(const char *path, const char *what, int64_t until, peri_checkpoint **out);
/** Have tensor @name in the manifest of @c, which is the parent of one. */
peri_status peri__checkpoint_unfold(peri_checkpoint *c, const char *name);
/** Have all of the manifest of @c, which is the parent of one, until it is folded again. */
peri_status peri__checkpoint_unfold_all(peri_checkpoint *c);
/** Read rectangle @region, which is within tensor @index and not empty, into host memory. (reader.c) */
peri_status peri__checkpoint_read_host(peri_checkpoint *c, int64_t index, const peri__region *region, void *out);
/** peri_checkpoint_identify. @before: the digest of what the checkpoint goes on from; "": of nothing, or not known.
 *  Of an increment it is the parent, of a full one that stands for an increment (same_as) that one's parent.
 *  (chain.c) */
peri_status peri__checkpoint_identify(const char *path, peri_checkpoint_info *out,
                                      char before[PERI_CHECKPOINT_DIGEST + 1]);
/** A checkpoint that is an increment of the one at @path and would be without its parent if that were gone: its path in
 *  @child (PATH_MAX bytes), or "". (chain.c) */
peri_status peri__checkpoint_child(const char *path, char *child);
/** An error unless the checkpoint of @digest, or one that stands for it, lies beside @path. (chain.c) */
peri_status peri__checkpoint_needs(const char *path, const char *digest);
/** peri_checkpoint_may_publish and peri_checkpoint_publish where only the checkpoint of digest @only may be replaced,
 *  whatever is saved at @path meanwhile; "": only one that is damaged; NULL: any. (publish.c) */
peri_status peri__checkpoint_may_publish(const char *path, const peri_checkpoint_config *config, bool replace,
                                         const char *only);
/** @same_as_parent: digest of the parent of the increment that config->same_as names. (publish.c) */
peri_status peri__checkpoint_publish(const char *folder, const char *path, const char *part,
                                     const peri_checkpoint_config *config, const char *same_as_parent, bool replace,
                                     const char *only, char digest[PERI_CHECKPOINT_DIGEST + 1]);

#endif
