/* SPDX-License-Identifier: Apache-2.0
 *
 * pinned_ring.h: copies from any memory of the host that have read their source when the call returns (PERI_COPY_H2D).
 * cudaMemcpyAsync alone does not promise that: it reads page-locked memory later, and for other memory it may first
 * wait for the stream's earlier work.
 */
#ifndef PERI_CUDA_PINNED_RING_H
#define PERI_CUDA_PINNED_RING_H

#include "../../../kernels/cuda/cuda.h"
#include "../../plugin/host.h"

typedef struct peri__stage peri__stage;

/** The stage of the current device: 8 MiB of page-locked memory. Free it with peri__stage_delete. */
cudaError_t peri__stage_new(const peri_plugin_host *host, peri__stage **out);
/** Waits for the copies that are under way. NULL: nothing. */
void peri__stage_delete(const peri_plugin_host *host, peri__stage *s);

/**
 * Queue on @stream the copy of @bytes bytes from @src (of the host) to @dst (of the current device); @src has been read
 * when the call returns. Waits only where the stage is full of copies that have not run. Any thread may call it.
 */
cudaError_t peri__stage_copy(peri__stage *s, void *dst, const void *src, int64_t bytes, enum cudaMemcpyKind kind,
                             cudaStream_t stream);

#endif
