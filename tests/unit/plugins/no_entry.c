/* SPDX-License-Identifier: Apache-2.0
 *
 * no_entry.c: a shared library that is no plugin.
 */
__attribute__((visibility("default"))) int peri_unrelated(void);
int peri_unrelated(void) { return 1; }
