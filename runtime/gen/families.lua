-- families.lua: the pages of the reference (lua/perilune/reference) by what people look for, in the order in which they
-- are listed.
return {
  { "Models", "modules", "dense_layers", "layers", "layers_more", "models", "parameters" },
  { "Tensors", "tensors", "tensor_making", "tensor_arithmetic", "tensor_math", "tensor_functions", "tensor_more",
    "tensor_places", "tensor_counts", "tensor_reductions", "dense_functions", "runtime" },
  { "Ids and tables", "jagged", "jagged_parts", "jagged_exchange", "tables", "tables_more", "feature_processors",
    "managed_collision", "managed_collections", "quantized" },
  { "Training", "training", "optimizers", "optimizer_parts", "plateau", "checkpoints_more", "metrics", "metrics_more",
    "session_metrics", "metric_module", "data", "data_more", "data_files" },
  { "Many ranks", "model_parallel", "pipelines", "pipeline_tools", "plans", "planner_parts", "proposers", "plan_tools",
    "groups" },
  { "Serving", "export", "retrieval" },
  { "What sharded models are made of", "sharders", "sharded_modules", "sharded_collections", "shard_functions",
    "awaitables", "exchanges", "comm_ops", "codecs" },
  { "Operators on ids and bags", "sparse_jagged", "sequences", "sparse_bags", "sparse_tables" },
}
