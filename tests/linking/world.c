/* SPDX-License-Identifier: Apache-2.0
 *
 * world.c: a program that lets the library start MPI, and finds its environment and its signal handlers as they were
 * while the world is open and after it is closed; commands that it starts do not take themselves for a rank.
 * spec/linking_spec.lua runs it alone, as a world of one, and as two ranks under mpirun.
 */
#include <perilune/perilune.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern char **environ;

enum { SIGNALS = 65 };

typedef struct process {
    char *variables[4096];
    int n;
    struct sigaction handlers[SIGNALS];
} process;

static process before;
static void own(int number) { (void)number; }

static void remember(process *p)
{
    for (char **e = environ; *e && p->n < 4096; e++) p->variables[p->n++] = strdup(*e);
    for (int s = 1; s < SIGNALS; s++)
        if (sigaction(s, NULL, &p->handlers[s]) != 0) memset(&p->handlers[s], 0, sizeof p->handlers[s]);
}

static int lacks(char **variables, int n, const char *line)
{
    for (int i = 0; i < n && variables[i]; i++)
        if (strcmp(variables[i], line) == 0) return 0;
    return 1;
}

/* Variables and handlers that are others than at first. */
static int changed(const char *when)
{
    process now = {.n = 0};
    int wrong = 0;
    remember(&now);
    for (int i = 0; i < now.n; i++)
        if (lacks(before.variables, before.n, now.variables[i]))
            wrong++, printf("%s: new: %s\n", when, now.variables[i]);
    for (int i = 0; i < before.n; i++)
        if (lacks(now.variables, now.n, before.variables[i]))
            wrong++, printf("%s: gone: %s\n", when, before.variables[i]);
    for (int s = 1; s < SIGNALS; s++) {
        /* documented: a rank that has no handler of SIGPIPE gets one that does nothing */
        if (s == SIGPIPE && before.handlers[s].sa_handler == SIG_DFL) continue;
        if (now.handlers[s].sa_handler == before.handlers[s].sa_handler) continue;
        printf("%s: handler of signal %d\n", when, s);
        wrong++;
    }
    for (int i = 0; i < now.n; i++) free(now.variables[i]);
    return wrong;
}

int main(int argc, char **argv)
{
    const int64_t one = 1;
    const peri_comm_config config = {.size = sizeof config, .transport = "mpi", .timeout_s = 20};
    peri_group *world;
    peri_device *cpu;
    peri_tensor *t;
    peri_work *work;
    double sum = 0;
    if (argc > 1) { /* a host with handlers of its own */
        const struct sigaction mine = {.sa_handler = own};
        sigaction(SIGPIPE, &mine, NULL);
        sigaction(SIGSEGV, &mine, NULL);
        setenv("OMPI_MCA_of_the_host", "its value", 1);
    }
    (void)argv;
    remember(&before);
    if (peri_comm_open(&config, &world) < 0) {
        printf("open: %s\n", peri_error_message());
        return 1;
    }
    int wrong = changed("open");
    if (peri_device_get("cpu", &cpu) < 0 || peri_tensor_full(cpu, PERI_F32, 1, &one, 1, &t) < 0) return 1;
    if (peri_coll_all_reduce(world, t, PERI_REDUCE_SUM, 0, &work) < 0 || peri_work_wait(work) < 0 ||
        peri_tensor_item(t, 0, &sum) < 0)
        return 1;
    wrong += sum != peri_group_size(world) || system("exit 7") >> 8 != 7;
    peri_work_release(work);
    peri_tensor_release(t);
    if (peri_group_close(world) < 0) return 1;
    peri_group_release(world);
    wrong += changed("closed");
    if (peri_comm_open(&config, &world) < 0) return 1; /* and once more */
    wrong += changed("open again");
    if (peri_group_close(world) < 0) return 1;
    peri_group_release(world);
    printf("ok %d wrong\n", wrong);
    return 0;
}
