/* SPDX-License-Identifier: Apache-2.0
 *
 * isas.h: all tables of kernels that tests compare with ref: instruction sets, and kernels/cuda on tests/cuda_host.
 */
#ifndef PERI_TESTS_ISAS_H
#define PERI_TESTS_ISAS_H

#include "kernels/kernels.h"
#include "tests/harness/fence.h"

#include <dlfcn.h>
#include <libgen.h>
#include <link.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ISAS = 4, ISAS_CPU = 3 };
static const char *const isas[ISAS] = {"ref", "avx2", "avx512", "cuda_host"};

/* -- a GPU reaches what the cases have: their heap, their static arrays and their stack ---------------------------- */

static inline void share_or_end(fence_share *share, uintptr_t from, uintptr_t to)
{
    const uintptr_t page = 4096;
    from = from / page * page;
    to = (to + page - 1) / page * page;
    if (to > from && !share((void *)from, to - from)) abort();
}

/** The parts of the program in memory, but for its code. */
static inline int share_segments(struct dl_phdr_info *info, size_t size, void *share)
{
    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *h = &info->dlpi_phdr[i];
        if (h->p_type != PT_LOAD || (h->p_flags & PF_X)) continue;
        uintptr_t from = (info->dlpi_addr + h->p_vaddr) / 4096 * 4096, to = info->dlpi_addr + h->p_vaddr + h->p_memsz;
        /* constants too: drivers write what they pin */
        if (mprotect((void *)from, to - from, PROT_READ | PROT_WRITE) != 0) abort();
        share_or_end(*(fence_share **)share, from, to);
    }
    return 1; /* the program itself comes first; libraries are not asked for */
}

/** Chunks of the time before the library is there: loading it allocates too much for a closed page behind each
 *  block. */
static struct { void *at; size_t bytes; } early_chunks[64];
static int n_early_chunks;
static inline bool share_later(void *p, size_t bytes)
{
    if (n_early_chunks == 64) return false;
    early_chunks[n_early_chunks].at = p;
    early_chunks[n_early_chunks++].bytes = bytes;
    return true;
}

static inline void share_all(fence_share *share)
{
    enum { DEEP = 1 << 20 };
    volatile char deep[DEEP]; /* the stack is there as far as it was used */
    pthread_attr_t attributes;
    void *low;
    size_t size;
    for (size_t i = 0; i < DEEP; i += 4096) deep[i] = 0;
    if (!fence_open || pthread_getattr_np(pthread_self(), &attributes) != 0) abort();
    if (pthread_attr_getstack(&attributes, &low, &size) != 0) abort();
    share_or_end(share, (uintptr_t)deep, (uintptr_t)low + size);
    fence_open(share);
    dl_iterate_phdr(share_segments, &share);
    for (int i = 0; i < n_early_chunks; i++)
        if (!share(early_chunks[i].at, early_chunks[i].bytes)) abort();
}

/** Memory that the cases map themselves is out of a GPU's reach. */
static bool reaches_mappings = true;

static void (*races)(int on);

/** The library of kernels/cuda: on the host, or the one that PERI_CUDA_KERNELS names: on a GPU. NULL: not built (there
 *  is no C++ compiler). Ends the program when it does not load, or its GPU does not reach the program's memory. */
static inline void *library_of_cuda_host(void)
{
    static void *plugin;
    char self[3900] = "", path[4000];
    if (plugin || readlink("/proc/self/exe", self, sizeof self - 1) < 0) return plugin;
    const char *named = getenv("PERI_CUDA_KERNELS");
    if (named) snprintf(path, sizeof path, "%s", named);
    else snprintf(path, sizeof path, "%s/../../cuda_host/libperilune_cuda_host.so", dirname(self));
    if (!named && access(path, R_OK) != 0) return NULL;
    if (named && fence_open) fence_open(share_later);
    plugin = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!plugin || !dlsym(plugin, "peri_cuda_host_kernels")) {
        fprintf(stderr, "%s\n", dlerror());
        abort();
    }
    void *found = dlsym(plugin, "peri_cuda_host_races");
    memcpy(&races, &found, sizeof races);
    found = dlsym(plugin, "peri_cuda_host_share");
    if (found) {
        fence_share *share;
        memcpy(&share, &found, sizeof share);
        share_all(share);
        reaches_mappings = false;
    } else if (fence_open) {
        fence_open(NULL);
    }
    return plugin;
}

/** Before anything is allocated. */
__attribute__((constructor)) static void load_named_library(void)
{
    if (getenv("PERI_CUDA_KERNELS")) library_of_cuda_host();
}

/** kernels/cuda, completed by ref's steps; NULL: it is not here. */
static inline const peri_kernels *kernels_of_cuda_host(void)
{
    static peri_kernels table;
    void *plugin = library_of_cuda_host(), *found;
    if (table.isa || !plugin) return table.isa ? &table : NULL;
    const peri_kernels *(*kernels)(void) = NULL;
    found = dlsym(plugin, "peri_cuda_host_kernels");
    memcpy(&kernels, &found, sizeof kernels);
    table = *kernels();
    for (int k = 0; k < PERI_KERNEL_COUNT; k++)
        if (!table.fn[k]) table.fn[k] = peri_kernels_isa("ref")->fn[k];
    return &table;
}

/** Whether tests/cuda_host looks for races where it can, as it does at first: what nonsense makes of a result nobody
 *  asks. */
static inline void races_matter(bool on)
{
    if (kernels_of_cuda_host() && races) races(on);
}

/** Whether case @number of a long list runs on isas[@isa]. The pretended GPU takes a hundred times as long as a
 *  processor: it has one case in three, drawn by the number, but all of them where PERI_CUDA_KERNELS names its kernels:
 *  `make check-cuda`, and GPUs. */
static inline bool has_case(int isa, uint64_t number)
{
    return isa < ISAS_CPU || getenv("PERI_CUDA_KERNELS") || (number * 0x9e3779b97f4a7c15u >> 40) % 3 == 0;
}

/** The kernels of one of `isas`; NULL: not here. */
static inline const peri_kernels *kernels_of(const char *isa)
{
    return !strcmp(isa, "cuda_host") ? kernels_of_cuda_host() : peri_kernels_isa(isa);
}

#endif
