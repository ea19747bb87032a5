/* SPDX-License-Identifier: Apache-2.0
 *
 * criteo.c: the format of lines "label TAB integers TAB hexadecimal categories". Lines are cut at their tabs, 64 bytes
 * at a time.
 */
#include "../base/floats.h"
#include "features.h"
#include "lines.h"

#include <stdio.h>

enum { LOG_TABLE = 1024 };

typedef struct criteo {
    peri__lines lines; /* first: a reader is one of these */
    int32_t dense, missing;
    peri__id_rule *rules; /* [sparse_features] */
    uint32_t *field_ends; /* [fields] offsets in the current line */
    int64_t stride;       /* between the ids of two features in the batch that is being read */
    float log_table[LOG_TABLE];
} criteo;

/* -- messages ------------------------------------------------------------------------------------------------------ */

/** Column @field of the line at @line is wrong. */
static peri_status bad_field(const criteo *r, int64_t line, int32_t field, const char *p, int64_t n, const char *wanted)
{
    char what[32];
    if (field == 0) snprintf(what, sizeof what, "label");
    else if (field <= r->lines.dense_features) snprintf(what, sizeof what, "integer %d", field);
    else snprintf(what, sizeof what, "category %d", field - r->lines.dense_features);
    return peri__lines_bad_field(&r->lines, line, field + 1, what, p, n, wanted);
}

static peri_status bad_count(const criteo *r, int64_t line, int64_t n, int32_t found)
{
    char wanted[96];
    snprintf(wanted, sizeof wanted, "%d (a label, %d integers, %d categories)", r->lines.fields,
             r->lines.dense_features, r->lines.sparse_features);
    return peri__lines_bad_count(&r->lines, line, n, found, wanted);
}

/* -- converting fields --------------------------------------------------------------------------------------------- */

#define BYTES(x) (UINT64_C(0x0101010101010101) * (x))

static inline uint64_t load_8(const char *p)
{
    uint64_t x;
    memcpy(&x, p, sizeof x);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    x = __builtin_bswap64(x);
#endif
    return x;
}

/** Decimal with an optional minus; false unless it is one of 1 to 18 digits. @before bytes in front of @p are
 *  readable. */
static inline bool parse_integer(const char *p, int64_t n, int64_t before, int64_t *out)
{
    bool minus = *p == '-';
    p += minus;
    n -= minus;
    int64_t x = 0;
    if (n >= 1 && n <= 8 && before + n >= 8) {
        /* The 8 bytes that end with the number, those in front of it cleared, one digit per byte; then pairs, fours,
         * eights. */
        uint64_t v = (load_8(p + n - 8) ^ BYTES('0')) & (~UINT64_C(0) << (64 - 8 * n));
        if (((v + BYTES(0x76)) | v) & BYTES(0x80)) return false;
        v = v * 10 + (v >> 8);
        v = ((v & UINT64_C(0x000000ff000000ff)) * UINT64_C(0x000f424000000064) +
             (v >> 16 & UINT64_C(0x000000ff000000ff)) * UINT64_C(0x0000271000000001)) >> 32;
        x = (int64_t)(v & 0xffffffff);
    } else {
        if (n < 1 || n > 18) return false;
        for (int64_t i = 0; i < n; i++) {
            uint32_t digit = (uint32_t)(unsigned char)p[i] - '0';
            if (digit > 9) return false;
            x = x * 10 + digit;
        }
    }
    *out = minus ? -x : x;
    return true;
}

/** 8 hexadecimal digits; false if it is anything else. */
static inline bool parse_hex_8(const char *p, uint64_t *out)
{
    uint64_t v = load_8(p), letter = v >> 6 & BYTES(1), digit = (v & BYTES(15)) + letter * 9;
    /* Valid exactly if the digits, written again in lower case, are the text. */
    uint64_t high = (digit + BYTES(6)) >> 4 & BYTES(1);
    if ((digit + BYTES('0') + high * ('a' - '0' - 10)) != (v | letter << 5) || (digit & BYTES(0xf0))) return false;
    digit = __builtin_bswap64(digit);
    digit = (digit | digit >> 4) & UINT64_C(0x00ff00ff00ff00ff);
    digit = (digit | digit >> 8) & UINT64_C(0x0000ffff0000ffff);
    *out = (digit | digit >> 16) & 0xffffffff;
    return true;
}

/** 1 to 16 hexadecimal digits; false if it is anything else. */
static inline bool parse_hex(const char *p, int64_t n, uint64_t *out)
{
    if (n == 8) return parse_hex_8(p, out); /* nearly all */
    if (n > 16) return false;
    uint64_t x = 0;
    for (int64_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)p[i], low = c | 0x20;
        if (c >= '0' && c <= '9') x = x << 4 | (c - '0');
        else if (low >= 'a' && low <= 'f') x = x << 4 | (low - 'a' + 10u);
        else return false;
    }
    *out = x;
    return true;
}

static inline float transform_dense(const criteo *r, int64_t x)
{
    if (r->dense == PERI_DENSE_RAW) return (float)x;
    int64_t size = r->dense == PERI_DENSE_SIGNED_LOG && x < 0 ? -x : x;
    float y = size >= 0 && size < LOG_TABLE ? r->log_table[size] : peri__dense_log(size);
    return x < 0 && r->dense == PERI_DENSE_SIGNED_LOG ? -y : y;
}

/* -- lines --------------------------------------------------------------------------------------------------------- */

/** Cut the line [at, at + n) at its tabs. */
static peri_status cut(criteo *r, int64_t at, int64_t n)
{
    const peri_window *w = &r->lines.window;
    const char *p = peri__window_at(w, at);
    int32_t fields = 0;
    for (int64_t i = 0; i < n; i += 64) {
        uint64_t mask = peri__match(p + i, w->end - at - i, '\t');
        if (n - i < 64) mask &= ((uint64_t)1 << (n - i)) - 1;
        for (; mask; mask &= mask - 1) {
            if (fields == r->lines.fields - 1) return bad_count(r, at, n, r->lines.fields + 1);
            r->field_ends[fields++] = (uint32_t)(i + __builtin_ctzll(mask));
        }
    }
    r->field_ends[fields++] = (uint32_t)n;
    return fields == r->lines.fields ? PERI_OK : bad_count(r, at, n, fields);
}

/** Convert the line into row @row; category f goes to values[row + f * stride]. */
static peri_status convert_line(peri__lines *lines, int64_t at, int64_t n, peri_batch *b, int64_t row)
{
    criteo *r = (criteo *)lines;
    const char *p = peri__window_at(&lines->window, at);
    int64_t before = at - lines->window.begin; /* bytes in front of it that are readable */
    int64_t *ids = b->values + row;
    if (n > UINT32_MAX) return bad_count(r, at, n, 0);
    PERI_TRY(cut(r, at, n));
    const uint32_t *ends = r->field_ends;
    if (ends[0] != 1 || (*p != '0' && *p != '1')) return bad_field(r, at, 0, p, ends[0], "0, 1");
    b->labels[row] = *p == '1';
    float *dense = b->dense + row * r->lines.dense_features;
    uint32_t start = ends[0] + 1;
    for (int32_t f = 0; f < r->lines.dense_features; f++) {
        uint32_t end = ends[f + 1];
        int64_t x = 0;
        if (end > start && !parse_integer(p + start, end - start, before + start, &x))
            return bad_field(r, at, f + 1, p + start, end - start, "empty, or a decimal number of at most 18 digits");
        dense[f] = transform_dense(r, x);
        start = end + 1;
    }
    for (int32_t f = 0; f < r->lines.sparse_features; f++) {
        uint32_t end = ends[r->lines.dense_features + f + 1];
        uint64_t x = 0;
        bool present = end > start;
        if (present && !parse_hex(p + start, end - start, &x))
            return bad_field(r, at, r->lines.dense_features + f + 1, p + start, end - start,
                             "empty, or 1 to 16 hexadecimal digits");
        ids[f * r->stride] = present ? peri__id_place(&r->rules[f], x) : r->missing == PERI_MISSING_ZERO ? 0 : -1;
        start = end + 1;
    }
    return PERI_OK;
}

/** One more cache line per feature: equal powers of two would put all features' rows into the same sets of the
 *  cache. */
static peri_status start_lines(peri__lines *lines, peri_batch *b, int64_t rows)
{
    criteo *r = (criteo *)lines;
    r->stride = rows + 8;
    return peri_batch_reserve(b, r->stride * lines->sparse_features);
}

/** Close the gaps that missing categories left: from [feature, stride] with -1 for none to key-major ids and
 *  lengths. */
static peri_status finish_lines(peri__lines *lines, peri_batch *b)
{
    int64_t n = 0;
    for (int32_t f = 0; f < b->sparse_features; f++) {
        const int64_t *from = b->values + f * ((criteo *)lines)->stride;
        int32_t *lengths = b->lengths + f * b->rows;
        for (int64_t i = 0; i < b->rows; i++) {
            int64_t id = from[i];
            lengths[i] = id >= 0;
            b->values[n] = id; /* n <= f * stride + i: what is overwritten was read */
            n += id >= 0;
        }
    }
    b->ids = n;
    return PERI_OK;
}

/* -- opening ------------------------------------------------------------------------------------------------------- */

static void criteo_release(peri__lines *lines)
{
    criteo *r = (criteo *)lines;
    peri__free(r->rules);
    peri__free(r->field_ends);
    peri__free(r);
}

static const peri__line_format format = {start_lines, convert_line, finish_lines, criteo_release};

static peri_status check_options(const char *f, const peri_criteo_config *o)
{
    if (o->dense < PERI_DENSE_RAW || o->dense > PERI_DENSE_SIGNED_LOG)
        return peri__fail(PERI_EINVAL, "%s: dense = %d, allowed: PERI_DENSE_RAW, PERI_DENSE_LOG, PERI_DENSE_SIGNED_LOG",
                          f, o->dense);
    if (o->n_more < 0 || (o->n_more > 0 && !o->more))
        return peri__fail(PERI_EINVAL, "%s: more = NULL, n_more = %d", f, o->n_more);
    return peri__ids_check(f, o->ids, PERI_IDS_MOD, o->missing, o->table_rows, o->sparse_features);
}

/** All but the text. */
static peri_status set_up(criteo *r, const peri_criteo_config *o)
{
    r->rules = peri__alloc(sizeof *r->rules * (size_t)peri__max(o->sparse_features, 1));
    r->field_ends = peri__alloc(sizeof *r->field_ends * (size_t)(1 + o->dense_features + o->sparse_features));
    if (!r->rules || !r->field_ends) return PERI_ENOMEM;
    r->dense = o->dense;
    r->missing = o->missing;
    for (int32_t f = 0; f < o->sparse_features; f++)
        r->rules[f] = peri__id_rule_of(o->ids, o->missing, o->table_rows[f]);
    for (int64_t i = 0; i < LOG_TABLE; i++) r->log_table[i] = peri__dense_log(i);
    return PERI_OK;
}

/** The files that a configuration names, as a list to be freed. */
static peri_status paths_of(const peri_criteo_config *o, const char ***out)
{
    const char **paths = peri__alloc(sizeof *paths * (size_t)(1 + o->n_more));
    if (!paths) return PERI_ENOMEM;
    paths[0] = o->path;
    for (int32_t i = 0; i < o->n_more; i++) paths[1 + i] = o->more[i];
    *out = paths;
    return PERI_OK;
}

/** @text NULL: open the files. */
static peri_status open_reader(const char *name, const peri_criteo_config *o, const char *text, int64_t size,
                               peri_criteo **out)
{
    PERI__OWN_FLOATS;
    const char **paths;
    peri__lines_config lines = {.n_paths = text ? 1 : 1 + o->n_more,
                                .dense_features = o->dense_features,
                                .sparse_features = o->sparse_features,
                                .rank = o->rank,
                                .world = o->world,
                                .batch_rows = o->batch_rows,
                                .begin = o->begin,
                                .end = o->end,
                                .text = text,
                                .size = size};
    if (o->dense_features < 0 || o->dense_features > IO_MAX_FEATURES || o->sparse_features < 0 ||
        o->sparse_features > IO_MAX_FEATURES)
        return peri__fail(PERI_EINVAL, "%s: %d integers and %d categories, allowed: 0..%d", name, o->dense_features,
                          o->sparse_features, IO_MAX_FEATURES);
    PERI_TRY(check_options(name, o));
    PERI_TRY(paths_of(o, &paths));
    criteo *r = peri__alloc_zero(sizeof *r);
    peri_status status = PERI_ENOMEM;
    if (r) {
        peri__object_count(1);
        lines.paths = paths;
        lines.fields = 1 + o->dense_features + o->sparse_features;
        r->lines.format = &format;
        r->lines.window = (peri_window){.name = "peri_criteo", .fd = -1, .current = -1};
        status = set_up(r, o);
        if (status >= 0) status = peri__lines_open(&r->lines, &lines);
        if (status < 0) peri_criteo_release(&r->lines);
        else *out = &r->lines;
    }
    peri__free(paths);
    return status;
}

peri_status peri_criteo_open(const peri_criteo_config *options, peri_criteo **out)
{
    PERI_TAKE(peri_criteo_config, options);
    PERI_NEED(out);
    return open_reader("peri_criteo_open", options, NULL, 0, out);
}

peri_status peri_criteo_open_memory(const peri_criteo_config *options, const char *text, int64_t size,
                                    peri_criteo **out)
{
    PERI__NOT_AT_BORDER;
    PERI_TAKE(peri_criteo_config, options);
    if (!text || size < 0)
        return peri__fail(PERI_EINVAL, "peri_criteo_open_memory: no text, or %lld bytes of it", (long long)size);
    return open_reader("peri_criteo_open_memory", options, text, size, out);
}
