/* SPDX-License-Identifier: Apache-2.0
 *
 * nccl.cc: a pretended libnccl.so.2. Processes of one machine meet in a folder of /dev/shm; each message is a file there, named by its
 * communicator, sender, receiver, and a number: that of the operation, or, of sends and receives, how many there were between the two.
 * So what two ranks call as their n-th operation on a communicator meets, whatever it is: operations that differ wait for ever, as with
 * the real one; and a rank that sends nobody anything has no part in an exchange. Sums go from the last rank to the first.
 *
 * An operation runs when its stream gets there (peri_cuda_host_poll): it sends, then asks at each passage whether everything has come.
 * Communicators made with blocking = 0 say ncclInProgress a few times about everything. Ranks that share a GPU are refused. PERI_FAKE_NCCL,
 * for the rank that PERI_FAKE_NCCL_RANK names (none: all): "delay:N" every operation takes N ms; "fail:N" the N-th operation of the process
 * is an error that comes later; "die:N" the process ends by SIGKILL in its N-th operation. With PERI_FAKE_NCCL_SERIAL=1 an operation of a
 * process begins when those that were launched before it have ended, whatever their communicators, as where a GPU has no room for two: ranks
 * that launch in different orders wait for each other for ever.
 *
 * A folder goes with its last process, however that ends: each holds a lock in it, and a process that is started with the folder waits for
 * all of them.
 */
#include "nccl.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <fcntl.h>
#include <map>
#include <spawn.h>
#include <string>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#define EXPORT __attribute__((visibility("default")))

struct ncclComm {
    std::string folder;
    int rank = 0, size = 1, lock = -1;
    bool blocking = true, aborted = false, owner = false;
    ncclResult_t error = ncclSuccess;
    int busy = 0;             /* times that it says ncclInProgress yet */
    int64_t operations = 0, splits = 0;
    std::vector<int64_t> sends, receives; /* how many, by peer */
    int64_t running = 0;
    bool closed = false, met = false;

    ~ncclComm()
    {
        if (lock >= 0) close(lock);
    }
};

namespace {

typedef void (*poll_fn)(cudaStream_t, bool (*)(void *), void *);

double now_ms()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

struct fault {
    std::string kind;
    int64_t n = 0;
};

char said[400]; /* what ncclGetLastError tells */

/** A whole number, at least @least; -1: it is none. */
int64_t number_of(const char *text, int64_t least)
{
    char *end = nullptr;
    errno = 0;
    long long n = strtoll(text, &end, 10);
    return *text >= '0' && *text <= '9' && !*end && !errno && n >= least ? n : -1;
}

/** What PERI_FAKE_NCCL asks of @rank; false: nothing that there is (`said` tells). */
bool fault_of(int rank, fault *f)
{
    const char *text = getenv("PERI_FAKE_NCCL"), *who = getenv("PERI_FAKE_NCCL_RANK");
    if (who && *who && number_of(who, 0) < 0) {
        snprintf(said, sizeof said, "PERI_FAKE_NCCL_RANK is '%.40s', allowed: the number of a rank", who);
        return false;
    }
    if (!text || !*text) return true;
    const char *colon = strchr(text, ':');
    std::string kind(text, colon ? (size_t)(colon - text) : strlen(text));
    int64_t n = colon ? number_of(colon + 1, 1) : -1;
    if (n < 0 || (kind != "delay" && kind != "fail" && kind != "die")) {
        snprintf(said, sizeof said, "PERI_FAKE_NCCL is '%.40s', allowed: delay:N, fail:N, die:N, of N from 1", text);
        return false;
    }
    if (!who || !*who || number_of(who, 0) == rank) f->kind = kind, f->n = n;
    return true;
}

int64_t operations_of_process;

struct part {
    int peer;
    std::string name;
    char *data;
    size_t bytes;
    bool here = false;
};

/** One operation: what it sends, what it waits for, what it does in the end. */
struct operation {
    ncclComm *comm;
    int64_t number;
    std::vector<part> out, in;
    void (*finish)(operation *) = nullptr;
    const char *send = nullptr;
    char *recv = nullptr;
    size_t count = 0;
    ncclDataType_t type = ncclInt8;
    ncclRedOp_t reduce = ncclSum;
    std::vector<std::vector<char>> rooms; /* of sums: what came, by rank */
    bool sent = false;
    double until = 0;
};

size_t size_of(ncclDataType_t t)
{
    switch (t) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    default: return 8;
    }
}

std::string name_of(const ncclComm *c, int64_t number, int from, int to, const char *kind = "")
{
    return c->folder + "/" + kind + std::to_string(number) + "-" + std::to_string(from) + "-" + std::to_string(to);
}

void write_file(const std::string &name, const void *data, size_t bytes)
{
    std::string hidden = name + ".new";
    FILE *f = fopen(hidden.c_str(), "wb");
    if (!f) return;
    std::string copy((const char *)data, bytes); /* the system would not open memory of the device */
    fwrite(copy.data(), 1, bytes, f);
    fclose(f);
    rename(hidden.c_str(), name.c_str());
}

/** Tell the device that these bytes of its memory were written. */
void wrote(const void *p, size_t bytes)
{
    typedef void (*wrote_fn)(const void *, size_t);
    static wrote_fn tell = nullptr;
    void *device = tell ? nullptr : dlopen("libperilune_cuda_host.so", RTLD_NOW | RTLD_NOLOAD);
    void *found = device ? dlsym(device, "peri_cuda_host_wrote") : nullptr;
    if (found) memcpy(&tell, &found, sizeof tell);
    if (tell) tell(p, bytes);
}

/** Has the file come, with so many bytes? Then read it. A file of another size stays: this operation never ends. */
bool read_file(part *p)
{
    struct stat s;
    if (p->here) return true;
    if (stat(p->name.c_str(), &s) != 0 || (size_t)s.st_size != p->bytes) return false;
    FILE *f = fopen(p->name.c_str(), "rb");
    if (!f) return false;
    std::vector<char> room(p->bytes);
    p->here = fread(room.data(), 1, p->bytes, f) == p->bytes;
    fclose(f);
    if (p->here) memcpy(p->data, room.data(), p->bytes);
    if (p->here) wrote(p->data, p->bytes);
    if (p->here) unlink(p->name.c_str());
    return p->here;
}

/** With PERI_FAKE_NCCL_SERIAL: what has been launched and has not ended, in the order of the launches. */
std::vector<operation *> launched;
bool serial()
{
    static const bool on = getenv("PERI_FAKE_NCCL_SERIAL") && strcmp(getenv("PERI_FAKE_NCCL_SERIAL"), "1") == 0;
    return on;
}

bool ended(void *data)
{
    operation *o = (operation *)data;
    ncclComm *c = o->comm;
    if (serial() && !c->aborted && launched.front() != o) return false;
    if (!c->aborted && !o->sent) {
        fault f;
        fault_of(c->rank, &f);
        operations_of_process++;
        if (f.kind == "die" && operations_of_process == f.n) raise(SIGKILL);
        if (f.kind == "fail" && operations_of_process == f.n) c->error = ncclInternalError;
        if (f.kind == "delay") o->until = now_ms() + (double)f.n;
        for (part &p : o->out) write_file(p.name, p.data, p.bytes);
        o->sent = true;
    }
    bool all = c->error == ncclSuccess && now_ms() >= o->until;
    for (part &p : o->in) all = read_file(&p) && all;
    if (!all && !c->aborted) return false;
    if (all && !c->aborted && o->finish) o->finish(o);
    if (serial()) launched.erase(std::find(launched.begin(), launched.end(), o));
    c->running--;
    if (c->closed && !c->running) delete c;
    delete o;
    return true;
}

template <class T> void sum(operation *o)
{
    T *y = (T *)o->recv;
    for (size_t i = 0; i < o->count; i++) {
        T x = ((const T *)o->rooms.back().data())[i];
        for (size_t r = o->rooms.size() - 1; r-- > 0;) {
            T other = ((const T *)o->rooms[r].data())[i];
            x = o->reduce == ncclSum ? (T)(x + other) : o->reduce == ncclMin ? (other < x ? other : x) : (other > x ? other : x);
        }
        y[i] = x;
    }
}

void finish_sum(operation *o)
{
    switch (o->type) {
    case ncclInt8: sum<int8_t>(o); break;
    case ncclUint8: sum<uint8_t>(o); break;
    case ncclInt32: sum<int32_t>(o); break;
    case ncclUint32: sum<uint32_t>(o); break;
    case ncclInt64: sum<int64_t>(o); break;
    case ncclUint64: sum<uint64_t>(o); break;
    case ncclFloat32: sum<float>(o); break;
    case ncclFloat64: sum<double>(o); break;
    default: break;
    }
}

poll_fn poller()
{
    static poll_fn poll = nullptr;
    if (poll) return poll;
    void *device = dlopen("libperilune_cuda_host.so", RTLD_NOW | RTLD_NOLOAD);
    void *found = device ? dlsym(device, "peri_cuda_host_poll") : nullptr;
    memcpy(&poll, &found, sizeof poll);
    if (!poll) {
        fprintf(stderr, "the pretended NCCL needs the pretended GPU\n");
        abort();
    }
    return poll;
}

/* -- groups of calls: sends and receives between start and end are one operation a communicator ------------------------------------- */

thread_local int depth;
thread_local operation *grouped;
thread_local cudaStream_t grouped_stream;

operation *begin(ncclComm *c)
{
    operation *o = new operation;
    o->comm = c;
    return o;
}

/** One that all ranks have a part in. */
operation *begin_for_all(ncclComm *c)
{
    operation *o = begin(c);
    o->number = ++c->operations;
    return o;
}

ncclResult_t queue(operation *o, cudaStream_t stream)
{
    o->comm->running++;
    if (serial()) launched.push_back(o);
    poller()(stream, ended, o);
    if (o->comm->blocking) return ncclSuccess;
    o->comm->busy = 1;
    return ncclInProgress;
}

ncclResult_t message(bool receive, void *data, size_t bytes, int peer, ncclComm *c, cudaStream_t stream)
{
    if (c->aborted || peer < 0 || peer >= c->size) return ncclInvalidArgument;
    bool alone = depth == 0;
    if (alone || !grouped) grouped = begin(c), grouped_stream = stream;
    if (grouped->comm != c) return ncclInvalidUsage;
    int64_t number = ++(receive ? c->receives : c->sends)[(size_t)peer];
    part p = {peer, receive ? name_of(c, number, peer, c->rank, "message-") : name_of(c, number, c->rank, peer, "message-"), (char *)data,
              bytes};
    (receive ? grouped->in : grouped->out).push_back(p);
    if (!alone) return ncclSuccess;
    operation *o = grouped;
    grouped = nullptr;
    return queue(o, stream);
}

/** Hold the lock of a folder: -1: there is no such folder. */
int hold(const std::string &folder, bool make)
{
    int fd = open((folder + "/lock").c_str(), O_RDWR | O_CLOEXEC | (make ? O_CREAT : 0), 0600);
    if (fd >= 0 && flock(fd, LOCK_SH | LOCK_NB) != 0) close(fd), fd = -1;
    return fd;
}

/** The locks of folders that this process made and no communicator has yet. */
std::map<std::string, int> &first_locks()
{
    static auto *locks = new std::map<std::string, int>;
    return *locks;
}

/** The GPU that the calling thread has chosen, as one number for all processes of the machine. */
int own_gpu()
{
    typedef int (*gpu_fn)(void);
    gpu_fn gpu = nullptr;
    void *device = dlopen("libperilune_cuda_host.so", RTLD_NOW | RTLD_NOLOAD);
    void *found = device ? dlsym(device, "peri_cuda_host_gpu") : nullptr;
    memcpy(&gpu, &found, sizeof gpu);
    return gpu ? gpu() : -1;
}

ncclComm *made(const std::string &folder, int rank, int size, const ncclConfig_t *config)
{
    ncclComm *c = new ncclComm;
    c->folder = folder;
    c->rank = rank;
    c->size = size;
    c->sends.resize((size_t)size);
    c->receives.resize((size_t)size);
    c->blocking = !config || config->blocking != 0;
    c->busy = 3;
    mkdir(folder.c_str(), 0700);
    std::string gpu = std::to_string(own_gpu());
    write_file(folder + "/here-" + std::to_string(rank), gpu.data(), gpu.size());
    return c;
}

/** Everybody has come? Then look whether two of them have one GPU. */
bool complete(ncclComm *c)
{
    if (c->met) return true;
    std::vector<std::string> gpus((size_t)c->size);
    for (int i = 0; i < c->size; i++) {
        FILE *f = fopen((c->folder + "/here-" + std::to_string(i)).c_str(), "rb");
        char text[32];
        if (!f) return false;
        gpus[(size_t)i].assign(text, fread(text, 1, sizeof text, f));
        fclose(f);
    }
    c->met = true;
    for (int i = 0; i < c->size; i++)
        for (int k = 0; k < i && c->error == ncclSuccess; k++)
            if (gpus[(size_t)i] == gpus[(size_t)k]) {
                snprintf(said, sizeof said, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %s", k, i,
                         gpus[(size_t)i].c_str());
                c->error = ncclInvalidUsage;
            }
    return true;
}

void remove_folder(const std::string &folder)
{
    std::string command = "rm -rf '" + folder + "'";
    if (folder.compare(0, 9, "/dev/shm/") == 0 && system(command.c_str()) != 0) return;
}

/** Have @folder removed when nobody holds its lock any more. The process that waits is nobody's child, and has nothing of this one open. */
void remove_later(const std::string &folder)
{
    const char *argv[] = {"sh", "-c", "flock \"$1\"/lock rm -rf \"$1\" &", "sh", folder.c_str(), nullptr};
    const char *const env[] = {"PATH=/usr/local/bin:/usr/bin:/bin", nullptr};
    posix_spawn_file_actions_t files;
    posix_spawnattr_t how;
    pid_t child;
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&how);
    for (int fd = 0; fd < 3; fd++) posix_spawn_file_actions_addopen(&files, fd, "/dev/null", O_RDWR, 0);
    posix_spawn_file_actions_addclosefrom_np(&files, 3);
    posix_spawnattr_setflags(&how, POSIX_SPAWN_SETSID);
    if (posix_spawn(&child, "/bin/sh", &files, &how, (char *const *)argv, (char *const *)env) == 0) waitpid(child, nullptr, 0);
    posix_spawnattr_destroy(&how);
    posix_spawn_file_actions_destroy(&files);
}

} // namespace

extern "C" {

EXPORT ncclResult_t ncclGetVersion(int *version) { return *version = 22800, ncclSuccess; }

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    static int count;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/dev/shm/perilune-nccl-%d-%d-%lld", (int)getpid(), ++count, (long long)time(nullptr));
    int lock = mkdir(id->internal, 0700) == 0 ? hold(id->internal, true) : -1;
    if (lock < 0) return ncclSystemError;
    first_locks()[id->internal] = lock;
    remove_later(id->internal);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    fault f;
    if (rank < 0 || rank >= ranks || !fault_of(rank, &f)) return ncclInvalidArgument;
    auto first = first_locks().find(id.internal);
    int lock = first != first_locks().end() ? first->second : hold(id.internal, false);
    if (first != first_locks().end()) first_locks().erase(first);
    if (lock < 0) return snprintf(said, sizeof said, "whoever made %s is gone", id.internal), ncclRemoteError;
    *comm = made(id.internal, rank, ranks, config);
    (*comm)->owner = rank == 0;
    (*comm)->lock = lock;
    while ((*comm)->blocking && !complete(*comm)) usleep(100);
    return (*comm)->blocking ? (*comm)->error : ncclInProgress;
}

EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out, ncclConfig_t *config)
{
    if (color != 0 || key != comm->rank) return ncclInvalidUsage; /* others are not asked for */
    *out = made(comm->folder + "/split" + std::to_string(++comm->splits), comm->rank, comm->size, config);
    while ((*out)->blocking && !complete(*out)) usleep(100);
    return (*out)->blocking ? (*out)->error : ncclInProgress;
}

EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    bool whole = complete(comm);
    *error = comm->error;
    if (comm->error == ncclSuccess && (!whole || comm->busy > 0)) {
        if (comm->busy > 0) comm->busy--;
        *error = ncclInProgress;
    }
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    comm->aborted = true;
    comm->closed = true;
    if (comm->owner) remove_folder(comm->folder);
    if (!comm->running) delete comm;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) /* the real one waits for the others here too */
{
    write_file(comm->folder + "/gone-" + std::to_string(comm->rank), "", 0);
    for (int i = 0, tries = 0; comm->owner && i < comm->size && tries < 20000;)
        if (access((comm->folder + "/gone-" + std::to_string(i)).c_str(), F_OK) == 0) i++;
        else usleep(100), tries++;
    if (comm->owner) remove_folder(comm->folder);
    comm->closed = true;
    if (!comm->running) delete comm;
    return ncclSuccess;
}

EXPORT const char *ncclGetErrorString(ncclResult_t result)
{
    static const char *const names[] = {"no error",
                                        "unhandled cuda error",
                                        "system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "in progress"};
    return result >= 0 && result <= ncclInProgress ? names[result] : "unknown";
}

EXPORT const char *ncclGetLastError(ncclComm_t) { return said; }

EXPORT ncclResult_t ncclGroupStart(void) { return depth++, ncclSuccess; }

EXPORT ncclResult_t ncclGroupEnd(void)
{
    if (--depth > 0 || !grouped) return ncclSuccess;
    operation *o = grouped;
    grouped = nullptr;
    return queue(o, grouped_stream);
}

EXPORT ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream)
{
    return message(false, (void *)send, count * size_of(type), peer, comm, stream);
}

EXPORT ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream)
{
    return message(true, recv, count * size_of(type), peer, comm, stream);
}

/** All parts of @count elements from each rank into rooms, then the sum. @parts: this rank sends part i to rank i; else all of it to all. */
static ncclResult_t reduction(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm *c,
                              cudaStream_t stream, bool parts)
{
    operation *o = begin_for_all(c);
    size_t bytes = count * size_of(type);
    o->recv = (char *)recv;
    o->count = count;
    o->type = type;
    o->reduce = op;
    o->finish = finish_sum;
    o->rooms.resize((size_t)c->size, std::vector<char>(bytes));
    for (int i = 0; i < c->size; i++) {
        o->out.push_back({i, name_of(c, o->number, c->rank, i), (char *)send + (parts ? (size_t)i * bytes : 0), bytes});
        o->in.push_back({i, name_of(c, o->number, i, c->rank), o->rooms[(size_t)i].data(), bytes});
    }
    return queue(o, stream);
}

EXPORT ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                  cudaStream_t stream)
{
    return comm->aborted ? ncclInvalidUsage : reduction(send, recv, count, type, op, comm, stream, false);
}

EXPORT ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                      cudaStream_t stream)
{
    return comm->aborted ? ncclInvalidUsage : reduction(send, recv, count, type, op, comm, stream, true);
}

EXPORT ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream)
{
    if (comm->aborted) return ncclInvalidUsage;
    operation *o = begin_for_all(comm);
    size_t bytes = count * size_of(type);
    for (int i = 0; i < comm->size; i++) {
        o->out.push_back({i, name_of(comm, o->number, comm->rank, i), (char *)send, bytes});
        o->in.push_back({i, name_of(comm, o->number, i, comm->rank), (char *)recv + (size_t)i * bytes, bytes});
    }
    return queue(o, stream);
}

EXPORT ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                                  cudaStream_t stream)
{
    if (comm->aborted) return ncclInvalidUsage;
    operation *o = begin_for_all(comm);
    size_t bytes = count * size_of(type);
    if (comm->rank == root)
        for (int i = 0; i < comm->size; i++) o->out.push_back({i, name_of(comm, o->number, root, i), (char *)send, bytes});
    o->in.push_back({root, name_of(comm, o->number, root, comm->rank), (char *)recv, bytes});
    return queue(o, stream);
}

} /* extern "C" */
