/* SPDX-License-Identifier: Apache-2.0
 *
 * threads.c: a C program in which many threads run the same Lua script at once. Each has a Lua of its own; all look up
 * in one table, whose rows lie in the program's memory.
 *
 *   cc threads.c $(pkg-config --cflags --libs perilune) -lpthread -o threads && ./threads score.lua 4
 *
 * Row r of the table is r, r, r, r, so that the pooled row of a bag is the sum of its ids, which the program checks.
 */
#include <perilune/host.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 1000, COLS = 4, BAGS = 8, CALLS = 200, MOST = 64 };
static const char *script;
static peri_device *cpu;
static peri_tbe *tables;

static void check(peri_status status)
{
    if (status >= 0) return;
    fprintf(stderr, "threads: %s\n", peri_error_message()); /* of the calling thread */
    exit(1);
}

static void make_tables(void)
{
    static float rows[ROWS][COLS];
    static peri_table_config table; /* static: zeros, which are the defaults of all fields but `size` */
    static peri_tbe_config config;
    const int64_t n = ROWS * COLS;
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLS; c++) rows[r][c] = (float)r;
    config.size = sizeof config, table.size = sizeof table;
    table.name = "items", table.rows = ROWS, table.cols = COLS;
    config.device = cpu, config.tables = &table, config.n_tables = 1;
    check(peri_host_tensor(cpu, PERI_F32, 1, &n, rows, NULL, NULL, &config.weights));
    check(peri_tbe_new(&config, &tables));
    peri_tensor_release(config.weights);
}

static peri_lua_value tensor_over(int32_t dtype, int32_t ndim, const int64_t *shape, void *data)
{
    static peri_lua_value zeros;
    peri_lua_value value = zeros;
    value.kind = PERI_LUA_TENSOR;
    check(peri_host_tensor(cpu, dtype, ndim, shape, data, NULL, NULL, &value.tensor));
    return value;
}

/* One thread: its own Lua, its own buffers, the table of all. Returns how many numbers were wrong. */
static void *serve(void *number)
{
    int64_t ids[BAGS * BAGS], lengths[BAGS], shape[2] = {BAGS, COLS}, wrong = 0, bags = BAGS;
    float out[BAGS][COLS];
    peri_lua *lua;
    peri_lua_object *model;
    static peri_lua_value zeros;
    peri_lua_value given = zeros;
    given.kind = PERI_LUA_TBE, given.tbe = tables;
    check(peri_lua_new(NULL, &lua));
    check(peri_lua_load(lua, script, &given, 1, &model));
    for (int64_t call = 0; call < CALLS; call++) {
        int64_t n = 0, sum[BAGS];
        for (int b = 0; b < BAGS; b++) { /* batches of different lengths */
            lengths[b] = (call + b) % BAGS, sum[b] = 0;
            for (int64_t i = 0; i < lengths[b]; i++)
                sum[b] += ids[n++] = (call * 31 + b * 7 + i * (int64_t)(size_t)number) % ROWS;
        }
        peri_lua_value values[3];
        values[0] = tensor_over(PERI_I64, 1, &n, ids);
        values[1] = tensor_over(PERI_I64, 1, &bags, lengths);
        values[2] = tensor_over(PERI_F32, 2, shape, out);
        check(peri_lua_call(model, "pool", values, 3, NULL, 0));
        peri_lua_values_release(values, 3);
        for (int b = 0; b < BAGS; b++)
            for (int c = 0; c < COLS; c++) wrong += out[b][c] != (float)sum[b];
    }
    peri_lua_object_release(model);
    peri_lua_release(lua);
    return (void *)(size_t)wrong;
}

int main(int argc, char **argv)
{
    pthread_t thread[MOST];
    const int n = argc == 3 ? atoi(argv[2]) : 0;
    size_t wrong = 0;
    if (n < 1 || n > MOST) return fprintf(stderr, "usage: threads SCRIPT THREADS: 1 to %d of them\n", MOST), 2;
    script = argv[1];
    check(peri_threads_set(1)); /* the threads are the program's: a call computes in the one that made it */
    check(peri_device_get("cpu", &cpu));
    make_tables();
    for (int i = 0; i < n; i++)
        if (pthread_create(&thread[i], NULL, serve, (void *)(size_t)(i + 1)) != 0) return perror("threads"), 1;
    for (int i = 0; i < n; i++) {
        void *result;
        pthread_join(thread[i], &result);
        wrong += (size_t)result;
    }
    peri_tbe_release(tables);
    printf("%d threads made %d calls each, %zu numbers were wrong, %lld objects are left\n", n, CALLS, wrong,
           (long long)peri_mem_objects());
    return wrong > 0;
}
