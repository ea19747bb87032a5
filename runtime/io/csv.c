/* SPDX-License-Identifier: Apache-2.0
 *
 * csv.c: the format of lines of columns that a program describes: labels, numbers, and bags of ids.
 */
#include "../base/floats.h"
#include "features.h"
#include "lines.h"
#include "text_number.h"

#include <stdio.h>

/** A column of the file. */
typedef struct column {
    char *name;
    int32_t kind, dense, base, separator;
    int32_t feature; /* number of its dense feature */
    bool described;
    float fallback;
    int64_t most;
    peri__id_rule rule;
} column;

/** A field of the current line. */
typedef struct field {
    const char *text;
    int64_t length;
    bool doubled; /* it stood between quotation marks, and has two for one */
} field;

typedef struct csv {
    peri__lines lines; /* first: a reader is one of these */
    column *columns;   /* [lines.fields], in the order of the file */
    field *fields;     /* [lines.fields] */
    int32_t *bags;     /* [sparse_features] their columns */
    char *plain;       /* room for a field without its doubled quotation marks */
    int64_t plain_room;
    char delimiter;
    locale_t c;
    int64_t *ids;      /* of the batch that is being read, row by row */
    int64_t n_ids, room;
    int32_t *lengths;  /* [row_room, sparse_features] */
    int64_t *cursor;   /* [row_room] */
    int64_t row_room;
} csv;

/* -- lines --------------------------------------------------------------------------------------------------------- */

static peri_status bad_field(const csv *r, int64_t line, int32_t i, const char *p, int64_t n, const char *wanted)
{
    char first[192];
    if (line == 0 && !r->lines.window.header) {
        snprintf(first, sizeof first, "%s; a first line of names is left out by header = true", wanted);
        wanted = first;
    }
    return peri__lines_bad_field(&r->lines, line, i + 1, r->columns[i].name, p, n, wanted);
}

/** A field that begins with a quotation mark at p[0]. @n: bytes of the line from it on. @used: its bytes, with its
 *  marks; 0: it is damaged. */
static field quoted(const char *p, int64_t n, char delimiter, int64_t *used)
{
    field f = {.text = p + 1};
    *used = 0;
    for (int64_t i = 1; i < n; i++) {
        if (p[i] != '"') continue;
        if (i + 1 < n && p[i + 1] == '"') {
            f.doubled = true;
            i++;
            continue;
        }
        f.length = i - 1;
        if (i + 1 == n || p[i + 1] == delimiter) *used = i + 1;
        break;
    }
    return f;
}

/** Cut the line of @n bytes at @at into its fields. */
static peri_status cut(csv *r, int64_t at, int64_t n)
{
    const char *p = peri__window_at(&r->lines.window, at);
    char wanted[24];
    int32_t count = 0;
    int64_t i = 0;
    snprintf(wanted, sizeof wanted, "%d", r->lines.fields);
    for (bool more = true; more; i++) { /* behind a field stands a delimiter, or the line's end */
        if (count == r->lines.fields) return peri__lines_bad_count(&r->lines, at, n, count + 1, wanted);
        field f = {.text = p + i};
        if (i < n && p[i] == '"') {
            int64_t used;
            f = quoted(p + i, n - i, r->delimiter, &used);
            if (used == 0)
                return bad_field(r, at, count, p + i, n - i,
                                 "a field between quotation marks, behind which the field ends, on one line");
            i += used;
        } else {
            const char *end = i < n ? memchr(p + i, r->delimiter, (size_t)(n - i)) : NULL;
            f.length = (end ? end - p : n) - i;
            i += f.length;
        }
        r->fields[count++] = f;
        more = i < n;
    }
    return count == r->lines.fields ? PERI_OK : peri__lines_bad_count(&r->lines, at, n, count, wanted);
}

/** A field's text, with one quotation mark for two. */
static peri_status plain_text(csv *r, field *f)
{
    int64_t n = 0;
    if (!f->doubled) return PERI_OK;
    if (f->length > r->plain_room) {
        char *room = peri__realloc(r->plain, (size_t)f->length);
        if (!room) return PERI_ENOMEM;
        r->plain = room;
        r->plain_room = f->length;
    }
    for (int64_t i = 0; i < f->length; i++) {
        r->plain[n++] = f->text[i];
        i += f->text[i] == '"';
    }
    *f = (field){.text = r->plain, .length = n};
    return PERI_OK;
}

static peri_status add_id(csv *r, int64_t id)
{
    if (r->n_ids == r->room) {
        int64_t room = peri__max(2 * r->room, (int64_t)1024);
        int64_t *ids = peri__realloc(r->ids, sizeof *ids * (size_t)room);
        if (!ids) return PERI_ENOMEM;
        r->ids = ids;
        r->room = room;
    }
    r->ids[r->n_ids++] = id;
    return PERI_OK;
}

/** A raw id: a whole number of 64 bits, with or without sign. */
static bool parse_raw(const char *p, int64_t n, int32_t base, int64_t *id)
{
    bool negative = base == 10 && n > 0 && p[0] == '-';
    uint64_t x;
    if (!peri__parse_whole(p + negative, n - negative, base, &x)) return false;
    if (negative && x > (uint64_t)INT64_MAX + 1) return false;
    *id = (int64_t)(negative ? 0 - x : x);
    return true;
}

/** An id of column @i of the line at @line: the @n bytes at @p. */
static peri_status convert_id(csv *r, int64_t line, int32_t i, const char *p, int64_t n)
{
    const column *c = &r->columns[i];
    char wanted[96];
    uint64_t x;
    if (c->rule.mode == PERI_IDS_TEXT)
        return add_id(r, (int64_t)peri__modulo(XXH3_64bits(p, (size_t)n), c->rule.modulus, c->rule.reciprocal));
    if (!c->rule.modulus) {
        int64_t raw;
        if (parse_raw(p, n, c->base, &raw)) return add_id(r, raw);
        return bad_field(r, line, i, p, n,
                         c->base == 10 ? "whole numbers -2^63..2^64-1" : "hexadecimal numbers of at most 16 digits");
    }
    if (!peri__parse_whole(p, n, c->base, &x))
        return bad_field(r, line, i, p, n,
                         c->base == 10 ? "whole numbers 0..2^64-1; ids = text takes words"
                                       : "hexadecimal numbers of at most 16 digits");
    int64_t id = peri__id_place(&c->rule, x);
    if (id >= 0) return add_id(r, id);
    snprintf(wanted, sizeof wanted, "ids 0..%llu, below the rows of its table",
             (unsigned long long)c->rule.modulus - 1);
    (void)bad_field(r, line, i, p, n, wanted);
    return PERI_ERANGE;
}

/** The bag of column @i. */
static peri_status convert_bag(csv *r, int64_t line, int32_t i, int32_t *length)
{
    const column *c = &r->columns[i];
    field f = r->fields[i];
    PERI_TRY(plain_text(r, &f));
    *length = 0;
    for (int64_t at = 0; at < f.length; (*length)++) {
        const char *end = c->separator ? memchr(f.text + at, c->separator, (size_t)(f.length - at)) : NULL;
        int64_t n = end ? end - f.text - at : f.length - at;
        if (c->most && *length == c->most) break;
        PERI_TRY(convert_id(r, line, i, f.text + at, n));
        at += n + (end != NULL);
        if (end && at == f.length) return bad_field(r, line, i, f.text, f.length, "an id behind the last separator");
    }
    return PERI_OK;
}

static peri_status convert_line(peri__lines *lines, int64_t at, int64_t n, peri_batch *b, int64_t row)
{
    csv *r = (csv *)lines;
    PERI_TRY(cut(r, at, n));
    b->labels[row] = 0;
    for (int32_t i = 0; i < lines->fields; i++) {
        const column *c = &r->columns[i];
        const field *f = &r->fields[i];
        double x = 0;
        if (c->kind == PERI_COLUMN_IDS) continue;
        bool missing = c->kind == PERI_COLUMN_SKIP || (c->kind == PERI_COLUMN_DENSE && f->length == 0);
        if (!missing && !peri__parse_double(f->text, f->length, r->c, &x))
            return bad_field(r, at, i, f->text, f->length,
                             c->kind == PERI_COLUMN_LABEL ? "a finite number" : "empty, or a finite number");
        float y = missing ? c->fallback : peri__dense_of(c->kind == PERI_COLUMN_DENSE ? c->dense : PERI_DENSE_RAW, x);
        if (!isfinite(y)) return bad_field(r, at, i, f->text, f->length, "numbers that f32 can hold");
        if (c->kind == PERI_COLUMN_LABEL) b->labels[row] = y;
        if (c->kind == PERI_COLUMN_DENSE) b->dense[row * lines->dense_features + c->feature] = y;
    }
    for (int32_t f = 0; f < lines->sparse_features; f++)
        PERI_TRY(convert_bag(r, at, r->bags[f], &r->lengths[row * lines->sparse_features + f]));
    return PERI_OK;
}

static peri_status start_lines(peri__lines *lines, peri_batch *b, int64_t rows)
{
    csv *r = (csv *)lines;
    (void)b;
    r->n_ids = 0;
    if (rows <= r->row_room) return PERI_OK;
    int32_t *lengths =
        peri__realloc(r->lengths, sizeof *lengths * (size_t)(rows * peri__max(lines->sparse_features, 1)));
    if (!lengths) return PERI_ENOMEM;
    r->lengths = lengths;
    int64_t *cursor = peri__realloc(r->cursor, sizeof *cursor * (size_t)rows);
    if (!cursor) return PERI_ENOMEM;
    r->cursor = cursor;
    r->row_room = rows;
    return PERI_OK;
}

static peri_status finish_lines(peri__lines *lines, peri_batch *b)
{
    csv *r = (csv *)lines;
    PERI_TRY(peri_batch_reserve(b, r->n_ids));
    peri__batch_set_ids(b, r->ids, r->lengths, r->cursor);
    return PERI_OK;
}

/* -- opening ------------------------------------------------------------------------------------------------------- */

static void csv_release(peri__lines *lines)
{
    csv *r = (csv *)lines;
    for (int32_t i = 0; r->columns && i < lines->fields; i++) peri__free(r->columns[i].name);
    if (r->c) freelocale(r->c);
    peri__free(r->columns);
    peri__free(r->fields);
    peri__free(r->bags);
    peri__free(r->plain);
    peri__free(r->ids);
    peri__free(r->lengths);
    peri__free(r->cursor);
    peri__free(r);
}

static const peri__line_format format = {start_lines, convert_line, finish_lines, csv_release};

static bool is_separator(int32_t c) { return c > 0 && c < 256 && c != '"' && c != '\n' && c != '\r'; }

static int32_t csv_delimiter(const peri_csv_config *o) { return o->delimiter ? o->delimiter : ','; }

/** Check the description of a column. */
static peri_status check_column(const peri_csv_column *c, int32_t i, int32_t delimiter)
{
    const char *f = "peri_csv_open";
    if (!c->name) return peri__fail(PERI_EINVAL, "%s: column %d has no name", f, i + 1);
    if (c->kind < PERI_COLUMN_SKIP || c->kind > PERI_COLUMN_IDS)
        return peri__fail(PERI_EINVAL, "%s: column '%s': kind = %d, allowed: PERI_COLUMN_*", f, c->name, c->kind);
    if (c->kind == PERI_COLUMN_DENSE &&
        (c->dense < PERI_DENSE_RAW || c->dense > PERI_DENSE_SIGNED_LOG || !isfinite(c->fallback)))
        return peri__fail(PERI_EINVAL,
                          "%s: column '%s': dense = %d, fallback = %g, allowed: PERI_DENSE_*, a finite number", f,
                          c->name, c->dense, c->fallback);
    if (c->kind != PERI_COLUMN_IDS) return PERI_OK;
    if ((c->base != 0 && c->base != 10 && c->base != 16) || c->most < 0)
        return peri__fail(PERI_EINVAL, "%s: column '%s': base = %d, most = %lld, allowed: 10 or 16, 0 or more", f,
                          c->name, c->base, (long long)c->most);
    if (c->separator && (!is_separator(c->separator) || c->separator == delimiter))
        return peri__fail(PERI_EINVAL, "%s: column '%s': separator %d, allowed: a character that is not the delimiter",
                          f, c->name, c->separator);
    if (c->ids < PERI_IDS_HASH || c->ids > PERI_IDS_TEXT || c->table_rows < (c->ids != PERI_IDS_EXACT))
        return peri__fail(PERI_EINVAL,
                          "%s: column '%s': ids = %d, %lld rows, allowed: PERI_IDS_*, 1 or more (0 with EXACT)", f,
                          c->name, c->ids, (long long)c->table_rows);
    return PERI_OK;
}

static peri_status check_options(const peri_csv_config *o, int32_t *dense, int32_t *sparse)
{
    const char *f = "peri_csv_open";
    int32_t labels = 0;
    *dense = *sparse = 0;
    if (!o->paths || o->n_paths < 1) return peri__fail(PERI_EINVAL, "%s: no paths", f);
    if (!o->columns || o->n_columns < 1 || o->n_columns > 2 * IO_MAX_FEATURES)
        return peri__fail(PERI_EINVAL, "%s: %d columns, allowed: 1..%d", f, o->n_columns, 2 * IO_MAX_FEATURES);
    if (!is_separator(csv_delimiter(o)))
        return peri__fail(PERI_EINVAL,
                          "%s: delimiter %d, allowed: a character that is no quotation mark and no line end", f,
                          o->delimiter);
    for (int32_t i = 0; i < o->n_columns; i++) {
        const peri_csv_column *given = peri__struct_at(o->columns, i);
        PERI_TAKE(peri_csv_column, given);
        PERI_TRY(check_column(given, i, csv_delimiter(o)));
        labels += given->kind == PERI_COLUMN_LABEL;
        *dense += given->kind == PERI_COLUMN_DENSE;
        *sparse += given->kind == PERI_COLUMN_IDS;
    }
    if (labels > 1)
        return peri__fail(PERI_EINVAL, "%s: %d columns of labels, allowed: 0, 1 (others may be of the kind dense)",
                          f, labels);
    return PERI_OK;
}

/** Describe column @at of the file. */
static peri_status set_column(csv *r, int32_t at, const peri_csv_column *given, int32_t feature)
{
    PERI_TAKE(peri_csv_column, given);
    column *c = &r->columns[at];
    if (c->described) return peri__fail(PERI_EINVAL, "peri_csv_open: column '%s' is described twice", given->name);
    peri__free(c->name);
    c->name = peri__strdup(given->name);
    if (!c->name) return PERI_ENOMEM;
    c->described = true;
    c->kind = given->kind;
    c->dense = given->dense;
    c->base = given->base ? given->base : 10;
    c->separator = given->separator;
    c->most = given->most;
    c->feature = feature;
    c->fallback = peri__dense_of(given->dense, given->fallback);
    if (c->kind == PERI_COLUMN_IDS) c->rule = peri__id_rule_of(given->ids, PERI_MISSING_EMPTY, given->table_rows);
    return PERI_OK;
}

/** Columns of the header, by which those of the file are numbered: each is left out, until it is described. */
static peri_status name_columns(csv *r, const char *header)
{
    int64_t n = (int64_t)strlen(header), i = 0, used;
    int32_t count = 0;
    for (const char *p = header; *p; p++) count += *p == r->delimiter;
    if (count >= 4 * IO_MAX_FEATURES)
        return peri__fail(PERI_EFORMAT, "peri_csv: %s:1: %d columns, allowed: at most %d",
                          r->lines.window.files[0].path, count + 1, 4 * IO_MAX_FEATURES);
    r->columns = peri__alloc_zero(sizeof *r->columns * (size_t)(count + 1));
    if (!r->columns) return PERI_ENOMEM;
    r->lines.fields = count + 1; /* no fewer than there are: room to be freed */
    count = 0;
    for (bool more = true; more; i++) {
        field f = {.text = header + i};
        if (i < n && header[i] == '"') f = quoted(header + i, n - i, r->delimiter, &used);
        else {
            const char *end = strchr(header + i, r->delimiter);
            used = f.length = end ? end - (header + i) : n - i;
        }
        if (i < n && header[i] == '"' && used == 0)
            return peri__fail(PERI_EFORMAT, "peri_csv: %s:1: column %d: its quotation mark is not closed",
                              r->lines.window.files[0].path, count + 1);
        i += used;
        PERI_TRY(plain_text(r, &f));
        char *name = peri__alloc((size_t)f.length + 1);
        if (!name) return PERI_ENOMEM;
        memcpy(name, f.text, (size_t)f.length);
        name[f.length] = 0;
        r->columns[count++].name = name;
        more = i < n;
    }
    r->lines.fields = count;
    return PERI_OK;
}

/** The place of a column in the header. */
static peri_status find_column(const csv *r, const char *name, int32_t *at)
{
    *at = -1;
    for (int32_t i = 0; i < r->lines.fields; i++) {
        if (strcmp(r->columns[i].name, name) != 0) continue;
        if (*at >= 0)
            return peri__fail(PERI_EFORMAT, "peri_csv: %s:1: two columns are named '%s'", r->lines.window.files[0].path,
                              name);
        *at = i;
    }
    if (*at >= 0) return PERI_OK;
    return peri__fail(PERI_EFORMAT, "peri_csv: %s:1: no column is named '%s'; the header is '%.200s'",
                      r->lines.window.files[0].path, name, r->lines.window.header);
}

/** Describe all columns, of files that are open. */
static peri_status set_columns(csv *r, const peri_csv_config *o)
{
    int32_t dense = 0, sparse = 0;
    r->bags = peri__alloc(sizeof *r->bags * (size_t)peri__max(r->lines.sparse_features, 1));
    if (!r->bags) return PERI_ENOMEM;
    if (o->header) PERI_TRY(name_columns(r, r->lines.window.header));
    else {
        r->columns = peri__alloc_zero(sizeof *r->columns * (size_t)o->n_columns);
        if (!r->columns) return PERI_ENOMEM;
        r->lines.fields = o->n_columns;
    }
    for (int32_t i = 0; i < o->n_columns; i++) {
        const peri_csv_column *given = peri__struct_at(o->columns, i);
        int32_t at = i;
        if (o->header) PERI_TRY(find_column(r, given->name, &at));
        PERI_TRY(set_column(r, at, given, given->kind == PERI_COLUMN_DENSE ? dense++ : 0));
        if (given->kind == PERI_COLUMN_IDS) r->bags[sparse++] = at;
    }
    r->fields = peri__alloc(sizeof *r->fields * (size_t)r->lines.fields);
    return r->fields ? PERI_OK : PERI_ENOMEM;
}

peri_status peri_csv_open(const peri_csv_config *options, peri_criteo **out)
{
    PERI_TAKE(peri_csv_config, options);
    PERI_NEED(out);
    PERI__OWN_FLOATS;
    peri__lines_config lines = {.paths = options->paths,
                                .n_paths = options->n_paths,
                                .rank = options->rank,
                                .world = options->world,
                                .batch_rows = options->batch_rows,
                                .begin = options->begin,
                                .end = options->end,
                                .fields = 1,
                                .header = options->header};
    PERI_TRY(check_options(options, &lines.dense_features, &lines.sparse_features));
    csv *r = peri__alloc_zero(sizeof *r);
    if (!r) return PERI_ENOMEM;
    peri__object_count(1);
    r->lines.format = &format;
    r->lines.window = (peri_window){.name = "peri_csv", .fd = -1, .current = -1};
    r->delimiter = (char)csv_delimiter(options);
    peri_status status = PERI_ENOMEM;
    r->c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (!r->c) goto out;
    PERI_TRY_GOTO(peri__lines_open(&r->lines, &lines), out);
    r->lines.fields = 0;
    PERI_TRY_GOTO(set_columns(r, options), out);
    *out = &r->lines;
out:
    if (status < 0) peri_criteo_release(&r->lines);
    return status;
}
