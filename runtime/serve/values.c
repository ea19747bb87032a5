/* SPDX-License-Identifier: Apache-2.0
 *
 * values.c: see values.h.
 */
#include "values.h"

#include "../base/buffer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

const char *const peri__serve_problem_names[PERI__SERVE_PROBLEM_COUNT] = {"missing", "extra", "repeated", "kind",
                                                                          "range",   "nan",   "empty"};

/* -- what does not fit --------------------------------------------------------------------------------------------- */

static const peri__serve_input *feature_of(const peri__serve_reader *r,
                                           int32_t f) { return &r->batch->facts->inputs[f]; }

bool peri__serve_blame(peri__serve_reader *r, int32_t f, int problem, const char *format, ...)
{
    if (r->j->status < 0) return false;
    va_list args;
    va_start(args, format);
    r->j->status = peri__fail_va(PERI_EFORMAT, __FILE__, __LINE__, format, args);
    va_end(args);
    r->batch->problems[f][problem]++;
    return false;
}

int64_t peri__serve_samples(const peri__serve_reader *r, int32_t f)
{
    return r->batch->columns[f].n_samples - r->batch->samples;
}

/** peri__serve_blame with the feature and the sample in front. */
#define BLAME(r, f, problem, format, ...)                                                                              \
    peri__serve_blame((r), (f), (problem), "feature '%s', sample %lld: " format, feature_of((r), (f))->name,           \
                      (long long)peri__serve_samples((r), (f)), __VA_ARGS__)

int32_t peri__serve_find(peri__serve_reader *r, const char *name)
{
    const peri__serve_facts *facts = r->batch->facts;
    for (int32_t i = 0; i < facts->n_inputs; i++) {
        int32_t f = (r->guess + i) % facts->n_inputs;
        if (strcmp(facts->inputs[f].name, name) != 0) continue;
        r->guess = f + 1;
        return f;
    }
    char known[256] = "";
    size_t n = 0;
    for (int32_t f = 0; f < facts->n_inputs && n < sizeof known; f++)
        n += (size_t)snprintf(known + n, sizeof known - n, "%s%s", f ? ", " : "", facts->inputs[f].name);
    if (n >= sizeof known) memcpy(known + sizeof known - 4, "...", 4);
    peri__serve_blame(r, facts->n_inputs, PERI__SERVE_EXTRA, "the model has no feature '%.100s'; it has %s", name,
                      known);
    return -1;
}

bool peri__serve_once(peri__serve_reader *r, int32_t f)
{
    if (r->batch->seen[f])
        return peri__serve_blame(r, f, PERI__SERVE_REPEATED, "feature '%s' is there twice", feature_of(r, f)->name);
    return r->batch->seen[f] = true;
}

/* -- one value ----------------------------------------------------------------------------------------------------- */

/** Make room for one more value in the column of feature @f. False: memory is short, which is the request's error. */
static bool make_room(peri__serve_reader *r, int32_t f)
{
    peri__serve_column *c = &r->batch->columns[f];
    if (c->n_values < c->room_values) return true;
    peri_status status = feature_of(r, f)->kind != PERI__SERVE_IDS
                             ? peri__grow((void **)&c->numbers, &c->room_values, c->n_values + 1, sizeof *c->numbers)
                             : peri__grow((void **)&c->ids, &c->room_values, c->n_values + 1, sizeof *c->ids);
    if (status < 0) r->j->status = status;
    return status >= 0;
}

bool peri__serve_add_number(peri__serve_reader *r, int32_t f, double x)
{
    float single = (float)x;
    if (!isfinite(x)) {
        if (!feature_of(r, f)->any) return BLAME(r, f, PERI__SERVE_NAN, "%f is no number", x);
        r->batch->problems[f][PERI__SERVE_NAN]++;
    } else if (!isfinite(single)) return BLAME(r, f, PERI__SERVE_RANGE, "%g is too large for f32", x);
    if (!make_room(r, f)) return false;
    peri__serve_column *c = &r->batch->columns[f];
    c->numbers[c->n_values++] = single;
    return true;
}

bool peri__serve_add_id(peri__serve_reader *r, int32_t f, uint64_t id, bool negative)
{
    uint64_t rows = feature_of(r, f)->rows;
    if (feature_of(r, f)->whole && !negative && id > INT64_MAX)
        return BLAME(r, f, PERI__SERVE_RANGE, "%llu, allowed: up to 9223372036854775807", (unsigned long long)id);
    if (rows ? negative || id >= rows : negative && id > (uint64_t)1 << 63) {
        if (!feature_of(r, f)->skip || (negative && id > (uint64_t)1 << 63))
            return BLAME(r, f, PERI__SERVE_RANGE, "id %s%llu, allowed: %s to %llu", negative ? "-" : "",
                         (unsigned long long)id, rows ? "0" : "-9223372036854775808", (unsigned long long)(rows - 1));
        r->batch->problems[f][PERI__SERVE_RANGE]++;
    }
    if (!make_room(r, f)) return false;
    peri__serve_column *c = &r->batch->columns[f];
    c->ids[c->n_values++] = (int64_t)(negative ? 0 - id : id);
    return true;
}

/** Whether @c, which stands next, begins a number; -Infinity is none. */
static bool begins_number(const peri__json *j, char c)
{
    return (c >= '0' && c <= '9') || (c == '-' && !(j->end - j->at > 1 && j->at[1] == 'I'));
}

bool peri__serve_refuse_kind(peri__serve_reader *r, int32_t f, const char *wanted)
{
    const char *at;
    int64_t bytes;
    char c = peri__json_next(r->j);
    if (c == 'N' || c == 'I' || (c == '-' && !begins_number(r->j, c)))
        return BLAME(r, f, PERI__SERVE_NAN, "%s is wanted, and NaN and Infinity are none", wanted);
    if (!peri__json_skip(r->j, &at, &bytes)) return false;
    return BLAME(r, f, PERI__SERVE_KIND, "%.*s%s, wanted: %s", (int)peri__min(bytes, 40), at, bytes > 40 ? "..." : "",
                 wanted);
}

/** Read a number of at most seven digits without an exponent, as most are: digits and power of ten are f32, so their
 *  quotient is rounded once. False: it has another form. */
static bool short_number(const char *at, int64_t bytes, float *out)
{
    static const float power[] = {1, 1e1f, 1e2f, 1e3f, 1e4f, 1e5f, 1e6f, 1e7f};
    const bool minus = *at == '-';
    int32_t x = 0, digits = 0, behind = 0; /* behind the point */
    bool point = false;
    for (int64_t i = minus; i < bytes; i++) {
        if (at[i] == '.') {
            point = true;
            continue;
        }
        if (at[i] < '0' || at[i] > '9' || digits == 7) return false;
        x = x * 10 + (at[i] - '0');
        digits++;
        behind += point;
    }
    const float y = (float)x / power[behind];
    *out = minus ? -y : y;
    return true;
}

bool peri__serve_number(peri__serve_reader *r, int32_t f)
{
    const char *at;
    int64_t bytes;
    float x;
    char c = peri__json_next(r->j);
    if (!begins_number(r->j, c)) return peri__serve_refuse_kind(r, f, "a number");
    if (!peri__json_skip(r->j, &at, &bytes)) return false;
    /* rounded once, to f32; the program never leaves the locale "C" */
    if (!short_number(at, bytes, &x)) x = strtof(at, NULL);
    if (!isfinite(x)) return BLAME(r, f, PERI__SERVE_RANGE, "%.*s is too large for f32", (int)peri__min(bytes, 40), at);
    return peri__serve_add_number(r, f, x);
}

bool peri__serve_id(peri__serve_reader *r, int32_t f)
{
    const char *at;
    int64_t bytes;
    char c = peri__json_next(r->j);
    if (c != '"' && !begins_number(r->j, c)) return peri__serve_refuse_kind(r, f, "an id");
    if (!peri__json_skip(r->j, &at, &bytes)) return false;
    return peri__serve_add_text(r, f, at + (c == '"'), at + bytes - (c == '"'));
}

bool peri__serve_add_text(peri__serve_reader *r, int32_t f, const char *at, const char *to)
{
    const char *from = at;
    const int shown = (int)peri__min(to - at, 40);
    uint64_t id = 0;
    bool negative = from < to && *from == '-', fits = true;
    from += negative;
    bool whole = from < to && (*from != '0' || to == from + 1);
    for (const char *d = from; d < to && whole; d++) {
        whole = *d >= '0' && *d <= '9';
        fits = fits && !__builtin_mul_overflow(id, 10u, &id) && !__builtin_add_overflow(id, (uint64_t)(*d - '0'), &id);
    }
    if (!whole)
        return BLAME(r, f, PERI__SERVE_KIND, "'%.*s', wanted: an id, a whole number", shown, at);
    if (fits) return peri__serve_add_id(r, f, id, negative && id > 0);
    return BLAME(r, f, PERI__SERVE_RANGE, "id %.*s, allowed: %s to %llu", shown, at,
                 feature_of(r, f)->rows ? "0" : "-9223372036854775808",
                     (unsigned long long)(feature_of(r, f)->rows - 1));
}

/* -- a sample ------------------------------------------------------------------------------------------------------ */

bool peri__serve_end(peri__serve_reader *r, int32_t f)
{
    peri__serve_column *c = &r->batch->columns[f];
    if (r->j->status < 0) return false;
    if (peri__serve_samples(r, f) >= r->rules->most_samples) {
        r->j->status = peri__fail(PERI_EFORMAT, "more than %lld samples in a request (perilune serve --samples)",
                                  (long long)r->rules->most_samples);
        return false;
    }
    if (feature_of(r, f)->kind != PERI__SERVE_NUMBERS) {
        peri_status status = peri__grow((void **)&c->offsets, &c->room_offsets, c->n_samples + 2, sizeof *c->offsets);
        if (status < 0) return r->j->status = status, false;
        c->offsets[0] = 0;
        int64_t n = c->n_values - c->offsets[c->n_samples];
        if (n > PERI__SERVE_MOST_IDS)
            return BLAME(r, f, PERI__SERVE_KIND, "a list of %lld, allowed: %d", (long long)n, PERI__SERVE_MOST_IDS);
        if (feature_of(r, f)->length > 0 && n != feature_of(r, f)->length)
            return BLAME(r, f, PERI__SERVE_KIND, "a list of %lld, wanted: %lld", (long long)n,
                         (long long)feature_of(r, f)->length);
        c->offsets[c->n_samples + 1] = c->n_values;
        r->batch->problems[f][PERI__SERVE_EMPTY] += n == 0 && feature_of(r, f)->kind == PERI__SERVE_IDS;
    }
    c->n_samples++;
    return true;
}

/** A list of numbers or ids. @wanted: how many; -1: any. */
static bool list(peri__serve_reader *r, int32_t f, int64_t wanted)
{
    bool numbers = feature_of(r, f)->kind != PERI__SERVE_IDS;
    int64_t n = 0;
    for (peri__json_enter(r->j, '['); peri__json_item(r->j); n++)
        if (!(numbers ? peri__serve_number(r, f) : peri__serve_id(r, f))) return false;
    if (r->j->status < 0) return false;
    if (wanted >= 0 && n != wanted)
        return BLAME(r, f, PERI__SERVE_KIND, "%lld %s, wanted: %lld", (long long)n, numbers ? "numbers" : "ids",
                     (long long)wanted);
    return peri__serve_end(r, f);
}

bool peri__serve_sample(peri__serve_reader *r, int32_t f, int64_t length)
{
    const peri__serve_input *in = feature_of(r, f);
    char c = peri__json_next(r->j);
    if (in->kind == PERI__SERVE_NUMBERS) {
        if (c == '[') return list(r, f, in->width);
        return in->width == 1 ? peri__serve_number(r, f) && peri__serve_end(r, f)
                              : peri__serve_refuse_kind(r, f, "a list of numbers");
    }
    if (c == '[') return list(r, f, length);
    if (in->kind == PERI__SERVE_WEIGHTS) return peri__serve_number(r, f) && peri__serve_end(r, f);
    if (c != '"' && !begins_number(r->j, c)) return peri__serve_refuse_kind(r, f, "an id or a list of ids");
    return peri__serve_id(r, f) && peri__serve_end(r, f);
}

/** Whether sample @i of a column is there, and an empty list. */
static bool empty(const peri__serve_column *c, int64_t i)
{
    return c->n_samples > i && c->offsets[i + 1] == c->offsets[i];
}

bool peri__serve_missing(peri__serve_reader *r, int32_t f)
{
    const peri__serve_input *in = feature_of(r, f);
    if (r->j->status < 0) return false;
    if (in->one && empty(&r->batch->columns[in->of], r->batch->columns[f].n_samples)) return peri__serve_end(r, f);
    if (!in->optional)
        return peri__serve_blame(r, f, PERI__SERVE_MISSING, "sample %lld: feature '%s' is missing",
                                 (long long)peri__serve_samples(r, f), in->name);
    r->batch->problems[f][PERI__SERVE_MISSING]++;
    for (int64_t i = 0; in->kind == PERI__SERVE_NUMBERS && i < in->width; i++) {
        if (!make_room(r, f)) return false;
        r->batch->columns[f].numbers[r->batch->columns[f].n_values++] = in->missing;
    }
    return peri__serve_end(r, f);
}
