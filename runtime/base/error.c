/* SPDX-License-Identifier: Apache-2.0
 *
 * error.c: status names, the per-thread error record, log lines, dtype names, versions.
 */
#include "base_internal.h"
#include "quiet.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static const struct {
    int32_t status;
    const char *name, *text;
} statuses[] = {
    {PERI_OK, "OK", "done"},
    {PERI_PENDING, "PENDING", "in progress"},
    {PERI_EINVAL, "EINVAL", "an argument is malformed"},
    {PERI_ENOMEM, "ENOMEM", "memory could not be had"},
    {PERI_ERANGE, "ERANGE", "an id, index or offset lies outside its allowed range"},
    {PERI_EUNSUPPORTED, "EUNSUPPORTED", "this build, device or transport cannot serve the request"},
    {PERI_EIO, "EIO", "a file or system call failed"},
    {PERI_EFORMAT, "EFORMAT", "a file or message is not in the format it claims"},
    {PERI_ENOTFOUND, "ENOTFOUND", "a named thing does not exist"},
    {PERI_ETIMEOUT, "ETIMEOUT", "a deadline passed"},
    {PERI_EMISMATCH, "EMISMATCH", "ranks disagree about an operation"},
    {PERI_EPEER, "EPEER", "a peer rank failed or is gone"},
    {PERI_EABORTED, "EABORTED", "the group is poisoned by an earlier failure"},
    {PERI_ECLOSED, "ECLOSED", "the object was closed or released"},
    {PERI_EINTERNAL, "EINTERNAL", "a bug of Perilune's own"},
};

static const int8_t dtype_sizes[PERI_DTYPE_COUNT] = PERI_DTYPE_SIZES;
static const char *const dtype_names[PERI_DTYPE_COUNT] = PERI_DTYPE_NAMES;
/** PyTorch's names, which are understood too. */
static const char *const torch_names[PERI_DTYPE_COUNT] = {
    [PERI_F64] = "float64", [PERI_F32] = "float32", [PERI_F16] = "float16",   [PERI_BF16] = "bfloat16",
    [PERI_I64] = "int64",   [PERI_I32] = "int32",   [PERI_I16] = "int16",     [PERI_I8] = "int8",
    [PERI_U8] = "uint8",    [PERI_BOOL] = "bool",   [PERI_C64] = "complex64", [PERI_C128] = "complex128",
};

static _Thread_local peri__error record; /* one thread's last failure */
/** The record before a function of the program's failed in the library, which is no failure of the call outside. */
static _Thread_local struct {
    bool kept;
    peri__error record;
} outside;

static atomic_int log_level = -1;
static atomic_int log_rank = -1;
/** The host's function for log lines; NULL: they are printed. */
static struct {
    pthread_mutex_t lock;
    void (*log)(void *ctx, int32_t level, const char *text);
    void *ctx;
} listener = {.lock = PTHREAD_MUTEX_INITIALIZER};
PERI_FORK_LOCK(listener.lock, PERI__FORK_LOG)

int32_t peri_abi_version(void) { return PERI_ABI_VERSION; }
const char *peri_version(void) { return PERI_VERSION_TEXT; }

const char *peri_status_name(int32_t status)
{
    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++)
        if (statuses[i].status == status) return statuses[i].name;
    return "unknown";
}

const char *peri_status_text(int32_t status)
{
    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++)
        if (statuses[i].status == status) return statuses[i].text;
    return "unknown status";
}

const char *peri_error_message(void) { return record.message; }
int32_t peri_error_status(void) { return record.status; }
const char *peri_error_where(void) { return record.where; }

static void keep_outside(void)
{
    if (outside.kept || !peri__at_border()) return;
    outside.record = record;
    outside.kept = true;
}

void peri__border_forget(void)
{
    if (outside.kept) record = outside.record;
    outside.kept = false;
}

void peri_error_clear(void)
{
    keep_outside();
    record.status = PERI_OK;
    record.message[0] = record.where[0] = 0;
}

void peri__error_keep(peri__error *kept) { *kept = record; }
void peri__error_restore(const peri__error *kept) { record = *kept; }

/** @text, @length long, as a message. Of one that is too long the middle is left out: it begins with what failed, and
 *  ends with the cause. */
static void fit(char *message, const char *text, int length)
{
    enum { HEAD = PERI_MESSAGE_MAX / 3, GAP = 5, TAIL = PERI_MESSAGE_MAX - 1 - HEAD - GAP };
    if (length < PERI_MESSAGE_MAX) {
        memcpy(message, text, (size_t)length + 1);
        return;
    }
    memcpy(message, text, HEAD);
    memcpy(message + HEAD, " ... ", GAP);
    memcpy(message + HEAD + GAP, text + length - TAIL, TAIL + 1);
}

peri_status peri__fail_va(peri_status status, const char *file, int line, const char *format, va_list args)
{
    int saved = errno;
    char message[4 * PERI_MESSAGE_MAX]; /* apart: an argument may be the old message */
    int length = peri__vprint_plain(message, sizeof message, format, args);
    keep_outside();
    fit(record.message, message, length < (int)sizeof message ? length : (int)sizeof message - 1);
    record.status = status;
    const char *tail = file;
    for (const char *c = file; *c; c++)
        if (!strncmp(c, "runtime/", 8) || !strncmp(c, "kernels/", 8)) tail = c;
    snprintf(record.where, sizeof record.where, "%s:%d", tail, line);
    errno = saved;
    return status;
}

peri_status peri__fail_at(peri_status status, const char *file, int line, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    peri__fail_va(status, file, line, format, args);
    va_end(args);
    return status;
}

peri_status peri__border_fail(const char *function)
{
    if (atomic_load(&peri__border_forked))
        return peri__fail(PERI_EINVAL,
                          "%s: this process was forked by a function that was given to the library, while that may "
                          "have held locks; allowed in it: to run another program, or to end",
                          function);
    return peri__fail(PERI_EINVAL, "%s: a function that was given to %s calls the library, which it may not", function,
                      peri__border_in());
}

#if defined(PERI_DEBUG)
void peri__assert_failed(const char *file, int line, const char *what)
{
    fprintf(stderr, "perilune: %s:%d: broken assertion: %s (a bug of Perilune's own)\n", file, line, what);
    abort();
}
#endif

peri_status peri_log_level_set(int32_t level)
{
    PERI__NOT_AT_BORDER;
    if (level < PERI_LOG_ERROR || level > PERI_LOG_DEBUG)
        return peri__fail(PERI_EINVAL, "peri_log_level_set: level %d, allowed: %d..%d", level, PERI_LOG_ERROR,
                          PERI_LOG_DEBUG);
    atomic_store(&log_level, level);
    return PERI_OK;
}

void peri__log_rank_set(int32_t rank) { atomic_store(&log_rank, rank); }

static int log_level_of(const char *text)
{
    static const char *const names[] = {"error", "warn", "info", "debug"};
    for (int i = 0; text && i < 4; i++)
        if (!strcmp(text, names[i])) return i;
    return -1;
}

peri_status peri__log_check(void)
{
    const char *text = secure_getenv("PERI_LOG");
    if (!text || !*text || log_level_of(text) >= 0) return PERI_OK;
    return peri__fail(PERI_EINVAL, "PERI_LOG is '%.40s', allowed: error, warn, info, debug", text);
}

static int level_now(void)
{
    int level = atomic_load_explicit(&log_level, memory_order_relaxed);
    if (level >= 0) return level;
    level = log_level_of(secure_getenv("PERI_LOG"));
    if (level < 0) level = PERI_LOG_WARN; /* what is no level fails where devices are opened */
    atomic_store(&log_level, level);
    return level;
}

bool peri__log_shows(int32_t level) { return level <= level_now(); }

/** All of @text in one write(2), so that lines of several ranks and threads do not mix, however stderr is buffered. A
 *  pipe that nobody reads any more takes nothing, and the program gets no signal for it. */
static void write_stderr(const char *text, size_t n)
{
    PERI__QUIET;
    fflush(stderr);
    for (size_t done = 0; done < n;) {
        ssize_t written = write(STDERR_FILENO, text + done, n - done);
        if (written < 0 && errno != EINTR) break;
        if (written > 0) done += (size_t)written;
    }
}

void peri__log_set(void (*log)(void *ctx, int32_t level, const char *text), void *ctx)
{
    pthread_mutex_lock(&listener.lock);
    listener.log = log;
    listener.ctx = ctx;
    pthread_mutex_unlock(&listener.lock);
}

/** Give a line, @text[n], to the host. False: it wants none. The lock is not held meanwhile: the function may take
 *  long. */
static bool told(int32_t level, char *text, size_t n)
{
    pthread_mutex_lock(&listener.lock);
    void (*log)(void *ctx, int32_t level, const char *text) = listener.log;
    void *ctx = listener.ctx;
    pthread_mutex_unlock(&listener.lock);
    if (!log) return false;
    text[n] = 0;
    PERI__AT_BORDER("peri_host_log_set", log(ctx, level, text));
    return true;
}

void peri__log(int32_t level, const char *format, ...)
{
    if (!peri__log_shows(level) || peri__at_border()) return; /* a function of the program's is not told of itself */
    static const char *const names[] = {"error", "warning", "info", "debug"};
    int saved = errno, rank = atomic_load(&log_rank);
    char line[PERI_MESSAGE_MAX * 2];
    int used = rank >= 0 ? snprintf(line, sizeof line, "perilune[%d] %s: ", rank, names[level & 3])
                         : snprintf(line, sizeof line, "perilune %s: ", names[level & 3]);
    va_list args;
    va_start(args, format);
    peri__vprint_plain(line + used, sizeof line - (size_t)used - 1, format, args);
    va_end(args);
    size_t n = strlen(line);
    if (!told(level, line, n)) {
        line[n] = '\n';
        write_stderr(line, n + 1);
    }
    errno = saved;
}

static bool dtype_is_known(int32_t dtype) { return dtype >= 0 && dtype < PERI_DTYPE_COUNT; }

int64_t peri_dtype_size(int32_t dtype) { return dtype_is_known(dtype) ? dtype_sizes[dtype] : 0; }
const char *peri_dtype_name(int32_t dtype) { return dtype_is_known(dtype) ? dtype_names[dtype] : "?"; }

int32_t peri_dtype_parse(const char *name)
{
    char all[128] = "";
    for (int32_t i = 0; name && i < PERI_DTYPE_COUNT; i++)
        if (!strcmp(name, dtype_names[i]) || !strcmp(name, torch_names[i])) return i;
    for (int32_t i = 0, used = 0; i < PERI_DTYPE_COUNT; i++)
        used += snprintf(all + used, sizeof all - (size_t)used, " %s", dtype_names[i]);
    return peri__fail(PERI_EINVAL, "peri_dtype_parse: '%s' is no dtype; known:%s", name ? name : "(null)", all);
}
