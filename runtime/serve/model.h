/* SPDX-License-Identifier: Apache-2.0
 *
 * model.h: what the server knows of a model: names, and a function from features to numbers. `perilune serve` puts a
 * model file behind it (model_file.c), tests a function that they know.
 */
#ifndef PERI_SERVE_MODEL_H
#define PERI_SERVE_MODEL_H

#include "../base/base_internal.h"

enum { PERI__SERVE_NUMBERS, PERI__SERVE_IDS, PERI__SERVE_WEIGHTS };

/** A feature that a sample has. */
typedef struct peri__serve_input {
    const char *name;
    int32_t kind;  /* NUMBERS: width numbers; IDS: a list of ids of any length; WEIGHTS: a number for each id of feature
                      `of`. The name of an id's weight is that of the ids with ".weights" behind */
    int32_t of;    /* WEIGHTS, `same`, `counts`: another feature */
    bool same;     /* IDS: lists are as long as those of feature `of` */
    bool whole;    /* IDS: whole numbers from -2^63 to 2^63 - 1, of which nothing is looked up */
    bool counts;   /* NUMBERS of width 1: whole, from 0 to the length of the sample's list of feature `of` */
    int64_t length; /* IDS: all lists have so many; 0: any number */
    int64_t width; /* NUMBERS */
    uint64_t rows; /* IDS: there are rows for 0 to rows - 1; 0: all 2^64 ids are known to a map, or are for the map to
                      judge */
    bool skip;     /* IDS: an id without a row counts as zeros; else it is an error */
    bool optional; /* may be missing: the list is empty, numbers are `missing` */
    float missing;
    bool any; /* NUMBERS, WEIGHTS: NaN and infinity are computed with; else they are errors */
    bool one; /* WEIGHTS: they and their ids are one input of the model, so a list without ids needs none */
} peri__serve_input;

typedef struct peri__serve_output {
    const char *name;
    int64_t width; /* numbers for a sample, or for each of its list */
    bool best;     /* the numbers are of the best items, the best one first: a request may want fewer */
    bool listed;   /* a sample has a list, of at most as many as its list of feature `list` has */
    int32_t list;
} peri__serve_output;

enum { PERI__SERVE_MOST_IDS = 65536 };

/** What a model says of itself. */
typedef struct peri__serve_facts {
    const char *name, *version;
    const peri__serve_input *inputs;
    const peri__serve_output *outputs;
    int32_t n_inputs, n_outputs;
} peri__serve_facts;

/** One feature of all samples of a batch. Numbers: width for each sample. Ids and weights: those of sample i are those
 *  from offsets[i] to before offsets[i + 1]; an id from 2^63 on is kept as the negative number of the same bits. */
typedef struct peri__serve_column {
    float *numbers;
    int64_t *ids, *offsets; /* offsets: [n_samples + 1], from 0 */
    int64_t n_values, n_samples;
    int64_t room_values, room_offsets;
} peri__serve_column;

typedef struct peri__serve_model peri__serve_model;

/** The functions of a kind of model. */
typedef struct peri__serve_kind {
    /** What a thread needs to predict up to @most samples at a time, whose lists have up to PERI__SERVE_MOST_IDS ids;
     *  @out new, for `drop`. */
    peri_status (*context)(peri__serve_model *model, int64_t most, void **out);
    void (*drop)(peri__serve_model *model, void *context);
    /** @outputs[k]: [samples, width of output k], or, where it is `listed`, one list after the other: that of sample i
     *  from offsets[k][i] to before offsets[k][i + 1] times the width; @offsets[k]: [samples + 1], to be filled in. A
     *  sample's numbers depend on nothing but its own features. Any number of threads, each with a context of its own.
     *  PERI_EINVAL, PERI_ERANGE: the model refuses what a sample says. */
    peri_status (*predict)(peri__serve_model *model, void *context, int64_t samples, const peri__serve_column *columns,
                           float *const *outputs, int64_t *const *offsets);
    /** The feature of which `predict` refuses what a sample says: an id that the model's map has no row for; -1: of
     *  none. NULL: the model has no such maps. */
    int32_t (*refused)(peri__serve_model *model, void *context, int64_t samples, const peri__serve_column *columns);
    /** Ids of a batch that the model's maps have no row for, and that it skips; NULL: it has no such maps. */
    int64_t (*skipped)(peri__serve_model *model, void *context, int64_t samples, const peri__serve_column *columns);
    /** Free it; the last reference has gone. */
    void (*close)(peri__serve_model *model);
    /** Whether it can still answer: nobody has cut or written to the file that it maps. NULL: always. */
    bool (*sound)(peri__serve_model *model);
} peri__serve_kind;

/** A model: first member of what a kind keeps. Counted: a batch that has begun with one ends with it, though another
 *  one serves by then. */
struct peri__serve_model {
    const peri__serve_kind *kind;
    peri__refs refs;
    peri__serve_facts facts;
    int64_t loaded_unix_ns;                /* when it was loaded */
    int64_t bytes;                         /* of the file that it maps; 0: of none */
    int64_t born_unix_ns;                  /* when what it says was written, by its trainer; 0: unknown */
    struct peri__serve_counter **counters; /* of the server: [n_inputs + 1] problems of its features */
};

#endif
