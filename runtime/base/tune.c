/* SPDX-License-Identifier: Apache-2.0
 *
 * tune.c: the choices of perilune/tune.h: who decides, and what is measured. Their file is tune_file.c.
 */
#include "tune.h"
#include "tune_file.h"
#include "tune_table.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { LEAST_ROUNDS = 5 }; /* of a measurement; fewer decide nothing */
#define MARGIN 3.0         /* percent by which a way must beat the default */
#define NOISY 25.0         /* percent of noise from which on nothing is seen: the default is used */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
PERI_FORK_LOCK(lock, PERI__FORK_TUNE)
static struct {
    _Atomic int32_t way;      /* in use */
    int32_t given, kept, got; /* by whom: places among the ways; -1: not */
    int64_t ns[PERI_TUNE_WAYS];
    double noise; /* of the last measurement here; see measure */
} now[PERI__TUNE_CHOICES];
static const peri__tune_meter *meters[PERI__TUNE_GROUPS];
static atomic_bool loaded;
static bool off; /* PERI_TUNE has the word: no file */

/** "a, b, c": the ways of a choice; -1: the choices. */
static const char *list(int32_t choice, char *text, size_t room)
{
    size_t used = 0;
    int32_t n = choice < 0 ? PERI__TUNE_CHOICES : peri__tune_ways(choice);
    text[0] = 0;
    for (int32_t i = 0; i < n && used < room; i++)
        used += (size_t)snprintf(text + used, room - used, "%s%s", i ? ", " : "",
                                 choice < 0 ? peri__tune_table[i].name : peri__tune_table[choice].ways[i]);
    return text;
}

/** Take the way that goes before the others. */
static void apply(int32_t c)
{
    int32_t way = peri__tune_way(c, peri__tune_table[c].usual);
    if (now[c].kept >= 0) way = now[c].kept;
    if (now[c].got >= 0) way = now[c].got;
    if (now[c].given >= 0) way = now[c].given;
    atomic_store_explicit(&now[c].way, way, memory_order_relaxed);
}

/* -- loading ------------------------------------------------------------------------------------------------------- */

/** Which choice and way a word "name=way" of PERI_TUNE asks for; both -1 for "off". False: it asks for nothing there
 *  is; @why says so. */
static bool understand(const char *word, int32_t *choice, int32_t *way, char *why, size_t len)
{
    char room[256], name[64];
    const char *equals = strchr(word, '=');
    *choice = *way = -1;
    if (!strcmp(word, "off")) return true;
    snprintf(name, sizeof name, "%.*s", equals ? (int)(equals - word) : 60, word);
    *choice = peri__tune_find(name);
    if (*choice >= 0 && equals) *way = peri__tune_way(*choice, equals + 1);
    if (*choice < 0) snprintf(why, len, "'%.60s' is no choice, known: %s", name, list(-1, room, sizeof room));
    else if (*way < 0)
        snprintf(why, len, "'%.80s', allowed ways of %s: %s", word, peri__tune_table[*choice].name,
                 list(*choice, room, sizeof room));
    return *way >= 0;
}

peri_status peri__tune_check(void)
{
    char words[512], why[512], *rest = NULL;
    const char *given = secure_getenv("PERI_TUNE");
    int32_t choice, way;
    snprintf(words, sizeof words, "%s", given ? given : "");
    for (char *word = strtok_r(words, ", ", &rest); word; word = strtok_r(NULL, ", ", &rest))
        if (!understand(word, &choice, &way, why, sizeof why)) return peri__fail(PERI_EINVAL, "PERI_TUNE: %s", why);
    return PERI_OK;
}

static void give(const char *word)
{
    char why[512];
    int32_t choice, way;
    /* see peri__tune_check */
    if (!understand(word, &choice, &way, why, sizeof why)) peri__log(PERI_LOG_WARN, "PERI_TUNE: %s", why);
    else if (choice < 0) off = true;
    else now[choice].given = way;
}

static void load(void)
{
    char words[512];
    for (int32_t c = 0; c < PERI__TUNE_CHOICES; c++) now[c].given = now[c].kept = now[c].got = -1;
    off = false;
    const char *given = secure_getenv("PERI_TUNE");
    snprintf(words, sizeof words, "%s", given ? given : "");
    char *rest = NULL;
    for (char *word = strtok_r(words, ", ", &rest); word; word = strtok_r(NULL, ", ", &rest)) give(word);
    peri__tune_lines lines;
    if (!off && peri__tune_read(&lines)) {
        for (int32_t c = 0; c < PERI__TUNE_CHOICES; c++) {
            now[c].kept = lines.way[c];
            memcpy(now[c].ns, lines.ns[c], sizeof now[c].ns);
        }
    }
    for (int32_t c = 0; c < PERI__TUNE_CHOICES; c++) apply(c);
    atomic_store_explicit(&loaded, true, memory_order_release);
}

static void load_once(void)
{
    if (atomic_load_explicit(&loaded, memory_order_acquire)) return;
    pthread_mutex_lock(&lock);
    if (!atomic_load(&loaded)) load();
    pthread_mutex_unlock(&lock);
}

void peri__tune_reload(void)
{
    pthread_mutex_lock(&lock);
    memset(now, 0, sizeof now);
    load();
    pthread_mutex_unlock(&lock);
}

/* -- using --------------------------------------------------------------------------------------------------------- */

int64_t peri__tune(int32_t choice)
{
    load_once();
    int32_t way = atomic_load_explicit(&now[choice].way, memory_order_relaxed);
    const char *word = peri__tune_table[choice].ways[way];
    if (!strncmp(word, "l1-", 3) || !strncmp(word, "l2-", 3)) word += 3;
    if (*word < '0' || *word > '9') return way;
    char *unit;
    int64_t n = strtoll(word, &unit, 10);
    return *unit == 'k' ? n << 10 : *unit == 'm' ? n << 20 : n;
}

bool peri__tune_near(int32_t choice)
{
    load_once();
    return !strncmp(peri__tune_table[choice].ways[atomic_load_explicit(&now[choice].way, memory_order_relaxed)], "l1-",
                    3);
}

/* -- measuring ----------------------------------------------------------------------------------------------------- */

void peri__tune_offer(int32_t group, const peri__tune_meter *meter) { meters[group] = meter; }

/** One pass of a way. */
static int64_t timed(int32_t c, int32_t way, const peri__tune_meter *meter, void *state)
{
    atomic_store_explicit(&now[c].way, way, memory_order_relaxed);
    return meter->pass(state, c);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/** The number that @part (0..1) of @n numbers are less than; sorts them. */
static double quantile(double *x, int32_t n, double part)
{
    qsort(x, (size_t)n, sizeof *x, ascending);
    return n > 0 ? x[(int32_t)(part * n)] : 0;
}

/** What a measurement found. */
typedef struct timing {
    int64_t least[PERI_TUNE_WAYS];
    int32_t wins[PERI_TUNE_WAYS]; /* turns in which a way was faster than both passes of the default beside it, by the
                                     margin */
    double *ratio[PERI_TUNE_WAYS]; /* [rounds] its time over the lesser of theirs */
    double *noise;                 /* [rounds * ways] the greater of theirs over the lesser, less 1 */
    int32_t compared;
} timing;

/** The way to use: of those that won three of four turns, and in the median by more than the noise, the fastest; else
 *  the default. A machine is shared: what disturbs it disturbs passes of the default as well, so it is in the noise,
 *  and it seldom meets both of those around a pass without meeting that. */
static int32_t chosen(timing *t, int32_t ways, int32_t usual, int32_t rounds, double *noise)
{
    int32_t best = usual;
    double lead = 1;
    *noise = quantile(t->noise, t->compared, 0.75);
    double margin = MARGIN / 100.0, most = 1 - (*noise > margin ? *noise : margin);
    for (int32_t w = 0; w < ways; w++) {
        if (w == usual) continue;
        double ratio = quantile(t->ratio[w], rounds, 0.5);
        if (rounds < LEAST_ROUNDS || *noise * 100 > NOISY || 4 * t->wins[w] < 3 * rounds || ratio >= most ||
            ratio >= lead)
            continue;
        best = w;
        lead = ratio;
    }
    return best;
}

/** Time all ways of choice @c in turns, each between two passes of the default. */
static peri_status time_ways(int32_t c, const peri__tune_meter *meter, void *state, int32_t rounds, timing *t)
{
    int32_t ways = peri__tune_ways(c), usual = peri__tune_way(c, peri__tune_table[c].usual);
    for (int32_t r = 0; r < rounds; r++) {
        int64_t before = timed(c, usual, meter, state);
        for (int32_t w = 0; w < ways; w++) {
            int64_t ns = w == usual || before <= 0 ? before : timed(c, w, meter, state);
            int64_t after = w == usual || ns <= 0 ? before : timed(c, usual, meter, state);
            if (ns <= 0 || after <= 0) {
                if (ns == 0) return PERI_PENDING;
                return peri__fail(PERI_EUNSUPPORTED, "%s=%s cannot be measured here", peri__tune_table[c].name,
                                  peri__tune_table[c].ways[w]);
            }
            if (r == 0 || ns < t->least[w]) t->least[w] = ns;
            if (w == usual) continue;
            double beside = (double)peri__min(before, after);
            t->ratio[w][r] = (double)ns / beside;
            t->wins[w] += t->ratio[w][r] < 1 - MARGIN / 100.0;
            t->noise[t->compared++] = (double)peri__max(before, after) / beside - 1;
            if (after < t->least[usual]) t->least[usual] = after;
            before = after;
        }
    }
    return PERI_OK;
}

/** Measure choice @c, and use the way that it finds. PERI_PENDING: not with these threads. */
static peri_status measure(int32_t c, const peri__tune_meter *meter, void *state, int32_t rounds)
{
    int32_t ways = peri__tune_ways(c), usual = peri__tune_way(c, peri__tune_table[c].usual);
    timing t = {.noise = peri__alloc(sizeof(double) * 2 * (size_t)rounds * (size_t)ways)};
    if (!t.noise) return PERI_ENOMEM;
    for (int32_t w = 0; w < ways; w++) t.ratio[w] = t.noise + (size_t)rounds * (size_t)(ways + w);
    peri_status status = time_ways(c, meter, state, rounds, &t);
    if (status == PERI_OK) {
        now[c].got = chosen(&t, ways, usual, rounds, &now[c].noise);
        memcpy(now[c].ns, t.least, sizeof t.least);
    }
    peri__free(t.noise);
    apply(c);
    return status;
}

/* -- the public face ----------------------------------------------------------------------------------------------- */

int32_t peri_tune_count(void) { return PERI__TUNE_CHOICES; }

peri_status peri_tune_describe(int32_t c, peri_tune_info *out)
{
    PERI_NEED(out);
    if (c < 0 || c >= PERI__TUNE_CHOICES)
        return peri__fail(PERI_EINVAL, "peri_tune_describe: choice %d, allowed: 0..%d", c, PERI__TUNE_CHOICES - 1);
    load_once();
    peri_tune_info choice = {.name = peri__tune_table[c].name,
                              .text = peri__tune_table[c].text,
                              .way = atomic_load(&now[c].way),
                              .usual = peri__tune_way(c, peri__tune_table[c].usual),
                              .source = now[c].given >= 0  ? PERI_TUNE_GIVEN
                                        : now[c].got >= 0  ? PERI_TUNE_MEASURED
                                        : now[c].kept >= 0 ? PERI_TUNE_KEPT
                                                           : PERI_TUNE_DEFAULT,
                              .measured = meters[peri__tune_table[c].group] != NULL};
    memcpy(choice.ways, peri__tune_table[c].ways, sizeof choice.ways);
    memcpy(choice.ns, now[c].ns, sizeof choice.ns);
    choice.noise = now[c].noise;
    return PERI_GIVE(peri_tune_info, out, &choice);
}

/** The choice of this name, or the failure. */
static peri_status named(const char *function, const char *name, int32_t *out)
{
    char room[256];
    load_once();
    *out = peri__tune_find(name);
    if (*out >= 0) return PERI_OK;
    return peri__fail(PERI_ENOTFOUND, "%s: no choice '%.60s'; known: %s", function, name,
                      list(-1, room, sizeof room));
}

peri_status peri_tune_set(const char *name, const char *word)
{
    char room[256];
    int32_t c;
    PERI_NEED(name);
    PERI_TRY(named("peri_tune_set", name, &c));
    int32_t way = word ? peri__tune_way(c, word) : -1;
    if (word && way < 0)
        return peri__fail(PERI_EINVAL, "peri_tune_set: %s=%.60s, allowed: %s", name, word, list(c, room, sizeof room));
    now[c].given = way;
    apply(c);
    return PERI_OK;
}

peri_status peri_tune_measure(const char *name, int32_t rounds)
{
    int32_t c;
    PERI_NEED(name);
    PERI_TRY(named("peri_tune_measure", name, &c));
    if (rounds < 1 || rounds > 10000)
        return peri__fail(PERI_EINVAL, "peri_tune_measure: %d rounds, allowed: 1..10000", rounds);
    const peri__tune_meter *meter = meters[peri__tune_table[c].group];
    if (!meter) return peri__fail(PERI_EUNSUPPORTED, "peri_tune_measure: %s is not measured", name);
    void *state = NULL;
    pthread_mutex_lock(&lock);
    peri_status status = meter->open(&state);
    if (status >= 0) status = measure(c, meter, state, rounds);
    meter->close(state);
    pthread_mutex_unlock(&lock);
    if (status == PERI_PENDING) return peri__fail(PERI_EUNSUPPORTED, "peri_tune_measure: %s needs two threads", name);
    return status;
}

peri_status peri_tune_save(void)
{
    PERI__NOT_AT_BORDER;
    peri__tune_lines lines;
    char why[256];
    load_once();
    for (int32_t c = 0; c < PERI__TUNE_CHOICES; c++) {
        lines.way[c] = now[c].noise * 100 > NOISY ? -1 : now[c].got;
        memcpy(lines.ns[c], now[c].ns, sizeof now[c].ns);
    }
    if (peri__tune_write(&lines, why, sizeof why)) return PERI_OK;
    return peri__fail(PERI_EIO, "peri_tune_save: %s", why);
}

const char *peri_tune_path(void)
{
    if (peri__border_refuses(__func__)) return "";
    load_once();
    return off ? "" : peri__tune_file();
}
