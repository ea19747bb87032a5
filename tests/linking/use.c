/* SPDX-License-Identifier: Apache-2.0
 *
 * use.c: what a guest does with the library: a lookup, a matrix product that the worker threads share, an error.
 * spec/linking_spec.lua builds it as a program (by -DPROGRAM), and as a plugin, in every way in which the library can
 * be linked.
 */
#include <perilune/perilune.h>
#include <stdio.h>
#include <string.h>

enum { ROWS = 100, COLS = 4, BAGS = 3, N = 300 };

int use(void);

static int look_up(peri_device *cpu)
{
    static const int64_t ids[] = {1, 99, 7, 7, 3}, offsets[] = {0, 2, 2, 5}, n = 5, ends = BAGS + 1,
                         shape[2] = {BAGS, COLS};
    const peri_table_config table = {
        .size = sizeof table, .name = "t", .rows = ROWS, .cols = COLS, .init = PERI_INIT_CONSTANT, .init_a = 2};
    const peri_tbe_config config = {.size = sizeof config, .device = cpu, .n_tables = 1, .tables = &table};
    const peri_tbe_block block = {.bags = BAGS, .out_stride = COLS, .feature = -1};
    peri_tbe_input in = {0};
    peri_tensor *out;
    peri_tbe *tbe;
    float sums[BAGS][COLS];
    if (peri_tbe_new(&config, &tbe) < 0 || peri_tbe_blocks_new(tbe, &block, 1, &in.blocks) < 0) return 1;
    if (peri_tensor_new(cpu, PERI_I64, 1, &n, &in.ids) < 0 || peri_tensor_write(in.ids, ids, sizeof ids) < 0) return 2;
    if (peri_tensor_new(cpu, PERI_I64, 1, &ends, &in.offsets) < 0 ||
        peri_tensor_write(in.offsets, offsets, sizeof offsets) < 0)
        return 3;
    if (peri_tensor_new(cpu, PERI_F32, 2, shape, &out) < 0 || peri_tbe_forward(tbe, &in, out) < 0) return 4;
    if (peri_tensor_read(out, sums, sizeof sums) < 0) return 5;
    for (int c = 0; c < COLS; c++)
        if (sums[0][c] != 4 || sums[1][c] != 0 || sums[2][c] != 6) return 6;
    peri_tensor_release(out);
    peri_tensor_release(in.ids);
    peri_tensor_release(in.offsets);
    peri_tbe_blocks_release(in.blocks);
    peri_tbe_release(tbe);
    return 0;
}

static int multiply(peri_device *cpu)
{
    static const int64_t shape[2] = {N, N};
    peri_tensor *a, *b;
    double x = 0;
    if (peri_tensor_full(cpu, PERI_F32, 2, shape, 1, &a) < 0 || peri_op_matmul(a, a, &b) < 0) return 7;
    if (peri_tensor_item(b, N * N - 1, &x) < 0 || x != N) return 8;
    peri_tensor_release(a);
    peri_tensor_release(b);
    return 0;
}

/* 0, or what went wrong. Any number of threads at once. */
int use(void)
{
    peri_device *cpu;
    if (peri_abi_version() != PERI_ABI_VERSION || peri_device_get("cpu", &cpu) < 0) return 9;
    int wrong = look_up(cpu);
    if (!wrong) wrong = multiply(cpu);
    if (!wrong && (peri_device_get("moon", &cpu) != PERI_ENOTFOUND || !strstr(peri_error_message(), "moon")))
        wrong = 10;
    return wrong;
}

#ifdef PROGRAM
int main(void)
{
    const int wrong = use();
    if (wrong) fprintf(stderr, "use: %d: %s\n", wrong, peri_error_message());
    else printf("ok %s, %lld objects\n", peri_version(), (long long)peri_mem_objects());
    return wrong;
}
#endif
