/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_main.c: main for tests/fuzz programs, which define LLVMFuzzerTestOneInput (so libFuzzer can drive them too). It
 * feeds random mutations of the corpus in tests/fuzz/corpus/<program>/ (or of nothing): so many, which are the same on
 * every machine, or for some seconds.
 *
 * usage: program [inputs | <seconds>s [seed]]    or    program file...   to replay inputs
 */
#include <dirent.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MOST_BYTES = 1 << 16, MOST_INPUTS = 256 };

static struct {
    uint8_t *data;
    size_t size;
} corpus[MOST_INPUTS];
static int inputs;
static uint64_t state = 1;
static uint8_t buffer[MOST_BYTES];

static uint64_t draw(uint64_t below) /* xorshift64* */
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545f4914f6cdd1du % below;
}

static void load(const char *path)
{
    FILE *file = inputs < MOST_INPUTS ? fopen(path, "rb") : NULL;
    if (!file) return;
    corpus[inputs].data = malloc(MOST_BYTES);
    corpus[inputs].size = corpus[inputs].data ? fread(corpus[inputs].data, 1, MOST_BYTES, file) : 0;
    inputs++;
    fclose(file);
}

static int not_hidden(const struct dirent *entry) { return entry->d_name[0] != '.'; }

static void load_corpus(const char *program) /* in the order of names, which a folder does not keep */
{
    char folder[512], path[1024];
    struct dirent **entries = NULL;
    const char *name = strrchr(program, '/');
    snprintf(folder, sizeof folder, "tests/fuzz/corpus/%s", name ? name + 1 : program);
    int n = scandir(folder, &entries, not_hidden, alphasort);
    for (int i = 0; i < n; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, entries[i]->d_name);
        load(path);
        free(entries[i]);
    }
    free(entries);
}

/** A new input in buffer: a corpus file or nothing, then some edits. */
static size_t mutate(void)
{
    static const uint8_t edges[] = {0, 1, 0x7f, 0x80, 0xff, '"', '{', '[', '-', '9', '\t', '\n'};
    size_t size = 0;
    if (inputs && draw(8)) {
        int pick = (int)draw((uint64_t)inputs);
        size = corpus[pick].size;
        memcpy(buffer, corpus[pick].data, size);
    } else {
        size = draw(256);
        for (size_t i = 0; i < size; i++) buffer[i] = (uint8_t)draw(256);
    }
    for (uint64_t edits = draw(8); edits > 0 && size > 0; edits--) {
        size_t at = draw(size), run = 1 + draw(8);
        if (run > size - at) run = size - at;
        switch (draw(6)) {
        case 0: buffer[at] ^= (uint8_t)(1u << draw(8)); break;
        case 1: buffer[at] = edges[draw(sizeof edges)]; break;
        case 2: memset(buffer + at, edges[draw(sizeof edges)], run); break;
        case 3: memmove(buffer + at, buffer + at + run, size - at - run), size -= run; break;
        case 4: memmove(buffer + at, buffer + draw(size - run + 1), run); break;
        default: size = at; break; /* cut the end off */
        }
    }
    return size;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

int main(int argc, char **argv)
{
    char *end = NULL;
    double most = argc > 1 ? strtod(argv[1], &end) : 20000;
    bool timed = argc > 1 && strcmp(end, "s") == 0;
    if (argc > 1 && !timed && *end) { /* files to replay */
        for (int i = 1; i < argc; i++) load(argv[i]);
        for (int i = 0; i < inputs; i++) LLVMFuzzerTestOneInput(corpus[i].data, corpus[i].size);
        return 0;
    }
    state = argc > 2 ? strtoull(argv[2], NULL, 10) * 2 + 1 : 1;
    load_corpus(argv[0]);
    for (int i = 0; i < inputs; i++) LLVMFuzzerTestOneInput(corpus[i].data, corpus[i].size);
    long runs = 0;
    for (double start = timed ? now() : 0; (timed ? now() - start : (double)runs) < most; runs++) {
        size_t size = mutate();
        uint8_t *exact = malloc(size ? size : 1); /* of exactly this size, so that the address sanitizer sees
                                                     overruns */
        if (!exact) return 1;
        memcpy(exact, buffer, size);
        LLVMFuzzerTestOneInput(exact, size);
        free(exact);
    }
    printf("%ld inputs from %d files, seed %s\n", runs, inputs, argc > 2 ? argv[2] : "0");
    return 0;
}
