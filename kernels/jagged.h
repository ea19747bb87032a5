/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/jagged.h: jagged arrays (values cut into bags by lengths or offsets) and the sparse operators over them.
 *
 * Words: a *bag* is the list of ids of one row of one key; bag i covers values [offsets[i], offsets[i+1]). `offsets`
 * are complete (one more entry than bags, first 0). Arrays of lengths, offsets, ids and permutations are i32 or i64,
 * named by a dtype beside the pointer; scratch and reports are i64. `width` is the size of one row of values in bytes.
 *
 * The steps of cumulative sums and checks run over blocks of PERI_JAGGED_BLOCK elements, whatever the number of
 * threads.
 */
#ifndef PERI_KERNELS_JAGGED_H
#define PERI_KERNELS_JAGGED_H

#include <perilune/base.h>

#include "work.h"

enum { PERI_JAGGED_BLOCK = 4096 };

/* -- cumulative sums ----------------------------------------------------------------------------------------------- */

/** Operation: the cumulative sum of each row of x [rows x cols], modulo 2^64 (2^32 when y is i32). mode: PERI_CUMSUM_*.
 *  `limit` >= 0 asks for a checked sum of lengths: an x outside [0, limit] counts as 0, and no y exceeds limit, so that
 *  y is monotone and inside [0, limit] whatever x holds; limit < 2^50. */
typedef struct peri_op_cumsum {
    const void *x;
    void *y;        /* COMPLETE: rows x (cols + 1), else rows x cols; NULL: only what is found */
    int64_t *total; /* rows: the sum of each row; checked: INT64_MAX if it is beyond 2^63. NULL: nobody asks */
    int64_t *bad;   /* 1: checked sums only: flat index of the first x outside [0, limit], else INT64_MAX. NULL: nobody
                       asks */
    int64_t rows, cols, limit; /* limit < 0: unchecked */
    int32_t x_dtype, y_dtype, mode;
} peri_op_cumsum;

/** Arguments of the three steps. x is rows x cols; each row is cut into `blocks` = max(1, ceil(cols /
 *  PERI_JAGGED_BLOCK)).
 *  Sums are modulo 2^64 (2^32 when y is i32). `limit` >= 0 asks for a checked sum of lengths: an x outside [0, limit]
 *  counts as 0, and no y exceeds limit, so that y is monotone and inside [0, limit] whatever x holds; limit < 2^50. */
typedef struct peri_k_cumsum_args {
    const void *x;
    void *y;        /* COMPLETE: rows x (cols + 1), else rows x cols */
    int64_t *sums;  /* rows x (blocks + 1) */
    int64_t *bad;   /* rows x blocks, checked sums only; may be NULL */
    int64_t *most;  /* rows x blocks, largest x of the block (0 if none is positive); may be NULL */
    int64_t rows, cols, blocks, limit; /* limit < 0: unchecked */
    int32_t x_dtype, y_dtype, mode;
} peri_k_cumsum_args;

/** cumsum_sums: for each block: sums[r * (blocks + 1) + b] = sum of its x; bad = flat index of its first x outside [0,
 *  limit], else INT64_MAX; most = max(0, max x). range: rows * blocks.
 *  cumsum_scan: for each row: sums[r] becomes its exclusive cumulative sum, the total in its last entry. range: rows.
 *  cumsum_write: for each block, from the block's entry of sums: y. range: rows * blocks. */

/* -- checking bags ------------------------------------------------------------------------------------------------- */

/** For each block of PERI_JAGGED_BLOCK bags: bad[b] = first bag i with offsets[i] < 0, offsets[i+1] < offsets[i],
 *  offsets[i+1] > limit or (if lengths) lengths[i] != offsets[i+1] - offsets[i], else INT64_MAX; most[b] = longest bag
 *  (at least 0). range: blocks. */
typedef struct peri_k_jagged_check_args {
    const void *offsets, *lengths; /* lengths may be NULL */
    int64_t *bad, *most;
    int64_t bags, limit;
    int32_t offsets_dtype, lengths_dtype;
} peri_k_jagged_check_args;

/** Words of a report; the offsets at the bounds follow. */
enum {
    PERI_REPORT_BAD = 0,    /* first malformed bag, -1: none */
    PERI_REPORT_LENGTH = 1, /* its length, if lengths are there */
    PERI_REPORT_BEGIN = 2,  /* its two offsets, if offsets are there */
    PERI_REPORT_END = 3,
    PERI_REPORT_FIRST = 4, /* offsets[0] */
    PERI_REPORT_TOTAL = 5, /* sum of lengths (malformed ones count as 0), or the last offset */
    PERI_REPORT_MOST = 6,  /* longest bag */
    PERI_REPORT_HEADER = 7
};

/** Where bags_report looks. */
enum {
    PERI_BAGS_SOUND = 0,  /* nothing is looked for: the offsets are known to be well formed */
    PERI_BAGS_LENGTHS = 1, /* the offsets are the sum of the lengths, made here; a length outside [0, values] counts as
                              0 */
    PERI_BAGS_OFFSETS = 2 /* offsets, and lengths if they are there */
};

/** Operation: what the host wants to know of bags: report[PERI_REPORT_*] (SOUND: only FIRST and TOTAL mean something),
 *  and report[PERI_REPORT_HEADER + i] = offsets[bounds ? bounds[i] : i * step] for i in [0, n_bounds). A bag is
 *  malformed if it is for jagged_check, or if its length is outside [0, values]. */
typedef struct peri_op_bags_report {
    const void *lengths, *offsets; /* lengths may be NULL but for LENGTHS */
    int64_t *sums;                 /* [bags + 1], or NULL. LENGTHS: gets the offsets; offsets are these sums then.
                                      OFFSETS: gets them if the report finds nothing and they cut all values, else
                                      zeros: bags that lead nowhere */
    const int64_t *bounds;
    int64_t *report;
    int64_t bags, values, step, n_bounds;
    int32_t lengths_dtype, offsets_dtype, look;
} peri_op_bags_report;

/** report[PERI_REPORT_*] from the blocks' findings, and report[PERI_REPORT_HEADER + i] = offsets[bounds ? bounds[i] : i
 *  * step] for i in [0, n_bounds). range: 1. */
typedef struct peri_k_jagged_report_args {
    const void *lengths, *offsets; /* lengths may be NULL */
    const int64_t *bad, *most, *total; /* total: NULL when offsets were given */
    const int64_t *bounds;
    int64_t *report;
    int64_t bags, blocks, step, n_bounds;
    int32_t lengths_dtype, offsets_dtype;
} peri_k_jagged_report_args;

/* -- bounds, lengths, segments ------------------------------------------------------------------------------------- */

/** out[i] = offsets[bounds ? bounds[i] : i * step] - base, base = rebase ? offsets[bound(0)] : 0. range: n. */
typedef struct peri_k_jagged_bounds_args {
    const void *offsets;
    const int64_t *bounds;
    void *out;
    int64_t step;
    int32_t offsets_dtype, out_dtype;
    bool rebase;
} peri_k_jagged_bounds_args;

/** out[i] = offsets[p + 1] - offsets[p], p = permute ? permute[i] : i. range: n. */
typedef struct peri_k_jagged_lengths_args {
    const void *offsets, *permute;
    void *out;
    int32_t offsets_dtype, permute_dtype, out_dtype;
} peri_k_jagged_lengths_args;

/** Copy segments of rows: for t in [0, segments), p = permute ? permute[t] : t, n = out(t + 1) - out(t):
 *    dst[out(t) .. out(t) + n) = src[in(p) .. in(p) + n)
 *  with out(t) = out_offsets ? out_offsets[t] : t * out_step, and in(p) likewise. out(0) = 0. range: rows of dst; rows
 *  from out(segments) on stay as they are. Every permute[t] must be a segment of src. */
typedef struct peri_k_jagged_copy_args {
    void *dst;
    const void *src, *out_offsets, *in_offsets, *permute;
    int64_t width, segments, out_step, in_step;
    int32_t out_dtype, in_dtype, permute_dtype;
} peri_k_jagged_copy_args;

/** The adjoint of copying segments: for each segment p of dst, n = in(p + 1) - in(p) rows:
 *    dst[in(p) + i] = sum over j in [list_offsets[p], list_offsets[p + 1]) of src[out(list[j]) + i], 0 if there are
 *    none,
 *  in this order of j, from the first on, in f32 (f64 for f64). Offsets as in jagged_copy, all i64; NULL: segments of
 *  one row. range: rows of dst. */
typedef struct peri_k_jagged_sum_args {
    void *dst;
    const void *src;
    const int64_t *in_offsets, *out_offsets, *list_offsets, *list;
    int64_t columns, segments; /* elements of a row; segments of dst */
    int32_t dtype;             /* PERI_F32, PERI_F64 */
} peri_k_jagged_sum_args;

/* -- padded rows --------------------------------------------------------------------------------------------------- */

/** jagged_to_padded: for each bag b, j in [0, max): padded[b][j] = j < n ? values[offsets[b] + j] : padding, n = the
 *  bag's length: longer bags keep their first `max` rows. jagged_from_padded: values[offsets[b] + j] = j < max ?
 *  padded[b][j] : 0 for j in [0, n). range: bags. */
typedef struct peri_k_jagged_padded_args {
    void *padded, *values;
    const void *offsets;
    int64_t max, width, element; /* rows; bytes of a row; bytes of an element (1, 2, 4, 8, 16) */
    uint64_t padding[2];         /* one element */
    int32_t offsets_dtype;
} peri_k_jagged_padded_args;

/* -- columns ------------------------------------------------------------------------------------------------------- */

/** Words of an item and of a source in the tables of columns_sum. Strides are elements from row to row; addresses are
 *  the device's. */
enum {
    PERI_ITEM_DST = 0,
    PERI_ITEM_STRIDE = 1,
    PERI_ITEM_COLUMNS = 2,
    PERI_ITEM_FIRST = 3,
    PERI_ITEM_SOURCES = 4,
    PERI_ITEM_WORDS = 5
};
enum { PERI_SOURCE_ADDRESS = 0, PERI_SOURCE_STRIDE = 1, PERI_SOURCE_WORDS = 2 };

/** Column blocks of matrices of equal row counts: for each row r and item: dst[r][c] = sum of its sources' [r][c], in
 *  their order, from the first on, in f32 (f64 for f64), rounded once; 0 without sources; a copy of the bits with one.
 *  range: rows. */
typedef struct peri_k_columns_sum_args {
    const int64_t *items, *sources;
    int64_t n_items;
    int32_t dtype; /* PERI_F32, PERI_F64, PERI_F16, PERI_BF16 */
} peri_k_columns_sum_args;

PERI_KERNELS_JAGGED(PERI_K_ARGS_OF) PERI_OPS_JAGGED(PERI_OP_ARGS_OF)

#endif
