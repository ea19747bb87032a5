/* SPDX-License-Identifier: Apache-2.0
 *
 * newer_model.h: the model that is served, and a thread that looks for a newer one: another file of its name, or what
 * the trainer has saved.
 */
#ifndef PERI_SERVE_NEWER_MODEL_H
#define PERI_SERVE_NEWER_MODEL_H

#include "server.h"

typedef struct peri__follow peri__follow;

/** What is served. Texts are borrowed. */
typedef struct peri__follow_source {
    const char *path;   /* the model file */
    const char *name;   /* what requests call it; NULL: as the file says */
    const char *folder; /* of checkpoints, whose newest is served; NULL: none, the file is */
    const char *saved;  /* what the model is called in them */
} peri__follow_source;

/** Open the model as it is now, with the newest checkpoint if there is one. @model new, for the server. @out new, for
 *  peri__follow_stop. */
peri_status peri__follow_open(const peri__follow_source *source, peri__serve_model **model, peri__follow **out);
/** Give @server newer ones from now on; look every @every_ns. Once. */
peri_status peri__follow_start(peri__follow *follow, peri__server *server, int64_t every_ns);
/** End it, before the server; NULL is fine. */
void peri__follow_stop(peri__follow *follow);

#endif
