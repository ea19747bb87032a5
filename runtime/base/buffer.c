/* SPDX-License-Identifier: Apache-2.0
 *
 * buffer.c: see buffer.h.
 */
#include "base_internal.h"
#include "buffer.h"
#include "json.h"

static peri_status grow_array(void **array, int64_t *room, int64_t need, size_t element, void *resize(void *, size_t))
{
    if (need <= *room) return PERI_OK;
    int64_t more = peri__max(need, *room + *room / 2 + 16);
    void *p = resize(*array, (size_t)more * element);
    if (!p) return PERI_ENOMEM;
    *array = p;
    *room = more;
    return PERI_OK;
}

peri_status peri__grow(void **array, int64_t *room, int64_t need, size_t element)
{
    return grow_array(array, room, need, element, peri__realloc);
}

peri_status peri__grow_pages(void **array, int64_t *room, int64_t need, size_t element)
{
    return grow_array(array, room, need, element, peri__realloc_pages);
}

peri_status peri__grow_one(void **array, int64_t n, size_t element)
{
    if (n & (n - 1)) return PERI_OK;
    void *p = peri__realloc(*array, (size_t)(n ? 2 * n : 1) * element);
    if (!p) return PERI_ENOMEM;
    *array = p;
    return PERI_OK;
}

static bool make_room(peri__buffer *b, int64_t n)
{
    if (b->status < 0) return false;
    b->status = peri__grow_pages((void **)&b->data, &b->room, b->bytes + n + 1, 1);
    return b->status >= 0;
}

void peri__buffer_append(peri__buffer *b, const char *text, int64_t bytes)
{
    if (!make_room(b, bytes)) return;
    memcpy(b->data + b->bytes, text, (size_t)bytes);
    b->bytes += bytes;
    b->data[b->bytes] = 0;
}

peri_status peri__buffer_put(void *b, const char *text, int64_t bytes)
{
    peri__buffer *to = b;
    peri__buffer_append(to, text, bytes);
    return to->status;
}

void peri__buffer_print(peri__buffer *b, const char *format, ...)
{
    char line[256];
    va_list args;
    va_start(args, format);
    int n = peri__vprint_plain(line, sizeof line, format, args);
    va_end(args);
    PERI_ASSERT(n >= 0);
    if (n < (int)sizeof line) {
        peri__buffer_append(b, line, n);
    } else if (make_room(b, n)) {
        va_start(args, format);
        peri__vprint_plain(b->data + b->bytes, (size_t)n + 1, format, args);
        va_end(args);
        b->bytes += n;
    }
}

void peri__buffer_quote(peri__buffer *b, const char *text)
{
    int64_t n = peri__json_quoted(text);
    if (!make_room(b, n)) return;
    peri__json_quote(b->data + b->bytes, text);
    b->bytes += n;
    b->data[b->bytes] = 0;
}
