/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/model.h: a trained model in one file, and answers from it. The file is specified in docs/model_file.md.
 *
 * A model file holds everything that an answer needs: the forward pass as a list of operations, the weights, the
 * embedding tables, and what its inputs are called. It is data: nothing in it is executed, and all of it that could
 * lead astray is checked when it is opened.
 *
 *     peri_model_open("model.peri", 0, &model)              one per process; any number of threads share it
 *     peri_model_context_new(model, 256, 0, &context)       one per thread: all memory that a call needs
 *     peri_model_predict(context, batch, inputs, outputs)   no allocation, no lock, no other thread
 *
 * The answer for a sample is a function of the file and of that sample alone: not of the other samples of the batch,
 * not of how many they are, not of the thread. On one instruction set it has the same bits every time.
 *
 * No function here needs Lua, MPI, or a device.
 *
 * Threads: nothing changes a model (peri_model), so any number of threads may use it at once. A context
 * (peri_model_context), a follower (peri_model_follower) and a writer (peri_model_writer) are used by one thread at a
 * time.
 */
#ifndef PERILUNE_MODEL_H
#define PERILUNE_MODEL_H

#include <perilune/base.h>

/** The newest version of the format; files of all versions up to it can be opened. */
enum { PERI_MODEL_VERSION = 1 };

/** A model file that was opened. Nothing changes it, so any number of threads may use it. Opening again gives another
 *  one. */
typedef struct peri_model peri_model;

/* -- opening ------------------------------------------------------------------------------------------------------- */

/** How to open. */
enum {
    PERI_MODEL_VERIFY = 1, /* read the whole file and compare its checksums, as peri_model_verify */
    PERI_MODEL_COPY = 2,   /* read the file into memory of this process instead of mapping it; it may then be changed */
    PERI_MODEL_GUARD = 4   /* survive that the file is cut short while a call reads it: install a handler for SIGBUS,
                              once in a process, which passes on what does not concern a guarded file. For programs that
                              are nobody's guest */
};

/** Open the model file @path; @flags: PERI_MODEL_*, or 0. Takes a few milliseconds whatever the size of the file, which
 *  is mapped, so that processes share its memory and rows are read from disk when they are first needed. Checks the
 *  header, its checksum, and that all of the file is there. PERI_EFORMAT: it is no model file, or a broken one; the
 *  message says where. PERI_EUNSUPPORTED: a version or an operation that this library does not know. @out new.
 *
 *  Whoever replaces a model file writes beside it and renames (peri_file_write, the exporter): this model then stays
 *  what it was. After a mapped file was cut or written to in place, calls fail with PERI_EIO: each looks at the file's
 *  size and time before it reads, and at its end. Only a file that is cut while a call reads it ends the process with
 *  SIGBUS, unless PERI_MODEL_GUARD or PERI_MODEL_COPY was given. No signal handler is installed without
 *  PERI_MODEL_GUARD. Whatever the bytes of sections are, no call leaves its memory. */
PERI_API peri_status peri_model_open(const char *path, int32_t flags, peri_model **out);
/** Add a reference. */
PERI_API void peri_model_retain(peri_model *model);
/** Give up a reference; NULL is fine. Contexts keep their model. */
PERI_API void peri_model_release(peri_model *model);
/** Read all sections and compare their checksums: PERI_EFORMAT names the first that differs. Blocks as long as reading
 *  the file takes. */
PERI_API peri_status peri_model_verify(const peri_model *model);
/** PERI_OK: the file that was opened is as long and as old as it was then. PERI_EIO: it was cut, written to, or cannot
 *  be asked; what peri_model_predict asks, too. That another file has got its name meanwhile is no change. Always
 *  PERI_OK with PERI_MODEL_COPY. */
PERI_API peri_status peri_model_changed(const peri_model *model);

/* -- what it takes and gives --------------------------------------------------------------------------------------- */

/** What an input is. */
enum {
    PERI_MODEL_DENSE = 0, /* a fixed number of f32 for each sample */
    PERI_MODEL_IDS = 1,   /* a list of ids for each sample, of any length, perhaps with a weight for each id */
    PERI_MODEL_WHOLE = 2, /* a list of whole numbers for each sample, such as times, -2^63 to 2^63 - 1, given as ids
                             are */
    PERI_MODEL_NUMBERS = 3 /* a list of f32 for each sample, such as prices, one for each member of the list of another
                              input (peri_model_input_rules.like), given as weights are: `weights` and `offsets` */
};

/** What becomes of an id that the model has no row for. */
enum {
    PERI_MODEL_ID_REFUSE = 0, /* an error that names the feature, the sample and the id */
    PERI_MODEL_ID_SKIP = 1    /* its row counts as zeros; with mean pooling it counts in the number of ids. With a map:
                                 what the map says of ids that have no row: one that they share, another id's, or
                                 zeros */
};

/** One input. Texts are borrowed from the model. */
typedef struct peri_model_input {
    const char *name;      /* of a dense input, or of a feature; unique among inputs */
    int32_t kind;          /* PERI_MODEL_DENSE, PERI_MODEL_IDS, ... */
    int32_t unknown;       /* IDS: PERI_MODEL_ID_* */
    int64_t columns;       /* DENSE: numbers of a sample; else 0 */
    int64_t rows;          /* IDS without a map: ids are 0 .. rows - 1; with a map: rows of its table; else 0 */
    bool weighted;         /* IDS: each id has a weight, an f32 */
    bool mapped;           /* IDS: ids are any 64-bit numbers (read as uint64_t, all 2^64 are ids), of which the model's
                              map makes rows */
    bool optional;         /* may be missing: a list is then empty, a dense input is `missing` */
    bool finite;           /* DENSE, and weights: NaN and infinities are refused; false: they are computed with */
    float missing;         /* DENSE: what each number of a missing input is, if `optional` */
    int64_t spare[4];      /* 0: nothing that this header knows of */
} peri_model_input;

/** One output: @columns f32 for each sample, or for each of a list (peri_model_output_list). */
typedef struct peri_model_output {
    const char *name;
    int64_t columns;
    int64_t spare[4]; /* likewise */
} peri_model_output;

/** What else is known about a model. Texts are borrowed from it. */
typedef struct peri_model_info {
    int64_t size;         /* sizeof(peri_model_info) */
    const char *path;     /* as it was opened */
    const char *name;     /* whatever the exporter was told, "" if nothing */
    const char *producer; /* "perilune 0.1.0" */
    const char *digest;   /* identifies the model: XXH3-128 of the header, which has all checksums, in 32 hexadecimal
                             digits */
    int32_t version;      /* of the format */
    int32_t operations;
    int64_t bytes;        /* of the file */
    int64_t table_bytes;  /* of these, those of embedding tables */
    int64_t step;         /* of the training, that the model comes from; -1: not known */
    int64_t inputs, outputs, tables;
} peri_model_info;

/** One embedding table of the file. */
typedef struct peri_model_table {
    const char *name;
    const char *dtype; /* "f32", "f16", "bf16", "int8", "int8_half", "int4", "int2", "fp8" */
    int64_t rows, columns, bytes;
    int64_t spare[4]; /* likewise */
} peri_model_table;

/** Describe @model. @out: its `size` is set. */
PERI_API peri_status peri_model_describe(const peri_model *model, peri_model_info *out);
/** The inputs in the order that peri_model_predict takes them; @n: their number. Borrowed, lives as long as the
 *  model. */
PERI_API const peri_model_input *peri_model_inputs(const peri_model *model, int32_t *n);
/** The outputs, likewise. */
PERI_API const peri_model_output *peri_model_outputs(const peri_model *model, int32_t *n);
/** What an input's values have to be like beside that. Inputs are numbers in peri_model_inputs. */
typedef struct peri_model_input_rules {
    int64_t size;   /* sizeof(peri_model_input_rules) */
    int64_t length; /* all but DENSE: each list has so many; 0: any number */
    int64_t like;   /* all but DENSE: lists are as long as those of this input; -1: as they please */
    int64_t counts; /* DENSE: a whole number from 0 to the length of the sample's list of this input; -1: any number */
} peri_model_input_rules;

/** The rules of input @input. @out: its `size` is set. */
PERI_API peri_status peri_model_input_describe(const peri_model *model, int64_t input, peri_model_input_rules *out);
/** -1: output @output has `columns` numbers for each sample. Else each sample has a list, with `columns` numbers for
 *  each member, and at most as many members as the sample's list of the input with this number has. */
PERI_API int64_t peri_model_output_list(const peri_model *model, int64_t output);
/** Whether output @output has the best of all items, or their scores, the best one first: of its columns the first k
 *  are then those of the k best ones. */
PERI_API bool peri_model_output_best(const peri_model *model, int64_t output);
/** The tables, likewise. */
PERI_API const peri_model_table *peri_model_tables(const peri_model *model, int32_t *n);

/* -- answers ------------------------------------------------------------------------------------------------------- */

/** The values of one input for all samples of a batch. Everything is borrowed for the call. A missing input is all
 *  NULL. */
typedef struct peri_model_values {
    const float *dense;     /* DENSE: [batch][columns] */
    const int64_t *ids;     /* IDS: the ids of all samples, one list after the other (NULL is fine where all lists are
                               empty) */
    const int64_t *offsets; /* IDS: [batch + 1], from 0: the list of sample b is ids[offsets[b] .. offsets[b + 1]) */
    const float *weights;   /* IDS that are `weighted`: one for each id; NUMBERS: the numbers themselves */
    int64_t spare[2];       /* 0; PERI_EUNSUPPORTED otherwise: of a later header */
} peri_model_values;

/** Whether the model takes these values, of as many inputs and in the order that peri_model_inputs says: what
 *  peri_model_predict checks, and computes nothing. After PERI_OK the same values, also between those of others in a
 *  larger batch, are not refused by predict. A server so finds out which request is wrong before it joins them.
 *  PERI_EINVAL: missing or malformed; PERI_ERANGE: an id without a row, a number that is not finite. The message names
 *  the input, the sample (from 0), and what is allowed. @skipped (or NULL): += ids without a row that
 *  PERI_MODEL_ID_SKIP lets pass, and raw ids without a row of their own. No allocation, no lock. */
PERI_API peri_status peri_model_check(const peri_model *model, int64_t batch, const peri_model_values *inputs,
                                      int64_t *skipped);

/** The memory of one thread's calls. */
typedef struct peri_model_context peri_model_context;

/** Plan and allocate the memory of calls with up to @max_batch samples. Intermediate results whose lifetimes do not
 *  overlap share memory, and samples are computed in blocks, so this grows no further from some hundred samples on.
 *  @max_ids: most ids of one sample's list, in calls with this context; 0: 65536. Retains @model. A context is for one
 *  thread at a time. @out new. */
PERI_API peri_status peri_model_context_new(peri_model *model, int64_t max_batch, int64_t max_ids,
                                            peri_model_context **out);
/** Give it up; NULL is fine. */
PERI_API void peri_model_context_release(peri_model_context *context);
/** Bytes that it takes. */
PERI_API int64_t peri_model_context_bytes(const peri_model_context *context);
/** Answers for @batch samples (0..max_batch): @inputs and @outputs in the order of peri_model_inputs and
 *  peri_model_outputs. @outputs[i]: [batch][columns] in the caller's memory, or NULL: not wanted. Checks the values
 *  first as peri_model_check does, and then writes nothing if it refuses them. Outputs overlap neither inputs nor each
 *  other. Computes in the calling thread, allocates nothing, and takes no lock. PERI_EIO: the mapped file was cut or
 *  written to since it was opened; outputs mean nothing then. PERI_EUNSUPPORTED: a wanted output is a list of each
 *  sample. */
PERI_API peri_status peri_model_predict(peri_model_context *context, int64_t batch, const peri_model_values *inputs,
                                        float *const *outputs);
/** The same, for models with outputs that are lists: @outputs[i] of such a one has room for `columns` f32 for each of
 *  the ids that the batch has of the input that peri_model_output_list says, and the list of sample b begins at the
 *  member offsets[i][b] and ends before offsets[i][b + 1]. @offsets[i]: [batch + 1], wanted with such an output; of
 *  others it is not looked at, and may be NULL. */
PERI_API peri_status peri_model_predict_lists(peri_model_context *context, int64_t batch,
                                              const peri_model_values *inputs, float *const *outputs,
                                              int64_t *const *offsets);

/* -- following a run ----------------------------------------------------------------------------------------------- */

/** A model that goes on learning: what a trainer saves into a folder of checkpoints (perilune/checkpoint.h), increments
 *  and full ones, is in its answers soon after. It needs a file whose sections say which tensors they were made of, as
 *  exporters write it.
 *
 *     peri_model_follower_new("model.peri", "checkpoints", NULL, 0, &f);
 *     ... every 100 ms, in one thread ...
 *     if (peri_model_follower_poll(f, &model) == PERI_OK) {
 *         ... contexts of other threads go over to `model` when they please ...
 *     }
 *
 * There are two models, of which one answers while the other is changed: a model that somebody has a reference to never
 * changes. Memory: the pages that differ from the file's, twice. One thread at a time. */
typedef struct peri_model_follower peri_model_follower;

/** Open the file @path for following what programs save into @folder, which may be missing, under the name that they
 *  gave the model (@name; NULL: "model", as in peri.checkpoint.save(path, { model = model })). @flags:
 *  PERI_MODEL_VERIFY, PERI_MODEL_GUARD, or 0.
 *  PERI_EUNSUPPORTED: the file does not say where a section comes from. @out new. */
PERI_API peri_status peri_model_follower_new(const char *path, const char *folder, const char *name, int32_t flags,
                                             peri_model_follower **out);
/** Take the newest checkpoint, if there is one that is newer than what the model has. PERI_PENDING: there is none, or
 *  somebody still has the model before the last one. PERI_OK: @out new (peri_model_release): the model that has it; its
 *  `step` is that of the checkpoint's name, its `digest` the checkpoint's. Reads what changed since then; all of that
 *  is compared with its checksums first. Other errors say why what is there cannot be had; it is tried again, and less
 *  and less often where a checkpoint is damaged, does not fit the model, or has numbers that the file's dtypes do not
 *  hold (PERI_ERANGE; peri_checkpoint_follower_refuse). The models
 *  that were given stay what they are. With PERI_MODEL_GUARD: a model that has met a page of the file that could not be
 *  read refuses calls (PERI_EIO), and a later poll gives another one in its place. */
PERI_API peri_status peri_model_follower_poll(peri_model_follower *follower, peri_model **out);
/** The newest model, at first as the file has it. Borrowed. */
PERI_API peri_model *peri_model_follower_model(const peri_model_follower *follower);
/** The checkpoint that it has; NULL: none yet. Borrowed until the next poll. */
PERI_API const char *peri_model_follower_path(const peri_model_follower *follower);
/** Free it; NULL is fine. */
PERI_API void peri_model_follower_release(peri_model_follower *follower);

/* -- writing ------------------------------------------------------------------------------------------------------- */

/** A model file that is being written: what exporters use. Sections come first, one after the other; then the header, a
 *  JSON text that docs/model_file.md specifies and that the caller makes; then the file gets its name. For one thread
 *  at a time. */
typedef struct peri_model_writer peri_model_writer;

/** Where a section lies. */
typedef struct peri_model_writer_place {
    int64_t offset, bytes;
    uint64_t checksum; /* XXH3-64 of the bytes */
} peri_model_writer_place;

/** Begin a file that will be @path, beside it and under another name. Folders that are missing are made. @out new. */
PERI_API peri_status peri_model_writer_new(const char *path, peri_model_writer **out);
/** Begin the next section; *section: its number, from 0. */
PERI_API peri_status peri_model_writer_begin(peri_model_writer *writer, int32_t *section);
/** Append @bytes of @data to the section. */
PERI_API peri_status peri_model_writer_put(peri_model_writer *writer, const void *data, int64_t bytes);
/** Append the matrix @weight [columns][inner], as peri_op_linear takes it, in the panels that the operation `linear`
 *  reads, as @dtype: PERI_F32, PERI_BF16 (rounded to nearest even), or PERI_I8 (codes from -127 to 127, and a scale for
 *  each column). PERI_ERANGE: a number would become another than by rounding (above the range of bf16; not finite as
 *  PERI_I8). */
PERI_API peri_status peri_model_writer_matrix(peri_model_writer *writer, const float *weight, int64_t columns,
                                              int64_t inner, int32_t dtype);
/** The same as PERI_F32. */
PERI_API peri_status peri_model_writer_panels(peri_model_writer *writer, const float *weight, int64_t columns,
                                              int64_t inner);
/** Append the index of a map of raw ids, as docs/model_file.md draws it: @ids[rows] (1 to 2^32 - 2 rows) has the id of
 *  each row, and @free where a row has none. */
PERI_API peri_status peri_model_writer_index(peri_model_writer *writer, const int64_t *ids, int64_t rows, int64_t free);
/** Where section @section lies; it is ended if it was the last. */
PERI_API peri_status peri_model_writer_section(peri_model_writer *writer, int32_t section,
                                               peri_model_writer_place *out);
/** Write the header, and what the file begins with, and wait until all of it is on disk. The file at
 *  peri_model_writer_path can be opened from now on. */
PERI_API peri_status peri_model_writer_finish(peri_model_writer *writer, const char *header, int64_t bytes);
/** Where the file is until it is published. Borrowed. */
PERI_API const char *peri_model_writer_path(const peri_model_writer *writer);
/** Give the finished file its name, in the place of what was there. */
PERI_API peri_status peri_model_writer_publish(peri_model_writer *writer);
/** Give it up; what was not published is removed. NULL is fine. */
PERI_API void peri_model_writer_release(peri_model_writer *writer);

#endif
