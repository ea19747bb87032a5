/* SPDX-License-Identifier: Apache-2.0
 *
 * border.h: calls of functions of the program's own (perilune/host.h). The library may hold locks while it calls one,
 * so such a function may not call the library. One rule holds for all public functions there: those that return a
 * status refuse (PERI_NEED, or PERI__NOT_AT_BORDER where no argument is needed), a release gives no reference up
 * (peri__refs_drop, peri__border_refuses), memory is refused (peri__alloc), and all others only read, without a lock.
 * So nothing waits for a lock that this very thread holds. Such a function may neither throw nor end its thread: frames
 * of C cannot be left half done, so the process ends with a message. Units that call such functions are compiled with
 * -fexceptions; a longjmp is not noticed.
 */
#ifndef PERI_BORDER_H
#define PERI_BORDER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct peri__border {
    const char *what, *outer; /* the function that is called; the one in which this thread was before, or NULL */
    bool returned;
} peri__border;

peri__border peri__border_enter(const char *what);
/** The border is left, in whatever way. */
void peri__border_leave(peri__border *border);
/** The function of the program's in which this thread is; NULL: in none. */
const char *peri__border_in(void);
/** Whether any thread has ever been in one: the common path is one relaxed load. */
extern atomic_bool peri__border_used;
/** Whether this process was forked by one of them. It has locks that nobody will open, and is refused everything. */
extern atomic_bool peri__border_forked;
static inline bool peri__at_border(void)
{
    return atomic_load_explicit(&peri__border_used, memory_order_relaxed) && peri__border_in();
}

/** Record that @function is called by a function of the program's, and return PERI_EINVAL. */
int32_t peri__border_fail(const char *function);
/** Whether @function is called by a function of the program's; records that. */
static inline bool peri__border_refuses(const char *function)
{
    return peri__at_border() && peri__border_fail(function) < 0;
}

/** Call @part, a function of the library's, which a function of the program's calls as it should. */
void peri__border_part(void (*part)(int32_t i), int32_t i);

/** Return an error from the enclosing public function if a function of the program's calls it. */
#define PERI__NOT_AT_BORDER                                                                                            \
    do {                                                                                                               \
        if (peri__at_border()) return peri__border_fail(__func__);                                                     \
    } while (0)

/** What a function of the program's has failed at is forgotten: the error record is the one before it was called. */
void peri__border_forget(void);
static inline void peri__border_done(peri__border *border)
{
    peri__border_forget();
    peri__border_leave(border);
}

/** Evaluate @call, which calls the function that the host has set by @what. */
#define PERI__AT_BORDER(what, call)                                                                                    \
    do {                                                                                                               \
        __attribute__((cleanup(peri__border_done))) peri__border border_ = peri__border_enter(what);                   \
        call;                                                                                                          \
        border_.returned = true;                                                                                       \
    } while (0)

#endif
