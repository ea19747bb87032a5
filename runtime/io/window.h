/* SPDX-License-Identifier: Apache-2.0
 *
 * io/window.h (L6): a text in memory, in a file or in a pipe, of which a part is in memory. Offsets are those of the whole text.
 */
#ifndef PERI_IO_WINDOW_H
#define PERI_IO_WINDOW_H

#include "internal.h"

typedef struct peri_window {
    const char *path;   /* for messages; the caller's */
    const char *text;   /* bytes [begin, end) of the whole */
    char *buffer;       /* the same as `text`, with room for `capacity` bytes; NULL over the caller's memory */
    int64_t capacity;
    int64_t begin, end; /* offsets of what is in memory */
    int64_t size;       /* of the whole; of a pipe INT64_MAX until its end was read */
    int fd;             /* -1: the whole is the caller's memory */
    bool pipe;          /* whatever is no regular file: read once, in order */
} peri_window;

/** Over @size bytes of @text, which the caller keeps. */
void peri__window_memory(peri_window *w, const char *text, int64_t size);
/** Over a file or pipe; nothing is read yet. PERI_EIO with the system's reason; peri__window_close then too. */
peri_status peri__window_open(peri_window *w, const char *path);
void peri__window_close(peri_window *w);
/** Go on at offset @at, which in a pipe must be in memory or its end. Invalidates pointers. */
void peri__window_seek(peri_window *w, int64_t at);
/** Read some more behind `end`; bytes in front of @keep may be forgotten. @more: false at the end of the whole. PERI_EIO with the system's
 *  reason, or if a file became shorter. Invalidates pointers. Blocks while a pipe is empty. */
peri_status peri__window_more(peri_window *w, int64_t keep, bool *more);
/** Copy bytes [@at, @at + @n) of memory or a file to @to, wherever the window is. Fails as peri__window_more. */
peri_status peri__window_read(const peri_window *w, char *to, int64_t n, int64_t at);
/** Line ends in front of offset @end, of memory and files (of what of it can be read). */
int64_t peri__window_line_ends(const peri_window *w, int64_t end);

/** The byte at offset @at, which is in memory, and those that follow it. */
static inline const char *peri__window_at(const peri_window *w, int64_t at) { return w->text + (at - w->begin); }

#endif
