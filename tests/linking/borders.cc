/* SPDX-License-Identifier: Apache-2.0
 *
 * borders.cc: functions of a C++ program that the library calls, and that do what they may not: call the library, any
 * public function of it, which is an error there and hangs nothing; fork; and throw, which ends the process with a
 * message. Each case is a child of its own. spec/linking_spec.lua runs it, and writes calls.h: a line for each public
 * function,
 *     STATUS(peri_device_get, 0, 0)    one that returns a status, with zeros for its arguments
 *     RELEASE(peri_tensor_release)     one that gives up an object
 *     OTHER(peri_version, )            all others
 */
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <perilune/host.h>
#include <perilune/perilune.h>
#include <stdexcept>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

const int64_t small[1] = {40}, big[2] = {600, 600};
bool throws, armed;
int refused, called;
void *closed; /* memory that nobody may look at, as an object's */

struct object {
    template <class T> operator T *() const { return static_cast<T *>(closed); }
};

bool told(const char *name, bool ok)
{
    ok = ok && strstr(peri_error_message(), "calls the library");
    if (!ok) fprintf(stderr, "%s is not refused: %s\n", name, peri_error_message());
    return ok;
}

/* Whether all public functions refuse what they must. */
bool all_refuse()
{
    bool ok = true;
#define STATUS(name, ...) peri_error_clear(), ok = told(#name, name(__VA_ARGS__) < 0) && ok;
#define RELEASE(name) peri_error_clear(), name(object()), ok = told(#name, true) && ok;
#define OTHER(name, ...) (void)name(__VA_ARGS__);
#include "calls.h"
    return ok;
}

/* A child that is forked here may end, and use the library only to be told so. */
bool forks()
{
    const pid_t pid = fork();
    if (pid == 0) _exit(peri_host_init() == PERI_EINVAL && strstr(peri_error_message(), "was forked by") ? 0 : 1);
    int status = 1;
    return waitpid(pid, &status, 0) == pid && status == 0;
}

/* What a function does when it is armed. */
void misbehave()
{
    if (!armed) return;
    if (throws) called++, throw std::runtime_error("a function of the program's");
    if (called > 20) return;
    called++;
    armed = false; /* what the library calls because of the next line is not to misbehave, too */
    if (all_refuse() && (called > 3 || forks())) refused++;
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
    peri_device *cpu;
    if (peri_device_get("cpu", &cpu) < 0 || peri_tensor_full(cpu, PERI_F32, 2, big, 1, &a) < 0) return 1;
    if (peri_op_add(a, a, &b) < 0) return 2;
    if (peri_host_tensor(cpu, PERI_F32, 1, small, own, gone, nullptr, &c) < 0) return 3;
    peri_tensor_release(a), peri_tensor_release(b);
    if (peri_tensor_data(c, nullptr) >= 0) return 5;
    const std::string before = peri_error_message();
    peri_tensor_release(c);
    if (before != peri_error_message()) return 6; /* what the program's function was told is not what failed here */
    if (peri_device_trim(cpu) < 0) return 4;
    return 0;
}

int child(const std::string &which)
{
    alarm(60);
    closed = mmap(nullptr, 1 << 16, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
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
