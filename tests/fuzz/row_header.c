/* SPDX-License-Identifier: Apache-2.0
 *
 * row_header.c: any bytes as the header of a row file: it is refused with a sentence, or its numbers are possible and
 * it survives being written again. Half of the inputs get a right checksum first, else nothing would ever get beyond
 * it.
 *
 * inputs: 1000000
 */
#include "runtime/embed/tier/row_file.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <xxhash.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(int good, const char *what)
{
    if (good) return;
    fprintf(stderr, "row header fuzz: %s\n", what);
    abort();
}

static void check_header(const peri__row_header *h)
{
    require(h->rows >= 0 && h->cols >= 1 && h->row_offset >= 0 && h->col_offset >= 0, "impossible numbers");
    require(h->row_offset + h->rows <= h->total_rows && h->col_offset + h->cols <= h->total_cols,
            "a shard outside its table");
    require(h->n_parts >= 1 && h->n_parts <= PERI__ROW_PARTS, "impossible parts");
    require(h->record_bytes == peri__row_record_bytes(h) && h->record_bytes % 8 == 0 && h->record_bytes > 8,
            "records that do not fit");
    require(h->rows <= (INT64_MAX - PERI__ROW_HEADER_BYTES - peri__row_map_bytes(h->rows)) / h->record_bytes,
            "a size that overflows");
    require(memchr(h->name, 0, sizeof h->name) != NULL && h->name[0], "a name without an end");
    require((h->clean == 0 || h->clean == 1) && h->iteration >= 0, "an impossible state");
    require(h->flush >= 0 && (h->flush == 0) == (h->stamp == 0), "an impossible flush");
    require(h->ids.sum == 0 ? h->ids.iteration == 0 : h->flush > 0 && h->ids.iteration >= 0,
            "an impossible map of raw ids");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    peri__row_header h, again;
    unsigned char bytes[PERI__ROW_HEADER_BYTES] = {0};
    if (size == 0) return 0;
    if (data[0] & 1) {
        peri_status status = peri__row_header_parse("fuzz", data + 1, (int64_t)size - 1, &h);
        require(status >= 0 || strlen(peri_error_message()) > 10, "an error without a sentence");
        if (status >= 0) check_header(&h);
        return 0;
    }
    memcpy(bytes, data + 1, size - 1 < sizeof bytes ? size - 1 : sizeof bytes);
    if (data[0] & 2) { /* a sound header with some bytes changed: pairs of place and value */
        peri__row_header sound = {.rows = 10,
                                  .cols = 4,
                                  .total_rows = 10,
                                  .total_cols = 4,
                                  .n_parts = 1,
                                  .part_bytes = {4},
                                  .clean = 1,
                                  .record_bytes = 24,
                                  .name = "t"};
        peri__row_header_seal(&sound, bytes);
        for (size_t i = 1; i + 1 < size; i += 2) bytes[16 + data[i] % 200] = data[i + 1];
    }
    uint64_t sum = XXH3_64bits(bytes, sizeof bytes - 8);
    memcpy(bytes + sizeof bytes - 8, &sum, sizeof sum);
    peri_status status = peri__row_header_parse("fuzz", bytes, sizeof bytes, &h);
    if (status < 0) return 0;
    check_header(&h);
    peri__row_header_seal(&h, bytes);
    require(peri__row_header_parse("fuzz", bytes, sizeof bytes, &again) >= 0, "what was read cannot be read again");
    require(memcmp(&h, &again, offsetof(peri__row_header, name) + sizeof h.name) == 0,
            "what was read changes when it is written");
    return 0;
}
