/* SPDX-License-Identifier: Apache-2.0
 *
 * lines.c: any bytes as one or two files of columns, packed by gzip or not: the reader gives samples or an error with a
 * sentence, and the rows of all ranks together are the lines that it counts. The first bytes choose the description of
 * the columns.
 *
 * inputs: 20000
 */
#include "choices.h"

#include <perilune/perilune.h>

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { FILES = 2, ROWS = 50 };

/** What is read of a batch is what the header promises. */
static void check_batch(const peri_batch *b)
{
    int64_t at = 0;
    for (int64_t i = 0; i < b->rows * b->sparse_features; i++) {
        require(b->lengths[i] >= 0 && b->lengths[i] <= b->ids, "an impossible length");
        for (int32_t k = 0; k < b->lengths[i]; k++, at++)
            require(b->values[at] >= 0 && b->values[at] < ROWS, "an id outside its table");
    }
    require(at == b->ids, "the lengths do not sum to the ids");
    for (int64_t i = 0; i < b->rows * b->dense_features; i++)
        require(b->dense[i] - b->dense[i] == 0, "a number that is not finite");
}

/** The rows of one rank; -1 after an error. */
static int64_t read_all(peri_csv_config *o, int64_t *lines)
{
    peri_criteo *reader = NULL;
    peri_batch *batch = NULL;
    int64_t rows = 0;
    int32_t dense = 0, sparse = 0;
    for (int32_t i = 0; i < o->n_columns; i++) {
        dense += o->columns[i].kind == PERI_COLUMN_DENSE;
        sparse += o->columns[i].kind == PERI_COLUMN_IDS;
    }
    if (peri_csv_open(o, &reader) < 0) {
        require(strlen(peri_error_message()) > 10, "an error without a sentence");
        return -1;
    }
    require(peri_batch_new(dense, sparse, 0, 0, &batch) == PERI_OK, "no batch");
    *lines = peri_criteo_count(reader);
    do {
        if (peri_criteo_next(reader, batch) < 0) {
            require(strlen(peri_error_message()) > 10, "an error without a sentence");
            rows = -1;
            break;
        }
        check_batch(batch);
        rows += batch->rows;
    } while (batch->global_rows);
    peri_batch_release(batch);
    peri_criteo_release(reader);
    return rows;
}

/** A file of memory with these bytes; its path goes to @path. */
static int file_of(const uint8_t *data, size_t n, char *path, size_t room)
{
    int fd = memfd_create("lines", 0);
    require(fd >= 0 && write(fd, data, n) == (ssize_t)n, "no file in memory");
    snprintf(path, room, "/proc/self/fd/%d", fd);
    return fd;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char separators[] = {' ', '|', 0};
    const char *names[] = {"a", "b", "c", "d"};
    peri_csv_column columns[4];
    char path[FILES][40];
    const char *paths[FILES] = {path[0], path[1]};
    int fd[FILES];
    bytes = data;
    left = size;
    peri_csv_config o = {.size = sizeof o, .paths = paths, .columns = columns, .n_paths = 1 + (int32_t)pick(FILES),
                         .n_columns = 1 + (int32_t)pick(4), .delimiter = pick(2) ? ',' : '\t', .header = pick(2),
                         .world = 1 + (int32_t)pick(3), .batch_rows = 1 + pick(7), .begin = 0, .end = 1};
    for (int32_t i = 0; i < 4; i++) {
        columns[i] = (peri_csv_column){.size = sizeof *columns,
                                       .name = names[i],
                                       .kind = (int32_t)pick(4),
                                       .dense = (int32_t)pick(3),
                                       .ids = (int32_t)pick(4),
                                       .base = pick(2) ? 10 : 16,
                                       .table_rows = ROWS,
                                       .most = pick(3),
                                       .separator = separators[pick(3)]};
    }
    size_t first = o.n_paths == 2 ? (size_t)pick(255) * left / 255 : left;
    fd[0] = file_of(bytes, first, path[0], sizeof path[0]);
    fd[1] = file_of(bytes + first, left - first, path[1], sizeof path[1]);
    int64_t rows = 0, lines = 0;
    for (o.rank = 0; o.rank < o.world && rows >= 0; o.rank++) {
        int64_t own = read_all(&o, &lines);
        rows = own < 0 ? -1 : rows + own;
    }
    require(rows < 0 || rows == lines, "the ranks' rows are not the lines of the files");
    close(fd[0]);
    close(fd[1]);
    return 0;
}
