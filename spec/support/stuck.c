/* SPDX-License-Identifier: Apache-2.0
 *
 * stuck.c: an MPI_Testall that does not come back once STUCK is in the environment (spec/dist/mpi_fault_spec.lua
 * preloads it): it sleeps, or, where that is "spins", computes.
 */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int MPI_Testall(int n, void *requests, int *flag, void *statuses);
int MPI_Testall(int n, void *requests, int *flag, void *statuses)
{
    static int (*real)(int, void *, int *, void *);
    for (const char *how; (how = getenv("STUCK"));)
        if (strcmp(how, "spins")) pause();
    if (!real)
        real =
            (int (*)(int, void *, int *, void *))dlsym(dlopen("libmpi.so.40", RTLD_LAZY | RTLD_NOLOAD), "PMPI_Testall");
    return real(n, requests, flag, statuses);
}
