/* SPDX-License-Identifier: Apache-2.0
 *
 * base/between.h (L0): what whoever computes does between two operations: let exchanges of other ranks' data move on,
 * without knowing of them. Wires that need the processor stand still otherwise, until somebody waits.
 */
#ifndef PERI_BASE_BETWEEN_H
#define PERI_BASE_BETWEEN_H

#include <perilune/base.h>

/** What a thread's exchanges are to whoever computes or waits on it. */
typedef struct peri__between_vtab {
    /* Let them move on. Never blocks. */
    void (*progress)(void *ctx);
    /* Whether some are queued on a device behind a rank that may die: a call that blocks for the device could then
     * block for ever. */
    bool (*queued)(void *ctx);
    /* Whether some still run there. Also from within an exchange's own step, where `progress` does nothing: ends them
     * if a rank is lost, or if they have been waited for since @since_ns, for longer than they may take. */
    bool (*still_queued)(void *ctx, int64_t since_ns);
    /* PERI_OK, or the failure of one that was queued, recorded as this thread's error: what was computed from it is
     * worth nothing. Tells of each failure once. */
    peri_status (*lost)(void *ctx);
} peri__between_vtab;

/** Between two operations of this thread: let its exchanges move on, if it has any. Never blocks. */
void peri__between(void);
/** Before a call that blocks until @queued has run on a device: call it, with @ctx, until it says something else than
 *  PERI_PENDING, and let exchanges move on meanwhile. Returns false, and has called nothing, where the caller may as
 *  well block. */
bool peri__between_poll(peri_status (*queued)(void *ctx), void *ctx, peri_status *status);
/** Wait until no exchange is queued on a device, before a call that may wait for all that runs there. */
peri_status peri__between_idle(void);
/** From now on, or no longer, peri__between does nothing on this thread: it records (runtime/tensor/capture.h), and a
 *  question about an exchange would be recorded too. */
void peri__between_hold(bool on);
/** From now on peri__between lets @ctx move on, on this thread and on no other; vtab NULL: nothing any more. */
void peri__between_set(const peri__between_vtab *vtab, void *ctx);
/** Forget @ctx, if it is this thread's. */
void peri__between_drop(const void *ctx);

#endif
