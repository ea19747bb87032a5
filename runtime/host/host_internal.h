/* SPDX-License-Identifier: Apache-2.0
 *
 * host/host_internal.h (L7): what the files of the launcher, Lua in other programs (guest/), and the generated pack of
 * Lua files agree on.
 */
#ifndef PERI_HOST_INTERNAL_H
#define PERI_HOST_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>

/** One Lua module inside the launcher. */
typedef struct peri__packed {
    const char *name;  /* "perilune.util"; NULL ends the list */
    const char *code;  /* LuaJIT bytecode */
    size_t size;       /* bytes of code */
} peri__packed;

/** All modules, made by runtime/gen/pack.lua. */
extern const peri__packed peri__pack[];

struct lua_State;

/** Open Lua's libraries in a new state. Of a program that runs with other rights than its caller has (AT_SECURE)
 *  `require` heeds neither the caller's environment nor its current folder. */
void peri__open_libraries(struct lua_State *L);

/** Let `require` find the packed modules: after package.preload, or, when a developer's path is set (PERI_LUA_PATH),
 *  after the files of that path. @environment: stack index of the table that is the modules' environment; 0: the
 *  globals. */
void peri__packed_install(struct lua_State *L, int environment);

/** Put functions into the module perilune.launcher, the table on top of the stack: watch, settled (rank_watch.c);
 *  files, start, next, signal, children, sweep (job.c). */
void peri__watch_register(struct lua_State *L);
void peri__job_register(struct lua_State *L);
/** stops, stops_early, stop_asked (stop.c). */
void peri__stop_register(struct lua_State *L);
/** libraries (libraries.c). */
void peri__libraries_register(struct lua_State *L);
/** interactive, raw, key, columns, interrupts (terminal.c). */
void peri__terminal_register(struct lua_State *L);

#endif
