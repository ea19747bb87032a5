/* SPDX-License-Identifier: Apache-2.0
 *
 * tensor/jagged_internal.h (L2): the structs behind perilune/jagged.h, for this folder and for the layers above
 * (exchanges, lookups).
 */
#ifndef PERI_TENSOR_JAGGED_INTERNAL_H
#define PERI_TENSOR_JAGGED_INTERNAL_H

#include "report.h"

#include <perilune/jagged.h>

struct peri_keys {
    peri__refs refs;
    int32_t count;
    bool unique;
    uint64_t hash;
    uint64_t *name_hash; /* count */
    int32_t *table;      /* open addressing over name_hash: position + 1, 0: free */
    int32_t table_mask;
    const char **names; /* count, into text */
    char *text;
};

/** The keys of @keys at positions @index[n], repeats allowed; each within the list. */
peri_status peri__keys_select(const peri_keys *keys, const int32_t *index, int32_t n, peri_keys **out);
/** Keys [begin, end) of @keys. */
peri_status peri__keys_slice(const peri_keys *keys, int32_t begin, int32_t end, peri_keys **out);

/* -- numbers of the host ------------------------------------------------------------------------------------------- */

/** Host numbers as a new i64 tensor [n] of @device. */
peri_status peri__upload_i64(peri_device *device, const int64_t *host, int64_t n, peri_tensor **out);

/* -- bags: what lengths and offsets say ---------------------------------------------------------------------------- */

/** The part that jt and kjt share. */
typedef struct peri__bags {
    peri_tensor *lengths, *offsets; /* at least one; the other is made when asked for */
    int64_t bags, values;           /* entries of lengths; rows of values */
    bool given_lengths, given_offsets; /* what the constructor got */
    bool checked;                   /* they are well formed */
    int64_t longest;                /* -1: not known */
    int64_t version;                /* peri__bags_version when they were looked at; -1: no caller's tensors */
    peri__report *report;           /* a check on its way, or NULL */
} peri__bags;

/** How often the tensors that *b was made of have been changed in place together. Lengths or offsets that were derived
 *  do not count: when they are made is not the caller's doing. */
static inline int64_t peri__bags_version(const peri__bags *b)
{
    return (b->given_lengths ? peri_tensor_version(b->lengths) : 0) +
           (b->given_offsets ? peri_tensor_version(b->offsets) : 0);
}

/** Whether the caller has changed the given tensors in place since they were looked at: then what was derived from them
 *  is gone, and they are to be checked again. */
bool peri__bags_changed(peri__bags *b);

/** Writes "key 'f2', sample 17" into @text. */
typedef void (*peri__bag_text_fn)(const void *owner, int64_t bag, char *text, size_t len);

/** Set *b up from given tensors (contiguous copies or new references) and check counts, dtypes and devices. @values has
 *  been checked. */
peri_status peri__bags_init(const char *function, peri__bags *b, peri_tensor *lengths, peri_tensor *offsets,
                            const peri_tensor *values);
/** Set *b up from well-formed tensors (retained; either may be NULL). */
void peri__bags_adopt(peri__bags *b, peri_tensor *lengths, peri_tensor *offsets, int64_t bags, int64_t values);
void peri__bags_fini(peri__bags *b);
/** A reference of its own to @t (or NULL) in *out: what getters give. */
peri_status peri__share(peri_tensor *t, peri_tensor **out);
/** A new tensor of the dtype and shape of @t on @device; NULL where @t is. */
peri_status peri__room(const peri_tensor *t, peri_device *device, peri_tensor **out);
/** b->lengths or b->offsets, made if needed. Offsets made from unchecked lengths are clamped: monotone and within the
 *  values, always. */
peri_status peri__bags_lengths(peri__bags *b);
peri_status peri__bags_offsets(peri__bags *b);
/** @offsets [n + 1] = the complete cumulative sum of @lengths [n], both contiguous, i32 or i64. @limit >= 0: lengths
 *  outside [0, limit] count as 0 and no offset exceeds it. */
peri_status peri__complete_sum(const peri_tensor *lengths, int64_t limit, peri_tensor *offsets);
/** Queue the check (nothing to check if b->checked); offsets[bounds ? bounds[i] : i * step] for i in [0, n_bounds) will
 *  stand in the report after its header. */
peri_status peri__bags_post(peri__bags *b, const peri_tensor *bounds, int64_t step, int64_t n_bounds);
/** Queue the check of bags that are not shared (set up by peri__bags_init) and have b->offsets safe at once: made of
 *  lengths they are clamped; given ones are replaced by i64 ones, the same if they are well formed, and zeros if not.
 *  So work that goes where they lead may be queued before the report is judged. */
peri_status peri__bags_post_safe(peri__bags *b);
/** Judge the report, which has arrived; @text names bags. Sets longest and checked. The report stays for the caller to
 *  read and return. */
peri_status peri__bags_judge(peri__bags *b, const char *function, peri__bag_text_fn text, const void *owner);

/* -- rows moved as whole segments, with gradient ------------------------------------------------------------------- */

/** out = the rows of @parts[n] (equal dtype, device and row shape) one after the other; n >= 1. */
peri_status peri__rows_cat(const char *function, peri_tensor *const *parts, int32_t n, peri_tensor **out);
/** out[i] = rows at[i] .. at[i + 1] of the contiguous @t, a view (0 <= at[i] <= at[i + 1] <= its rows; at[n] are all);
 *  n >= 0. */
peri_status peri__rows_split(peri_tensor *t, const int64_t *at, int32_t n, peri_tensor **out);
/** As peri__rows_split, not recorded. */
peri_status peri__rows_views(peri_tensor *t, const int64_t *at, int32_t n, peri_tensor **out);
/** The gradient of what was split: @parts[n] one behind the other, NULL ones as zeros; *out NULL if all are. */
peri_status peri__rows_join(peri_tensor *const *parts, const int64_t *at, int32_t n, peri_tensor **out);
/** For each key of @k its part of rows, @values (retained), with the key's lengths, and with @indices its ids as
 *  weights. @out: as many as keys, new; not written on failure. Needs peri_kjt_sync and lengths. */
peri_status peri__kjt_cut(const peri_kjt *k, peri_tensor *const *values, bool indices, peri_jt **out);

/** Segments of host-known sizes: segment t of the result is segment p = index[t] of the source, which covers its rows
 *  [offsets[p], offsets[p + 1]). The source has @parts segments, the result @n. */
typedef struct peri__rows_plan {
    int64_t parts, n, rows; /* rows of the result */
    int64_t *offsets;       /* parts + 1 */
    int64_t *starts;        /* n: first row of segment t in the source */
    int64_t *out_offsets;   /* n + 1 */
    int64_t *index;         /* n */
    peri_tensor *table;     /* starts and out_offsets on the device */
} peri__rows_plan;

/** Copies @offsets[parts + 1] and @index[n]. */
peri_status peri__rows_plan_init(peri__rows_plan *plan, peri_device *device, const int64_t *offsets, int64_t parts,
                                 const int32_t *index, int64_t n);
void peri__rows_plan_fini(peri__rows_plan *plan);
/** Rows of @src (offsets[parts] of them) moved by the plan. */
peri_status peri__rows_permute(peri_tensor *src, const peri__rows_plan *plan, peri_tensor **out);

/* -- padded rows, with gradient ------------------------------------------------------------------------------------ */

/** values [n, ...] cut by @offsets into bags -> [bags, max, ...]. The offsets are well formed. */
peri_status peri__to_padded(peri_tensor *values, peri_tensor *offsets, int64_t max, double padding, peri_tensor **out);
/** padded [bags, max, ...] -> [rows, ...], rows = the last of @offsets; what a bag has beyond max is 0. */
peri_status peri__from_padded(peri_tensor *padded, peri_tensor *offsets, int64_t rows, peri_tensor **out);

/** Whether two tensors have the same dtype, shape and bits; both or neither NULL. Reads them. */
peri_status peri__tensors_equal(const peri_tensor *a, const peri_tensor *b, bool *same);

/* -- columns: blocks of columns of some matrices copied or summed into others -------------------------------------- */

/** A table under construction. */
typedef struct peri__columns {
    int64_t *words; /* items, then sources: kernels/jagged.h, columns_sum */
    int64_t items, sources, room_items;
} peri__columns;

/** Room for so many. */
peri_status peri__columns_init(peri__columns *t, int64_t items, int64_t sources);
void peri__columns_fini(peri__columns *t);
/** The next block of columns to be written; its sources follow, one by one. Matrices have unit stride inside a row. */
void peri__columns_item(peri__columns *t, const peri_tensor *dst, int64_t column, int64_t columns);
void peri__columns_source(peri__columns *t, const peri_tensor *src, int64_t column);
/** Queue it; all matrices have @rows rows of @dtype (f32, f64, f16, bf16). */
peri_status peri__columns_run(const peri__columns *t, peri_device *device, int32_t dtype, int64_t rows);
/** A matrix with unit stride inside its rows: @t (a new reference) or a contiguous copy. */
peri_status peri__columns_rows(peri_tensor *t, peri_tensor **out);

/** A way to make a tensor elsewhere: peri_tensor_to, peri_tensor_upload, or into pinned memory. */
typedef peri_status (*peri__move_fn)(peri_tensor *t, int32_t dtype, peri_device *device, peri_tensor **out);
/** peri__move_fn: a copy in pinned memory, from which @device copies without the processor. The dtype stays. */
peri_status peri__move_pinned(peri_tensor *t, int32_t dtype, peri_device *device, peri_tensor **out);

/* -- containers ---------------------------------------------------------------------------------------------------- */

struct peri_jt {
    peri__refs refs;
    peri_tensor *values, *weights; /* weights may be NULL */
    peri__bags bags;
    int64_t *host_offsets; /* bags + 1, or NULL */
};

struct peri_kjt {
    peri__refs refs;
    peri_keys *keys;
    peri_tensor *values, *weights; /* weights may be NULL */
    peri__bags bags;
    int64_t stride;
    int32_t ranks;                    /* 0: fixed batch */
    int64_t *stride_per_key_per_rank; /* keys x ranks, NULL: fixed batch */
    int64_t *stride_per_key;          /* keys */
    int64_t *lengths_offset_per_key;  /* keys + 1 */
    peri_keys *inverse_keys;          /* or NULL, like inverse */
    peri_tensor *inverse;
    peri__report *inverse_report; /* the check of the inverse indices on its way, or NULL */
    bool synced; /* the next two are valid */
    int64_t *length_per_key;  /* keys */
    int64_t *offset_per_key;  /* keys + 1 */
    int64_t *host;            /* the block that holds the arrays above */
};

struct peri_kt {
    peri__refs refs;
    peri_keys *keys;
    peri_tensor *values;
    int32_t key_dim;
    int64_t *length_per_key, *offset_per_key; /* keys, keys + 1; one block */
};

/** A kjt of parts that are known to be well formed (results of operations on checked ones): nothing is read back. All
 *  tensors retained and contiguous. Either of lengths and offsets may be NULL. @stride_per_key_per_rank as in
 *  peri_kjt_config. @length_per_key: what the host knows already, keys entries, copied; NULL: not known, a sync will
 *  fetch it. Key names may repeat. */
typedef struct peri__kjt_parts {
    peri_keys *keys;
    peri_tensor *values, *weights, *lengths, *offsets;
    int64_t stride;
    int32_t ranks;
    const int64_t *stride_per_key_per_rank;
    peri_keys *inverse_keys;
    peri_tensor *inverse;
    const int64_t *length_per_key;
    int64_t longest; /* -1: not known */
    bool trusted;    /* lengths and offsets need no check even if length_per_key is NULL */
} peri__kjt_parts;

peri_status peri__kjt_adopt(const peri__kjt_parts *parts, peri_kjt **out);
/** The stride of a variable batch: the rows of the key that has most, of all ranks (@rows: keys x ranks). */
int64_t peri__kjt_most_rows(const int64_t *rows, int64_t keys, int32_t ranks);
/** The inverse indices of the keys at positions @index[n] (repeats allowed), with their names: both NULL if @k has
 *  none, else new; they have no rows if none of these keys has inverse indices. */
peri_status peri__inverse_select(const peri_kjt *k, const int32_t *index, int32_t n, peri_keys **keys,
                                 peri_tensor **inverse);
/** Queue the check of the inverse indices, where the host cannot look itself; judge its report, or look. */
peri_status peri__inverse_post(peri_kjt *k);
peri_status peri__inverse_judge(peri_kjt *k);
/** A jt of tensors that are known to be well formed, all retained; either of lengths and offsets may be NULL. */
peri_status peri__jt_adopt(peri_tensor *values, peri_tensor *weights, peri_tensor *lengths, peri_tensor *offsets,
                           peri_jt **out);

/* -- segments of an exchange: what comes ordered by rank and then key, goes to key and then rank ------------------- */

typedef struct peri__recat {
    int64_t segments;      /* keys x ranks */
    int32_t *recat;        /* segments: received segment at each place of the result (peri_kjt_recat) */
    int64_t *bags;         /* segments + 1: first bag of each received segment */
    int64_t *per_key_rank; /* keys x ranks, ranks in the result's order: bags */
    peri_tensor *table;    /* on the device, i64: recat, its inverse, first bag of each place (segments + 1); NULL if
                              in_order */
    bool in_order;         /* recat changes nothing */
} peri__recat;

/** The stagger that an argument says. */
static inline int32_t peri__stagger(int32_t given) { return given ? given : 1; }
/** Either @stride_per_rank[ranks] or @strides[ranks x keys] (host). Released with fini, also after a failure. */
peri_status peri__recat_init(peri__recat *recat, peri_device *device, int32_t keys, int32_t ranks, int32_t stagger,
                             const int64_t *stride_per_rank, const int64_t *strides);
void peri__recat_fini(peri__recat *recat);
/** Where the values of each segment begin, from the @offsets of the result's bags: @in and @result, i64 [segments + 1],
 *  in received order and in the result's. @out new, also on failure. Not if in_order. */
peri_status peri__recat_offsets(const peri__recat *recat, const peri_tensor *offsets, peri_tensor **in,
                                peri_tensor **result);
/** Rows of @src into @dst: from received order to the result's, or @back. Not if in_order. */
peri_status peri__recat_move(const peri__recat *recat, const peri_tensor *src, peri_tensor *dst, const peri_tensor *in,
                             const peri_tensor *result, bool back);

static inline peri_device *peri__kjt_device(const peri_kjt *kjt) { return peri__device(kjt->values); }

#endif
