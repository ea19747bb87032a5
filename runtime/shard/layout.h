/* SPDX-License-Identifier: Apache-2.0
 *
 * layout.h: the routes of one batch: the compiled plan with the numbers of bags filled in, as arrays in device memory. The home side
 * follows from this rank's input; the owner side from what the other ranks sent. Both stay the same from batch to batch as long as the
 * batch sizes and the order of the keys do, and are then used again. Making them takes time linear in features x ranks.
 */
#ifndef PERI_SHARD_LAYOUT_H
#define PERI_SHARD_LAYOUT_H

#include "../tensor/internal.h"
#include "routes.h"

/** Several small host arrays on their way to one device buffer. */
typedef struct peri__upload {
    char *host;
    int64_t bytes, capacity;
    peri_tensor *device; /* u8 */
} peri__upload;

/** Append @bytes (copied; NULL: zeros), 8-byte aligned. Returns the offset, or a negative status. */
int64_t peri__upload_add(peri__upload *up, const void *data, int64_t bytes);
/** Copy everything to @device and drop the host side. */
peri_status peri__upload_send(peri__upload *up, peri_device *device);
void peri__upload_fini(peri__upload *up);
/** The device address of an offset from peri__upload_add. */
static inline void *peri__upload_at(const peri__upload *up, int64_t offset) { return (char *)peri__data(up->device) + offset; }

/** What this rank sends and what it gets back. */
typedef struct peri__home {
    peri__refs refs;
    peri__upload up;
    int64_t *feature_bags, *feature_first; /* host, n_features: bags, and first bag in the input */
    int64_t *feature_inverse; /* host, n_features: first entry in the inverse indices; NULL: no variable batch */
    int64_t bags;       /* of all partitions: the range of route_count and route_pack */
    int64_t wire_bags;  /* bags on the wire */
    int64_t *rank_bags; /* host, world_size + 1: wire bags before each rank */
    int64_t *rank_out;  /* host, lanes x world_size: elements that come back from each rank; 0 for this one */
    int64_t lane_out[PERI__LANES]; /* their sums */
    int64_t own_out;     /* elements of this rank's own slots */
    int64_t replica_out; /* elements of its replicas; they lie behind its own slots' */
    int64_t received_out; /* elements of all other ranks' slots: lane after lane, in each rank after rank */
    int64_t *replica_offset; /* host, n_replicas: of each replica's rows in the own buffer */
    int64_t rows;       /* of the output: the batch */
    int64_t most_bags;  /* of an output: the range of route_spread */
    /* Offsets in `up`: */
    int64_t partitions, bounds, wire_bag, at, outputs, pieces, output_bags;
    bool variable;
} peri__home;

/** @first_bag, @bags: int64[n_features], by feature. @rows: output rows. @inverse: first entry of each feature in the inverse indices,
 *  int64[n_features] (variable batch), or NULL. @divisor, @sent_divisor: double[n_tables], of the gradients of this rank's own rows
 *  and of others'. @out new. */
peri_status peri__home_new(const peri__routes *r, int32_t rank, const int64_t *first_bag, const int64_t *bags, int64_t rows,
                           const int64_t *inverse, const double *divisor, const double *sent_divisor, peri_device *device,
                           peri__home **out);
void peri__home_release(peri__home *home);

/** One lookup block of the owner side: see kernels/tbe.h. */
typedef struct peri__block {
    int64_t first_bag, bags, out_offset, out_stride;
    int32_t slot; /* in routes->slots */
    int32_t source;
} peri__block;

/** What this rank looks up for all ranks. */
typedef struct peri__owner {
    int64_t *counts;     /* host, world_size x streams of this rank: bags */
    int64_t bags;        /* received */
    int64_t *source_bags; /* host, world_size: bags received from each rank */
    int64_t *source_out; /* host, lanes x world_size: elements that go back to each rank; 0 for this one */
    int64_t lane_out[PERI__LANES]; /* their sums */
    int64_t sent_out;    /* elements for all other ranks; in the buffer they follow this rank's own, lane after lane */
    int32_t n_blocks;
    peri__block *blocks; /* by source rank, then slot */
} peri__owner;

/** @counts: int64[world_size x streams of @rank], taken on success. @own: elements of the buffer before what others get. */
peri_status peri__owner_new(const peri__routes *r, int32_t rank, int64_t *counts, int64_t own, peri__owner **out);
void peri__owner_free(peri__owner *owner);

#endif
