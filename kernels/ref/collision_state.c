/* SPDX-License-Identifier: Apache-2.0
 *
 * collision_state.c: what a map has learned, written out and read back.
 */

static void ref_collision_changed(const void *args, int64_t begin, int64_t end)
{
    const peri_k_collision_changed_args *a = args;
    const peri_k_collision_map *m = &a->map;
    int64_t at = 0;
    for (int64_t b = 0; b < begin; b++) at += a->n_before[b];
    for (int64_t b = begin; b < end; b++) {
        int64_t *list = m->changed + m->bucket[b].first_row, n = a->n_before[b];
        /* The list is as long as the bucket has rows at most: where it is long, going through the flags is less work
         * than sorting. */
        if (n < m->bucket[b].rows / 64) {
            for (int64_t i = 1; i < n; i++)
                for (int64_t j = i, row = list[i]; j > 0 && list[j - 1] > row; j--) {
                    list[j] = list[j - 1];
                    list[j - 1] = row;
                }
            for (int64_t i = 0; i < n; i++) {
                a->out[at++] = list[i];
                m->is_changed[list[i]] = 0;
            }
        } else {
            for (int64_t row = m->bucket[b].first_row, left = n; left > 0; row++) {
                if (!m->is_changed[row]) continue;
                a->out[at++] = row;
                m->is_changed[row] = 0;
                left--;
            }
        }
        m->n_changed[b] = 0;
        ref_head_add(&m->head[PERI_COLLISION_CHANGED], -n);
    }
}

static void ref_collision_reset(const void *args, int64_t begin, int64_t end)
{
    const peri_k_collision_state_args *a = args;
    const peri_k_collision_map *m = &a->map;
    for (int64_t k = a->from + begin; k < a->from + end; k++) {
        const peri_k_collision_bucket *b = &m->bucket[k];
        int64_t occupied = 0;
        for (int64_t row = b->first_row; row < b->first_row + b->rows; row++) {
            m->is_changed[row] = 0;
            if (m->rows) {
                occupied += !a->blank && m->rows[row].id != -1;
                if (!a->rows_stay) m->rows[row] = (peri_k_hash_row){-1, -1, 0};
                continue;
            }
            occupied += !a->blank && m->ids[row] != INT64_MAX;
            if (a->rows_stay) continue;
            m->ids[row] = INT64_MAX;
            if (m->counts) m->counts[row] = 0;
            if (m->last) m->last[row] = 0;
        }
        for (int64_t s = b->first_line * PERI_MCH_LINE; s < (b->first_line + b->lines) * PERI_MCH_LINE; s++)
            m->slots[s] = (peri_k_mch_slot){INT64_MAX, UINT32_MAX, 0};
        ref_head_add(&m->head[PERI_COLLISION_OCCUPIED], -occupied);
        if (!a->blank) ref_head_add(&m->head[PERI_COLLISION_CHANGED], -m->n_changed[k]);
        m->n_changed[k] = 0;
    }
}

static void ref_report_number(const peri_k_collision_state_args *a, int64_t b, int64_t fault, int64_t id, int64_t row,
                              int64_t value)
{
    int64_t *report = a->report + b * PERI_COLLISION_FAULT_WORDS;
    report[PERI_COLLISION_FAULT] = fault;
    report[PERI_COLLISION_FAULT_ID] = id;
    report[PERI_COLLISION_FAULT_ROW] = row;
    report[PERI_COLLISION_FAULT_VALUE] = value;
}

static void ref_report_fault(const peri_k_collision_state_args *a, int64_t b, int64_t fault, int64_t id, int64_t row)
{
    ref_report_number(a, b, fault, id, row, 0);
}

/** Whether @id belongs to bucket @b of the map. */
static bool ref_at_home(const peri_k_collision_map *m, int64_t id, int64_t b)
{
    return peri_k_bucket(id, m->spread, m->buckets, m->block) == m->first_bucket + b;
}

/* -- MCH ----------------------------------------------------------------------------------------------------------- */

static void ref_mch_sorted(const void *args, int64_t begin, int64_t end)
{
    const peri_k_collision_state_args *a = args;
    const peri_k_collision_map *m = &a->map;
    for (int64_t k = a->from + begin; k < a->from + end; k++) {
        const peri_k_collision_bucket *b = &m->bucket[k];
        peri_k_collision_record *r = a->scratch + b->first_row;
        for (int64_t i = 0; i < b->rows; i++) /* that of the last row stays last: its row is the greatest */
            r[i] =
                (peri_k_collision_record){{ref_sortable(m->ids[b->first_row + i]), (uint64_t)(b->first_row + i), 0, 0}};
        ref_record_sort(r, b->rows);
        for (int64_t i = 0; i < b->rows; i++) {
            int64_t row = (int64_t)r[i].word[1], to = b->first_row + i - a->state_row;
            a->sorted[to] = m->ids[row];
            a->mapping[to] = a->first_row + row;
            if (m->counts) a->counts[to] = m->counts[row];
            if (m->last) a->last[to] = m->last[row];
        }
    }
}

/** Report the first fault that the stored state of bucket @k has, or that it has none. */
static void ref_mch_validate_bucket(const peri_k_collision_state_args *a, int64_t k)
{
    const peri_k_collision_map *m = &a->map;
    const peri_k_collision_bucket *b = &m->bucket[k];
    const int64_t *ids = a->sorted + b->first_row - a->state_row, *mapping = a->mapping + b->first_row - a->state_row;
    uint8_t *seen = (uint8_t *)(a->scratch + b->first_row);
    memset(seen, 0, (size_t)b->rows);
    ref_report_fault(a, k, PERI_COLLISION_SOUND, 0, 0);
    for (int64_t i = 0; i < b->rows; i++) {
        int64_t id = ids[i], row = mapping[i] - a->first_row - b->first_row, value;
        bool last = i == b->rows - 1;
        if (row < 0 || row >= b->rows || seen[row])
            return ref_report_fault(a, k, PERI_COLLISION_ROW_OUT, id, mapping[i]);
        seen[row] = 1;
        if (last != (row == b->rows - 1) || (last && id != INT64_MAX))
            return ref_report_fault(a, k, PERI_COLLISION_LAST, id, mapping[i]);
        if (i > 0 && id < ids[i - 1]) return ref_report_fault(a, k, PERI_COLLISION_ORDER, id, mapping[i]);
        int64_t fault = peri_k_mch_numbers(a, b->first_row - a->state_row + i, last, &value);
        if (fault != PERI_COLLISION_SOUND) return ref_report_number(a, k, fault, id, mapping[i], value);
        if (id == INT64_MAX) continue;
        if (i > 0 && id == ids[i - 1]) return ref_report_fault(a, k, PERI_COLLISION_TWICE, id, mapping[i]);
        if (!ref_at_home(m, id, k)) return ref_report_fault(a, k, PERI_COLLISION_STRAY, id, mapping[i]);
    }
}

static void ref_mch_validate(const void *args, int64_t begin, int64_t end)
{
    const peri_k_collision_state_args *a = args;
    for (int64_t k = a->from + begin; k < a->from + end; k++) ref_mch_validate_bucket(a, k);
}

static void ref_mch_load(const void *args, int64_t begin, int64_t end)
{
    const peri_k_collision_state_args *a = args;
    const peri_k_collision_map *m = &a->map;
    for (int64_t k = a->from + begin; k < a->from + end; k++) {
        const peri_k_collision_bucket *b = &m->bucket[k];
        int64_t occupied = 0;
        for (int64_t i = 0; i < b->rows; i++) {
            int64_t from = b->first_row + i - a->state_row, row = a->mapping ? a->mapping[from] - a->first_row : from;
            occupied += a->sorted[from] != INT64_MAX;
            m->ids[row] = a->sorted[from];
            if (m->counts) m->counts[row] = a->counts[from];
            if (m->last) m->last[row] = a->last[from];
            if (m->ids[row] != INT64_MAX) ref_mch_put(m, b, m->ids[row], row);
        }
        ref_head_add(&m->head[PERI_COLLISION_OCCUPIED], occupied);
    }
}

/* -- hash maps ----------------------------------------------------------------------------------------------------- */

static void ref_hash_map_read(const void *args, int64_t begin, int64_t end)
{
    const peri_k_collision_state_args *a = args;
    for (int64_t k = a->from + begin; k < a->from + end; k++) {
        const peri_k_collision_bucket *b = &a->map.bucket[k];
        for (int64_t row = b->first_row; row < b->first_row + b->rows; row++) {
            a->sorted[row - a->state_row] = a->map.rows[row].id;
            if (a->expiries) a->expiries[row - a->state_row] = a->map.rows[row].expiry;
        }
    }
}

/** How often @id stands within reach of its home, in the bucket's identities @ids. *hole: a free row comes before the
 *  first. */
static int64_t ref_times_found(const peri_k_collision_map *m, const peri_k_collision_bucket *b, const int64_t *ids,
                               int64_t id, bool *hole)
{
    int64_t most = m->max_probe < b->usable ? m->max_probe : b->usable, at = ref_hash_home(b, id), times = 0;
    *hole = false;
    for (int64_t seen = 0; seen < most; seen++, at = at + 1 < b->usable ? at + 1 : 0) {
        times += ids[at] == id;
        *hole = *hole || (!times && ids[at] == -1);
    }
    return times;
}

/** Report the first fault that the stored state of bucket @k has, or that it has none. */
static void ref_hash_validate_bucket(const peri_k_collision_state_args *a, int64_t k)
{
    const peri_k_collision_map *m = &a->map;
    const peri_k_collision_bucket *b = &m->bucket[k];
    const int64_t *ids = a->sorted + b->first_row - a->state_row;
    ref_report_fault(a, k, PERI_COLLISION_SOUND, 0, 0);
    for (int64_t i = 0; i < b->rows; i++) {
        int64_t row = a->first_row + b->first_row + i, place = b->first_row - a->state_row + i;
        bool hole;
        if (!peri_k_hash_expiry(a, place))
            return ref_report_number(a, k, PERI_COLLISION_EXPIRY, ids[i], row, a->expiries[place]);
        if (ids[i] == -1) continue;
        if (i >= b->usable) return ref_report_fault(a, k, PERI_COLLISION_LAST, ids[i], row);
        if (!ref_at_home(m, ids[i], k)) return ref_report_fault(a, k, PERI_COLLISION_STRAY, ids[i], row);
        int64_t reach = (i - ref_hash_home(b, ids[i]) + b->usable) % b->usable,
                times = ref_times_found(m, b, ids, ids[i], &hole);
        if (reach >= m->max_probe) return ref_report_fault(a, k, PERI_COLLISION_FAR, ids[i], row);
        if (times > 1) return ref_report_fault(a, k, PERI_COLLISION_TWICE, ids[i], row);
        if (hole) ref_report_fault(a, k, PERI_COLLISION_HOLE, ids[i], row);
    }
}

static void ref_hash_map_validate(const void *args, int64_t begin, int64_t end)
{
    const peri_k_collision_state_args *a = args;
    for (int64_t k = a->from + begin; k < a->from + end; k++) ref_hash_validate_bucket(a, k);
}

static void ref_hash_map_load(const void *args, int64_t begin, int64_t end)
{
    const peri_k_collision_state_args *a = args;
    for (int64_t k = a->from + begin; k < a->from + end; k++) {
        const peri_k_collision_bucket *b = &a->map.bucket[k];
        int64_t occupied = 0;
        for (int64_t row = b->first_row; row < b->first_row + b->rows; row++) {
            int64_t id = a->sorted[row - a->state_row];
            occupied += id != -1;
            a->map.rows[row] = (peri_k_hash_row){id, a->expiries ? a->expiries[row - a->state_row] : -1, 0};
        }
        ref_head_add(&a->map.head[PERI_COLLISION_OCCUPIED], occupied);
    }
}
