/* SPDX-License-Identifier: Apache-2.0
 *
 * library.c: libnccl.so.2, found at run time, so that this plugin loads where there is none and can say so.
 */
#include "nccl_internal.h"

#include <dlfcn.h>
#include <string.h>

nccl_library peri__nccl;

bool peri__nccl_load(char *reason, size_t len)
{
    static const char *const names[] = {
        "GetVersion", "GetUniqueId",    "CommInitRankConfig", "CommSplit",     "CommGetAsyncError", "CommDestroy",
        "CommAbort",  "GetErrorString", "GetLastError",       "GroupStart",    "GroupEnd",          "Send",
        "Recv",       "AllReduce",      "AllGather",          "ReduceScatter", "Broadcast"};
    enum {
        COUNT = sizeof names / sizeof *names,
        LEAST = 21800 /* 2.18: communicators can be split, without blocking */
    };
    _Static_assert(sizeof(nccl_library) == COUNT * sizeof(void *), "a name for each function");
    if (peri__nccl.Broadcast) return true;
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL), *found[COUNT];
    if (!library) {
        snprintf(reason, len, "%s", dlerror());
        return false;
    }
    for (int i = 0; i < COUNT; i++) {
        char name[64];
        snprintf(name, sizeof name, "nccl%s", names[i]);
        found[i] = dlsym(library, name);
        if (found[i]) continue;
        snprintf(reason, len, "libnccl.so.2 has no %s: wanted NCCL 2.18 or later", name);
        return false;
    }
    nccl_library l;
    int version = 0;
    memcpy(&l, found, sizeof l);
    if (l.GetVersion(&version) != ncclSuccess || version < LEAST) {
        snprintf(reason, len, "libnccl.so.2 is version %d.%d, wanted 2.18 or later", version / 10000,
                 version / 100 % 100);
        return false;
    }
    peri__nccl = l;
    return true;
}

peri_status peri__nccl_fail(const char *what, ncclResult_t result)
{
    bool misused = result == ncclInvalidArgument || result == ncclInvalidUsage;
    peri_status status = result == ncclRemoteError ? PERI_EPEER : misused ? PERI_EMISMATCH : PERI_EIO;
    const char *said = peri__nccl.GetLastError(NULL); /* of this process: what NCCL would have logged */
    if (misused && said && strstr(said, "Duplicate GPU"))
        return FAIL(
            status,
            "nccl%s: %s: %.160s; NCCL wants a GPU for each rank: start no more ranks on a machine than it has GPUs, or "
            "leave device_transport out, so that tensors go over transport mpi",
            what, peri__nccl.GetErrorString(result), said);
    return FAIL(status, "nccl%s: %s%s%.200s", what, peri__nccl.GetErrorString(result), said && *said ? ": " : "",
                said ? said : "");
}
