/* SPDX-License-Identifier: Apache-2.0
 *
 * libraries.c: the libraries that this process has loaded, and the versions that they tell.
 */
#include "host_internal.h"

#include <dlfcn.h>
#include <lauxlib.h>
#include <link.h>
#include <lua.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/** How libraries tell their versions. */
enum { BY_TEXT, BY_STRUCT, BY_NUMBER, BY_MPI, BY_NAME };

static const struct {
    const char *file;   /* how the library's file begins */
    const char *name;
    const char *symbol; /* function that tells; NULL: its file's name does */
    int how;
} known[] = {
    {"libopenblas", "OpenBLAS", "openblas_get_config", BY_TEXT}, {"libdnnl", "oneDNN", "dnnl_version", BY_STRUCT},
    {"libxxhash", "xxHash", "XXH_versionNumber", BY_NUMBER},     {"liburing", "liburing", NULL, BY_NAME},
    {"libmpi.", "Open MPI", "MPI_Get_library_version", BY_MPI},  {"libpmix", "PMIx", "PMIx_Get_version", BY_TEXT},
};

/** What the library says of itself, in one line. */
static void version_of(void *function, int how, const char *path, char *text, int len)
{
    const char *after = strstr(path, ".so.");
    snprintf(text, (size_t)len, "%s", after ? after + 4 : "");
    if (!function) return;
    if (how == BY_TEXT) snprintf(text, (size_t)len, "%s", ((const char *(*)(void))function)());
    if (how == BY_STRUCT) {
        const int *v = ((const int *(*)(void))function)(); /* major, minor, patch come first */
        snprintf(text, (size_t)len, "%d.%d.%d", v[0], v[1], v[2]);
    }
    if (how == BY_NUMBER) {
        unsigned v = ((unsigned (*)(void))function)();
        snprintf(text, (size_t)len, "%u.%u.%u", v / 10000, v / 100 % 100, v % 100);
    }
    if (how == BY_MPI) {
        char all[8192] = ""; /* MPI_MAX_LIBRARY_VERSION_STRING of any MPI */
        int n = 0;
        ((int (*)(char *, int *))function)(all, &n);
        snprintf(text, (size_t)len, "%s", all);
    }
    text[strcspn(text, "\n")] = 0;
}

/** Adds a loaded library to the table on the stack: { name =, version =, path = }. */
static int look(struct dl_phdr_info *info, size_t size, void *state)
{
    (void)size;
    lua_State *L = state;
    const char *slash = strrchr(info->dlpi_name, '/'), *file = slash ? slash + 1 : info->dlpi_name;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strncmp(file, known[i].file, strlen(known[i].file)) != 0) continue;
        char version[512], *path = realpath(info->dlpi_name, NULL);
        void *library = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
        version_of(library && known[i].symbol ? dlsym(library, known[i].symbol) : NULL, known[i].how,
                   path ? path : file, version, sizeof version);
        if (library) dlclose(library);
        lua_newtable(L);
        lua_pushstring(L, known[i].name);
        lua_setfield(L, -2, "name");
        lua_pushstring(L, version);
        lua_setfield(L, -2, "version");
        lua_pushstring(L, path ? path : info->dlpi_name);
        lua_setfield(L, -2, "path");
        lua_rawseti(L, -2, (int)lua_objlen(L, -2) + 1);
        free(path);
    }
    return 0;
}

/** libraries(): list of { name =, version =, path = } of what is loaded now. */
static int libraries(lua_State *L)
{
    lua_newtable(L);
    dl_iterate_phdr(look, L);
    return 1;
}

void peri__libraries_register(lua_State *L)
{
    static const luaL_Reg functions[] = {{"libraries", libraries}, {NULL, NULL}};
    luaL_register(L, NULL, functions);
}
