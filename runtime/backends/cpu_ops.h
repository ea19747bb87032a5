/* SPDX-License-Identifier: Apache-2.0
 *
 * cpu_ops.h: the operations of the device cpu.
 */
#ifndef PERI_BACKENDS_CPU_OPS_H
#define PERI_BACKENDS_CPU_OPS_H

#include "../../kernels/dense.h"
#include "../plugin/host.h"

/** Bytes of scratch for operation @op (PERI_OP_*) with @args. They fix how many parts it has where threads decide
 *  that. */
int64_t peri__cpu_op_scratch(const peri_plugin_host *host, int32_t op, const void *args);
/** Run it; @scratch has the @bytes that were asked for, with these arguments. Not gemm, which can fail. */
void peri__cpu_op_run(const peri_plugin_host *host, int32_t op, const void *args, void *scratch, int64_t bytes);

/** Matrix products (cpu_gemm.c): once, before any; whether there is one of this dtype and these sizes; and to make
 *  it. */
void peri__cpu_gemm_init(const peri_plugin_host *lent);
bool peri__cpu_has_gemm(const peri_op_gemm *g);
peri_status peri__cpu_gemm(const peri_op_gemm *g);

#endif
