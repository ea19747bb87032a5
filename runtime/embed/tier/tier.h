/* SPDX-License-Identifier: Apache-2.0
 *
 * tier.h: table batches whose tables are larger than memory. The rows live in a file (row_file.h), or, where the device
 * has a memory of its own, in the host's (row_memory.c); the table batch's own tables are slots in the device's memory,
 * and a cache (cache.h) says which row is in which slot. A lookup translates ids to slots, brings missing rows, and
 * then runs the ordinary kernels on the slots; optimizer states travel with their rows. So every result has the bits
 * that tables in memory would give.
 *
 * A *ticket* holds the rows of a batch in flight: they are pinned from its prefetch (or its lookup) to the end of its
 * update, or of the batch. It is a convenience: when a lookup needs more slots than are left, tickets of other batches
 * are given up, oldest first; their lookups or updates will then resolve their ids again. Only when the rows of a
 * single batch do not fit is there an error.
 *
 * All functions here run within calls that are alone (peri__tbe_enter), but those that make and free tiers.
 *
 * Order on the file: a job of writes may run beside reads of the same ticket, since no row is in both, and beside
 * everything else up to the next ticket that reads: that one waits for all earlier writes first. A write that fails
 * keeps its bytes and is tried again then, and at a flush; until it succeeds nothing is read, so nothing is lost while
 * the process lives. Rows in the host's memory are copied at once, so a prefetch that needs no file puts them into
 * their slots itself, on its stream.
 */
#ifndef PERI_EMBED_TIER_H
#define PERI_EMBED_TIER_H

#include "cache.h"
#include "../embed_internal.h"
#include "row_file.h"
#include "row_io.h"

typedef struct peri__tier_table {
    peri__cache *cache;
    peri__row_file *file;
    int64_t payload;   /* bytes of a record without its padding */
    int64_t need;      /* rows that the batch being resolved wants */
    peri_ids_mark ids; /* what the next flush says of them; sum 0: nothing yet, or ids are rows */
    peri_tbe_cache_stats stats;
} peri__tier_table;

/** A row that a ticket brings. */
typedef struct peri__tier_want {
    int64_t row;
    int64_t victim;      /* whose slot it got; -1: it was free */
    int32_t table, slot; /* slot -1: there was no room (prefetches only) */
    uint8_t flags;       /* of the victim's slot */
    bool strayed;        /* its slot is not of its own set */
} peri__tier_want;

/** A slot that a ticket has pinned. */
typedef struct peri__tier_pin {
    int32_t table, slot;
} peri__tier_pin;

/** Records on their way between a file, or the host's memory, and slots. Where the host can access the device's memory,
 *  host and device are the same bytes; else queued copies can use `host` (peri__host_alloc). */
typedef struct peri__records {
    peri_tensor *device, *moves_device;
    char *host;
    peri_event *sent; /* after the last copy from there; NULL: none yet */
    peri_k_cache_move *moves;
    int64_t n, moves_capacity; /* moves, and room for them */
    int64_t bytes, capacity;   /* of their records, and room for them */
    int64_t host_bytes;        /* of `host`, where that is its own */
    peri__row_request *requests;
    peri__row_job job;
} peri__records;

enum { PERI__TICKET_FREE = 0, PERI__TICKET_OPEN, PERI__TICKET_PREFETCHED, PERI__TICKET_LOOKED_UP };

struct peri__ticket {
    int32_t state;
    bool complete;  /* all rows of the batch have a slot, and `mapped` says which */
    bool filled;    /* the rows that it brings are in their slots */
    bool depends;   /* some of its rows are brought by other tickets */
    bool fetched;   /* some of its pins were brought by a prefetch that no lookup has used yet */
    bool updated;   /* its rows are newer than the file */
    uint64_t sequence;
    peri_tbe_batch *owner; /* whose ticket it is; NULL: nobody's */
    peri_tbe_batch *inner; /* the same batch in slots; NULL until the first lookup */
    peri_tensor *mapped_store, *mapped; /* i32 [layers * ids]: slots; a view of the store, which is kept */
    peri_tensor *layer_offsets; /* i64, layers > 1 only */
    peri_tbe_blocks *layer_blocks; /* layers > 1 only; retained */
    int64_t layers, bad_ids;
    peri__tier_pin *pins;
    int64_t n_pins, pins_capacity;
    peri__tier_want *wants;
    int64_t n_wants, wants_capacity;
    peri__records in, out; /* rows that come, rows that leave */
};

enum { PERI__TICKETS = 8 };

typedef struct peri__tier {
    peri_tbe *tbe; /* whose tier this is; borrowed */
    int64_t n_tables;
    peri__tier_table *tables;
    peri__row_io *io;
    uint64_t seed;
    uint64_t sequence;
    bool direct;  /* the host can access the device's memory */
    bool in_memory; /* some table's rows are in the host's memory */
    bool dirty;   /* rows have been updated since the last flush */
    bool prepared; /* no row has been updated since the first half of a flush */
    bool open;    /* it was made as a whole */
    int64_t bad_ids;
    peri_k_cache_part part[PERI_CACHE_PARTS];
    int32_t n_parts;
    peri__ticket ticket[PERI__TICKETS];
    peri__records spare; /* flushes, reads and writes of whole ranges */
    int32_t *mapped_host;   /* devices whose memory the host cannot access: mapped ids on their way */
    int64_t mapped_capacity;
    /* The last block list that shares bags, in layers that do not. */
    uint64_t layered;
    peri_tbe_blocks *layer_blocks;
    int64_t *block_layer;
    int64_t layers, layered_bags, layered_ids;
} peri__tier;

/** The tier of a table batch whose store is the files. */
static inline peri__tier *peri__tier_of(const peri_tbe *tbe) { return tbe->own; }

/* tickets.c: lookups */

/** What the store does; see peri__store. */
peri_status peri__tier_forward(const char *function, peri_tbe_batch *batch, peri_tensor *out);
peri_status peri__tier_backward(const char *function, peri_tbe_batch *batch, peri_tensor *grad,
                                peri_tensor *grad_weights);
peri_status peri__tier_prefetch(const char *function, peri_tbe_batch *batch);
void peri__tier_drop(peri_tbe_batch *batch);

/* slot_map.c: ids to slots */

/** A batch's ids and offsets on the host. */
typedef struct peri__tier_batch {
    const void *ids;
    bool ids_i32;
    const int64_t *offsets;
    int64_t n_ids, bags;
    void *own_ids;
    int64_t *own_offsets;
} peri__tier_batch;

/** Read @in's ids and offsets; waits for the device. */
peri_status peri__tier_batch_init(const peri__tier *tier, const peri_tbe_input *in, peri__tier_batch *b);
void peri__tier_batch_fini(peri__tier_batch *b);
/** Pin the slots of @b's rows and list the rows that have none: mapped[layer * n_ids + i] becomes the slot of id i, -2
 *  - the number of a want of the ticket, or -1. After a failure the wants are still marked in their caches. */
peri_status peri__tier_map(const char *function, peri__tier *tier, peri__ticket *t, const peri__tier_batch *b,
                           int32_t *mapped);

/* records.c: moving records */

/** The flags of a slot. */
static inline uint8_t *peri__tier_flags(const peri__tier *tier, int32_t table, int32_t slot)
{
    return &tier->tables[table].cache->slot[slot].flags;
}

/** Room for @n records that start with @bytes in all. Keeps nothing of the old content. Waits for copies from the old
 *  one. */
peri_status peri__records_reserve(peri__tier *tier, peri__records *stage, int64_t n, int64_t bytes);
void peri__records_fini(peri__tier *tier, peri__records *stage);
/** Copy slots into records (and wait), with checksums; make the job that writes them. */
peri_status peri__records_spill(peri__tier *tier, peri__records *stage);
/** Make and submit the job that reads the records of rows that may be in the file. */
void peri__records_read(peri__tier *tier, peri__records *stage);
/** Submit the writes. The files are marked unclean. */
void peri__records_write(peri__tier *tier, peri__records *stage);
/** Wait for the writes, trying again what failed before. */
peri_status peri__records_written(peri__tier *tier, peri__records *stage);
/** Those of the moves whose rows are in the host's memory: into it (@store), or, where they were ever stored, out of
 *  it. (row_memory.c) */
void peri__row_memory_move(const peri__tier *tier, const peri__records *stage, bool store);
/** Wait for all writes of all tickets. */
peri_status peri__tier_wait_writes(peri__tier *tier);
/** Write back the dirty slots of @table that hold rows [row, end), a chunk at a time. */
peri_status peri__tier_write_back(peri__tier *tier, int32_t table, int64_t row, int64_t end);
/** What the store does. */
peri_status peri__tier_read(peri_tbe *tbe, int64_t table, int32_t part, int64_t row, peri_tensor *dst);
peri_status peri__tier_write(peri_tbe *tbe, int64_t table, int32_t part, int64_t row, const peri_tensor *src);
peri_status peri__tier_reset(peri_tbe *tbe, int64_t table, const int64_t *rows, int64_t n);
void peri__tier_statistics(const peri_tbe *tbe, int64_t table, peri_tbe_cache_stats *out);
/** Finish the rows under way of a ticket, or of all. A ticket whose rows cannot be read is forgotten, so that its batch
 *  asks anew. */
peri_status peri__ticket_fill(peri__tier *tier, peri__ticket *ticket);
peri_status peri__tier_fill_slots(peri__tier *tier);
/** Give everything back that the ticket holds; rows that have not arrived are dropped. A ticket that is free stays
 *  so. */
void peri__ticket_forget(peri__tier *tier, peri__ticket *ticket);

/* flush.c: flushes */

/** The files that were opened are of one flush; the table batch goes on with its iteration. */
peri_status peri__tier_adopt_flush(peri__tier *tier);
/** What the store does. */
void peri__tier_flush_info(const peri_tbe *tbe, peri_flush_info *out);
void peri__tier_table_file(const peri_tbe *tbe, int64_t table, peri_table_file *out);
void peri__tier_ids_mark(peri_tbe *tbe, int64_t table, const peri_ids_mark *mark);
peri_status peri__tier_flush_prepare(peri_tbe *tbe);
peri_status peri__tier_flush_commit(peri_tbe *tbe, int64_t number, uint64_t stamp);
/** Before @file is closed: say what becomes of rows that were updated and not flushed. */
void peri__tier_warn_unflushed(const peri__tier *tier, const peri__row_file *file);

#endif
