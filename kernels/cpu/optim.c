/* SPDX-License-Identifier: Apache-2.0
 *
 * optim.c (cpu): see kernels/optim.h.
 */

#define K_CPU_OPTIM
