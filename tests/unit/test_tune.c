/* SPDX-License-Identifier: Apache-2.0
 *
 * test_tune.c: who decides between ways: given, kept, measured, default; the choice follows the times of a meter that
 * is told them; the file comes back as it was written, and no damage to it goes unseen.
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
    peri_tune_info c = {.size = sizeof c};
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

static peri_tune_info described(int32_t choice)
{
    peri_tune_info c = {.size = sizeof c};
    assert_ok(peri_tune_describe(choice, &c));
    return c;
}

static void numbers_of_ways(void **state)
{
    (void)state;
    for (int c = 0; c < PERI__TUNE_CHOICES; c++) {
        peri_tune_info x = described(c);
        assert_int_equal(x.way, x.usual);
        assert_int_equal(x.source, PERI_TUNE_DEFAULT);
        assert_true(strlen(x.text) > 10 && x.ways[0] && x.ways[1]);
    }
    assert_int_equal(peri__tune(PERI__TUNE_lookup_prefetch), 32 << 10);
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
    assert_int_equal(peri__tune(PERI__TUNE_lookup_prefetch), 32 << 10);
    assert_fails(peri_tune_set("lookup_prefetch", "l3-1k"), PERI_EINVAL, "allowed: off, l1-4k");
    assert_fails(peri_tune_set("lookup", "off"), PERI_ENOTFOUND, "known: lookup_prefetch, lookup_order");
    assert_fails(peri_tune_measure("copy_near", 1), PERI_EUNSUPPORTED, "not measured");
    assert_fails(peri_tune_measure("copy_by", 0), PERI_EINVAL, "allowed: 1..10000");
}

static void follows_the_times(void **state)
{
    (void)state;
    for (int c = 0; c < PERI__TUNE_CHOICES; c++) {
        peri_tune_info x = described(c);
        if (!x.measured) continue;
        for (int w = 0; w < PERI_TUNE_WAYS && x.ways[w]; w++) {
            for (int k = 0; k < PERI_TUNE_WAYS; k++) fake.told[c][k] = 100000 + 1000 * k;
            fake.told[c][w] = 60000;
            assert_ok(peri_tune_measure(x.name, 5));
            peri_tune_info got = described(c);
            assert_string_equal(got.ways[got.way], x.ways[w]);
            assert_int_equal(got.source, PERI_TUNE_MEASURED);
            assert_int_equal(got.ns[w], 60000);
        }
        /* faster by less than 3 %: the default stays */
        for (int k = 0; k < PERI_TUNE_WAYS; k++) fake.told[c][k] = 98500;
        fake.told[c][x.usual] = 100000;
        assert_ok(peri_tune_measure(x.name, 3));
        assert_int_equal(described(c).way, x.usual);
    }
    assert_int_equal(fake.opened, fake.closed);
}

/** Measure a choice as `perilune calibrate` does, and keep what was found. */
static void measure_and_keep(const char *name)
{
    assert_ok(peri_tune_measure(name, 5));
    assert_ok(peri_tune_save());
}

static void measured_when_asked_and_kept(void **state)
{
    (void)state;
    fake.told[PERI__TUNE_lookup_order][1] = 50000;
    for (int32_t c = 0; c < PERI__TUNE_CHOICES; c++) (void)peri__tune(c);
    assert_int_equal(fake.opened, 0); /* using a choice measures nothing */
    measure_and_keep("lookup_order");
    assert_int_equal(peri__tune(PERI__TUNE_lookup_order), 1);
    assert_int_equal(fake.opened, 1);
    struct stat s;
    assert_int_equal(stat(peri_tune_path(), &s), 0);
    assert_non_null(strstr(peri_tune_path(), PERI_VERSION_TEXT));

    peri__tune_reload(); /* the next process */
    assert_int_equal(peri__tune(PERI__TUNE_lookup_order), 1);
    assert_int_equal(described(PERI__TUNE_lookup_order).source, PERI_TUNE_KEPT);
    assert_int_equal(fake.opened, 1);

    fake.told[PERI__TUNE_copy_past][0] = 50000; /* what is found of another choice goes beside it */
    measure_and_keep("copy_past");
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
    assert_int_equal(peri__tune(PERI__TUNE_lookup_order), 0);
    assert_int_equal(described(PERI__TUNE_lookup_order).source, PERI_TUNE_GIVEN);
    assert_int_equal(peri__tune(PERI__TUNE_copy_block), 256 << 10);
    assert_int_equal(described(PERI__TUNE_copy_by).source, PERI_TUNE_DEFAULT);
    assert_ok(peri_tune_measure("lookup_order", 5)); /* what was given stays in use */
    assert_int_equal(peri__tune(PERI__TUNE_lookup_order), 0);
    assert_int_equal(described(PERI__TUNE_lookup_order).ns[1], 50000);
    assert_ok(peri_tune_save());

    setenv("PERI_TUNE", "off", 1); /* leaves the file out */
    peri__tune_reload();
    assert_int_equal(described(PERI__TUNE_lookup_order).source, PERI_TUNE_DEFAULT);
    assert_string_equal(peri_tune_path(), "");
}

static void failures_leave_the_default(void **state)
{
    (void)state;
    fake.open_status = PERI_ENOMEM;
    assert_fails(peri_tune_measure("lookup_order", 5), PERI_ENOMEM, "no room for the measurement");
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
    assert_ok(peri_tune_measure("update_near", 5));
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

    measure_and_keep("lookup_order"); /* a file that is damaged is not used, and replaced */
    FILE *f = fopen(peri_tune_path(), "a");
    assert_non_null(f);
    fputs("more\n", f);
    fclose(f);
    peri_log_level_set(PERI_LOG_ERROR);
    peri__tune_reload();
    assert_int_equal(described(PERI__TUNE_lookup_order).source, PERI_TUNE_DEFAULT);
    measure_and_keep("lookup_order");
    peri__tune_reload();
    assert_int_equal(described(PERI__TUNE_lookup_order).source, PERI_TUNE_KEPT);
}

/** A machine that a meter is on: passes take what is true of their way, and more while another program runs, for spells
 *  of some passes. */
static struct {
    double truth[PERI_TUNE_WAYS];
    double jitter, slowdown, drift;
    int32_t spell, pause, left; /* passes of the other program, and between; of what is on now */
    bool busy;
    uint64_t seed, passes;
} machine;

static double drawn(void)
{
    machine.seed = machine.seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(machine.seed >> 33) / (double)(1u << 31);
}

static int64_t simulated_pass(void *state, int32_t choice)
{
    peri_tune_info c = {.size = sizeof c};
    (void)state;
    assert_ok(peri_tune_describe(choice, &c));
    if (machine.left-- <= 0) {
        machine.busy = !machine.busy;
        machine.left = (int32_t)(drawn() * 2 * (machine.busy ? machine.spell : machine.pause));
    }
    double ns = machine.truth[c.way] * (1 + machine.jitter * drawn()) * (1 + machine.drift * (double)machine.passes++);
    return (int64_t)(machine.busy ? ns * (1 + machine.slowdown * drawn()) : ns);
}

static void never_slower_than_the_default(void **state)
{
    (void)state;
    static const peri__tune_meter simulated = {fake_open, simulated_pass, fake_close};
    static const int32_t rounds[] = {1, 5, 15};
    int32_t found = 0, quiet = 0;
    peri__tune_offer(PERI__TUNE_LOOKUP, &simulated);
    for (uint64_t trial = 0; trial < 3000; trial++) {
        memset(&machine, 0, sizeof machine);
        machine.seed = trial * 2654435761u + 7;
        int32_t usual = described(PERI__TUNE_lookup_prefetch).usual, best = usual;
        bool disturbed = trial % 4 != 0;
        for (int w = 0; w < PERI_TUNE_WAYS; w++) machine.truth[w] = 1e6 * (0.85 + 0.3 * drawn());
        for (int w = 0; w < peri__tune_ways(PERI__TUNE_lookup_prefetch); w++)
            if (machine.truth[w] < machine.truth[best]) best = w;
        machine.jitter = 0.01 + (disturbed ? 0.05 * drawn() : 0);
        machine.drift = (drawn() - 0.5) * 2e-4; /* a clock that changes */
        machine.slowdown = disturbed ? 3 * drawn() : 0;
        machine.spell = 1 + (int32_t)(drawn() * 30);
        machine.pause = 1 + (int32_t)(drawn() * 60);
        assert_ok(peri_tune_measure("lookup_prefetch", rounds[trial % 3]));
        peri_tune_info got = described(PERI__TUNE_lookup_prefetch);
        if (machine.truth[got.way] > machine.truth[usual])
            fail_msg("trial %d: way %s takes %.0f, the default %.0f, at a noise of %.3f", (int)trial, got.ways[got.way],
                     machine.truth[got.way], machine.truth[usual], got.noise);
        assert_true(got.noise >= 0 && (disturbed || got.noise < 0.03));
        if (disturbed || trial % 3 == 0 || machine.truth[best] > 0.93 * machine.truth[usual]) continue;
        quiet++;
        found += machine.truth[got.way] < 1.02 * machine.truth[best];
    }
    assert_true(quiet > 100);
    assert_int_equal(found, quiet); /* where nothing disturbs, a way that is 7 % faster is found */
}

static void what_was_disturbed_is_not_kept(void **state)
{
    (void)state;
    static const peri__tune_meter simulated = {fake_open, simulated_pass, fake_close};
    peri__tune_offer(PERI__TUNE_UPDATE, &simulated);
    memset(&machine, 0, sizeof machine);
    for (int w = 0; w < PERI_TUNE_WAYS; w++) machine.truth[w] = 1e6;
    machine.slowdown = 8;
    machine.spell = machine.pause = 1;
    measure_and_keep("update_prefetch");
    assert_true(described(PERI__TUNE_update_prefetch).noise > 0.25);
    assert_int_equal(described(PERI__TUNE_update_prefetch).way, described(PERI__TUNE_update_prefetch).usual);
    peri__tune_reload();
    assert_int_equal(described(PERI__TUNE_update_prefetch).source, PERI_TUNE_DEFAULT);
    machine.slowdown = 0;
    machine.truth[0] = 8e5;
    measure_and_keep("update_prefetch");
    machine.slowdown = 8; /* nor does it replace what a quiet measurement found */
    measure_and_keep("update_prefetch");
    peri__tune_reload();
    assert_int_equal(described(PERI__TUNE_update_prefetch).source, PERI_TUNE_KEPT);
    assert_int_equal(described(PERI__TUNE_update_prefetch).way, 0);
}

static void put(const char *root, int cpu, int index, int level, const char *size, const char *shared)
{
    char command[1024];
    snprintf(command, sizeof command,
             "d=%s/cpu%d/cache/index%d; mkdir -p $d && echo %d > $d/level && echo %s > $d/size && echo %s > "
             "$d/shared_cpu_list",
             root, cpu, index, level, size, shared);
    assert_int_equal(system(command), 0);
}

static void working_sets_are_larger_than_the_caches(void **state)
{
    (void)state;
    const bool all[8] = {true, true, true, true, true, true, true, true}, some[8] = {false, true, false, true};
    char root[300];
    snprintf(root, sizeof root, "%s/none", folder);
    assert_int_equal(peri__cache_bytes_of(root, all, 8), 32 << 20);
    snprintf(root, sizeof root, "%s/cpus", folder);
    for (int cpu = 0; cpu < 8; cpu++) { /* two chips of four processors, a last cache each */
        put(root, cpu, 0, 1, "32K", "x");
        put(root, cpu, 3, 3, "300M", cpu < 4 ? "0-3" : "4-7");
        put(root, cpu, 2, 2, "2048K", "x");
    }
    assert_int_equal(peri__cache_bytes_of(root, all, 8), (int64_t)600 << 20);
    assert_int_equal(peri__cache_bytes_of(root, some, 8), (int64_t)300 << 20); /* of the first chip alone */
    assert_int_equal(peri__tune_working_set(0), 64 << 20);
    for (int64_t cache = 1 << 20; cache < (int64_t)1 << 33; cache *= 3)
        assert_true(peri__tune_working_set(cache) >= 2 * cache);
    assert_true(peri_cache_bytes() > 0);
    char *memory = NULL;
    assert_fails(peri__tune_memory((size_t)1 << 50, &memory), PERI_ENOMEM, "half of what is free");
    assert_null(memory);
    assert_ok(peri__tune_memory(1 << 20, &memory));
    assert_int_equal(memory[0] | memory[(1 << 20) - 1], 0);
    peri__tune_memory_free(memory, 1 << 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(never_slower_than_the_default, fresh),
        cmocka_unit_test_setup(what_was_disturbed_is_not_kept, fresh),
        cmocka_unit_test_setup(working_sets_are_larger_than_the_caches, fresh),
        cmocka_unit_test_setup(numbers_of_ways, fresh),
        cmocka_unit_test_setup(follows_the_times, fresh),
        cmocka_unit_test_setup(measured_when_asked_and_kept, fresh),
        cmocka_unit_test_setup(given_goes_first, fresh),
        cmocka_unit_test_setup(damage_is_seen, fresh),
        cmocka_unit_test_setup_teardown(failures_leave_the_default, fresh, gone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
