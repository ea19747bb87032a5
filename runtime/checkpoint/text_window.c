/* SPDX-License-Identifier: Apache-2.0
 *
 * text_window.c: see text_window.h. Addresses are reserved for the whole text, so that pointers into it stay as they
 * are; pages come as they are read.
 */
#include "../base/fault.h"
#include "text_window.h"

#include <sys/mman.h>
#include <xxhash.h>

enum { WINDOW = 1 << 18, PAGE = 1 << 16 /* a multiple of the system's */ };

/** Give the pages back that nobody wants any more. */
static void give_back(peri__text_window *w)
{
    const peri__json *j = &w->j;
    const int64_t wanted = (j->kept ? j->kept : j->at) - j->begin, past = wanted / PAGE * PAGE;
    if (past <= w->given_back) return;
    madvise((char *)j->begin + w->given_back, (size_t)(past - w->given_back), MADV_DONTNEED);
    w->given_back = past;
}

static bool read_more(peri__json *j)
{
    peri__text_window *w = (peri__text_window *)j;
    const int64_t at = j->end - j->begin, n = peri__min(WINDOW, w->bytes - at);
    if (n <= 0) return false;
    give_back(w);
    j->status = w->get(w->context, (char *)j->end, n, at);
    if (j->status < 0) return false;
    if (at < w->hashed) XXH3_128bits_update(w->hash, j->end, (size_t)peri__min(n, w->hashed - at));
    j->end += n;
    return true;
}

peri_status peri__text_window_open(peri__text_window *w, peri__get *get, void *context, int64_t bytes, int64_t unhashed,
                                   const char *what)
{
    *w = (peri__text_window){.get = get, .context = context, .bytes = bytes, .hashed = bytes - unhashed,
                             .hash = XXH3_createState()};
    char *memory = w->hash && !peri__fault(PERI_FAULT_alloc)
                       ? mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                       : MAP_FAILED;
    if (memory == MAP_FAILED)
        return peri__fail(PERI_ENOMEM, "%s: no memory for the %lld bytes of its manifest", what, (long long)bytes);
    XXH3_128bits_reset(w->hash);
    peri__json_open(&w->j, memory, 0, what);
    w->j.more = read_more;
    return PERI_OK;
}

peri_status peri__text_window_finish(peri__text_window *w)
{
    w->j.status = PERI_OK;
    do w->j.at = w->j.end;
    while (read_more(&w->j));
    return w->j.status;
}

void peri__text_window_close(peri__text_window *w)
{
    if (w->j.begin) munmap((char *)w->j.begin, (size_t)w->bytes);
    XXH3_freeState(w->hash);
}
