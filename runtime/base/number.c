/* SPDX-License-Identifier: Apache-2.0
 *
 * number.c: numbers in texts of the library's own (files, what ranks compare, the environment, messages), which look
 * the same in every locale of the program, with a point, and however the thread rounds.
 */
#include "base_internal.h"
#include "floats.h"

#include <locale.h>
#include <stdio.h>
#include <stdlib.h>

/** Until the end of this block the thread writes and reads numbers with a point, and rounds to nearest. (A C library
 *  has the locale "C" without taking memory.) */
#define PLAIN_NUMBERS                                                                                                  \
    PERI__OWN_FLOATS;                                                                                                  \
    __attribute__((cleanup(locale_back), unused)) const locale_t theirs =                                              \
        uselocale(newlocale(LC_ALL_MASK, "C", NULL))

static void locale_back(const locale_t *theirs)
{
    const locale_t plain = uselocale(*theirs);
    if (plain != *theirs) freelocale(plain);
}

const char *peri__number_text(double x, char out[32])
{
    PLAIN_NUMBERS;
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(out, 32, "%.*g", digits, x);
        if (strtod(out, NULL) == x) break;
    }
    return out;
}

bool peri__number_of(const char *text, int64_t bytes, double *out)
{
    PLAIN_NUMBERS;
    char copy[64], *end;
    if (bytes < 1 || bytes >= (int64_t)sizeof copy) return false;
    memcpy(copy, text, (size_t)bytes);
    copy[bytes] = 0;
    const double x = strtod(copy, &end);
    if (end != copy + bytes) return false;
    *out = x;
    return true;
}

int peri__vprint_plain(char *text, size_t room, const char *format, va_list args)
{
    PLAIN_NUMBERS;
    return vsnprintf(text, room, format, args);
}
