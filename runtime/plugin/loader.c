/* SPDX-License-Identifier: Apache-2.0
 *
 * loader.c: backends by name. Built-in ones come from a table; others from libperilune_<name>.so, searched in PERI_PLUGIN_PATH
 * (colon-separated) and then in the folder of the object that holds this code; never in the working directory, never unloaded.
 * Tests give the name `opaque` to another device by PERI_OPAQUE_DEVICE: what is said of the test device must hold for any.
 */
#include "internal.h"

#include "../../kernels/kernels.h"
#include "../base/tune.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

const peri_device_vtab *peri__cpu_entry(const peri_plugin_host *host);
const peri_device_vtab *peri__opaque_entry(const peri_plugin_host *host);
const peri_coll_vtab *peri__self_entry(const peri_plugin_host *host);
const peri_coll_vtab *peri__sim_entry(const peri_plugin_host *host);

static const struct {
    const char *name;
    peri_device_entry_fn entry;
} built_in_devices[] = {{"cpu", peri__cpu_entry}, {"opaque", peri__opaque_entry}};

static const struct {
    const char *name;
    peri_coll_entry_fn entry;
} built_in_colls[] = {{"self", peri__self_entry}, {"sim", peri__sim_entry}};

static int64_t copy_choice(int32_t choice)
{
    static const int32_t choices[PERI_HOST_COPY_CHOICES] = {
        [PERI_HOST_COPY_PAST] = PERI__TUNE_copy_past, [PERI_HOST_COPY_BLOCK] = PERI__TUNE_copy_block,
        [PERI_HOST_COPY_BY] = PERI__TUNE_copy_by, [PERI_HOST_COPY_NEAR] = PERI__TUNE_copy_near,
        [PERI_HOST_COPY_ROWS] = PERI__TUNE_copy_rows};
    if (choice == PERI_HOST_COPY_PAST || choice == PERI_HOST_COPY_ROWS) peri__tune_need(PERI__TUNE_COPY);
    return peri__tune(choices[choice]);
}

static int64_t sort_keys(void) { return peri__tune(PERI__TUNE_sort_ids); }

static const peri_plugin_host host = {
    .size = sizeof host,
    .abi = PERI_PLUGIN_HOST_ABI,
    .fail = peri__fail_at,
    .error_message = peri_error_message,
    .log = peri__log,
    .alloc = peri__alloc,
    .alloc_zero = peri__alloc_zero,
    .free = peri__free,
    .parallel_for = peri__parallel_for,
    .kernels = peri_kernels_get,
    .fault = peri__fault,
    .time_ns = peri_time_ns,
    .pause = peri_pause,
    .copy_choice = copy_choice,
    .threads = peri_threads,
    .sort_keys = sort_keys,
};

const peri_plugin_host *peri__plugin_host(void) { return &host; }

/** Open libperilune_<name>.so from one folder; NULL when it is not there or cannot be loaded (@reason says which). */
static void *open_in(const char *folder, size_t length, const char *name, char *reason, size_t len)
{
    char path[4096];
    if (!length) return NULL;
    if (folder[0] != '/') { /* would mean the working directory */
        snprintf(reason, len, "no libperilune_%s.so: PERI_PLUGIN_PATH has the folder '%.*s', allowed: paths that begin with /", name,
                 (int)(length < 200 ? length : 200), folder);
        return NULL;
    }
    snprintf(path, sizeof path, "%.*s/libperilune_%s.so", (int)length, folder, name);
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char *why = dlerror();
        if (!strstr(why, "cannot open shared object file") || strstr(why, "libperilune_") == NULL || strncmp(why, path, strlen(path)) != 0)
            snprintf(reason, len, "%s", why);
    }
    return handle;
}

/** The folder of the object (shared library or program) that holds this code. */
static size_t own_folder(char *path, size_t len)
{
    Dl_info info;
    if (!dladdr((void *)(uintptr_t)&host, &info) || !info.dli_fname) return 0;
    char *real = realpath(strchr(info.dli_fname, '/') ? info.dli_fname : "/proc/self/exe", NULL);
    if (!real) return 0;
    char *slash = strrchr(real, '/');
    size_t n = slash ? (size_t)(slash - real) : 0;
    if (n >= len) n = 0;
    memcpy(path, real, n);
    path[n] = 0;
    free(real);
    return n;
}

static void *open_plugin(const char *name, char *reason, size_t len)
{
    bool gpus = !strcmp(name, "cuda") || !strcmp(name, "nccl");
    snprintf(reason, len, "no libperilune_%s.so on PERI_PLUGIN_PATH or beside libperilune%s", name, gpus ? "; `make cuda` builds it" : "");
    void *handle = NULL;
    const char *path = secure_getenv("PERI_PLUGIN_PATH");
    while (path && *path && !handle) {
        const char *colon = strchr(path, ':');
        size_t n = colon ? (size_t)(colon - path) : strlen(path);
        handle = open_in(path, n, name, reason, len);
        path = colon ? colon + 1 : NULL;
    }
    char folder[3500], beside[3600];
    size_t n = handle ? 0 : own_folder(folder, sizeof folder);
    if (n) handle = open_in(folder, n, name, reason, len);
    if (n && !handle) { /* a program in PREFIX/bin has its plugins in PREFIX/lib/perilune; a library in PREFIX/lib too */
        snprintf(beside, sizeof beside, "%s/../lib/perilune", folder);
        handle = open_in(beside, strlen(beside), name, reason, len);
    }
    return handle;
}

static peri_status check_table(const char *what, const char *name, const uint32_t *size_abi, uint32_t minimum, uint32_t abi)
{
    if (!size_abi) return peri__fail(PERI_EUNSUPPORTED, "%s '%s': the backend refused this version of Perilune", what, name);
    if (size_abi[1] != abi || size_abi[0] < minimum)
        return peri__fail(PERI_EUNSUPPORTED, "%s '%s': built for another version of Perilune (contract %u of %u bytes, wanted %u of %u)",
                          what, name, size_abi[1], size_abi[0], abi, minimum);
    return PERI_OK;
}

/** Kernels and operations are numbers: with another list, a plugin would run others than those that are meant. */
static peri_status check_kernels(const char *what, const char *name, uint64_t (*kernels)(void))
{
    unsigned long long own = peri_kernels_hash(), has = kernels ? kernels() : 0;
    if (own == has) return PERI_OK;
    return peri__fail(PERI_EUNSUPPORTED, "%s '%s': built with another list of kernels (its hash is %016llx, wanted %016llx): build it "
                      "again with the headers of this version", what, name, has, own);
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/** The vtab of plugin @name by its entry symbol, remembered. @what is "device" or "transport". */
static peri_status from_plugin(const char *what, const char *name, const char *symbol, const void **out)
{
    enum { MOST = 16 };
    static struct {
        char key[64];
        const void *vtab;
    } known[MOST];
    char key[64], reason[PERI_MESSAGE_MAX - 128];
    for (const char *c = name; *c; c++)
        if (!((*c >= 'a' && *c <= 'z') || (*c >= '0' && *c <= '9') || *c == '_') || c - name > 31)
            return peri__fail(PERI_ENOTFOUND, "%s '%.40s': no such %s", what, name, what);
    snprintf(key, sizeof key, "%s/%s", what, name);
    peri_status status = PERI_OK;
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < MOST && known[i].vtab && strcmp(known[i].key, key) != 0) i++;
    if (i < MOST && !known[i].vtab) {
        void *handle = open_plugin(name, reason, sizeof reason);
        const void *(*entry)(const peri_plugin_host *) = NULL;
        void *found = handle ? dlsym(handle, symbol) : NULL;
        memcpy(&entry, &found, sizeof entry);
        if (!handle) status = peri__fail(PERI_ENOTFOUND, "%s '%s': %s", what, name, reason);
        else if (!entry) status = peri__fail(PERI_EUNSUPPORTED, "%s '%s': libperilune_%s.so has no %s", what, name, name, symbol);
        else {
            known[i].vtab = entry(&host);
            memcpy(known[i].key, key, sizeof key);
            if (!known[i].vtab) status = check_table(what, name, NULL, 0, 0);
        }
    } else if (i == MOST) {
        status = peri__fail(PERI_EUNSUPPORTED, "%s '%s': more than %d plugins in one process", what, name, MOST);
    }
    if (status == PERI_OK) *out = known[i].vtab;
    pthread_mutex_unlock(&lock);
    return status;
}

peri_status peri__plugin_device(const char *name, const peri_device_vtab **out)
{
    const peri_device_vtab *vtab = NULL;
    const char *other = !strcmp(name, "opaque") ? secure_getenv("PERI_OPAQUE_DEVICE") : NULL;
    if (other && *other) name = other;
    for (size_t i = 0; i < sizeof built_in_devices / sizeof *built_in_devices; i++)
        if (!strcmp(name, built_in_devices[i].name)) vtab = built_in_devices[i].entry(&host);
    if (!vtab) PERI_TRY(from_plugin("device", name, PERI_DEVICE_ENTRY, (const void **)&vtab));
    PERI_TRY(check_table("device", name, &vtab->size, sizeof *vtab, PERI_DEVICE_ABI));
    PERI_TRY(check_kernels("device", name, vtab->kernels));
    *out = vtab;
    return PERI_OK;
}

peri_status peri__plugin_coll(const char *name, const peri_coll_vtab **out)
{
    const peri_coll_vtab *vtab = NULL;
    for (size_t i = 0; i < sizeof built_in_colls / sizeof *built_in_colls; i++)
        if (!strcmp(name, built_in_colls[i].name)) vtab = built_in_colls[i].entry(&host);
    if (!vtab) PERI_TRY(from_plugin("transport", name, PERI_COLL_ENTRY, (const void **)&vtab));
    PERI_TRY(check_table("transport", name, &vtab->size, sizeof *vtab, PERI_COLL_ABI));
    PERI_TRY(check_kernels("transport", name, vtab->kernels));
    *out = vtab;
    return PERI_OK;
}
