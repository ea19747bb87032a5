/* SPDX-License-Identifier: Apache-2.0
 *
 * lua.c: a C program whose model is a Lua script. The buffers are the program's: the script reads and writes them in
 * place.
 *
 *   cc lua.c $(pkg-config --cflags --libs perilune) -o lua && ./lua score.lua 1,2,3 4,5,6
 *
 * The arguments are samples of three numbers each. The program prints a score for each, and what the script says of its
 * model.
 */
#include <perilune/host.h>
#include <stdio.h>
#include <stdlib.h>

enum { FEATURES = 3, MOST = 64 };

static void check(peri_status status)
{
    if (status >= 0) return;
    fprintf(stderr, "lua: %s\n", peri_error_message());
    exit(1);
}

/* The library has given up a buffer: from now on the program may free it. */
static void done(void *count, void *data)
{
    (void)data;
    ++*(int *)count;
}

/* A value for the script: a tensor that lies in the program's memory. */
static peri_lua_value buffer(peri_device *cpu, int64_t rows, int64_t cols, float *data, int *given_back)
{
    const int64_t shape[2] = {rows, cols};
    static peri_lua_value zeros;
    peri_lua_value value = zeros;
    value.kind = PERI_LUA_TENSOR;
    check(peri_host_tensor(cpu, PERI_F32, cols ? 2 : 1, shape, data, done, given_back, &value.tensor));
    return value;
}

int main(int argc, char **argv)
{
    static float samples[MOST][FEATURES], scores[MOST];
    static peri_lua_config config; /* static: zeros, which are the defaults of all fields but `size` */
    const int64_t n = argc - 2;
    int given_back = 0;
    if (argc < 3 || n > MOST) {
        fprintf(stderr, "usage: lua SCRIPT SAMPLE ...: up to %d samples of %d numbers with commas between\n", MOST,
                FEATURES);
        return 2;
    }
    for (int i = 0; i < n; i++) {
        char *at = argv[i + 2];
        for (int k = 0; k < FEATURES; k++) {
            samples[i][k] = strtof(at, &at);
            if (*at != (k < FEATURES - 1 ? ',' : 0))
                return fprintf(stderr, "lua: '%s': not %d numbers\n", argv[i + 2], FEATURES), 2;
            at++;
        }
    }

    peri_device *cpu;
    peri_lua *lua;
    peri_lua_object *model;
    peri_lua_value values[2], said[2];
    config.size = sizeof config;
    config.narrow = 1; /* the script needs neither files nor the system */
    check(peri_device_get("cpu", &cpu));
    check(peri_lua_new(&config, &lua));
    check(peri_lua_load(lua, argv[1], NULL, 0, &model));

    values[0] = buffer(cpu, n, FEATURES, samples[0], &given_back);
    values[1] = buffer(cpu, n, 0, scores, &given_back);
    check(peri_lua_call(model, "score", values, 2, NULL, 0));
    for (int i = 0; i < n; i++) printf("%g\n", scores[i]);

    check(peri_lua_call(model, "describe", NULL, 0, said, 2));
    printf("%s, %g parameters\n", said[0].text, said[1].number);

    peri_lua_values_release(values, 2);
    peri_lua_object_release(model);
    peri_lua_release(lua);
    printf("%d buffers are the program's again\n", given_back);
    return 0;
}
