/* SPDX-License-Identifier: Apache-2.0
 *
 * base/between.h (L0): what whoever computes does between two operations: let exchanges of other ranks' data move on, without knowing of
 * them. Wires that need the processor stand still otherwise, until somebody waits.
 */
#ifndef PERI_BASE_BETWEEN_H
#define PERI_BASE_BETWEEN_H

/** Between two operations of this thread: call what peri__between_set gave it, if anything. Never blocks. */
void peri__between(void);
/** From now on peri__between calls f(ctx) on this thread, and on no other; f NULL: nothing any more. */
void peri__between_set(void (*f)(void *ctx), void *ctx);
/** Forget @ctx, if it is this thread's. */
void peri__between_drop(const void *ctx);

#endif
