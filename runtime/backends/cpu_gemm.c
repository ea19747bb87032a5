/* SPDX-License-Identifier: Apache-2.0
 *
 * cpu_gemm.c: the operation gemm of the device cpu: matrix products by OpenBLAS or oneDNN, in blocks of rows that the worker pool shares.
 */
#include "../../kernels/kernels.h"
#include "cpu_ops.h"

#include <cblas.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const peri_plugin_host *host;

/** oneDNN's f32 product, if the library is there: the products of a DLRM step (batch 2,048, one thread of a Zen 4) took 93 ms with
 *  OpenBLAS 0.3.21, 92 ms with BLIS 0.9 and 85 ms with oneDNN 2.6. It is looked for at run time, at the first product;
 *  PERI_BLAS=openblas does without it, PERI_BLAS=onednn insists on it. */
static struct {
    pthread_once_t once;
    int (*sgemm)(char ta, char tb, int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda, const float *b, int64_t ldb,
                 float beta, float *c, int64_t ldc); /* row-major; 0 is success. NULL: OpenBLAS */
    int (*omp_threads)(void);       /* of products that the calling thread starts; NULL if oneDNN was built without OpenMP */
    void (*omp_threads_set)(int n);
    char problem[192];              /* why what PERI_BLAS asks for cannot be had; "" */
} onednn = {.once = PTHREAD_ONCE_INIT};

static void onednn_find(void)
{
    static const char *const files[] = {"libdnnl.so.3", "libdnnl.so.2", "libdnnl.so.1"};
    const char *wanted = getenv("PERI_BLAS");
    void *library = NULL;
    if (wanted && !strcmp(wanted, "openblas")) return;
    if (wanted && *wanted && strcmp(wanted, "onednn") != 0) {
        snprintf(onednn.problem, sizeof onednn.problem, "PERI_BLAS=%.60s, allowed: onednn, openblas", wanted);
        return;
    }
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    if (!wanted) return; /* its OpenMP runtime is not instrumented */
#endif
    for (size_t i = 0; i < sizeof files / sizeof *files && !library; i++) library = dlopen(files[i], RTLD_NOW | RTLD_LOCAL);
    void *sgemm = library ? dlsym(library, "dnnl_sgemm") : NULL;
    if (!sgemm && wanted) snprintf(onednn.problem, sizeof onednn.problem, "PERI_BLAS=onednn, but libdnnl.so was not found");
    if (!sgemm) return;
    *(void **)&onednn.omp_threads = dlsym(library, "omp_get_max_threads");
    *(void **)&onednn.omp_threads_set = dlsym(library, "omp_set_num_threads");
    if (!onednn.omp_threads) onednn.omp_threads_set = NULL;
    *(void **)&onednn.sgemm = sgemm;
    host->log(PERI_LOG_INFO, "cpu: f32 matrix products by oneDNN");
}

/** Multiplications below which oneDNN's preparations cost more than they gain. */
enum { ONEDNN_LEAST = 1 << 15 };

static bool use_onednn(const peri_op_gemm *g)
{
    return g->dtype == PERI_F32 && onednn.sgemm && g->k > 0 && g->m * g->n * g->k >= ONEDNN_LEAST;
}

/** One matrix product over rows [begin, end) of C. What oneDNN declines (out of memory for its kernels) is OpenBLAS's. */
static void gemm_one(const peri_op_gemm *g, int64_t batch, int64_t begin, int64_t end)
{
    enum CBLAS_TRANSPOSE ta = g->trans_a ? CblasTrans : CblasNoTrans, tb = g->trans_b ? CblasTrans : CblasNoTrans;
    int64_t a_at = batch * g->stride_a + begin * (g->trans_a ? 1 : g->lda), b_at = batch * g->stride_b;
    int64_t c_at = batch * g->stride_c + begin * g->ldc;
    if (use_onednn(g) && onednn.sgemm(g->trans_a ? 'T' : 'N', g->trans_b ? 'T' : 'N', end - begin, g->n, g->k, (float)g->alpha,
                                      (const float *)g->a + a_at, g->lda, (const float *)g->b + b_at, g->ldb, (float)g->beta,
                                      (float *)g->c + c_at, g->ldc) == 0)
        return;
    if (g->dtype == PERI_F32)
        cblas_sgemm(CblasRowMajor, ta, tb, (int)(end - begin), (int)g->n, (int)g->k, (float)g->alpha, (const float *)g->a + a_at,
                    (int)g->lda, (const float *)g->b + b_at, (int)g->ldb, (float)g->beta, (float *)g->c + c_at, (int)g->ldc);
    else
        cblas_dgemm(CblasRowMajor, ta, tb, (int)(end - begin), (int)g->n, (int)g->k, g->alpha, (const double *)g->a + a_at, (int)g->lda,
                    (const double *)g->b + b_at, (int)g->ldb, g->beta, (double *)g->c + c_at, (int)g->ldc);
}

/** Rows of C are cut into blocks of this many, the same at any thread count, so that the bits of a product do not depend on it. At one
 *  thread blocks of 256 cost 1 to 2 % of the time (each packs the other matrix anew). */
enum { GEMM_ROWS = 256 };

static void gemm_range(void *ctx, int64_t begin, int64_t end)
{
    const peri_op_gemm *g = ctx;
    int64_t blocks = (g->m + GEMM_ROWS - 1) / GEMM_ROWS;
    bool limit = onednn.omp_threads_set && use_onednn(g);
    int threads = limit ? onednn.omp_threads() : 1; /* the worker pool splits products itself; the caller's own setting comes back */
    if (limit && threads != 1) onednn.omp_threads_set(1);
    for (int64_t i = begin; i < end; i++) {
        int64_t row = i % blocks * GEMM_ROWS;
        gemm_one(g, i / blocks, row, row + GEMM_ROWS < g->m ? row + GEMM_ROWS : g->m);
    }
    if (limit && threads != 1) onednn.omp_threads_set(threads);
}

bool peri__cpu_has_gemm(const peri_op_gemm *g)
{
    int64_t most = INT32_MAX; /* OpenBLAS counts in 32 bits */
    return (g->dtype == PERI_F32 || g->dtype == PERI_F64) && g->c_dtype == g->dtype && !g->biased && g->m <= most && g->n <= most &&
        g->k <= most && g->lda <= most && g->ldb <= most && g->ldc <= most;
}

void peri__cpu_gemm_init(const peri_plugin_host *lent)
{
    host = lent;
    openblas_set_num_threads(1); /* the worker pool splits products itself */
}

peri_status peri__cpu_gemm(const peri_op_gemm *g)
{
    pthread_once(&onednn.once, onednn_find);
    if (*onednn.problem) return PERI_HOST_FAIL(host, PERI_EUNSUPPORTED, "cpu: %s", onednn.problem);
    if (g->m == 0 || g->n == 0 || g->batch == 0) return PERI_OK;
    peri_op_gemm copy = *g;
    host->parallel_for((g->m + GEMM_ROWS - 1) / GEMM_ROWS * g->batch, 1, gemm_range, &copy);
    return PERI_OK;
}
