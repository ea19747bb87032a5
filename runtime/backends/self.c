/* SPDX-License-Identifier: Apache-2.0
 *
 * self.c: the transport of a world of one rank: every operation is a copy to itself, done when posted.
 */
#include "../plugin/coll.h"

#include <string.h>

static const peri_plugin_host *host;

static peri_status self_probe(char *reason, size_t len)
{
    (void)reason, (void)len;
    return PERI_OK;
}

static peri_status self_open(peri_coll_open *boot, void **group)
{
    if (boot->rank > 0 || boot->size > 1)
        return PERI_HOST_FAIL(host, PERI_EINVAL, "self: rank %d of %d, this transport is a world of one rank",
                              boot->rank, boot->size);
    boot->rank = 0;
    boot->size = 1;
    *group = &host;
    return PERI_OK;
}

static peri_status self_subgroup(void *group, const int32_t *ranks, int32_t n, uint64_t tag, void **sub)
{
    (void)ranks, (void)tag;
    if (n != 1) return PERI_HOST_FAIL(host, PERI_EINVAL, "self: a group of %d ranks in a world of one", n);
    *sub = group;
    return PERI_OK;
}

static peri_status self_post(void *group, const peri_coll_op *op, void **request)
{
    int64_t count = 0;
    switch (op->kind) {
    case PERI_COLL_ALL_REDUCE: count = op->count; break;
    case PERI_COLL_ALL_GATHER:
    case PERI_COLL_REDUCE_SCATTER:
    case PERI_COLL_ALL_TO_ALL: count = op->send_counts[0]; break;
    default: break; /* barrier and broadcast: nothing moves */
    }
    if (count > 0 && op->recv != op->send)
        memcpy(op->recv, op->send, (size_t)(count * peri_coll_dtype_size(op->dtype)));
    *request = group;
    return PERI_OK;
}

static peri_status self_test(void *request)
{
    (void)request;
    return PERI_OK;
}

static peri_status self_drop(void *request)
{
    (void)request;
    return PERI_OK;
}

static void self_blame(void *request, char *text, size_t len)
{
    (void)request, (void)text, (void)len;
}
static void self_abort(void *group, const char *message) { (void)group, (void)message; }

static peri_status self_close(void *group)
{
    (void)group;
    return PERI_OK;
}

static void self_release(void *group) { (void)group; }

static const peri_coll_vtab vtab = {
    .size = sizeof vtab,
    .abi = PERI_COLL_ABI,
    .name = "self",
    .takes = PERI_COLL_HOST | PERI_COLL_RANK_ORDER,
    .probe = self_probe,
    .open = self_open,
    .subgroup = self_subgroup,
    .post = self_post,
    .test = self_test,
    .blame = self_blame,
    .drop = self_drop,
    .abort = self_abort,
    .close = self_close,
    .release = self_release,
};

const peri_coll_vtab *peri__self_entry(const peri_plugin_host *lent);
const peri_coll_vtab *peri__self_entry(const peri_plugin_host *lent)
{
    if (!host) host = lent; /* who has the table reads it */
    return &vtab;
}
