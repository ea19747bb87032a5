/* SPDX-License-Identifier: Apache-2.0
 *
 * lines.c: what readers of lines have in common: where lines and batches begin, in files and parts of files, on ranks
 * and workers.
 *
 * The text comes chunk by chunk, and is used while it is in the cache. Of other ranks' lines the ends are counted; this
 * rank's are converted. A batch is taken to be full; one that ends too early, the last of its part, is read again, now
 * that its lines, and so this rank's share, are known.
 */
#include "../base/floats.h"
#include "lines.h"

#include <errno.h>

enum { MAX_LINE = 1 << 20 };
/* Of an index: bytes whose line ends are counted together; how far readers count ahead for each other; its first
 * words. */
enum { INDEX_CHUNK = 1 << 18, INDEX_AHEAD = 256, INDEX_SIZE = 0, INDEX_BEGIN = 1, INDEX_END = 2, INDEX_COUNTS = 3 };
enum { UNKNOWN = -1, CLAIMED = -2 }; /* counts: nobody has counted; somebody counts */

typedef peri__line_cursor cursor;

/* -- searching the text -------------------------------------------------------------------------------------------- */

static const char *first_path(const peri__lines *r) { return r->window.files[0].path; }

/** End of the part; of a text read in order, as soon as it is known. */
static int64_t part_end(const peri__lines *r) { return peri__min(r->end, r->window.size); }

static peri_status line_too_long(const peri__lines *r, int64_t at)
{
    const peri_window_file *f = peri__window_file(&r->window, at);
    return peri__fail(PERI_EFORMAT, "%s: %s: byte %lld: a line of more than %d bytes; is this a file of lines?",
                      r->window.name, f->path, (long long)(f->skip + at - f->at), MAX_LINE);
}

/** What must stay in memory while the text from @at on is read: of one read in order the whole batch, which may have to
 *  be read again. */
static int64_t kept(const peri__lines *r, int64_t at) { return r->window.in_order ? r->at : at; }

/** @next: the position behind the @wanted-th line end (>= 1) after @at; if there are fewer, the end of the part. @found
 *  gets the number of lines: a last line without an end counts. */
static peri_status skip_lines(peri__lines *r, int64_t at, int64_t wanted, int64_t *next, int64_t *found)
{
    peri_window *w = &r->window;
    int64_t lines = 0, i = at, line = at, before = 0; /* line: a place in the current line, or a chunk earlier */
    bool more = true;
    peri__window_seek(w, at);
    while (more && i < part_end(r)) {
        int64_t limit = peri__min(part_end(r), w->end);
        for (; i < limit; i = peri__min(i + 64, limit)) {
            const char *p = peri__window_at(w, i);
            uint64_t mask = peri__match(p, limit - i, '\n');
            int64_t here = __builtin_popcountll(mask);
            if (lines + here < wanted) {
                lines += here;
                continue;
            }
            while (++lines < wanted) mask &= mask - 1;
            *found = wanted;
            *next = i + __builtin_ctzll(mask) + 1;
            return PERI_OK;
        }
        if (i == part_end(r)) break;
        if (lines > before) line = i;
        before = lines;
        if (i - line > MAX_LINE) return line_too_long(r, line);
        PERI_TRY(peri__window_more(w, kept(r, i), &more));
    }
    if (at < i && *peri__window_at(w, i - 1) != '\n') lines++;
    *found = lines;
    *next = i;
    return PERI_OK;
}

/** @start: the start of the first line that starts at or behind @at. */
static peri_status line_start(peri__lines *r, int64_t at, int64_t *start)
{
    peri_window *w = &r->window;
    *start = peri__min(peri__max(at, 0), w->size);
    if (at <= 0 || at >= w->size) return PERI_OK;
    int64_t i = at - 1;
    bool more = true;
    for (peri__window_seek(w, i); more; i = w->end) {
        if (w->end == i) PERI_TRY(peri__window_more(w, i, &more));
        const char *p = memchr(peri__window_at(w, i), '\n', (size_t)(w->end - i));
        if (p) {
            *start = i + (p - peri__window_at(w, i)) + 1;
            return PERI_OK;
        }
    }
    *start = w->size;
    return PERI_OK;
}

/* -- an index of lines that several readers share ------------------------------------------------------------------ */

/** Count the line ends of a chunk that this reader has claimed, and let all know. */
static peri_status count_chunk(peri__lines *r, int64_t chunk, int64_t *count)
{
    char text[1 << 15]; /* callers have 64 KiB of stack */
    int64_t at = r->begin + chunk * INDEX_CHUNK, end = peri__min(at + INDEX_CHUNK, r->end), lines = 0;
    peri_status status = PERI_OK;
    while (at < end && status >= 0) {
        int64_t n = peri__min((int64_t)sizeof text, end - at), i = 0;
        status = peri__window_read(&r->window, text, n, at);
        if (status < 0) break;
        for (; i < n; i += 64) lines += __builtin_popcountll(peri__match(text + i, n - i, '\n'));
        at += n;
    }
    __atomic_store_n(&r->index[INDEX_COUNTS + chunk], status < 0 ? UNKNOWN : lines, __ATOMIC_RELEASE);
    *count = lines;
    return status;
}

static bool claim_chunk(peri__lines *r, int64_t chunk)
{
    int64_t unknown = UNKNOWN;
    return __atomic_compare_exchange_n(&r->index[INDEX_COUNTS + chunk], &unknown, CLAIMED, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE);
}

/** Line ends of a chunk. While another reader counts it, this one counts those that will be asked for next. */
static peri_status chunk_lines(peri__lines *r, int64_t chunk, int64_t *count)
{
    int64_t ahead = chunk + 1, last = peri__min(chunk + INDEX_AHEAD, r->chunks), unused;
    for (int64_t round = 0;; round++) {
        *count = __atomic_load_n(&r->index[INDEX_COUNTS + chunk], __ATOMIC_ACQUIRE);
        if (*count >= 0) return PERI_OK;
        if (*count == UNKNOWN && claim_chunk(r, chunk)) return count_chunk(r, chunk, count);
        while (ahead < last && !claim_chunk(r, ahead)) ahead++;
        if (ahead < last) PERI_TRY(count_chunk(r, ahead, &unused));
        else peri_pause(round);
    }
}

/** Move @c to the chunk that has the end in front of line @line (> 0) of the part, or to the last one. @known: it
 *  has. */
static peri_status index_move(peri__lines *r, cursor *c, int64_t line, bool *known)
{
    int64_t count;
    *known = true;
    if (c->before >= line) *c = (cursor){0, 0};
    for (; c->chunk < r->chunks - 1; c->chunk++, c->before += count) {
        PERI_TRY(chunk_lines(r, c->chunk, &count));
        if (c->before + count >= line) return PERI_OK;
    }
    *known = false;
    return PERI_OK;
}

/** @at: where line @line of the part begins, or the end of the part; @found: the same line, or how many there are. */
static peri_status index_find(peri__lines *r, cursor *c, int64_t line, int64_t *at, int64_t *found)
{
    bool known;
    *at = r->begin;
    *found = 0;
    if (line <= 0) return PERI_OK;
    PERI_TRY(index_move(r, c, line, &known));
    PERI_TRY(skip_lines(r, r->begin + c->chunk * INDEX_CHUNK, line - c->before, at, found));
    *found += c->before;
    return PERI_OK;
}

/** @rows: of the next global batch. */
static peri_status index_rows(peri__lines *r, int64_t *rows)
{
    int64_t at, lines = r->row + r->batch_rows;
    bool known = true;
    if (r->row > 0) PERI_TRY(index_move(r, &r->here, r->row, &known));
    cursor c = r->here;
    PERI_TRY(index_move(r, &c, lines, &known));
    if (!known) PERI_TRY(index_find(r, &c, lines, &at, &lines));
    *rows = peri__max(lines - r->row, 0);
    return PERI_OK;
}

int64_t peri_criteo_index_words(const peri__lines *r)
{
    if (!r) return 0;
    if (r->window.pipe)
        return peri__fail(
            PERI_EINVAL,
            "%s: %s is a pipe: one reader can read it, one line after the other; write it to a file first, or "
            "use "
            "one worker",
            r->window.name, first_path(r));
    if (r->window.in_order) return 0;
    return INDEX_COUNTS + peri__max(peri__ceil_div(r->end - r->begin, INDEX_CHUNK), 1);
}

peri_status peri_criteo_index(const peri__lines *r, int64_t *words)
{
    PERI_NEED(r);
    PERI_NEED(words);
    int64_t n = peri_criteo_index_words(r);
    if (n <= 0) return (peri_status)n;
    words[INDEX_SIZE] = r->window.size;
    words[INDEX_BEGIN] = r->begin;
    words[INDEX_END] = r->end;
    for (int64_t i = INDEX_COUNTS; i < n; i++) words[i] = UNKNOWN;
    return PERI_OK;
}

peri_status peri_criteo_share(peri__lines *r, int64_t *words)
{
    PERI_NEED(r);
    PERI_NEED(words);
    int64_t n = peri_criteo_index_words(r);
    if (n <= 0) return (peri_status)n;
    if (words[INDEX_SIZE] != r->window.size || words[INDEX_BEGIN] != r->begin || words[INDEX_END] != r->end)
        return peri__fail(PERI_EINVAL, "%s: %s has changed since its loader was made: it had %lld bytes, and has %lld",
                          r->window.name, first_path(r), (long long)words[INDEX_SIZE], (long long)r->window.size);
    r->index = words;
    r->chunks = n - INDEX_COUNTS;
    peri_criteo_rewind(r);
    return PERI_OK;
}

/** Convert the lines from @at on into rows [0, @rows) of @b, fewer at the end of the part. @next: the position behind
 *  them, @found: their number. */
static peri_status read_lines(peri__lines *r, int64_t at, int64_t rows, peri_batch *b, int64_t *next, int64_t *found)
{
    int64_t row = 0;
    peri_window *w = &r->window;
    bool more = true;
    PERI_TRY(peri__batch_reserve_rows(b, rows));
    PERI_TRY(r->format->start(r, b, rows));
    peri__window_seek(w, at);
    for (; row < rows && at < part_end(r); row++, r->line++) {
        int64_t limit = peri__min(part_end(r), w->end), searched = at;
        const char *end = NULL;
        while (!(end = memchr(peri__window_at(w, searched), '\n', (size_t)(limit - searched))) && limit < part_end(r) &&
               more) {
            if (limit - at > MAX_LINE) return line_too_long(r, at);
            PERI_TRY(peri__window_more(w, kept(r, at), &more));
            searched = limit;
            limit = peri__min(part_end(r), w->end);
        }
        if (!end && at == limit) break; /* a pipe ended where a line did */
        const char *line = peri__window_at(w, at);
        int64_t length = end ? end - line : limit - at, n = length;
        if (n > 0 && line[n - 1] == '\r') n--;
        PERI_TRY(r->format->convert(r, at, n, b, row));
        at += length + (end != NULL);
    }
    b->rows = row;
    PERI_TRY(r->format->finish(r, b));
    *next = at;
    *found = row;
    return PERI_OK;
}

static peri_status fail_pipe_was_read(const peri__lines *r)
{
    return peri__fail(PERI_EINVAL, "%s: %s is a pipe, which is read once; for more passes write it to a file",
                      r->window.name, first_path(r));
}

/** Read this rank's share of a batch of @lines lines. @found: how many there are, at most so many. */
static peri_status read_share(peri__lines *r, int64_t lines, peri_batch *b, int64_t *next, int64_t *found)
{
    int64_t first, last, n = 0;
    peri_batch_share(lines, r->rank, r->world, &first, &last);
    *next = r->at;
    *found = 0;
    if (first) PERI_TRY(skip_lines(r, *next, first, next, found));
    r->line = r->row + *found;
    PERI_TRY(read_lines(r, *next, last - first, b, next, &n));
    *found += n;
    if (lines > last) {
        PERI_TRY(skip_lines(r, *next, lines - last, next, &n));
        *found += n;
    }
    b->global_row = r->row + first;
    return PERI_OK;
}

/** The next batch, of a reader with an index. */
static peri_status next_indexed(peri__lines *r, peri_batch *b)
{
    int64_t rows, first, last, at, next, found;
    PERI_TRY(index_rows(r, &rows));
    peri_batch_share(rows, r->rank, r->world, &first, &last);
    cursor c = r->here;
    PERI_TRY(index_find(r, &c, r->row + first, &at, &r->line));
    PERI_TRY(read_lines(r, at, last - first, b, &next, &found));
    if (found != last - first)
        return peri__fail(PERI_EIO, "%s: %s has changed while it was read: line %lld is not where it was",
                          r->window.name, first_path(r), (long long)(r->row + first));
    b->global_row = r->row + first;
    b->global_rows = rows;
    r->row += rows;
    return PERI_OK;
}

peri_status peri_criteo_skip(peri__lines *r, int64_t *rows)
{
    PERI_NEED(r);
    PERI_NEED(rows);
    int64_t next = r->at;
    if (r->spent) return fail_pipe_was_read(r);
    PERI_TRY(r->index ? index_rows(r, rows) : skip_lines(r, r->at, r->batch_rows, &next, rows));
    r->row += *rows;
    r->at = next;
    return PERI_OK;
}

peri_status peri_criteo_next(peri__lines *r, peri_batch *b)
{
    PERI_NEED(r);
    PERI_NEED(b);
    PERI_TRY(peri__batch_check(r->window.name, b, r->dense_features, r->sparse_features));
    if (r->spent) return fail_pipe_was_read(r);
    PERI__OWN_FLOATS;
    if (r->index) return next_indexed(r, b);
    /* A whole line has a byte per field: room for more rows than can be there is not made. */
    int64_t lines = peri__min(r->batch_rows - 1, (part_end(r) - r->at) / r->fields) + 1, next, found;
    PERI_TRY(read_share(r, lines, b, &next, &found));
    if (found < lines && r->world > 1) PERI_TRY(read_share(r, found, b, &next, &found));
    b->global_rows = found;
    r->row += found;
    r->at = next;
    return PERI_OK;
}

void peri_criteo_rewind(peri__lines *r)
{
    if (!r) return;
    r->spent = r->window.pipe && r->at > r->begin;
    r->at = r->begin;
    r->row = 0;
    r->here = (cursor){0, 0};
}

int64_t peri_criteo_count(peri__lines *r)
{
    if (!r) return 0;
    PERI__NOT_AT_BORDER;
    int64_t lines, next;
    if (r->window.pipe)
        return peri__fail(PERI_EINVAL, "%s: %s is a pipe, whose lines are not known; write it to a file",
                          r->window.name, first_path(r));
    if (r->window.in_order) {
        PERI_TRY(peri__window_count(&r->window, &lines));
        return lines;
    }
    PERI_TRY(skip_lines(r, r->begin, INT64_MAX, &next, &lines));
    return lines;
}

/* -- messages ------------------------------------------------------------------------------------------------------ */

/** Number in its file, from 1, of the line that begins at @at, which is being read. */
static int64_t line_number(const peri__lines *r, int64_t at)
{
    return r->window.pipe ? 1 + r->line : peri__window_line(&r->window, at);
}

enum { SHOWN = 41 };

/** The first of @n bytes as they can be printed, @other for those that cannot. */
static void show(char *shown, const char *p, int64_t n, char other)
{
    int64_t length = peri__min(n, SHOWN - 1);
    for (int64_t i = 0; i < length; i++) shown[i] = p[i] >= ' ' && p[i] < 127 ? p[i] : other;
    shown[length] = 0;
}

peri_status peri__lines_bad_field(const peri__lines *r, int64_t line, int32_t column, const char *what, const char *p,
                                  int64_t n, const char *wanted)
{
    char shown[SHOWN];
    show(shown, p, n, '?');
    return peri__fail(PERI_EFORMAT, "%s: %s:%lld: column %d (%s) is '%s%s', allowed: %s", r->window.name,
                      peri__window_file(&r->window, line)->path, (long long)line_number(r, line), column, what, shown,
                      n >= SHOWN ? "..." : "", wanted);
}

peri_status peri__lines_bad_count(const peri__lines *r, int64_t line, int64_t n, int32_t found, const char *wanted)
{
    char shown[SHOWN];
    show(shown, peri__window_at(&r->window, line), n, ' ');
    if (n == 0)
        return peri__fail(PERI_EFORMAT, "%s: %s:%lld: the line is empty, wanted columns: %s", r->window.name,
                          peri__window_file(&r->window, line)->path, (long long)line_number(r, line), wanted);
    return peri__fail(PERI_EFORMAT, "%s: %s:%lld: %s%d columns, wanted %s: '%s%s'", r->window.name,
                      peri__window_file(&r->window, line)->path, (long long)line_number(r, line),
                      found > r->fields ? "more than " : "", found > r->fields ? r->fields : found, wanted, shown,
                      n >= SHOWN ? "..." : "");
}

/* -- opening ------------------------------------------------------------------------------------------------------- */

static peri_status check_config(const char *f, const peri__lines_config *o)
{
    for (int32_t i = 0; i < o->n_paths; i++)
        if (!o->paths[i]) return peri__fail(PERI_EINVAL, "%s: no path", f);
    if (o->n_paths < 1) return peri__fail(PERI_EINVAL, "%s: no path", f);
    if (o->dense_features < 0 || o->dense_features > IO_MAX_FEATURES || o->sparse_features < 0 ||
        o->sparse_features > IO_MAX_FEATURES)
        return peri__fail(PERI_EINVAL, "%s: %d dense and %d sparse features, allowed: 0..%d", f, o->dense_features,
                          o->sparse_features, IO_MAX_FEATURES);
    if (o->world < 1 || o->rank < 0 || o->rank >= o->world)
        return peri__fail(PERI_EINVAL, "%s: rank %d of %d, allowed: 0 to world - 1", f, o->rank, o->world);
    if (o->batch_rows < 1 || o->batch_rows > IO_MAX_ROWS)
        return peri__fail(PERI_EINVAL, "%s: a batch of %lld rows, allowed: 1..2^31", f, (long long)o->batch_rows);
    if (!(o->begin >= 0 && o->begin <= o->end && o->end <= 1))
        return peri__fail(PERI_EINVAL, "%s: the part from %g to %g, allowed: 0 <= begin <= end <= 1", f, o->begin,
                          o->end);
    return PERI_OK;
}

/** A pipe is read once, from its start to its end, by one reader; a packed text as a whole. */
static peri_status check_order(const peri__lines *r, const peri__lines_config *o)
{
    bool whole = o->begin == 0 && o->end == 1;
    if (!r->window.in_order || (whole && (!r->window.pipe || o->world == 1))) return PERI_OK;
    if (r->window.pipe)
        return peri__fail(
            PERI_EINVAL,
            "%s: %s is a pipe (no regular file): one rank can read it, once, as a whole; wanted: %g to %g of "
            "it on "
            "rank %d of %d; write it to a file first",
            r->window.name, first_path(r), o->begin, o->end, o->rank, o->world);
    return peri__fail(
        PERI_EINVAL,
        "%s: %s (or a file beside it) is packed by gzip, so its size is not known, and it is read as a whole; "
        "wanted: "
        "%g to %g of it; unpack it first (gunzip), or keep the parts in files of their own",
        r->window.name, first_path(r), o->begin, o->end);
}

peri_status peri__lines_open(peri__lines *r, const peri__lines_config *given)
{
    const char *name = r->window.name;
    peri__lines_config now = *given;
    const peri__lines_config *const o = &now;
    if (now.world == 0) now.world = 1;
    if (now.begin == 0 && now.end == 0) now.end = 1;
    PERI_TRY(check_config(name, o));
    r->window.fd = -1;
    r->dense_features = o->dense_features;
    r->sparse_features = o->sparse_features;
    r->fields = o->fields;
    r->rank = o->rank;
    r->world = o->world;
    r->batch_rows = o->batch_rows;
    peri_window_file *files = peri__alloc_zero(sizeof *files * (size_t)o->n_paths);
    if (!files) return PERI_ENOMEM;
    r->window.files = files;
    r->window.n_files = o->n_paths;
    for (int32_t i = 0; i < o->n_paths; i++)
        if (!(files[i].path = peri__strdup(o->paths[i]))) return PERI_ENOMEM;
    if (o->text) peri__window_memory(&r->window, files, o->text, o->size);
    else PERI_TRY(peri__window_open(&r->window, files, o->n_paths, o->header));
    PERI_TRY(check_order(r, o));
    r->end = r->window.size;
    if (!r->window.in_order) PERI_TRY(line_start(r, (int64_t)((double)r->window.size * o->begin), &r->begin));
    if (o->end < 1) PERI_TRY(line_start(r, (int64_t)((double)r->window.size * o->end), &r->end));
    peri_criteo_rewind(r);
    return PERI_OK;
}

static void lines_close(peri__lines *r)
{
    peri__window_close(&r->window);
    for (int32_t i = 0; i < r->window.n_files; i++) peri__free((void *)r->window.files[i].path);
    peri__free(r->window.files);
    r->window.files = NULL;
}

void peri_criteo_release(peri_criteo *r)
{
    if (!r || peri__border_refuses(__func__)) return;
    int saved = errno;
    lines_close(r);
    peri__object_count(-1);
    r->format->release(r);
    errno = saved;
}
