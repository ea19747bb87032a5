/* SPDX-License-Identifier: Apache-2.0
 *
 * fbgemm_isa.c: tells FBGEMM what the processor has. With the wheels torch 2.14.0 and fbgemm-gpu-cpu 1.9.0 FBGEMM asks
 * a cpuinfo of its own that stays empty, takes the processor for one without AVX2, and runs its reference code
 * (EmbeddingSpMDM_ref). A comparison has to be with its vector code, so the benchmarks run Python with this library
 * preloaded: its answers come before FBGEMM's own. */
#include <stdbool.h>

#if defined(__x86_64__)
bool _ZN6fbgemm20fbgemmHasAvx2SupportEv(void);
bool _ZN6fbgemm22fbgemmHasAvx512SupportEv(void);
bool _ZN6fbgemm26fbgemmHasAvx512VnniSupportEv(void);

bool _ZN6fbgemm20fbgemmHasAvx2SupportEv(void) { return __builtin_cpu_supports("avx2"); }

bool _ZN6fbgemm22fbgemmHasAvx512SupportEv(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool _ZN6fbgemm26fbgemmHasAvx512VnniSupportEv(void) { return __builtin_cpu_supports("avx512vnni"); }
#endif
