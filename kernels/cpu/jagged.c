/* SPDX-License-Identifier: Apache-2.0
 *
 * jagged.c (cpu): see kernels/jagged.h.
 */

#define K_CPU_JAGGED
