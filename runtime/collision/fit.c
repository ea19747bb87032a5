/* SPDX-License-Identifier: Apache-2.0
 *
 * fit.c: which ids of a stored map go into some rows of a map of another size, and for HASH which row each gets.
 */
#include "collision_internal.h"

/** Rows of bucket @b that ids can have, the first ones. */
static int64_t usable_of(const peri_collision_fit *a, int64_t b)
{
    return a->segments[b + 1] - a->segments[b] - (a->aside ? 1 : 0);
}

static peri_status check_fit(const char *f, const peri_collision_fit *a)
{
    if (!a->segments || a->buckets < 1)
        return peri__fail(PERI_EINVAL, "%s: %d buckets%s, allowed: 1 or more, and where they begin", f, a->buckets,
                          a->segments ? "" : " and no segments");
    if (a->kind != PERI_COLLISION_MCH && a->kind != PERI_COLLISION_HASH)
        return peri__fail(PERI_EINVAL, "%s: kind %d, allowed: %d and %d", f, a->kind, PERI_COLLISION_MCH,
                          PERI_COLLISION_HASH);
    if (a->low < 0 || a->low > a->high || a->high > a->buckets)
        return peri__fail(PERI_EINVAL, "%s: buckets %lld to %lld, allowed: within 0 to %d", f, (long long)a->low,
                          (long long)a->high, a->buckets);
    return PERI_OK;
}

peri_status peri_collision_fit_pick(const peri_collision_fit *a, const int64_t *ids, int64_t n, int32_t *place,
                                    int32_t *bucket, int64_t *home, peri_collision_picked *out)
{
    peri_collision_picked found = {.size = sizeof found, .lowest = INT64_MAX, .highest = -1};
    PERI_NEED(out);
    PERI_TAKE(peri_collision_fit, a);
    PERI_TRY(check_fit(__func__, a));
    const bool hash = a->kind == PERI_COLLISION_HASH;
    if (n < 0 || (n > 0 && (!ids || !place || !bucket || (hash && !home))))
        return peri__fail(PERI_EINVAL, "peri_collision_fit_pick: %lld ids, and an array is missing", (long long)n);
    const int64_t block = peri__collision_block(a->buckets, a->input_hash_size), none = hash ? -1 : INT64_MAX;
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] == none) continue;
        const int64_t b = peri_k_bucket(ids[i], a->spread, a->buckets, block);
        found.ids++;
        if (b < 0) continue;
        found.lowest = peri__min(found.lowest, b);
        found.highest = peri__max(found.highest, b);
        if (b < a->low || b >= a->high) continue;
        if (hash) {
            const int64_t usable = usable_of(a, b);
            const int64_t row = usable > 0 ? a->segments[b] + peri_collision_home(ids[i], usable) : -1;
            if (row < a->first || row >= a->past) continue;
            home[found.n] = row;
        }
        bucket[found.n] = (int32_t)b;
        place[found.n++] = (int32_t)i;
    }
    return PERI_GIVE(peri_collision_picked, out, &found);
}

/** Whether entry @k is rather kept than what is in row @at of the window: the greater score, of equal ones the smaller
 *  id. */
static bool is_better(const peri_collision_fit *a, int64_t k, int64_t at)
{
    double here, there;
    memcpy(&here, &a->entries[1][k], sizeof here);
    memcpy(&there, &a->rows[1][at], sizeof there);
    return here != there ? here > there : a->entries[0][k] < a->rows[0][at];
}

/** Put entry @k into row @at of the window. What was in the row becomes entry @k, and has to find another one. */
static void exchange_entry(const peri_collision_fit *a, int64_t k, int64_t at)
{
    for (int64_t i = 0; i < a->arrays; i++) {
        const int64_t kept = a->rows[i][at];
        a->rows[i][at] = a->entries[i][k];
        a->entries[i][k] = kept;
    }
}

/** Find a row of bucket @b for entry @k: it probes row after row from @row, which is @reach rows behind its home. Where
 *  it is the better one it takes the row, and the entry that was there goes on from the next; one that has been probing
 *  for too long is dropped. True: the next row to probe is the first one of the next window. */
static bool put_one(const peri_collision_fit *a, int64_t k, int64_t b, int64_t row, int64_t reach)
{
    const int64_t base = a->segments[b], usable = usable_of(a, b), most = peri__min(a->max_probe, usable);
    const int64_t past = peri__min(a->past, base + usable);
    for (; reach < most; row++, reach++) {
        if (row == past) {
            if (a->part) return true;
            row = base;
        }
        const int64_t at = row - a->first;
        const bool free = a->rows[0][at] == -1;
        if (!free && !is_better(a, k, at)) continue;
        exchange_entry(a, k, at);
        if (free) {
            a->filled[b]++;
            return false;
        }
        reach = row - base - peri_collision_home(a->entries[0][k], usable);
        if (reach < 0) reach += usable;
    }
    return false;
}

peri_status peri_collision_fit_put(const peri_collision_fit *a, int64_t from, int64_t n, const int32_t *bucket,
                                   const int64_t *row, int64_t *out)
{
    static const char f[] = "peri_collision_fit_put";
    PERI_NEED(out);
    PERI_TAKE(peri_collision_fit, a);
    PERI_TRY(check_fit(f, a));
    if (a->kind != PERI_COLLISION_HASH || a->arrays < 2 || !a->rows || !a->entries || !a->filled)
        return peri__fail(PERI_EINVAL, "%s: kind %d with %lld arrays, allowed: HASH, with ids and scores first", f,
                          a->kind, (long long)a->arrays);
    if (from < 0 || from > n || (n > 0 && (!bucket || !row)))
        return peri__fail(PERI_EINVAL, "%s: entries %lld to %lld, and an array is missing", f, (long long)from,
                          (long long)n);
    for (; from < n; from++) {
        const int64_t b = bucket[from], usable = b >= a->low && b < a->high ? usable_of(a, b) : 0;
        const int64_t behind = usable + (a->part ? 1 : 0); /* a window may have no other row than the last one */
        if (usable < 1 || row[from] < a->first || row[from] >= a->past || row[from] - a->segments[b] >= behind)
            return peri__fail(PERI_EINVAL, "%s: entry %lld has bucket %lld and row %lld, allowed: rows of the window",
                              f, (long long)from, (long long)b, (long long)row[from]);
        const int64_t reach = row[from] - a->segments[b] - peri_collision_home(a->entries[0][from], usable);
        if (put_one(a, from, b, row[from], reach < 0 ? reach + usable : reach)) break;
    }
    *out = from;
    return PERI_OK;
}
