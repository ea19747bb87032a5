/* SPDX-License-Identifier: Apache-2.0
 *
 * places.cc: where in the code a thread of a kernel is. That is not one line: a function that has a barrier may be called at two places,
 * inlined or not, and a GPU has its barrier twice then. So a place is the list of the addresses that the calls return to, from the barrier
 * up to the function where the thread began.
 *
 * Kernels are compiled for the host with frame pointers and without optimization, where each call of the source (and each copy of a call
 * that is inlined) is at one address, and at an address of its own.
 */
#include "cuda_host_internal.h"

#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <vector>

namespace peri_cuda_host {

namespace {

/** What the compiler keeps at the address of each frame: that of the caller's frame, and where it goes on there. */
struct frame {
    const frame *caller;
    const char *back;
};

const frame *next(const frame *f, const void *bottom)
{
    if (f->caller > f && (const void *)f->caller <= bottom) return f->caller;
    fprintf(stderr, "tests/cuda_host: kernels must be compiled with -fno-omit-frame-pointer\n");
    abort();
}

/** The addresses, from the inner call to the outer one. */
std::vector<const char *> list(walk w)
{
    std::vector<const char *> all;
    for (const frame *f = (const frame *)w.frame; f != w.bottom; f = next(f, w.bottom)) all.push_back(f->back);
    return all;
}

/** Lines of the source for one address: the inner one, then the calls that are inlined. */
std::vector<std::string> lines_of(const char *at)
{
    Dl_info in;
    char command[4300], line[300];
    std::vector<std::string> lines;
    if (!dladdr(at, &in) || !in.dli_fname) return {"?"};
    snprintf(command, sizeof command, "addr2line -i -s -e '%s' %#zx 2>/dev/null", in.dli_fname,
             (size_t)(at - (const char *)in.dli_fbase) - 1);
    FILE *pipe = popen(command, "r");
    while (pipe && fgets(line, sizeof line, pipe)) {
        line[strcspn(line, " \n")] = 0;
        lines.push_back(line);
    }
    if (pipe) pclose(pipe);
    if (!lines.empty() && lines[0][0] != '?') return lines;
    snprintf(line, sizeof line, "%s+%#zx", in.dli_fname, (size_t)(at - (const char *)in.dli_fbase));
    return {line};
}

/** "a.cuh:1 of b.cu:2", without this folder's own lines and those of the launch; no more than @most. */
std::string joined(const std::vector<std::string> &lines, size_t most)
{
    std::string text;
    size_t n = 0;
    for (const std::string &line : lines) {
        if (line.compare(0, 14, "cuda_runtime.h") == 0 && lines.size() > 1) continue;
        if (n++ == most) break;
        text += (text.empty() ? "" : " of ") + line;
    }
    return text;
}

std::string words(const std::vector<const char *> &calls, size_t n)
{
    std::vector<std::string> all;
    for (size_t i = 0; i < n; i++)
        for (const std::string &line : lines_of(calls[i])) all.push_back(line);
    return joined(all, 6);
}

} // namespace

uint64_t path_of(walk w)
{
    uint64_t path = 0;
    for (const frame *f = (const frame *)w.frame; f != w.bottom; f = next(f, w.bottom))
        path = (path ^ (uint64_t)(uintptr_t)f->back) * 0x9e3779b97f4a7c15u;
    return path;
}

std::string line_of(const void *after) { return joined(lines_of((const char *)after), 4); }

std::string told(walk w)
{
    std::vector<const char *> calls = list(w);
    std::string text;
    for (size_t n = 1; n <= calls.size() && (text.empty() || text.compare(0, 14, "cuda_runtime.h") == 0); n++) text = words(calls, n);
    return text;
}

void tell_apart(walk a, walk b, std::string *in_a, std::string *in_b)
{
    std::vector<const char *> calls[2] = {list(a), list(b)};
    size_t n[2] = {calls[0].size(), calls[1].size()};
    while (n[0] > 1 && n[1] > 1 && calls[0][n[0] - 1] == calls[1][n[1] - 1]) n[0]--, n[1]--; /* from here on outwards they are the same */
    *in_a = words(calls[0], n[0]);
    *in_b = words(calls[1], n[1]);
    if (*in_a != *in_b) return;
    for (int i = 0; i < 2; i++) { /* two places of one line */
        Dl_info in = {};
        char text[64];
        const char *at = calls[i][n[i] - 1];
        dladdr(at, &in);
        snprintf(text, sizeof text, " (before %#zx)", (size_t)(at - (const char *)in.dli_fbase));
        *(i ? in_b : in_a) += text;
    }
}

} // namespace peri_cuda_host
