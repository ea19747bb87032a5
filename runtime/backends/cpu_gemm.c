/* SPDX-License-Identifier: Apache-2.0
 *
 * cpu_gemm.c: the operation gemm of the device cpu: matrix products by OpenBLAS or oneDNN, in blocks of rows that the
 * worker pool shares.
 */
#include "../../kernels/dense.h"
#include "../../kernels/work.h"
#include "cpu_ops.h"

#include <cblas.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>

static const peri_plugin_host *host;

/** OpenBLAS, which is loaded at the first product. Linked to the library it would start its threads before the
 *  program's main, with all signals open: one that the program blocks in order to wait for it would end the process
 *  there. */
static struct {
    __typeof__(cblas_sgemm) *sgemm;
    __typeof__(cblas_dgemm) *dgemm;
    int (*threads)(void); /* of a product; NULL: it does not say */
    void (*threads_set)(int n);
} openblas;

/** Products of ours that are under way, and what the program had set when the first of them began. */
static struct {
    pthread_mutex_t lock;
    int32_t under_way;
    int threads; /* 0: its own setting holds */
} products = {.lock = PTHREAD_MUTEX_INITIALIZER};

/** How many threads are inside a library for products (a call of its, or the loader's). fork waits until none is: a
 *  child has copies of the library's own locks, and one that another thread held at that moment nobody would ever
 *  unlock. A fork goes before products that have not begun, and waits for a block of rows at most. */
static struct {
    pthread_mutex_t gate; /* held by a fork */
    atomic_bool forking;
    atomic_int_least32_t threads;
} inside = {.gate = PTHREAD_MUTEX_INITIALIZER};

static void enter_library(void)
{
    for (;;) {
        atomic_fetch_add(&inside.threads, 1);
        if (!atomic_load(&inside.forking)) return;
        atomic_fetch_sub(&inside.threads, 1);
        pthread_mutex_lock(&inside.gate);
        pthread_mutex_unlock(&inside.gate);
    }
}

static void leave_library(void) { atomic_fetch_sub(&inside.threads, 1); }

static void before_fork(void)
{
    pthread_mutex_lock(&inside.gate);
    atomic_store(&inside.forking, true);
    while (atomic_load(&inside.threads) > 0) sched_yield();
}

static void after_fork(void)
{
    atomic_store(&inside.forking, false);
    pthread_mutex_unlock(&inside.gate);
}

/** The threads whose products were under way are gone; the program's setting comes back after the child's first
 *  product. */
static void in_child(void)
{
    products.under_way = 0;
    atomic_store(&inside.threads, 0); /* those that were on their way in */
    after_fork();
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(before_fork, after_fork, in_child); }

/** oneDNN's f32 product, if the library is there: the products of a DLRM step (batch 2,048, one thread of a Zen 4) took
 *  93 ms with OpenBLAS 0.3.21, 92 ms with BLIS 0.9 and 85 ms with oneDNN 2.6. PERI_BLAS=openblas does without it,
 *  PERI_BLAS=onednn insists on it. */
static struct {
    int (*sgemm)(char ta, char tb, int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
                 const float *b, int64_t ldb, float beta, float *c,
                 int64_t ldc);      /* row-major; 0 is success. NULL: OpenBLAS */
    int (*omp_threads)(void);       /* of products that the calling thread starts; NULL if oneDNN was built without
                                       OpenMP */
    void (*omp_threads_set)(int n);
} onednn;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static char problem[256]; /* why there are no products; "" */

enum { OPENBLAS_CODE = 48 << 20, OPENBLAS_BUFFER = 128 << 20, MOST_THREADS = 1024 };
enum { DNNL_MAJOR = 3, DNNL_MINOR = 15 }; /* the newest oneDNN that is looked for */

/** Are there addresses for the buffers of so many products at a time, and @more bytes? Where OpenBLAS gets none for a
 *  buffer it asks for ever, with all of a processor. */
static bool room_for(int32_t threads, size_t more)
{
    void *blocks[MOST_THREADS + 1];
    int32_t n = 0, wanted = threads < MOST_THREADS ? threads : MOST_THREADS;
    bool ok = true;
    for (; ok && n < wanted + (more > 0); n++) {
        blocks[n] =
            mmap(NULL, n < wanted ? OPENBLAS_BUFFER : more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        ok = blocks[n] != MAP_FAILED;
    }
    for (int32_t i = 0; i < n; i++)
        if (blocks[i] != MAP_FAILED) munmap(blocks[i], i < wanted ? OPENBLAS_BUFFER : more);
    return ok;
}

/** Load a library whose threads, if it starts any, take no signals. OpenBLAS starts as many as there are processors on
 *  which this thread may run, with a buffer each: while it is loaded that is one, since the worker pool splits
 *  products. */
static void *load(const char *file, bool alone)
{
    sigset_t all, before;
    cpu_set_t mine, one;
    int here = sched_getcpu();
    bool narrowed = alone && here >= 0 && here < CPU_SETSIZE && sched_getaffinity(0, sizeof mine, &mine) == 0;
    CPU_ZERO(&one);
    if (narrowed) CPU_SET(here, &one);
    narrowed = narrowed && sched_setaffinity(0, sizeof one, &one) == 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    enter_library(); /* a child that is forked in the middle of a dlopen crashes in its own first one */
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    leave_library();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (narrowed) sched_setaffinity(0, sizeof mine, &mine);
    return library;
}

static void openblas_find(void)
{
    if (!room_for(1, OPENBLAS_CODE)) {
        snprintf(problem, sizeof problem,
                 "OpenBLAS needs %d MiB of addresses, which this process does not get (ulimit -v)",
                 (OPENBLAS_CODE + OPENBLAS_BUFFER) >> 20);
        return;
    }
    /* Where a linked program would find it, then where the build has found it. */
    static const char *const files[] = {"libopenblas.so.0", PERI_OPENBLAS_FOLDER "/libopenblas.so.0",
                                        PERI_OPENBLAS_FOLDER "/libopenblas.so"};
    void *library = NULL;
    for (size_t i = 0; i < sizeof files / sizeof *files && !library; i++) library = load(files[i], true);
    if (!library) {
        snprintf(problem, sizeof problem, "OpenBLAS was not found: %.200s", dlerror());
        return;
    }
    *(void **)&openblas.sgemm = dlsym(library, "cblas_sgemm");
    *(void **)&openblas.dgemm = dlsym(library, "cblas_dgemm");
    *(void **)&openblas.threads = dlsym(library, "openblas_get_num_threads");
    *(void **)&openblas.threads_set = dlsym(library, "openblas_set_num_threads");
    if (!openblas.threads) openblas.threads_set = NULL;
    if (!openblas.sgemm || !openblas.dgemm)
        snprintf(problem, sizeof problem, "this OpenBLAS has no cblas_sgemm and cblas_dgemm");
}

static void onednn_find(void)
{
    const char *wanted = secure_getenv("PERI_BLAS");
    void *library = NULL;
    if (wanted && !*wanted) wanted = NULL;
    if (wanted && !strcmp(wanted, "openblas")) return;
    /* oneDNN loads a library that INTEL_JIT_PROFILER64 names, and writes files where ONEDNN_JIT_DUMP is set: a program
     * with other rights than its caller (setuid, capabilities) does without. */
    if (getauxval(AT_SECURE) != 0) return;
    if (wanted && strcmp(wanted, "onednn") != 0) {
        snprintf(problem, sizeof problem, "PERI_BLAS=%.60s, allowed: onednn, openblas", wanted);
        return;
    }
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    if (!wanted) return; /* its OpenMP runtime is not instrumented */
#endif
    /* Debian 12: libdnnl.so.2; 13: libdnnl.so.3.6, and no libdnnl.so.3 */
    for (int major = DNNL_MAJOR; major > 0 && !library; major--) {
        char file[32];
        snprintf(file, sizeof file, "libdnnl.so.%d", major);
        library = load(file, false);
        for (int minor = DNNL_MINOR; minor >= 0 && !library; minor--) {
            snprintf(file, sizeof file, "libdnnl.so.%d.%d", major, minor);
            library = load(file, false);
        }
    }
    void *sgemm = library ? dlsym(library, "dnnl_sgemm") : NULL;
    if (!sgemm && wanted) snprintf(problem, sizeof problem, "PERI_BLAS=onednn, but libdnnl.so was not found");
    if (!sgemm) return;
    *(void **)&onednn.omp_threads = dlsym(library, "omp_get_max_threads");
    *(void **)&onednn.omp_threads_set = dlsym(library, "omp_set_num_threads");
    if (!onednn.omp_threads) onednn.omp_threads_set = NULL;
    *(void **)&onednn.sgemm = sgemm;
    host->log(PERI_LOG_INFO, "cpu: f32 matrix products by oneDNN");
}

/** What a program without a dynamic linker was linked with (-u cblas_sgemm -u cblas_dgemm -lopenblas, which the
 *  pkg-config file says); else NULL. Such a program cannot load libraries: the C library would end it. */
extern __typeof__(cblas_sgemm) cblas_sgemm __attribute__((weak));
extern __typeof__(cblas_dgemm) cblas_dgemm __attribute__((weak));

extern int openblas_get_num_threads(void) __attribute__((weak));
extern void openblas_set_num_threads(int n) __attribute__((weak));

static bool linked_statically(void) { return getauxval(AT_BASE) == 0; } /* nobody has loaded libraries for it */

static void find_openblas(void)
{
    if (linked_statically()) {
        openblas.sgemm = cblas_sgemm;
        openblas.dgemm = cblas_dgemm;
        openblas.threads = openblas_get_num_threads;
        openblas.threads_set = openblas.threads ? openblas_set_num_threads : NULL;
        if (!openblas.sgemm || !openblas.dgemm)
            snprintf(problem, sizeof problem,
                     "this program was linked statically, without OpenBLAS; link it with -u cblas_sgemm "
                     "-u cblas_dgemm -lopenblas");
        return;
    }
    onednn_find(); /* first: an OpenMP that comes with it counts this process's processors */
    if (!*problem) openblas_find();
}

/** Multiplications below which oneDNN's preparations cost more than they gain. */
enum { ONEDNN_LEAST = 1 << 15 };

static bool use_onednn(const peri_op_gemm *g)
{
    return g->dtype == PERI_F32 && onednn.sgemm && g->k > 0 && g->m * g->n * g->k >= ONEDNN_LEAST;
}

/** One matrix product over rows [begin, end) of C. What oneDNN declines (out of memory for its kernels) is
 *  OpenBLAS's. */
static void gemm_one(const peri_op_gemm *g, int64_t batch, int64_t begin, int64_t end)
{
    enum CBLAS_TRANSPOSE ta = g->trans_a ? CblasTrans : CblasNoTrans, tb = g->trans_b ? CblasTrans : CblasNoTrans;
    int64_t a_at = batch * g->stride_a + begin * (g->trans_a ? 1 : g->lda), b_at = batch * g->stride_b;
    int64_t c_at = batch * g->stride_c + begin * g->ldc;
    if (use_onednn(g) && onednn.sgemm(g->trans_a ? 'T' : 'N', g->trans_b ? 'T' : 'N', end - begin, g->n, g->k,
                                      (float)g->alpha, (const float *)g->a + a_at, g->lda, (const float *)g->b + b_at,
                                      g->ldb, (float)g->beta, (float *)g->c + c_at, g->ldc) == 0)
        return;
    if (g->dtype == PERI_F32)
        openblas.sgemm(CblasRowMajor, ta, tb, (int)(end - begin), (int)g->n, (int)g->k, (float)g->alpha,
                       (const float *)g->a + a_at, (int)g->lda, (const float *)g->b + b_at, (int)g->ldb, (float)g->beta,
                       (float *)g->c + c_at, (int)g->ldc);
    else
        openblas.dgemm(CblasRowMajor, ta, tb, (int)(end - begin), (int)g->n, (int)g->k, g->alpha,
                       (const double *)g->a + a_at, (int)g->lda, (const double *)g->b + b_at, (int)g->ldb, g->beta,
                       (double *)g->c + c_at, (int)g->ldc);
}

/** Rows of C are cut into blocks of this many, the same at any thread count, so that the bits of a product do not
 *  depend on it. At one thread blocks of 256 cost 1 to 2 % of the time (each packs the other matrix anew). A thread
 *  gets blocks of at least GEMM_GRAIN products together: for fewer it would take longer to wake it. */
enum { GEMM_ROWS = 256, GEMM_GRAIN = 1 << 16 };

static void gemm_range(void *ctx, int64_t begin, int64_t end)
{
    const peri_op_gemm *g = ctx;
    int64_t blocks = (g->m + GEMM_ROWS - 1) / GEMM_ROWS;
    bool limit = onednn.omp_threads_set && use_onednn(g);
    int threads = limit ? onednn.omp_threads() : 1; /* the worker pool splits products itself; the caller's own setting
                                                       comes back */
    if (limit && threads != 1) onednn.omp_threads_set(1);
    for (int64_t i = begin; i < end; i++) {
        int64_t row = i % blocks * GEMM_ROWS;
        enter_library();
        gemm_one(g, i / blocks, row, row + GEMM_ROWS < g->m ? row + GEMM_ROWS : g->m);
        leave_library();
    }
    if (limit && threads != 1) onednn.omp_threads_set(threads);
}

/* -- products whose sums have one order ---------------------------------------------------------------------------- */

/** op(A) and op(B) of one product, copied so that the kernel can read them. */
typedef struct ordered {
    const peri_op_gemm *g;
    float *a; /* [m][k], or NULL: A is read where it lies */
    float *panels, *sums; /* sums: [m][n] */
    int64_t batch;
} ordered;

static void ordered_range(void *ctx, int64_t begin, int64_t end)
{
    const ordered *o = ctx;
    const peri_op_gemm *g = o->g;
    const float *a = o->a ? o->a : (const float *)g->a + o->batch * g->stride_a;
    float *c = (float *)g->c + o->batch * g->stride_c;
    peri_k_panel_product_args args = {.y = o->sums,
                                      .x = a,
                                      .panels = o->panels,
                                      .act = PERI_UNARY_IDENTITY,
                                      .inner = g->k,
                                      .cols = g->n,
                                      .x_stride = o->a ? g->k : g->lda,
                                      .y_stride = g->n};
    const int64_t first = begin * GEMM_ROWS, last = end * GEMM_ROWS < g->m ? end * GEMM_ROWS : g->m;
    peri_kernels_get()->fn[PERI_K_panel_product](&args, first, last);
    for (int64_t i = first; i < last; i++)
        for (int64_t j = 0; j < g->n; j++) {
            const float x = (float)g->alpha * o->sums[i * g->n + j];
            c[i * g->ldc + j] = g->beta == 0 ? x : x + (float)g->beta * c[i * g->ldc + j];
        }
}

/** The product by the step panel_product. */
static peri_status ordered_product(const peri_op_gemm *g)
{
    const int64_t panels = peri_panel_size(g->n, g->k);
    ordered o = {.g = g};
    float *memory = host->alloc(sizeof(float) * (size_t)(panels + g->m * g->n + (g->trans_a ? g->m * g->k : 0)));
    if (!memory) return PERI_ENOMEM;
    o.panels = memory;
    o.sums = memory + panels;
    o.a = g->trans_a ? o.sums + g->m * g->n : NULL;
    for (o.batch = 0; o.batch < g->batch; o.batch++) {
        const float *a = (const float *)g->a + o.batch * g->stride_a, *b = (const float *)g->b + o.batch * g->stride_b;
        if (o.batch == 0 || g->stride_b != 0)
            peri_panel_pack(o.panels, b, g->n, g->k, g->trans_b ? g->ldb : 1, g->trans_b ? 1 : g->ldb);
        for (int64_t i = 0; o.a && i < g->m; i++)
            for (int64_t k = 0; k < g->k; k++) o.a[i * g->k + k] = a[k * g->lda + i];
        host->parallel_for((g->m + GEMM_ROWS - 1) / GEMM_ROWS, 1, ordered_range, &o);
    }
    host->free(memory);
    return PERI_OK;
}

bool peri__cpu_has_gemm(const peri_op_gemm *g)
{
    int64_t most = INT32_MAX; /* OpenBLAS counts in 32 bits */
    return (g->dtype == PERI_F32 || g->dtype == PERI_F64) && g->c_dtype == g->dtype && !g->biased && g->m <= most &&
           g->n <= most && g->k <= most && g->lda <= most && g->ldb <= most && g->ldc <= most;
}

void peri__cpu_gemm_init(const peri_plugin_host *lent)
{
    host = lent;
    host->fork_lock(&products.lock);
}

/** From here to products_end OpenBLAS makes each product by one thread, since the worker pool splits them. A program
 *  that uses OpenBLAS, too, has its own setting back when none of ours is under way. */
static void products_begin(void)
{
    if (!openblas.threads_set) return;
    pthread_mutex_lock(&products.lock);
    if (products.under_way++ == 0) {
        if (products.threads == 0) products.threads = openblas.threads();
        if (products.threads != 1) openblas.threads_set(1);
    }
    pthread_mutex_unlock(&products.lock);
}

static void products_end(void)
{
    if (!openblas.threads_set) return;
    pthread_mutex_lock(&products.lock);
    if (--products.under_way == 0) {
        if (products.threads != 1) openblas.threads_set(products.threads);
        products.threads = 0;
    }
    pthread_mutex_unlock(&products.lock);
}

peri_status peri__cpu_gemm(const peri_op_gemm *g)
{
    if (g->ordered && g->dtype == PERI_F32) return ordered_product(g);
    static atomic_int roomy = 1; /* so many threads have had the addresses that their products need */
    pthread_once(&once, find_openblas);
    if (*problem) return PERI_HOST_FAIL(host, PERI_EUNSUPPORTED, "cpu: %s", problem);
    if (g->m == 0 || g->n == 0 || g->batch == 0) return PERI_OK;
    int64_t blocks = (g->m + GEMM_ROWS - 1) / GEMM_ROWS * g->batch;
    int32_t threads = host->threads();
    threads = blocks < threads ? (int32_t)blocks : threads;
    if (threads > atomic_load(&roomy)) {
        if (!room_for(threads, 0))
            return PERI_HOST_FAIL(host, PERI_ENOMEM,
                                  "cpu: matrix products by %d threads need %d MiB of addresses for each, which this "
                                  "process does not get (ulimit -v; PERI_NUM_THREADS)",
                                  threads, OPENBLAS_BUFFER >> 20);
        atomic_store(&roomy, threads);
    }
    peri_op_gemm copy = *g;
    const int64_t rows = g->m < GEMM_ROWS ? g->m : GEMM_ROWS, each = rows * g->n * (g->k > 0 ? g->k : 1);
    products_begin();
    host->parallel_for(blocks, 1 + GEMM_GRAIN / each, gemm_range, &copy);
    products_end();
    return PERI_OK;
}
