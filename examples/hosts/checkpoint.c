/* SPDX-License-Identifier: Apache-2.0
 *
 * checkpoint.c: a C program whose sharded table and dense layer outlive it, without Lua.
 *
 *   cc checkpoint.c $(pkg-config --cflags --libs perilune) -o checkpoint
 *   mpirun -n 2 ./checkpoint save model-1 && mpirun -n 3 ./checkpoint load model-1
 * Names and values are those of peri.checkpoint (docs/checkpoints.md): Lua reads it as a model with a collection `ebc` and a layer `over`,
 * and writes what this program reads.
 */
#include <perilune/perilune.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 100, COLS = 8, TEXT = 1 << 16, MOST = 64 /* ranks */ };
#define TABLE "ebc.embedding_bags.t.weight"
static peri_device *cpu;
static peri_group *world;
static peri_sharded *tables; /* one, of an optimizer whose states have a number for each row */
static peri_tensor *layer, *steps; /* [1, COLS], and the table's updates [1]: equal on all ranks */

static void check(peri_status status)
{
    if (status < 0 && world) peri_group_abort(world, peri_error_message()); /* the other ranks end with the same message */
    if (status < 0) exit((fprintf(stderr, "checkpoint: %s\n", peri_error_message()), 1));
}

/* The texts of all ranks, TEXT bytes each. */
static void gather(const char *text, char *all)
{
    static char own[TEXT];
    const int64_t bytes = TEXT, total = TEXT * peri_group_size(world);
    peri_tensor *in, *out;
    peri_work *work;
    if (snprintf(own, sizeof own, "%s", text) >= TEXT) exit(1); /* more tables than this program has */
    check(peri_tensor_new(cpu, PERI_U8, 1, &bytes, &in)), check(peri_tensor_new(cpu, PERI_U8, 1, &total, &out));
    check(peri_tensor_write(in, own, bytes)), check(peri_coll_all_gather(world, out, in, 0, &work)), check(peri_work_wait(work));
    check(peri_tensor_read(out, all, total)), peri_work_release(work), peri_tensor_release(in), peri_tensor_release(out);
}

/* What a rank has: f(tensor of the checkpoint, rectangle of it, elements here) for each state of each shard, and for the layer. */
typedef void visit(const peri_checkpoint_tensor *whole, const peri_checkpoint_region *part, peri_tensor *elements, void *to);
static void each(visit *f, void *to)
{
    const peri_checkpoint_tensor over = {.name = "model/over.weight", .dtype = PERI_F32, .ndim = 2, .shape = {1, COLS}};
    const peri_checkpoint_tensor step = {.name = "model.tables/state/" TABLE "/t.step", .dtype = PERI_I64, .ndim = 1, .shape = {1}};
    const peri_checkpoint_region row = {.size = {1, COLS}};
    peri_tensor *elements;
    peri_local_shard s;
    for (int32_t i = 0; i < peri_sharded_local_shards(tables); i++) {
        check(peri_sharded_local_shard(tables, i, &s));
        for (int32_t k = 0; s.shard.rows > 0 && peri_tbe_state_name(s.tbe, k); k++) {
            const char *state = peri_tbe_state_name(s.tbe, k);
            char name[99];
            peri_checkpoint_tensor whole = {.name = name, .dtype = PERI_F32, .ndim = k ? 1 : 2, .shape = {ROWS, COLS}};
            peri_checkpoint_region part = {.offset = {s.shard.row_offset, s.shard.col_offset}, .size = {s.shard.rows, s.shard.cols}};
            snprintf(name, sizeof name, k ? "model.tables/state/" TABLE "/t.%s" : "model/" TABLE, state);
            check(peri_tbe_state(s.tbe, s.tbe_table, state, &elements)), f(&whole, &part, elements, to), peri_tensor_release(elements);
        }
    }
    f(&over, &row, layer, to), f(&step, &row, steps, to);
}
static bool announcing; /* all pieces are announced before the first is put */
static void give(const peri_checkpoint_tensor *whole, const peri_checkpoint_region *part, peri_tensor *elements, void *writer)
{
    if ((elements == layer || elements == steps) && peri_group_rank(world) > 0) return; /* what all have alike one rank writes */
    check(announcing ? peri_checkpoint_writer_add(writer, whole, part) : peri_checkpoint_writer_put(writer, elements));
}
static void take(const peri_checkpoint_tensor *whole, const peri_checkpoint_region *part, peri_tensor *elements, void *checkpoint)
{
    check(peri_checkpoint_read(checkpoint, peri_checkpoint_find(checkpoint, whole->name), part, elements)); /* -1, none: an error */
}
static void save(const char *path)
{
    static const char values[] = "{\"parts\":{\"model\":{},\"model.tables\":{\"param_groups\":[{\"params\":[\"" TABLE "\"],"
                         "\"optimizer\":\"rowwise_adagrad\",\"lr\":0.1}],\"state\":{\"" TABLE "\":{}}}},\"extra\":{\"model\":{}}}";
    const int32_t rank = peri_group_rank(world), size = peri_group_size(world);
    const char *parts[MOST], *part;
    static char all[MOST * TEXT], digest[PERI_CHECKPOINT_DIGEST + 1], stem[32];
    peri_checkpoint_folder *folder = NULL;
    peri_checkpoint_writer *writer;
    peri_local_shard s;
    if (rank == 0) check(peri_checkpoint_folder_new(path, &folder)); /* 1: a folder beside the name that it is to have */
    gather(folder ? peri_checkpoint_folder_path(folder) : "", all);
    check(peri_checkpoint_folder_await(all)), snprintf(stem, sizeof stem, "rank-%d", rank);
    check(peri_checkpoint_writer_new(all, stem, 0, &writer)); /* 2: each rank writes its pieces: all are announced, then put */
    check(peri_sharded_local_shard(tables, 0, &s)), check(peri_tensor_write(steps, (int64_t[]){peri_tbe_iteration(s.tbe)}, 8));
    announcing = true, each(give, writer), announcing = false, each(give, writer);
    check(peri_checkpoint_writer_finish(writer)), check(peri_checkpoint_writer_part(writer, &part));
    gather(part, all); /* 3: rank 0 joins what they say, and the folder gets its name */
    for (int32_t r = 0; r < size; r++) parts[r] = all + TEXT * r;
    const peri_checkpoint_facts facts = {.values = values};
    if (rank == 0) check(peri_checkpoint_publish(peri_checkpoint_folder_path(folder), path, parts, size, &facts, true, digest));
    peri_checkpoint_writer_release(writer), peri_checkpoint_folder_release(folder);
}
static void load(const char *path)
{
    double n;
    peri_checkpoint *checkpoint;
    check(peri_checkpoint_open(path, &checkpoint)), each(take, checkpoint); /* each rank reads the rectangles that it has */
    check(peri_tensor_item(steps, 0, &n)), check(peri_sharded_iteration_set(tables, (int64_t)n)), peri_checkpoint_release(checkpoint);
}

int main(int argc, char **argv)
{
    static const char *const features[] = {"f"};
    peri_tbe_optimizer adagrad = {.size = sizeof adagrad};
    check(peri_comm_open(NULL, &world)), check(peri_device_get("cpu", &cpu));
    check(peri_tbe_optimizer_default(PERI_TBE_ROWWISE_ADAGRAD, &adagrad)), adagrad.learning_rate = 0.1;
    const peri_sharded_table table = {.size = sizeof table,
                                      .name = "t", .rows = ROWS, .cols = COLS, .features = (int32_t[]){0}, .n_features = 1,
                                      .sharding_type = PERI_ROW_WISE, .compute_kernel = PERI_KERNEL_FUSED};
    const peri_sharded_config config = {.size = sizeof config,
                                        .group = world, .device = cpu, .tables = &table, .n_tables = 1, .seed = 1, .features = features,
                                        .n_features = 1, .optimizers = &adagrad, .n_optimizers = 1};
    check(peri_sharded_new(&config, &tables)), check(peri_tensor_new(cpu, PERI_I64, 1, (int64_t[]){1}, &steps));
    check(peri_tensor_full(cpu, PERI_F32, 2, (int64_t[]){1, COLS}, 0.5, &layer)); /* then training, as in train.c */
    if (argc == 3 && strcmp(argv[1], "load") == 0) load(argv[2]);
    if (argc == 3) save(argv[2]); /* what was loaded too: now it is cut for these ranks */
    check(peri_group_close(world)); /* what is left goes with the process */
}
