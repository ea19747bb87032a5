/* SPDX-License-Identifier: Apache-2.0
 *
 * test_lua.c: Lua inside a host: values of all kinds there and back, the host's memory, errors with words, states of
 * threads, narrow states, and a state of the host's own that lacks libraries.
 */
#include "tests/harness/check.h"

#include <fenv.h>
#include <lauxlib.h>
#include <lualib.h>
#include <math.h>
#include <perilune/host.h>
#include <perilune/perilune.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static peri_device *cpu;

static int open_cpu(void **state)
{
    (void)state;
    return peri_device_get("cpu", &cpu) < 0;
}

static peri_lua *lua_new(void)
{
    peri_lua *lua = NULL;
    assert_ok(peri_lua_new(NULL, &lua));
    return lua;
}

static peri_lua_object *load(peri_lua *lua, const char *text)
{
    peri_lua_object *object = NULL;
    assert_ok(peri_lua_load_text(lua, "script.lua", text, (int64_t)strlen(text), NULL, 0, &object));
    return object;
}

static void given_back(void *count, void *data)
{
    (void)data;
    ++*(int *)count;
}

/* -- values
 * ------------------------------------------------------------------------------------------------------------------ */

static void scripts_work_in_the_hosts_memory(void **state)
{
    (void)state;
    float x[6] = {1, 2, 3, 4, 5, 6}, y[6] = {0};
    const int64_t shape[2] = {2, 3};
    int count = 0;
    peri_lua_value in[2] = {{.kind = PERI_LUA_TENSOR}, {.kind = PERI_LUA_TENSOR}}, out[2];
    assert_ok(peri_host_tensor(cpu, PERI_F32, 2, shape, x, given_back, &count, &in[0].tensor));
    assert_ok(peri_host_tensor(cpu, PERI_F32, 2, shape, y, given_back, &count, &in[1].tensor));
    peri_lua *lua = lua_new();
    peri_lua_object *m = load(lua, "local peri = require 'perilune'\n"
                                   "local M, kept = {}\n"
                                   "function M.double(x, y) y:copy(x * 2) return x, y:slice(1, 1, 2) end\n"
                                   "function M.keep(x) kept = peri.keep(x) end\n"
                                   "function M.drop() kept:release() end\n"
                                   "return M");
    assert_ok(peri_lua_call(m, "double", in, 2, out, 2));
    for (int i = 0; i < 6; i++) assert_true(y[i] == 2 * x[i]);
    void *p;
    assert_ok(peri_tensor_data(out[0].tensor, &p));
    assert_ptr_equal(p, x);
    assert_ok(peri_tensor_data(out[1].tensor, &p));
    assert_ptr_equal(p, y + 3); /* a view: the result is not copied either */
    peri_lua_values_release(out, 2);
    assert_int_equal(out[1].kind, PERI_LUA_NIL);
    peri_tensor_release(in[1].tensor);
    assert_int_equal(count, 1);
    assert_ok(peri_lua_call(m, "keep", in, 1, NULL, 0));
    peri_tensor_release(in[0].tensor);
    assert_int_equal(count, 1);
    assert_ok(peri_lua_call(m, "drop", NULL, 0, NULL, 0));
    assert_int_equal(count, 2);
    peri_lua_object_release(m);
    peri_lua_release(lua);
    assert_int_equal(peri_mem_objects(), 0);
}

static void values_come_back_as_they_went(void **state)
{
    (void)state;
    static const char text[] = "a\0b";
    const int64_t ids[3] = {1, 2, 3}, lengths[2] = {1, 2}, n = 3, two = 2;
    static const char *const names[2] = {"f", "g"};
    peri_kjt_config kjt = {.size = sizeof kjt};
    peri_lua *lua = lua_new();
    peri_lua_object *same = load(lua, "return function(...) return ... end"),
                    *m = load(lua, "return { n = 7, f = function(self, x) "
                                   "return self.n + x end }");
    assert_ok(peri_tensor_new(cpu, PERI_I64, 1, &n, &kjt.values));
    assert_ok(peri_tensor_write(kjt.values, ids, sizeof ids));
    assert_ok(peri_tensor_new(cpu, PERI_I64, 1, &two, &kjt.lengths));
    assert_ok(peri_tensor_write(kjt.lengths, lengths, sizeof lengths));
    assert_ok(peri_keys_new(names, 2, &kjt.keys));
    peri_lua_value in[9] = {{.kind = PERI_LUA_NIL},
                            {.kind = PERI_LUA_BOOL, .integer = 1},
                            {.kind = PERI_LUA_NUMBER, .number = 0.25},
                            {.kind = PERI_LUA_INTEGER, .integer = 12},
                            {.kind = PERI_LUA_INTEGER, .integer = INT64_MIN + 1},
                            {.kind = PERI_LUA_TEXT, .text = text, .length = 3},
                            {.kind = PERI_LUA_TEXT, .text = "word"},
                            {.kind = PERI_LUA_KJT},
                            {.kind = PERI_LUA_OBJECT, .object = m}};
    assert_ok(peri_kjt_new(&kjt, &in[7].kjt));
    peri_lua_value out[10];
    assert_ok(peri_lua_call(same, NULL, in, 9, out, 10));
    assert_int_equal(out[0].kind, PERI_LUA_NIL);
    assert_true(out[1].kind == PERI_LUA_BOOL && out[1].integer == 1);
    assert_true(out[2].kind == PERI_LUA_NUMBER && out[2].number == 0.25);
    assert_true(out[3].kind == PERI_LUA_NUMBER && out[3].number == 12);
    assert_true(out[4].kind == PERI_LUA_INTEGER && out[4].integer == INT64_MIN + 1);
    assert_true(out[5].kind == PERI_LUA_TEXT && out[5].length == 3);
    assert_memory_equal(out[5].text, text, 4);
    assert_string_equal(out[6].text, "word");
    assert_true(out[7].kind == PERI_LUA_KJT && out[7].kjt == in[7].kjt);
    assert_int_equal(out[8].kind, PERI_LUA_OBJECT);
    assert_int_equal(out[9].kind, PERI_LUA_NIL);
    peri_lua_value x = {.kind = PERI_LUA_NUMBER, .number = 1}, sum;
    assert_ok(peri_lua_call(out[8].object, ":f", &x, 1, &sum, 1));
    assert_true(sum.number == 8);
    peri_lua_release(lua); /* its objects keep it */
    assert_ok(peri_lua_call(m, ":f", &x, 1, &sum, 1));
    peri_lua_values_release(out, 10);
    peri_kjt_release(in[7].kjt);
    peri_keys_release(kjt.keys);
    peri_tensor_release(kjt.values);
    peri_tensor_release(kjt.lengths);
    peri_lua_object_release(m);
    peri_lua_object_release(same);
    assert_int_equal(peri_mem_objects(), 0);
}

/* -- errors
 * ------------------------------------------------------------------------------------------------------------------ */

/** What scripts compute depends on nothing that the thread has set, which gets it back. */
static void scripts_round_as_the_library_does(void **state)
{
    (void)state;
    peri_lua_value plain[4], odd[4];
    fenv_t before;
    fegetenv(&before);
    for (int i = 0; i < 2; i++) {
        if (i) fesetround(FE_UPWARD);
#if defined(__x86_64__)
        /* denormals are zero, and are flushed; what is invalid, too large, or divided by 0 traps */
        if (i) __builtin_ia32_ldmxcsr((__builtin_ia32_stmxcsr() | 0x8040u) & ~0x680u);
#endif
        peri_lua *lua = lua_new();
        peri_lua_object *m = load(lua, "local sum, x = 0, 0/0\n"
                                       "for i = 1, 100 do sum = sum + 0.1 end\n"
                                       "return function(tiny) return sum, tiny / 2, 1 / (tiny - tiny),\n"
                                       "  ('%.3g %s'):format(0.9, x ~= x) end");
        const peri_lua_value tiny = {.kind = PERI_LUA_NUMBER, .number = 0x1p-1070};
        peri_lua_value *out = i ? odd : plain;
        assert_ok(peri_lua_call(m, NULL, &tiny, 1, out, 4));
        assert_string_equal(out[3].text, "0.9 true");
        assert_ok(peri_lua_collect(lua));
        peri_lua_object_release(m);
        if (i) assert_int_equal(fegetround(), FE_UPWARD);
#if defined(__x86_64__)
        if (i) assert_int_equal(__builtin_ia32_stmxcsr() & 0xffc0u, 0x8040u | FE_UPWARD << 3 | (0x1f80u & ~0x680u));
#endif
        peri_lua_release(lua);
    }
    fesetenv(&before);
    assert_true(plain[1].number == 0x1p-1071 && isinf(plain[2].number));
    for (int i = 0; i < 3; i++) assert_memory_equal(&plain[i].number, &odd[i].number, sizeof(double));
}

static void errors_are_statuses_with_words(void **state)
{
    (void)state;
    peri_lua_config config = {.size = sizeof config, .trace = 1};
    peri_lua *lua = NULL, *other = lua_new();
    peri_lua_object *m, *none = NULL, *foreign = load(other, "return {}");
    assert_ok(peri_lua_new(&config, &lua));
    assert_string_equal(peri_lua_error(lua), "");
    m = load(lua, "local peri = require 'perilune'\n"
                  "local M = { x = 1 }\n"
                  "function M.raise()\n"
                  "  error 'by the script'\n"
                  "end\n"
                  "function M.refused() return peri.zeros { -2 } end\n"
                  "function M.none() return peri.ffi.device 'moon' end\n"
                  "function M.thing() error(setmetatable({}, { __tostring = function() error 'twice' end })) end\n"
                  "return M");
    assert_fails(peri_lua_call(m, "raise", NULL, 0, NULL, 0), PERI_EINVAL,
                 "peri_lua_call: by the script (script.lua:4)");
    assert_non_null(strstr(peri_lua_error(lua), "stack traceback"));
    assert_fails(peri_lua_call(m, "refused", NULL, 0, NULL, 0), PERI_EINVAL, "script.lua:6");
    assert_fails(peri_lua_call(m, "none", NULL, 0, NULL, 0), PERI_ENOTFOUND, "moon");
    assert_fails(peri_lua_call(m, "thing", NULL, 0, NULL, 0), PERI_EINVAL, "__tostring fails");
    assert_fails(peri_lua_call(m, "missing", NULL, 0, NULL, 0), PERI_EINVAL,
                 "the object (a table) has no function 'missing'");
    assert_fails(peri_lua_call(m, "x", NULL, 0, NULL, 0), PERI_EINVAL, "call");
    peri_lua_value in = {.kind = PERI_LUA_OBJECT, .object = foreign};
    assert_fails(peri_lua_call(m, "raise", &in, 1, NULL, 0), PERI_EINVAL, "object 0 is of another state of Lua");
    in = (peri_lua_value){.kind = 77};
    assert_fails(peri_lua_call(m, "raise", &in, 1, NULL, 0), PERI_EINVAL,
                 "value 0 is of kind 77, allowed: PERI_LUA_*, 0..10");
    in = (peri_lua_value){.kind = PERI_LUA_TENSOR};
    assert_fails(peri_lua_call(m, "raise", &in, 1, NULL, 0), PERI_EINVAL, "value 0 is NULL");
    assert_fails(peri_lua_call(m, "raise", NULL, 1, NULL, 0), PERI_EINVAL, "in is missing");
    assert_fails(peri_lua_call(m, "raise", NULL, 65, NULL, 0), PERI_EINVAL, "allowed: 0..64");
    assert_fails(peri_lua_load(lua, "/no/such/script.lua", NULL, 0, &none), PERI_ENOTFOUND, "/no/such/script.lua");
    static const char *const bad[][2] = {{"return {", "script.lua:1"}, {"local x = 1", "script.lua returns nothing"},
                                         {"\033LJ\002", "bytecode"}, {"error 'early'", "early (script.lua:1)"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_fails(peri_lua_load_text(lua, "script.lua", bad[i][0], (int64_t)strlen(bad[i][0]), NULL, 0, &none),
                     PERI_EINVAL, bad[i][1]);
    assert_null(none);
    peri_lua_object_release(foreign);
    peri_lua_object_release(m);
    peri_lua_release(lua);
    peri_lua_release(other);
    assert_int_equal(peri_mem_objects(), 0);
}

static const char endless[] = "local M = {}\n"
                              "function M.calls() return 1 + M.calls() end\n"
                              "function M.indexes()\n"
                              "  local t = setmetatable({}, { __index = function(t, k) return t[k + 1] + 1 end })\n"
                              "  return t[1]\n"
                              "end\n"
                              "function M.catches() local ok, e = pcall(M.catches) return tostring(e) end\n"
                              "function M.text() error(setmetatable({}, { __tostring = M.calls })) end\n"
                              "function M.fine() return 'fine' end\n"
                              "return M";

static void *run_endless(void *ok)
{
    peri_lua *lua = lua_new();
    peri_lua_object *m = load(lua, endless);
    static const char *const methods[] = {"calls", "indexes", "text"};
    peri_lua_value out = {0};
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++) {
        assert_fails(peri_lua_call(m, methods[i], NULL, 0, &out, 1), PERI_EINVAL, "stack overflow");
        assert_ok(peri_lua_call(m, "fine", NULL, 0, &out, 1)); /* the state goes on */
        assert_string_equal(out.text, "fine");
    }
    assert_ok(peri_lua_call(m, "catches", NULL, 0, &out, 1));
    peri_lua_object_release(m);
    peri_lua_release(lua);
    *(bool *)ok = true;
    return NULL;
}

static void endless_recursion_is_an_error(void **state)
{
    (void)state;
    bool ok = false;
    pthread_attr_t attr;
    pthread_t thread;
    pthread_attr_init(&attr);
    assert_int_equal(pthread_attr_setstacksize(&attr, 256 << 10), 0); /* what perilune/lua.h asks for */
    assert_int_equal(pthread_create(&thread, &attr, run_endless, &ok), 0);
    pthread_join(thread, NULL);
    pthread_attr_destroy(&attr);
    assert_true(ok);
}

static void *wait_for_flag(void *object)
{
    return (void *)(intptr_t)peri_lua_call(object, "wait", NULL, 0, NULL, 0);
}

static void a_state_is_one_threads_at_a_time(void **state)
{
    (void)state;
    static int32_t flag[2];
    const int64_t n = 2;
    peri_lua_value in = {.kind = PERI_LUA_TENSOR};
    pthread_t thread;
    void *status;
    peri_lua *lua = lua_new();
    peri_lua_object *m = NULL;
    static const char text[] = "local x = ...\nlocal M = {}\n"
                               "function M.wait() x:fill(1) while x:item(0) ~= 2 do end end\nreturn M";
    assert_ok(peri_host_tensor(cpu, PERI_I32, 1, &n, flag, NULL, NULL, &in.tensor));
    assert_ok(peri_lua_load_text(lua, "wait.lua", text, sizeof text - 1, &in, 1, &m));
    assert_int_equal(pthread_create(&thread, NULL, wait_for_flag, m), 0);
    while (__atomic_load_n(&flag[0], __ATOMIC_ACQUIRE) != 1) peri_pause(1000);
    assert_fails(peri_lua_call(m, "wait", NULL, 0, NULL, 0), PERI_EINVAL, "this state of Lua is in a call already");
    __atomic_store_n(&flag[0], 2, __ATOMIC_RELEASE);
    pthread_join(thread, &status);
    assert_int_equal((intptr_t)status, PERI_OK);
    peri_tensor_release(in.tensor);
    peri_lua_object_release(m);
    peri_lua_release(lua);
    assert_int_equal(peri_mem_objects(), 0);
}

/* -- states
 * ------------------------------------------------------------------------------------------------------------------ */

static const char narrow_script[] =
    "local peri = require 'perilune'\n"
    "assert(os == nil and io == nil and debug == nil and ffi == nil)\n"
    "for _, name in ipairs { 'os', 'io', 'debug', 'ffi' } do assert(not pcall(require, name), name) end\n"
    "local linear = peri.nn.Linear { in_features = 2, out_features = 1 }\n"
    "return function() return linear(peri.ones { 3, 2 }):numel(), peri.zeros { -1 } end";

static void narrow_states_have_little(void **state)
{
    (void)state;
    peri_lua_config config = {.size = sizeof config, .narrow = 1};
    peri_lua *lua = NULL;
    assert_ok(peri_lua_new(&config, &lua));
    peri_lua_object *f = load(lua, narrow_script);
    assert_fails(peri_lua_call(f, NULL, NULL, 0, NULL, 0), PERI_EINVAL, "(script.lua:5)");
    assert_ok(peri_lua_collect(lua));
    peri_lua_object_release(f);
    peri_lua_release(lua);
    assert_int_equal(peri_mem_objects(), 0);
}

static void *plain_memory(void *requests, void *p, size_t old, size_t size)
{
    (void)old;
    *(int *)requests += size != 0;
    if (size) return realloc(p, size);
    free(p);
    return NULL;
}

/* Such a state has neither the allocator nor the panic function by which states of luaL_newstate are known. */
static void a_state_may_have_an_allocator_of_the_hosts_own(void **state)
{
    (void)state;
    int requests = 0;
    lua_State *L = lua_newstate(plain_memory, &requests);
    luaL_openlibs(L);
    peri_lua_config config = {.size = sizeof config, .state = L};
    peri_lua *lua = NULL;
    assert_ok(peri_lua_new(&config, &lua));
    const int before = requests;
    peri_lua_object *f = load(lua, "return function(n) return ('x'):rep(n * 1000):len() end");
    peri_lua_value in = {.kind = PERI_LUA_NUMBER, .number = 7}, out;
    assert_ok(peri_lua_call(f, NULL, &in, 1, &out, 1));
    assert_true(out.number == 7000 && requests > before);
    peri_lua_object_release(f);
    peri_lua_release(lua);
    lua_close(L);
}

static void a_state_of_the_hosts_own_keeps_what_it_has(void **state)
{
    (void)state;
    static const luaL_Reg libraries[] = {
        {"", luaopen_base},     {"package", luaopen_package}, {"table", luaopen_table}, {"string", luaopen_string},
        {"math", luaopen_math}, {"bit", luaopen_bit},         {"jit", luaopen_jit},     {NULL, NULL}};
    peri_lua *lua = NULL;
    lua_State *L = luaL_newstate();
    for (const luaL_Reg *library = libraries; library->name; library++) {
        lua_pushcfunction(L, library->func);
        lua_pushstring(L, library->name);
        lua_call(L, 1, 0);
    }
    lua_pushinteger(L, 41);
    lua_setglobal(L, "mine");
    peri_lua_config config = {.size = sizeof config, .state = L};
    for (int round = 0; round < 2; round++) {
        assert_ok(peri_lua_new(&config, &lua));
        peri_lua_object *f = load(lua, narrow_script),
                        *g = load(lua, "return function() mine = mine + 1 return mine end");
        peri_lua_value out;
        assert_fails(peri_lua_call(f, NULL, NULL, 0, NULL, 0), PERI_EINVAL, "(script.lua:5)");
        assert_ok(peri_lua_call(g, NULL, NULL, 0, &out, 1));
        assert_true(out.number == 42 + round);
        peri_lua_object_release(f);
        peri_lua_object_release(g);
        peri_lua_release(lua);
        assert_int_equal(lua_gettop(L), 0);
    }
    lua_getglobal(L, "mine");
    assert_int_equal(lua_tointeger(L, -1), 43);
    config.narrow = 1;
    assert_fails(peri_lua_new(&config, &lua), PERI_EINVAL, "narrow is of new states");
    lua_close(L);
    L = luaL_newstate();
    config = (peri_lua_config){.size = sizeof config, .state = L};
    assert_fails(peri_lua_new(&config, &lua), PERI_EINVAL, "the state has no library 'package'");
    lua_close(L);
    assert_int_equal(peri_mem_objects(), 0);
}

/* -- threads
 * ------------------------------------------------------------------------------------------------------------------ */

enum { THREADS = 4, CALLS = 30, ROWS = 50, COLS = 4 };
static peri_tbe *tables;

static const char lookup_script[] =
    "local peri = require 'perilune'\n"
    "local rows = peri.EmbeddingBagCollection { table_batch = ..., tables = { peri.EmbeddingBagConfig { name = 't', "
    "num_embeddings = 50,\n"
    "  embedding_dim = 4, feature_names = { 'f' } } } }\n"
    "return function(ids) return rows(peri.KeyedJaggedTensor { keys = { 'f' }, values = ids,\n"
    "  lengths = peri.tensor({ ids:size(1) }, 'i64') }):values():sum():item(0) end";

static void *look_up(void *number)
{
    peri_lua *lua = NULL;
    peri_lua_object *f = NULL;
    peri_lua_value given = {.kind = PERI_LUA_TBE, .tbe = tables}, in = {.kind = PERI_LUA_TENSOR}, out;
    intptr_t wrong = 0;
    if (peri_lua_new(NULL, &lua) < 0) return (void *)-1;
    if (peri_lua_load_text(lua, "look.lua", lookup_script, sizeof lookup_script - 1, &given, 1, &f) < 0)
        return (void *)-2;
    for (int64_t call = 0; call < CALLS; call++) {
        int64_t ids[CALLS], n = 1 + call % 7, sum = 0;
        const bool bad = call % 5 == 4; /* an id that is not there */
        for (int64_t i = 0; i < n; i++) sum += ids[i] = (call * 7 + i * (intptr_t)number) % ROWS;
        if (bad) ids[0] = ROWS + call;
        if (peri_host_tensor(cpu, PERI_I64, 1, &n, ids, NULL, NULL, &in.tensor) < 0) return (void *)-3;
        const peri_status status = peri_lua_call(f, NULL, &in, 1, &out, 1);
        peri_tensor_release(in.tensor);
        if (bad) wrong += status != PERI_ERANGE;
        else wrong += status < 0 || out.number != (double)(COLS * sum);
    }
    peri_lua_object_release(f);
    peri_lua_release(lua);
    return (void *)wrong;
}

static void threads_have_states_of_their_own_and_share_tables(void **state)
{
    (void)state;
    static float rows[ROWS][COLS];
    const int64_t n = ROWS * COLS;
    const peri_table_config table = {.size = sizeof table, .name = "t", .rows = ROWS, .cols = COLS};
    peri_tbe_config config = {.size = sizeof config, .device = cpu, .tables = &table, .n_tables = 1};
    pthread_t thread[THREADS];
    for (int i = 0; i < ROWS * COLS; i++) rows[i / COLS][i % COLS] = (float)(i / COLS);
    assert_ok(peri_host_tensor(cpu, PERI_F32, 1, &n, rows, NULL, NULL, &config.weights));
    assert_fails(peri_tbe_new(&config, &tables), PERI_EINVAL, "weights is f32 [200] on cpu, wanted f32 [208] on cpu");
    peri_tensor_release(config.weights);
    static float more[ROWS * COLS + 8];
    memcpy(more, rows, sizeof rows);
    const int64_t padded = n + 8;
    assert_ok(peri_host_tensor(cpu, PERI_F32, 1, &padded, more, NULL, NULL, &config.weights));
    assert_ok(peri_tbe_new(&config, &tables));
    peri_tensor_release(config.weights);
    peri_table_config said = {.size = sizeof said};
    assert_ok(peri_tbe_table(tables, 0, &said));
    assert_string_equal(said.name, "t");
    assert_true(said.rows == ROWS && said.cols == COLS);
    assert_fails(peri_tbe_table(tables, 1, &said), PERI_ERANGE, "table 1, allowed: 0..0");
    for (intptr_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, look_up, (void *)(i + 1)), 0);
    for (int i = 0; i < THREADS; i++) {
        void *wrong;
        pthread_join(thread[i], &wrong);
        assert_int_equal((intptr_t)wrong, 0);
    }
    peri_tbe_release(tables);
    assert_int_equal(peri_mem_objects(), 0);
}

static const char open_script[] =
    "local peri = require 'perilune'\n"
    "local M, rows = {}\n"
    "function M.open(tables) rows = peri.EmbeddingBagCollection { table_batch = tables, tables = {\n"
    "  peri.EmbeddingBagConfig { name = 't', num_embeddings = 4, embedding_dim = 4, feature_names = { 'f' } } } } end\n"
    "function M.sum(id) return rows(peri.KeyedJaggedTensor { keys = { 'f' }, values = { id }, lengths = { 1 } })\n"
    "  :values():sum():item() end\n"
    "return M";

static void a_collection_keeps_the_table_batch_of_an_earlier_call(void **state)
{
    (void)state;
    const peri_table_config table = {
        .size = sizeof table, .name = "t", .rows = 4, .cols = 4, .init = PERI_INIT_CONSTANT, .init_a = 0.5};
    const peri_tbe_config config = {.size = sizeof config, .device = cpu, .tables = &table, .n_tables = 1};
    peri_lua_value given = {.kind = PERI_LUA_TBE}, id = {.kind = PERI_LUA_INTEGER, .integer = 3}, out;
    peri_lua *lua = lua_new();
    peri_lua_object *model = load(lua, open_script);
    assert_ok(peri_tbe_new(&config, &given.tbe));
    assert_ok(peri_lua_call(model, "open", &given, 1, NULL, 0));
    peri_tbe_release(given.tbe);
    assert_ok(peri_lua_collect(lua));
    assert_ok(peri_lua_call(model, "sum", &id, 1, &out, 1));
    assert_true(out.number == 4 * 0.5);
    peri_lua_object_release(model);
    peri_lua_release(lua);
    assert_int_equal(peri_mem_objects(), 0);
}

static void nothing_is_left(void **state)
{
    (void)state;
    assert_ok(peri_host_init());
    assert_ok(peri_host_shutdown());
    assert_int_equal(peri_mem_live(), 0);
    assert_ok(peri_device_get("cpu", &cpu));
    peri_lua_object *f = load(lua_new(), "return function() end"); /* and again */
    (void)f;
}

/* -- memory that Lua does not get ---------------------------------------------------------------------------------- */

static struct {
    lua_Alloc usual;
    void *ctx;
    int64_t left; /* allocations that succeed yet */
} lean;

static void *lean_alloc(void *ctx, void *block, size_t old, size_t size)
{
    (void)ctx;
    if (size > old && lean.left-- <= 0) return NULL;
    return lean.usual(lean.ctx, block, old, size);
}

/** From now on Lua gets memory only lean.left times. */
static int lean_begins(lua_State *L)
{
    lean.usual = lua_getallocf(L, &lean.ctx);
    lua_setallocf(L, lean_alloc, NULL);
    return 0;
}

/** A call that fails comes back with words where the memory ends after the script has failed. (It takes some 60
 *  blocks to find words; LuaJIT itself may crash where it has none while it throws.) */
static void a_failure_without_memory_comes_back(void **state)
{
    (void)state;
    static const char script[] =
        "jit.off() local error, lean = error, lean_begins return { f = function() lean() error('a constant', 0) end }";
    lua_State *L = luaL_newstate();
    const peri_lua_config config = {.size = sizeof config, .state = L};
    peri_lua *lua = NULL;
    int status = -1;
    assert_non_null(L);
    luaL_openlibs(L);
    lua_register(L, "lean_begins", lean_begins);
    assert_ok(peri_lua_new(&config, &lua));
    peri_lua_object *m = load(lua, script);
    fflush(NULL);
    for (lean.left = 30; lean.left < 80; lean.left++) {
        const pid_t child = fork();
        if (child == 0) {
            const peri_status failed = peri_lua_call(m, "f", NULL, 0, NULL, 0);
            _exit(failed < 0 && strstr(peri_error_message(), "peri_lua_call: ") ? 0 : 2);
        }
        assert_true(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
    }
    peri_lua_object_release(m);
    peri_lua_release(lua);
    lua_close(L);
}

/** What a script passes on where Lua has no memory is PERI_ENOMEM too, and its state goes on when there is some; the
 *  next call releases what the script held. */
static void a_lack_of_memory_that_is_passed_on_says_so(void **state)
{
    (void)state;
    static const char script[] = "jit.off() local function fill() local t = {} for i = 1, 99 do t[i] = {} end end "
                                 "local ones, scope = require('perilune').ones, require('perilune').scope "
                                 "local function hold(n) local x = ones { 2 } * ones { 2 } "
                                 "  if n > 0 then scope(hold, n - 1) else lean_begins() fill() end end "
                                 "return { held = function() hold(3) end, plain = function() lean_begins() fill() end,"
                                 "  passed = function() lean_begins() local ok, why = pcall(fill) error(why, 0) end,"
                                 "  placed = function() lean_begins() local ok, why = pcall(fill) error(why) end,"
                                 "  good = function() fill() return 7 end }";
    static const char *const ways[] = {"plain", "passed", "placed", "held"};
    lua_State *L = luaL_newstate();
    const peri_lua_config config = {.size = sizeof config, .state = L};
    peri_lua *lua = NULL;
    peri_lua_value out;
    assert_non_null(L);
    luaL_openlibs(L);
    lua_register(L, "lean_begins", lean_begins);
    assert_ok(peri_lua_new(&config, &lua));
    peri_lua_object *m = load(lua, script);
    const int64_t objects = peri_mem_objects();
    for (int way = 0; way < 4; way++) {
        for (int64_t n = 0; n < 90; n += 5) {
            lean.left = n;
            assert_int_equal(peri_lua_call(m, ways[way], NULL, 0, NULL, 0), PERI_ENOMEM);
            assert_non_null(strstr(peri_error_message(), "no memory"));
            lua_setallocf(L, lean.usual, lean.ctx);
            assert_ok(peri_lua_call(m, "good", NULL, 0, &out, 1));
            assert_true(out.kind == PERI_LUA_NUMBER && out.number == 7);
            assert_int_equal(peri_mem_objects(), objects);
        }
    }
    lean.left = 0;
    assert_int_equal(peri_lua_call(m, "held", NULL, 0, NULL, 0), PERI_ENOMEM);
    lua_setallocf(L, lean.usual, lean.ctx);
    peri_lua_object_release(m);
    peri_lua_release(lua);
    lua_close(L);
    assert_int_equal(peri_mem_objects(), 0);
}

/** Where Lua has no memory for the first call of no_grad, gradients are recorded after the next one as before. */
static void no_grad_without_memory_changes_nothing(void **state)
{
    (void)state;
    static const char script[] =
        "jit.off() local peri = require 'perilune' local function nothing() end "
        "return { f = function() lean_begins() peri.no_grad(nothing) end, grad = function() peri.no_grad(nothing) "
        "local x = peri.ones({ 3 }):requires_grad() x:sum():backward() return x:grad():sum():item() end }";
    lua_State *L = luaL_newstate();
    const peri_lua_config config = {.size = sizeof config, .state = L};
    peri_lua *lua = NULL;
    int status = -1;
    assert_non_null(L);
    luaL_openlibs(L);
    lua_register(L, "lean_begins", lean_begins);
    assert_ok(peri_lua_new(&config, &lua));
    peri_lua_object *m = load(lua, script);
    fflush(NULL);
    for (lean.left = 0; lean.left < 8; lean.left++) {
        const pid_t child = fork();
        if (child == 0) {
            peri_lua_value out;
            peri_lua_call(m, "f", NULL, 0, NULL, 0);
            lua_setallocf(L, lean.usual, lean.ctx);
            _exit(peri_lua_call(m, "grad", NULL, 0, &out, 1) >= 0 && out.number == 3 ? 0 : 2);
        }
        assert_true(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
    }
    peri_lua_object_release(m);
    peri_lua_release(lua);
    lua_close(L);
}

/* -- code memory --------------------------------------------------------------------------------------------------- */

/** Map all that is free within 2 GiB of @address, as hosts with large heaps and many libraries have. */
static void fill_around(uintptr_t address)
{
    enum { MOST = 4096 };
    static uintptr_t gap[MOST][2];
    const uintptr_t page = address & ~(uintptr_t)4095, far = UINT64_C(1) << 31, low = page > far ? page - far : 65536,
                    high = page + far;
    uintptr_t end = low;
    unsigned long first, past;
    int n = 0;
    char line[1024];
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && n < MOST && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx", &first, &past) != 2 || past <= low) continue;
        if (first > end && end < high) gap[n][0] = end, gap[n++][1] = first < high ? first : high;
        if (past > end) end = past;
    }
    if (maps) fclose(maps);
    if (n < MOST && end < high) gap[n][0] = end, gap[n++][1] = high;
    for (int i = 0; i < n; i++)
        mmap((void *)gap[i][0], gap[i][1] - gap[i][0], PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
}

/** Map a page in each 128 KiB within 1 GiB of @address, which leaves many small gaps. */
static void scatter_around(uintptr_t address)
{
    for (intptr_t i = -8192; i < 8192; i++)
        mmap((void *)((address & ~(uintptr_t)4095) + (uintptr_t)(i * (128 << 10))), 4096, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
}

/** Long loops of 300 functions, whose code takes more than a MiB, and how many traces there are of them. */
static const char loops[] =
    "local util = require 'jit.util'\n"
    "local M, kept = {}, {}\n"
    "function M.traces()\n"
    "  for i = 1, 300 do\n"
    "    local line = 's = s * 0.5 + k % ' .. (i + 1) .. ' '\n"
    "    local f = loadstring('local s = ' .. i .. ' for k = 1, 200 do ' .. line:rep(60) .. 'end return s')\n"
    "    f()\n"
    "    kept[i] = f\n"
    "  end\n"
    "  local n = 0\n"
    "  for i = 1, 2000 do if util.traceinfo(i) then n = n + 1 end end\n"
    "  return n\n"
    "end\n"
    "return M";

/** A state of the host's own, whose compiler has taken memory for a loop already. */
static lua_State *state_with_code(void)
{
    lua_State *L = luaL_newstate();
    if (!L) return NULL;
    luaL_openlibs(L);
    return luaL_dostring(L, "for _ = 1, 200 do end assert(require 'jit.util'.traceinfo(1))") ? NULL : L;
}

/** In a child, since what is mapped stays: 0 if the loops were compiled. @own: in a state of the host's own. @before,
 *  @after: what maps memory before the library has a state, or after that. */
static int compiled_in_child(bool own, void (*before)(uintptr_t address), void (*after)(uintptr_t address))
{
    const pid_t child = fork();
    int status = -1;
    if (child == 0) {
        peri_lua_value n = {0};
        peri_lua_config config = {.size = sizeof config, .state = own ? state_with_code() : NULL};
        peri_lua *lua = NULL;
        peri_lua_object *m = NULL;
        if (own && !config.state) _exit(5);
        if (before) before((uintptr_t)(void *)&lua_pcall);
        if (peri_lua_new(&config, &lua) < 0) _exit(2);
        if (after) after((uintptr_t)(void *)&lua_pcall);
        if (peri_lua_load_text(lua, "loops.lua", loops, (int64_t)strlen(loops), NULL, 0, &m) < 0) _exit(3);
        if (peri_lua_call(m, "traces", NULL, 0, &n, 1) < 0) _exit(4);
        _exit(n.number >= 300 ? 0 : 1);
    }
    assert_true(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void code_finds_memory_in_hosts_with_much_mapped(void **state)
{
    (void)state;
    for (int own = 0; own < 2; own++) {
        assert_int_equal(compiled_in_child(own, NULL, fill_around), 0);
        assert_int_equal(compiled_in_child(own, scatter_around, NULL), 0);
    }
    assert_int_equal(compiled_in_child(false, fill_around, NULL), 1); /* no room any more: scripts run interpreted */
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(scripts_work_in_the_hosts_memory),
    cmocka_unit_test(values_come_back_as_they_went),
    cmocka_unit_test(scripts_round_as_the_library_does),
    cmocka_unit_test(errors_are_statuses_with_words),
    cmocka_unit_test(endless_recursion_is_an_error),
    cmocka_unit_test(a_state_is_one_threads_at_a_time),
    cmocka_unit_test(narrow_states_have_little),
    cmocka_unit_test(a_state_of_the_hosts_own_keeps_what_it_has),
    cmocka_unit_test(a_state_may_have_an_allocator_of_the_hosts_own),
    cmocka_unit_test(threads_have_states_of_their_own_and_share_tables),
    cmocka_unit_test(a_collection_keeps_the_table_batch_of_an_earlier_call),
    cmocka_unit_test(a_failure_without_memory_comes_back),
    cmocka_unit_test(a_lack_of_memory_that_is_passed_on_says_so),
    cmocka_unit_test(no_grad_without_memory_changes_nothing),
    cmocka_unit_test(code_finds_memory_in_hosts_with_much_mapped),
    cmocka_unit_test(nothing_is_left),
};

int main(void) { return cmocka_run_group_tests(tests, open_cpu, NULL); }
