/* SPDX-License-Identifier: Apache-2.0
 *
 * file_jobs.c: see file_jobs.h.
 */
#include "file_jobs.h"
#include "../base/fault.h"
#include "shared.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

enum { JOBS = 16, THREADS = 4, WRITE_BACK = 32 << 20 };

typedef enum job_kind { WRITE, READ, FINISH } job_kind;

typedef struct job {
    job_kind kind;
    peri__io_file *file;
    void *data;
    int64_t bytes, at;
    peri__io_then *then;
    const void *context;
    peri__shared *shared; /* NULL: nobody else reads these bytes */
    bool keep;            /* what another process has read is put into `data`, too */
    bool done;
} job;

struct peri__io {
    pthread_t threads[THREADS];
    int32_t n_threads;
    pthread_mutex_t lock;
    pthread_cond_t given_one, done_one;
    job jobs[JOBS];       /* job n lies at n % JOBS */
    int64_t given, begun; /* how many jobs */
    int64_t done;         /* all jobs below this number are */
    int32_t forks; /* peri__forks where the threads are */
    bool stop;
    peri_status status; /* of the first job that failed */
    char message[PERI_MESSAGE_MAX];
};

/* -- files --------------------------------------------------------------------------------------------------------- */

peri_status peri__io_file_new(int fd, const char *path, peri__io_file **out)
{
    size_t bytes = strlen(path) + 1;
    peri__io_file *file = peri__alloc(sizeof *file + bytes);
    if (!file) {
        close(fd);
        return PERI_ENOMEM;
    }
    file->fd = fd;
    memcpy(file->path, path, bytes);
    *out = file;
    return PERI_OK;
}

void peri__io_file_free(peri__io_file *file)
{
    if (file) close(file->fd);
    peri__free(file);
}

static void set_direct(peri__io_file *file, bool direct)
{
    int flags = fcntl(file->fd, F_GETFL);
    if (flags >= 0) fcntl(file->fd, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT);
}

static bool is_direct(const peri__io_file *file)
{
    int flags = fcntl(file->fd, F_GETFL);
    return flags >= 0 && flags & O_DIRECT;
}

void peri__io_file_direct(peri__io_file *file) { set_direct(file, true); }

static int64_t whole_pages(int64_t bytes) { return peri__ceil_div(bytes, PERI__IO_HUGE) * PERI__IO_HUGE; }

char *peri__io_pages(int64_t bytes)
{
    const size_t n = (size_t)whole_pages(bytes);
    char *p = peri__fault(PERI_FAULT_alloc)
                  ? MAP_FAILED
                  : mmap(NULL, n + PERI__IO_HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        peri__fail(PERI_ENOMEM, "checkpoint: no memory for %lld bytes of buffers", (long long)bytes);
        return NULL;
    }
    const size_t before = (PERI__IO_HUGE - (uintptr_t)p % PERI__IO_HUGE) % PERI__IO_HUGE;
    if (before) munmap(p, before);
    munmap(p + before + n, PERI__IO_HUGE - before);
    madvise(p + before, n, MADV_HUGEPAGE);
    return p + before;
}

void peri__io_pages_free(char *p, int64_t bytes)
{
    if (p) munmap(p, (size_t)whole_pages(bytes));
}

/* -- the thread ---------------------------------------------------------------------------------------------------- */

static peri_status write_job(const job *j)
{
    const bool direct = is_direct(j->file);
    if (direct) {
        /* File systems may want more than we know of: then, and for the last bytes of a file, the page cache takes
         * them. */
        const bool aligned = j->bytes % PERI__IO_PAGE == 0 && j->at % PERI__IO_PAGE == 0;
        peri_status status =
            aligned ? peri__file_put(j->file->fd, j->file->path, j->data, j->bytes, j->at) : PERI_EINVAL;
        if (aligned && (status >= 0 || errno != EINVAL)) return status;
        set_direct(j->file, false);
    }
    PERI_TRY(peri__file_put(j->file->fd, j->file->path, j->data, j->bytes, j->at));
    /* A hint, so that the last sync has little to do: that it failed, the sync tells. */
    const int64_t past = j->at + j->bytes;
    if (past / WRITE_BACK != j->at / WRITE_BACK)
        sync_file_range(j->file->fd, peri__max(0, past - 2 * WRITE_BACK), 2 * WRITE_BACK, SYNC_FILE_RANGE_WRITE);
    return PERI_OK;
}

static peri_status read_job(const job *j)
{
    char *data = j->data;
    const int64_t skip = j->at % PERI__IO_PAGE, need = skip + j->bytes;
    int64_t has = skip;
    if (is_direct(j->file)) { /* the last page of the file is shorter */
        ssize_t n =
            pread(j->file->fd, data, (size_t)(peri__ceil_div(need, PERI__IO_PAGE) * PERI__IO_PAGE), j->at - skip);
        if (n >= need) return PERI_OK;
        set_direct(j->file, false);
        has = peri__max(has, n);
    }
    return peri__file_get(j->file->fd, j->file->path, data + has, need - has, j->at - skip + has);
}

/** Bytes that others of this machine read, too: each is read by one of them. */
static peri_status read_together(const job *j)
{
    const peri__shared_key key = {j->file->device, j->file->inode, j->at, j->bytes};
    char *own = (char *)j->data + j->at % PERI__IO_PAGE;
    int32_t slot;
    const char *theirs = peri__shared_take(j->shared, &key, &slot);
    if (theirs) {
        if (j->keep) memcpy(own, theirs, (size_t)j->bytes);
        if (j->then) j->then(j->context, theirs, j->bytes, j->at);
        peri__shared_done(j->shared, slot);
        return PERI_OK;
    }
    const peri_status status = read_job(j);
    if (slot >= 0 && status < 0) peri__shared_drop(j->shared, slot);
    else if (slot >= 0) peri__shared_give(j->shared, slot, own);
    if (status >= 0 && j->then) j->then(j->context, own, j->bytes, j->at);
    return status;
}

static peri_status perform_job(const job *j, bool failed)
{
    if (j->kind == READ && failed) return PERI_OK;
    if (j->kind == READ && j->shared) return read_together(j);
    if (j->kind == READ) {
        PERI_TRY(read_job(j));
        if (j->then) j->then(j->context, (const char *)j->data + j->at % PERI__IO_PAGE, j->bytes, j->at);
        return PERI_OK;
    }
    if (j->kind == WRITE) return failed ? PERI_OK : write_job(j);
    peri_status status = PERI_OK;
    if (failed) close(j->file->fd);
    else status = peri__file_finish(j->file->fd, j->file->path);
    peri__free(j->file);
    return status;
}

static void *worker_thread(void *context)
{
    peri__io *io = context;
    pthread_mutex_lock(&io->lock);
    for (;;) {
        while (io->begun == io->given && !io->stop) pthread_cond_wait(&io->given_one, &io->lock);
        if (io->begun == io->given) break;
        const int64_t number = io->begun++;
        const job j = io->jobs[number % JOBS];
        while (j.kind == FINISH && io->done < number) pthread_cond_wait(&io->done_one, &io->lock);
        const bool failed = io->status < 0;
        pthread_mutex_unlock(&io->lock);
        peri_status status = perform_job(&j, failed);
        pthread_mutex_lock(&io->lock);
        if (status < 0 && io->status >= 0) {
            io->status = status;
            snprintf(io->message, sizeof io->message, "%s", peri_error_message());
        }
        io->jobs[number % JOBS].done = true;
        while (io->done < io->begun && io->jobs[io->done % JOBS].done) io->done++;
        pthread_cond_broadcast(&io->done_one);
    }
    pthread_mutex_unlock(&io->lock);
    return NULL;
}

peri_status peri__io_new(int32_t threads, peri__io **out)
{
    int why = 0;
    peri__io *io = peri__alloc_zero(sizeof *io);
    if (!io) return PERI_ENOMEM;
    io->forks = peri__forks();
    pthread_mutex_init(&io->lock, NULL);
    pthread_cond_init(&io->given_one, NULL);
    pthread_cond_init(&io->done_one, NULL);
    while (io->n_threads < threads && !why)
        if ((why = peri__thread_start(&io->threads[io->n_threads], worker_thread, io)) == 0) io->n_threads++;
    if (io->n_threads == 0) {
        peri__io_release(io);
        return peri__fail(PERI_ENOMEM, "checkpoint: no thread for reading and writing: %s", strerror(why));
    }
    *out = io;
    return PERI_OK;
}

bool peri__io_has_threads(const peri__io *io) { return io->forks == peri__forks(); }

void peri__io_release(peri__io *io)
{
    if (!io || !peri__io_has_threads(io)) return;
    pthread_mutex_lock(&io->lock);
    io->stop = true;
    pthread_cond_broadcast(&io->given_one);
    pthread_mutex_unlock(&io->lock);
    for (int32_t t = 0; t < io->n_threads; t++) pthread_join(io->threads[t], NULL);
    pthread_cond_destroy(&io->given_one);
    pthread_cond_destroy(&io->done_one);
    pthread_mutex_destroy(&io->lock);
    peri__free(io);
}

/* -- jobs ---------------------------------------------------------------------------------------------------------- */

static int64_t give_job(peri__io *io, const job *j)
{
    pthread_mutex_lock(&io->lock);
    while (io->given - io->done == JOBS) pthread_cond_wait(&io->done_one, &io->lock);
    io->jobs[io->given % JOBS] = *j;
    const int64_t number = io->given++;
    pthread_cond_signal(&io->given_one);
    pthread_mutex_unlock(&io->lock);
    return number;
}

int64_t peri__io_write(peri__io *io, peri__io_file *file, const void *data, int64_t bytes, int64_t at)
{
    return give_job(io, &(job){.kind = WRITE, .file = file, .data = (void *)(uintptr_t)data, .bytes = bytes, .at = at});
}

int64_t peri__io_read_shared(peri__io *io, peri__shared *shared, bool keep, peri__io_file *file, void *data,
                             int64_t bytes, int64_t at, peri__io_then *then, const void *context)
{
    return give_job(io, &(job){.kind = READ,
                           .file = file,
                           .data = data,
                           .bytes = bytes,
                           .at = at,
                           .then = then,
                           .context = context,
                           .shared = shared,
                           .keep = keep});
}

int64_t peri__io_finish(peri__io *io, peri__io_file *file)
{
    return give_job(io, &(job){.kind = FINISH, .file = file});
}

bool peri__io_done(peri__io *io, int64_t number)
{
    pthread_mutex_lock(&io->lock);
    const bool done = io->done > number;
    pthread_mutex_unlock(&io->lock);
    return done;
}

peri_status peri__io_wait(peri__io *io, int64_t number)
{
    pthread_mutex_lock(&io->lock);
    while (io->done <= number) pthread_cond_wait(&io->done_one, &io->lock);
    const peri_status status = io->status;
    pthread_mutex_unlock(&io->lock);
    return status < 0 ? peri__fail(status, "%s", io->message) : PERI_OK;
}

void peri__io_clear(peri__io *io)
{
    pthread_mutex_lock(&io->lock);
    while (io->done < io->given) pthread_cond_wait(&io->done_one, &io->lock);
    io->status = PERI_OK;
    pthread_mutex_unlock(&io->lock);
}
