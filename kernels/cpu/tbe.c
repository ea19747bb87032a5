/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe.c (cpu): see kernels/tbe.h.
 */

#define K_CPU_TBE
