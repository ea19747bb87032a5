/* SPDX-License-Identifier: Apache-2.0
 *
 * rank_watch.c: a rank's parent, which says how the rank ended when the rank cannot say it itself: killed, or gone in
 * the middle of its script.
 *
 * mpirun and srun start `perilune run`; it forks, the child becomes the rank, and the parent waits. It runs on the
 * rank's machine, so it knows the rank's process, signal, memory, and whether the kernel's out-of-memory killer has
 * struck, under every launcher.
 */
#include "host_internal.h"

#include <errno.h>
#include <lauxlib.h>
#include <lua.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/** What a rank tells its watcher, in memory that they share; NULL: this process is not watched. */
static atomic_int *settled; /* 1: the rank ends by itself, and has said what there was to say */

static bool told; /* the launcher reads this rank's standard error, and takes out the notes that are for itself: see
                     note */

static const int passed_on[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/** How often the out-of-memory killer has struck on this machine; -1: unknown. */
static long long oom_kills(void)
{
    FILE *file = fopen("/proc/vmstat", "r");
    long long count = -1;
    char line[128];
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "oom_kill %lld", &count) == 1) break;
    if (file) fclose(file);
    return count;
}

/** What may be behind a SIGKILL. */
static void suspect(char *text, size_t len, long long before, long long now)
{
    if (before >= 0 && now > before)
        snprintf(text, len,
                 "; the kernel's out-of-memory killer has struck %lld time%s on this machine meanwhile (see dmesg)",
                 now - before, now - before == 1 ? "" : "s");
    else if (before >= 0) snprintf(text, len, "; not by the out-of-memory killer, which has not struck meanwhile");
    else
        snprintf(text, len,
                 "; when memory runs out, the kernel's out-of-memory killer does so (see dmesg on this machine)");
}

static const char *name_of(int number)
{
    static const char *const names[] = {
        [SIGHUP] = "SIGHUP",   [SIGINT] = "SIGINT",   [SIGQUIT] = "SIGQUIT", [SIGILL] = "SIGILL",
        [SIGABRT] = "SIGABRT", [SIGBUS] = "SIGBUS",   [SIGFPE] = "SIGFPE",   [SIGKILL] = "SIGKILL",
        [SIGSEGV] = "SIGSEGV", [SIGPIPE] = "SIGPIPE", [SIGALRM] = "SIGALRM", [SIGTERM] = "SIGTERM",
        [SIGXCPU] = "SIGXCPU"};
    bool known = number > 0 && number < (int)(sizeof names / sizeof *names) && names[number];
    return known ? names[number] : strsignal(number);
}

/** Name the rank that has ended and how. */
static void report(long long rank, pid_t child, int status, const struct rusage *usage, double lived,
                   long long oom_before)
{
    char host[256] = "", how[256], used[64] = "";
    gethostname(host, sizeof host - 1);
    if (WIFSIGNALED(status)) {
        char why[160] = "";
        if (WTERMSIG(status) == SIGKILL) suspect(why, sizeof why, oom_before, oom_kills());
        snprintf(how, sizeof how, "was killed by signal %d (%s)%s", WTERMSIG(status), name_of(WTERMSIG(status)), why);
    } else
        snprintf(how, sizeof how, "ended with exit code %d in the middle of its script, without leaving the world",
                 WEXITSTATUS(status));
    bool large = usage->ru_maxrss >= 1 << 20; /* KiB */
    if (usage->ru_maxrss > 0)
        snprintf(used, sizeof used, ", at most %.4g %s of memory",
                 (double)usage->ru_maxrss / (large ? 1 << 20 : 1 << 10), large ? "GiB" : "MiB");
    char line[1024];
    int n = snprintf(line, sizeof line, "perilune: rank %lld (process %lld on %s, %.1f s old%s) %s\n", rank,
                     (long long)child, host, lived, used, how);
    if (write(STDERR_FILENO, line, (size_t)n) < 0) return; /* nobody to tell */
}

/** A note for the launcher (launch/job.lua) in the rank's standard error, which reaches it from every machine:
 *  "\x1ekind rank what\n". */
static void note(const char *kind, long long rank, long long number, const char *text)
{
    char line[512];
    int n = snprintf(line, sizeof line, "\x1e%s %lld %lld %s\n", kind, rank, number, text);
    if (told && write(STDERR_FILENO, line, (size_t)n) < 0) told = false;
}

/** End as the rank has ended; a rank that has left the others alone ends as a failure. */
static _Noreturn void end_alike(long long rank, int status, bool in_order)
{
    int code = WIFSIGNALED(status)                     ? 128 + WTERMSIG(status)
               : WEXITSTATUS(status) == 0 && !in_order ? 1
                                                       : WEXITSTATUS(status);
    note("end", rank, code, "");
    if (WIFSIGNALED(status)) {
        struct rlimit none = {0, 0};
        sigset_t all;
        setrlimit(RLIMIT_CORE, &none); /* the rank's own core is the one to keep */
        signal(WTERMSIG(status), SIG_DFL);
        sigfillset(&all);
        sigprocmask(SIG_UNBLOCK, &all, NULL);
        raise(WTERMSIG(status));
    }
    _exit(code);
}

/** Wait so many milliseconds; true, and at once, if the launcher tells this rank to end meanwhile. */
static bool told_to_end(pid_t launcher, const sigset_t *set, int ms)
{
    const double until = seconds() + ms * 1e-3;
    for (double left; (left = until - seconds()) > 0;) {
        siginfo_t info = {0};
        const int number = sigtimedwait(set, &info, &(struct timespec){.tv_nsec = (long)(left * 1e9)});
        if (number > 0 && number != SIGCHLD && number != SIGUSR1 && number != SIGUSR2 && info.si_pid == launcher)
            return true;
    }
    return false;
}

/** The watcher's life: pass signals on until the rank has ended. Signals of @set are blocked. */
static _Noreturn void attend(long long rank, pid_t launcher, pid_t child, const sigset_t *set)
{
    double began = seconds();
    long long oom = oom_kills();
    bool ordered = false; /* whoever started this rank has told it to end: that is no news */
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    prctl(PR_SET_NAME, "perilune-watch", 0, 0, 0);
    const char *job = secure_getenv("PMIX_NAMESPACE");
    note("job", rank, 0, job ? job : "");
    note("start", rank, child, host);
    for (;;) {
        siginfo_t info = {0};
        int number = sigtimedwait(set, &info, &(struct timespec){.tv_sec = 1});
        if (getppid() != launcher) { /* mpirun was killed: nobody will end this rank */
            kill(child, SIGKILL);
            _exit(128 + SIGKILL);
        }
        if (number < 0) continue;
        if (number != SIGCHLD) {
            bool fatal = number != SIGUSR1 && number != SIGUSR2, order = info.si_pid == launcher;
            ordered = ordered || (fatal && order);
            /* the launcher signals the group of processes, thus the rank too */
            if (fatal || !order) kill(child, number);
            continue;
        }
        int status = 0;
        struct rusage usage = {0};
        if (wait4(child, &status, WNOHANG, &usage) != child) continue;
        bool in_order = atomic_load(settled) && !WIFSIGNALED(status);
        /* srun ends all processes of a step by SIGKILL, one by one; and where a rank has died, MPI_Init ends the others
         * by exit(1), whose watchers must not speak before its own. */
        if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) usleep(200000);
        else if (!in_order && WIFEXITED(status)) ordered = told_to_end(launcher, set, 500) || ordered;
        if (!in_order && !ordered) {
            report(rank, child, status, &usage, seconds() - began, oom);
            /* somebody asked this rank to stop, and its script did not heed it yet */
            if (WIFSIGNALED(status)) note("quit", rank, WTERMSIG(status), "");
        }
        end_alike(rank, status, in_order);
    }
}

/** watch(rank): returns in a child process that is the rank from here on; this process watches it and ends as it
 *  does. */
static int watch(lua_State *L)
{
    long long rank = luaL_checkinteger(L, 1);
    void *page = mmap(NULL, sizeof *settled, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return luaL_error(L, "no memory for a page that a rank shares with its watcher: %s", strerror(errno));
    settled = page;
    told = secure_getenv("PERI_LAUNCHER") != NULL;
    unsetenv("PERI_LAUNCHER"); /* what the script starts is no rank */
    sigset_t set, before;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    for (size_t i = 0; i < sizeof passed_on / sizeof *passed_on; i++) sigaddset(&set, passed_on[i]);
    sigprocmask(SIG_BLOCK, &set, &before);
    fflush(NULL);
    pid_t launcher = getppid(), parent = getpid(), child = fork();
    if (child > 0) attend(rank, launcher, child, &set);
    int problem = errno;
    sigprocmask(SIG_SETMASK, &before, NULL);
    if (child < 0) return luaL_error(L, "rank %d cannot be started: fork: %s", (int)rank, strerror(problem));
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (getppid() != parent) _exit(1); /* it died before it could be followed */
    return 0;
}

/** settled(): this rank ends by itself now, and has said why. */
static int settle(lua_State *L)
{
    (void)L;
    if (settled) atomic_store(settled, 1);
    return 0;
}

static void interrupted(int number)
{
    static const char line[] = "perilune: interrupted (Ctrl-C)\n";
    ssize_t told_user = write(STDERR_FILENO, line, sizeof line - 1);
    (void)told_user; /* nobody to tell */
    _exit(128 + number);
}

/** interruptible(): a rank on its own, which nobody watches, says that Ctrl-C ends it. Where SIGINT is ignored (nohup)
 *  it stays so. */
static int interruptible(lua_State *L)
{
    struct sigaction now;
    (void)L;
    if (sigaction(SIGINT, NULL, &now) == 0 && now.sa_handler == SIG_DFL) signal(SIGINT, interrupted);
    return 0;
}

void peri__watch_register(lua_State *L)
{
    static const luaL_Reg functions[] = {
        {"watch", watch}, {"settled", settle}, {"interruptible", interruptible}, {NULL, NULL}};
    luaL_register(L, NULL, functions);
}
