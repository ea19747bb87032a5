/* SPDX-License-Identifier: Apache-2.0
 *
 * row_io.c: see row_io.h. Two queues of jobs. Reads are served by one thread that drives a ring, or by several that
 * read themselves. Writes end in the system's memory and would wait for each other's lock on the file, so one thread
 * makes them all, one by one.
 */
#include "row_io.h"
#include "../../base/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#if defined(PERI_HAVE_URING)
#include <liburing.h>
#endif

enum { RING_DEPTH = 256, RING_WAIT = 32, READERS = 16, TAKE = 4 };
enum { READS, WRITES, QUEUES };

struct peri__row_io {
    pthread_mutex_t lock;
    pthread_cond_t work, ended; /* there is something to do; a job has ended */
    peri__row_job *first[QUEUES], *last[QUEUES]; /* jobs with requests that nobody has taken */
    pthread_t threads[READERS + 1];
    int64_t waited; /* ns, in peri__row_io_wait */
    int32_t n_threads; /* the first one writes */
    int32_t forks;     /* peri__forks where the threads are */
    bool stop, uring;
#if defined(PERI_HAVE_URING)
    struct io_uring ring;
#endif
};

/* -- the queue; all under the lock --------------------------------------------------------------------------------- */

/** Take up to @most requests of the first job of @queue. Returns how many; *job gets whose. */
static int64_t take_requests(peri__row_io *io, int queue, int64_t most, peri__row_job **job,
                             peri__row_request **requests)
{
    peri__row_job *j = io->first[queue];
    if (!j) return 0;
    int64_t n = peri__min(most, j->n - j->next);
    *job = j;
    *requests = j->requests + j->next;
    j->next += n;
    if (j->next == j->n) {
        io->first[queue] = j->link;
        if (!io->first[queue]) io->last[queue] = NULL;
    }
    return n;
}

static void finish_requests(peri__row_io *io, peri__row_job *job, int64_t n, int64_t failed)
{
    job->failed += failed;
    job->finished += n;
    if (job->finished == job->n) pthread_cond_broadcast(&io->ended);
}

/* -- threads ------------------------------------------------------------------------------------------------------- */

/** What came of one call; true when the request has ended. */
static bool note_progress(peri__row_request *r, int64_t moved, int code)
{
    if (moved < 0 && code == EINTR) return false;
    if (moved < 0) r->error = code;
    else if (moved == 0) r->error = r->write ? ENOSPC : ENODATA;
    else r->done += moved;
    return r->error || r->done == r->bytes;
}

/** A fault point stands for the disk. */
static bool fault_strikes(peri__row_request *r)
{
    if (peri__fault(r->write ? PERI_FAULT_row_write : PERI_FAULT_row_read)) r->error = r->write ? ENOSPC : EIO;
    return r->error != 0;
}

static void run_request(peri__row_request *r)
{
    if (r->done == r->bytes || fault_strikes(r)) return;
    for (;;) {
        size_t left = (size_t)(r->bytes - r->done);
        ssize_t n = r->write ? pwrite(r->fd, r->data + r->done, left, (off_t)(r->offset + r->done))
                             : pread(r->fd, r->data + r->done, left, (off_t)(r->offset + r->done));
        if (note_progress(r, n, errno)) return;
    }
}

static void *serve_queue(peri__row_io *io, int queue)
{
    pthread_mutex_lock(&io->lock);
    while (!io->stop) {
        peri__row_job *job;
        peri__row_request *r;
        int64_t n = take_requests(io, queue, queue == WRITES ? RING_DEPTH : TAKE, &job, &r), failed = 0;
        if (n == 0) {
            pthread_cond_wait(&io->work, &io->lock);
            continue;
        }
        pthread_mutex_unlock(&io->lock);
        for (int64_t i = 0; i < n; i++) {
            run_request(&r[i]);
            failed += r[i].error != 0;
        }
        pthread_mutex_lock(&io->lock);
        finish_requests(io, job, n, failed);
    }
    pthread_mutex_unlock(&io->lock);
    return NULL;
}

static void *reader_thread(void *io) { return serve_queue(io, READS); }
static void *writer_thread(void *io) { return serve_queue(io, WRITES); }

/* -- the ring ------------------------------------------------------------------------------------------------------ */

#if defined(PERI_HAVE_URING)

/** A request in the ring. */
typedef struct flight {
    peri__row_request *request;
    peri__row_job *job;
    struct flight *link; /* unused ones */
} flight;

static void put_read(struct io_uring *ring, flight *f)
{
    peri__row_request *r = f->request;
    struct io_uring_sqe *sqe = io_uring_get_sqe(ring); /* there is room: at most RING_DEPTH are in flight */
    unsigned left = (unsigned)peri__min(r->bytes - r->done, 1 << 30);
    io_uring_prep_read(sqe, r->fd, r->data + r->done, left, (uint64_t)(r->offset + r->done));
    io_uring_sqe_set_data(sqe, f);
}

/** Put requests into the ring until it is full; returns how many are in flight then. Called and returns with the lock
 *  held. */
static int64_t load_ring(peri__row_io *io, flight **unused, int64_t flying)
{
    peri__row_job *job;
    peri__row_request *r;
    int64_t n;
    while (flying < RING_DEPTH && (n = take_requests(io, READS, RING_DEPTH - flying, &job, &r)) > 0) {
        int64_t dropped = 0;
        for (int64_t i = 0; i < n; i++) {
            if (r[i].done == r[i].bytes || fault_strikes(&r[i])) {
                finish_requests(io, job, 1, r[i].error != 0);
                dropped++;
                continue;
            }
            flight *f = *unused;
            *unused = f->link;
            *f = (flight){.request = &r[i], .job = job};
            put_read(&io->ring, f);
        }
        flying += n - dropped;
    }
    return flying;
}

static void *ring_thread(void *arg)
{
    peri__row_io *io = arg;
    flight flights[RING_DEPTH], *unused = NULL;
    for (int i = 0; i < RING_DEPTH; i++) {
        flights[i].link = unused;
        unused = &flights[i];
    }
    int64_t flying = 0;
    pthread_mutex_lock(&io->lock);
    while (!io->stop || flying > 0) {
        flying = load_ring(io, &unused, flying);
        if (flying == 0) {
            if (!io->stop) pthread_cond_wait(&io->work, &io->lock);
            continue;
        }
        pthread_mutex_unlock(&io->lock);
        io_uring_submit_and_wait(&io->ring, (unsigned)peri__min(flying, RING_WAIT));
        pthread_mutex_lock(&io->lock);
        struct io_uring_cqe *cqe;
        while (io_uring_peek_cqe(&io->ring, &cqe) == 0) {
            flight *f = io_uring_cqe_get_data(cqe);
            int result = cqe->res;
            io_uring_cqe_seen(&io->ring, cqe);
            bool again = result == -EAGAIN;
            if (again || !note_progress(f->request, result, -result)) {
                put_read(&io->ring, f);
                continue;
            }
            finish_requests(io, f->job, 1, f->request->error != 0);
            f->link = unused;
            unused = f;
            flying--;
        }
    }
    pthread_mutex_unlock(&io->lock);
    return NULL;
}

static bool ring_open(peri__row_io *io)
{
    /* Those of descriptors 0..2 that the program has closed are taken meanwhile, so that the ring gets none of them. */
    int low[STDERR_FILENO + 1], n = 0;
    while (n <= STDERR_FILENO && (low[n] = open("/", O_PATH | O_CLOEXEC)) >= 0)
        if (low[n++] > STDERR_FILENO) break;
    int code = io_uring_queue_init(RING_DEPTH, &io->ring, 0);
    while (n > 0) close(low[--n]);
    if (code == 0) return true;
    peri__log(PERI_LOG_INFO, "io_uring cannot be used here (%s); row files are read by threads", strerror(-code));
    return false;
}

#endif

/* -- making -------------------------------------------------------------------------------------------------------- */

static peri_status choose_engine(peri__row_io *io)
{
    const char *wanted = secure_getenv("PERI_ROW_IO");
    if (wanted && !strcmp(wanted, "threads")) return PERI_OK;
    if (wanted && *wanted && strcmp(wanted, "uring") != 0 && strcmp(wanted, "auto") != 0)
        return peri__fail(PERI_EINVAL, "PERI_ROW_IO is '%.40s', allowed: auto, uring, threads", wanted);
#if defined(PERI_HAVE_URING)
    io->uring = ring_open(io);
#endif
    if (!io->uring && wanted && !strcmp(wanted, "uring"))
        return peri__fail(PERI_EUNSUPPORTED, "PERI_ROW_IO is 'uring', but io_uring cannot be used here");
    return PERI_OK;
}

peri_status peri__row_io_new(peri__row_io **out)
{
    peri__row_io *io = peri__alloc_zero(sizeof *io);
    if (!io) return PERI_ENOMEM;
    io->forks = peri__forks();
    pthread_mutex_init(&io->lock, NULL);
    pthread_cond_init(&io->work, NULL);
    pthread_cond_init(&io->ended, NULL);
    peri_status status = choose_engine(io);
    void *(*body)(void *) = reader_thread;
#if defined(PERI_HAVE_URING)
    if (io->uring) body = ring_thread;
#endif
    int32_t wanted = 1 + (io->uring ? 1 : READERS);
    for (; status >= 0 && io->n_threads < wanted; io->n_threads++)
        if (peri__thread_start(&io->threads[io->n_threads], io->n_threads ? body : writer_thread, io) != 0) break;
    if (status >= 0 && io->n_threads < 2)
        status = peri__fail(PERI_ENOMEM, "peri__row_io_new: no thread could be started");
    if (status < 0) peri__row_io_free(io);
    else *out = io;
    return status;
}

void peri__row_io_free(peri__row_io *io)
{
    if (!io) return;
    const bool own = io->forks == peri__forks(); /* the threads are not those of a process that this one was forked
                                                    from */
    if (own) {
        pthread_mutex_lock(&io->lock);
        io->stop = true;
        pthread_cond_broadcast(&io->work);
        pthread_mutex_unlock(&io->lock);
        for (int32_t i = 0; i < io->n_threads; i++) pthread_join(io->threads[i], NULL);
    }
#if defined(PERI_HAVE_URING)
    if (io->uring) io_uring_queue_exit(&io->ring);
#endif
    if (own) { /* else they are as the parent's threads left them: maybe waited for */
        pthread_cond_destroy(&io->ended);
        pthread_cond_destroy(&io->work);
        pthread_mutex_destroy(&io->lock);
    }
    peri__free(io);
}

const char *peri__row_io_name(const peri__row_io *io) { return io->uring ? "io_uring" : "threads"; }

void peri__row_io_submit(peri__row_io *io, peri__row_job *job)
{
    job->next = job->finished = job->failed = 0;
    job->link = NULL;
    job->queued = job->n > 0;
    if (!job->queued) return;
    pthread_mutex_lock(&io->lock);
    int queue = job->requests->write ? WRITES : READS;
    if (io->last[queue]) io->last[queue]->link = job;
    else io->first[queue] = job;
    io->last[queue] = job;
    pthread_cond_broadcast(&io->work);
    pthread_mutex_unlock(&io->lock);
}

int64_t peri__row_io_waited(const peri__row_io *io) { return io->waited; }

int64_t peri__row_io_wait(peri__row_io *io, peri__row_job *job)
{
    if (!job->queued) return job->failed;
    const int64_t begin = peri_time_ns();
    pthread_mutex_lock(&io->lock);
    while (job->finished < job->n) pthread_cond_wait(&io->ended, &io->lock);
    pthread_mutex_unlock(&io->lock);
    io->waited += peri_time_ns() - begin;
    job->queued = false;
    return job->failed;
}
