/* SPDX-License-Identifier: Apache-2.0
 *
 * arrays.c: files of arrays that NumPy wrote. An npz is a zip archive whose members are npy files:
 *
 *     member 0: local header, name, npy file
 *     member 1 ...
 *     directory: an entry per member
 *     [zip64: its end, and where that is]
 *     end
 *
 * Nothing in a file is believed: every place and size is checked against the bytes that are there.
 */
#include "text_window.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(PERI_HAVE_ZLIB)
#include <zlib.h>
#endif

enum {
    MOST_ARRAYS = 1 << 16,
    MOST_DIMS = 8,
    END_BYTES = 22,
    LOCATOR_BYTES = 20,
    END_64_BYTES = 56,
    ENTRY_BYTES = 46,
    LOCAL_BYTES = 30,
    MOST_CHECKED = 1 << 30 /* bytes of a member that is not packed: more would make the first batch wait for seconds */
};

/** An array of the file, with what of it is in memory. */
typedef struct entry {
    peri_array array;
    void *unpacked; /* the npy file, or NULL: it is in the mapped file */
} entry;

struct peri_arrays {
    char *path;
    const uint8_t *bytes;
    int64_t size;
    void *mapped; /* NULL: the caller's memory */
    entry *entries;
    int32_t n, room;
};

/** PERI_EFORMAT: what is wrong with the file, or with its member @name. */
__attribute__((format(printf, 3, 4))) static peri_status damaged(const peri_arrays *a, const char *name,
                                                                 const char *format, ...)
{
    char why[256];
    va_list list;
    va_start(list, format);
    vsnprintf(why, sizeof why, format, list);
    va_end(list);
    return peri__fail(PERI_EFORMAT, "peri_arrays: %s%s%s: %s", a->path, name && *name ? ": " : "", name ? name : "",
                      why);
}

/** A little-endian number of @n bytes. */
static uint64_t number(const uint8_t *p, int n)
{
    uint64_t x = 0;
    for (int i = n - 1; i >= 0; i--) x = x << 8 | p[i];
    return x;
}

/* -- npy ----------------------------------------------------------------------------------------------------------- */

/** Where the value of @key begins in the header, behind blanks; NULL: it is not there. */
static const char *value_of(const char *header, const char *key)
{
    char quoted[32];
    snprintf(quoted, sizeof quoted, "'%s'", key);
    const char *p = strstr(header, quoted);
    if (!p) return NULL;
    p += strlen(quoted);
    p += strspn(p, " ");
    if (*p != ':') return NULL;
    return p + 1 + strspn(p + 1, " ");
}

static peri_status read_dtype(const peri_arrays *a, const char *header, peri_array *out)
{
    static const struct {
        const char *text;
        int32_t dtype;
    } known[] = {{"<f4", PERI_F32}, {"<f8", PERI_F64}, {"<f2", PERI_F16}, {"<i8", PERI_I64}, {"<i4", PERI_I32},
                 {"<i2", PERI_I16}, {"|i1", PERI_I8},  {"|u1", PERI_U8},  {"|b1", PERI_BOOL}};
    const char *p = value_of(header, "descr");
    if (!p) return damaged(a, out->name, "the header of its array has no 'descr'");
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (*p == '\'' && strncmp(p + 1, known[i].text, 3) == 0 && p[4] == '\'') {
            out->dtype = known[i].dtype;
            return PERI_OK;
        }
    return peri__fail(PERI_EUNSUPPORTED,
                      "peri_arrays: %s%s%s: its elements are %.*s, allowed: little-endian f4, f8, f2, i8, i4, i2, i1, "
                      "u1, b1",
                      a->path, *out->name ? ": " : "", out->name, (int)strcspn(p, ",}"), p);
}

static peri_status read_shape(const peri_arrays *a, const char *header, peri_array *out)
{
    static const int64_t sizes[] = PERI_DTYPE_SIZES;
    const char *p = value_of(header, "shape");
    if (!p || *p != '(') return damaged(a, out->name, "the header of its array has no 'shape'");
    out->ndim = 0;
    out->elements = 1;
    for (p++;;) {
        p += strspn(p, " ,");
        if (*p == ')') break;
        size_t digits = strspn(p, "0123456789");
        if (digits == 0 || digits > 18) return damaged(a, out->name, "the shape of its array is damaged: %.40s", p);
        if (out->ndim == MOST_DIMS) return damaged(a, out->name, "its array has more than %d dimensions", MOST_DIMS);
        int64_t n = 0;
        for (; digits; digits--) n = n * 10 + (*p++ - '0');
        out->shape[out->ndim++] = n;
        if (__builtin_mul_overflow(out->elements, n, &out->elements) || out->elements > INT64_MAX / 16)
            return damaged(a, out->name, "the shape of its array is too large");
    }
    const char *order = value_of(header, "fortran_order");
    int32_t wide = 0;
    for (int32_t i = 0; i < out->ndim; i++) wide += out->shape[i] > 1;
    if (!order) return damaged(a, out->name, "the header of its array has no 'fortran_order'");
    if (strncmp(order, "True", 4) == 0 && wide > 1)
        return damaged(a, out->name,
                       "its array lies column by column (fortran_order); wanted: row by row (numpy.ascontiguousarray)");
    return out->elements * sizes[out->dtype] >= 0 ? PERI_OK : PERI_EFORMAT;
}

/** Read the npy file of @n bytes at @p; out->name is set. */
static peri_status read_npy(const peri_arrays *a, const uint8_t *p, int64_t n, peri_array *out)
{
    static const int64_t sizes[] = PERI_DTYPE_SIZES;
    if (n < 10 || memcmp(p, "\x93NUMPY", 6) != 0) return damaged(a, out->name, "it is no npy file");
    int64_t wide = p[6] == 1 ? 2 : 4;
    if (p[6] < 1 || p[6] > 3 || n < 8 + wide)
        return damaged(a, out->name, "an npy file of version %d, allowed: 1..3", p[6]);
    int64_t length = (int64_t)number(p + 8, (int)wide), at = 8 + wide;
    if (length > 1 << 16 || length > n - at)
        return damaged(a, out->name, "its array's header of %lld bytes is cut short", (long long)length);
    char *header = peri__alloc((size_t)length + 1);
    if (!header) return PERI_ENOMEM;
    memcpy(header, p + at, (size_t)length);
    header[length] = 0;
    peri_status status = read_dtype(a, header, out);
    if (status >= 0) status = read_shape(a, header, out);
    peri__free(header);
    if (status < 0) return status;
    at += length;
    if (out->elements > (n - at) / sizes[out->dtype])
        return damaged(a, out->name,
                       "it is cut short: its array has %lld elements of %lld bytes, and %lld bytes are there",
                       (long long)out->elements, (long long)sizes[out->dtype], (long long)(n - at));
    out->data = p + at;
    return PERI_OK;
}

/** Room for one more array. @name: @n bytes, copied. */
static peri_status add_entry(peri_arrays *a, const void *name, int64_t n, entry **out)
{
    if (a->n == a->room) {
        int32_t room = a->room ? 2 * a->room : 4;
        entry *entries = peri__realloc(a->entries, sizeof *entries * (size_t)room);
        if (!entries) return PERI_ENOMEM;
        a->entries = entries;
        a->room = room;
    }
    char *copy = peri__alloc((size_t)n + 1);
    if (!copy) return PERI_ENOMEM;
    for (int64_t i = 0; i < n; i++) copy[i] = ((const char *)name)[i] >= ' ' ? ((const char *)name)[i] : '?';
    copy[n] = 0;
    *out = &a->entries[a->n++];
    **out = (entry){.array = {.size = sizeof(peri_array), .name = copy}};
    return PERI_OK;
}

/* -- npz ----------------------------------------------------------------------------------------------------------- */

/** What the directory says of a member. */
typedef struct member {
    const uint8_t *name;
    int64_t name_bytes, packed, size, local;
    uint32_t crc, method, flags;
} member;

/** The numbers that do not fit into 32 bits stand in an extra field, those that are missing, in this order. */
static peri_status read_extra(const peri_arrays *a, const uint8_t *p, int64_t n, member *m)
{
    int64_t *wide[] = {&m->size, &m->packed, &m->local};
    for (; n >= 4; ) {
        int64_t length = (int64_t)number(p + 2, 2), at = 4;
        if (length > n - 4) break;
        for (int i = 0; number(p, 2) == 1 && i < 3; i++) {
            if (*wide[i] != UINT32_MAX) continue;
            if (at + 8 > 4 + length) return damaged(a, NULL, "its directory is damaged: a zip64 field is too short");
            *wide[i] = (int64_t)number(p + at, 8);
            at += 8;
        }
        p += 4 + length;
        n -= 4 + length;
    }
    return PERI_OK;
}

/** Whether the @bytes of a member that is not packed are those that were written. Members of more than MOST_CHECKED
 *  bytes, and all in a build without zlib, are taken as they are. */
static peri_status check_stored(const peri_arrays *a, const member *m, const uint8_t *bytes, const char *name)
{
#if defined(PERI_HAVE_ZLIB)
    if (m->size > MOST_CHECKED) return PERI_OK;
    uint32_t crc = (uint32_t)crc32_z(0, bytes, (size_t)m->size);
    if (crc != m->crc)
        return damaged(a, name, "its bytes are damaged: their checksum is %08x, and the directory says %08x", crc,
                       m->crc);
#else
    (void)a, (void)m, (void)bytes, (void)name;
#endif
    return PERI_OK;
}

#if defined(PERI_HAVE_ZLIB)
/** Unpack a member into new memory. */
static peri_status inflate_member(const peri_arrays *a, const member *m, const uint8_t *p, const char *name, void **out)
{
    /* deflate makes nothing 1,032 times smaller or less: a damaged size asks for no memory. */
    if (m->size / 1040 > m->packed)
        return damaged(a, name, "%lld packed bytes cannot be %lld", (long long)m->packed, (long long)m->size);
    uint8_t *bytes = peri__alloc((size_t)m->size + 1);
    z_stream z = {.next_in = (void *)(uintptr_t)p};
    if (!bytes) return PERI_ENOMEM;
    if (inflateInit2(&z, -MAX_WBITS) != Z_OK) {
        peri__free(bytes);
        return PERI_ENOMEM;
    }
    int64_t given = 0, got = 0;
    int code = Z_OK;
    while (code == Z_OK) {
        z.avail_in = (unsigned)peri__min(m->packed - given, (int64_t)1 << 30);
        z.next_out = bytes + got;
        z.avail_out = (unsigned)peri__min(m->size - got, (int64_t)1 << 30);
        unsigned in = z.avail_in, room = z.avail_out;
        code = inflate(&z, Z_NO_FLUSH);
        given += in - z.avail_in;
        got += room - z.avail_out;
        if (code == Z_OK && in == z.avail_in && room == z.avail_out) code = Z_BUF_ERROR;
    }
    inflateEnd(&z);
    uLong crc = crc32_z(0, bytes, (size_t)got);
    bool good = code == Z_STREAM_END && got == m->size && crc == m->crc;
    if (good) *out = bytes;
    else peri__free(bytes);
    return good ? PERI_OK : damaged(a, name, "its packed bytes are damaged, or cut short");
}
#endif

/** The bytes of a member, in the file or unpacked. */
static peri_status member_bytes(const peri_arrays *a, const member *m, entry *e, const uint8_t **bytes)
{
    const char *name = e->array.name;
    if (m->local < 0 || m->local > a->size - LOCAL_BYTES || memcmp(a->bytes + m->local, "PK\x03\x04", 4) != 0)
        return damaged(a, name, "the directory says that it begins at byte %lld, where no member begins",
                       (long long)m->local);
    const uint8_t *p = a->bytes + m->local;
    int64_t at = m->local + LOCAL_BYTES + (int64_t)number(p + 26, 2) + (int64_t)number(p + 28, 2);
    if (m->packed < 0 || m->size < 0 || at > a->size || m->packed > a->size - at)
        return damaged(a, name, "it is cut short: it has %lld bytes from byte %lld on, and the file %lld",
                       (long long)m->packed, (long long)at, (long long)a->size);
    *bytes = a->bytes + at;
    if (m->flags & 1) return damaged(a, name, "it is encrypted");
    if (m->method == 0)
        return m->packed == m->size ? check_stored(a, m, *bytes, name)
                                    : damaged(a, name, "its sizes differ, and it is not packed");
    if (m->method != 8) return damaged(a, name, "it is packed by method %u, allowed: 0 (none), 8 (deflate)", m->method);
#if defined(PERI_HAVE_ZLIB)
    PERI_TRY(inflate_member(a, m, *bytes, name, &e->unpacked));
    *bytes = e->unpacked;
    return PERI_OK;
#else
    return peri__fail(PERI_EUNSUPPORTED,
                      "peri_arrays: %s: %s is packed, and this build has no zlib: install zlib1g-dev, then: make probe "
                      "all",
                      a->path, name);
#endif
}

static peri_status read_member(peri_arrays *a, const member *m)
{
    entry *e;
    const uint8_t *bytes = NULL;
    bool suffix = m->name_bytes >= 4 && memcmp(m->name + m->name_bytes - 4, ".npy", 4) == 0;
    PERI_TRY(add_entry(a, m->name, m->name_bytes - (suffix ? 4 : 0), &e));
    PERI_TRY(member_bytes(a, m, e, &bytes));
    return read_npy(a, bytes, m->size, &e->array);
}

/** The entry of the directory at @at; @next: where the next one begins. */
static peri_status read_entry(const peri_arrays *a, int64_t at, member *m, int64_t *next)
{
    const uint8_t *p = a->bytes + at;
    if (at > a->size - ENTRY_BYTES || memcmp(p, "PK\x01\x02", 4) != 0)
        return damaged(a, NULL, "its directory is damaged at byte %lld", (long long)at);
    int64_t name = (int64_t)number(p + 28, 2), extra = (int64_t)number(p + 30, 2), comment = (int64_t)number(p + 32, 2);
    if (name + extra + comment > a->size - at - ENTRY_BYTES)
        return damaged(a, NULL, "its directory is cut short at byte %lld", (long long)at);
    *m = (member){.name = p + ENTRY_BYTES,
                  .name_bytes = name,
                  .packed = (int64_t)number(p + 20, 4),
                  .size = (int64_t)number(p + 24, 4),
                  .local = (int64_t)number(p + 42, 4),
                  .crc = (uint32_t)number(p + 16, 4),
                  .method = (uint32_t)number(p + 10, 2),
                  .flags = (uint32_t)number(p + 8, 2)};
    *next = at + ENTRY_BYTES + name + extra + comment;
    return read_extra(a, p + ENTRY_BYTES + name, extra, m);
}

/** The end of the archive: where its directory begins, and how many members it has. */
static peri_status find_directory(const peri_arrays *a, int64_t *at, int64_t *members)
{
    int64_t end = a->size - END_BYTES, first = peri__max(end - UINT16_MAX, (int64_t)0);
    while (end >= first && memcmp(a->bytes + end, "PK\x05\x06", 4) != 0) end--;
    if (end < first) return damaged(a, NULL, "the end of a zip archive is missing: it is cut short");
    const uint8_t *p = a->bytes + end;
    *members = (int64_t)number(p + 10, 2);
    *at = (int64_t)number(p + 16, 4);
    p -= LOCATOR_BYTES;
    if (end < LOCATOR_BYTES || memcmp(p, "PK\x06\x07", 4) != 0) return PERI_OK;
    int64_t wide = (int64_t)number(p + 8, 8);
    if (wide < 0 || wide > a->size - END_64_BYTES || memcmp(a->bytes + wide, "PK\x06\x06", 4) != 0)
        return damaged(a, NULL, "its zip64 end is not at byte %lld, where it should be", (long long)wide);
    *members = (int64_t)number(a->bytes + wide + 32, 8);
    *at = (int64_t)number(a->bytes + wide + 48, 8);
    return PERI_OK;
}

static peri_status read_npz(peri_arrays *a)
{
    int64_t at = 0, members = 0;
    member m;
    PERI_TRY(find_directory(a, &at, &members));
    if (members < 1 || members > MOST_ARRAYS)
        return damaged(a, NULL, "a zip archive of %lld members, allowed: 1..%d", (long long)members, MOST_ARRAYS);
    if (at < 0) return damaged(a, NULL, "its directory is at no possible place");
    for (int64_t i = 0; i < members; i++) {
        PERI_TRY(read_entry(a, at, &m, &at));
        PERI_TRY(read_member(a, &m));
    }
    return PERI_OK;
}

/* -- opening ------------------------------------------------------------------------------------------------------- */

static peri_status read_file(peri_arrays *a)
{
    entry *e;
    if (a->size == 0) return damaged(a, NULL, "it is empty, wanted an npy or npz file");
    if (a->size >= 4 && (memcmp(a->bytes, "PK\x03\x04", 4) == 0 || memcmp(a->bytes, "PK\x05\x06", 4) == 0))
        return read_npz(a);
    const char *kind = a->size >= 6 && memcmp(a->bytes, "\x93NUMPY", 6) == 0
                           ? NULL
                           : peri__file_kind((const char *)a->bytes, peri__min(a->size, (int64_t)4096));
    if (kind) return damaged(a, NULL, "it is %s, wanted an npy or npz file", kind);
    PERI_TRY(add_entry(a, "", 0, &e));
    return read_npy(a, a->bytes, a->size, &e->array);
}

static peri_status map_file(peri_arrays *a)
{
    struct stat info;
    int fd = open(a->path, O_RDONLY | O_CLOEXEC);
    bool good = fd >= 0 && fstat(fd, &info) == 0;
    if (good && S_ISDIR(info.st_mode)) {
        errno = EISDIR;
        good = false;
    }
    if (good && info.st_size > 0) {
        a->mapped = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        good = a->mapped != MAP_FAILED;
        if (!good) a->mapped = NULL;
    }
    if (good) {
        a->size = (int64_t)info.st_size;
        a->bytes = a->mapped;
    }
    peri_status status = good ? PERI_OK : peri__fail(PERI_EIO, "peri_arrays: %s: %s", a->path, strerror(errno));
    if (fd >= 0) close(fd);
    return status;
}

static peri_status open_arrays(const char *path, const void *bytes, int64_t n, peri_arrays **out)
{
    peri_arrays *a = peri__alloc_zero(sizeof *a);
    if (!a) return PERI_ENOMEM;
    peri__object_count(1);
    a->bytes = bytes;
    a->size = n;
    a->path = peri__strdup(path);
    peri_status status = a->path ? PERI_OK : PERI_ENOMEM;
    if (status >= 0 && !bytes) status = map_file(a);
    if (status >= 0) status = read_file(a);
    if (status < 0) peri_arrays_release(a);
    else *out = a;
    return status;
}

peri_status peri_arrays_open(const char *path, peri_arrays **out)
{
    PERI_NEED(path);
    PERI_NEED(out);
    return open_arrays(path, NULL, 0, out);
}

peri_status peri_arrays_open_memory(const char *path, const void *bytes, int64_t size, peri_arrays **out)
{
    PERI_NEED(path);
    PERI_NEED(bytes);
    PERI_NEED(out);
    if (size < 0) return peri__fail(PERI_EINVAL, "peri_arrays_open_memory: %lld bytes", (long long)size);
    return open_arrays(path, bytes, size, out);
}

void peri_arrays_release(peri_arrays *a)
{
    if (!a || peri__border_refuses(__func__)) return;
    for (int32_t i = 0; i < a->n; i++) {
        peri__free((void *)a->entries[i].array.name);
        peri__free(a->entries[i].unpacked);
    }
    if (a->mapped) munmap(a->mapped, (size_t)a->size);
    peri__free(a->entries);
    peri__free(a->path);
    peri__object_count(-1);
    peri__free(a);
}

int32_t peri_arrays_count(const peri_arrays *a) { return a ? a->n : 0; }

peri_status peri_arrays_get(const peri_arrays *a, int32_t i, peri_array *out)
{
    PERI_NEED(a);
    PERI_NEED(out);
    if (i < 0 || i >= a->n) return peri__fail(PERI_ERANGE, "peri_arrays_get: array %d, allowed: 0..%d", i, a->n - 1);
    return PERI_GIVE(peri_array, out, &a->entries[i].array);
}
