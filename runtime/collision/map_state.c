/* SPDX-License-Identifier: Apache-2.0
 *
 * map_state.c: what a map has learned, as TorchRec's buffers.
 */
#include "collision_internal.h"

#include <stdio.h>

enum { SORTED, MAPPING, COUNTS, LAST, IDENTITIES, METADATA, BUCKET, SEGMENTS, ITERATION, KINDS };
static const char *const names[KINDS] = {
    [SORTED] = "_mch_sorted_raw_ids", [MAPPING] = "_mch_remapped_ids_mapping", [COUNTS] = "_mch_counts",
    [LAST] = "_mch_last_access_iter", [IDENTITIES] = "_hash_zch_identities", [METADATA] = "_hash_zch_metadata",
    [BUCKET] = "_hash_zch_bucket", [SEGMENTS] = "_output_segments_tensor", [ITERATION] = "_current_iter_tensor"};

enum { SEGMENT_ROOM = PERI_COLLISION_MOST_BUCKETS + 1 };

static bool has_state(const peri_collision *c, int32_t kind)
{
    bool hash = peri__collision_hash(c);
    switch (kind) {
    case SORTED:
    case MAPPING: return !hash;
    case COUNTS: return c->counts;
    case LAST: return c->last;
    case METADATA: return hash && c->config.policy != PERI_FORGET_NONE;
    case IDENTITIES:
    case BUCKET: return hash;
    default: return true;
    }
}

static bool by_row(int32_t kind) { return kind < BUCKET; }
/** Whether a load needs it: TorchRec's hash maps have only those with rows. */
static bool required(const peri_collision *c, int32_t kind)
{
    return has_state(c, kind) && (by_row(kind) || !peri__collision_hash(c));
}

/** The kind of state @i, KINDS if there is none. */
static int32_t kind_of(const peri_collision *c, int32_t i)
{
    int32_t kind = 0;
    for (; kind < KINDS; kind++)
        if (has_state(c, kind) && i-- == 0) break;
    return i < -1 ? KINDS : kind;
}

int32_t peri_collision_states(const peri_collision *c)
{
    if (!c) return 0;
    int32_t n = 0;
    for (int32_t kind = 0; kind < KINDS; kind++) n += has_state(c, kind);
    return n;
}

const char *peri_collision_state_name(const peri_collision *c, int32_t i)
{
    if (!c) return NULL;
    int32_t kind = i < 0 ? KINDS : kind_of(c, i);
    return kind < KINDS ? names[kind] : NULL;
}

/* -- reading ------------------------------------------------------------------------------------------------------- */

static peri_status new_state_tensor(peri_collision *c, int32_t ndim, const int64_t *shape, const int64_t *from,
                                    peri_tensor **out)
{
    peri_tensor *t;
    PERI_TRY(peri_tensor_new(c->device, PERI_I64, ndim, shape, &t));
    peri_status status = peri_tensor_write(t, from, peri__numel(t) * 8);
    if (status < 0) peri_tensor_release(t);
    else *out = t;
    return status;
}

/** States with rows, by kind: those that a kernel reads or writes together. */
typedef struct table {
    peri_tensor *state[BUCKET], *scratch;
} table;

static void table_fini(table *t)
{
    for (int32_t kind = 0; kind < BUCKET; kind++) peri_tensor_release(t->state[kind]);
    peri_tensor_release(t->scratch);
}

static void *state_data(const table *t, int32_t kind) { return t->state[kind] ? peri__data(t->state[kind]) : NULL; }

static peri_k_collision_state_args state_args(const peri_collision *c, const table *t)
{
    bool hash = peri__collision_hash(c);
    return (peri_k_collision_state_args){.map = c->map,
                                         .sorted = state_data(t, hash ? IDENTITIES : SORTED),
                                         .mapping = state_data(t, MAPPING),
                                         .counts = state_data(t, COUNTS),
                                         .last = state_data(t, LAST),
                                         .expiries = state_data(t, METADATA),
                                         .scratch = t->scratch ? peri__data(t->scratch) : NULL,
                                         .first_row = c->first_row};
}

static peri_status make_scratch(peri_collision *c, table *t)
{
    int64_t n = c->rows * (int64_t)(sizeof(peri_k_collision_record) / 8);
    return peri__collision_hash(c) ? PERI_OK : peri_tensor_new(c->device, PERI_I64, 1, &n, &t->scratch);
}

static peri_status read_rows(peri_collision *c, table *t)
{
    for (int32_t kind = 0; kind < BUCKET; kind++)
        if (has_state(c, kind)) {
            const int64_t shape[] = {c->rows, 1};
            PERI_TRY(peri_tensor_new(c->device, kind == METADATA ? PERI_I32 : PERI_I64, kind < IDENTITIES ? 1 : 2,
                                     shape, &t->state[kind]));
        }
    PERI_TRY(make_scratch(c, t));
    peri_k_collision_state_args args = state_args(c, t);
    if (peri__collision_hash(c)) return PERI_LAUNCH(c->device, hash_map_read, &args, c->config.n_buckets, 1);
    return PERI_LAUNCH(c->device, mch_sorted, &args, c->config.n_buckets, 1);
}

peri_status peri_collision_state(peri_collision *c, int32_t i, peri_tensor **out)
{
    PERI_NEED(c);
    PERI_NEED(out);
    int32_t kind = i < 0 ? KINDS : kind_of(c, i);
    if (kind == KINDS)
        return peri__fail(PERI_EINVAL, "peri_collision_state: table '%s': state %d, allowed: 0 to %d", c->name, i,
                          peri_collision_states(c) - 1);
    const int64_t one[] = {1, 1}, room = SEGMENT_ROOM, buckets = c->config.buckets;
    if (kind == BUCKET) return new_state_tensor(c, 2, one, &buckets, out);
    if (kind == ITERATION) return new_state_tensor(c, 1, one, &c->iteration, out);
    if (kind == SEGMENTS) {
        int64_t segments[SEGMENT_ROOM];
        for (int32_t b = 0; b < SEGMENT_ROOM; b++) segments[b] = b <= c->config.buckets ? c->segments[b] : -1;
        return new_state_tensor(c, 1, &room, segments, out);
    }
    table t = {0};
    peri_status status = read_rows(c, &t);
    if (status >= 0) {
        *out = t.state[kind];
        t.state[kind] = NULL;
    }
    table_fini(&t);
    return status;
}

/* -- loading ------------------------------------------------------------------------------------------------------- */

static const char f[] = "peri_collision_load";

/** A state that is loaded: buckets [first, first + n) of the table. */
typedef struct load {
    peri_collision *c;
    int32_t first, n;
    int32_t from, count; /* those of the map's buckets that it has */
    table rows;
    int64_t iteration;   /* -1: not said */
} load;

static int64_t rows_to_load(const load *l) { return l->c->segments[l->first + l->n] - l->c->segments[l->first]; }

static peri_status check_shape(const load *l, int32_t kind, const peri_tensor *t)
{
    char text[128];
    const peri_collision *c = l->c;
    int64_t n = by_row(kind) ? rows_to_load(l) : kind == SEGMENTS ? c->config.buckets + 1 : 1;
    int32_t dtype = kind == METADATA ? PERI_I32 : PERI_I64;
    bool shaped = t->ndim == 1 || (t->ndim == 2 && t->shape[1] == 1);
    if (t->dtype == dtype && shaped && (kind == SEGMENTS ? t->shape[0] >= n : t->shape[0] == n)) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: table '%s': %s is %s, wanted %s [%lld] for buckets [%d, %d)", f, c->name,
                      names[kind], peri__tensor_text(t, text, sizeof text), peri_dtype_name(dtype), (long long)n,
                      l->first, l->first + l->n);
}

static peri_status check_segments(const load *l, const peri_tensor *t)
{
    const peri_collision *c = l->c;
    int64_t n = t->shape[0], *got = peri__alloc((size_t)peri__max(n, 1) * 8), most = c->config.buckets;
    peri_status status = got ? peri_tensor_read(t, got, n * 8) : PERI_ENOMEM;
    for (int64_t b = 0; b < n && status >= 0; b++) {
        int64_t want = b <= most ? c->segments[b] : -1;
        if (got[b] != want)
            status = peri__fail(PERI_EMISMATCH, "%s: table '%s': segments differ: %s[%lld] is %lld, wanted %lld", f,
                                c->name, names[SEGMENTS], (long long)b, (long long)got[b], (long long)want);
    }
    peri__free(got);
    return status;
}

/** A number of one word that is no part of the rows. */
static peri_status take_word(load *l, int32_t kind, peri_tensor *t)
{
    const peri_collision *c = l->c;
    int64_t value;
    PERI_TRY(peri_tensor_read(t, &value, 8));
    if (kind == BUCKET && value != c->config.buckets)
        return peri__fail(PERI_EMISMATCH, "%s: table '%s': %lld buckets, wanted %d", f, c->name, (long long)value,
                          c->config.buckets);
    if (kind == ITERATION && (value < 0 || value > PERI_COLLISION_MOST_ITERATION))
        return peri__fail(PERI_EINVAL, "%s: table '%s': %s is %lld, allowed: 0 to %lld", f, c->name, names[kind],
                          (long long)value, (long long)PERI_COLLISION_MOST_ITERATION);
    if (kind == ITERATION) l->iteration = value;
    return PERI_OK;
}

static peri_status load_state_tensor(load *l, const char *name, peri_tensor *t)
{
    const peri_collision *c = l->c;
    int32_t kind = 0;
    while (kind < KINDS && (!has_state(c, kind) || strcmp(names[kind], name))) kind++;
    if (kind == KINDS) return peri__fail(PERI_EINVAL, "%s: table '%s' has no state '%s'", f, c->name, name);
    PERI_TRY(check_shape(l, kind, t));
    if (kind == SEGMENTS) return check_segments(l, t);
    if (!by_row(kind)) return take_word(l, kind, t);
    peri_tensor *here;
    PERI_TRY(peri_tensor_to(t, t->dtype, c->device, &here));
    peri_status status = peri_tensor_contiguous(here, &l->rows.state[kind]);
    peri_tensor_release(here);
    return status;
}

peri_status peri_collision_words_check(peri_collision *c, int32_t n, const char *const *given,
                                       peri_tensor *const *tensors, int64_t *iteration)
{
    PERI_NEED(c);
    PERI_NEED(iteration);
    load l = {.c = c, .first = c->config.first_bucket, .n = c->config.n_buckets, .iteration = -1};
    PERI_TRY(peri__check_list("peri_collision_words_check", "the names", given, n));
    PERI_TRY(peri__check_list("peri_collision_words_check", "the states", tensors, n));
    for (int32_t kind = BUCKET; kind < KINDS; kind++) {
        int32_t found = 0;
        for (int32_t i = 0; i < n; i++) found += !strcmp(given[i], names[kind]);
        if (required(c, kind) && !found)
            return peri__fail(PERI_EINVAL, "%s: table '%s': state %s is missing", f, c->name, names[kind]);
    }
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < n && status >= 0; i++) status = load_state_tensor(&l, given[i], tensors[i]);
    table_fini(&l.rows);
    *iteration = l.iteration;
    return status;
}

static peri_status load_state_tensors(load *l, int32_t n, const char *const *given, peri_tensor *const *tensors)
{
    const peri_collision *c = l->c;
    for (int32_t kind = 0; kind < KINDS; kind++) {
        int32_t found = 0;
        for (int32_t i = 0; i < n; i++) found += !strcmp(given[i], names[kind]);
        if (required(c, kind) && !found)
            return peri__fail(PERI_EINVAL, "%s: table '%s': state %s is missing", f, c->name, names[kind]);
        if (found > 1)
            return peri__fail(PERI_EINVAL, "%s: table '%s': state %s is given twice", f, c->name, names[kind]);
    }
    for (int32_t i = 0; i < n; i++) PERI_TRY(load_state_tensor(l, given[i], tensors[i]));
    return PERI_OK;
}

static const char *const faults[] = {
    [PERI_COLLISION_ORDER] = "ids are not ascending",
    [PERI_COLLISION_TWICE] = "it has two rows",
    [PERI_COLLISION_STRAY] = "it belongs to another bucket",
    [PERI_COLLISION_ROW_OUT] = "the row is another bucket's, or another id's too",
    [PERI_COLLISION_LAST] = "the bucket's last row is nobody's, and stands last",
    [PERI_COLLISION_FAR] = "the row is further from the id's home than max_probe"};

/** What is wrong with bucket @b of the map, in words. */
static peri_status fault_of(const load *l, int32_t b, const int64_t *found)
{
    const peri_collision *c = l->c;
    const char *what = "";
    char number[128];
    int64_t fault = found[PERI_COLLISION_FAULT], id = found[PERI_COLLISION_FAULT_ID],
            row = found[PERI_COLLISION_FAULT_ROW];
    int64_t least = 0, most = l->iteration;
    int32_t bucket = c->config.first_bucket + b, kind = LAST;
    switch (fault) {
    case PERI_COLLISION_COUNT:
        kind = COUNTS;
        most = peri_k_most_count(row == c->segments[bucket + 1] - 1);
        break;
    case PERI_COLLISION_SEEN: what = ", the state's iteration"; break;
    case PERI_COLLISION_EXPIRY:
        kind = METADATA;
        least = -1;
        most = INT32_MAX;
        break;
    default: kind = KINDS; break;
    }
    if (kind < KINDS) {
        snprintf(number, sizeof number, "%s is %lld, allowed: %lld to %lld%s", names[kind],
                 (long long)found[PERI_COLLISION_FAULT_VALUE], (long long)least, (long long)most, what);
        what = number;
    } else what = faults[fault];
    if (kind < KINDS && id == (peri__collision_hash(c) ? -1 : INT64_MAX))
        return peri__fail(PERI_EINVAL, "%s: table '%s', bucket %d: row %lld, without an id: %s", f, c->name, bucket,
                          (long long)row, what);
    return peri__fail(PERI_EINVAL, "%s: table '%s', bucket %d: id %lld, row %lld: %s", f, c->name, bucket,
                      (long long)id, (long long)row, what);
}

/** Read what the kernel found about each bucket. *hole: looks must not end at free rows. */
static peri_status check_report(const load *l, peri_tensor *report, bool *hole)
{
    int64_t bytes = peri__numel(report) * 8, *r = peri__alloc((size_t)bytes);
    peri_status status = r ? peri_tensor_read(report, r, bytes) : PERI_ENOMEM;
    for (int32_t b = l->from; b < l->from + l->count && status >= 0; b++) {
        const int64_t *found = r + b * PERI_COLLISION_FAULT_WORDS;
        int64_t fault = found[PERI_COLLISION_FAULT];
        if (fault == PERI_COLLISION_HOLE) *hole = true;
        else if (fault != PERI_COLLISION_SOUND) status = fault_of(l, b, found);
    }
    peri__free(r);
    return status;
}

static peri_status validate_loaded(load *l, const peri_k_collision_state_args *args, bool *hole)
{
    peri_collision *c = l->c;
    peri_tensor *report;
    int64_t n = c->config.n_buckets * (int64_t)PERI_COLLISION_FAULT_WORDS;
    PERI_TRY(peri_tensor_new(c->device, PERI_I64, 1, &n, &report));
    peri_k_collision_state_args own = *args;
    own.report = peri__data(report);
    peri_status status = peri__collision_hash(c) ? PERI_LAUNCH(c->device, hash_map_validate, &own, l->count, 1)
                                                 : PERI_LAUNCH(c->device, mch_validate, &own, l->count, 1);
    if (status >= 0) status = check_report(l, report, hole);
    peri_tensor_release(report);
    return status;
}

static peri_status install_loaded(load *l)
{
    peri_collision *c = l->c;
    bool hole = false;
    PERI_TRY(make_scratch(c, &l->rows));
    peri_k_collision_state_args args = state_args(c, &l->rows);
    args.from = l->from;
    args.state_row = c->segments[l->first] - c->first_row;
    args.iteration = l->iteration;
    PERI_TRY(validate_loaded(l, &args, &hole));
    PERI_TRY(peri__collision_reset(c, l->from, l->count, false));
    PERI_TRY(peri__collision_hash(c) ? PERI_LAUNCH(c->device, hash_map_load, &args, l->count, 1)
                                     : PERI_LAUNCH(c->device, mch_load, &args, l->count, 1));
    c->map.full = hole || (c->map.full && l->count < c->config.n_buckets);
    return PERI_OK;
}

peri_status peri__collision_loaded(peri_collision *c, int64_t iteration)
{
    peri__collision_unlearn(c);
    if (iteration >= 0) c->iteration = iteration;
    c->window = c->iteration;
    c->recorded = 0;
    c->logged = 0;
    c->report_logged = -1;
    PERI_TRY(peri__collision_set(c, PERI_COLLISION_LOGGED, 0));
    return peri__collision_report(c);
}

peri_status peri_collision_load(peri_collision *c, int32_t first_bucket, int32_t n_buckets, int32_t n,
                                const char *const *given, peri_tensor *const *tensors)
{
    PERI_NEED(c);
    const peri_collision_config *a = &c->config;
    if (first_bucket < 0 || n_buckets < 1 || n_buckets > a->buckets - first_bucket)
        return peri__fail(PERI_EINVAL, "%s: table '%s': buckets [%d, %lld), allowed: some of [0, %d)", f, c->name,
                          first_bucket, (long long)first_bucket + n_buckets, a->buckets);
    if (n < 0) return peri__fail(PERI_EINVAL, "%s: table '%s': %d states, allowed: 0 and more", f, c->name, n);
    PERI_TRY(peri__check_list(f, "the names", given, n));
    PERI_TRY(peri__check_list(f, "the states", tensors, n));
    int32_t from = (int32_t)peri__max(first_bucket, a->first_bucket);
    int32_t past = (int32_t)peri__min(first_bucket + n_buckets, a->first_bucket + a->n_buckets);
    if (from >= past) return PERI_OK;
    load l = {.c = c,
              .first = first_bucket,
              .n = n_buckets,
              .from = from - a->first_bucket,
              .count = past - from,
              .iteration = -1};
    peri_status status = load_state_tensors(&l, n, given, tensors);
    if (status >= 0) status = install_loaded(&l);
    if (status >= 0) status = peri__collision_loaded(c, l.iteration);
    table_fini(&l.rows);
    return status;
}
