/* SPDX-License-Identifier: Apache-2.0
 *
 * test_checkpoint_state.c: what a C program has, by the names that it has in checkpoints (peri_checkpoint_state).
 */
#include "tests/harness/check.h"

#include "checkpoint_folder.h"

#include <perilune/host.h>
#include <perilune/shard.h>

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/** 100,000 tensors of 1,000 parts: each name is looked up, not compared with all others. */
static void many_names_take_as_long_as_they_are_many(void **context)
{
    enum { N = 100000 };
    (void)context;
    const int64_t one = 1;
    char name[64];
    const char *values;
    peri_checkpoint_state *s;
    peri_tensor *t;
    const clock_t begin = clock();
    assert_ok(peri_tensor_full(cpu(), PERI_F32, 1, &one, 0, &t));
    assert_ok(peri_checkpoint_state_new(0, &s));
    for (int64_t k = 0; k < N; k++) {
        snprintf(name, sizeof name, "part%d/tensor-%d", (int)(k % 1000), (int)k);
        assert_ok(peri_checkpoint_state_tensor(s, name, t));
    }
    assert_fails(peri_checkpoint_state_tensor(s, "part7/tensor-7", t), PERI_EINVAL,
                 "'part7/tensor-7' is there already");
    assert_ok(peri_checkpoint_state_values(s, NULL, &values));
    assert_true(strncmp(values, "{\"parts\":{\"part0\":{},\"part1\":{},", 32) == 0);
    assert_non_null(strstr(values, ",\"part999\":{}}"));
    peri_checkpoint_state_release(s);
    peri_tensor_release(t);
    assert_true(clock() - begin < 3 * CLOCKS_PER_SEC);
}

/** "/", "%" and a "#" in front of a key, of a module and tables here (docs/checkpoint_format.md, What programs save).
 *  Two ranks have one table each, and neither takes the other's for one that has no place. */
static void keys_are_written_as_in_lua(void **context)
{
    static const char *const names[] = {
        "model/%23m.embedding_bags.a%2Fb.weight", "model.tables/state/%23m.embedding_bags.a%2Fb.weight/a%2Fb.step",
        "model/%23m.embedding_bags.%25c.weight", "model.tables/state/%23m.embedding_bags.%25c.weight/%25c.momentum1"};
    static const char *const features[] = {"f", "g"};
    peri_tbe_optimizer_config adagrad = {.size = sizeof adagrad};
    assert_ok(peri_tbe_optimizer_default(PERI_TBE_ROWWISE_ADAGRAD, &adagrad));
    (void)context;
    peri_group *group[2];
    peri_sharded *tables[2];
    peri_checkpoint_state *state[2];
    const char *parts[2];
    char digest[33];
    peri_checkpoint_writer *w[2];
    peri_checkpoint *c;
    for (int32_t r = 0; r < 2; r++) {
        const peri_comm_config world = {
            .size = sizeof world, .transport = "sim", .job = "keys", .rank = r, .world_size = 2, .timeout_s = 20};
        assert_ok(peri_comm_open(&world, &group[r]));
    }
    for (int32_t r = 0; r < 2; r++) {
        const peri_sharded_table own[] = {{.size = sizeof *own,
                                           .name = "a/b",
                                           .rows = 3,
                                           .cols = 4,
                                           .features = (int32_t[]){0},
                                           .n_features = 1,
                                           .sharding_type = PERI_TABLE_WISE,
                                           .ranks = (int32_t[]){0},
                                           .n_ranks = 1,
                                           .compute_kernel = PERI_KERNEL_FUSED},
                                          {.size = sizeof *own,
                                           .name = "%c",
                                           .rows = 3,
                                           .cols = 4,
                                           .features = (int32_t[]){1},
                                           .n_features = 1,
                                           .sharding_type = PERI_TABLE_WISE,
                                           .ranks = (int32_t[]){1},
                                           .n_ranks = 1,
                                           .compute_kernel = PERI_KERNEL_FUSED}};
        const peri_sharded_config config = {.size = sizeof config,
                                            .group = group[r],
                                            .device = cpu(),
                                            .tables = own,
                                            .n_tables = 2,
                                            .features = features,
                                            .n_features = 2,
                                            .optimizers = &adagrad,
                                            .n_optimizers = 1};
        assert_ok(peri_sharded_new(&config, &tables[r]));
        assert_ok(peri_checkpoint_state_new(r, &state[r]));
        assert_ok(peri_checkpoint_state_tables(state[r], "model", "#m", tables[r], &config));
        assert_ok(peri_checkpoint_writer_new(saving, r ? "b" : "a", 0, &w[r]));
        assert_ok(peri_checkpoint_state_write(state[r], w[r]));
        assert_ok(peri_checkpoint_writer_part(w[r], &parts[r]));
    }
    assert_ok(peri_checkpoint_publish(saving, path, parts, 2, NULL, false, digest));
    assert_ok(peri_checkpoint_open(path, &c));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) assert_true(peri_checkpoint_find(c, names[i]) >= 0);
    for (int32_t r = 0; r < 2; r++) {
        assert_ok(peri_checkpoint_state_read(state[r], c));
        peri_checkpoint_state_release(state[r]);
        peri_checkpoint_writer_release(w[r]);
        peri_sharded_release(tables[r]);
    }
    peri_checkpoint_release(c);
    for (int32_t r = 0; r < 2; r++) peri_group_close(group[r]);
    for (int32_t r = 0; r < 2; r++) peri_group_release(group[r]);
}

/* -- collections of one table -------------------------------------------------------------------------------------- */

/** The sharded collection of @table, of feature "f", on rank @rank of @group (@places of the process), trained by
 *  @optimizer (NULL: nobody trains it); and what of it is saved. */
static void make_collection(peri_group *group, int32_t rank, int32_t places, peri_sharded_table table,
                            const peri_tbe_optimizer_config *optimizer, peri_sharded **of,
                            peri_checkpoint_state **state)
{
    static const char *const feature = "f";
    table.size = sizeof table;
    table.name = "t";
    table.features = (int32_t[]){0};
    table.n_features = 1;
    const peri_sharded_config config = {.size = sizeof config,
                                        .group = group,
                                        .device = cpu(),
                                        .tables = &table,
                                        .n_tables = 1,
                                        .features = &feature,
                                        .n_features = 1,
                                        .optimizers = optimizer,
                                        .n_optimizers = optimizer != NULL,
                                        .places = places};
    assert_ok(peri_sharded_new(&config, of));
    assert_ok(peri_checkpoint_state_new(rank, state));
    assert_ok(peri_checkpoint_state_tables(*state, "model", "ebc", *of, &config));
}

/** The same, trained by an optimizer of kind @kind, in @n blocks of columns on this one rank. */
static void make_trained(int32_t kind, int32_t n, peri_sharded_table table, peri_sharded **of,
                         peri_checkpoint_state **state)
{
    static const int32_t ranks[16] = {0};
    const peri_comm_config world = {.size = sizeof world, .transport = "self", .world_size = 1};
    peri_tbe_optimizer_config optimizer = {.size = sizeof optimizer};
    peri_group *group;
    int64_t sizes[16];
    for (int32_t i = 0; i < n; i++) sizes[i] = table.cols / n;
    assert_ok(peri_tbe_optimizer_default(kind, &optimizer));
    assert_ok(peri_comm_open(&world, &group));
    table.sharding_type = n > 1 ? PERI_COLUMN_WISE : PERI_TABLE_WISE;
    table.compute_kernel = PERI_KERNEL_FUSED;
    table.ranks = ranks;
    table.n_ranks = n;
    table.sizes = n > 1 ? sizes : NULL;
    make_collection(group, 0, 0, table, &optimizer, of, state);
    peri_group_close(group);
    peri_group_release(group);
}

/* -- Shampoo ------------------------------------------------------------------------------------------------------- */

enum { COLS = 16 };
static const char *const preconditioner = "model.tables/state/ebc.embedding_bags.t.weight/t.preconditioner";

/** A table of COLS columns trained with Shampoo, in blocks of COLS / @n columns on this one rank, and what of it is
 *  saved. */
static void make_blocks(int32_t n, peri_sharded **of, peri_checkpoint_state **state)
{
    make_trained(PERI_TBE_SHAMPOO, n, (peri_sharded_table){.rows = 3, .cols = COLS}, of, state);
}

/** What a number of the whole matrix is. */
static float number(int64_t row, int64_t col) { return (float)(1 + row * COLS + col); }

/** Read (@values NULL: write number()) the preconditioner of block @i, whose first column is @first. */
static void block_of(peri_sharded *of, int32_t i, int64_t n, float *values)
{
    peri_local_shard l;
    peri_tensor *t;
    float own[COLS * COLS];
    assert_ok(peri_sharded_local_shard(of, i, &l));
    assert_ok(peri_tbe_state(l.tbe, l.tbe_table, "preconditioner", &t));
    const int64_t first = l.shard.col_offset;
    for (int64_t k = 0; k < n * n; k++) own[k] = number(first + k / n, first + k % n);
    if (values) assert_ok(peri_tensor_read(t, values, n * n * 4));
    else assert_ok(peri_tensor_write(t, own, n * n * 4));
    peri_tensor_release(t);
}

static void save(peri_checkpoint_state *state)
{
    const char *part;
    char digest[33];
    peri_checkpoint_writer *w;
    peri_checkpoint_folder *held;
    assert_ok(peri_checkpoint_folder_new(path, &held));
    const char *at = peri_checkpoint_folder_path(held);
    assert_ok(peri_checkpoint_writer_new(at, "r", 0, &w));
    assert_ok(peri_checkpoint_state_write(state, w));
    assert_ok(peri_checkpoint_writer_part(w, &part));
    assert_ok(peri_checkpoint_publish(at, path, &part, 1, NULL, true, digest));
    peri_checkpoint_writer_release(w);
    peri_checkpoint_folder_release(held);
}

/** Columns cut into @from blocks are saved, and loaded into @to: each block has the pairs that lay in one block of
 *  both; others are 0. */
static void check_blocks(int32_t from, int32_t to)
{
    peri_sharded *saved, *loaded;
    peri_checkpoint_state *source, *target;
    peri_checkpoint *c;
    const int64_t n = COLS / from, wide = COLS / to;
    float values[COLS * COLS];
    make_blocks(from, &saved, &source);
    make_blocks(to, &loaded, &target);
    for (int32_t i = 0; i < from; i++) block_of(saved, i, n, NULL);
    save(source);
    assert_ok(peri_checkpoint_open(path, &c));
    assert_true(peri_checkpoint_find(c, preconditioner) >= 0);
    assert_ok(peri_checkpoint_state_read(target, c));
    for (int32_t i = 0; i < to; i++) {
        peri_local_shard l;
        assert_ok(peri_sharded_local_shard(loaded, i, &l));
        block_of(loaded, i, wide, values);
        for (int64_t k = 0; k < wide * wide; k++) {
            const int64_t row = l.shard.col_offset + k / wide, col = l.shard.col_offset + k % wide;
            assert_float_equal(values[k], (row / n == col / n ? number(row, col) : 0), 0);
        }
    }
    peri_checkpoint_release(c);
    peri_checkpoint_state_release(source);
    peri_checkpoint_state_release(target);
    peri_sharded_release(saved);
    peri_sharded_release(loaded);
}

static void shampoo_has_blocks_on_the_diagonal(void **context)
{
    (void)context;
    for (int32_t from = 1; from <= 4; from *= 2)
        for (int32_t to = 1; to <= 4; to *= 2) check_blocks(from, to);
}

/* -- tables in files ----------------------------------------------------------------------------------------------- */

enum { FILE_ROWS = 300, FILE_COLS = 8 };

/** A table trained with row-wise Adagrad on this one rank, in @n blocks of columns: behind caches of a tenth of its
 *  rows, in files of @directory (NULL: nameless ones), or in memory (@cached false). */
static void make_rows(bool cached, const char *directory, int32_t n, peri_sharded **of, peri_checkpoint_state **state)
{
    const peri_cache_config cache = {.size = sizeof cache, .load_factor = 0.1, .directory = directory};
    const peri_sharded_table table = {.rows = FILE_ROWS, .cols = FILE_COLS, .cache = cached ? &cache : NULL};
    make_trained(PERI_TBE_ROWWISE_ADAGRAD, n, table, of, state);
}

/** Write (@check: compare) the weights and the numbers of all rows. Blocks of columns have the same number of a row. */
static void rows_of(peri_sharded *of, bool check)
{
    for (int32_t i = 0; i < peri_sharded_local_shards(of); i++) {
        peri_local_shard l;
        peri_tensor *t[2];
        float values[FILE_ROWS * FILE_COLS], own[FILE_ROWS * FILE_COLS];
        assert_ok(peri_sharded_local_shard(of, i, &l));
        const int64_t wide = l.shard.cols, shape[2] = {FILE_ROWS, wide};
        for (int s = 0; s < 2; s++) {
            const int64_t each = s ? 1 : wide;
            for (int64_t k = 0; k < FILE_ROWS * each; k++)
                values[k] = s ? (float)k + 0.5f : (float)(k / wide * 100 + l.shard.col_offset + k % wide);
            assert_ok(peri_tensor_new(cpu(), PERI_F32, s ? 1 : 2, shape, &t[s]));
            const char *name = s ? "momentum1" : "weight";
            if (check) {
                assert_ok(peri_tbe_read(l.tbe, l.tbe_table, name, 0, t[s]));
                assert_ok(peri_tensor_read(t[s], own, FILE_ROWS * each * 4));
                assert_memory_equal(own, values, (size_t)(FILE_ROWS * each * 4));
            } else {
                assert_ok(peri_tensor_write(t[s], values, FILE_ROWS * each * 4));
                assert_ok(peri_tbe_write(l.tbe, l.tbe_table, name, 0, t[s]));
            }
            peri_tensor_release(t[s]);
        }
    }
}

/** Rows in files, nameless or in a folder, and in memory, whole or cut by columns, each into each. */
static void rows_in_files_are_saved_and_loaded(void **context)
{
    (void)context;
    char rows[2][160];
    for (int from = 0; from < 4; from++)
        for (int to = 0; to < 4; to++) {
            for (int k = 0; k < 2; k++) {
                snprintf(rows[k], sizeof rows[k], "%s/rows-%d-%d-%d", folder, from, to, k);
                assert_int_equal(mkdir(rows[k], 0777), 0);
            }
            peri_sharded *saved, *loaded;
            peri_checkpoint_state *source, *target;
            peri_checkpoint *c;
            make_rows(from > 0, from == 2 ? rows[0] : NULL, from == 3 ? 2 : 1, &saved, &source);
            make_rows(to > 0, to == 2 ? rows[1] : NULL, to == 3 ? 2 : 1, &loaded, &target);
            rows_of(saved, false);
            save(source);
            assert_ok(peri_checkpoint_open(path, &c));
            assert_ok(peri_checkpoint_state_read(target, c));
            rows_of(loaded, true);
            rows_of(saved, true);
            peri_checkpoint_release(c);
            peri_checkpoint_state_release(source);
            peri_checkpoint_state_release(target);
            peri_sharded_release(saved);
            peri_sharded_release(loaded);
        }
}

/* -- paths that are replaced --------------------------------------------------------------------------------------- */

/** A program has mapped a file of a checkpoint, and its tensor lies there; it saves that to the same path,
 *  which replaces the checkpoint, and trains on. What is mapped is as it was until it is written to. */
static void a_path_is_replaced_by_what_is_mapped_from_it(void **context)
{
    enum { N = 5000 };
    (void)context;
    const int64_t n = N;
    float values[N], read[N];
    char file[512];
    peri_tensor *t;
    peri_checkpoint_state *s;
    peri_checkpoint *c;
    peri_checkpoint_region region = {.size = sizeof region}, whole = {.size = sizeof whole, .extent = {N}};
    peri_checkpoint_place place = {.size = sizeof place};
    for (int i = 0; i < N; i++) values[i] = (float)i;
    assert_ok(peri_tensor_new(cpu(), PERI_F32, 1, &n, &t));
    assert_ok(peri_tensor_write(t, values, sizeof values));
    assert_ok(peri_checkpoint_state_new(0, &s));
    assert_ok(peri_checkpoint_state_tensor(s, "model/w", t));
    save(s);
    peri_checkpoint_state_release(s);
    peri_tensor_release(t);
    assert_ok(peri_checkpoint_open(path, &c));
    assert_ok(peri_checkpoint_piece(c, 0, 0, &region, &place));
    snprintf(file, sizeof file, "%s/%s", path, place.file);
    peri_checkpoint_release(c);
    const size_t bytes = (size_t)(place.begin + place.bytes);
    const int fd = open(file, O_RDONLY);
    char *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    assert_true(data != MAP_FAILED);
    close(fd);
    assert_ok(peri_host_tensor(cpu(), PERI_F32, 1, &n, data + place.begin, NULL, NULL, &t));
    assert_ok(peri_checkpoint_state_new(0, &s));
    assert_ok(peri_checkpoint_state_tensor(s, "model/w", t));
    for (int round = 0; round < 3; round++) {
        save(s);
        assert_memory_equal(data + place.begin, values, sizeof values);
        assert_ok(peri_checkpoint_open(path, &c));
        assert_ok(peri_checkpoint_verify(c, 0, 0));
        peri_tensor *back;
        assert_ok(peri_tensor_new(cpu(), PERI_F32, 1, &n, &back));
        assert_ok(peri_checkpoint_read(c, 0, &whole, back));
        assert_ok(peri_tensor_read(back, read, sizeof read));
        assert_memory_equal(read, values, sizeof values);
        peri_tensor_release(back);
        peri_checkpoint_release(c);
        for (int i = round; i < N; i += 7) values[i] += 0.25f; /* a step */
        assert_ok(peri_tensor_write(t, values, sizeof values));
    }
    peri_checkpoint_state_release(s);
    peri_tensor_release(t);
    munmap(data, bytes);
}

/* -- quantized tables ---------------------------------------------------------------------------------------------- */

enum { QUANT_ROWS = 5 };
static const char *const quantized = "model/ebc.embedding_bags.t.weight";

/** Rank @rank of @n (0: a process alone, @places of it) has a quantized table of QUANT_ROWS rows, cut as @type says. */
static void make_quantized(int32_t rank, int32_t n, int32_t places, int32_t dtype, int64_t cols, int32_t type,
                           peri_group **group, peri_sharded **of, peri_checkpoint_state **state)
{
    static const int32_t ranks[] = {1, 0}, last[] = {0};
    const int64_t sizes[] = {cols / 2, cols / 2};
    const peri_comm_config world = {.size = sizeof world,
                                    .transport = n ? "sim" : "self",
                                    .job = "quantized",
                                    .rank = rank,
                                    .world_size = n ? n : 1,
                                    .timeout_s = 20};
    assert_ok(peri_comm_open(&world, group));
    const peri_sharded_table table = {.rows = QUANT_ROWS,
                                      .cols = cols,
                                      .init = PERI_INIT_NONE,
                                      .sharding_type = type,
                                      .ranks = type == PERI_COLUMN_WISE ? ranks : type == PERI_TABLE_WISE ? last : NULL,
                                      .n_ranks = type == PERI_COLUMN_WISE ? 2 : type == PERI_TABLE_WISE,
                                      .sizes = type == PERI_COLUMN_WISE ? sizes : NULL,
                                      .dtype = dtype,
                                      .compute_kernel = PERI_KERNEL_QUANT};
    make_collection(*group, rank, places, table, NULL, of, state);
}

static void drop_quantized(peri_group *group, peri_sharded *of, peri_checkpoint_state *state)
{
    peri_checkpoint_state_release(state);
    peri_sharded_release(of);
    peri_group_close(group);
    peri_group_release(group);
}

/** Byte @b of row @row of the block of columns that begins at @first. */
static uint8_t code(int64_t row, int64_t first, int64_t b) { return (uint8_t)(40 * row + 16 * (first > 0) + b); }

/** Write (@check: compare) the bytes of the pieces here. */
static void codes_of(peri_sharded *of, bool check)
{
    for (int32_t i = 0; i < peri_sharded_local_shards(of); i++) {
        peri_local_shard l;
        peri_tensor *t;
        uint8_t bytes[QUANT_ROWS * 16];
        assert_ok(peri_sharded_local_shard(of, i, &l));
        assert_ok(peri_tbe_state(l.tbe, l.tbe_table, "weight", &t));
        peri_tensor_info d = {.size = sizeof d};
        assert_ok(peri_tensor_describe(t, &d));
        const int64_t width = d.shape[1];
        assert_true(d.numel == l.shard.rows * width && d.numel <= (int64_t)sizeof bytes);
        if (check) assert_ok(peri_tensor_read(t, bytes, d.numel));
        for (int64_t k = 0; k < d.numel; k++) {
            const uint8_t want = code(l.shard.row_offset + k / width, l.shard.col_offset, k % width);
            if (check) assert_int_equal(bytes[k], want);
            else bytes[k] = want;
        }
        if (!check) assert_ok(peri_tensor_write(t, bytes, d.numel));
        peri_tensor_release(t);
    }
}

/** Save a table that two ranks have. @said: what the first one says beside. */
static void save_quantized(int32_t dtype, int64_t cols, int32_t type, const char *said)
{
    peri_group *group[2];
    peri_sharded *of[2];
    peri_checkpoint_state *state[2];
    peri_checkpoint_writer *w[2];
    peri_checkpoint_folder *held;
    peri_checkpoint_config facts = {.size = sizeof facts};
    const char *parts[2];
    char digest[33];
    assert_ok(peri_checkpoint_folder_new(path, &held));
    const char *at = peri_checkpoint_folder_path(held);
    for (int32_t r = 0; r < 2; r++) {
        make_quantized(r, 2, 0, dtype, cols, type, &group[r], &of[r], &state[r]);
        codes_of(of[r], false);
        assert_ok(peri_checkpoint_writer_new(at, r ? "b" : "a", 0, &w[r]));
        assert_ok(peri_checkpoint_state_write(state[r], w[r]));
        assert_ok(peri_checkpoint_writer_part(w[r], &parts[r]));
    }
    assert_ok(peri_checkpoint_state_values(state[0], NULL, &facts.values));
    assert_string_equal(facts.values, said);
    assert_ok(peri_checkpoint_publish(at, path, parts, 2, &facts, true, digest));
    peri_checkpoint_folder_release(held);
    for (int32_t r = 0; r < 2; r++) {
        peri_checkpoint_writer_release(w[r]);
        drop_quantized(group[r], of[r], state[r]);
    }
}

/** Into @view, or into rows of it, nothing of another format is read: neither by one rectangle nor by several. */
static void refuse_rows_of_another_format(peri_checkpoint *c, peri_tensor *view)
{
    static const char why[] = "tensor 'model/ebc.embedding_bags.t.weight' has rows of INT4 x 8 here, and rows of INT8 "
                              "x 4 in the checkpoint";
    peri_checkpoint_region r = {.size = sizeof r, .extent = {QUANT_ROWS, 8}}, half = r, rest = r;
    peri_tensor *rows[2];
    assert_fails(peri_checkpoint_read(c, 0, &r, view), PERI_EMISMATCH, why);
    half.extent[0] = rest.offset[0] = QUANT_ROWS / 2;
    rest.extent[0] = QUANT_ROWS - QUANT_ROWS / 2;
    assert_ok(peri_tensor_slice(view, 0, 0, QUANT_ROWS / 2, 1, &rows[0]));
    assert_ok(peri_tensor_slice(view, 0, QUANT_ROWS / 2, QUANT_ROWS, 1, &rows[1]));
    assert_fails(peri_checkpoint_read(c, 0, &rest, rows[1]), PERI_EMISMATCH, why);
    const peri_checkpoint_region *regions[2] = {&half, &rest};
    assert_fails(peri_checkpoint_read_several(c, 0, regions, rows, 2), PERI_EMISMATCH, why);
    peri_tensor_release(rows[0]);
    peri_tensor_release(rows[1]);
}

/** Rows of bytes are one tensor of all ranks, under any plan that does not cut them; blocks of columns stay apart, and
 *  rows of another format are refused, whatever their bytes. */
static void quantized_tables_are_those_of_lua(void **context)
{
    (void)context;
    peri_group *group;
    peri_sharded *of;
    peri_checkpoint_state *state;
    peri_checkpoint *c;
    save_quantized(PERI_ROWS_INT8_HALF, 4, PERI_ROW_WISE,
                   "{\"parts\":{\"model\":{}},\"extra\":{\"model\":{}},\"rows\":{"
                   "\"model/ebc.embedding_bags.t.weight\":\"INT8 x 4\"}}");
    assert_ok(peri_checkpoint_open(path, &c));
    assert_true(peri_checkpoint_count(c) == 1 && peri_checkpoint_find(c, quantized) == 0);
    make_quantized(0, 0, 0, PERI_ROWS_INT8_HALF, 4, PERI_TABLE_WISE, &group, &of, &state);
    assert_ok(peri_checkpoint_state_read(state, c));
    codes_of(of, true);
    drop_quantized(group, of, state);
    make_quantized(0, 0, 0, PERI_ROWS_INT4, 8, PERI_TABLE_WISE, &group, &of, &state);
    assert_fails(peri_checkpoint_state_read(state, c), PERI_EMISMATCH,
                 "'model/ebc.embedding_bags.t.weight' has rows of INT4 x 8 here, and rows of INT8 x 4 in the "
                 "checkpoint");
    peri_local_shard l; /* a view of the rows, beside no module */
    peri_tensor *view;
    peri_checkpoint_state *alone;
    const char *said;
    assert_ok(peri_sharded_local_shard(of, 0, &l));
    assert_ok(peri_tbe_state(l.tbe, l.tbe_table, "weight", &view));
    assert_ok(peri_checkpoint_state_new(0, &alone));
    assert_ok(peri_checkpoint_state_tensor(alone, quantized, view));
    assert_ok(peri_checkpoint_state_values(alone, NULL, &said));
    assert_non_null(strstr(said, "\"rows\":{\"model/ebc.embedding_bags.t.weight\":\"INT4 x 8\"}"));
    assert_fails(peri_checkpoint_state_read(alone, c), PERI_EMISMATCH, "has rows of INT4 x 8 here");
    refuse_rows_of_another_format(c, view);
    peri_checkpoint_state_release(alone);
    peri_tensor_release(view);
    drop_quantized(group, of, state);
    peri_checkpoint_release(c);

    save_quantized(PERI_ROWS_INT4, 16, PERI_COLUMN_WISE,
                   "{\"parts\":{\"model\":{}},\"extra\":{\"model\":{}},\"rows\":{"
                   "\"model/ebc.embedding_bags.t.weight\":\"INT4 x 8\","
                   "\"model/ebc.embedding_bags.t.weight.1\":\"INT4 x 8\"}}");
    assert_ok(peri_checkpoint_open(path, &c));
    assert_true(peri_checkpoint_count(c) == 2);
    for (int32_t r = 0; r < 2; r++) { /* both have one of the blocks, and neither takes the other one for left over */
        make_quantized(r, 2, 0, PERI_ROWS_INT4, 16, PERI_COLUMN_WISE, &group, &of, &state);
        assert_ok(peri_checkpoint_state_read(state, c));
        codes_of(of, true);
        drop_quantized(group, of, state);
    }
    make_quantized(0, 0, 2, PERI_ROWS_INT4, 16, PERI_COLUMN_WISE, &group, &of, &state); /* two places of one process */
    assert_ok(peri_checkpoint_state_read(state, c));
    codes_of(of, true);
    drop_quantized(group, of, state);
    peri_checkpoint_release(c);
}

static const struct CMUnitTest tests[] = {
    TEST(many_names_take_as_long_as_they_are_many),
    TEST(keys_are_written_as_in_lua),
    TEST(shampoo_has_blocks_on_the_diagonal),
    TEST(rows_in_files_are_saved_and_loaded),
    TEST(a_path_is_replaced_by_what_is_mapped_from_it),
    TEST(quantized_tables_are_those_of_lua),
};

check_main(tests)
