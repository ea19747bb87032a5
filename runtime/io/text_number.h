/* SPDX-License-Identifier: Apache-2.0
 *
 * io/text_number.h (L6): numbers written in a text.
 */
#ifndef PERI_IO_TEXT_NUMBER_H
#define PERI_IO_TEXT_NUMBER_H

#include "io_internal.h"

#include <locale.h>
#include <stdlib.h>

/** A whole number without sign, in base 10 or 16; false if it is anything else, or does not fit into 64 bits. */
static inline bool peri__parse_whole(const char *p, int64_t n, int32_t base, uint64_t *out)
{
    uint64_t x = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t c = (unsigned char)p[i], digit = c - '0', low = c | 0x20;
        if (digit > 9) digit = base == 16 && low >= 'a' && low <= 'f' ? low - 'a' + 10 : 99;
        if (digit > 15 || __builtin_mul_overflow(x, (uint64_t)base, &x) ||
            __builtin_add_overflow(x, (uint64_t)digit, &x))
            return false;
    }
    *out = x;
    return n > 0;
}

/** A finite number, such as -1.5e3; false if it is anything else. Numbers of at most 15 digits without exponent are
 *  exact products of two doubles; others are read by the C library in @c, the locale "C". */
static inline bool peri__parse_double(const char *p, int64_t n, locale_t c, double *out)
{
    static const double power[] = {1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15};
    bool minus = n > 0 && *p == '-', simple = true;
    int64_t i = n > 0 && (*p == '-' || *p == '+'), digits = 0, behind = -1, x = 0;
    for (; i < n && simple; i++) {
        if (p[i] == '.' && behind < 0) {
            behind = digits;
            continue;
        }
        simple = p[i] >= '0' && p[i] <= '9' && digits < 15;
        x = x * 10 + (p[i] - '0');
        digits++;
    }
    if (simple && digits > 0) {
        double y = (double)x / power[behind < 0 ? 0 : digits - behind];
        *out = minus ? -y : y;
        return true;
    }
    char text[64], *end;
    if (n < 1 || n >= (int64_t)sizeof text) return false;
    for (i = 0; i < n; i++)
        if (!((p[i] >= '0' && p[i] <= '9') || p[i] == '+' || p[i] == '-' || p[i] == '.' || p[i] == 'e' || p[i] == 'E'))
            return false;
    memcpy(text, p, (size_t)n);
    text[n] = 0;
    *out = strtod_l(text, &end, c);
    return end == text + n && isfinite(*out);
}

#endif
