/* SPDX-License-Identifier: Apache-2.0
 *
 * criteo.c: lines "label TAB integers TAB hexadecimal categories" -> batches.
 *
 * The text comes chunk by chunk, and is used while it is in the cache. Of other ranks' lines the ends are counted; this rank's are cut at
 * their tabs, 64 bytes at a time, and their fields converted. A batch is taken to be full; one that ends too early, the last of its part,
 * is read again, now that its lines, and so this rank's share, are known.
 */
#include "window.h"

#include <errno.h>
#include <stdio.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { LOG_TABLE = 1024, MAX_LINE = 1 << 20 };
/* Of an index: bytes whose line ends are counted together; how far readers count ahead for each other; its first words. */
enum { INDEX_CHUNK = 1 << 18, INDEX_AHEAD = 256, INDEX_SIZE = 0, INDEX_BEGIN = 1, INDEX_END = 2, INDEX_COUNTS = 3 };
enum { UNKNOWN = -1, CLAIMED = -2 }; /* counts: nobody has counted; somebody counts */

/** A place in an index: a chunk, and the line ends of the part in front of it. */
typedef struct cursor {
    int64_t chunk, before;
} cursor;

struct peri_criteo {
    char *path;
    peri_window window; /* the file, or the part of it that is in memory */
    int64_t begin, end; /* the part: offsets of line starts; of a pipe 0 and INT64_MAX */
    int64_t at;         /* start of the next global batch */
    int64_t row;        /* its number in the part */
    int64_t line;       /* number in the part of the line that is being read, for messages */
    bool spent;         /* a pipe that was to be read again */
    int32_t dense_features, sparse_features, fields;
    int32_t dense, ids, missing, rank, world;
    int64_t batch_rows;
    uint64_t *modulus, *reciprocal; /* [sparse_features] what ids are taken modulo, and floor((2^64 - 1) / it) */
    uint32_t *field_ends; /* [fields] offsets in the current line */
    float log_table[LOG_TABLE];
    int64_t *index; /* words of peri_criteo_share, or NULL */
    int64_t chunks;
    cursor here; /* not behind line `row` */
};

/* -- searching the text ---------------------------------------------------------------------------------------------------------- */

/** Bit i: p[i] == byte, for 64 readable bytes. */
static inline uint64_t match_block(const char *p, char byte)
{
#if defined(__SSE2__)
    __m128i wanted = _mm_set1_epi8(byte);
    uint64_t mask = 0;
    for (int i = 0; i < 4; i++) {
        __m128i v = _mm_loadu_si128((const __m128i *)(p + 16 * i));
        mask |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(v, wanted)) << (16 * i);
    }
    return mask;
#else
    uint64_t mask = 0;
    for (int i = 0; i < 64; i++) mask |= (uint64_t)(p[i] == byte) << i;
    return mask;
#endif
}

/** The same for the first @n < 64 bytes only. */
static uint64_t match_part(const char *p, int64_t n, char byte)
{
    uint64_t mask = 0;
    for (int64_t i = 0; i < n; i++) mask |= (uint64_t)(p[i] == byte) << i;
    return mask;
}

/** End of the part; of a pipe, as soon as it is known. */
static int64_t part_end(const peri_criteo *r) { return peri__min(r->end, r->window.size); }

static peri_status line_too_long(const peri_criteo *r, int64_t at)
{
    return peri__fail(PERI_EFORMAT, "peri_criteo_next: %s: byte %lld: a line of more than %d bytes; is this a file of lines?", r->path,
                      (long long)at, MAX_LINE);
}

/** What must stay in memory while the text from @at on is read: of a pipe the whole batch, which may have to be read again. */
static int64_t kept(const peri_criteo *r, int64_t at) { return r->window.pipe ? r->at : at; }

/** @next: the position behind the @wanted-th line end (>= 1) after @at; if there are fewer, the end of the part. @found gets the number of
 *  lines: a last line without an end counts. */
static peri_status skip_lines(peri_criteo *r, int64_t at, int64_t wanted, int64_t *next, int64_t *found)
{
    peri_window *w = &r->window;
    int64_t lines = 0, i = at, line = at, before = 0; /* line: a place in the current line, or a chunk earlier */
    bool more = true;
    peri__window_seek(w, at);
    while (more && i < part_end(r)) {
        int64_t limit = peri__min(part_end(r), w->end);
        for (; i < limit; i = peri__min(i + 64, limit)) {
            const char *p = peri__window_at(w, i);
            uint64_t mask = limit - i >= 64 ? match_block(p, '\n') : match_part(p, limit - i, '\n');
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
static peri_status line_start(peri_criteo *r, int64_t at, int64_t *start)
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

/* -- an index of lines that several readers share ------------------------------------------------------------------------------------ */

/** Count the line ends of a chunk that this reader has claimed, and let all know. */
static peri_status count_chunk(peri_criteo *r, int64_t chunk, int64_t *count)
{
    char text[1 << 16];
    int64_t at = r->begin + chunk * INDEX_CHUNK, end = peri__min(at + INDEX_CHUNK, r->end), lines = 0;
    peri_status status = PERI_OK;
    while (at < end && status >= 0) {
        int64_t n = peri__min((int64_t)sizeof text, end - at), i = 0;
        status = peri__window_read(&r->window, text, n, at);
        if (status < 0) break;
        for (; i + 64 <= n; i += 64) lines += __builtin_popcountll(match_block(text + i, '\n'));
        lines += __builtin_popcountll(match_part(text + i, n - i, '\n'));
        at += n;
    }
    __atomic_store_n(&r->index[INDEX_COUNTS + chunk], status < 0 ? UNKNOWN : lines, __ATOMIC_RELEASE);
    *count = lines;
    return status;
}

static bool claim(peri_criteo *r, int64_t chunk)
{
    int64_t unknown = UNKNOWN;
    return __atomic_compare_exchange_n(&r->index[INDEX_COUNTS + chunk], &unknown, CLAIMED, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

/** Line ends of a chunk. While another reader counts it, this one counts those that will be asked for next. */
static peri_status chunk_lines(peri_criteo *r, int64_t chunk, int64_t *count)
{
    int64_t ahead = chunk + 1, last = peri__min(chunk + INDEX_AHEAD, r->chunks), unused;
    for (int64_t round = 0;; round++) {
        *count = __atomic_load_n(&r->index[INDEX_COUNTS + chunk], __ATOMIC_ACQUIRE);
        if (*count >= 0) return PERI_OK;
        if (*count == UNKNOWN && claim(r, chunk)) return count_chunk(r, chunk, count);
        while (ahead < last && !claim(r, ahead)) ahead++;
        if (ahead < last) PERI_TRY(count_chunk(r, ahead, &unused));
        else peri_pause(round);
    }
}

/** Move @c to the chunk that has the end in front of line @line (> 0) of the part, or to the last one. @known: it has. */
static peri_status index_move(peri_criteo *r, cursor *c, int64_t line, bool *known)
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
static peri_status index_find(peri_criteo *r, cursor *c, int64_t line, int64_t *at, int64_t *found)
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
static peri_status index_rows(peri_criteo *r, int64_t *rows)
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

int64_t peri_criteo_index_words(const peri_criteo *r)
{
    if (!r) return 0;
    if (r->window.pipe)
        return peri__fail(PERI_EINVAL, "peri_criteo_index_words: %s is a pipe: one reader can read it, one after the other; write it to a "
                          "file first, or use one worker", r->path);
    return INDEX_COUNTS + peri__max(peri__ceil_div(r->end - r->begin, INDEX_CHUNK), 1);
}

peri_status peri_criteo_index(const peri_criteo *r, int64_t *words)
{
    PERI_NEED(r);
    PERI_NEED(words);
    int64_t n = peri_criteo_index_words(r);
    if (n < 0) return (peri_status)n;
    words[INDEX_SIZE] = r->window.size;
    words[INDEX_BEGIN] = r->begin;
    words[INDEX_END] = r->end;
    for (int64_t i = INDEX_COUNTS; i < n; i++) words[i] = UNKNOWN;
    return PERI_OK;
}

peri_status peri_criteo_share(peri_criteo *r, int64_t *words)
{
    PERI_NEED(r);
    PERI_NEED(words);
    int64_t n = peri_criteo_index_words(r);
    if (n < 0) return (peri_status)n;
    if (words[INDEX_SIZE] != r->window.size || words[INDEX_BEGIN] != r->begin || words[INDEX_END] != r->end)
        return peri__fail(PERI_EINVAL, "peri_criteo_share: %s has changed since its loader was made: it had %lld bytes, and has %lld",
                          r->path, (long long)words[INDEX_SIZE], (long long)r->window.size);
    r->index = words;
    r->chunks = n - INDEX_COUNTS;
    peri_criteo_rewind(r);
    return PERI_OK;
}

/* -- messages ---------------------------------------------------------------------------------------------------------------------- */

/** Number in the file, from 1, of the line that is being read. */
static int64_t line_number(const peri_criteo *r)
{
    return 1 + r->line + (r->begin ? peri__window_line_ends(&r->window, r->begin) : 0);
}

/** Column @field of the current line is wrong. */
static peri_status bad_field(const peri_criteo *r, int32_t field, const char *p, int64_t n, const char *wanted)
{
    char shown[41];
    int64_t length = peri__min(n, (int64_t)sizeof shown - 1);
    for (int64_t i = 0; i < length; i++) shown[i] = p[i] >= ' ' && p[i] < 127 ? p[i] : '?';
    shown[length] = 0;
    char what[32];
    if (field == 0) snprintf(what, sizeof what, "label");
    else if (field <= r->dense_features) snprintf(what, sizeof what, "integer %d", field);
    else snprintf(what, sizeof what, "category %d", field - r->dense_features);
    return peri__fail(PERI_EFORMAT, "peri_criteo_next: %s:%lld: column %d (%s) is '%s%s', allowed: %s", r->path, (long long)line_number(r),
                      field + 1, what, shown, n > length ? "..." : "", wanted);
}

static peri_status bad_count(const peri_criteo *r, int64_t line, int64_t n, int32_t found)
{
    char shown[41];
    int64_t length = peri__min(n, (int64_t)sizeof shown - 1);
    const char *p = peri__window_at(&r->window, line);
    for (int64_t i = 0; i < length; i++) shown[i] = p[i] >= ' ' && p[i] < 127 ? p[i] : ' ';
    shown[length] = 0;
    return peri__fail(PERI_EFORMAT, "peri_criteo_next: %s:%lld: %s%d columns, wanted %d (a label, %d integers, %d categories): '%s%s'",
                      r->path, (long long)line_number(r), found > r->fields ? "more than " : "", found > r->fields ? r->fields : found,
                      r->fields, r->dense_features, r->sparse_features, shown, n > length ? "..." : "");
}

/* -- converting fields ------------------------------------------------------------------------------------------------------------- */

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

/** Decimal with an optional minus; false unless it is one of 1 to 18 digits. @before bytes in front of @p are readable. */
static inline bool parse_integer(const char *p, int64_t n, int64_t before, int64_t *out)
{
    bool minus = *p == '-';
    p += minus;
    n -= minus;
    int64_t x = 0;
    if (n >= 1 && n <= 8 && before + n >= 8) {
        /* The 8 bytes that end with the number, those in front of it cleared, one digit per byte; then pairs, fours, eights. */
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

static inline float transform(const peri_criteo *r, int64_t x)
{
    if (r->dense == PERI_DENSE_RAW) return (float)x;
    int64_t size = r->dense == PERI_DENSE_SIGNED_LOG && x < 0 ? -x : x;
    float y = size >= 0 && size < LOG_TABLE ? r->log_table[size] : peri__dense_log(size);
    return x < 0 && r->dense == PERI_DENSE_SIGNED_LOG ? -y : y;
}

/** x mod n without a division: the quotient from the reciprocal (Barrett) is at most 2 too small. */
static inline uint64_t modulo(uint64_t x, uint64_t n, uint64_t reciprocal)
{
    uint64_t quotient = (uint64_t)((__extension__(unsigned __int128) x * reciprocal) >> 64), rest = x - quotient * n;
    rest -= n & (0 - (uint64_t)(rest >= n)); /* no branch: it would be a coin toss */
    return rest - (n & (0 - (uint64_t)(rest >= n)));
}

static inline int64_t place_id(const peri_criteo *r, uint64_t x, int32_t feature)
{
    if (r->ids == PERI_IDS_HASH) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        x = __builtin_bswap64(x);
#endif
        x = XXH3_64bits(&x, sizeof x);
    }
    return (int64_t)modulo(x, r->modulus[feature], r->reciprocal[feature]) + (r->missing == PERI_MISSING_ZERO);
}

/* -- lines ------------------------------------------------------------------------------------------------------------------------- */

/** Cut the line [at, at + n) at its tabs. */
static peri_status cut(peri_criteo *r, int64_t at, int64_t n)
{
    const char *p = peri__window_at(&r->window, at);
    int32_t fields = 0;
    for (int64_t i = 0; i < n; i += 64) {
        uint64_t mask;
        if (r->window.end - at - i >= 64) {
            mask = match_block(p + i, '\t');
            if (n - i < 64) mask &= ((uint64_t)1 << (n - i)) - 1;
        } else mask = match_part(p + i, n - i, '\t');
        for (; mask; mask &= mask - 1) {
            if (fields == r->fields - 1) return bad_count(r, at, n, r->fields + 1);
            r->field_ends[fields++] = (uint32_t)(i + __builtin_ctzll(mask));
        }
    }
    r->field_ends[fields++] = (uint32_t)n;
    return fields == r->fields ? PERI_OK : bad_count(r, at, n, fields);
}

/** Convert the line into row @row; category f goes to ids[f * stride]. */
static peri_status parse_line(peri_criteo *r, int64_t at, int64_t n, peri_batch *b, int64_t row, int64_t *ids, int64_t stride)
{
    const char *p = peri__window_at(&r->window, at);
    int64_t before = at - r->window.begin; /* bytes in front of it that are readable */
    if (n > UINT32_MAX) return bad_count(r, at, n, 0);
    PERI_TRY(cut(r, at, n));
    const uint32_t *ends = r->field_ends;
    if (ends[0] != 1 || (*p != '0' && *p != '1')) return bad_field(r, 0, p, ends[0], "0, 1");
    b->labels[row] = *p == '1';
    float *dense = b->dense + row * r->dense_features;
    uint32_t start = ends[0] + 1;
    for (int32_t f = 0; f < r->dense_features; f++) {
        uint32_t end = ends[f + 1];
        int64_t x = 0;
        if (end > start && !parse_integer(p + start, end - start, before + start, &x))
            return bad_field(r, f + 1, p + start, end - start, "empty, or a decimal number of at most 18 digits");
        dense[f] = transform(r, x);
        start = end + 1;
    }
    for (int32_t f = 0; f < r->sparse_features; f++) {
        uint32_t end = ends[r->dense_features + f + 1];
        uint64_t x = 0;
        bool present = end > start;
        if (present && !parse_hex(p + start, end - start, &x))
            return bad_field(r, r->dense_features + f + 1, p + start, end - start, "empty, or 1 to 16 hexadecimal digits");
        ids[f * stride] = present ? place_id(r, x, f) : r->missing == PERI_MISSING_ZERO ? 0 : -1;
        start = end + 1;
    }
    return PERI_OK;
}

/** Close the gaps that missing categories left: from [feature, stride] with -1 for none to key-major ids and lengths. */
static void compact(peri_batch *b, int64_t stride)
{
    int64_t n = 0;
    for (int32_t f = 0; f < b->sparse_features; f++) {
        const int64_t *from = b->values + f * stride;
        int32_t *lengths = b->lengths + f * b->rows;
        for (int64_t i = 0; i < b->rows; i++) {
            int64_t id = from[i];
            lengths[i] = id >= 0;
            b->values[n] = id; /* n <= f * stride + i: what is overwritten was read */
            n += id >= 0;
        }
    }
    b->ids = n;
}

/** Convert the lines from @at on into rows [0, @rows) of @b, fewer at the end of the part. @next: the position behind them, @found: their
 *  number. */
static peri_status read_lines(peri_criteo *r, int64_t at, int64_t rows, peri_batch *b, int64_t *next, int64_t *found)
{
    /* One more cache line per feature: equal powers of two would put all features' rows into the same sets of the cache. */
    int64_t stride = rows + 8, row = 0;
    peri_window *w = &r->window;
    bool more = true;
    PERI_TRY(peri__batch_reserve_rows(b, rows));
    PERI_TRY(peri_batch_reserve(b, stride * r->sparse_features));
    peri__window_seek(w, at);
    for (; row < rows && at < part_end(r); row++, r->line++) {
        int64_t limit = peri__min(part_end(r), w->end), searched = at;
        const char *end = NULL;
        while (!(end = memchr(peri__window_at(w, searched), '\n', (size_t)(limit - searched))) && limit < part_end(r) && more) {
            if (limit - at > MAX_LINE) return line_too_long(r, at);
            PERI_TRY(peri__window_more(w, kept(r, at), &more));
            searched = limit;
            limit = peri__min(part_end(r), w->end);
        }
        if (!end && at == limit) break; /* a pipe ended where a line did */
        const char *line = peri__window_at(w, at);
        int64_t length = end ? end - line : limit - at, n = length;
        if (n > 0 && line[n - 1] == '\r') n--;
        PERI_TRY(parse_line(r, at, n, b, row, b->values + row, stride));
        at += length + (end != NULL);
    }
    b->rows = row;
    compact(b, stride);
    *next = at;
    *found = row;
    return PERI_OK;
}

static peri_status spent(const peri_criteo *r)
{
    return peri__fail(PERI_EINVAL, "peri_criteo_next: %s is a pipe, which is read once; for more passes write it to a file", r->path);
}

/** Read this rank's share of a batch of @lines lines. @found: how many there are, at most so many. */
static peri_status read_share(peri_criteo *r, int64_t lines, peri_batch *b, int64_t *next, int64_t *found)
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
static peri_status next_indexed(peri_criteo *r, peri_batch *b)
{
    int64_t rows, first, last, at, next, found;
    PERI_TRY(index_rows(r, &rows));
    peri_batch_share(rows, r->rank, r->world, &first, &last);
    cursor c = r->here;
    PERI_TRY(index_find(r, &c, r->row + first, &at, &r->line));
    PERI_TRY(read_lines(r, at, last - first, b, &next, &found));
    if (found != last - first)
        return peri__fail(PERI_EIO, "peri_criteo_next: %s has changed while it was read: line %lld is not where it was", r->path,
                          (long long)(r->row + first));
    b->global_row = r->row + first;
    b->global_rows = rows;
    r->row += rows;
    return PERI_OK;
}

peri_status peri_criteo_skip(peri_criteo *r, int64_t *rows)
{
    PERI_NEED(r);
    PERI_NEED(rows);
    int64_t next = r->at;
    if (r->spent) return spent(r);
    PERI_TRY(r->index ? index_rows(r, rows) : skip_lines(r, r->at, r->batch_rows, &next, rows));
    r->row += *rows;
    r->at = next;
    return PERI_OK;
}

peri_status peri_criteo_next(peri_criteo *r, peri_batch *b)
{
    PERI_NEED(r);
    PERI_NEED(b);
    PERI_TRY(peri__batch_check("peri_criteo_next", b, r->dense_features, r->sparse_features));
    if (r->spent) return spent(r);
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

void peri_criteo_rewind(peri_criteo *r)
{
    if (!r) return;
    r->spent = r->window.pipe && r->at > r->begin;
    r->at = r->begin;
    r->row = 0;
    r->here = (cursor){0, 0};
}

int64_t peri_criteo_count(peri_criteo *r)
{
    if (!r) return 0;
    int64_t lines, next;
    if (r->window.pipe)
        return peri__fail(PERI_EINVAL, "peri_criteo_count: %s is a pipe, whose lines are not known; write it to a file", r->path);
    PERI_TRY(skip_lines(r, r->begin, INT64_MAX, &next, &lines));
    return lines;
}

/* -- opening ----------------------------------------------------------------------------------------------------------------------- */

static peri_status check_options(const peri_criteo_config *o)
{
    const char *f = "peri_criteo_open";
    if (!o->path) return peri__fail(PERI_EINVAL, "%s: no path", f);
    if (o->dense_features < 0 || o->dense_features > IO_MAX_FEATURES || o->sparse_features < 0 || o->sparse_features > IO_MAX_FEATURES)
        return peri__fail(PERI_EINVAL, "%s: %d integers and %d categories, allowed: 0..%d", f, o->dense_features, o->sparse_features,
                          IO_MAX_FEATURES);
    if (o->dense < PERI_DENSE_RAW || o->dense > PERI_DENSE_SIGNED_LOG)
        return peri__fail(PERI_EINVAL, "%s: dense = %d, allowed: PERI_DENSE_RAW, PERI_DENSE_LOG, PERI_DENSE_SIGNED_LOG", f, o->dense);
    if (o->ids != PERI_IDS_HASH && o->ids != PERI_IDS_MOD)
        return peri__fail(PERI_EINVAL, "%s: ids = %d, allowed: PERI_IDS_HASH, PERI_IDS_MOD", f, o->ids);
    if (o->missing != PERI_MISSING_EMPTY && o->missing != PERI_MISSING_ZERO)
        return peri__fail(PERI_EINVAL, "%s: missing = %d, allowed: PERI_MISSING_EMPTY, PERI_MISSING_ZERO", f, o->missing);
    if (o->world < 1 || o->rank < 0 || o->rank >= o->world)
        return peri__fail(PERI_EINVAL, "%s: rank %d of %d", f, o->rank, o->world);
    if (o->batch_rows < 1 || o->batch_rows > IO_MAX_ROWS)
        return peri__fail(PERI_EINVAL, "%s: a batch of %lld rows, allowed: 1..2^31", f, (long long)o->batch_rows);
    if (!(o->begin >= 0 && o->begin <= o->end && o->end <= 1))
        return peri__fail(PERI_EINVAL, "%s: the part from %g to %g, allowed: 0 <= begin <= end <= 1", f, o->begin, o->end);
    int64_t least = o->missing == PERI_MISSING_ZERO ? 2 : 1;
    for (int32_t i = 0; i < o->sparse_features; i++)
        if (o->table_rows[i] < least)
            return peri__fail(PERI_EINVAL, "%s: the table of category %d has %lld rows, allowed: %lld or more", f, i + 1,
                              (long long)o->table_rows[i], (long long)least);
    return PERI_OK;
}

/** A pipe is read once, from its start to its end, by one reader. */
static peri_status check_pipe(const peri_criteo *r, const peri_criteo_config *o)
{
    if (!r->window.pipe || (o->world == 1 && o->begin == 0 && o->end == 1)) return PERI_OK;
    return peri__fail(PERI_EINVAL, "peri_criteo_open: %s is a pipe (no regular file): one rank can read it, once, as a whole; wanted: "
                      "%g to %g of it on rank %d of %d; write it to a file first", r->path, o->begin, o->end, o->rank, o->world);
}

/** @text NULL: open the file. */
static peri_status open_reader(const peri_criteo_config *o, const char *text, int64_t size, peri_criteo **out)
{
    PERI_TRY(check_options(o));
    peri_criteo *r = peri__alloc_zero(sizeof *r);
    if (!r) return PERI_ENOMEM;
    peri__object_count(1);
    peri_status status = PERI_ENOMEM;
    r->dense_features = o->dense_features;
    r->sparse_features = o->sparse_features;
    r->fields = 1 + o->dense_features + o->sparse_features;
    r->dense = o->dense;
    r->ids = o->ids;
    r->missing = o->missing;
    r->rank = o->rank;
    r->world = o->world;
    r->batch_rows = o->batch_rows;
    peri__window_memory(&r->window, text, size);
    r->path = peri__strdup(o->path);
    r->modulus = peri__alloc(sizeof *r->modulus * (size_t)peri__max(o->sparse_features, 1));
    r->reciprocal = peri__alloc(sizeof *r->reciprocal * (size_t)peri__max(o->sparse_features, 1));
    r->field_ends = peri__alloc(sizeof *r->field_ends * (size_t)r->fields);
    if (!r->path || !r->modulus || !r->reciprocal || !r->field_ends) goto out;
    for (int32_t f = 0; f < o->sparse_features; f++) {
        r->modulus[f] = (uint64_t)(o->table_rows[f] - (o->missing == PERI_MISSING_ZERO));
        r->reciprocal[f] = UINT64_MAX / r->modulus[f];
    }
    if (!text) PERI_TRY_GOTO(peri__window_open(&r->window, r->path), out);
    PERI_TRY_GOTO(check_pipe(r, o), out);
    for (int64_t i = 0; i < LOG_TABLE; i++) r->log_table[i] = peri__dense_log(i);
    PERI_TRY_GOTO(line_start(r, (int64_t)((double)r->window.size * o->begin), &r->begin), out);
    r->end = r->window.size;
    if (o->end < 1) PERI_TRY_GOTO(line_start(r, (int64_t)((double)r->window.size * o->end), &r->end), out);
    peri_criteo_rewind(r);
    *out = r;
    status = PERI_OK;
out:
    if (status < 0) peri_criteo_release(r);
    return status;
}

peri_status peri_criteo_open(const peri_criteo_config *options, peri_criteo **out)
{
    PERI_TAKE(peri_criteo_config, options);
    PERI_NEED(out);
    return open_reader(options, NULL, 0, out);
}

peri_status peri_criteo_open_memory(const peri_criteo_config *options, const char *text, int64_t size, peri_criteo **out)
{
    PERI_TAKE(peri_criteo_config, options);
    if (!text || size < 0) return peri__fail(PERI_EINVAL, "peri_criteo_open_memory: no text, or %lld bytes of it", (long long)size);
    return open_reader(options, text, size, out);
}

void peri_criteo_release(peri_criteo *r)
{
    if (!r) return;
    int saved = errno;
    peri__window_close(&r->window);
    peri__free(r->path);
    peri__free(r->modulus);
    peri__free(r->reciprocal);
    peri__free(r->field_ends);
    peri__object_count(-1);
    peri__free(r);
    errno = saved;
}
