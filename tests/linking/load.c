/* SPDX-License-Identifier: Apache-2.0
 *
 * load.c: a program that loads plugins late, each with a Perilune of its own or one that they share, uses them from
 * threads, closes them, and lets the threads end afterwards. It knows nothing of Perilune.
 *
 *   load ROUNDS plugin.so ...
 */
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 4, THREADS = 2 };

typedef struct worker {
    pthread_t thread;
    int (*use)(void);
    int result;
    sem_t done, may_end;
} worker;

static void *work(void *arg)
{
    worker *w = (worker *)arg;
    w->result = w->use();
    sem_post(&w->done);
    sem_wait(&w->may_end); /* the plugin is closed meanwhile */
    return NULL;
}

static int round_of(char **plugins, int n)
{
    static worker workers[MOST][THREADS];
    void *library[MOST];
    int wrong = 0;
    for (int i = 0; i < n; i++) {
        library[i] = dlopen(plugins[i], RTLD_NOW | RTLD_LOCAL);
        if (!library[i]) return fprintf(stderr, "load: %s\n", dlerror()), -1;
        void *found = dlsym(library[i], "use");
        for (int t = 0; t < THREADS; t++) {
            worker *w = &workers[i][t];
            memcpy(&w->use, &found, sizeof found);
            sem_init(&w->done, 0, 0);
            sem_init(&w->may_end, 0, 0);
            if (pthread_create(&w->thread, NULL, work, w) != 0) return -1;
        }
    }
    for (int i = 0; i < n; i++)
        for (int t = 0; t < THREADS; t++) {
            sem_wait(&workers[i][t].done);
            if (workers[i][t].result) wrong = workers[i][t].result;
        }
    for (int i = 0; i < n; i++) dlclose(library[i]);
    for (int i = 0; i < n; i++)
        for (int t = 0; t < THREADS; t++) {
            sem_post(&workers[i][t].may_end);
            pthread_join(workers[i][t].thread, NULL);
        }
    return wrong;
}

/* Lines of /proc/self/maps. */
static int mappings(void)
{
    FILE *file = fopen("/proc/self/maps", "r");
    int n = 0;
    for (int c; file && (c = fgetc(file)) != EOF;) n += c == '\n';
    if (file) fclose(file);
    return n;
}

int main(int argc, char **argv)
{
    const int rounds = argc > 2 ? atoi(argv[1]) : 0, n = argc - 2;
    int early = 0;
    if (rounds < 1 || n > MOST) return fprintf(stderr, "usage: load ROUNDS plugin.so ...\n"), 2;
    for (int i = 0; i < rounds; i++) {
        const int wrong = round_of(argv + 2, n);
        if (wrong) return fprintf(stderr, "load: round %d: %d\n", i, wrong), 1;
        if (i == rounds / 2) early = mappings();
    }
    printf("ok, %s\n", mappings() <= early + 8 ? "no mapping is left" : "mappings are left");
    return 0;
}
