/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/host.h: for programs that embed the runtime. It takes function pointers, so it is not part of the Lua declarations and
 * perilune.h does not include it.
 */
#ifndef PERILUNE_HOST_H
#define PERILUNE_HOST_H

#include <perilune/base.h>

/**
 * Make all heap memory of the runtime come from the host's functions, which behave like malloc, realloc and free and may be called from
 * any thread. Device storage is not heap memory. Local; before any other call of the library: PERI_EINVAL once something is allocated,
 * or when one of the functions is missing.
 */
PERI_API peri_status peri_host_allocator_set(void *(*alloc)(size_t size), void *(*resize)(void *p, size_t size), void (*release)(void *p));

#endif
