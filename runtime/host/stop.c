/* SPDX-License-Identifier: Apache-2.0
 *
 * stop.c: signals that ask a rank to stop, once its script has said that it heeds them (lua/perilune/stop.lua). The
 * first one is noted for the script, and a deadline begins; a Ctrl-C after it ends the process.
 *
 * Ranks under `perilune run -n` do not get the launcher's signals themselves. It has mpirun pass SIGUSR1 on for
 * SIGTERM, and SIGUSR2 for SIGINT, which all versions of Open MPI do, and keeps the deadline itself.
 */
#include "host_internal.h"
#include <perilune/base.h>

#include <errno.h>
#include <lauxlib.h>
#include <lua.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <sysexits.h>
#include <unistd.h>

/** Signals by the numbers that stop.lua has for them, from 1. */
static const int asking[] = {0, SIGTERM, SIGINT, SIGUSR1, SIGUSR2};
enum { ASK_TERM = 1, ASK_INT, ASK_COUNT = sizeof asking / sizeof *asking };

static struct {
    atomic_int why;               /* which of `asking` came first; 0: none */
    atomic_int_least64_t since_ns;
    double grace;                 /* seconds */
    bool launched;                /* SIGUSR1 and SIGUSR2 are the launcher's */
} asked;

static void tell(const char *line)
{
    ssize_t told_user = write(STDERR_FILENO, line, strlen(line));
    (void)told_user; /* nobody to tell */
}

/** As if the signal had found no handler. */
static void end_by(int number)
{
    sigset_t all;
    signal(number, SIG_DFL);
    sigfillset(&all);
    sigprocmask(SIG_UNBLOCK, &all, NULL);
    raise(number);
}

static void overdue(int number)
{
    (void)number;
    tell("perilune: the script has not stopped within its grace time (--grace): it is ended\n");
    end_by(asking[atomic_load(&asked.why)]);
}

static void heard(int number)
{
    int saved = errno, why = 1, none = 0;
    const bool passed_on = asked.launched && (number == SIGUSR1 || number == SIGUSR2);
    while (asking[why] != number) why++;
    if (passed_on) why = number == SIGUSR1 ? ASK_TERM : ASK_INT;
    if (atomic_load(&asked.why) == 0) {
        atomic_store(&asked.since_ns, peri_time_ns());
        atomic_compare_exchange_strong(&asked.why, &none, why);
        struct itimerval once = {
            .it_value = {(time_t)asked.grace, (suseconds_t)((asked.grace - (double)(time_t)asked.grace) * 1e6)}};
        if (!passed_on) setitimer(ITIMER_REAL, &once, NULL);
    } else if (number == SIGINT && !asked.launched) {
        tell("perilune: interrupted (Ctrl-C, while it was stopping)\n");
        _exit(128 + SIGINT);
    }
    errno = saved;
}

/** Before `stops`: nothing was learned that is not saved. */
static void early(int number)
{
    (void)number;
    tell("perilune: asked to stop before the script has a Saver: it can be started again\n");
    _exit(EX_TEMPFAIL);
}

/** stops_early(): until `stops`, SIGTERM and SIGINT end the process with the exit code that says "start me again".
 *  Signals that are ignored (nohup) stay so. */
static int stops_early(lua_State *L)
{
    (void)L;
    struct sigaction now, act = {.sa_handler = early};
    for (int why = ASK_TERM; why <= ASK_INT; why++)
        if (sigaction(asking[why], NULL, &now) == 0 && now.sa_handler != SIG_IGN) sigaction(asking[why], &act, NULL);
    return 0;
}

/** stops(grace, launched, more): from now on SIGTERM, SIGINT and the signals of the list @more (numbers) ask to stop,
 *  and end nothing for
 *  @grace seconds. launched: by the launcher. Signals that are ignored (nohup) stay so. */
static int stops(lua_State *L)
{
    bool wanted[ASK_COUNT] = {[ASK_TERM] = true, [ASK_INT] = true};
    struct sigaction now, act = {.sa_handler = heard, .sa_flags = SA_RESTART}, late = {.sa_handler = overdue};
    asked.grace = luaL_checknumber(L, 1);
    asked.launched = lua_toboolean(L, 2);
    sigfillset(&act.sa_mask);
    for (int why = 1; why < ASK_COUNT; why++) {
        wanted[why] = wanted[why] || asked.launched;
        for (int i = 1; i <= (int)lua_objlen(L, 3); i++) {
            lua_rawgeti(L, 3, i);
            wanted[why] = wanted[why] || lua_tointeger(L, -1) == asking[why];
            lua_pop(L, 1);
        }
        if (wanted[why] && sigaction(asking[why], NULL, &now) == 0 && now.sa_handler != SIG_IGN)
            sigaction(asking[why], &act, NULL);
    }
    sigaction(SIGALRM, &late, NULL);
    return 0;
}

/** stop_asked(): which signal has asked, by the numbers of stop.lua, and how many seconds ago; nil: none. */
static int stop_asked(lua_State *L)
{
    int why = atomic_load(&asked.why);
    if (!why) return 0;
    lua_pushinteger(L, why);
    lua_pushnumber(L, (lua_Number)(peri_time_ns() - atomic_load(&asked.since_ns)) * 1e-9);
    return 2;
}

void peri__stop_register(lua_State *L)
{
    static const luaL_Reg functions[] = {
        {"stops", stops}, {"stops_early", stops_early}, {"stop_asked", stop_asked}, {NULL, NULL}};
    luaL_register(L, NULL, functions);
}
