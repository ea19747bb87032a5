/* SPDX-License-Identifier: Apache-2.0
 *
 * io/lines.h (L6): a reader of lines, which become the rows of batches. Every format of lines (criteo.c, csv.c) is one,
 * with functions of its own that convert a line. Public functions call it peri_criteo.
 */
#ifndef PERI_IO_LINES_H
#define PERI_IO_LINES_H

#include "text_window.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

typedef struct peri_criteo peri__lines;

/** What a format does with the lines of a batch. */
typedef struct peri__line_format {
    /** Make room for @rows lines. */
    peri_status (*start)(peri__lines *r, peri_batch *b, int64_t rows);
    /** Convert the line at @at, @n bytes long without its end, into row @row. */
    peri_status (*convert)(peri__lines *r, int64_t at, int64_t n, peri_batch *b, int64_t row);
    /** b->rows lines were converted: put their ids and lengths in order. */
    peri_status (*finish)(peri__lines *r, peri_batch *b);
    /** Free what is the format's own, and the reader. */
    void (*release)(peri__lines *r);
} peri__line_format;

/** A place in an index: a chunk, and the line ends of the part in front of it. */
typedef struct peri__line_cursor {
    int64_t chunk, before;
} peri__line_cursor;

struct peri_criteo {
    const peri__line_format *format;
    peri_window window; /* the text, or the part of it that is in memory */
    int64_t begin, end; /* the part of the text that is read: offsets of line starts; of a text read in order 0 and
                           INT64_MAX */
    int64_t at;         /* start of the next global batch */
    int64_t row;        /* its number in the part */
    int64_t line;       /* number in the part of the line that is being read, for messages */
    bool spent;         /* a pipe that was to be read again */
    int32_t dense_features, sparse_features, rank, world;
    int32_t fields;     /* of a line; each has a byte at least */
    int64_t batch_rows;
    int64_t *index;     /* words of peri_criteo_share, or NULL */
    int64_t chunks;
    peri__line_cursor here; /* not behind line `row` */
};

/** What all formats are opened with. */
typedef struct peri__lines_config {
    const char *const *paths; /* [n_paths], each at least a name for messages */
    int32_t n_paths, dense_features, sparse_features, fields, rank, world;
    int64_t batch_rows;
    double begin, end;        /* part of the text by its bytes */
    bool header;
    const char *text;         /* NULL: the files; else @size bytes of memory, borrowed */
    int64_t size;
} peri__lines_config;

/** Set a zeroed reader up, all but what is the format's own; window.name says whose it is. After an error,
 *  too, peri_criteo_release is what frees it. */
peri_status peri__lines_open(peri__lines *r, const peri__lines_config *o);
/** PERI_EFORMAT: column @column (from 1), called @what, of the current line, which begins at @line, is the @n bytes at
 *  @p. */
peri_status peri__lines_bad_field(const peri__lines *r, int64_t line, int32_t column, const char *what, const char *p,
                                  int64_t n, const char *wanted);
/** PERI_EFORMAT: the line at @line, @n bytes long, has @found columns; @wanted says how many it should have. */
peri_status peri__lines_bad_count(const peri__lines *r, int64_t line, int64_t n, int32_t found, const char *wanted);

/** Bit i: p[i] == @byte, for 64 readable bytes. */
static inline uint64_t peri__match_block(const char *p, char byte)
{
#if defined(__SSE2__)
    __m128i wanted = _mm_set1_epi8(byte);
    uint64_t mask = 0;
    for (int i = 0; i < 4; i++) {
        __m128i v = _mm_loadu_si128((const __m128i *)(p + 16 * i));
        mask |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(v, wanted)) << (16 * i);
    }
    return mask;
#else
    uint64_t mask = 0;
    for (int i = 0; i < 64; i++) mask |= (uint64_t)(p[i] == byte) << i;
    return mask;
#endif
}

/** The same for the first @n < 64 bytes only. */
static inline uint64_t peri__match_part(const char *p, int64_t n, char byte)
{
    uint64_t mask = 0;
    for (int64_t i = 0; i < n; i++) mask |= (uint64_t)(p[i] == byte) << i;
    return mask;
}

/** The same for the first @n bytes, at most 64. */
static inline uint64_t peri__match(const char *p, int64_t n, char byte)
{
    return n >= 64 ? peri__match_block(p, byte) : peri__match_part(p, n, byte);
}

#endif
