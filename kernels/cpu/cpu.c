/* SPDX-License-Identifier: Apache-2.0
 *
 * cpu.c: the vectorised kernels, compiled once per instruction set with -DK_ISA=avx2 or avx512 and the matching -m flags. Families are
 * included; everything is static but the table. A kernel that a family does not define is left NULL: select.c completes the table
 * from the next lower set.
 */
#include "../kernels.h"

#include <math.h>
#include <string.h>

#include "../ref/number.h"
#include "simd.h"

#include "convert.c"
#include "codec.c"
#include "dense.c"
#include "jagged.c"
#include "optim.c"
#include "quantize.c"
#include "sparse.c"
#include "indices.c"
#include "route.c"
#include "tbe.c"

#define K_CAT_(a, b) a##b
#define K_CAT(a, b) K_CAT_(a, b)
#define K_TEXT_(a) #a
#define K_TEXT(a) K_TEXT_(a)

const peri_kernels K_CAT(peri_kernels_, K_ISA) = {
    .isa = K_TEXT(K_ISA),
    .fn = {K_CPU_CONVERT K_CPU_DENSE K_CPU_JAGGED K_CPU_OPTIM K_CPU_SPARSE K_CPU_QUANTIZE K_CPU_TBE K_CPU_ROUTE K_CPU_CODEC},
};
