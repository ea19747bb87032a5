/* SPDX-License-Identifier: Apache-2.0
 *
 * io/text_window.h (L6): a text in memory, in files, or in a pipe, of which a part is in memory. Several files are
 * one text: their contents one behind the other, each but the last with a line end at its end. Offsets are those of
 * the whole text.
 *
 *     file 0 "BOM a\n b"   file 1 "c\n"        text:  a \n b \n c \n
 *
 * (A byte order mark and a header line are left out, the line end behind b is added.)
 *
 * Two kinds of text are read in order only, and their size is not known before their end: a pipe, which is read once,
 * and files of which one is packed by gzip, which can be begun again.
 */
#ifndef PERI_IO_TEXT_WINDOW_H
#define PERI_IO_TEXT_WINDOW_H

#include "io_internal.h"

/** A file of the text. */
typedef struct peri_window_file {
    const char *path; /* the caller's */
    int64_t skip;     /* bytes at its beginning that are left out: a byte order mark, a header line */
    int64_t at;       /* offset of its first byte in the text; of a text that is read in order it is set when the file
                         is reached */
    int64_t bytes;    /* that it gives to the text, without a line end that is added; packed: not known */
    bool added;       /* a line end is added behind it (packed: if it has none) */
    bool packed;      /* by gzip */
} peri_window_file;

typedef struct peri_window {
    const char *name;   /* of the caller's functions, "peri_criteo": begins messages */
    const char *text;   /* bytes [begin, end) of the whole */
    char *buffer;       /* the same as `text`, with room for `capacity` bytes; NULL over the caller's memory */
    int64_t capacity;
    int64_t begin, end; /* offsets of what is in memory */
    int64_t size;       /* of the whole; of a text that is read in order INT64_MAX until its end was read */
    bool memory;        /* the whole is the caller's memory */
    bool in_order;      /* pipes and packed files */
    bool pipe;          /* whatever is no regular file: read once */
    peri_window_file *files;
    int32_t n_files;
    int32_t current;    /* the file that is open, or -1 */
    int fd;             /* its descriptor, or -1 */
    void *packed;       /* its reader (zlib's gzFile), which owns the descriptor; NULL if it is not packed */
    char *header;       /* the first line of the first file, if headers are left out; ended by a zero */
} peri_window;

/** Over @size bytes of @text, which the caller keeps; @file, too, which only gives it a name. */
void peri__window_memory(peri_window *w, peri_window_file *file, const char *text, int64_t size);
/** Over the files named in @files (an array that the caller keeps), or over one pipe. The beginning of each regular
 *  file is looked at: PERI_EFORMAT for one that is empty or no text; PERI_EIO with the system's reason. @header: the
 *  first line of each file is left out, and is the same in all. peri__window_close then, after an error too. */
peri_status peri__window_open(peri_window *w, peri_window_file *files, int32_t n_files, bool header);
void peri__window_close(peri_window *w);
/** Go on at offset @at. A text that is read in order has it in memory, or begins again (@at 0). Invalidates
 *  pointers. */
void peri__window_seek(peri_window *w, int64_t at);
/** Read some more behind `end`; bytes in front of @keep may be forgotten. @more: false at the end of the whole.
 *  PERI_EIO with the system's reason, or if a file became shorter; PERI_EFORMAT for a damaged packed file. Invalidates
 *  pointers. Blocks while a pipe is empty. */
peri_status peri__window_more(peri_window *w, int64_t keep, bool *more);
/** Copy bytes [@at, @at + @n) of a text that is not read in order to @to, wherever the window is. Fails as
 *  peri__window_more. */
peri_status peri__window_read(peri_window *w, char *to, int64_t n, int64_t at);
/** The file in which offset @at lies. */
const peri_window_file *peri__window_file(const peri_window *w, int64_t at);
/** Number in its file, from 1, of the line that begins at offset @at: of all but pipes, read again from the file's
 *  beginning. */
int64_t peri__window_line(const peri_window *w, int64_t at);
/** @lines: of the whole text, which is read in order and can be begun again. Where the window is does not change. */
peri_status peri__window_count(const peri_window *w, int64_t *lines);
/** What a file is whose first @n bytes are at @p, in words; NULL: a text, or unknown. */
const char *peri__file_kind(const char *p, int64_t n);

/** The byte at offset @at, which is in memory, and those that follow it. */
static inline const char *peri__window_at(const peri_window *w, int64_t at) { return w->text + (at - w->begin); }

#endif
