/* SPDX-License-Identifier: Apache-2.0
 *
 * mapped.c: the bytes of a model file. A mapped file that somebody cuts short sends SIGBUS to whoever reads behind its
 * new end. Where it was asked for (PERI_MODEL_GUARD), the handler of this file puts pages of zeros where the file was
 * and notes that it did, so that the call goes on, and fails at its end.
 */
#include "model_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/** Files that are mapped now. The handler reads this without a lock: a slot's `begin` is set last, and cleared
 *  first. */
enum { SLOTS = 256 };
static struct slot {
    atomic_uintptr_t begin; /* 0: nothing is here */
    atomic_uintptr_t end;
    atomic_bool taken;
    atomic_uintptr_t missing; /* a page that could not be read: its distance from `begin`, and 1 */
} slots[SLOTS];

static struct sigaction before; /* what SIGBUS did before */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static uintptr_t page;

/** Hand the signal to whoever had it before us. */
static void pass_on(int number, siginfo_t *info, void *context)
{
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    } else {
        signal(SIGBUS, SIG_DFL); /* the instruction runs again, and ends the process as it would have without us */
    }
}

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    const int kept = errno;
    const uintptr_t at = (uintptr_t)info->si_addr;
    for (int i = 0; i < SLOTS; i++) {
        uintptr_t begin = atomic_load(&slots[i].begin), end = atomic_load(&slots[i].end);
        if (!begin || at < begin || at >= end) continue;
        void *from = (void *)(at & ~(page - 1));
        if (mmap(from, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
            break;
        atomic_store(&slots[i].missing, (uintptr_t)from - begin + 1);
        errno = kept;
        return;
    }
    errno = kept;
    pass_on(number, info, context);
}

static void install_bus_handler(void)
{
    page = (uintptr_t)sysconf(_SC_PAGESIZE);
    struct sigaction ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, &before);
}

/** Tell the handler about [data, data + bytes); -1: there are SLOTS of them already. */
static int32_t watch(const char *data, int64_t bytes)
{
    pthread_once(&once, install_bus_handler);
    for (int32_t i = 0; i < SLOTS; i++) {
        bool free = false;
        if (!atomic_compare_exchange_strong(&slots[i].taken, &free, true)) continue;
        atomic_store(&slots[i].missing, 0);
        atomic_store(&slots[i].end, (uintptr_t)data + (uintptr_t)bytes);
        atomic_store(&slots[i].begin, (uintptr_t)data);
        return i;
    }
    return -1;
}

static peri_status fail_open(const char *path, const char *what)
{
    const int why = errno;
    return peri__fail(why == ENOENT ? PERI_ENOTFOUND : PERI_EIO, "peri_model_open: '%.200s': %s: %s", path, what,
                      strerror(why));
}

static peri_status map_or_read(int fd, const char *path, peri__mapping how, peri__mapped *m)
{
    const int protection = how.copy || how.own ? PROT_READ | PROT_WRITE : PROT_READ;
    const int flags = how.copy ? MAP_PRIVATE | MAP_ANONYMOUS : how.own ? MAP_PRIVATE | MAP_NORESERVE : MAP_SHARED;
    char *data = mmap(NULL, (size_t)m->bytes, protection, flags, how.copy ? -1 : fd, 0);
    if (data == MAP_FAILED) return fail_open(path, how.copy ? "there is no memory for it" : "it cannot be mapped");
    m->data = data;
    if (!how.copy && !how.guard) return PERI_OK;
    if (!how.copy) {
        m->slot = watch(data, m->bytes);
        if (m->slot >= 0) return PERI_OK;
        munmap(data, (size_t)m->bytes);
        return peri__fail(PERI_ENOMEM, "peri_model_open: %d model files are mapped and guarded, more cannot be", SLOTS);
    }
    if (peri__read_at(fd, data, m->bytes, 0) == m->bytes) return PERI_OK;
    const peri_status status =
        errno ? fail_open(path, "it cannot be read")
              : peri__fail(PERI_EIO, "peri_model_open: '%.200s' became shorter while it was read", path);
    munmap(data, (size_t)m->bytes);
    return status;
}

peri_status peri__mapped_open(const char *path, peri__mapping how, peri__mapped *out)
{
    peri__mapped m = {.fd = -1, .slot = -1};
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return fail_open(path, "it cannot be opened");
    peri_status status = PERI_OK;
    if (fstat(fd, &info) != 0) status = fail_open(path, "it cannot be asked for its size");
    else if (S_ISDIR(info.st_mode))
        status = peri__fail(PERI_EFORMAT,
                            "peri_model_open: '%.200s' is a folder, wanted a model file; of a checkpoint `perilune "
                            "export` makes one",
                            path);
    else if (!S_ISREG(info.st_mode)) status = peri__fail(PERI_EFORMAT, "peri_model_open: '%.200s' is no file", path);
    else if (info.st_size < (off_t)sizeof(peri__model_preamble))
        status = peri__fail(PERI_EFORMAT, "peri_model_open: '%.200s' has %lld bytes, a model file has %zu and more",
                            path, (long long)info.st_size, sizeof(peri__model_preamble));
    if (status >= 0) {
        m.bytes = info.st_size;
        m.changed_s = info.st_mtim.tv_sec;
        m.changed_ns = info.st_mtim.tv_nsec;
        status = map_or_read(fd, path, how, &m);
    }
    if (status < 0 || how.copy) close(fd);
    else m.fd = fd;
    if (status >= 0) *out = m;
    return status;
}

void peri__mapped_close(peri__mapped *m)
{
    if (!m->data) return;
    if (m->slot >= 0) {
        atomic_store(&slots[m->slot].begin, 0);
        atomic_store(&slots[m->slot].taken, false);
    }
    munmap((void *)(uintptr_t)m->data, (size_t)m->bytes);
    if (m->fd >= 0) close(m->fd);
    *m = (peri__mapped){.fd = -1, .slot = -1};
}

int64_t peri__mapped_missing(const peri__mapped *m)
{
    return m->slot < 0 ? -1 : (int64_t)atomic_load_explicit(&slots[m->slot].missing, memory_order_relaxed) - 1;
}

bool peri__mapped_cut(const peri__mapped *m) { return peri__mapped_missing(m) >= 0; }
