/* SPDX-License-Identifier: Apache-2.0
 *
 * join.c: calls into MPI that wait for other ranks and cannot be interrupted, within a deadline, and who is missing.
 *
 * MPI_Init, the making of communicators and the blocking operations of joining are made by a thread of their own. When
 * that takes too long, or somebody is gone, this rank gives up: the thread stays where it is, and this process never
 * calls MPI again.
 *
 * Before MPI connects them, ranks of one machine see each other in two ways that leave nothing behind: a rank that
 * comes to join binds a Unix socket to a name made of the job and its rank (abstract: no file), and every rank's
 * process carries its rank in its environment. Other users could do both, so only what belongs to this user counts.
 */
#include "mpi_internal.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static struct {
    int socket;                /* -1: none, this process was launched without PMIx */
    int32_t worlds;            /* peri__mpi.worlds when this process came to join */
    const char *job;           /* PMIX_NAMESPACE */
    atomic_int done;           /* the thread has come back */
    void (*run)(void);
} join = {.socket = -1};

/** A process of this machine that belongs to the job. */
typedef struct process {
    int64_t pid; /* 0: none was seen */
    char state;  /* as /proc tells it: T is stopped */
    bool here;   /* has come to join */
} process;

/** A socket and the address that stands for @what of the job; -1: none. */
static int join_socket(const char *what, struct sockaddr_un *address, socklen_t *len)
{
    int fd = join.job ? peri__mpi_host->own_file(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) : -1;
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    const char *job = join.job ? join.job : "";
    size_t length = strlen(job); /* Open MPI 5 begins a job's name with the host's, which may be long: its end tells
                                    jobs apart */
    int n = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "perilune/%u/%s/%s", (unsigned)getuid(),
                     job + (length > 60 ? length - 60 : 0), what);
    *len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
    return fd;
}

/** Bind the name; the socket, -1: it cannot be had. It is closed with this process. */
static int join_bind(const char *what)
{
    struct sockaddr_un address;
    socklen_t len;
    int fd = join_socket(what, &address, &len);
    if (fd >= 0 && bind(fd, (struct sockaddr *)&address, len) == 0 && listen(fd, SOMAXCONN) == 0) return fd;
    if (fd >= 0) close(fd);
    return -1;
}

/** Has a process of this user on this machine bound the name, and is it still there? Everybody can bind any of these
 *  names: the kernel says whose socket it is. */
static bool join_bound(const char *what)
{
    struct sockaddr_un address;
    struct ucred owner = {0};
    socklen_t len, room = sizeof owner;
    int fd = join_socket(what, &address, &len);
    if (fd < 0) return false;
    bool bound = connect(fd, (struct sockaddr *)&address, len) == 0;
    if (bound) bound = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &owner, &room) == 0 && owner.uid == geteuid();
    else bound = errno == EAGAIN; /* more have asked than it keeps; whose it is shows when it goes: join_lost */
    close(fd);
    return bound;
}

/** Forget who has asked whether this rank is here: the kernel keeps a few thousand. */
static void join_answer(void)
{
    for (int fd; join.socket >= 0 && (fd = accept4(join.socket, NULL, NULL, SOCK_CLOEXEC)) >= 0;) close(fd);
}

void peri__mpi_join_announce(void)
{
    char what[32];
    const char *rank = secure_getenv("PMIX_RANK");
    join.job = secure_getenv("PMIX_NAMESPACE");
    join.worlds = peri__mpi.worlds;
    if (join.socket >= 0) close(join.socket);
    snprintf(what, sizeof what, "%d/%d", join.worlds, rank ? atoi(rank) : -1);
    join.socket = rank ? join_bind(what) : -1;
}

/** Has the rank come to join, on this machine, and is it still there? */
static bool join_here(int32_t rank)
{
    char what[32];
    snprintf(what, sizeof what, "%d/%d", join.worlds, rank);
    return join.socket >= 0 && join_bound(what);
}

char peri__mpi_process_state(int64_t pid, char *name)
{
    char path[64], line[256] = "", state = 0;
    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)pid);
    FILE *file = fopen(path, "re");
    const char *close = file && fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL, *open = strchr(line, '(');
    if (close) state = close[1] == ' ' ? close[2] : 0;
    if (close && open && name)
        snprintf(name, 16, "%.*s", (int)(close - open - 1 < 15 ? close - open - 1 : 15), open + 1);
    if (file) fclose(file);
    return state == 'Z' || state == 'X' ? 0 : state;
}

/** The rank that a process of this user has in this job, by its environment; -1: none. */
static int32_t process_rank(int64_t pid)
{
    char path[64], *line = NULL;
    size_t room = 0;
    int32_t rank = -1;
    bool ours = false;
    struct stat info;
    snprintf(path, sizeof path, "/proc/%lld/environ", (long long)pid);
    FILE *file = fopen(path, "re");
    const bool own = file && fstat(fileno(file), &info) == 0 && info.st_uid == geteuid();
    while (own && getdelim(&line, &room, 0, file) > 0) {
        if (strncmp(line, "PMIX_RANK=", 10) == 0) rank = atoi(line + 10);
        if (strncmp(line, "PMIX_NAMESPACE=", 15) == 0) ours = strcmp(line + 15, join.job) == 0;
    }
    free(line);
    if (file) fclose(file);
    return ours ? rank : -1;
}

/** Does the process see the same network as this one? Otherwise it counts as another machine's: its socket cannot be
 *  seen. */
static bool same_network(int64_t pid)
{
    char path[64], own[64] = "", other[64] = "";
    snprintf(path, sizeof path, "/proc/%lld/ns/net", (long long)pid);
    return readlink("/proc/self/ns/net", own, sizeof own - 1) > 0 && readlink(path, other, sizeof other - 1) > 0 &&
           strcmp(own, other) == 0;
}

/** Find the processes of the job on this machine: the oldest of each rank that is not the launcher's watcher. */
static void processes_find(process *list, int32_t size)
{
    DIR *folder = join.job ? opendir("/proc") : NULL;
    for (struct dirent *d; folder && (d = readdir(folder));) {
        int64_t pid = atoll(d->d_name);
        char name[16] = "", state = pid > 0 ? peri__mpi_process_state(pid, name) : 0;
        int32_t rank = state && strcmp(name, "perilune-watch") != 0 ? process_rank(pid) : -1;
        if (rank < 0 || rank >= size || (list[rank].pid && list[rank].pid < pid) || !same_network(pid)) continue;
        list[rank].pid = pid;
        list[rank].state = state;
    }
    if (folder) closedir(folder);
}

/** Name the ranks that have not come, or are stopped, as far as this machine knows. */
static void join_missing(char *text, size_t len, int32_t size)
{
    char name[256] = "";
    size_t used = 0;
    int32_t shown = 0, unseen = 0;
    gethostname(name, sizeof name - 1);
    snprintf(text, len, "all ranks that can be seen from %s have come", name);
    process *list = join.job ? peri__mpi_host->alloc_zero(sizeof *list * (size_t)size) : NULL;
    if (!list) return;
    for (int32_t i = 0; i < size; i++) list[i].here = join_here(i); /* before the others give up, too */
    processes_find(list, size);
    for (int32_t i = 0; i < size; i++) {
        const process *p = &list[i];
        bool stopped = p->state == 'T' || p->state == 't';
        unseen += !p->here && !p->pid;
        if (!p->pid || (p->here && !stopped) || shown++ >= 8 || used >= len) continue;
        used += (size_t)snprintf(text + used, len - used, "%srank %d (process %lld on %s) %s%s", shown > 1 ? ", " : "",
                                 i, (long long)p->pid, name, p->here ? "" : "has not come",
                                 !stopped  ? ""
                                 : p->here ? "is stopped"
                                           : ": it is stopped");
    }
    if (shown > 8 && used < len) used += (size_t)snprintf(text + used, len - used, " and %d more", shown - 8);
    for (int32_t i = 0, k = 0; i < size && unseen && used < len; i++) {
        if (list[i].here || list[i].pid || k++ >= 8) continue;
        if (k > 1) used += (size_t)snprintf(text + used, len - used, ", %d", i);
        else
            used +=
                (size_t)snprintf(text + used, len - used, "%sno process on %s has rank %d", used ? "; " : "", name, i);
    }
    if (unseen > 8 && used < len) snprintf(text + used, len - used, " and %d more", unseen - 8);
    peri__mpi_host->free(list);
}

int32_t peri__mpi_launched(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", NULL};
    for (const char *const *n = names; *n; n++)
        if (secure_getenv(*n)) return atoi(secure_getenv(*n));
    return 1;
}

/** Are all ranks on this machine? */
static bool all_local(int32_t size)
{
    const char *ranks = secure_getenv("OMPI_COMM_WORLD_LOCAL_SIZE"), *nodes = secure_getenv("SLURM_STEP_NUM_NODES");
    return ranks ? atoi(ranks) == size : nodes && atoi(nodes) == 1;
}

/** Does the launcher, on this machine, say that all ranks have been started (runtime/host/job.c)? */
static bool all_started(void) { return join_bound("started"); }

/** A rank that is gone; -1: none. @list: what was seen of them before; @settled: all that are on this machine have been
 *  started. */
static int32_t join_lost(process *list, int32_t size, bool settled)
{
    bool waiting = false, vanished = false;
    for (int32_t i = 0; i < size; i++) {
        bool here = join_here(i);
        vanished = vanished || (list[i].here && !here);
        waiting = waiting || !here;
        list[i].here = here || list[i].here;
    }
    if (!waiting || !join.job) return -1;
    if (vanished) processes_find(list, size);
    for (int32_t i = 0; vanished && i < size; i++) { /* gone with its process, unless it was somebody else's socket */
        if (!list[i].here || join_here(i)) continue;
        if (!list[i].pid || !peri__mpi_process_state(list[i].pid, NULL)) return i;
        list[i].here = false;
    }
    for (int32_t i = 0; i < size; i++)
        if (list[i].pid && !list[i].here && !peri__mpi_process_state(list[i].pid, NULL)) return i;
    processes_find(list, size);
    for (int32_t i = 0; settled && i < size; i++)
        if (!list[i].pid && !join_here(i)) return i;
    return -1;
}

static void *join_thread(void *unused)
{
    (void)unused;
    join.run();
    atomic_store(&join.done, 1);
    return NULL;
}

/** The end of a process with a thread in MPI: nothing of MPI may be torn down under it. */
static void end_at_once(int code, void *unused)
{
    (void)unused;
    fflush(NULL);
    _exit(code);
}

/** MPI is not to be called again: a thread of this process is in it. */
static void give_mpi_up(void)
{
    peri__mpi.over = peri__mpi.broken = true;
    on_exit(end_at_once, NULL);
    for (mpi_group *g = peri__mpi.groups; g; g = g->next)
        peri__mpi_group_fail(g, PERI_EABORTED, peri__mpi_host->error_message());
}

/** Look after the thread until it is done. @g: the group whose members it waits for, NULL: all ranks, which join. */
static peri_status join_wait(const mpi_group *g, const char *what, int64_t timeout_ns)
{
    /* of a part of the ranks nobody knows who is missing */
    int32_t size = g ? g->size : peri__mpi.guest ? 0 : peri__mpi_launched();
    process *seen = peri__mpi_host->alloc_zero(sizeof *seen * (size_t)(size + 1));
    int64_t begin = peri__mpi_host->time_ns(), every = 500000000, look = begin + every;
    bool local = all_local(size);
    int64_t started = local ? begin + 20000000000 + size * (int64_t)100000000 : INT64_MAX;
    char text[PERI_MESSAGE_MAX / 2] = "";
    peri_status status = seen ? PERI_OK : PERI_ENOMEM;
    for (int64_t round = 0; seen && !atomic_load(&join.done); round++) {
        int64_t now = peri__mpi_host->time_ns();
        peri__mpi_host->pause(round);
        if (now < look && now - begin < timeout_ns) continue;
        look = now + every;
        join_answer();
        every = every < 8000000000 ? every * 5 / 4 : every; /* looking takes time, which the late ones may need */
        int32_t lost = g ? -1 : join_lost(seen, size, now > started || (local && all_started()));
        for (int32_t i = 0; g && i < size; i++)
            if (peri__mpi_gone(g->ranks[i])) lost = g->ranks[i];
        if (lost >= 0 && !atomic_load(&join.done)) {
            status = FAIL(PERI_EPEER, "mpi: %s: the process of rank %d is gone", what, lost);
            break;
        }
        if (now - begin < timeout_ns) continue;
        if (peri__mpi.guest) snprintf(text, sizeof text, "not all ranks of the program's communicator have come");
        else join_missing(text, sizeof text, g ? peri__mpi.size : size);
        status = FAIL(PERI_ETIMEOUT, "mpi: %s took longer than %g s: %s", what, (double)timeout_ns * 1e-9, text);
        break;
    }
    peri__mpi_host->free(seen);
    return status;
}

peri_status peri__mpi_within(const mpi_group *g, const char *what, int64_t timeout_ns, void (*run)(void))
{
    pthread_t thread;
    join.run = run;
    atomic_store(&join.done, 0);
    int problem = peri__mpi_host->thread_start(&thread, join_thread, NULL);
    if (problem) return FAIL(PERI_ENOMEM, "mpi: %s: no thread: %s", what, strerror(problem));
    peri_status status = join_wait(g, what, timeout_ns);
    if (status >= 0) pthread_join(thread, NULL);
    else {
        pthread_detach(thread);
        give_mpi_up();
    }
    return status;
}
