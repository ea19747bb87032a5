/* SPDX-License-Identifier: Apache-2.0
 *
 * sparse.c (cpu): see kernels/sparse.h.
 */

#define K_CPU_SPARSE
