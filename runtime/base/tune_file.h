/* SPDX-License-Identifier: Apache-2.0
 *
 * base/tune_file.h (L0): the file that keeps measured choices, one for each kind of processor.
 */
#ifndef PERI_BASE_TUNE_FILE_H
#define PERI_BASE_TUNE_FILE_H

#include "tune.h"

/** The file's path, and "" where there is no folder for it. Borrowed; the environment as it is now. */
const char *peri__tune_file(void);
/** Read it; false: there is none, or it is damaged, which the log says. */
bool peri__tune_read(peri__tune_lines *lines);
/** Put @lines beside what the file has of other choices, so that readers see the old file or the new one. False:
 *  @why. */
bool peri__tune_write(const peri__tune_lines *lines, char *why, size_t room);

/** What the last line says of those before. */
uint64_t peri__tune_hash(const char *text, size_t length);

#endif
