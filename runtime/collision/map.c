/* SPDX-License-Identifier: Apache-2.0
 *
 * map.c: making a map: what its configuration may say, and the memory of its device.
 */
#include "collision_internal.h"

#include <math.h>

int32_t peri_collision_buckets(int64_t rows)
{
    int32_t buckets = 1;
    while (buckets < 64 && 2 * buckets <= rows / 64) buckets *= 2;
    return buckets;
}

void peri_collision_segments(int64_t rows, int32_t buckets, int64_t *out)
{
    if (!out || buckets < 1) return;
    for (int32_t b = 0; b <= buckets; b++) out[b] = rows / buckets * b + rows % buckets * b / buckets;
}

int64_t peri__collision_block(int32_t buckets, int64_t input_hash_size)
{
    return input_hash_size > 0 ? (input_hash_size - 1) / buckets + 1 : 1;
}

int64_t peri_collision_bucket(int64_t id, int32_t spread, int32_t buckets, int64_t input_hash_size)
{
    return peri_k_bucket(id, spread, buckets, peri__collision_block(buckets, input_hash_size));
}

int64_t peri_collision_home(int64_t id, int64_t rows)
{
    return rows > 0 ? (int64_t)(peri_k_murmur((uint64_t)id, 0, 0) % (uint64_t)rows) : -1;
}

/* -- what a configuration may say ---------------------------------------------------------------------------------- */

static const char f[] = "peri_collision_new";

static peri_status check_range(const peri_collision_config *a, const char *what, int64_t value, int64_t least,
                               int64_t most)
{
    if (value >= least && value <= most) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: table '%s': %s %lld, allowed: %lld to %lld", f, a->name, what, (long long)value,
                      (long long)least, (long long)most);
}

static peri_status check_segments(const peri_collision_config *a)
{
    for (int32_t b = 0; a->segments && b <= a->buckets; b++) {
        int64_t least = b == 0            ? 0
                        : b == a->buckets ? a->rows
                                          : a->segments[b - 1] + 1,
                most = b == 0 ? 0 : a->rows - (a->buckets - b);
        if (a->segments[b] < least || a->segments[b] > most)
            return peri__fail(PERI_EINVAL,
                              "%s: table '%s': segments[%d] is %lld, wanted rising numbers from 0 to %lld rows", f,
                              a->name, b, (long long)a->segments[b], (long long)a->rows);
    }
    return PERI_OK;
}

static peri_status check_mch(const peri_collision_config *a)
{
    if (a->policy < PERI_FORGET_LFU || a->policy > PERI_FORGET_USER)
        return peri__fail(PERI_EINVAL,
                          "%s: table '%s': policy %d for an MCH map, allowed: LFU, LRU, DISTANCE_LFU, USER", f, a->name,
                          a->policy);
    if (!(a->decay_exponent >= 0) || isinf(a->decay_exponent))
        return peri__fail(PERI_EINVAL, "%s: table '%s': decay_exponent %g, allowed: finite numbers above 0, or 0 for 1",
                          f, a->name, a->decay_exponent);
    PERI_TRY(check_range(a, "eviction_interval", a->eviction_interval, 0, INT32_MAX));
    PERI_TRY(check_range(a, "filter", a->filter, PERI_FILTER_NONE, PERI_FILTER_PROBABILISTIC));
    if (!(a->filter_arg >= 0) || isinf(a->filter_arg) || (a->filter == PERI_FILTER_PROBABILISTIC && a->filter_arg > 1))
        return peri__fail(PERI_EINVAL,
                          "%s: table '%s': filter_arg %g, allowed: finite numbers from 0 on, to 1 for PROBABILISTIC", f,
                          a->name, a->filter_arg);
    return check_range(a, "history_capacity", a->history_capacity, 0, INT64_MAX);
}

/** Times to live are those of a policy that goes by them. */
static peri_status check_ttl(const peri_collision_config *a)
{
    if (a->n_ttl > 0 && !a->ttl) return peri__fail(PERI_EINVAL, "%s: table '%s': ttl is missing", f, a->name);
    if (a->n_ttl != 0 && a->n_ttl != 1 && a->n_ttl != a->n_features)
        return peri__fail(PERI_EINVAL, "%s: table '%s': %d times to live for %d features, allowed: 1 or one a feature",
                          f, a->name, a->n_ttl, a->n_features);
    for (int32_t i = 0; i < a->n_ttl; i++) PERI_TRY(check_range(a, "ttl", a->ttl[i], 0, INT32_MAX));
    if (a->n_ttl > 0 && a->policy != PERI_FORGET_TTL && a->policy != PERI_FORGET_PROBE_LRU)
        return peri__fail(
            PERI_EINVAL,
            "%s: table '%s': times to live, which policy %d does not go by; allowed: with TTL and PROBE_LRU", f,
            a->name, a->policy);
    return PERI_OK;
}

static peri_status check_hash(const peri_collision_config *a)
{
    bool timed = a->policy == PERI_FORGET_TTL || a->policy == PERI_FORGET_PROBE_LRU;
    if (a->policy != PERI_FORGET_NONE && !timed)
        return peri__fail(PERI_EINVAL, "%s: table '%s': policy %d for a HASH map, allowed: NONE, TTL, PROBE_LRU", f,
                          a->name, a->policy);
    if (a->policy == PERI_FORGET_TTL && a->n_ttl == 0)
        return peri__fail(PERI_EINVAL, "%s: table '%s': policy TTL without a time to live", f, a->name);
    return check_range(a, "max_probe", a->max_probe, 0, INT32_MAX);
}

/** @a with its defaults filled in, checked. */
static peri_status check_config(peri_collision_config *a)
{
    if (!a->name) a->name = "";
    PERI_TRY(check_range(a, "rows", a->rows, 1, (int64_t)UINT32_MAX - 1));
    PERI_TRY(check_range(a, "kind", a->kind, PERI_COLLISION_MCH, PERI_COLLISION_HASH));
    if (a->buckets == 0) a->buckets = peri_collision_buckets(a->rows);
    PERI_TRY(check_range(a, "buckets", a->buckets, 1, peri__min(a->rows, PERI_COLLISION_MOST_BUCKETS)));
    PERI_TRY(check_segments(a));
    PERI_TRY(check_range(a, "spread", a->spread, PERI_SPREAD_HASH, PERI_SPREAD_RANGE));
    if (a->spread == PERI_SPREAD_RANGE) PERI_TRY(check_range(a, "input_hash_size", a->input_hash_size, 1, INT64_MAX));
    PERI_TRY(check_range(a, "first_bucket", a->first_bucket, 0, a->buckets - 1));
    if (a->first_bucket == 0 && a->n_buckets == 0) a->n_buckets = a->buckets;
    PERI_TRY(check_range(a, "n_buckets", a->n_buckets, 1, a->buckets - a->first_bucket));
    PERI_TRY(check_range(a, "on_miss", a->on_miss, PERI_MISS_DEFAULT, PERI_MISS_ERROR));
    if (a->on_miss == PERI_MISS_DEFAULT) a->on_miss = a->kind == PERI_COLLISION_HASH ? PERI_MISS_HASH : PERI_MISS_ROW;
    PERI_TRY(check_range(a, "n_features", a->n_features, 0, INT32_MAX));
    if (a->read_only && a->n_features == 0)
        return peri__fail(PERI_EINVAL, "%s: table '%s': read_only without n_features", f, a->name);
    PERI_TRY(check_ttl(a));
    PERI_TRY(a->kind == PERI_COLLISION_HASH ? check_hash(a) : check_mch(a));
    if (a->decay_exponent == 0) a->decay_exponent = 1;
    if (a->eviction_interval == 0) a->eviction_interval = 1;
    if (a->max_probe == 0) a->max_probe = 128;
    return PERI_OK;
}

/* -- making one ---------------------------------------------------------------------------------------------------- */

static void *memory_copy(const void *from, size_t bytes)
{
    void *to = peri__alloc(bytes ? bytes : 1);
    if (to && bytes) memcpy(to, from, bytes);
    return to;
}

/** The map's own copies of what @a points at. */
static peri_status own_config(peri_collision *c, const peri_collision_config *a)
{
    size_t segments = ((size_t)a->buckets + 1) * sizeof *c->segments;
    c->name = peri__strdup(a->name);
    c->segments = peri__alloc(segments);
    c->ttl = memory_copy(a->ttl, (size_t)a->n_ttl * sizeof *c->ttl);
    c->read_only = a->read_only ? memory_copy(a->read_only, (size_t)a->n_features * sizeof *c->read_only) : NULL;
    if (!c->name || !c->segments || !c->ttl || (a->read_only && !c->read_only)) return PERI_ENOMEM;
    if (a->segments) memcpy(c->segments, a->segments, segments);
    else peri_collision_segments(a->rows, a->buckets, c->segments);
    c->config = *a;
    c->config.name = c->name;
    c->config.segments = c->segments;
    c->config.ttl = c->ttl;
    c->config.read_only = c->read_only;
    c->first_row = c->segments[a->first_bucket];
    c->rows = c->segments[a->first_bucket + a->n_buckets] - c->first_row;
    c->any_id = a->n_buckets == a->buckets && a->spread != PERI_SPREAD_RANGE;
    return PERI_OK;
}

/** Whether windows have counts: for scores or for filters. */
static bool counted(const peri_collision_config *a)
{
    return a->policy != PERI_FORGET_LRU || a->filter != PERI_FILTER_NONE;
}

/** Of the @rows of a bucket those that ids may have. */
static int64_t usable(const peri_collision *c, int64_t rows)
{
    return rows - (c->config.kind == PERI_COLLISION_MCH || c->config.on_miss == PERI_MISS_ROW);
}

/** Rows of bucket @i of this map. */
static int64_t bucket_rows(const peri_collision *c, int32_t i)
{
    const int64_t *at = &c->segments[c->config.first_bucket + i];
    return at[1] - at[0];
}

/** Lines of the index of a bucket of MCH: half of the slots stay free. */
static int64_t bucket_lines(const peri_collision *c, int64_t rows)
{
    return c->config.kind == PERI_COLLISION_MCH ? peri__ceil_div(rows, PERI_MCH_LINE / 2) : 0;
}

/** The buckets on the device. */
static peri_status write_buckets(peri_collision *c)
{
    int64_t n = c->config.n_buckets, bytes = n * (int64_t)sizeof(peri_k_collision_bucket), line = 0;
    peri_k_collision_bucket *b = peri__alloc((size_t)bytes);
    if (!b) return PERI_ENOMEM;
    for (int32_t i = 0; i < n; i++) {
        int64_t rows = bucket_rows(c, i);
        b[i] = (peri_k_collision_bucket){.first_row = c->segments[c->config.first_bucket + i] - c->first_row,
                                         .rows = rows,
                                         .usable = usable(c, rows),
                                         .first_line = line,
                                         .lines = bucket_lines(c, rows)};
        b[i].reciprocal = UINT64_MAX / (uint64_t)peri__max(b[i].usable, 1);
        line += b[i].lines;
    }
    peri_status status = peri_tensor_write(c->bucket, b, bytes);
    peri__free(b);
    return status;
}

/** A tensor of a map, and the address of its data in peri_k_collision_map. */
typedef struct part {
    peri_tensor **tensor;
    void *address;
    int32_t dtype;
    int64_t n;
} part;
enum { MOST_PARTS = 9 };

/** The tensors of a map of this configuration into @out; returns how many. */
static int32_t parts_of(peri_collision *c, part *out)
{
    const peri_collision_config *a = &c->config;
    peri_k_collision_map *m = &c->map;
    int64_t rows = c->rows, lines = 0;
    for (int32_t i = 0; i < a->n_buckets; i++) lines += bucket_lines(c, bucket_rows(c, i));
    int32_t n = 0;
    out[n++] = (part){&c->bucket, &m->bucket, PERI_U8, a->n_buckets * (int64_t)sizeof(peri_k_collision_bucket)};
    out[n++] = (part){&c->head, &m->head, PERI_I64, PERI_COLLISION_WORDS};
    out[n++] = (part){&c->changed, &m->changed, PERI_I64, rows};
    out[n++] = (part){&c->n_changed, &m->n_changed, PERI_I64, a->n_buckets};
    out[n++] = (part){&c->is_changed, &m->is_changed, PERI_U8, rows};
    if (peri__collision_hash(c)) {
        out[n++] = (part){&c->hash_rows, &m->rows, PERI_I64, 2 * rows};
        return n;
    }
    out[n++] = (part){&c->slots, &m->slots, PERI_I64, 2 * PERI_MCH_LINE * lines};
    out[n++] = (part){&c->ids, &m->ids, PERI_I64, rows};
    if (a->policy != PERI_FORGET_LRU) out[n++] = (part){&c->counts, &m->counts, PERI_I64, rows};
    if (a->policy != PERI_FORGET_LFU) out[n++] = (part){&c->last, &m->last, PERI_I64, rows};
    return n;
}

static peri_status make_memory(peri_collision *c)
{
    const peri_collision_config *a = &c->config;
    peri_k_collision_map *m = &c->map;
    int64_t head[PERI_COLLISION_WORDS] = {[PERI_COLLISION_BAD] = INT64_MAX};
    part parts[MOST_PARTS];
    int32_t n = parts_of(c, parts);
    for (int32_t i = 0; i < n; i++) {
        PERI_TRY(peri_tensor_new(c->device, parts[i].dtype, 1, &parts[i].n, parts[i].tensor));
        void *data = peri__data(*parts[i].tensor);
        memcpy(parts[i].address, &data, sizeof data);
    }
    PERI_TRY(write_buckets(c));
    PERI_TRY(peri_tensor_write(c->head, head, sizeof head));
    m->buckets = a->buckets;
    m->block = peri__collision_block(a->buckets, a->input_hash_size);
    m->spread = a->spread;
    m->first_bucket = a->first_bucket;
    m->n_buckets = a->n_buckets;
    m->on_miss = a->on_miss;
    m->policy = a->policy;
    m->max_probe = a->max_probe;
    m->counted = counted(a);
    return peri__collision_reset(c, 0, a->n_buckets, true);
}

peri_status peri__collision_reset(peri_collision *c, int32_t from, int32_t n, bool blank)
{
    peri_k_collision_state_args args = {.map = c->map, .from = from, .blank = blank};
    return PERI_LAUNCH(c->device, collision_reset, &args, n, 1);
}

peri_status peri_collision_new(peri_device *device, const peri_collision_config *config, peri_collision **out)
{
    PERI_NEED(device);
    PERI_TAKE(peri_collision_config, config);
    PERI_NEED(out);
    peri_collision_config a = *config;
    PERI_TRY(check_config(&a));
    peri_collision *c = peri__alloc_zero(sizeof *c);
    if (!c) return PERI_ENOMEM;
    peri__refs_init(&c->refs);
    c->device = device;
    c->time = -1;
    peri__object_count(1);
    peri_status status = own_config(c, &a);
    if (status >= 0) status = make_memory(c);
    if (status < 0) peri_collision_release(c);
    else *out = c;
    return status;
}

static void free_config(peri_collision *c)
{
    peri__free(c->name);
    peri__free(c->segments);
    peri__free(c->ttl);
    peri__free(c->read_only);
}

peri_status peri_collision_bytes_of(const peri_collision_config *config, int64_t *out)
{
    PERI_TAKE(peri_collision_config, config);
    PERI_NEED(out);
    peri_collision_config a = *config;
    PERI_TRY(check_config(&a));
    peri_collision c = {0};
    peri_status status = own_config(&c, &a);
    part parts[MOST_PARTS];
    int32_t n = status < 0 ? 0 : parts_of(&c, parts);
    free_config(&c);
    PERI_TRY(status);
    *out = 0;
    for (int32_t i = 0; i < n; i++) *out += parts[i].n * (int64_t)peri_dtype_size(parts[i].dtype);
    return PERI_OK;
}

void peri_collision_retain(peri_collision *c) { if (c) peri__refs_add(&c->refs); }

void peri_collision_release(peri_collision *c)
{
    if (!c || !peri__refs_drop(&c->refs)) return;
    peri_tensor *all[] = {c->bucket,    c->head,    c->slots,     c->ids,        c->counts, c->last,
                          c->hash_rows, c->changed, c->n_changed, c->is_changed, c->log};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) peri_tensor_release(all[i]);
    peri__collision_unlearn(c);
    peri__report_return(c->report);
    free_config(c);
    peri__free(c);
    peri__object_count(-1);
}

int64_t peri_collision_rows(const peri_collision *c) { return c ? c->rows : 0; }
int64_t peri_collision_first_row(const peri_collision *c) { return c ? c->first_row : 0; }

peri_status peri_collision_time_set(peri_collision *c, int64_t now)
{
    PERI_NEED(c);
    if (now < -1 || now > INT32_MAX)
        return peri__fail(PERI_EINVAL,
                          "peri_collision_time_set: table '%s': %lld, allowed: 0 to %d, and -1 for the iteration",
                          c->name, (long long)now, INT32_MAX);
    c->time = now;
    return PERI_OK;
}
