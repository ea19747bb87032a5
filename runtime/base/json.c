/* SPDX-License-Identifier: Apache-2.0
 *
 * json.c: see json.h. Grammar: RFC 8259.
 */
#include "json.h"

enum { MOST_DEPTH = 64 };

void peri__json_open(peri__json *j, const char *text, int64_t bytes, const char *what)
{
    *j = (peri__json){.begin = text, .at = text, .end = text + bytes, .what = what};
}

bool peri__json_fail(peri__json *j, const char *wrong)
{
    if (j->status < 0) return false;
    j->status = peri__fail(PERI_EFORMAT, "%s, byte %lld: %s", j->what, (long long)(j->at - j->begin), wrong);
    return false;
}

/** Whether @n bytes are left, which are then in memory. */
static bool have(peri__json *j, int64_t n)
{
    while (j->end - j->at < n)
        if (!j->more || j->status < 0 || !j->more(j)) return false;
    return true;
}

/** Whether another byte is left. */
static inline bool has(peri__json *j) { return j->at < j->end || have(j, 1); }

static void skip_space(peri__json *j)
{
    while (has(j) && (*j->at == ' ' || *j->at == '\n' || *j->at == '\t' || *j->at == '\r')) j->at++;
}

char peri__json_next(peri__json *j)
{
    if (j->status < 0) return 0;
    skip_space(j);
    return has(j) ? *j->at : 0;
}

static bool take_char(peri__json *j, char c, const char *wrong)
{
    if (peri__json_next(j) != c) return peri__json_fail(j, wrong);
    j->at++;
    return true;
}

bool peri__json_enter(peri__json *j, char kind)
{
    if (!take_char(j, kind, kind == '{' ? "an object ({) is wanted" : "a list ([) is wanted")) return false;
    j->first = true;
    return true;
}

/** Step to the next member of an object or list that ends with @last. */
static bool member(peri__json *j, char last)
{
    char c = peri__json_next(j);
    bool first = j->first;
    j->first = false;
    if (j->status < 0) return false;
    if (c == last) {
        j->at++;
        return false;
    }
    if (first) return true;
    return take_char(j, ',', last == '}' ? "a comma or } is wanted" : "a comma or ] is wanted") &&
           (peri__json_next(j) != last || peri__json_fail(j, "nothing follows the comma"));
}

bool peri__json_item(peri__json *j) { return member(j, ']'); }

bool peri__json_key(peri__json *j, char *key, size_t room)
{
    *key = 0;
    return member(j, '}') && peri__json_text(j, key, room) && take_char(j, ':', "a colon is wanted behind the key");
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/** Four hexadecimal digits behind \u; -1: there are none. */
static int32_t code_unit(peri__json *j)
{
    int32_t unit = 0;
    if (!have(j, 4)) return -1;
    for (int i = 0; i < 4; i++) {
        int d = hex_digit(j->at[i]);
        if (d < 0) return -1;
        unit = unit * 16 + d;
    }
    j->at += 4;
    return unit;
}

/** The character of an escape sequence behind its backslash; -1: it is none. */
static int32_t escaped(peri__json *j)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (!has(j)) return -1;
    char c = *j->at++;
    const char *known = c ? strchr(from, c) : NULL;
    if (known) return to[known - from];
    int32_t unit = c == 'u' ? code_unit(j) : -1;
    if (unit < 0xd800 || unit > 0xdfff) return unit;
    if (unit > 0xdbff || !have(j, 6) || j->at[0] != '\\' || j->at[1] != 'u') return -1;
    j->at += 2;
    int32_t low = code_unit(j);
    return low < 0xdc00 || low > 0xdfff ? -1 : 0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00);
}

static int encode_utf8(int32_t c, char out[4])
{
    if (c < 0x80) return out[0] = (char)c, 1;
    if (c < 0x800) return out[0] = (char)(0xc0 | c >> 6), out[1] = (char)(0x80 | (c & 63)), 2;
    if (c < 0x10000)
        return out[0] = (char)(0xe0 | c >> 12), out[1] = (char)(0x80 | (c >> 6 & 63)), out[2] = (char)(0x80 | (c & 63)),
               3;
    return out[0] = (char)(0xf0 | c >> 18), out[1] = (char)(0x80 | (c >> 12 & 63)),
           out[2] = (char)(0x80 | (c >> 6 & 63)), out[3] = (char)(0x80 | (c & 63)), 4;
}

/** A text while it is copied; @to NULL: it is only read. */
typedef struct copied {
    char *to;
    size_t room;
} copied;

static bool copy_bytes(peri__json *j, copied *out, const char *bytes, size_t n)
{
    if (!out->to) return true;
    if (n + 1 > out->room) return peri__json_fail(j, "the text is too long");
    memcpy(out->to, bytes, n);
    out->to += n;
    out->room -= n;
    return true;
}

/** The escape sequence that begins here. */
static bool copy_escaped(peri__json *j, copied *out)
{
    char bytes[4];
    j->at++;
    const int32_t code = escaped(j);
    if (code < 0) return peri__json_fail(j, "an escape sequence that is none");
    if (code == 0 && out->to) return peri__json_fail(j, "a zero byte in a text");
    return copy_bytes(j, out, bytes, (size_t)encode_utf8(code, bytes));
}

/** A text; without @to it is only read. What has no escapes is copied at once. */
static bool text(peri__json *j, char *to, size_t room)
{
    copied out = {to, room};
    if (!take_char(j, '"', "a text is wanted")) return false;
    for (;;) {
        const char *from = j->at;
        while (j->at < j->end && (unsigned char)*j->at >= 0x20 && *j->at != '"' && *j->at != '\\') j->at++;
        if (!copy_bytes(j, &out, from, (size_t)(j->at - from))) return false;
        if (!has(j)) return peri__json_fail(j, "the text has no end");
        if (*j->at == '"') break;
        if ((unsigned char)*j->at >= 0x20 && *j->at != '\\') continue; /* read only now: it is copied, too */
        if (*j->at != '\\') return peri__json_fail(j, "a control character in a text");
        if (!copy_escaped(j, &out)) return false;
    }
    j->at++;
    if (out.to) *out.to = 0;
    return true;
}

bool peri__json_text(peri__json *j, char *out, size_t room)
{
    *out = 0;
    return text(j, out, room);
}

int64_t peri__json_integer(peri__json *j)
{
    int64_t x = 0;
    bool minus = peri__json_next(j) == '-';
    if (j->status < 0) return 0;
    const char *from = j->at += minus;
    const bool zero = has(j) && *from == '0';
    for (; has(j) && *j->at >= '0' && *j->at <= '9'; j->at++)
        if (__builtin_mul_overflow(x, 10, &x) || __builtin_add_overflow(x, *j->at - '0', &x)) {
            peri__json_fail(j, "the number is too large");
            return 0;
        }
    bool whole = j->at > from && (!zero || j->at == from + 1) &&
                 (!has(j) || (*j->at != '.' && *j->at != 'e' && *j->at != 'E'));
    if (!whole) peri__json_fail(j, "a whole number is wanted");
    return whole ? minus ? -x : x : 0;
}

uint64_t peri__json_hex(peri__json *j)
{
    char text[32];
    uint64_t x = 0;
    if (!peri__json_text(j, text, sizeof text)) return 0;
    if (strlen(text) != 16 || strspn(text, "0123456789abcdef") != 16) {
        peri__json_fail(j, "16 hexadecimal digits are wanted");
        return 0;
    }
    for (const char *c = text; *c; c++) x = x << 4 | (uint64_t)hex_digit(*c);
    return x;
}

/** As many digits as there are; false: none. */
static bool digits(peri__json *j)
{
    const char *from = j->at;
    while (has(j) && *j->at >= '0' && *j->at <= '9') j->at++;
    return j->at > from;
}

static bool read_number(peri__json *j)
{
    if (*j->at == '-') j->at++;
    const char *from = j->at;
    const bool zero = has(j) && *from == '0';
    bool good = digits(j) && (!zero || j->at == from + 1);
    if (good && has(j) && *j->at == '.') {
        j->at++;
        good = digits(j);
    }
    if (good && has(j) && (*j->at == 'e' || *j->at == 'E')) {
        j->at++;
        if (has(j) && (*j->at == '+' || *j->at == '-')) j->at++;
        good = digits(j);
    }
    return good || peri__json_fail(j, "a value is wanted");
}

static bool take_word(peri__json *j, const char *w)
{
    size_t n = strlen(w);
    if (!have(j, (int64_t)n) || memcmp(j->at, w, n) != 0) return false;
    j->at += n;
    return true;
}

bool peri__json_null(peri__json *j) { return peri__json_next(j) == 'n' && take_word(j, "null"); }

static bool skip_value(peri__json *j, int depth)
{
    char c = peri__json_next(j);
    if (j->status < 0) return false;
    if (depth == MOST_DEPTH) return peri__json_fail(j, "lists and objects are nested too deep");
    if (c == '"') return text(j, NULL, 0);
    if (c == '{' || c == '[') {
        peri__json_enter(j, c);
        while (member(j, c == '{' ? '}' : ']')) {
            if (c == '{' && !(text(j, NULL, 0) && take_char(j, ':', "a colon is wanted behind the key"))) return false;
            if (!skip_value(j, depth + 1)) return false;
            j->first = false;
        }
        return j->status >= 0;
    }
    if (c && (take_word(j, "true") || take_word(j, "false") || take_word(j, "null"))) return true;
    if (c && j->not_numbers && (take_word(j, "NaN") || take_word(j, "Infinity") || take_word(j, "-Infinity")))
        return true;
    if (c == '-' || (c >= '0' && c <= '9')) return read_number(j);
    return peri__json_fail(j, "a value is wanted");
}

bool peri__json_skip(peri__json *j, const char **from, int64_t *bytes)
{
    peri__json_next(j);
    const char *at = j->at;
    if (from) j->kept = at;
    bool good = skip_value(j, 0);
    j->kept = NULL;
    if (from) *from = at;
    if (bytes) *bytes = good ? j->at - at : 0;
    return good;
}

peri_status peri__json_close(peri__json *j)
{
    if (peri__json_next(j) || (j->status >= 0 && j->at < j->end)) peri__json_fail(j, "something follows the end");
    return j->status;
}

/* -- UTF-8 -------------------------------------------------------------------------------------------------------- */

int peri__utf8_bytes(const char *text)
{
    const unsigned char *c = (const unsigned char *)text;
    const int n = *c < 0x80                 ? *c != 0
                  : *c >= 0xc2 && *c < 0xe0 ? 2
                  : *c >= 0xe0 && *c < 0xf0 ? 3
                  : *c >= 0xf0 && *c < 0xf5 ? 4
                                            : 0;
    for (int i = 1; i < n; i++)
        if ((c[i] & 0xc0) != 0x80) return 0;
    if (n == 3 && ((*c == 0xe0 && c[1] < 0xa0) || (*c == 0xed && c[1] > 0x9f))) return 0;
    return n == 4 && ((*c == 0xf0 && c[1] < 0x90) || (*c == 0xf4 && c[1] > 0x8f)) ? 0 : n;
}

bool peri__is_utf8(const char *text)
{
    for (int n; (n = peri__utf8_bytes(text)) > 0;) text += n;
    return !*text;
}

/* -- writing ------------------------------------------------------------------------------------------------------- */

int64_t peri__json_quoted(const char *text)
{
    int64_t n = 2;
    for (const unsigned char *c = (const unsigned char *)text; *c; c++)
        n += *c < 0x20 ? 6 : *c == '"' || *c == '\\' ? 2 : 1;
    return n;
}

char *peri__json_quote(char *to, const char *text)
{
    static const char hex[] = "0123456789abcdef";
    *to++ = '"';
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        if (c < 0x20) {
            memcpy(to, "\\u00", 4);
            to[4] = hex[c >> 4];
            to[5] = hex[c & 15];
            to += 6;
            continue;
        }
        if (c == '"' || c == '\\') *to++ = '\\';
        *to++ = (char)c;
    }
    *to++ = '"';
    return to;
}
