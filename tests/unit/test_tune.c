/* SPDX-License-Identifier: Apache-2.0
 *
 * test_tune.c: who decides between ways: given, kept, measured, default; the choice follows the times of a meter that is told them; the
 * file comes back as it was written, and no damage to it goes unseen.
 */
#include "tests/harness/check.h"

#include "runtime/base/tune.h"
#include "runtime/base/tune_file.h"
#include "runtime/base/tune_table.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[256];

/** A meter whose passes take as long as `told` says. */
static struct {
    int64_t told[PERI__TUNE_CHOICES][PERI_TUNE_WAYS];
    int32_t opened, closed, passes;
    peri_status open_status;
} fake;

static peri_status fake_open(void **state)
{
    *state = &fake;
    fake.opened++;
    if (fake.open_status < 0) return peri__fail(fake.open_status, "no room for the measurement");
    return PERI_OK;
}

static int64_t fake_pass(void *state, int32_t choice)
{
    peri_tune_choice c;
    assert_ptr_equal(state, &fake);
    assert_ok(peri_tune_describe(choice, &c));
    fake.passes++;
    return fake.told[choice][c.way] + (fake.passes % 4 == 3 ? 1000 : 0); /* some are disturbed: the least counts */
}

static void fake_close(void *state)
{
    assert_ptr_equal(state, &fake);
    fake.closed++;
}

static const peri__tune_meter meter = {fake_open, fake_pass, fake_close};

static int fresh(void **state)
{
    (void)state;
    char command[300];
    snprintf(folder, sizeof folder, "/tmp/perilune_tune_%d", (int)getpid());
    snprintf(command, sizeof command, "rm -rf %s", folder);
    assert_int_equal(system(command), 0);
    setenv("XDG_CACHE_HOME", folder, 1);
    unsetenv("PERI_TUNE");
    memset(&fake, 0, sizeof fake);
    for (int c = 0; c < PERI__TUNE_CHOICES; c++)
        for (int w = 0; w < PERI_TUNE_WAYS; w++) fake.told[c][w] = 100000;
    for (int g = 0; g < PERI__TUNE_NONE; g++) peri__tune_offer(g, &meter);
    peri__tune_reload();
    return 0;
}

static int gone(void **state)
{
    fresh(state);
    return 0;
}

static peri_tune_choice described(int32_t choice)
{
    peri_tune_choice c;
    assert_ok(peri_tune_describe(choice, &c));
    return c;
}

static void numbers_of_ways(void **state)
{
    (void)state;
    for (int c = 0; c < PERI__TUNE_CHOICES; c++) {
        peri_tune_choice x = described(c);
        assert_int_equal(x.way, x.usual);
        assert_int_equal(x.source, PERI_TUNE_DEFAULT);
        assert_true(strlen(x.text) > 10 && x.ways[0] && x.ways[1]);
    }
    assert_int_equal(peri__tune(PERI__TUNE_lookup_prefetch), 16 << 10);
    assert_false(peri__tune_near(PERI__TUNE_lookup_prefetch));
    assert_ok(peri_tune_set("lookup_prefetch", "l1-4k"));
    assert_int_equal(peri__tune(PERI__TUNE_lookup_prefetch), 4 << 10);
    assert_true(peri__tune_near(PERI__TUNE_lookup_prefetch));
    assert_ok(peri_tune_set("lookup_prefetch", "off"));
    assert_int_equal(peri__tune(PERI__TUNE_lookup_prefetch), 0);
    assert_int_equal(peri__tune(PERI__TUNE_lookup_order), 0);
    assert_ok(peri_tune_set("lookup_order", "lines"));
    assert_int_equal(peri__tune(PERI__TUNE_lookup_order), 1);
    assert_int_equal(peri__tune(PERI__TUNE_copy_past), 24 << 20);
    assert_int_equal(peri__tune(PERI__TUNE_copy_near), 16000);
    assert_ok(peri_tune_set("lookup_prefetch", NULL));
    assert_int_equal(peri__tune(PERI__TUNE_lookup_prefetch), 16 << 10);
    assert_fails(peri_tune_set("lookup_prefetch", "l3-1k"), PERI_EINVAL, "allowed: off, l1-4k");
    assert_fails(peri_tune_set("lookup", "off"), PERI_ENOTFOUND, "known: lookup_prefetch, lookup_order");
    assert_fails(peri_tune_measure("copy_near", 1), PERI_EUNSUPPORTED, "not measured");
    assert_fails(peri_tune_measure("copy_by", 0), PERI_EINVAL, "allowed: 1..10000");
}

static void follows_the_times(void **state)
{
    (void)state;
    for (int c = 0; c < PERI__TUNE_CHOICES; c++) {
        peri_tune_choice x = described(c);
        if (!x.measured) continue;
        for (int w = 0; w < PERI_TUNE_WAYS && x.ways[w]; w++) {
            for (int k = 0; k < PERI_TUNE_WAYS; k++) fake.told[c][k] = 100000 + 1000 * k;
            fake.told[c][w] = 60000;
            assert_ok(peri_tune_measure(x.name, 4));
            peri_tune_choice got = described(c);
            assert_string_equal(got.ways[got.way], x.ways[w]);
            assert_int_equal(got.source, PERI_TUNE_MEASURED);
            assert_int_equal(got.ns[w], 60000);
        }
        for (int k = 0; k < PERI_TUNE_WAYS; k++) fake.told[c][k] = 98500; /* faster by less than 3 %: the default stays */
        fake.told[c][x.usual] = 100000;
        assert_ok(peri_tune_measure(x.name, 3));
        assert_int_equal(described(c).way, x.usual);
    }
    assert_int_equal(fake.opened, fake.closed);
}

static void measured_once_and_kept(void **state)
{
    (void)state;
    fake.told[PERI__TUNE_lookup_order][1] = 50000;
    peri__tune_need(PERI__TUNE_LOOKUP);
    assert_int_equal(peri__tune(PERI__TUNE_lookup_order), 1);
    assert_int_equal(fake.opened, 1);
    int32_t passes = fake.passes;
    peri__tune_need(PERI__TUNE_LOOKUP);
    assert_int_equal(fake.passes, passes);
    struct stat s;
    assert_int_equal(stat(peri_tune_path(), &s), 0);
    assert_non_null(strstr(peri_tune_path(), PERI_VERSION_TEXT));

    fake.told[PERI__TUNE_lookup_order][1] = 200000; /* the next process does not measure */
    peri__tune_reload();
    assert_int_equal(peri__tune(PERI__TUNE_lookup_order), 1);
    assert_int_equal(described(PERI__TUNE_lookup_order).source, PERI_TUNE_KEPT);
    peri__tune_need(PERI__TUNE_LOOKUP);
    assert_int_equal(fake.passes, passes);

    fake.told[PERI__TUNE_copy_past][0] = 50000; /* what another group finds goes beside it */
    peri__tune_need(PERI__TUNE_COPY);
    peri__tune_reload();
    assert_int_equal(described(PERI__TUNE_lookup_order).source, PERI_TUNE_KEPT);
    assert_int_equal(peri__tune(PERI__TUNE_copy_past), 0);
}

static void given_goes_first(void **state)
{
    (void)state;
    fake.told[PERI__TUNE_lookup_order][1] = 50000;
    setenv("PERI_TUNE", "lookup_order=scattered, copy_block=256k nonsense=1,copy_by=nobody", 1);
    peri__tune_reload();
    peri__tune_need(PERI__TUNE_LOOKUP);
    assert_int_equal(peri__tune(PERI__TUNE_lookup_order), 0);
    assert_int_equal(described(PERI__TUNE_lookup_order).source, PERI_TUNE_GIVEN);
    assert_int_equal(described(PERI__TUNE_lookup_prefetch).source, PERI_TUNE_MEASURED);
    assert_int_equal(peri__tune(PERI__TUNE_copy_block), 256 << 10);
    assert_int_equal(described(PERI__TUNE_copy_by).source, PERI_TUNE_DEFAULT);
    assert_ok(peri_tune_measure("lookup_order", 2)); /* asked for: it is measured, and what was given stays */
    assert_int_equal(peri__tune(PERI__TUNE_lookup_order), 0);
    assert_int_equal(described(PERI__TUNE_lookup_order).ns[1], 50000);

    setenv("PERI_TUNE", "off", 1);
    fake.opened = 0;
    peri__tune_reload();
    for (int g = 0; g < PERI__TUNE_NONE; g++) peri__tune_need(g);
    assert_int_equal(fake.opened, 0);
    assert_string_equal(peri_tune_path(), "");
}

static void failures_leave_the_default(void **state)
{
    (void)state;
    fake.open_status = PERI_ENOMEM;
    peri_log_level_set(PERI_LOG_ERROR);
    peri__tune_need(PERI__TUNE_LOOKUP);
    assert_int_equal(described(PERI__TUNE_lookup_order).source, PERI_TUNE_DEFAULT);
    fake.open_status = PERI_OK;
    fake.told[PERI__TUNE_copy_by][0] = -1000; /* the first pass gives 0: nothing to be seen */
    fake.passes = 2;
    assert_fails(peri_tune_measure("copy_by", 1), PERI_EUNSUPPORTED, "two threads");
    assert_int_equal(described(PERI__TUNE_copy_by).source, PERI_TUNE_DEFAULT);
    assert_int_equal(fake.opened, fake.closed);

    setenv("XDG_CACHE_HOME", "/dev/null/nowhere", 1); /* unwritable: it goes on, and says so where it was asked for */
    fake.told[PERI__TUNE_update_near][0] = 50000;
    peri__tune_reload();
    peri__tune_need(PERI__TUNE_UPDATE);
    assert_int_equal(peri__tune(PERI__TUNE_update_near), 0);
    assert_fails(peri_tune_save(), PERI_EIO, "/dev/null/nowhere");
    unsetenv("XDG_CACHE_HOME");
    char *home = getenv("HOME") ? strdup(getenv("HOME")) : NULL;
    unsetenv("HOME");
    assert_string_equal(peri_tune_path(), "");
    assert_fails(peri_tune_save(), PERI_EIO, "neither XDG_CACHE_HOME nor HOME");
    if (home) setenv("HOME", home, 1);
    free(home);
}

static void damage_is_seen(void **state)
{
    (void)state;
    static const char key[] = "Processor-1-2";
    peri__tune_lines lines, back;
    char text[8192];
    memset(&lines, 0, sizeof lines);
    for (int c = 0; c < PERI__TUNE_CHOICES; c++) {
        lines.way[c] = c % 4 == 3 ? -1 : c % peri__tune_ways(c);
        for (int w = 0; w < peri__tune_ways(c) && lines.way[c] >= 0; w++) lines.ns[c][w] = 1000 * c + w;
    }
    size_t n = peri__tune_print(&lines, key, text, sizeof text);
    assert_true(n < sizeof text);
    assert_ok(peri__tune_parse(text, n, key, &back));
    assert_memory_equal(&lines, &back, sizeof lines);
    assert_fails(peri__tune_parse(text, n, "Processor-1-3", &back), PERI_EFORMAT, "line 1 is not");
    for (size_t cut = 0; cut < n; cut++) assert_int_equal(peri__tune_parse(text, cut, key, &back), PERI_EFORMAT);
    for (size_t i = 0; i < n; i++)
        for (int bit = 0; bit < 8; bit++) {
            text[i] = (char)(text[i] ^ 1 << bit);
            assert_int_equal(peri__tune_parse(text, n, key, &back), PERI_EFORMAT);
            text[i] = (char)(text[i] ^ 1 << bit);
        }
    assert_memory_equal(&lines, &back, sizeof lines); /* no failure touched it */

    peri__tune_need(PERI__TUNE_LOOKUP); /* a file that is damaged is measured again, and replaced */
    FILE *f = fopen(peri_tune_path(), "a");
    assert_non_null(f);
    fputs("more\n", f);
    fclose(f);
    peri_log_level_set(PERI_LOG_ERROR);
    peri__tune_reload();
    assert_int_equal(described(PERI__TUNE_lookup_order).source, PERI_TUNE_DEFAULT);
    peri__tune_need(PERI__TUNE_LOOKUP);
    peri__tune_reload();
    assert_int_equal(described(PERI__TUNE_lookup_order).source, PERI_TUNE_KEPT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(numbers_of_ways, fresh),        cmocka_unit_test_setup(follows_the_times, fresh),
        cmocka_unit_test_setup(measured_once_and_kept, fresh), cmocka_unit_test_setup(given_goes_first, fresh),
        cmocka_unit_test_setup(damage_is_seen, fresh),         cmocka_unit_test_setup_teardown(failures_leave_the_default, fresh, gone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
