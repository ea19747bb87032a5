/* SPDX-License-Identifier: Apache-2.0
 *
 * id_map.c: raw ids to the rows of a table. A map is a dictionary in two sections: `ids` has the id of each row, and
 * `index` leads from an id to its row. An index is twice as long as the map has rows; an entry is a row's number + 1,
 * or 0 while it is free. An id's entry is at its home or behind it, with no free one between:
 *
 *     ids     row 0: 700   row 1: (free)   row 2: -9
 *     index   0  0  3  1  0  0       home of -9: 2; home of 700: 2, which was taken
 *
 * An id without a row is what `miss` says; its bucket says which row that is. Sections may have any contents: loops end
 * after all entries, and every row is compared with the number of rows.
 */
#include "../../kernels/spread.h"
#include "model_internal.h"

#include <perilune/collision.h>

enum { AHEAD = 32 }; /* ids whose entries are asked for before the first is read */

int64_t peri__model_map_slots(int64_t rows) { return 2 * rows; }

static int64_t index_home(int64_t id, int64_t slots)
{
    return (int64_t)peri_k_high(peri_k_rotate(peri_k_mix((uint64_t)id), 32), (uint64_t)slots);
}

static int64_t next_slot(int64_t at, int64_t slots) { return at + 1 < slots ? at + 1 : 0; }

/** The row of @id, whose home is @at; -1: it has none. */
static int64_t find_row(const peri__model_map *map, const int64_t *ids, const uint32_t *index, int64_t id, int64_t at)
{
    if (id == map->free) return -1;
    for (int64_t seen = 0; seen < map->slots && index[at]; seen++, at = next_slot(at, map->slots)) {
        const int64_t row = (int64_t)index[at] - 1;
        if (row < map->rows && ids[row] == id) return row;
    }
    return -1;
}

static int64_t map_bucket(const peri__model_map *map, int64_t id)
{
    return peri_k_bucket(id, map->spread, map->n_segments - 1, map->block);
}

bool peri__model_map_allows(const peri__model_map *map, int64_t id) { return map_bucket(map, id) >= 0; }

/** The row of an id that has none of its own. */
static int64_t row_of_unknown(const peri__model_map *map, int64_t id)
{
    const int64_t bucket = map_bucket(map, id);
    if (bucket < 0 || map->miss == PERI_MISS_DROP || map->miss == PERI_MISS_ERROR) return -1;
    const int64_t *at = &map->segments[bucket];
    if (map->miss == PERI_MISS_ROW) return at[1] - 1;
    const int64_t usable = peri__max(at[1] - at[0] - map->aside, 1);
    return at[0] + (int64_t)(peri_k_murmur((uint64_t)id, 0, 0) % (uint64_t)usable);
}

int64_t peri__model_map_find(const peri_model *m, const peri__model_map *map, const int64_t *ids, int64_t n,
                             int64_t *out)
{
    const int64_t *known = peri__model_data(m, map->ids);
    const uint32_t *index = peri__model_data(m, map->index);
    int64_t unknown = 0, home[AHEAD];
    for (int64_t first = 0; first < n; first += AHEAD) {
        const int64_t some = peri__min(n - first, AHEAD);
        for (int64_t i = 0; i < some; i++) {
            home[i] = index_home(ids[first + i], map->slots);
            __builtin_prefetch(&index[home[i]]);
        }
        for (int64_t i = 0; i < some; i++) {
            const uint32_t entry = index[home[i]];
            if (entry && entry <= map->rows) __builtin_prefetch(&known[entry - 1]);
        }
        for (int64_t i = 0; i < some; i++) {
            int64_t row = find_row(map, known, index, ids[first + i], home[i]);
            unknown += row < 0;
            if (out) out[first + i] = row < 0 ? row_of_unknown(map, ids[first + i]) : row;
        }
    }
    return unknown;
}

/* -- changing ------------------------------------------------------------------------------------------------------ */

static void insert_row(uint32_t *index, int64_t slots, int64_t row, int64_t id)
{
    int64_t at = index_home(id, slots);
    for (int64_t seen = 0; seen < slots; seen++, at = next_slot(at, slots)) {
        if (index[at]) continue;
        index[at] = (uint32_t)row + 1;
        return;
    }
}

/** Whether @x lies on the way from @from (not included) to @to, round and round. */
static bool lies_between(int64_t from, int64_t x, int64_t to)
{
    return from < to ? from < x && x <= to : from < x || x <= to;
}

/** Take the entry of @row, whose id is @id, out. Entries behind it that are not at home move up, so that none is cut
 *  off. */
static void remove_row(const peri__model_map *map, const int64_t *ids, uint32_t *index, int64_t row, int64_t id)
{
    int64_t hole = index_home(id, map->slots), seen = 0;
    while (index[hole] != (uint32_t)row + 1) {
        if (!index[hole] || ++seen > map->slots) return; /* of a damaged index: it is not there */
        hole = next_slot(hole, map->slots);
    }
    for (int64_t at = next_slot(hole, map->slots); index[at] && index[at] <= map->rows && at != hole;
         at = next_slot(at, map->slots)) {
        if (lies_between(hole, index_home(ids[index[at] - 1], map->slots), at)) continue;
        index[hole] = index[at];
        hole = at;
        if (++seen > map->slots) break;
    }
    index[hole] = 0;
}

void peri__model_map_set(const peri_model *m, const peri__model_map *map, int64_t row, int64_t id)
{
    int64_t *ids = (int64_t *)(uintptr_t)peri__model_data(m, map->ids);
    uint32_t *index = (uint32_t *)(uintptr_t)peri__model_data(m, map->index);
    if (ids[row] == id) return;
    if (ids[row] != map->free) remove_row(map, ids, index, row, ids[row]);
    ids[row] = id;
    if (id != map->free) insert_row(index, map->slots, row, id);
}

void peri__model_map_index(const int64_t *ids, int64_t rows, int64_t free, uint32_t *index, int64_t slots)
{
    memset(index, 0, sizeof *index * (size_t)slots);
    for (int64_t row = 0; row < rows; row++)
        if (ids[row] != free) insert_row(index, slots, row, ids[row]);
}
