/* SPDX-License-Identifier: Apache-2.0
 *
 * buffer.h: arrays and texts that grow.
 */
#ifndef PERI_BASE_BUFFER_H
#define PERI_BASE_BUFFER_H

#include "base_internal.h"

/** Make room for @need elements of @element bytes in an array of room *@room. */
peri_status peri__grow(void **array, int64_t *room, int64_t need, size_t element);
/** As peri__grow, for arrays that are large for a short time (peri__realloc_pages). */
peri_status peri__grow_pages(void **array, int64_t *room, int64_t need, size_t element);
/** Make room for one more element in an array that has @n of them and nothing that counts its room: it gets room for 1,
 *  2, 4, 8, ... */
peri_status peri__grow_one(void **array, int64_t n, size_t element);

/** A text, with a 0 behind it, that grows. After an error nothing is appended any more, so callers look at `status` at
 *  the end only. */
typedef struct peri__buffer {
    char *data;
    int64_t bytes, room;
    peri_status status;
} peri__buffer;
/** Append what the format says. */
void peri__buffer_print(peri__buffer *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
/** Append @text as a JSON text, with its quotes. */
void peri__buffer_quote(peri__buffer *b, const char *text);
/** Append @bytes of @text. */
void peri__buffer_append(peri__buffer *b, const char *text, int64_t bytes);
/** As peri__buffer_append, to the peri__buffer @b; its status. */
peri_status peri__buffer_put(void *b, const char *text, int64_t bytes);

#endif
