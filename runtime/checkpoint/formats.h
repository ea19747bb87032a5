/* SPDX-License-Identifier: Apache-2.0
 *
 * formats.h: how rows of bytes are stored, those of quantized tables: "INT8 x 4", a data type and how many numbers a
 * row has. Rows of other formats may have as many bytes, so shapes alone do not say whether a tensor fits.
 */
#ifndef PERI_CHECKPOINT_FORMATS_H
#define PERI_CHECKPOINT_FORMATS_H

#include "names.h"

enum { PERI__FORMAT_ROOM = 64 };

/** What a checkpoint says of its tensors under `values`: `rows`. Begins as zeros; it is read when it is first asked
 *  for. */
typedef struct peri__formats {
    bool known;
    struct peri__format_said {
        char *name, *format;
    } *said;
    int64_t n, room;
    peri__names by_name; /* numbers in `said` */
} peri__formats;

/** peri_row_format_text of rows of bytes, each of @cols numbers; returns @out. */
const char *peri__format_text(int32_t coded, int64_t cols, char out[PERI__FORMAT_ROOM]);
/** The format that the checkpoint says of tensor @name, NULL: none. @values: of the checkpoint. @out borrowed. */
peri_status peri__format_of(peri__formats *formats, const char *values, const char *name, const char **out);
/** Free what it has. */
void peri__formats_free(peri__formats *formats);

#endif
