/* SPDX-License-Identifier: Apache-2.0
 *
 * test_checkpoint.c: checkpoints from C. The law: whatever the cuts of writers, any rectangle reads back the elements
 * that were written.
 */
#include "tests/harness/check.h"

#include "checkpoint_folder.h"
#include "guest.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

static uint64_t state;

static int64_t draw(int64_t below) /* xorshift64* */
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (int64_t)((state * 0x2545f4914f6cdd1du >> 11) % (uint64_t)below);
}

/* -- the law ------------------------------------------------------------------------------------------------------- */

enum { RANKS = 3, MOST_PIECES = 64 };

/** Cut [0, size) of each dimension at random places: the pieces of a grid. */
static int cut(int32_t ndim, const int64_t *shape, peri_checkpoint_region *pieces)
{
    int n = 1;
    pieces[0] = (peri_checkpoint_region){SIZED};
    memcpy(pieces[0].extent, shape, (size_t)ndim * sizeof *shape);
    for (int step = 0; step < 4; step++) { /* halve a piece of those that are there */
        int i = (int)draw(n);
        int32_t d = ndim ? (int32_t)draw(ndim) : 0;
        if (!ndim || pieces[i].extent[d] < 2) continue;
        int64_t at = 1 + draw(pieces[i].extent[d] - 1);
        pieces[n] = pieces[i];
        pieces[i].extent[d] = at;
        pieces[n].offset[d] += at;
        pieces[n++].extent[d] -= at;
    }
    return n;
}

/** Byte @i of an element of @dtype; no NaN of 16 bits, which copies into views with gaps make quiet. */
static unsigned char value_of(int32_t dtype, int64_t element, int64_t i)
{
    int64_t x = element * 131 + i * 17 + (element >> 8) * 7;
    return (unsigned char)(dtype == PERI_BOOL                                    ? x & 1
                           : (dtype == PERI_F16 || dtype == PERI_BF16) && i == 1 ? x & ~5
                                                                                 : x);
}

/** The elements of a region, row-major. */
static void fill(const peri_checkpoint_tensor *t, const peri_checkpoint_region *r, unsigned char *out)
{
    const int64_t size = peri_dtype_size(t->dtype);
    int64_t at[PERI_MAX_DIMS] = {0}, n = 1;
    for (int32_t d = 0; d < t->ndim; d++) n *= r->extent[d];
    for (int64_t k = 0; k < n; k++) {
        int64_t element = 0;
        for (int32_t d = 0; d < t->ndim; d++) element = element * t->shape[d] + r->offset[d] + at[d];
        for (int64_t i = 0; i < size; i++) *out++ = value_of(t->dtype, element, i);
        for (int32_t d = t->ndim - 1; d >= 0 && ++at[d] == r->extent[d]; d--) at[d] = 0;
    }
}

static int64_t volume(int32_t ndim, const int64_t *size)
{
    int64_t n = 1;
    for (int32_t d = 0; d < ndim; d++) n *= size[d];
    return n;
}

/** @out: a tensor for region @r; a view with gaps where @strided. */
static peri_tensor *room_for(const peri_checkpoint_tensor *t, const peri_checkpoint_region *r, bool strided,
                             peri_device *device)
{
    peri_tensor *out, *view;
    int64_t shape[PERI_MAX_DIMS];
    memcpy(shape, r->extent, sizeof shape);
    if (strided && t->ndim) shape[t->ndim - 1] = shape[t->ndim - 1] * 2 + 1;
    assert_ok(peri_tensor_new(device, t->dtype, t->ndim, shape, &out));
    if (!strided || !t->ndim) return out;
    assert_ok(peri_tensor_slice(out, t->ndim - 1, 1, shape[t->ndim - 1], 2, &view));
    peri_tensor_release(out);
    return view;
}

static void check_region(peri_checkpoint *c, const peri_checkpoint_tensor *t, peri_device *device)
{
    peri_checkpoint_region r = {.size = sizeof r};
    for (int32_t d = 0; d < t->ndim; d++) {
        r.offset[d] = draw(t->shape[d] + 1);
        r.extent[d] = draw(2) ? t->shape[d] - r.offset[d] : draw(t->shape[d] - r.offset[d] + 1);
    }
    if (draw(3) == 0) {
        memset(r.offset, 0, sizeof r.offset);
        memcpy(r.extent, t->shape, sizeof r.extent);
    }
    const int64_t bytes = volume(t->ndim, r.extent) * peri_dtype_size(t->dtype);
    unsigned char *want = malloc((size_t)bytes + 1), *got = malloc((size_t)bytes + 1);
    peri_tensor *out = room_for(t, &r, draw(2), device);
    fill(t, &r, want);
    assert_ok(peri_checkpoint_read(c, peri_checkpoint_find(c, t->name), &r, out));
    assert_ok(peri_tensor_read(out, got, bytes));
    assert_memory_equal(got, want, (size_t)bytes);
    peri_tensor_release(out);
    free(want);
    free(got);
}

/** Several rectangles at once: a random one, cut along a dimension, and at times one that lies elsewhere. */
static void check_several(peri_checkpoint *c, const peri_checkpoint_tensor *t)
{
    enum { N = 3 };
    peri_checkpoint_region r[N] = {{.size = sizeof *r}};
    const peri_checkpoint_region *regions[N];
    peri_tensor *outs[N];
    if (t->ndim < 1) return;
    for (int32_t d = 0; d < t->ndim; d++) {
        r[0].offset[d] = draw(t->shape[d] + 1);
        r[0].extent[d] = draw(t->shape[d] - r[0].offset[d] + 1);
    }
    const int32_t d = (int32_t)draw(t->ndim);
    for (int i = 1; i < N; i++) { /* what is left is halved, more or less */
        r[i] = r[i - 1];
        const int64_t half = draw(r[i].extent[d] + 1);
        r[i - 1].extent[d] = half;
        r[i].offset[d] += half;
        r[i].extent[d] -= half;
    }
    if (draw(4) == 0) memset(r[1].offset, 0, sizeof r[1].offset);
    for (int i = 0; i < N; i++) {
        regions[i] = &r[i];
        outs[i] = room_for(t, &r[i], draw(5) == 0, cpu());
    }
    assert_ok(peri_checkpoint_read_several(c, peri_checkpoint_find(c, t->name), regions, outs, N));
    for (int i = 0; i < N; i++) {
        const int64_t bytes = volume(t->ndim, r[i].extent) * peri_dtype_size(t->dtype);
        unsigned char *want = malloc((size_t)bytes + 1), *got = malloc((size_t)bytes + 1);
        fill(t, &r[i], want);
        assert_ok(peri_tensor_read(outs[i], got, bytes));
        assert_memory_equal(got, want, (size_t)bytes);
        peri_tensor_release(outs[i]);
        free(want);
        free(got);
    }
}

static void write_piece(peri_checkpoint_writer *w, const peri_checkpoint_tensor *t, const peri_checkpoint_region *r)
{
    const int64_t size = peri_dtype_size(t->dtype), bytes = volume(t->ndim, r->extent) * size;
    unsigned char *data = malloc((size_t)bytes + 1);
    fill(t, r, data);
    if (t->ndim == 2 && draw(2)) { /* rows of a tensor with gaps, in two calls */
        for (int64_t from = 0, past = r->extent[0] / 2; from < r->extent[0]; from = past, past = r->extent[0]) {
            peri_checkpoint_region part = {.size = sizeof part, .extent = {past - from, r->extent[1]}};
            peri_tensor *view = room_for(t, &part, true, cpu());
            assert_ok(peri_tensor_write(view, data + from * r->extent[1] * size, (past - from) * r->extent[1] * size));
            assert_ok(peri_checkpoint_writer_put(w, view));
            peri_tensor_release(view);
        }
    } else {
        for (int64_t at = 0; at < bytes;) {
            int64_t n = peri__min(bytes - at, size * (1 + draw(bytes / size)));
            assert_ok(peri_checkpoint_writer_put_bytes(w, data + at, n));
            at += n;
        }
    }
    free(data);
}

/** Random tensors, cut at random among random ranks and files; then any rectangle, into any layout, on any device. */
static void any_rectangle_reads_what_was_written(void **context)
{
    (void)context;
    static const int32_t dtypes[] = {PERI_F64, PERI_F32, PERI_F16,  PERI_BF16, PERI_I64,
                                     PERI_I32, PERI_U8,  PERI_BOOL, PERI_C64};
    peri_device *opaque;
    assert_ok(peri_device_get("opaque", &opaque));
    for (uint64_t seed = 1; seed <= 60; seed++) {
        enum { TENSORS = 4 };
        peri_checkpoint_tensor tensors[TENSORS];
        static peri_checkpoint_region pieces[TENSORS][MOST_PIECES];
        int n_pieces[TENSORS], owner[TENSORS][MOST_PIECES];
        static char names[TENSORS][32];
        peri_checkpoint_writer *writers[RANKS];
        const char *parts[RANKS];
        char digest[33];
        state = seed * 0x9e3779b97f4a7c15u;
        for (int i = 0; i < TENSORS; i++) {
            int64_t shape[PERI_MAX_DIMS];
            int32_t ndim = (int32_t)draw(4);
            for (int32_t d = 0; d < ndim; d++) shape[d] = draw(12) ? 1 + draw(ndim == 1 ? 3000 : 40) : 0;
            snprintf(names[i], sizeof names[i], "m\".%c\n%d", 'a' + (int)draw(26), i);
            tensors[i] = tensor_of(names[i], dtypes[draw(sizeof dtypes / sizeof *dtypes)], ndim, shape);
            n_pieces[i] = cut(ndim, shape, pieces[i]);
            for (int k = 0; k < n_pieces[i]; k++) owner[i][k] = (int)draw(RANKS);
        }
        mkdir(saving, 0777);
        for (int r = 0; r < RANKS; r++) {
            char stem[32];
            snprintf(stem, sizeof stem, "rank-%d", r);
            assert_ok(peri_checkpoint_writer_new(saving, stem, draw(2) ? 0 : 1 + draw(3000), &writers[r]));
            for (int i = 0; i < TENSORS; i++)
                for (int k = 0; k < n_pieces[i]; k++)
                    if (owner[i][k] == r) assert_ok(peri_checkpoint_writer_add(writers[r], &tensors[i], &pieces[i][k]));
            for (int i = 0; i < TENSORS; i++)
                for (int k = 0; k < n_pieces[i]; k++)
                    if (owner[i][k] == r) write_piece(writers[r], &tensors[i], &pieces[i][k]);
            assert_ok(peri_checkpoint_writer_finish(writers[r]));
            assert_ok(peri_checkpoint_writer_part(writers[r], &parts[r]));
        }
        assert_ok(
            peri_checkpoint_publish(saving, path, parts, RANKS, FACTS(.values = "{\"a\":[1,null]}"), seed > 1, digest));
        for (int r = 0; r < RANKS; r++) peri_checkpoint_writer_release(writers[r]);
        peri_checkpoint *c;
        assert_ok(peri_checkpoint_open(path, &c));
        assert_int_equal(peri_checkpoint_count(c), TENSORS);
        assert_string_equal(peri_checkpoint_digest(c), digest);
        assert_string_equal(peri_checkpoint_values(c), "{\"a\":[1,null]}");
        for (int i = 0; i < TENSORS; i++) {
            peri_checkpoint_tensor t = {.size = sizeof t};
            int64_t at = peri_checkpoint_find(c, tensors[i].name);
            assert_ok(peri_checkpoint_tensor_at(c, at, &t));
            assert_int_equal(t.dtype, tensors[i].dtype);
            for (int64_t k = 0; k < t.pieces; k++) assert_ok(peri_checkpoint_verify(c, at, k));
            for (int k = 0; k < 12; k++) check_region(c, &tensors[i], k % 4 ? cpu() : opaque);
            for (int k = 0; k < 6; k++) check_several(c, &tensors[i]);
        }
        peri_checkpoint_release(c);
    }
    assert_int_equal(access(saving, F_OK), -1); /* nothing of what was replaced is left */
}

/** Numbers of rows that belong to columns: read with the same columns they have the same bits, with others they are
 *  weighted means. */
static void columns_have_means(void **context)
{
    (void)context;
    const int64_t rows = 5;
    const peri_checkpoint_tensor t = tensor_of("momentum", PERI_F32, 1, &rows);
    const peri_checkpoint_region left = {.size = sizeof left, .extent = {5}, .column = 0, .columns = 3};
    const peri_checkpoint_region right = {.size = sizeof right, .extent = {5}, .column = 3, .columns = 1};
    const float a[] = {1, 2, 3, 4, 5}, b[] = {9, 8, 7, 6, 5.5f};
    float got[5];
    peri_checkpoint_writer *w;
    peri_checkpoint *c;
    peri_tensor *out;
    const char *part;
    char digest[33];
    assert_ok(peri_checkpoint_writer_new(saving, "r", 0, &w));
    assert_ok(peri_checkpoint_writer_add(w, &t, &right));
    assert_ok(peri_checkpoint_writer_add(w, &t, &left));
    assert_ok(peri_checkpoint_writer_put_bytes(w, b, sizeof b));
    assert_ok(peri_checkpoint_writer_put_bytes(w, a, sizeof a));
    assert_ok(peri_checkpoint_writer_finish(w));
    assert_ok(peri_checkpoint_writer_part(w, &part));
    assert_ok(peri_checkpoint_publish(saving, path, &part, 1, NULL, false, digest));
    peri_checkpoint_writer_release(w);
    assert_ok(peri_checkpoint_open(path, &c));
    assert_ok(peri_tensor_new(cpu(), PERI_F32, 1, &rows, &out));
    static const struct {
        int64_t column, columns;
        double weight[2];
    } cases[] = {{0, 3, {1, 0}},       {3, 1, {0, 1}},     {0, 0, {0.75, 0.25}},
                 {0, 4, {0.75, 0.25}}, {2, 2, {0.5, 0.5}}, {1, 1, {1, 0}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        peri_checkpoint_region r = {
            .size = sizeof r, .extent = {5}, .column = cases[i].column, .columns = cases[i].columns};
        assert_ok(peri_checkpoint_read(c, 0, &r, out));
        assert_ok(peri_tensor_read(out, got, sizeof got));
        for (int k = 0; k < 5; k++)
            assert_true(got[k] == (float)(cases[i].weight[0] * a[k] + cases[i].weight[1] * b[k]));
    }
    assert_fails(peri_checkpoint_read(c, 0, REGION(.extent = {5}, .column = 9, .columns = 1), out), PERI_EMISMATCH,
                 "no piece has columns 9 to 10");
    peri_tensor_release(out);
    peri_checkpoint_release(c);
}

/** 100,000 pieces of the same rows, in any order: comparing each with each other would take minutes. */
static void many_pieces_take_as_long_as_they_are_many(void **context)
{
    enum { N = 100000, STEP = 7919 };
    (void)context;
    const int64_t shape[] = {2, N};
    const peri_checkpoint_tensor t = tensor_of("t", PERI_U8, 2, shape);
    const char *part;
    char digest[33];
    peri_checkpoint_writer *w;
    peri_checkpoint *c;
    const clock_t begin = clock();
    assert_ok(peri_checkpoint_writer_new(saving, "r", 0, &w));
    for (int64_t k = 0; k < N; k++)
        assert_ok(peri_checkpoint_writer_add(w, &t, REGION(.offset = {0, k * STEP % N}, .extent = {2, 1})));
    for (int64_t k = 0; k < N; k++) assert_ok(peri_checkpoint_writer_put_bytes(w, "ab", 2));
    assert_ok(peri_checkpoint_writer_finish(w));
    assert_ok(peri_checkpoint_writer_part(w, &part));
    assert_ok(peri_checkpoint_publish(saving, path, &part, 1, NULL, false, digest));
    peri_checkpoint_writer_release(w);
    assert_ok(peri_checkpoint_open(path, &c));
    peri_checkpoint_release(c);
    assert_true(clock() - begin < 10 * CLOCKS_PER_SEC);
}

/* -- several processes --------------------------------------------------------------------------------------------- */

enum { TALL = 80000, WIDE = 16 };

/** Write a tensor whose number in row r, column c is WIDE * r + c. */
static void save_wide(void)
{
    const int64_t shape[] = {TALL, WIDE};
    const peri_checkpoint_tensor t = tensor_of("t", PERI_F32, 2, shape);
    float *values = malloc(sizeof *values * TALL * WIDE);
    const char *part;
    char digest[33];
    peri_checkpoint_writer *w;
    for (int64_t k = 0; k < TALL * WIDE; k++) values[k] = (float)k;
    assert_ok(peri_checkpoint_writer_new(saving, "r", 0, &w));
    assert_ok(peri_checkpoint_writer_add(w, &t, REGION(.extent = {TALL, WIDE})));
    assert_ok(peri_checkpoint_writer_put_bytes(w, values, (int64_t)sizeof *values * TALL * WIDE));
    assert_ok(peri_checkpoint_writer_finish(w));
    assert_ok(peri_checkpoint_writer_part(w, &part));
    assert_ok(peri_checkpoint_publish(saving, path, &part, 1, NULL, false, digest));
    peri_checkpoint_writer_release(w);
    free(values);
}

/** Whether columns [@first, + @width) are read as they were written, by a process that shares under @name. */
static bool is_right(const char *name, int64_t processes, int64_t first, int64_t width)
{
    const int64_t shape[] = {TALL, width};
    float *got = malloc(sizeof *got * TALL * WIDE);
    peri_checkpoint *c;
    peri_tensor *out;
    bool right = peri_checkpoint_open(path, &c) >= 0 && peri_checkpoint_share(c, name, processes) >= 0 &&
                 peri_tensor_new(cpu(), PERI_F32, 2, shape, &out) >= 0;
    if (!right) return false;
    right = peri_checkpoint_read(c, 0, REGION(.offset = {0, first}, .extent = {TALL, width}, .alike = width == WIDE),
                                 out) >= 0 &&
            peri_tensor_read(out, got, (int64_t)sizeof *got * TALL * width) >= 0;
    for (int64_t r = 0; right && r < TALL; r++)
        for (int64_t k = 0; k < width; k++) right = right && got[r * width + k] == (float)(r * WIDE + first + k);
    peri_tensor_release(out);
    peri_checkpoint_release(c);
    free(got);
    return right;
}

/** What processes of a machine take over from each other is what each would have read, also where some never come, or
 *  die in the middle; and nothing stays in /dev/shm. */
static void processes_share_what_they_read(void **context)
{
    (void)context;
    char name[64], left[128];
    save_wide();
    snprintf(name, sizeof name, "test-%d", (int)getpid());
    snprintf(left, sizeof left, "/dev/shm/perilune-%u-%s", (unsigned)getuid(), name);
    assert_true(is_right(name, 3, 4, 4)); /* nobody else comes */
    assert_int_equal(access(left, F_OK), -1);
    for (int round = 0; round < 6; round++) {
        const int64_t width = round % 2 ? WIDE : 4; /* all want the whole, or others other columns */
        pid_t children[2];
        for (int64_t k = 0; k < 2; k++) {
            children[k] = fork();
            assert_true(children[k] >= 0);
            if (children[k] == 0) _exit(is_right(name, 3, round % 2 ? 0 : 4 * k + 8, width) ? 0 : 1);
        }
        if (round >= 3) {
            usleep((useconds_t)draw(8000));
            kill(children[0], SIGKILL);
        }
        assert_true(is_right(name, 3, round % 2 ? 0 : 4, width));
        for (int64_t k = 0; k < 2; k++) {
            int status;
            assert_int_equal(waitpid(children[k], &status, 0), children[k]);
            assert_true((k == 0 && round >= 3) || (WIFEXITED(status) && WEXITSTATUS(status) == 0));
        }
        assert_int_equal(access(left, F_OK), -1);
    }
    peri_checkpoint *c;
    assert_ok(peri_checkpoint_open(path, &c));
    assert_fails(peri_checkpoint_share(c, "../x", 2), PERI_EINVAL, "allowed: 1 to 64 letters, digits and '-'");
    assert_fails(peri_checkpoint_share(c, "x", 1), PERI_EINVAL, "1 processes, allowed: 2 or more");
    peri_checkpoint_release(c);
}

/* -- a sandbox, as containers have ------------------------------------------------------------------------------- */

static int saves_where_a_call_is_refused(void *number)
{
    static const float numbers[] = {1, 2, 3};
    char digest[33];
    if (!refuse((const int[]){SYS_renameat2}, 1, *(int *)number)) return 77;
    assert_ok(save_one(numbers, 3, false, digest));
    check_one(numbers, 3);
    assert_fails(save_one(numbers, 3, false, digest), PERI_EINVAL, "model' ");
    sweep(saving);
    assert_fails(save_one(numbers, 3, true, digest), PERI_EIO,
                 "cannot replace a checkpoint: save under another name (perilune checkpoint compact: -o PATH)");
    return 0;
}

static void a_sandbox_without_renameat2_saves(void **context)
{
    if (SANITIZED) skip();
    for (int i = 0; i < 3; i++) {
        const int status = in_child(saves_where_a_call_is_refused, &(int){(int[]){EPERM, EACCES, ENOSYS}[i]});
        if (status == 77) skip(); /* filters cannot be set here */
        assert_int_equal(status, 0);
        sweep(folder);
        assert_int_equal(make_folder(context), 0);
    }
}

static const struct CMUnitTest tests[] = {
    TEST(any_rectangle_reads_what_was_written),
    TEST(columns_have_means),
    TEST(many_pieces_take_as_long_as_they_are_many),
    TEST(processes_share_what_they_read),
    TEST(a_sandbox_without_renameat2_saves),
};

check_main(tests)
