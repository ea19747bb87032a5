/* SPDX-License-Identifier: Apache-2.0
 *
 * other_list.c: own_way, built with another list of kernels: cache_fill is not there, two new ones are, which moves the
 * numbers of all that come after them, cumsum has longer arguments, and those of dropout have
 * as many bytes and another layout. The list is changed before any header makes
 * numbers of it.
 */
#include "kernels/layout.h"
#include "kernels/list.h"

typedef struct longer_cumsum longer_cumsum;
#define PERI_LAYOUT_longer_cumsum 1
#undef PERI_LAYOUT_peri_k_dropout_args
#define PERI_LAYOUT_peri_k_dropout_args 1
#undef PERI_OPS_JAGGED
#define PERI_OPS_JAGGED(X) X(cumsum, longer_cumsum) X(bags_report, peri_op_bags_report)
#undef PERI_KERNELS_CACHE
#define PERI_KERNELS_CACHE(X)                                                                                          \
    X(of_tomorrow, peri_k_cache_args) X(of_next_week, peri_k_cache_args) X(cache_spill, peri_k_cache_args)

#include "kernels/jagged.h"
struct longer_cumsum {
    peri_op_cumsum now;
    int64_t gone;
};

#include "own_way.h"
