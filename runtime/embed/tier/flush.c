/* SPDX-License-Identifier: Apache-2.0
 *
 * flush.c: flushes of table batches: rows to the disk, then marks that say of which flush they are. See row_file.h and
 * tier.h.
 */
#include "tier.h"

#include <stdio.h>

/** "flush 3, iteration 21". */
static const char *flush_text(const peri__row_header *h, char text[64])
{
    snprintf(text, 64, "flush %lld, iteration %lld", (long long)h->flush, (long long)h->iteration);
    return text;
}

/** All files must be of the same flush; a new one is of flush 0. A table batch has one iteration. */
peri_status peri__tier_adopt_flush(peri__tier *tier)
{
    const peri__row_file *first = NULL;
    for (int64_t i = 0; i < tier->n_tables; i++) {
        char text[2][64];
        const peri__row_file *f = tier->tables[i].file;
        if (f->temporary) continue;
        if (!first) first = f;
        if (f->header.flush == first->header.flush && f->header.stamp == first->header.stamp) continue;
        return peri__fail(PERI_EMISMATCH,
                          "row files '%.150s' (%s) and '%.150s' (%s%s): they must be of the same flush; restore all "
                          "files of the module "
                          "from one flush, or remove all",
                          first->path, flush_text(&first->header, text[0]), f->path, flush_text(&f->header, text[1]),
                          f->header.flush == first->header.flush ? " of another run" : "");
    }
    if (first) tier->tbe->iteration = first->header.iteration;
    return PERI_OK;
}

void peri__tier_warn_unflushed(const peri__tier *tier, const peri__row_file *f)
{
    if (f->temporary) return;
    if (!f->header.clean)
        peri__log(PERI_LOG_WARN,
                  "row file '%s' is closed without a flush: its rows are of different times, so it will not open "
                  "again; restore it from a "
                  "checkpoint, and flush before the end",
                  f->path);
    else if (tier->dirty)
        peri__log(
            PERI_LOG_WARN,
            "row file '%s' is closed without a flush: it stays at flush %lld, iteration %lld, later updates are lost",
            f->path, (long long)f->header.flush, (long long)f->header.iteration);
}

void peri__tier_flush_info(const peri_tbe *tbe, peri_flush_info *out)
{
    const peri__tier *tier = peri__tier_of(tbe);
    for (int64_t t = 0; t < tier->n_tables; t++) {
        const peri__row_file *f = tier->tables[t].file;
        const peri__row_header *h = &f->header;
        if (f->temporary) continue;
        bool other = out->files && (h->flush != out->number || h->stamp != out->stamp);
        const peri_ids_mark *ids = &tier->tables[t].ids;
        bool remapped = ids->sum != 0 && (ids->sum != h->ids.sum || ids->iteration != h->ids.iteration);
        out->changed = out->changed || other || tier->dirty || f->unsure || !h->clean ||
                       h->iteration != tbe->iteration || remapped;
        if (!out->files++ || h->flush > out->number) {
            out->number = h->flush;
            out->stamp = h->stamp;
            out->iteration = h->iteration;
            out->path = f->path;
        }
    }
}

void peri__tier_table_file(const peri_tbe *tbe, int64_t table, peri_table_file *out)
{
    const peri__row_file *f = peri__tier_of(tbe)->tables[table].file;
    if (f->temporary) return;
    *out = (peri_table_file){
        .path = f->path, .flush = f->header.flush, .iteration = f->header.iteration, .ids = f->header.ids};
}

void peri__tier_ids_mark(peri_tbe *tbe, int64_t table, const peri_ids_mark *mark)
{
    peri__tier_of(tbe)->tables[table].ids = *mark;
}

/** Of rows that a map gives to raw ids somebody has said which map that is. */
static peri_status check_ids(const peri_tbe *tbe)
{
    const peri__tier *tier = peri__tier_of(tbe);
    for (int64_t t = 0; t < tier->n_tables; t++)
        if (tbe->tables[t].config.raw_ids && !tier->tables[t].file->temporary && tier->tables[t].ids.sum == 0)
            return peri__fail(
                PERI_EINVAL,
                "peri_tbe_flush_prepare: table '%s' has raw ids, and nobody has said of which map its rows are "
                "(peri_tbe_ids_mark_set)",
                tbe->tables[t].name);
    return PERI_OK;
}

peri_status peri__tier_flush_prepare(peri_tbe *tbe)
{
    peri__tier *tier = peri__tier_of(tbe);
    PERI_TRY(check_ids(tbe));
    PERI_TRY(peri__tier_wait_writes(tier));
    for (int32_t t = 0; t < tier->n_tables; t++)
        PERI_TRY(peri__tier_write_back(tier, t, 0, tier->tables[t].cache->rows));
    for (int32_t t = 0; t < tier->n_tables; t++) PERI_TRY(peri__row_file_sync(tier->tables[t].file));
    tier->prepared = true;
    return PERI_OK;
}

peri_status peri__tier_flush_commit(peri_tbe *tbe, int64_t number, uint64_t stamp)
{
    peri__tier *tier = peri__tier_of(tbe);
    if (!tier->prepared)
        return peri__fail(
            PERI_EINVAL,
            "peri_tbe_flush_commit: the tables were not prepared (peri_tbe_flush_prepare), or updated since");
    for (int32_t t = 0; t < tier->n_tables; t++)
        PERI_TRY(peri__row_file_mark_clean(tier->tables[t].file, tbe->iteration, number, stamp, &tier->tables[t].ids));
    tier->dirty = false;
    return PERI_OK;
}

uint64_t peri_flush_stamp(void) { return peri__row_stamp(); }
