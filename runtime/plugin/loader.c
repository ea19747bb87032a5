/* SPDX-License-Identifier: Apache-2.0
 *
 * loader.c: backends by name. Built-in ones come from a table; others from libperilune_<name>.so, searched in
 * PERI_PLUGIN_PATH (colon-separated) and then in the folder of the object that holds this code; never in the working
 * directory, never unloaded. Tests give the name `opaque` to another device by PERI_OPAQUE_DEVICE: what is said of the
 * test device must hold for any.
 */
#include "plugin_internal.h"

#include "../../kernels/kernels.h"
#include "../base/tune.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/auxv.h>

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
    return peri__tune(choices[choice]);
}

static int64_t sort_keys(void) { return peri__tune(PERI__TUNE_sort_ids); }

/** The kernel that the backend which this thread loads asked for last without getting it; "": none. */
static _Thread_local char missed[96];

static void (*kernel_named(const char *name, int64_t args))(const void *args, int64_t begin, int64_t end)
{
    int32_t n;
    bool other = false;
    const peri_work_entry *list = peri_work_list(&n);
    for (int32_t i = 0; name && i < PERI_KERNEL_COUNT; i++) {
        if (strcmp(list[i].name, name)) continue;
        if (list[i].args == args) return peri_kernels_get()->fn[i];
        other = true;
    }
    snprintf(missed, sizeof missed, "kernel '%.40s', which %s here", name ? name : "",
             other ? "takes other arguments" : "is not");
    return NULL;
}

static int thread_start(void *thread, void *(*body)(void *), void *ctx)
{
    return peri__thread_start(thread, body, ctx);
}

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
    .kernel = kernel_named,
    .fault = peri__fault,
    .time_ns = peri_time_ns,
    .pause = peri_pause,
    .copy_choice = copy_choice,
    .threads = peri_threads,
    .sort_keys = sort_keys,
    .fork_lock = peri__fork_leaf,
    .thread_start = thread_start,
    .own_file = peri__fd_of_ours,
};

const peri_plugin_host *peri__plugin_host(void) { return &host; }

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
PERI_FORK_LOCK(lock, PERI__FORK_PLUGINS)

/** dlopen. The program's handlers of signals are what they were afterwards: a library that comes along may set handlers
 *  of its own when it is loaded (UCX does, which the Open MPI of some distributions needs). */
static void *load_library(const char *path)
{
    enum { MOST = 65 };
    struct sigaction before[MOST], now;
    bool known[MOST];
    for (int s = 1; s < MOST; s++) known[s] = sigaction(s, NULL, &before[s]) == 0;
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    for (int s = 1; s < MOST; s++)
        if (known[s] && sigaction(s, NULL, &now) == 0 && now.sa_handler != before[s].sa_handler)
            sigaction(s, &before[s], NULL);
    return handle;
}

/** Open libperilune_<name>.so from one folder; NULL when it is not there or cannot be loaded (@reason says which). */
static void *open_in(const char *folder, size_t length, const char *name, char *reason, size_t len)
{
    char path[4096];
    if (!length) return NULL;
    if (folder[0] != '/') { /* would mean the working directory */
        snprintf(reason, len,
                 "no libperilune_%s.so: PERI_PLUGIN_PATH has the folder '%.*s', allowed: paths that begin with /", name,
                 (int)(length < 200 ? length : 200), folder);
        return NULL;
    }
    snprintf(path, sizeof path, "%.*s/libperilune_%s.so", (int)length, folder, name);
    void *handle = load_library(path);
    if (!handle) {
        const char *why = dlerror();
        if (!strstr(why, "cannot open shared object file") || strstr(why, "libperilune_") == NULL ||
            strncmp(why, path, strlen(path)) != 0)
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

/** The folders that the program has named, colon-separated; NULL: none. */
static char *own_path;

peri_status peri__plugin_path_set(const char *path)
{
    for (const char *at = path; at && *at; at = strchr(at, ':') ? strchr(at, ':') + 1 : NULL)
        if (*at != '/')
            return peri__fail(
                PERI_EINVAL,
                "peri_host_plugin_path_set: the folder '%.200s', allowed: paths that begin with /, between "
                "them ':'",
                at);
    char *copy = NULL;
    if (path && *path && !(copy = peri__strdup(path))) return PERI_ENOMEM;
    pthread_mutex_lock(&lock);
    peri__free(own_path);
    own_path = copy;
    pthread_mutex_unlock(&lock);
    return PERI_OK;
}

/** Open libperilune_<name>.so from the first of the colon-separated folders that has it. */
static void *open_along(const char *path, const char *name, char *reason, size_t len)
{
    void *handle = NULL;
    while (path && *path && !handle) {
        const char *colon = strchr(path, ':');
        handle = open_in(path, colon ? (size_t)(colon - path) : strlen(path), name, reason, len);
        path = colon ? colon + 1 : NULL;
    }
    return handle;
}

static void *open_plugin(const char *name, char *reason, size_t len)
{
    bool gpus = !strcmp(name, "cuda") || !strcmp(name, "nccl");
    snprintf(reason, len, "no libperilune_%s.so on PERI_PLUGIN_PATH or beside libperilune%s", name,
             gpus ? "; `make cuda` builds it" : "");
    /* nobody has loaded libraries for this program, and nobody can: the C library would end it */
    if (getauxval(AT_BASE) == 0) {
        snprintf(reason, len, "this program was linked statically, and cannot load libperilune_%s.so", name);
        return NULL;
    }
    /* The libraries behind plugins (MPI's, NCCL's, CUDA's) load code that variables and files in HOME name. */
    if (getauxval(AT_SECURE) != 0) {
        snprintf(reason, len,
                 "this program has other rights than its caller (setuid, capabilities), and loads no plugins: whoever "
                 "calls it would choose the code that libraries of libperilune_%s.so load",
                 name);
        return NULL;
    }
    void *handle = open_along(own_path, name, reason, len);
    if (!handle) handle = open_along(secure_getenv("PERI_PLUGIN_PATH"), name, reason, len);
    char folder[3500], beside[3600];
    size_t n = handle ? 0 : own_folder(folder, sizeof folder);
    if (n) handle = open_in(folder, n, name, reason, len);
    /* a program in PREFIX/bin has its plugins in PREFIX/lib/perilune; a library in PREFIX/lib too */
    if (n && !handle) {
        snprintf(beside, sizeof beside, "%s/../lib/perilune", folder);
        handle = open_in(beside, strlen(beside), name, reason, len);
    }
    return handle;
}

/** A backend names the lowest contract that it needs, which this library has to know; it may have fewer members than
 *  today's table, and more. */
static peri_status check_table(const char *what, const char *name, const uint32_t *size_abi, uint32_t least,
                               uint32_t lowest, uint32_t abi)
{
    if (!size_abi)
        return peri__fail(PERI_EUNSUPPORTED,
                          "%s '%s': the backend refused this version of Perilune, or serves another copy of it in this "
                          "process",
                          what, name);
    if (size_abi[1] >= lowest && size_abi[1] <= abi && size_abi[0] >= least) return PERI_OK;
    return peri__fail(PERI_EUNSUPPORTED,
                      "%s '%s': built for another version of Perilune (it needs contract %u, with a table of %u bytes; "
                      "allowed: %u..%u, %u bytes or more)",
                      what, name, size_abi[1], size_abi[0], lowest, abi, least);
}

/** A plugin that was loaded: a device or a transport. */
typedef struct known_plugin {
    char key[64];
    bool loaded; /* `work` is filled in */
    const uint32_t *given; /* how the backend's own table begins */
    union {
        peri_device_vtab device;
        peri_coll_vtab coll;
    } table; /* a copy, zeros behind what the backend has */
    int32_t work[PERI_WORK_COUNT]; /* of a device: its numbers by ours */
} known_plugin;

/** Kernels and operations are known by their names: @work gets the number of each in the backend's list, -1 where that
 *  has none of the name with the same arguments. Operations come after a gap in the list, and may be called as
 *  steps are. */
static void translate(const peri_work_entry *(*list)(int32_t *count), int32_t work[PERI_WORK_COUNT])
{
    int32_t own_count, count = 0, gap = 0;
    const peri_work_entry *own = peri_work_list(&own_count), *theirs = list ? list(&count) : NULL;
    while (gap < count && theirs[gap].name) gap++;
    for (int32_t i = 0; i < PERI_WORK_COUNT; i++) {
        const bool kernel = i < PERI_KERNEL_COUNT;
        work[i] = -1;
        for (int32_t k = kernel ? 0 : gap + 1; own[i].name && k < (kernel ? gap : count) && work[i] < 0; k++)
            if (theirs[k].name && !strcmp(theirs[k].name, own[i].name) && theirs[k].args == own[i].args) work[i] = k;
    }
}

peri_status peri__plugin_symbol(const char *name, const char *symbol, void **out)
{
    char reason[PERI_MESSAGE_MAX - 128];
    PERI__NOT_AT_BORDER;
    pthread_mutex_lock(&lock);
    void *handle = open_plugin(name, reason, sizeof reason), *found = handle ? dlsym(handle, symbol) : NULL;
    pthread_mutex_unlock(&lock);
    if (!handle) return peri__fail(PERI_ENOTFOUND, "plugin '%s': %s", name, reason);
    if (!found) return peri__fail(PERI_EUNSUPPORTED, "plugin '%s': libperilune_%s.so has no %s", name, name, symbol);
    *out = found;
    return PERI_OK;
}

/** What a name that is none of Perilune's own should have been, perhaps. */
static const char *own_names(const char *what, const char *name)
{
    if (!strcmp(what, "device")) return strcmp(name, "cuda") ? "; Perilune's own are cpu, cuda and opaque" : "";
    return strcmp(name, "mpi") && strcmp(name, "nccl") ? "; Perilune's own are self, sim, mpi and nccl" : "";
}

/** Load plugin @name into @p. */
static peri_status load(const char *what, const char *name, const char *symbol, known_plugin *p)
{
    char reason[PERI_MESSAGE_MAX - 128];
    void *handle = open_plugin(name, reason, sizeof reason);
    if (!handle) return peri__fail(PERI_ENOTFOUND, "%s '%s': %s%s", what, name, reason, own_names(what, name));
    const void *(*entry)(const peri_plugin_host *) = NULL;
    void *found = dlsym(handle, symbol);
    memcpy(&entry, &found, sizeof entry);
    if (!entry) return peri__fail(PERI_EUNSUPPORTED, "%s '%s': libperilune_%s.so has no %s", what, name, name, symbol);
    missed[0] = 0;
    const void *given = entry(&host);
    if (!given && missed[0])
        return peri__fail(PERI_EUNSUPPORTED, "%s '%s': built for another version of Perilune (it needs %s)", what, name,
                          missed);
    if (!given) return check_table(what, name, NULL, 0, 0, 0);
    p->given = given;
    const bool device = !strcmp(what, "device");
    memcpy(&p->table, given, (size_t)peri__min(p->given[0], device ? sizeof p->table.device : sizeof p->table.coll));
    snprintf(p->key, sizeof p->key, "%s/%s", what, name);
    return PERI_OK;
}

/** Plugin @name by its entry symbol, remembered. @what is "device" or "transport". */
static peri_status from_plugin(const char *what, const char *name, const char *symbol, known_plugin **out)
{
    enum { MOST = 16 };
    static known_plugin known[MOST];
    char key[64];
    for (const char *c = name; *c; c++)
        if (!((*c >= 'a' && *c <= 'z') || (*c >= '0' && *c <= '9') || *c == '_') || c - name > 31)
            return peri__fail(PERI_ENOTFOUND, "%s '%.40s': no such %s", what, name, what);
    snprintf(key, sizeof key, "%s/%s", what, name);
    peri_status status = PERI_OK;
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < MOST && known[i].given && strcmp(known[i].key, key) != 0) i++;
    if (i == MOST)
        status = peri__fail(PERI_EUNSUPPORTED, "%s '%s': more than %d plugins in one process", what, name, MOST);
    else if (!known[i].given) status = load(what, name, symbol, &known[i]);
    if (status == PERI_OK) *out = &known[i];
    pthread_mutex_unlock(&lock);
    return status;
}

/** Once a device's contract is known to be one of ours, so that it has a list: its numbers. */
static const int32_t *numbers_of(known_plugin *p)
{
    static pthread_mutex_t translating = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&translating);
    if (!p->loaded) translate(p->table.device.work, p->work);
    p->loaded = true;
    pthread_mutex_unlock(&translating);
    return p->work;
}

peri_status peri__plugin_device(const char *name, const peri_device_vtab **out, const int32_t **work)
{
    const char *other = !strcmp(name, "opaque") ? secure_getenv("PERI_OPAQUE_DEVICE") : NULL;
    if (other && *other) name = other;
    for (size_t i = 0; i < sizeof built_in_devices / sizeof *built_in_devices; i++) {
        if (strcmp(name, built_in_devices[i].name) != 0) continue;
        pthread_mutex_lock(&lock); /* threads that ask at the same time */
        *out = built_in_devices[i].entry(&host);
        pthread_mutex_unlock(&lock);
        if (work) *work = NULL;
        return PERI_OK;
    }
    known_plugin *p = NULL;
    PERI_TRY(from_plugin("device", name, PERI_DEVICE_ENTRY, &p));
    PERI_TRY(check_table("device", name, p->given, PERI_DEVICE_SIZE_LOWEST, PERI_DEVICE_ABI_LOWEST, PERI_DEVICE_ABI));
    const int32_t *numbers = numbers_of(p);
    *out = &p->table.device;
    if (work) *work = numbers;
    return PERI_OK;
}

peri_status peri__plugin_coll(const char *name, const peri_coll_vtab **out)
{
    for (size_t i = 0; i < sizeof built_in_colls / sizeof *built_in_colls; i++) {
        if (strcmp(name, built_in_colls[i].name) != 0) continue;
        pthread_mutex_lock(&lock); /* threads that ask at the same time */
        *out = built_in_colls[i].entry(&host);
        pthread_mutex_unlock(&lock);
        return PERI_OK;
    }
    known_plugin *p = NULL;
    PERI_TRY(from_plugin("transport", name, PERI_COLL_ENTRY, &p));
    PERI_TRY(check_table("transport", name, p->given, PERI_COLL_SIZE_LOWEST, PERI_COLL_ABI_LOWEST, PERI_COLL_ABI));
    *out = &p->table.coll;
    return PERI_OK;
}
