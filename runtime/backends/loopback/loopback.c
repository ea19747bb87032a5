/* SPDX-License-Identifier: Apache-2.0
 *
 * loopback.c: what mpirun loads before the C library (LD_PRELOAD) when all ranks are on its machine: sockets that it
 * binds to addresses of the machine are bound to the loopback's. mpirun listens on all of them, and prterun on an
 * interface's too, for those who start ranks on other machines, and no parameter of Open MPI's says otherwise. The
 * ranks, and what they start, inherit the variable: there it takes itself out and does nothing.
 */
#include <errno.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static bool active;

/** Is this process mpirun, or what it becomes? */
static bool starts_ranks(const char *name)
{
    static const char *const names[] = {"mpirun", "mpiexec", "orterun", "prterun", NULL};
    for (const char *const *n = names; *n; n++)
        if (strcmp(name, *n) == 0) return true;
    return false;
}

__attribute__((constructor)) static void see_whether_active(void)
{
    const char *list = secure_getenv("LD_PRELOAD"), *rest = list ? strchr(list, ':') : NULL;
    active = starts_ranks(program_invocation_short_name);
    if (active || !list || !strstr(list, "libperilune_loopback.so")) return; /* it comes first: runtime/host/job.c */
    if (rest && rest[1]) setenv("LD_PRELOAD", rest + 1, 1);
    else unsetenv("LD_PRELOAD");
}

__attribute__((visibility("default"))) int bind(int fd, const struct sockaddr *address, socklen_t len);
int bind(int fd, const struct sockaddr *address, socklen_t len)
{
    struct sockaddr_in own;
    struct sockaddr_in6 own6;
    if (active && address && address->sa_family == AF_INET && len == sizeof own) {
        memcpy(&own, address, sizeof own);
        own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        return (int)syscall(SYS_bind, fd, &own, sizeof own);
    }
    if (active && address && address->sa_family == AF_INET6 && len == sizeof own6) {
        memcpy(&own6, address, sizeof own6);
        own6.sin6_addr = in6addr_loopback;
        return (int)syscall(SYS_bind, fd, &own6, sizeof own6);
    }
    return (int)syscall(SYS_bind, fd, address, len);
}
