/* SPDX-License-Identifier: Apache-2.0
 *
 * test_loader.c: backends by name: built in, from plugins, and everything that can be wrong with a plugin. The plugins of
 * tests/unit/plugins lie beside this program.
 */
#include "tests/harness/check.h"

#include "runtime/plugin/internal.h"

#include <libgen.h>
#include <perilune/device.h>
#include <stdlib.h>
#include <unistd.h>

static char folder[4000];

static int find_plugins(void **state)
{
    (void)state;
    char self[3900] = "";
    if (readlink("/proc/self/exe", self, sizeof self - 1) < 0) return -1;
    snprintf(folder, sizeof folder, "%s/plugins", dirname(self));
    return 0;
}

static void built_in_backends_are_there(void **state)
{
    (void)state;
    const peri_device_vtab *device = NULL;
    const peri_coll_vtab *coll = NULL;
    assert_ok(peri__plugin_device("cpu", &device));
    assert_string_equal(device->name, "cpu");
    assert_ok(peri__plugin_device("opaque", &device));
    assert_ok(peri__plugin_coll("self", &coll));
    assert_string_equal(coll->name, "self");
}

static void names_cannot_be_paths(void **state)
{
    (void)state;
    static const char *const bad[] = {"../cpu", "a/b", "CPU", "", " ", "a.b", "abcdefghijklmnopqrstuvwxyzabcdefghijklmnop", "cpu;rm"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const peri_device_vtab *device = NULL;
        const peri_coll_vtab *coll = NULL;
        assert_int_equal(peri__plugin_device(bad[i], &device), PERI_ENOTFOUND);
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
    assert_fails(peri__plugin_coll("nowhere", &coll), PERI_ENOTFOUND, "no libperilune_nowhere.so on PERI_PLUGIN_PATH or beside");
    setenv("PERI_PLUGIN_PATH", "plugins", 1);
    assert_fails(peri__plugin_coll("nowhere", &coll), PERI_ENOTFOUND,
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
        assert_fails(peri__plugin_device("bad_abi", &device), PERI_EUNSUPPORTED, "built for another version of Perilune (contract 42");
        assert_fails(peri__plugin_coll("bad_abi", &coll), PERI_EUNSUPPORTED, "of 16 bytes");
        assert_fails(peri__plugin_device("no_entry", &device), PERI_EUNSUPPORTED, "libperilune_no_entry.so has no peri_device_entry_v1");
        assert_fails(peri__plugin_coll("refusing", &coll), PERI_EUNSUPPORTED, "refused this version");
    }
    assert_null(device);
    assert_null(coll);
}

static void another_list_of_kernels_is_refused(void **state)
{
    (void)state;
    const peri_device_vtab *device = NULL;
    peri_device *opened = NULL;
    setenv("PERI_PLUGIN_PATH", folder, 1);
    for (int twice = 0; twice < 2; twice++) {
        assert_fails(peri__plugin_device("stale_order", &device), PERI_EUNSUPPORTED, "'stale_order': built with another list of kernels");
        assert_fails(peri__plugin_device("stale_size", &device), PERI_EUNSUPPORTED, "'stale_size': built with another list of kernels");
    }
    const peri_coll_vtab *coll = NULL;
    assert_fails(peri__plugin_coll("stale_order", &coll), PERI_EUNSUPPORTED, "transport 'stale_order': built with another list of kernels");
    assert_null(coll);
    assert_fails(peri_device_get("stale_order", &opened), PERI_EUNSUPPORTED, "build it again with the headers of this version");
    assert_null(device);
    assert_null(opened);
    assert_ok(peri__plugin_device("own_way", &device)); /* built with the list of today */
    assert_string_equal(device->name, "own_way");
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
    peri_status status = peri__plugin_device("text", &device);
    unlink(path);
    assert_int_equal(status, PERI_ENOTFOUND);
    assert_non_null(strstr(peri_error_message(), "libperilune_text.so"));
    assert_non_null(strstr(peri_error_message(), "invalid ELF header") ? "" : strstr(peri_error_message(), "too short"));
}

static void an_unusable_device_tells_its_reason(void **state)
{
    (void)state;
    char reason[256] = "";
    peri_device *device = NULL;
    setenv("PERI_PLUGIN_PATH", folder, 1);
    assert_false(peri_device_probe("refusing", reason, sizeof reason));
    assert_string_equal(reason, "the moon is in the wrong phase");
    assert_fails(peri_device_get("refusing:1", &device), PERI_EUNSUPPORTED, "cannot be used here: the moon is in the wrong phase");
    assert_null(device);
    assert_fails(peri_device_get("own_way:1", &device), PERI_ENOTFOUND, "device own_way:1: open failed: a named thing does not exist");
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
    assert_fails(peri__plugin_device("bad_abi", &device), PERI_EUNSUPPORTED, "contract 42");
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
    cmocka_unit_test(another_list_of_kernels_is_refused),
    cmocka_unit_test(a_file_that_is_no_library_is_named),
    cmocka_unit_test(an_unusable_device_tells_its_reason),
    cmocka_unit_test(the_path_is_searched_in_order_and_relative_folders_never),
};

int main(void) { return cmocka_run_group_tests(tests, find_plugins, NULL); }
