/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/lua.h: Lua inside a C program: models, plans and loops are scripts, data and tables are the program's.
 *
 * The first call loads libperilune_lua.so, which is installed beside the other plugins; it holds all of Perilune's Lua
 * modules and needs LuaJIT's shared library. Programs that never call this header load neither.
 *
 * A *state* is one LuaJIT. It shares nothing with other states but what it is given, so a program has one for each
 * thread that runs scripts, and gives them the same tensors and tables.
 *
 * Threads: a state (peri_lua) with all its objects (peri_lua_object) is called by one thread at a time: a second one is
 * told so (PERI_EINVAL), as is a call from inside another call of the same state. Any thread may release them, at any
 * time.
 *
 * A thread that runs scripts needs 256 KiB of stack. Endless recursion of functions of Lua is an error, whatever the
 * stack ("stack overflow"). Recursion through functions of C that call back (string.gsub with a function, table.sort,
 * coroutines that start coroutines) takes the thread's own stack at each level, which LuaJIT does not watch: endless,
 * it ends the process by a signal, as it does in luajit itself. Run scripts that are not yours in a process of theirs.
 *
 * Errors of scripts are statuses, as those of C are: the status of what failed (PERI_EINVAL for errors that a script
 * raised itself), and in peri_error_message the text with the script's file and line; peri_lua_error has the whole
 * text.
 *
 * A script model.lua, and how a program calls it:
 *
 *   local M = {}
 *   function M.score(x) return (x * x):sum() end
 *   return M
 *
 *   peri_lua_value in = {.kind = PERI_LUA_TENSOR, .tensor = x}, out;
 *   peri_lua_load(lua, "model.lua", NULL, 0, &model);
 *   peri_lua_call(model, "score", &in, 1, &out, 1);
 */
#ifndef PERILUNE_LUA_H
#define PERILUNE_LUA_H

#include <perilune/embed.h>
#include <perilune/jagged.h>
#include <perilune/tensor.h>

/** A state of Lua. */
typedef struct peri_lua peri_lua;
/** Something of a state that the program keeps: a table, a function, an object. */
typedef struct peri_lua_object peri_lua_object;

/** What a value is. */
enum {
    PERI_LUA_NIL = 0,
    PERI_LUA_BOOL = 1,    /* integer: 0 or 1 */
    PERI_LUA_NUMBER = 2,  /* number */
    PERI_LUA_INTEGER = 3, /* integer; from 2^53 on scripts have a 64-bit integer, below a number. Results: 64-bit
                             integers only */
    PERI_LUA_TEXT = 4,    /* text and length; a result ends with a zero byte, which length does not count */
    PERI_LUA_TENSOR = 5,  /* tensor, and so on */
    PERI_LUA_JT = 6,
    PERI_LUA_KJT = 7,
    PERI_LUA_KT = 8,
    PERI_LUA_TBE = 9,     /* a table batch: peri.EmbeddingBagCollection { table_batch = ... } looks rows up in it */
    PERI_LUA_OBJECT = 10, /* of the same state */
    PERI_LUA_KIND_COUNT = 11
};

/** A value that goes into a call, or comes out of one: the members that its kind names, zeros in all others. Handles
 *  that go in are retained by the script, so the program may release its own; those that come out are new. Memory is
 *  not copied on either way. */
typedef struct peri_lua_value {
    int32_t kind;   /* PERI_LUA_* */
    int32_t unused; /* 0 */
    int64_t length; /* bytes of a text; of one that goes in, 0: up to its first zero byte */
    double number;
    int64_t integer;
    const char *text; /* of a result: borrowed, valid until the next call of the state */
    peri_tensor *tensor;
    peri_jt *jt;
    peri_kjt *kjt;
    peri_kt *kt;
    peri_tbe *tbe;
    peri_lua_object *object;
} peri_lua_value;

/** How a state is made. Zeros are the defaults. */
typedef struct peri_lua_config {
    int64_t size;     /* sizeof(peri_lua_config) */
    void *state;      /* a lua_State of the program's own, which stays its own; NULL: a new one. It has to be of the
                         LuaJIT that this process has as a shared library, or that the program exports (-rdynamic):
                         PERI_EUNSUPPORTED if it is of another */
    int32_t narrow;   /* not 0: scripts of a new state have neither os, io, debug nor ffi, and cannot load C libraries.
                         That keeps scripts from what they should not need; it is no wall, since perilune.ffi reaches
                         all of C */
    int32_t trace;    /* not 0: the texts of errors end with the stack of where they were raised */
    const char *path; /* where scripts' own modules are, as in Lua's package.path ("/etc/models/?.lua"); NULL: as LuaJIT
                         has it in a new state, or as the program has set it */
} peri_lua_config;

/** A state with Perilune's modules (`require "perilune"`) and, unless it is the program's own, Lua's libraries. @config
 *  NULL: defaults.
 *  PERI_ENOTFOUND: there is no libperilune_lua.so, or no LuaJIT; the message says which. A program that is linked fully
 *  statically has no Lua (PERI_ENOTFOUND). One that holds libperilune.a links all of it (-Wl,--whole-archive) and
 *  exports its functions (-rdynamic). @out new. */
PERI_API peri_status peri_lua_new(const peri_lua_config *config, peri_lua **out);
/** Give up the state, which ends when its objects are released, too; NULL is fine. One of the program's own stays open:
 *  release it and its objects before lua_close, in the thread that uses it. */
PERI_API void peri_lua_release(peri_lua *lua);
/** Run the script file @path with @n values @in as its arguments (`...`). @out new: what it returned; a table of
 *  functions, mostly. Text only: bytecode is refused. PERI_EINVAL if it returns nothing. Collective if the script
 *  is. */
PERI_API peri_status peri_lua_load(peri_lua *lua, const char *path, const peri_lua_value *in, int32_t n,
                                   peri_lua_object **out);
/** The same of @length bytes of @text; @name stands for the file in messages. @out new. */
PERI_API peri_status peri_lua_load_text(peri_lua *lua, const char *name, const char *text, int64_t length,
                                        const peri_lua_value *in, int32_t n, peri_lua_object **out);
/** Call a function of @object with @n_in values, and take its first @n_out results; missing ones are PERI_LUA_NIL.
 *  @method: "score" calls object.score(...), ":forward" calls object:forward(...), NULL the object itself. What the
 *  script makes and does not return or keep is released at its end (peri.keep keeps). On failure @out is untouched.
 *  Collective if the script is. */
PERI_API peri_status peri_lua_call(peri_lua_object *object, const char *method, const peri_lua_value *in, int32_t n_in,
                                   peri_lua_value *out, int32_t n_out);
/** The whole text of the last failure of this state, with its stack if the state has `trace`; "" if none. Borrowed,
 *  valid until the next call of the state. */
PERI_API const char *peri_lua_error(const peri_lua *lua);
/** Collect what scripts have given up, and give its memory back. */
PERI_API peri_status peri_lua_collect(peri_lua *lua);
/** Give up an object; NULL is fine. The state forgets it at its next call. */
PERI_API void peri_lua_object_release(peri_lua_object *object);
/** Give up what @n results hold, and make them PERI_LUA_NIL; NULL is fine. Never fails. */
PERI_API void peri_lua_values_release(peri_lua_value *values, int32_t n);

#endif
