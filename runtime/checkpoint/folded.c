/* SPDX-License-Identifier: Apache-2.0
 *
 * folded.c: manifests of which little is in memory, and the rest is read again when it is wanted. Of a chain of many
 * increments only the last one's manifest is there as a whole: the others are asked for one tensor after the other.
 *
 *     text     {"format":..., "tensors":[{"name":"a", ...}, {"name":"b", ...}, ...]}
 *     places                             at 190, 120 bytes   at 311, 118 bytes       in the order of the names' hashes
 */
#include "manifest.h"
#include "names.h"

#include <stdio.h>
#include <stdlib.h>

static int by_hash(const void *a, const void *b)
{
    const peri__tensor_place *x = a, *y = b;
    if (x->hash != y->hash) return x->hash < y->hash ? -1 : 1;
    return x->at < y->at ? -1 : x->at > y->at;
}

static void fold_tensors(peri__manifest *m)
{
    const char *last = m->n_files ? m->text + m->files[m->n_files - 1].name : NULL;
    m->n_text = last ? last - m->text + (int64_t)strlen(last) + 1 : 0;
    m->n_numbers = m->n_entries = m->n_pieces = 0;
}

peri_status peri__manifest_fold(peri__manifest *m)
{
    peri__manifest kept = {.increment = m->increment};
    memcpy(kept.digest, m->digest, sizeof m->digest);
    memcpy(kept.parent, m->parent, sizeof m->parent);
    memcpy(kept.same_as, m->same_as, sizeof m->same_as);
    for (int64_t f = 0; f < m->n_files; f++) {
        int32_t index;
        peri_status status = peri__manifest_file(&kept, m->text + m->files[f].name, m->files[f].bytes, &index);
        if (status < 0) return peri__manifest_fini(&kept), status;
        kept.files[index].header = m->files[f].header;
        kept.files[index].checksum = m->files[f].checksum;
    }
    const size_t bytes = (size_t)peri__max(m->n_places, 1) * sizeof *m->places;
    peri__tensor_place *places = peri__realloc(m->places, bytes); /* as many bytes as are wanted */
    if (!places) return peri__manifest_fini(&kept), PERI_ENOMEM;
    kept.places = places;
    kept.n_places = kept.places_room = m->n_places;
    m->places = NULL;
    if (kept.n_places > 1) qsort(places, (size_t)kept.n_places, sizeof *places, by_hash);
    peri__manifest_fini(m);
    *m = kept;
    return PERI_OK;
}

/** Append what the text says of tensor @name. */
static peri_status add_named(peri__manifest *m, const char *name, peri__get *get, void *context, const char *what)
{
    const uint32_t hash = (uint32_t)peri__hash_text(name);
    int64_t low = 0, high = m->n_places;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (m->places[middle].hash < hash) low = middle + 1;
        else high = middle;
    }
    for (; low < m->n_places && m->places[low].hash == hash; low++) {
        const peri__tensor_place place = m->places[low];
        const int64_t entries = m->n_entries, pieces = m->n_pieces;
        char *text = peri__alloc((size_t)place.bytes);
        if (!text) return PERI_ENOMEM;
        peri_status status = get(context, text, place.bytes, place.at);
        if (status >= 0) status = peri__manifest_parse_tensor(m, text, place.bytes, what);
        peri__free(text);
        if (status < 0) return status;
        if (strcmp(peri__entry_name(m, &m->entries[entries]), name) != 0) /* another name of this hash */
            m->n_entries = entries, m->n_pieces = pieces;
    }
    return PERI_OK;
}

/** Append the lists of rows that the pieces name, each once. */
static peri_status add_lists(peri__manifest *m, const char *name, peri__get *get, void *context, const char *what)
{
    peri__names seen = {0}; /* by name, the first entry of it */
    peri_status status = peri__names_add(&seen, name, 0);
    for (int64_t k = 0; status >= 0 && k < m->n_pieces; k++) {
        char list[PERI__NAME_MOST + 1];
        if (!m->pieces[k].rows) continue;
        snprintf(list, sizeof list, "%s", peri__manifest_text(m, m->pieces[k].rows - 1));
        bool known = false;
        for (int64_t at = -1, i; !known && (i = peri__names_next(&seen, list, &at)) >= 0;)
            known = strcmp(peri__entry_name(m, &m->entries[i]), list) == 0;
        if (known) continue;
        const int64_t entries = m->n_entries;
        status = add_named(m, list, get, context, what);
        if (m->n_entries == entries) break; /* it is not there */
        if (status >= 0) status = peri__names_add(&seen, list, entries);
    }
    peri__names_free(&seen);
    return status;
}

peri_status peri__manifest_unfold(peri__manifest *m, const char *name, peri__get *get, void *context, const char *what)
{
    if (peri__entry_named(m, name)) return PERI_OK;
    fold_tensors(m);
    peri_status status = add_named(m, name, get, context, what);
    if (status >= 0 && m->n_entries) status = add_lists(m, name, get, context, what);
    if (status >= 0) status = peri__manifest_settle(m, what);
    if (status < 0) fold_tensors(m);
    return status;
}
