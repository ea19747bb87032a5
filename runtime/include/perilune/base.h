/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/base.h: status codes, the error record, dtypes, threads, memory accounting, fault points; the
 * constants that kernels and callers share.
 *
 * Every public header is "cdef-clean": LuaJIT's C parser reads it after the C preprocessor. Constants are enums, there
 * are no function-like macros, no inline functions, no bit-fields, no structs by value.
 *
 * Words of ownership used in all headers: *new* (the caller must release), *borrowed* (valid for the call), *retained*
 * (the callee keeps a reference of its own), *taken* (the callee becomes the owner).
 *
 * Files of docs/ and kernels/ that comments name (formulas, mostly) are in share/doc/perilune of an installation.
 *
 * Threads: any thread may call any function, unless its header or comment says otherwise. The error record is the
 * calling thread's.
 */
#ifndef PERILUNE_BASE_H
#define PERILUNE_BASE_H

/** The version of these headers, for `#if`; peri_version tells that of the library. */
#define PERI_VERSION_MAJOR 0
#define PERI_VERSION_MINOR 3
#define PERI_VERSION_PATCH 0

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(PERI_CDEF_PASS)
#define PERI_API
#elif defined(__cplusplus)
#define PERI_API extern "C" __attribute__((visibility("default")))
#else
#define PERI_API __attribute__((visibility("default")))
#endif

/** Changes whenever a public struct, enum or signature changes incompatibly: it is the number in the shared library's
 *  name, and Lua refuses a library that reports another one.
 *
 *  While it stays, programs that were built with an older header run with every newer library. Structures age by one
 *  rule:
 *
 *  - A structure whose first member is `size` may get new members, at its end. The caller sets `size` to sizeof of the
 *    structure and every other byte to 0 before it fills in what it needs; what is left 0 is the default. (For those
 *    that the library fills in, `size` says how much room there is.) A newer library takes 0 for the members that an
 *    older caller does not have. An older library refuses what it does not know, if that is not 0 (PERI_EUNSUPPORTED).
 *  - All other structures stay as they are. They are zeroed likewise: 0 is the default of each of their members.
 *  - Numbers of optimizers (learning rates, betas, eps) are what they say, 0 too: peri_optim_default and
 *    peri_tbe_optimizer_default fill in peri_optim_config and peri_tbe_optimizer_config before a program changes some.
 *    Where nobody has filled them in, PERI_EINVAL says so.
 *
 *  Functions, constants and members keep their names, numbers and places; new ones may come. */
enum { PERI_ABI_VERSION = 1 };

/** Result of every call that can fail: >= 0 is success, < 0 an error whose detail is in the calling thread's error
 *  record. */
typedef int32_t peri_status;

enum {
    PERI_OK = 0,            /* done */
    PERI_PENDING = 1,       /* in progress: call again (post, test, wait) */
    PERI_EINVAL = -1,       /* an argument is malformed: shape, dtype, key, option */
    PERI_ENOMEM = -2,       /* memory could not be had */
    PERI_ERANGE = -3,       /* an id, index or offset lies outside its allowed range */
    PERI_EUNSUPPORTED = -4, /* a legal request that this build, device or transport cannot serve */
    PERI_EIO = -5,          /* a file or system call failed */
    PERI_EFORMAT = -6,      /* a file or message is not in the format it claims */
    PERI_ENOTFOUND = -7,    /* a named thing (file, device, key, plugin) does not exist */
    PERI_ETIMEOUT = -8,     /* a deadline passed; the message names who was waited for */
    PERI_EMISMATCH = -9,    /* ranks disagree: operation, dtype, splits, keys */
    PERI_EPEER = -10,       /* a peer rank failed or is gone */
    PERI_EABORTED = -11,    /* the group is poisoned by an earlier failure, quoted in the message */
    PERI_ECLOSED = -12,     /* the object was closed or released */
    PERI_EINTERNAL = -13    /* a bug of Perilune's own */
};

/** Element types; f32, the usual one, is 0. Complex numbers are pairs (real, imaginary). bool is one byte, 0 or 1. */
enum {
    PERI_F32 = 0,
    PERI_F64 = 1,
    PERI_F16 = 2,
    PERI_BF16 = 3,
    PERI_I64 = 4,
    PERI_I32 = 5,
    PERI_I16 = 6,
    PERI_I8 = 7,
    PERI_U8 = 8,
    PERI_BOOL = 9,
    PERI_C64 = 10,  /* complex64: two f32 */
    PERI_C128 = 11, /* complex128: two f64 */
    PERI_DTYPE_COUNT = 12
};

/** Bytes of an element, and names, of all element types in the order of their numbers: what arrays of PERI_DTYPE_COUNT
 *  begin with. */
#define PERI_DTYPE_SIZES {4, 8, 2, 2, 8, 4, 2, 1, 1, 1, 8, 16}
#define PERI_DTYPE_NAMES {"f32", "f64", "f16", "bf16", "i64", "i32", "i16", "i8", "u8", "bool", "c64", "c128"}

/** How reducing operations combine the ranks' values. */
enum { PERI_REDUCE_SUM = 0, PERI_REDUCE_MIN = 1, PERI_REDUCE_MAX = 2, PERI_REDUCE_COUNT = 3 };

/** Channels of a group of ranks: operations of one channel are posted in one order on all ranks; between channels there
 *  is no order. */
enum {
    PERI_CHANNEL_DENSE = 0,   /* what callers post and name no channel for; gradients of dense parameters */
    PERI_CHANNEL_IDS = 1,     /* ids, lengths and weights on their way to the owners of rows */
    PERI_CHANNEL_ROWS = 2,    /* rows on their way back, and their gradients */
    PERI_CHANNEL_CONTROL = 3, /* sizes and identities, before the data that they announce */
    PERI_CHANNEL_REPORTS = 4, /* what was different, after the ranks disagreed */
    PERI_CHANNEL_OWN = 5,     /* this one and those after it: a schedule's own */
    PERI_CHANNEL_COUNT = 16
};

/** Formats in which f32 numbers travel (perilune/codec.h). */
enum {
    PERI_CODEC_NONE = 0, /* as they are */
    PERI_CODEC_FP16 = 1,
    PERI_CODEC_BF16 = 2,
    PERI_CODEC_FP8 = 3,  /* 8-bit floats, with one scale a row or none */
    PERI_CODEC_INT8 = 4, /* 8-bit integers between the least and the largest number of a row */
    PERI_CODEC_MX4 = 5,  /* 4-bit floats with an exponent that a group shares */
    PERI_CODEC_COUNT = 6
};

/** How PERI_CODEC_MX4 rounds the largest number of a group, whose exponent they share. */
enum {
    PERI_ROUND_NEAREST = 0,
    PERI_ROUND_FLOOR = 1,
    PERI_ROUND_EVEN = 2, /* up from 1.75 times a power of two: the usual choice */
    PERI_ROUND_STOCHASTIC = 3,
    PERI_ROUND_CEIL = 4,
    PERI_ROUND_COUNT = 5
};

/** Comparisons; with a NaN only NE holds. */
enum {
    PERI_COMPARE_EQ = 0,
    PERI_COMPARE_NE = 1,
    PERI_COMPARE_LT = 2,
    PERI_COMPARE_LE = 3,
    PERI_COMPARE_GT = 4,
    PERI_COMPARE_GE = 5,
    PERI_COMPARE_COUNT = 6
};

/** What cumulative sums of x begin and end with: COMPLETE 0 and the sum (one entry more than x has), EXCLUSIVE 0,
 *  INCLUSIVE the sum. */
enum { PERI_CUMSUM_COMPLETE = 0, PERI_CUMSUM_EXCLUSIVE = 1, PERI_CUMSUM_INCLUSIVE = 2 };

/** How attention makes weights of scores: see kernels/sequence.h. */
enum { PERI_ATTENTION_SOFTMAX = 0, PERI_ATTENTION_SILU = 1 };

/** What a bag gives: the sum of its rows, the sum divided by the number of its ids, (NONE) each of its rows, or (MAX,
 *  peri_embedding_bag only) their largest elements. */
enum { PERI_POOLING_SUM = 0, PERI_POOLING_MEAN = 1, PERI_POOLING_NONE = 2, PERI_POOLING_MAX = 3 };

/** Rows of bytes, for lookups only, beside those of PERI_F32, PERI_F16 and PERI_BF16. A number of the row is fma(code,
 *  scale, bias). */
enum {
    PERI_ROWS_INT8 = 64,      /* cols codes, f32 scale, f32 bias: FBGEMM's fused 8-bit rows */
    PERI_ROWS_INT8_HALF = 65, /* f16 scale, f16 bias, cols codes: those of its tables for inference */
    PERI_ROWS_FP8 = 66,       /* cols codes: sign, 4 bits of exponent with bias 7, 3 bits of mantissa; neither
                                 infinities nor NaN */
    PERI_ROWS_INT4 = 67,      /* as INT8_HALF, two codes a byte, the earlier one in the low bits */
    PERI_ROWS_INT2 = 68       /* four codes a byte, likewise */
};

/** Optimizers that run in the backward pass (FBGEMM's EmbOptimType, and Lion); formulas and sources in
 *  kernels/tbe.h. */
enum {
    PERI_TBE_NONE = 0,                 /* none: gradients are returned (peri_tbe_gradient), or flow to dense leaves on
                                          the tape */
    PERI_TBE_SGD = 1,                  /* EXACT_SGD */
    PERI_TBE_ADAGRAD = 2,              /* EXACT_ADAGRAD: state momentum1 [rows, cols] */
    PERI_TBE_ROWWISE_ADAGRAD = 3,      /* EXACT_ROWWISE_ADAGRAD: state momentum1 [rows] */
    PERI_TBE_ADAM = 4,                 /* ADAM: states momentum1, momentum2 [rows, cols] */
    PERI_TBE_PARTIAL_ROWWISE_ADAM = 5, /* PARTIAL_ROWWISE_ADAM: states momentum1 [rows, cols], momentum2 [rows] */
    PERI_TBE_LAMB = 6,                 /* LAMB: states momentum1, momentum2 [rows, cols] */
    PERI_TBE_PARTIAL_ROWWISE_LAMB = 7, /* PARTIAL_ROWWISE_LAMB: states momentum1 [rows, cols], momentum2 [rows] */
    PERI_TBE_LARS_SGD = 8,             /* LARS_SGD: state momentum1 [rows, cols] */
    PERI_TBE_LION = 9,                 /* state momentum1 [rows, cols] */
    PERI_TBE_SHAMPOO = 10,             /* one-sided, over columns: state preconditioner [cols, cols]; costs cols^3 an
                                          update */
    PERI_TBE_ROWWISE_RMSPROP_AR = 11,  /* ROWWISE_RMSPROP_AR: states momentum1, prev_iter [rows] */
    /* EMAINPLACE_ROWWISE_ADAGRAD: row-wise Adagrad, state momentum1 [rows], and the right half of all rows follows the
     * left. Even cols */
    PERI_TBE_EMAINPLACE_ROWWISE_ADAGRAD = 12,
    /* EXACT_ROWWISE_ADAGRAD with WeightDecayMode COUNTER or COWCLIP: states momentum1, row_counter, prev_iter [rows];
     * and max_counter [1] of the table, where peri_tbe_counter says so */
    PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER = 13,
    PERI_TBE_OPTIMIZER_COUNT = 14
};

/** COUNTER and COWCLIP are of PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER, which has no others: peri_tbe_counter says how it
 *  decays. */
enum {
    PERI_DECAY_NONE = 0,
    PERI_DECAY_L2 = 1,
    PERI_DECAY_DECOUPLE = 2,
    PERI_DECAY_COUNTER = 3,
    PERI_DECAY_COWCLIP = 4
};
/** How peri_tbe_counter decays weights, by how often their row came. */
enum {
    PERI_COUNTER_NONE = 0,
    PERI_COUNTER_L2 = 1,
    PERI_COUNTER_DECOUPLE = 2,
    PERI_COUNTER_ADAGRADW = 3
};
/** Learning rates by how often a row came: one for all, larger or smaller for rows above the tail, or by the row's
 *  counter alone. */
enum {
    PERI_RATES_EQUAL = 0,
    PERI_RATES_TAIL_ID_INCREASE = 1,
    PERI_RATES_TAIL_ID_DECREASE = 2,
    PERI_RATES_COUNTER_SGD = 3
};

/** Constants of a fixed size that appear in public structs. */
enum { PERI_MAX_DIMS = 8, PERI_MESSAGE_MAX = 512 };

/** Severity of a log line; a level prints itself and everything more severe. */
enum { PERI_LOG_ERROR = 0, PERI_LOG_WARN = 1, PERI_LOG_INFO = 2, PERI_LOG_DEBUG = 3 };

/* -- versions ------------------------------------------------------------------------------------------------------ */

/** PERI_ABI_VERSION of the loaded library. Local, never fails. */
PERI_API int32_t peri_abi_version(void);
/** Release name such as "0.2.0". Static text, borrowed. */
PERI_API const char *peri_version(void);

/* -- the error record (one per thread) ----------------------------------------------------------------------------- */

/** Upper-case name of a status, "EINVAL" for PERI_EINVAL; "unknown" otherwise. Static text, borrowed. */
PERI_API const char *peri_status_name(int32_t status);
/** One sentence on what a status means. Static text, borrowed. */
PERI_API const char *peri_status_text(int32_t status);
/** Message of this thread's last failure ("function: what was wrong, with the value and the allowed range"); "" if
 *  none. Borrowed, valid until this thread's next failure. */
PERI_API const char *peri_error_message(void);
/** Status of this thread's last failure, PERI_OK if none. */
PERI_API int32_t peri_error_status(void);
/** "file:line" at which this thread's last failure was raised. Borrowed. */
PERI_API const char *peri_error_where(void);
/** Forget this thread's last failure. */
PERI_API void peri_error_clear(void);

/** Print lines of this level and more severe ones to stderr, or give them to the host's function (peri_host_log_set).
 *  Default: PERI_LOG_WARN, or PERI_LOG=error|warn|info|debug. */
PERI_API peri_status peri_log_level_set(int32_t level);

/* -- dtypes -------------------------------------------------------------------------------------------------------- */

/** Bytes of one element; 0 for an unknown dtype. */
PERI_API int64_t peri_dtype_size(int32_t dtype);
/** "f32", "i64", "c64", ...; "?" for an unknown dtype. Static text, borrowed. */
PERI_API const char *peri_dtype_name(int32_t dtype);
/** The dtype of a name ("f32"; PyTorch's "float32" and the like are accepted too); PERI_EINVAL (negative) if there is
 *  none. */
PERI_API int32_t peri_dtype_parse(const char *name);

/* -- threads and time ---------------------------------------------------------------------------------------------- */

/** Worker threads of this process, the caller included. Default: PERI_NUM_THREADS, else the processors that the
 *  affinity mask leaves to it divided by the ranks of this node, but no more than the cgroup's quota of processor time,
 *  rounded up. Results never depend on it. Workers spin for less than 0.1 ms after an operation, then sleep; they take
 *  no signals, and are called "perilune". */
PERI_API int32_t peri_threads(void);
/** Set the number of worker threads, 1..256. Local; must not run while another thread of the process computes. */
PERI_API peri_status peri_threads_set(int32_t threads);
/** Monotonic clock, nanoseconds. */
PERI_API int64_t peri_time_ns(void);
/** Give the processor away for a moment; @round (0, 1, 2, ... of one wait) makes it spin first, then yield, then sleep
 *  up to 200 us. */
PERI_API void peri_pause(int64_t round);

/* -- memory -------------------------------------------------------------------------------------------------------- */

/** Live bytes of the process, heap objects and device storage together. */
PERI_API int64_t peri_mem_live(void);
/** Highest peri_mem_live so far. */
PERI_API int64_t peri_mem_peak(void);
/** Live tensors, groups, works and other counted objects; 0 when everything was released. */
PERI_API int64_t peri_mem_objects(void);
/** Bytes of storage allocated on behalf of handles since the last call (and resets it): a binding with a garbage
 *  collector adds it to its own pressure. */
PERI_API int64_t peri_mem_debt(void);
/** Bytes of memory that this process may have: the machine's, or what the control groups of its container or job allow
 *  if that is less. @available (NULL: not asked): bytes of them that can be had now without pushing others out.
 *  INT64_MAX where nobody says. Reads files: some 0.1 ms. */
PERI_API int64_t peri_host_memory(int64_t *available);

/* -- files --------------------------------------------------------------------------------------------------------- */

/** Write a whole file: under @path is what was there before, or all @size bytes of @data, which are written beside it
 *  and renamed. A pipe or a device is written to. @folders: make those above it that are missing. @data NULL: only try
 *  whether a file could be made there, which leaves none. PERI_EIO: it could not, with the system's words. Local. */
PERI_API peri_status peri_file_write(const char *path, const void *data, int64_t size, bool folders);
enum { PERI_PATH_MOST = 4096 }; /* bytes of a path, with the 0 at its end */
/** The same of a file that is written bit by bit: makes an empty one beside @path, which the caller writes and then
 *  gives to peri_file_end, or removes. @fresh: its path. Where @path is a pipe or a device that is @path itself. */
PERI_API peri_status peri_file_begin(const char *path, char fresh[PERI_PATH_MOST]);
/** What was written to @fresh, and closed, is on the disk, and then has the name @path. If that fails @fresh is
 *  removed. */
PERI_API peri_status peri_file_end(const char *path, const char *fresh);

/* -- fault points (tests) ------------------------------------------------------------------------------------------ */

/** Make the @k-th passage (1 = the next) of fault point @name fail, once; 0 disarms. PERI_ENOTFOUND lists the names. */
PERI_API peri_status peri_fault_arm(const char *name, int64_t k);
/** How often fault point @name was passed since it was last armed or disarmed; -1 for an unknown name. */
PERI_API int64_t peri_fault_passed(const char *name);

#endif
