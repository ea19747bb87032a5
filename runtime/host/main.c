/* SPDX-License-Identifier: Apache-2.0
 *
 * main.c: the launcher `perilune`: LuaJIT, libperilune and all of Perilune's Lua files in one program. It opens a Lua
 * state, lets `require` find the packed modules, and calls lua/perilune/cli.lua, which does everything else.
 *
 * PERI_LUA_PATH (a folder, or patterns with '?') makes modules from files go before the packed ones: for work on
 * Perilune itself.
 */
#include "../base/base_internal.h"
#include "host_internal.h"

#include <errno.h>
#include <lauxlib.h>
#include <lua.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdio_ext.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* -- the module perilune.launcher: what only the launcher can do --------------------------------------------------- */

/** cpus(): processors that this process may use. */
static int cpus(lua_State *L)
{
    cpu_set_t set;
    lua_pushinteger(L, sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1);
    return 1;
}

/** memory(): MiB that are available to this process. */
static int memory(lua_State *L)
{
    int64_t available;
    (void)peri_host_memory(&available);
    lua_pushnumber(L, (lua_Number)available / (1 << 20));
    return 1;
}

/** seconds(): of a clock that nobody sets, from some moment on. */
static int seconds(lua_State *L)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    lua_pushnumber(L, (lua_Number)t.tv_sec + (lua_Number)t.tv_nsec * 1e-9);
    return 1;
}

/** root(): does it run as root? */
static int root(lua_State *L)
{
    lua_pushboolean(L, geteuid() == 0);
    return 1;
}

/** terminal(): does somebody look at the standard output? */
static int terminal(lua_State *L)
{
    lua_pushboolean(L, isatty(STDOUT_FILENO));
    return 1;
}

/** setenv(name, value) for this process and what it becomes. */
static int set_variable(lua_State *L)
{
    if (setenv(luaL_checkstring(L, 1), luaL_checkstring(L, 2), 1) != 0)
        return luaL_error(L, "setenv: %s", strerror(errno));
    return 0;
}

/** become(program, words): this process goes on as another program. Returns why it does not. */
static int become(lua_State *L)
{
    const char *words[1024] = {luaL_checkstring(L, 1)};
    size_t n = lua_objlen(L, 2);
    if (n > 1022) return luaL_error(L, "become: %d words, at most 1022", (int)n);
    for (size_t i = 1; i <= n; i++) {
        lua_rawgeti(L, 2, (int)i);
        words[i] = luaL_checkstring(L, -1); /* the table keeps it */
        lua_pop(L, 1);
    }
    execv(words[0], (char *const *)words);
    lua_pushstring(L, strerror(errno));
    return 1;
}

/** peer_memory(): may processes of one user read each other's memory (process_vm_readv)? Containers and hardened
 *  kernels forbid it; Open MPI then complains unless it is told. */
static int peer_memory(lua_State *L)
{
    char from = 1, to = 0;
    struct iovec local = {&to, 1}, remote = {&from, 1};
    bool allowed = process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == 1;
    FILE *yama = allowed ? fopen("/proc/sys/kernel/yama/ptrace_scope", "r") : NULL;
    if (yama) {
        allowed = fgetc(yama) == '0'; /* 1 and more: only parents may */
        fclose(yama);
    }
    lua_pushboolean(L, allowed);
    return 1;
}

static int prepare(lua_State *L);

static int open_launcher(lua_State *L)
{
    static const luaL_Reg functions[] = {{"cpus", cpus}, {"memory", memory}, {"seconds", seconds}, {"root", root},
                                         {"terminal", terminal}, {"setenv", set_variable}, {"become", become},
                                         {"peer_memory", peer_memory}, {NULL, NULL}};
    lua_newtable(L);
    luaL_register(L, NULL, functions);
    peri__watch_register(L);
    peri__job_register(L);
    peri__stop_register(L);
    peri__libraries_register(L);
    peri__terminal_register(L);
    char *path = realpath("/proc/self/exe", NULL);
    lua_pushstring(L, path ? path : "perilune");
    lua_setfield(L, -2, "program");
    free(path);
    lua_pushlightuserdata(L, (void *)(uintptr_t)prepare); /* a lua_CFunction for another state */
    lua_setfield(L, -2, "prepare");
    return 1;
}

/** What every Lua state of the launcher has: the main one, and those of threads (pipeline/loading.lua). */
static int prepare(lua_State *L)
{
    peri__open_libraries(L);
    peri__packed_install(L, 0);
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "preload");
    lua_pushcfunction(L, open_launcher);
    lua_setfield(L, -2, "perilune.launcher");
    lua_pop(L, 2);
    return 0;
}

/* -- main ---------------------------------------------------------------------------------------------------------- */

/** Everything that can fail, in a protected call: argc and argv as userdata; returns the exit code. */
static int protected_main(lua_State *L)
{
    int argc = (int)lua_tointeger(L, 1);
    char **argv = lua_touserdata(L, 2);
    prepare(L);
    lua_getglobal(L, "require");
    lua_pushliteral(L, "perilune.cli");
    lua_call(L, 1, 1);
    lua_getfield(L, -1, "main");
    lua_createtable(L, argc, 0);
    for (int i = 0; i < argc; i++) {
        lua_pushstring(L, argv[i]);
        lua_rawseti(L, -2, i);
    }
    lua_call(L, 1, 1);
    return 1;
}

static int add_traceback(lua_State *L)
{
    if (lua_isstring(L, 1)) luaL_traceback(L, L, lua_tostring(L, 1), 1);
    return 1;
}

/** A step makes thousands of small blocks and frees them all at its end. glibc would give their pages back to the
 *  system each time, and the next step would take them anew: a third of what functions of few numbers cost. It
 *  keeps twice as much as the largest block that it has mapped and freed (mallopt(3), M_MMAP_THRESHOLD), which is
 *  this one: no page of it is touched. */
static void keep_small_pages(void)
{
    enum { BLOCK = 4 << 20 };
    void *volatile block = malloc(BLOCK);
    free(block);
}

/** A program that runs with other rights than its caller has (AT_SECURE) forgets its environment, which is the
 *  caller's: it names files with code, for this program, libraries such as MPI's, and programs that it starts. */
static void forget_environment(void)
{
    clearenv();
    setenv("PATH", "/usr/local/bin:/usr/bin:/bin", 1);
}

/** The last thing that a process does: what could not be written to its standard output (a full disk) makes its exit
 *  code 74 (EX_IOERR), where it would be 0. A standard output that was closed from the start and never used is none. */
static void close_output(int code, void *unused)
{
    (void)unused;
    const bool pending = __fpending(stdout) != 0, before = ferror(stdout) != 0;
    errno = 0;
    const bool now = fflush(stdout) != 0;
    if (!before && !(now && (pending || errno != EBADF))) return;
    fprintf(stderr, "perilune: standard output could not be written%s%s\n", errno != 0 ? ": " : "",
            errno != 0 ? strerror(errno) : "");
    if (code == 0) _exit(74);
}

int main(int argc, char **argv)
{
    on_exit(close_output, NULL);
    peri__streams_hold();
    keep_small_pages();
    if (getauxval(AT_SECURE) != 0) forget_environment();
    lua_State *L = luaL_newstate();
    signal(SIGXFSZ, SIG_IGN); /* a file that would be longer than `ulimit -f` allows is an error with words, not the
                                 process's end */
    if (!L) {
        fputs("perilune: no memory for a Lua state\n", stderr);
        return 70;
    }
    lua_pushcfunction(L, add_traceback);
    lua_pushcfunction(L, protected_main);
    lua_pushinteger(L, argc);
    lua_pushlightuserdata(L, argv);
    int code = 70; /* EX_SOFTWARE: cli.lua handles all errors but its own */
    if (lua_pcall(L, 2, 1, 1) == 0) code = (int)lua_tointeger(L, -1);
    else fprintf(stderr, "perilune: %s\n", lua_tostring(L, -1) ? lua_tostring(L, -1) : "an error without a message");
    lua_close(L);
    return code;
}
