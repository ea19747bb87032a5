/* SPDX-License-Identifier: Apache-2.0
 *
 * jagged.c (ref): see kernels/jagged.h.
 */
