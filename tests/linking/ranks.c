/* SPDX-License-Identifier: Apache-2.0
 *
 * ranks.c: an MPI program that brings its own communicator, in which some of its ranks have no part: those add up
 * something of their own meanwhile. `ranks low` initialises MPI for too few threads; `ranks late` has a rank that never
 * comes; `ranks refused` may make no memory that others could share. spec/linking_spec.lua runs it.
 */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <mpi.h>
#include <perilune/perilune.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

static int failed(const char *what)
{
    fprintf(stderr, "ranks: %s: %s\n", what, peri_error_message());
    return 1;
}

/* From now on the system makes no memory files for this process. */
static int refuse_memory_files(void)
{
    struct sock_filter code[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                                 BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_create, 0, 1),
                                 BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                                 BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

/* Whether memory or a socket of the library's has the number of a stream that is closed: printed lines would go into
 * it. */
static int in_a_stream(void)
{
    char name[32], of[64];
    struct sockaddr_un address;
    for (int fd = 0; fd <= STDERR_FILENO; fd++) {
        snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
        memset(of, 0, sizeof of);
        if (readlink(name, of, sizeof of - 1) > 0 && strstr(of, "memfd")) return 1;
        memset(&address, 0, sizeof address);
        if (getsockname(fd, (struct sockaddr *)&address, &(socklen_t){sizeof address}) != 0) continue;
        if (address.sun_family == AF_UNIX && !strncmp(address.sun_path + 1, "perilune/", 9)) return 1;
    }
    return 0;
}

static MPI_Errhandler own;
static void own_errors(MPI_Comm *communicator, int *code, ...) { (void)communicator, (void)code; }

/* The sum of (rank + 1) over the world. */
static int add_up(MPI_Comm *communicator, double *sum)
{
    const int64_t one = 1;
    peri_comm_config config = {.size = sizeof config, .communicator = communicator, .timeout_s = 20};
    peri_group *world;
    peri_device *cpu;
    peri_tensor *t;
    peri_work *work;
    if (peri_comm_open(&config, &world) < 0 || peri_device_get("cpu", &cpu) < 0) return failed("open");
    if (peri_tensor_full(cpu, PERI_F32, 1, &one, peri_group_rank(world) + 1, &t) < 0) return failed("tensor");
    if (peri_coll_all_reduce(world, t, PERI_REDUCE_SUM, 0, &work) < 0 || peri_work_wait(work) < 0) return failed("sum");
    if (peri_tensor_item(t, 0, sum) < 0) return failed("item");
    if (in_a_stream()) return failed("stdin");
    peri_work_release(work);
    peri_tensor_release(t);
    if (peri_group_close(world) < 0) return failed("close");
    peri_group_release(world);
    return 0;
}

/* Communicators that come and go, and so get the handles of others before them: each world is of the ranks of its own,
 * also when the program has freed that one already. */
static int come_and_go(int rank)
{
    int wrong = 0;
    for (int round = 0; round < 4; round++) {
        MPI_Comm some, other;
        MPI_Comm_split(MPI_COMM_WORLD, round % 2 ? rank % 2 : 0, round < 2 ? rank : -rank, &some);
        peri_comm_config config = {.size = sizeof config, .communicator = &some, .timeout_s = 20};
        peri_group *world;
        int own, size;
        MPI_Comm_rank(some, &own);
        MPI_Comm_size(some, &size);
        if (peri_comm_open(&config, &world) < 0) return failed("open");
        wrong += peri_group_rank(world) != own || peri_group_size(world) != size;
        if (round % 2 == 0) MPI_Comm_free(&some);
        if (peri_group_close(world) < 0) return failed("close");
        peri_group_release(world);
        if (round != 1) continue;
        MPI_Intercomm_create(some, 0, MPI_COMM_WORLD, rank % 2 ? 0 : 1, 0, &other);
        config.communicator = &other;
        wrong += peri_comm_open(&config, &world) != PERI_EINVAL || !strstr(peri_error_message(), "intercommunicator");
        MPI_Comm_free(&other);
        MPI_Comm_free(&some);
    }
    return wrong;
}

/* A program that ends MPI before it has closed its world is told so. */
static int finalize_too_early(void)
{
    peri_comm_config config = {.size = sizeof config, .communicator = &(MPI_Comm){MPI_COMM_WORLD}, .timeout_s = 20};
    peri_group *world;
    peri_work *work = NULL;
    int wrong = 0;
    if (peri_comm_open(&config, &world) < 0) return failed("open");
    MPI_Finalize();
    wrong += peri_coll_barrier(world, 0, &work) >= 0 && peri_work_wait(work) != PERI_EABORTED;
    wrong += !strstr(peri_error_message(), "the program has called MPI_Finalize");
    wrong += peri_group_close(world) != PERI_EABORTED;
    peri_work_release(work);
    peri_group_release(world);
    wrong += peri_comm_open(&config, &world) != PERI_EABORTED;
    return wrong;
}

int main(int argc, char **argv)
{
    const int low = argc > 1 && !strcmp(argv[1], "low"), late = argc > 1 && !strcmp(argv[1], "late"),
              refused = argc > 1 && !strcmp(argv[1], "refused");
    int rank, size, level, wrong = 0;
    double sum = 0;
    MPI_Init_thread(&argc, &argv, low ? MPI_THREAD_SINGLE : MPI_THREAD_SERIALIZED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm part;
    /* the last rank has no part; the others turn round */
    MPI_Comm_split(MPI_COMM_WORLD, rank < size - 1 ? 0 : MPI_UNDEFINED, size - rank, &part);
    if (low || late) {
        peri_comm_config config = {.size = sizeof config, .communicator = &part, .timeout_s = 1};
        peri_group *world;
        const peri_status status = late && rank == 0 ? 0 : peri_comm_open(&config, &world);
        if (rank == 1) printf("%s: %s\n", peri_status_name(status), peri_error_message());
        fflush(stdout);
        if (late && rank != 1) sleep(5); /* the others give up meanwhile, and rank 1, which has said so, ends all */
        if (late) MPI_Abort(MPI_COMM_WORLD, 0); /* whoever has given up may call MPI no more */
        if (!low) return 0;
        MPI_Finalize();
        return 0;
    }
    MPI_Errhandler handler;
    close(STDIN_FILENO);
    if (!refused) close(STDERR_FILENO);
    else if (!refuse_memory_files()) fprintf(stderr, "ranks: there are no filters here\n");
    if (part != MPI_COMM_NULL) MPI_Comm_create_errhandler(own_errors, &own);
    if (part != MPI_COMM_NULL) MPI_Comm_set_errhandler(part, own);
    for (int round = 0; round < 2 && rank < size - 1; round++) { /* twice: a world that was left can be opened again */
        wrong += add_up(&part, &sum);
        wrong += sum != (size - 1) * size / 2;
    }
    if (part != MPI_COMM_NULL) { /* what the program does about errors is its own */
        MPI_Comm_get_errhandler(part, &handler);
        wrong += handler != own;
        MPI_Errhandler_free(&handler);
    }
    wrong += come_and_go(rank);
    if (rank == 1) { /* and one of two ranks of it */
        if (peri_comm_open(
                &(peri_comm_config){.size = sizeof(peri_comm_config), .communicator = &(MPI_Comm){MPI_COMM_NULL}},
                &(peri_group *){NULL}) != PERI_EINVAL)
            wrong++;
        if (peri_comm_open(
                &(peri_comm_config){.size = sizeof(peri_comm_config), .communicator = &part, .transport = "self"},
                &(peri_group *){NULL}) != PERI_EINVAL)
            wrong++;
    }
    if (part != MPI_COMM_NULL) MPI_Comm_free(&part);
    wrong += finalize_too_early();
    if (rank == 1) printf("%d wrong, sum %g\n", wrong, sum);
    return wrong;
}
