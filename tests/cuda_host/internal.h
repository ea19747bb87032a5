/* SPDX-License-Identifier: Apache-2.0
 *
 * internal.h: between device.cc (memory, streams) and threads.cc (the threads of a grid).
 */
#ifndef PERI_CUDA_HOST_INTERNAL_H
#define PERI_CUDA_HOST_INTERNAL_H

#include "cuda_runtime.h"

#include <string>

namespace peri_cuda_host {

/** The next number of the seed's sequence. */
uint64_t draw();
/** Run all blocks of a grid. False: the kernel did something that `wrong` tells. */
bool run_grid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &kernel);
extern std::string wrong;

} // namespace peri_cuda_host

#endif
