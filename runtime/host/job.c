/* SPDX-License-Identifier: Apache-2.0
 *
 * job.c: mpirun as a child of the launcher: what it writes to its standard error, the signals that come meanwhile, and
 * its end, one event after the other. Its input is the launcher's own, and so is its output if that is a terminal.
 * Other output goes through the launcher, which learns whether it could be written; mpirun would not tell.
 */
#include "host_internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <lauxlib.h>
#include <lua.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

/** The job of this process: one at a time. */
static struct {
    pid_t pid;    /* 0: none */
    int error;    /* its standard error, -1 when that is at its end */
    int output;   /* its standard output, likewise; -1 too where that is the launcher's */
    int signals;  /* signals to this process */
    int socket;   /* tells that all ranks have started, -1: not yet */
    sigset_t before; /* signals that were blocked before it */
    int status;   /* as waitpid tells it */
    bool ended;
    int n_started;
    pid_t started[1024]; /* what it had started when it was told to end: ranks, and who starts them on other machines */
} job = {.error = -1, .output = -1, .signals = -1, .socket = -1};

static int failure(lua_State *L, const char *what)
{
    lua_pushnil(L);
    lua_pushfstring(L, "%s: %s", what, strerror(errno));
    return 2;
}

/** In the child: become the program @words; says why not through @report. A Ctrl-C, or a SIGTERM to the whole group of
 *  processes, is the launcher's, which may give the ranks time; mpirun would end them at once, and does so at a
 *  SIGHUP. */
static _Noreturn void become(char *const *words, const char *preload, int error, int output, int report,
                             pid_t parent, const sigset_t *mask)
{
    if (preload) setenv("LD_PRELOAD", preload, 1);
    sigset_t ours = *mask;
    sigaddset(&ours, SIGINT);
    sigaddset(&ours, SIGTERM);
    sigprocmask(SIG_SETMASK, &ours, NULL);
    prctl(PR_SET_PDEATHSIG, SIGHUP, 0, 0, 0); /* no ranks without a launcher */
    if (getppid() == parent && dup2(error, STDERR_FILENO) >= 0 && (output < 0 || dup2(output, STDOUT_FILENO) >= 0))
        execvp(words[0], words);
    int problem = errno;
    if (write(report, &problem, sizeof problem) < 0) _exit(126);
    _exit(127);
}

/** files(count): let this process and its children open so many files. Returns how many they may. */
static int files(lua_State *L)
{
    struct rlimit limit = {0, 0};
    rlim_t wanted = (rlim_t)luaL_checknumber(L, 1);
    getrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_cur < wanted) {
        limit.rlim_cur = wanted < limit.rlim_max ? wanted : limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
        getrlimit(RLIMIT_NOFILE, &limit);
    }
    lua_pushnumber(L, (lua_Number)limit.rlim_cur);
    return 1;
}

/** start(list of words, list of numbers, LD_PRELOAD or nil): run a program; wait for these signals too. Its process id,
 *  or nil and why not. */
static int start(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    int count = (int)lua_objlen(L, 1), error[2], report[2], output[2] = {-1, -1}, problem = 0;
    luaL_argcheck(L, count > 0 && !job.pid, 1, "a program's name and arguments wanted, one program at a time");
    const char *preload = luaL_optstring(L, 3, NULL);
    const char **words = lua_newuserdata(L, sizeof *words * ((size_t)count + 1));
    for (int i = 0; i < count; i++) {
        lua_rawgeti(L, 1, i + 1);
        words[i] = luaL_checkstring(L, -1);
        lua_pop(L, 1); /* the table keeps the string */
    }
    words[count] = NULL;
    sigset_t set;
    sigemptyset(&set);
    for (const int *s = (const int[]){SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGCHLD, 0}; *s; s++) {
        struct sigaction now;
        sigaction(*s, NULL, &now);
        /* nohup's, and the shell's for what runs behind */
        if (now.sa_handler != SIG_IGN || *s == SIGCHLD) sigaddset(&set, *s);
    }
    for (int i = 1; i <= (int)lua_objlen(L, 2); i++) {
        lua_rawgeti(L, 2, i);
        sigaddset(&set, (int)lua_tointeger(L, -1));
        lua_pop(L, 1);
    }
    sigprocmask(SIG_BLOCK, &set, &job.before);
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); /* ranks whose mpirun has died come here: see sweep */
    job.signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (job.signals < 0 || pipe2(error, O_CLOEXEC) != 0 || pipe2(report, O_CLOEXEC) != 0) return failure(L, "a pipe");
    const bool printing = (fcntl(STDOUT_FILENO, F_GETFL) & O_ACCMODE) != O_RDONLY && !isatty(STDOUT_FILENO);
    if (printing && pipe2(output, O_CLOEXEC) != 0) return failure(L, "a pipe");
    fflush(NULL);
    pid_t parent = getpid();
    job.pid = fork();
    if (job.pid == 0) become((char *const *)words, preload, error[1], output[1], report[1], parent, &job.before);
    close(error[1]);
    if (output[1] >= 0) close(output[1]);
    close(report[1]);
    if (job.pid < 0) return failure(L, "fork");
    bool failed = read(report[0], &problem, sizeof problem) == sizeof problem; /* ends when the program has begun */
    close(report[0]);
    if (failed) {
        errno = problem;
        return failure(L, words[0]);
    }
    job.error = error[0];
    fcntl(job.error, F_SETFL, O_NONBLOCK);
    job.output = output[0];
    if (job.output >= 0) {
        fcntl(job.output, F_SETFL, O_NONBLOCK);
        signal(SIGPIPE, SIG_IGN); /* who reads our output may go; the ranks go on, and the exit code tells of it */
    }
    lua_pushinteger(L, job.pid);
    return 1;
}

/** Take note of children that have ended: the program, and ranks that came here. */
static void reap(void)
{
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
        if (pid == job.pid) job.status = status, job.ended = true;
}

/** The next signal other than of children; false: none waits. */
static bool next_signal(struct signalfd_siginfo *info)
{
    while (read(job.signals, info, sizeof *info) == sizeof *info) {
        if (info->ssi_signo != SIGCHLD) return true;
        reap();
    }
    return false;
}

/** Text from the program's standard error, on the stack; false: none waits. */
static bool next_text(lua_State *L)
{
    char text[16384];
    ssize_t n = job.error < 0 ? -1 : read(job.error, text, sizeof text);
    if (n > 0) lua_pushlstring(L, text, (size_t)n);
    if (n == 0) {
        close(job.error);
        job.error = -1;
    }
    return n > 0;
}

/** Whether our standard output takes text now: then it takes PIPE_BUF bytes without a wait. */
static bool output_ready(void)
{
    struct pollfd to = {.fd = STDOUT_FILENO, .events = POLLOUT};
    return poll(&to, 1, 0) != 0;
}

/** Pass on some of what the program has written to its standard output; false: there is nothing, or nobody takes it. A
 *  failure stays with stdout, whose end makes the exit code of it (main.c); what comes after it is dropped. */
static bool pass_output(void)
{
    char text[PIPE_BUF];
    if (job.output < 0 || !output_ready()) return false;
    const ssize_t n = read(job.output, text, sizeof text);
    if (n > 0) {
        if (!ferror(stdout) && fwrite(text, 1, (size_t)n, stdout) == (size_t)n) fflush(stdout);
        return true;
    }
    if (n < 0 && !(job.ended && errno == EAGAIN)) return false;
    close(job.output);
    job.output = -1;
    return false;
}

/** next(seconds): what happens next, within so long: "text", string; "signal", number; "end", exit code, signal or nil;
 *  "time". */
static int next(lua_State *L)
{
    double seconds = luaL_checknumber(L, 1);
    struct signalfd_siginfo info;
    for (;;) {
        const bool over = job.ended; /* then everything that it wrote can be read at once */
        /* see started */
        for (int fd; job.socket >= 0 && (fd = accept4(job.socket, NULL, NULL, SOCK_CLOEXEC)) >= 0;) close(fd);
        lua_settop(L, 0);
        lua_pushliteral(L, "text");
        if (next_text(L)) return 2;
        for (int round = 0; round < 16 && pass_output();) round++; /* signals are heard between them */
        lua_settop(L, 0);
        if (next_signal(&info)) {
            lua_pushliteral(L, "signal");
            lua_pushinteger(L, (lua_Integer)info.ssi_signo);
            return 2;
        }
        if (over && job.output < 0) break;
        struct pollfd list[3] = {{.fd = job.signals, .events = POLLIN}, {.fd = job.error, .events = POLLIN},
                                 {.fd = job.output, .events = POLLIN}};
        if (job.output >= 0 && !output_ready()) list[2] = (struct pollfd){.fd = STDOUT_FILENO, .events = POLLOUT};
        if ((!job.ended || job.output >= 0) && poll(list, 3, (int)(seconds * 1e3)) == 0) {
            reap(); /* a thread of a library may have taken the signal of its end */
            lua_pushliteral(L, "time");
            return 1;
        }
    }
    lua_pushliteral(L, "end");
    lua_pushinteger(L, WIFSIGNALED(job.status) ? 128 + WTERMSIG(job.status) : WEXITSTATUS(job.status));
    if (WIFSIGNALED(job.status)) lua_pushinteger(L, WTERMSIG(job.status));
    return lua_gettop(L);
}

/** sought(): a signal to end that somebody has sent the program, which blocks it: the launcher's to heed. nil: none. */
static int sought(lua_State *L)
{
    char path[64], line[256];
    unsigned long long pending = 0, more = 0;
    snprintf(path, sizeof path, "/proc/%ld/status", (long)job.pid);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "SigPnd: %llx", &more) == 1 || sscanf(line, "ShdPnd: %llx", &more) == 1) pending |= more;
    if (file) fclose(file);
    for (const int *s = (const int[]){SIGTERM, SIGINT, 0}; *s; s++) {
        if (!(pending >> (*s - 1) & 1)) continue;
        lua_pushinteger(L, *s);
        return 1;
    }
    return 0;
}

/** State of a process ('Z': it has ended) and its parent; 0: there is none. */
static char state_of(long pid, long *parent)
{
    char path[64], line[512], state = 0;
    snprintf(path, sizeof path, "/proc/%ld/stat", pid);
    FILE *file = fopen(path, "r");
    const char *after = file && fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
    if (file) fclose(file);
    return after && sscanf(after, ") %c %ld", &state, parent) == 2 ? state : 0;
}

/** The processes that the program has started and that have not ended: how many, at most @room of them in @list; -1:
 *  unknown. */
static int find_children(pid_t *list, int room)
{
    char path[96];
    long pid, parent;
    snprintf(path, sizeof path, "/proc/%ld/task/%ld/children", (long)job.pid, (long)job.pid);
    FILE *file = fopen(path, "r");
    if (!file) return -1;
    int count = 0;
    while (fscanf(file, "%ld", &pid) == 1) {
        char state = state_of(pid, &parent);
        if (!state || state == 'Z') continue;
        if (count < room) list[count] = (pid_t)pid;
        count++;
    }
    fclose(file);
    return count;
}

/** children(): how many processes the program has started that have not ended; nil: unknown. */
static int children(lua_State *L)
{
    int count = find_children(NULL, 0);
    if (count < 0) return 0;
    lua_pushinteger(L, count);
    return 1;
}

/** signal(number): to the program. */
static int send_signal(lua_State *L)
{
    int room = (int)(sizeof job.started / sizeof *job.started);
    if (job.pid <= 0 || job.ended) return 0;
    int count = find_children(job.started, room);
    job.n_started = count < 0 ? 0 : count < room ? count : room;
    kill(job.pid, luaL_checkint(L, 1));
    return 0;
}

/** Is process @pid a child of this one, and the same program, or one that the program has started? */
static bool left_behind(long pid, const char *own)
{
    char path[64], other[4096];
    long parent = 0;
    for (int i = 0; i < job.n_started; i++)
        if (job.started[i] == pid) return state_of(pid, &parent) && parent == (long)getpid();
    snprintf(path, sizeof path, "/proc/%ld/exe", pid);
    ssize_t n = readlink(path, other, sizeof other - 1);
    if (n <= 0) return false;
    other[n] = 0;
    return state_of(pid, &parent) && parent == (long)getpid() && strcmp(own, other) == 0;
}

/** The next job may begin. */
static void forget(void)
{
    const int files[] = {job.error, job.output, job.signals, job.socket};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        if (files[i] >= 0) close(files[i]);
    sigprocmask(SIG_SETMASK, &job.before, NULL);
    memset(&job, 0, sizeof job);
    job.error = job.output = job.signals = job.socket = -1;
}

/** sweep(): end the ranks of this machine that have outlived mpirun, and what mpirun has left behind when it was told
 *  to end: it cannot end what starts its daemon on a machine that does not answer any more. The end of a job. */
static int sweep(lua_State *L)
{
    (void)L;
    char own[4096] = "";
    int found = readlink("/proc/self/exe", own, sizeof own - 1) > 0;
    for (int round = 0; found && round < 200; round++) {
        DIR *folder = opendir("/proc");
        found = 0;
        for (struct dirent *d; folder && (d = readdir(folder));) {
            long pid = atol(d->d_name);
            if (pid <= 0 || !left_behind(pid, own)) continue;
            if (getpgid((pid_t)pid) == pid) kill(-(pid_t)pid, SIGKILL);
            kill((pid_t)pid, SIGKILL); /* a watcher (rank_watch.c), whose rank follows it and comes here then */
            found++;
        }
        if (folder) closedir(folder);
        if (found) usleep(10000);
        reap();
    }
    if (job.ended) forget();
    return 0;
}

/** started(name): tell the ranks of this machine that all ranks of mpirun's job @name have been started, until it ends:
 *  an abstract socket of that name (backends/mpi/join.c looks for it). Without it they find out later. */
static int started(lua_State *L)
{
    size_t length;
    const char *name = luaL_checklstring(L, 1, &length);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int n = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "perilune/%u/%s/started", (unsigned)getuid(),
                     name + (length > 60 ? length - 60 : 0));
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    socklen_t len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
    if (fd >= 0 && (bind(fd, (struct sockaddr *)&address, len) != 0 || listen(fd, SOMAXCONN) != 0)) close(fd), fd = -1;
    job.socket = fd;
    return 0;
}

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *at)
{
    (void)info, (void)kind, (void)at;
    remove(path);
    return 0;
}

static void remove_tree(const char *path) { nftw(path, remove_entry, 8, FTW_DEPTH | FTW_PHYS | FTW_MOUNT); }

/** Lock this user's folder @path; -1: it is another's, is locked, or is gone, as after the wait for whoever removed
 *  it. */
static int lock_folder(const char *path, int how)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    struct stat is;
    if (fd < 0 || (fstat(fd, &is) == 0 && is.st_uid == geteuid() && flock(fd, how) == 0 && access(path, F_OK) == 0))
        return fd;
    close(fd);
    return -1;
}

#define FOLDER "perilune-job-"
static int held = -1; /* the folder of this job, locked as long as this process lives */

/** Remove the folders of launchers that were killed: nobody has them locked. */
static void remove_abandoned(const char *place)
{
    char path[512];
    DIR *folder = opendir(place);
    for (struct dirent *d; folder && (d = readdir(folder));) {
        if (strncmp(d->d_name, FOLDER, sizeof FOLDER - 1) != 0) continue;
        snprintf(path, sizeof path, "%s/%s", place, d->d_name);
        int fd = lock_folder(path, LOCK_EX | LOCK_NB);
        if (fd < 0) continue;
        remove_tree(path);
        close(fd);
    }
    if (folder) closedir(folder);
}

/** Bytes that this user may still write to the file system of a folder; -1: the folder is not there. */
static double room_of(const char *place)
{
    struct statvfs s;
    return statvfs(place, &s) == 0 ? (double)s.f_bavail * (double)s.f_frsize : -1;
}

/** room(place): room_of; nil: the folder is not there. */
static int room(lua_State *L)
{
    const double bytes = room_of(luaL_checkstring(L, 1));
    if (bytes < 0) return 0;
    lua_pushnumber(L, bytes);
    return 1;
}

/** folder(mib): a new folder for files of this job: in shared memory if that has so much room, else among temporary
 *  files. Only this user can enter it. Its name, or nil: it cannot be made. */
static int make_folder(lua_State *L)
{
    const char *temporary = secure_getenv("TMPDIR"),
               *places[] = {"/dev/shm", temporary && *temporary == '/' ? temporary : "/tmp"};
    char path[4096];
    remove_abandoned(places[0]); /* other places may be shared by machines, which need not see each other's locks */
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        const bool enough = room_of(places[i]) >= luaL_checknumber(L, 1) * 0x1p20;
        if (i == 0 && !enough) continue;
        if (snprintf(path, sizeof path, "%s/" FOLDER "XXXXXX", places[i]) >= (int)sizeof path || !mkdtemp(path))
            continue;
        held = lock_folder(path, LOCK_EX);
        if (held < 0 && access(path, F_OK) != 0) { /* taken for abandoned before it was locked */
            i--;
            continue;
        }
        lua_pushstring(L, path);
        return 1;
    }
    return 0;
}

/** loopback(): the value of LD_PRELOAD with which mpirun listens to this machine only (runtime/backends/loopback): the
 *  library lies beside the launcher, or where plugins are installed. nil: it is not there, or sanitizers have to come
 *  first. */
static int loopback(lua_State *L)
{
    static const char *const places[] = {"", "../lib/perilune/", NULL};
    const char *others = secure_getenv("LD_PRELOAD");
    char path[4096];
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return 0;
#endif
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 64);
    while (n > 0 && path[n - 1] != '/') n--;
    for (const char *const *place = places; n > 0 && *place; place++) {
        snprintf(path + n, sizeof path - (size_t)n, "%slibperilune_loopback.so", *place);
        if (access(path, R_OK) != 0 || strpbrk(path, " :")) continue; /* it stands in a list */
        lua_pushfstring(L, "%s%s%s", path, others && *others ? ":" : "", others ? others : "");
        return 1;
    }
    return 0;
}

/** remove(folder): what make_folder has made, with all that is in it. */
static int remove_folder(lua_State *L)
{
    remove_tree(luaL_checkstring(L, 1));
    if (held >= 0) close(held);
    held = -1;
    return 0;
}

void peri__job_register(lua_State *L)
{
    static const luaL_Reg functions[] = {{"folder", make_folder}, {"remove", remove_folder}, {"sought", sought},
                                         {"loopback", loopback}, {"room", room},
                                         {"files", files}, {"start", start}, {"next", next}, {"signal", send_signal},
                                         {"children", children}, {"sweep", sweep}, {"started", started}, {NULL, NULL}};
    luaL_register(L, NULL, functions);
}
