/* SPDX-License-Identifier: Apache-2.0
 *
 * model_open.c: opening, describing and verifying model files.
 */
#include "model_internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <xxhash.h>

static peri_status fail_broken_file(const peri_model *m, const char *wrong)
{
    return peri__fail(PERI_EFORMAT, "peri_model_open: '%.200s': %s", m->path, wrong);
}

/** The preamble, and a copy of the header, which nobody can change while it is read. @text new. */
static peri_status load_header(peri_model *m, char **text, int64_t *bytes)
{
    peri__model_preamble p;
    const peri__mapped *f = &m->file;
    memcpy(&p, f->data, sizeof p);
    if (memcmp(p.magic, PERI__MODEL_MAGIC, sizeof p.magic) != 0) return fail_broken_file(m,
                                                                                         "no model file of Perilune");
    if (p.checksum != XXH3_64bits(&p, offsetof(peri__model_preamble, checksum)))
        return fail_broken_file(m, "its first 64 bytes are damaged");
    if (p.version < 1 || p.version > PERI_MODEL_VERSION)
        return peri__fail(PERI_EUNSUPPORTED,
                          "peri_model_open: '%.200s' is of version %u of the format, this library knows 1..%d", m->path,
                          p.version, PERI_MODEL_VERSION);
    m->version = (int32_t)p.version;
    if (p.file_bytes != (uint64_t)f->bytes)
        return peri__fail(PERI_EFORMAT,
                          "peri_model_open: '%.200s' has %lld bytes, it was written with %llu: it is not whole",
                          m->path, (long long)f->bytes, (unsigned long long)p.file_bytes);
    if (p.header_offset > p.file_bytes || p.header_bytes > p.file_bytes - p.header_offset ||
        p.header_bytes > PERI__MODEL_HEADER_MOST)
        return fail_broken_file(m, "its header lies outside of the file");
    char *copy = peri__alloc((size_t)p.header_bytes + 1);
    if (!copy) return PERI_ENOMEM;
    memcpy(copy, f->data + p.header_offset, (size_t)p.header_bytes);
    copy[p.header_bytes] = 0;
    XXH128_hash_t digest = XXH3_128bits(copy, (size_t)p.header_bytes);
    if (digest.low64 != p.digest[0] || digest.high64 != p.digest[1]) {
        peri__free(copy);
        return fail_broken_file(m, "its header is damaged");
    }
    snprintf(m->digest, sizeof m->digest, "%016llx%016llx", (unsigned long long)digest.high64,
             (unsigned long long)digest.low64);
    *text = copy;
    *bytes = (int64_t)p.header_bytes;
    return PERI_OK;
}

peri_status peri__model_open(const char *path, int32_t flags, bool own, peri_model **out)
{
    if (flags & ~(PERI_MODEL_VERIFY | PERI_MODEL_COPY | PERI_MODEL_GUARD))
        return peri__fail(PERI_EINVAL,
                          "peri_model_open: flags %d, allowed: PERI_MODEL_VERIFY | PERI_MODEL_COPY | PERI_MODEL_GUARD",
                          flags);
    peri_model *m;
    char what[300], *text = NULL;
    int64_t bytes = 0;
    snprintf(what, sizeof what, "peri_model_open: header of '%.200s'", path);
    PERI_TRY(peri__model_new(path, &m));
    peri_status status =
        peri__mapped_open(path, (peri__mapping){flags & PERI_MODEL_COPY, own, flags & PERI_MODEL_GUARD}, &m->file);
    if (status >= 0) status = load_header(m, &text, &bytes);
    if (status >= 0) status = peri__model_header(m, text, bytes, what);
    if (status >= 0) status = peri__model_check(m, what);
    if (status >= 0 && (flags & PERI_MODEL_VERIFY)) status = peri_model_verify(m);
    peri__free(text);
    if (peri__mapped_cut(&m->file))
        status = peri__fail(PERI_EIO, "peri_model_open: '%.200s' was cut, or could not be read, while it was opened",
                            m->path);
    if (status < 0) peri_model_release(m);
    else *out = m;
    return status;
}

peri_status peri_model_open(const char *path, int32_t flags, peri_model **out)
{
    PERI_NEED(path);
    PERI_NEED(out);
    return peri__model_open(path, flags, false, out);
}

peri_status peri_model_verify(const peri_model *model)
{
    PERI_NEED(model);
    if (model->followed)
        return peri__fail(PERI_EUNSUPPORTED,
                          "peri_model_verify: '%.200s' follows a run: it has no longer what the file has", model->path);
    if (model->file.slot < 0) PERI_TRY(peri__model_unchanged("peri_model_verify", model));
    for (int32_t i = 0; i < model->n_sections; i++) {
        const peri__model_section *s = &model->sections[i];
        const bool same = XXH3_64bits(peri__model_data(model, i), (size_t)s->bytes) == s->checksum;
        if (peri__mapped_cut(&model->file))
            return peri__fail(PERI_EIO, "peri_model_verify: '%.200s' was cut, or cannot be read", model->path);
        if (!same)
            return peri__fail(PERI_EFORMAT, "peri_model_verify: '%.200s': section %d, bytes %lld to %lld, is damaged",
                              model->path, i, (long long)s->offset, (long long)(s->offset + s->bytes));
    }
    return PERI_OK;
}

peri_status peri__model_unchanged(const char *function, const peri_model *m)
{
    struct stat info;
    const peri__mapped *f = &m->file;
    if (f->fd < 0) return PERI_OK;
    if (fstat(f->fd, &info) != 0) return peri__fail(PERI_EIO, "%s: '%.200s': %s", function, m->path, strerror(errno));
    if (peri__mapped_cut(f) || info.st_size < f->bytes)
        return peri__fail(PERI_EIO, "%s: '%.200s' was cut, or could not be read, while it was mapped; open it again",
                          function, m->path);
    if (info.st_size != f->bytes || info.st_mtim.tv_sec != f->changed_s || info.st_mtim.tv_nsec != f->changed_ns)
        return peri__fail(PERI_EIO, "%s: '%.200s' was written to since it was opened; open it again", function,
                          m->path);
    return PERI_OK;
}

peri_status peri_model_changed(const peri_model *model)
{
    PERI_NEED(model);
    return peri__model_unchanged("peri_model_changed", model);
}

/* -- describing ---------------------------------------------------------------------------------------------------- */

peri_status peri_model_describe(const peri_model *model, peri_model_info *out)
{
    PERI_NEED(model);
    const peri_model_info now = {.path = model->path,
                                 .name = model->name,
                                 .producer = model->producer,
                                 .digest = model->digest,
                                 .version = model->version,
                                 .operations = model->n_operations,
                                 .bytes = model->file.bytes,
                                 .table_bytes = model->table_bytes,
                                 .step = model->step,
                                 .inputs = model->n_inputs,
                                 .outputs = model->n_outputs,
                                 .tables = model->n_tables};
    return PERI_GIVE(peri_model_info, out, &now);
}

const peri_model_input *peri_model_inputs(const peri_model *model, int32_t *n)
{
    if (n) *n = model ? model->n_inputs : 0;
    return model ? model->inputs : NULL;
}

const peri_model_output *peri_model_outputs(const peri_model *model, int32_t *n)
{
    if (n) *n = model ? model->n_outputs : 0;
    return model ? model->outputs : NULL;
}

peri_status peri_model_input_describe(const peri_model *model, int64_t input, peri_model_input_rules *out)
{
    PERI_NEED(model);
    if (input < 0 || input >= model->n_inputs)
        return peri__fail(PERI_EINVAL, "peri_model_input_describe: input %lld, allowed: 0..%d", (long long)input,
                          model->n_inputs - 1);
    const peri__model_rule *rule = &model->rules[input];
    const peri_model_input_rules now = {.length = rule->length, .like = rule->like, .counts = rule->counts};
    return PERI_GIVE(peri_model_input_rules, out, &now);
}

int64_t peri_model_output_list(const peri_model *model, int64_t output)
{
    return model && output >= 0 && output < model->n_outputs ? peri__model_output_list(model, (int32_t)output) : -1;
}

bool peri_model_output_best(const peri_model *model, int64_t output)
{
    if (!model || output < 0 || output >= model->n_outputs) return false;
    const peri__model_operation *o = &model->operations[model->values[model->output_values[output]].made_by];
    if (o->kind != PERI__MODEL_copy || model->values[*o->in].made_by < 0) return false;
    const peri__model_operation *from = &model->operations[model->values[*o->in].made_by];
    if (from->kind != PERI__MODEL_top) return false;
    const int64_t k = from->sizes[0], n = o->sizes[0]; /* of `copy`: dimensions, offset, shape, strides */
    return model->outputs[output].columns == k && o->sizes[1] % k == 0 && o->sizes[1 + n] == k &&
           o->sizes[1 + 2 * n] == 1;
}

const peri_model_table *peri_model_tables(const peri_model *model, int32_t *n)
{
    if (n) *n = model ? model->n_tables : 0;
    return model ? model->tables : NULL;
}
