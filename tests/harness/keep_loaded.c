/* SPDX-License-Identifier: Apache-2.0
 *
 * keep_loaded.c: part of the launcher under the address and thread sanitizers: no library is unloaded (Open MPI unloads
 * its parts at the end), so that reports of leaks can name the library that leaked and the patterns of lsan.supp can
 * match it; the thread sanitizer ends a process that unloads what tsan.supp names.
 */
__attribute__((visibility("default"))) int dlclose(void *handle);
int dlclose(void *handle)
{
    (void)handle;
    return 0;
}
