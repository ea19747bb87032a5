/* SPDX-License-Identifier: Apache-2.0
 *
 * inline.h: functions of numbers that kernels of every device share.
 */
#ifndef PERI_KERNELS_INLINE_H
#define PERI_KERNELS_INLINE_H

#if defined(__CUDACC__)
#define K_INLINE static __host__ __device__ inline
#else
#define K_INLINE static inline
#endif

#endif
