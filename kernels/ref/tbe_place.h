/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_place.h: what walks of the list of kernels/tbe.h keep: see tbe_list.h.
 */
#ifndef PERI_KERNELS_TBE_PLACE_H
#define PERI_KERNELS_TBE_PLACE_H

#include <perilune/base.h>

/** A place between bags of the list: before bag j of block k; the end is (n_blocks, 0). */
typedef struct tbe_place {
    int64_t k, j;
} tbe_place;

/** Bad input met in one kernel call; tbe_count_merge adds it to the report. */
typedef struct tbe_count {
    int64_t bad_ids, bad_bags, first_item, first_bag;
} tbe_count;

#endif
