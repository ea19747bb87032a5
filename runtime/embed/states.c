/* SPDX-License-Identifier: Apache-2.0
 *
 * states.c: weights and states of optimizers as users see them; learning rates, iterations, counts.
 */
#include "row_watch.h"

#include <math.h>
#include <stdio.h>

/* -- state --------------------------------------------------------------------------------------------------------- */

/** The place of state @name among the optimizer's; PERI_ENOTFOUND lists them. */
static peri_status state_index(const char *function, const peri_tbe *tbe, int64_t table, const char *name, int32_t *out)
{
    char known[128] = "";
    for (int32_t i = 0; peri_tbe_state_name(tbe, i); i++) {
        if (!strcmp(name, peri_tbe_state_name(tbe, i))) {
            *out = i;
            return PERI_OK;
        }
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", i ? ", " : "",
                 peri_tbe_state_name(tbe, i));
    }
    return peri__fail(PERI_ENOTFOUND, "%s: table '%s' has no state '%.60s'; it has: %s", function,
                      tbe->tables[table].name, name, known);
}

peri_status peri__tbe_check_table(const char *function, const peri_tbe *tbe, int64_t table)
{
    if (table >= 0 && table < tbe->n_tables) return PERI_OK;
    return peri__fail(PERI_ERANGE, "%s: table %lld, allowed: 0..%lld", function, (long long)table,
                      (long long)tbe->n_tables - 1);
}

peri_status peri_tbe_table(const peri_tbe *tbe, int64_t table, peri_table_config *out)
{
    PERI_NEED(tbe);
    PERI_TRY(peri__tbe_check_table("peri_tbe_table", tbe, table));
    peri_table_config now = tbe->tables[table].config;
    now.name = tbe->tables[table].name;
    return PERI_GIVE(peri_table_config, out, &now);
}

/** Such a view, behind all calls so far. */
static peri_status view_of_state(const char *function, peri_tbe *tbe, int64_t table, const char *name,
                                 peri_tensor **out)
{
    int32_t i;
    PERI_TRY(peri__tbe_check_table(function, tbe, table));
    PERI_TRY(state_index(function, tbe, table, name, &i));
    bool rows = peri__has_rows(tbe->state[i].geometry);
    if (rows && !tbe->store->whole)
        return peri__fail(
            PERI_EUNSUPPORTED,
            "%s: the rows of table '%s' are behind a cache, so there is no view of them; read and write rows", function,
            tbe->tables[table].name);
    PERI_TRY(peri__tbe_enter(tbe, true)); /* the current stream waits for them */
    return peri__tbe_leave(tbe, true, peri__state_view(tbe, table, i, out));
}

peri_status peri_tbe_state(peri_tbe *tbe, int64_t table, const char *name, peri_tensor **out)
{
    PERI_NEED(tbe);
    PERI_NEED(name);
    PERI_NEED(out);
    return view_of_state("peri_tbe_state", tbe, table, name, out);
}

int32_t peri_tbe_state_shape(const peri_tbe *tbe, int64_t table, const char *name, int64_t *shape)
{
    int32_t i;
    PERI_NEED(tbe);
    PERI_NEED(name);
    PERI_NEED(shape);
    PERI_TRY(peri__tbe_check_table("peri_tbe_state_shape", tbe, table));
    PERI_TRY(state_index("peri_tbe_state_shape", tbe, table, name, &i));
    int64_t rows = tbe->tables[table].config.rows, cols = tbe->layout[table].cols;
    int32_t geometry = tbe->state[i].geometry;
    shape[0] = geometry == PERI_STATE_SCALAR ? 1 : geometry == PERI_STATE_SQUARE ? cols : rows;
    shape[1] = cols;
    return geometry == PERI_STATE_FULL || geometry == PERI_STATE_SQUARE ? 2 : 1;
}

int32_t peri_tbe_state_geometry(const peri_tbe *tbe, const char *name)
{
    PERI_NEED(tbe);
    PERI_NEED(name);
    for (int32_t i = 0; i < tbe->n_states; i++)
        if (!strcmp(name, tbe->state[i].name)) return tbe->state[i].geometry;
    return peri__fail(PERI_ENOTFOUND, "peri_tbe_state_geometry: optimizer %s has no state '%.60s'",
                      peri__optimizer_kind_of(tbe->optimizer.kind)->name, name);
}

peri_status peri_tbe_leaf(peri_tbe *tbe, int64_t table, peri_tensor **out)
{
    PERI_NEED(tbe);
    PERI_NEED(out);
    PERI_TRY(peri__tbe_check_table("peri_tbe_leaf", tbe, table));
    if (tbe->optimizer.kind != PERI_TBE_NONE)
        return peri__fail(PERI_EINVAL, "peri_tbe_leaf: table '%s' is trained by its fused optimizer %s, it has no leaf",
                          tbe->tables[table].name, peri__optimizer_kind_of(tbe->optimizer.kind)->name);
    if (tbe->dtype != PERI_F32)
        return peri__fail(PERI_EINVAL, "peri_tbe_leaf: table '%s' is %s; leaves, whose gradients are f32, are f32",
                          tbe->tables[table].name, peri_dtype_name(tbe->weight->dtype));
    peri_tensor **leaf = &tbe->tables[table].leaf, *fresh = NULL;
    pthread_mutex_lock(&tbe->small);
    bool made = *leaf != NULL;
    pthread_mutex_unlock(&tbe->small);
    if (!made) PERI_TRY(view_of_state("peri_tbe_leaf", tbe, table, "weight", &fresh));
    pthread_mutex_lock(&tbe->small); /* another thread may have been faster */
    if (!*leaf) {
        *leaf = fresh;
        fresh->requires_grad = true;
        fresh = NULL;
    }
    peri_tensor_retain(*leaf);
    *out = *leaf;
    pthread_mutex_unlock(&tbe->small);
    peri_tensor_release(fresh);
    return PERI_OK;
}

/** A call alone on a table's weights or state @name, which is state number *part. */
static peri_status enter_part(const char *function, peri_tbe *tbe, int64_t table, const char *name, int32_t *part)
{
    PERI_TRY(peri__tbe_check_table(function, tbe, table));
    PERI_TRY(state_index(function, tbe, table, name, part));
    return peri__tbe_enter(tbe, true);
}

peri_status peri_tbe_read(peri_tbe *tbe, int64_t table, const char *name, int64_t row, peri_tensor *dst)
{
    PERI_NEED(tbe);
    PERI_NEED(name);
    PERI_NEED(dst);
    int32_t part;
    PERI_TRY(enter_part("peri_tbe_read", tbe, table, name, &part));
    return peri__tbe_leave(tbe, true, tbe->store->read(tbe, table, part, row, dst));
}

/** Tell the watches what peri_tbe_write writes, as far as that lies in the table: the store refuses the rest. */
static peri_status tell_write(peri_tbe *tbe, int64_t table, int32_t part, int64_t row, const peri_tensor *src)
{
    const int64_t rows = tbe->tables[table].config.rows, n = src->ndim ? src->shape[0] : 0;
    if (row < 0 || row > rows || n > rows - row) return PERI_OK;
    return peri__tbe_tell_range(tbe, table, part, row, n);
}

peri_status peri_tbe_write(peri_tbe *tbe, int64_t table, const char *name, int64_t row, const peri_tensor *src)
{
    PERI_NEED(tbe);
    PERI_NEED(name);
    PERI_NEED(src);
    int32_t part;
    PERI_TRY(enter_part("peri_tbe_write", tbe, table, name, &part));
    peri_status status = part == 0 ? peri__check_floats_fit("peri_tbe_write", tbe, table, row, src) : PERI_OK;
    const bool rows = peri__has_rows(tbe->state[part].geometry);
    if (status >= 0 && rows && tbe->watches) status = tell_write(tbe, table, part, row, src);
    if (status >= 0) {
        tbe->writes += part == 0;
        status = tbe->store->write(tbe, table, part, row, src);
    }
    return peri__tbe_leave(tbe, true, status);
}

peri_status peri_tbe_learning_rate_set(peri_tbe *tbe, double learning_rate)
{
    PERI_NEED(tbe);
    if (!(learning_rate >= 0) || !isfinite((float)learning_rate))
        return peri__fail(PERI_EINVAL, "peri_tbe_learning_rate_set: %g, allowed: finite numbers >= 0", learning_rate);
    tbe->optimizer.learning_rate = learning_rate;
    return PERI_OK;
}

int64_t peri__tbe_change_count(const peri_tbe *tbe)
{
    return tbe->updates + tbe->writes + tbe->ema_step + (tbe->weight ? (int64_t)peri__version(tbe->weight) : 0);
}

double peri_tbe_learning_rate(const peri_tbe *tbe) { return tbe ? tbe->optimizer.learning_rate : 0; }
int64_t peri_tbe_iteration(const peri_tbe *tbe) { return tbe ? tbe->iteration : 0; }

peri_status peri_tbe_iteration_set(peri_tbe *tbe, int64_t iteration)
{
    PERI_NEED(tbe);
    if (iteration < 0)
        return peri__fail(PERI_EINVAL, "peri_tbe_iteration_set: %lld, allowed: >= 0", (long long)iteration);
    tbe->iteration = iteration;
    tbe->ema_step = 0;
    return PERI_OK;
}

peri_status peri_tbe_statistics(peri_tbe *tbe, peri_tbe_stats *out)
{
    PERI_NEED(tbe);
    PERI_NEED(out);
    int64_t counts[PERI__TBE_COUNTERS];
    PERI_TRY(peri__tbe_enter(tbe, true));
    PERI_TRY(peri__tbe_leave(tbe, true, peri_tensor_read(tbe->counters, counts, sizeof counts)));
    peri_tbe_stats now = {.lookups = atomic_load(&tbe->lookups),
                          .updates = tbe->updates,
                          .ids = counts[PERI__TBE_COUNT_IDS],
                          .bags = counts[PERI__TBE_COUNT_BAGS],
                          .rows_updated = counts[PERI__TBE_COUNT_ROWS],
                          .bad_ids =
                              counts[PERI__TBE_COUNT_BAD_IDS] + (tbe->store->bad_ids ? tbe->store->bad_ids(tbe) : 0),
                          .bad_bags = counts[PERI__TBE_COUNT_BAD_BAGS],
                          .weight_bytes = peri__tensor_bytes(tbe->weight)};
    for (int32_t i = 1; i < tbe->n_states; i++) now.state_bytes += peri__tensor_bytes(tbe->state[i].flat);
    for (int i = 0; i < PERI__TBE_WORKSPACES; i++) now.workspace_bytes += peri__tensor_bytes(tbe->workspace[i]);
    pthread_mutex_lock(&tbe->small);
    for (const peri_tbe_batch *b = tbe->idle; b; b = b->next)
        now.workspace_bytes += peri__tensor_bytes(b->spans) + peri__tensor_bytes(b->report);
    for (const peri__sorted *r = tbe->idle_sorted; r; r = r->next)
        for (int i = 0; i < PERI__SORT_ROOMS; i++) now.workspace_bytes += peri__tensor_bytes(r->room[i]);
    pthread_mutex_unlock(&tbe->small);
    return PERI_GIVE(peri_tbe_stats, out, &now);
}
