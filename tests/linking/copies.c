/* SPDX-License-Identifier: Apache-2.0
 *
 * copies.c: two copies of the library in one process, each in a plugin of a host that knows nothing of it. Both want a
 * world of the transport mpi, which serves one of them. -DPLUGIN builds a plugin, whose memory is marked as its own;
 * without it the host: copies FIRST.so SECOND.so. spec/linking_spec.lua runs it.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(PLUGIN)
#include <perilune/host.h>
#include <perilune/perilune.h>

enum { HEAD = 64 };

static char own;
static int foreign; /* blocks of somebody else's that came back here */

static void *take(size_t size)
{
    char *p = malloc(size + HEAD);
    if (!p) return NULL;
    memcpy(p, &(void *){&own}, sizeof(void *));
    return p + HEAD;
}

static void give(void *p)
{
    if (!p) return;
    foreign += memcmp((char *)p - HEAD, &(void *){&own}, sizeof(void *)) != 0;
    free((char *)p - HEAD);
}

static void *resize(void *p, size_t size)
{
    char *block = realloc(p ? (char *)p - HEAD : NULL, size + HEAD);
    if (!block) return NULL;
    memcpy(block, &(void *){&own}, sizeof(void *));
    return block + HEAD;
}

/* A world, closed again. 1: this copy is refused, with words. */
int use(void);
int use(void)
{
    peri_comm_config config = {.size = sizeof config, .transport = "mpi", .timeout_s = 20};
    peri_group *world = NULL;
    peri_work *work;
    if (peri_host_init() < 0 || peri_host_allocator_set(take, resize, give) < 0) return -1;
    const int refused = peri_comm_open(&config, &world) == PERI_EUNSUPPORTED;
    if (refused && !strstr(peri_error_message(), "serves another copy of it in this process")) return -2;
    if (!refused && (peri_coll_barrier(world, 0, &work) < 0 || peri_work_wait(work) < 0)) return -3;
    if (!refused) peri_work_release(work);
    if (!refused && peri_group_close(world) < 0) return -4;
    peri_group_release(world);
    if (peri_host_shutdown() < 0 || peri_mem_live() != 0 || foreign) return -5;
    return refused;
}

#else

int main(int argc, char **argv)
{
    int (*use)(void), said[2] = {0};
    for (int i = 0; i < argc - 1 && i < 2; i++) {
        void *library = dlopen(argv[i + 1], RTLD_NOW | RTLD_LOCAL), *found = library ? dlsym(library, "use") : NULL;
        if (!found) return fprintf(stderr, "copies: %s\n", dlerror()), 1;
        memcpy(&use, &found, sizeof found);
        said[i] = use();
    }
    printf("%d %d\n", said[0], said[1]);
    return 0;
}

#endif
