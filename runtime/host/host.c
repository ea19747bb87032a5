/* SPDX-License-Identifier: Apache-2.0
 *
 * host.c: the runtime inside a larger program.
 */
#include <perilune/host.h>

#include "../base/internal.h"

peri_status peri_host_allocator_set(void *(*alloc)(size_t size), void *(*resize)(void *p, size_t size), void (*release)(void *p))
{
    return peri__allocator_set(alloc, resize, release);
}
