/* SPDX-License-Identifier: Apache-2.0
 *
 * border.h: calls of functions of the program's own (perilune/host.h). They may not call the library: what would need
 * memory there is refused, so that nothing waits for a lock that the caller of the function holds. And they may neither
 * throw nor end their thread: frames of C cannot be left half done, so the process ends with a message. Units that call
 * such functions are compiled with -fexceptions; a longjmp is not noticed.
 */
#ifndef PERI_BORDER_H
#define PERI_BORDER_H

#include <stdbool.h>
#include <stdint.h>

typedef struct peri__border {
    const char *what, *outer; /* the function that is called; the one in which this thread was before, or NULL */
    bool returned;
} peri__border;

peri__border peri__border_enter(const char *what);
/** Called when the border is left, in whatever way. */
void peri__border_leave(peri__border *border);
/** The function of the program's in which this thread is; NULL: in none. */
const char *peri__border_in(void);

/** Call @part, a function of the library's, which a function of the program's calls as it should. */
void peri__border_part(void (*part)(int32_t i), int32_t i);

/** Return an error from the enclosing public function, which takes a lock, if a function of the program's calls it. */
#define PERI__NOT_AT_BORDER                                                                                            \
    do {                                                                                                               \
        if (peri__border_in())                                                                                         \
            return peri__fail(PERI_EINVAL, "%s: a function that was given to %s calls the library, which it may not",  \
                              __func__, peri__border_in());                                                            \
    } while (0)

/** Evaluate @call, which calls the function that the host has set by @what. */
#define PERI__AT_BORDER(what, call)                                                                                    \
    do {                                                                                                               \
        __attribute__((cleanup(peri__border_leave))) peri__border border_ = peri__border_enter(what);                  \
        call;                                                                                                          \
        border_.returned = true;                                                                                       \
    } while (0)

#endif
