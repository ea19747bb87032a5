/* SPDX-License-Identifier: Apache-2.0
 *
 * criteo.c: any bytes as a Criteo file: the reader gives samples or an error, and never leaves its memory. The first
 * byte chooses the options; the text lies at the very end of its block, so that reading behind it is caught.
 */
#include <perilune/perilune.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(int good, const char *what)
{
    if (good) return;
    fprintf(stderr, "criteo fuzz: %s\n", what);
    abort();
}

/** Whatever was read must be what the header promises. */
static void check_batch(const peri_batch *b, const int64_t *table_rows)
{
    int64_t at = 0;
    for (int32_t f = 0; f < b->sparse_features; f++)
        for (int64_t i = 0; i < b->rows; i++) {
            int32_t length = b->lengths[f * b->rows + i];
            require(length == 0 || length == 1, "a bag of more than one id");
            for (; length > 0; length--, at++)
                require(b->values[at] >= 0 && b->values[at] < table_rows[f], "an id outside its table");
        }
    require(at == b->ids, "the lengths do not sum to the ids");
    for (int64_t i = 0; i < b->rows; i++)
        require(b->labels[i] == 0 || b->labels[i] == 1, "a label that is neither 0 nor 1");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const int64_t table_rows[3] = {2, 1000, INT64_C(1) << 40};
    if (size < 1) return 0;
    uint8_t choice = data[0];
    char *text = malloc(size);
    require(text != NULL, "no memory");
    memcpy(text, data + 1, size - 1);
    char *end = realloc(text, size - 1 ? size - 1 : 1);
    peri_criteo_config o = {.size = sizeof o,
                            .path = "fuzz",
                            .table_rows = table_rows,
                            .dense_features = 2,
                            .sparse_features = 3,
                            .world = 1 + (choice & 1),
                            .dense = choice % 3,
                            .ids = choice >> 3 & 1,
                            .missing = choice >> 4 & 1,
                            .batch_rows = 1 + (choice >> 5),
                            .begin = choice & 4 ? 0.25 : 0,
                            .end = choice & 2 ? 0.75 : 1};
    int64_t lines = 0, expected = 0;
    bool failed = false;
    for (o.rank = 0; o.rank < o.world; o.rank++) {
        peri_criteo *reader = NULL;
        peri_batch *batch = NULL;
        require(peri_criteo_open_memory(&o, end, (int64_t)size - 1, &reader) == PERI_OK, "the reader does not open");
        require(peri_batch_new(2, 3, 0, 0, &batch) == PERI_OK, "no batch");
        expected = peri_criteo_count(reader);
        do {
            failed = failed || peri_criteo_next(reader, batch) != PERI_OK;
            if (failed) break;
            check_batch(batch, table_rows);
            lines += batch->rows;
        } while (batch->global_rows);
        peri_batch_release(batch);
        peri_criteo_release(reader);
    }
    require(failed || lines == expected, "the ranks' rows are not the lines of the part");
    free(end);
    return 0;
}
