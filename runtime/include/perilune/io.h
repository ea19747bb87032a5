/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/io.h: batches in host memory, the Criteo reader, synthetic data, what judges a model (metrics, a baseline),
 * and loading on threads of their own.
 *
 * Everything here works on host memory, serially, and is local: no function communicates. A batch on the host becomes
 * tensors and a KeyedJaggedTensor by Lua's perilune.data. Distributed reading needs no communication either: every rank
 * takes its own rows of each *global* batch of G rows, rows [G*rank/world, G*(rank+1)/world) of it, so that what is
 * trained does not depend on the number of ranks.
 *
 * Threads: each object is used by one thread at a time: peri_batch, peri_criteo, peri_arrays, peri_columns,
 * peri_columns_writer, peri_logistic, and peri_feed, which has threads of its own beside it. Two objects may be used
 * by two threads at once.
 */
#ifndef PERILUNE_IO_H
#define PERILUNE_IO_H

#include <perilune/jagged.h>
#include <perilune/tensor.h>

/* -- batches ------------------------------------------------------------------------------------------------------- */

/** Samples in host memory, made for one set of features and filled again and again. Ids are key-major: all bags of
 *  feature 0, row after row, then those of feature 1. Fields are read-only for callers of the readers; whoever fills a
 *  batch by hand writes all of them. */
typedef struct peri_batch {
    int32_t dense_features, sparse_features;
    int64_t row_capacity;   /* rows that `dense`, `labels`, `lengths` have room for */
    int64_t value_capacity; /* ids that `values` has room for */
    int64_t rows, ids;      /* what is in it */
    int64_t global_row;     /* number of its first row in this pass over the data */
    int64_t global_rows;    /* rows of the global batch of which this is one rank's part; 0: the data is at its end */
    float *dense;           /* [rows, dense_features] */
    float *labels;          /* [rows], of the Criteo layout 0 or 1 */
    int64_t *values;        /* [ids] */
    int32_t *lengths;       /* [sparse_features, rows]: ids per bag */
} peri_batch;

/** An empty batch with room for @rows rows and @ids ids. @out new. */
PERI_API peri_status peri_batch_new(int32_t dense_features, int32_t sparse_features, int64_t rows, int64_t ids,
                                    peri_batch **out);
/** Free it; NULL is fine. A batch has one owner. */
PERI_API void peri_batch_release(peri_batch *batch);
/** Make room for at least @ids ids, keeping those that are there; `values` may move. */
PERI_API peri_status peri_batch_reserve(peri_batch *batch, int64_t ids);
/** The rows that @rank of @world ranks takes of a global batch of @rows: [begin, end). */
PERI_API void peri_batch_share(int64_t rows, int32_t rank, int32_t world, int64_t *begin, int64_t *end);

/* -- the Criteo layout --------------------------------------------------------------------------------------------- */

/** What becomes of an integer x. A missing one becomes 0. */
enum {
    PERI_DENSE_RAW = 0,       /* x */
    PERI_DENSE_LOG = 1,       /* ln(1 + max(x, 0)): what DLRM's own reader does */
    PERI_DENSE_SIGNED_LOG = 2 /* sign(x) ln(1 + |x|) */
};

/** What becomes of a category, read as an unsigned 64-bit number x, in a table of n rows. */
enum {
    PERI_IDS_HASH = 0, /* XXH3_64bits(x as 8 little-endian bytes) mod n */
    PERI_IDS_MOD = 1,  /* x mod n */
    PERI_IDS_EXACT = 2, /* x itself, which is below n: else PERI_ERANGE. With n = 0 any x, as an int64_t of the same
                           bits: raw ids, for a peri_collision; a column may then have -2^63..-1, too. Not of the Criteo
                           layout */
    PERI_IDS_TEXT = 3  /* columns of text: XXH3_64bits of its bytes, whatever they are, mod n */
};

/** What becomes of a missing category. */
enum {
    PERI_MISSING_EMPTY = 0, /* an empty bag */
    PERI_MISSING_ZERO = 1   /* id 0, which is then kept for it: the others share 1..n-1 as above, with n-1 for n, plus
                               1 */
};

typedef struct peri_criteo_config {
    int64_t size; /* sizeof(peri_criteo_config) */
    const char *path;
    const int64_t *table_rows; /* [sparse_features], each > 0 (> 1 with PERI_MISSING_ZERO); copied */
    int32_t dense_features, sparse_features; /* 13 and 26; 0 is allowed for one of them */
    int32_t dense, ids, missing;             /* PERI_DENSE_*, PERI_IDS_*, PERI_MISSING_* */
    int32_t rank, world;                     /* 0 <= rank < world; world 0: 1 */
    int64_t batch_rows;                      /* of the global batch, > 0 */
    double begin, end;                       /* part of the file by its bytes, 0 <= begin <= end <= 1: lines that start
                                                in it; both 0: all */
    const char *const *more;                 /* [n_more] paths of files that follow `path`: all are read as one;
                                                copied */
    int32_t n_more;
} peri_criteo_config;

/** A reader of lines: of the Criteo layout, "label TAB integers TAB hexadecimal categories", every field but the label
 *  possibly empty, or of another one (peri_csv_open). Lines are ended by LF or CR LF, the last one of a file by its end
 *  too. A byte order mark is left out. Files may be packed by gzip (each member of one is read): they are then read as
 *  a whole, in order, by every rank. A pipe (whatever is no regular file) is read once, by one rank, as a whole. */
typedef struct peri_criteo peri_criteo;

/** Open files or a pipe. PERI_EIO with the system's reason; PERI_EINVAL for a part of a pipe or a packed file, or
 *  several ranks of a pipe; PERI_EFORMAT for a file that is empty or no text. @out new. */
PERI_API peri_status peri_criteo_open(const peri_criteo_config *config, peri_criteo **out);
/** The same over @size bytes of @text in memory, which the caller keeps until the release; config.path only names it
 *  in messages.
 *  @out new. */
PERI_API peri_status peri_criteo_open_memory(const peri_criteo_config *config, const char *text, int64_t size,
                                             peri_criteo **out);
PERI_API void peri_criteo_release(peri_criteo *reader);
/** Fill @batch (made for the same numbers of features; its room grows as needed) with this rank's rows of the next
 *  global batch. At the end of the part batch->global_rows is 0. PERI_EFORMAT names file, line, column and text,
 *  PERI_EIO the system's reason or that the file became shorter; the reader then stays where it is. PERI_EINVAL for a
 *  second pass over a pipe. Blocks while a pipe is empty. */
PERI_API peri_status peri_criteo_next(peri_criteo *reader, peri_batch *batch);
/** Leave the next global batch out; @rows: its rows, of all ranks, fewer at the end of the part, 0 behind it. Fails as
 *  peri_criteo_next. */
PERI_API peri_status peri_criteo_skip(peri_criteo *reader, int64_t *rows);
/** Several readers of one part of a file, each on a thread of its own, can take turns at its batches: each leaves out
 *  those of the others. Where lines begin they tell each other in an index, memory of so many 64-bit words; 0 where
 *  packed files are read, which have none; a negative status for a pipe. */
PERI_API int64_t peri_criteo_index_words(const peri_criteo *reader);
/** Make @words an index of that part of the file, before anybody shares it. */
PERI_API peri_status peri_criteo_index(const peri_criteo *reader, int64_t *words);
/** Use the index @words, and tell what this reader finds, from now on (it begins again at its first line). Borrowed
 *  until the release. PERI_EINVAL if the file had another size when the index was made. */
PERI_API peri_status peri_criteo_share(peri_criteo *reader, int64_t *words);
/** Start again at the first line of the part. */
PERI_API void peri_criteo_rewind(peri_criteo *reader);
/** Lines of the part (counted at every call); a negative status as peri_criteo_next, PERI_EINVAL for a pipe. */
PERI_API int64_t peri_criteo_count(peri_criteo *reader);

/* -- lines of columns ---------------------------------------------------------------------------------------------- */

/** What a column has. */
enum {
    PERI_COLUMN_SKIP = 0,  /* nothing that is wanted */
    PERI_COLUMN_LABEL = 1, /* the label, a finite number; one column at most, 0 without it */
    PERI_COLUMN_DENSE = 2, /* a number; an empty one becomes `fallback`, which is transformed like the others */
    PERI_COLUMN_IDS = 3    /* a bag of ids, with `separator` between them; an empty one is an empty bag */
};

/** A column of a file. Dense and sparse features are numbered in the order in which they are described. */
typedef struct peri_csv_column {
    int64_t size;       /* sizeof(peri_csv_column) */
    const char *name;   /* for messages and, where files have a header line, for finding it */
    int32_t kind;       /* PERI_COLUMN_* */
    int32_t dense;      /* DENSE: PERI_DENSE_* */
    double fallback;    /* DENSE: what an empty one has */
    int32_t ids;        /* IDS: PERI_IDS_* */
    int32_t base;       /* IDS: 10 or 16: how numbers are written; 0: 10 */
    int64_t table_rows; /* IDS: > 0; 0 with PERI_IDS_EXACT: raw ids */
    int64_t most;       /* IDS: so many of a bag are kept, the first ones; 0: all */
    int32_t separator;  /* IDS: a character; 0: the column has one id at most */
} peri_csv_column;

typedef struct peri_csv_config {
    int64_t size;                   /* sizeof(peri_csv_config) */
    const char *const *paths;       /* [n_paths] files that are read as one, or one pipe; copied */
    const peri_csv_column *columns; /* [n_columns]; copied */
    int32_t n_paths, n_columns;
    int32_t delimiter;              /* a character that is no quotation mark and no line end; 0: a comma */
    bool header;                    /* the first line of each file names its columns: those that are described are found
                                       by their names, in any order, and others are left out; else columns are described
                                       in the order of the file, all */
    int32_t rank, world;            /* 0 <= rank < world; world 0: 1 */
    int64_t batch_rows;             /* of the global batch, > 0 */
    double begin, end;              /* part of the text by its bytes, as peri_criteo_config's */
} peri_csv_config;

/** Open files of lines of columns. A field may stand between quotation marks; it then may have delimiters in it, and
 *  two quotation marks for one, but no line end. Fails as peri_criteo_open; PERI_EFORMAT too for a header without a
 *  column. @out new: released, read, left out, shared and counted by the functions of peri_criteo. PERI_ERANGE of
 *  peri_criteo_next names an id that is not below its table's rows. */
PERI_API peri_status peri_csv_open(const peri_csv_config *config, peri_criteo **out);

/* -- arrays in files ----------------------------------------------------------------------------------------------- */

/** The arrays of a file that NumPy wrote: npy, which has one, or npz, a zip archive (zip64, too) of several. Files are
 *  mapped, not read: one that is cut short while it is in use ends the process (SIGBUS), at whoever reads behind its
 *  new end. A program that has to survive that reads the file into memory and opens it there: peri_arrays_open_memory.
 *  Whoever replaces such a file writes beside it and renames. Members of an npz that are packed (savez_compressed) are
 *  unpacked into memory. */
typedef struct peri_arrays peri_arrays;

/** An array: little-endian elements, the last dimension densest, at an address that may be odd. */
typedef struct peri_array {
    int64_t size;                 /* sizeof(peri_array) */
    const char *name;             /* of the member of an npz, without ".npy"; "" of an npy */
    const void *data;
    int64_t shape[8], elements;
    int32_t ndim, dtype;          /* PERI_F32, F64, F16, I64, I32, I16, I8, U8 or BOOL */
} peri_array;

/** Open a file. PERI_EIO with the system's reason; PERI_EFORMAT for one that is empty, damaged or of another kind, with
 *  what is wrong where;
 *  PERI_EUNSUPPORTED for other elements. @out new. */
PERI_API peri_status peri_arrays_open(const char *path, peri_arrays **out);
/** The same of @size bytes at @bytes, which the caller keeps until the release; @path only names them. @out new. */
PERI_API peri_status peri_arrays_open_memory(const char *path, const void *bytes, int64_t size, peri_arrays **out);
PERI_API void peri_arrays_release(peri_arrays *arrays);
PERI_API int32_t peri_arrays_count(const peri_arrays *arrays);
/** Array @i, in the order of the file; name and data are borrowed until the release. */
PERI_API peri_status peri_arrays_get(const peri_arrays *arrays, int32_t i, peri_array *out);

/* -- samples in arrays --------------------------------------------------------------------------------------------- */

/** Row i of it is the elements data[i * stride], ..., data[i * stride + count - 1]. At an address that may be odd. */
typedef struct peri_rows {
    const void *data; /* NULL: there are none */
    int64_t stride;
    int32_t dtype, count;
} peri_rows;

/** Samples of one file, or of arrays that belong together. Their ids are either in an array per feature, with so many
 *  in every row, or, with `offsets`, in one array, row after row, of each row feature by feature. */
typedef struct peri_columns_part {
    int64_t size;           /* sizeof(peri_columns_part) */
    const char *name;       /* for messages; copied */
    int64_t rows;
    peri_rows dense;        /* count: the dense features */
    peri_rows labels;       /* count: 1, or NULL: 0 */
    const peri_rows *ids;   /* [sparse_features], copied; NULL with offsets */
    const int64_t *offsets; /* [rows + 1]: ids of row i are values[offsets[i]] and those that follow */
    peri_rows lengths;      /* count: the sparse features: ids of each */
    peri_rows values;       /* stride 1: all ids */
    int64_t total;          /* elements of `values` */
    /* Where samples are, for messages; kept by the caller until the release, as the arrays are. */
    int64_t first_row;             /* the number that the first row has in its file */
    const char *labels_name;       /* the file of the labels; NULL: `name` */
    const char *const *ids_names;  /* [sparse_features] that of each feature's ids; NULL: `name` */
} peri_columns_part;

typedef struct peri_columns_config {
    int64_t size;               /* sizeof(peri_columns_config) */
    const int64_t *table_rows;  /* [sparse_features], each > 0, or with PERI_IDS_EXACT 0: raw ids; copied */
    int32_t dense_features, sparse_features;
    int32_t dense, ids;         /* PERI_DENSE_*; PERI_IDS_* but TEXT. PERI_IDS_MOD of a negative id is not negative,
                                   either */
    int64_t padding;            /* with `padded`: ids that are this number are none */
    bool padded;
    int64_t block_rows, blocks; /* shuffling: blocks of so many rows that lie together come in a random order, and of so
                                   many blocks that follow each other the rows do; 0: rows come in their own order */
    uint64_t seed;              /* of the shuffling */
} peri_columns_config;

/** Samples in arrays, in their own order or shuffled. */
typedef struct peri_columns peri_columns;

/** @out new. */
PERI_API peri_status peri_columns_new(const peri_columns_config *config, peri_columns **out);
PERI_API void peri_columns_release(peri_columns *columns);
/** Add the samples of a part, behind those that are there. Its arrays are borrowed until the release. PERI_EINVAL for
 *  arrays that do not fit. */
PERI_API peri_status peri_columns_add(peri_columns *columns, const peri_columns_part *part);
/** Samples of all parts. */
PERI_API int64_t peri_columns_rows(const peri_columns *columns);
/** Take the order of pass @epoch, which depends on the seed, the pass and the number of samples only. */
PERI_API peri_status peri_columns_epoch(peri_columns *columns, int64_t epoch);
/** Fill @batch with samples [first, first + rows) of the order. PERI_ERANGE names part, row and feature of an id
 *  outside its table, PERI_EFORMAT those of a number that is not finite, or of offsets that do not fit. */
PERI_API peri_status peri_columns_fill(peri_columns *columns, int64_t first, int64_t rows, peri_batch *batch);

/** Writes batches into a new folder, as arrays that NumPy reads: dense.npy f32 [rows, dense], labels.npy f32 [rows],
 *  lengths.npy i16 [rows, sparse], offsets.npy i64 [rows + 1], ids.npy i64 or i32 [ids]; and samples.txt, a text of the
 *  caller's. Until all is written the folder has ".part" behind its name. */
typedef struct peri_columns_writer peri_columns_writer;

/** @wide: ids are i64, any of them. PERI_EIO if @folder exists, or cannot be made. A folder ".part" of an earlier
 *  writer is written again. @out new. */
PERI_API peri_status peri_columns_writer_new(const char *folder, int32_t dense_features, int32_t sparse_features,
                                             bool wide, peri_columns_writer **out);
/** Write the samples of @batch. PERI_ERANGE for a bag of more than 32767 ids, or where ids are i32 one that is negative
 *  or too large for that. */
PERI_API peri_status peri_columns_writer_add(peri_columns_writer *writer, const peri_batch *batch);
/** All is written: the arrays get their sizes, samples.txt is @text, all is on the disk, and the folder gets its
 *  name. */
PERI_API peri_status peri_columns_writer_finish(peri_columns_writer *writer, const char *text);
/** Without a finish before the folder keeps its ".part". */
PERI_API void peri_columns_writer_release(peri_columns_writer *writer);

/* -- synthetic data ------------------------------------------------------------------------------------------------ */

/** Samples shaped like Criteo's. Every number of row i depends on (seed, i) and the features' own fields only. Ids
 *  follow a power law: P(id) falls as (id + 1)^-alpha. The label is drawn from a hidden logistic model: a weight per
 *  integer and per id, and, scaled by `interaction`, dot products of hidden vectors of neighbouring features, which no
 *  logistic regression can express. */
typedef struct peri_synthetic_args {
    int64_t size; /* sizeof(peri_synthetic_args) */
    const int64_t *table_rows; /* [sparse_features], each 1..2^31 */
    const int32_t *bag_min, *bag_max; /* [sparse_features]: ids per bag, uniform in bag_min..bag_max, 0 <= min <= max */
    int32_t dense_features, sparse_features;
    uint64_t seed;
    double alpha;       /* >= 0; 0: uniform ids; about 1.05 looks like click logs */
    double signal;      /* scale of the first-order part of the logit */
    double interaction; /* scale of the second-order part */
    double bias;        /* constant of the logit: lower makes positives rarer */
} peri_synthetic_args;

/** Fill @batch with rows [first, first + rows) (its room grows as needed). */
PERI_API peri_status peri_synthetic_fill(const peri_synthetic_args *args, int64_t first, int64_t rows,
                                         peri_batch *batch);
/** Write rows [first, first + rows) to @path in the Criteo layout: bags of 0 or 1 id only (bag_max <= 1), ids as 8
 *  hexadecimal digits. Read back with PERI_DENSE_LOG and PERI_IDS_MOD they are what peri_synthetic_fill makes. */
PERI_API peri_status peri_synthetic_write(const peri_synthetic_args *args, int64_t first, int64_t rows,
                                          const char *path);
/** A number in [0, 1) that depends on (seed, stream, index) only. For samplers in Lua. */
PERI_API double peri_random_uniform(uint64_t seed, uint64_t stream, uint64_t index);

/* -- logistic regression ------------------------------------------------------------------------------------------- */

typedef struct peri_logistic_config {
    int64_t size; /* sizeof(peri_logistic_config) */
    const int64_t *table_rows; /* [sparse_features] */
    int32_t dense_features, sparse_features;
    double learning_rate, l2;
} peri_logistic_config;

/** A logistic regression over the ids of every feature (one weight each) and the dense features, trained one sample at
 *  a time by Adagrad: s += g^2, w -= learning_rate * g / sqrt(s + 1e-8), where g includes l2 * w. All weights start at
 *  0. */
typedef struct peri_logistic peri_logistic;

/** @out new. */
PERI_API peri_status peri_logistic_new(const peri_logistic_config *config, peri_logistic **out);
PERI_API void peri_logistic_release(peri_logistic *model);
/** Train on the rows of @batch, in their order. @loss: mean log-loss before each sample's own update. PERI_ERANGE for
 *  ids outside. */
PERI_API peri_status peri_logistic_train(peri_logistic *model, const peri_batch *batch, double *loss);
/** Probabilities of the rows of @batch into @out[rows]. */
PERI_API peri_status peri_logistic_predict(peri_logistic *model, const peri_batch *batch, float *out);

/* -- metrics ------------------------------------------------------------------------------------------------------- */

/* Everywhere predictions and labels are numbers, labels and weights are finite, and weights are not negative; a sample
 * of weight 0 changes nothing but what counts samples without their weights. What else a function or a metric needs is
 * said with it; PERI_EINVAL names the first sample that has it not, and nothing was changed. */

/** Predictions, labels and weights of @n samples, borrowed. */
typedef struct peri_metric_samples {
    const double *predictions, *labels;
    const double *weights; /* NULL: all 1 */
    int64_t n;
} peri_metric_samples;

/** What a metric needs of its samples beside that; flags. */
enum {
    PERI_METRIC_FINITE = 1,               /* predictions are finite (else they may be infinite: only their order
                                             counts) */
    PERI_METRIC_PROBABILITIES = 2,        /* predictions lie in [0, 1]: no logits */
    PERI_METRIC_RATES = 4,                /* predictions are finite and not negative */
    PERI_METRIC_LABELS_OF_CLASSES = 8,    /* labels lie in [0, 1]: 1 positive, 0 negative, between them a share */
    PERI_METRIC_LABELS_NOT_NEGATIVE = 16
};
/** Whether the samples are what a metric needs. @name begins the error's message. */
PERI_API peri_status peri_metric_check(const peri_metric_samples *samples, int32_t needs, const char *name);

/** Sums over samples, in their order: what the metrics that only need sums are computed from. All members are f64. */
typedef struct peri_metric_sums {
    double n, weight;                    /* samples; sum w */
    double label, prediction;            /* sum w*y, sum w*p */
    double plain_label;                  /* sum y */
    double cross_entropy;                /* sum of -w (y log2 p + (1-y) log2 (1-p)), p kept inside [1e-12, 1 - 1e-12];
                                            this and the next two are NaN if a prediction or a label lies outside [0,
                                            1] */
    double positive_cross_entropy;       /* its part of y: sum of -w y log2 p */
    double plain_cross_entropy;          /* cross_entropy with all w = 1 */
    double square_error, absolute_error; /* sum w (p-y)^2, sum w |p-y| */
    double ones_square_error;            /* sum w (1-y)^2: the square error of predicting 1 */
    double correct;                      /* sum of w*y where p >= threshold, of w*(1-y) elsewhere */
    double true_positive;                /* sum of w*y where p >= threshold */
    double false_positive;               /* sum of w*(1-y) where p >= threshold */
    double false_negative;               /* sum of w*y where p < threshold */
} peri_metric_sums;

/** Add the samples, whose predictions are finite, to @sums. */
PERI_API peri_status peri_metric_add(const peri_metric_samples *samples, double threshold, peri_metric_sums *sums);
/** Add the sums @part, of other samples with the same threshold, to @sums: those of other threads and ranks, or of the
 *  newest parts of a window. */
PERI_API peri_status peri_metric_merge(const peri_metric_sums *part, peri_metric_sums *sums);
/** The name of metric @i that is a function of sums, from 0 on: "ne", "logloss", "calibration", ...; NULL: there are no
 *  more. What they are: docs/models.md. Static text. */
PERI_API const char *peri_metric_name(int32_t i);
/** What metric @name needs of its samples (peri_metric_check), or PERI_EINVAL, which lists the names. */
PERI_API int32_t peri_metric_needs(const char *name);
/** The value of metric @name over @sums. NaN where the samples say nothing of it. PERI_EINVAL: there is no such
 *  metric. */
PERI_API peri_status peri_metric_value(const peri_metric_sums *sums, const char *name, double *out);
/** Area under the ROC curve, of labels in [0, 1]; a tie between a positive and a negative counts one half; 0.5 when a
 *  class has no weight. n log n. */
PERI_API peri_status peri_metric_auc(const peri_metric_samples *samples, double *out);
/** Average precision, of labels in [0, 1]: the sum over distinct predictions, from the highest, of precision times the
 *  growth of recall; 0 without positives. */
PERI_API peri_status peri_metric_auprc(const peri_metric_samples *samples, double *out);
/** Regression AUC: the share of all pairs of samples, each weighted w_i*w_j, whose labels and predictions are not in
 *  opposite orders; NaN for less than two samples that have weight. n log n. */
PERI_API peri_status peri_metric_rauc(const peri_metric_samples *samples, double *out);
/** XAUC, of finite predictions: over all pairs, weighted w_i*w_j: @right = pairs in the same strict order, or tied, by
 *  both label and prediction; @pairs = all. PERI_ERANGE: weights are so large or small that a double does not hold
 *  @pairs. n^2. */
PERI_API peri_status peri_metric_xauc(const peri_metric_samples *samples, double *right, double *pairs);

/* -- loading on threads of their own ------------------------------------------------------------------------------- */

/** A bounded queue of parcels from threads that make them to the one thread that takes them. Parcels are taken in the
 *  order of their numbers, which count from 0; a thread gets the number of the next one that it makes when it asks for
 *  it (peri_feed_next), so that fast threads make more of them than slow ones. */
typedef struct peri_feed peri_feed;

/** What an object in a parcel is. */
enum { PERI_FEED_TENSOR = 0, PERI_FEED_KJT = 1, PERI_FEED_JT = 2, PERI_FEED_KT = 3 };

/** An object in a parcel: a reference that whoever has the parcel owns. */
typedef struct peri_feed_object {
    void *ptr;    /* a peri_tensor, peri_kjt, ... */
    int32_t kind; /* PERI_FEED_* */
} peri_feed_object;

/** C functions like Lua's lua_pcall and lua_close, so that the thread can run a state of Lua of its own. The first
 *  returns 0 if it went well. (Not functions of Lua: a callback of LuaJIT's FFI may not be called on another thread.)
 *  Both may call the library, and both have to return: nothing may be thrown out of them. */
typedef int32_t (*peri_feed_run_f)(void *state, int32_t n_args, int32_t n_results, int32_t handler);
typedef void (*peri_feed_close_f)(void *state);

/** What a thread does: run(state, n_args, 0, 0), once, and then, when the feed is released, close(state). */
typedef struct peri_feed_thread {
    void *state;
    int32_t n_args;
    peri_feed_run_f run;
    peri_feed_close_f close; /* or NULL */
} peri_feed_thread;

/** What one call of a thread hands over. */
typedef struct peri_feed_parcel {
    const char *bytes; /* [length] */
    int64_t length;
    const peri_feed_object *objects; /* [n_objects] */
    int32_t n_objects;
} peri_feed_parcel;

/** A queue of at most @ahead (1..2^22) parcels. @out new. */
PERI_API peri_status peri_feed_new(int32_t ahead, peri_feed **out);
/** Begin a thread, one more: the feed owns @thread->state from then on. Without a thread (PERI_EIO, PERI_ENOMEM) the
 *  state stays the caller's. */
PERI_API peri_status peri_feed_start(peri_feed *feed, const peri_feed_thread *thread);
/** On a thread: the number of the parcel that it is to put next. No other thread gets this number, and a thread gets
 *  greater ones each time; asked again before it has put, the same. A lone thread that puts all parcels need not ask.
 *  PERI_ECLOSED: nobody wants more.
 *  PERI_PENDING: the other side wants to begin again (peri_feed_restart); the next call returns a number from 0 on. */
PERI_API peri_status peri_feed_next(peri_feed *feed, int64_t *number);
/** On a thread: hand over the parcel of the number that peri_feed_next has returned, or of the next one. Its bytes and
 *  list of objects are copied. The objects' references are taken over, also when it fails (but not with PERI_EINVAL:
 *  the parcel is malformed). Blocks until less than `ahead` parcels of lower numbers are left to be taken.
 *  PERI_ECLOSED: nobody wants more.
 *  PERI_PENDING: the parcel was given up, since the other side wants to begin again (peri_feed_restart). */
PERI_API peri_status peri_feed_put(peri_feed *feed, const peri_feed_parcel *parcel);
/** On a thread: there is no parcel of its number, nor of later ones. Blocks until the other side wants to begin again
 *  (PERI_OK) or nobody wants more (PERI_ECLOSED). */
PERI_API peri_status peri_feed_end(peri_feed *feed);
/** On the other side: the next parcel; bytes and list stay until the next call, the objects' references become the
 *  caller's. Waits up to @wait_us microseconds, then PERI_PENDING. PERI_ECLOSED: there is none: the thread that got its
 *  number, or an earlier one, has called peri_feed_end or is over; or no thread runs. */
PERI_API peri_status peri_feed_take(peri_feed *feed, int64_t wait_us, peri_feed_parcel *parcel);
/** What the run of the thread that ended the parcels has returned; 0 while that thread is not over. */
PERI_API int32_t peri_feed_result(peri_feed *feed);
/** The state of the thread whose run has returned peri_feed_result, if that is not 0; else NULL. */
PERI_API void *peri_feed_failed(peri_feed *feed);
/** Want everything again from the beginning: what is in the queue is given up, and each thread gets to know it from
 *  peri_feed_next, peri_feed_put or peri_feed_end. PERI_ECLOSED if one is over. */
PERI_API peri_status peri_feed_restart(peri_feed *feed);
/** Want no more: what is in the queue is given up, and the threads get PERI_ECLOSED from their next calls. Waits up to
 *  @wait_us microseconds for their end: PERI_ETIMEOUT if that does not come. */
PERI_API peri_status peri_feed_stop(peri_feed *feed, int64_t wait_us);
/** Stop it, and give it and the states back; NULL is fine. Threads that do not end within 5 s are left alone, and the
 *  last one that ends does so. */
PERI_API void peri_feed_release(peri_feed *feed);

#endif
