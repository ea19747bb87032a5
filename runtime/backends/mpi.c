/* SPDX-License-Identifier: Apache-2.0
 *
 * mpi.c: the transport of launched ranks, over Open MPI.
 *
 * Every operation is made of nonblocking point-to-point messages here: so that nothing ever blocks, that sums are made in rank order, and
 * that ranks which disagree find out. A message's tag carries the operation's number and signature, so messages of different
 * operations never meet; a rank that sees no message for a while asks the ranks it waits for (mpi_control.h) what they are doing.
 *
 *   barrier          rounds k = 0, 1, ...: to rank + 2^k, from rank - 2^k
 *   broadcast        binomial tree
 *   all_gather, all_to_all   direct: every rank to every rank
 *   reduce_scatter   direct exchange of the parts, segment by segment, summed in rank order
 *   all_reduce       small: everybody gets everything and sums; large: reduce_scatter, then all_gather of the sums
 *
 * Between ranks of one machine only small data travel in messages; mpi_near.h copies the rest.
 *
 * All ranks of a pair exchange a message even where the count is zero: a disagreement about counts is then seen by the receiver.
 */
#include "../../kernels/kernels.h"
#include "../plugin/coll.h"

#include <mpi.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

static const peri_plugin_host *host;

enum {
    SEQUENCE_BITS = 10,
    HISTORY = 256,             /* operations of a group that a rank can still tell others about */
    SMALL_REDUCE = 32 << 10,   /* bytes of all vectors together up to which all_reduce sends everything to everybody */
    EAGER = 4000,              /* bytes of a message that Open MPI sends at once between processes of a machine */
    SEGMENT = 256 << 10,       /* bytes of a part that are received before they are summed */
    FAULT_COLL_DROP = 1,       /* places in base/fault.def */
    FAULT_COLL_STALL = 2
};

typedef struct mpi_group mpi_group;
typedef struct mpi_request mpi_request;

/** Where a message of a request comes from or goes to. */
typedef struct slot {
    int peer; /* rank in the group */
    int bytes;
    bool receive, note; /* note: a descriptor of mpi_near.h */
} slot;

struct mpi_request {
    mpi_request *next, *previous; /* of the group, while it is in progress */
    mpi_group *group;
    peri_coll_op op;
    peri_status status;
    char *message;           /* of the failure */
    int32_t phase, stage;    /* steps made; all_reduce: 0 scatter, 1 gather */
    int32_t n, room;         /* messages of this phase; how many fit */
    MPI_Request *requests;
    slot *slots;
    MPI_Status *statuses;
    char *scratch;           /* parts received before they are summed */
    int64_t scratch_bytes;
    struct near_state *near; /* copies between processes; NULL: messages only */
    int64_t given_up_ns;     /* dropped while the others may still copy */
    int64_t quiet_ns, asked_ns; /* since when nothing came; when the others were asked last */
    int32_t polls;
    bool past;               /* results are written past the caches */
    int64_t rows;            /* how short rows are received: PERI_HOST_COPY_ROWS; 0 while there are few of them */
    bool deferred;           /* not begun: waits for a free cell */
    bool stalled, dropped;   /* fault points */
    bool cancelled;          /* receives were cancelled after a failure */
};

struct mpi_group {
    mpi_group *next, *parent;
    MPI_Comm comm;
    int32_t rank, size;
    int32_t *ranks;          /* size: ranks in the world */
    uint64_t tag;
    peri_status failed;
    char message[PERI_MESSAGE_MAX];
    mpi_request *active;
    uint64_t last;           /* highest number posted */
    peri_coll_op *history;   /* HISTORY, by number */
    mpi_request *spare;      /* kept between operations, with its room for messages */
    char *scratch;           /* also kept */
    int64_t scratch_bytes;
    struct near_shared *shared; /* cells of its copies; NULL: messages only */
    uint32_t *used;          /* own cells in use, by peer: bits */
    bool left, released;
};

/** What is known of another rank of the world. */
typedef struct peer {
    int64_t pid;
    uint64_t machine;        /* hash of host and process-id space: equal where pids can be compared */
    char host[48];           /* name of its machine */
    int32_t node;
    int32_t left;            /* worlds that it has left */
    int64_t answered_ns;
    char answer[160];
} peer;

static struct {
    bool started, ours, open, broken; /* ours: MPI_Init was called here; broken: a group failed, so MPI_Finalize could hang */
    bool over;                        /* MPI was finalized, or given up: no call of it any more */
    bool crowded;                     /* this machine has more ranks than processors */
    int32_t rank, size, epoch;        /* worlds opened */
    MPI_Comm world, control;
    int hash_bits;
    int64_t piece;                    /* bytes of the largest message */
    int64_t timeout_ns;
    peer *peers;
    mpi_group *groups;
    int64_t near_least;               /* bytes above which a message is a job of mpi_near.h; the same on all ranks */
    char *bounce;                     /* a block of mpi_near.h; NULL: not needed so far */
} mpi;

static int64_t size_of(int32_t dtype)
{
    static const int8_t sizes[PERI_DTYPE_COUNT] = {8, 4, 2, 2, 8, 4, 2, 1, 1, 1, 8, 16};
    return sizes[dtype];
}

static peri_status mpi_fail(const char *what, int code)
{
    char text[MPI_MAX_ERROR_STRING];
    int len = 0;
    MPI_Error_string(code, text, &len);
    return PERI_HOST_FAIL(host, PERI_EPEER, "%s: %.*s", what, len, text);
}

/** The group, or one that it was made from, that has failed; NULL while all are sound. */
static const mpi_group *broken(const mpi_group *g)
{
    while (g && g->failed == PERI_OK) g = g->parent;
    return g;
}

static void near_close(const mpi_group *g);

static void group_fail(mpi_group *g, peri_status status, const char *message)
{
    if (g->failed != PERI_OK) return;
    near_close(g);
    g->failed = status;
    snprintf(g->message, sizeof g->message, "%s", message);
    mpi.broken = true;
}

/** Pass an error on. */
#define TRY(expr)                                                                                                                     \
    do {                                                                                                                              \
        peri_status try_ = (expr);                                                                                                    \
        if (try_ < 0) return try_;                                                                                                    \
    } while (0)

static void near_waited_for(const mpi_request *r, bool *members);

#include "mpi_control.h"

#include "mpi_messages.h"

#include "mpi_near.h"

#include "mpi_phases.h"

/* -- posting and testing ------------------------------------------------------------------------------------------------------------- */

static void unlist(mpi_request *r)
{
    if (r->previous) r->previous->next = r->next;
    else if (r->group->active == r) r->group->active = r->next;
    if (r->next) r->next->previous = r->previous;
    r->next = r->previous = NULL;
}

/** Remember how the request ended. The first failure of a group is told to all its members. */
static peri_status end(mpi_request *r, peri_status status)
{
    mpi_group *g = r->group;
    char what[128], text[PERI_MESSAGE_MAX];
    r->status = status;
    unlist(r);
    if (status >= 0) {
        near_give(r);
        return status;
    }
    const char *message = host->error_message();
    r->message = host->alloc(strlen(message) + 1);
    if (r->message) memcpy(r->message, message, strlen(message) + 1);
    if (!broken(g)) {
        text_of(&r->op, g, what, sizeof what);
        snprintf(text, sizeof text, "rank %d, %s: %.300s", g->rank, what, message);
        group_fail(g, status, text);
        poison_send(g, status, text);
    }
    return status;
}

/** After the messages of a phase: was anything else than expected received? */
static peri_status check_messages(const mpi_request *r, int code)
{
    for (int32_t i = 0; i < r->n; i++) {
        int count = 0, error = code == MPI_ERR_IN_STATUS ? r->statuses[i].MPI_ERROR : MPI_SUCCESS, class = MPI_SUCCESS;
        if (error == MPI_ERR_PENDING) continue;
        if (error != MPI_SUCCESS) MPI_Error_class(error, &class);
        if (error != MPI_SUCCESS && class != MPI_ERR_TRUNCATE) return mpi_fail(r->slots[i].receive ? "a receive" : "a send", error);
        if (!r->slots[i].receive) continue;
        MPI_Get_count(&r->statuses[i], MPI_BYTE, &count);
        const slot *s = &r->slots[i];
        if (class == MPI_SUCCESS && count == s->bytes) continue;
        if (s->note)
            return PERI_HOST_FAIL(host, PERI_EMISMATCH, "rank %d sent %s%d bytes, rank %d expects %llu", s->peer,
                                  class == MPI_SUCCESS ? "" : "more than ", class == MPI_SUCCESS ? count : s->bytes, r->group->rank,
                                  (unsigned long long)r->near->mine[s->peer].recv_bytes);
        if (class == MPI_SUCCESS && count != (int)sizeof(descriptor))
            return PERI_HOST_FAIL(host, PERI_EMISMATCH, "rank %d sent %d bytes, rank %d expects %d", s->peer, count, r->group->rank,
                                  s->bytes);
        return PERI_HOST_FAIL(host, PERI_EMISMATCH, "rank %d sent %s the %d bytes that rank %d expects", s->peer,
                              class == MPI_SUCCESS && count < s->bytes ? "less than" : "more than", s->bytes, r->group->rank);
    }
    return code == MPI_SUCCESS || code == MPI_ERR_IN_STATUS ? PERI_OK : mpi_fail("MPI_Testall", code);
}

/** Nothing has come: look at the notes now and then, and ask when it takes long. */
static peri_status waiting(mpi_request *r)
{
    if (++r->polls & 31) return PERI_PENDING;
    control_poll();
    const mpi_group *bad = broken(r->group);
    if (bad) return end(r, PERI_HOST_FAIL(host, bad->failed, "%s", bad->message));
    int64_t now = host->time_ns();
    if (!r->quiet_ns) r->quiet_ns = now;
    if (now - r->quiet_ns < STALL_NS || now - r->asked_ns < ASK_NS || r->dropped || r->stalled) return PERI_PENDING;
    r->asked_ns = now;
    peri_status status = ask(r);
    return status < 0 ? end(r, status) : status;
}

static peri_status mpi_test(void *request)
{
    mpi_request *r = request;
    if (r->status == PERI_PENDING && mpi.over) return end(r, PERI_HOST_FAIL(host, PERI_EABORTED, "%s", r->group->message));
    if (r->status != PERI_PENDING) return r->status >= 0 ? r->status : PERI_HOST_FAIL(host, r->status, "%s", r->message ? r->message : "");
    if (r->dropped || r->stalled) return waiting(r);
    if (copying(r)) {
        bool idle;
        peri_status status = near_step(r, &idle);
        if (status != PERI_PENDING) return end(r, status);
        if (idle && mpi.crowded) sched_yield(); /* as MPI_Testall does then: whom this rank waits for may need this processor */
        if (idle) return waiting(r);
        r->quiet_ns = 0;
        return PERI_PENDING;
    }
    if (r->deferred) {
        r->deferred = false;
        peri_status status = advance(r);
        return r->deferred ? waiting(r) : status == PERI_PENDING ? status : end(r, status);
    }
    int flag = 0;
    int code = MPI_Testall(r->n, r->requests, &flag, r->statuses);
    if (code == MPI_SUCCESS && !flag) return waiting(r);
    peri_status status = check_messages(r, code);
    r->quiet_ns = 0;
    if (status >= 0) status = advance(r);
    return status == PERI_PENDING ? status : end(r, status);
}

static void free_request(mpi_request *r)
{
    if (r) host->free(r->statuses);
    host->free(r);
}

/** A new request of @g; NULL: no memory. */
static mpi_request *take_request(mpi_group *g)
{
    mpi_request *r = g->spare;
    if (r) *r = (mpi_request){.room = r->room, .requests = r->requests, .slots = r->slots, .statuses = r->statuses};
    else r = host->alloc_zero(sizeof *r);
    g->spare = NULL;
    if (r) r->group = g;
    return r;
}

static void give_request(mpi_request *r)
{
    mpi_group *g = r->group;
    if (g->spare) free_request(r);
    else g->spare = r;
}

static peri_status mpi_post(void *group, const peri_coll_op *op, void **request)
{
    mpi_group *g = group;
    const mpi_group *bad = broken(g);
    if (bad) return PERI_HOST_FAIL(host, bad->failed, "%s", bad->message);
    if (!g->history) {
        g->history = host->alloc_zero(sizeof *g->history * HISTORY);
        if (!g->history) return PERI_ENOMEM;
    }
    mpi_request *r = take_request(g);
    if (!r) return PERI_ENOMEM;
    r->op = *op;
    r->status = PERI_PENDING;
    r->dropped = host->fault(FAULT_COLL_DROP);
    r->stalled = host->fault(FAULT_COLL_STALL);
    if (!r->dropped) {
        peri_coll_op *h = &g->history[op->sequence % HISTORY];
        *h = *op;
        h->send_counts = h->recv_counts = NULL;
        h->recv_runs = NULL;
        if (op->sequence > g->last) g->last = op->sequence;
    }
    r->next = g->active;
    if (g->active) g->active->previous = r;
    g->active = r;
    peri_status status = r->dropped ? PERI_PENDING : advance(r);
    if (status != PERI_PENDING) end(r, status);
    *request = r; /* also after a failure: messages may be under way, and test reports it */
    return PERI_OK;
}

/** After a failure: does nobody use the request's buffers any more? Pieces under way end at once, unless their process was killed. */
static bool near_over(mpi_request *r)
{
    const mpi_group *g = r->group;
    int64_t now = host->time_ns();
    near_close(g);
    if (near_quiet(g)) return true;
    if (!r->given_up_ns) r->given_up_ns = now;
    bool dead = false;
    for (int32_t i = 0; i < g->size && now - r->given_up_ns > 4 * STALL_NS; i++) dead = dead || gone(g->ranks[i]);
    return dead;
}

static peri_status mpi_drop(void *request)
{
    mpi_request *r = request;
    int32_t left = 0;
    for (int32_t i = 0; i < r->n && !mpi.over; i++) {
        int flag = 0;
        if (r->requests[i] == MPI_REQUEST_NULL) continue;
        if (!r->cancelled && r->slots[i].receive) MPI_Cancel(&r->requests[i]);
        if (MPI_Test(&r->requests[i], &flag, MPI_STATUS_IGNORE) == MPI_SUCCESS && !flag) left++;
    }
    r->cancelled = true;
    if (r->status == PERI_PENDING) {
        unlist(r);
        r->status = PERI_EABORTED;
    }
    if (r->near && !near_over(r)) left++;
    if (left) return PERI_PENDING;
    give_scratch(r);
    near_give(r);
    host->free(r->message);
    give_request(r);
    return PERI_OK;
}

static void mpi_abort(void *group, const char *message)
{
    mpi_group *g = group;
    char text[PERI_MESSAGE_MAX];
    if (g->failed != PERI_OK || mpi.over) return; /* who broke it has told the others */
    snprintf(text, sizeof text, "rank %d gave up: %s", g->rank, message);
    group_fail(g, PERI_EPEER, text);
    poison_send(g, PERI_EPEER, text);
    control_poll();
}

/* -- worlds and groups ----------------------------------------------------------------------------------------------------------------- */

static peri_status mpi_probe(char *reason, size_t len)
{
    (void)reason, (void)len;
    return PERI_OK;
}

static int32_t mpi_launched(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", NULL};
    for (const char *const *n = names; *n; n++)
        if (getenv(*n)) return atoi(getenv(*n));
    return 1;
}

#include "mpi_join.h"

/** At the end of the process: finalize if everybody is leaving too; else end without, as a failure that mpirun sees. */
static void at_exit(void)
{
    int finalized = 1;
    if (!mpi.started || mpi.over || MPI_Finalized(&finalized) != MPI_SUCCESS || finalized) return;
    bool clean = !mpi.broken;
    if (mpi.open) {
        clean = leave_world(mpi.broken ? 0 : mpi.timeout_ns) && clean;
        mpi.open = false;
    }
    mpi.over = true;
    if (clean && mpi.ours) MPI_Finalize();
}

/** What the thread of a join came to; it may outlive the call. */
static struct {
    int code;         /* of MPI */
    const char *what; /* the call that failed */
    mpi_group *g;     /* that is made */
    int tag;
} joined;

/** In a thread: start MPI, unless the program has, and make the two communicators of all ranks. */
static void connect_ranks(void)
{
    int ready = 0, level = 0, code = MPI_SUCCESS;
    joined.what = "MPI_Init_thread";
    MPI_Initialized(&ready);
    if (!ready) code = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
    mpi.ours = mpi.ours || (!ready && code == MPI_SUCCESS);
    if (code == MPI_SUCCESS) joined.what = "MPI_Comm_dup";
    if (code == MPI_SUCCESS && !mpi.world) code = MPI_Comm_dup(MPI_COMM_WORLD, &mpi.world);
    if (code == MPI_SUCCESS && !mpi.control) code = MPI_Comm_dup(MPI_COMM_WORLD, &mpi.control);
    joined.code = code;
}

static peri_status start(int64_t timeout_ns)
{
    if (!mpi.started) {
        /* Copies between processes need a system call that containers may forbid; without it Open MPI complains and then fails. */
        char byte = 1, copy = 0;
        struct iovec from = {&byte, 1}, to = {&copy, 1};
        if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) != 1) setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 0);
        prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); /* lets the other ranks do it where Yama guards it; an error is no matter */
    }
    join_announce();
    TRY(within(NULL, "joining the world", timeout_ns, connect_ranks));
    if (joined.code != MPI_SUCCESS) return mpi_fail(joined.what, joined.code);
    if (!mpi.started) atexit(at_exit);
    mpi.started = true;
    return PERI_OK;
}

/** Exchange who is where. Returns MPI's code. */
static int meet(void)
{
    struct {
        int64_t pid;
        uint64_t machine;
        int64_t leader; /* lowest rank of its node */
        char host[48];
    } own = {.pid = getpid(), .machine = 14695981039346656037u /* FNV-1a */}, *all = host->alloc(sizeof own * (size_t)mpi.size);
    char space[64] = "";
    gethostname(own.host, sizeof own.host - 1);
    ssize_t n = readlink("/proc/self/ns/pid", space, sizeof space - 1);
    for (const char *c = own.host; *c; c++) own.machine = (own.machine ^ (unsigned char)*c) * 1099511628211u;
    for (ssize_t i = 0; i < n; i++) own.machine = (own.machine ^ (unsigned char)space[i]) * 1099511628211u;
    MPI_Comm node;
    int leader = mpi.rank, code = MPI_Comm_split_type(mpi.world, MPI_COMM_TYPE_SHARED, mpi.rank, MPI_INFO_NULL, &node);
    if (code == MPI_SUCCESS) code = MPI_Bcast(&leader, 1, MPI_INT, 0, node);
    if (code == MPI_SUCCESS) code = MPI_Comm_free(&node);
    own.leader = leader;
    peer *peers = host->alloc_zero(sizeof *peers * (size_t)mpi.size);
    if (!all || !peers) code = MPI_ERR_NO_MEM;
    if (code == MPI_SUCCESS) code = MPI_Allgather(&own, (int)sizeof own, MPI_BYTE, all, (int)sizeof own, MPI_BYTE, mpi.world);
    int32_t nodes = 0, near = 0;
    cpu_set_t processors;
    for (int32_t i = 0; i < mpi.size && code == MPI_SUCCESS; i++) {
        int32_t lead = (int32_t)all[i].leader;
        peers[i] = (peer){.pid = all[i].pid, .machine = all[i].machine};
        snprintf(peers[i].host, sizeof peers[i].host, "%s", all[i].host);
        peers[i].node = lead == i ? nodes++ : peers[lead].node; /* a leader is its node's lowest rank */
        near += peers[i].machine == own.machine;
    }
    mpi.crowded = sched_getaffinity(0, sizeof processors, &processors) != 0 || near > CPU_COUNT(&processors);
    host->free(all);
    host->free(mpi.peers);
    mpi.peers = peers;
    return code;
}

/** In a thread: exchange who is where, and what ranks of one machine share. */
static void meet_ranks(void)
{
    joined.what = "peri_comm_open";
    joined.code = meet();
    if (joined.code == MPI_SUCCESS) near_join(joined.g);
}

static mpi_group *group_make(mpi_group *parent, const int32_t *ranks, int32_t n, uint64_t tag)
{
    mpi_group *g = host->alloc_zero(sizeof *g);
    int32_t *copy = host->alloc(sizeof *copy * (size_t)n);
    if (!g || !copy) {
        host->free(g);
        host->free(copy);
        return NULL;
    }
    g->parent = parent;
    g->tag = tag;
    g->size = n;
    g->ranks = copy;
    for (int32_t i = 0; i < n; i++) {
        copy[i] = parent ? parent->ranks[ranks[i]] : i;
        if (copy[i] == mpi.rank) g->rank = i;
    }
    g->comm = MPI_COMM_NULL;
    g->next = mpi.groups;
    mpi.groups = g;
    return g;
}

static peri_status mpi_open(peri_coll_open *boot, void **group)
{
    if (mpi.open) return PERI_HOST_FAIL(host, PERI_EINVAL, "mpi: this process is in a world already");
    if (mpi.broken || mpi.over) return PERI_HOST_FAIL(host, PERI_EABORTED, "mpi: an earlier world of this process failed or is over");
    int64_t until = host->time_ns() + boot->timeout_ns;
    int *bound = NULL, found = 0;
    TRY(start(boot->timeout_ns));
    MPI_Comm_set_errhandler(mpi.world, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(mpi.control, MPI_ERRORS_RETURN);
    MPI_Comm_rank(mpi.world, &mpi.rank);
    MPI_Comm_size(mpi.world, &mpi.size);
    if ((boot->size && boot->size != mpi.size) || (boot->rank >= 0 && boot->rank != mpi.rank))
        return PERI_HOST_FAIL(host, PERI_EINVAL, "mpi: rank %d of %d wanted, this is rank %d of %d", boot->rank, boot->size, mpi.rank,
                              mpi.size);
    if (mpi.size == 1 && mpi_launched() > 1) /* each rank would train alone */
        return PERI_HOST_FAIL(host, PERI_EUNSUPPORTED,
                              "mpi: launched as one of %d ranks, but MPI knows of one only (srun needs --mpi=pmix)", mpi_launched());
    MPI_Comm_get_attr(mpi.world, MPI_TAG_UB, &bound, &found);
    int64_t most = found ? *bound : 32767;
    for (mpi.hash_bits = 0; (int64_t)1 << (SEQUENCE_BITS + mpi.hash_bits + 1) <= most + 1; mpi.hash_bits++) {}
    const char *limit = getenv("PERI_TEST_COUNT_LIMIT");
    mpi.piece = limit && atoll(limit) > 0 && atoll(limit) < INT32_MAX ? atoll(limit) : 1 << 30;
    mpi.timeout_ns = boot->timeout_ns;
    mpi_group *g = group_make(NULL, NULL, mpi.size, 0);
    if (!g) return PERI_ENOMEM;
    g->comm = mpi.world;
    joined.g = g;
    int64_t left = until - host->time_ns();
    TRY(within(NULL, "joining the world", left > 0 ? left : 0, meet_ranks));
    if (joined.code != MPI_SUCCESS) return mpi_fail(joined.what, joined.code);
    mpi.epoch++;
    mpi.open = true;
    receive_next();
    boot->rank = mpi.rank;
    boot->size = mpi.size;
    *group = g;
    return PERI_OK;
}

static int32_t mpi_node(void *group, int32_t rank)
{
    (void)group;
    return mpi.peers[rank].node;
}

/** Wait, within the deadline, until every member is about to make the group: MPI's own call for it cannot be interrupted. */
static peri_status gather_members(const mpi_group *g)
{
    int tag = 1 + (int)(g->tag % 32000);
    int64_t until = host->time_ns() + mpi.timeout_ns;
    char byte = 0, in = 0;
    for (int64_t distance = 1; distance < g->size; distance *= 2) {
        MPI_Request requests[2];
        int32_t from = g->ranks[(g->rank - distance + g->size) % g->size], to = g->ranks[(g->rank + distance) % g->size];
        int done = 0, code = MPI_Irecv(&in, 1, MPI_BYTE, from, tag, mpi.control, &requests[0]);
        if (code == MPI_SUCCESS) code = MPI_Isend(&byte, 1, MPI_BYTE, to, tag, mpi.control, &requests[1]);
        for (int64_t round = 0; code == MPI_SUCCESS && !done; round++) {
            code = MPI_Testall(2, requests, &done, MPI_STATUSES_IGNORE);
            if (done || code != MPI_SUCCESS) break;
            control_poll();
            const mpi_group *bad = broken(g->parent);
            const char *why = bad ? bad->message : mpi.peers[from].left >= mpi.epoch || gone(from) ? "it is gone" : NULL;
            if (why || host->time_ns() > until) {
                MPI_Cancel(&requests[0]);
                mpi.broken = true;
                return PERI_HOST_FAIL(host, why ? PERI_EPEER : PERI_ETIMEOUT,
                                      "mpi: making a group, waiting for rank %d of the world (process %lld on %s): %s", from,
                                      (long long)mpi.peers[from].pid, mpi.peers[from].host, why ? why : "it did not come");
            }
            host->pause(round);
        }
        if (code != MPI_SUCCESS) return mpi_fail("peri_group_new", code);
    }
    return PERI_OK;
}

static void mpi_release(void *group)
{
    mpi_group *g = group;
    for (mpi_group **p = &mpi.groups; *p; p = &(*p)->next)
        if (*p == g) {
            *p = g->next;
            break;
        }
    near_leave(g);
    free_request(g->spare);
    host->free(g->scratch);
    host->free(g->history);
    host->free(g->ranks);
    host->free(g);
}

/** In a thread: MPI's own making of a group. */
static void make_group(void)
{
    mpi_group *g = joined.g;
    MPI_Group all, members;
    MPI_Comm_group(mpi.world, &all);
    MPI_Group_incl(all, g->size, g->ranks, &members);
    joined.what = "MPI_Comm_create_group";
    joined.code = MPI_Comm_create_group(mpi.world, members, joined.tag, &g->comm);
    MPI_Group_free(&members);
    MPI_Group_free(&all);
    if (joined.code == MPI_SUCCESS) joined.code = MPI_Comm_set_errhandler(g->comm, MPI_ERRORS_RETURN);
    if (joined.code == MPI_SUCCESS) near_join(g);
}

static peri_status mpi_subgroup(void *group, const int32_t *ranks, int32_t n, uint64_t tag, void **sub)
{
    mpi_group *parent = group, *g = group_make(parent, ranks, n, tag);
    if (!g) return PERI_ENOMEM;
    peri_status status = gather_members(g);
    joined.g = g;
    joined.tag = (int)(tag % 32000);
    if (status >= 0) TRY(within(g, "making a group", mpi.timeout_ns, make_group)); /* the thread of a failure keeps g */
    if (status >= 0 && joined.code != MPI_SUCCESS) status = mpi_fail(joined.what, joined.code);
    if (status < 0) mpi_release(g);
    else *sub = g;
    return status;
}

/** The failure of leaving the world: who has not left. */
static peri_status left_alone(void)
{
    char text[PERI_MESSAGE_MAX / 2] = "";
    size_t used = 0;
    int32_t shown = 0;
    bool dead = false;
    for (int32_t i = 0; i < mpi.size; i++) {
        const peer *p = &mpi.peers[i];
        if (p->left >= mpi.epoch || shown++ >= 8 || used >= sizeof text) continue;
        bool near = p->machine == mpi.peers[mpi.rank].machine;
        char state = near ? process_state(p->pid, NULL) : '?';
        dead = dead || !state;
        used += (size_t)snprintf(text + used, sizeof text - used, "%srank %d (process %lld on %s) %s", shown > 1 ? ", " : "", i,
                                 (long long)p->pid, p->host, !state ? "is gone without leaving it" : state == 'T' ? "is stopped"
                                                                                                             : "has not left it");
    }
    if (shown > 8 && used < sizeof text) snprintf(text + used, sizeof text - used, " and %d more", shown - 8);
    if (dead) return PERI_HOST_FAIL(host, PERI_EPEER, "mpi: leaving the world: %s", text);
    return PERI_HOST_FAIL(host, PERI_ETIMEOUT, "mpi: leaving the world took longer than %g s: %s", (double)mpi.timeout_ns * 1e-9, text);
}

static peri_status mpi_close(void *group)
{
    mpi_group *g = group;
    if (g->left || mpi.over) return PERI_OK;
    g->left = true;
    if (g->parent) {
        /* Every operation of a sound group is complete here: no message can still come. */
        if (!broken(g) && g->comm != MPI_COMM_NULL) MPI_Comm_free(&g->comm);
        return PERI_OK;
    }
    bool was_broken = mpi.broken, clean = leave_world(was_broken ? 0 : mpi.timeout_ns);
    if (control.receiving != MPI_REQUEST_NULL && clean) {
        MPI_Cancel(&control.receiving);
        MPI_Wait(&control.receiving, MPI_STATUS_IGNORE); /* returns at once: it is local after a cancel, everybody has left */
    }
    mpi.open = false;
    if (!clean && g->failed != PERI_OK && !was_broken) return PERI_HOST_FAIL(host, g->failed, "mpi: leaving the world: %s", g->message);
    if (clean || mpi.broken) return PERI_OK;
    mpi.broken = true;
    return left_alone();
}

static const peri_coll_vtab vtab = {
    .size = sizeof vtab,
    .abi = PERI_COLL_ABI,
    .name = "mpi",
    .takes = PERI_COLL_HOST | PERI_COLL_PLACES | PERI_COLL_RANK_ORDER,
    .probe = mpi_probe,
    .launched = mpi_launched,
    .open = mpi_open,
    .node = mpi_node,
    .subgroup = mpi_subgroup,
    .post = mpi_post,
    .test = mpi_test,
    .blame = mpi_blame,
    .drop = mpi_drop,
    .abort = mpi_abort,
    .close = mpi_close,
    .release = mpi_release,
};

__attribute__((visibility("default"))) const peri_coll_vtab *peri_coll_entry_v1(const peri_plugin_host *lent);
const peri_coll_vtab *peri_coll_entry_v1(const peri_plugin_host *lent)
{
    host = lent;
    return &vtab;
}
