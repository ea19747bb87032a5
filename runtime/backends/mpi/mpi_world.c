/* SPDX-License-Identifier: Apache-2.0
 *
 * mpi_world.c: worlds and groups: joining, who is where, making groups, leaving.
 */
#include "mpi_internal.h"

#include <dlfcn.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#define FINALIZE_NS ((int64_t)10000000000)
#define LAST_WORDS_NS ((int64_t)3000000000) /* that a rank under srun has to end after another one has failed */

static bool by_slurm; /* srun has started this process, with no mpirun between them */

/** Leave PMIx in order: where the connection of a rank just breaks, Slurm kills all others, whose exit codes go before
 *  this rank's then. */
static void leave_pmix(void)
{
    void *library = dlopen("libpmix.so.2", RTLD_LAZY | RTLD_NOLOAD);
    int (*initialized)(void) = library ? (int (*)(void))dlsym(library, "PMIx_Initialized") : NULL;
    int (*finalize)(const void *, size_t) =
        library ? (int (*)(const void *, size_t))dlsym(library, "PMIx_Finalize") : NULL;
    for (int i = 0; initialized && finalize && i < 8 && initialized(); i++) finalize(NULL, 0); /* users are counted */
}

static void *finalize_thread(void *done)
{
    MPI_Finalize();
    atomic_store((atomic_int *)done, 1);
    return NULL;
}

/** MPI_Finalize, where messages of a failed group may never arrive: should it wait for them, the process ends without
 *  it after FINALIZE_NS, in order for the launcher. */
static void finalize_loose(void)
{
    static atomic_int done; /* outlives this function, as the thread may */
    pthread_t thread;
    if (peri__mpi_host->thread_start(&thread, finalize_thread, &done) != 0) return;
    pthread_detach(thread);
    int64_t until = peri__mpi_host->time_ns() + FINALIZE_NS;
    for (int64_t round = 0; !atomic_load(&done) && peri__mpi_host->time_ns() < until; round++)
        peri__mpi_host->pause(round);
    if (!atomic_load(&done)) leave_pmix();
}

/** At the end of the process: finalize if everybody is leaving too; else end without, as a failure that mpirun sees.
 *  srun does not: there all ranks end by themselves, but for those that do not in time, which Slurm is made to kill. */
static void at_exit(void)
{
    int finalized = 1;
    if (!peri__mpi.started || peri__mpi.over || MPI_Finalized(&finalized) != MPI_SUCCESS || finalized) return;
    bool clean = !peri__mpi.broken;
    if (peri__mpi.open) {
        clean = peri__mpi_leave_world(peri__mpi.broken ? 0 : peri__mpi.timeout_ns) && clean;
        if (!clean && by_slurm && peri__mpi_all_left(LAST_WORDS_NS)) leave_pmix();
        peri__mpi.open = false;
    }
    peri__mpi.over = true;
    if (clean && peri__mpi.ours && peri__mpi.loose) finalize_loose();
    else if (clean && peri__mpi.ours) MPI_Finalize();
}

/** What ranks tell each other first: it keeps this layout, as a rank of another version reads it too. */
typedef struct version_card {
    int32_t numbers[3]; /* of its Perilune: major, minor, patch */
    char host[52];
} version_card;

/** What the thread of a join came to; it may outlive the call. */
static struct {
    int code;         /* of MPI */
    const char *what; /* the call that failed */
    mpi_group *g;     /* that is made */
    int tag;
    int32_t unlike;                       /* the first rank with another version than rank 0; 0: all have the same */
    version_card first_card, unlike_card; /* if unlike: of rank 0 and of that rank */
} joined;

/** The attribute of a communicator that holds its duplicate: of the base the world, of the world the control. Of
 *  MPI_COMM_SELF it holds nothing: MPI_Finalize deletes that one before all else. */
static int duplicate_key = MPI_KEYVAL_INVALID;

/** MPI deletes the attribute: MPI_Finalize has begun, or @of is being freed, and its duplicate goes with it. That of a
 *  world that is open goes when the world is left. */
static int end_duplicate(MPI_Comm of, int key, void *attribute, void *unused)
{
    (void)key, (void)unused;
    if (peri__mpi.over) return MPI_SUCCESS;
    if (of == MPI_COMM_SELF) {
        for (mpi_group *g = peri__mpi.groups; g; g = g->next)
            peri__mpi_group_fail(g, PERI_EABORTED, "mpi: the program has called MPI_Finalize");
        peri__mpi.over = true;
        peri__mpi.open = false;
        return MPI_SUCCESS;
    }
    MPI_Comm copy;
    memcpy(&copy, &attribute, sizeof copy);
    peri__mpi.orphan = peri__mpi.open && copy == peri__mpi.world;
    /* messages of a broken world may be under way */
    return peri__mpi.orphan || peri__mpi.broken ? MPI_SUCCESS : MPI_Comm_free(&copy);
}

/** The duplicate of communicator @of, made if there is none. Handles of communicators that were freed come again, as
 *  those of others: only MPI knows which one has a duplicate. */
static int duplicate(MPI_Comm of, MPI_Comm *out)
{
    void *attribute = NULL;
    int found = 0, code = MPI_SUCCESS;
    if (duplicate_key == MPI_KEYVAL_INVALID) {
        code = MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, end_duplicate, &duplicate_key, NULL);
        if (code == MPI_SUCCESS) code = MPI_Comm_set_attr(MPI_COMM_SELF, duplicate_key, NULL);
    }
    if (code == MPI_SUCCESS) code = MPI_Comm_get_attr(of, duplicate_key, &attribute, &found);
    if (code == MPI_SUCCESS && !found) {
        code = MPI_Comm_dup(of, out);
        if (code != MPI_SUCCESS) return code;
        memcpy(&attribute, out, sizeof *out);
        code = MPI_Comm_set_attr(of, duplicate_key, attribute);
    }
    memcpy(out, &attribute, sizeof *out);
    return code;
}

/** Make the two communicators of all ranks. A failure is a code rather than the end of the process; the program's own
 *  communicator is as it was afterwards. Where MPI is ours, so are errors that concern no communicator. */
static int duplicate_base(void)
{
    MPI_Errhandler before;
    int code = MPI_Comm_get_errhandler(peri__mpi.base, &before);
    if (code == MPI_SUCCESS) code = MPI_Comm_set_errhandler(peri__mpi.base, MPI_ERRORS_RETURN);
    if (code != MPI_SUCCESS) return code;
    code = duplicate(peri__mpi.base, &peri__mpi.world);
    if (code == MPI_SUCCESS) code = MPI_Comm_set_errhandler(peri__mpi.world, MPI_ERRORS_RETURN);
    if (code == MPI_SUCCESS) code = duplicate(peri__mpi.world, &peri__mpi.control);
    if (!peri__mpi.ours) MPI_Comm_set_errhandler(peri__mpi.base, before);
    MPI_Errhandler_free(&before);
    return code;
}

/** In a thread: start MPI, unless the program has, and make the communicators. Where MPI_Init cannot begin, Open MPI
 *  ends the process: it has no way to ask for an error before that. */
static void connect_ranks(void)
{
    int ready = 0, level = 0, code = MPI_SUCCESS;
    joined.what = "MPI_Init_thread";
    MPI_Initialized(&ready);
    if (!ready) code = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
    peri__mpi.ours = peri__mpi.ours || (!ready && code == MPI_SUCCESS);
    if (code == MPI_SUCCESS) {
        joined.what = "MPI_Comm_dup";
        code = duplicate_base();
    }
    joined.code = code;
}

static void no_matter(int number) { (void)number; }

/** Open MPI writes to connections whose other process may have been killed, and the second such write is a SIGPIPE, of
 *  which this rank would die without a word. A handler that does nothing (children do not inherit it, as they would
 *  SIG_IGN) makes it an error of the write; the program's own handler stays. */
static void survive_broken_connections(void)
{
    struct sigaction now, ours = {.sa_handler = no_matter, .sa_flags = SA_RESTART};
    if (sigaction(SIGPIPE, NULL, &now) == 0 && !(now.sa_flags & SA_SIGINFO) && now.sa_handler == SIG_DFL)
        sigaction(SIGPIPE, &ours, NULL);
}

/** Checks that a world can be joined with MPI as the program left it, and over @communicator (NULL: MPI_COMM_WORLD): an
 *  error after MPI_Finalize, with too few threads, or for a communicator that cannot be used. Sets peri__mpi.base. */
static peri_status look_at_program(const MPI_Comm *communicator)
{
    static const char *const levels[] = {"MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED",
                                         "MPI_THREAD_MULTIPLE"};
    int ready = 0, finalized = 0, between = 0, level = MPI_THREAD_MULTIPLE;
    MPI_Initialized(&ready);
    MPI_Finalized(&finalized);
    if (finalized) return FAIL(PERI_ECLOSED, "mpi: this process has called MPI_Finalize");
    if (communicator && !ready)
        return FAIL(PERI_EINVAL, "mpi: a communicator, but the program has not initialised MPI");
    if (communicator && *communicator == MPI_COMM_NULL)
        return FAIL(
            PERI_EINVAL,
            "mpi: the communicator is MPI_COMM_NULL; a rank that is not in it takes no part, and opens no world");
    if (ready) MPI_Query_thread(&level);
    if (level < MPI_THREAD_SERIALIZED)
        return FAIL(PERI_EUNSUPPORTED,
                    "mpi: the program has initialised MPI for %s; wanted: MPI_THREAD_SERIALIZED or more "
                    "(MPI_Init_thread)",
                    level >= 0 && level < 4 ? levels[level] : "fewer threads");
    if (communicator) MPI_Comm_test_inter(*communicator, &between);
    if (between)
        return FAIL(PERI_EINVAL, "mpi: the communicator is an intercommunicator; allowed: one of one group of ranks");
    peri__mpi.base = communicator ? *communicator : MPI_COMM_WORLD;
    peri__mpi.guest = communicator != NULL;
    return PERI_OK;
}

/** What Open MPI is told by variables, which start_mpi() takes back when it has been read. */
static void set_variables(void)
{
    /* Copies between processes need a system call that containers may forbid; without it Open MPI complains and then
     * fails. */
    char byte = 1, copy = 0;
    struct iovec from = {&byte, 1}, to = {&copy, 1};
    if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) != 1)
        setenv(OMPI_MAJOR_VERSION < 5 ? "OMPI_MCA_btl_vader_single_copy_mechanism" : "OMPI_MCA_smsc",
               OMPI_MAJOR_VERSION < 5 ? "none" : "^cma", 0);
    setenv("OMPI_MCA_opal_signal", "", 0); /* no handlers of Open MPI's own, unless the program or its user asks */
}

/** Start MPI and make the communicators of all ranks, within @timeout_ns. */
static peri_status connect_within(int64_t timeout_ns)
{
    char **kept = NULL;
    if (!peri__mpi.started) {
        kept = peri__mpi_environment_keep();
        if (!kept) return FAIL(PERI_ENOMEM, "mpi: no memory for a copy of the environment");
        set_variables();
    }
    const peri_status status = peri__mpi_within(NULL, "joining the world", timeout_ns, connect_ranks);
    if (kept && status >= 0) peri__mpi_environment_restore(kept);
    else peri__mpi_host->free(kept); /* the thread that was given up may be in the environment still */
    return status;
}

static peri_status start_mpi(int64_t timeout_ns)
{
    if (!peri__mpi.started) {
        survive_broken_connections();
        by_slurm = secure_getenv("SLURM_PROCID") && !secure_getenv("OMPI_COMM_WORLD_SIZE");
        if (by_slurm && peri__mpi_launched() > 1 && !secure_getenv("PMIX_RANK") && !secure_getenv("PMI_FD") &&
            !secure_getenv("PMI_RANK"))
            return FAIL(PERI_EUNSUPPORTED,
                        "mpi: srun has started this rank without PMIx, by which ranks find each other: srun --mpi=pmix "
                        "(srun --mpi=list shows what there is)");
        prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); /* lets the other ranks do it where Yama guards it; an error
                                                               is no matter */
    }
    peri__mpi_join_announce();
    TRY(connect_within(timeout_ns));
    if (joined.code != MPI_SUCCESS) return peri__mpi_fail(joined.what, joined.code);
    if (!peri__mpi.started) atexit(at_exit);
    peri__mpi.started = true;
    return PERI_OK;
}

static void forget_peers(void)
{
    peri__mpi_heap_forget(peri__mpi.peers, peri__mpi.n_peers);
    peri__mpi_host->free(peri__mpi.peers);
    peri__mpi.peers = NULL;
    peri__mpi.n_peers = 0;
}

/** Exchange the versions of Perilune, and note in `joined` which rank has another one than rank 0, if one has. Returns
 *  MPI's code. */
static int compare_versions(void)
{
    const char *patch = secure_getenv("PERI_TEST_PATCH");
    version_card own = {.numbers = {PERI_VERSION_MAJOR, PERI_VERSION_MINOR, PERI_VERSION_PATCH}},
                 *all = peri__mpi_host->alloc(sizeof own * (size_t)peri__mpi.size);
    if (!all) return MPI_ERR_NO_MEM;
    if (patch) own.numbers[2] = atoi(patch);
    gethostname(own.host, sizeof own.host - 1);
    int code = MPI_Allgather(&own, (int)sizeof own, MPI_BYTE, all, (int)sizeof own, MPI_BYTE, peri__mpi.world);
    for (int32_t i = 1; i < peri__mpi.size && code == MPI_SUCCESS && !joined.unlike; i++)
        if (memcmp(all[i].numbers, all[0].numbers, sizeof own.numbers) != 0) joined.unlike = i;
    if (joined.unlike) joined.first_card = all[0], joined.unlike_card = all[joined.unlike];
    peri__mpi_host->free(all);
    return code;
}

/** Exchange who is where. Returns MPI's code. */
static int meet(void)
{
    struct {
        int64_t pid;
        uint64_t machine;
        int64_t leader; /* lowest rank of its node */
        int64_t epoch;  /* ranks may have taken part in different numbers of worlds so far */
        heap_place heap;
        char host[48];
    } own = {.pid = getpid(), .machine = 14695981039346656037u /* FNV-1a */, .epoch = peri__mpi.epoch}, *all;
    all = peri__mpi_host->alloc(sizeof own * (size_t)peri__mpi.size);
    char space[64] = "";
    if (peri__mpi.size > 1) peri__mpi_heap_open();
    own.heap = peri__mpi_heap_own();
    gethostname(own.host, sizeof own.host - 1);
    ssize_t n = readlink("/proc/self/ns/pid", space, sizeof space - 1);
    for (const char *c = own.host; *c; c++) own.machine = (own.machine ^ (unsigned char)*c) * 1099511628211u;
    for (ssize_t i = 0; i < n; i++) own.machine = (own.machine ^ (unsigned char)space[i]) * 1099511628211u;
    MPI_Comm node;
    int leader = peri__mpi.rank,
        code = MPI_Comm_split_type(peri__mpi.world, MPI_COMM_TYPE_SHARED, peri__mpi.rank, MPI_INFO_NULL, &node);
    if (code == MPI_SUCCESS) code = MPI_Bcast(&leader, 1, MPI_INT, 0, node);
    if (code == MPI_SUCCESS) code = MPI_Comm_free(&node);
    own.leader = leader;
    peer *peers = peri__mpi_host->alloc_zero(sizeof *peers * (size_t)peri__mpi.size);
    if (!all || !peers) code = MPI_ERR_NO_MEM;
    if (code == MPI_SUCCESS)
        code = MPI_Allgather(&own, (int)sizeof own, MPI_BYTE, all, (int)sizeof own, MPI_BYTE, peri__mpi.world);
    int32_t nodes = 0, near = 0;
    cpu_set_t processors;
    for (int32_t i = 0; i < peri__mpi.size && code == MPI_SUCCESS; i++) {
        int32_t lead = (int32_t)all[i].leader;
        peers[i] = (peer){.pid = all[i].pid, .machine = all[i].machine};
        snprintf(peers[i].host, sizeof peers[i].host, "%s", all[i].host);
        peers[i].node = lead == i ? nodes++ : peers[lead].node; /* a leader is its node's lowest rank */
        near += peers[i].machine == own.machine;
        if (all[i].epoch > peri__mpi.epoch) peri__mpi.epoch = (int32_t)all[i].epoch;
        if (peers[i].machine == own.machine && i != peri__mpi.rank) peers[i].heap = all[i].heap;
    }
    peri__mpi.crowded = sched_getaffinity(0, sizeof processors, &processors) != 0 || near > CPU_COUNT(&processors);
    peri__mpi_host->free(all);
    forget_peers();
    peri__mpi.peers = peers;
    peri__mpi.n_peers = peri__mpi.size;
    return code;
}

/** In a thread: exchange versions, who is where, and what ranks of one machine share. */
static void meet_ranks(void)
{
    joined.what = "peri_comm_open";
    joined.unlike = 0;
    joined.code = compare_versions();
    if (joined.code != MPI_SUCCESS || joined.unlike) return;
    joined.code = meet();
    if (joined.code == MPI_SUCCESS) peri__mpi_near_join(joined.g);
}

/** What came of meet_ranks. */
static peri_status met(void)
{
    if (joined.code != MPI_SUCCESS) return peri__mpi_fail(joined.what, joined.code);
    if (!joined.unlike) return PERI_OK;
    const version_card *first = &joined.first_card, *other = &joined.unlike_card;
    return FAIL(PERI_EUNSUPPORTED,
                "mpi: rank 0 on %s has Perilune %d.%d.%d, and rank %d on %s has %d.%d.%d: all hosts must have the same "
                "version",
                first->host, first->numbers[0], first->numbers[1], first->numbers[2], joined.unlike, other->host,
                other->numbers[0], other->numbers[1], other->numbers[2]);
}

static mpi_group *group_make(mpi_group *parent, const int32_t *ranks, int32_t n, uint64_t tag)
{
    mpi_group *g = peri__mpi_host->alloc_zero(sizeof *g);
    int32_t *copy = peri__mpi_host->alloc(sizeof *copy * (size_t)n);
    if (!g || !copy) {
        peri__mpi_host->free(g);
        peri__mpi_host->free(copy);
        return NULL;
    }
    g->parent = parent;
    g->tag = tag;
    g->size = n;
    g->ranks = copy;
    for (int32_t i = 0; i < n; i++) {
        copy[i] = parent ? parent->ranks[ranks[i]] : i;
        if (copy[i] == peri__mpi.rank) g->rank = i;
    }
    g->comm = MPI_COMM_NULL;
    g->next = peri__mpi.groups;
    peri__mpi.groups = g;
    return g;
}

peri_status peri__mpi_open(peri_coll_open *boot, void **group)
{
    if (peri__mpi.open) return FAIL(PERI_EINVAL, "mpi: this process is in a world already");
    if (peri__mpi.broken || peri__mpi.over)
        return FAIL(PERI_EABORTED, "mpi: an earlier world of this process failed or is over");
    int64_t until = peri__mpi_host->time_ns() + boot->timeout_ns;
    int *bound = NULL, found = 0;
    TRY(look_at_program(boot->communicator));
    TRY(start_mpi(boot->timeout_ns));
    MPI_Comm_set_errhandler(peri__mpi.control, MPI_ERRORS_RETURN);
    MPI_Comm_rank(peri__mpi.world, &peri__mpi.rank);
    MPI_Comm_size(peri__mpi.world, &peri__mpi.size);
    if ((boot->size && boot->size != peri__mpi.size) || (boot->rank >= 0 && boot->rank != peri__mpi.rank))
        return FAIL(PERI_EINVAL, "mpi: rank %d of %d wanted, this is rank %d of %d", boot->rank, boot->size,
                    peri__mpi.rank, peri__mpi.size);
    if (peri__mpi.size == 1 && !peri__mpi.guest && peri__mpi_launched() > 1) /* each rank would train alone */
        return FAIL(PERI_EUNSUPPORTED, "mpi: launched as one of %d ranks, but MPI knows of one only (srun --mpi=pmix?)",
                    peri__mpi_launched());
    MPI_Comm_get_attr(peri__mpi.world, MPI_TAG_UB, &bound, &found);
    int64_t most = found ? *bound : 32767;
    for (peri__mpi.hash_bits = 0; (int64_t)1 << (SEQUENCE_BITS + peri__mpi.hash_bits + 1) <= most + 1;
         peri__mpi.hash_bits++) {
    }
    const char *limit = secure_getenv("PERI_TEST_COUNT_LIMIT");
    peri__mpi.piece = limit && atoll(limit) > 0 && atoll(limit) < INT32_MAX ? atoll(limit) : 1 << 30;
    peri__mpi.timeout_ns = boot->timeout_ns;
    mpi_group *g = group_make(NULL, NULL, peri__mpi.size, 0);
    if (!g) return PERI_ENOMEM;
    g->comm = peri__mpi.world;
    joined.g = g;
    int64_t left = until - peri__mpi_host->time_ns();
    TRY(peri__mpi_within(NULL, "joining the world", left > 0 ? left : 0, meet_ranks));
    TRY(met());
    if (peri__mpi.size > 1) TRY(peri__mpi_guard_start(boot->timeout_ns));
    peri__mpi.epoch++; /* the same on all ranks, as meet has seen to */
    if (!peri__mpi.guest) peri__mpi.worlds++;
    peri__mpi.open = true;
    peri__mpi.why[0] = 0;
    peri__mpi_control_open();
    boot->rank = peri__mpi.rank;
    boot->size = peri__mpi.size;
    *group = g;
    return PERI_OK;
}

int32_t peri__mpi_node(void *group, int32_t rank)
{
    (void)group;
    return peri__mpi.peers[rank].node;
}

/** Wait, within the deadline, until every member is about to make the group: MPI's own call for it cannot be
 *  interrupted. */
static peri_status gather_members(const mpi_group *g)
{
    int tag = 1 + (int)(g->tag % 32000);
    int64_t now = peri__mpi_host->time_ns(), until = now + peri__mpi.timeout_ns, ask = now + STALL_NS;
    char byte = 0, in = 0;
    for (int64_t distance = 1; distance < g->size; distance *= 2) {
        MPI_Request requests[2];
        int32_t from = g->ranks[(g->rank - distance + g->size) % g->size],
                to = g->ranks[(g->rank + distance) % g->size];
        int done = 0, code = MPI_Irecv(&in, 1, MPI_BYTE, from, tag, peri__mpi.control, &requests[0]);
        if (code == MPI_SUCCESS) code = peri__mpi_send(&byte, 1, to, tag, peri__mpi.control, &requests[1]);
        for (int64_t round = 0; code == MPI_SUCCESS && !done; round++) {
            code = peri__mpi_test_all(2, requests, &done, MPI_STATUSES_IGNORE);
            if (done || code != MPI_SUCCESS) break;
            bool lost = peri__mpi.peers[from].left >= peri__mpi.epoch || peri__mpi_gone(from);
            peri__mpi_control_poll(); /* after the look: what it said before it ended tells more */
            const mpi_group *bad = peri__mpi_broken(g->parent);
            const char *why = bad ? bad->message : lost ? "it is gone" : NULL;
            now = peri__mpi_host->time_ns();
            if (why || now > until) {
                MPI_Cancel(&requests[0]);
                peri__mpi.loose = true;
                return FAIL(bad ? bad->failed : lost ? PERI_EPEER : PERI_ETIMEOUT,
                            "mpi: making a group, waiting for rank %d of the world (process %lld on %s): %s", from,
                            (long long)peri__mpi.peers[from].pid, peri__mpi.peers[from].host,
                            why ? why : "it did not come");
            }
            if (now > ask) {
                peri__mpi_ask_to_make(g, from);
                ask = now + ASK_NS;
            }
            peri__mpi_host->pause(round);
        }
        if (code != MPI_SUCCESS) return peri__mpi_fail("peri_group_new", code);
    }
    return PERI_OK;
}

void peri__mpi_release(void *group)
{
    mpi_group *g = group;
    for (mpi_group **p = &peri__mpi.groups; *p; p = &(*p)->next)
        if (*p == g) {
            *p = g->next;
            break;
        }
    /* in a world that failed somebody may still look at them */
    if (!g->parent && !peri__mpi.open && !peri__mpi.broken && !peri__mpi.over) forget_peers();
    peri__mpi_near_leave(g);
    peri__mpi_free_request(g->spare);
    peri__mpi_host->free(g->scratch);
    peri__mpi_host->free(g->history);
    peri__mpi_host->free(g->ranks);
    peri__mpi_host->free(g);
}

/** In a thread: MPI's own making of a group. */
static void make_group(void)
{
    mpi_group *g = joined.g;
    MPI_Group all, members;
    MPI_Comm_group(peri__mpi.world, &all);
    MPI_Group_incl(all, g->size, g->ranks, &members);
    joined.what = "MPI_Comm_create_group";
    joined.code = MPI_Comm_create_group(peri__mpi.world, members, joined.tag, &g->comm);
    MPI_Group_free(&members);
    MPI_Group_free(&all);
    if (joined.code == MPI_SUCCESS) joined.code = MPI_Comm_set_errhandler(g->comm, MPI_ERRORS_RETURN);
    if (joined.code == MPI_SUCCESS) peri__mpi_near_join(g);
}

peri_status peri__mpi_subgroup(void *group, const int32_t *ranks, int32_t n, uint64_t tag, void **sub)
{
    mpi_group *parent = group, *g = group_make(parent, ranks, n, tag);
    if (!g) return PERI_ENOMEM;
    peri__mpi.making = g;
    peri_status status = gather_members(g);
    peri__mpi.making = NULL;
    joined.g = g;
    joined.tag = (int)(tag % 32000);
    /* the thread of a failure keeps g */
    if (status >= 0) TRY(peri__mpi_within(g, "making a group", peri__mpi.timeout_ns, make_group));
    if (status >= 0 && joined.code != MPI_SUCCESS) status = peri__mpi_fail(joined.what, joined.code);
    if (status < 0) peri__mpi_release(g);
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
    for (int32_t i = 0; i < peri__mpi.size; i++) {
        const peer *p = &peri__mpi.peers[i];
        if (p->left >= peri__mpi.epoch || shown++ >= 8 || used >= sizeof text) continue;
        bool near = p->machine == peri__mpi.peers[peri__mpi.rank].machine;
        char state = near ? peri__mpi_process_state(p->pid, NULL) : '?';
        dead = dead || !state;
        used += (size_t)snprintf(text + used, sizeof text - used, "%srank %d (process %lld on %s) %s",
                                 shown > 1 ? ", " : "", i, (long long)p->pid, p->host,
                                 !state         ? "is gone without leaving it"
                                 : state == 'T' ? "is stopped"
                                                : "has not left it");
    }
    if (shown > 8 && used < sizeof text) snprintf(text + used, sizeof text - used, " and %d more", shown - 8);
    if (dead) return FAIL(PERI_EPEER, "mpi: leaving the world: %s", text);
    return FAIL(PERI_ETIMEOUT, "mpi: leaving the world took longer than %g s: %s", (double)peri__mpi.timeout_ns * 1e-9,
                text);
}

peri_status peri__mpi_close(void *group)
{
    mpi_group *g = group;
    if (g->left) return PERI_OK;
    g->left = true;
    if (peri__mpi.over && !g->parent && g->failed != PERI_OK)
        return FAIL(g->failed, "mpi: leaving the world: %s", g->message);
    if (peri__mpi.over) return PERI_OK;
    if (g->parent) {
        /* Every operation of a sound group is complete here: no message can still come. */
        if (!peri__mpi_broken(g) && g->comm != MPI_COMM_NULL) MPI_Comm_free(&g->comm);
        return PERI_OK;
    }
    bool was_broken = peri__mpi.broken, clean = peri__mpi_leave_world(was_broken ? 0 : peri__mpi.timeout_ns);
    if (clean) peri__mpi_control_close();
    peri__mpi.open = false;
    if (peri__mpi.orphan && !peri__mpi.broken) MPI_Comm_free(&peri__mpi.world);
    peri__mpi.orphan = false;
    /* also where all have left: one of them had given up before */
    if (g->failed != PERI_OK && !was_broken) return FAIL(g->failed, "mpi: leaving the world: %s", g->message);
    if (clean || peri__mpi.broken) return PERI_OK;
    peri__mpi.broken = true;
    return left_alone();
}
