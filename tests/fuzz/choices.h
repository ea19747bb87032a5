/* SPDX-License-Identifier: Apache-2.0
 *
 * choices.h: what fuzzers share whose input is read as small choices.
 */
#ifndef PERI_TESTS_FUZZ_CHOICES_H
#define PERI_TESTS_FUZZ_CHOICES_H

#include <perilune/base.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static inline void require(bool good, const char *what)
{
    if (good) return;
    fprintf(stderr, "%s fuzz: %s (last error: %s)\n", program_invocation_short_name, what, peri_error_message());
    abort();
}

/** The input, from the next choice on. */
static const uint8_t *bytes;
static size_t left;

/** A number in [0, below) from the input; 0 when it has run out. */
static inline int64_t pick(int64_t below)
{
    if (!left || below < 2) return 0;
    left--;
    return *bytes++ % below;
}

#endif
