/* SPDX-License-Identifier: Apache-2.0
 *
 * row_file.c: see row_file.h.
 */
#include "row_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <xxhash.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "row files are little-endian; this machine needs conversions here"
#endif

/* -- the header ------------------------------------------------------------------------------------------------------------------ */

#define ROW_MAGIC UINT64_C(0x0a53574f52495250) /* "PRIROWS\n" */
enum { ROW_VERSION = 1 };

/** The header on the disk; what follows it up to the checksum is zero. */
typedef struct disk_header {
    uint64_t magic;
    uint32_t version, header_bytes;
    int64_t rows, cols, row_offset, col_offset, total_rows, total_cols, record_bytes, iteration;
    uint64_t seed;
    double init_a, init_b;
    int32_t init, dtype, optimizer, clean, n_parts, part_bytes[PERI__ROW_PARTS], reserved;
    char name[PERI__ROW_NAME_MAX];
} disk_header;

enum { CHECKSUM_AT = PERI__ROW_HEADER_BYTES - 8 };
_Static_assert(sizeof(disk_header) <= CHECKSUM_AT && sizeof(disk_header) == 16 + 11 * 8 + 12 * 4 + PERI__ROW_NAME_MAX, "no padding");

void peri__row_header_seal(const peri__row_header *h, unsigned char bytes[PERI__ROW_HEADER_BYTES])
{
    disk_header d = {.magic = ROW_MAGIC, .version = ROW_VERSION, .header_bytes = PERI__ROW_HEADER_BYTES, .rows = h->rows, .cols = h->cols,
                     .row_offset = h->row_offset, .col_offset = h->col_offset, .total_rows = h->total_rows, .total_cols = h->total_cols,
                     .record_bytes = h->record_bytes, .iteration = h->iteration, .seed = h->seed, .init_a = h->init_a,
                     .init_b = h->init_b, .init = h->init, .dtype = h->dtype, .optimizer = h->optimizer, .clean = h->clean,
                     .n_parts = h->n_parts};
    memcpy(d.part_bytes, h->part_bytes, sizeof d.part_bytes);
    memcpy(d.name, h->name, sizeof d.name);
    d.name[sizeof d.name - 1] = 0;
    memset(bytes, 0, PERI__ROW_HEADER_BYTES);
    memcpy(bytes, &d, sizeof d);
    uint64_t sum = XXH3_64bits(bytes, CHECKSUM_AT);
    memcpy(bytes + CHECKSUM_AT, &sum, sizeof sum);
}

int64_t peri__row_record_bytes(const peri__row_header *h)
{
    int64_t bytes = 8;
    for (int32_t p = 0; p < h->n_parts; p++) bytes += h->part_bytes[p] < 0 ? -h->part_bytes[p] : h->part_bytes[p] * h->cols;
    return (bytes + 7) / 8 * 8;
}

/** Are the numbers possible? NULL, or what is wrong. */
static const char *check_numbers(const disk_header *d, const peri__row_header *h)
{
    const int64_t most = INT64_C(1) << 43;
    if (d->rows < 0 || d->rows > most || d->cols < 1 || d->cols > 1 << 20) return "its numbers of rows and columns are impossible";
    if (d->row_offset < 0 || d->total_rows < 0 || d->total_rows > most || d->row_offset > d->total_rows - d->rows)
        return "its rows are not within the whole table";
    if (d->col_offset < 0 || d->total_cols < 1 || d->total_cols > 1 << 20 || d->col_offset > d->total_cols - d->cols)
        return "its columns are not within the whole table";
    if (d->n_parts < 1 || d->n_parts > PERI__ROW_PARTS) return "its number of parts is impossible";
    for (int32_t p = 0; p < PERI__ROW_PARTS; p++) {
        int32_t bytes = d->part_bytes[p];
        if (p < d->n_parts ? bytes == 0 || bytes < -16 || bytes > 16 : bytes != 0) return "an element's size is impossible";
    }
    int64_t total;
    if (d->record_bytes != peri__row_record_bytes(h)) return "its records do not fit their parts";
    if (__builtin_mul_overflow(d->rows, d->record_bytes, &total) || total > INT64_MAX - PERI__ROW_HEADER_BYTES) return "it is too large";
    if (d->iteration < 0) return "its iteration is negative";
    if (d->clean != 0 && d->clean != 1) return "its state is neither clean nor unclean";
    if (d->name[sizeof d->name - 1] != 0 || d->name[0] == 0) return "its table has no name";
    return NULL;
}

peri_status peri__row_header_parse(const char *path, const void *bytes, int64_t size, peri__row_header *out)
{
    disk_header d;
    uint64_t sum;
    if (size < PERI__ROW_HEADER_BYTES)
        return peri__fail(PERI_EFORMAT, "row file '%.300s': %lld bytes, a header needs %d", path, (long long)size, PERI__ROW_HEADER_BYTES);
    memcpy(&d, bytes, sizeof d);
    memcpy(&sum, (const char *)bytes + CHECKSUM_AT, sizeof sum);
    if (d.magic != ROW_MAGIC) return peri__fail(PERI_EFORMAT, "row file '%.300s': not a row file (its first bytes are others)", path);
    if (d.version != ROW_VERSION || d.header_bytes != PERI__ROW_HEADER_BYTES)
        return peri__fail(PERI_EFORMAT, "row file '%.300s': version %u, this library reads %d", path, d.version, ROW_VERSION);
    if (sum != XXH3_64bits(bytes, CHECKSUM_AT))
        return peri__fail(PERI_EFORMAT, "row file '%.300s': the header is damaged (wrong checksum)", path);
    peri__row_header h = {.rows = d.rows, .cols = d.cols, .row_offset = d.row_offset, .col_offset = d.col_offset,
                          .total_rows = d.total_rows, .total_cols = d.total_cols, .record_bytes = d.record_bytes,
                          .iteration = d.iteration, .seed = d.seed, .init_a = d.init_a, .init_b = d.init_b, .init = d.init,
                          .dtype = d.dtype, .optimizer = d.optimizer, .clean = d.clean,
                          .n_parts = d.n_parts < 0 ? 0 : d.n_parts > PERI__ROW_PARTS ? PERI__ROW_PARTS : d.n_parts};
    memcpy(h.part_bytes, d.part_bytes, sizeof h.part_bytes);
    memcpy(h.name, d.name, sizeof h.name);
    bool narrow = d.cols >= 0 && d.cols <= 1 << 20; /* else the record's size would overflow */
    for (int32_t p = 0; p < PERI__ROW_PARTS; p++) narrow = narrow && d.part_bytes[p] >= -16 && d.part_bytes[p] <= 16;
    const char *wrong = narrow ? check_numbers(&d, &h) : "its sizes are impossible";
    if (wrong) return peri__fail(PERI_EFORMAT, "row file '%.300s': %s", path, wrong);
    *out = h;
    return PERI_OK;
}

/* -- records --------------------------------------------------------------------------------------------------------------------- */

static uint32_t record_sum(const char *record, int64_t bytes)
{
    uint32_t sum = (uint32_t)XXH3_64bits(record + 4, (size_t)bytes - 4);
    return sum ? sum : 1; /* 0 says that the record was never written */
}

/** In memory only: what follows is not the file's. */
enum { VACANT = 1 };

void peri__row_vacate(void *record)
{
    uint32_t head[2] = {0, VACANT};
    memcpy(record, head, sizeof head);
}

void peri__row_seal(void *record, int64_t bytes)
{
    memset((char *)record + 4, 0, 4);
    uint32_t sum = record_sum(record, bytes);
    memcpy(record, &sum, sizeof sum);
}

int32_t peri__row_check(const void *record, int64_t bytes)
{
    const char *at = record;
    uint32_t head[2];
    memcpy(head, record, sizeof head);
    if (head[0]) return head[0] == record_sum(record, bytes) ? 1 : -1;
    if (head[1] == VACANT) return 0;
    return head[1] == 0 && !memcmp(at, at + 1, (size_t)bytes - 1) ? 0 : -1; /* all zero */
}

/* -- opening --------------------------------------------------------------------------------------------------------------------- */

static peri_status fail_errno(const char *path, const char *what)
{
    int code = errno;
    return peri__fail(code == ENOMEM ? PERI_ENOMEM : PERI_EIO, "row file '%.300s': %s: %s", path, what, strerror(code));
}

/** directory/name.rows-0-1000.cols-0-64.peri, with characters that are no part of plain file names as %XX. */
static char *path_of(const char *directory, const peri__row_header *h)
{
    char name[220];
    size_t n = 0;
    const char *c = h->name;
    for (; *c && n < 150; c++) {
        bool plain = (*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') || (*c >= '0' && *c <= '9') || *c == '_' || *c == '-' ||
                     (*c == '.' && n > 0);
        if (plain) name[n++] = *c;
        else n += (size_t)snprintf(name + n, sizeof name - n, "%%%02X", (unsigned char)*c);
    }
    if (*c) n += (size_t)snprintf(name + n, sizeof name - n, "~%016llx", (unsigned long long)peri__hash_text(h->name));
    name[n] = 0;
    size_t most = strlen(directory) + 360;
    char *path = peri__alloc(most);
    if (path)
        snprintf(path, most, "%s/%s.rows-%lld-%lld.cols-%lld-%lld.peri", directory, name, (long long)h->row_offset,
                 (long long)(h->row_offset + h->rows), (long long)h->col_offset, (long long)(h->col_offset + h->cols));
    return path;
}

/** An error unless the file @have is of the table @want. */
static peri_status check_same(const char *path, const peri__row_header *have, const peri__row_header *want)
{
    const struct {
        const char *what;
        int64_t have, want;
    } numbers[] = {
        {"rows", have->rows, want->rows},
        {"columns", have->cols, want->cols},
        {"first row", have->row_offset, want->row_offset},
        {"first column", have->col_offset, want->col_offset},
        {"rows of the whole table", have->total_rows, want->total_rows},
        {"columns of the whole table", have->total_cols, want->total_cols},
        {"dtype", have->dtype, want->dtype},
        {"optimizer", have->optimizer, want->optimizer},
        {"bytes of a record", have->record_bytes, want->record_bytes},
        {"seed", (int64_t)have->seed, (int64_t)want->seed},
        {"initialiser", have->init, want->init},
    };
    if (strcmp(have->name, want->name) != 0)
        return peri__fail(PERI_EMISMATCH, "row file '%.250s': it holds table '%.80s', not '%.80s'", path, have->name, want->name);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (numbers[i].have != numbers[i].want)
            return peri__fail(PERI_EMISMATCH, "row file '%.250s' of table '%.80s': %s %lld, the table has %lld", path, want->name,
                              numbers[i].what, (long long)numbers[i].have, (long long)numbers[i].want);
    if (have->init_a != want->init_a || have->init_b != want->init_b || memcmp(have->part_bytes, want->part_bytes, sizeof have->part_bytes))
        return peri__fail(PERI_EMISMATCH, "row file '%.250s' of table '%.80s': another initialiser or other optimizer states", path,
                          want->name);
    if (!have->clean)
        return peri__fail(PERI_EFORMAT,
                          "row file '%.250s' of table '%.80s': it was not flushed before its process ended, so its rows are of "
                          "different times; restore it from a checkpoint or remove it",
                          path, want->name);
    return PERI_OK;
}

static peri_status write_header(peri__row_file *f)
{
    unsigned char bytes[PERI__ROW_HEADER_BYTES];
    peri__row_header_seal(&f->header, bytes);
    ssize_t n = pwrite(f->fd, bytes, sizeof bytes, 0);
    if (n == (ssize_t)sizeof bytes) return PERI_OK;
    if (n >= 0) errno = ENOSPC;
    return fail_errno(f->path, "writing the header");
}

static peri_status open_temporary(peri__row_file *f)
{
    const char *directory = getenv("TMPDIR");
    if (!directory || !*directory) directory = "/var/tmp";
    size_t most = strlen(directory) + 32;
    f->path = peri__alloc(most);
    if (!f->path) return PERI_ENOMEM;
    f->temporary = f->fresh = true;
    snprintf(f->path, most, "%s", directory);
    f->fd = open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (f->fd >= 0) return PERI_OK;
    snprintf(f->path, most, "%s/perilune-XXXXXX", directory);
    f->fd = mkostemp(f->path, O_CLOEXEC);
    if (f->fd < 0) return fail_errno(f->path, "making a temporary file");
    unlink(f->path);
    return PERI_OK;
}

/** Open the file and find out whether there is something in it already. */
static peri_status open_named(peri__row_file *f, const char *directory, const peri__row_header *want, int64_t *size)
{
    struct stat info;
    f->path = path_of(directory, want);
    if (!f->path) return PERI_ENOMEM;
    f->fd = open(f->path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (f->fd < 0) return fail_errno(f->path, "opening it");
    if (flock(f->fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK) return fail_errno(f->path, "locking it");
        return peri__fail(PERI_EIO, "row file '%.300s': another table or process has it open", f->path);
    }
    if (fstat(f->fd, &info) != 0) return fail_errno(f->path, "asking for its size");
    if (!S_ISREG(info.st_mode)) return peri__fail(PERI_EIO, "row file '%.300s': not an ordinary file", f->path);
    *size = info.st_size;
    f->fresh = info.st_size == 0;
    return PERI_OK;
}

/** A file that was there before: read its header and compare. */
static peri_status adopt(peri__row_file *f, const peri__row_header *want, int64_t size)
{
    unsigned char bytes[PERI__ROW_HEADER_BYTES];
    ssize_t n = pread(f->fd, bytes, sizeof bytes, 0);
    if (n < 0) return fail_errno(f->path, "reading the header");
    PERI_TRY(peri__row_header_parse(f->path, bytes, n, &f->header));
    PERI_TRY(check_same(f->path, &f->header, want));
    int64_t whole = PERI__ROW_HEADER_BYTES + want->rows * want->record_bytes;
    if (size < whole)
        return peri__fail(PERI_EFORMAT, "row file '%.300s': %lld bytes, its %lld rows need %lld: it was cut off", f->path,
                          (long long)size, (long long)want->rows, (long long)whole);
    return PERI_OK;
}

peri_status peri__row_file_open(const char *directory, const peri__row_header *want, peri__row_file **out)
{
    peri__row_file *f = peri__alloc_zero(sizeof *f);
    if (!f) return PERI_ENOMEM;
    f->fd = -1;
    int64_t size = 0;
    peri_status status = directory ? open_named(f, directory, want, &size) : open_temporary(f);
    if (status >= 0 && f->fresh) {
        f->header = *want;
        f->header.clean = 1;
        f->header.iteration = 0;
        if (ftruncate(f->fd, (off_t)(PERI__ROW_HEADER_BYTES + want->rows * want->record_bytes)) != 0)
            status = fail_errno(f->path, "making it as long as its rows need");
        if (status >= 0) status = write_header(f);
        if (status < 0 && directory) unlink(f->path);
    } else if (status >= 0) {
        status = adopt(f, want, size);
    }
    if (status < 0) {
        peri__row_file_close(f);
        return status;
    }
    posix_fadvise(f->fd, 0, 0, POSIX_FADV_RANDOM); /* no reading ahead */
    *out = f;
    return PERI_OK;
}

peri_status peri__row_file_mark(peri__row_file *f, bool clean, int64_t iteration)
{
    if (f->temporary || (f->header.clean == clean && f->header.iteration == iteration)) return PERI_OK;
    if (clean && fdatasync(f->fd) != 0) return fail_errno(f->path, "bringing its rows to the disk");
    peri__row_header before = f->header;
    f->header.clean = clean;
    f->header.iteration = iteration;
    peri_status status = write_header(f);
    if (status >= 0 && fdatasync(f->fd) != 0) status = fail_errno(f->path, "bringing its header to the disk");
    if (status < 0) f->header = before;
    return status;
}

void peri__row_file_close(peri__row_file *f)
{
    if (!f) return;
    int saved = errno;
    if (f->fd >= 0) close(f->fd);
    errno = saved;
    peri__free(f->path);
    peri__free(f);
}
