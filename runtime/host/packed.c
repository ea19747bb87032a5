/* SPDX-License-Identifier: Apache-2.0
 *
 * packed.c: `require` for the Lua files that are packed into the launcher and into libperilune_lua.so.
 */
#include "host_internal.h"

#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>

void peri__open_libraries(lua_State *L)
{
    const bool secure = getauxval(AT_SECURE) != 0;
    lua_pushboolean(L, secure);
    lua_setfield(L, LUA_REGISTRYINDEX, "LUA_NOENV"); /* LUA_PATH, LUA_CPATH */
    luaL_openlibs(L);
    if (!secure) return;
    lua_getglobal(L, "package");
    for (int i = 0; i < 2; i++) { /* what is left are absolute paths */
        lua_getfield(L, -1, i ? "cpath" : "path");
        luaL_gsub(L, lua_tostring(L, -1), i ? "./?.so;" : "./?.lua;", "");
        lua_setfield(L, -3, i ? "cpath" : "path");
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
}

/** A searcher of package.loaders: the packed module of a name, or why there is none. Its first upvalue, if it is a
 *  table, is the environment of the modules. */
static int find_packed(lua_State *L)
{
    const char *name = luaL_checkstring(L, 1);
    for (const peri__packed *p = peri__pack; p->name; p++) {
        if (strcmp(p->name, name) != 0) continue;
        if (luaL_loadbuffer(L, p->code, p->size, name) != 0) return lua_error(L);
        if (lua_istable(L, lua_upvalueindex(1))) {
            lua_pushvalue(L, lua_upvalueindex(1));
            lua_setfenv(L, -2);
        }
        return 1;
    }
    lua_pushfstring(L, "\n\tno packed module '%s'", name);
    return 1;
}

void peri__packed_install(lua_State *L, int environment)
{
    const char *path = secure_getenv("PERI_LUA_PATH");
    bool files_first = path && *path;
    if (environment) lua_pushvalue(L, environment);
    else lua_pushnil(L);
    lua_pushcclosure(L, find_packed, 1);
    lua_getglobal(L, "package");
    if (files_first) {
        bool folder = !strchr(path, '?');
        lua_getfield(L, -1, "path");
        if (folder) lua_pushfstring(L, "%s/?.lua;%s/?/init.lua;%s", path, path, lua_tostring(L, -1));
        else lua_pushfstring(L, "%s;%s", path, lua_tostring(L, -1));
        lua_setfield(L, -3, "path");
        lua_pop(L, 1);
    }
    lua_getfield(L, -1, "loaders");
    int count = (int)lua_objlen(L, -1), at = files_first ? count + 1 : 2;
    for (int i = count; i >= at; i--) {
        lua_rawgeti(L, -1, i);
        lua_rawseti(L, -2, i + 1);
    }
    lua_pushvalue(L, -3);
    lua_rawseti(L, -2, at);
    lua_pop(L, 3);
}
