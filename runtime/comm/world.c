/* SPDX-License-Identifier: Apache-2.0
 *
 * world.c: joining the world of all ranks, and the choice of its transports.
 */
#include "comm_internal.h"

#include <stdio.h>
#include <stdlib.h>

bool peri_comm_probe(const char *name, char *reason, int64_t size)
{
    const peri_coll_vtab *vtab;
    char why[256] = "";
    bool ok = name && !peri__border_refuses(__func__) && peri__plugin_coll(name, &vtab) >= 0;
    if (!name) snprintf(why, sizeof why, "no name");
    else if (!ok) snprintf(why, sizeof why, "%.250s", peri_error_message());
    else ok = vtab->probe(why, sizeof why) >= 0;
    if (reason && size > 0) snprintf(reason, (size_t)size, "%s", why);
    return ok;
}

/** The transport @name, if it can be used here. @what: the argument that names it. */
static peri_status find_usable(const char *what, const char *name, const peri_coll_vtab **out)
{
    char reason[256] = "";
    PERI_TRY(peri__plugin_coll(name, out));
    if ((*out)->probe(reason, sizeof reason) < 0)
        return peri__fail(PERI_EUNSUPPORTED, "peri_comm_open: %s '%s' cannot be used here: %s", what, name, reason);
    return PERI_OK;
}

/** mpi when it can run and several ranks were launched, else self. */
static peri_status choose_transport(const char *name, bool own, const peri_coll_vtab **out)
{
    char reason[256] = "";
    const bool any = !name || !*name || strcmp(name, "auto") == 0;
    if (own && !any && strcmp(name, "mpi") != 0)
        return peri__fail(PERI_EINVAL,
                          "peri_comm_open: transport '%.40s' with a communicator, allowed: mpi, whose it is", name);
    if (own) PERI_TRY(find_usable("transport", "mpi", out));
    if (own && (*out)->abi < 9)
        return peri__fail(PERI_EUNSUPPORTED,
                          "peri_comm_open: this libperilune_mpi.so is older than the library, and takes no "
                          "communicator");
    if (own) return PERI_OK;
    if (!any) return find_usable("transport", name, out);
    /* Loading the plugin costs tens of milliseconds: look for a launcher first. */
    static const char *const launchers[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "PMIX_RANK",
                                            NULL};
    bool launched = false;
    const char *size = NULL;
    for (const char *const *l = launchers; *l; l++) launched = launched || secure_getenv(*l);
    for (const char *const *l = launchers; !size && l < launchers + 3; l++) size = secure_getenv(*l);
    const peri_coll_vtab *mpi = NULL;
    if (launched && peri__plugin_coll("mpi", &mpi) >= 0 && mpi->probe(reason, sizeof reason) >= 0 && mpi->launched &&
        mpi->launched() > 1) {
        *out = mpi;
        return PERI_OK;
    }
    /* several ranks that do not know of each other would each train alone: never silently */
    if (size && atoi(size) > 1)
        return peri__fail(PERI_EUNSUPPORTED,
                          "peri_comm_open: launched as one of %s ranks, but transport 'mpi' cannot be used: %s", size,
                          reason[0] ? reason : peri_error_message());
    return peri__plugin_coll("self", out);
}

static peri_status read_timeout(double seconds, int64_t *out)
{
    if (seconds == 0) {
        const char *text = secure_getenv("PERI_COMM_TIMEOUT_S");
        seconds = 300;
        if (text && (!peri__number_of(text, (int64_t)strlen(text), &seconds) || !(seconds > 0)))
            return peri__fail(PERI_EINVAL, "peri_comm_open: PERI_COMM_TIMEOUT_S is '%s', allowed: numbers above 0",
                              text);
    }
    if (!(seconds > 0 && seconds <= 1e9))
        return peri__fail(PERI_EINVAL, "peri_comm_open: a timeout of %g s, allowed: above 0 to 1e9", seconds);
    *out = (int64_t)(seconds * 1e9);
    return PERI_OK;
}

/** Write down each rank's node: @local_size ranks in a row share one; 0: as the transport says, or all share one. */
static peri_status set_nodes(peri__comm *comm, void *ctx, int32_t local_size)
{
    comm->node = peri__alloc_zero(sizeof *comm->node * (size_t)comm->size);
    if (!comm->node) return PERI_ENOMEM;
    for (int32_t i = 0; i < comm->size; i++)
        comm->node[i] = local_size ? i / local_size : comm->vtab->node ? comm->vtab->node(ctx, i) : 0;
    return PERI_OK;
}

/** The transport and the device of the second world, into @comm, if one is wanted. Before the first one is joined: what
 *  is refused here leaves the rank free to try again. */
static peri_status find_device(peri__comm *comm, const peri_comm_config *config)
{
    const char *name = config->device_transport;
    if (name && strcmp(name, "auto") == 0) return PERI_OK; /* peri_comm_use_device, when the ranks can ask each other */
    if (!name || !*name) {
        if (config->device && *config->device)
            return peri__fail(PERI_EINVAL, "peri_comm_open: device '%.40s' without a device_transport", config->device);
        return PERI_OK;
    }
    if (!config->device || !*config->device)
        return peri__fail(PERI_EINVAL, "peri_comm_open: device_transport '%.40s' without the name of its device", name);
    PERI_TRY(find_usable("device_transport", name, &comm->device_vtab));
    if (!(comm->device_vtab->takes & PERI_COLL_DEVICE))
        return peri__fail(PERI_EUNSUPPORTED,
                          "peri_comm_open: transport '%s' takes no device memory: it is no device_transport", name);
    PERI_TRY(peri_device_get(config->device, &comm->device));
    if (comm->device->caps & PERI_DEVICE_IMMEDIATE)
        return peri__fail(PERI_EUNSUPPORTED,
                          "peri_comm_open: device '%s' needs no device_transport: its memory is the host's",
                          config->device);
    return PERI_OK;
}

/** Join the second world, if one was found: of the ranks of @world. @job: the world's name, by which sim finds the
 *  others; else NULL. */
static peri_status open_device(peri_group *world, const char *job)
{
    peri__comm *comm = world->comm;
    if (!comm->device) return PERI_OK;
    peri_coll_open boot = {.job = job, .rank = comm->rank, .size = comm->size, .timeout_ns = comm->timeout_ns,
                           .device_vtab = comm->device->vtab, .device = comm->device->ctx, .host_vtab = comm->vtab,
                           .host_group = world->ctx};
    PERI_TRY(comm->device_vtab->open(&boot, &world->device_ctx));
    comm->device_world = world->device_ctx;
    return PERI_OK;
}

/** What a rank tells the others about its GPU. */
typedef struct ballot {
    char place[64]; /* of the GPU on its machine */
    char why[184];  /* why it cannot be used by the transport of GPUs; "": it can */
    int32_t node;   /* number of the machine */
} ballot;

static void fill_ballot(peri__comm *comm, const char *name, void *host_group, ballot *b)
{
    char reason[256] = "";
    memset(b, 0, sizeof *b);
    b->node = comm->vtab->node ? comm->vtab->node(host_group, comm->rank) : 0;
    peri_status status = peri_device_get(name, &comm->device);
    if (status >= 0) status = peri__plugin_coll("nccl", &comm->device_vtab);
    if (status >= 0 && comm->device_vtab->probe(reason, sizeof reason) < 0)
        status = peri__fail(PERI_EUNSUPPORTED, "nccl cannot be used: %s", reason);
    if (status >= 0 && !comm->device->vtab->place)
        status = peri__fail(PERI_EUNSUPPORTED, "device %s does not tell which GPU it is", comm->device->name);
    if (status >= 0) status = comm->device->vtab->place(comm->device->ctx, b->place, sizeof b->place);
    if (status < 0) snprintf(b->why, sizeof b->why, "%.180s", peri_error_message());
    peri_error_clear();
}

/** Why the ranks cannot use the transport of GPUs, into @why; "": they can. The same on all ranks. */
static void count_up(const ballot *b, int32_t n, char *why, size_t len)
{
    why[0] = 0;
    for (int32_t i = 0; i < n && !why[0]; i++)
        if (b[i].why[0]) snprintf(why, len, "rank %d: %s", i, b[i].why);
    for (int32_t i = 0; i < n && !why[0]; i++)
        for (int32_t k = 0; k < i && !why[0]; k++)
            if (b[i].node == b[k].node && strcmp(b[i].place, b[k].place) == 0)
                snprintf(why, len, "ranks %d and %d share a GPU (%s), and nccl wants one for each rank", k, i,
                         b[i].place);
}

/** Where nobody has named a transport for the tensors of @name, a GPU: nccl, if each rank has a GPU of its own.
 *  Collective. */
static peri_status choose_device(peri_group *world, const char *name, char *why, size_t len)
{
    peri__comm *comm = world->comm;
    const int32_t n = comm->size;
    peri_group *vote = NULL; /* of its own, so that it takes no numbers of the world */
    peri_work *work = NULL;
    PERI__SCRATCH int32_t *ranks = peri__alloc(sizeof *ranks * (size_t)n);
    PERI__SCRATCH int64_t *counts = peri__alloc(sizeof *counts * (size_t)n);
    PERI__SCRATCH ballot *all = peri__alloc(sizeof *all * (size_t)n);
    ballot own;
    peri_status status;
    if (!ranks || !counts || !all) return PERI_ENOMEM;
    fill_ballot(comm, name, world->ctx, &own);
    for (int32_t i = 0; i < n; i++) {
        ranks[i] = i;
        counts[i] = sizeof own;
    }
    PERI_TRY_GOTO(peri_group_new(world, ranks, n, "transports", &vote), out);
    peri_coll_op op = {.kind = PERI_COLL_ALL_GATHER, .dtype = PERI_U8, .send = &own, .recv = all, .send_counts = counts,
                       .recv_counts = counts, .tag = peri__hash_text("transports")};
    PERI_TRY_GOTO(peri__coll_post_host(vote, &op, NULL, NULL, &work), out);
    PERI_TRY_GOTO(peri_work_wait(work), out);
    PERI_TRY_GOTO(peri_group_close(vote), out);
    count_up(all, n, why, len);
    if (why[0]) comm->device = NULL, comm->device_vtab = NULL;
    else status = open_device(world, NULL);
out:
    peri_work_release(work);
    peri_group_release(vote);
    return status;
}

/** Say in words what carries tensors of @device, which is NULL where there is no second transport. @chosen: nobody has
 *  named that; @why: then why it is not nccl. */
static void describe_carrier(peri__comm *comm, const char *device, bool chosen, const char *why)
{
    char *text = comm->transports;
    const size_t len = sizeof comm->transports;
    const char *first = comm->vtab->name;
    if (!device) snprintf(text, len, "%s", first);
    else if (!chosen)
        snprintf(text, len, "%s, and %s for tensors of %.24s, as was asked for", first, comm->device_vtab->name,
                 device);
    else if (why[0])
        snprintf(text, len, "%s, also for tensors of %.24s, through the host's memory: %.220s", first, device, why);
    else
        snprintf(text, len, "%s, and %s for tensors of %.24s: each of the %d ranks has a GPU of its own", first,
                 comm->device_vtab->name, device, comm->size);
    if (chosen && comm->rank == 0) peri__log(why[0] ? PERI_LOG_WARN : PERI_LOG_INFO, "transports: %s", text);
}

peri_status peri_comm_use_device(peri_group *world, const char *name)
{
    PERI_NEED(world, name);
    peri__comm *comm = world->comm;
    char why[256] = "";
    if (world->parent) return PERI_OK;
    PERI_TRY(peri__group_check("peri_comm_use_device", world));
    if (!comm->chooses || comm->size == 1 || !comm->vtab->note_send || strncmp(name, "cuda", 4) != 0) return PERI_OK;
    comm->chooses = false;
    peri_status status = choose_device(world, name, why, sizeof why);
    if (status < 0) return peri__group_fail(world, status);
    describe_carrier(comm, name, true, why);
    return PERI_OK;
}

peri_status peri_comm_open(const peri_comm_config *given, peri_group **out)
{
    PERI_NEED(out);
    peri_comm_config config = {.size = sizeof config};
    if (given) PERI_TRY(peri__struct_take(&config, sizeof config, given, __func__, "peri_comm_config"));
    int64_t timeout = 0;
    PERI_TRY(read_timeout(config.timeout_s, &timeout));
    const peri_coll_vtab *vtab;
    if (config.local_size < 0)
        return peri__fail(PERI_EINVAL, "peri_comm_open: nodes of %d ranks, allowed: 0 and more", config.local_size);
    if (config.world_size < 0)
        return peri__fail(PERI_EINVAL, "peri_comm_open: a world of %d ranks, allowed: 0 and more", config.world_size);
    PERI_TRY(choose_transport(config.transport, config.communicator != NULL, &vtab));
    peri__comm *comm = peri__alloc_zero(sizeof *comm);
    if (!comm) return PERI_ENOMEM;
    peri__refs_init(&comm->refs);
    comm->vtab = vtab;
    comm->forks = peri__forks();
    comm->timeout_ns = timeout;
    comm->chooses = config.device_transport && strcmp(config.device_transport, "auto") == 0;
    peri_group *world = NULL;
    void *ctx = NULL;
    peri_coll_open boot = {.job = config.job, .rank = config.world_size ? config.rank : -1,
                           .size = config.world_size, .timeout_ns = timeout, .communicator = config.communicator};
    peri_status status = find_device(comm, &config);
    if (status >= 0) status = vtab->open(&boot, &ctx);
    if (status < 0) goto out;
    comm->rank = boot.rank;
    comm->size = boot.size;
    PERI_TRY_GOTO(set_nodes(comm, ctx, config.local_size), out);
    PERI_TRY_GOTO(peri__group_make(comm, NULL, NULL, boot.size, "world", &world), out);
    world->ctx = ctx;
    ctx = NULL;
    world->tag = peri__hash_text("world");
    world->timeout_ns = timeout;
    PERI_TRY_GOTO(open_device(world, config.job), out);
    peri__group_show_numbers(world);
    describe_carrier(comm, comm->device ? config.device : NULL, false, "");
    if (config.device && *config.device) PERI_TRY_GOTO(peri_comm_use_device(world, config.device), out);
    if (boot.size > 1 && strcmp(vtab->name, "sim") != 0) {
        peri__log_rank_set(boot.rank);
        peri__between_set(&peri__comm_between, comm); /* the ranks of sim take turns by themselves */
    }
    *out = world;
    world = NULL;
out:
    if (ctx) {
        vtab->abort(ctx, peri_error_message());
        vtab->release(ctx);
    }
    if (world) {
        (void)peri__group_fail(world, status);
        peri_group_release(world);
    }
    peri__comm_release(comm);
    return status;
}
