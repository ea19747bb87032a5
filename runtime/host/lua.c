/* SPDX-License-Identifier: Apache-2.0
 *
 * lua.c: states of Lua in a C program: who may call them when, and what their values hold. guest/luajit.c, which links
 * LuaJIT, does the rest.
 */
#include "guest.h"

#include "../base/floats.h"
#include "../plugin/plugin_internal.h"

#include <dlfcn.h>
#include <sys/auxv.h>

struct peri_lua {
    peri__refs refs; /* the program's, and one of each object */
    const peri_guest_vtab *guest;
    void *state;                              /* the guest's */
    atomic_bool busy;                         /* a thread is in a call */
    _Atomic(peri_lua_object *) given_up;      /* list of objects that the state has not forgotten yet */
};

struct peri_lua_object {
    peri_lua *lua;
    int64_t number;
    peri_lua_object *next; /* in the list given_up */
};

/* -- one thread at a time ------------------------------------------------------------------------------------------ */

static void forget_objects(peri_lua *lua)
{
    for (peri_lua_object *o = atomic_exchange(&lua->given_up, NULL), *next; o; o = next) {
        next = o->next;
        lua->guest->drop(lua->state, o->number);
        peri__free(o);
    }
}

static peri_status enter(peri_lua *lua, const char *function)
{
    bool idle = false;
    if (!atomic_compare_exchange_strong(&lua->busy, &idle, true))
        return peri__fail(
            PERI_EINVAL,
            "%s: this state of Lua is in a call already; allowed: one call at a time, and a state for each "
            "thread",
            function);
    forget_objects(lua);
    return PERI_OK;
}

static peri_status leave(peri_lua *lua, peri_status status)
{
    atomic_store(&lua->busy, false);
    return status;
}

/** The last reference is gone, so nobody is in a call. */
static void drop(peri_lua *lua)
{
    if (!peri__refs_drop(&lua->refs)) return;
    PERI__OWN_FLOATS; /* for finalizers of scripts */
    forget_objects(lua);
    lua->guest->close(lua->state);
    peri__object_count(-1);
    peri__free(lua);
}

/* -- states -------------------------------------------------------------------------------------------------------- */

/** The guest, loaded once; later calls find the same. */
static peri_status find_guest(const peri_guest_vtab **out)
{
    void *found = NULL;
    peri_guest_entry_fn entry;
    PERI_TRY(peri__plugin_symbol("lua", PERI_GUEST_ENTRY, &found));
    memcpy(&entry, &found, sizeof entry);
    const peri_guest_vtab *guest = entry(peri__plugin_host());
    if (!guest || guest->abi != PERI_GUEST_ABI || guest->size < sizeof *guest)
        return peri__fail(PERI_EUNSUPPORTED,
                          "peri_lua_new: libperilune_lua.so is of another version of Perilune; install both of one "
                          "build");
    *out = guest;
    return PERI_OK;
}

/** The shared object that holds this code; NULL: the program does. */
static const char *own_file(void)
{
    Dl_info own, program;
    if (!dladdr((void *)(uintptr_t)peri_lua_new, &own) || !own.dli_fname) return NULL;
    if (dladdr((void *)getauxval(AT_PHDR), &program) && program.dli_fbase == own.dli_fbase) return NULL;
    return own.dli_fname;
}

peri_status peri_lua_new(const peri_lua_config *config, peri_lua **out)
{
    peri_lua_config defaults = {.size = sizeof defaults};
    if (!config) config = &defaults;
    PERI_NEED(out);
    PERI_TAKE(peri_lua_config, config);
    const peri_guest_core core = {.path = own_file()};
    peri_lua *lua = peri__alloc_zero(sizeof *lua);
    if (!lua) return PERI_ENOMEM;
    peri__refs_init(&lua->refs);
    PERI__OWN_FLOATS;
    peri_status status = find_guest(&lua->guest);
    if (status >= 0) status = lua->guest->open(config, &core, &lua->state);
    if (status < 0) {
        peri__free(lua);
        return status;
    }
    peri__object_count(1);
    *out = lua;
    return PERI_OK;
}

void peri_lua_release(peri_lua *lua)
{
    if (lua && !peri__border_refuses(__func__)) drop(lua);
}

const char *peri_lua_error(const peri_lua *lua) { return lua ? lua->guest->error(lua->state) : ""; }

peri_status peri_lua_collect(peri_lua *lua)
{
    PERI_NEED(lua);
    PERI_TRY(enter(lua, __func__));
    PERI__OWN_FLOATS;
    return leave(lua, lua->guest->collect(lua->state));
}

/* -- objects and values -------------------------------------------------------------------------------------------- */

static peri_status object_new(peri_lua *lua, int64_t number, peri_lua_object **out)
{
    peri_lua_object *o = peri__alloc(sizeof *o);
    if (!o) {
        lua->guest->drop(lua->state, number);
        return PERI_ENOMEM;
    }
    *o = (peri_lua_object){.lua = lua, .number = number};
    peri__refs_add(&lua->refs);
    peri__object_count(1);
    *out = o;
    return PERI_OK;
}

void peri_lua_object_release(peri_lua_object *o)
{
    if (!o || peri__border_refuses(__func__)) return;
    peri_lua *lua = o->lua;
    o->next = atomic_load(&lua->given_up);
    while (!atomic_compare_exchange_weak(&lua->given_up, &o->next, o)) {}
    peri__object_count(-1);
    drop(lua);
}

void peri_lua_values_release(peri_lua_value *values, int32_t n)
{
    if (!values || peri__border_refuses(__func__)) return;
    for (int32_t i = 0; i < n; i++) {
        switch (values[i].kind) {
        case PERI_LUA_TENSOR: peri_tensor_release(values[i].tensor); break;
        case PERI_LUA_JT: peri_jt_release(values[i].jt); break;
        case PERI_LUA_KJT: peri_kjt_release(values[i].kjt); break;
        case PERI_LUA_KT: peri_kt_release(values[i].kt); break;
        case PERI_LUA_TBE: peri_tbe_release(values[i].tbe); break;
        case PERI_LUA_OBJECT: peri_lua_object_release(values[i].object); break;
        default: break;
        }
        values[i] = (peri_lua_value){0};
    }
}

/** Most values that a call may take or give. */
enum { MOST = 64 };

/** The caller's values as the guest has them, objects as numbers. */
static peri_status values_in(const char *function, const peri_lua *lua, const peri_lua_value *in, int32_t n,
                             peri_lua_value *own)
{
    if (n < 0 || n > MOST) return peri__fail(PERI_EINVAL, "%s: %d values go in, allowed: 0..%d", function, n, MOST);
    if (n > 0 && !in) return peri__fail(PERI_EINVAL, "%s: in is missing", function);
    for (int32_t i = 0; i < n; i++) {
        const peri_lua_value *v = &in[i];
        own[i] = *v;
        if (v->kind < 0 || v->kind >= PERI_LUA_KIND_COUNT)
            return peri__fail(PERI_EINVAL, "%s: value %d is of kind %d, allowed: PERI_LUA_*, 0..%d", function, i,
                              v->kind, PERI_LUA_KIND_COUNT - 1);
        if (v->unused)
            return peri__fail(PERI_EUNSUPPORTED, "%s: `unused` of value %d is %d, this library takes 0", function, i,
                              v->unused);
        const void *const pointers[PERI_LUA_KIND_COUNT] = {
            [PERI_LUA_TEXT] = v->text,    [PERI_LUA_TENSOR] = v->tensor, [PERI_LUA_JT] = v->jt,
            [PERI_LUA_KJT] = v->kjt,      [PERI_LUA_KT] = v->kt,         [PERI_LUA_TBE] = v->tbe,
            [PERI_LUA_OBJECT] = v->object};
        if (v->kind >= PERI_LUA_TEXT && !pointers[v->kind])
            return peri__fail(PERI_EINVAL, "%s: value %d is NULL", function, i);
        if (v->kind == PERI_LUA_TEXT && v->length < 0)
            return peri__fail(PERI_EINVAL, "%s: text %d has a length of %lld, allowed: 0 or more", function, i,
                              (long long)v->length);
        if (v->kind == PERI_LUA_TEXT && v->length == 0) own[i].length = (int64_t)strlen(v->text);
        if (v->kind != PERI_LUA_OBJECT) continue;
        if (v->object->lua != lua)
            return peri__fail(PERI_EINVAL, "%s: object %d is of another state of Lua", function, i);
        own[i].integer = v->object->number;
    }
    return PERI_OK;
}

/** Results for the caller: numbers become objects. On failure nothing of them is left. */
static peri_status values_out(peri_lua *lua, peri_lua_value *own, int32_t n, peri_lua_value *out)
{
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < n; i++) {
        if (own[i].kind != PERI_LUA_OBJECT) continue;
        const int64_t number = own[i].integer;
        own[i].kind = PERI_LUA_NIL;
        if (status < 0) {
            lua->guest->drop(lua->state, number);
            continue;
        }
        status = object_new(lua, number, &own[i].object);
        if (status >= 0) own[i].kind = PERI_LUA_OBJECT;
    }
    if (status < 0) peri_lua_values_release(own, n);
    else if (n > 0) memcpy(out, own, sizeof *own * (size_t)n);
    return status;
}

/* -- calls --------------------------------------------------------------------------------------------------------- */

static peri_status load(const char *function, peri_lua *lua, const char *name, const char *text, int64_t length,
                        const peri_lua_value *in, int32_t n, peri_lua_object **out)
{
    peri_lua_value own[MOST];
    int64_t number = 0;
    PERI_TRY(values_in(function, lua, in, n, own));
    PERI_TRY(enter(lua, function));
    PERI__OWN_FLOATS;
    peri_status status = lua->guest->load(lua->state, name, text, length, own, n, &number);
    if (status >= 0) status = object_new(lua, number, out);
    return leave(lua, status);
}

peri_status peri_lua_load(peri_lua *lua, const char *path, const peri_lua_value *in, int32_t n, peri_lua_object **out)
{
    PERI_NEED(lua);
    PERI_NEED(path);
    PERI_NEED(out);
    return load(__func__, lua, path, NULL, 0, in, n, out);
}

peri_status peri_lua_load_text(peri_lua *lua, const char *name, const char *text, int64_t length,
                               const peri_lua_value *in, int32_t n, peri_lua_object **out)
{
    PERI_NEED(lua);
    PERI_NEED(name);
    PERI_NEED(text);
    PERI_NEED(out);
    if (length < 0)
        return peri__fail(PERI_EINVAL, "%s: %lld bytes of text, allowed: 0 or more", __func__, (long long)length);
    return load(__func__, lua, name, text, length, in, n, out);
}

peri_status peri_lua_call(peri_lua_object *object, const char *method, const peri_lua_value *in, int32_t n_in,
                          peri_lua_value *out, int32_t n_out)
{
    PERI_NEED(object);
    peri_lua *lua = object->lua;
    peri_lua_value own[MOST], results[MOST];
    if (n_out < 0 || n_out > MOST)
        return peri__fail(PERI_EINVAL, "%s: %d values come out, allowed: 0..%d", __func__, n_out, MOST);
    if (n_out > 0) PERI_NEED(out);
    PERI_TRY(values_in(__func__, lua, in, n_in, own));
    PERI_TRY(enter(lua, __func__));
    PERI__OWN_FLOATS; /* for what the script computes */
    peri_status status = lua->guest->call(lua->state, object->number, method, own, n_in, results, n_out);
    if (status >= 0) status = values_out(lua, results, n_out, out);
    return leave(lua, status);
}
