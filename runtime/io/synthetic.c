/* SPDX-License-Identifier: Apache-2.0
 *
 * synthetic.c: samples shaped like Criteo's, with a planted signal.
 *
 * Row i draws its words from the hash of (seed, i). The hidden model gives every id of a feature five numbers in [-1,
 * 1], the bytes of the hash of (seed, feature, id): a weight and a vector of four. A bag has their sums over sqrt(its
 * length). The logit is
 *     bias + signal * F / sqrt(var F) + interaction * S / sqrt(var S)
 *     F = sum of the bags' weights + sum over integers of (their own weight) * (ln(1 + x) - 1)
 *     S = sum over features f of the dot product of the vectors of f and f + 1 (the last with the first)
 * where var is the variance over uniform ids and full bags, so that `signal` and `interaction` are in units of the
 * logit.
 */
#include "../base/floats.h"
#include "../base/quiet.h"
#include "io_internal.h"

#include <errno.h>
#include <stdio.h>

enum { HIDDEN = 4, STREAM_LABEL = 1 << 20, STREAM_DENSE = 1 << 21, STREAM_MODEL = 1 << 22, STREAM_WEIGHT = 1 << 23 };

/** One row while it is made. */
typedef struct row_state {
    const peri_synthetic_args *options;
    uint64_t seed, hash; /* hashes of the seed, and of (seed, row) */
    double first, second;
    double head[HIDDEN], last[HIDDEN]; /* vectors of the first feature and of the one before */
} row_state;

static inline double uniform_of_word(uint64_t word) { return (double)(word >> 11) * 0x1p-53; }
static inline double byte_number(uint64_t word, int i) { return ((double)(word >> (8 * i) & 255) - 127.5) / 127.5; }

/** What all rows share for one feature: how a uniform number becomes an id. */
typedef struct power_law {
    double range, inverse; /* (n + 1)^(1 - alpha) - 1 and 1 / (1 - alpha); alpha = 1: ln(n + 1) and 0 */
} power_law;

static power_law power_law_of(int64_t n, double alpha)
{
    if (fabs(alpha - 1) < 1e-9) return (power_law){log((double)n + 1), 0};
    return (power_law){pow((double)n + 1, 1 - alpha) - 1, 1 / (1 - alpha)};
}

static inline int64_t power_law_id(power_law law, double u, int64_t n)
{
    double x = law.inverse == 0 ? exp(u * law.range) : pow(1 + u * law.range, law.inverse);
    int64_t id = (int64_t)x - 1;
    return id < 0 ? 0 : id >= n ? n - 1 : id;
}

/** Integer @d of the row: heavy-tailed, >= 0. @word gets its random word. */
static inline int64_t draw_integer(const row_state *s, int32_t d, uint64_t *word)
{
    *word = peri__hash_mix(s->hash, (uint64_t)(STREAM_DENSE + d));
    double u = uniform_of_word(*word);
    return (int64_t)(1 / ((1 - u) * (1 - u) + 1e-9)) - 1;
}

static void draw_dense(row_state *s, float *dense)
{
    uint64_t word;
    for (int32_t d = 0; d < s->options->dense_features; d++) {
        dense[d] = peri__dense_log(draw_integer(s, d, &word));
        s->first += byte_number(peri__hash_mix(s->seed, (uint64_t)(STREAM_WEIGHT + d)), 0) * (dense[d] - 1);
    }
}

static inline int64_t draw_length(const row_state *s, int32_t f)
{
    int32_t least = s->options->bag_min[f], most = s->options->bag_max[f];
    if (least == most) return least;
    return least + (int64_t)(uniform_of_word(peri__hash_mix(s->hash, (uint64_t)f << 32)) * (most - least + 1));
}

/** Draw the bag of feature @f into @ids and add it to the hidden model. */
static void draw_bag(row_state *s, int32_t f, power_law law, int64_t length, int64_t *ids)
{
    double weight = 0, vector[HIDDEN] = {0};
    uint64_t feature = peri__hash_mix(s->seed, (uint64_t)(STREAM_MODEL + f));
    for (int64_t k = 0; k < length; k++) {
        double u = uniform_of_word(peri__hash_mix(s->hash, ((uint64_t)f << 32) + (uint64_t)k + 1));
        ids[k] = power_law_id(law, u, s->options->table_rows[f]);
        uint64_t word = peri__hash_mix(feature, (uint64_t)ids[k]);
        weight += byte_number(word, 0);
        for (int d = 0; d < HIDDEN; d++) vector[d] += byte_number(word, d + 1);
    }
    double scale = length ? 1 / sqrt((double)length) : 0;
    s->first += weight * scale;
    for (int d = 0; d < HIDDEN; d++) {
        vector[d] *= scale;
        if (f == 0) s->head[d] = vector[d];
        else s->second += s->last[d] * vector[d];
        s->last[d] = vector[d];
    }
}

static float draw_label(row_state *s)
{
    const peri_synthetic_args *o = s->options;
    int32_t n = o->sparse_features;
    if (n > 2)
        for (int d = 0; d < HIDDEN; d++) s->second += s->last[d] * s->head[d];
    int32_t pairs = n > 2 ? n : n - 1;
    double logit = o->bias + o->signal * s->first / sqrt((n + o->dense_features) / 3.0);
    if (pairs > 0) logit += o->interaction * s->second / sqrt(pairs * HIDDEN / 9.0);
    return uniform_of_word(peri__hash_mix(s->hash, STREAM_LABEL)) < 1 / (1 + exp(-logit));
}

static row_state row_start(const peri_synthetic_args *o, int64_t row)
{
    uint64_t seed = peri__hash_mix(o->seed, 0);
    return (row_state){.options = o, .seed = seed, .hash = peri__hash_mix(seed, (uint64_t)row)};
}

static peri_status check_options(const char *function, const peri_synthetic_args *o, int64_t first, int64_t rows)
{
    if (o->dense_features < 0 || o->dense_features > IO_MAX_FEATURES || o->sparse_features < 0 ||
        o->sparse_features > IO_MAX_FEATURES || o->dense_features + o->sparse_features == 0)
        return peri__fail(PERI_EINVAL, "%s: %d dense and %d sparse features, allowed: 0..%d, and one in all", function,
                          o->dense_features, o->sparse_features, IO_MAX_FEATURES);
    PERI_TRY(peri__list_check(function, "table_rows", o->table_rows, o->sparse_features));
    PERI_TRY(peri__list_check(function, "bag_min", o->bag_min, o->sparse_features));
    PERI_TRY(peri__list_check(function, "bag_max", o->bag_max, o->sparse_features));
    for (int32_t f = 0; f < o->sparse_features; f++) {
        if (o->table_rows[f] < 1 || o->table_rows[f] > IO_MAX_ROWS)
            return peri__fail(PERI_EINVAL, "%s: the table of feature %d has %lld rows, allowed: 1..2^31", function, f,
                              (long long)o->table_rows[f]);
        if (o->bag_min[f] < 0 || o->bag_max[f] < o->bag_min[f])
            return peri__fail(PERI_EINVAL, "%s: bags of feature %d have %d to %d ids, allowed: 0 <= least <= most",
                              function, f, o->bag_min[f], o->bag_max[f]);
    }
    if (!(o->alpha >= 0 && o->alpha < 100) || !isfinite(o->signal) || !isfinite(o->interaction) || !isfinite(o->bias))
        return peri__fail(PERI_EINVAL,
                          "%s: alpha %g (allowed: 0..100), signal %g, interaction %g, bias %g (allowed: finite)",
                          function, o->alpha, o->signal, o->interaction, o->bias);
    if (first < 0 || rows < 0 || rows > IO_MAX_ROWS)
        return peri__fail(PERI_EINVAL, "%s: %lld rows from row %lld, allowed: 0..2^31 from 0 or more", function,
                          (long long)rows, (long long)first);
    return PERI_OK;
}

static power_law *power_laws(const peri_synthetic_args *o)
{
    power_law *laws = peri__alloc(sizeof *laws * (size_t)peri__max(o->sparse_features, 1));
    for (int32_t f = 0; laws && f < o->sparse_features; f++) laws[f] = power_law_of(o->table_rows[f], o->alpha);
    return laws;
}

peri_status peri_synthetic_fill(const peri_synthetic_args *o, int64_t first, int64_t rows, peri_batch *b)
{
    PERI__OWN_FLOATS;
    PERI_TAKE(peri_synthetic_args, o);
    PERI_NEED(b);
    const char *function = "peri_synthetic_fill";
    PERI_TRY(check_options(function, o, first, rows));
    PERI_TRY(peri__batch_check(function, b, o->dense_features, o->sparse_features));
    PERI_TRY(peri__batch_reserve_rows(b, rows));
    int64_t most = 0;
    for (int32_t f = 0; f < o->sparse_features; f++) most += o->bag_max[f] * rows;
    PERI_TRY(peri_batch_reserve(b, most));
    power_law *laws = power_laws(o);
    int64_t *at = peri__alloc(sizeof *at * (size_t)peri__max(o->sparse_features, 1));
    peri_status status = laws && at ? PERI_OK : PERI_ENOMEM;
    if (status < 0) goto out;
    /* Lengths first: they say where each feature's ids begin. */
    int64_t ids = 0;
    for (int32_t f = 0; f < o->sparse_features; f++) {
        at[f] = ids;
        for (int64_t i = 0; i < rows; i++) {
            row_state s = row_start(o, first + i);
            int64_t length = draw_length(&s, f);
            b->lengths[f * rows + i] = (int32_t)length;
            ids += length;
        }
    }
    for (int64_t i = 0; i < rows; i++) {
        row_state s = row_start(o, first + i);
        draw_dense(&s, b->dense + i * o->dense_features);
        for (int32_t f = 0; f < o->sparse_features; f++) {
            int64_t length = b->lengths[f * rows + i];
            draw_bag(&s, f, laws[f], length, b->values + at[f]);
            at[f] += length;
        }
        b->labels[i] = draw_label(&s);
    }
    b->rows = rows;
    b->ids = ids;
    b->global_row = first;
    b->global_rows = rows;
out:
    peri__free(laws);
    peri__free(at);
    return status;
}

/** The numbers of a row: on the heap, since callers have 64 KiB of stack. */
typedef struct row_numbers {
    float dense[IO_MAX_FEATURES];
    int64_t ids[IO_MAX_FEATURES], lengths[IO_MAX_FEATURES];
} row_numbers;

/** One line; false when the file refuses it. */
static bool write_row(const peri_synthetic_args *o, const power_law *laws, int64_t row, row_numbers *r, FILE *file)
{
    row_state s = row_start(o, row), unused = s;
    uint64_t word;
    draw_dense(&s, r->dense);
    for (int32_t f = 0; f < o->sparse_features; f++) {
        r->lengths[f] = draw_length(&s, f);
        draw_bag(&s, f, laws[f], r->lengths[f], r->ids + f);
    }
    if (fputc(draw_label(&s) > 0 ? '1' : '0', file) == EOF) return false;
    for (int32_t d = 0; d < o->dense_features; d++) {
        int64_t x = draw_integer(&unused, d, &word);
        /* Half of the zeros are missing: both read as 0. */
        if ((x == 0 && (word & 1) ? fputc('\t', file) : fprintf(file, "\t%lld", (long long)x)) < 0) return false;
    }
    for (int32_t f = 0; f < o->sparse_features; f++)
        if ((r->lengths[f] ? fprintf(file, "\t%08llx", (unsigned long long)r->ids[f]) : fputc('\t', file)) < 0)
            return false;
    return fputc('\n', file) != EOF;
}

peri_status peri_synthetic_write(const peri_synthetic_args *o, int64_t first, int64_t rows, const char *path)
{
    PERI_TAKE(peri_synthetic_args, o);
    PERI_NEED(path);
    const char *function = "peri_synthetic_write";
    PERI_TRY(check_options(function, o, first, rows));
    for (int32_t f = 0; f < o->sparse_features; f++)
        if (o->bag_max[f] > 1)
            return peri__fail(PERI_EINVAL, "%s: bags of feature %d have up to %d ids; the Criteo layout has room for 1",
                              function, f, o->bag_max[f]);
    power_law *laws = power_laws(o);
    row_numbers *numbers = laws ? peri__alloc(sizeof *numbers) : NULL;
    if (!numbers) {
        peri__free(laws);
        return PERI_ENOMEM;
    }
    PERI__QUIET;
    FILE *file = peri__stream_new(path);
    bool good = file != NULL;
    for (int64_t i = 0; good && i < rows; i++) good = write_row(o, laws, first + i, numbers, file);
    int saved = errno;
    if (file && fclose(file) != 0 && good) {
        saved = errno;
        good = false;
    }
    peri__free(numbers);
    peri__free(laws);
    return good ? PERI_OK : peri__fail(PERI_EIO, "%s: %s: %s", function, path, strerror(saved));
}
