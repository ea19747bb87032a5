/* SPDX-License-Identifier: Apache-2.0
 *
 * number.c: numbers in texts of the library's own (files, what ranks compare, the environment), which look the same in
 * every locale of the program: with a point.
 */
#include "base_internal.h"

#include <ctype.h>
#include <fenv.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>

/** strtod and printf round as the thread does, on x86-64 by the x87's settings, which PERI__OWN_FLOATS leaves alone. */
static void rounding_back(const fenv_t *theirs) { fesetenv(theirs); }
#define PLAIN_ROUNDING                                                                                                 \
    __attribute__((cleanup(rounding_back))) fenv_t theirs;                                                             \
    fegetenv(&theirs), fesetenv(FE_DFL_ENV)

const char *peri__number_text(double x, char out[32])
{
    PLAIN_ROUNDING;
    int to = 0;
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(out, 32, "%.*g", digits, x);
        if (strtod(out, NULL) == x) break;
    }
    for (int from = 0; out[from]; from++) { /* what the locale has for a point, of one byte or several */
        const unsigned char c = (unsigned char)out[from];
        const bool plain = c < 128 && (isalnum(c) || c == '-' || c == '+');
        if (plain) out[to++] = (char)c;
        else if (to > 0 && out[to - 1] != '.') out[to++] = '.';
    }
    out[to] = 0;
    return out;
}

bool peri__number_of(const char *text, int64_t bytes, double *out)
{
    PLAIN_ROUNDING;
    char copy[64], *end;
    if (bytes < 1 || bytes >= (int64_t)sizeof copy) return false;
    memcpy(copy, text, (size_t)bytes);
    copy[bytes] = 0;
    locale_t plain = newlocale(LC_ALL_MASK, "C", NULL);
    if (!plain) return false;
    const double x = strtod_l(copy, &end, plain);
    freelocale(plain);
    if (end != copy + bytes) return false;
    *out = x;
    return true;
}
