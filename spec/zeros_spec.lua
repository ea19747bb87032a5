-- What programs leave 0 in a structure is the default that its header names: a call with the 0 gives what the same call
-- gives with the default written out (spec/support/defaults.lua). Structures and members are those of the headers, so
-- that none is forgotten.
local ffi = require "ffi"
local contract = dofile "runtime/gen/contract.lua"
local defaults = require "spec.support.defaults"
local cases = defaults.cases

--- Structures whose members are data, or 0 where there is nothing, not one, or the first of a family: their members,
--- all of them.
local data = {
  peri_tpu_all_to_all_args = "group_assignment groups replicas concat_dimension split_dimension split_count tag",
  peri_collision_block = "row n iteration ids mapping counts last expiries",
  peri_collision_fit = "kind spread input_hash_size segments buckets max_probe low high first past aside part arrays "
    .. "entries rows filled",
  peri_variable_batch_args = "features_per_rank batch_size_per_rank_per_feature batch_size_per_feature_pre_a2a "
    .. "emb_dim_per_rank_per_feature",
  peri_logistic_config = "table_rows dense_features sparse_features learning_rate l2",
  peri_time_buckets_args = "timestamps seq_offsets num_buckets increment log",
  peri_tbe_expand_args = "pooled inverse features rows cols inverse_row names",
  peri_ids_mark = "sum iteration",
  peri_sharded_collision = "map segments input_hash_size buckets spread agreed",
  peri_sharded_codecs = "forward backward",
  peri_sharded_input = "module kjt",
  peri_checkpoint_region = "offset extent column columns rows listed alike",
  peri_checkpoint_tensor = "name dtype ndim shape pieces",
  peri_batch = "dense_features sparse_features row_capacity value_capacity rows ids global_row global_rows dense "
    .. "labels values lengths",
  peri_rows = "data stride dtype count",
  peri_metric_sums = "n weight label prediction plain_label cross_entropy positive_cross_entropy plain_cross_entropy "
    .. "square_error absolute_error ones_square_error correct true_positive false_positive false_negative",
  peri_feed_object = "ptr kind", peri_feed_thread = "state n_args run close",
  peri_feed_parcel = "bytes length objects n_objects",
  peri_model_values = "dense ids offsets weights spare",
  peri_lua_value = "kind unused length number integer text tensor jt kjt kt tbe object",
  peri_lua_config = "state narrow trace path",
  -- Numbers of which 0 is a value like others: _default fills them in.
  peri_optim_config = "kind maximize nesterov amsgrad centered lr weight_decay momentum dampening lr_decay "
    .. "initial_accumulator_value eps beta1 beta2 alpha",
  peri_tbe_optimizer_config = "kind weight_decay_mode learning_rate eps beta1 beta2 weight_decay eta momentum ema_beta "
    .. "ar_alpha min_shrinkage step_ema_coef step_ema step_start counter max_norm max_gradient row_bias_correction "
    .. "nearest exact",
  peri_tbe_counter = "halflife weight_decay_mode learning_rate_mode adjustment_iter adjustment_ub tail_id_threshold "
    .. "max_counter_update_freq weight_norm_coefficient lower_bound tail_id_is_ratio",
}

--- Structures that callers fill in: those that functions only read, and what these hold; name -> its members in order.
local function filled_in()
  local flat = require("perilune.cdef"):gsub("/%*.-%*/", ""):gsub("%s+", " ")
  local all, found, queue = {}, {}, {}
  for _, s in ipairs(contract.structs(flat)) do all[s.name] = s.members end
  for _, arguments in flat:gmatch "(peri_[%w_]+) ?(%b())" do
    for name, stars in arguments:gmatch "const (peri_[%w_]+) ?(%*+)" do
      if all[name] and stars == "*" then queue[#queue + 1] = name end
    end
  end
  while #queue > 0 do
    local name = table.remove(queue)
    if not found[name] then
      found[name] = all[name]
      for _, m in ipairs(all[name]) do
        local inner = m.text:match "^const (peri_[%w_]+)%*$" or m.text:match "^(peri_[%w_]+)$"
        if all[inner] then queue[#queue + 1] = inner end
      end
    end
  end
  return found
end

local function words(text, into)
  for word in (text or ""):gmatch "%S+" do into[word] = true end
  return into
end

--- A structure with these members, and `more`.
local function with(name, given, more)
  local s = ffi.new(name)
  for _, list in ipairs { given or {}, more } do
    for member, value in pairs(list) do s[member] = value end
  end
  if pcall(function() return s.size end) and name ~= "peri_rows" then s.size = ffi.sizeof(name) end
  return s
end

describe("structures that callers fill in", function()
  local structs, finish
  setup(function()
    structs, finish = filled_in(), defaults.begin()
  end)
  teardown(function() finish() end)

  it("are all known here, with all their members", function()
    local n = 0
    for name, members in pairs(structs) do
      local case, known, there = cases[name], { size = true }, { size = true }
      assert.is_true((case or data[name]) ~= nil, name .. " is new: which members have a default?")
      words(data[name], words(case and case.needs, words(case and case.rest, known)))
      for _, call in ipairs(case and { case[1]() } or {}) do
        for member in pairs(call.says or {}) do known[member] = true end
      end
      for _, m in ipairs(members) do
        there[m.name] = true
        assert.is_true(known[m.name] ~= nil, ("%s.%s is new: what is its default?"):format(name, m.name))
      end
      for member in pairs(known) do assert.is_true(there[member], ("%s has no member %s"):format(name, member)) end
      n = n + 1
    end
    assert.is_true(n > 50, n .. " structures were found")
  end)

  local names = {}
  for name in pairs(cases) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    local case = cases[name]
    it(name .. " has the default that its header names where it has 0", function()
      for _, call in ipairs { case[1]() } do
        local want = case.run(with(name, call.given, {}))
        local says = call.together and { call.says } or {}
        for member, value in pairs(not call.together and call.says or {}) do says[#says + 1] = { [member] = value } end
        for _, more in ipairs(says) do
          assert.equal(want, case.run(with(name, call.given, more)), ("%s.%s"):format(name, next(more)))
        end
      end
    end)
  end

  it("are refused where they are of optimizers that divide by eps, and nobody has filled them in", function()
    local C = require("perilune.ffi").C
    local out, tbe = ffi.new "peri_optim *[1]", ffi.new "peri_tbe *[1]"
    local filled, own = ffi.new "peri_optim_config", ffi.new "peri_tbe_optimizer_config"
    local table_of = with("peri_table_config", nil, { name = "t", rows = 3, cols = 2 })
    filled.size, own.size = ffi.sizeof(filled), ffi.sizeof(own)
    for kind = 0, C.PERI_OPTIM_KIND_COUNT - 1 do
      local divides = kind ~= C.PERI_OPTIM_SGD
      assert.equal(divides and C.PERI_EINVAL or 0,
        C.peri_optim_new(with("peri_optim_config", nil, { kind = kind }), nil, 0, out))
      if not divides then C.peri_optim_release(out[0]) end
      assert.equal(0, C.peri_optim_default(kind, filled))
      assert.equal(0, C.peri_optim_new(filled, nil, 0, out))
      C.peri_optim_release(out[0])
    end
    for kind = 0, C.PERI_TBE_OPTIMIZER_COUNT - 1 do
      assert.equal(0, C.peri_tbe_optimizer_default(kind, own))
      local divides, status = own.eps > 0, {}
      for i, optimizer in ipairs { with("peri_tbe_optimizer_config", nil, { kind = kind }), own } do
        local config = with("peri_tbe_config", nil, { device = defaults.device(), n_tables = 1, tables = table_of,
          optimizer = optimizer })
        status[i] = C.peri_tbe_new(config, tbe)
        if status[i] == 0 then C.peri_tbe_release(tbe[0]) end
      end
      assert.equal(0, status[2])
      if divides then assert.equal(C.PERI_EINVAL, status[1]) end
    end
  end)
end)
