/* SPDX-License-Identifier: Apache-2.0
 *
 * formats.c: see formats.h.
 */
#include "formats.h"

#include "../base/buffer.h"
#include "../base/json.h"
#include "../embed/embed_internal.h"
#include "manifest.h"

const char *peri__format_text(int32_t coded, int64_t cols, char out[PERI__FORMAT_ROOM])
{
    (void)peri_row_format_text(coded, cols, out, PERI__FORMAT_ROOM);
    return out;
}

static peri_status append_format(peri__formats *f, const char *name, const char *format)
{
    PERI_TRY(peri__grow((void **)&f->said, &f->room, f->n + 1, sizeof *f->said));
    const struct peri__format_said said = {.name = peri__strdup(name), .format = peri__strdup(format)};
    f->said[f->n++] = said;
    return said.name && said.format ? peri__names_add(&f->by_name, name, f->n - 1) : PERI_ENOMEM;
}

/** What `values`, which may be any JSON, says under `rows`. */
static peri_status collect(peri__formats *f, const char *values)
{
    peri__json j;
    char key[PERI__NAME_MOST + 1], format[256];
    peri__json_open(&j, values, (int64_t)strlen(values), "values");
    peri__json_enter(&j, '{');
    while (peri__json_key(&j, key, sizeof key) && strcmp(key, "rows") != 0) peri__json_skip(&j, NULL, NULL);
    if (strcmp(key, "rows") != 0) return PERI_OK;
    for (peri__json_enter(&j, '{'); peri__json_key(&j, key, sizeof key) && peri__json_text(&j, format, sizeof format);)
        PERI_TRY(append_format(f, key, format));
    return PERI_OK;
}

peri_status peri__format_of(peri__formats *f, const char *values, const char *name, const char **out)
{
    *out = NULL;
    if (!f->known) {
        peri_status status = collect(f, values);
        if (status < 0) peri__formats_free(f);
        PERI_TRY(status);
        f->known = true;
    }
    for (int64_t at = -1, i; (i = peri__names_next(&f->by_name, name, &at)) >= 0;)
        if (strcmp(f->said[i].name, name) == 0) *out = f->said[i].format;
    return PERI_OK;
}

void peri__formats_free(peri__formats *f)
{
    for (int64_t i = 0; i < f->n; i++) {
        peri__free(f->said[i].name);
        peri__free(f->said[i].format);
    }
    peri__free(f->said);
    peri__names_free(&f->by_name);
    *f = (peri__formats){0};
}
