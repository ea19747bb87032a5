/* SPDX-License-Identifier: Apache-2.0
 *
 * tune_table.c: see tune_table.h.
 */
#include "tune_table.h"

const peri__tune_row peri__tune_table[PERI__TUNE_CHOICES] = {
#define CHOICE(name, group, usual, text, ...) {#name, usual, text, PERI__TUNE_##group, {__VA_ARGS__}},
#include "tune.def"
#undef CHOICE
};

int32_t peri__tune_find(const char *name)
{
    for (int32_t c = 0; c < PERI__TUNE_CHOICES; c++)
        if (!strcmp(peri__tune_table[c].name, name)) return c;
    return -1;
}

int32_t peri__tune_way(int32_t choice, const char *word)
{
    for (int32_t w = 0; w < peri__tune_ways(choice); w++)
        if (!strcmp(peri__tune_table[choice].ways[w], word)) return w;
    return -1;
}

int32_t peri__tune_ways(int32_t choice)
{
    int32_t n = 0;
    while (n < PERI_TUNE_WAYS && peri__tune_table[choice].ways[n]) n++;
    return n;
}
