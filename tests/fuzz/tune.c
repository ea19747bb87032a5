/* SPDX-License-Identifier: Apache-2.0
 *
 * tune.c: any bytes as the file of measured choices: as they are, and as the lines of a file whose first and last lines
 * are right. It is an error with a message, or choices that come back the same when they are printed and read.
 *
 * inputs: 500000
 */
#include "runtime/base/tune.h"
#include "runtime/base/tune_file.h"
#include "runtime/base/tune_table.h"

#include "choices.h"

#include <string.h>

static void read_it(const char *text, size_t length)
{
    static const char key[] = "Processor-1-2";
    static char printed[64 << 10];
    peri__tune_lines lines, again;
    memset(&lines, 0x55, sizeof lines);
    peri_error_clear();
    if (peri__tune_parse(text, length, key, &lines) < 0) {
        require(peri_error_message()[0] != 0, "an error without a message");
        return;
    }
    for (int32_t c = 0; c < PERI__TUNE_CHOICES; c++)
        require(lines.way[c] >= -1 && lines.way[c] < peri__tune_ways(c), "a way that is none");
    size_t n = peri__tune_print(&lines, key, printed, sizeof printed);
    require(n < sizeof printed, "a file that is too long");
    require(peri__tune_parse(printed, n, key, &again) == PERI_OK, "a printed file that cannot be read");
    require(memcmp(&lines, &again, sizeof lines) == 0, "a file that comes back as another");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char first[] = "perilune " PERI_VERSION_TEXT " Processor-1-2\n";
    if (size > 20000) return 0;
    size_t body = sizeof first - 1 + size;
    char *exact = malloc(size ? size : 1), *whole = malloc(body + 32);
    require(exact && whole, "no memory");
    memcpy(exact, data, size);
    read_it(exact, size);
    memcpy(whole, first, sizeof first - 1);
    memcpy(whole + sizeof first - 1, data, size);
    if (size == 0 || data[size - 1] == '\n') {
        int n = snprintf(whole + body, 32, "end %016llx\n", (unsigned long long)peri__tune_hash(whole, body));
        read_it(whole, body + (size_t)n);
    }
    free(exact);
    free(whole);
    return 0;
}
