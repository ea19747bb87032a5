/* SPDX-License-Identifier: Apache-2.0
 *
 * checkpoint_folder.h: a folder for each test of checkpoints, and a small writer of whole tensors.
 */
#ifndef PERI_TESTS_CHECKPOINT_FOLDER_H
#define PERI_TESTS_CHECKPOINT_FOLDER_H

#include "runtime/base/base_internal.h"

#include <perilune/checkpoint.h>
#include <perilune/device.h>

#include <dirent.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[64], saving[128], path[128];

static peri_device *cpu(void)
{
    peri_device *device;
    assert_ok(peri_device_get("cpu", &device));
    return device;
}

static int make_folder(void **context)
{
    (void)context;
    strcpy(folder, "/tmp/peri-checkpoint-XXXXXX");
    if (!mkdtemp(folder)) return 1;
    snprintf(saving, sizeof saving, "%s/.saving", folder);
    snprintf(path, sizeof path, "%s/model", folder);
    return mkdir(saving, 0777);
}

static void sweep(const char *at)
{
    DIR *d = opendir(at);
    if (!d) return;
    for (struct dirent *e; (e = readdir(d));) {
        char inner[PATH_MAX];
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        snprintf(inner, sizeof inner, "%.2000s/%s", at, e->d_name);
        if (unlink(inner) != 0) sweep(inner);
    }
    closedir(d);
    rmdir(at);
}

static int remove_folder(void **context)
{
    (void)context;
    sweep(folder);
    return 0;
}

/* -- a small writer of whole tensors ------------------------------------------------------------------------------- */

#define SIZED .size = sizeof(peri_checkpoint_region)
#define REGION(...) (&(peri_checkpoint_region){SIZED, __VA_ARGS__})
#define FACTS(...) (&(peri_checkpoint_config){.size = sizeof(peri_checkpoint_config), __VA_ARGS__})

static peri_checkpoint_tensor tensor_of(const char *name, int32_t dtype, int32_t ndim, const int64_t *shape)
{
    peri_checkpoint_tensor t = {.size = sizeof t, .name = name, .dtype = dtype, .ndim = ndim};
    memcpy(t.shape, shape, (size_t)ndim * sizeof *shape);
    return t;
}

/** One f32 tensor "t" of @n numbers, those of @values, as the part of stem "rank-0". */
static peri_status write_one(const float *values, int64_t n, peri_checkpoint_writer **out)
{
    peri_checkpoint_writer *w;
    peri_checkpoint_tensor t = tensor_of("t", PERI_F32, 1, &n);
    peri_checkpoint_region r = {.size = sizeof r, .extent = {n}};
    PERI_TRY(peri_checkpoint_writer_new(saving, "rank-0", 0, &w));
    peri_status status = peri_checkpoint_writer_add(w, &t, &r);
    if (status >= 0) status = peri_checkpoint_writer_put_bytes(w, values, n * 4);
    if (status >= 0) status = peri_checkpoint_writer_finish(w);
    if (status < 0) peri_checkpoint_writer_release(w);
    else *out = w;
    return status;
}

static peri_status save_one(const float *values, int64_t n, bool replace, char digest[33])
{
    peri_checkpoint_writer *w;
    const char *part;
    mkdir(saving, 0777);
    PERI_TRY(write_one(values, n, &w));
    peri_status status = peri_checkpoint_writer_part(w, &part);
    if (status >= 0) status = peri_checkpoint_publish(saving, path, &part, 1, NULL, replace, digest);
    peri_checkpoint_writer_release(w);
    return status;
}

static void check_one(const float *values, int64_t n)
{
    peri_checkpoint *c;
    peri_tensor *out;
    float *got = malloc((size_t)n * 4);
    assert_ok(peri_checkpoint_open(path, &c));
    assert_ok(peri_tensor_new(cpu(), PERI_F32, 1, &n, &out));
    assert_ok(peri_checkpoint_read(c, peri_checkpoint_find(c, "t"), REGION(.extent = {n}), out));
    assert_ok(peri_tensor_read(out, got, n * 4));
    assert_memory_equal(got, values, (size_t)n * 4);
    peri_tensor_release(out);
    peri_checkpoint_release(c);
    free(got);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_folder, remove_folder)

#endif
