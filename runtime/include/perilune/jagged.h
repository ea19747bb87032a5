/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/jagged.h: key lists, JaggedTensor (jt), KeyedJaggedTensor (kjt), KeyedTensor (kt).
 *
 * A *bag* is the list of ids of one batch row of one key. Layout of a kjt: key-major, then row, then id. With a fixed
 * batch of B rows, bag (key k, row b) is number k * B + b; with a variable batch (vbe) key k has stride_per_key[k]
 * rows, rows of rank 0 first, and its bags begin at lengths_offset_per_key[k]. `lengths` has one entry per bag,
 * `offsets` one more: their complete cumulative sum.
 *
 * Containers are counted handles over tensors of one device. They are immutable but for the *_copy functions. Nobody
 * may change lengths or offsets under a container.
 *
 * Checks. Counts, dtypes, shapes, keys and devices are checked by every constructor. What lengths and offsets hold (not
 * negative, monotone, ending at the number of values) is checked where it can be read for nothing: at once on devices
 * that the host can access, else when the sizes are first needed on the host (peri_kjt_sync, one copy to the host) or
 * when *_validate is called. An error names key, sample and value.
 *
 * Unless a comment says otherwise functions are local, do not communicate, return containers and tensors that are
 * *new*, borrow their arguments, and leave outputs untouched on failure. Host arrays that are returned are borrowed and
 * live as long as the container.
 *
 * Threads: nothing changes a key list (peri_keys) or a plan for regrouping (peri_regroup), so any number of threads may
 * use them at once. A container (peri_jt, peri_kjt, peri_kt) is used by one thread at a time, since it keeps what it
 * learns of its sizes.
 */
#ifndef PERILUNE_JAGGED_H
#define PERILUNE_JAGGED_H

#include <perilune/tensor.h>

typedef struct peri_keys peri_keys;
typedef struct peri_jt peri_jt;
typedef struct peri_kjt peri_kjt;
typedef struct peri_kt peri_kt;

/* -- key lists: immutable ------------------------------------------------------------------------------------------ */

/** A list of @n names (copied; not empty strings). Names may repeat: containers refuse that where it is wrong. */
PERI_API peri_status peri_keys_new(const char *const *names, int32_t n, peri_keys **out);
/** Add a reference; give one up (NULL is fine). */
PERI_API void peri_keys_retain(peri_keys *keys);
PERI_API void peri_keys_release(peri_keys *keys);
/** Number of names. */
PERI_API int32_t peri_keys_count(const peri_keys *keys);
/** Name @i, 0 <= i < count; NULL outside. Borrowed. */
PERI_API const char *peri_keys_name(const peri_keys *keys, int32_t i);
/** Position of @name (the last one if it repeats), -1 if it is not there. */
PERI_API int32_t peri_keys_find(const peri_keys *keys, const char *name);
/** Depends on the names and their order only, equal on all machines. */
PERI_API uint64_t peri_keys_hash(const peri_keys *keys);
/** True when no name repeats. */
PERI_API bool peri_keys_unique(const peri_keys *keys);
/** Same names in the same order. */
PERI_API bool peri_keys_equal(const peri_keys *a, const peri_keys *b);

/* -- JaggedTensor -------------------------------------------------------------------------------------------------- */

typedef struct peri_jt_config {
    int64_t size; /* sizeof(peri_jt_config) */
    peri_tensor *values;  /* [n] or [n, ...], any dtype; retained */
    peri_tensor *weights; /* [n, ...], or NULL; f32 or f64, or the ids whose rows are the values; retained */
    peri_tensor *lengths; /* [bags] i32 or i64, or NULL; retained */
    peri_tensor *offsets; /* [bags + 1] i32 or i64, or NULL (one of the two is needed); retained */
} peri_jt_config;

/** Make one. */
PERI_API peri_status peri_jt_new(const peri_jt_config *config, peri_jt **out);
/** Add a reference; give one up (NULL is fine). */
PERI_API void peri_jt_retain(peri_jt *jt);
PERI_API void peri_jt_release(peri_jt *jt);
/** Number of bags. */
PERI_API int64_t peri_jt_bags(const peri_jt *jt);
/** As peri_kjt_version. */
PERI_API int64_t peri_jt_version(const peri_jt *jt);
/** Its tensors. Weights: NULL if there are none. Lengths and offsets are derived when they were not given: lengths in
 *  the dtype of the offsets, offsets as i64. */
PERI_API peri_status peri_jt_values(peri_jt *jt, peri_tensor **out);
PERI_API peri_status peri_jt_weights(peri_jt *jt, peri_tensor **out);
PERI_API peri_status peri_jt_lengths(peri_jt *jt, peri_tensor **out);
PERI_API peri_status peri_jt_offsets(peri_jt *jt, peri_tensor **out);
/** Check lengths and offsets now. Waits for the device. */
PERI_API peri_status peri_jt_validate(peri_jt *jt);
/** The longest bag. Checks lengths and offsets, and waits for the device, the first time. */
PERI_API peri_status peri_jt_longest(peri_jt *jt, int64_t *out);
/** Offsets on the host, bags + 1 entries. Waits for the device the first time. */
PERI_API peri_status peri_jt_offsets_on_host(peri_jt *jt, const int64_t **out);

/** values (or, if @weights, the weights) as [bags, length, ...], length = @desired_length or, if that is negative, the
 *  longest bag: shorter bags are padded with @padding, longer ones keep their first rows. With gradient. */
PERI_API peri_status peri_jt_to_padded_dense(peri_jt *jt, int64_t desired_length, double padding, bool weights,
                                             peri_tensor **out);
/** Bag i has the rows of values[i] ([n_i, ...], of equal dtype and row shape); @n >= 1. @weights: as many of [n_i], or
 *  NULL. Lengths are i32. With gradient. */
PERI_API peri_status peri_jt_from_dense(peri_tensor *const *values, peri_tensor *const *weights, int32_t n,
                                        peri_jt **out);
/** Bag i has the first lengths[i] columns of row i of @values [bags, columns, ...]; @weights [bags, columns] or NULL.
 *  Waits for the device. With gradient. */
PERI_API peri_status peri_jt_from_dense_lengths(peri_tensor *values, peri_tensor *lengths, peri_tensor *weights,
                                                peri_jt **out);
/** The same on another device; @jt itself (a new reference) if it is there. */
PERI_API peri_status peri_jt_to(peri_jt *jt, peri_device *device, peri_jt **out);
/** The same by peri_tensor_upload: what is in pinned memory is copied without waiting. */
PERI_API peri_status peri_jt_upload(peri_jt *jt, peri_device *device, peri_jt **out);
/** A copy of @jt, which is on the host, in memory that is pinned for @device: peri_tensor_pin. */
PERI_API peri_status peri_jt_pin(peri_jt *jt, peri_device *device, peri_jt **out);
/** Overwrite @dst with @src of the same counts and parts, across devices and dtypes too. */
PERI_API peri_status peri_jt_copy(peri_jt *dst, peri_jt *src);
/** Room for a copy of @jt on @device (NULL: its own): same counts, lengths 0, values not set: to be filled by
 *  peri_jt_copy. */
PERI_API peri_status peri_jt_empty_like(peri_jt *jt, peri_device *device, peri_jt **out);
/** Same lengths, values and weights, bit for bit. Waits for the device. */
PERI_API peri_status peri_jt_equal(peri_jt *a, peri_jt *b, bool *out);
/** Bytes of its tensors, derived ones included. */
PERI_API int64_t peri_jt_bytes(const peri_jt *jt);

/* -- KeyedJaggedTensor: making ------------------------------------------------------------------------------------- */

typedef struct peri_kjt_config {
    int64_t size; /* sizeof(peri_kjt_config) */
    peri_keys *keys;      /* no name repeats; retained */
    peri_tensor *values;  /* [n] i64 or i32 ids (other dtypes are carried, lookups refuse them); retained */
    peri_tensor *weights; /* [n] f32, one per value, or NULL; retained */
    peri_tensor *lengths; /* [bags] i32 or i64, or NULL; retained */
    peri_tensor *offsets; /* [bags + 1] i32 or i64, or NULL (one of the two is needed); retained */
    int64_t stride;       /* batch rows; 0: derived: bags / keys, or (vbe) the batch of the inverse indices, or the
                             largest of a key */
    int32_t ranks;        /* vbe: columns of the next field, >= 1; else 0 */
    const int64_t *stride_per_key_per_rank; /* vbe: host, [keys x ranks], copied: rows of key k that came from rank r;
                                               else NULL */
    peri_keys *inverse_keys;      /* vbe: names of the rows of the next field, or NULL; retained */
    peri_tensor *inverse_indices; /* vbe: [inverse_keys, stride] i64 or i32, or NULL: row b of the full batch uses row
                                     inverse_indices[f][b], from 0, of key f's; retained */
} peri_kjt_config;

/** Make one. */
PERI_API peri_status peri_kjt_new(const peri_kjt_config *config, peri_kjt **out);
/** Add a reference; give one up (NULL is fine). */
PERI_API void peri_kjt_retain(peri_kjt *kjt);
PERI_API void peri_kjt_release(peri_kjt *kjt);

/* -- KeyedJaggedTensor: looking ------------------------------------------------------------------------------------ */

typedef struct peri_kjt_info {
    int64_t size; /* sizeof(peri_kjt_info) */
    int64_t stride;      /* batch rows (vbe: of the full batch) */
    int64_t bags;        /* entries of lengths */
    int64_t values;      /* ids */
    peri_device *device; /* borrowed */
    int32_t keys;        /* number of keys */
    int32_t ranks;       /* 0: fixed batch */
    int32_t values_dtype, lengths_dtype; /* lengths_dtype: of the lengths if they are there, else of the offsets */
    bool weighted, variable_stride, has_inverse, has_lengths, has_offsets;
    bool synced; /* the host knows length_per_key */
} peri_kjt_info;

/** How often its tensors, as they were given, have been changed in place together: the sum of peri_tensor_version. 0
 *  for NULL. */
PERI_API int64_t peri_kjt_version(const peri_kjt *kjt);
/** Describe @kjt. @out: its `size` is set. */
PERI_API peri_status peri_kjt_describe(const peri_kjt *kjt, peri_kjt_info *out);
/** Its keys. Borrowed, live as long as the kjt. */
PERI_API peri_keys *peri_kjt_keys(const peri_kjt *kjt);
/** Its tensors; NULL for weights or inverse indices that are not there. Lengths and offsets are derived when they were
 *  not given: lengths in the dtype of the offsets, offsets as i64. */
PERI_API peri_status peri_kjt_values(peri_kjt *kjt, peri_tensor **out);
PERI_API peri_status peri_kjt_weights(peri_kjt *kjt, peri_tensor **out);
PERI_API peri_status peri_kjt_lengths(peri_kjt *kjt, peri_tensor **out);
PERI_API peri_status peri_kjt_offsets(peri_kjt *kjt, peri_tensor **out);
PERI_API peri_status peri_kjt_inverse_indices(peri_kjt *kjt, peri_tensor **out);
/** Names of the rows of the inverse indices, NULL if there are none. Borrowed. */
PERI_API peri_keys *peri_kjt_inverse_keys(const peri_kjt *kjt);
/** Rows of each key, keys entries. */
PERI_API const int64_t *peri_kjt_stride_per_key(const peri_kjt *kjt);
/** Complete cumulative sum of stride_per_key: where each key begins in lengths; keys + 1 entries. */
PERI_API const int64_t *peri_kjt_lengths_offset_per_key(const peri_kjt *kjt);
/** [keys x ranks] row-major, NULL for a fixed batch. */
PERI_API const int64_t *peri_kjt_stride_per_key_per_rank(const peri_kjt *kjt);

/** Check lengths, offsets, and that every inverse index names a bag of its key (PERI_ERANGE), and bring the number of
 *  ids of each key to the host: post queues the work and its copies, test says whether they have arrived (PERI_PENDING:
 *  not yet) and reports malformed input, sync does both and blocks. All are free once it is done. */
PERI_API peri_status peri_kjt_sync_post(peri_kjt *kjt);
PERI_API peri_status peri_kjt_sync_test(peri_kjt *kjt);
PERI_API peri_status peri_kjt_sync(peri_kjt *kjt);
/** Forget what the host knows; the next sync checks again. */
PERI_API void peri_kjt_unsync(peri_kjt *kjt);
/** Forget what the host knows, and sync: check all now. Waits for the device. */
PERI_API peri_status peri_kjt_validate(peri_kjt *kjt);
/** Ids of each key (keys entries), their complete cumulative sum (keys + 1), the longest bag. They sync first. */
PERI_API peri_status peri_kjt_length_per_key(peri_kjt *kjt, const int64_t **out);
PERI_API peri_status peri_kjt_offset_per_key(peri_kjt *kjt, const int64_t **out);
PERI_API peri_status peri_kjt_longest(peri_kjt *kjt, int64_t *out);

/* -- KeyedJaggedTensor: operations. All but to, copy, empty and bytes sync first. ---------------------------------- */

/** Key i of the result is key indices[i] (host, @n of them; repeats and subsets are fine). Weights are permuted too,
 *  with gradient; stride and the inverse indices of these keys stay. */
PERI_API peri_status peri_kjt_permute(peri_kjt *kjt, const int32_t *indices, int32_t n, peri_kjt **out);
/** Cut the keys into @n runs of segments[i] keys, which sum to all keys. @out gets n new kjts; their tensors are views.
 *  Stride and the inverse indices of a run's keys stay (a view too, if they follow each other there). */
PERI_API peri_status peri_kjt_split(peri_kjt *kjt, const int32_t *segments, int32_t n, peri_kjt **out);
/** Join along keys: @n >= 1 kjts of one device, all fixed with equal stride or all vbe with equal ranks, all weighted
 *  or none, all with inverse indices (of one batch) or none; no key twice. */
PERI_API peri_status peri_kjt_concat(peri_kjt *const *kjts, int32_t n, peri_kjt **out);
/** The bags of key number @key; values and weights are views. */
PERI_API peri_status peri_kjt_get(peri_kjt *kjt, int32_t key, peri_jt **out);
/** For each key its part of @rows [ids of all keys, ...] with the key's lengths; with @indices its ids are the weights.
 *  Values and weights are views; the gradients of all values become one of @rows. @out: as many as keys, new; not
 *  written on failure. */
PERI_API peri_status peri_kjt_cut(peri_kjt *kjt, peri_tensor *rows, bool indices, peri_jt **out);
/** A kjt of one jt per key (as many as keys): fixed batch when all have equally many bags, else vbe of one rank. All
 *  weighted or none. */
PERI_API peri_status peri_kjt_from_jts(peri_keys *keys, peri_jt *const *jts, peri_kjt **out);
/** The same on another device, host sizes included; @kjt itself (a new reference) if it is there. */
PERI_API peri_status peri_kjt_to(peri_kjt *kjt, peri_device *device, peri_kjt **out);
/** The same by peri_tensor_upload: what is in pinned memory is copied without waiting. */
PERI_API peri_status peri_kjt_upload(peri_kjt *kjt, peri_device *device, peri_kjt **out);
/** A copy of @kjt, which is on the host, in memory that is pinned for @device: peri_tensor_pin. */
PERI_API peri_status peri_kjt_pin(peri_kjt *kjt, peri_device *device, peri_kjt **out);
/** Overwrite @dst with @src of the same keys, strides, counts and parts, across devices and dtypes too. Views of @dst
 *  see the new content, and kjts made from it by split or get must not be used any more. */
PERI_API peri_status peri_kjt_copy(peri_kjt *dst, peri_kjt *src);
/** No key at all. @weights_dtype < 0: not weighted. */
PERI_API peri_status peri_kjt_empty(peri_device *device, int32_t values_dtype, int32_t lengths_dtype,
                                    int32_t weights_dtype, peri_kjt **out);
/** Room for a copy of @kjt on @device (NULL: its own): same keys, strides and counts, lengths 0, values not set: to be
 *  filled by peri_kjt_copy. */
PERI_API peri_status peri_kjt_empty_like(peri_kjt *kjt, peri_device *device, peri_kjt **out);
/** Same keys in the same order, strides, lengths, values, weights (bit for bit, dtypes included) and inverse indices.
 *  Waits for the device. */
PERI_API peri_status peri_kjt_equal(peri_kjt *a, peri_kjt *b, bool *out);
/** Bytes of its tensors, derived ones and inverse indices included. */
PERI_API int64_t peri_kjt_bytes(const peri_kjt *kjt);

/* -- KeyedJaggedTensor: what an exchange sends and rebuilds -------------------------------------------------------- */

/** The tensors that an exchange moves, always in this order; STRIDES with a variable batch only, WEIGHTS if there are
 *  any. Inverse indices stay behind: they speak of the sender's samples. */
enum { PERI_KJT_LENGTHS = 0, PERI_KJT_VALUES = 1, PERI_KJT_STRIDES = 2, PERI_KJT_WEIGHTS = 3, PERI_KJT_LABELS = 4 };

/** Which tensors: @labels gets up to PERI_KJT_LABELS of the above; returns how many. */
PERI_API int32_t peri_kjt_dist_labels(const peri_kjt *kjt, int32_t *labels);
/** The first key_splits[0] keys go to rank 0, the next key_splits[1] to rank 1, ...: @out[label * n + rank] gets the
 *  number of elements of each label's tensor for each rank ([labels, n] host; labels as peri_kjt_dist_labels orders
 *  them). Syncs first. */
PERI_API peri_status peri_kjt_dist_splits(peri_kjt *kjt, const int32_t *key_splits, int32_t n, int64_t *out);
/** The tensors themselves, in that order: @out gets as many as there are labels. STRIDES is i64 [keys]. */
PERI_API peri_status peri_kjt_dist_tensors(peri_kjt *kjt, peri_tensor **out);
/** Order of the received (rank, key) segments in the result: @out[keys * ranks] = number rank * keys + key of the
 *  received segment, key after key, the ranks of a key in the order x + (ranks / stagger) * y for x = 0, 1, ..., and
 *  within it y = 0, 1, ...; @stagger 0: 1 */
PERI_API peri_status peri_kjt_recat(int32_t keys, int32_t ranks, int32_t stagger, int32_t *out);

typedef struct peri_kjt_dist_args {
    peri_keys *keys;      /* of the receiver; names may repeat; retained */
    peri_tensor *lengths; /* [bags] received, ordered by rank, then key, then row */
    peri_tensor *values;  /* [n] in the same order */
    peri_tensor *weights; /* [n], or NULL */
    const int64_t *stride_per_rank; /* host [ranks]: rows of each rank; NULL for a variable batch */
    const int64_t *strides;         /* vbe: host [ranks x keys]: rows of each rank and key; else NULL */
    int32_t ranks, stagger;         /* stagger divides ranks; 0: 1 */
} peri_kjt_dist_args;

/** The received buffers as a kjt, rows of a key ordered by rank as peri_kjt_recat says. Lengths are checked like those
 *  of a new kjt: they come from elsewhere. Nothing is read back on devices that the host cannot access. */
PERI_API peri_status peri_kjt_dist_init(const peri_kjt_dist_args *args, peri_kjt **out);

/* -- KeyedTensor: a matrix whose columns have names ---------------------------------------------------------------- */

/** @values [rows, columns] (retained) whose columns belong to the @keys (retained; no name repeats), length_per_key[i]
 *  (host, copied) of them to key i; with @key_dim 0 the rows do, as they do in PyTorch's transposed form. */
PERI_API peri_status peri_kt_new(peri_keys *keys, const int64_t *length_per_key, int32_t key_dim, peri_tensor *values,
                                 peri_kt **out);
/** The tensors side by side (@key_dim 1) or one below the other (0): as many as @keys, all of 2 dimensions. With
 *  gradient. */
PERI_API peri_status peri_kt_from_tensors(peri_keys *keys, peri_tensor *const *tensors, int32_t key_dim, peri_kt **out);
/** Add a reference; give one up (NULL is fine). */
PERI_API void peri_kt_retain(peri_kt *kt);
PERI_API void peri_kt_release(peri_kt *kt);
/** As peri_kjt_version. */
PERI_API int64_t peri_kt_version(const peri_kt *kt);
/** Its keys. Borrowed, live as long as the kt. */
PERI_API peri_keys *peri_kt_keys(const peri_kt *kt);
/** The dimension that the keys divide: 1 or 0. */
PERI_API int32_t peri_kt_key_dim(const peri_kt *kt);
/** The whole matrix. */
PERI_API peri_status peri_kt_values(peri_kt *kt, peri_tensor **out);
/** Columns of each key (keys entries) and their complete cumulative sum (keys + 1). */
PERI_API const int64_t *peri_kt_length_per_key(const peri_kt *kt);
PERI_API const int64_t *peri_kt_offset_per_key(const peri_kt *kt);
/** The columns of key number @key: a view, with gradient. */
PERI_API peri_status peri_kt_get(peri_kt *kt, int32_t key, peri_tensor **out);

/** Which columns of some kts make which groups; counted. */
typedef struct peri_regroup peri_regroup;

/** Plan: group g (of @n_groups) takes the columns of its keys, in order, from whichever of the @n_kts kts (key_dim 1)
 *  has them. Keys may be used several times or not at all; a key that several kts have may not be asked for. @out new;
 *  the kts are examples of what will be regrouped: same keys and columns. */
PERI_API peri_status peri_regroup_new(peri_kt *const *kts, int32_t n_kts, peri_keys *const *groups, int32_t n_groups,
                                      peri_regroup **out);
/** Add a reference; give one up (NULL is fine). */
PERI_API void peri_regroup_retain(peri_regroup *plan);
PERI_API void peri_regroup_release(peri_regroup *plan);
/** One matrix per group into @out[n_groups]. With gradient: a block of columns gets the sum of the gradients of all its
 *  copies. f32, f64, f16 or bf16, all kts alike. */
PERI_API peri_status peri_regroup_run(peri_regroup *plan, peri_kt *const *kts, int32_t n_kts, peri_tensor **out);

#endif
