/* SPDX-License-Identifier: Apache-2.0
 *
 * structs.c: structures that begin with their size, between callers and a library of different versions
 * (perilune/base.h has the rule).
 */
#include "base_internal.h"

/** The caller's `size`; PERI_EINVAL unless it is that of a structure that has more than a size. */
static peri_status size_of(const void *given, size_t size, const char *function, const char *type, size_t *out)
{
    int64_t has;
    if (!given) return peri__fail(PERI_EINVAL, "%s: the %s is missing", function, type);
    memcpy(&has, given, sizeof has);
    if (has <= (int64_t)sizeof has || has > 1 << 16)
        return peri__fail(
            PERI_EINVAL,
            "%s: the size of a %s is %lld: set it to sizeof(%s), which is %zu here, and all else to 0 first", function,
            type, (long long)has, type, size);
    *out = (size_t)has;
    return PERI_OK;
}

peri_status peri__list_check(const char *function, const char *name, const void *list, int64_t n)
{
    if (n < 0)
        return peri__fail(PERI_EINVAL, "%s: %lld entries of %s, allowed: 0 and more", function, (long long)n, name);
    if (n > 0 && !list)
        return peri__fail(PERI_EINVAL, "%s: %s is missing, of %lld entries", function, name, (long long)n);
    return PERI_OK;
}

peri_status peri__struct_take(void *now, size_t size, const void *given, const char *function, const char *type)
{
    size_t has = 0;
    if (peri__border_refuses(function)) return PERI_EINVAL;
    PERI_TRY(size_of(given, size, function, type, &has));
    for (size_t i = size; i < has; i++)
        if (((const unsigned char *)given)[i])
            return peri__fail(
                PERI_EUNSUPPORTED,
                "%s: a %s of %zu bytes says something in byte %zu; this library (%s) knows %zu bytes: the "
                "program was built for a newer one, or has not set all to 0",
                function, type, has, i, PERI_VERSION_TEXT, size);
    memset(now, 0, size);
    memcpy(now, given, has < size ? has : size);
    const int64_t known = (int64_t)size;
    memcpy(now, &known, sizeof known);
    return PERI_OK;
}

const void *peri__struct_at(const void *array, int64_t i)
{
    int64_t apart;
    memcpy(&apart, array, sizeof apart);
    return (const char *)array + i * apart;
}

peri_status peri__struct_give(void *out, const void *now, size_t size, const char *function, const char *type)
{
    size_t has = 0;
    PERI_TRY(size_of(out, size, function, type, &has));
    const size_t common = has < size ? has : size;
    memcpy((char *)out + sizeof(int64_t), (const char *)now + sizeof(int64_t), common - sizeof(int64_t));
    memset((char *)out + common, 0, has - common);
    return PERI_OK;
}
