/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe.c (ref): see kernels/tbe.h.
 */
