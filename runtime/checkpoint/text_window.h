/* SPDX-License-Identifier: Apache-2.0
 *
 * text_window.h: the text of a manifest, read and hashed from the first byte to the last while it is parsed. Of 100,000
 * tables it has 70 MB, of which a window is in memory:
 *
 *     addresses   |  given back  |  kept, at          |  read  |  not read yet  |
 *                 begin                                         end              begin + bytes
 */
#ifndef PERI_CHECKPOINT_TEXT_WINDOW_H
#define PERI_CHECKPOINT_TEXT_WINDOW_H

#include "../base/json.h"

/** Reads @bytes from byte @at of a text on. */
typedef peri_status peri__get(void *context, char *out, int64_t bytes, int64_t at);

typedef struct peri__text_window {
    peri__json j; /* first: its `more` finds the window by it */
    peri__get *get;
    void *context;
    int64_t bytes, hashed; /* of the text, and those in front that are hashed */
    int64_t given_back;    /* so many in front are not in memory any more */
    void *hash;            /* an XXH3_state_t */
} peri__text_window;

/** Begin to read a text of @bytes (1 or more), of which the last @unhashed are not hashed; w->j parses it. Close it
 *  also after an error. */
peri_status peri__text_window_open(peri__text_window *w, peri__get *get, void *context, int64_t bytes, int64_t unhashed,
                                   const char *what);
/** Read what has not been parsed, too, which is for the hash only. */
peri_status peri__text_window_finish(peri__text_window *w);
void peri__text_window_close(peri__text_window *w);

#endif
