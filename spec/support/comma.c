/* SPDX-License-Identifier: Apache-2.0
 *
 * comma.c: loaded before the C library, it chooses the locale "comma" of the folder LOCPATH, in which numbers have a
 * comma in place of the point. Where there is none, the program ends with 97.
 */
#include <locale.h>
#include <unistd.h>

__attribute__((constructor)) static void choose_comma(void)
{
    if (!setlocale(LC_NUMERIC, "comma") || localeconv()->decimal_point[0] != ',') _exit(97);
}
