/* SPDX-License-Identifier: Apache-2.0
 *
 * plugin/coll.h (L1): the transport contract: groups of ranks and the collective operations that they post.
 *
 * Laws of the contract
 * - post never blocks; test never blocks. Operations are matched by their sequence number, which is one of the whole
 * group.
 * - Operations go on channels (PERI_CHANNEL_*). On one channel every rank posts the same numbers in ascending order: a
 *   transport may give each channel a communicator whose operations the library matches by their order. Between
 *   channels the order differs from rank to rank, because state machines of several phases take their numbers in
 *   advance and post when they are ready.
 * - Buffers are the transport's from post until drop returned PERI_OK.
 * - Sums are made in f32 for 16-bit floats; with PERI_COLL_*RANK_ORDER in rank order (rank 0 + rank 1 + ...), so that
 *   the same input gives the same bits on every transport that says so.
 * - A world has a transport for host memory and may have a second one for the memory of a device: groups of both are
 * made alike.
 * - Counts are int64; a transport whose library counts in int splits, and honours PERI_TEST_COUNT_LIMIT in its tests.
 * - A mismatch or a dead peer is an error from test on every rank, never a wait without end; afterwards the group is of
 *   no more use (the core poisons it and calls abort). The core watches the deadlines and asks `blame` whom an
 *   operation waited for.
 * - Calls on the groups of one world come from one thread at a time.
 */
#ifndef PERI_PLUGIN_COLL_H
#define PERI_PLUGIN_COLL_H

#include "host.h"

#include <stdio.h>
#include <string.h>

enum {
    PERI_COLL_ABI = 11,      /* of this header */
    PERI_COLL_ABI_LOWEST = 8 /* the oldest contract whose backends this core still takes */
};

struct peri_coll_vtab;

/** Kinds of operations. Buffers are contiguous; counts are elements of op.dtype. W is the size of the group. */
enum {
    PERI_COLL_BARRIER = 0,
    PERI_COLL_BROADCAST = 1,      /* buffer recv[count] goes from rank root to all; in place */
    PERI_COLL_ALL_REDUCE = 2,     /* send[count] -> recv[count]; may be the same buffer */
    PERI_COLL_ALL_GATHER = 3,     /* send[send_counts[0]] -> recv, rank i's part of recv_counts[i] after part i-1 */
    PERI_COLL_REDUCE_SCATTER = 4, /* send of W parts, part i of send_counts[i] -> recv[send_counts[rank]] */
    PERI_COLL_ALL_TO_ALL = 5,     /* send of W parts (send_counts) -> recv of W parts (recv_counts) */
    PERI_COLL_KIND_COUNT = 6
};

/** What a transport can take. */
enum {
    PERI_COLL_HOST = 1,   /* buffers in host memory */
    PERI_COLL_DEVICE = 2, /* buffers in the memory of the device that the world was opened with, ordered by `stream` */
    PERI_COLL_PLACES = 4, /* an ALL_TO_ALL whose data come to scattered places (recv_runs); of host memory */
    PERI_COLL_RANK_ORDER = 8,        /* sums of host memory in rank order */
    PERI_COLL_DEVICE_RANK_ORDER = 16, /* sums of a device's memory in rank order */
    PERI_COLL_DIRECT = 32 /* an ALL_TO_ALL or ALL_GATHER of host memory with functions instead of a buffer (fill,
                             take) */
};

/** Numbers of which a tag is made, for messages. */
enum { PERI_COLL_FACTS = 8 };
typedef struct peri_coll_facts {
    const char *names; /* of what has them and, each after a comma, of the numbers: "Adam,step,lr"; static. NULL:
                          none */
    double number[PERI_COLL_FACTS];
} peri_coll_facts;

/** Elements [from, from + n) of what is sent, which are wanted at `data`. */
typedef struct peri_coll_stretch {
    int64_t from, n;
    void *data;
} peri_coll_stretch;

/** One posted operation. The struct is copied by post; buffers and count arrays stay the core's and live until drop. */
typedef struct peri_coll_op {
    int32_t kind;                /* PERI_COLL_* */
    int32_t dtype;               /* element type (PERI_U8 for packed bytes) */
    int32_t reduce;              /* PERI_REDUCE_*, for the reducing kinds */
    int32_t root;                /* broadcast */
    int32_t channel;             /* PERI_CHANNEL_* */
    uint64_t sequence;           /* number of this operation in its group, from 1; the channels share the numbers */
    uint64_t tag;                /* the caller's mark, on which all ranks must agree */
    uint64_t signature;          /* hash over what all ranks must agree on: all of the above, symmetric counts and
                                    tag */
    const void *send;            /* NULL where the kind has none */
    void *recv;
    int64_t count;               /* elements, for BROADCAST and ALL_REDUCE */
    const int64_t *send_counts;  /* int64[W], NULL where the kind has none */
    const int64_t *recv_counts;  /* int64[W], NULL where the kind has none */
    /* ALL_TO_ALL, with PERI_COLL_PLACES; NULL: the parts lie one after the other. Elements [from, from + n) of them
     * (own part included) belong at recv + to, the n elements after them at recv + to + recv_step, and so on: each run
     * stands for recv_lines of them (0: 1). Ascending; the runs cover what comes exactly, and none reaches from one
     * part into the next. Local: other ranks need not have any. */
    const struct peri_k_run *recv_runs;
    int64_t n_recv_runs, recv_lines, recv_step;
    /* With PERI_COLL_DIRECT, in place of a buffer that would only be written to be read again: `fill`, of an ALL_TO_ALL
     * or an ALL_GATHER, writes stretches of what `send` would have; `take`, of an ALL_TO_ALL, gets elements [from, from
     * + n) of what `recv` would. The buffer is then NULL, and there are no runs. Called for each element before the
     * operation is complete, in pieces of any size and order. Of one operation some ranks may fill, or some may take,
     * whatever the others do; never both. Stretches that are filled together (no two for one rank) may have parts of
     * the same rows, which are then read once. `stays`: they are written where they belong, rather than to a block from
     * which they are copied at once. */
    void (*fill)(void *ctx, const peri_coll_stretch *stretches, int32_t count, bool stays);
    void (*take)(void *ctx, int64_t from, int64_t n, const void *data);
    void *ctx;
    void *stream;                /* of a device's buffers, else NULL: what is queued on it at the post comes before the
                                    operation, and what * is queued once test has said PERI_OK, after it; the data need
                                    not be there by then */
    const peri_coll_facts *facts; /* what the tag is made of, for messages, or NULL; as long as the count arrays */
} peri_coll_op;

/** What a rank has taken the last numbers of a group for, posted or not. All ranks take the same numbers for the same
 *  channels and give the same ones back, so an operation that another rank has posted under a number that is here
 *  another channel's, or was given back, never meets its counterpart. */
enum { PERI_COLL_NUMBERS = 256, PERI_COLL_SPARE = 128 };
typedef struct peri_coll_numbers {
    uint64_t last;                   /* taken so far: 1 to `last` */
    uint8_t what[PERI_COLL_NUMBERS]; /* by number % PERI_COLL_NUMBERS: the channel; with PERI_COLL_SPARE where it was
                                        given back */
    int64_t blocked; /* of a world: the rank's thread waits for one work, and does nothing else: so many are in flight.
                        0: it does not */
    /* Of a world that the rank leaves in good order (since contract 11): what averages of gradients have kept alike in
     * it (0: nothing), and what became of that. Transports that hear from ranks that leave compare: of two ranks whose
     * `averaged` is the same, `trained` should be. */
    uint64_t averaged, trained;
} peri_coll_numbers;

enum { PERI_COLL_NOTE = 480 }; /* bytes of the largest note */

/** How ranks find each other. */
typedef struct peri_coll_open {
    const char *job;    /* name that all ranks of one sim world share; NULL otherwise */
    int32_t rank, size; /* wanted place, -1 and 0: the transport knows (mpirun); out: the place had */
    int64_t timeout_ns; /* for opening and closing */
    const struct peri_device_vtab *device_vtab; /* NULL: for host memory; else for that of this device
                                                   (PERI_COLL_DEVICE) */
    void *device;
    const struct peri_coll_vtab *host_vtab; /* with a device: the transport of host memory and its world, which outlives
                                               this one */
    void *host_group;
    const void *communicator; /* mpi: the program's MPI_Comm, or NULL (since contract 9) */
} peri_coll_open;

typedef struct peri_coll_vtab {
    uint32_t size, abi; /* sizeof this struct, of which the core takes no more; the lowest contract that the backend
                           needs */
    const char *name;   /* "mpi" */
    int32_t takes;      /* PERI_COLL_HOST | ... */
    /* Usable here? PERI_OK, or PERI_EUNSUPPORTED and a sentence in @reason. Local. */
    peri_status (*probe)(char *reason, size_t len);
    /* Ranks of the world that this process was launched into; 1 when it was launched alone. Local. (optional: 1) */
    int32_t (*launched)(void);
    /* Join the world; sets boot->rank and boot->size. Collective. */
    peri_status (*open)(peri_coll_open *boot, void **group);
    /* Number of the node (0, 1, ...) on which rank @rank of the world runs. (optional: all on one) */
    int32_t (*node)(void *group, int32_t rank);
    /* A group of the given ranks (of @group, ascending or not), which all members call in the same order. Collective
     * over members; must not block on ranks outside. @tag names the group (equal on all members). */
    peri_status (*subgroup)(void *group, const int32_t *ranks, int32_t n, uint64_t tag, void **sub);
    peri_status (*post)(void *group, const peri_coll_op *op, void **request);
    /* PERI_OK, PERI_PENDING or the error. */
    peri_status (*test)(void *request);
    /* For whom @request still waits, in words: "rank 2 (its last operation: 4 barrier)". */
    void (*blame)(void *request, char *text, size_t len);
    /* Give a request back, after test said done or after abort. PERI_OK: it is gone, its buffers are free;
     * PERI_PENDING: the transport still holds buffers, call again later. */
    peri_status (*drop)(void *request);
    /* Tell all ranks that the group, and every group made from it, is broken and why. Local, does not block, may be
     * called twice. */
    void (*abort)(void *group, const char *message);
    /* Leave: operations that still need this rank fail on the others. Collective for healthy groups where the library
     * needs it (then bounded by the opening timeout), local for aborted ones. */
    peri_status (*close)(void *group);
    /* Free what the handle holds. Local, never communicates; also without close. */
    void (*release)(void *group);
    /* What the transport of a device tells its other ranks beside the data. @group: a world; ranks are numbered in it.
     * (all optional: such a transport has to do without, or refuses) */
    /* Send @bytes (1 to PERI_COLL_NOTE) to rank @to: eager, in order for a pair of ranks. Never waits. */
    void (*note_send)(void *group, int32_t to, const void *note, int32_t bytes);
    /* The oldest note that has come: into @note[PERI_COLL_NOTE], its sender into *@from. Returns its bytes; 0: there is
     * none. */
    int32_t (*note_take)(void *group, int32_t *from, void *note);
    /* Is the rank known to have died or to have left? Then *@text says so in words: "rank 1 (process 77) is gone". */
    bool (*gone)(void *group, int32_t rank, char *text, size_t len);
    /* This rank has posted @op, a number of this group, on a device's transport: for ranks that wait here for that
     * number. (optional) */
    void (*elsewhere)(void *group, const peri_coll_op *op);
    /* PERI_OK, or why the group has failed. Does not block. A transport of host memory is asked while an operation of a
     * device is pending; one of a device moves its operations on, and says PERI_PENDING while any of its world run on
     * the device. (optional) */
    peri_status (*check)(void *group);
    /* Host memory for buffers of operations, of any contents, in which they are faster than in other memory: at least
     * @bytes, on whole cache lines. NULL: there is none, and any memory does. It outlives worlds. Any thread's, as is
     * giving it back. (both optional) */
    void *(*lend)(int64_t bytes);
    void (*give_back)(void *data);
    /* Somebody waits for @request, an operation of a device: have what is queued on its stream from here on come after
     * it, as soon as the library has the operation, whether or not it has run. PERI_OK: so it does; PERI_PENDING: call
     * again; or the error. From then on the poster's buffers need only live until what is queued now has run, and
     * `test` tells whether the operation has. (optional: wait for `test`) */
    peri_status (*join)(void *request);
    /* What this rank takes the group's numbers for: kept up to date, and there until `release`. (optional: ranks that
     * differ in it wait for their deadlines) */
    void (*numbers)(void *group, const peri_coll_numbers *numbers);
} peri_coll_vtab;

/** What every transport has: the members up to `gone`. */
enum { PERI_COLL_SIZE_LOWEST = offsetof(peri_coll_vtab, elsewhere) };

/** The one symbol that a transport plugin libperilune_<name>.so exports. */
typedef const peri_coll_vtab *(*peri_coll_entry_fn)(const peri_plugin_host *host);
#define PERI_COLL_ENTRY "peri_coll_entry_v1"

/** Bytes of an element of @dtype, a valid one. */
static inline int64_t peri_coll_dtype_size(int32_t dtype)
{
    static const int8_t sizes[PERI_DTYPE_COUNT] = PERI_DTYPE_SIZES;
    return sizes[dtype];
}

/** Write " [1 2 3]" (at most six numbers) at text + used; returns the new length. */
static inline size_t peri_coll_list_text(const char *what, const int64_t *counts, int32_t n, char *text, size_t used,
                                         size_t len)
{
    if (!counts || used >= len) return used;
    used += (size_t)snprintf(text + used, len - used, "%s[", what);
    for (int32_t i = 0; i < n && i < 6 && used < len; i++)
        used += (size_t)snprintf(text + used, len - used, i ? " %lld" : "%lld", (long long)counts[i]);
    if (used < len) used += (size_t)snprintf(text + used, len - used, n > 6 ? " ...]" : "]");
    return used < len ? used : len - 1;
}

/** The name of a channel (PERI_CHANNEL_*). */
static inline const char *peri_coll_channel_name(int32_t channel)
{
    static const char *const names[PERI_CHANNEL_COUNT] = {[PERI_CHANNEL_DENSE] = "dense",
                                                          [PERI_CHANNEL_IDS] = "ids",
                                                          [PERI_CHANNEL_ROWS] = "rows",
                                                          [PERI_CHANNEL_CONTROL] = "control",
                                                          [PERI_CHANNEL_REPORTS] = "reports",
                                                          [PERI_CHANNEL_OWN] = "own1",
                                                          "own2",
                                                          "own3",
                                                          "own4",
                                                          "own5",
                                                          "own6",
                                                          "own7",
                                                          "own8",
                                                          "own9",
                                                          "own10",
                                                          "own11"};
    return names[channel];
}

/** Write @x with a point. printf writes that of the program's locale, which may be a comma. */
static inline void peri_coll_number_text(double x, char text[32])
{
    snprintf(text, 32, "%.9g", x);
    char *point = text + strspn(text, "-0123456789e"), *after = point + strcspn(point, "0123456789");
    if (after == point || *after == 0) return; /* a whole number, or none: "inf" */
    *point = '.';
    memmove(point + 1, after, strlen(after) + 1);
}

/** Write " by Adam (step 12, lr 0.1)", without the numbers that are 0, at text + used; returns the new length. */
static inline size_t peri_coll_facts_text(const peri_coll_facts *facts, char *text, size_t used, size_t len)
{
    int32_t shown = 0;
    char number[32];
    const char *name = facts->names;
    for (int32_t i = -1; name && i < PERI_COLL_FACTS && used < len; i++) {
        int n = (int)strcspn(name, ",");
        if (i < 0) used += (size_t)snprintf(text + used, len - used, " by %.*s", n, name);
        else if (facts->number[i] != 0) {
            peri_coll_number_text(facts->number[i], number);
            used += (size_t)snprintf(text + used, len - used, "%s%.*s %s", shown++ ? ", " : " (", n, name, number);
        }
        name = name[n] ? name + n + 1 : NULL;
    }
    if (shown && used < len) used += (size_t)snprintf(text + used, len - used, ")");
    return used < len ? used : len - 1;
}

/** An operation in words, for messages: "operation 3: all_to_all f32 send [3 4] recv [3 3]". @size: of the group. */
static inline void peri_coll_op_text(const peri_coll_op *op, int32_t size, char *text, size_t len)
{
    static const char *const kinds[] = {"barrier",    "broadcast",      "all_reduce",
                                        "all_gather", "reduce_scatter", "all_to_all"};
    static const char *const reduces[] = {"sum", "min", "max"};
    static const char *const dtypes[PERI_DTYPE_COUNT] = PERI_DTYPE_NAMES;
    bool reducing = op->kind == PERI_COLL_ALL_REDUCE || op->kind == PERI_COLL_REDUCE_SCATTER;
    bool counted = op->kind == PERI_COLL_ALL_REDUCE || op->kind == PERI_COLL_BROADCAST;
    size_t used = (size_t)snprintf(text, len, "operation %llu: %s", (unsigned long long)op->sequence, kinds[op->kind]);
    if (reducing && used < len) used += (size_t)snprintf(text + used, len - used, " %s", reduces[op->reduce]);
    if (op->kind != PERI_COLL_BARRIER && used < len)
        used += (size_t)snprintf(text + used, len - used, " %s", dtypes[op->dtype]);
    if (counted) used = peri_coll_list_text(" ", &op->count, 1, text, used, len);
    if (op->kind == PERI_COLL_ALL_GATHER) used = peri_coll_list_text(" ", op->recv_counts, size, text, used, len);
    if (op->kind == PERI_COLL_REDUCE_SCATTER) used = peri_coll_list_text(" ", op->send_counts, size, text, used, len);
    if (op->kind == PERI_COLL_ALL_TO_ALL) {
        used = peri_coll_list_text(" send ", op->send_counts, size, text, used, len);
        used = peri_coll_list_text(" recv ", op->recv_counts, size, text, used, len);
    }
    if (op->kind == PERI_COLL_BROADCAST && used < len)
        used += (size_t)snprintf(text + used, len - used, " from rank %d", op->root);
    if (op->channel != PERI_CHANNEL_DENSE && used < len)
        used += (size_t)snprintf(text + used, len - used, " on channel %s", peri_coll_channel_name(op->channel));
    if (op->facts) peri_coll_facts_text(op->facts, text, used, len);
    else if (op->tag && used < len) snprintf(text + used, len - used, " tag %llx", (unsigned long long)op->tag);
}

/** Does member @own, which has posted no operation @sequence and took its @numbers otherwise, never post what another
 *  one has under it on
 *  @channel? Then @text gets what the number is there, in words. @numbers: NULL where they are not known. */
static inline bool peri_coll_numbers_differ(const peri_coll_numbers *numbers, int32_t own, uint64_t sequence,
                                            int32_t channel, char *text, size_t len)
{
    if (!numbers || sequence > numbers->last || numbers->last - sequence >= PERI_COLL_NUMBERS) return false;
    int32_t what = numbers->what[sequence % PERI_COLL_NUMBERS], had = what & (PERI_COLL_SPARE - 1);
    if (what == channel) return false;
    snprintf(text, len,
             "rank %d took that number for another operation on channel %s%s: one of them has made a call that the "
             "other has "
             "not",
             own, peri_coll_channel_name(had), what & PERI_COLL_SPARE ? ", which was not needed" : "");
    return true;
}

/** The warning of a rank that leaves the world with another model than rank @first, in words. */
static inline void peri_coll_models_differ(int32_t first, char *text, size_t len)
{
    snprintf(text, len,
             "this rank ends with another model than rank %d: after the last averages of gradients one of them made an "
             "optimizer's step, or changed a parameter, and the other did not, or otherwise",
             first);
}

#endif
