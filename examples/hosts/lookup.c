/* SPDX-License-Identifier: Apache-2.0
 *
 * lookup.c: a C program that owns two embedding tables and looks rows up, without Lua.
 *
 *   cc lookup.c $(pkg-config --cflags --libs perilune) -o lookup && ./lookup 3 7 999
 *
 * The arguments are one user's clicked items. The program prints the sum of their rows and the mean of the same user's
 * two tags. Numbers that no item has end in the library's message.
 */
#include <perilune/perilune.h>
#include <stdio.h>
#include <stdlib.h>

enum { ITEMS = 1000, TAGS = 10, COLS = 4, MAX_IDS = 64 };

static void check(peri_status status)
{
    if (status >= 0) return;
    fprintf(stderr, "lookup: %s\n", peri_error_message());
    exit(1);
}

/* A tensor with a copy of `data`. */
static peri_tensor *tensor_of(peri_device *cpu, int32_t dtype, int64_t count, const void *data)
{
    peri_tensor *t;
    check(peri_tensor_new(cpu, dtype, 1, &count, &t));
    check(peri_tensor_write(t, data, count * peri_dtype_size(dtype)));
    return t;
}

/* Start values are the program's own: row r of a table is r + 0, r + 0.25, r + 0.5, r + 0.75. */
static void fill(peri_tbe *tables, peri_device *cpu, int64_t table, int64_t rows)
{
    int64_t shape[2] = {rows, COLS};
    float *numbers = (float *)malloc((size_t)(rows * COLS) * sizeof *numbers);
    peri_tensor *t;
    if (!numbers) exit(1);
    for (int64_t i = 0; i < rows * COLS; i++) numbers[i] = (float)(i / COLS) + 0.25f * (float)(i % COLS);
    check(peri_tensor_new(cpu, PERI_F32, 2, shape, &t));
    check(peri_tensor_write(t, numbers, rows * COLS * (int64_t)sizeof *numbers));
    check(peri_tbe_write(tables, table, "weight", 0, t));
    peri_tensor_release(t);
    free(numbers);
}

static peri_tbe *make_tables(peri_device *cpu)
{
    static const char *const features[] = {"clicked", "tags"};
    static peri_table_config table[2]; /* static: zeros, which are the defaults of all fields but `size` */
    static peri_tbe_config config;
    peri_tbe *tables;
    config.size = sizeof config, table[0].size = table[1].size = sizeof table[0];
    table[0].name = "items", table[0].rows = ITEMS, table[0].cols = COLS, table[0].pooling = PERI_POOLING_SUM;
    table[1].name = "tags", table[1].rows = TAGS, table[1].cols = COLS, table[1].pooling = PERI_POOLING_MEAN;
    table[0].init = table[1].init = PERI_INIT_NONE;
    config.device = cpu, config.dtype = PERI_F32;
    config.tables = table, config.n_tables = 2;
    config.features = features, config.n_features = 2;
    check(peri_tbe_new(&config, &tables));
    fill(tables, cpu, 0, ITEMS);
    fill(tables, cpu, 1, TAGS);
    return tables;
}

int main(int argc, char **argv)
{
    peri_device *cpu;
    int64_t ids[MAX_IDS + 2], shape[2] = {1, 2 * COLS}, n = 0;
    float out[2 * COLS];
    if (argc < 2 || argc > MAX_IDS + 1) {
        fprintf(stderr, "usage: lookup ID [ID ...]: up to %d items, of 0 to %d\n", MAX_IDS, ITEMS - 1);
        return 2;
    }
    for (int i = 1; i < argc; i++) {
        char *end;
        ids[n++] = strtoll(argv[i], &end, 10);
        if (end == argv[i] || *end) return fprintf(stderr, "lookup: '%s' is no number\n", argv[i]), 2;
    }
    int64_t offsets[3] = {0, n, n + 2}; /* one sample: bag 0 is its clicked items, bag 1 its tags */
    ids[n] = 2, ids[n + 1] = 5;

    check(peri_device_get("cpu", &cpu));
    peri_tbe *tables = make_tables(cpu);

    /* Which bags look into which table, and where their sums go: the columns of one output row. */
    static peri_tbe_block block[2];
    for (int k = 0; k < 2; k++) {
        block[k].first_bag = k, block[k].bags = 1, block[k].table = block[k].feature = k;
        block[k].out_offset = k * COLS, block[k].out_stride = 2 * COLS;
    }
    static peri_tbe_input input;
    check(peri_tbe_blocks_new(tables, block, 2, &input.blocks));
    input.ids = tensor_of(cpu, PERI_I64, n + 2, ids);
    input.offsets = tensor_of(cpu, PERI_I64, 3, offsets);
    peri_tensor *pooled;
    check(peri_tensor_new(cpu, PERI_F32, 2, shape, &pooled));
    check(peri_tbe_forward(tables, &input, pooled));
    check(peri_tensor_read(pooled, out, sizeof out));
    printf("clicked: %g %g %g %g\ntags: %g %g %g %g\n", out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[7]);

    peri_tensor_release(pooled);
    peri_tensor_release(input.ids);
    peri_tensor_release(input.offsets);
    peri_tbe_blocks_release(input.blocks);
    peri_tbe_release(tables);
    return 0;
}
