/* SPDX-License-Identifier: Apache-2.0
 *
 * json.h: a reader of JSON that the caller drives, and that allocates nothing: manifests have hundreds of thousands of
 * entries, of which a tree would need ten times the memory, and come from strangers.
 *
 *     json_open(&j, text, bytes, what);            // { "a": [1, 2], "b": "x" }
 *     json_enter(&j, '{');
 *     while (json_key(&j, key, sizeof key)) {      // false at the '}', and after an error
 *         if (!strcmp(key, "a")) for (json_enter(&j, '['); json_item(&j);) n = json_integer(&j);
 *         else json_skip(&j);
 *     }
 *     return json_close(&j);                       // the first error, if there was one, or text behind the value
 *
 * After an error every function returns false, 0 or "" at once, so callers look at the end only.
 */
#ifndef PERI_BASE_JSON_H
#define PERI_BASE_JSON_H

#include "base_internal.h"

typedef struct peri__json peri__json;
struct peri__json {
    const char *begin, *at, *end;
    const char *what; /* what the text is, for errors: "manifest of 'x'" */
    bool first;       /* nothing of the innermost object or list has been read yet */
    bool not_numbers; /* peri__json_skip takes NaN, Infinity and -Infinity, which are no JSON, for values: whoever reads
                         these later can say better what is wrong with them */
    peri_status status;
    /* Of a text that is read piece by piece: puts the next bytes at `end` and moves it; false: there are none, or they
     * cannot be read, which `status` says. It may give memory back in front of `at`, or of `kept` where that is not
     * NULL. NULL: the text is in memory as a whole. */
    bool (*more)(peri__json *j);
    const char *kept;
};

void peri__json_open(peri__json *j, const char *text, int64_t bytes, const char *what);
/** Fail with PERI_EFORMAT at the current byte; the first failure counts. Always false. */
bool peri__json_fail(peri__json *j, const char *wrong);
/** The next character that is no white space, which is not read yet; 0 at the end and after an error. */
char peri__json_next(peri__json *j);
/** Expect the begin of an object ('{') or list ('['). */
bool peri__json_enter(peri__json *j, char kind);
/** The next key of the object, with its colon, into @key; false behind the last one, whose '}' is then read. A key that
 *  is too long is an error. */
bool peri__json_key(peri__json *j, char *key, size_t room);
/** Whether the list has another value, which stands next; false behind the last one, whose ']' is then read. */
bool peri__json_item(peri__json *j);
/** A text into @out with its final 0. An error if it does not fit, or has a 0 in it. */
bool peri__json_text(peri__json *j, char *out, size_t room);
/** A whole number, -2^63 < x < 2^63. */
int64_t peri__json_integer(peri__json *j);
/** 64 bits as a text of 16 hexadecimal digits, in small letters. */
uint64_t peri__json_hex(peri__json *j);
/** Step over any value; @from and @bytes (either may be NULL): where it stands. */
bool peri__json_skip(peri__json *j, const char **from, int64_t *bytes);
/** Whether a null stands next, which is then read. */
bool peri__json_null(peri__json *j);
/** The first error, or that something else than white space is left. */
peri_status peri__json_close(peri__json *j);

/** Bytes of the UTF-8 character that @text begins with, 1 to 4; 0: its first byte begins none (or it is the end). */
int peri__utf8_bytes(const char *text);
/** Whether all of @text is UTF-8, which JSON has to be. */
bool peri__is_utf8(const char *text);
/** Append @text as a JSON text, with its quotes, to a buffer that has room (peri__json_quoted bytes). Returns the
 *  end. */
char *peri__json_quote(char *to, const char *text);
/** Bytes that peri__json_quote writes. */
int64_t peri__json_quoted(const char *text);

#endif
