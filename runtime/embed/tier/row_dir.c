/* SPDX-License-Identifier: Apache-2.0
 *
 * row_dir.c: the names of row files: which files of a table lie in a directory, and whether they are cut as they should
 * be.
 */
#include "row_file.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>

/** How many bytes of the file's name say the table; @text has room for 220. */
static size_t row_file_stem(const char *table, char *text)
{
    size_t n = 0;
    const char *c = table;
    for (; *c && n < 150; c++) {
        bool plain = (*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') || (*c >= '0' && *c <= '9') || *c == '_' ||
                     *c == '-' || (*c == '.' && n > 0);
        if (plain) text[n++] = *c;
        else n += (size_t)snprintf(text + n, 4, "%%%02X", (unsigned char)*c);
    }
    if (*c) n += (size_t)snprintf(text + n, 20, "~%016llx", (unsigned long long)peri__hash_text(table));
    text[n] = 0;
    return n;
}

char *peri__row_file_path(const char *directory, const peri__row_header *h)
{
    char stem[220];
    size_t most = strlen(directory) + row_file_stem(h->name, stem) + 120;
    char *path = peri__alloc(most);
    if (path)
        snprintf(path, most, "%s/%s.rows-%lld-%lld.cols-%lld-%lld.peri", directory, stem, (long long)h->row_offset,
                 (long long)(h->row_offset + h->rows), (long long)h->col_offset, (long long)(h->col_offset + h->cols));
    return path;
}

/** Read the part of a file's name behind the table. */
static bool parse(const char *text, peri__row_shard *out)
{
    long long row, row_end, col, col_end;
    int end = 0;
    if (sscanf(text, ".rows-%lld-%lld.cols-%lld-%lld.peri%n", &row, &row_end, &col, &col_end, &end) != 4 || !end ||
        text[end])
        return false;
    if (row < 0 || row_end < row || col < 0 || col_end < col) return false;
    out->row = row;
    out->rows = row_end - row;
    out->col = col;
    out->cols = col_end - col;
    return true;
}

peri_status peri__row_files_of(const char *directory, const char *table,
                               bool (*visit)(void *ctx, const peri__row_shard *shard), void *ctx)
{
    char stem[220];
    size_t length = row_file_stem(table, stem);
    DIR *folder = opendir(directory);
    if (!folder && errno == ENOENT) return PERI_OK;
    if (!folder)
        return peri__fail(PERI_EIO, "row files in '%.300s': reading the directory: %s", directory, strerror(errno));
    bool more = true;
    for (struct dirent *entry; more && (entry = readdir(folder));) {
        peri__row_shard shard;
        if (strncmp(entry->d_name, stem, length) != 0 || !parse(entry->d_name + length, &shard)) continue;
        if (snprintf(shard.path, sizeof shard.path, "%s/%s", directory, entry->d_name) >= (int)sizeof shard.path)
            continue;
        more = visit(ctx, &shard);
    }
    closedir(folder);
    return PERI_OK;
}

typedef struct others {
    const peri__row_header *want;
    int64_t n;
    size_t used;
    char text[512];
} others;

static bool ranges_apart(int64_t a, int64_t n, int64_t b, int64_t m) { return a + n <= b || b + m <= a; }

/** Note a file that shares rows with the wanted shard, and is not its own. */
static bool note_overlap(void *ctx, const peri__row_shard *s)
{
    others *o = ctx;
    const peri__row_header *w = o->want;
    if (s->row == w->row_offset && s->rows == w->rows && s->col == w->col_offset && s->cols == w->cols) return true;
    if (ranges_apart(s->row, s->rows, w->row_offset, w->rows) || ranges_apart(s->col, s->cols, w->col_offset, w->cols))
        return true;
    if (o->n++ < 4)
        o->used += (size_t)snprintf(o->text + o->used, sizeof o->text - o->used,
                                    "%srows %lld..%lld of columns %lld..%lld", o->n > 1 ? ", " : "", (long long)s->row,
                                    (long long)(s->row + s->rows), (long long)s->col, (long long)(s->col + s->cols));
    return true;
}

peri_status peri__row_files_check(const char *directory, const peri__row_header *want)
{
    others o = {.want = want};
    PERI_TRY(peri__row_files_of(directory, want->name, note_overlap, &o));
    if (o.n == 0) return PERI_OK;
    return peri__fail(PERI_EMISMATCH,
                      "row files in '%.200s': table '%.80s': wanted are rows %lld..%lld of columns %lld..%lld, but "
                      "there lie shards of "
                      "another plan, number of ranks, dim or number of rows: %s%s; go on with what wrote them, or name "
                      "another directory "
                      "(or remove them) to start from scratch",
                      directory, want->name, (long long)want->row_offset, (long long)(want->row_offset + want->rows),
                      (long long)want->col_offset, (long long)(want->col_offset + want->cols), o.text,
                      o.n > 4 ? ", ..." : "");
}
