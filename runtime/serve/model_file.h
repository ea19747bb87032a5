/* SPDX-License-Identifier: Apache-2.0
 *
 * model_file.h: a model file (perilune/model.h) as what the server asks.
 */
#ifndef PERI_SERVE_MODEL_FILE_H
#define PERI_SERVE_MODEL_FILE_H

#include "model.h"

#include <perilune/model.h>

/** Open the model file @path. @name: what requests call it; NULL: the name in the file, or else that of the file.
 *  @verify: read all of it, and compare its checksums. @out new. */
peri_status peri__serve_open_file(const char *path, const char *name, bool verify, peri__serve_model **out);
/** The same of a model that was opened from @path, whose reference is taken over in any case. @written: what was
 *  written when the model learned last: the file, or a checkpoint. */
peri_status peri__serve_take_file(peri_model *file, const char *path, const char *name, const char *written,
                                  peri__serve_model **out);

#endif
