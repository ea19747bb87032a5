/* SPDX-License-Identifier: Apache-2.0
 *
 * test_host_model.c: answers of a model file in somebody else's process. Where the system refuses the processor's tiles
 * (AMX), however the program's threads round, and on a small stack, they have the bits that they have otherwise; no
 * signal comes, and nothing is printed.
 */
#include "guest.h"

#include "kernels/work.h"

#include <errno.h>
#include <fenv.h>
#include <float.h>
#include <math.h>
#include <perilune/model.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

enum { INNER = 96, OUTS = 40, SAMPLES = 64 };

/** How a matrix is stored, and what is multiplied. Products that this library does not know are left out. */
static const struct {
    int32_t dtype;
    const char *weight, *products;
} kinds[] = {{PERI_F32, "f32", "f32"}, {PERI_BF16, "bf16", "f32"}, {PERI_BF16, "bf16", "bf16"},
             {PERI_I8, "int8", "f32"}, {PERI_I8, "int8", "int8"}};
enum { KINDS = sizeof kinds / sizeof *kinds };

static char path[] = "/tmp/perilune-host-model-XXXXXX";
static float (*answers)[SAMPLES * OUTS]; /* of a child, which has them in memory that it shares with its parent */

static float x[SAMPLES * INNER], weight[OUTS * INNER];

/** The products of the later samples are denormal. */
static void make_numbers(void)
{
    for (int64_t i = 0; i < OUTS * INNER; i++) weight[i] = (float)(i * 7919 % 1009 - 504) * 0.01f;
    for (int64_t i = 0; i < SAMPLES * INNER; i++)
        x[i] = (float)(i * 6421 % 1013 - 506) * (i < SAMPLES * INNER / 2 ? 0.003f : 1e-42f);
}

/** y = x W^T, one linear layer. */
static peri_status write_model(int kind)
{
    char header[2000];
    peri_model_writer *w;
    peri_model_writer_place p;
    int32_t section;
    PERI_TRY(peri_model_writer_new(path, &w));
    PERI_TRY(peri_model_writer_begin(w, &section));
    PERI_TRY(peri_model_writer_matrix(w, weight, OUTS, INNER, kinds[kind].dtype));
    PERI_TRY(peri_model_writer_section(w, section, &p));
    const int n = snprintf(
        header, sizeof header,
        "{\"inputs\":[{\"name\":\"x\",\"kind\":\"dense\",\"columns\":%d}],\"tables\":[],"
        "\"values\":[{\"columns\":%d,\"input\":0},{\"columns\":%d}],"
        "\"operations\":[{\"op\":\"linear\",\"in\":[0],\"out\":1,\"weight\":0,\"weight_dtype\":\"%s\","
        "\"products\":\"%s\",\"function\":\"identity\",\"sizes\":[%d,%d]}],\"outputs\":[{\"name\":\"y\",\"value\":1}],"
        "\"sections\":[{\"offset\":%lld,\"bytes\":%lld,\"checksum\":\"%016llx\"}]}",
        INNER, INNER, OUTS, kinds[kind].weight, kinds[kind].products, INNER, OUTS, (long long)p.offset,
        (long long)p.bytes, (unsigned long long)p.checksum);
    PERI_TRY(peri_model_writer_finish(w, header, n));
    PERI_TRY(peri_model_writer_publish(w));
    peri_model_writer_release(w);
    return PERI_OK;
}

/** Answers of each kind. */
static int answer_all(void)
{
    for (int k = 0; k < KINDS; k++) {
        const peri_model_values in = {.dense = x};
        peri_model *m;
        peri_model_context *c;
        if (write_model(k) < 0) return 1;
        if (peri_model_open(path, PERI_MODEL_VERIFY, &m) < 0) {
            const bool unknown = !strcmp(kinds[k].products, "bf16") && strstr(peri_error_message(), "unknown dtype");
            if (!unknown) return 2;
            continue;
        }
        if (peri_model_context_new(m, SAMPLES, 0, &c) < 0) return 3;
        if (peri_model_predict(c, SAMPLES, &in, (float *[]){answers[k]}) < 0) return 4;
        peri_model_context_release(c);
        peri_model_release(m);
    }
    return 0;
}

static void *answer_on_a_small_stack(void *status)
{
    *(int *)status = answer_all();
    return NULL;
}

static volatile sig_atomic_t caught;
static void catch (int number) { caught = number; }

enum { PLAIN, REFUSED, UNKNOWN_CALL, SMALL_SIGNAL_STACK, ROUNDED, SMALL_STACK, WAYS };

/** What the program has done before; 0: it is done, 77: this system does not let it. */
static int prepare(int way)
{
    if (way == REFUSED || way == UNKNOWN_CALL) {
#if defined(SYS_arch_prctl)
        if (!refuse((int[]){SYS_arch_prctl}, 1, way == REFUSED ? EPERM : ENOSYS)) return 77;
#endif
    }
    if (way == SMALL_SIGNAL_STACK) {
        static char room[4096]; /* holds the registers of AVX-512, and not the tiles */
        const struct sigaction action = {.sa_handler = catch, .sa_flags = SA_ONSTACK};
        if (sigaction(SIGUSR1, &action, NULL) != 0) return 5;
        if (sigaltstack(&(stack_t){.ss_sp = room, .ss_size = sizeof room}, NULL) != 0) return 77;
    }
    if (way == ROUNDED) {
        fesetround(FE_UPWARD);
#if defined(__x86_64__)
        __builtin_ia32_ldmxcsr((__builtin_ia32_stmxcsr() | 0x8040u) & ~0x80u); /* no denormals; what is invalid traps */
#endif
    }
    return 0;
}

static int answers_of(void *ctx)
{
    const int way = *(int *)ctx, none = memfd_create("said", 0);
    struct stat said;
    for (int i = 1; i < 32; i++) signal(i, SIG_DFL); /* cmocka has handlers */
    int status = none < 0 || dup2(none, STDOUT_FILENO) < 0 || dup2(none, STDERR_FILENO) < 0 ? 6 : prepare(way);
    if (status != 0) return status;
    if (way == SMALL_STACK) {
        pthread_attr_t attr;
        pthread_t thread;
        pthread_attr_init(&attr);
        if (pthread_attr_setstacksize(&attr, 64 << 10) != 0) return 7;
        if (pthread_create(&thread, &attr, answer_on_a_small_stack, &status) != 0) return 8;
        pthread_join(thread, NULL);
    } else {
        status = answer_all();
    }
    if (status == 0 && (way == REFUSED || way == UNKNOWN_CALL) && peri_kernels_amx()) return 9;
    if (status == 0 && way == SMALL_SIGNAL_STACK && (raise(SIGUSR1) != 0 || caught != SIGUSR1)) return 10;
    if (status == 0 && way == ROUNDED && fegetround() != FE_UPWARD) return 11;
    fflush(NULL);
    return status != 0 ? status : fstat(none, &said) == 0 && said.st_size == 0 ? 0 : 12;
}

static void answers_are_the_same_in_every_process(void **state)
{
    (void)state;
    const size_t bytes = sizeof *answers * KINDS;
    float(*plain)[SAMPLES * OUTS] = malloc(bytes);
    answers = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(plain && answers != MAP_FAILED);
    make_numbers();
    for (int way = PLAIN; way < WAYS; way++) {
        if (SANITIZED && way != PLAIN && way != ROUNDED) continue; /* they make calls and have stacks of their own */
        memset(answers, 0, bytes);
        const int status = in_child(answers_of, &way);
        if (status == 77) continue;
        if (status != 0) fail_msg("way %d: status %d", way, status);
        if (way == PLAIN) memcpy(plain, answers, bytes);
        for (int k = 0; k < KINDS; k++)
            if (memcmp(plain[k], answers[k], sizeof *answers) != 0)
                fail_msg("way %d: other bits of matrices %s, products %s", way, kinds[k].weight, kinds[k].products);
    }
    double sum = 0; /* of a known number, in f64 */
    for (int64_t i = 0; i < INNER; i++) sum += (double)x[i] * (double)weight[i];
    assert_true(plain[0][0] - sum < 1e-3 && sum - plain[0][0] < 1e-3 && sum != 0);
    const float least = fabsf(plain[0][SAMPLES * OUTS - 1]);
    assert_true(least > 0 && least < FLT_MIN);
    munmap(answers, bytes);
    free(plain);
    unlink(path);
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(answers_are_the_same_in_every_process)};

int main(void)
{
    const int file = mkstemp(path);
    return file < 0 || close(file) != 0 ? 1 : cmocka_run_group_tests(tests, NULL, NULL);
}
