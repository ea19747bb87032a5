/* SPDX-License-Identifier: Apache-2.0
 *
 * unit.c: the normative kernels: plain loops that say what is right. The files of all families are included here; all
 * functions are static and the only symbol is the table.
 */
#include "../kernels.h"

#include <math.h>
#include <string.h>

#include "number.h"
#include "../spread.h"

#include "convert.c"
#include "codec.c"
/* gcc 12 for ARM (Debian 12) crashes where it makes vector code of softmax and cross entropy. */
#if defined(__aarch64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC push_options
#pragma GCC optimize("no-tree-vectorize")
#include "dense.c"
#pragma GCC pop_options
#else
#include "dense.c"
#endif
#include "formula.c"
#include "jagged.c"
#include "optim.c"
#include "quantize.c"
#include "nearest.c"
#include "sparse.c"
#include "lookup.c"
#include "route.c"
#include "tbe.c"
#include "tbe_update.c"
#include "tbe_shampoo.c"
#include "tbe_mark.c"
#include "cache.c"
#include "bags.c"
#include "collision.c"
#include "collision_learn.c"
#include "collision_state.c"
#include "elements.c"
#include "sequence.c"
#include "places.c"

const peri_kernels peri_kernels_ref = {
    .isa = "ref",
    .fn =
        {
#define X(name, args) [PERI_K_##name] = ref_##name,
            PERI_KERNELS(X) PERI_STEPS(X)
#undef X
        },
};
