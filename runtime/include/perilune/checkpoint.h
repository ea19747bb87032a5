/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/checkpoint.h: checkpoints: folders of safetensors files with a manifest. The format is specified in
 * docs/checkpoint_format.md.
 *
 * A checkpoint holds named *tensors*. Each tensor lies there in one or more *pieces*, rectangles of it, which different
 * ranks may have written. Reading does not depend on how a tensor was cut: any rectangle can be asked for, and only the
 * pieces that it meets are read.
 *
 * Saving has four steps. Rank 0 makes a folder (peri_checkpoint_folder). Every rank writes its pieces there with a
 * peri_checkpoint_writer, and tells rank 0 where its *part* of the manifest is (peri_checkpoint_writer_part). Rank 0
 * joins the parts and gives the folder its name (peri_checkpoint_publish). Until then no checkpoint of that name is
 * there, and one that is being replaced is whole.
 *
 * Everything here is local: no function communicates. Reading blocks until the bytes are there; what is put into a
 * writer is copied, and written by threads of its own meanwhile: an error of the file system may be told by a later
 * call, at the latest by finish. Files are untrusted: sizes are checked before anything is allocated, and nothing in
 * them is executed.
 *
 * Threads: each object is used by one thread at a time: peri_checkpoint, peri_checkpoint_folder, peri_checkpoint_lock,
 * peri_checkpoint_writer, peri_checkpoint_publishing, peri_checkpoint_follower, peri_checkpoint_state. Two objects may
 * be used by two threads at once, also of one folder.
 */
#ifndef PERILUNE_CHECKPOINT_H
#define PERILUNE_CHECKPOINT_H

#include <perilune/moment.h>
#include <perilune/shard.h>
#include <perilune/tensor.h>

/** Constants of the format. A digest is XXH3-128 in 32 hexadecimal digits. */
enum { PERI_CHECKPOINT_VERSION = 1, PERI_CHECKPOINT_DIGEST = 32 };

/** A rectangle of a tensor of up to PERI_MAX_DIMS dimensions. A tensor of no dimensions has one element, and its
 *  rectangle no entries. */
typedef struct peri_checkpoint_region {
    int64_t size;                                         /* sizeof(peri_checkpoint_region) */
    int64_t offset[PERI_MAX_DIMS], extent[PERI_MAX_DIMS]; /* in elements of each dimension: where it begins, and how
                                                             many */
    /* For tensors with one number for each row of a table (states of row-wise optimizers): the number belongs to the
     * table's columns [column, column + columns). Pieces that differ in their columns may have the same rows. columns =
     * 0: to all columns. */
    int64_t column, columns;
    /* Pieces of increments: `listed` rows of the rectangle (indices of the first dimension) are there, which tensor
     * `rows` of the same checkpoint lists; the parent has the others. NULL: all are there. Ignored by readers. */
    const char *rows;
    int64_t listed;
    bool alike; /* Reading: other processes (peri_checkpoint_share) read the same rectangle. Ignored by writers. */
} peri_checkpoint_region;

/** Names of the tensors that list rows begin so; they are I64 [listed], ascending, counted in the whole tensor. */
#define PERI_CHECKPOINT_ROWS "%rows/"
/** Names of the lists of evicted ids of increments begin so (docs/checkpoint_format.md, Maps of raw ids): no
 *  tensors of a program either. */
#define PERI_CHECKPOINT_EVICTED "%evicted/"

/** A checkpoint that was opened: its manifest in memory. */
typedef struct peri_checkpoint peri_checkpoint;

/** A tensor as a checkpoint knows it. */
typedef struct peri_checkpoint_tensor {
    int64_t size; /* sizeof(peri_checkpoint_tensor) */
    const char *name;
    int32_t dtype, ndim;
    int64_t shape[PERI_MAX_DIMS]; /* of the whole */
    int64_t pieces;               /* ignored by writers */
} peri_checkpoint_tensor;

/** Where a piece lies. */
typedef struct peri_checkpoint_place {
    int64_t size;          /* sizeof(peri_checkpoint_place) */
    const char *file;      /* its name in the folder */
    int64_t begin, bytes;  /* in the file */
    uint64_t checksum;     /* XXH3-64 of these bytes */
    bool checked;          /* false: there is no checksum (a safetensors file that another program wrote) */
} peri_checkpoint_place;

/* -- the folder of a save ------------------------------------------------------------------------------------------ */

/** A folder in which a save collects its files until they are a checkpoint. */
typedef struct peri_checkpoint_folder peri_checkpoint_folder;

/** Make one beside @path, the checkpoint that is to be; folders above that are missing are made. The last part of @path
 *  has 1 to 200 bytes, no '.' in front and no line feed in it. The folder is locked as long
 *  as the handle lives; what saves of dead processes left there is removed. On one rank, which tells the others its
 *  path. @out new. */
PERI_API peri_status peri_checkpoint_folder_new(const char *path, peri_checkpoint_folder **out);
/** Its path. Borrowed. */
PERI_API const char *peri_checkpoint_folder_path(const peri_checkpoint_folder *folder);
/** Give it up: if it was not published, it is removed with what a save wrote into it. After publishing, readers wait
 *  for this. NULL is fine. */
PERI_API void peri_checkpoint_folder_release(peri_checkpoint_folder *folder);
/** On the other ranks: wait until the folder @path is here too, at most 30 s (on network file systems names appear
 *  late). PERI_ENOTFOUND: this host does not share it. */
PERI_API peri_status peri_checkpoint_folder_await(const char *path);

/** The right to save into a folder of checkpoints. */
typedef struct peri_checkpoint_lock peri_checkpoint_lock;

/** Take it, as long as the handle lives (or the process); the folder is made if it is missing. PERI_EPEER: another job
 *  has it, which the message names. On file systems without such locks everybody gets it. @out new. */
PERI_API peri_status peri_checkpoint_lock_new(const char *folder, peri_checkpoint_lock **out);
/** Whether @lock is still that of the folder: false where another one has got its name since, or has no ".lock". */
PERI_API bool peri_checkpoint_lock_holds(const peri_checkpoint_lock *lock, const char *folder);
/** Give it up; NULL is fine. */
PERI_API void peri_checkpoint_lock_release(peri_checkpoint_lock *lock);

/** The names of the checkpoints in a folder, sorted, each with a line feed behind it. PERI_ENOTFOUND: there is no such
 *  folder. @out new, freed with peri_checkpoint_names_release. */
PERI_API peri_status peri_checkpoint_names(const char *folder, char **out);
/** Free them; NULL is fine. */
PERI_API void peri_checkpoint_names_release(char *names);

/* -- writing ------------------------------------------------------------------------------------------------------- */

/** One rank's files while they are written. */
typedef struct peri_checkpoint_writer peri_checkpoint_writer;

/** A writer of files @stem.safetensors (if one would exceed @file_bytes: @stem-2.safetensors, ...) in @folder, which
 *  must exist. No file of that name may exist. @file_bytes 0: 16 GiB. A file holds at least one piece or, of a piece
 *  larger than that, as many rows as fit. @out new. */
PERI_API peri_status peri_checkpoint_writer_new(const char *folder, const char *stem, int64_t file_bytes,
                                                peri_checkpoint_writer **out);
/** Announce a piece: rectangle @region of @tensor. All pieces are announced before the first is written; the name is
 *  copied. The same name must come with the same dtype and shape on all ranks. PERI_EUNSUPPORTED: safetensors has no
 *  such dtype (c128). */
PERI_API peri_status peri_checkpoint_writer_add(peri_checkpoint_writer *writer, const peri_checkpoint_tensor *tensor,
                                                const peri_checkpoint_region *region);
/** Write the next elements: pieces in the order of their announcement, each in row-major order. @elements, of any shape
 *  and on any device, must have the dtype of the piece that is being written, and no more elements than it has left.
 *  After an error of the file system the writer is spent: every further call returns that error. */
PERI_API peri_status peri_checkpoint_writer_put(peri_checkpoint_writer *writer, const peri_tensor *elements);
/** The same from host memory: @bytes, whole elements. */
PERI_API peri_status peri_checkpoint_writer_put_bytes(peri_checkpoint_writer *writer, const void *data, int64_t bytes);
/** The same of rows [@row, @row + @rows) of part @index of a moment, as they were; the moment passes them
 *  (peri_moment_pass). The writer is spent, too, where the moment has no such rows. */
PERI_API peri_status peri_checkpoint_writer_put_moment(peri_checkpoint_writer *writer, peri_moment *moment,
                                                       int64_t index, int64_t row, int64_t rows);
/** How many bytes can be put now without waiting for the disk. After an error: 0. */
PERI_API int64_t peri_checkpoint_writer_room(const peri_checkpoint_writer *writer);
/** All pieces are put: PERI_OK when the files are on the disk, so that peri_checkpoint_writer_finish will not wait;
 *  PERI_PENDING as long as they are written and synced. Does not block. */
PERI_API peri_status peri_checkpoint_writer_test(peri_checkpoint_writer *writer);
/** All pieces are written: sync the files to the disk and close them. */
PERI_API peri_status peri_checkpoint_writer_finish(peri_checkpoint_writer *writer);
/** A short text that says where this rank's part of the manifest is: in a file STEM.part.json, which
 *  peri_checkpoint_writer_finish has written into the folder, and which peri_checkpoint_publish removes. @out borrowed,
 *  valid as long as the writer. */
PERI_API peri_status peri_checkpoint_writer_part(peri_checkpoint_writer *writer, const char **out);
/** Free it; files that are not finished are removed. NULL is fine. */
PERI_API void peri_checkpoint_writer_release(peri_checkpoint_writer *writer);

/** XXH3-64 of the elements of a tensor in row-major order, as manifests have it. Blocks until they are computed. */
PERI_API peri_status peri_checkpoint_checksum(const peri_tensor *elements, uint64_t *out);

/** What a manifest says beside its tensors; NULL stands for zeros. */
typedef struct peri_checkpoint_config {
    int64_t size;       /* sizeof(peri_checkpoint_config) */
    const char *values; /* any JSON text, kept as it is; NULL: {} */
    const char *parent; /* digest of the checkpoint that this one is an increment of; NULL: none, and every tensor is
                           whole */
    int64_t increment;  /* how many increments there are from a full checkpoint to this one; with a parent 1 or more:
                           its number + 1 */
    const char *same_as; /* this full checkpoint has everything that the increment of this digest and its parents have,
                            and stands for it; NULL: none */
} peri_checkpoint_config;

/** Join @parts[@n] (peri_checkpoint_writer_part of all ranks) to the manifest of @folder, sync it, and rename @folder
 *  to @path, beside which it must lie (in one file system). Where @path exists: with @replace that checkpoint is
 *  exchanged for the new one and then removed, without it PERI_EINVAL; what is no checkpoint is never replaced.
 *  PERI_ENOTFOUND: the parent is not beside @path any more. PERI_EPEER: another process gives or takes a name beside
 *  @path, and is not done within 30 s.
 *  PERI_EMISMATCH: parts contradict each other, or pieces of a tensor leave elements out or overlap. @digest: the new
 *  checkpoint's, with its final 0. One thread of one process calls it. */
PERI_API peri_status peri_checkpoint_publish(const char *folder, const char *path, const char *const *parts, int32_t n,
                                             const peri_checkpoint_config *config, bool replace,
                                             char digest[PERI_CHECKPOINT_DIGEST + 1]);

/** Whether peri_checkpoint_publish would refuse @path as things are, with its words: to be asked before anything is
 *  written. */
PERI_API peri_status peri_checkpoint_may_publish(const char *path, const peri_checkpoint_config *config, bool replace);

/** peri_checkpoint_publish by a thread of its own. */
typedef struct peri_checkpoint_publishing peri_checkpoint_publishing;

/** Begin it, with the arguments of peri_checkpoint_publish, which are copied. @out new. */
PERI_API peri_status peri_checkpoint_publishing_new(const char *folder, const char *path, const char *const *parts,
                                                    int32_t n, const peri_checkpoint_config *config, bool replace,
                                                    peri_checkpoint_publishing **out);
/** PERI_PENDING as long as it goes on; then what peri_checkpoint_publish returned, and the digest. Does not block. */
PERI_API peri_status peri_checkpoint_publishing_test(peri_checkpoint_publishing *publishing,
                                                     char digest[PERI_CHECKPOINT_DIGEST + 1]);
/** Wait for its end, and free it; NULL is fine. */
PERI_API void peri_checkpoint_publishing_release(peri_checkpoint_publishing *publishing);

/** Remove the checkpoint in folder @path: it gets the name of a save's folder, which later saves sweep if this process
 *  dies; then its manifest is removed, the files that it lists, and the folder. PERI_EPEER: somebody has it open
 *  (peri_checkpoint_open), nothing was removed. PERI_EINVAL: @path is a file, or a link. PERI_EIO: something could not
 *  be removed; what is no file of the checkpoint is never touched, and keeps the folder under its name. */
PERI_API peri_status peri_checkpoint_remove(const char *path);

/** Make a full checkpoint at @path of @checkpoint, an open increment, and all that it is an increment of. All bytes are
 *  compared with their checksums first. It gets @checkpoint's values and stands for it: increments of that one are
 *  increments of this one, too. @replace: as for peri_checkpoint_publish; the path of @checkpoint itself may be
 *  replaced, also where there are increments of it: then its old files are removed, and there is nothing left to read
 *  through @checkpoint. Only what is at @path when this is called is replaced, and at the path of @checkpoint only
 *  @checkpoint: PERI_EINVAL if something else is saved there meanwhile, which stays. Needs 32 MiB beside the
 *  manifests, whatever the sizes. PERI_EINVAL: it is no increment. @digest: the new one's, with its final 0. */
PERI_API peri_status peri_checkpoint_compact(peri_checkpoint *checkpoint, const char *path, bool replace,
                                             char digest[PERI_CHECKPOINT_DIGEST + 1]);

/* -- reading ------------------------------------------------------------------------------------------------------- */

/** Open the checkpoint in folder @path, or a single safetensors file. Reads the manifest only. As long as it is open
 *  nobody removes it (peri_checkpoint_remove), and what replaces it meanwhile is not seen. Waits a second at most for
 *  who is saving or removing it. Errors: PERI_ENOTFOUND (no such path, or not any more), PERI_EFORMAT (no manifest, one
 *  that is damaged, or of a later version), each with the place. An increment is opened with what it is an increment
 *  of, which is found by its digest in the same folder, whatever its name; what of it is missing or damaged is named.
 *  @out new. */
PERI_API peri_status peri_checkpoint_open(const char *path, peri_checkpoint **out);
/** The same, to load what is in it or to resume from it: a file that the manifest lists, and that is missing or shorter
 *  than it says, may come late on a network file system. It is waited for, @seconds at most for all files together
 *  (0 to 86400; 30 is a good choice), and a line of the log names it. If it does not come, the error names it.
 *  @out new. */
PERI_API peri_status peri_checkpoint_open_late(const char *path, double seconds, peri_checkpoint **out);
/** The same without what it is an increment of: what it says may be asked for, its pieces verified, and its whole
 *  tensors read. @out new. */
PERI_API peri_status peri_checkpoint_open_alone(const char *path, peri_checkpoint **out);
/** Open a chain whose checkpoints may lie anywhere: @paths[0] a full one, each other one an increment of the one
 *  before. PERI_EINVAL: one is missing in front, there twice, or out of order; the message names it. @out new: the last
 *  one, as peri_checkpoint_open opens it. */
PERI_API peri_status peri_checkpoint_open_chain(const char *const *paths, int32_t n, peri_checkpoint **out);
/** How many checkpoints an open one consists of: 1, and one more for each that it is an increment of (1 if it was
 *  opened alone). */
PERI_API int64_t peri_checkpoint_levels(const peri_checkpoint *checkpoint);
/** The path of one of them, 0: the checkpoint itself, 1: its parent, ...; NULL: there is none. Borrowed. */
PERI_API const char *peri_checkpoint_level(const peri_checkpoint *checkpoint, int64_t level);

/** The number of the checkpoint of that digest in the chain, or of one that stands for it; -1: it is not there. */
PERI_API int64_t peri_checkpoint_level_of(const peri_checkpoint *checkpoint, const char *digest);

/** Who a checkpoint is. "" where there is nothing. */
typedef struct peri_checkpoint_info {
    int64_t size; /* sizeof(peri_checkpoint_info) */
    char digest[PERI_CHECKPOINT_DIGEST + 1], parent[PERI_CHECKPOINT_DIGEST + 1];
    char same_as[PERI_CHECKPOINT_DIGEST + 1]; /* see peri_checkpoint_config */
    int64_t increment;
} peri_checkpoint_info;
/** What the begin and the end of the manifest in folder @path say; the rest is not looked at. PERI_ENOTFOUND: there is
 *  none; PERI_EFORMAT: it is cut short. */
PERI_API peri_status peri_checkpoint_identify(const char *path, peri_checkpoint_info *out);

/** Meet the other processes of this machine, @processes of them with this one, that have the same checkpoint open and
 *  give the same @name (1 to 64 letters, digits and '-', another one for each load). Rows of which they want different
 *  columns, and rectangles that are alike, are then read by one of them, past the page cache, and handed over in 18 MiB
 *  of memory that they share. Where that memory cannot be had, or others do not come, fail, or want other rows, each
 *  reads by itself: what is read is the same. Local. */
PERI_API peri_status peri_checkpoint_share(peri_checkpoint *checkpoint, const char *name, int64_t processes);
/** Free it; NULL is fine. */
PERI_API void peri_checkpoint_release(peri_checkpoint *checkpoint);
/** The number of tensors; they are sorted by name (byte by byte). */
PERI_API int64_t peri_checkpoint_count(const peri_checkpoint *checkpoint);
/** Tensor @index, 0 <= index < peri_checkpoint_count. @out: the name is borrowed, valid as long as the checkpoint. */
PERI_API peri_status peri_checkpoint_tensor_at(const peri_checkpoint *checkpoint, int64_t index,
                                               peri_checkpoint_tensor *out);
/** The index of tensor @name, -1 if there is none. */
PERI_API int64_t peri_checkpoint_find(const peri_checkpoint *checkpoint, const char *name);
/** Piece @piece of tensor @index. @place: the file's name is borrowed. */
PERI_API peri_status peri_checkpoint_piece(const peri_checkpoint *checkpoint, int64_t index, int64_t piece,
                                           peri_checkpoint_region *region, peri_checkpoint_place *place);
/** Read rectangle @region of tensor @index into @out, a tensor of its dtype with as many elements as the rectangle, in
 *  row-major order. A piece that is read as a whole is compared with its checksum.
 *
 *  Where pieces of different columns have a number for the same row: the number of the piece that has the region's
 *  columns or, if several have some of them, the mean of theirs, weighted by how many columns each shares with the
 *  region (by all that it has, if region->columns is 0). f32 and f64 have means; numbers of other dtypes must be equal.
 *
 *  After an error @out is undefined. PERI_EFORMAT: the file is damaged or too short; PERI_EMISMATCH: no piece has the
 *  region's columns, or numbers that must be equal are not; or, before anything changes, @out lies in the rows of a
 *  quantized table, and the checkpoint says that its rows are of another data type or number of columns. */
PERI_API peri_status peri_checkpoint_read(peri_checkpoint *checkpoint, int64_t index,
                                          const peri_checkpoint_region *region, peri_tensor *out);
/** As peri_checkpoint_read of each of @n rectangles into its tensor, but what they lie in is read once: parts of a
 *  table that was cut otherwise, say. After an error all of @outs are undefined. */
PERI_API peri_status peri_checkpoint_read_several(peri_checkpoint *checkpoint, int64_t index,
                                                  const peri_checkpoint_region *const *regions,
                                                  peri_tensor *const *outs, int32_t n);
/** Bring @out, host memory that has rectangle @region of tensor @index in row-major order as checkpoint number @level
 *  of the chain (peri_checkpoint_level) has it, to what @checkpoint has: rows that no increment since then has are not
 *  read. @level 0: nothing is done; -1: @out has nothing yet, and all is read. Checksums as with peri_checkpoint_read;
 *  after an error @out is undefined. */
PERI_API peri_status peri_checkpoint_read_since(peri_checkpoint *checkpoint, int64_t level, int64_t index,
                                                const peri_checkpoint_region *region, void *out);
/** Of piece @piece of tensor @index, of which this increment has some rows: @many of them from number @from of its
 *  list on. @rows[@many]: which, ascending, counted in the whole tensor. @values: their elements, one row of the piece
 *  after the other, host memory. */
PERI_API peri_status peri_checkpoint_piece_rows(peri_checkpoint *checkpoint, int64_t index, int64_t piece, int64_t from,
                                                int64_t many, int64_t *rows, void *values);
/** Of such a piece, the number in its list of the first row that is @row or more, counted in the whole tensor; as many
 *  as the list has if all are less. */
PERI_API peri_status peri_checkpoint_piece_find(peri_checkpoint *checkpoint, int64_t index, int64_t piece, int64_t row,
                                                int64_t *out);
/** Compare piece @piece of tensor @index with its checksum. PERI_EFORMAT: it differs; the message names the file and
 *  the bytes. */
PERI_API peri_status peri_checkpoint_verify(peri_checkpoint *checkpoint, int64_t index, int64_t piece);
/** Compare the headers of its safetensors files, which only other programs read, with the manifest's checksums (those
 *  that an older version saved have none). PERI_EFORMAT: one differs; the message names the file. */
PERI_API peri_status peri_checkpoint_verify_headers(peri_checkpoint *checkpoint);
/** peri_checkpoint_verify of all pieces, and of all headers, of the first @level checkpoints of the chain
 *  (peri_checkpoint_level): what came since that number; -1: of all of them. */
PERI_API peri_status peri_checkpoint_verify_since(peri_checkpoint *checkpoint, int64_t level);
/** The digest of the checkpoint: XXH3-128 of its manifest, which has the checksums of everything else. "" for a
 *  safetensors file. Borrowed. */
PERI_API const char *peri_checkpoint_digest(const peri_checkpoint *checkpoint);
/** The parent's digest, "" if there is none. Borrowed. */
PERI_API const char *peri_checkpoint_parent(const peri_checkpoint *checkpoint);
/** The digest of the increment for which this full checkpoint stands, "" if it stands for none. Borrowed. */
PERI_API const char *peri_checkpoint_same_as(const peri_checkpoint *checkpoint);
/** Which increment of its chain it is; 0: it is no increment, and none that stands for one. */
PERI_API int64_t peri_checkpoint_increment(const peri_checkpoint *checkpoint);
/** The JSON text that the writer gave along ("{}" for a safetensors file). Borrowed. */
PERI_API const char *peri_checkpoint_values(const peri_checkpoint *checkpoint);

/* -- following a run ----------------------------------------------------------------------------------------------- */

/** Which checkpoint of a folder comes next for a process that has an older one, and of what it already has the rest:
 *
 *     peri_checkpoint_follower_new("checkpoints", &f);
 *     ... every second ...
 *     if (peri_checkpoint_follower_next(f, &c, &level) == PERI_OK) {
 *         if (peri_checkpoint_verify_since(c, level) < 0) peri_checkpoint_follower_refuse(f);    what one has stays
 *         else for each tensor: peri_checkpoint_read_since(c, level, index, &region, memory);
 *         peri_checkpoint_follower_take(f);
 *     }
 *
 * The newest is that of the largest NUMBER among names save-NUMBER-step-STEP, which a Saver gives. In a folder without
 * such names it is the end of the chain that goes on from what was taken, and PERI_EMISMATCH where there are several.
 * Where what was taken is gone, and all numbers are smaller (without numbers: nothing goes on from it), at two looks in
 * a row, it was replaced, the folder has another run by now, or somebody went back: then its newest comes next. */
typedef struct peri_checkpoint_follower peri_checkpoint_follower;

/** One that has taken nothing yet. The folder may be missing. @out new. */
PERI_API peri_status peri_checkpoint_follower_new(const char *folder, peri_checkpoint_follower **out);
/** Free it; NULL is fine. */
PERI_API void peri_checkpoint_follower_release(peri_checkpoint_follower *follower);
/** Look for the newest checkpoint that is newer than what was taken, and not left out (_refuse). PERI_PENDING:
 *  there is none. Checkpoints that cannot be opened are passed over for older ones; if none is left, the error of the
 *  newest. @out borrowed, open until the next call of _next, _refuse or _release. @level: the number in its chain of
 *  what was taken (peri_checkpoint_read_since); -1: the chain does not have it, so all is to be read. */
PERI_API peri_status peri_checkpoint_follower_next(peri_checkpoint_follower *follower, peri_checkpoint **out,
                                                   int64_t *level);
/** What _next gave last is what one has now. */
PERI_API peri_status peri_checkpoint_follower_take(peri_checkpoint_follower *follower);
/** What _next gave last is damaged, or does not fit: the next 7 calls of _next leave it out, after another refusal the
 *  next 15, and so on, up to 511. What a file system of a network shows late, or wrong at first, so becomes good by
 *  itself. Once another one was taken, nothing is left out. */
PERI_API peri_status peri_checkpoint_follower_refuse(peri_checkpoint_follower *follower);
/** One has nothing any more: the next one is read as a whole. */
PERI_API peri_status peri_checkpoint_follower_forget(peri_checkpoint_follower *follower);

/* -- all that a program has ---------------------------------------------------------------------------------------- */

/** What a C program has, by the names that Lua's peri.checkpoint gives (docs/checkpoint_format.md, What programs
 *  save), so that each reads what the other wrote. A save with it, on every rank:
 *
 *     peri_checkpoint_state_new(rank, &state);
 *     peri_checkpoint_state_tensor(state, "model/over.weight", weight);
 *     peri_checkpoint_state_tables(state, "model", "ebc", tables, &config);
 *     peri_checkpoint_folder_new(...), and its path to all ranks;
 *     peri_checkpoint_writer_new(path, stem, 0, &writer);
 *     peri_checkpoint_state_write(state, writer);               and peri_checkpoint_writer_part to rank 0, which does:
 *     peri_checkpoint_state_values(state, NULL, &manifest.values);
 *     peri_checkpoint_publish(...);
 *
 *  and a load, under any plan and number of ranks: peri_checkpoint_open, peri_checkpoint_state_read. Local. */
typedef struct peri_checkpoint_state peri_checkpoint_state;

/** One of nothing. @rank: this process's among those that save together; what all have alike rank 0 writes. @out
 *  new. */
PERI_API peri_status peri_checkpoint_state_new(int32_t rank, peri_checkpoint_state **out);
/** Free it; NULL is fine. */
PERI_API void peri_checkpoint_state_release(peri_checkpoint_state *state);
/** Add @tensor, which all ranks have alike, under the name of part, "/", and the rest: "model/over.weight". Retains
 *  it. */
PERI_API peri_status peri_checkpoint_state_tensor(peri_checkpoint_state *state, const char *name, peri_tensor *tensor);
/** Add the tables of @tables with the states of their fused optimizers, as part @part ("model") has them at @path
 *  ("ebc", or ""). Rows of bytes of quantized tables (PERI_ROWS_*) are one tensor of all ranks' rows for each block of
 *  columns, the k-th with ".k" behind its name.
 *  @config: what the module was made of. Retains the module. PERI_EUNSUPPORTED: tables of raw ids. */
PERI_API peri_status peri_checkpoint_state_tables(peri_checkpoint_state *state, const char *part, const char *path,
                                                  peri_sharded *tables, const peri_sharded_config *config);
/** What peri_checkpoint_config.values says of all that was added: parts, groups of parameters, learning rates. @user:
 *  any JSON beside, which Lua's load returns; or NULL. @out borrowed, until the next call. */
PERI_API peri_status peri_checkpoint_state_values(peri_checkpoint_state *state, const char *user, const char **out);
/** Announce to a new writer what this rank writes of all that was added, put it, and finish the writer. */
PERI_API peri_status peri_checkpoint_state_write(peri_checkpoint_state *state, peri_checkpoint_writer *writer);
/** Load all that was added from an open checkpoint: rectangles of this rank, counts of updates and learning rates.
 *  PERI_EMISMATCH lists what is missing, has another form (of rows of quantized tables also their data type and number
 *  of columns), or has no place here, before anything changes. After another error what was added is undefined. */
PERI_API peri_status peri_checkpoint_state_read(peri_checkpoint_state *state, peri_checkpoint *checkpoint);

#endif
