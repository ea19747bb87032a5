/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/io.h: readers.
 */
#ifndef PERILUNE_IO_H
#define PERILUNE_IO_H

#include <perilune/tensor.h>

#endif
