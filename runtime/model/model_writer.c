/* SPDX-License-Identifier: Apache-2.0
 *
 * model_writer.c: a model file while it is being written, beside its place: sections one after the other, then the
 * header, then the preamble. It gets its name when it is whole, and what had the name before stays what it was for
 * those who have it open.
 */
#include "../base/floats.h"
#include "../base/quiet.h"
#include "../../kernels/dense.h"
#include "../../kernels/ref/number.h"
#include "model_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum { BUFFER = 1 << 20, PACKED = 1 << 18 /* bytes, numbers that are packed at a time */ };

struct peri_model_writer {
    char *path, *fresh; /* where it will be, and where it is */
    int fd;
    int64_t at; /* bytes written and buffered */
    char *buffer;
    int64_t filled;
    XXH3_state_t *hash;
    peri__model_section *sections;
    int32_t n;
    int32_t forks; /* peri__forks of the process that writes */
    bool open, finished, published; /* open: the last section is being written */
    peri_status spent; /* after an error of the file system */
};

static peri_status fail_writing(peri_model_writer *w, const char *what)
{
    const int why = errno;
    return w->spent = peri__fail(PERI_EIO, "model file '%.200s': %s: %s", w->path, what, strerror(why));
}

static peri_status check_usable(const peri_model_writer *w, const char *function)
{
    if (w->spent < 0) return peri__fail(w->spent, "%s: '%.200s': writing has failed before", function, w->path);
    if (w->forks != peri__forks())
        return peri__fail(PERI_EUNSUPPORTED, "%s: '%.200s': the process that this one was forked from writes it",
                          function, w->path);
    if (w->finished) return peri__fail(PERI_EINVAL, "%s: '%.200s' is finished", function, w->path);
    return PERI_OK;
}

peri_status peri_model_writer_new(const char *path, peri_model_writer **out)
{
    PERI_NEED(path);
    PERI_NEED(out);
    char fresh[PATH_MAX];
    uint64_t mark;
    if (getrandom(&mark, sizeof mark, 0) != sizeof mark ||
        snprintf(fresh, sizeof fresh, "%s.%016llx", path, (unsigned long long)mark) >= (int)sizeof fresh)
        return peri__fail(PERI_EINVAL, "peri_model_writer_new: the path '%.200s' is too long", path);
    peri_model_writer *w = peri__alloc_zero(sizeof *w);
    if (!w) return PERI_ENOMEM;
    peri__object_count(1);
    w->fd = -1;
    w->forks = peri__forks();
    w->path = peri__strdup(path);
    w->fresh = peri__strdup(fresh);
    w->buffer = peri__alloc(BUFFER);
    w->hash = XXH3_createState();
    peri_status status = w->path && w->fresh && w->buffer && w->hash ? PERI_OK : PERI_ENOMEM;
    if (status >= 0) {
        peri__make_folders(path, false);
        w->fd = peri__fd_of_ours(open(fresh, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
        if (w->fd < 0) status = fail_writing(w, "it cannot be made");
    }
    if (status >= 0) {
        w->at = sizeof(peri__model_preamble);
        memset(w->buffer, 0, (size_t)w->at);
        w->filled = w->at;
        *out = w;
    } else {
        peri_model_writer_release(w);
    }
    return status;
}

static peri_status flush_buffer(peri_model_writer *w)
{
    PERI__QUIET;
    const char *from = w->buffer;
    while (w->filled > 0) {
        ssize_t n = write(w->fd, from, (size_t)w->filled);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return fail_writing(w, "it cannot be written");
        from += n;
        w->filled -= n;
    }
    return PERI_OK;
}

static peri_status write_bytes(peri_model_writer *w, const void *data, int64_t bytes)
{
    const char *from = data;
    while (bytes > 0) {
        const int64_t n = peri__min(bytes, BUFFER - w->filled);
        memcpy(w->buffer + w->filled, from, (size_t)n);
        w->filled += n;
        w->at += n;
        from += n;
        bytes -= n;
        if (w->filled == BUFFER) PERI_TRY(flush_buffer(w));
    }
    return PERI_OK;
}

/** Zeros up to the next place where a section may begin. */
static peri_status align_section(peri_model_writer *w)
{
    static const char zeros[PERI__MODEL_ALIGN];
    return write_bytes(w, zeros, (PERI__MODEL_ALIGN - w->at % PERI__MODEL_ALIGN) % PERI__MODEL_ALIGN);
}

/** End the section that is being written. */
static void end_section(peri_model_writer *w)
{
    if (!w->open) return;
    peri__model_section *s = &w->sections[w->n - 1];
    s->bytes = w->at - s->offset;
    s->checksum = XXH3_64bits_digest(w->hash);
    w->open = false;
}

peri_status peri_model_writer_begin(peri_model_writer *writer, int32_t *section)
{
    PERI_NEED(writer);
    PERI_NEED(section);
    PERI_TRY(check_usable(writer, "peri_model_writer_begin"));
    peri__model_section *more = peri__realloc(writer->sections, sizeof *more * (size_t)(writer->n + 1));
    if (!more) return PERI_ENOMEM;
    writer->sections = more;
    end_section(writer);
    PERI_TRY(align_section(writer));
    writer->sections[writer->n] = (peri__model_section){.offset = writer->at};
    XXH3_64bits_reset(writer->hash);
    writer->open = true;
    *section = writer->n++;
    return PERI_OK;
}

peri_status peri_model_writer_put(peri_model_writer *writer, const void *data, int64_t bytes)
{
    PERI_NEED(writer);
    PERI_TRY(check_usable(writer, "peri_model_writer_put"));
    if (!writer->open) return peri__fail(PERI_EINVAL, "peri_model_writer_put: no section was begun");
    if (bytes < 0 || (bytes > 0 && !data))
        return peri__fail(PERI_EINVAL, "peri_model_writer_put: %lld bytes%s", (long long)bytes,
                          data ? "" : " at no place");
    XXH3_64bits_update(writer->hash, data, (size_t)bytes);
    return write_bytes(writer, data, bytes);
}

/** The code of a number; 0 where the scale is no use. */
static int8_t code_of_number(float x, float scale)
{
    return scale > 0 && scale <= FLT_MAX ? (int8_t)lrintf(fmaxf(-127, fminf(127, x / scale))) : 0;
}

/** One panel of @inner rows as codes, and then the scales of its columns. */
static void panel_as_codes(const float *panel, int64_t inner, char *to)
{
    float scales[PERI_PANEL];
    for (int64_t c = 0; c < PERI_PANEL; c++) {
        float most = 0;
        for (int64_t k = 0; k < inner; k++) {
            const float x = fabsf(panel[k * PERI_PANEL + c]);
            if (!(x <= most) && most == most) most = x; /* NaN stays, and makes all of the column NaN */
        }
        scales[c] = most / 127;
    }
    for (int64_t i = 0; i < inner * PERI_PANEL; i++) to[i] = (char)code_of_number(panel[i], scales[i % PERI_PANEL]);
    memcpy(to + inner * PERI_PANEL, scales, sizeof scales);
}

int64_t peri__model_panels_as(const float *panels, int64_t cols, int64_t inner, int32_t dtype, void *to)
{
    PERI__OWN_FLOATS;
    const int64_t n = peri_panel_size(cols, inner);
    char *out = to;
    if (dtype == PERI_F32) memcpy(to, panels, sizeof *panels * (size_t)n);
    for (int64_t at = 0; dtype == PERI_I8 && at < n;
         at += PERI_PANEL * inner, out += peri_panel_bytes(PERI_PANEL, inner, dtype))
        panel_as_codes(panels + at, inner, out);
    for (int64_t i = 0; dtype == PERI_BF16 && i < n; i++) {
        const uint16_t narrow = k_f32_to_bf16(panels[i]);
        memcpy(out + 2 * i, &narrow, sizeof narrow);
    }
    return peri_panel_bytes(cols, inner, dtype);
}

peri_status peri__model_matrix_held(const char *who, const float *weight, int64_t cols, int64_t inner,
                                    int64_t column_step, int64_t inner_step, int32_t dtype)
{
    static const float most_bf16 = 0x1.fefffep127F; /* rounds to the largest one; the next f32 rounds to infinity */
    for (int64_t c = 0; c < cols && dtype != PERI_F32; c++)
        for (int64_t k = 0; k < inner; k++) {
            const float x = weight[c * column_step + k * inner_step];
            const bool held = dtype == PERI_BF16 ? !isfinite(x) || fabsf(x) <= most_bf16 : isfinite(x);
            if (held) continue;
            return peri__fail(PERI_ERANGE,
                              "%s: its number for output %lld, input %lld is %g, which a matrix of %s does not hold; "
                              "allowed: %s",
                              who, (long long)c, (long long)k, isnan(x) ? (double)NAN : (double)x,
                              dtype == PERI_BF16 ? "bf16" : "int8",
                              dtype == PERI_BF16 ? "-3.3895314e38..3.3895314e38, inf, nan" : "finite numbers");
        }
    return PERI_OK;
}

peri_status peri_model_writer_matrix(peri_model_writer *writer, const float *weight, int64_t columns, int64_t inner,
                                     int32_t dtype)
{
    PERI_NEED(writer);
    PERI_NEED(weight);
    if (dtype != PERI_F32 && dtype != PERI_BF16 && dtype != PERI_I8)
        return peri__fail(PERI_EINVAL, "peri_model_writer_matrix: dtype %s, allowed: f32, bf16, i8",
                          peri_dtype_name(dtype));
    if (columns < 1 || inner < 1)
        return peri__fail(PERI_EINVAL, "peri_model_writer_matrix: a matrix of %lld x %lld, allowed: 1 and more",
                          (long long)columns, (long long)inner);
    if (columns > PTRDIFF_MAX / (int64_t)sizeof *weight / inner)
        return peri__fail(PERI_EINVAL, "peri_model_writer_matrix: no memory holds a matrix of %lld x %lld",
                          (long long)columns, (long long)inner);
    PERI_TRY(peri__model_matrix_held("peri_model_writer_matrix", weight, columns, inner, inner, 1, dtype));
    const int64_t step = peri__max(PACKED / PERI_PANEL / inner, 1) * PERI_PANEL; /* columns at a time: whole panels */
    float *panels = peri__alloc(sizeof *panels * (size_t)peri_panel_size(peri__min(step, columns), inner));
    void *bytes = peri__alloc((size_t)peri_panel_bytes(peri__min(step, columns), inner, dtype));
    peri_status status = panels && bytes ? PERI_OK : PERI_ENOMEM;
    for (int64_t c = 0; c < columns && status >= 0; c += step) {
        const int64_t n = peri__min(step, columns - c);
        peri_panel_pack(panels, weight + c * inner, n, inner, inner, 1);
        status = peri_model_writer_put(writer, bytes, peri__model_panels_as(panels, n, inner, dtype, bytes));
    }
    peri__free(panels);
    peri__free(bytes);
    return status;
}

peri_status peri_model_writer_panels(peri_model_writer *writer, const float *weight, int64_t columns, int64_t inner)
{
    PERI__NOT_AT_BORDER;
    return peri_model_writer_matrix(writer, weight, columns, inner, PERI_F32);
}

peri_status peri_model_writer_index(peri_model_writer *writer, const int64_t *ids, int64_t rows, int64_t free)
{
    PERI_NEED(writer);
    PERI_NEED(ids);
    if (rows < 1 || rows > (int64_t)UINT32_MAX - 1)
        return peri__fail(PERI_EINVAL, "peri_model_writer_index: a map of %lld rows, allowed: 1..%lld", (long long)rows,
                          (long long)UINT32_MAX - 1);
    const int64_t slots = peri__model_map_slots(rows);
    uint32_t *index = peri__alloc(sizeof *index * (size_t)slots);
    if (!index) return PERI_ENOMEM;
    peri__model_map_index(ids, rows, free, index, slots);
    peri_status status = peri_model_writer_put(writer, index, slots * (int64_t)sizeof *index);
    peri__free(index);
    return status;
}

peri_status peri_model_writer_section(peri_model_writer *writer, int32_t section, peri_model_writer_place *out)
{
    PERI_NEED(writer);
    PERI_NEED(out);
    if (section < 0 || section >= writer->n)
        return peri__fail(PERI_EINVAL, "peri_model_writer_section: section %d, allowed: 0..%d", section, writer->n - 1);
    end_section(writer);
    const peri__model_section *s = &writer->sections[section];
    *out = (peri_model_writer_place){.offset = s->offset, .bytes = s->bytes, .checksum = s->checksum};
    return PERI_OK;
}

peri_status peri_model_writer_finish(peri_model_writer *writer, const char *header, int64_t bytes)
{
    PERI_NEED(writer);
    PERI_NEED(header);
    PERI_TRY(check_usable(writer, "peri_model_writer_finish"));
    if (bytes < 0 || bytes > PERI__MODEL_HEADER_MOST)
        return peri__fail(PERI_EINVAL, "peri_model_writer_finish: a header of %lld bytes, allowed: 0..%d",
                          (long long)bytes, PERI__MODEL_HEADER_MOST);
    end_section(writer);
    PERI_TRY(align_section(writer));
    XXH128_hash_t digest = XXH3_128bits(header, (size_t)bytes);
    peri__model_preamble p = {.magic = PERI__MODEL_MAGIC,
                              .version = PERI_MODEL_VERSION,
                              .header_offset = (uint64_t)writer->at,
                              .header_bytes = (uint64_t)bytes,
                              .file_bytes = (uint64_t)(writer->at + bytes),
                              .digest = {digest.low64, digest.high64}};
    p.checksum = XXH3_64bits(&p, offsetof(peri__model_preamble, checksum));
    PERI_TRY(write_bytes(writer, header, bytes));
    PERI_TRY(flush_buffer(writer));
    if (peri__write_at(writer->fd, &p, sizeof p, 0) != sizeof p) return fail_writing(writer, "it cannot be written");
    if (fsync(writer->fd) != 0) return fail_writing(writer, "it cannot be written");
    if (close(writer->fd) != 0) return writer->fd = -1, fail_writing(writer, "it cannot be written");
    writer->fd = -1;
    writer->finished = true;
    return PERI_OK;
}

const char *peri_model_writer_path(const peri_model_writer *writer) { return writer ? writer->fresh : NULL; }

/** That the new name is on disk, too. Not all file systems can say so. */
static void sync_folder(const char *path)
{
    char folder[PATH_MAX];
    snprintf(folder, sizeof folder, "%s", path);
    char *slash = strrchr(folder, '/');
    if (slash) slash[slash == folder] = 0;
    int fd = open(slash ? folder : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return;
    (void)!fsync(fd);
    close(fd);
}

peri_status peri_model_writer_publish(peri_model_writer *writer)
{
    PERI_NEED(writer);
    if (!writer->finished)
        return peri__fail(PERI_EINVAL, "peri_model_writer_publish: '%.200s' is not finished", writer->path);
    if (writer->published) return PERI_OK;
    if (rename(writer->fresh, writer->path) != 0) return fail_writing(writer, "it cannot get its name");
    writer->published = true;
    sync_folder(writer->path);
    return PERI_OK;
}

void peri_model_writer_release(peri_model_writer *writer)
{
    if (!writer || peri__border_refuses(__func__)) return;
    if (writer->fd >= 0) close(writer->fd);
    const bool ours = writer->forks == peri__forks(); /* a child of fork leaves what its parent writes */
    if (ours && writer->fresh && !writer->published && (writer->fd >= 0 || writer->finished)) unlink(writer->fresh);
    peri__free(writer->path);
    peri__free(writer->fresh);
    peri__free(writer->buffer);
    peri__free(writer->sections);
    XXH3_freeState(writer->hash);
    peri__free(writer);
    peri__object_count(-1);
}
