/* SPDX-License-Identifier: Apache-2.0
 *
 * border.c: which function of the program's a thread is in, and what becomes of one that does not return.
 */
#include "border.h"

#include <stdio.h>
#include <stdlib.h>

atomic_bool peri__border_used, peri__border_forked;
static _Thread_local const char *in; /* the innermost one */

const char *peri__border_in(void)
{
    return in || !atomic_load_explicit(&peri__border_forked, memory_order_relaxed) ? in : "fork";
}

peri__border peri__border_enter(const char *what)
{
    const peri__border border = {.what = what, .outer = in};
    if (!atomic_load_explicit(&peri__border_used, memory_order_relaxed)) atomic_store(&peri__border_used, true);
    in = what;
    return border;
}

void peri__border_part(void (*part)(int32_t i), int32_t i)
{
    const char *before = in;
    in = NULL;
    part(i);
    in = before;
}

void peri__border_leave(peri__border *border)
{
    in = border->outer;
    if (border->returned) return;
    fprintf(stderr,
            "perilune: a function that was given to %s was left by an exception, or ended its thread; it has to "
            "return\n",
            border->what);
    abort();
}
