/* SPDX-License-Identifier: Apache-2.0
 *
 * host/guest.h (L7): what the library (lua.c) and libperilune_lua.so (guest/luajit.c) agree on. The latter links
 * LuaJIT; the former does not.
 */
#ifndef PERI_HOST_GUEST_H
#define PERI_HOST_GUEST_H

#include "../plugin/host.h"

#include <perilune/lua.h>

enum { PERI_GUEST_ABI = 1 };
#define PERI_GUEST_ENTRY "peri_lua_entry_v1"

/** Where the library is, for Lua. */
typedef struct peri_guest_core {
    const char *path; /* of the shared object that holds it; NULL: the program does */
} peri_guest_core;

/** Objects are numbers here: those of a state's registry. In values of PERI_LUA_OBJECT they are in `integer`. */
typedef struct peri_guest_vtab {
    uint32_t size, abi; /* sizeof this struct; PERI_GUEST_ABI */
    peri_status (*open)(const peri_lua_config *config, const peri_guest_core *core, void **state);
    void (*close)(void *state);
    /* Run a script: the file @path, or @text named @path. */
    peri_status (*load)(void *state, const char *path, const char *text, int64_t length, const peri_lua_value *in,
                        int32_t n, int64_t *object);
    peri_status (*call)(void *state, int64_t object, const char *method, const peri_lua_value *in, int32_t n_in,
                        peri_lua_value *out, int32_t n_out);
    void (*drop)(void *state, int64_t object);
    const char *(*error)(void *state);
    peri_status (*collect)(void *state);
} peri_guest_vtab;

typedef const peri_guest_vtab *(*peri_guest_entry_fn)(const peri_plugin_host *host);

#endif
