/* SPDX-License-Identifier: Apache-2.0
 *
 * tune_file.c: measured choices kept in $XDG_CACHE_HOME/perilune or ~/.cache/perilune. The file's name says on which
 * kind of processor they were measured, among which ways and by which version, since home folders are shared between
 * machines and between builds:
 *
 *   perilune 0.2.0 AuthenticAMD-25-1-1-32K-512K-32768K-2-0b5e91c4
 *   lookup_prefetch l2-8k 904123 871400 ...            the way, and the nanoseconds of all of them
 *   end 1f7b0c2d9e8a4453                               a hash of the lines before
 */
#include "tune_file.h"
#include "tune_table.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

enum { MOST_BYTES = 16 << 10, MOST_PATH = 1024, MOST_KEY = 160 };

/* -- the processor ------------------------------------------------------------------------------------------------- */

/** The first word of a small file, "?" without one. */
static void first_word(const char *path, char *word, size_t room)
{
    FILE *f = fopen(path, "re");
    char text[64] = "";
    if (f) {
        size_t n = fread(text, 1, sizeof text - 1, f);
        text[n] = 0;
        fclose(f);
    }
    text[strcspn(text, " \n")] = 0;
    snprintf(word, room, "%s", text[0] ? text : "?");
}

/** A hash of what there is to choose: builds with other choices have files of their own. */
static uint32_t table_hash(void)
{
    uint64_t hash = 0;
    for (int32_t c = 0; c < PERI__TUNE_CHOICES; c++) {
        hash = peri__hash_mix(hash, peri__tune_hash(peri__tune_table[c].name, strlen(peri__tune_table[c].name)));
        for (int32_t w = 0; w < peri__tune_ways(c); w++)
            hash =
                peri__hash_mix(hash, peri__tune_hash(peri__tune_table[c].ways[w], strlen(peri__tune_table[c].ways[w])));
    }
    return (uint32_t)(hash >> 32 ^ hash);
}

/** Vendor, family, model, stepping; sizes of the caches for data; processors that this process may use; table_hash. */
static void processor_key(char key[MOST_KEY])
{
    char model[64] = "processor", sizes[3][16] = {"?", "?", "?"};
#if defined(__x86_64__)
    unsigned a, b, c, d, most, vendor[4] = {0};
    if (__get_cpuid(0, &most, &vendor[0], &vendor[2], &vendor[1]) && __get_cpuid(1, &a, &b, &c, &d)) {
        unsigned family = a >> 8 & 15, number = a >> 4 & 15;
        if (family == 15 || family == 6) number |= a >> 12 & 0xf0;
        if (family == 15) family += a >> 20 & 255;
        snprintf(model, sizeof model, "%.12s-%u-%u-%u", (const char *)vendor, family, number, a & 15);
    }
#endif
    for (int i = 0; i < 8; i++) {
        char path[96], word[16];
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/type", i);
        first_word(path, word, sizeof word);
        if (!strcmp(word, "Instruction") || !strcmp(word, "?")) continue;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/level", i);
        first_word(path, word, sizeof word);
        int level = atoi(word);
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", i);
        if (level >= 1 && level <= 3) first_word(path, sizes[level - 1], sizeof sizes[0]);
    }
    cpu_set_t set;
    int cpus = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
    snprintf(key, MOST_KEY, "%s-%s-%s-%s-%d-%08x", model, sizes[0], sizes[1], sizes[2], cpus, table_hash());
    for (char *at = key; *at; at++)
        if (!strchr("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-", *at)) *at = '_';
}

/* -- the text ------------------------------------------------------------------------------------------------------ */

uint64_t peri__tune_hash(const char *text, size_t length)
{
    uint64_t hash = length;
    for (size_t i = 0; i < length; i++) hash = peri__hash_mix(hash, (unsigned char)text[i]);
    return hash;
}

size_t peri__tune_print(const peri__tune_lines *lines, const char *key, char *text, size_t room)
{
    size_t n = (size_t)snprintf(text, room, "perilune %s %s\n", PERI_VERSION_TEXT, key);
    for (int32_t c = 0; c < PERI__TUNE_CHOICES && n < room; c++) {
        if (lines->way[c] < 0) continue;
        n += (size_t)snprintf(text + n, room - n, "%s %s", peri__tune_table[c].name,
                              peri__tune_table[c].ways[lines->way[c]]);
        for (int32_t w = 0; w < peri__tune_ways(c) && n < room; w++)
            n += (size_t)snprintf(text + n, room - n, " %lld", (long long)lines->ns[c][w]);
        if (n < room) n += (size_t)snprintf(text + n, room - n, "\n");
    }
    if (n < room)
        n += (size_t)snprintf(text + n, room - n, "end %016llx\n", (unsigned long long)peri__tune_hash(text, n));
    return n;
}

/** One line, ended by 0: a choice, its way, its times. */
static peri_status parse_line(char *line, int32_t number, peri__tune_lines *out)
{
    char *rest = NULL, *name = strtok_r(line, " ", &rest), *word = strtok_r(NULL, " ", &rest);
    int32_t c = name ? peri__tune_find(name) : -1;
    if (c < 0) return peri__fail(PERI_EFORMAT, "line %d: no choice '%.40s'", number, name ? name : "");
    int32_t way = word ? peri__tune_way(c, word) : -1;
    if (way < 0) return peri__fail(PERI_EFORMAT, "line %d: %s has no way '%.40s'", number, name, word ? word : "");
    if (out->way[c] >= 0) return peri__fail(PERI_EFORMAT, "line %d: %s is there twice", number, name);
    for (int32_t w = 0; w < peri__tune_ways(c); w++) {
        char *text = strtok_r(NULL, " ", &rest), *end = text;
        int64_t ns = text && *text >= '0' && *text <= '9' ? strtoll(text, &end, 10) : -1;
        if (ns < 0 || *end || end - text > 18)
            return peri__fail(PERI_EFORMAT, "line %d: no time for each way of %s", number, name);
        out->ns[c][w] = ns;
    }
    if (strtok_r(NULL, " ", &rest)) return peri__fail(PERI_EFORMAT, "line %d: more than the times of %s", number, name);
    out->way[c] = way;
    return PERI_OK;
}

peri_status peri__tune_parse(const char *text, size_t length, const char *key, peri__tune_lines *out)
{
    char copy[MOST_BYTES + 1], wanted[MOST_KEY + 32];
    peri__tune_lines lines = {.ns = {{0}}};
    for (int32_t c = 0; c < PERI__TUNE_CHOICES; c++) lines.way[c] = -1;
    if (length > MOST_BYTES) return peri__fail(PERI_EFORMAT, "%zu bytes, allowed: %d", length, MOST_BYTES);
    memcpy(copy, text, length);
    copy[length] = 0;
    if (strlen(copy) != length) return peri__fail(PERI_EFORMAT, "a byte 0 at %zu", strlen(copy));
    snprintf(wanted, sizeof wanted, "perilune %s %s\n", PERI_VERSION_TEXT, key);
    if (strncmp(copy, wanted, strlen(wanted)) != 0)
        return peri__fail(PERI_EFORMAT, "line 1 is not '%.*s'", (int)strlen(wanted) - 1, wanted);
    const size_t last = sizeof "end 0123456789abcdef\n" - 1;
    char end[32];
    if (length < strlen(wanted) + last) return peri__fail(PERI_EFORMAT, "its last line is missing");
    snprintf(end, sizeof end, "end %016llx\n", (unsigned long long)peri__tune_hash(text, length - last));
    if (strcmp(copy + length - last, end) != 0)
        return peri__fail(PERI_EFORMAT, "its last line is not the hash of those before");
    copy[length - last] = 0;
    char *line = copy + strlen(wanted);
    for (int32_t number = 2; *line; number++) {
        char *stop = strchr(line, '\n');
        if (!stop) return peri__fail(PERI_EFORMAT, "line %d has no end", number);
        *stop = 0;
        PERI_TRY(parse_line(line, number, &lines));
        line = stop + 1;
    }
    *out = lines;
    return PERI_OK;
}

/* -- the file ------------------------------------------------------------------------------------------------------ */

const char *peri__tune_file(void)
{
    static _Thread_local char path[MOST_PATH];
    const char *cache = secure_getenv("XDG_CACHE_HOME"), *home = secure_getenv("HOME");
    char key[MOST_KEY];
    processor_key(key);
    int n = 0;
    if (cache && cache[0] == '/')
        n = snprintf(path, sizeof path, "%s/perilune/%s-%s.txt", cache, key, PERI_VERSION_TEXT);
    else if (home && home[0] == '/')
        n = snprintf(path, sizeof path, "%s/.cache/perilune/%s-%s.txt", home, key, PERI_VERSION_TEXT);
    if (n <= 0 || n >= MOST_PATH) path[0] = 0;
    return path;
}

bool peri__tune_read(peri__tune_lines *lines)
{
    char text[MOST_BYTES + 2], key[MOST_KEY];
    const char *path = peri__tune_file();
    FILE *f = path[0] ? fopen(path, "re") : NULL;
    if (!f) return false;
    size_t n = fread(text, 1, MOST_BYTES + 1, f);
    fclose(f);
    processor_key(key);
    if (peri__tune_parse(text, n, key, lines) == PERI_OK) return true;
    peri__log(PERI_LOG_WARN, "%s is damaged (%s): not used; perilune calibrate makes it anew", path,
              peri_error_message());
    peri_error_clear();
    return false;
}

bool peri__tune_write(const peri__tune_lines *own, char *why, size_t room)
{
    char text[MOST_BYTES], path[MOST_PATH], key[MOST_KEY];
    peri__tune_lines lines;
    snprintf(path, sizeof path, "%s", peri__tune_file());
    if (!path[0]) {
        snprintf(why, room, "neither XDG_CACHE_HOME nor HOME names a folder");
        return false;
    }
    if (!peri__tune_read(&lines)) {
        lines = (peri__tune_lines){.ns = {{0}}};
        for (int32_t c = 0; c < PERI__TUNE_CHOICES; c++) lines.way[c] = -1;
    }
    for (int32_t c = 0; c < PERI__TUNE_CHOICES; c++) {
        if (own->way[c] < 0) continue;
        lines.way[c] = own->way[c];
        memcpy(lines.ns[c], own->ns[c], sizeof lines.ns[c]);
    }
    processor_key(key);
    size_t n = peri__tune_print(&lines, key, text, sizeof text);
    if (peri_file_write(path, text, (int64_t)n, true) >= 0) return true;
    snprintf(why, room, "%s", peri_error_message() + sizeof "peri_file_write: " - 1);
    peri_error_clear();
    return false;
}
