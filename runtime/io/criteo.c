/* SPDX-License-Identifier: Apache-2.0
 *
 * criteo.c: lines "label TAB integers TAB hexadecimal categories" -> batches.
 *
 * A global batch is read in two passes over the mapped text: the first finds the line ends and so this rank's share of the lines, the
 * second, over that share (by then in the cache), cuts each line at its tabs, 64 bytes at a time, and converts the fields. Other ranks'
 * lines cost the first pass only, which runs at the speed of memory.
 */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { LOG_TABLE = 1024 };

struct peri_criteo {
    char *path;
    const char *text; /* the file */
    int64_t size;
    bool mapped;
    int64_t begin, end; /* the part: offsets of line starts */
    int64_t at;         /* start of the next global batch */
    int64_t row;        /* its number in the part */
    int32_t dense_features, sparse_features, fields;
    int32_t dense, ids, missing, rank, world;
    int64_t batch_rows;
    uint64_t *modulus, *reciprocal; /* [sparse_features] what ids are taken modulo, and floor((2^64 - 1) / it) */
    uint32_t *field_ends; /* [fields] offsets in the current line */
    float log_table[LOG_TABLE];
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

/** Position behind the @wanted-th line end (>= 1) after @at; if there are fewer, the end of the part. @found gets the number of lines:
 *  a last line without an end counts. */
static int64_t skip_lines(const peri_criteo *r, int64_t at, int64_t wanted, int64_t *found)
{
    int64_t lines = 0;
    for (int64_t i = at; i < r->end && lines < wanted; i += 64) {
        uint64_t mask = r->end - i >= 64 ? match_block(r->text + i, '\n') : match_part(r->text + i, r->end - i, '\n');
        int64_t here = __builtin_popcountll(mask);
        if (lines + here < wanted) {
            lines += here;
            continue;
        }
        while (++lines < wanted) mask &= mask - 1;
        *found = wanted;
        return i + __builtin_ctzll(mask) + 1;
    }
    if (lines < wanted && at < r->end && r->text[r->end - 1] != '\n') lines++;
    *found = lines;
    return r->end;
}

/** Start of the first line that starts at or behind @at. */
static int64_t line_start(const peri_criteo *r, int64_t at)
{
    if (at <= 0) return 0;
    if (at >= r->size) return r->size;
    const char *p = memchr(r->text + at - 1, '\n', (size_t)(r->size - at + 1));
    return p ? p + 1 - r->text : r->size;
}

/* -- messages ---------------------------------------------------------------------------------------------------------------------- */

/** Column @field of the line at @line is wrong. */
static peri_status bad_field(const peri_criteo *r, int64_t line, int32_t field, const char *p, int64_t n, const char *wanted)
{
    int64_t number = 1;
    for (const char *c = r->text; (c = memchr(c, '\n', (size_t)(r->text + line - c))); c++) number++;
    char shown[41];
    int64_t length = peri__min(n, (int64_t)sizeof shown - 1);
    for (int64_t i = 0; i < length; i++) shown[i] = p[i] >= ' ' && p[i] < 127 ? p[i] : '?';
    shown[length] = 0;
    char what[32];
    if (field == 0) snprintf(what, sizeof what, "label");
    else if (field <= r->dense_features) snprintf(what, sizeof what, "integer %d", field);
    else snprintf(what, sizeof what, "category %d", field - r->dense_features);
    return peri__fail(PERI_EFORMAT, "peri_criteo_next: %s:%lld: column %d (%s) is '%s%s', allowed: %s", r->path, (long long)number,
                      field + 1, what, shown, n > length ? "..." : "", wanted);
}

static peri_status bad_count(const peri_criteo *r, int64_t line, int64_t n, int32_t found)
{
    int64_t number = 1;
    for (const char *c = r->text; (c = memchr(c, '\n', (size_t)(r->text + line - c))); c++) number++;
    char shown[41];
    int64_t length = peri__min(n, (int64_t)sizeof shown - 1);
    for (int64_t i = 0; i < length; i++) shown[i] = r->text[line + i] >= ' ' && r->text[line + i] < 127 ? r->text[line + i] : ' ';
    shown[length] = 0;
    return peri__fail(PERI_EFORMAT, "peri_criteo_next: %s:%lld: %s%d columns, wanted %d (a label, %d integers, %d categories): '%s%s'",
                      r->path, (long long)number, found > r->fields ? "more than " : "", found > r->fields ? r->fields : found, r->fields,
                      r->dense_features, r->sparse_features, shown, n > length ? "..." : "");
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
    const char *p = r->text + at;
    int32_t fields = 0;
    for (int64_t i = 0; i < n; i += 64) {
        uint64_t mask;
        if (r->size - at - i >= 64) {
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
    const char *p = r->text + at;
    if (n > UINT32_MAX) return bad_count(r, at, n, 0);
    PERI_TRY(cut(r, at, n));
    const uint32_t *ends = r->field_ends;
    if (ends[0] != 1 || (*p != '0' && *p != '1')) return bad_field(r, at, 0, p, ends[0], "0, 1");
    b->labels[row] = *p == '1';
    float *dense = b->dense + row * r->dense_features;
    uint32_t start = ends[0] + 1;
    for (int32_t f = 0; f < r->dense_features; f++) {
        uint32_t end = ends[f + 1];
        int64_t x = 0;
        if (end > start && !parse_integer(p + start, end - start, at + start, &x))
            return bad_field(r, at, f + 1, p + start, end - start, "empty, or a decimal number of at most 18 digits");
        dense[f] = transform(r, x);
        start = end + 1;
    }
    for (int32_t f = 0; f < r->sparse_features; f++) {
        uint32_t end = ends[r->dense_features + f + 1];
        uint64_t x = 0;
        bool present = end > start;
        if (present && !parse_hex(p + start, end - start, &x))
            return bad_field(r, at, r->dense_features + f + 1, p + start, end - start, "empty, or 1 to 16 hexadecimal digits");
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

peri_status peri_criteo_next(peri_criteo *r, peri_batch *b)
{
    PERI_TRY(peri__batch_check("peri_criteo_next", b, r->dense_features, r->sparse_features));
    int64_t lines, first, last, skipped;
    int64_t next = skip_lines(r, r->at, r->batch_rows, &lines);
    peri_batch_share(lines, r->rank, r->world, &first, &last);
    int64_t rows = last - first;
    /* One more cache line per feature: equal powers of two would put all features' rows into the same sets of the cache. */
    int64_t stride = rows + 8;
    PERI_TRY(peri__batch_reserve_rows(b, rows));
    PERI_TRY(peri_batch_reserve(b, stride * r->sparse_features));
    int64_t at = first ? skip_lines(r, r->at, first, &skipped) : r->at;
    for (int64_t row = 0; row < rows; row++) {
        const char *end = memchr(r->text + at, '\n', (size_t)(r->end - at));
        int64_t stop = end ? end - r->text : r->end, n = stop - at;
        if (n > 0 && r->text[stop - 1] == '\r') n--;
        PERI_TRY(parse_line(r, at, n, b, row, b->values + row, stride));
        at = stop + 1;
    }
    b->rows = rows;
    b->global_rows = lines;
    b->global_row = r->row + first;
    compact(b, stride);
    r->row += lines;
    r->at = next;
    return PERI_OK;
}

void peri_criteo_rewind(peri_criteo *r)
{
    r->at = r->begin;
    r->row = 0;
}

int64_t peri_criteo_count(peri_criteo *r)
{
    int64_t lines;
    skip_lines(r, r->begin, INT64_MAX, &lines);
    return lines;
}

/* -- opening ----------------------------------------------------------------------------------------------------------------------- */

static peri_status check_options(const peri_criteo_options *o)
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

static peri_status map_file(peri_criteo *r)
{
    int file = open(r->path, O_RDONLY | O_CLOEXEC);
    struct stat info;
    if (file < 0 || fstat(file, &info) != 0) {
        peri_status status = peri__fail(PERI_EIO, "peri_criteo_open: %s: %s", r->path, strerror(errno));
        if (file >= 0) close(file);
        return status;
    }
    void *text = NULL;
    r->size = info.st_size;
    if (S_ISDIR(info.st_mode)) text = MAP_FAILED, errno = EISDIR;
    else if (r->size > 0) text = mmap(NULL, (size_t)r->size, PROT_READ, MAP_PRIVATE, file, 0);
    int saved = errno;
    close(file);
    if (text == MAP_FAILED) return peri__fail(PERI_EIO, "peri_criteo_open: %s: %s", r->path, strerror(saved));
    if (text) madvise(text, (size_t)r->size, MADV_SEQUENTIAL);
    r->text = text ? text : "";
    r->mapped = text != NULL;
    return PERI_OK;
}

/** @text NULL: map the file. */
static peri_status open_reader(const peri_criteo_options *o, const char *text, int64_t size, peri_criteo **out)
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
    r->text = text;
    r->size = size;
    r->path = peri__strdup(o->path);
    r->modulus = peri__alloc(sizeof *r->modulus * (size_t)peri__max(o->sparse_features, 1));
    r->reciprocal = peri__alloc(sizeof *r->reciprocal * (size_t)peri__max(o->sparse_features, 1));
    r->field_ends = peri__alloc(sizeof *r->field_ends * (size_t)r->fields);
    if (!r->path || !r->modulus || !r->reciprocal || !r->field_ends) goto out;
    for (int32_t f = 0; f < o->sparse_features; f++) {
        r->modulus[f] = (uint64_t)(o->table_rows[f] - (o->missing == PERI_MISSING_ZERO));
        r->reciprocal[f] = UINT64_MAX / r->modulus[f];
    }
    if (!text) PERI_TRY_GOTO(map_file(r), out);
    for (int64_t i = 0; i < LOG_TABLE; i++) r->log_table[i] = peri__dense_log(i);
    r->begin = line_start(r, (int64_t)((double)r->size * o->begin));
    r->end = o->end < 1 ? line_start(r, (int64_t)((double)r->size * o->end)) : r->size;
    peri_criteo_rewind(r);
    *out = r;
    status = PERI_OK;
out:
    if (status < 0) peri_criteo_release(r);
    return status;
}

peri_status peri_criteo_open(const peri_criteo_options *options, peri_criteo **out) { return open_reader(options, NULL, 0, out); }

peri_status peri_criteo_open_memory(const peri_criteo_options *options, const char *text, int64_t size, peri_criteo **out)
{
    if (!text || size < 0) return peri__fail(PERI_EINVAL, "peri_criteo_open_memory: no text, or %lld bytes of it", (long long)size);
    return open_reader(options, text, size, out);
}

void peri_criteo_release(peri_criteo *r)
{
    if (!r) return;
    int saved = errno;
    if (r->mapped) munmap((void *)(uintptr_t)r->text, (size_t)r->size);
    peri__free(r->path);
    peri__free(r->modulus);
    peri__free(r->reciprocal);
    peri__free(r->field_ends);
    peri__object_count(-1);
    peri__free(r);
    errno = saved;
}
