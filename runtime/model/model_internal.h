/* SPDX-License-Identifier: Apache-2.0
 *
 * model/model_internal.h: model files in memory. docs/model_file.md specifies the format.
 *
 *   mapped.c           the bytes of a file: mapped or copied; what happens when a mapped file is cut
 *   model_memory.c     an empty model, references, and the end of one
 *   header.c           reads the header: JSON into the structs below. Whether they make sense is not its affair
 *   header_check.c     whether they do: every index, size and order that the other files rely on; operation_check.c:
 *                      those of operations
 *   model_open.c       opening, describing, verifying
 *   id_map.c           raw ids to rows
 *   input_check.c      whether a model takes what a caller gives it
 *   context.c          the memory of one thread's calls: which results share it
 *   predict.c          the operations; list_operations.c: those of the members of lists; table_lookup.c: rows of tables
 *   model_writer.c     a file while it is being written
 *   model_update.c     a model brought to what a checkpoint has (model_follow.h)
 *   model_follow.c     one that follows the checkpoints of a run
 */
#ifndef PERI_MODEL_INTERNAL_H
#define PERI_MODEL_INTERNAL_H

#include "../base/base_internal.h"

#include <perilune/model.h>

/* -- the bytes of a file ------------------------------------------------------------------------------------------- */

/** What a file begins with, little-endian. The header stands behind the sections, so that a writer need not know it
 *  beforehand. */
typedef struct peri__model_preamble {
    char magic[8]; /* PERI__MODEL_MAGIC */
    uint32_t version, reserved;
    uint64_t header_offset, header_bytes, file_bytes;
    uint64_t digest[2]; /* XXH3-128 of the header: low and high half */
    uint64_t checksum;  /* XXH3-64 of the bytes before */
} peri__model_preamble;

#define PERI__MODEL_MAGIC "PERIMODL"
enum {
    PERI__MODEL_ALIGN = 64,               /* of sections */
    PERI__MODEL_HEADER_MOST = 256 << 20,  /* bytes */
};

/** A file in memory. */
typedef struct peri__mapped {
    const char *data;
    int64_t bytes;
    int fd; /* -1: copied */
    int32_t slot; /* of the table that the handler of SIGBUS looks into; -1: not in it, as it was not asked for */
    int64_t changed_s, changed_ns; /* of the file, when it was opened */
} peri__mapped;

/** How to have a file in memory: mapped, unless it is read into `copy`; with `own` it is mapped so that what this
 *  process writes there is its own; with `guard` the handler of SIGBUS knows of it. */
typedef struct peri__mapping {
    bool copy, own, guard;
} peri__mapping;
peri_status peri__mapped_open(const char *path, peri__mapping how, peri__mapped *out);
void peri__mapped_close(peri__mapped *m);
/** Where a page begins that was missing when somebody read it; -1: none was. */
int64_t peri__mapped_missing(const peri__mapped *m);
/** Whether a page of it was missing. */
bool peri__mapped_cut(const peri__mapped *m);

/* -- the header ---------------------------------------------------------------------------------------------------- */

/** Up to it f32, of which all values of a model are, has all whole numbers. */
#define PERI__MODEL_WHOLE ((int64_t)1 << 24)

typedef struct peri__model_section {
    int64_t offset, bytes;
    uint64_t checksum; /* XXH3-64 */
    char *source; /* name of the tensor that it was made of, in the model's state; NULL: unknown */
    int64_t first, of; /* of > 0: of some elements of that tensor, from @first on, which has @of of them */
    bool turned;       /* from the transpose of what it is made of */
    int32_t formula;   /* the output of the model's formulas that it is made of; -1: none */
} peri__model_section;

/** An array of f32: of each sample, or of each member of a list, `columns` numbers, or, where it is a section, of all
 *  samples together. */
typedef struct peri__model_value {
    int64_t columns;
    int32_t list;    /* whose members have the numbers, or -1: samples have them */
    int32_t input;   /* the dense input that it is, or, of a list, the input whose numbers or weights it is; or -1 */
    int32_t section; /* the constant that it is, or -1 */
    /* Found by the checks: */
    int32_t made_by; /* the operation, or -1 */
    int32_t last;    /* the last operation that reads it; an output lives to the end */
} peri__model_value;

/** Kinds of operations, and how many values each reads. docs/model_file.md has the formulas. */
#define PERI__MODEL_OPERATIONS(X) PERI__MODEL_OF_SAMPLES(X) PERI__MODEL_OF_MEMBERS(X)
#define PERI__MODEL_OF_SAMPLES(X)                                                                                      \
    X(lookup, 0, 0)                                                                                                    \
    X(linear, 1, 2) X(unary, 1, 1) X(binary, 2, 2) X(muladd, 3, 3) X(cross, 3, 4) X(interaction, 2, 2) X(copy, 1, 1)   \
        X(cat, 1, 65536) X(sum, 1, 1) X(softmax, 1, 1) X(layer_norm, 1, 3) X(matmul, 2, 2) X(rows, 0, 0)               \
            X(lengths, 0, 0) X(compare, 1, 2) X(where, 3, 3) X(top, 1, 1) X(cosine, 2, 2) X(order, 1, 1)               \
                X(running, 1, 1) X(search, 2, 2) X(pick, 2, 2) X(extreme, 1, 1) X(put, 3, 3)
/** Those that go from samples to the members of their lists, or back (list_operations.c). */
#define PERI__MODEL_OF_MEMBERS(X)                                                                                      \
    X(members, 0, 0)                                                                                                   \
    X(spread, 1, 1) X(pool, 1, 1) X(attention, 3, 4) X(places, 0, 1) X(times, 0, 0) X(take, 2, 2) X(select, 2, 2)     \
        X(slice, 1, 2)
enum {
#define X(name, least, most) PERI__MODEL_##name,
    PERI__MODEL_OPERATIONS(X)
#undef X
        PERI__MODEL_OPERATION_COUNT
};
extern const char *const peri__model_operation_names[PERI__MODEL_OPERATION_COUNT];

/** The rows of one feature's ids in one table, added up. */
typedef struct peri__model_bag {
    int32_t input, table, pooling; /* PERI_POOLING_SUM, PERI_POOLING_MEAN */
    int32_t map;                   /* what makes rows of the input's raw ids; -1: the ids are rows */
    int32_t positions;             /* a constant with the weight of each place of a list; -1: the input's weights, if it
                                      has any */
} peri__model_bag;

enum { PERI__MODEL_NUMBERS = 2, PERI__MODEL_TEXT = 200, PERI__MODEL_SOURCE = 1000 };

typedef struct peri__model_operation {
    int32_t kind, out, weight; /* weight: a section, or -1 */
    int32_t table;             /* of top: the items; -1 */
    int32_t input;             /* of times; -1 */
    int32_t weight_dtype;      /* PERI_F32, PERI_BF16, PERI_I8; -1: unknown */
    int32_t products;          /* of linear: PERI_F32, or weight_dtype: x is rounded to it, too; -1: unknown */
    int32_t n_in, n_sizes, n_bags, n_numbers;
    int32_t *in;
    int64_t *sizes;
    peri__model_bag *bags;
    double numbers[PERI__MODEL_NUMBERS];
    char function[16];
    int32_t code; /* of the function, by the checks */
} peri__model_operation;

/** A list of each sample: its members are the ids (or whole numbers) of some inputs, which are equally many in all of
 *  these, or those members of another list that the operations select and slice have kept:
 *
 *      sample    input "item"    list 0: 5 members    list 1, of list 0, of mask 0 1 1 0 1: 3 members
 *      0         7 3 9           0 1 2                1 2
 *      1                         -                    -
 *      2         4 4             3 4                  4
 */
typedef struct peri__model_list {
    int32_t *inputs;
    int32_t n_inputs; /* 0: it is of another list */
    int32_t of;       /* that list, or -1 */
    /* Found by the checks: */
    int32_t made_by;  /* the first operation that keeps the members, or -1 */
    int32_t first;    /* the input that it comes from */
} peri__model_list;

/** How an embedding table lies in the file. */
typedef struct peri__model_rows {
    int32_t section, format; /* format: PERI_F32, ..., PERI_ROWS_* */
    int64_t stride, row_bytes; /* elements, or bytes where rows are bytes; bytes */
} peri__model_rows;

/** A map of raw ids to the rows of a table: a dictionary of the ids that have a row, and the rule for all others.
 *  docs/model_file.md draws its two sections. Buckets matter for ids without a row only: they say which row stands for
 *  them. */
typedef struct peri__model_map {
    int32_t ids, index;       /* sections: i64 [rows]; u32 [slots] */
    int32_t spread, miss;     /* PERI_SPREAD_*, PERI_MISS_* without the default; -1: unknown */
    int32_t n_segments;       /* buckets + 1 */
    int64_t *segments;        /* rows where buckets begin, and the end: the number of rows */
    int64_t block;            /* PERI_SPREAD_RANGE: ids of a bucket */
    int64_t free;             /* what stands in place of an id where a row has none */
    bool aside;               /* the last row of each bucket is no id's own */
    /* Found by the checks: */
    int64_t rows;
    int64_t slots;
} peri__model_map;

/** A map that makes rows of an input's ids. */
typedef struct peri__model_mapped {
    int32_t input, map;
} peri__model_mapped;

/** What lists of an input have to be like. */
typedef struct peri__model_rule {
    int64_t length; /* each list has so many; 0: any number */
    int32_t like;   /* lists are as long as those of this input; -1: as they please */
    int32_t counts; /* of a dense input: a whole number from 0 to the length of the sample's list of this input; -1: any
                       number */
} peri__model_rule;

struct peri_model {
    peri__refs refs;
    peri__mapped file;
    char *path, *name, *producer;
    char digest[33];
    bool followed; /* it has not what the file has, but what a checkpoint has */
    int32_t version;
    int64_t step, table_bytes;
    /* n_*: entries; the lists grow while the header is read. */
    int32_t n_sections, n_values, n_operations, n_inputs, n_outputs, n_tables, n_maps, n_mapped, n_lists;
    peri__model_section *sections;
    peri__model_map *maps;
    peri__model_list *lists;
    /* By the checks: */
    peri__model_mapped *mapped; /* each input and map that meet, once */
    int64_t *longest;           /* n_inputs: ids of the longest list that operations take; 0: any */
    bool makes;                 /* some bag makes rows or weights, for which contexts have room */
    peri__model_value *values;
    peri__model_operation *operations;
    peri_model_input *inputs;
    peri__model_rule *rules; /* n_inputs */
    peri_model_output *outputs;
    int32_t *output_values;
    peri_model_table *tables;
    peri__model_rows *rows; /* n_tables */
    char *loose;            /* why it can follow no trainer; NULL: nothing is known against it */
    /* How constants come from the state of the model: a model of one sample, whose inputs are tensors of the state
     * and whose outputs are constants. NULL: there are no formulas. It has this model's `file` and `sections`. */
    peri_model *formulas;
};

/** peri_model_open; @own: in memory of its own, for peri__model_update. */
peri_status peri__model_open(const char *path, int32_t flags, bool own, peri_model **out);
/** An empty model. */
peri_status peri__model_new(const char *path, peri_model **out);
/** Read the header @text into an empty model. */
peri_status peri__model_header(peri_model *m, const char *text, int64_t bytes, const char *what);
/** Check all of it against a file of @bytes. */
peri_status peri__model_check(peri_model *m, const char *what);
/** Write panels of @cols x @inner numbers as those of @dtype (PERI_F32, PERI_BF16, PERI_I8; to nearest even) to @to;
 *  returns their bytes. */
int64_t peri__model_panels_as(const float *panels, int64_t cols, int64_t inner, int32_t dtype, void *to);
/** Whether a matrix of @dtype (PERI_F32, PERI_BF16, PERI_I8) holds @weight, whose element (column, k) lies at column *
 *  @column_step + k * @inner_step; PERI_ERANGE names the first one that it does not. @who: for the message. */
peri_status peri__model_matrix_held(const char *who, const float *weight, int64_t cols, int64_t inner,
                                    int64_t column_step, int64_t inner_step, int32_t dtype);
/** The input whose lists output @output follows; -1: it has numbers of samples. */
static inline int32_t peri__model_output_list(const peri_model *m, int32_t output)
{
    const int32_t list = m->values[m->output_values[output]].list;
    return list < 0 ? -1 : m->lists[list].first;
}
/** The bytes of a section. */
static inline const void *peri__model_data(const peri_model *m, int32_t section)
{
    return m->file.data + m->sections[section].offset;
}

/** peri_model_changed, in the name of @function. */
peri_status peri__model_unchanged(const char *function, const peri_model *m);

/* -- maps ---------------------------------------------------------------------------------------------------------- */

/** Slots of the index of a map of @rows. */
int64_t peri__model_map_slots(int64_t rows);
/** Rows of @ids[n], as @map has them; -1: no row, neither its own nor another. @out (may be NULL): [n]. Returns how
 *  many ids have no row of their own. No allocation, no lock; whatever the sections have, it reads nothing else. */
int64_t peri__model_map_find(const peri_model *m, const peri__model_map *map, const int64_t *ids, int64_t n,
                             int64_t *out);
/** Whether PERI_SPREAD_RANGE allows the id. */
bool peri__model_map_allows(const peri__model_map *map, int64_t id);
/** From now on row @row has the id @id (map->free: none). The model is in memory of its own. */
void peri__model_map_set(const peri_model *m, const peri__model_map *map, int64_t row, int64_t id);
/** Fill @index[slots] for @ids[rows]. */
void peri__model_map_index(const int64_t *ids, int64_t rows, int64_t free, uint32_t *index, int64_t slots);

/* -- calls --------------------------------------------------------------------------------------------------------- */

/** Samples that are computed together: their intermediate results stay in the processor's caches. Results do not depend
 *  on it. */
enum {
    PERI__MODEL_BLOCK = 128,
    PERI__MODEL_MEMBERS = 2048, /* members of one list that are computed together, unless a sample has more */
    PERI__MODEL_IDS_MOST = 65536
};

struct peri_model_context {
    peri_model *model;
    int64_t max_batch, max_ids, block, bytes;
    int64_t members;          /* that values of lists have room for */
    char *memory;
    float **values;           /* n_values: where each lies; NULL: an input, at the caller's */
    float *scratch;           /* of matmul */
    int64_t *offsets;         /* block + 1 zeros: of missing lists */
    int64_t *moved, *rows;    /* block + 1 offsets, and max_ids rows: of lists whose rows or weights are made; else
                                 NULL */
    float *weights;           /* max_ids */
    int64_t *lists;           /* n_lists x (block + 1): which members each sample has, in the block that is being
                                 computed */
    const float **at;         /* n_values: where each lies, in the block that is being computed */
};

/** peri_model_check, with lists of at most @max_ids ids; without @skipped, raw ids are looked for only where the answer
 *  may be an error. */
peri_status peri__model_values(const char *function, const peri_model *m, int64_t batch, int64_t max_ids,
                               const peri_model_values *inputs, int64_t *skipped);
/** The input for which peri_model_check refuses these values; -1: it refuses none of them. */
int32_t peri__model_refused_input(const peri_model *m, int64_t batch, const peri_model_values *inputs);
/** f32 numbers that operations need beside their values: top; order and extreme, whose result has @out numbers for each
 *  sample; cosine of @rows rows. */
int64_t peri__model_top_scratch(const peri_model *m, const peri__model_operation *o);
int64_t peri__model_order_scratch(const peri__model_operation *o, int64_t out);
int64_t peri__model_extreme_scratch(int64_t out);
int64_t peri__model_cosine_scratch(int64_t rows);
/** Which members samples have: list @l's offsets, [samples + 1]. */
static inline int64_t *peri__model_list_of(const peri_model_context *c, int32_t l)
{
    return c->lists + l * (c->block + 1);
}
/** How many of the samples from @first on, below @batch, the context has room for at once. */
int64_t peri__model_block_of(const peri_model_context *c, int64_t first, int64_t batch,
                             const peri_model_values *inputs);

#endif
