/* SPDX-License-Identifier: Apache-2.0
 *
 * input_dist.c: ids to the ranks that own their rows. One state machine, a work:
 *
 *   SYNC     the input's lengths and offsets are known to be well formed
 *   COUNT    a kernel counted ids by stream and checked their range; the counts came to the host
 *   SAME     first batch only: all ranks run the same module
 *   HEADERS  every rank knows what every other sends it (and that they still run the same module); the ids are being packed meanwhile
 *   EXPLAIN  only if they do not: what every rank runs, in words; ends with the error
 *   PAYLOAD  lengths, ids, weights and factors of mean pooling, one all-to-all each
 *
 * The numbers of all exchanges are taken at the start, so other operations may be posted in between. A failure of this rank (a bad id, a
 * malformed input) poisons the group: the other ranks wait for this one and could not go on.
 */
#include "exchange.h"

#include "../tensor/jagged_internal.h"

enum { SYNC, COUNT, SAME, HEADERS, EXPLAIN, PAYLOAD };
/** Words of a header before the numbers of bags; the first two of them also come before the first header. */
enum { HEAD_IDENTITY, HEAD_TEXT, HEAD_WORDS, HEAD_KIND = HEAD_WORDS, HEAD_IDS, HEAD_ROWS, HEAD_FILES, HEAD_STAMP, HEAD };

/* -- finding what is wrong ---------------------------------------------------------------------------------------------------------- */

static peri_status report_bad_id(const peri__input_dist *d, const peri_k_route_report *r)
{
    const peri_sharded_ebc *e = d->ebc;
    int64_t index = r->where - 1;
    for (int32_t i = 0; i < e->routes->n_partitions; i++) {
        const peri__partition *p = &e->routes->partitions[i];
        int64_t bags = d->home->feature_bags[p->feature];
        if (index < bags)
            return peri__fail(PERI_ERANGE,
                              "peri_sharded_ebc_input_dist: table '%s', feature '%s', sample %lld: id %lld at position %lld of the bag, "
                              "allowed: 0..%lld (-1: skipped); rank %d",
                              e->table_names[p->table], e->feature_names[p->feature], (long long)index, (long long)r->id,
                              (long long)r->position, (long long)p->rows - 1, e->rank);
        index -= bags;
    }
    return peri__fail(PERI_EINTERNAL, "peri_sharded_ebc_input_dist: a report about no bag");
}

static peri_status judge(peri__input_dist *d)
{
    peri_sharded_ebc *e = d->ebc;
    const peri_k_route_report *reports = (const peri_k_route_report *)(d->report->words + e->world_size + 1);
    int64_t blocks = peri__ceil_div(d->home->bags, PERI_ROUTE_BLOCK);
    for (int32_t mode = PERI_BOUNDS_FATAL; mode < PERI_BOUNDS_NONE; mode++) {
        const peri_k_route_report *first = NULL;
        int64_t bad = 0;
        for (int64_t b = 0; b < blocks; b++) {
            const peri_k_route_report *r = &reports[b * PERI_ROUTE_REPORTS + mode];
            bad += r->bad;
            if (r->bad && !first) first = r;
        }
        e->bad_ids += bad;
        if (!bad || mode == PERI_BOUNDS_IGNORE) continue;
        peri_status status = report_bad_id(d, first);
        if (mode == PERI_BOUNDS_FATAL) return status;
        peri__log(PERI_LOG_WARN, "%s (%lld ids of this batch are out of range and skipped)", peri_error_message(), (long long)bad);
        peri_error_clear();
    }
    return PERI_OK;
}

_Static_assert((int)PERI_ROUTE_REPORTS == (int)PERI_BOUNDS_NONE && (int)PERI_BOUNDS_FATAL == 0, "modes that report");

/* -- kernels ---------------------------------------------------------------------------------------------------------------------- */

static peri_status new_1d(peri_device *device, int32_t dtype, int64_t n, peri_tensor **out)
{
    return peri_tensor_new(device, dtype, 1, &n, out);
}

/** Count ids by stream, sum the counts along the wire, and send totals and reports to the host. */
static peri_status count(peri__input_dist *d)
{
    peri_sharded_ebc *e = d->ebc;
    peri_device *device = e->device;
    const peri__home *h = d->home;
    int64_t blocks = peri__ceil_div(h->bags, PERI_ROUTE_BLOCK);
    int64_t words = e->world_size + 1 + blocks * PERI_ROUTE_REPORTS * (int64_t)(sizeof(peri_k_route_report) / sizeof(int64_t));
    peri_tensor *findings = NULL;
    peri_status status;
    PERI_TRY(new_1d(device, PERI_I64, words, &findings));
    PERI_TRY_GOTO(peri__tensor_zero(findings), out);
    PERI_TRY_GOTO(new_1d(device, PERI_I32, h->wire_bags, &d->wire_lengths), out);
    PERI_TRY_GOTO(new_1d(device, PERI_I64, h->wire_bags + 1, &d->cursor), out);
    int64_t *totals = peri__data(findings);
    peri_k_route_count_args args = {.ids = peri__data(d->values), .offsets = peri__data(d->offsets_in),
                                    .partitions = peri__upload_at(&h->up, h->partitions), .bounds = peri__upload_at(&h->up, h->bounds),
                                    .wire_bag = peri__upload_at(&h->up, h->wire_bag), .lengths = peri__data(d->wire_lengths),
                                    .reports = (peri_k_route_report *)(totals + e->world_size + 1), .bags = h->bags,
                                    .n_partitions = e->routes->n_partitions, .ids_i32 = d->values->dtype == PERI_I32};
    PERI_TRY_GOTO(PERI_LAUNCH(device, route_count, &args, blocks, 1), out);
    PERI_TRY_GOTO(peri__complete_sum(d->wire_lengths, -1, d->cursor), out);
    peri_k_route_totals_args gather = {.totals = totals, .positions = peri__data(d->cursor), .at = peri__upload_at(&h->up, h->at)};
    PERI_TRY_GOTO(PERI_LAUNCH(device, route_totals, &gather, e->world_size + 1, 1 << 12), out);
    PERI_TRY_GOTO(peri__report_take(device, words, &d->report), out);
    status = peri__report_post(d->report, totals, words);
out:
    peri_tensor_release(findings);
    return status;
}

/** Lay the ids, and what goes with them, out along the wire. */
static peri_status pack(peri__input_dist *d)
{
    peri_sharded_ebc *e = d->ebc;
    const peri__home *h = d->home;
    int64_t n = d->report->words[e->world_size];
    PERI_TRY(new_1d(e->device, e->wire_i32 ? PERI_I32 : PERI_I64, n, &d->send[PERI__IDS]));
    if (e->weighted) PERI_TRY(new_1d(e->device, PERI_F32, n, &d->send[PERI__WEIGHTS]));
    peri_k_route_pack_args args = {.ids = peri__data(d->values), .weights = e->weighted ? peri__data(d->weights_in) : NULL,
                                   .offsets = peri__data(d->offsets_in), .partitions = peri__upload_at(&h->up, h->partitions),
                                   .bounds = peri__upload_at(&h->up, h->bounds), .wire_bag = peri__upload_at(&h->up, h->wire_bag),
                                   .cursor = peri__data(d->cursor), .out = peri__data(d->send[PERI__IDS]),
                                   .out_weights = e->weighted ? peri__data(d->send[PERI__WEIGHTS]) : NULL, .bags = h->bags,
                                   .n_partitions = e->routes->n_partitions, .ids_i32 = d->values->dtype == PERI_I32,
                                   .out_i32 = e->wire_i32};
    PERI_TRY(PERI_LAUNCH(e->device, route_pack, &args, h->bags, 512));
    d->send[PERI__LENGTHS] = d->wire_lengths;
    d->wire_lengths = NULL;
    if (!e->any_mean) return PERI_OK;
    PERI_TRY(new_1d(e->device, PERI_F32, h->wire_bags, &d->send[PERI__SCALES]));
    peri_k_route_mean_args mean = {.scale = peri__data(d->send[PERI__SCALES]), .offsets = args.offsets, .partitions = args.partitions,
                                   .wire_bag = args.wire_bag, .n_partitions = args.n_partitions};
    return PERI_LAUNCH(e->device, route_mean, &mean, h->bags, 1 << 13);
}

/* -- headers ---------------------------------------------------------------------------------------------------------------------- */

static int32_t streams_of(const peri_sharded_ebc *e, int32_t rank)
{
    return e->routes->rank_wire[rank + 1] - e->routes->rank_wire[rank];
}

/** Kind of the input: what must be alike on all ranks. */
enum { KIND_VARIABLE = 1, KIND_WEIGHTS_GRAD = 2 };
static int64_t kind_of(const peri__input_dist *d)
{
    return (d->home->variable ? KIND_VARIABLE : 0) | (peri__weights_want_grad(d) ? KIND_WEIGHTS_GRAD : 0);
}

static void release_dist(void *dist) { peri_work_release(dist); }

/** What this rank says of itself. */
static void own_words(const peri__input_dist *d, int64_t words[HEAD_WORDS])
{
    words[HEAD_IDENTITY] = (int64_t)peri__identity_hash(d->ebc);
    words[HEAD_TEXT] = d->ebc->identity_bytes;
}

static peri_status post_heads(peri__input_dist *d)
{
    const peri_sharded_ebc *e = d->ebc;
    int64_t world = e->world_size, *counts = peri__alloc(sizeof *counts * (size_t)world);
    d->heads = peri__alloc(sizeof *d->heads * (size_t)(HEAD_WORDS * (world + 1)));
    peri_status status = counts && d->heads ? PERI_OK : PERI_ENOMEM;
    if (status >= 0) own_words(d, d->heads);
    for (int64_t r = 0; r < world && status >= 0; r++) counts[r] = HEAD_WORDS;
    peri_coll_op op = {.kind = PERI_COLL_ALL_GATHER, .dtype = PERI_I64, .channel = PERI_CHANNEL_CONTROL, .sequence = d->control - 1,
                       .send = d->heads, .recv = d->heads + HEAD_WORDS, .send_counts = counts, .recv_counts = counts};
    if (status >= 0) {
        peri_work_retain(&d->base);
        status = peri__coll_post_host(e->group, &op, d, release_dist, &d->works[0]);
    }
    peri__free(counts);
    return status;
}

static peri_status post_headers(peri__input_dist *d)
{
    const peri_sharded_ebc *e = d->ebc;
    int32_t world = e->world_size, mine = streams_of(e, e->rank);
    int64_t own[HEAD_WORDS], send_words = 0, recv_words = (int64_t)world * (HEAD + mine);
    for (int32_t r = 0; r < world; r++) send_words += HEAD + streams_of(e, r);
    d->header_send = peri__alloc(sizeof(int64_t) * (size_t)(send_words + recv_words + 2 * world));
    if (!d->header_send) return PERI_ENOMEM;
    own_words(d, own);
    d->header_recv = d->header_send + send_words;
    int64_t *send_counts = d->header_recv + recv_words, *recv_counts = send_counts + world, *at = d->header_send;
    for (int32_t r = 0; r < world; r++) {
        const int64_t *totals = d->report->words;
        send_counts[r] = HEAD + streams_of(e, r);
        recv_counts[r] = HEAD + mine;
        at[HEAD_IDENTITY] = own[HEAD_IDENTITY];
        at[HEAD_TEXT] = own[HEAD_TEXT];
        at[HEAD_KIND] = kind_of(d);
        at[HEAD_IDS] = totals[r + 1] - totals[r];
        at[HEAD_ROWS] = d->home->rows;
        at[HEAD_FILES] = e->found.files;
        at[HEAD_STAMP] = (int64_t)e->found.stamp;
        for (int32_t w = e->routes->rank_wire[r], i = 0; w < e->routes->rank_wire[r + 1]; w++, i++)
            at[HEAD + i] = d->home->feature_bags[e->routes->partitions[e->routes->streams[e->routes->wire[w]].partition].feature];
        at += send_counts[r];
    }
    peri_coll_op op = {.kind = PERI_COLL_ALL_TO_ALL, .dtype = PERI_I64, .channel = PERI_CHANNEL_CONTROL, .sequence = d->control,
                       .send = d->header_send, .recv = d->header_recv, .send_counts = send_counts, .recv_counts = recv_counts};
    peri_work_retain(&d->base);
    return peri__coll_post_host(e->group, &op, d, release_dist, &d->works[0]);
}

/** PERI_OK if all ranks say the same of themselves, PERI_PENDING if they do not: then they are told what is different. @heads: of rank 0,
 *  @stride words from one rank's to the next's. */
static peri_status compare(peri__input_dist *d, const int64_t *heads, int64_t stride)
{
    const peri_sharded_ebc *e = d->ebc;
    bool same = true;
    int64_t total = 0;
    for (int32_t r = 0; r < e->world_size; r++) same = same && heads[r * stride + HEAD_IDENTITY] == heads[HEAD_IDENTITY];
    if (same) return PERI_OK;
    d->text_bytes = peri__alloc(sizeof *d->text_bytes * (size_t)e->world_size);
    for (int32_t r = 0; r < e->world_size && d->text_bytes; r++) total += d->text_bytes[r] = peri__max(0, heads[r * stride + HEAD_TEXT]);
    const int64_t own = d->text_bytes ? d->text_bytes[e->rank] : 0; /* as announced: a rate may be set at any time */
    d->texts = d->text_bytes ? peri__alloc_zero((size_t)(own + total)) : NULL;
    if (!d->texts) return PERI_ENOMEM;
    memcpy(d->texts, e->identity_text, (size_t)peri__min(own, e->identity_bytes));
    peri_coll_op op = {.kind = PERI_COLL_ALL_GATHER, .dtype = PERI_U8, .channel = PERI_CHANNEL_REPORTS, .sequence = d->explain,
                       .send = d->texts, .recv = d->texts + own, .send_counts = &own, .recv_counts = d->text_bytes};
    peri_work_retain(&d->base);
    d->phase = EXPLAIN;
    PERI_TRY(peri__coll_post_host(e->group, &op, d, release_dist, &d->works[0]));
    return PERI_PENDING;
}

static peri_status explain(const peri__input_dist *d)
{
    const peri_sharded_ebc *e = d->ebc;
    return peri__identity_fail("peri_sharded_ebc_input_dist", e->world_size, d->texts + d->text_bytes[e->rank], d->text_bytes);
}

/** Check what the others say of themselves; gather bag counts and ids by source. */
static peri_status read_headers(peri__input_dist *d)
{
    const peri_sharded_ebc *e = d->ebc;
    int32_t world = e->world_size, mine = streams_of(e, e->rank);
    d->counts = peri__alloc(sizeof *d->counts * (size_t)peri__max(1, (int64_t)world * mine));
    d->source_ids = peri__alloc(sizeof *d->source_ids * (size_t)world);
    if (!d->counts || !d->source_ids) return PERI_ENOMEM;
    for (int32_t s = 0; s < world; s++) {
        const int64_t *head = world == 1 ? NULL : d->header_recv + (int64_t)s * (HEAD + mine);
        if (!head) { /* alone: what would have been sent */
            d->source_ids[0] = d->report->words[1];
            for (int32_t i = 0; i < mine; i++)
                d->counts[i] = d->home->feature_bags[e->routes->partitions[e->routes->streams[e->routes->wire[i]].partition].feature];
            return PERI_OK;
        }
        if ((head[HEAD_KIND] ^ kind_of(d)) & KIND_VARIABLE)
            return peri__fail(PERI_EMISMATCH,
                              "peri_sharded_ebc_input_dist: the input of rank %d is%s of variable batch, that of rank %d is%s", s,
                              head[HEAD_KIND] & KIND_VARIABLE ? "" : " not", e->rank, d->home->variable ? "" : " not");
        if (head[HEAD_KIND] != kind_of(d))
            return peri__fail(PERI_EMISMATCH,
                              "peri_sharded_ebc_input_dist: the per-sample weights of rank %d %s a gradient, those of rank %d %s", s,
                              head[HEAD_KIND] & KIND_WEIGHTS_GRAD ? "want" : "do not want", e->rank,
                              peri__weights_want_grad(d) ? "do" : "do not");
        if (head[HEAD_FILES] && e->found.files && (uint64_t)head[HEAD_STAMP] != e->found.stamp)
            return peri__fail(PERI_EMISMATCH,
                              "peri_sharded_ebc_input_dist: the row files of rank %d were of another flush, when they were opened, than "
                              "those of rank %d (flush %lld, iteration %lld); they must be of the same flush",
                              s, e->rank, (long long)e->found.number, (long long)e->found.iteration);
        bool legal = head[HEAD_IDS] >= 0;
        for (int32_t i = 0; i < mine; i++) {
            legal = legal && head[HEAD + i] >= 0;
            d->counts[(int64_t)s * mine + i] = head[HEAD + i];
        }
        if (!legal) return peri__fail(PERI_EFORMAT, "peri_sharded_ebc_input_dist: rank %d announced a negative count", s);
        d->source_ids[s] = head[HEAD_IDS];
    }
    return PERI_OK;
}

/* -- payload ---------------------------------------------------------------------------------------------------------------------- */

static peri_status post_payload(peri__input_dist *d)
{
    peri_sharded_ebc *e = d->ebc;
    const peri__owner *owner = d->layout->owner;
    int32_t world = e->world_size;
    int64_t ids = 0, *counts = peri__alloc(sizeof *counts * 2 * (size_t)world);
    if (!counts) return PERI_ENOMEM;
    for (int32_t s = 0; s < world; s++) ids += d->source_ids[s];
    peri_status status = new_1d(e->device, PERI_I32, owner->bags, &d->received[PERI__LENGTHS]);
    if (status >= 0) status = new_1d(e->device, d->send[PERI__IDS]->dtype, ids, &d->received[PERI__IDS]);
    if (status >= 0 && e->weighted) status = new_1d(e->device, PERI_F32, ids, &d->received[PERI__WEIGHTS]);
    if (status >= 0 && e->any_mean) status = new_1d(e->device, PERI_F32, owner->bags, &d->received[PERI__SCALES]);
    for (int32_t k = PERI__LENGTHS; k < PERI__PAYLOADS && status >= 0; k++) {
        uint64_t sequence = d->payload + (uint64_t)(k - PERI__LENGTHS);
        if (!d->send[k]) {
            peri__group_skip(e->group, PERI_CHANNEL_IDS, sequence);
            continue;
        }
        bool bags = k == PERI__LENGTHS || k == PERI__SCALES;
        for (int32_t r = 0; r < world; r++) {
            counts[r] = bags ? d->home->rank_bags[r + 1] - d->home->rank_bags[r] : d->report->words[r + 1] - d->report->words[r];
            counts[world + r] = bags ? owner->source_bags[r] : d->source_ids[r];
        }
        peri_coll_op op = {.kind = PERI_COLL_ALL_TO_ALL, .dtype = d->send[k]->dtype, .channel = PERI_CHANNEL_IDS,
                           .sequence = sequence, .send_counts = counts, .recv_counts = counts + world};
        status = peri__coll_post(e->group, &op, d->send[k], d->received[k], &d->works[k]);
    }
    peri__free(counts);
    return status;
}

/** Everything is here: make offsets, drop what was sent. */
static peri_status finish(peri__input_dist *d)
{
    peri_device *device = d->ebc->device;
    if (peri__weights_want_grad(d)) {
        d->wire_lengths = d->ebc->world_size > 1 ? d->send[PERI__LENGTHS] : d->received[PERI__LENGTHS];
        peri_tensor_retain(d->wire_lengths);
    }
    for (int32_t k = 0; k < PERI__PAYLOADS; k++) {
        peri_tensor_release(d->send[k]);
        d->send[k] = NULL;
    }
    peri_tensor_release(d->cursor);
    d->cursor = NULL;
    PERI_TRY(new_1d(device, PERI_I64, peri__numel(d->received[PERI__LENGTHS]) + 1, &d->offsets));
    PERI_TRY(peri__complete_sum(d->received[PERI__LENGTHS], peri__numel(d->received[PERI__IDS]), d->offsets));
    peri_tensor_release(d->received[PERI__LENGTHS]);
    d->received[PERI__LENGTHS] = NULL;
    return PERI_OK;
}

/* -- the state machine ------------------------------------------------------------------------------------------------------------- */

static peri_status test_all(peri__input_dist *d)
{
    for (int32_t k = 0; k < PERI__PAYLOADS; k++) {
        if (!d->works[k]) continue;
        peri_status status = peri_work_test(d->works[k]);
        if (status != PERI_OK) return status;
        peri_work_release(d->works[k]);
        d->works[k] = NULL;
    }
    return PERI_OK;
}

/** Waiting for the own device is no standstill of the ranks. */
static peri_status device_pending(const peri__input_dist *d, peri_status status)
{
    if (status == PERI_PENDING) d->ebc->group->comm->events++;
    return status;
}

static peri_status advance(peri__input_dist *d)
{
    peri_status status;
    switch (d->phase) {
    case SYNC:
        if ((status = device_pending(d, peri_kjt_sync_test(d->kjt))) != PERI_OK) return status;
        PERI_TRY(count(d));
        d->phase = COUNT;
        /* fallthrough */
    case COUNT:
        if ((status = device_pending(d, peri__report_test(d->report))) != PERI_OK) return status;
        PERI_TRY(judge(d));
        if (d->first) PERI_TRY(post_heads(d));
        d->phase = SAME;
        /* fallthrough */
    case SAME:
        if ((status = test_all(d)) != PERI_OK) return status;
        if (d->first && (status = compare(d, d->heads + HEAD_WORDS, HEAD_WORDS)) != PERI_OK) return status;
        if (d->ebc->world_size > 1) PERI_TRY(post_headers(d));
        PERI_TRY(pack(d));
        d->phase = HEADERS;
        /* fallthrough */
    case HEADERS:
        if ((status = test_all(d)) != PERI_OK) return status;
        if (d->header_recv && (status = compare(d, d->header_recv, HEAD + streams_of(d->ebc, d->ebc->rank))) != PERI_OK) return status;
        if (d->header_recv) peri__group_skip(d->ebc->group, PERI_CHANNEL_REPORTS, d->explain);
        PERI_TRY(read_headers(d));
        PERI_TRY(peri__bag_layout_new(d->ebc, d->home, d->counts, &d->layout));
        d->counts = NULL;
        if (d->ebc->world_size > 1) {
            PERI_TRY(post_payload(d));
        } else {
            memcpy(d->received, d->send, sizeof d->received);
            memset(d->send, 0, sizeof d->send);
        }
        d->phase = PAYLOAD;
        /* fallthrough */
    case PAYLOAD:
        if ((status = test_all(d)) != PERI_OK) return status;
        return finish(d);
    default:
        if ((status = test_all(d)) != PERI_OK) return status;
        return explain(d);
    }
}

static peri_status dist_step(peri_work *work)
{
    peri__input_dist *d = (peri__input_dist *)work;
    peri_status status = advance(d);
    if (status < 0 && d->ebc->world_size > 1) peri__group_fail(d->ebc->group, status);
    return status;
}

static void dist_fini(peri_work *work)
{
    peri__input_dist *d = (peri__input_dist *)work;
    for (int32_t g = 0; d->looks && g < d->layout->n_groups; g++) peri_tbe_batch_release(d->looks[g]);
    peri__free(d->looks);
    for (int32_t k = 0; k < PERI__PAYLOADS; k++) {
        peri_work_release(d->works[k]);
        peri_tensor_release(d->send[k]);
        peri_tensor_release(d->received[k]);
    }
    peri_tensor *tensors[] = {d->values, d->weights_in, d->offsets_in, d->inverse, d->wire_lengths, d->cursor, d->offsets};
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) peri_tensor_release(tensors[i]);
    peri__report_return(d->report);
    peri__free(d->header_send);
    peri__free(d->heads);
    peri__free(d->text_bytes);
    peri__free(d->texts);
    peri__free(d->counts);
    peri__free(d->source_ids);
    peri__bag_layout_release(d->layout);
    peri__home_release(d->home);
    peri_kjt_release(d->kjt);
    peri_sharded_ebc_release(d->ebc);
}

const peri__work_vtab peri__input_dist_vtab = {.name = "input_dist", .step = dist_step, .fini = dist_fini};

/* -- the call ---------------------------------------------------------------------------------------------------------------------- */

/** Numbers for the exchanges of this batch. What ranks say of themselves comes before the first headers only. */
static peri_status take_numbers(peri__input_dist *d)
{
    peri_group *g = d->ebc->group;
    PERI_TRY(peri__group_reserve(g, PERI_CHANNEL_CONTROL, d->first ? 2 : 1, &d->control));
    d->control += d->first;
    PERI_TRY(peri__group_reserve(g, PERI_CHANNEL_REPORTS, 1, &d->explain));
    return peri__group_reserve(g, PERI_CHANNEL_IDS, PERI__PAYLOADS - PERI__LENGTHS, &d->payload);
}

static peri_status check_input(peri_sharded_ebc *e, peri_kjt *kjt)
{
    static const char *const f = "peri_sharded_ebc_input_dist";
    peri_kjt_desc desc;
    if (!kjt) return peri__fail(PERI_EINVAL, "%s: no input", f);
    peri_kjt_describe(kjt, &desc);
    if (desc.device != e->device)
        return peri__fail(PERI_EINVAL, "%s: the input is on %s, the module on %s", f, peri_device_name(desc.device),
                          peri_device_name(e->device));
    if (desc.values_dtype != PERI_I64 && desc.values_dtype != PERI_I32)
        return peri__fail(PERI_EINVAL, "%s: ids are %s, allowed: i64, i32", f, peri_dtype_name(desc.values_dtype));
    if (desc.weighted != e->weighted)
        return peri__fail(PERI_EINVAL, "%s: the input has %sweights, the module is %sweighted (is_weighted)", f, desc.weighted ? "" : "no ",
                          e->weighted ? "" : "not ");
    return PERI_OK;
}

/** The input's tensors as the kernels take them: contiguous, offsets and inverse indices i64. */
static peri_status take_input(peri__input_dist *d)
{
    peri_tensor *offsets = NULL, *weights = NULL, *inverse = NULL;
    PERI_TRY(peri_kjt_values(d->kjt, &d->values));
    PERI_TRY(peri_kjt_weights(d->kjt, &weights));
    d->weights_in = weights;
    if (weights && (weights->dtype != PERI_F32 || weights->ndim != 1))
        return peri__fail(PERI_EINVAL, "peri_sharded_ebc_input_dist: the weights are %s of %d dimensions, allowed: f32, one for each id",
                          peri_dtype_name(weights->dtype), weights->ndim);
    PERI_TRY(peri_kjt_offsets(d->kjt, &offsets));
    peri_status status = peri_tensor_to(offsets, PERI_I64, NULL, &d->offsets_in);
    peri_tensor_release(offsets);
    PERI_TRY(status);
    if (!d->home->variable) return PERI_OK;
    PERI_TRY(peri_kjt_inverse_indices(d->kjt, &inverse));
    status = peri_tensor_to(inverse, PERI_I64, NULL, &d->inverse);
    peri_tensor_release(inverse);
    return status;
}

static peri_status start(peri_sharded_ebc *e, peri_kjt *kjt, peri_work **out)
{
    peri_work *work;
    peri__home *home;
    PERI_TRY(check_input(e, kjt));
    PERI_TRY(peri__bag_home(e, kjt, &home));
    peri_status status = peri__work_new(sizeof(peri__input_dist), &peri__input_dist_vtab, e->group, e->device, &work);
    if (status < 0) {
        peri__home_release(home);
        return status;
    }
    peri__input_dist *d = (peri__input_dist *)work;
    peri_sharded_ebc_retain(e);
    d->ebc = e;
    peri_kjt_retain(kjt);
    d->kjt = kjt;
    d->home = home;
    d->first = e->world_size > 1 && !e->compared;
    e->compared = true;
    if (e->world_size > 1) status = take_numbers(d);
    if (status >= 0) status = take_input(d);
    if (status >= 0) status = peri_kjt_sync_post(kjt);
    if (status < 0) peri__work_cancel(work, status);
    else status = peri_work_test(work);
    if (status < 0) peri_work_release(work);
    else *out = work;
    return status < 0 ? status : PERI_OK;
}

peri_status peri_sharded_ebc_input_dist(peri_sharded_ebc *e, peri_kjt *kjt, peri_work **out)
{
    PERI_NEED(e);
    PERI_NEED(kjt);
    PERI_NEED(out);
    PERI_TRY(peri__group_check("peri_sharded_ebc_input_dist", e->group));
    peri_status status = start(e, kjt, out);
    if (status < 0 && e->world_size > 1) peri__group_fail(e->group, status);
    return status;
}
