/* SPDX-License-Identifier: Apache-2.0
 *
 * router.c: ids to the ranks that own their rows. One state machine for a batch:
 *
 *   SYNC      the input's lengths and offsets are known to be well formed
 *   COUNT     a kernel counted ids by strand and checked their range; the counts came to the host
 *   ANNOUNCE  every rank learns what every other sends it, and that they run the same; the ids are being packed
 *             meanwhile. Batches of several modules that set out together are announced in one message, once the ids of
 *             all are counted
 *   PAYLOAD   lengths, ids, weights and the module's numbers of bags, one all-to-all each
 *
 * The numbers of all exchanges are taken when it sets out, so others may be posted in between. A failure of this rank
 * (a bad id, a malformed input) is the caller's to tell the others, who wait for this one and could not go on.
 */
#include "router.h"
#include "../../kernels/route.h"

#include "../embed/embed_internal.h"
#include "../tensor/jagged_internal.h"

enum { SYNC, COUNT, ANNOUNCE, PAYLOAD, DONE };

/* -- finding what is wrong ----------------------------------------------------------------------------------------- */

static peri_status report_bad_id(const peri__routing *r, const peri_k_route_report *report)
{
    const peri__router *o = r->router;
    int64_t index = report->where - 1;
    for (int32_t i = 0; i < o->routes->n_partitions; i++) {
        const peri__partition *p = &o->routes->partitions[i];
        int64_t bags = r->outbound->feature_bags[p->feature];
        if (index < bags)
            return peri__fail(PERI_ERANGE,
                              "%s: table '%s', feature '%s', sample %lld: %sid %lld at position %lld of the bag, "
                              "allowed: 0..%lld (%s); rank %d",
                              o->function, o->table_names[p->table], o->feature_names[p->feature], (long long)index,
                              p->raw ? "raw " : "", (long long)report->id, (long long)report->position,
                              (long long)(p->raw ? p->rows * p->bucket_ids : p->rows) - 1,
                              p->raw ? "spread by range" : "-1: skipped", o->group->rank);
        index -= bags;
    }
    return peri__fail(PERI_EINTERNAL, "%s: a report about no bag", o->function);
}

static peri_status check_id_reports(peri__routing *r)
{
    const peri_k_route_report *reports =
        (const peri_k_route_report *)(r->report->words + r->router->routes->n_strands + 1);
    int64_t blocks = peri__ceil_div(r->outbound->bags, PERI_ROUTE_BLOCK);
    for (int32_t mode = PERI_BOUNDS_FATAL; mode < PERI_BOUNDS_NONE; mode++) {
        const peri_k_route_report *first = NULL;
        int64_t bad = 0;
        for (int64_t b = 0; b < blocks; b++) {
            const peri_k_route_report *report = &reports[b * PERI_ROUTE_REPORTS + mode];
            bad += report->bad;
            if (report->bad && !first) first = report;
        }
        r->router->bad_ids += bad;
        if (!bad || mode == PERI_BOUNDS_IGNORE) continue;
        peri_status status = report_bad_id(r, first);
        if (mode == PERI_BOUNDS_FATAL) return status;
        peri__log(PERI_LOG_WARN, "%s (%lld ids of this batch are out of range and skipped)", peri_error_message(),
                  (long long)bad);
        peri_error_clear();
    }
    return PERI_OK;
}

_Static_assert((int)PERI_ROUTE_REPORTS == (int)PERI_BOUNDS_NONE && (int)PERI_BOUNDS_FATAL == 0, "modes that report");

/* -- kernels ------------------------------------------------------------------------------------------------------- */

static peri_status new_1d(peri_device *device, int32_t dtype, int64_t n, peri_tensor **out)
{
    return peri_tensor_new(device, dtype, 1, &n, out);
}

peri_k_routed peri__routing_ids(const peri__routing *r)
{
    const peri__outbound *h = r->outbound;
    return (peri_k_routed){.ids = peri__data(r->values),
                           .offsets = peri__data(r->offsets_in),
                           .partitions = peri__upload_at(&h->up, h->partitions),
                           .bounds = peri__upload_at(&h->up, h->bounds),
                           .wire_bag = peri__upload_at(&h->up, h->wire_bag),
                           .bags = h->bags,
                           .n_partitions = r->router->routes->n_partitions,
                           .ids_i32 = r->values->dtype == PERI_I32};
}

/** Count ids by strand, sum the counts along the wire, and send totals and reports to the host. */
static peri_status count_ids(peri__routing *r)
{
    const peri__router *o = r->router;
    const peri__outbound *h = r->outbound;
    const int64_t places = o->routes->n_strands + 1, blocks = peri__ceil_div(h->bags, PERI_ROUTE_BLOCK);
    int64_t words = places + blocks * PERI_ROUTE_REPORTS * (int64_t)(sizeof(peri_k_route_report) / sizeof(int64_t));
    PERI__HELD peri_tensor *findings = NULL;
    PERI_TRY(new_1d(o->device, PERI_I64, words, &findings));
    PERI_TRY(peri__tensor_zero(findings));
    PERI_TRY(new_1d(o->device, PERI_I32, h->wire_bags, &r->send[PERI__LENGTHS]));
    PERI_TRY(new_1d(o->device, PERI_I64, h->wire_bags + 1, &r->cursor));
    int64_t *totals = peri__data(findings);
    peri_k_route_count_args args = {.in = peri__routing_ids(r),
                                    .lengths = peri__data(r->send[PERI__LENGTHS]),
                                    .reports = (peri_k_route_report *)(totals + places)};
    PERI_TRY(PERI_LAUNCH(o->device, route_count, &args, blocks, 1));
    PERI_TRY(peri__complete_sum(r->send[PERI__LENGTHS], -1, r->cursor));
    peri_k_route_totals_args gather = {
        .totals = totals, .positions = peri__data(r->cursor), .at = peri__upload_at(&h->up, h->at)};
    PERI_TRY(PERI_LAUNCH(o->device, route_totals, &gather, places, 1 << 12));
    PERI_TRY(peri__report_take(o->device, words, &r->report));
    return peri__report_post(r->report, totals, words);
}

/** Room for the places of ids: one for each id of each partition that is routed. @first: them, on the device. */
static peri_status make_places(peri__routing *r, peri_tensor **first)
{
    peri__router *o = r->router;
    const int64_t *ids;
    if (!r->args.keep_places && !r->args.by_id) return PERI_OK;
    PERI_TRY(peri__router_find(o, peri_kjt_keys(r->args.kjt)));
    PERI_TRY(peri_kjt_length_per_key(r->args.kjt, &ids));
    r->place_first = peri__alloc_zero(sizeof *r->place_first * (size_t)(o->routes->n_partitions + 1));
    if (!r->place_first) return PERI_ENOMEM;
    for (int32_t i = 0; i < o->routes->n_partitions; i++) {
        const peri__partition *p = &o->routes->partitions[i];
        r->place_first[i + 1] = r->place_first[i] + (p->n_parts ? ids[o->feature_key[p->feature]] : 0);
    }
    PERI_TRY(new_1d(o->device, PERI_I64, r->place_first[o->routes->n_partitions], &r->places));
    return peri__upload_i64(o->device, r->place_first, o->routes->n_partitions, first);
}

/** Lay the ids, and what goes with them, out along the wire. */
static peri_status pack_ids(peri__routing *r)
{
    const peri__router *o = r->router;
    const peri__outbound *h = r->outbound;
    int64_t n = r->rank_ids[o->routes->world_size];
    PERI__HELD peri_tensor *first = NULL;
    PERI_TRY(make_places(r, &first));
    PERI_TRY(new_1d(o->device, o->wire_i32 ? PERI_I32 : PERI_I64, n, &r->send[PERI__IDS]));
    if (r->weights) PERI_TRY(new_1d(o->device, PERI_F32, n, &r->send[PERI__WEIGHTS]));
    if (r->args.keep_origins && peri__numel(r->values) <= INT32_MAX)
        PERI_TRY(new_1d(o->device, PERI_I32, n, &r->origins));
    peri_k_route_pack_args args = {.in = peri__routing_ids(r),
                                   .weights = r->weights ? peri__data(r->weights) : NULL,
                                   .cursor = peri__data(r->cursor),
                                   .out = peri__data(r->send[PERI__IDS]),
                                   .out_weights = r->weights ? peri__data(r->send[PERI__WEIGHTS]) : NULL,
                                   .places = r->places ? peri__data(r->places) : NULL,
                                   .place_first = first ? peri__data(first) : NULL,
                                   .origins = r->origins ? peri__data(r->origins) : NULL,
                                   .out_i32 = o->wire_i32};
    PERI_TRY(PERI_LAUNCH(o->device, route_pack, &args, h->bags, 512));
    if (r->args.keep_lengths) {
        r->wire_lengths = r->send[PERI__LENGTHS];
        peri_tensor_retain(r->wire_lengths);
    }
    if (r->args.by_id) {
        peri_tensor_release(r->send[PERI__LENGTHS]);
        r->send[PERI__LENGTHS] = NULL;
    }
    if (!r->args.by_bag) return PERI_OK;
    PERI_TRY(new_1d(o->device, PERI_F32, h->wire_bags, &r->send[PERI__BY_BAG]));
    return r->args.by_bag(r, r->send[PERI__BY_BAG]);
}

/* -- announcements ------------------------------------------------------------------------------------------------- */

/** Words of a strand, behind those of the module. */
enum { STRAND_BAGS, STRAND_IDS, STRAND_WORDS };

int64_t peri__routing_sent(const peri__routing *r, int32_t w) { return r->report->words[w + 1] - r->report->words[w]; }

/** Bags, and ids, of this rank's that place @w of the wire takes. */
static void strand_counts(const peri__routing *r, int32_t w, int64_t *bags, int64_t *ids)
{
    *bags = r->outbound->feature_bags[r->router->routes->wire_feature[w]];
    *ids = peri__routing_sent(r, w);
}

/** Write this rank's words; they set out with those of the routings beside this one. */
static peri_status post_announcement(peri__routing *r)
{
    const peri__routes *routes = r->router->routes;
    for (int32_t k = 0; k < routes->world_size; k++) {
        int64_t *at = peri__announce_to(r->announce, r->part, k);
        memcpy(at, r->args.words, sizeof r->args.words);
        at += PERI__ROUTING_WORDS;
        for (int32_t w = routes->rank_wire[k]; w < routes->rank_wire[k + 1]; w++, at += STRAND_WORDS)
            strand_counts(r, w, &at[STRAND_BAGS], &at[STRAND_IDS]);
    }
    return peri__announce_post(r->announce);
}

/** Totals by rank of what this rank sends, and room for what it is told. */
static peri_status make_counts(peri__routing *r)
{
    const peri__routes *routes = r->router->routes;
    const int64_t world = routes->world_size, mine = peri__strands_of(routes, r->router->group->rank);
    r->rank_ids = peri__alloc_zero(sizeof *r->rank_ids * (size_t)(world + 1 + 2 * world * mine + 4 * world));
    if (!r->rank_ids) return PERI_ENOMEM;
    r->counts = r->rank_ids + world + 1;
    r->ids = r->counts + world * mine;
    r->source_bags = r->ids + world * mine;
    r->source_ids = r->source_bags + world;
    r->sent_bags = r->source_ids + world;
    r->sent_ids = r->sent_bags + world;
    for (int64_t k = 0; k <= world; k++) r->rank_ids[k] = r->report->words[routes->rank_wire[k]];
    for (int64_t k = 0; k < world; k++) {
        r->sent_bags[k] = r->outbound->rank_bags[k + 1] - r->outbound->rank_bags[k];
        r->sent_ids[k] = r->rank_ids[k + 1] - r->rank_ids[k];
    }
    return PERI_OK;
}

/** Take the numbers of rank @s, which are not believed. */
static peri_status take_counts(peri__routing *r, int32_t s, const int64_t *at)
{
    enum { MOST_BITS = 48 }; /* counts below 2^48 can be added up and multiplied by the size of an element */
    const peri__router *o = r->router;
    const int64_t most = (int64_t)1 << MOST_BITS, mine = peri__strands_of(o->routes, o->group->rank);
    for (int64_t i = 0; i < mine; i++, at += STRAND_WORDS) {
        const int64_t bags = at[STRAND_BAGS], ids = at[STRAND_IDS];
        if (bags < 0 || ids < 0 || bags > most - r->source_bags[s] || ids > most - r->source_ids[s])
            return peri__fail(PERI_EFORMAT, "%s: rank %d announced %lld bags with %lld ids", o->function, s,
                              (long long)bags, (long long)ids);
        r->counts[s * mine + i] = bags;
        r->ids[s * mine + i] = ids;
        r->source_bags[s] += bags;
        r->source_ids[s] += ids;
    }
    return PERI_OK;
}

static peri_status read_announcements(peri__routing *r)
{
    const peri__router *o = r->router;
    for (int32_t s = 0; s < o->routes->world_size && r->announce; s++) {
        const int64_t *words = peri__announce_from(r->announce, r->part, s);
        PERI_TRY(r->args.check(r->args.ctx, s, words));
        PERI_TRY(take_counts(r, s, words + PERI__ROUTING_WORDS));
    }
    for (int32_t w = 0; w < o->routes->n_strands && !r->announce; w++) { /* alone: what would have been sent */
        strand_counts(r, w, &r->counts[w], &r->ids[w]);
        r->source_bags[0] += r->counts[w];
        r->source_ids[0] += r->ids[w];
    }
    r->announced = true;
    return PERI_OK;
}

/* -- payload ------------------------------------------------------------------------------------------------------- */

static peri_status post_payload(peri__routing *r)
{
    peri_group *group = r->router->group;
    for (int32_t k = 0; k < PERI__PAYLOADS; k++) {
        bool by_bag = k == PERI__LENGTHS || k == PERI__BY_BAG;
        peri__transfer_args a = {.kind = PERI_COLL_ALL_TO_ALL,
                                 .channel = PERI_CHANNEL_IDS,
                                 .sequence = r->payload + (uint64_t)k,
                                 .out = by_bag ? r->sent_bags : r->sent_ids,
                                 .in = by_bag ? r->source_bags : r->source_ids};
        if (r->send[k]) PERI_TRY(peri__transfer_post(group, r->send[k], &a, &r->transfers[k]));
        else peri__group_skip(group, PERI_CHANNEL_IDS, a.sequence);
    }
    return PERI_OK;
}

/** Everything is here: make offsets, drop what was sent. */
static peri_status finish_routing(peri__routing *r)
{
    peri_device *device = r->router->device;
    for (int32_t k = 0; k < PERI__PAYLOADS; k++) {
        if (r->announce) {
            peri_tensor_release(r->send[k]);
            r->received[k] = peri__transfer_numbers(&r->transfers[k]);
        } else {
            r->received[k] = r->send[k];
        }
        r->send[k] = NULL;
    }
    peri_tensor_release(r->cursor);
    r->cursor = NULL;
    if (r->args.by_id) {
        PERI_TRY(peri__offsets_of_equal(device, peri__numel(r->received[PERI__IDS]), 1, &r->offsets));
        return peri__offsets_of_equal(device, peri__numel(r->values), 1, &r->own_offsets);
    }
    r->own_offsets = r->offsets_in;
    peri_tensor_retain(r->own_offsets);
    PERI_TRY(new_1d(device, PERI_I64, peri__numel(r->received[PERI__LENGTHS]) + 1, &r->offsets));
    PERI_TRY(peri__complete_sum(r->received[PERI__LENGTHS], peri__numel(r->received[PERI__IDS]), r->offsets));
    peri_tensor_release(r->received[PERI__LENGTHS]);
    r->received[PERI__LENGTHS] = NULL;
    return PERI_OK;
}

/* -- the state machine --------------------------------------------------------------------------------------------- */

/** Waiting for the own device is no standstill of the ranks. */
static peri_status device_pending(const peri__routing *r, peri_status status)
{
    if (status == PERI_PENDING) r->router->group->comm->events++;
    return status;
}

static peri_status test_payload(peri__routing *r)
{
    for (int32_t k = 0; k < PERI__PAYLOADS; k++) {
        peri_status status = peri__transfer_test(&r->transfers[k]);
        if (status != PERI_OK) return status;
    }
    return PERI_OK;
}

peri_status peri__routing_test(peri__routing *r)
{
    peri_status status;
    switch (r->phase) {
    case SYNC:
        if ((status = device_pending(r, peri_kjt_sync_test(r->args.kjt))) != PERI_OK) return status;
        PERI_TRY(count_ids(r));
        r->phase = COUNT;
        /* fallthrough */
    case COUNT:
        if ((status = device_pending(r, peri__report_test(r->report))) != PERI_OK) return status;
        PERI_TRY(check_id_reports(r));
        PERI_TRY(make_counts(r));
        if (r->announce) PERI_TRY(post_announcement(r));
        PERI_TRY(pack_ids(r));
        r->phase = ANNOUNCE;
        /* fallthrough */
    case ANNOUNCE:
        if (r->announce && (status = peri__announce_test(r->announce)) != PERI_OK) return status;
        PERI_TRY(read_announcements(r));
        if (r->announce) PERI_TRY(post_payload(r));
        r->phase = PAYLOAD;
        /* fallthrough */
    case PAYLOAD:
        if ((status = test_payload(r)) != PERI_OK) return status;
        PERI_TRY(finish_routing(r));
        r->phase = DONE;
        /* fallthrough */
    default: return PERI_OK;
    }
}

peri_status peri__routing_return(const peri__routing *r, peri_tensor *numbers, peri__transfer *back)
{
    const peri__transfer_args a = {
        .kind = PERI_COLL_ALL_TO_ALL, .channel = PERI_CHANNEL_ROWS, .out = r->source_ids, .in = r->sent_ids};
    return peri__transfer_post(r->router->group, numbers, &a, back);
}

void peri__routing_drop_input(peri__routing *r)
{
    peri_tensor **tensors[] = {&r->values, &r->weights, &r->offsets_in, &r->own_offsets};
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        peri_tensor_release(*tensors[i]);
        *tensors[i] = NULL;
    }
    peri_kjt_release(r->args.kjt);
    r->args.kjt = NULL;
}

void peri__routing_fini(peri__routing *r)
{
    peri__routing_drop_input(r);
    for (int32_t k = 0; k < PERI__PAYLOADS; k++) {
        peri__transfer_fini(&r->transfers[k]);
        peri_tensor_release(r->send[k]);
        peri_tensor_release(r->received[k]);
    }
    peri_tensor *tensors[] = {r->cursor, r->wire_lengths, r->offsets, r->places, r->origins};
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) peri_tensor_release(tensors[i]);
    peri__report_return(r->report);
    peri__announce_release(r->announce);
    peri__free(r->rank_ids);
    peri__free(r->place_first);
    peri__outbound_release(r->outbound);
    *r = (peri__routing){0};
}

/* -- the start of a batch ------------------------------------------------------------------------------------------ */

/** The input's tensors as the kernels take them: contiguous, offsets i64. */
static peri_status normalise_input(peri__routing *r)
{
    PERI__HELD peri_tensor *offsets = NULL;
    PERI_TRY(peri_kjt_values(r->args.kjt, &r->values));
    PERI_TRY(peri_kjt_weights(r->args.kjt, &r->weights));
    if (r->weights && (r->weights->dtype != PERI_F32 || r->weights->ndim != 1))
        return peri__fail(PERI_EINVAL, "%s: the weights are %s of %d dimensions, allowed: f32, one for each id",
                          r->router->function, peri_dtype_name(r->weights->dtype), r->weights->ndim);
    PERI_TRY(peri_kjt_offsets(r->args.kjt, &offsets));
    return peri_tensor_to(offsets, PERI_I64, NULL, &r->offsets_in);
}

peri_status peri__routing_start(peri__routing *r, peri__router *o, const peri__routing_args *args)
{
    *r = (peri__routing){.router = o, .args = *args};
    peri_kjt_retain(args->kjt);
    peri_status status = peri__router_find(o, peri_kjt_keys(args->kjt));
    if (status >= 0) status = peri__outbound_of(o, args->kjt, &r->outbound);
    if (status >= 0) status = normalise_input(r);
    if (status >= 0) status = peri_kjt_sync_post(args->kjt);
    if (status < 0) peri__routing_fini(r);
    return status;
}

/* -- setting out --------------------------------------------------------------------------------------------------- */

/** Make the announcement that @n routings share. Each then writes and reads its own part of it. @parts and @out are the
 *  caller's memory: a part for each routing, and how many words it has for each rank. */
static peri_status new_announcement(peri__routing *const *r, int32_t n, peri__announce_part *parts, int64_t *out)
{
    peri_group *g = r[0]->router->group;
    bool ahead = false, texts = false;
    for (int32_t i = 0; i < n; i++, out += g->size) {
        peri__router *o = r[i]->router;
        const int32_t mine = peri__strands_of(o->routes, g->rank);
        parts[i] = (peri__announce_part){.agreement = r[i]->args.agreement, .out = out,
                                         .in = PERI__ROUTING_WORDS + STRAND_WORDS * (int64_t)mine};
        for (int32_t k = 0; k < g->size; k++)
            out[k] = PERI__ROUTING_WORDS + STRAND_WORDS * (int64_t)peri__strands_of(o->routes, k);
        texts = texts || r[i]->args.agreement.bytes > 0;
        ahead = ahead || !o->begun; /* identities come before a first batch's words, whose number depends on the plan */
        o->begun = true;
    }
    peri__announce_numbers numbers;
    PERI_TRY(peri__announce_reserve(g, ahead, texts, &numbers));
    peri__announce *a;
    /* ranks must list as many */
    PERI_TRY(peri__announce_new(r[0]->router->function, g, parts, n, &numbers, (uint64_t)(n - 1), &a));
    for (int32_t i = 0; i < n; i++) {
        if (i) peri__announce_retain(a);
        r[i]->announce = a;
        r[i]->part = i;
    }
    return PERI_OK;
}

peri_status peri__routings_set_out(peri__routing *const *r, int32_t n)
{
    peri_group *g = r[0]->router->group;
    if (g->size == 1) return PERI_OK;
    PERI__SCRATCH peri__announce_part *parts =
        peri__alloc((sizeof *parts + sizeof(int64_t) * (size_t)g->size) * (size_t)n);
    if (!parts) return PERI_ENOMEM;
    PERI_TRY(new_announcement(r, n, parts, (int64_t *)(parts + n)));
    for (int32_t i = 0; i < n; i++)
        PERI_TRY(peri__group_reserve(g, PERI_CHANNEL_IDS, PERI__PAYLOADS, &r[i]->payload));
    return PERI_OK;
}
