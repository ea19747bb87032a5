/* SPDX-License-Identifier: Apache-2.0
 *
 * row_file.c: see row_file.h.
 */
#include "row_file.h"

#include "../../base/quiet.h"
#include "../embed_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <xxhash.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "row files are little-endian; this machine needs conversions here"
#endif

/* -- the header ---------------------------------------------------------------------------------------------------- */

#define ROW_MAGIC UINT64_C(0x0a53574f52495250) /* "PRIROWS\n" */
enum { ROW_VERSION = 3 };

/** Element types in files keep the numbers that they had in the first of them: f64 was 0, and f32 1. */
static int32_t dtype_on_disk(int32_t dtype) { return dtype == PERI_F32 ? 1 : dtype == PERI_F64 ? 0 : dtype; }

/** The header on the disk; what follows it up to the checksum is zero. */
typedef struct disk_header {
    uint64_t magic;
    uint32_t version, header_bytes;
    int64_t rows, cols, row_offset, col_offset, total_rows, total_cols, record_bytes, iteration, flush;
    uint64_t stamp, map_sum, ids_sum;
    int64_t ids_iteration;
    uint64_t seed;
    double init_a, init_b;
    int32_t init, dtype, optimizer, clean, n_parts, part_bytes[PERI__ROW_PARTS], reserved;
    char name[PERI__ROW_NAME_MAX];
} disk_header;

enum { CHECKSUM_AT = PERI__ROW_HEADER_BYTES - 8 };
_Static_assert(sizeof(disk_header) <= CHECKSUM_AT && sizeof(disk_header) == 16 + 16 * 8 + 12 * 4 + PERI__ROW_NAME_MAX,
               "no padding");

void peri__row_header_seal(const peri__row_header *h, unsigned char bytes[PERI__ROW_HEADER_BYTES])
{
    disk_header d = {.magic = ROW_MAGIC,
                     .version = ROW_VERSION,
                     .header_bytes = PERI__ROW_HEADER_BYTES,
                     .rows = h->rows,
                     .cols = h->cols,
                     .row_offset = h->row_offset,
                     .col_offset = h->col_offset,
                     .total_rows = h->total_rows,
                     .total_cols = h->total_cols,
                     .record_bytes = h->record_bytes,
                     .iteration = h->iteration,
                     .flush = h->flush,
                     .stamp = h->stamp,
                     .map_sum = h->map_sum,
                     .ids_sum = h->ids.sum,
                     .ids_iteration = h->ids.iteration,
                     .seed = h->seed,
                     .init_a = h->init_a,
                     .init_b = h->init_b,
                     .init = h->init,
                     .dtype = dtype_on_disk(h->dtype),
                     .optimizer = h->optimizer,
                     .clean = h->clean,
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
    for (int32_t p = 0; p < h->n_parts; p++)
        bytes += h->part_bytes[p] < 0 ? -h->part_bytes[p] : h->part_bytes[p] * h->cols;
    return (bytes + 7) / 8 * 8;
}

/** Are the numbers possible? NULL, or what is wrong. */
static const char *check_numbers(const disk_header *d, const peri__row_header *h)
{
    const int64_t most = INT64_C(1) << 43;
    if (d->rows < 0 || d->rows > most || d->cols < 1 || d->cols > 1 << 20)
        return "its numbers of rows and columns are impossible";
    if (d->row_offset < 0 || d->total_rows < 0 || d->total_rows > most || d->row_offset > d->total_rows - d->rows)
        return "its rows are not within the whole table";
    if (d->col_offset < 0 || d->total_cols < 1 || d->total_cols > 1 << 20 || d->col_offset > d->total_cols - d->cols)
        return "its columns are not within the whole table";
    if (d->n_parts < 1 || d->n_parts > PERI__ROW_PARTS) return "its number of parts is impossible";
    for (int32_t p = 0; p < PERI__ROW_PARTS; p++) {
        int32_t bytes = d->part_bytes[p];
        if (p < d->n_parts ? bytes == 0 || bytes < -16 || bytes > 16 : bytes != 0)
            return "an element's size is impossible";
    }
    int64_t total;
    if (d->record_bytes != peri__row_record_bytes(h)) return "its records do not fit their parts";
    int64_t beside = PERI__ROW_HEADER_BYTES + peri__row_map_bytes(d->rows);
    if (__builtin_mul_overflow(d->rows, d->record_bytes, &total) || total > INT64_MAX - beside)
        return "it is too large";
    if (d->iteration < 0) return "its iteration is negative";
    if (d->flush < 0 || (d->flush == 0) != (d->stamp == 0)) return "its flush is impossible";
    if (d->ids_iteration < 0 || (d->ids_sum == 0 && d->ids_iteration != 0) || (d->flush == 0 && d->ids_sum != 0))
        return "its map of raw ids is impossible";
    if (d->clean != 0 && d->clean != 1) return "its state is neither clean nor unclean";
    if (d->dtype < 0 || d->dtype >= PERI_DTYPE_COUNT || d->optimizer < 0 || d->optimizer >= PERI_TBE_OPTIMIZER_COUNT ||
        d->init < PERI_INIT_DEFAULT || d->init > PERI_INIT_NONE)
        return "its dtype, optimizer or initialiser is none";
    if (d->name[sizeof d->name - 1] != 0 || d->name[0] == 0) return "its table has no name";
    return NULL;
}

peri_status peri__row_header_parse(const char *path, const void *bytes, int64_t size, peri__row_header *out)
{
    disk_header d;
    uint64_t sum;
    if (size < PERI__ROW_HEADER_BYTES)
        return peri__fail(PERI_EFORMAT, "row file '%.300s': %lld bytes, a header needs %d", path, (long long)size,
                          PERI__ROW_HEADER_BYTES);
    memcpy(&d, bytes, sizeof d);
    memcpy(&sum, (const char *)bytes + CHECKSUM_AT, sizeof sum);
    if (d.magic != ROW_MAGIC)
        return peri__fail(PERI_EFORMAT, "row file '%.300s': not a row file (its first bytes are others)", path);
    if (d.version != ROW_VERSION || d.header_bytes != PERI__ROW_HEADER_BYTES)
        return peri__fail(PERI_EFORMAT,
                          "row file '%.300s': version %u, this library reads %d; go on with the library that wrote it, "
                          "or remove it to "
                          "start from scratch",
                          path, d.version, ROW_VERSION);
    if (sum != XXH3_64bits(bytes, CHECKSUM_AT))
        return peri__fail(PERI_EFORMAT, "row file '%.300s': the header is damaged (wrong checksum)", path);
    peri__row_header h = {.rows = d.rows,
                          .cols = d.cols,
                          .row_offset = d.row_offset,
                          .col_offset = d.col_offset,
                          .total_rows = d.total_rows,
                          .total_cols = d.total_cols,
                          .record_bytes = d.record_bytes,
                          .iteration = d.iteration,
                          .flush = d.flush,
                          .stamp = d.stamp,
                          .map_sum = d.map_sum,
                          .ids = {.sum = d.ids_sum, .iteration = d.ids_iteration},
                          .seed = d.seed,
                          .init_a = d.init_a,
                          .init_b = d.init_b,
                          .init = d.init,
                          .dtype = dtype_on_disk(d.dtype),
                          .optimizer = d.optimizer,
                          .clean = d.clean,
                          .n_parts = d.n_parts < 0                 ? 0
                                     : d.n_parts > PERI__ROW_PARTS ? PERI__ROW_PARTS
                                                                   : d.n_parts};
    memcpy(h.part_bytes, d.part_bytes, sizeof h.part_bytes);
    memcpy(h.name, d.name, sizeof h.name);
    bool narrow = d.cols >= 0 && d.cols <= 1 << 20; /* else the record's size would overflow */
    for (int32_t p = 0; p < PERI__ROW_PARTS; p++) narrow = narrow && d.part_bytes[p] >= -16 && d.part_bytes[p] <= 16;
    const char *wrong = narrow ? check_numbers(&d, &h) : "its sizes are impossible";
    if (wrong) return peri__fail(PERI_EFORMAT, "row file '%.300s': %s", path, wrong);
    *out = h;
    return PERI_OK;
}

/* -- records ------------------------------------------------------------------------------------------------------- */

/** A record in another row's place, or another table's, has the wrong sum. */
static uint32_t record_sum(const peri__row_file *f, int64_t row, const char *record)
{
    uint64_t sum = XXH3_64bits(record + 4, (size_t)f->header.record_bytes - 4);
    return (uint32_t)peri__hash_mix(peri__hash_mix(f->salt, (uint64_t)row), sum);
}

static uint64_t checksum_salt(const peri__row_header *h)
{
    uint64_t salt = peri__hash_mix(peri__hash_text(h->name), h->seed);
    const int64_t place[] = {h->row_offset, h->col_offset, h->cols, h->total_rows, h->total_cols};
    for (size_t i = 0; i < sizeof place / sizeof *place; i++) salt = peri__hash_mix(salt, (uint64_t)place[i]);
    return salt;
}

void peri__row_record_seal(const peri__row_file *f, int64_t row, void *record)
{
    memset((char *)record + 4, 0, 4);
    uint32_t sum = record_sum(f, row, record);
    memcpy(record, &sum, sizeof sum);
}

bool peri__row_record_is_whole(const peri__row_file *f, int64_t row, const void *record)
{
    uint32_t sum;
    memcpy(&sum, record, sizeof sum);
    return sum == record_sum(f, row, record);
}

bool peri__row_record_is_hole(const peri__row_file *f, const void *record)
{
    const char *at = record;
    return at[0] == 0 && !memcmp(at, at + 1, (size_t)f->header.record_bytes - 1);
}

/* -- opening ------------------------------------------------------------------------------------------------------- */

static peri_status fail_errno(const char *path, const char *what)
{
    int code = errno;
    return peri__fail(code == ENOMEM ? PERI_ENOMEM : PERI_EIO, "row file '%.300s': %s: %s", path, what, strerror(code));
}

static int64_t map_offset(const peri__row_header *h) { return PERI__ROW_HEADER_BYTES + h->rows * h->record_bytes; }
static int64_t file_bytes(const peri__row_header *h) { return map_offset(h) + peri__row_map_bytes(h->rows); }

static bool set_file_bytes(int fd, int64_t bytes)
{
    PERI__QUIET;
    return ftruncate(fd, (off_t)bytes) == 0;
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
        {"seed", (int64_t)have->seed, (int64_t)want->seed},
    };
    char starts[2][PERI__START_TEXT];
    const struct {
        const char *what, *have, *want;
    } words[] = {
        {"dtype", peri_dtype_name(have->dtype), peri_dtype_name(want->dtype)},
        {"optimizer", peri__optimizer_kind_of(have->optimizer)->name, peri__optimizer_kind_of(want->optimizer)->name},
        {"start values", peri__start_text(have->init, have->init_a, have->init_b, starts[0]),
         peri__start_text(want->init, want->init_a, want->init_b, starts[1])},
    };
    if (strcmp(have->name, want->name) != 0)
        return peri__fail(PERI_EMISMATCH, "row file '%.250s': it holds table '%.80s', not '%.80s'", path, have->name,
                          want->name);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (numbers[i].have != numbers[i].want)
            return peri__fail(PERI_EMISMATCH, "row file '%.250s' of table '%.80s': %s %lld, the table has %lld", path,
                              want->name, numbers[i].what, (long long)numbers[i].have, (long long)numbers[i].want);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcmp(words[i].have, words[i].want) != 0)
            return peri__fail(PERI_EMISMATCH, "row file '%.250s' of table '%.80s': %s %s, the table has %s", path,
                              want->name, words[i].what, words[i].have, words[i].want);
    if (have->record_bytes != want->record_bytes || memcmp(have->part_bytes, want->part_bytes, sizeof have->part_bytes))
        return peri__fail(PERI_EMISMATCH,
                          "row file '%.250s' of table '%.80s': its optimizer has other states: %lld bytes of a row, "
                          "the table has %lld",
                          path, want->name, (long long)have->record_bytes, (long long)want->record_bytes);
    if (have->flush != 0 && (have->ids.sum != 0) != want->raw_ids)
        return peri__fail(PERI_EMISMATCH,
                          "row file '%.250s' of table '%.80s': its rows are %s, the table's %s; name another "
                          "directory, or remove it to "
                          "start from scratch",
                          path, want->name,
                          want->raw_ids ? "those of ids that are rows"
                                        : "those that a map gave to raw ids (managed "
                                          "collision)",
                          want->raw_ids ? "are given to raw ids by a map (managed collision)" : "ids are rows");
    if (!have->clean)
        return peri__fail(
            PERI_EFORMAT,
            "row file '%.250s' of table '%.80s': it was not flushed before its process ended (the last flush was "
            "number "
            "%lld, of iteration %lld), so its rows are of different times; restore all files of the module from a "
            "checkpoint, or remove all to start from scratch",
            path, want->name, (long long)have->flush, (long long)have->iteration);
    return PERI_OK;
}

static peri_status write_header(peri__row_file *f)
{
    unsigned char bytes[PERI__ROW_HEADER_BYTES];
    peri__row_header_seal(&f->header, bytes);
    const bool written = peri__write_at(f->fd, bytes, sizeof bytes, 0) == sizeof bytes;
    return written ? PERI_OK : fail_errno(f->path, "writing the header");
}

static peri_status open_temporary(peri__row_file *f)
{
    const char *directory = secure_getenv("TMPDIR");
    if (!directory || !*directory) directory = "/var/tmp";
    size_t most = strlen(directory) + 32;
    f->path = peri__alloc(most);
    if (!f->path) return PERI_ENOMEM;
    f->temporary = f->fresh = true;
    snprintf(f->path, most, "%s", directory);
    f->fd = peri__fd_of_ours(open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
    if (f->fd >= 0) return PERI_OK;
    snprintf(f->path, most, "%s/perilune-XXXXXX", directory);
    f->fd = peri__fd_of_ours(mkostemp(f->path, O_CLOEXEC));
    if (f->fd < 0) return fail_errno(f->path, "making a temporary file");
    unlink(f->path);
    return PERI_OK;
}

/** What @f's name is of: PERI_OK: of the file that is open; PERI_PENDING: of another one, or of none (*@none). */
static peri_status whose_name(const peri__row_file *f, bool *none)
{
    struct stat own, named;
    *none = false;
    if (fstat(f->fd, &own) != 0) return fail_errno(f->path, "asking for its name");
    if (stat(f->full, &named) == 0)
        return own.st_dev == named.st_dev && own.st_ino == named.st_ino ? PERI_OK : PERI_PENDING;
    if (errno != ENOENT && errno != ENOTDIR) return fail_errno(f->path, "asking for its name");
    *none = true;
    return PERI_PENDING;
}

/** An error unless an open file still has its name and its length: who opens the name next would find nothing, or
 *  something else. */
static peri_status check_there(const peri__row_file *f)
{
    struct stat info;
    bool none;
    peri_status status = whose_name(f, &none);
    if (status == PERI_PENDING)
        return peri__fail(PERI_EIO,
                          "row file '%.300s' of table '%.80s': %s while it was in use: no flush can be found there; "
                          "put the file back if "
                          "it was moved, or else save a state_dict, which still has all rows, and begin with it in an "
                          "empty directory",
                          f->path, f->header.name, none ? "it was removed or moved" : "another file took its name");
    PERI_TRY(status);
    if (fstat(f->fd, &info) != 0) return fail_errno(f->path, "asking for its size");
    if (info.st_size >= file_bytes(&f->header)) return PERI_OK;
    return peri__fail(PERI_EIO,
                      "row file '%.300s' of table '%.80s': %lld bytes, its %lld rows need %lld: it was cut off while "
                      "it was in use, and "
                      "rows are lost; restore all files of the module from a copy, or remove all to start from scratch",
                      f->path, f->header.name, (long long)info.st_size, (long long)f->header.rows,
                      (long long)file_bytes(&f->header));
}

/** Take the lock of an open file; PERI_PENDING: its name is gone by now, or another's. @made: it has no name yet. */
static peri_status lock_file(peri__row_file *f, bool made, int64_t *size)
{
    struct stat info;
    bool none;
    if (flock(f->fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK) return fail_errno(f->path, "locking it");
        return peri__fail(PERI_EIO, "row file '%.300s': another table or process has it open", f->path);
    }
    if (fstat(f->fd, &info) != 0) return fail_errno(f->path, "asking for its size");
    if (!S_ISREG(info.st_mode)) return peri__fail(PERI_EIO, "row file '%.300s': not an ordinary file", f->path);
    *size = info.st_size;
    return made ? PERI_OK : whose_name(f, &none);
}

/** Give a file its name for good: it, not its name only, is on the disk then. PERI_PENDING: another file has the
 *  name. */
static peri_status give_name(peri__row_file *f, const char *directory, const char *made)
{
    int status = link(made, f->path);
    if (status != 0 && (errno == EPERM || errno == EOPNOTSUPP)) /* no links in this file system */
        status = renameat2(AT_FDCWD, made, AT_FDCWD, f->path, RENAME_NOREPLACE);
    if (status != 0) return errno == EEXIST ? PERI_PENDING : fail_errno(f->path, "giving it its name");
    f->fresh = true;
    int folder = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    status = folder < 0 ? -1 : fsync(folder);
    peri_status result = status == 0 ? PERI_OK : fail_errno(f->path, "bringing its name to the disk");
    if (folder >= 0) close(folder);
    return result;
}

/** Make a file with a header under another name, and give it its own when it is whole: a crash leaves no half-made file
 *  under the name.
 *  PERI_PENDING: somebody else was faster. */
static peri_status make_named(peri__row_file *f, const char *directory, const peri__row_header *want)
{
    int64_t size;
    size_t most = strlen(directory) + 40;
    char *made = peri__alloc(most);
    if (!made) return PERI_ENOMEM;
    snprintf(made, most, "%s/.row-file-%016llx", directory, (unsigned long long)peri__row_stamp());
    f->fd = peri__fd_of_ours(open(made, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (f->fd < 0) {
        peri_status status = fail_errno(f->path, "opening it");
        if (access(directory, F_OK) != 0)
            status = peri__fail(PERI_EIO,
                                "row file '%.300s' of table '%.80s': there is no directory '%.300s'; make it first "
                                "(mkdir -p), or name another one",
                                f->path, want->name, directory);
        peri__free(made);
        return status;
    }
    f->header = *want;
    peri_status status = lock_file(f, true, &size);
    if (status >= 0 && !set_file_bytes(f->fd, file_bytes(want)))
        status = fail_errno(f->path, "making it as long as its rows need");
    if (status >= 0) status = write_header(f);
    if (status >= 0) status = give_name(f, directory, made);
    unlink(made);
    peri__free(made);
    return status;
}

static peri_status read_header(int fd, const char *path, peri__row_header *out)
{
    unsigned char bytes[PERI__ROW_HEADER_BYTES];
    const int64_t n = peri__read_at(fd, bytes, sizeof bytes, 0);
    if (n < (int64_t)sizeof bytes && errno) return fail_errno(path, "reading the header");
    return peri__row_header_parse(path, bytes, n, out);
}

/** A file that was there before: read its header and compare. */
static peri_status adopt_file(peri__row_file *f, const peri__row_header *want, int64_t size)
{
    PERI_TRY(read_header(f->fd, f->path, &f->header));
    PERI_TRY(check_same(f->path, &f->header, want));
    int64_t whole = file_bytes(want);
    if (size < whole)
        return peri__fail(PERI_EFORMAT, "row file '%.300s': %lld bytes, its %lld rows need %lld: it was cut off",
                          f->path, (long long)size, (long long)want->rows, (long long)whole);
    return peri__row_map_load(&f->map, f->path, f->fd, map_offset(&f->header), f->header.map_sum);
}

/** @path from the root on; NULL: no memory, or no working directory (errno). */
static char *full_path(const char *path)
{
    char here[PATH_MAX] = "";
    if (path[0] != '/' && !getcwd(here, sizeof here)) return NULL;
    size_t most = strlen(here) + strlen(path) + 2;
    char *full = peri__alloc(most);
    if (full) snprintf(full, most, "%s%s%s", here, *here ? "/" : "", path);
    else errno = ENOMEM;
    return full;
}

/** Open the file of this name, or make it. */
static peri_status open_named(peri__row_file *f, const char *directory, const peri__row_header *want)
{
    int64_t size = 0;
    f->path = peri__row_file_path(directory, want);
    if (!f->path) return PERI_ENOMEM;
    f->full = full_path(f->path);
    if (!f->full) return fail_errno(f->path, "finding out where it is");
    PERI_TRY(peri__row_files_check(directory, want));
    for (int tries = 0; tries < 100; tries++) {
        if (f->fd >= 0) close(f->fd);
        f->fd = peri__fd_of_ours(open(f->path, O_RDWR | O_CLOEXEC));
        if (f->fd < 0 && errno != ENOENT) return fail_errno(f->path, "opening it");
        if (peri__file_planted(f->path))
            return peri__fail(PERI_EIO,
                              "row file '%.300s' is another user's, in a folder in which everybody may make files: "
                              "it is not opened",
                              f->path);
        peri_status status = f->fd < 0 ? make_named(f, directory, want) : lock_file(f, false, &size);
        if (status == PERI_PENDING) continue; /* it came or went in between */
        return status < 0 || f->fresh ? status : adopt_file(f, want, size);
    }
    return peri__fail(PERI_EIO, "row file '%.300s': other processes make and remove it all the time", f->path);
}

peri_status peri__row_file_open(const char *directory, const peri__row_header *asked, peri__row_file **out)
{
    peri__row_file *f = peri__alloc_zero(sizeof *f);
    if (!f) return PERI_ENOMEM;
    f->fd = -1;
    peri__row_header want = *asked;
    want.clean = 1;
    want.iteration = want.flush = 0;
    want.stamp = want.map_sum = 0;
    want.ids = (peri_ids_mark){0};
    f->salt = checksum_salt(&want);
    peri_status status = peri__row_map_init(&f->map, want.rows);
    if (status >= 0) status = directory ? open_named(f, directory, &want) : open_temporary(f);
    if (status >= 0 && f->temporary) {
        f->header = want;
        if (!set_file_bytes(f->fd, file_bytes(&want)))
            status = fail_errno(f->path, "making it as long as its rows need");
    }
    if (status < 0) {
        peri__row_file_close(f);
        return status;
    }
    posix_fadvise(f->fd, 0, 0, POSIX_FADV_RANDOM); /* no reading ahead */
    *out = f;
    return PERI_OK;
}

/* -- flushes ------------------------------------------------------------------------------------------------------- */

peri_status peri__row_file_peek(const char *path, peri__row_header *out)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return fail_errno(path, "opening it");
    const peri_status status = read_header(fd, path, out);
    close(fd);
    return status;
}

/** Write the header as it is to become, and wait for the disk. After a failure the disk may hold either. */
static peri_status change_header(peri__row_file *f, const peri__row_header *next)
{
    peri__row_header before = f->header;
    f->header = *next;
    f->unsure = true;
    peri_status status = write_header(f);
    if (status >= 0 && fdatasync(f->fd) != 0) status = fail_errno(f->path, "bringing its header to the disk");
    if (status < 0) f->header = before;
    else f->unsure = false;
    return status;
}

peri_status peri__row_file_mark_unclean(peri__row_file *f)
{
    if (f->temporary || !(f->header.clean || f->unsure)) return PERI_OK;
    peri__row_header next = f->header;
    next.clean = 0;
    return change_header(f, &next);
}

peri_status peri__row_file_sync(peri__row_file *f)
{
    if (f->temporary) return PERI_OK;
    PERI_TRY(check_there(f));
    if (f->header.clean) return PERI_OK;
    PERI_TRY(peri__row_map_store(&f->map, f->path, f->fd, map_offset(&f->header), &f->header.map_sum));
    return fdatasync(f->fd) == 0 ? PERI_OK : fail_errno(f->path, "bringing its rows to the disk");
}

peri_status peri__row_file_mark_clean(peri__row_file *f, int64_t iteration, int64_t flush, uint64_t stamp,
                                const peri_ids_mark *ids)
{
    peri__row_header next = f->header;
    bool same = f->header.clean && f->header.iteration == iteration && f->header.flush == flush &&
                f->header.stamp == stamp && f->header.ids.sum == ids->sum && f->header.ids.iteration == ids->iteration;
    if (f->temporary || (same && !f->unsure)) return PERI_OK;
    PERI_TRY(check_there(f));
    next.clean = 1;
    next.iteration = iteration;
    next.flush = flush;
    next.stamp = stamp;
    next.ids = *ids;
    return change_header(f, &next);
}

uint64_t peri__row_stamp(void)
{
    uint64_t stamp = 0;
    if (getrandom(&stamp, sizeof stamp, 0) != (ssize_t)sizeof stamp) /* a very old system */
        stamp = peri__hash_mix((uint64_t)getpid(), (uint64_t)peri_time_ns());
    return stamp ? stamp : 1;
}

void peri__row_file_close(peri__row_file *f)
{
    if (!f) return;
    int saved = errno;
    bool none;
    if (f->fresh && !f->temporary && f->header.clean && f->header.flush == 0 && whose_name(f, &none) == PERI_OK)
        unlink(f->full);
    if (f->fd >= 0) close(f->fd);
    if (f->memory) munmap(f->memory, (size_t)peri__row_memory_bytes(f));
    errno = saved;
    peri__row_map_fini(&f->map);
    peri__free(f->path);
    peri__free(f->full);
    peri__free(f);
}
