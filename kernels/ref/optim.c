/* SPDX-License-Identifier: Apache-2.0
 *
 * optim.c (ref): see kernels/optim.h.
 */
