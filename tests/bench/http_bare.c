/* SPDX-License-Identifier: Apache-2.0
 *
 * http_bare.c: a server of libmicrohttpd, the library beneath `perilune serve`, which answers each request with the
 * same body and as many bytes of headers: what HTTP takes on a machine before anything is added to it. It prints its
 * port.
 */
#include <microhttpd.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static enum MHD_Result answer(void *ctx, struct MHD_Connection *connection, const char *path, const char *method,
                              const char *version, const char *data, size_t *bytes, void **request)
{
    static char begun, body[] = "{\"predictions\":[0.0604153760]}\n";
    (void)ctx, (void)path, (void)method, (void)version, (void)data;
    if (!*request || *bytes > 0) {
        *request = &begun;
        *bytes = 0;
        return MHD_YES;
    }
    struct MHD_Response *r = MHD_create_response_from_buffer(strlen(body), body, MHD_RESPMEM_PERSISTENT);
    MHD_add_response_header(r, "Content-Type", "application/json");
    MHD_add_response_header(r, "Server-Timing", "queue;dur=0.000, compute;dur=0.000, batch;desc=\"1\"");
    MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    MHD_add_response_header(r, "Cache-Control", "no-store");
    enum MHD_Result result = MHD_queue_response(connection, 200, r);
    MHD_destroy_response(r);
    return result;
}

int main(void)
{
    struct MHD_Daemon *daemon =
        MHD_start_daemon(MHD_USE_EPOLL | MHD_USE_INTERNAL_POLLING_THREAD, 0, NULL, NULL, answer, NULL, MHD_OPTION_END);
    if (!daemon) return perror("http_bare"), 1;
    printf("%d\n", MHD_get_daemon_info(daemon, MHD_DAEMON_INFO_BIND_PORT)->port);
    fflush(stdout);
    for (;;) pause();
}
