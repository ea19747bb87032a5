/* SPDX-License-Identifier: Apache-2.0
 *
 * keys.c: immutable lists of key names with a hash of the whole and positions by name.
 */
#include "jagged_internal.h"

/** Fill the table; later positions of a repeated name replace earlier ones. */
static void index_names(peri_keys *k)
{
    k->unique = true;
    k->hash = peri__hash_mix(0x70657269u, (uint64_t)k->count);
    for (int32_t i = 0; i < k->count; i++) {
        k->name_hash[i] = peri__hash_text(k->names[i]);
        k->hash = peri__hash_mix(k->hash, k->name_hash[i]);
        int32_t at = (int32_t)(k->name_hash[i] & (uint64_t)k->table_mask);
        for (; k->table[at]; at = (at + 1) & k->table_mask) {
            int32_t other = k->table[at] - 1;
            if (k->name_hash[other] == k->name_hash[i] && !strcmp(k->names[other], k->names[i])) {
                k->unique = false;
                break;
            }
        }
        k->table[at] = i + 1;
    }
}

/** Room for @count names of @bytes bytes in all. */
static peri_keys *keys_room(int32_t count, size_t bytes)
{
    int32_t slots = 4;
    while (slots < 2 * count) slots *= 2;
    size_t n = (size_t)count,
           size = sizeof(peri_keys) + n * (sizeof(uint64_t) + sizeof(char *)) + sizeof(int32_t) * (size_t)slots + bytes;
    peri_keys *k = peri__alloc_zero(size);
    if (!k) return NULL;
    peri__refs_init(&k->refs);
    k->count = count;
    k->table_mask = slots - 1;
    k->name_hash = (uint64_t *)(k + 1);
    k->names = (const char **)(k->name_hash + n);
    k->table = (int32_t *)(k->names + n);
    k->text = (char *)(k->table + slots);
    peri__object_count(1);
    return k;
}

peri_status peri_keys_new(const char *const *names, int32_t count, peri_keys **out)
{
    PERI_NEED(out);
    if (count > 0) PERI_NEED(names);
    if (count < 0 || count > 1 << 24)
        return peri__fail(PERI_EINVAL, "peri_keys_new: %d names, allowed: 0..%d", count, 1 << 24);
    size_t bytes = 0;
    for (int32_t i = 0; i < count; i++) {
        if (!names[i] || !*names[i]) return peri__fail(PERI_EINVAL, "peri_keys_new: name %d is empty", i);
        bytes += strlen(names[i]) + 1;
    }
    peri_keys *k = keys_room(count, bytes);
    if (!k) return PERI_ENOMEM;
    char *text = k->text;
    for (int32_t i = 0; i < count; i++) {
        size_t size = strlen(names[i]) + 1;
        memcpy(text, names[i], size);
        k->names[i] = text;
        text += size;
    }
    index_names(k);
    *out = k;
    return PERI_OK;
}

peri_status peri__keys_select(const peri_keys *keys, const int32_t *index, int32_t n, peri_keys **out)
{
    const char **names = peri__alloc(sizeof *names * (size_t)peri__max(n, 1));
    if (!names) return PERI_ENOMEM;
    for (int32_t i = 0; i < n; i++) names[i] = keys->names[index[i]];
    peri_status status = peri_keys_new(names, n, out);
    peri__free(names);
    return status;
}

peri_status peri__keys_slice(const peri_keys *keys, int32_t begin, int32_t end, peri_keys **out)
{
    return peri_keys_new(keys->names + begin, end - begin, out);
}

void peri_keys_retain(peri_keys *k) { if (k) peri__refs_add(&k->refs); }

void peri_keys_release(peri_keys *k)
{
    if (!k || !peri__refs_drop(&k->refs)) return;
    peri__object_count(-1);
    peri__free(k);
}

int32_t peri_keys_count(const peri_keys *k) { return k ? k->count : 0; }
const char *peri_keys_name(const peri_keys *k, int32_t i) { return k && i >= 0 && i < k->count ? k->names[i] : NULL; }
uint64_t peri_keys_hash(const peri_keys *k) { return k ? k->hash : 0; }
bool peri_keys_unique(const peri_keys *k) { return k && k->unique; }

int32_t peri_keys_find(const peri_keys *k, const char *name)
{
    if (!k || !name) return -1;
    uint64_t hash = peri__hash_text(name);
    for (int32_t at = (int32_t)(hash & (uint64_t)k->table_mask); k->table[at]; at = (at + 1) & k->table_mask) {
        int32_t i = k->table[at] - 1;
        if (k->name_hash[i] == hash && !strcmp(k->names[i], name)) return i;
    }
    return -1;
}

bool peri_keys_equal(const peri_keys *a, const peri_keys *b)
{
    if (a == b) return true;
    if (!a || !b) return false;
    if (a->count != b->count || a->hash != b->hash) return false;
    for (int32_t i = 0; i < a->count; i++)
        if (strcmp(a->names[i], b->names[i])) return false;
    return true;
}
