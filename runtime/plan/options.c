/* SPDX-License-Identifier: Apache-2.0
 *
 * options.c: options by the names that configurations, plans and TorchRec have for them.
 */
#include "plan_internal.h"

#include <stdio.h>

typedef struct choice {
    const char *option, *name;
    int32_t value;
} choice;

static const choice choices[] = {
    {"pooling", "SUM", PERI_POOLING_SUM},
    {"pooling", "MEAN", PERI_POOLING_MEAN},
    {"pooling", "NONE", PERI_POOLING_NONE},
    {"bounds_check", "FATAL", PERI_BOUNDS_FATAL},
    {"bounds_check", "WARNING", PERI_BOUNDS_WARNING},
    {"bounds_check", "IGNORE", PERI_BOUNDS_IGNORE},
    {"bounds_check", "NONE", PERI_BOUNDS_NONE},
    {"cache_algorithm", "LRU", PERI_CACHE_LRU},
    {"cache_algorithm", "LFU", PERI_CACHE_LFU},
    {"compute_kernel", "fused", PERI_KERNEL_FUSED},
    {"compute_kernel", "dense", PERI_KERNEL_DENSE},
    {"compute_kernel", "quant", PERI_KERNEL_QUANT},
    {"weight_decay_mode", "none", PERI_DECAY_NONE},
    {"weight_decay_mode", "l2", PERI_DECAY_L2},
    {"weight_decay_mode", "decouple", PERI_DECAY_DECOUPLE},
    {"weight_decay_mode", "counter", PERI_DECAY_COUNTER},
    {"weight_decay_mode", "cowclip", PERI_DECAY_COWCLIP},
    {"counter_weight_decay_mode", "none", PERI_COUNTER_NONE},
    {"counter_weight_decay_mode", "l2", PERI_COUNTER_L2},
    {"counter_weight_decay_mode", "decouple", PERI_COUNTER_DECOUPLE},
    {"counter_weight_decay_mode", "adagradw", PERI_COUNTER_ADAGRADW},
    {"learning_rate_mode", "equal", PERI_RATES_EQUAL},
    {"learning_rate_mode", "tail_id_lr_increase", PERI_RATES_TAIL_ID_INCREASE},
    {"learning_rate_mode", "tail_id_lr_decrease", PERI_RATES_TAIL_ID_DECREASE},
    {"learning_rate_mode", "counter_sgd", PERI_RATES_COUNTER_SGD},
    {"codec", "FP32", PERI_CODEC_NONE},
    {"codec", "FP16", PERI_CODEC_FP16},
    {"codec", "BF16", PERI_CODEC_BF16},
    {"codec", "FP8", PERI_CODEC_FP8},
    {"codec", "INT8", PERI_CODEC_INT8},
    {"codec", "MX4", PERI_CODEC_MX4},
    {"data_type", "FP32", PERI_F32},
    {"data_type", "FP16", PERI_F16},
    {"data_type", "BF16", PERI_BF16},
};

enum { CHOICES = sizeof choices / sizeof *choices };

static const char *sharding_type(int32_t i) { return i < PERI_SHARDING_TYPE_COUNT ? peri_sharding_type_name(i) : NULL; }
static const char *row_format(int32_t i) { return peri_row_format_name(PERI_ROWS_INT8 + i); }

/** Options whose names another list has, from the value @first on; they come behind those above. */
static const struct listed {
    const char *option;
    const char *(*name)(int32_t i);
    int32_t first;
} listed[] = {{"sharding_type", sharding_type, 0},
              {"optimizer", peri_tbe_optimizer_name, 0},
              {"data_type", row_format, PERI_ROWS_INT8}};

const char *peri_option_name(const char *option, int32_t i, int32_t *value)
{
    if (!option || i < 0) return NULL;
    for (int32_t k = 0; k < CHOICES; k++) {
        if (strcmp(choices[k].option, option) != 0 || i-- > 0) continue;
        if (value) *value = choices[k].value;
        return choices[k].name;
    }
    for (size_t k = 0; k < sizeof listed / sizeof *listed; k++) {
        const char *name = strcmp(listed[k].option, option) == 0 ? listed[k].name(i) : NULL;
        if (name && value) *value = listed[k].first + i;
        if (name) return name;
    }
    return NULL;
}

const char *peri__option_text(const char *option, int32_t value)
{
    const char *name;
    int32_t known;
    for (int32_t i = 0; (name = peri_option_name(option, i, &known)); i++)
        if (known == value) return name;
    return "?";
}

static const peri__kernel kernels[] = {{"fused", PERI_KERNEL_FUSED, false, false},
                                       {"dense", PERI_KERNEL_DENSE, false, false},
                                       {"fused_uvm", PERI_KERNEL_FUSED, true, false},
                                       {"fused_uvm_caching", PERI_KERNEL_FUSED, false, true},
                                       {"quant", PERI_KERNEL_QUANT, false, false},
                                       {"quant_uvm", PERI_KERNEL_QUANT, true, false}};

enum { KERNELS = sizeof kernels / sizeof *kernels };

const peri__kernel *peri__kernel_of(const char *name)
{
    for (int32_t i = 0; i < KERNELS; i++)
        if (strcmp(kernels[i].name, name) == 0) return &kernels[i];
    return NULL;
}

const char *peri__kernel_name(const peri_sharded_table *t)
{
    const bool cached = t->cache != NULL;
    for (int32_t i = 0; i < KERNELS; i++)
        if (kernels[i].kernel == t->compute_kernel && kernels[i].mapped == t->mapped && kernels[i].cached == cached)
            return kernels[i].name;
    return "?";
}

peri_status peri_option_value(const char *option, const char *name, int32_t *out)
{
    PERI_NEED(option, name, out);
    char allowed[PERI_MESSAGE_MAX] = "";
    size_t used = 0;
    int32_t value;
    const char *known;
    for (int32_t i = 0; (known = peri_option_name(option, i, &value)); i++) {
        if (strcmp(known, name) == 0) {
            *out = value;
            return PERI_OK;
        }
        if (used < sizeof allowed)
            used += (size_t)snprintf(allowed + used, sizeof allowed - used, "%s%s", i ? ", " : "", known);
    }
    if (used > 0) return peri__fail(PERI_EINVAL, "%s is '%.80s', allowed: %s", option, name, allowed);
    return peri__fail(PERI_EINVAL,
                      "peri_option_value: there is no option '%.80s', allowed: pooling, bounds_check, cache_algorithm, "
                      "compute_kernel, weight_decay_mode, counter_weight_decay_mode, learning_rate_mode, codec, "
                      "data_type, sharding_type, "
                      "optimizer",
                      option);
}
