/* SPDX-License-Identifier: Apache-2.0
 *
 * quiet.h: writes that fail send the calling thread a signal: SIGXFSZ where a file would be longer than RLIMIT_FSIZE
 * allows, SIGPIPE where nobody reads. Both end a program that has no handler. In the library's own calls such a write
 * is an error with words, and the program gets no signal.
 */
#ifndef PERI_QUIET_H
#define PERI_QUIET_H

#include <errno.h>
#include <signal.h>
#include <time.h>

typedef struct peri__quiet {
    sigset_t held, before; /* the signals that are taken away at the end; the thread's mask */
} peri__quiet;

static inline peri__quiet peri__quiet_begin(void)
{
    static const int numbers[] = {SIGXFSZ, SIGPIPE};
    peri__quiet q;
    sigset_t pending;
    sigemptyset(&q.held);
    sigemptyset(&pending);
    sigpending(&pending);
    for (int i = 0; i < 2; i++) /* One that waits already is the program's, and stays. */
        if (!sigismember(&pending, numbers[i])) sigaddset(&q.held, numbers[i]);
    pthread_sigmask(SIG_BLOCK, &q.held, &q.before);
    return q;
}

static inline void peri__quiet_end(peri__quiet *q)
{
    const struct timespec now = {0};
    const int saved = errno;
    while (sigtimedwait(&q->held, NULL, &now) >= 0 || errno == EINTR) continue;
    pthread_sigmask(SIG_SETMASK, &q->before, NULL);
    errno = saved;
}

/** Until the end of this block. Keeps errno. */
#define PERI__QUIET __attribute__((cleanup(peri__quiet_end), unused)) peri__quiet quiet_ = peri__quiet_begin()

#endif
