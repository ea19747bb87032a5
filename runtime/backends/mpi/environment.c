/* SPDX-License-Identifier: Apache-2.0
 *
 * environment.c: what opening the first world leaves of the process's environment and signals: all as it was.
 *
 * MPI_Init writes variables into the environment (some 27 in a process that mpirun did not start) and takes variables
 * of mpirun's out of it. All of them are for what runs inside MPI_Init: communication, MPI_Comm_spawn and MPI_Finalize
 * do without, and the program's own children should not take themselves for this rank. It also installs handlers for
 * four signals, which OMPI_MCA_opal_signal lists; an empty list means none.
 */
#include "mpi_internal.h"

#include <stdlib.h>
#include <string.h>

extern char **environ;

/** Is @line, "name=value", a variable that belongs to Open MPI or to a library that MPI_Init sets up? */
static bool is_of_mpi(const char *line)
{
    static const char *const beginnings[] = {"OMPI_",  "OPAL_",  "ORTE_", "PRTE_",
                                             "PMIX_",  "PSM2_",  "PSM_",  "HFI_NO_BACKTRACE=",
                                             "IPATH_NO_BACKTRACE="};
    for (size_t i = 0; strchr(line, '=') && i < sizeof beginnings / sizeof *beginnings; i++)
        if (strncmp(line, beginnings[i], strlen(beginnings[i])) == 0) return true;
    return false;
}

/** The variable of @lines, ended by NULL, that has the name of @line; NULL: none has. */
static char *find(char **lines, const char *line)
{
    const size_t n = strcspn(line, "=");
    for (; *lines; lines++)
        if (strncmp(*lines, line, n) == 0 && (*lines)[n] == '=') return *lines;
    return NULL;
}

char **peri__mpi_environment_keep(void)
{
    size_t n = 0, bytes = sizeof(char *);
    for (char **e = environ; e && *e; e++)
        if (is_of_mpi(*e)) bytes += sizeof(char *) + strlen(*e) + 1, n++;
    char **kept = peri__mpi_host->alloc_zero(bytes);
    if (!kept) return NULL;
    char *text = (char *)(kept + n + 1);
    n = 0;
    for (char **e = environ; e && *e; e++) {
        if (!is_of_mpi(*e)) continue;
        kept[n++] = strcpy(text, *e);
        text += strlen(text) + 1;
    }
    return kept;
}

/** Set the variable of @line, "name=value". */
static void put(char *line)
{
    char *const equals = strchr(line, '=');
    *equals = '\0';
    setenv(line, equals + 1, 1);
    *equals = '=';
}

void peri__mpi_environment_restore(char **kept)
{
    for (char **e = environ; e && *e;) {
        if (!is_of_mpi(*e) || find(kept, *e)) {
            e++;
            continue;
        }
        char name[256]; /* longer ones are not MPI's */
        const size_t n = strcspn(*e, "=");
        if (n < sizeof name) {
            memcpy(name, *e, n);
            name[n] = '\0';
            if (unsetenv(name) == 0) continue; /* the next one is in its place */
        }
        e++;
    }
    for (char **line = kept; *line; line++) {
        const char *now = find(environ, *line);
        if (!now || strcmp(now, *line) != 0) put(*line);
    }
    peri__mpi_host->free(kept);
}
