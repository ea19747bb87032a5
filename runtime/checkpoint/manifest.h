/* SPDX-License-Identifier: Apache-2.0
 *
 * manifest.h: what a checkpoint holds, in memory: files, tensors, and the pieces of each tensor. A writer fills it
 * piece by piece, publishing joins those of all ranks, and opening reads one. As a text it is the manifest of
 * docs/checkpoint_format.md.
 *
 * Example: table t of 10 x 4 in two pieces, written by two ranks.
 *
 *     files     0 "rank-0.safetensors"           1 "rank-1.safetensors"
 *     entries   "t", F32, shape [10, 4], first_piece 0, n_pieces 2
 *     pieces    0: file 0, rows 0 to 5           1: file 1, rows 5 to 10
 *
 * Everything of variable length lies in two pools, `text` and `numbers`, by index: a model of 100,000 tables has
 * 300,000 pieces.
 */
#ifndef PERI_CHECKPOINT_MANIFEST_H
#define PERI_CHECKPOINT_MANIFEST_H

#include "../base/buffer.h"
#include "text_window.h"

#include <perilune/checkpoint.h>

enum {
    PERI__NAME_MOST = 1000,               /* bytes of a tensor's name */
    PERI__CHECKPOINT_MOST = 1 << 30,      /* bytes of a manifest, or of the header of a safetensors file that we read */
    PERI__HEADER_MOST = 100 * 1000 * 1000 /* bytes of a header that the safetensors library reads */
};
#define PERI__MANIFEST "manifest.json"
#define PERI__PART ".part.json" /* how the name of the file ends that has a rank's part of the manifest */

/** A peri_checkpoint_region of which all members are known. */
typedef struct peri__region {
    int64_t offset[PERI_MAX_DIMS], size[PERI_MAX_DIMS], column, columns;
    const char *rows;
    int64_t listed;
    int64_t alike; /* not 0: other processes read it, too (no bool: regions are compared byte by byte) */
} peri__region;

typedef struct peri__file {
    int64_t name;      /* in text */
    int64_t bytes;     /* of the whole file */
    int64_t header;    /* bytes in front of the data of a safetensors file; 0: no checksum of them is known */
    uint64_t checksum; /* of these */
} peri__file;

typedef struct peri__stored_piece {
    int64_t numbers; /* in numbers: offset[ndim], size[ndim], column, columns */
    int64_t begin, bytes;
    uint64_t checksum;
    int32_t file;
    bool checked;   /* there is a checksum */
    int64_t rows;   /* Of an increment: 1 + the place (in text) of the name of the tensor that lists which rows of the
                       rectangle are there; * 0: all are. */
    int64_t listed; /* then: how many */
} peri__stored_piece;

typedef struct peri__entry {
    int64_t name;  /* in text */
    int64_t shape; /* in numbers */
    int64_t first_piece, n_pieces;
    int32_t dtype, ndim;
} peri__entry;

/** Where the text of a manifest has a tensor, or some pieces of one: its texts may be several. */
typedef struct peri__tensor_place {
    uint32_t hash; /* of its name, the low bits */
    uint32_t at, bytes;
} peri__tensor_place;

typedef struct peri__manifest {
    char *text;
    int64_t *numbers;
    peri__file *files;
    peri__entry *entries;
    peri__stored_piece *pieces;
    peri__tensor_place *places; /* of what was read from a whole manifest */
    int64_t n_text, n_numbers, n_files, n_entries, n_pieces, n_places;
    /* What there is memory for. */
    int64_t text_room, numbers_room, files_room, entries_room, pieces_room, places_room;
    char *values;
    char digest[PERI_CHECKPOINT_DIGEST + 1], parent[PERI_CHECKPOINT_DIGEST + 1], same_as[PERI_CHECKPOINT_DIGEST + 1];
    char same_as_parent[PERI_CHECKPOINT_DIGEST + 1]; /* of what is written only: who reads asks
                                                        peri__checkpoint_identify */
    int64_t increment;
} peri__manifest;

void peri__manifest_fini(peri__manifest *m);
/** The manifest of an open checkpoint. Borrowed. */
const peri__manifest *peri__checkpoint_manifest(const peri_checkpoint *c);
/** The folder of an open checkpoint, open; -1: it is a single file. */
int peri__checkpoint_folder(const peri_checkpoint *c);
/** Whether nobody else has it open; from now on nobody will. */
bool peri__checkpoint_alone(const peri_checkpoint *c);

static inline const char *peri__manifest_text(const peri__manifest *m, int64_t at) { return m->text + at; }
static inline const char *peri__entry_name(const peri__manifest *m, const peri__entry *e) { return m->text + e->name; }
static inline const int64_t *peri__entry_shape(const peri__manifest *m, const peri__entry *e)
{
    return m->numbers + e->shape;
}
void peri__piece_region(const peri__manifest *m, const peri__entry *e, const peri__stored_piece *p, peri__region *out);

/** Append a file; its index in @index. */
peri_status peri__manifest_file(peri__manifest *m, const char *name, int64_t bytes, int32_t *index);
/** Append a tensor without pieces. */
peri_status peri__manifest_entry(peri__manifest *m, const char *name, int32_t dtype, int32_t ndim,
                                 const int64_t *shape);
/** Append a piece to the last tensor; place: all but `numbers`, `rows` and `listed`. */
peri_status peri__manifest_piece(peri__manifest *m, const peri__region *region, const peri__stored_piece *place);

/** The tensor that lists the rows of a piece (peri__stored_piece.rows); NULL: there is none of that name. @m:
 *  settled. */
const peri__entry *peri__rows_entry(const peri__manifest *m, const peri__stored_piece *p);
/** Tensor @name, NULL if there is none. @m: settled. */
const peri__entry *peri__entry_named(const peri__manifest *m, const char *name);
/** Whether @name begins as the names of such lists do. */
static inline bool peri__lists_rows(const char *name)
{
    return strncmp(name, PERI_CHECKPOINT_ROWS, sizeof PERI_CHECKPOINT_ROWS - 1) == 0;
}
/** Whether tensor @name is a list of an increment, of rows or of evicted ids, which a full checkpoint does not have. */
static inline bool peri__is_list(const char *name)
{
    return peri__lists_rows(name) || strncmp(name, PERI_CHECKPOINT_EVICTED, sizeof PERI_CHECKPOINT_EVICTED - 1) == 0;
}
/** Elements that a piece of @elements has where only @listed of its rows are there. */
static inline int64_t peri__listed_elements(int64_t elements, int64_t rows, int64_t listed)
{
    return rows ? elements / rows * listed : 0;
}

/** The elements of a region. PERI_EINVAL, in the name of @what, unless it lies within @shape and does not overflow. */
peri_status peri__region_check(const char *what, int32_t ndim, const int64_t *shape, const peri__region *region,
                               int64_t *elements);
/** The product of the sizes of a region that was checked. */
static inline int64_t peri__volume(int32_t ndim, const int64_t *size)
{
    int64_t n = 1;
    for (int32_t d = 0; d < ndim; d++) n *= size[d];
    return n;
}
/** The argument of public function @function. */
peri_status peri__region_take(peri__region *out, const peri_checkpoint_region *region, const char *function);
/** A region as text, "[0:5, 0:4]". */
const char *peri__region_text(int32_t ndim, const peri__region *region, char *out, size_t room);

/** peri_checkpoint_writer_add, of a region whose members are all known. */
peri_status peri__writer_add(peri_checkpoint_writer *writer, const peri_checkpoint_tensor *tensor,
                             const peri__region *region);

/** Sort tensors by name, join those of the same name, and see that the pieces of each are whole and do not overlap.
 *  @what: for errors. */
peri_status peri__manifest_settle(peri__manifest *m, const char *what);
/** Whether @text is a digest as manifests have them: 32 hexadecimal digits. */
static inline bool peri__is_digest(const char *text)
{
    return strspn(text, "0123456789abcdef") == PERI_CHECKPOINT_DIGEST && !text[PERI_CHECKPOINT_DIGEST];
}
/** Append what a manifest says, whose text @get reads window by window. @part: the text of one rank, which has no
 *  checksum. */
peri_status peri__manifest_read(peri__manifest *m, peri__get *get, void *context, int64_t bytes, bool part,
                                const char *what);
/** The same of file @name in the open folder @dir; @path: the file's, for errors. (checkpoint_open.c) */
peri_status peri__manifest_read_file(peri__manifest *m, int dir, const char *name, const char *path, bool part,
                                     const char *what);
/** Keep of a manifest its files, its digests and where its tensors stand in its text: of a tensor 12 bytes instead of
 *  some hundred. */
peri_status peri__manifest_fold(peri__manifest *m);
/** Have of a folded manifest tensor @name, with the lists of its rows, and no other; settled. @get reads its text. */
peri_status peri__manifest_unfold(peri__manifest *m, const char *name, peri__get *get, void *context, const char *what);
/** Append the tensor whose text in a manifest is @text. */
peri_status peri__manifest_parse_tensor(peri__manifest *m, const char *text, int64_t bytes, const char *what);
/** Takes the next bytes of a text. */
typedef peri_status peri__put(void *context, const char *data, int64_t bytes);
/** Put the text of a manifest block by block; @config NULL: a part, without values and checksum. Sets m->digest unless
 *  it is a part. */
peri_status peri__manifest_print(peri__manifest *m, const peri_checkpoint_config *config, peri__put *put,
                                 void *context);
/** Append what the header of safetensors file @name says: one tensor each, of one piece without a checksum.
 *  @file_bytes: of the whole file. */
peri_status peri__safetensors_parse(peri__manifest *m, const char *name, int64_t file_bytes, const char *header,
                                    int64_t bytes, const char *what);
/** Set where the pieces of safetensors file @file begin, and its bytes; @bytes: of its header, which
 *  peri__safetensors_print puts. */
peri_status peri__safetensors_lay_out(peri__manifest *m, int32_t file, int64_t *bytes);
/** Put the first @bytes of safetensors file @file block by block: all up to its data, which are its pieces one after
 *  the other. */
peri_status peri__safetensors_print(const peri__manifest *m, int32_t file, int64_t bytes, peri__put *put,
                                    void *context);

/** safetensors' name of a dtype, NULL if it has none. */
const char *peri__safetensors_dtype(int32_t dtype);

#endif
