/* SPDX-License-Identifier: Apache-2.0
 *
 * test_loader.c: backends by name: built in, from plugins, and everything that can be wrong with a plugin. The plugins
 * of tests/unit/plugins lie beside this program.
 */
#include "tests/harness/check.h"

#include "kernels/kernels.h"
#include "runtime/plugin/plugin_internal.h"

#include <libgen.h>
#include <perilune/ops.h>
#include <perilune/sparse.h>
#include <stdlib.h>
#include <unistd.h>

static char folder[4000];

static int find_plugins(void **state)
{
    (void)state;
    char self[3900] = "";
    if (readlink("/proc/self/exe", self, sizeof self - 1) < 0) return -1;
    snprintf(folder, sizeof folder, "%s/plugins", dirname(self));
    if (access(folder, R_OK) == 0) return 0;
    print_error("%s: there is no such folder; it has the plugins that `make check-c` builds\n", folder);
    return -1;
}

static void built_in_backends_are_there(void **state)
{
    (void)state;
    const peri_device_vtab *device = NULL;
    const peri_coll_vtab *coll = NULL;
    assert_ok(peri__plugin_device("cpu", &device, NULL));
    assert_string_equal(device->name, "cpu");
    assert_ok(peri__plugin_device("opaque", &device, NULL));
    assert_ok(peri__plugin_coll("self", &coll));
    assert_string_equal(coll->name, "self");
}

static void names_cannot_be_paths(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "../cpu", "a/b", "CPU", "", " ", "a.b", "abcdefghijklmnopqrstuvwxyzabcdefghijklmnop", "cpu;rm"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const peri_device_vtab *device = NULL;
        const peri_coll_vtab *coll = NULL;
        assert_int_equal(peri__plugin_device(bad[i], &device, NULL), PERI_ENOTFOUND);
        assert_int_equal(peri__plugin_coll(bad[i], &coll), PERI_ENOTFOUND);
        assert_null(device);
        assert_null(coll);
    }
}

static void a_missing_plugin_says_where_it_was_looked_for(void **state)
{
    (void)state;
    const peri_coll_vtab *coll = NULL;
    setenv("PERI_PLUGIN_PATH", folder, 1);
    assert_fails(peri__plugin_coll("nowhere", &coll), PERI_ENOTFOUND,
                 "no libperilune_nowhere.so on PERI_PLUGIN_PATH or beside");
    setenv("PERI_PLUGIN_PATH", "plugins", 1);
    assert_fails(
        peri__plugin_coll("nowhere", &coll), PERI_ENOTFOUND,
        "no libperilune_nowhere.so: PERI_PLUGIN_PATH has the folder 'plugins', allowed: paths that begin with /");
    unsetenv("PERI_PLUGIN_PATH");
    assert_fails(peri__plugin_coll("nowhere", &coll), PERI_ENOTFOUND, "transport 'nowhere'");
    assert_null(coll);
}

static void other_contracts_are_refused(void **state)
{
    (void)state;
    const peri_device_vtab *device = NULL;
    const peri_coll_vtab *coll = NULL;
    setenv("PERI_PLUGIN_PATH", folder, 1);
    for (int twice = 0; twice < 2; twice++) { /* remembered or not */
        assert_fails(peri__plugin_device("bad_abi", &device, NULL), PERI_EUNSUPPORTED,
                     "built for another version of Perilune (it needs contract 42");
        assert_fails(peri__plugin_coll("bad_abi", &coll), PERI_EUNSUPPORTED, "a table of 16 bytes");
        assert_fails(peri__plugin_device("no_entry", &device, NULL), PERI_EUNSUPPORTED,
                     "libperilune_no_entry.so has no peri_device_entry_v1");
        assert_fails(peri__plugin_coll("refusing", &coll), PERI_EUNSUPPORTED, "refused this version");
        setenv("REFUSING_NEEDS", "reduce", 1); /* has other arguments than when the plugin was built */
        assert_fails(peri__plugin_coll("refusing", &coll), PERI_EUNSUPPORTED,
                     "it needs kernel 'reduce', which takes other arguments here)");
        setenv("REFUSING_NEEDS", "gone", 1);
        assert_fails(peri__plugin_coll("refusing", &coll), PERI_EUNSUPPORTED,
                     "it needs kernel 'gone', which is not here)");
        unsetenv("REFUSING_NEEDS");
    }
    assert_null(device);
    assert_null(coll);
}

/** other_list has kernels that the library has not, others in another order, and one whose arguments have another
 *  size. */
static void kernels_are_known_by_their_names(void **state)
{
    (void)state;
    const peri_device_vtab *device = NULL;
    const int32_t *work = NULL;
    peri_device *opened = NULL;
    setenv("PERI_PLUGIN_PATH", folder, 1);
    assert_ok(peri__plugin_device("own_way", &device, &work)); /* built with the list of today */
    for (int32_t i = 0; i < PERI_WORK_COUNT; i++) assert_int_equal(work[i], i == PERI_KERNEL_COUNT ? -1 : i);
    assert_ok(peri__plugin_device("cpu", &device, &work));
    assert_null(work);
    assert_ok(peri__plugin_device("other_list", &device, &work));
    int32_t n;
    const peri_work_entry *own = peri_work_list(&n);
    int moved = 0, there = 0;
    for (int32_t i = 0; i < PERI_WORK_COUNT; i++) {
        int32_t count;
        const peri_work_entry *theirs = device->work(&count);
        if (work[i] < 0) continue;
        assert_string_equal(theirs[work[i]].name, own[i].name);
        moved += work[i] != i;
        there++;
    }
    assert_int_equal(there, PERI_WORK_COUNT - 4); /* less the gap between kernels and operations, cumsum, dropout, and
                                                     the kernel that is gone */
    assert_int_equal(work[PERI_K_dropout], -1);
    assert_true(moved > 50);
    assert_int_equal(work[PERI_OP_cumsum], -1);
    assert_int_equal(work[PERI_K_cache_fill], -1);

    /* What it is asked to run is what was meant. */
    const int64_t shape[1] = {5};
    peri_tensor *t = NULL, *sums = NULL;
    double x = 0;
    assert_ok(peri_device_get("other_list", &opened));
    assert_ok(peri_tensor_full(opened, PERI_F32, 1, shape, 2.5, &t));
    assert_ok(peri_op_affine(t, 2, 1, &sums));
    assert_ok(peri_tensor_item(sums, 4, &x));
    assert_true(x == 6);
    peri_tensor_release(sums);
    sums = NULL;
    peri_tensor *lengths = NULL;
    assert_ok(peri_tensor_full(opened, PERI_I64, 1, shape, 1, &lengths));
    assert_fails(peri_sparse_cumsum(lengths, PERI_CUMSUM_COMPLETE, &sums), PERI_EUNSUPPORTED,
                 "device other_list has no operation cumsum");
    peri_tensor_release(lengths);
    peri_tensor_release(t);
}

/** A backend says the lowest contract that it needs; the members that it does not have are NULL, those that the core
 *  does not know are not looked at. */
static void contracts_from_the_lowest_on_are_taken(void **state)
{
    (void)state;
    const peri_device_vtab *device = NULL;
    setenv("PERI_PLUGIN_PATH", folder, 1);
    assert_ok(peri__plugin_device("short_table", &device, NULL));
    assert_int_equal(device->size, PERI_DEVICE_SIZE_LOWEST);
    assert_non_null(device->probe);
    assert_null(device->seed);
    assert_null(device->trim); /* in the plugin's memory something else lies there */
    assert_ok(peri__plugin_device("long_table", &device, NULL));
    assert_int_equal(device->size, sizeof *device + 16);
    assert_null(device->trim);
}

static void a_file_that_is_no_library_is_named(void **state)
{
    (void)state;
    char path[4096];
    const peri_device_vtab *device = NULL;
    snprintf(path, sizeof path, "%s/libperilune_text.so", folder);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs("no ELF file\n", file);
    fclose(file);
    setenv("PERI_PLUGIN_PATH", folder, 1);
    peri_status status = peri__plugin_device("text", &device, NULL);
    unlink(path);
    assert_int_equal(status, PERI_ENOTFOUND);
    assert_non_null(strstr(peri_error_message(), "libperilune_text.so"));
    assert_non_null(strstr(peri_error_message(), "invalid ELF header") ? ""
                                                                       : strstr(peri_error_message(), "too short"));
}

static void an_unusable_device_tells_its_reason(void **state)
{
    (void)state;
    char reason[256] = "";
    peri_device *device = NULL;
    setenv("PERI_PLUGIN_PATH", folder, 1);
    assert_false(peri_device_probe("refusing", reason, sizeof reason));
    assert_string_equal(reason, "the moon is in the wrong phase");
    assert_fails(peri_device_get("refusing:1", &device), PERI_EUNSUPPORTED,
                 "cannot be used here: the moon is in the wrong phase");
    assert_null(device);
    assert_fails(peri_device_get("own_way:1", &device), PERI_ENOTFOUND,
                 "device own_way:1: open failed: a named thing does not exist");
    assert_null(device);
    assert_true(peri_device_probe("cpu", reason, sizeof reason));
    assert_string_equal(reason, "");
    assert_false(peri_device_probe("nowhere", NULL, 0));
    assert_false(peri_device_probe("nowhere", reason, 8));
    assert_int_equal(strlen(reason), 7);
}

static void the_path_is_searched_in_order_and_relative_folders_never(void **state)
{
    (void)state;
    char path[9000];
    const peri_coll_vtab *coll = NULL;
    const peri_device_vtab *device = NULL;
    snprintf(path, sizeof path, ":.:/nonexistent:%s:", folder);
    setenv("PERI_PLUGIN_PATH", path, 1);
    assert_fails(peri__plugin_device("bad_abi", &device, NULL), PERI_EUNSUPPORTED, "contract 42");
    /* From inside the folder, "." and "" would find it. */
    char before[4096];
    assert_non_null(getcwd(before, sizeof before));
    assert_int_equal(chdir(folder), 0);
    setenv("PERI_PLUGIN_PATH", ".:", 1);
    assert_fails(peri__plugin_coll("no_entry", &coll), PERI_ENOTFOUND, "no libperilune_no_entry.so");
    assert_int_equal(chdir(before), 0);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(built_in_backends_are_there),
    cmocka_unit_test(names_cannot_be_paths),
    cmocka_unit_test(a_missing_plugin_says_where_it_was_looked_for),
    cmocka_unit_test(other_contracts_are_refused),
    cmocka_unit_test(kernels_are_known_by_their_names),
    cmocka_unit_test(contracts_from_the_lowest_on_are_taken),
    cmocka_unit_test(a_file_that_is_no_library_is_named),
    cmocka_unit_test(an_unusable_device_tells_its_reason),
    cmocka_unit_test(the_path_is_searched_in_order_and_relative_folders_never),
};

int main(void) { return cmocka_run_group_tests(tests, find_plugins, NULL); }
