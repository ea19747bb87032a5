/* SPDX-License-Identifier: Apache-2.0
 *
 * manifest.c: any bytes as a manifest, as a rank's part of one, or as the header of a safetensors file: refused with a
 * sentence, or what was read is possible (pieces within their tensors and files, every element once), and is the same
 * after it was printed and read again.
 *
 * inputs: 150000
 */
#include "choices.h"

#include "runtime/checkpoint/manifest.h"

#include <string.h>
#include <xxhash.h>

enum { FILE_BYTES = 4096 };

static void check_pieces(const peri__manifest *m)
{
    for (int64_t i = 0; i < m->n_entries; i++) {
        const peri__entry *e = &m->entries[i];
        require(i == 0 || strcmp(peri__entry_name(m, e - 1), peri__entry_name(m, e)) < 0, "tensors out of order");
        require(e->ndim >= 0 && e->ndim <= PERI_MAX_DIMS && peri__safetensors_dtype(e->dtype), "an impossible tensor");
        for (int64_t k = e->first_piece; k < e->first_piece + e->n_pieces; k++) {
            const peri__stored_piece *p = &m->pieces[k];
            peri__region r;
            int64_t elements;
            peri__piece_region(m, e, p, &r);
            require(peri__region_check("fuzz", e->ndim, peri__entry_shape(m, e), &r, &elements) >= 0,
                    "a piece outside its tensor");
            require(p->file >= 0 && p->file < m->n_files, "a file that is not there");
            if (p->rows) {
                const peri__entry *list = peri__rows_entry(m, p);
                require(list && list->dtype == PERI_I64 && list->ndim == 1 && *peri__entry_shape(m, list) == p->listed,
                        "no such list");
                elements = peri__listed_elements(elements, r.size[0], p->listed);
            }
            require(p->bytes == elements * peri_dtype_size(e->dtype), "bytes that do not fit");
            require(p->begin >= 0 && p->begin <= m->files[p->file].bytes - p->bytes, "a piece outside its file");
        }
    }
}

/** A text that is read in parts. */
static peri_status get_part(void *text, char *out, int64_t n, int64_t at)
{
    memcpy(out, (const char *)text + at, (size_t)n);
    return PERI_OK;
}

/** What a settled manifest says, printed and read again, is the same. */
static void check_again(peri__manifest *m)
{
    peri__manifest again = {0};
    peri__buffer text = {0}, other = {0};
    const peri_checkpoint_config facts = {.size = sizeof facts,
                                         .values = m->values,
                                         .parent = *m->parent ? m->parent : NULL,
                                         .increment = m->increment,
                                         .same_as = *m->same_as ? m->same_as : NULL};
    require(peri__manifest_print(m, &facts, peri__buffer_put, &text) >= 0, "what was read cannot be printed");
    require(peri__manifest_read(&again, get_part, text.data, text.bytes, false, "fuzz") >= 0 &&
                peri__manifest_settle(&again, "fuzz") >= 0,
            "what was printed cannot be read");
    require(peri__manifest_print(&again, &facts, peri__buffer_put, &other) >= 0,
            "what was read again cannot be printed");
    require(text.bytes == other.bytes && memcmp(text.data, other.data, (size_t)text.bytes) == 0,
            "what was read again is something else");
    peri__free(text.data);
    peri__free(other.data);
    peri__manifest_fini(&again);
}

static void check_same(const peri__manifest *m, const peri__entry *e, const peri__manifest *n, const peri__entry *x)
{
    require(x && x->dtype == e->dtype && x->ndim == e->ndim && x->n_pieces == e->n_pieces &&
                memcmp(peri__entry_shape(n, x), peri__entry_shape(m, e), (size_t)e->ndim * sizeof(int64_t)) == 0,
            "a tensor of a folded manifest has another form");
    for (int64_t k = 0; k < e->n_pieces; k++) {
        const peri__stored_piece *p = &m->pieces[e->first_piece + k], *q = &n->pieces[x->first_piece + k];
        char a[2000], b[2000];
        peri__region r, s;
        peri__piece_region(m, e, p, &r);
        peri__piece_region(n, x, q, &s);
        require(strcmp(peri__region_text(e->ndim, &r, a, sizeof a), peri__region_text(x->ndim, &s, b, sizeof b)) == 0 &&
                    p->begin == q->begin && p->bytes == q->bytes && p->checksum == q->checksum && p->file == q->file,
                "a piece of a folded manifest is another one");
        if (p->rows) check_same(m, peri__rows_entry(m, p), n, peri__rows_entry(n, q));
    }
}

/** What a settled manifest says of a tensor, it says when it is folded, too; in any order of tensors. */
static void check_folded(const peri__manifest *m, char *text, int64_t n)
{
    peri__manifest folded = {0};
    require(peri__manifest_read(&folded, get_part, text, n, false, "fuzz") >= 0 && peri__manifest_fold(&folded) >= 0,
            "a manifest that was read cannot be folded");
    for (int64_t i = m->n_entries - 1; i >= 0; i--) {
        const peri__entry *e = &m->entries[i];
        const char *name = peri__entry_name(m, e);
        require(peri__manifest_unfold(&folded, name, get_part, text, "fuzz") >= 0, peri_error_message());
        check_same(m, e, &folded, peri__entry_named(&folded, name));
    }
    peri__manifest_fini(&folded);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    peri__manifest m = {0};
    peri_status status;
    char *sealed = NULL;
    int64_t sealed_bytes = 0;
    if (size == 0) return 0;
    const char *text = (const char *)data + 1;
    const int64_t n = (int64_t)size - 1;
    if (data[0] % 3 == 0) { /* with a right checksum, else nothing would get beyond it */
        sealed = malloc(size + 64);
        require(sealed != NULL, "no memory");
        memcpy(sealed, text, (size_t)n);
        XXH128_hash_t h = XXH3_128bits(text, (size_t)n);
        int more = sprintf(sealed + n, ",\n\"checksum\":\"%016llx%016llx\"}\n", (unsigned long long)h.high64,
                           (unsigned long long)h.low64);
        sealed_bytes = n + more;
        status = peri__manifest_read(&m, get_part, sealed, sealed_bytes, false, "fuzz");
    } else if (data[0] % 3 == 1) {
        status = peri__manifest_read(&m, get_part, (void *)text, n, true, "fuzz");
        if (status >= 0) /* of another rank */
            status = peri__manifest_read(&m, get_part, (void *)text, n, true, "fuzz");
    } else {
        status = peri__safetensors_parse(&m, "x.safetensors", 8 + n + FILE_BYTES, text, n, "fuzz");
    }
    if (status >= 0) status = peri__manifest_settle(&m, "fuzz");
    if (status < 0) {
        require(strlen(peri_error_message()) > 10, "an error without a sentence");
    } else {
        check_pieces(&m);
        check_again(&m);
        if (sealed) check_folded(&m, sealed, sealed_bytes);
    }
    free(sealed);
    peri__manifest_fini(&m);
    return 0;
}
