/* SPDX-License-Identifier: Apache-2.0
 *
 * luajit.c: libperilune_lua.so: a LuaJIT with Perilune's modules, for runtime/host/lua.c. It pushes the program's
 * values, and lua/perilune/ hosted.lua makes handles of them; that file says how calls look on the stack.
 */
#include "../guest.h"
#include "../host_internal.h"

#include <dlfcn.h>
#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>
#include <stdlib.h>
#include <string.h>

static const peri_plugin_host *host;

#define FAIL(status, ...) PERI_HOST_FAIL(host, (status), __VA_ARGS__)

typedef struct state {
    lua_State *L;
    int load, call, describe; /* functions of hosted.lua, in the registry */
    int results;              /* the table of the last results, which keeps their texts */
    char *error;              /* the whole text of the last failure, or NULL */
    bool own;                 /* opened here: the other one's is the program's */
} state;

/** A request for a protected call. */
typedef struct request {
    state *s;
    const peri_lua_config *config;
    const peri_guest_core *core;
    const char *path, *text, *method;
    int64_t length;
    const peri_lua_value *in;
    peri_lua_value *out;
    int32_t n_in, n_out;
    int64_t object;
    peri_status status; /* of a failure that has words already */
} request;

/* -- opening ------------------------------------------------------------------------------------------------------- */

/** Libraries that scripts may be without, and Perilune's modules need. */
static const luaL_Reg kept[] = {
    {"os", luaopen_os}, {"io", luaopen_io}, {"debug", luaopen_debug}, {"ffi", luaopen_ffi}, {NULL, NULL}};

/** Push the table of a library that scripts have (true), or open it and hide it from them. */
static bool take_library(lua_State *L, const luaL_Reg *library, bool hide)
{
    lua_getfield(L, LUA_REGISTRYINDEX, "_LOADED");
    lua_getfield(L, -1, library->name);
    const bool seen = lua_istable(L, -1);
    if (seen && !hide) return lua_remove(L, -2), true;
    lua_getglobal(L, library->name); /* what scripts have under this name stays theirs */
    if (!seen) {
        lua_pushnil(L);
        lua_setglobal(L, library->name);
        lua_pushcfunction(L, library->func);
        lua_pushstring(L, library->name);
        lua_call(L, 1, 0);
        lua_getfield(L, -3, library->name);
        lua_replace(L, -3);
    } else {
        lua_pop(L, 1);
        lua_pushnil(L);
    }
    lua_setglobal(L, library->name);
    lua_pushnil(L);
    lua_setfield(L, -3, library->name);
    lua_remove(L, -2);
    return false;
}

/** Push the environment of Perilune's modules: what scripts have, and what is hidden from them; or nil, if that is
 *  nothing. */
static void push_environment(lua_State *L, bool narrow)
{
    static const char joins[] = "local private, require = ...\n"
                                "function private.require(name)\n"
                                "  local x = rawget(private, name)\n"
                                "  if x ~= nil then return x end\n"
                                "  return require(name)\n"
                                "end\n"
                                "return setmetatable(private, { __index = _G })\n";
    bool all = true;
    lua_newtable(L);
    for (const luaL_Reg *library = kept; library->name; library++) {
        all &= take_library(L, library, narrow);
        lua_setfield(L, -2, library->name);
    }
    if (all) {
        lua_pop(L, 1);
        lua_pushnil(L);
        return;
    }
    if (luaL_loadbuffer(L, joins, sizeof joins - 1, "=perilune/guest") != 0) lua_error(L);
    lua_insert(L, -2);
    lua_getglobal(L, "require");
    lua_call(L, 2, 1);
}

/** Perilune's modules need these beside those that are kept from scripts. */
static void check_libraries(lua_State *L)
{
    static const char *const needed[] = {"package", "string", "table", "math", "bit", "jit", NULL};
    lua_getfield(L, LUA_REGISTRYINDEX, "_LOADED");
    for (const char *const *name = needed; *name; name++) {
        if (lua_istable(L, -1)) lua_getfield(L, -1, *name);
        if (!lua_istable(L, -1))
            luaL_error(L, "the state has no library '%s'; needed: base, package, string, table, math, bit, jit", *name);
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
}

static void narrow_package(lua_State *L)
{
    lua_getglobal(L, "package");
    lua_pushnil(L);
    lua_setfield(L, -2, "loadlib");
    lua_pushliteral(L, "");
    lua_setfield(L, -2, "cpath");
    lua_getfield(L, -1, "preload");
    lua_pushnil(L);
    lua_setfield(L, -2, "ffi");
    lua_pop(L, 2);
}

/** package.loaded["perilune.core"]: where library.lua finds the library, and LuaJIT for states of threads. */
static void describe_core(lua_State *L, const peri_guest_core *core)
{
    Dl_info info;
    lua_getfield(L, LUA_REGISTRYINDEX, "_LOADED");
    lua_newtable(L);
    if (core->path) {
        lua_pushstring(L, core->path);
        lua_setfield(L, -2, "path");
    }
    if (dladdr((void *)(uintptr_t)lua_pcall, &info) && info.dli_fname && strstr(info.dli_fname, ".so")) {
        lua_pushstring(L, info.dli_fname);
        lua_setfield(L, -2, "luajit");
    }
    lua_setfield(L, -2, "perilune.core");
    lua_pop(L, 1);
}

/** A reference to function @name of the module on top of the stack. */
static int function_of(lua_State *L, const char *name)
{
    lua_getfield(L, -1, name);
    return luaL_ref(L, LUA_REGISTRYINDEX);
}

static int prepare(lua_State *L)
{
    request *r = lua_touserdata(L, 1);
    const bool narrow = r->s->own && r->config->narrow;
    if (r->s->own) peri__open_libraries(L);
    check_libraries(L);
    if (r->config->path) {
        lua_getglobal(L, "package");
        lua_pushstring(L, r->config->path);
        lua_setfield(L, -2, "path");
        lua_pop(L, 1);
    }
    lua_getfield(L, LUA_REGISTRYINDEX, "perilune.guest");
    if (lua_isnil(L, -1)) { /* else this state of the program's was given to peri_lua_new before */
        push_environment(L, narrow);
        const int environment = lua_gettop(L);
        if (narrow) narrow_package(L);
        describe_core(L, r->core);
        peri__packed_install(L, environment);
        lua_pushboolean(L, 1);
        lua_setfield(L, LUA_REGISTRYINDEX, "perilune.guest");
    }
    lua_getglobal(L, "require");
    lua_pushliteral(L, "perilune.hosted");
    lua_call(L, 1, 1);
    r->s->load = function_of(L, "load");
    r->s->call = function_of(L, "call");
    r->s->describe = function_of(L, "describe");
    lua_getfield(L, -1, "trace");
    lua_pushboolean(L, r->config->trace != 0);
    lua_call(L, 1, 0);
    return 0;
}

/** Whether the program itself has the LuaJIT that is linked here: as a shared library, or exported. */
static bool program_has_ours(void)
{
    void *program = dlopen(NULL, RTLD_LAZY), *theirs = program ? dlsym(program, "lua_newstate") : NULL;
    lua_State *(*ours)(lua_Alloc, void *) = lua_newstate;
    const bool same = theirs && memcmp(&theirs, &ours, sizeof theirs) == 0;
    if (program) dlclose(program);
    return same;
}

/** Whether @L is a state of the LuaJIT that is linked here. One that the program made with an allocator of its own
 *  (lua_newstate) has nothing by which it could be known, so the program's LuaJIT is looked at instead. */
static bool is_ours(lua_State *L)
{
    if (program_has_ours()) return true;
    lua_State *fresh = luaL_newstate();
    if (!fresh) return true; /* the next call says that there is no memory */
    bool same = lua_getallocf(L, NULL) == lua_getallocf(fresh, NULL);
    if (!same) {
        lua_CFunction panic = lua_atpanic(L, NULL), usual = lua_atpanic(fresh, NULL);
        lua_atpanic(L, panic);
        same = panic == usual;
    }
    lua_close(fresh);
    return same;
}

/* -- failures ------------------------------------------------------------------------------------------------------ */

static void keep_error(state *s, const char *text)
{
    const size_t n = strlen(text) + 1;
    host->free(s->error);
    s->error = host->alloc(n);
    if (s->error) memcpy(s->error, text, n);
}

/** Whether memory was short, also where a protected call of the script, or of Perilune, passed LuaJIT's words on. */
static bool lacked_memory(lua_State *L, int code)
{
    static const char words[] = "not enough memory";
    size_t length = 0;
    const char *text = lua_type(L, -1) == LUA_TSTRING ? lua_tolstring(L, -1, &length) : NULL;
    if (code == LUA_ERRMEM) return true;
    return length >= sizeof words - 1 && strcmp(text + length - (sizeof words - 1), words) == 0;
}

/** Ask describe(error) for status and text. The error is in the slot of results. */
static int describe(lua_State *L)
{
    request *r = lua_touserdata(L, 1);
    lua_rawgeti(L, LUA_REGISTRYINDEX, r->s->describe);
    lua_rawgeti(L, LUA_REGISTRYINDEX, r->s->results);
    lua_call(L, 1, 2);
    keep_error(r->s, lua_tostring(L, -1) ? lua_tostring(L, -1) : "an error without a message");
    r->status = (peri_status)lua_tointeger(L, -2);
    return 0;
}

/** A protected call has ended with @code and has the error on top of the stack, which this takes. Nothing here may take
 *  memory of Lua outside of a protected call: where there is none, LuaJIT ends the process. */
static peri_status failed(request *r, const char *function, int code)
{
    lua_State *L = r->s->L;
    const bool memory = lacked_memory(L, code);
    const bool asks = !memory && r->s->describe != LUA_NOREF && r->s->results != LUA_NOREF && r->status >= 0;
    if (memory) keep_error(r->s, "no memory for Lua");
    else keep_error(r->s, lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : "an error without a message");
    if (r->status >= 0) r->status = memory ? PERI_ENOMEM : PERI_EINVAL;
    if (asks) {
        lua_rawseti(L, LUA_REGISTRYINDEX, r->s->results); /* the slot is there: no memory is taken */
        (void)lua_cpcall(L, describe, r);
    }
    const char *text = r->s->error ? r->s->error : "no memory for the message";
    const char *stack = strstr(text, "\nstack traceback:");
    const peri_status status =
        FAIL(r->status, "%s: %.*s", function, stack ? (int)(stack - text) : (int)strlen(text), text);
    lua_settop(L, 0);
    return status;
}

/* -- values -------------------------------------------------------------------------------------------------------- */

/** Two values on the stack: the kind of a handle, or 0, and the value, or the handle's pointer. */
static void push_value(lua_State *L, const peri_lua_value *v)
{
    const bool handle = (v->kind >= PERI_LUA_TENSOR && v->kind <= PERI_LUA_TBE) || v->kind == PERI_LUA_INTEGER;
    lua_pushinteger(L, handle ? v->kind : 0);
    switch (v->kind) {
    case PERI_LUA_NIL: lua_pushnil(L); break;
    case PERI_LUA_BOOL: lua_pushboolean(L, v->integer != 0); break;
    case PERI_LUA_NUMBER: lua_pushnumber(L, v->number); break;
    case PERI_LUA_INTEGER: lua_pushlightuserdata(L, (void *)(uintptr_t)&v->integer); break;
    case PERI_LUA_TEXT: lua_pushlstring(L, v->text, (size_t)v->length); break;
    case PERI_LUA_OBJECT: lua_rawgeti(L, LUA_REGISTRYINDEX, (int)v->integer); break;
    case PERI_LUA_TENSOR: lua_pushlightuserdata(L, v->tensor); break;
    case PERI_LUA_JT: lua_pushlightuserdata(L, v->jt); break;
    case PERI_LUA_KJT: lua_pushlightuserdata(L, v->kjt); break;
    case PERI_LUA_KT: lua_pushlightuserdata(L, v->kt); break;
    default: lua_pushlightuserdata(L, v->tbe); break;
    }
}

/** The value on top of the stack, unless `slot` has a handle; it is popped. */
static void take_value(lua_State *L, const int64_t slot[2], peri_lua_value *v)
{
    *v = (peri_lua_value){0};
    if (slot[0] != 0) {
        void *pointer = (void *)(intptr_t)slot[1];
        v->kind = (int32_t)slot[0];
        switch (v->kind) {
        case PERI_LUA_TENSOR: v->tensor = pointer; break;
        case PERI_LUA_JT: v->jt = pointer; break;
        case PERI_LUA_KJT: v->kjt = pointer; break;
        case PERI_LUA_KT: v->kt = pointer; break;
        case PERI_LUA_TBE: v->tbe = pointer; break;
        default: v->integer = slot[1]; break;
        }
        lua_pop(L, 1);
        return;
    }
    size_t length = 0;
    switch (lua_type(L, -1)) {
    case LUA_TNIL:
    case LUA_TNONE: break;
    case LUA_TBOOLEAN: v->kind = PERI_LUA_BOOL, v->integer = lua_toboolean(L, -1); break;
    case LUA_TNUMBER: v->kind = PERI_LUA_NUMBER, v->number = lua_tonumber(L, -1); break;
    case LUA_TSTRING:
        v->kind = PERI_LUA_TEXT, v->text = lua_tolstring(L, -1, &length), v->length = (int64_t)length;
        break;
    default: v->kind = PERI_LUA_OBJECT, v->integer = luaL_ref(L, LUA_REGISTRYINDEX); return; /* pops it */
    }
    lua_pop(L, 1);
}

/* -- calls --------------------------------------------------------------------------------------------------------- */

static void push_values(lua_State *L, const request *r)
{
    for (int32_t i = 0; i < r->n_in; i++) push_value(L, &r->in[i]);
}

/** load(chunk, n, kind, value, ...) -> what the script returns. */
static int run_script(lua_State *L)
{
    request *r = lua_touserdata(L, 1);
    luaL_checkstack(L, 2 * r->n_in + 16, "values of a script");
    lua_rawgeti(L, LUA_REGISTRYINDEX, r->s->load);
    int code;
    if (r->text) {
        lua_pushfstring(L, "@%s", r->path);
        code = luaL_loadbufferx(L, r->text, (size_t)r->length, lua_tostring(L, -1), "t");
        lua_remove(L, -2);
    } else {
        code = luaL_loadfilex(L, r->path, "t");
    }
    if (code != 0) {
        if (strstr(lua_tostring(L, -1), "wrong mode")) lua_pushfstring(L, "%s is bytecode; allowed: Lua text", r->path);
        r->status = code == LUA_ERRFILE ? PERI_ENOTFOUND : code == LUA_ERRMEM ? PERI_ENOMEM : PERI_EINVAL;
        return lua_error(L);
    }
    lua_pushinteger(L, r->n_in);
    push_values(L, r);
    lua_call(L, 2 + 2 * r->n_in, 1);
    if (lua_isnil(L, -1)) {
        r->status = PERI_EINVAL;
        return luaL_error(L, "%s returns nothing; wanted: a table of functions, or a function", r->path);
    }
    r->object = luaL_ref(L, LUA_REGISTRYINDEX);
    return 0;
}

/** call(target, method, slots, n_out, n_in, kind, value, ...) -> table of results; handles are in the slots instead. */
static int run_call(lua_State *L)
{
    request *r = lua_touserdata(L, 1);
    int64_t slots[128] = {0}; /* of 64 results: kind, pointer */
    luaL_checkstack(L, 2 * r->n_in + 16, "values of a call");
    lua_rawgeti(L, LUA_REGISTRYINDEX, r->s->call);
    lua_rawgeti(L, LUA_REGISTRYINDEX, (int)r->object);
    if (r->method) lua_pushstring(L, r->method);
    else lua_pushnil(L);
    lua_pushlightuserdata(L, slots);
    lua_pushinteger(L, r->n_out);
    lua_pushinteger(L, r->n_in);
    push_values(L, r);
    lua_call(L, 5 + 2 * r->n_in, 1);
    for (int32_t i = 0; i < r->n_out; i++) {
        lua_rawgeti(L, -1, i + 1);
        take_value(L, &slots[2 * i], &r->out[i]);
    }
    if (r->n_out > 0) lua_rawseti(L, LUA_REGISTRYINDEX, r->s->results);
    return 0;
}

static peri_status protected(request *r, lua_CFunction body, const char *function)
{
    if (r->s->L == NULL) return FAIL(PERI_ECLOSED, "%s: the state of Lua is closed", function);
    const int code = lua_cpcall(r->s->L, body, r);
    return code == 0 ? PERI_OK : failed(r, function, code);
}

static peri_status load(void *s, const char *path, const char *text, int64_t length, const peri_lua_value *in,
                        int32_t n, int64_t *object)
{
    request r = {.s = s, .path = path, .text = text, .length = length, .in = in, .n_in = n};
    peri_status status = protected(&r, run_script, "peri_lua_load");
    *object = r.object;
    return status;
}

static peri_status call(void *s, int64_t object, const char *method, const peri_lua_value *in, int32_t n_in,
                        peri_lua_value *out, int32_t n_out)
{
    request r = {.s = s, .object = object, .method = method, .in = in, .n_in = n_in, .out = out, .n_out = n_out};
    return protected(&r, run_call, "peri_lua_call");
}

static void drop(void *s, int64_t object) { luaL_unref(((state *)s)->L, LUA_REGISTRYINDEX, (int)object); }

static const char *error(void *s) { return ((state *)s)->error ? ((state *)s)->error : ""; }

static int collect_all(lua_State *L)
{
    request *r = lua_touserdata(L, 1);
    lua_pushnil(L);
    lua_rawseti(L, LUA_REGISTRYINDEX, r->s->results);
    lua_gc(L, LUA_GCCOLLECT, 0);
    lua_gc(L, LUA_GCCOLLECT, 0); /* finalizers of handles have let go of more */
    return 0;
}

static peri_status collect(void *s)
{
    request r = {.s = s};
    return protected(&r, collect_all, "peri_lua_collect");
}

/* -- the table ----------------------------------------------------------------------------------------------------- */

static int forget(lua_State *L)
{
    state *s = lua_touserdata(L, 1);
    const int list[] = {s->load, s->call, s->describe, s->results};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) luaL_unref(L, LUA_REGISTRYINDEX, list[i]);
    return 0;
}

static void close_state(void *state_)
{
    state *s = state_;
    if (s->own && s->L) lua_close(s->L);
    else if (s->L) (void)lua_cpcall(s->L, forget, s);
    host->free(s->error);
    host->free(s);
}

static int reserve(lua_State *L)
{
    request *r = lua_touserdata(L, 1);
    lua_pushboolean(L, 1);
    luaL_unref(L, LUA_REGISTRYINDEX, luaL_ref(L, LUA_REGISTRYINDEX)); /* so that a later one takes no memory */
    lua_pushboolean(L, 1);
    r->s->results = luaL_ref(L, LUA_REGISTRYINDEX);
    return prepare(L);
}

static peri_status open_state(const peri_lua_config *config, const peri_guest_core *core, void **out)
{
    if (config->state && config->narrow)
        return FAIL(
            PERI_EINVAL,
            "peri_lua_new: narrow is of new states; one of the program's own has the libraries that it has opened");
    if (config->state && !is_ours(config->state))
        return FAIL(PERI_EUNSUPPORTED,
                    "peri_lua_new: the state is of another LuaJIT than libperilune_lua.so has; link the program with "
                    "the shared libluajit-5.1, or export its own (-rdynamic)");
    state *s = host->alloc_zero(sizeof *s);
    if (!s) return PERI_ENOMEM;
    s->load = s->call = s->describe = s->results = LUA_NOREF;
    s->own = !config->state;
    s->L = s->own ? luaL_newstate() : config->state;
    if (!s->L) {
        host->free(s);
        return FAIL(PERI_ENOMEM, "peri_lua_new: no memory for a state of Lua");
    }
    request r = {.s = s, .config = config, .core = core};
    peri_status status = protected(&r, reserve, "peri_lua_new");
    if (status < 0) close_state(s);
    else *out = s;
    return status;
}

__attribute__((visibility("default"))) const peri_guest_vtab *peri_lua_entry_v1(const peri_plugin_host *lent);

const peri_guest_vtab *peri_lua_entry_v1(const peri_plugin_host *lent)
{
    static const peri_guest_vtab table = {.size = sizeof table,
                                          .abi = PERI_GUEST_ABI,
                                          .open = open_state,
                                          .close = close_state,
                                          .load = load,
                                          .call = call,
                                          .drop = drop,
                                          .error = error,
                                          .collect = collect};
    if (lent->abi < 2) return NULL;
    host = lent;
    return &table;
}
