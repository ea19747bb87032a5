/* SPDX-License-Identifier: Apache-2.0
 *
 * test_follow.c: following a run from C. The law: what a reader has of any checkpoint of a chain, brought up to date by
 * what came since, is what the newest has; and which checkpoint is the newest. Rows of tables: written one by one, and
 * as they were at a moment.
 */
#include "tests/harness/check.h"

#include <perilune/checkpoint.h>
#include <perilune/device.h>
#include <perilune/moment.h>

#include <stdlib.h>
#include <unistd.h>

enum { ROWS = 200, COLS = 6, PIECES = 4, LEVELS = 6 };

static char folder[64];
static float now[ROWS][COLS];
static uint64_t state = 88172645463325252u;

static int64_t draw(int64_t below) /* xorshift64* */
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (int64_t)((state * 0x2545f4914f6cdd1du >> 11) % (uint64_t)below);
}

static int make_folder(void **context)
{
    (void)context;
    strcpy(folder, "/tmp/peri-follow-XXXXXX");
    return mkdtemp(folder) ? 0 : 1;
}

static int remove_folder(void **context)
{
    char command[128];
    (void)context;
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command);
}

static peri_device *cpu(void)
{
    peri_device *device;
    assert_ok(peri_device_get("cpu", &device));
    return device;
}

/* -- a run --------------------------------------------------------------------------------------------------------- */

static const int64_t first_row[PIECES] = {0, 0, 120, 120}, rows_of[PIECES] = {120, 120, 80, 80};
static const int64_t first_col[PIECES] = {0, 4, 0, 4}, cols_of[PIECES] = {4, 2, 4, 2};

/** Some rows of piece @p change: their numbers in @list. Returns how many. */
static int64_t change(int p, int64_t *list)
{
    int64_t n = 0;
    for (int64_t r = first_row[p]; r < first_row[p] + rows_of[p]; r++) {
        if (draw(7)) continue;
        for (int64_t c = first_col[p]; c < first_col[p] + cols_of[p]; c++) now[r][c] = (float)draw(1000) / 8;
        list[n++] = r;
    }
    return n;
}

static void put(peri_checkpoint_writer *w, int p, const int64_t *list, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        assert_ok(peri_checkpoint_writer_put_bytes(w, &now[list ? list[i] : first_row[p] + i][first_col[p]],
                                                   cols_of[p] * (int64_t)sizeof(float)));
}

/** Save "t" as @name: whole, or an increment of what has digest @parent, with some rows of most pieces. */
static void save(const char *name, const char *parent, int64_t increment, char digest[33])
{
    static int64_t list[PIECES][ROWS];
    char path[128];
    int64_t n[PIECES];
    peri_checkpoint_folder *f;
    peri_checkpoint_writer *w;
    const char *part;
    const peri_checkpoint_tensor t = {
        .size = sizeof t, .name = "t", .dtype = PERI_F32, .ndim = 2, .shape = {ROWS, COLS}};
    snprintf(path, sizeof path, "%s/%s", folder, name);
    assert_ok(peri_checkpoint_folder_new(path, &f));
    assert_ok(peri_checkpoint_writer_new(peri_checkpoint_folder_path(f), "rank-0", 0, &w));
    for (int p = 0; p < PIECES; p++) {
        char rows[32];
        n[p] = change(p, list[p]);
        if (!parent || draw(5) == 0) n[p] = -1; /* the piece is whole */
        peri_checkpoint_region r = {
            .size = sizeof r, .offset = {first_row[p], first_col[p]}, .extent = {rows_of[p], cols_of[p]}};
        if (n[p] >= 0) {
            snprintf(rows, sizeof rows, "%%rows/0/%d", p);
            const peri_checkpoint_tensor l = {
                .size = sizeof l, .name = rows, .dtype = PERI_I64, .ndim = 1, .shape = {n[p]}};
            assert_ok(peri_checkpoint_writer_add(w, &l, &(peri_checkpoint_region){.size = sizeof r, .extent = {n[p]}}));
            r.rows = rows;
            r.listed = n[p];
        }
        assert_ok(peri_checkpoint_writer_add(w, &t, &r));
    }
    for (int p = 0; p < PIECES; p++) {
        if (n[p] > 0) assert_ok(peri_checkpoint_writer_put_bytes(w, list[p], 8 * n[p]));
        if (n[p] >= 0) put(w, p, list[p], n[p]);
        else put(w, p, NULL, rows_of[p]);
    }
    assert_ok(peri_checkpoint_writer_finish(w));
    assert_ok(peri_checkpoint_writer_part(w, &part));
    const peri_checkpoint_config facts = {.size = sizeof facts, .parent = parent, .increment = increment};
    assert_ok(peri_checkpoint_publish(peri_checkpoint_folder_path(f), path, &part, 1, &facts, false, digest));
    peri_checkpoint_writer_release(w);
    peri_checkpoint_folder_release(f);
}

/** Whether a rectangle in memory is that of @want. */
static bool alike(const float *memory, const peri_checkpoint_region *r, float (*want)[COLS])
{
    const size_t bytes = (size_t)r->extent[1] * sizeof(float);
    for (int64_t i = 0; i < r->extent[0]; i++)
        if (memcmp(memory + i * r->extent[1], &want[r->offset[0] + i][r->offset[1]], bytes) != 0) return false;
    return true;
}

static void any_rectangle_of_any_moment_is_brought_up_to_date(void **context)
{
    static float then[LEVELS][ROWS][COLS], memory[ROWS * COLS];
    char digests[LEVELS][33], name[128];
    peri_checkpoint *c;
    (void)context;
    for (int k = 0; k < LEVELS; k++) {
        snprintf(name, sizeof name, "law-%d", k);
        save(name, k ? digests[k - 1] : NULL, k, digests[k]);
        memcpy(then[k], now, sizeof now);
    }
    snprintf(name, sizeof name, "%s/law-%d", folder, LEVELS - 1);
    assert_ok(peri_checkpoint_open(name, &c));
    assert_ok(peri_checkpoint_verify_since(c, -1));
    for (int k = 0; k < LEVELS; k++) assert_int_equal(peri_checkpoint_level_of(c, digests[k]), LEVELS - 1 - k);
    assert_int_equal(peri_checkpoint_level_of(c, "0123"), -1);
    const int64_t index = peri_checkpoint_find(c, "t");
    for (int i = 0; i < 200; i++) {
        peri_checkpoint_region r = {.size = sizeof r, .offset = {draw(ROWS), draw(COLS)}};
        r.extent[0] = 1 + draw(ROWS - r.offset[0]);
        r.extent[1] = 1 + draw(COLS - r.offset[1]);
        const int64_t level = draw(LEVELS + 1) - 1;
        memset(memory, 0x7f, sizeof memory);
        for (int64_t row = 0; level >= 0 && row < r.extent[0]; row++)
            memcpy(memory + row * r.extent[1], &then[LEVELS - 1 - level][r.offset[0] + row][r.offset[1]],
                   (size_t)r.extent[1] * sizeof(float));
        assert_ok(peri_checkpoint_read_since(c, level, index, &r, memory));
        assert_true(alike(memory, &r, now));
    }
    peri_checkpoint_region all = {.size = sizeof all, .extent = {ROWS, COLS}};
    assert_fails(peri_checkpoint_read_since(c, LEVELS, index, &all, memory), PERI_EINVAL, "level 6, allowed: -1 to 5");
    peri_checkpoint_release(c);
}

static void rows_of_an_increment_are_listed(void **context)
{
    char digest[33], path[128];
    int64_t rows[ROWS];
    float values[ROWS * COLS];
    peri_checkpoint *c;
    int lists = 0;
    (void)context;
    save("rows-0", NULL, 0, digest);
    save("rows-1", digest, 1, digest);
    snprintf(path, sizeof path, "%s/rows-1", folder);
    assert_ok(peri_checkpoint_open(path, &c));
    const int64_t index = peri_checkpoint_find(c, "t");
    for (int64_t k = 0; k < PIECES; k++) {
        peri_checkpoint_region r = {.size = sizeof r};
        assert_ok(peri_checkpoint_piece(c, index, k, &r, NULL));
        if (!r.rows) {
            assert_fails(peri_checkpoint_piece_rows(c, index, k, 0, 0, rows, values), PERI_EINVAL, "has all its rows");
            continue;
        }
        lists++;
        const int64_t half = r.listed / 2;
        assert_ok(peri_checkpoint_piece_rows(c, index, k, 0, half, rows, values));
        assert_ok(
            peri_checkpoint_piece_rows(c, index, k, half, r.listed - half, rows + half, values + half * r.extent[1]));
        for (int64_t i = 0; i < r.listed; i++) {
            assert_true(i == 0 || rows[i] > rows[i - 1]);
            assert_memory_equal(values + i * r.extent[1], &now[rows[i]][r.offset[1]],
                                (size_t)r.extent[1] * sizeof(float));
        }
        assert_fails(peri_checkpoint_piece_rows(c, index, k, half, r.listed, rows, values), PERI_EINVAL,
                     "allowed: within the");
    }
    assert_true(lists > 0);
    peri_checkpoint_release(c);
}

/* -- what comes next ----------------------------------------------------------------------------------------------- */

static void the_newest_comes_next(void **context)
{
    static float memory[ROWS * COLS];
    const peri_checkpoint_region all = {.size = sizeof all, .extent = {ROWS, COLS}};
    char digest[33], path[128], command[256], was[64];
    peri_checkpoint_follower *f;
    peri_checkpoint *c;
    int64_t level;
    (void)context;
    strcpy(was, folder);
    strcat(folder, "/run");
    assert_ok(peri_checkpoint_follower_new(folder, &f));
    assert_int_equal(peri_checkpoint_follower_next(f, &c, &level), PERI_PENDING); /* there is no folder yet */
    assert_fails(peri_checkpoint_follower_take(f), PERI_EINVAL, "nothing was offered");
    save("save-000001-step-10", NULL, 0, digest);
    save("save-000002-step-20", digest, 1, digest);
    assert_ok(peri_checkpoint_follower_next(f, &c, &level));
    assert_int_equal(level, -1);
    assert_ok(peri_checkpoint_read_since(c, level, peri_checkpoint_find(c, "t"), &all, memory));
    assert_ok(peri_checkpoint_follower_take(f));
    assert_int_equal(peri_checkpoint_follower_next(f, &c, &level), PERI_PENDING);
    save("save-000003-step-30", digest, 2, digest);
    save("save-000010-step-5", digest, 3, digest); /* the number counts, not the step */
    assert_ok(peri_checkpoint_follower_next(f, &c, &level));
    assert_int_equal(level, 2);
    assert_ok(peri_checkpoint_verify_since(c, level));
    assert_ok(peri_checkpoint_read_since(c, level, peri_checkpoint_find(c, "t"), &all, memory));
    assert_true(alike(memory, &all, now));
    assert_ok(peri_checkpoint_follower_refuse(f)); /* all the same */
    assert_ok(peri_checkpoint_follower_next(f, &c, &level));
    assert_int_equal(level, 1); /* the one before it */
    assert_ok(peri_checkpoint_follower_take(f));
    assert_ok(peri_checkpoint_follower_next(f, &c, &level)); /* what was taken since then makes it worth another look */
    assert_int_equal(level, 1);
    assert_ok(peri_checkpoint_follower_take(f));
    assert_ok(peri_checkpoint_follower_forget(f));
    assert_ok(peri_checkpoint_follower_next(f, &c, &level));
    assert_int_equal(level, -1);
    assert_ok(peri_checkpoint_follower_take(f));
    /* The newest is damaged: an error as long as nothing else is newer. */
    save("save-000011-step-1", digest, 4, digest);
    snprintf(path, sizeof path, "%s/save-000011-step-1", folder);
    snprintf(command, sizeof command, "rm %s/rank-0.safetensors", path);
    assert_int_equal(system(command), 0);
    assert_fails(peri_checkpoint_follower_next(f, &c, &level), PERI_ENOTFOUND, "rank-0.safetensors");
    save("save-000012-step-1", NULL, 0, digest);
    assert_ok(peri_checkpoint_follower_next(f, &c, &level));
    assert_int_equal(level, -1);
    assert_ok(peri_checkpoint_follower_take(f));
    /* So is one that has nothing in its manifest. */
    snprintf(command, sizeof command, "cd %s && mkdir save-000013-step-1 && : >save-000013-step-1/manifest.json",
             folder);
    assert_int_equal(system(command), 0);
    assert_fails(peri_checkpoint_follower_next(f, &c, &level), PERI_EFORMAT, "save-000013-step-1");
    snprintf(command, sizeof command, "rm -r %s/save-000013-step-1", folder);
    assert_int_equal(system(command), 0);
    assert_int_equal(peri_checkpoint_follower_next(f, &c, &level), PERI_PENDING);
    /* What was taken is damaged: nothing older comes. It is gone: the newest of what is there, at the second look. */
    snprintf(command, sizeof command, "cd %s && rm -r save-000011-step-1 && : >save-000012-step-1/manifest.json",
             folder);
    assert_int_equal(system(command), 0);
    for (int i = 0; i < 3; i++) assert_int_equal(peri_checkpoint_follower_next(f, &c, &level), PERI_PENDING);
    snprintf(command, sizeof command, "rm -r %s/save-000012-step-1", folder);
    assert_int_equal(system(command), 0);
    assert_int_equal(peri_checkpoint_follower_next(f, &c, &level), PERI_PENDING);
    assert_ok(peri_checkpoint_follower_next(f, &c, &level));
    assert_non_null(strstr(peri_checkpoint_level(c, 0), "save-000010-step-5"));
    assert_ok(peri_checkpoint_follower_take(f));
    assert_int_equal(peri_checkpoint_follower_next(f, &c, &level), PERI_PENDING);
    save("save-000011-step-9", NULL, 0, digest);
    assert_ok(peri_checkpoint_follower_next(f, &c, &level));
    peri_checkpoint_follower_release(f);
    strcpy(folder, was);
}

/** What a network shows wrong at first: refused, it is offered again, later each time. And a save that has the name of
 *  the one that was taken, as after somebody went back: it comes at the second look. */
static void what_was_refused_comes_again(void **context)
{
    char digest[33], command[256], was[64];
    peri_checkpoint_follower *f;
    peri_checkpoint *c;
    int64_t level;
    (void)context;
    strcpy(was, folder);
    strcat(folder, "/again");
    assert_ok(peri_checkpoint_follower_new(folder, &f));
    save("save-000001-step-10", NULL, 0, digest);
    assert_ok(peri_checkpoint_follower_next(f, &c, &level));
    assert_ok(peri_checkpoint_follower_take(f));
    save("save-000002-step-20", digest, 1, digest);
    assert_ok(peri_checkpoint_follower_next(f, &c, &level));
    for (int looks = 8; looks < 4096; looks *= 2) {
        assert_ok(peri_checkpoint_follower_refuse(f));
        for (int i = 1; i < (looks < 512 ? looks : 512); i++)
            assert_int_equal(peri_checkpoint_follower_next(f, &c, &level), PERI_PENDING);
        assert_ok(peri_checkpoint_follower_next(f, &c, &level));
        assert_int_equal(level, 1);
    }
    assert_ok(peri_checkpoint_follower_take(f));
    snprintf(command, sizeof command, "rm -r %s/save-000002-step-20", folder);
    assert_int_equal(system(command), 0);
    save("save-000002-step-20", NULL, 2, digest);
    assert_int_equal(peri_checkpoint_follower_next(f, &c, &level), PERI_PENDING);
    assert_ok(peri_checkpoint_follower_next(f, &c, &level));
    assert_string_equal(peri_checkpoint_digest(c), digest);
    assert_ok(peri_checkpoint_follower_take(f));
    for (int i = 0; i < 3; i++) assert_int_equal(peri_checkpoint_follower_next(f, &c, &level), PERI_PENDING);
    peri_checkpoint_follower_release(f);
    strcpy(folder, was);
}

/* -- rows of tables ------------------------------------------------------------------------------------------------ */

static peri_tbe *table_of(int64_t rows)
{
    const peri_table_config table = {.size = sizeof table, .name = "a", .rows = rows, .cols = COLS};
    peri_tbe_optimizer_config optimizer = {.size = sizeof optimizer};
    peri_tbe_config c = {
        .size = sizeof c, .device = cpu(), .n_tables = 1, .tables = &table, .dtype = PERI_F32, .seed = 5};
    peri_tbe *tbe;
    assert_ok(peri_tbe_optimizer_default(PERI_TBE_ROWWISE_ADAGRAD, &optimizer));
    c.optimizer = &optimizer;
    assert_ok(peri_tbe_new(&c, &tbe));
    return tbe;
}

static peri_tbe *tables(void) { return table_of(ROWS); }

static peri_tensor *list_of(const int64_t *rows, int64_t n)
{
    peri_tensor *t;
    assert_ok(peri_tensor_new(cpu(), PERI_I64, 1, &n, &t));
    assert_ok(peri_tensor_write(t, rows, 8 * n));
    return t;
}

static peri_tensor *full(int64_t n, double value)
{
    peri_tensor *t;
    assert_ok(peri_tensor_full(cpu(), PERI_F32, 2, (int64_t[]){n, COLS}, value, &t));
    return t;
}

static void rows_are_written_and_told_of(void **context)
{
    const int64_t rows[] = {3, 4, 90, 199}, wrong[] = {4, 3}, beyond[] = {200};
    peri_tbe *tbe = tables();
    peri_row_marks *marks;
    peri_tensor *list = list_of(rows, 4), *values = full(4, 2.5), *bits, *changed, *got;
    float numbers[4 * COLS];
    int64_t which[4];
    (void)context;
    assert_ok(peri_row_marks_new(tbe, &marks));
    assert_ok(peri_tbe_write_rows(tbe, 0, "weight", list, values));
    assert_ok(peri_tbe_read_rows(tbe, 0, "weight", list, &got));
    assert_ok(peri_tensor_read(got, numbers, sizeof numbers));
    for (int i = 0; i < 4 * COLS; i++) assert_true(numbers[i] == 2.5f);
    assert_ok(peri_row_marks_take(marks, &bits));
    assert_ok(peri_row_bits_list(tbe, 0, bits, 0, &changed));
    assert_ok(peri_tensor_read(changed, which, sizeof which));
    assert_memory_equal(which, rows, sizeof rows);
    peri_tensor *unordered = list_of(wrong, 2), *outside = list_of(beyond, 1), *two = full(2, 0), *one = full(1, 0);
    assert_fails(peri_tbe_write_rows(tbe, 0, "weight", unordered, two), PERI_EINVAL, "allowed: ascending");
    assert_fails(peri_tbe_write_rows(tbe, 0, "weight", outside, one), PERI_ERANGE, "row 200, allowed: 0..199");
    assert_fails(peri_tbe_write_rows(tbe, 0, "weight", list, one), PERI_EINVAL, "another shape");
    assert_fails(peri_tbe_write_rows(tbe, 0, "none", list, values), PERI_ENOTFOUND, "none");
    peri_tensor *const all[] = {list, values, bits, changed, got, unordered, outside, two, one};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) peri_tensor_release(all[i]);
    peri_row_marks_release(marks);
    peri_tbe_release(tbe);
}

/** Rows that change while a moment lives are read as they were; those behind which reading has passed are not kept. */
static void a_moment_stays(void **context)
{
    peri_tbe *tbe = tables();
    peri_tensor *weight, *block, *whole;
    peri_moment *m;
    int64_t index, other;
    static float before[ROWS][COLS], got[ROWS][COLS];
    (void)context;
    assert_ok(peri_tbe_state(tbe, 0, "weight", &weight));
    assert_ok(peri_tensor_read(weight, before, sizeof before));
    assert_ok(peri_moment_new(&m));
    assert_ok(peri_moment_add(m, weight, &index));
    assert_int_equal(index, 0);
    peri_tensor *plain = full(3, 1);
    assert_ok(peri_moment_add(m, plain, &other));
    assert_int_equal(other, -1); /* no rows of a table */
    for (int step = 0; step < 5; step++) {
        int64_t rows[4] = {draw(40), 40 + draw(40), 80 + draw(60), 140 + draw(60)};
        peri_tensor *list = list_of(rows, 4), *values = full(4, step);
        assert_ok(peri_tbe_write_rows(tbe, 0, "weight", list, values));
        peri_tensor_release(list);
        peri_tensor_release(values);
    }
    assert_true(peri_moment_bytes(m) > 0);
    for (int64_t row = 0; row < ROWS; row += 50) {
        assert_ok(peri_tensor_new(cpu(), PERI_F32, 2, (int64_t[]){50, COLS}, &block));
        assert_ok(peri_moment_read(m, index, row, block));
        assert_ok(peri_tensor_read(block, got[row], 50 * COLS * (int64_t)sizeof(float)));
        assert_ok(peri_moment_pass(m, index, row + 50));
        peri_tensor_release(block);
        whole = full(ROWS, row);
        assert_ok(peri_tensor_copy(weight, whole)); /* all rows change, also those that are still to be read */
        peri_tensor_release(whole);
    }
    assert_memory_equal(got, before, sizeof before);
    const int64_t held = peri_moment_bytes(m);
    whole = full(ROWS, 9);
    assert_ok(peri_tensor_copy(weight, whole));
    assert_true(peri_moment_bytes(m) <= held); /* nobody reads them again */
    peri_tensor_release(whole);
    peri_tensor_release(plain);
    peri_tensor_release(weight);
    peri_moment_release(m);
    peri_tbe_release(tbe);
}

/** A writer of @bytes numbers "first", and of the rows of table "t", in files of @file_bytes. */
static peri_checkpoint_writer *writer_of(const char *in, int64_t bytes, int64_t rows, int64_t file_bytes)
{
    peri_checkpoint_writer *w;
    const peri_checkpoint_tensor first = {
        .size = sizeof first, .name = "first", .dtype = PERI_U8, .ndim = 1, .shape = {bytes}};
    const peri_checkpoint_tensor t = {
        .size = sizeof t, .name = "t", .dtype = PERI_F32, .ndim = 2, .shape = {rows, COLS}};
    const peri_checkpoint_region all = {.size = sizeof all, .extent = {bytes}},
                                 table = {.size = sizeof table, .extent = {rows, COLS}};
    assert_ok(peri_checkpoint_writer_new(in, "rank-0", file_bytes, &w));
    assert_ok(peri_checkpoint_writer_add(w, &first, &all));
    assert_ok(peri_checkpoint_writer_add(w, &t, &table));
    assert_ok(peri_checkpoint_writer_put_bytes(w, "abc", bytes));
    return w;
}

enum { MANY = 400000 };

/** Write the rows of a moment's only part, some at a time, while rows of it change. */
static void put_moment(peri_checkpoint_writer *w, peri_moment *m, peri_tbe *tbe)
{
    for (int64_t row = 0, n; row < MANY; row += n) {
        const int64_t rows[2] = {draw(MANY / 2), MANY / 2 + draw(MANY / 2)};
        peri_tensor *list = list_of(rows, 2), *values = full(2, 7);
        assert_ok(peri_tbe_write_rows(tbe, 0, "weight", list, values));
        peri_tensor_release(list);
        peri_tensor_release(values);
        n = 1 + draw(draw(4) ? 20000 : MANY);
        if (n > MANY - row) n = MANY - row;
        assert_ok(peri_checkpoint_writer_put_moment(w, m, 0, row, n));
    }
}

/** Rows of a moment that are written are those that there were, wherever in the writer's buffers (4 MiB, in which no
 *  whole number of these rows lies) and in its files they come to lie. */
static void a_moment_is_written(void **context)
{
    static const struct {
        int64_t before, file_bytes;
    } cases[] = {{0, 0}, {3, 0} /* no number lies at an address of numbers then */, {0, 1000000}};
    const int64_t bytes = (int64_t)sizeof(float) * MANY * COLS;
    float *before = malloc((size_t)bytes), *got = malloc((size_t)bytes);
    (void)context;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        char path[128], digest[33];
        const char *part;
        int64_t index;
        peri_tbe *tbe = table_of(MANY);
        peri_tensor *weight, *loaded;
        peri_moment *m;
        peri_checkpoint_folder *f;
        peri_checkpoint *c;
        const peri_checkpoint_region all = {.size = sizeof all, .extent = {MANY, COLS}};
        snprintf(path, sizeof path, "%s/moment-%zu", folder, k);
        assert_ok(peri_tbe_state(tbe, 0, "weight", &weight));
        assert_ok(peri_tensor_read(weight, before, bytes));
        assert_ok(peri_moment_new(&m));
        assert_ok(peri_moment_add(m, weight, &index));
        assert_ok(peri_checkpoint_folder_new(path, &f));
        const char *saving = peri_checkpoint_folder_path(f);
        peri_checkpoint_writer *w = writer_of(saving, cases[k].before, MANY, cases[k].file_bytes);
        assert_fails(peri_checkpoint_writer_put_moment(w, m, index, 0, -1), PERI_EINVAL, "-1 rows, allowed: 0 or more");
        assert_fails(peri_checkpoint_writer_put_moment(w, m, index, 0, MANY + 1), PERI_EINVAL, "'t' has 2400000 left");
        put_moment(w, m, tbe);
        assert_fails(peri_checkpoint_writer_put_moment(w, m, index, MANY, 1), PERI_EINVAL, "all pieces");
        assert_ok(peri_checkpoint_writer_finish(w));
        assert_ok(peri_checkpoint_writer_part(w, &part));
        assert_ok(peri_checkpoint_publish(saving, path, &part, 1, NULL, false, digest));
        assert_ok(peri_checkpoint_open(path, &c));
        assert_ok(peri_checkpoint_verify_since(c, 1));
        assert_ok(peri_tensor_new(cpu(), PERI_F32, 2, all.extent, &loaded));
        assert_ok(peri_checkpoint_read(c, 1, &all, loaded));
        assert_ok(peri_tensor_read(loaded, got, bytes));
        assert_memory_equal(got, before, (size_t)bytes);
        peri_checkpoint_release(c);
        peri_checkpoint_writer_release(w);
        w = writer_of(folder, 1, MANY, 0);
        for (int again = 0; again < 2; again++)
            assert_fails(peri_checkpoint_writer_put_moment(w, m, index, 1, MANY), PERI_ERANGE, "of table 'a', allowed");
        peri_checkpoint_writer_release(w);
        peri_checkpoint_folder_release(f);
        peri_moment_release(m);
        peri_tensor_release(loaded);
        peri_tensor_release(weight);
        peri_tbe_release(tbe);
    }
    free(before);
    free(got);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_rectangle_of_any_moment_is_brought_up_to_date),
        cmocka_unit_test(rows_of_an_increment_are_listed),
        cmocka_unit_test(the_newest_comes_next),
        cmocka_unit_test(what_was_refused_comes_again),
        cmocka_unit_test(rows_are_written_and_told_of),
        cmocka_unit_test(a_moment_stays),
        cmocka_unit_test(a_moment_is_written),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
