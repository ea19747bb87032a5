/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_shampoo.c (ref): the steps of Shampoo: see kernels/tbe.h.
 */

/** The table that holds row @i of all tables' statistics, columns of the tables before it in *before, its squares in
 *  *offset. */
static int64_t ref_shampoo_table(const peri_k_tbe_shampoo *s, int64_t i, int64_t *before, int64_t *offset)
{
    int64_t t = 0;
    *before = *offset = 0;
    while (i >= *before + s->tables[t].cols) {
        *before += s->tables[t].cols;
        *offset += s->tables[t].cols * s->tables[t].cols;
        t++;
    }
    return t;
}

static void ref_tbe_gram(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_shampoo *s = args;
    for (int64_t at = begin; at < end; at++) {
        int64_t before, offset, t = ref_shampoo_table(s, at, &before, &offset), n = s->tables[t].cols, i = at - before;
        float *row = s->gram + offset + i * n;
        for (int64_t r = s->first[t]; r < s->first[t + 1]; r++) {
            const float *g = s->values + r * s->stride;
            for (int64_t j = 0; j < n; j++) row[j] = fmaf(g[i], g[j], row[j]);
        }
    }
}

/** Turn rows p and q of x[., n] by the angle of cosine c and sine s. */
static void ref_shampoo_turn(double *x, int64_t n, int64_t p, int64_t q, double c, double s)
{
    double *a = x + p * n, *b = x + q * n;
    for (int64_t k = 0; k < n; k++) {
        double y = a[k], z = b[k];
        a[k] = c * y - s * z;
        b[k] = s * y + c * z;
    }
}

/** Jacobi's method (Golub, Van Loan: cyclic by rows): symmetric @a becomes diagonal, the rows of @v its
 *  eigenvectors. */
static void ref_shampoo_jacobi(double *a, double *v, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++) v[i * n + j] = i == j;
    for (int sweep = 0; sweep < 40; sweep++) {
        double off = 0, all = 0;
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < n; j++) {
                all += a[i * n + j] * a[i * n + j];
                if (i != j) off += a[i * n + j] * a[i * n + j];
            }
        if (!(off > 1e-26 * all)) break;
        for (int64_t p = 0; p + 1 < n; p++)
            for (int64_t q = p + 1; q < n; q++) {
                double x = a[p * n + q];
                if (x == 0) continue;
                double theta = (a[q * n + q] - a[p * n + p]) / (2 * x);
                double tangent = (theta >= 0 ? 1 : -1) / (fabs(theta) + sqrt(theta * theta + 1));
                double c = 1 / sqrt(tangent * tangent + 1), s = tangent * c;
                ref_shampoo_turn(a, n, p, q, c, s);
                for (int64_t k = 0; k < n; k++) {
                    double y = a[k * n + p], z = a[k * n + q];
                    a[k * n + p] = c * y - s * z;
                    a[k * n + q] = s * y + c * z;
                }
                ref_shampoo_turn(v, n, p, q, c, s);
            }
    }
}

static void ref_tbe_root(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_shampoo *s = args;
    for (int64_t t = begin; t < end; t++) {
        int64_t n = s->tables[t].cols, offset = 0;
        for (int64_t b = 0; b < t; b++) offset += s->tables[b].cols * s->tables[b].cols;
        if (s->first[t] == s->first[t + 1]) continue; /* nothing to precondition */
        double *a = s->room + 2 * offset, *v = a + n * n;
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j <= i; j++) a[i * n + j] = a[j * n + i] = s->gram[offset + i * n + j];
        ref_shampoo_jacobi(a, v, n);
        for (int64_t i = 0; i < n; i++) a[i * n + i] = 1 / sqrt((a[i * n + i] > 0 ? a[i * n + i] : 0) + s->eps);
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < n; j++) {
                double sum = 0;
                for (int64_t k = 0; k < n; k++) sum += v[k * n + i] * a[k * n + k] * v[k * n + j];
                s->root[offset + i * n + j] = (float)sum;
            }
    }
}

static void ref_tbe_precondition(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_shampoo *s = args;
    int64_t all = s->first[s->n_tables], from = tbe_part(all, begin, s->chunks), to = tbe_part(all, end, s->chunks),
            offset = 0;
    float *u = s->scratch + begin * s->scratch_stride;
    peri_k_tbe_optimizer step = s->optimizer;
    step.kind = PERI_TBE_SGD;
    for (int64_t t = 0; t < s->n_tables; t++) {
        int64_t n = s->tables[t].cols;
        for (int64_t r = tbe_clamp(s->first[t], from, to); r < tbe_clamp(s->first[t + 1], from, to); r++) {
            const float *g = s->values + r * s->stride;
            for (int64_t j = 0; j < n; j++) u[j] = 0;
            for (int64_t i = 0; i < n; i++)
                for (int64_t j = 0; j < n; j++) u[j] = fmaf(g[i], s->root[offset + i * n + j], u[j]);
            ref_tbe_row(&s->rows, &step, &s->tables[t], s->run_rows[r], u, u + ref_tbe_round16(n));
        }
        offset += n * n;
    }
}
