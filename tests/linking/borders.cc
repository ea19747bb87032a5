/* SPDX-License-Identifier: Apache-2.0
 *
 * borders.cc: functions of a C++ program that the library calls, and that do what they may not: call the library, which
 * is an error there and hangs nothing, and throw, which ends the process with a message. Each case is a child of its
 * own. spec/linking_spec.lua runs it.
 */
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <perilune/host.h>
#include <perilune/perilune.h>
#include <stdexcept>
#include <string>
#include <sys/wait.h>
#include <unistd.h>

namespace {

const int64_t small[1] = {40}, big[2] = {600, 600};
bool throws, armed;
int refused, called;
peri_device *cpu; /* once there is one */

/* What a function does when it is armed: it asks for a device, and for a tensor. */
void misbehave()
{
    if (!armed) return;
    called++;
    if (throws) throw std::runtime_error("a function of the program's");
    armed = false; /* what the library calls because of the next line is not to misbehave, too */
    peri_device *other;
    peri_tensor *t;
    if (peri_device_get("opaque", &other) == PERI_EINVAL && strstr(peri_error_message(), "calls the library") &&
        (!cpu || peri_tensor_full(cpu, PERI_F32, 1, small, 1, &t) == PERI_ENOMEM) &&
        strstr(peri_error_message(), "calls the library"))
        refused++;
    armed = true;
}

void log(void *, int32_t, const char *) { misbehave(); }
void *alloc(size_t n) { return misbehave(), malloc(n); }
void *resize(void *p, size_t n) { return misbehave(), realloc(p, n); }
void release(void *p) { misbehave(), free(p); }
void *take(size_t n, size_t alignment)
{
    misbehave();
    return aligned_alloc(alignment, (n + alignment - 1) / alignment * alignment);
}
void give(void *p, size_t) { misbehave(), free(p); }
void gone(void *, void *) { misbehave(); }
void run(void *, int32_t parts, void (*part)(void *, int32_t), void *arg)
{
    for (int32_t i = 0; i < parts; i++) part(arg, i);
    misbehave();
}

/* A product that all threads share, and tensors of sizes that are new. */
int work()
{
    static float own[40];
    peri_tensor *a, *b, *c;
    if (peri_device_get("cpu", &cpu) < 0 || peri_tensor_full(cpu, PERI_F32, 2, big, 1, &a) < 0) return 1;
    if (peri_op_add(a, a, &b) < 0) return 2;
    if (peri_host_tensor(cpu, PERI_F32, 1, small, own, gone, nullptr, &c) < 0) return 3;
    peri_tensor_release(a), peri_tensor_release(b), peri_tensor_release(c);
    if (peri_device_trim(cpu) < 0) return 4;
    return 0;
}

int child(const std::string &which)
{
    alarm(20);
    peri_status status = PERI_OK;
    if (which == "log") status = peri_host_log_set(log, nullptr), peri_log_level_set(PERI_LOG_DEBUG);
    if (which == "allocator") status = peri_host_allocator_set(alloc, resize, release);
    if (which == "storage") status = peri_host_storage_set(take, give);
    if (which == "pool") status = peri_host_pool_set(3, run, nullptr);
    if (status < 0) return 10;
    armed = true;
    try {
        if (int wrong = work()) return wrong;
    } catch (const std::exception &) {
        return 11; /* through frames of the library */
    }
    armed = false;
    if (called == 0 || refused != called) return fprintf(stderr, "%d called, %d refused\n", called, refused), 12;
    return work(); /* all goes well afterwards */
}

} // namespace

int main()
{
    int wrong = 0;
    for (const char *which : {"log", "allocator", "storage", "pool", "tensor"})
        for (bool t : {false, true}) {
            fflush(nullptr);
            const pid_t pid = fork();
            if (pid == 0) {
                throws = t;
                if (t) fclose(stderr);
                _exit(child(which));
            }
            int status = 0;
            waitpid(pid, &status, 0);
            const bool well = t ? WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT : status == 0;
            if (!well) printf("%s, %s: status %x\n", which, t ? "throws" : "calls", status);
            wrong += !well;
        }
    printf("ok %d wrong\n", wrong);
}
