/* SPDX-License-Identifier: Apache-2.0
 *
 * test_checkpoint_damage.c: checkpoints from C: saves that fail, files that are damaged or made up, parts that do not
 * fit, arguments that are refused.
 */
#include "tests/harness/check.h"

#include "checkpoint_folder.h"

#include <fcntl.h>
#include <math.h>
#include <sys/wait.h>
#include <time.h>
#include <xxhash.h>

/** Every failed allocation, write and sync: an error, no leak, and the checkpoint that was there is whole. */
static void a_failed_save_leaves_the_old_one(void **context)
{
    (void)context;
    const float old[] = {1, 2, 3}, fresh[] = {4, 5, 6, 7};
    char digest[33];
    static const char *const faults[] = {"alloc", "checkpoint_write", "checkpoint_sync"};
    assert_ok(save_one(old, 3, false, digest));
    const int64_t objects = peri_mem_objects();
    for (size_t f = 0; f < 3; f++) {
        for (int after = 1;; after++) {
            assert_ok(peri_fault_arm(faults[f], after));
            peri_status status = save_one(fresh, 4, true, digest);
            char why[PERI_MESSAGE_MAX];
            snprintf(why, sizeof why, "%s", peri_error_message());
            const bool failed = peri_fault_passed(faults[f]) >= after;
            assert_ok(peri_fault_arm(faults[f], 0));
            if (!failed) break;
            /* a failure after the new one had its name: it is there, and what is left of the old one is no error */
            if (status >= 0) {
                check_one(fresh, 4);
                sweep(saving);
                assert_ok(save_one(old, 3, true, digest));
                continue;
            }
            assert_true(after < 1000);
            assert_true(strlen(why) > 10);
            assert_int_equal(peri_mem_objects(), objects);
            check_one(old, 3);
            sweep(saving);
        }
        assert_ok(save_one(old, 3, true, digest));
    }
    for (int after = 1;; after++) { /* under a name that is free, it is not there after a failure */
        peri_checkpoint *c;
        assert_ok(peri_checkpoint_remove(path));
        assert_ok(peri_fault_arm("checkpoint_sync", after));
        const peri_status status = save_one(fresh, 4, false, digest);
        const bool failed = peri_fault_passed("checkpoint_sync") >= after;
        assert_ok(peri_fault_arm("checkpoint_sync", 0));
        if (!failed) break;
        assert_int_equal(status, PERI_EIO);
        assert_int_equal(peri_checkpoint_open(path, &c), PERI_ENOTFOUND);
        sweep(saving);
        assert_ok(save_one(old, 3, false, digest));
    }
}

static void read_file(const char *name, char **out, long *n)
{
    char file[PATH_MAX];
    snprintf(file, sizeof file, "%s/%s", path, name);
    FILE *f = fopen(file, "rb");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    *n = ftell(f);
    rewind(f);
    *out = malloc((size_t)*n);
    assert_int_equal(fread(*out, 1, (size_t)*n, f), *n);
    fclose(f);
}

static void write_file(const char *name, const char *data, long n)
{
    char file[PATH_MAX];
    snprintf(file, sizeof file, "%s/%s", path, name);
    FILE *f = fopen(file, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, (size_t)n, f), n);
    fclose(f);
}

/** Open, read and verify everything; the first error. */
static peri_status read_all(void)
{
    peri_checkpoint *c;
    const int64_t n = 3;
    peri_tensor *out = NULL;
    PERI_TRY(peri_checkpoint_open(path, &c));
    peri_status status = peri_tensor_new(cpu(), PERI_F32, 1, &n, &out);
    if (status >= 0) status = peri_checkpoint_read(c, 0, REGION(.extent = {3}), out);
    if (status >= 0) status = peri_checkpoint_verify_since(c, -1);
    peri_tensor_release(out);
    peri_checkpoint_release(c);
    return status;
}

/** Who loads waits for file @file of the checkpoint, which another process moves in; what does not come is named. */
static void late_file_is_waited_for(const char *file)
{
    char aside[PATH_MAX];
    peri_checkpoint *c;
    const struct timespec pause = {.tv_nsec = 200 * 1000 * 1000};
    snprintf(aside, sizeof aside, "%s-aside", path);
    assert_int_equal(rename(file, aside), 0);
    int64_t began = peri_time_ns();
    assert_fails(peri_checkpoint_open_late(path, 0.2, &c), PERI_ENOTFOUND, "rank-0.safetensors");
    assert_true(peri_time_ns() - began >= pause.tv_nsec);
    assert_fails(peri_checkpoint_open_late(path, 0, &c), PERI_ENOTFOUND, "rank-0.safetensors");
    assert_fails(peri_checkpoint_open_late(path, NAN, &c), PERI_EINVAL, "allowed: 0 to 86400");
    const pid_t child = fork();
    if (child == 0) {
        nanosleep(&pause, NULL);
        _exit(rename(aside, file) != 0);
    }
    int ended;
    assert_ok(peri_checkpoint_open_late(path, 30, &c));
    peri_checkpoint_release(c);
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_int_equal(ended, 0);
}

/** Any flipped bit of the manifest, of a header or of data, any cut, any file that is not there. */
static void damage_is_named(void **context)
{
    (void)context;
    const float values[] = {1, 2, 3};
    char digest[33], *data;
    long n;
    assert_ok(save_one(values, 3, false, digest));
    assert_ok(read_all());
    static const char *const names[] = {"manifest.json", "rank-0.safetensors"};
    for (int f = 0; f < 2; f++) {
        read_file(names[f], &data, &n);
        for (long i = 0; i < n; i++) {
            data[i] = (char)(data[i] ^ 1 << i % 8);
            write_file(names[f], data, n);
            assert_fails(read_all(), PERI_EFORMAT, "checkpoint");
            data[i] = (char)(data[i] ^ 1 << i % 8);
        }
        for (long i = 0; i < n; i++) {
            write_file(names[f], data, i);
            assert_fails(read_all(), PERI_EFORMAT, "checkpoint");
        }
        write_file(names[f], data, n);
        assert_ok(read_all());
        free(data);
    }
    char file[PATH_MAX];
    snprintf(file, sizeof file, "%s/rank-0.safetensors", path);
    late_file_is_waited_for(file);
    unlink(file);
    assert_fails(read_all(), PERI_ENOTFOUND, "rank-0.safetensors");
    snprintf(file, sizeof file, "%s/manifest.json", path);
    unlink(file);
    assert_fails(read_all(), PERI_EFORMAT, "not finished");
    rmdir(path);
    assert_fails(read_all(), PERI_ENOTFOUND, "model");
}

/** Write @body, a manifest without its end, with the checksum that it has. */
static void write_manifest(const char *body)
{
    char text[4096];
    XXH128_hash_t h = XXH3_128bits(body, strlen(body));
    int n = snprintf(text, sizeof text, "%s,\n\"checksum\":\"%016llx%016llx\"}\n", body, (unsigned long long)h.high64,
                     (unsigned long long)h.low64);
    assert_true(n < (int)sizeof text);
    write_file("manifest.json", text, n);
}

/** Manifests whose checksums hold and that strangers have made up; links, pipes and folders in place of files. */
static void strangers_are_refused(void **context)
{
    (void)context;
#define FILES "\"files\":[{\"name\":\"x\",\"bytes\":20}],"
#define OF(files, shape, pieces)                                                                                       \
    "{\"format\":\"perilune-checkpoint\",\"version\":1,\n" files                                                       \
    "\"tensors\":[{\"name\":\"t\",\"dtype\":\"F32\",\"shape\":" shape ",\"pieces\":[" pieces "]}]"
#define PIECE(begin, bytes, offset, size)                                                                              \
    "{\"file\":0,\"begin\":" begin ",\"bytes\":" bytes ",\"offset\":[" offset "],\"size\":[" size "]}"
#define NAMED(name, bytes) "\"files\":[{\"name\":\"" name "\",\"bytes\":" bytes "}],"
    static const struct {
        const char *body, *why;
    } cases[] = {
        {OF(NAMED("x", "9223372036854775807"), "[3]", PIECE("9223372036854775800", "12", "0", "3")),
         "outside its file"},
        {OF(NAMED("x", "9223372036854775808"), "[3]", PIECE("8", "12", "0", "3")), "too large"},
        {OF(NAMED("x", "-1"), "[3]", PIECE("8", "12", "0", "3")), "without its bytes"},
        {OF(FILES, "[9223372036854775807]", PIECE("8", "12", "0", "9223372036854775807")), "too many elements"},
        {OF(FILES, "[4611686018427387904,4]", ""), "too many elements"},
        {OF(FILES, "[3]", PIECE("8", "12", "9223372036854775807", "3")), "allowed: within 0 to 3"},
        {OF(FILES, "[3]", PIECE("-8", "12", "0", "3")), "outside its file"},
        {OF(FILES, "[3]", PIECE("8", "16", "0", "3")), "not those of its elements"},
        {OF(FILES, "[3]", PIECE("8", "12", "0", "3") "," PIECE("8", "4", "2", "1")), "the same elements"},
        {OF(FILES, "[3]", ""), "0 of its 3 elements"},
        {OF(NAMED("../x", "20"), "[3]", PIECE("8", "12", "0", "3")), "no plain name"},
        {OF(NAMED("..", "20"), "[3]", PIECE("8", "12", "0", "3")), "no plain name"},
        {OF(NAMED("manifest.json", "20"), "[3]", PIECE("8", "12", "0", "3")), "no plain name"},
        {OF(NAMED("x", "20,\"header\":21,\"xxh3\":\"0123456789abcdef\""), "[3]",
            PIECE("8", "12", "0", "3")),
         "whose header"},
        {OF(NAMED("x", "20,\"header\":-8,\"xxh3\":\"0123456789abcdef\""), "[3]",
            PIECE("8", "12", "0", "3")),
         "whose header"},
        {OF(NAMED("x", "20,\"header\":8"), "[3]", PIECE("8", "12", "0", "3")), "whose header"},
        {OF(NAMED("x", "20,\"xxh3\":\"0123456789abcdef\""), "[3]", PIECE("8", "12", "0", "3")), "whose header"},
        {"{\"format\":\"perilune-checkpoint\",\"version\":2", "version 2 of the format"},
    };
    peri_checkpoint *c;
    char file[PATH_MAX], other[PATH_MAX];
    mkdir(path, 0777);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_manifest(cases[i].body);
        assert_fails(peri_checkpoint_open(path, &c), PERI_EFORMAT, cases[i].why);
    }
    /* A file that is listed twice is one file. */
    const float values[] = {0, 0, 1, 2, 3};
    write_manifest(OF("\"files\":[{\"name\":\"x\",\"bytes\":20},{\"name\":\"x\",\"bytes\":20}],", "[3]",
                      PIECE("8", "4", "0", "1") ",{\"file\":1,\"begin\":12,\"bytes\":8,\"offset\":[1],\"size\":[2]}"));
    write_file("x", (const char *)values, 20);
    check_one(values + 2, 3);
    assert_ok(peri_checkpoint_remove(path));
    assert_int_equal(access(path, F_OK), -1);
    /* Not what the manifest says: longer than any file, a link, a pipe, a folder. */
    mkdir(path, 0777);
    write_manifest(OF(NAMED("x", "9223372036854775807"), "[3]", PIECE("9223372036854775795", "12", "0", "3")));
    write_file("x", (const char *)values, 20);
    assert_fails(read_all(), PERI_EFORMAT, "has 20 bytes");
    write_manifest(OF(FILES, "[3]", PIECE("8", "12", "0", "3")));
    snprintf(file, sizeof file, "%.2000s/x", path);
    snprintf(other, sizeof other, "%.2000s/y", path);
    assert_int_equal(rename(file, other), 0);
    assert_int_equal(symlink(other, file), 0);
    assert_fails(read_all(), PERI_EFORMAT, "'x' is no regular file");
    unlink(file);
    assert_int_equal(mkfifo(file, 0666), 0);
    assert_fails(read_all(), PERI_EFORMAT, "'x' is no regular file");
    unlink(file);
    assert_int_equal(mkdir(file, 0777), 0);
    assert_fails(read_all(), PERI_EFORMAT, "'x' is no regular file");
    rmdir(file);
    /* A folder by another name can be read, and only be removed by its own. */
    assert_int_equal(rename(other, file), 0);
    snprintf(other, sizeof other, "%.2000s/link", folder);
    assert_int_equal(symlink(path, other), 0);
    assert_ok(peri_checkpoint_open(other, &c));
    peri_checkpoint_release(c);
    assert_fails(peri_checkpoint_remove(other), PERI_EINVAL, "a link to a folder");
    assert_ok(read_all());
}

/** What exists is refused, and what is no checkpoint is never replaced or removed. */
static void only_checkpoints_are_replaced(void **context)
{
    (void)context;
    const float values[] = {1, 2, 3};
    char digest[33], file[PATH_MAX], other[PATH_MAX];
    assert_ok(save_one(values, 3, false, digest));
    assert_fails(save_one(values, 3, false, digest), PERI_EINVAL, "is there already");
    sweep(saving);
    snprintf(file, sizeof file, "%s/notes.txt", path);
    close(open(file, O_CREAT | O_WRONLY, 0666));
    assert_fails(peri_checkpoint_remove(path), PERI_EIO, "files that are not of the checkpoint");
    assert_int_equal(access(file, F_OK), 0);
    assert_fails(save_one(values, 3, true, digest), PERI_EINVAL, "is no checkpoint");
    sweep(saving);
    assert_int_equal(access(file, F_OK), 0);
    unlink(file);
    rmdir(path);
    assert_ok(save_one(values, 3, true, digest));
    check_one(values, 3);
    for (int i = 0; i < 2; i++) { /* what somebody has put into its folder would go with it */
        snprintf(file, sizeof file, "%s/%s", path, i ? "rank-7.safetensors" : "notes.txt");
        close(open(file, O_CREAT | O_WRONLY, 0666));
        assert_fails(save_one(values, 3, true, digest), PERI_EINVAL, "in it is no file of the checkpoint");
        sweep(saving);
        check_one(values, 3);
        unlink(file);
    }
    assert_ok(save_one(values, 3, true, digest));
    /* What cannot be read now may be an increment of it; what is damaged is none. */
    snprintf(other, sizeof other, "%.2000s/other", folder);
    snprintf(file, sizeof file, "%.2000s/manifest.json", other);
    assert_int_equal(mkdir(other, 0777), 0);
    assert_int_equal(mknod(file, S_IFSOCK | 0666, 0), 0);
    assert_fails(peri_checkpoint_remove(path), PERI_EIO, "other': No such device or address; it may be an increment");
    check_one(values, 3);
    unlink(file);
    close(open(file, O_CREAT | O_WRONLY, 0666));
    assert_ok(peri_checkpoint_remove(path));
    assert_int_equal(access(path, F_OK), -1);
    unlink(file);
    rmdir(other);
}

/** Parts that do not fit together. */
static void parts_must_fit(void **context)
{
    (void)context;
    const int64_t shape[] = {4, 4};
    const peri_checkpoint_tensor t = tensor_of("t", PERI_U8, 2, shape);
    static const struct {
        peri_checkpoint_region pieces[2];
        int n;
        const char *why;
    } cases[] = {
        {{{SIZED, .extent = {2, 4}}}, 1, "its pieces have 8 of its 16 elements"},
        {{{SIZED, .extent = {3, 4}}, {SIZED, .offset = {2, 0}, .extent = {2, 4}}},
         2,
         "two of its pieces have the same elements"},
        {{{SIZED, .extent = {2, 4}}, {SIZED, .offset = {1, 0}, .extent = {2, 4}}},
         2,
         "two of its pieces have the same elements"},
        {{{SIZED, .extent = {4, 4}, .columns = 2}, {SIZED, .extent = {4, 4}, .column = 1, .columns = 2}},
         2,
         "share columns"},
        {{{SIZED, .extent = {4, 4}}, {SIZED, .extent = {4, 4}, .column = 1, .columns = 2}}, 2, "say their columns"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        peri_checkpoint_writer *w;
        const char *part;
        char digest[33];
        const unsigned char data[16] = {0};
        assert_ok(peri_checkpoint_writer_new(saving, "r", 0, &w));
        for (int k = 0; k < cases[i].n; k++) assert_ok(peri_checkpoint_writer_add(w, &t, &cases[i].pieces[k]));
        for (int k = 0; k < cases[i].n; k++)
            assert_ok(
                peri_checkpoint_writer_put_bytes(w, data, cases[i].pieces[k].extent[0] * cases[i].pieces[k].extent[1]));
        assert_ok(peri_checkpoint_writer_finish(w));
        assert_ok(peri_checkpoint_writer_part(w, &part));
        assert_fails(peri_checkpoint_publish(saving, path, &part, 1, NULL, false, digest), PERI_EMISMATCH,
                     cases[i].why);
        peri_checkpoint_writer_release(w);
        sweep(saving);
        mkdir(saving, 0777);
    }
}

/** A bool is 0 or 1, whoever wrote the file. */
static void bools_are_checked(void **context)
{
    (void)context;
    const int64_t n = 4;
    const unsigned char data[] = {0, 1, 2, 1};
    const peri_checkpoint_tensor t = tensor_of("t", PERI_BOOL, 1, &n);
    peri_checkpoint_writer *w;
    peri_checkpoint *c;
    peri_tensor *out;
    assert_ok(peri_checkpoint_writer_new(saving, "r", 0, &w));
    assert_ok(peri_checkpoint_writer_add(w, &t, REGION(.extent = {4})));
    assert_ok(peri_checkpoint_writer_put_bytes(w, data, 4));
    assert_ok(peri_checkpoint_writer_finish(w));
    strcat(saving, "/r.safetensors");
    assert_ok(peri_checkpoint_open(saving, &c));
    assert_int_equal(peri_checkpoint_count(c), 1);
    assert_string_equal(peri_checkpoint_digest(c), "");
    assert_ok(peri_tensor_new(cpu(), PERI_BOOL, 1, &n, &out));
    assert_fails(peri_checkpoint_read(c, 0, REGION(.extent = {4}), out), PERI_EFORMAT, "neither 0 nor 1");
    peri_tensor_release(out);
    peri_checkpoint_release(c);
    peri_checkpoint_writer_release(w);
}

static void refusals_say_what_is_allowed(void **context)
{
    (void)context;
    const int64_t shape[] = {4};
    peri_checkpoint_tensor t = tensor_of("t", PERI_F32, 1, shape), wide = tensor_of("c", PERI_C128, 1, shape);
    const float values[4] = {0};
    peri_checkpoint_writer *w;
    const char *part;
    char digest[33];
    assert_fails(peri_checkpoint_writer_new(saving, "a/b", 0, &w), PERI_EINVAL, "stem");
    assert_ok(peri_checkpoint_writer_new(saving, "r", 0, &w));
    assert_fails(peri_checkpoint_writer_add(w, &t, REGION(.offset = {2}, .extent = {3})), PERI_EINVAL, "within 0 to 4");
    assert_fails(peri_checkpoint_writer_add(w, &wide, REGION(.extent = {4})), PERI_EUNSUPPORTED, "c128");
    assert_ok(peri_checkpoint_writer_add(w, &t, REGION(.extent = {4})));
    assert_fails(peri_checkpoint_writer_put_bytes(w, values, 3), PERI_EINVAL, "whole elements");
    assert_fails(peri_checkpoint_writer_put_bytes(w, values, 20), PERI_EINVAL, "has 4 left");
    assert_fails(peri_checkpoint_writer_finish(w), PERI_EINVAL, "4 elements of 't'");
    assert_fails(peri_checkpoint_writer_part(w, &part), PERI_EINVAL, "not finished");
    assert_ok(peri_checkpoint_writer_put_bytes(w, values, 16));
    assert_fails(peri_checkpoint_writer_put_bytes(w, values, 4), PERI_EINVAL, "are written");
    assert_ok(peri_checkpoint_writer_finish(w));
    assert_ok(peri_checkpoint_writer_part(w, &part));
    const char *other = "{\"part\":\"../r.part.json\",\"bytes\":1}";
    assert_fails(peri_checkpoint_publish(saving, path, &other, 1, NULL, false, digest), PERI_EFORMAT,
                 "no text of peri_checkpoint_writer_part");
    assert_fails(peri_checkpoint_publish(saving, path, &part, 1, FACTS(.values = "{"), false, digest), PERI_EINVAL, "");
    assert_fails(peri_checkpoint_publish(saving, path, &part, 1, FACTS(.parent = "x"), false, digest), PERI_EINVAL,
                 "digest");
    sweep(saving);
    rmdir(saving); /* nothing is waited for then: the name of a folder is never late in the process that made it */
    const int64_t began = peri_time_ns();
    assert_fails(peri_checkpoint_publish(saving, path, &part, 1, NULL, false, digest), PERI_ENOTFOUND,
                 "of this save was removed while it was written: nothing is saved");
    assert_true(peri_time_ns() - began < (int64_t)10e9);
    peri_checkpoint_lock *lock;
    peri_checkpoint_folder *made;
    if (access("/sys/kernel", F_OK) == 0) { /* where nobody can make a folder, the reason is that, not that it lacks */
        assert_true(peri_checkpoint_lock_new("/sys/perilune-test", &lock) == PERI_EIO);
        assert_null(strstr(peri_error_message(), "No such file"));
        assert_true(peri_checkpoint_folder_new("/sys/perilune-test/model", &made) == PERI_EIO);
        assert_null(strstr(peri_error_message(), "No such file"));
    }
    peri_checkpoint_writer_release(w);
}

static const struct CMUnitTest tests[] = {
    TEST(a_failed_save_leaves_the_old_one),
    TEST(damage_is_named),
    TEST(strangers_are_refused),
    TEST(only_checkpoints_are_replaced),
    TEST(parts_must_fit),
    TEST(bools_are_checked),
    TEST(refusals_say_what_is_allowed),
};

check_main(tests)
