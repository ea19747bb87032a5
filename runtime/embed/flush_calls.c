/* SPDX-License-Identifier: Apache-2.0
 *
 * flush_calls.c: flushes of table batches and counts of their caches, wherever the rows are.
 */
#include "embed_internal.h"

peri_status peri_tbe_flush_info(const peri_tbe *tbe, peri_flush_info *out)
{
    PERI_NEED(tbe);
    PERI_NEED(out);
    *out = (peri_flush_info){.path = ""};
    if (tbe->store->flush_info) tbe->store->flush_info(tbe, out);
    return PERI_OK;
}

peri_status peri_tbe_flush_prepare(peri_tbe *tbe)
{
    PERI_NEED(tbe);
    if (!tbe->store->flush_prepare) return PERI_OK;
    PERI_TRY(peri__tbe_enter(tbe, true));
    return peri__tbe_leave(tbe, true, tbe->store->flush_prepare(tbe));
}

peri_status peri_tbe_flush_commit(peri_tbe *tbe, int64_t number, uint64_t stamp)
{
    PERI_NEED(tbe);
    if (!tbe->store->flush_commit) return PERI_OK;
    if (number < 1 || stamp == 0)
        return peri__fail(
            PERI_EINVAL,
            "peri_tbe_flush_commit: flush %lld with stamp %llu, allowed: 1 or more, and a stamp other than 0",
            (long long)number, (unsigned long long)stamp);
    PERI_TRY(peri__tbe_enter(tbe, true));
    return peri__tbe_leave(tbe, true, tbe->store->flush_commit(tbe, number, stamp));
}

peri_status peri_tbe_flush(peri_tbe *tbe)
{
    PERI_NEED(tbe);
    peri_flush_info info;
    PERI_TRY(peri_tbe_flush_prepare(tbe));
    PERI_TRY(peri_tbe_flush_info(tbe, &info));
    if (info.files && !info.changed && info.number) return PERI_OK;
    return peri_tbe_flush_commit(tbe, info.number + 1, peri_flush_stamp());
}

peri_status peri_tbe_table_file(const peri_tbe *tbe, int64_t table, peri_table_file *out)
{
    PERI_NEED(tbe);
    PERI_NEED(out);
    PERI_TRY(peri__tbe_check_table("peri_tbe_table_file", tbe, table));
    *out = (peri_table_file){0};
    if (tbe->store->table_file) tbe->store->table_file(tbe, table, out);
    return PERI_OK;
}

peri_status peri_tbe_ids_mark_set(peri_tbe *tbe, int64_t table, const peri_ids_mark *mark)
{
    PERI_NEED(tbe);
    PERI_NEED(mark);
    PERI_TRY(peri__tbe_check_table("peri_tbe_ids_mark_set", tbe, table));
    if (!tbe->tables[table].config.raw_ids || mark->sum == 0)
        return peri__fail(PERI_EINVAL,
                          "peri_tbe_ids_mark_set: table '%s' %s raw_ids, and sum is %llu; allowed: with raw_ids, not 0",
                          tbe->tables[table].name, tbe->tables[table].config.raw_ids ? "has" : "is without",
                          (unsigned long long)mark->sum);
    if (tbe->store->ids_mark) tbe->store->ids_mark(tbe, table, mark);
    return PERI_OK;
}

const char *peri_tbe_cache_io(const peri_tbe *tbe) { return tbe && tbe->store->io ? tbe->store->io(tbe) : NULL; }

peri_status peri_tbe_cache_statistics(peri_tbe *tbe, int64_t table, peri_tbe_cache_stats *out)
{
    PERI_NEED(tbe);
    PERI_NEED(out);
    if (!tbe->store->cache_statistics)
        return peri__fail(PERI_EUNSUPPORTED, "peri_tbe_cache_statistics: these tables are in %s", tbe->store->name);
    if (table < -1 || table >= tbe->n_tables)
        return peri__fail(PERI_ERANGE, "peri_tbe_cache_statistics: table %lld, allowed: 0..%lld, or -1 for all",
                          (long long)table, (long long)tbe->n_tables - 1);
    PERI_TRY(peri__tbe_enter(tbe, true));
    peri_tbe_cache_stats now;
    tbe->store->cache_statistics(tbe, table, &now);
    PERI_TRY(peri__tbe_leave(tbe, true, PERI_OK));
    return PERI_GIVE(peri_tbe_cache_stats, out, &now);
}
