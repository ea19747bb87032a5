/* SPDX-License-Identifier: Apache-2.0
 *
 * text.c: manifests and the headers of safetensors files as texts. See manifest.h; the formats are in
 * docs/checkpoint_format.md.
 */
#include "../base/json.h"
#include "manifest.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <xxhash.h>

/* -- dtypes -------------------------------------------------------------------------------------------------------- */

static const char *const dtypes[PERI_DTYPE_COUNT] = {
    [PERI_F64] = "F64", [PERI_F32] = "F32",   [PERI_F16] = "F16", [PERI_BF16] = "BF16",
    [PERI_I64] = "I64", [PERI_I32] = "I32",   [PERI_I16] = "I16", [PERI_I8] = "I8",
    [PERI_U8] = "U8",   [PERI_BOOL] = "BOOL", [PERI_C64] = "C64"};

const char *peri__safetensors_dtype(int32_t dtype)
{
    return dtype >= 0 && dtype < PERI_DTYPE_COUNT ? dtypes[dtype] : NULL;
}

/** The dtype of safetensors' name for it, -1 if there is none. */
static int32_t safetensors_dtype_of(const char *name)
{
    for (int32_t d = 0; d < PERI_DTYPE_COUNT; d++)
        if (dtypes[d] && strcmp(dtypes[d], name) == 0) return d;
    return -1;
}

/* -- printing ------------------------------------------------------------------------------------------------------ */

static void print_numbers(peri__buffer *b, const int64_t *list, int32_t n)
{
    for (int32_t i = 0; i < n; i++) peri__buffer_print(b, "%s%lld", i ? "," : "[", (long long)list[i]);
    peri__buffer_print(b, n ? "]" : "[]");
}

static void print_piece(const peri__manifest *m, const peri__entry *e, const peri__stored_piece *p, peri__buffer *b)
{
    const int64_t *n = m->numbers + p->numbers;
    peri__buffer_print(b, "{\"file\":%d,\"begin\":%lld,\"bytes\":%lld", p->file, (long long)p->begin,
                       (long long)p->bytes);
    if (p->checked) peri__buffer_print(b, ",\"xxh3\":\"%016" PRIx64 "\"", p->checksum);
    peri__buffer_print(b, ",\"offset\":");
    print_numbers(b, n, e->ndim);
    peri__buffer_print(b, ",\"size\":");
    print_numbers(b, n + e->ndim, e->ndim);
    if (n[2 * e->ndim + 1]) {
        peri__buffer_print(b, ",\"columns\":");
        print_numbers(b, n + 2 * e->ndim, 2);
    }
    if (p->rows) {
        peri__buffer_print(b, ",\"rows\":");
        peri__buffer_quote(b, peri__manifest_text(m, p->rows - 1));
        peri__buffer_print(b, ",\"listed\":%lld", (long long)p->listed);
    }
    peri__buffer_print(b, "}");
}

static const char checksum_key[] = ",\n\"checksum\":\"", checksum_end[] = "\"}\n";
enum { CHECKSUM_BYTES = sizeof checksum_key - 1 + PERI_CHECKPOINT_DIGEST + sizeof checksum_end - 1 };

static void digest_text(XXH128_hash_t h, char digest[PERI_CHECKPOINT_DIGEST + 1])
{
    snprintf(digest, PERI_CHECKPOINT_DIGEST + 1, "%016" PRIx64 "%016" PRIx64, (uint64_t)h.high64, (uint64_t)h.low64);
}

/** A text that is put somewhere block by block: that of a manifest of 100,000 tables has 70 MB. */
typedef struct block_text {
    peri__buffer b;
    XXH3_state_t *hash; /* of all that is put; or NULL */
    peri__put *put;
    void *context;
    int64_t done; /* bytes that have been put */
} block_text;

enum { TEXT_BLOCK = 1 << 16 };

/** Put what has been printed so far, if it is as much as @least bytes. */
static void flush(block_text *t, int64_t least)
{
    if (t->b.status < 0 || t->b.bytes < least) return;
    if (t->hash) XXH3_128bits_update(t->hash, t->b.data, (size_t)t->b.bytes);
    t->b.status = t->put(t->context, t->b.data, t->b.bytes);
    t->done += t->b.bytes;
    t->b.bytes = 0;
}

/** What a manifest says in front of its files. */
static void print_config(const peri__manifest *m, const peri_checkpoint_config *config, peri__buffer *b)
{
    const char *values = config->values ? config->values : "{}";
    peri__buffer_print(b, ",\n\"parent\":");
    if (config->parent) peri__buffer_quote(b, config->parent);
    else peri__buffer_print(b, "null");
    if (config->increment) peri__buffer_print(b, ",\n\"increment\":%lld", (long long)config->increment);
    if (config->same_as) {
        peri__buffer_print(b, ",\n\"same_as\":");
        peri__buffer_quote(b, config->same_as);
    }
    if (*m->same_as_parent) peri__buffer_print(b, ",\n\"same_as_parent\":\"%s\"", m->same_as_parent);
    peri__buffer_print(b, ",\n\"values\":");
    peri__buffer_append(b, values, (int64_t)strlen(values));
}

static void print_file(const peri__manifest *m, const peri__file *f, peri__buffer *b)
{
    peri__buffer_print(b, "\n{\"name\":");
    peri__buffer_quote(b, peri__manifest_text(m, f->name));
    peri__buffer_print(b, ",\"bytes\":%lld", (long long)f->bytes);
    if (f->header)
        peri__buffer_print(b, ",\"header\":%lld,\"xxh3\":\"%016" PRIx64 "\"", (long long)f->header, f->checksum);
    peri__buffer_print(b, "}");
}

static void print_entry(const peri__manifest *m, const peri__entry *e, block_text *t)
{
    peri__buffer *b = &t->b;
    peri__buffer_print(b, "\n{\"name\":");
    peri__buffer_quote(b, peri__entry_name(m, e));
    peri__buffer_print(b, ",\"dtype\":\"%s\",\"shape\":", dtypes[e->dtype]);
    print_numbers(b, peri__entry_shape(m, e), e->ndim);
    peri__buffer_print(b, ",\"pieces\":[");
    for (int64_t k = 0; k < e->n_pieces; k++) {
        if (k) peri__buffer_print(b, ",");
        print_piece(m, e, &m->pieces[e->first_piece + k], b);
        flush(t, TEXT_BLOCK);
    }
    peri__buffer_print(b, "]}");
}

peri_status peri__manifest_print(peri__manifest *m, const peri_checkpoint_config *config, peri__put *put, void *context)
{
    block_text t = {.hash = XXH3_createState(), .put = put, .context = context};
    peri__buffer *b = &t.b;
    if (!t.hash) return peri__fail(PERI_ENOMEM, "checkpoint: no memory for a hash");
    XXH3_128bits_reset(t.hash);
    peri__buffer_print(b, "{\"format\":\"perilune-checkpoint\",\"version\":%d", PERI_CHECKPOINT_VERSION);
    if (config) print_config(m, config, b);
    peri__buffer_print(b, ",\n\"files\":[");
    for (int64_t f = 0; f < m->n_files; f++) {
        if (f) peri__buffer_print(b, ",");
        print_file(m, &m->files[f], b);
        flush(&t, TEXT_BLOCK);
    }
    peri__buffer_print(b, "],\n\"tensors\":[");
    for (int64_t i = 0; i < m->n_entries; i++) {
        if (i) peri__buffer_print(b, ",");
        print_entry(m, &m->entries[i], &t);
        flush(&t, TEXT_BLOCK);
    }
    peri__buffer_print(b, "]");
    flush(&t, 1);
    if (config) {
        digest_text(XXH3_128bits_digest(t.hash), m->digest);
        peri__buffer_print(b, "%s%s%s", checksum_key, m->digest, checksum_end);
    } else {
        peri__buffer_print(b, "}\n");
    }
    flush(&t, 1);
    XXH3_freeState(t.hash);
    peri__free(b->data);
    return b->status;
}

/* -- parsing ------------------------------------------------------------------------------------------------------- */

/** A list of at most @most numbers; the number of them, -1 after an error. */
static int32_t parse_numbers(peri__json *j, int64_t *list, int32_t most)
{
    int32_t n = 0;
    peri__json_enter(j, '[');
    while (peri__json_item(j)) {
        if (n == most) {
            peri__json_fail(j, "the list is too long");
            return -1;
        }
        list[n++] = peri__json_integer(j);
    }
    return j->status < 0 ? -1 : n;
}

/** Files are in the checkpoint's folder, and nowhere else. */
static bool plain_name(const char *name)
{
    return *name && !strchr(name, '/') && strcmp(name, ".") != 0 && strcmp(name, "..") != 0 &&
           strcmp(name, PERI__MANIFEST) != 0;
}

static bool parse_file(peri__manifest *m, peri__json *j)
{
    char key[32], name[256] = "";
    int64_t bytes = -1, header = 0;
    uint64_t checksum = 0;
    bool checked = false;
    int32_t index;
    peri__json_enter(j, '{');
    while (peri__json_key(j, key, sizeof key)) {
        if (strcmp(key, "name") == 0) peri__json_text(j, name, sizeof name);
        else if (strcmp(key, "bytes") == 0) bytes = peri__json_integer(j);
        else if (strcmp(key, "header") == 0) header = peri__json_integer(j);
        else if (strcmp(key, "xxh3") == 0) checksum = peri__json_hex(j), checked = true;
        else peri__json_skip(j, NULL, NULL);
    }
    if (j->status < 0) return false;
    if (!plain_name(name)) return peri__json_fail(j, "a file's name is no plain name in the folder");
    if (bytes < 0) return peri__json_fail(j, "a file without its bytes");
    if (header < 0 || header > bytes || (header > 0) != checked)
        return peri__json_fail(j, "a file whose header is longer than the file, or has no checksum");
    if (m->n_files == INT32_MAX) return peri__json_fail(j, "too many files");
    j->status = peri__manifest_file(m, name, bytes, &index);
    if (j->status < 0) return false;
    m->files[index].header = header;
    m->files[index].checksum = checksum;
    return true;
}

/** A piece of the last entry. @files: those of this text begin here. */
static bool parse_piece(peri__manifest *m, peri__json *j, int64_t files)
{
    char key[32], rows[PERI__NAME_MOST + 1] = "";
    const peri__entry e = m->entries[m->n_entries - 1];
    peri__stored_piece p = {.begin = -1, .bytes = -1};
    peri__region region = {0};
    int64_t file = -1, columns[2] = {0}, elements, need;
    int32_t offsets = -1, sizes = -1, n = 2;
    peri__json_enter(j, '{');
    while (peri__json_key(j, key, sizeof key)) {
        if (strcmp(key, "file") == 0) file = peri__json_integer(j);
        else if (strcmp(key, "begin") == 0) p.begin = peri__json_integer(j);
        else if (strcmp(key, "bytes") == 0) p.bytes = peri__json_integer(j);
        else if (strcmp(key, "xxh3") == 0) p.checksum = peri__json_hex(j), p.checked = j->status >= 0;
        else if (strcmp(key, "offset") == 0) offsets = parse_numbers(j, region.offset, PERI_MAX_DIMS);
        else if (strcmp(key, "size") == 0) sizes = parse_numbers(j, region.size, PERI_MAX_DIMS);
        else if (strcmp(key, "columns") == 0) n = parse_numbers(j, columns, 2);
        else if (strcmp(key, "rows") == 0) region.rows = peri__json_text(j, rows, sizeof rows) ? rows : NULL;
        else if (strcmp(key, "listed") == 0) region.listed = peri__json_integer(j);
        else peri__json_skip(j, NULL, NULL);
    }
    if (j->status < 0) return false;
    region.column = columns[0];
    region.columns = columns[1];
    if (file < 0 || file >= m->n_files - files) return peri__json_fail(j, "a piece in a file that is not listed");
    if (offsets != e.ndim || sizes != e.ndim || n != 2)
        return peri__json_fail(j, "a piece of other dimensions than its tensor");
    j->status = peri__region_check(j->what, e.ndim, peri__entry_shape(m, &e), &region, &elements);
    if (j->status < 0) return false;
    p.file = (int32_t)(files + file);
    if (region.rows) elements = peri__listed_elements(elements, region.size[0], region.listed);
    if (__builtin_mul_overflow(elements, peri_dtype_size(e.dtype), &need) || p.bytes != need)
        return peri__json_fail(j, "a piece whose bytes are not those of its elements");
    if (p.begin < 0 || p.begin > m->files[p.file].bytes || p.bytes > m->files[p.file].bytes - p.begin)
        return peri__json_fail(j, "a piece that lies outside its file");
    j->status = peri__manifest_piece(m, &region, &p);
    return j->status >= 0;
}

/** A tensor whose elements can be counted, without pieces. */
static bool add_entry(peri__manifest *m, peri__json *j, const char *name, int32_t dtype, int32_t ndim,
                      const int64_t *shape)
{
    int64_t elements;
    peri__region all = {0};
    if (!*name) return peri__json_fail(j, "a tensor without a name");
    if (dtype < 0)
        return peri__json_fail(j,
                               "a tensor whose dtype is none of F64, F32, F16, BF16, I64, I32, I16, I8, U8, BOOL, C64");
    if (ndim < 0) return peri__json_fail(j, "a tensor without a shape");
    memcpy(all.size, shape, (size_t)ndim * sizeof *shape);
    j->status = peri__region_check(j->what, ndim, shape, &all, &elements);
    if (j->status >= 0 && elements > INT64_MAX / 16) return peri__json_fail(j, "a tensor of too many elements");
    if (j->status >= 0) j->status = peri__manifest_entry(m, name, dtype, ndim, shape);
    return j->status >= 0;
}

static bool parse_tensor(peri__manifest *m, peri__json *j, int64_t files)
{
    char key[32], name[PERI__NAME_MOST + 1] = "", dtype[8] = "";
    int64_t shape[PERI_MAX_DIMS];
    int32_t ndim = -1;
    bool pieces = false;
    peri__json_enter(j, '{');
    while (peri__json_key(j, key, sizeof key)) {
        if (strcmp(key, "name") == 0) {
            peri__json_text(j, name, sizeof name);
        } else if (strcmp(key, "dtype") == 0) {
            peri__json_text(j, dtype, sizeof dtype);
        } else if (strcmp(key, "shape") == 0) {
            ndim = parse_numbers(j, shape, PERI_MAX_DIMS);
        } else if (strcmp(key, "pieces") == 0) {
            if (pieces) return peri__json_fail(j, "two lists of pieces");
            if (!add_entry(m, j, name, safetensors_dtype_of(dtype), ndim, shape)) return false;
            pieces = true;
            for (peri__json_enter(j, '['); peri__json_item(j);)
                if (!parse_piece(m, j, files)) return false;
        } else {
            peri__json_skip(j, NULL, NULL);
        }
    }
    return j->status >= 0 && (pieces || peri__json_fail(j, "a tensor without pieces"));
}

/** The last tensor has the text from @from on. */
static bool note_place(peri__manifest *m, peri__json *j, const char *from)
{
    const uint64_t hash = peri__hash_text(peri__entry_name(m, &m->entries[m->n_entries - 1]));
    j->status = peri__grow_pages((void **)&m->places, &m->places_room, m->n_places + 1, sizeof *m->places);
    if (j->status < 0) return false;
    m->places[m->n_places++] =
        (peri__tensor_place){(uint32_t)hash, (uint32_t)(from - j->begin), (uint32_t)(j->at - from)};
    return true;
}

peri_status peri__manifest_parse_tensor(peri__manifest *m, const char *text, int64_t bytes, const char *what)
{
    peri__json j;
    peri__json_open(&j, text, bytes, what);
    parse_tensor(m, &j, 0);
    return peri__json_close(&j);
}

/** Keep a value of the manifest as the text that it is. */
static bool keep_values(peri__manifest *m, peri__json *j)
{
    const char *from;
    int64_t bytes;
    if (!peri__json_skip(j, &from, &bytes)) return false;
    if (m->values) return peri__json_fail(j, "two values");
    m->values = peri__alloc((size_t)bytes + 1);
    if (!m->values) return j->status = PERI_ENOMEM, false;
    memcpy(m->values, from, (size_t)bytes);
    m->values[bytes] = 0;
    return true;
}

static bool parse_digest(peri__json *j, char out[PERI_CHECKPOINT_DIGEST + 1], const char *wrong)
{
    return peri__json_text(j, out, PERI_CHECKPOINT_DIGEST + 1) && (peri__is_digest(out) || peri__json_fail(j, wrong));
}

static bool parse_key(peri__manifest *m, peri__json *j, const char *key, int64_t files, bool part, bool *format)
{
    char text[64];
    if (strcmp(key, "format") == 0) {
        *format = peri__json_text(j, text, sizeof text) && strcmp(text, "perilune-checkpoint") == 0;
        return *format || peri__json_fail(j, "the format is not perilune-checkpoint");
    }
    if (strcmp(key, "version") == 0) {
        int64_t version = peri__json_integer(j);
        if (j->status < 0 || version == PERI_CHECKPOINT_VERSION) return j->status >= 0;
        j->status =
            peri__fail(PERI_EFORMAT,
                       "%s: version %lld of the format, this library reads %d; read it with the library that wrote it",
                       j->what, (long long)version, PERI_CHECKPOINT_VERSION);
        return false;
    }
    if (strcmp(key, "parent") == 0) {
        if (peri__json_null(j)) return true;
        return parse_digest(j, m->parent, "the parent is no digest (32 hexadecimal digits)");
    }
    if (strcmp(key, "same_as") == 0) return parse_digest(j, m->same_as, "same_as is no digest (32 hexadecimal digits)");
    if (strcmp(key, "increment") == 0) {
        m->increment = peri__json_integer(j);
        return j->status >= 0 && (m->increment >= 0 || peri__json_fail(j, "the number of an increment is negative"));
    }
    if (strcmp(key, "values") == 0) return keep_values(m, j);
    if (strcmp(key, "files") == 0) {
        for (peri__json_enter(j, '['); peri__json_item(j);)
            if (!parse_file(m, j)) return false;
    } else if (strcmp(key, "tensors") == 0) {
        for (peri__json_enter(j, '['); peri__json_item(j);) {
            const char *from = j->at;
            if (!parse_tensor(m, j, files) || (!part && !note_place(m, j, from))) return false;
        }
    } else {
        peri__json_skip(j, NULL, NULL);
    }
    return j->status >= 0;
}

/** A manifest ends with the checksum of all that comes before, which the window has hashed. */
static peri_status check_end(peri__manifest *m, peri__text_window *w, const char *what)
{
    char own[PERI_CHECKPOINT_DIGEST + 1], end[CHECKSUM_BYTES];
    const char *sum = end + sizeof checksum_key - 1;
    PERI_TRY(w->get(w->context, end, CHECKSUM_BYTES, w->bytes - CHECKSUM_BYTES));
    if (memcmp(end, checksum_key, sizeof checksum_key - 1) != 0 ||
        memcmp(sum + PERI_CHECKPOINT_DIGEST, checksum_end, sizeof checksum_end - 1) != 0)
        return peri__fail(PERI_EFORMAT, "%s: its manifest.json does not end with its checksum: it is cut short, or was "
                          "changed by hand", what);
    memcpy(m->digest, sum, PERI_CHECKPOINT_DIGEST);
    m->digest[PERI_CHECKPOINT_DIGEST] = 0;
    digest_text(XXH3_128bits_digest(w->hash), own);
    if (memcmp(own, m->digest, sizeof own) == 0) return PERI_OK;
    return peri__fail(PERI_EFORMAT, "%s: its manifest.json is damaged: its checksum is %.32s, that of its bytes %s",
                      what, m->digest, own);
}

static peri_status parse_all(peri__manifest *m, peri__json *j, bool part)
{
    char key[64];
    bool format = false;
    const int64_t files = m->n_files;
    peri__json_enter(j, '{');
    while (peri__json_key(j, key, sizeof key))
        if (!parse_key(m, j, key, files, part, &format)) break;
    PERI_TRY(peri__json_close(j));
    if (!format) return peri__fail(PERI_EFORMAT, "%s: it does not say that its format is perilune-checkpoint", j->what);
    for (int64_t k = 0; k < m->n_pieces && !part && !*m->parent; k++)
        if (m->pieces[k].rows)
            return peri__fail(PERI_EFORMAT, "%s: it has some rows of a tensor only, and names no parent", j->what);
    if (*m->parent && m->increment == 0)
        return peri__fail(PERI_EFORMAT, "%s: it names a parent, but not which increment it is", j->what);
    return PERI_OK;
}

peri_status peri__manifest_read(peri__manifest *m, peri__get *get, void *context, int64_t bytes, bool part,
                                const char *what)
{
    peri__text_window w;
    char wrong[PERI_MESSAGE_MAX];
    if (bytes < (part ? 1 : CHECKSUM_BYTES))
        return peri__fail(PERI_EFORMAT, "%s: its manifest.json has %lld bytes: it is cut short", what,
                          (long long)bytes);
    peri_status status = peri__text_window_open(&w, get, context, bytes, part ? bytes : CHECKSUM_BYTES, what);
    if (status >= 0 && part) {
        status = parse_all(m, &w.j, true);
    } else if (status >= 0) {
        const peri_status parsed = parse_all(m, &w.j, false);
        if (parsed < 0) snprintf(wrong, sizeof wrong, "%s", peri_error_message());
        status = peri__text_window_finish(&w);
        if (status >= 0) status = check_end(m, &w, what); /* what is damaged may be wrong in many ways */
        if (status >= 0 && parsed < 0) status = peri__fail(parsed, "%s", wrong);
    }
    peri__text_window_close(&w);
    return status;
}

/* -- safetensors --------------------------------------------------------------------------------------------------- */

static bool parse_named(peri__manifest *m, peri__json *j, const char *name, int32_t file, int64_t data)
{
    char key[32], dtype[8] = "";
    int64_t shape[PERI_MAX_DIMS], at[2];
    int32_t ndim = -1, n = -1;
    peri__json_enter(j, '{');
    while (peri__json_key(j, key, sizeof key)) {
        if (strcmp(key, "dtype") == 0) peri__json_text(j, dtype, sizeof dtype);
        else if (strcmp(key, "shape") == 0) ndim = parse_numbers(j, shape, PERI_MAX_DIMS);
        else if (strcmp(key, "data_offsets") == 0) n = parse_numbers(j, at, 2);
        else peri__json_skip(j, NULL, NULL);
    }
    if (j->status < 0 || !add_entry(m, j, name, safetensors_dtype_of(dtype), ndim, shape)) return false;
    const int64_t bytes = m->files[file].bytes - data;
    peri__region all = {0};
    memcpy(all.size, shape, (size_t)ndim * sizeof *shape);
    if (n != 2 || at[0] < 0 || at[1] < at[0] || at[1] > bytes)
        return peri__json_fail(j, "data_offsets that lie outside the file");
    if (at[1] - at[0] != peri__volume(ndim, shape) * peri_dtype_size(m->entries[m->n_entries - 1].dtype))
        return peri__json_fail(j, "data_offsets that do not fit dtype and shape");
    j->status = peri__manifest_piece(
        m, &all, &(peri__stored_piece){.begin = data + at[0], .bytes = at[1] - at[0], .file = file});
    return j->status >= 0;
}

peri_status peri__safetensors_parse(peri__manifest *m, const char *name, int64_t file_bytes, const char *header,
                                    int64_t bytes, const char *what)
{
    peri__json j;
    int32_t file;
    char key[PERI__NAME_MOST + 1];
    PERI_TRY(peri__manifest_file(m, name, file_bytes, &file));
    peri__json_open(&j, header, bytes, what);
    peri__json_enter(&j, '{');
    while (peri__json_key(&j, key, sizeof key)) {
        if (strcmp(key, "__metadata__") == 0) peri__json_skip(&j, NULL, NULL);
        else if (!parse_named(m, &j, key, file, 8 + bytes)) break;
    }
    return peri__json_close(&j);
}

/** Append what a safetensors header says of piece @p, whose data begin at @at. */
static void print_named(const peri__manifest *m, const peri__entry *e, const peri__stored_piece *p, int64_t at,
                        peri__buffer *b)
{
    char name[PERI__NAME_MOST + 400], place[400]; /* a list's name is cut where it is longer */
    peri__region region;
    peri__piece_region(m, e, p, &region);
    const bool all = !region.columns && !region.rows &&
                     memcmp(region.size, peri__entry_shape(m, e), (size_t)e->ndim * sizeof *region.size) == 0;
    snprintf(name, sizeof name, "%s%s", peri__entry_name(m, e),
             all ? "" : peri__region_text(e->ndim, &region, place, sizeof place));
    peri__buffer_print(b, ",\n");
    peri__buffer_quote(b, name);
    peri__buffer_print(b, ":{\"dtype\":\"%s\",\"shape\":", dtypes[e->dtype]);
    if (region.rows) region.size[0] = region.listed;
    print_numbers(b, region.size, e->ndim);
    peri__buffer_print(b, ",\"data_offsets\":[%lld,%lld]}", (long long)at, (long long)(at + p->bytes));
}

/** Print the JSON of the header of file @file. */
static void print_header(const peri__manifest *m, int32_t file, block_text *t)
{
    int64_t at = 0;
    peri__buffer_print(&t->b, "{\"__metadata__\":{\"format\":\"perilune-checkpoint\"}");
    for (int64_t i = 0; i < m->n_entries; i++) {
        const peri__entry *e = &m->entries[i];
        for (int64_t k = e->first_piece; k < e->first_piece + e->n_pieces; k++) {
            const peri__stored_piece *p = &m->pieces[k];
            if (p->file != file) continue;
            print_named(m, e, p, at, &t->b);
            at += p->bytes;
            flush(t, TEXT_BLOCK);
        }
    }
    peri__buffer_print(&t->b, "}");
}

static peri_status put_nowhere(void *context, const char *data, int64_t bytes)
{
    (void)context, (void)data, (void)bytes;
    return PERI_OK;
}

peri_status peri__safetensors_lay_out(peri__manifest *m, int32_t file, int64_t *bytes)
{
    enum { ALIGN = 64 }; /* where data begin: readers that map the file find them aligned */
    block_text t = {.put = put_nowhere};
    print_header(m, file, &t);
    flush(&t, 1);
    peri__free(t.b.data);
    PERI_TRY(t.b.status);
    int64_t n = (8 + t.done + ALIGN - 1) / ALIGN * ALIGN;
    if (n - 8 > PERI__HEADER_MOST)
        return peri__fail(
            PERI_EUNSUPPORTED,
            "peri_checkpoint_writer: the header of '%s' would have %lld bytes, safetensors reads %d at most; "
            "write more files",
            peri__manifest_text(m, m->files[file].name), (long long)n, PERI__HEADER_MOST);
    *bytes = n;
    for (int64_t i = 0; i < m->n_entries; i++) {
        const peri__entry *e = &m->entries[i];
        for (int64_t k = e->first_piece; k < e->first_piece + e->n_pieces; k++) {
            if (m->pieces[k].file != file) continue;
            m->pieces[k].begin = n;
            n += m->pieces[k].bytes;
        }
    }
    m->files[file].bytes = n;
    return PERI_OK;
}

peri_status peri__safetensors_print(const peri__manifest *m, int32_t file, int64_t bytes, peri__put *put, void *context)
{
    block_text t = {.put = put, .context = context};
    char count[8];
    for (int i = 0; i < 8; i++) count[i] = (char)((uint64_t)(bytes - 8) >> 8 * i);
    peri__buffer_append(&t.b, count, 8);
    print_header(m, file, &t);
    while (t.b.status >= 0 && t.done + t.b.bytes < bytes) peri__buffer_append(&t.b, " ", 1);
    flush(&t, 1);
    peri__free(t.b.data);
    return t.b.status;
}
