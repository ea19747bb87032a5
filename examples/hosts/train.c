/* SPDX-License-Identifier: Apache-2.0
 *
 * train.c: a C program that owns data and loop, and trains tables that are sharded over its ranks, without Lua.
 *
 *   cc train.c $(pkg-config --cflags --libs perilune) -o train && mpirun -n 2 ./train
 *
 * A sample is an item and three words; its label: is the item odd just when most words are? Table "items" lies on the
 * last rank, rows of "words" on all, a layer on each. A step's samples are dealt over the ranks: any number learns so.
 */
#include <perilune/perilune.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 240, STEPS = 200, ITEMS = 50, WORDS = 200, COLS = 8, EACH = 3 };
static const char *const features[] = {"item", "words"};
static peri_device *cpu;
static peri_group *world;
static void check(peri_status status)
{
    if (status >= 0) return;
    if (world) peri_group_abort(world, peri_error_message()); /* the other ranks end with the same message */
    exit((fprintf(stderr, "train: %s\n", peri_error_message()), 1));
}
static uint32_t mix(uint32_t a, uint32_t b) /* a pseudo-random number that depends on (a, b) only */
{
    return (((a * 2654435761u) ^ ((b + 1) * 2246822519u)) * 3266489917u) >> 8;
}
static peri_tensor *tensor_of(int32_t dtype, int64_t size, const void *data)
{
    peri_tensor *t;
    check(peri_tensor_new(cpu, dtype, 1, &size, &t)), check(peri_tensor_write(t, data, size * peri_dtype_size(dtype)));
    return t;
}
static peri_sharded *make_tables(void)
{
    const int32_t which[] = {0, 1}, last = peri_group_size(world) - 1;
    static peri_sharded_table table[2]; /* static: zeros, which are the defaults of all fields but `size` */
    static peri_sharded_config config;
    static peri_tbe_optimizer_config adagrad;
    peri_sharded *tables;
    config.size = sizeof config, table[0].size = table[1].size = sizeof table[0], adagrad.size = sizeof adagrad;
    check(peri_tbe_optimizer_default(PERI_TBE_ROWWISE_ADAGRAD, &adagrad)), adagrad.learning_rate = 0.1;
    table[0].name = "items", table[0].rows = ITEMS, table[0].ranks = &last, table[0].n_ranks = 1;
    table[0].sharding_type = PERI_TABLE_WISE, table[1].sharding_type = PERI_ROW_WISE;
    table[1].name = "words", table[1].rows = WORDS, table[1].pooling = PERI_POOLING_MEAN;
    table[0].compute_kernel = table[1].compute_kernel = PERI_KERNEL_FUSED;
    for (int i = 0; i < 2; i++) table[i].cols = COLS, table[i].features = &which[i], table[i].n_features = 1;
    config.group = world, config.device = cpu, config.tables = table, config.n_tables = 2, config.seed = 1;
    config.features = features, config.n_features = 2, config.optimizers = &adagrad, config.n_optimizers = 1;
    check(peri_sharded_new(&config, &tables));
    return tables;
}

/* This rank's share of a step, feature after feature: the items of all its samples, then their words. */
static void next_batch(peri_keys *keys, uint32_t step, peri_kjt **batch, peri_tensor **labels)
{
    const int32_t rank = peri_group_rank(world), size = peri_group_size(world);
    const int64_t first = BATCH * rank / size, share = BATCH * (rank + 1) / size - first;
    int64_t ids[BATCH * (1 + EACH)], lengths[2 * BATCH], n = share;
    float label[BATCH];
    static peri_kjt_config args;
    for (int64_t i = 0; i < share; i++) {
        uint32_t sample = step * BATCH + (uint32_t)(first + i), odd = 0;
        ids[i] = mix(sample, EACH) % ITEMS, lengths[i] = 1, lengths[share + i] = EACH;
        for (uint32_t k = 0; k < EACH; k++) odd += (ids[n++] = mix(sample, k) % WORDS) % 2 != 0;
        label[i] = (2 * odd > EACH) == (ids[i] % 2 != 0);
    }
    args.size = sizeof args, args.keys = keys;
    args.values = tensor_of(PERI_I64, n, ids), args.lengths = tensor_of(PERI_I64, 2 * share, lengths);
    check(peri_kjt_new(&args, batch)), peri_tensor_release(args.values), peri_tensor_release(args.lengths);
    *labels = tensor_of(PERI_F32, share, label);
}

/* Ids go to their owners, rows come back; a layer looks at item * words. The mean of all losses is the batch's */
static peri_tensor *loss_of(peri_sharded *tables, peri_kjt *batch, peri_tensor *weight, peri_tensor *labels)
{
    peri_work *ids, *rows;
    peri_tensor *t[6], *loss;
    check(peri_sharded_input_dist(tables, batch, &ids)), check(peri_work_wait(ids));
    check(peri_sharded_compute_and_output_dist(tables, ids, &rows)), check(peri_work_wait(rows));
    check(peri_sharded_output(tables, rows, &t[0])), peri_work_release(ids), peri_work_release(rows);
    check(peri_tensor_slice(t[0], 1, 0, COLS, 1, &t[1])), check(peri_tensor_slice(t[0], 1, COLS, 2 * COLS, 1, &t[2]));
    check(peri_op_mul(t[1], t[2], &t[3])), check(peri_op_matmul(t[3], weight, &t[4]));
    check(peri_op_bce_with_logits(t[4], labels, NULL, NULL, PERI_LOSS_SUM, &t[5]));
    check(peri_op_affine(t[5], (double)peri_group_size(world) / BATCH, 0, &loss));
    for (int i = 0; i < 6; i++) peri_tensor_release(t[i]); /* the tape keeps what it needs */
    return loss;
}

int main(void)
{
    const int64_t cols = COLS;
    static peri_optim_config options;
    peri_tensor *weight, *labels, *loss, *sum;
    peri_optim *optim;
    peri_reducer *reducer; /* averages the weight's gradient over the ranks */
    peri_keys *keys;
    check(peri_comm_open(NULL, &world)), check(peri_device_get("cpu", &cpu));
    peri_sharded *tables = make_tables();
    check(peri_keys_new(features, 2, &keys)), check(peri_tensor_full(cpu, PERI_F32, 1, &cols, 1, &weight));
    check(peri_tensor_requires_grad_set(weight, true)), check(peri_reducer_new(world, &weight, 1, 0, &reducer));
    options.size = sizeof options, check(peri_optim_default(PERI_OPTIM_ADAGRAD, &options));
    check(peri_optim_new(&options, &weight, 1, &optim));
    for (uint32_t step = 1; step <= STEPS; step++) {
        peri_kjt *batch;
        peri_work *work;
        double total;
        next_batch(keys, step, &batch, &labels);
        check(peri_tensor_backward(loss = loss_of(tables, batch, weight, labels), NULL)); /* owners update their rows */
        for (peri_status s = PERI_PENDING; s == PERI_PENDING;) check(s = peri_reducer_finish(reducer));
        check(peri_optim_step(optim)), check(peri_optim_zero_grad(optim)), check(peri_tensor_detach(loss, &sum));
        check(peri_coll_all_reduce(world, sum, PERI_REDUCE_SUM, 0, &work)), check(peri_work_wait(work));
        check(peri_tensor_item(sum, 0, &total)), peri_work_release(work), peri_tensor_release(sum);
        total /= peri_group_size(world);
        if (step % 50 == 0 && peri_group_rank(world) == 0) printf("step %u: loss %.4f\n", step, total);
        peri_tensor_release(loss), peri_tensor_release(labels), peri_kjt_release(batch);
    }
    check(peri_group_close(world)); /* what is left goes with the process */
}
