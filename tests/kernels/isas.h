/* SPDX-License-Identifier: Apache-2.0
 *
 * isas.h: all tables of kernels that tests compare with ref: instruction sets, and kernels/cuda on tests/cuda_host.
 */
#ifndef PERI_TESTS_ISAS_H
#define PERI_TESTS_ISAS_H

#include "kernels/kernels.h"

#include <dlfcn.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ISAS = 4, ISAS_CPU = 3 };
static const char *const isas[ISAS] = {"ref", "avx2", "avx512", "cuda_host"};

/**
 * kernels/cuda, completed by ref's steps, on the host, or in the library that PERI_CUDA_KERNELS names: on a GPU. NULL: not built (there
 * is no C++ compiler), or a GPU that does not reach the host's memory. Ends the program when the library does not load.
 */
static void (*races)(int on);
static inline const peri_kernels *kernels_of_cuda_host(void)
{
    static peri_kernels table;
    char self[3900] = "", path[4000];
    if (table.isa) return &table;
    if (readlink("/proc/self/exe", self, sizeof self - 1) < 0) return NULL;
    const char *named = getenv("PERI_CUDA_KERNELS");
    if (named) snprintf(path, sizeof path, "%s", named);
    else snprintf(path, sizeof path, "%s/../../cuda_host/libperilune_cuda_host.so", dirname(self));
    if (!named && access(path, R_OK) != 0) return NULL;
    void *plugin = dlopen(path, RTLD_NOW | RTLD_LOCAL), *found = plugin ? dlsym(plugin, "peri_cuda_host_kernels") : NULL;
    const peri_kernels *(*kernels)(void) = NULL;
    if (!found) {
        fprintf(stderr, "%s\n", dlerror());
        abort();
    }
    memcpy(&kernels, &found, sizeof kernels);
    found = dlsym(plugin, "peri_cuda_host_races");
    memcpy(&races, &found, sizeof races);
    const peri_kernels *reached = kernels();
    if (!reached) return NULL;
    table = *reached;
    for (int k = 0; k < PERI_KERNEL_COUNT; k++)
        if (!table.fn[k]) table.fn[k] = peri_kernels_isa("ref")->fn[k];
    return &table;
}

/** Whether tests/cuda_host looks for races where it can, as it does at first: what nonsense makes of a result nobody asks. */
static inline void races_matter(bool on)
{
    if (kernels_of_cuda_host() && races) races(on);
}

/** The kernels of one of `isas`; NULL: not here. */
static inline const peri_kernels *kernels_of(const char *isa)
{
    return !strcmp(isa, "cuda_host") ? kernels_of_cuda_host() : peri_kernels_isa(isa);
}

#endif
