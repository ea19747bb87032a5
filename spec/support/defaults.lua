-- defaults.lua: for spec/zeros_spec.lua: structures that C programs fill in, and the defaults of their members.
local ffi = require "ffi"
local P = require "perilune.ffi"
local C, check = P.C, P.check

-- -- objects and what they say ----------------------------------------------------------------------------------------

local kept = {} -- what structures point to
local function keep(x)
  kept[#kept + 1] = x
  return x
end

--- What `f` gives through its last argument; kind: "tensor", "kjt"; released when it is collected.
local function made(kind, f, ...)
  local out, n = ffi.new(("peri_%s *[1]"):format(kind)), select("#", ...)
  local arguments = { ... }
  arguments[n + 1] = out
  check(C[f](unpack(arguments, 1, n + 1)))
  return keep(ffi.gc(out[0], C[("peri_%s_release"):format(kind)]))
end

local function array(type_of, ...) return keep(ffi.new(type_of .. "[?]", select("#", ...), { ... })) end
local function longs(...) return array("int64_t", ...) end
local function texts(...) return array("const char *", ...) end

local device
local types = { [C.PERI_F32] = "float", [C.PERI_F64] = "double", [C.PERI_I64] = "int64_t", [C.PERI_I32] = "int32_t",
  [C.PERI_U8] = "uint8_t" }

local function tensor(dtype, shape, ...)
  local t = made("tensor", "peri_tensor_new", device, dtype, #shape, longs(unpack(shape)))
  local numbers = ffi.new(types[dtype] .. "[?]", select("#", ...), ...)
  check(C.peri_tensor_write(t, numbers, ffi.sizeof(numbers)))
  return t
end
local function floats(shape, ...) return tensor(C.PERI_F32, shape, ...) end
local function ids(...) return tensor(C.PERI_I64, { select("#", ...) }, ...) end

--- Shape and numbers of a tensor; "-" for none.
local function numbers_of(t)
  if t == nil then return "-" end
  local info = P.struct "peri_tensor_info"
  check(C.peri_tensor_describe(t, info))
  local n = tonumber(info.numel)
  local numbers = ffi.new(types[info.dtype] .. "[?]", n)
  check(C.peri_tensor_read(t, numbers, ffi.sizeof(numbers)))
  local list = { info.dtype }
  for i = 0, info.ndim - 1 do list[#list + 1] = tostring(info.shape[i]) end
  for i = 0, n - 1 do list[#list + 1] = tostring(numbers[i]) end
  return table.concat(list, " ")
end

--- Numbers of the tensors that `f` makes, one in each place behind its other arguments.
local function results(n, f, ...)
  local arguments, count, places, list = { ... }, select("#", ...), {}, {}
  for i = 1, n do
    places[i] = ffi.new "peri_tensor *[1]"
    arguments[count + i] = places[i]
  end
  check(C[f](unpack(arguments, 1, count + n)))
  for i, place in ipairs(places) do
    list[i] = numbers_of(place[0])
    C.peri_tensor_release(place[0])
  end
  return table.concat(list, "; ")
end

--- These members of a structure as text.
local function members_of(s, names)
  local list = {}
  for name in names:gmatch "%S+" do list[#list + 1] = name .. "=" .. tostring(s[name]) end
  return table.concat(list, " ")
end

local function world() return made("group", "peri_comm_open", P.struct("peri_comm_config", { transport = "self" })) end

local function batch_of(fill)
  local batch = made("batch", "peri_batch_new", 1, 1, 8, 64)
  check(fill(batch))
  local list = { tostring(batch.rows), tostring(batch.ids), tostring(batch.global_rows) }
  for i = 0, tonumber(batch.rows) - 1 do
    list[#list + 1] = ("%g %g %d"):format(batch.dense[i], batch.labels[i], batch.lengths[i])
  end
  for i = 0, tonumber(batch.ids) - 1 do list[#list + 1] = tostring(batch.values[i]) end
  return table.concat(list, " ")
end

local folder

local function file_of(name, text)
  local path = folder .. "/" .. name
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
  return path
end

-- -- the structures ---------------------------------------------------------------------------------------------------

--- name -> { needs = members that have no default, rest = members whose 0 is what it says (nothing, no, the first of a
--- family), run = function(structure) return text end, { given = members, says = { member = its default } }... }. What
--- has neither `needs` nor `says` in all of its calls has to be in `rest`. Numbers are made when they are used.
local cases = {}

cases.peri_cross_entropy_config = { rest = "label_smoothing ignore_index ignores",
  run = function(s)
    return results(1, "peri_op_cross_entropy_with", floats({ 2, 2 }, 1, 2, 3, 5), ids(0, 1), s, C.PERI_LOSS_MEAN)
  end,
  function() return { says = { weight = floats({ 2 }, 1, 1) } } end }

cases.peri_formula = { needs = "steps numbers n_in n_steps n_numbers", rest = "reduction keepdim in_f32",
  run = function(s) return results(1, "peri_op_formula", s, array("peri_tensor *", floats({ 2 }, -1, 3))) end,
  function()
    local given = { steps = array("int32_t", C.peri_formula_code "affine", 0, 0, 0, 0, 1),
      numbers = array("double", 2, 1), n_in = 1, n_steps = 1, n_numbers = 2 }
    local mean = { reduction = C.PERI_LOSS_MEAN }
    for name, value in pairs(given) do mean[name] = value end
    return { given = given, says = { name = "peri_op_formula" } },
      { given = mean, says = { dims = array("int32_t", 0), n_dims = 1 }, together = true }
  end }

cases.peri_jt_config = { needs = "values lengths", rest = "weights offsets",
  run = function(s) return tostring(C.peri_jt_bags(made("jt", "peri_jt_new", s))) end,
  function() return { given = { values = ids(1, 2, 3), lengths = ids(1, 2) } } end }
local kjt_members = "stride bags values keys ranks values_dtype lengths_dtype weighted variable_stride has_inverse"
local function kjt_says(kjt)
  local info = P.struct "peri_kjt_info"
  check(C.peri_kjt_describe(kjt, info))
  return members_of(info, kjt_members) .. results(1, "peri_kjt_values", kjt)
end
local function two_keys() return made("keys", "peri_keys_new", texts("a", "b"), 2) end

cases.peri_kjt_config = { needs = "keys values lengths",
  rest = "weights offsets ranks stride_per_key_per_rank inverse_keys inverse_indices",
  run = function(s) return kjt_says(made("kjt", "peri_kjt_new", s)) end,
  function()
    return { given = { keys = two_keys(), values = ids(5, 6, 7), lengths = ids(1, 1, 0, 1) }, says = { stride = 2 } }
  end }

cases.peri_kjt_dist_args = { needs = "keys lengths values stride_per_rank ranks", rest = "weights strides",
  run = function(s) return kjt_says(made("kjt", "peri_kjt_dist_init", s)) end,
  function()
    return { given = { keys = two_keys(), lengths = ids(1, 0, 1, 1), values = ids(5, 6, 7), ranks = 2,
      stride_per_rank = longs(1, 1) }, says = { stagger = 1 } }
  end }

cases.peri_bucket_args = { needs = "buckets n_features block_sizes",
  rest = "sequence bucketize_pos bucket_mapping",
  run = function(s)
    local out = ffi.new "peri_bucket_result"
    check(C.peri_sparse_bucketize(s, ids(2, 1), ids(1, 5, 3), nil, nil, out))
    return numbers_of(out.lengths) .. numbers_of(out.ids)
  end,
  function()
    return { given = { buckets = 2, n_features = 1, block_sizes = longs(4) }, says = { total_num_blocks = longs(2),
      bounds = array("const int64_t *", longs(0, 4, 8)), keep_original_indices = array("bool", false) } }
  end }

cases.peri_batch_select_args = { needs = "n num_indices rows columns", rest = "permute_output_dim_0_1",
  run = function(s)
    return results(1, "peri_sparse_batch_index_select", floats({ 4 }, 1, 2, 3, 4), ids(1, 0), s)
  end,
  function() return { given = { n = 1, num_indices = longs(2), rows = longs(2), columns = longs(2) } } end }

cases.peri_prune_args = { needs = "compressed_indices_dtype", rest = "threshold abs min_num_rows min_save_ratio",
  run = function(s)
    return results(2, "peri_sparse_rowwise_prune", floats({ 3, 1 }, 1, 2, 3), floats({ 3 }, -1, 1, 2), s)
  end,
  function() return { given = { compressed_indices_dtype = C.PERI_I64 } } end }

cases.peri_calibration_args = { needs = "bin_num_examples bin_num_positives num_bins positive_weight upper_bound",
  rest = "lower_bound bin_ctr_in_use_after bin_ctr_weight_value segment_lengths segment_value num_segments",
  run = function(s) return results(2, "peri_sparse_calibrate", floats({ 2 }, 0, 1), s) end,
  function()
    return { given = { bin_num_examples = tensor(C.PERI_F64, { 2 }, 3, 4), num_bins = 2, positive_weight = 1,
      bin_num_positives = tensor(C.PERI_F64, { 2 }, 1, 3), upper_bound = 1 } }
  end }

cases.peri_murmur_args = { rest = "y_number seed_number",
  run = function(s) return results(1, "peri_sparse_murmur_hash3", ids(3, 4), s) end,
  function() return { says = { y = ids(0, 0), seed = ids(0, 0) } } end }

cases.peri_attention_args = { needs = "q k v seq_offsets", rest = "causal contextual_seq_len",
  run = function(s) return results(1, "peri_sparse_attention", s) end,
  function()
    local x = floats({ 3, 1, 2 }, 1, 2, 3, -1, 0.5, 1)
    local given = { q = x, k = x, v = x, seq_offsets = ids(0, 2, 3) }
    local says = { num_targets = ids(0, 0), max_seq_len = 2, max_attn_len = 100, min_full_attn_seq_len = 0,
      alpha = 1 / math.sqrt(2), form = C.PERI_ATTENTION_SOFTMAX }
    local silu = { form = C.PERI_ATTENTION_SILU }
    for name, value in pairs(given) do silu[name] = value end
    return { given = given, says = says }, { given = silu, says = { alpha = 1 / math.sqrt(2), scale = 1 } }
  end }

cases.peri_row_format = { rest = "codes scale_dtype scale_first",
  run = function(s) return results(1, "peri_quantize_rows", floats({ 1, 3 }, 1, 2, 4), s, nil) end,
  function()
    return { says = { alignment = 1 } }, { given = { codes = C.PERI_QUANTIZE_FP8 },
      says = { exponent_bits = 4, exponent_bias = 7 }, together = true }
  end }

local function map_says(s)
  local map, bytes = made("collision", "peri_collision_new", device, s), ffi.new "int64_t[1]"
  local input = array("peri_tensor *", ids(70, 71, 70, 72, 90))
  local list = { results(1, "peri_collision_remap", map, input, 1, true),
    results(1, "peri_collision_remap", map, input, 1, false) }
  local stats = P.struct "peri_collision_stats"
  check(C.peri_collision_statistics(map, stats))
  check(C.peri_collision_bytes_of(s, bytes))
  list[3] = members_of(stats, "ids hits missed inserted evicted occupied rows") .. tostring(bytes[0])
  return table.concat(list, "; ")
end

cases.peri_collision_config = { needs = "rows name policy",
  rest = "kind spread input_hash_size first_bucket on_miss filter filter_arg seed read_only ttl n_ttl",
  run = map_says,
  function()
    local buckets = C.peri_collision_buckets(8)
    local segments = longs(unpack({ 0, 0, 0, 0, 0, 0, 0, 0, 0 }, 1, buckets + 1))
    C.peri_collision_segments(8, buckets, segments)
    local lfu = C.PERI_FORGET_LFU
    return { given = { name = "t", rows = 8, policy = lfu }, says = { buckets = buckets, segments = segments,
      n_buckets = buckets, eviction_interval = 1, history_capacity = 1000, n_features = 1 } },
      { given = { name = "t", rows = 8, policy = C.PERI_FORGET_LRU }, says = { decay_exponent = 1 } },
      { given = { name = "t", rows = 8, kind = C.PERI_COLLISION_HASH }, says = { max_probe = 128 } }
  end }

cases.peri_comm_config = { rest = "rank job device_transport device communicator",
  run = function(s)
    local group = made("group", "peri_comm_open", s)
    return ("%s %d %d %g"):format(ffi.string(C.peri_group_transport(group)), C.peri_group_size(group),
      C.peri_group_local_size(group), C.peri_group_timeout(group))
  end,
  function()
    local limit = tonumber(os.getenv "PERI_COMM_TIMEOUT_S") or 300
    return { says = { transport = "self", world_size = 1, local_size = 1, timeout_s = limit } }
  end }

cases.peri_codec_config = { rest = "format rounding seed",
  run = function(s)
    local told = P.struct "peri_codec_config"
    check(C.peri_codec_describe(made("codec", "peri_codec_new", s), told))
    return members_of(told, "format rounding exponent_bits exponent_bias row_dim loss_scale seed")
  end,
  function()
    return { given = { format = C.PERI_CODEC_FP8 }, says = { exponent_bits = 4, exponent_bias = 15 } },
      { given = { format = C.PERI_CODEC_FP8, exponent_bits = 5 }, says = { exponent_bias = 31 } },
      { given = { format = C.PERI_CODEC_FP8, exponent_bits = 3 }, says = { exponent_bias = 3 } },
      { given = { format = C.PERI_CODEC_INT8 }, says = { row_dim = 32 } },
      { given = { format = C.PERI_CODEC_MX4 }, says = { row_dim = 32 } },
      { given = { format = C.PERI_CODEC_FP16 }, says = { loss_scale = 1 } }
  end }

local function table_(more)
  local t = P.structs("peri_table_config", 1)
  t[0].name, t[0].rows, t[0].cols = "t", 4, 4
  for name, value in pairs(more or {}) do t[0][name] = value end
  return keep(t)
end
local function optimizer(kind)
  local config = keep(P.struct "peri_tbe_optimizer_config")
  check(C.peri_tbe_optimizer_default(kind, config))
  return config
end
--- Rows 3 and 1 of a table batch, and its sizes.
local function tbe_says(config)
  config.device = device
  local tbe, bytes = made("tbe", "peri_tbe_new", config), ffi.new "peri_tbe_bytes"
  local block = array("peri_tbe_block", { bags = 1, out_stride = 4 })
  local input = ffi.new("peri_tbe_input", { ids = ids(3, 1), offsets = ids(0, 2),
    blocks = made("tbe_blocks", "peri_tbe_blocks_new", tbe, block, 1) })
  check(C.peri_tbe_bytes_of(config, false, bytes))
  local said = P.struct "peri_table_config"
  check(C.peri_tbe_table(tbe, 0, said))
  return results(1, "peri_tbe_lookup", tbe, input, 2, longs(1, 4)) .. members_of(bytes, "device host files")
    .. members_of(said, "rows cols row_offset col_offset total_rows total_cols pooling init init_a init_b"), tbe
end

cases.peri_table_config = { needs = "name rows cols", rest = "row_offset col_offset pooling init init_a init_b raw_ids",
  run = function(s)
    return (tbe_says(P.struct("peri_tbe_config", { n_tables = 1, tables = s })))
  end,
  function() return { given = { name = "t", rows = 4, cols = 4 }, says = { total_rows = 4, total_cols = 4 } } end }

cases.peri_tbe_config = { needs = "device n_tables tables",
  rest = "dtype bounds_check features n_features seed output_dtype caches mapped weights",
  run = function(s) return (tbe_says(s)) end,
  function()
    return { given = { n_tables = 1, tables = table_() }, says = { optimizer = optimizer(C.PERI_TBE_NONE) } }
  end }

cases.peri_cache_config = { rest = "reserved_memory directory algorithm",
  run = function(s)
    local config = P.struct("peri_tbe_config", { n_tables = 1, tables = table_ { rows = 100 }, caches = s })
    config.optimizer = optimizer(C.PERI_TBE_SGD)
    local text, tbe = tbe_says(config)
    local stats = P.struct "peri_tbe_cache_stats"
    check(C.peri_tbe_cache_statistics(tbe, 0, stats))
    return text .. members_of(stats, "slots resident hits misses")
  end,
  function() return { says = { load_factor = 0.2, ways = C.PERI_CACHE_WAYS_NONE } } end }

local plain_batch -- a table batch and a block list of it
local function plain()
  if plain_batch then return unpack(plain_batch) end
  local tbe = made("tbe", "peri_tbe_new", P.struct("peri_tbe_config", { device = device, n_tables = 1,
    tables = table_() }))
  plain_batch = { tbe, made("tbe_blocks", "peri_tbe_blocks_new", tbe, array("peri_tbe_block", { bags = 1,
    out_stride = 4 }), 1) }
  return unpack(plain_batch)
end

cases.peri_tbe_block = { needs = "bags out_stride", rest = "first_bag out_offset table feature",
  run = function(s)
    local tbe = plain()
    local input = ffi.new("peri_tbe_input", { ids = ids(3, 1), offsets = ids(0, 2),
      blocks = made("tbe_blocks", "peri_tbe_blocks_new", tbe, s, 1) })
    return results(1, "peri_tbe_lookup", tbe, input, 2, longs(1, 4))
  end,
  function() return { given = { bags = 1, out_stride = 4 } } end }

cases.peri_tbe_input = { needs = "ids offsets blocks", rest = "",
  run = function(s)
    local tbe = plain()
    return results(1, "peri_tbe_lookup", tbe, s, 2, longs(1, 4))
  end,
  function()
    local _, blocks = plain()
    return { given = { ids = ids(3, 1), offsets = ids(0, 2), blocks = blocks },
      says = { weights = floats({ 2 }, 1, 1), scale = floats({ 1 }, 1) } }
  end }

cases.peri_embedding_bag_args = { needs = "weight ids offsets",
  rest = "padding_idx max_norm mode include_last_offset padded",
  run = function(s)
    s.weight = floats({ 2, 2 }, 3, 4, 1, 0) -- max_norm changes it
    return results(1, "peri_embedding_bag", s)
  end,
  function()
    local given = { ids = ids(0, 1, 0), offsets = ids(0, 2) }
    return { given = given, says = { weights = floats({ 3 }, 1, 1, 1) } },
      { given = { ids = given.ids, offsets = given.offsets, max_norm = 2 }, says = { norm_type = 2 } }
  end }

cases.peri_sharding = { needs = "world_size rows cols", rest = "type table segments buckets",
  run = function(s)
    local shards, n, list = ffi.new "peri_shard[8]", ffi.new "int32_t[1]", {}
    check(C.peri_sharding_shards(s, shards, 8, n))
    for i = 0, n[0] - 1 do
      list[#list + 1] = members_of(shards[i], "row_offset rows col_offset cols rank index")
    end
    return table.concat(list, "; ")
  end,
  function()
    local given, all = { world_size = 3, rows = 9, cols = 4 }, array("int32_t", 0, 1, 2)
    local by_rows = { world_size = 3, rows = 9, cols = 4, type = C.PERI_ROW_WISE }
    return { given = given, says = { nodes = array("int32_t", 5, 5, 5) } },
      { given = given, says = { ranks = array("int32_t", 0), n_ranks = 1 }, together = true },
      { given = by_rows, says = { ranks = all, n_ranks = 3 }, together = true },
      { given = by_rows, says = { ranks = all, n_ranks = 3, sizes = longs(3, 3, 3) }, together = true }
  end }

cases.peri_checkpoint_config = { rest = "parent increment same_as",
  run = function(s)
    local at, digest = os.tmpname(), ffi.new "char[33]"
    os.remove(at)
    local path = folder .. "/" .. at:match "[^/]+$"
    local own = made("checkpoint_folder", "peri_checkpoint_folder_new", path)
    local writer = made("checkpoint_writer", "peri_checkpoint_writer_new", C.peri_checkpoint_folder_path(own), "a", 0)
    local part = ffi.new "const char *[1]"
    check(C.peri_checkpoint_writer_finish(writer))
    check(C.peri_checkpoint_writer_part(writer, part))
    check(C.peri_checkpoint_publish(C.peri_checkpoint_folder_path(own), path, part, 1, s, false, digest))
    return ffi.string(C.peri_checkpoint_values(made("checkpoint", "peri_checkpoint_open", path)))
  end,
  function() return { says = { values = "{}" } } end }

local lines = "1\t5\tb\n0\t6\t7\n1\t2\t1\n"
cases.peri_criteo_config = { needs = "path table_rows dense_features sparse_features batch_rows",
  rest = "dense ids missing rank begin more n_more",
  run = function(s)
    local reader = made("criteo", "peri_criteo_open", s)
    return batch_of(function(batch) return C.peri_criteo_next(reader, batch) end)
  end,
  function()
    return { given = { path = texts(file_of("criteo", lines))[0], table_rows = longs(20), dense_features = 1,
      sparse_features = 1, batch_rows = 3 }, says = { world = 1, ["end"] = 1 } }
  end }

local function csv_columns(more)
  local columns = keep(P.structs("peri_csv_column", 3))
  columns[0].name, columns[0].kind = "label", C.PERI_COLUMN_LABEL
  columns[1].name, columns[1].kind = "x", C.PERI_COLUMN_DENSE
  columns[2].name, columns[2].kind, columns[2].table_rows = "id", C.PERI_COLUMN_IDS, 20
  for name, value in pairs(more or {}) do columns[2][name] = value end
  return columns
end
local function csv_says(s)
  s.paths, s.n_paths, s.n_columns, s.batch_rows = texts(file_of("csv", "1,5,11\n0,6,7\n")), 1, 3, 2
  local reader = made("criteo", "peri_csv_open", s)
  return batch_of(function(batch) return C.peri_criteo_next(reader, batch) end)
end
cases.peri_csv_config = { needs = "paths columns n_paths n_columns batch_rows", rest = "header rank begin",
  run = csv_says,
  function()
    return { given = { columns = csv_columns() }, says = { delimiter = (","):byte(), world = 1, ["end"] = 1 } }
  end }
cases.peri_csv_column = { needs = "name kind table_rows", rest = "dense fallback ids separator",
  run = function(s)
    return csv_says(P.struct("peri_csv_config", { columns = csv_columns { base = s.base, most = s.most } }))
  end,
  function() return { says = { base = 10, most = 100 } } end }

local function columns_says(config, part)
  local columns, ones = made("columns", "peri_columns_new", config), array("float", 1, 2)
  part.rows = 2
  part.dense = { data = ones, stride = 1, dtype = C.PERI_F32, count = 1 }
  part.ids = array("peri_rows", { data = longs(3, 4), stride = 1, dtype = C.PERI_I64, count = 1 })
  check(C.peri_columns_add(columns, part))
  check(C.peri_columns_epoch(columns, 0))
  return batch_of(function(batch) return C.peri_columns_fill(columns, 0, 2, batch) end)
end
cases.peri_columns_config = { needs = "table_rows dense_features sparse_features",
  rest = "dense ids padding padded block_rows blocks seed",
  run = function(s) return columns_says(s, P.struct("peri_columns_part", { name = "p" })) end,
  function() return { given = { table_rows = longs(9), dense_features = 1, sparse_features = 1 } } end }
cases.peri_columns_part = { needs = "name rows dense ids",
  rest = "offsets lengths values total first_row labels_name ids_names",
  run = function(s)
    return columns_says(P.struct("peri_columns_config", { table_rows = longs(9), dense_features = 1,
      sparse_features = 1 }), s)
  end,
  function()
    return { given = { name = "p" }, says = { labels = { data = array("float", 0, 0), stride = 1, dtype = C.PERI_F32,
      count = 1 } } }
  end }

cases.peri_synthetic_args = { needs = "table_rows bag_min bag_max dense_features sparse_features",
  rest = "seed alpha signal interaction bias",
  run = function(s) return batch_of(function(batch) return C.peri_synthetic_fill(s, 0, 4, batch) end) end,
  function()
    return { given = { table_rows = longs(9), bag_min = array("int32_t", 1), bag_max = array("int32_t", 2),
      dense_features = 1, sparse_features = 1 } }
  end }

cases.peri_metric_samples = { needs = "predictions labels n", rest = "",
  run = function(s)
    local out = ffi.new "double[1]"
    check(C.peri_metric_auc(s, out))
    return tostring(out[0])
  end,
  function()
    return { given = { predictions = array("double", 0.1, 0.9, 0.4), labels = array("double", 0, 1, 1), n = 3 },
      says = { weights = array("double", 1, 1, 1) } }
  end }

--- Each exchange of a world of one rank gives what it got.
local function exchanged(f, ...)
  local work = made("work", f, world(), ...)
  check(C.peri_work_wait(work))
  local out = ffi.new("peri_tensor *[?]", C.peri_exchange_results(work))
  check(C.peri_exchange_result(work, out))
  local text = numbers_of(out[0])
  C.peri_tensor_release(out[0])
  return text
end

cases.peri_exchange_args = { rest = "division tag",
  run = function(s) return exchanged("peri_exchange_all_gather_base_pooled", floats({ 2 }, 1.0001, 3), s) end,
  function()
    local plain_codec = P.struct("peri_codec_config", { format = C.PERI_CODEC_NONE })
    local codec = made("codec", "peri_codec_new", plain_codec)
    return { says = { forward = codec, backward = codec } }
  end }

cases.peri_sequence_args = { needs = "lengths features batch_size_per_rank input_splits output_splits",
  rest = "stride_per_key_per_rank",
  run = function(s) return exchanged("peri_exchange_alltoall_sequence", floats({ 3, 1 }, 1, 3, 5), s, nil) end,
  function()
    return { given = { lengths = ids(1, 2), features = 1, batch_size_per_rank = longs(2), input_splits = longs(3),
      output_splits = longs(3) }, says = { stagger = 1 } }
  end }

cases.peri_kjt_exchange_args = { needs = "kjt key_splits", rest = "",
  run = function(s)
    local splits, work = ffi.new "peri_work *[1]", ffi.new "peri_work *[1]"
    check(C.peri_exchange_kjts(world(), s, 1, splits, work))
    keep(ffi.gc(splits[0], C.peri_work_release))
    keep(ffi.gc(work[0], C.peri_work_release))
    check(C.peri_work_wait(work[0]))
    return kjt_says(made("kjt", "peri_exchange_kjt_result", work[0]))
  end,
  function()
    local config = P.struct("peri_kjt_config", { keys = two_keys(), values = ids(5, 6, 7), lengths = ids(1, 1, 0, 1) })
    return { given = { kjt = made("kjt", "peri_kjt_new", config), key_splits = array("int32_t", 2) },
      says = { stagger = 1, keys = two_keys() } }
  end }

cases.peri_sharded_config = { needs = "group device tables features optimizers n_tables n_features n_optimizers",
  rest = "seed weighted output_dtype all_to_all reduce_scatter kind index_dedup returns_rows name",
  run = function(s)
    local group, features = world(), array("int32_t", 0)
    if s.tables == nil then
      local t = keep(P.structs("peri_sharded_table", 1))
      t[0].name, t[0].rows, t[0].cols, t[0].features, t[0].n_features = "t", 4, 4, features, 1
      s.tables = t
    end
    s.group, s.device, s.features, s.optimizers = group, device, texts "f", optimizer(C.PERI_TBE_SGD)
    s.n_tables, s.n_features, s.n_optimizers = 1, 1, 1
    local module, shard, list = made("sharded", "peri_sharded_new", s), ffi.new "peri_local_shard", {}
    for i = 0, C.peri_sharded_local_shards(module) - 1 do
      check(C.peri_sharded_local_shard(module, i, shard))
      local said = P.struct "peri_table_config"
      check(C.peri_tbe_table(shard.tbe, shard.tbe_table, said))
      list[#list + 1] = members_of(shard.shard, "row_offset rows col_offset cols rank index")
        .. members_of(said, "pooling init init_a init_b") .. results(1, "peri_tbe_state", shard.tbe, shard.tbe_table,
        "weight")
    end
    return table.concat(list, "; ")
  end,
  function() return { says = { places = 1, gradient_division = C.PERI_DIVISION_DEFAULT } } end }

cases.peri_sharded_table = { needs = "name rows cols features n_features",
  rest = "sizes init_a init_b pooling init sharding_type compute_kernel optimizer dtype bounds_check mapped cache "
    .. "collision",
  run = function(s) return cases.peri_sharded_config.run(P.struct("peri_sharded_config", { tables = s })) end,
  function()
    local given = { name = "t", rows = 4, cols = 4, features = array("int32_t", 0), n_features = 1 }
    return { given = given, says = { ranks = array("int32_t", 0), n_ranks = 1 }, together = true }
  end }

--- Begin, before any of `cases` is asked; the function that is returned ends it.
local function begin()
  local place = ffi.new "peri_device *[1]"
  check(C.peri_device_get("cpu", place))
  device = place[0]
  local at, clean = require("spec.support.shell").temporary()
  folder = at
  return function()
    kept, plain_batch = {}, nil
    collectgarbage()
    clean()
  end
end

return { cases = cases, begin = begin, device = function() return device end }
