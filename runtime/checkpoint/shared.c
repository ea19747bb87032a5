/* SPDX-License-Identifier: Apache-2.0
 *
 * shared.c: see shared.h.
 */
#include "../base/quiet.h"
#include "shared.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    SLOTS = 8,
    READY = 0x70657269,   /* slots and lock are made; fresh memory has zeros */
    LATE_MS = 1000,       /* for so long a block is waited for that another process reads */
    PATIENCE_US = 20000   /* for so long, at first, those that have not used a block yet */
};

typedef enum slot_state { FREE, READING, FULL } slot_state;

typedef struct slot {
    peri__shared_key key;
    slot_state state;
    int32_t users;   /* who copies from it now */
    int64_t used;    /* processes that have had it */
    int64_t number;  /* of the block among all that were read: the least is the oldest */
} slot;

/** What all processes have in common, at the begin of the memory; blocks lie behind it. */
typedef struct common {
    _Atomic uint32_t made;
    _Atomic int32_t processes; /* that have come */
    pthread_mutex_t lock;
    int64_t blocks; /* so many were read */
    bool broken;    /* a process died with the lock: nothing is taken over any more */
    slot slots[SLOTS];
} common;

struct peri__shared {
    common *all;
    char *blocks; /* SLOTS of PERI__IO_HUGE bytes */
    int64_t processes;
    _Atomic int64_t patience_us;
    char path[NAME_MAX]; /* of the memory, as long as not all have come; else "" */
};

static const int64_t whole = PERI__IO_HUGE * (1 + (int64_t)SLOTS);

static void sleep_us(int64_t us)
{
    nanosleep(&(struct timespec){.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000}, NULL);
}

/* -- meeting ------------------------------------------------------------------------------------------------------- */

/** Make slots and lock in fresh memory. */
static bool make(common *all)
{
    pthread_mutexattr_t kind;
    if (pthread_mutexattr_init(&kind) != 0) return false;
    bool made = pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED) == 0 &&
                pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST) == 0 &&
                pthread_mutex_init(&all->lock, &kind) == 0;
    pthread_mutexattr_destroy(&kind);
    if (made) atomic_store(&all->made, READY);
    return made;
}

static bool reserve_file_bytes(int fd, int64_t bytes)
{
    PERI__QUIET;
    return posix_fallocate(fd, 0, bytes) == 0;
}

/** Map the memory of that name: the first process makes it, others wait until it is made. NULL: it cannot be. */
static common *meet(const char *path)
{
    bool first = true;
    struct stat is;
    int fd = open(path, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) fd = errno == EEXIST ? open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW) : -1, first = false;
    fd = peri__fd_of_ours(fd);
    if (fd < 0) return NULL;
    /* All of it has to be there: who writes to memory that a full file system does not have is killed. */
    bool there = first && reserve_file_bytes(fd, whole);
    for (int ms = 0; !first && !there && ms < LATE_MS; ms++) {
        if (fstat(fd, &is) != 0 || is.st_uid != geteuid() || is.st_mode & 077) break; /* somebody else's */
        there = is.st_size == whole && (int64_t)is.st_blocks * 512 >= whole;
        if (!there) sleep_us(1000);
    }
    common *all = there ? mmap(NULL, (size_t)whole, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    close(fd);
    bool made = all != MAP_FAILED && (!first || make(all));
    for (int ms = 0; made && atomic_load(&all->made) != READY && ms < LATE_MS; ms++) sleep_us(1000);
    if (made && atomic_load(&all->made) == READY) return all;
    unlink(path); /* who began to make it has died, or there is no room, or it is somebody else's */
    if (all != MAP_FAILED) munmap(all, (size_t)whole);
    return NULL;
}

peri_status peri__shared_open(const char *name, int64_t processes, peri__shared **out)
{
    peri__shared *s = peri__alloc_zero(sizeof *s);
    *out = NULL;
    if (!s) return PERI_ENOMEM;
    snprintf(s->path, sizeof s->path, "/dev/shm/perilune-%u-%.100s", (unsigned)getuid(), name);
    if (!(s->all = meet(s->path))) {
        peri__free(s);
        return PERI_OK;
    }
    s->blocks = (char *)s->all + PERI__IO_HUGE;
    s->processes = processes;
    atomic_store(&s->patience_us, PATIENCE_US);
    if (atomic_fetch_add(&s->all->processes, 1) + 1 >= processes) { /* all have come: nobody needs the name any more */
        unlink(s->path);
        s->path[0] = 0;
    }
    *out = s;
    return PERI_OK;
}

void peri__shared_close(peri__shared *s)
{
    if (!s) return;
    if (s->path[0]) unlink(s->path);
    munmap(s->all, (size_t)whole);
    peri__free(s);
}

/* -- blocks -------------------------------------------------------------------------------------------------------- */

/** Have the lock; false: nothing is to be had here any more. */
static bool lock(peri__shared *s)
{
    const int why = pthread_mutex_lock(&s->all->lock);
    if (why == EOWNERDEAD) {
        s->all->broken = true;
        pthread_mutex_consistent(&s->all->lock);
    } else if (why != 0) return false;
    if (!s->all->broken) return true;
    pthread_mutex_unlock(&s->all->lock);
    return false;
}

static void unlock_shared(peri__shared *s) { pthread_mutex_unlock(&s->all->lock); }

static slot *find_slot(peri__shared *s, const peri__shared_key *key)
{
    for (slot *x = s->all->slots; x < s->all->slots + SLOTS; x++)
        if (x->state != FREE && memcmp(&x->key, key, sizeof *key) == 0) return x;
    return NULL;
}

/** A slot for a block that is read now: a free one or, if @any, the one whose block has been there for longest. NULL:
 *  there is none. */
static slot *choose(peri__shared *s, bool any)
{
    slot *oldest = NULL;
    for (slot *x = s->all->slots; x < s->all->slots + SLOTS; x++) {
        if (x->state == FREE) return x;
        if (x->state == FULL && x->users == 0 && (!oldest || x->number < oldest->number)) oldest = x;
    }
    return any ? oldest : NULL;
}

/** Wait a moment without the lock; false: it is not to be had again. */
static bool let_others(peri__shared *s, int64_t us)
{
    unlock_shared(s);
    sleep_us(us);
    return lock(s);
}

/** The slot of a block, with the lock: FULL, or one that the caller fills. NULL: there is none. Others are given time
 *  to use what lies in all of them before the oldest is taken, but less each time that this was in vain. */
static slot *slot_for(peri__shared *s, const peri__shared_key *key, bool *locked)
{
    enum { STEP_US = 100 };
    const int64_t patience = atomic_load(&s->patience_us);
    int64_t late = 0, crowded = 0;
    while (late <= LATE_MS * 1000 && crowded <= patience) {
        slot *x = find_slot(s, key);
        if (x && x->state == FULL) return x;
        if (x) late += STEP_US; /* somebody reads it, and may be slow, or dead */
        else if ((x = choose(s, crowded >= patience))) {
            atomic_store(&s->patience_us, x->state == FREE ? PATIENCE_US : patience / 2);
            *x = (slot){.key = *key, .state = READING, .number = s->all->blocks++};
            return x;
        } else crowded += STEP_US;
        if (!(*locked = let_others(s, STEP_US))) return NULL;
    }
    return NULL;
}

const char *peri__shared_take(peri__shared *s, const peri__shared_key *key, int32_t *at)
{
    const char *data = NULL;
    *at = -1;
    bool locked = key->bytes <= PERI__IO_HUGE && lock(s);
    slot *x = locked ? slot_for(s, key, &locked) : NULL;
    if (x) {
        *at = (int32_t)(x - s->all->slots);
        if (x->state == FULL) {
            x->users++;
            data = s->blocks + *at * (int64_t)PERI__IO_HUGE;
        }
    }
    if (locked) unlock_shared(s);
    return data;
}

/** One more process has had a block; when all have, its slot is free. */
static void count(peri__shared *s, slot *x)
{
    x->used++;
    if (x->used >= s->processes && x->users == 0) x->state = FREE;
}

void peri__shared_done(peri__shared *s, int32_t at)
{
    if (!lock(s)) return;
    s->all->slots[at].users--;
    count(s, &s->all->slots[at]);
    unlock_shared(s);
}

void peri__shared_give(peri__shared *s, int32_t at, const char *data)
{
    slot *x = &s->all->slots[at]; /* nobody touches one that is being read */
    memcpy(s->blocks + at * (int64_t)PERI__IO_HUGE, data, (size_t)x->key.bytes);
    if (!lock(s)) return;
    x->state = FULL;
    count(s, x);
    unlock_shared(s);
}

void peri__shared_drop(peri__shared *s, int32_t at)
{
    if (!lock(s)) return;
    s->all->slots[at].state = FREE;
    unlock_shared(s);
}
