/* SPDX-License-Identifier: Apache-2.0
 *
 * follow.h: a thread that looks whether the model file has been replaced, and gives the server the new one.
 */
#ifndef PERI_SERVE_FOLLOW_H
#define PERI_SERVE_FOLLOW_H

#include "server.h"

typedef struct peri__follow peri__follow;

/** Look at @path every @every_ns. @name: what the model is called, whatever the new file says. @path and @name are borrowed. @out new, for
 *  peri__follow_stop, which comes before the server's. */
peri_status peri__follow_start(peri__server *server, const char *path, const char *name, int64_t every_ns, peri__follow **out);
void peri__follow_stop(peri__follow *follow);

#endif
