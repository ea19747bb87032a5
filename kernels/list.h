/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/list.h: the names of all kernels, steps and operations (kernels/kernels.h), by the headers that describe
 * them, each with the struct of its arguments. They stand here, not in those headers, so that only who fills in
 * arguments of a family needs its header.
 */
#ifndef PERI_KERNELS_LIST_H
#define PERI_KERNELS_LIST_H

/* convert.h */
#define PERI_KERNELS_CONVERT(X)                                                                                        \
    X(fill, peri_k_fill_args)                                                                                          \
    X(convert, peri_k_convert_args) X(random, peri_k_random_args) X(reduce, peri_k_reduce_args)                        \
        X(divide, peri_k_divide_args)

/* codec.h */
#define PERI_KERNELS_CODEC(X) X(codec_encode, peri_k_codec_args) X(codec_decode, peri_k_codec_args)

/* dense.h */
#define PERI_KERNELS_DENSE(X)                                                                                          \
    X(axpy, peri_k_axpy_args)                                                                                          \
    X(unary, peri_k_unary_args) X(unary_grad, peri_k_unary_grad_args) X(binary, peri_k_binary_args)                    \
        X(muladd, peri_k_muladd_args) X(bias_act, peri_k_bias_act_args) X(act_grad, peri_k_act_grad_args)              \
            X(formula, peri_k_formula_args)                                                                            \
            X(cross, peri_k_cross_args) X(cross_grad, peri_k_cross_grad_args) X(sum_dim, peri_k_sum_dim_args)          \
                X(max_dim, peri_k_max_dim_args) X(max_dim_grad, peri_k_max_dim_grad_args)                              \
                    X(product_dim, peri_k_product_dim_args) X(product_dim_grad, peri_k_product_dim_grad_args)          \
                    X(softmax, peri_k_softmax_args) X(softmax_grad, peri_k_softmax_grad_args)                          \
                        X(layer_norm, peri_k_layer_norm_args) X(layer_norm_grad, peri_k_layer_norm_grad_args)          \
                            X(dropout, peri_k_dropout_args) X(interaction, peri_k_interaction_args)                    \
                                X(interaction_grad, peri_k_interaction_grad_args) X(loss, peri_k_loss_args)            \
                                    X(loss_grad, peri_k_loss_grad_args) X(mean, peri_k_mean_args)                      \
                                        X(cross_entropy, peri_k_cross_entropy_args)                                    \
                                            X(cross_entropy_grad, peri_k_cross_entropy_grad_args)
#define PERI_STEPS_DENSE(X) X(panel_product, peri_k_panel_product_args)
#define PERI_OPS_DENSE(X) X(gemm, peri_op_gemm)

/* optim.h */
#define PERI_KERNELS_OPTIM(X)                                                                                          \
    X(optim_sgd, peri_k_optim_sgd_args)                                                                                \
    X(optim_adagrad, peri_k_optim_adagrad_args) X(optim_adam, peri_k_optim_adam_args)                                  \
        X(optim_rmsprop, peri_k_optim_rmsprop_args) X(optim_rowwise_adagrad, peri_k_optim_rowwise_adagrad_args)        \
            X(norm_partial, peri_k_norm_partial_args) X(clip_norm, peri_k_clip_norm_args)                              \
                X(clip_value, peri_k_clip_value_args)
#define PERI_STEPS_OPTIM(X) X(norm_finish, peri_k_norm_finish_args)
#define PERI_OPS_OPTIM(X) X(norm_finish, peri_k_norm_finish_args)

/* jagged.h */
#define PERI_KERNELS_JAGGED(X)                                                                                         \
    X(jagged_bounds, peri_k_jagged_bounds_args)                                                                        \
    X(jagged_lengths, peri_k_jagged_lengths_args) X(jagged_copy, peri_k_jagged_copy_args)                              \
        X(jagged_sum, peri_k_jagged_sum_args) X(jagged_to_padded, peri_k_jagged_padded_args)                           \
            X(jagged_from_padded, peri_k_jagged_padded_args) X(columns_sum, peri_k_columns_sum_args)
#define PERI_STEPS_JAGGED(X)                                                                                           \
    X(cumsum_sums, peri_k_cumsum_args)                                                                                 \
    X(cumsum_scan, peri_k_cumsum_args) X(cumsum_write, peri_k_cumsum_args) X(jagged_check, peri_k_jagged_check_args)   \
        X(jagged_report, peri_k_jagged_report_args)
#define PERI_OPS_JAGGED(X) X(cumsum, peri_op_cumsum) X(bags_report, peri_op_bags_report)

/* sparse.h */
#define PERI_KERNELS_SPARSE(X)                                                                                         \
    X(jagged_places, peri_k_jagged_places_args)                                                                        \
    X(invert_permute, peri_k_invert_permute_args) X(segment_sum, peri_k_segment_sum_args)                              \
        X(levels_to_dense, peri_k_levels_args) X(segment_spread, peri_k_segment_spread_args)                           \
            X(bucketize_replay, peri_k_bucketize_replay_args) X(levels_from_dense, peri_k_levels_args)
#define PERI_STEPS_SPARSE(X)                                                                                           \
    X(index_check, peri_k_index_check_args)                                                                            \
    X(sort_keys, peri_k_sort_keys_args) X(sort_order, peri_k_sort_order_args) X(sort_lists, peri_k_sort_lists_args)    \
        X(unique_count, peri_k_unique_args) X(unique_write, peri_k_unique_args) X(unique_counts, peri_k_unique_args)   \
            X(mark_set, peri_k_mark_args) X(mark_count, peri_k_mark_args) X(mark_write, peri_k_mark_args)              \
                X(mark_lookup, peri_k_mark_args) X(mark_tally, peri_k_mark_args)                                       \
                    X(bucketize_count, peri_k_bucketize_args) X(bucketize_place, peri_k_bucketize_args)
#define PERI_OPS_SPARSE(X)                                                                                             \
    X(index_check, peri_op_index_check)                                                                                \
    X(lists, peri_op_lists) X(unique, peri_op_unique) X(bucketize, peri_k_bucketize_args)

/* lookup.h */
#define PERI_KERNELS_LOOKUP(X)                                                                                         \
    X(batch_select, peri_k_batch_select_args)                                                                          \
    X(batch_select_sum, peri_k_batch_select_args) X(unary_sum, peri_k_unary_sum_args)                                  \
        X(unary_sum_back, peri_k_unary_sum_args) X(prune_mark, peri_k_prune_mark_args)                                 \
            X(mask_lengths, peri_k_mask_args) X(hash_find, peri_k_hash_args) X(murmur_hash3, peri_k_murmur_hash3_args) \
                X(calibrate, peri_k_calibrate_args)
#define PERI_STEPS_LOOKUP(X)                                                                                           \
    X(table_rows, peri_k_table_rows_args)                                                                              \
    X(weights_by_id, peri_k_weights_by_id_args) X(slice_bounds, peri_k_slice_bounds_args)                              \
        X(mask_sums, peri_k_mask_args) X(mask_pick, peri_k_mask_args) X(mask_spread, peri_k_mask_args)                 \
            X(mask_places, peri_k_mask_args) X(hash_insert, peri_k_hash_args)
#define PERI_OPS_LOOKUP(X)                                                                                             \
    X(table_rows, peri_k_table_rows_args)                                                                              \
    X(weights_by_id, peri_k_weights_by_id_args) X(slice_bounds, peri_k_slice_bounds_args)                              \
        X(mask_count, peri_k_mask_args) X(mask_pick, peri_k_mask_args) X(mask_spread, peri_k_mask_args)                \
            X(mask_places, peri_k_mask_args) X(hash_insert, peri_k_hash_args)

/* quantize.h */
#define PERI_KERNELS_QUANTIZE(X) X(rows_quantize, peri_k_rows_args) X(rows_restore, peri_k_rows_args)

/* nearest.h */
#define PERI_OPS_NEAREST(X) X(nearest, peri_op_nearest)
#define PERI_STEPS_NEAREST(X) X(nearest_part, peri_k_nearest_args) X(nearest_merge, peri_k_nearest_args)

/* route.h */
#define PERI_KERNELS_ROUTE(X)                                                                                          \
    X(route_count, peri_k_route_count_args)                                                                            \
    X(route_totals, peri_k_route_totals_args) X(route_pack, peri_k_route_pack_args)                                    \
        X(route_return, peri_k_route_return_args) X(route_mean, peri_k_route_mean_args)                                \
            X(route_combine, peri_k_route_combine_args) X(route_spread, peri_k_route_spread_args)                      \
                X(route_rows, peri_k_route_rows_args) X(route_rows_back, peri_k_route_rows_args)                       \
                    X(route_pool, peri_k_route_pool_args) X(route_pool_weights, peri_k_route_pool_args)                \
                        X(route_place, peri_k_route_place_args) X(route_lines, peri_k_route_lines_args)

/* tbe.h */
#define PERI_KERNELS_TBE(X)                                                                                            \
    X(tbe_shift, peri_k_tbe_shift_args)                                                                                \
    X(tbe_run_tables, peri_k_tbe_run_tables_args) X(tbe_most_counted, peri_k_tbe_most_counted_args)                    \
        X(tbe_mark, peri_k_tbe_mark_args)
#define PERI_STEPS_TBE(X)                                                                                              \
    X(tbe_prepare, peri_k_tbe_prepare_args)                                                                            \
    X(tbe_check, peri_k_tbe_check_args) X(tbe_report, peri_k_tbe_report_args) X(tbe_forward, peri_k_tbe_forward_args)  \
        X(tbe_weight_gradient, peri_k_tbe_weight_gradient_args) X(tbe_sort, peri_k_tbe_sort_args)                      \
            X(tbe_keys, peri_k_tbe_keys_args) X(radix_histogram, peri_k_radix_args) X(radix_scan, peri_k_radix_args)   \
                X(radix_scatter, peri_k_radix_args) X(tbe_update, peri_k_tbe_update_args)                              \
                    X(tbe_dense_update, peri_k_tbe_dense_update_args) X(tbe_runs, peri_k_tbe_runs_args)                \
                        X(tbe_gram, peri_k_tbe_shampoo) X(tbe_root, peri_k_tbe_shampoo)                                \
                            X(tbe_precondition, peri_k_tbe_shampoo) X(tbe_ema, peri_k_tbe_ema_args)
#define PERI_OPS_TBE(X)                                                                                                \
    X(tbe_prepare, peri_k_tbe_prepare_args)                                                                            \
    X(tbe_check, peri_k_tbe_check_args) X(tbe_report, peri_k_tbe_report_args) X(tbe_forward, peri_k_tbe_forward_args)  \
        X(tbe_weight_gradient, peri_k_tbe_weight_gradient_args) X(tbe_sort, peri_op_tbe_sort)                          \
            X(tbe_update, peri_k_tbe_update_args) X(tbe_dense_update, peri_k_tbe_dense_update_args)                    \
                X(tbe_shampoo, peri_k_tbe_shampoo) X(tbe_ema, peri_k_tbe_ema_args)

/* cache.h */
#define PERI_KERNELS_CACHE(X) X(cache_fill, peri_k_cache_args) X(cache_spill, peri_k_cache_args)

/* bags.h */
#define PERI_KERNELS_BAGS(X)                                                                                           \
    X(bag_pad, peri_k_bag_pad_args)                                                                                    \
    X(bag_scale, peri_k_bag_scale_args) X(bag_max, peri_k_bag_max_args) X(bag_max_grad, peri_k_bag_max_grad_args)      \
        X(bag_renorm, peri_k_bag_renorm_args)

/* collision.h */
#define PERI_KERNELS_COLLISION(X)                                                                                      \
    X(collision_check, peri_k_collision_find_args)                                                                     \
    X(mch_find, peri_k_collision_find_args) X(hash_map_find, peri_k_collision_find_args)                               \
        X(hash_map_again, peri_k_collision_find_args) X(collision_count, peri_k_collision_group_args)                  \
            X(collision_starts, peri_k_collision_group_args) X(collision_group, peri_k_collision_group_args)           \
                X(mch_coalesce, peri_k_collision_learn_args) X(mch_evict, peri_k_collision_learn_args)                 \
                    X(hash_map_insert, peri_k_collision_learn_args)                                                    \
                        X(collision_changed, peri_k_collision_changed_args) X(mch_sorted, peri_k_collision_state_args) \
                            X(mch_validate, peri_k_collision_state_args) X(mch_load, peri_k_collision_state_args)      \
                                X(hash_map_read, peri_k_collision_state_args)                                          \
                                    X(hash_map_validate, peri_k_collision_state_args)                                  \
                                        X(hash_map_load, peri_k_collision_state_args)                                  \
                                            X(collision_reset, peri_k_collision_state_args)

/* elements.h */
#define PERI_KERNELS_ELEMENTS(X)                                                                                       \
    X(compare, peri_k_compare_args)                                                                                    \
    X(where, peri_k_where_args)                                                                                        \
    X(take, peri_k_take_args) X(running_sum, peri_k_running_sum_args) X(iota, peri_k_iota_args)                        \
        X(integer, peri_k_binary_args) X(integer_product, peri_k_integer_product_args) X(search, peri_k_search_args)   \
            X(running_product, peri_k_product_dim_args) X(running_product_grad, peri_k_product_dim_grad_args)          \
                X(running_extreme, peri_k_running_extreme_args) X(mode_line, peri_k_mode_args)                         \
                    X(bin_number, peri_k_bin_args) X(unravel, peri_k_unravel_args)                                     \
                        X(in_batch_logits, peri_k_in_batch_logits_args)                                                \
                            X(integer_sum, peri_k_integer_sum_args) X(triangle, peri_k_triangle_args)                  \
                                X(member, peri_k_member_args) X(cosine, peri_k_cosine_args)                            \
                                    X(cosine_grad, peri_k_cosine_grad_args)
#define PERI_STEPS_ELEMENTS(X) X(sort_line, peri_k_sort_line_args) X(take_add, peri_k_take_add_args)
#define PERI_OPS_ELEMENTS(X) X(sort_lines, peri_op_sort_lines) X(take_add, peri_k_take_add_args)

/* sequence.h */
#define PERI_KERNELS_SEQUENCE(X)                                                                                       \
    X(attention, peri_k_attention_args)                                                                                \
    X(attention_grad_q, peri_k_attention_args) X(attention_grad_kv, peri_k_attention_args)                             \
        X(sequence_positions, peri_k_sequence_positions_args) X(time_buckets, peri_k_time_buckets_args)

/** X(name, argument struct) for each kernel, step and operation. */
#define PERI_KERNELS(X)                                                                                                \
    PERI_KERNELS_CONVERT(X)                                                                                            \
    PERI_KERNELS_DENSE(X) PERI_KERNELS_OPTIM(X) PERI_KERNELS_JAGGED(X) PERI_KERNELS_TBE(X) PERI_KERNELS_SPARSE(X)      \
        PERI_KERNELS_LOOKUP(X) PERI_KERNELS_QUANTIZE(X) PERI_KERNELS_ROUTE(X) PERI_KERNELS_CODEC(X)                    \
            PERI_KERNELS_CACHE(X) PERI_KERNELS_BAGS(X) PERI_KERNELS_COLLISION(X) PERI_KERNELS_ELEMENTS(X)              \
                PERI_KERNELS_SEQUENCE(X)

#define PERI_STEPS(X)                                                                                                  \
    PERI_STEPS_DENSE(X)                                                                                                \
    PERI_STEPS_OPTIM(X) PERI_STEPS_JAGGED(X) PERI_STEPS_SPARSE(X) PERI_STEPS_LOOKUP(X) PERI_STEPS_TBE(X)               \
        PERI_STEPS_NEAREST(X) PERI_STEPS_ELEMENTS(X)
#define PERI_OPS(X)                                                                                                    \
    PERI_OPS_DENSE(X)                                                                                                  \
    PERI_OPS_OPTIM(X) PERI_OPS_JAGGED(X) PERI_OPS_SPARSE(X) PERI_OPS_LOOKUP(X) PERI_OPS_TBE(X) PERI_OPS_NEAREST(X)     \
        PERI_OPS_ELEMENTS(X)

/** At the end of a family's header: peri_k_args_of_<name> and peri_op_args_of_<name>, for the compiler to check what is
 *  launched. */
#define PERI_K_ARGS_OF(name, args) typedef args peri_k_args_of_##name;
#define PERI_OP_ARGS_OF(name, args) typedef args peri_op_args_of_##name;

#endif
