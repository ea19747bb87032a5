/* SPDX-License-Identifier: Apache-2.0
 *
 * serve_known.h: the features of a function that tests of the server know, and requests for it.
 */
#ifndef PERI_TESTS_SERVE_KNOWN_H
#define PERI_TESTS_SERVE_KNOWN_H

#include "runtime/serve/request.h"

/* The function: score = age + 10 x + 100 y + the sum of clicked + the sum of shown, weighted; echo = (how many are
 * clicked, user modulo 1000). User 666 is refused by the model itself. */
static const peri__serve_input inputs[] = {
    {.name = "age", .kind = PERI__SERVE_NUMBERS, .width = 1},
    {.name = "point", .kind = PERI__SERVE_NUMBERS, .width = 2},
    {.name = "clicked", .kind = PERI__SERVE_IDS, .rows = 1000},
    {.name = "user", .kind = PERI__SERVE_IDS},
    {.name = "shown", .kind = PERI__SERVE_IDS, .rows = 10, .skip = true, .optional = true},
    {.name = "shown.weights", .kind = PERI__SERVE_WEIGHTS, .of = 4, .optional = true},
    {.name = "hour", .kind = PERI__SERVE_NUMBERS, .width = 1, .optional = true, .missing = 0.25f, .any = true},
};
static const peri__serve_output outputs[] = {{.name = "score", .width = 1}, {.name = "echo", .width = 2}};
enum { N_INPUTS = 7 };

static const peri__serve_facts facts = {"known", "7", inputs, outputs, N_INPUTS, 2};
static const peri__serve_rules strict = {.most_samples = 100};

#define ROW(more) "{\"instances\":[{\"age\":1,\"point\":[2,3],\"clicked\":[4,5],\"user\":6" more "}]}"
#define T(name, shape, type, data)                                                                                     \
    "{\"name\":\"" name "\",\"shape\":" shape ",\"datatype\":\"" type "\",\"data\":" data "}"
#define V2(more)                                                                                                       \
    "{\"inputs\":[" T("age", "[1]", "FP32", "[1]") "," T("point", "[1,2]", "FP32",                                     \
                                                         "[2,3]") "," T("user", "[1]", "UINT64", "[6]") more "]"       \
                                                                                                             "}"

#endif
