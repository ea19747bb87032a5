/* SPDX-License-Identifier: Apache-2.0
 *
 * out_of_memory.c: what is said when memory is short: whose table or batch it is, and what would take less of the
 * device's memory.
 */
#include "embed_internal.h"

#include <stdio.h>

enum { WAY_OUT_TEXT = 200 };

/** What would leave more of @device's memory free for tables that are placed like these. */
static const char *way_out(peri_device *device, int32_t dtype, bool mapped, bool cached, char out[WAY_OUT_TEXT])
{
    bool host = peri_device_host_access(device), bytes = peri__rows_are_bytes(dtype);
    if (cached)
        snprintf(out, WAY_OUT_TEXT, "a smaller load_factor or a larger reserved_memory makes the caches smaller");
    else if (mapped && bytes)
        snprintf(out, WAY_OUT_TEXT, "that is the host's memory, pinned; compute_kernel quant has rows on the device");
    else if (mapped)
        snprintf(out, WAY_OUT_TEXT,
                 "that is the host's memory, pinned; compute_kernel fused_uvm_caching has rows in a file, with a "
                 "directory in its cache_params");
    else if (host)
        snprintf(out, WAY_OUT_TEXT, "%s",
                 bytes ? "more ranks would share them" : "compute_kernel fused_uvm_caching has rows in a file");
    else if (bytes) snprintf(out, WAY_OUT_TEXT, "compute_kernel quant_uvm has rows in the host's memory");
    else
        snprintf(out, WAY_OUT_TEXT,
                 "compute_kernel fused_uvm has rows in the host's memory, fused_uvm_caching too, with a cache of them "
                 "on the device");
    return out;
}

/** Bytes of table @i in the states that the device holds; @i is n_tables: of all tables. */
static double device_bytes(const peri_tbe *tbe, int64_t i, bool mapped)
{
    peri__state states[PERI__STATES];
    int32_t n = peri__states_of(tbe->dtype, &tbe->optimizer, states);
    double bytes = 0;
    for (int32_t k = 0; k < n; k++) {
        bool rows = peri__has_rows(states[k].geometry);
        int64_t from = i < tbe->n_tables ? peri__state_offset(tbe, &states[k], i) : 0;
        int64_t to = peri__state_offset(tbe, &states[k], i < tbe->n_tables ? i + 1 : i);
        if (rows || !mapped) bytes += (double)(to - from) * (double)peri_dtype_size(states[k].dtype);
    }
    return bytes;
}

peri_status peri__tbe_out_of_memory(const peri_tbe *tbe, const peri_tbe_config *c, peri_status status)
{
    char out[WAY_OUT_TEXT], others[96] = "";
    if (status != PERI_ENOMEM || tbe->n_tables == 0) return status;
    int64_t largest = 0;
    for (int64_t i = 1; i < tbe->n_tables; i++)
        if (device_bytes(tbe, i, c->mapped) > device_bytes(tbe, largest, c->mapped)) largest = i;
    const peri_table_config *t = &tbe->tables[largest].config;
    if (tbe->n_tables > 1)
        snprintf(others, sizeof others, ", the largest of %lld, which take %.0f MB", (long long)tbe->n_tables,
                 device_bytes(tbe, tbe->n_tables, c->mapped) / 1e6);
    return peri__fail(status,
                      "peri_tbe_new: table '%.60s' of %lld x %lld takes %.0f MB with its states%s%s: %.120s; %s",
                      t->name, (long long)t->rows, (long long)t->cols, device_bytes(tbe, largest, c->mapped) / 1e6,
                      c->caches ? " (its cache)" : "", others, peri_error_message(),
                      way_out(tbe->device, tbe->dtype, c->mapped, c->caches, out));
}

peri_status peri__batch_out_of_memory(const peri_tbe_batch *b, peri_status status)
{
    const peri_tbe *tbe = b->tbe;
    const peri_tbe_blocks *l = b->in.blocks;
    char out[WAY_OUT_TEXT], feature[80] = "", others[48] = "";
    if (status != PERI_ENOMEM || tbe->n_tables == 0 || l->n == 0) return status;
    if (strstr(peri_error_message(), "table '")) return status; /* a cache that is too small says so by itself */
    const peri_k_tbe_block *first = &l->block[0];
    if (first->feature >= 0 && first->feature < tbe->n_features)
        snprintf(feature, sizeof feature, ", feature '%.60s'", tbe->features[first->feature]);
    if (l->n > 1) snprintf(others, sizeof others, " and %lld more", (long long)l->n - 1);
    bool mapped = tbe->weight && tbe->weight->storage->mapped;
    double bytes = 0;
    for (int32_t i = 0; i < tbe->n_states; i++)
        if (!tbe->state[i].flat->storage->mapped)
            bytes += (double)peri__numel(tbe->state[i].flat) * (double)peri_dtype_size(tbe->state[i].dtype);
    return peri__fail(status, "a batch of %lld ids, table '%.60s'%s%s: %.120s; the tables take %.0f MB of it%s%s",
                      (long long)peri__numel(b->in.ids), tbe->tables[first->table].name, feature, others,
                      peri_error_message(), bytes / 1e6, mapped ? "" : ": ",
                      mapped ? "" : way_out(tbe->device, tbe->dtype, false, !tbe->store->whole, out));
}
