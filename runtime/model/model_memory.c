/* SPDX-License-Identifier: Apache-2.0
 *
 * model_memory.c: what a model is in memory: its beginning, as nothing, and its end.
 */
#include "model_internal.h"

peri_status peri__model_new(const char *path, peri_model **out)
{
    peri_model *m = peri__alloc_zero(sizeof *m);
    if (!m) return PERI_ENOMEM;
    peri__object_count(1);
    peri__refs_init(&m->refs);
    m->file.fd = m->file.slot = -1;
    m->path = peri__strdup(path);
    if (!m->path) {
        peri_model_release(m);
        return PERI_ENOMEM;
    }
    *out = m;
    return PERI_OK;
}

static void release_lists(peri_model *m)
{
    for (int32_t i = 0; i < m->n_operations; i++) {
        peri__free(m->operations[i].in);
        peri__free(m->operations[i].sizes);
        peri__free(m->operations[i].bags);
    }
    for (int32_t i = 0; i < m->n_inputs; i++) peri__free((void *)(uintptr_t)m->inputs[i].name);
    for (int32_t i = 0; i < m->n_outputs; i++) peri__free((void *)(uintptr_t)m->outputs[i].name);
    for (int32_t i = 0; i < m->n_tables; i++) {
        peri__free((void *)(uintptr_t)m->tables[i].name);
        peri__free((void *)(uintptr_t)m->tables[i].dtype);
    }
    for (int32_t i = 0; i < m->n_sections; i++) peri__free(m->sections[i].source);
    for (int32_t i = 0; i < m->n_maps; i++) peri__free(m->maps[i].segments);
    for (int32_t i = 0; i < m->n_lists; i++) peri__free(m->lists[i].inputs);
    peri__free(m->lists);
    peri__free(m->maps);
    peri__free(m->mapped);
    peri__free(m->longest);
    peri__free(m->sections);
    peri__free(m->values);
    peri__free(m->operations);
    peri__free(m->inputs);
    peri__free(m->rules);
    peri__free(m->outputs);
    peri__free(m->output_values);
    peri__free(m->tables);
    peri__free(m->rows);
}

void peri_model_retain(peri_model *model)
{
    if (model) peri__refs_add(&model->refs);
}

/** Formulas have sections and file of the model that they belong to. */
static void release_formulas(peri_model *formulas)
{
    if (!formulas) return;
    formulas->sections = NULL;
    formulas->n_sections = 0;
    formulas->file = (peri__mapped){.fd = -1, .slot = -1};
    peri_model_release(formulas);
}

void peri_model_release(peri_model *model)
{
    if (!model || !peri__refs_drop(&model->refs)) return;
    release_formulas(model->formulas);
    release_lists(model);
    peri__mapped_close(&model->file);
    peri__free(model->path);
    peri__free(model->name);
    peri__free(model->producer);
    peri__free(model->loose);
    peri__free(model);
    peri__object_count(-1);
}
