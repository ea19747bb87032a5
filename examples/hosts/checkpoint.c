/* SPDX-License-Identifier: Apache-2.0
 *
 * checkpoint.c: a C program whose sharded table and dense layer outlive it, without Lua.
 *
 *   cc checkpoint.c $(pkg-config --cflags --libs perilune) -o checkpoint
 *   mpirun -n 2 ./checkpoint save model-1 && mpirun -n 3 ./checkpoint load model-1
 * Names and values are those of peri.checkpoint (docs/checkpoints.md): Lua reads it as a model with a collection `ebc`
 * and a layer `over`, and writes what this program reads.
 */
#include <perilune/perilune.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 100, COLS = 8, TEXT = 1 << 16, MOST = 64 /* ranks */ };
static peri_device *cpu;
static peri_group *world;

static void check(peri_status status)
{
    /* the other ranks end with the same message */
    if (status < 0 && world) peri_group_abort(world, peri_error_message());
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
    check(peri_tensor_write(in, own, bytes)), check(peri_coll_all_gather(world, out, in, 0, &work)),
        check(peri_work_wait(work));
    check(peri_tensor_read(out, all, total)), peri_work_release(work), peri_tensor_release(in),
        peri_tensor_release(out);
}

static void save(peri_checkpoint_state *state, const char *path)
{
    const int32_t rank = peri_group_rank(world), size = peri_group_size(world);
    const char *parts[MOST], *part;
    static char all[MOST * TEXT], digest[PERI_CHECKPOINT_DIGEST + 1], stem[32];
    peri_checkpoint_folder *folder = NULL;
    peri_checkpoint_writer *writer;
    /* 1: a folder beside the name that it is to have */
    if (rank == 0) check(peri_checkpoint_folder_new(path, &folder));
    gather(folder ? peri_checkpoint_folder_path(folder) : "", all);
    check(peri_checkpoint_folder_await(all)), snprintf(stem, sizeof stem, "rank-%d", rank);
    /* 2: each rank's pieces */
    check(peri_checkpoint_writer_new(all, stem, 0, &writer)), check(peri_checkpoint_state_write(state, writer));
    check(peri_checkpoint_writer_part(writer, &part));
    gather(part, all); /* 3: rank 0 joins what they say, and the folder gets its name */
    for (int32_t r = 0; r < size; r++) parts[r] = all + TEXT * r;
    static peri_checkpoint_config facts; /* static: zeros, which are the defaults of all fields but `size` */
    facts.size = sizeof facts;
    check(peri_checkpoint_state_values(state, NULL, &facts.values));
    if (rank == 0)
        check(peri_checkpoint_publish(peri_checkpoint_folder_path(folder), path, parts, size, &facts, true, digest));
    peri_checkpoint_writer_release(writer), peri_checkpoint_folder_release(folder);
}
static void load(peri_checkpoint_state *state, const char *path)
{
    peri_checkpoint *checkpoint;
    /* what this rank has of it */
    check(peri_checkpoint_open_late(path, 30, &checkpoint)), check(peri_checkpoint_state_read(state, checkpoint));
    peri_checkpoint_release(checkpoint);
}

int main(int argc, char **argv)
{
    static const char *const features[] = {"f"};
    static const int32_t first = 0; /* of the features: the table's */
    static const int64_t shape[] = {1, COLS};
    static peri_sharded_table table;
    static peri_sharded_config config;
    static peri_tbe_optimizer_config adagrad;
    peri_sharded *tables;
    peri_tensor *layer; /* [1, COLS]: equal on all ranks */
    peri_checkpoint_state *state;
    if (argc != 3 || (strcmp(argv[1], "save") != 0 && strcmp(argv[1], "load") != 0))
        return fprintf(stderr, "usage: checkpoint save|load PATH\n"), 2;
    check(peri_comm_open(NULL, &world)), check(peri_device_get("cpu", &cpu));
    adagrad.size = sizeof adagrad;
    check(peri_tbe_optimizer_default(PERI_TBE_ROWWISE_ADAGRAD, &adagrad)), adagrad.learning_rate = 0.1;
    table.size = sizeof table, table.name = "t", table.rows = ROWS, table.cols = COLS;
    table.features = &first, table.n_features = 1;
    table.sharding_type = PERI_ROW_WISE, table.compute_kernel = PERI_KERNEL_FUSED;
    config.size = sizeof config, config.group = world, config.device = cpu, config.tables = &table, config.n_tables = 1;
    config.features = features, config.n_features = 1, config.seed = 1;
    config.optimizers = &adagrad, config.n_optimizers = 1;
    check(peri_sharded_new(&config, &tables));
    check(peri_tensor_full(cpu, PERI_F32, 2, shape, 0.5, &layer)); /* then training, as in train.c */
    /* what is saved and loaded, and how it is called */
    check(peri_checkpoint_state_new(peri_group_rank(world), &state));
    check(peri_checkpoint_state_tensor(state, "model/over.weight", layer));
    check(peri_checkpoint_state_tables(state, "model", "ebc", tables, &config));
    if (strcmp(argv[1], "load") == 0) load(state, argv[2]);
    save(state, argv[2]); /* what was loaded too: now it is cut for these ranks */
    check(peri_group_close(world)); /* what is left goes with the process */
}
