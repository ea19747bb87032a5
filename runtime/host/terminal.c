/* SPDX-License-Identifier: Apache-2.0
 *
 * terminal.c: what an interactive session needs of the terminal: keys one by one, its width, and Ctrl-C while a line
 * runs; and names of files, for completion.
 */
#include "host_internal.h"

#include <dirent.h>
#include <lauxlib.h>
#include <lua.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

static struct termios usual; /* The terminal's settings before raw(true). */
static bool is_raw;

static void restore(void)
{
    if (is_raw) tcsetattr(STDIN_FILENO, TCSADRAIN, &usual);
    is_raw = false;
}

/** interactive(): is there a person at the standard input and output? */
static int interactive(lua_State *L)
{
    lua_pushboolean(L, isatty(STDIN_FILENO) && isatty(STDOUT_FILENO));
    return 1;
}

/** raw(on): keys arrive one by one, and are not shown (true), or lines arrive as the terminal usually gives them
 *  (false). Returns whether it is done. The settings come back when the process exits. */
static int set_raw(lua_State *L)
{
    static bool registered;
    if (!lua_toboolean(L, 1)) restore();
    else if (!is_raw) {
        if (tcgetattr(STDIN_FILENO, &usual) != 0) return 0;
        struct termios keys = usual;
        keys.c_iflag &= ~(tcflag_t)(BRKINT | ICRNL | INPCK | ISTRIP | IXON);
        keys.c_lflag &= ~(tcflag_t)(ECHO | ICANON | IEXTEN | ISIG);
        keys.c_cc[VMIN] = 1;
        keys.c_cc[VTIME] = 0;
        if (!registered) registered = atexit(restore) == 0;
        is_raw = tcsetattr(STDIN_FILENO, TCSADRAIN, &keys) == 0;
        if (!is_raw) return 0;
    }
    lua_pushboolean(L, true);
    return 1;
}

/** key(milliseconds): the next byte of the standard input; nil: none within that time (without an argument: it has
 *  ended). */
static int key(lua_State *L)
{
    struct pollfd in = {.fd = STDIN_FILENO, .events = POLLIN};
    unsigned char byte;
    if (!lua_isnoneornil(L, 1) && poll(&in, 1, (int)luaL_checkinteger(L, 1)) != 1) return 0;
    if (read(STDIN_FILENO, &byte, 1) != 1) return 0;
    lua_pushinteger(L, byte);
    return 1;
}

/** columns(): of the terminal; 80 where that is not known. */
static int columns(lua_State *L)
{
    struct winsize size;
    const bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    lua_pushinteger(L, known ? size.ws_col : 80);
    return 1;
}

/** names(folder): the names in a folder, in any order, those of folders with a slash behind; none where it cannot be
 *  read. */
static int names_in(lua_State *L)
{
    DIR *folder = opendir(luaL_checkstring(L, 1));
    int n = 0;
    lua_newtable(L);
    for (struct dirent *e; folder && (e = readdir(folder));) {
        struct stat s;
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        const bool is_folder = fstatat(dirfd(folder), e->d_name, &s, 0) == 0 && S_ISDIR(s.st_mode);
        lua_pushfstring(L, "%s%s", e->d_name, is_folder ? "/" : "");
        lua_rawseti(L, -2, ++n);
    }
    if (folder) closedir(folder);
    return 1;
}

static lua_State *running; /* The state whose line runs, while Ctrl-C is to stop it. */

static void stop_line(lua_State *L, lua_Debug *unused)
{
    (void)unused;
    lua_sethook(L, NULL, 0, 0);
    lua_pushliteral(L, "stopped by Ctrl-C"); /* Without a position: a line of the library would look like its fault. */
    lua_error(L);
}

/** Stop at the next call or instruction that is not compiled. A second Ctrl-C ends the process: compiled loops and C do
 *  not look. */
static void on_interrupt(int number)
{
    signal(number, SIG_DFL);
    if (running) lua_sethook(running, stop_line, LUA_MASKCALL | LUA_MASKRET | LUA_MASKCOUNT, 1);
}

/** interrupts(on): from now on Ctrl-C is an error in the running Lua code (true), or ends the process as usual
 *  (false). */
static int interrupts(lua_State *L)
{
    running = lua_toboolean(L, 1) ? L : NULL;
    signal(SIGINT, running ? on_interrupt : SIG_DFL);
    return 0;
}

void peri__terminal_register(lua_State *L)
{
    static const luaL_Reg functions[] = {{"interactive", interactive}, {"raw", set_raw},           {"key", key},
                                         {"columns", columns},         {"interrupts", interrupts}, {"names", names_in},
                                         {NULL, NULL}};
    luaL_register(L, NULL, functions);
}
