/* SPDX-License-Identifier: Apache-2.0
 *
 * renamed.c: functions of earlier releases whose names or parameters are others now. Programs that were built then find
 * them in the shared library under the version that they ask for; the linker offers them to no new program, and no
 * header declares them. runtime/gen/contract.lua reads this file: what a release had is here, as it was, or there.
 */
#include <perilune/host.h>
#include <perilune/perilune.h>

/** Function peri_@name of release @release. */
#define KEPT(release, result, name, parameters)                                                                       \
    __asm__(".symver peri__kept_" #name ", peri_" #name "@PERILUNE_" #release);                                       \
    PERI_API result peri__kept_##name parameters;                                                                     \
    result peri__kept_##name parameters

/* -- setters have names that end in _set, and return a status; another function tells the setting ------------------ */

KEPT(0.2, peri_status, stream_set_current, (peri_device *device, peri_stream *stream))
{
    return peri_stream_current_set(device, stream);
}

KEPT(0.2, peri_status, set_float32_matmul_precision, (const char *precision))
{
    return peri_float32_matmul_precision_set(precision);
}

KEPT(0.2, const char *, get_float32_matmul_precision, (void)) { return peri_float32_matmul_precision(); }

KEPT(0.2, bool, grad_enable, (bool on))
{
    const bool before = peri_grad_enabled();
    peri_grad_enabled_set(on);
    return before;
}

KEPT(0.2, bool, ordered_products, (bool on))
{
    const bool before = peri_products_ordered();
    peri_products_ordered_set(on);
    return before;
}

KEPT(0.2, peri_autocast *, autocast_swap, (peri_autocast *region))
{
    peri_autocast *before = peri_autocast_current();
    peri_autocast_current_set(region);
    return before;
}

KEPT(0.2, void, reducer_enable, (peri_reducer *reducer, bool on)) { peri_reducer_enabled_set(reducer, on); }
KEPT(0.2, void, reducer_defer, (peri_reducer *reducer, bool on)) { peri_reducer_deferred_set(reducer, on); }
KEPT(0.2, void, group_fingerprints, (peri_group *group, bool on)) { peri_group_fingerprints_set(group, on); }
KEPT(0.2, void, log_level_set, (int32_t level)) { peri_log_level_set(level); }
KEPT(0.2, void, host_log_set, (void (*log)(void *ctx, int32_t level, const char *text), void *ctx))
{
    peri_host_log_set(log, ctx);
}

KEPT(0.2, peri_status, group_watch, (peri_group *group, bool on)) { return peri_group_watch_set(group, on); }
KEPT(0.2, peri_status, sharded_train, (peri_sharded *module, bool training))
{
    return peri_sharded_training_set(module, training);
}
KEPT(0.2, peri_status, tensor_requires_grad, (peri_tensor *leaf, bool on))
{
    return peri_tensor_requires_grad_set(leaf, on);
}
KEPT(0.2, peri_status, collision_time, (peri_collision *c, int64_t now)) { return peri_collision_time_set(c, now); }
KEPT(0.2, peri_status, sharded_time, (peri_sharded *module, const char *table, int64_t now))
{
    return peri_sharded_time_set(module, table, now);
}

/* -- entries of an array are counted by int32_t -------------------------------------------------------------------- */

/** @n as the functions of today take it; what is too large for them is -1, which they refuse. */
static int32_t count(int64_t n) { return n >= 0 && n <= INT32_MAX ? (int32_t)n : -1; }

KEPT(0.2, peri_status, reducer_new,
     (peri_group *group, peri_tensor *const *params, int64_t n, int64_t bucket_bytes, peri_reducer **out))
{
    return peri_reducer_new(group, params, count(n), bucket_bytes, out);
}

KEPT(0.2, peri_status, tbe_blocks_new,
     (const peri_tbe *tbe, const peri_tbe_block *blocks, int64_t n, peri_tbe_blocks **out))
{
    return peri_tbe_blocks_new(tbe, blocks, count(n), out);
}

KEPT(0.2, peri_status, checkpoint_read_several,
     (peri_checkpoint *checkpoint, int64_t index, const peri_checkpoint_region *const *regions,
      peri_tensor *const *outs, int64_t n))
{
    return peri_checkpoint_read_several(checkpoint, index, regions, outs, count(n));
}

KEPT(0.2, peri_status, sparse_permute_pooled,
     (peri_tensor *pooled, const int64_t *offsets, int64_t features, const int64_t *permute, int64_t n,
      peri_tensor **out))
{
    return peri_sparse_permute_pooled(pooled, offsets, count(features), permute, count(n), out);
}

KEPT(0.2, const peri_model_input *, model_inputs, (const peri_model *model, int64_t *n))
{
    int32_t inputs;
    const peri_model_input *list = peri_model_inputs(model, &inputs);
    if (n) *n = inputs;
    return list;
}

KEPT(0.2, const peri_model_output *, model_outputs, (const peri_model *model, int64_t *n))
{
    int32_t outputs;
    const peri_model_output *list = peri_model_outputs(model, &outputs);
    if (n) *n = outputs;
    return list;
}

KEPT(0.2, const peri_model_table *, model_tables, (const peri_model *model, int64_t *n))
{
    int32_t tables;
    const peri_model_table *list = peri_model_tables(model, &tables);
    if (n) *n = tables;
    return list;
}
