-- What a rank may not ask of a group: numbers that cannot be, groups that it is not a member of, groups that were
-- closed or released. Each is an error at once, by name and with what is allowed, and the ranks go on.
local dist = require "perilune.dist"
local ops = require "perilune.dist.ops"
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local worlds = require "spec.support.worlds"

local function fails(pattern, f, ...)
  local ok, err = pcall(f, ...)
  assert.is_false(ok, "no error where '" .. pattern .. "' was expected")
  assert.is_table(err, tostring(err)) -- an error of ours, no slip of the library
  assert.truthy(tostring(err):find(pattern, 1, true), tostring(err))
end

--- A list of n equal entries, the last one changed to `odd`.
local function list(n, x, odd)
  local out = {}
  for i = 1, n do out[i] = x end
  if odd ~= nil then out[n] = odd end
  return out
end

describe("counts", function()
  worlds.each("that are negative, broken or too few", function(world, device, n)
    local t = peri.ones({ 2 * n, 3 }, "f32", device)
    for _, odd in ipairs { -1, 1.5, 0 / 0, "two", 2 ^ 60 } do
      local rows = list(n, 2, odd)
      local text = ("%s rows for rank %d of group"):format(tostring(odd), n - 1)
      fails(text, world.all_to_all_v, world, t, rows, list(n, 2))
      fails(text, world.all_to_all_v, world, t, list(n, 2), rows)
      fails(text, world.all_gather_v, world, t, rows)
      fails(text, world.reduce_scatter_v, world, t, rows)
    end
    for _, short in ipairs { list(n - 1, 2), list(n + 1, 2) } do
      fails(("%d entries for the %d ranks"):format(#short, n), world.all_to_all_v, world, t, short, list(n, 2))
      fails(("%d entries for the %d ranks"):format(#short, n), world.all_to_all_v, world, t, list(n, 2), short)
      fails(("%d entries for the %d ranks"):format(#short, n), world.all_gather_v, world, t, short)
      fails(("%d entries for the %d ranks"):format(#short, n), world.reduce_scatter_v, world, t, short)
    end
    fails("rows is a nil", world.all_gather_v, world, t)
    fails("send_rows is a number", world.all_to_all_v, world, t, 2, list(n, 2))
    assert.same({ 2 * n, 3 }, world:all_to_all_v(t, list(n, 2), list(n, 2)):wait():shape())
  end)
end)

describe("a group of others", function()
  worlds.each("cannot be used by ranks outside it", function(world, device, n)
    local rank = world.rank_number
    local members = {}
    for r = 1, n - 1 do members[r] = r end
    local group = dist.new_group(members, "all but 0")
    local x = peri.ones({ n - 1, 2 }, "f32", device)
    if rank > 0 then
      assert.equal(n - 1, group:all_reduce(peri.ones({ 1 }, "f32", device)):wait():item())
    else
      assert.is_nil(world:new_group({ 1 }, "one"))
      fails("NON_GROUP_MEMBER", ops.all_gather_base_pooled, { input = x, group = group })
      fails("NON_GROUP_MEMBER", ops.set_gradient_division, true, group)
      fails("NON_GROUP_MEMBER", dist.KJTAllToAll, group, { 1 })
      fails("NON_GROUP_MEMBER", dist.PooledEmbeddingsReduceScatter, { pg = group })
      fails("NON_GROUP_MEMBER", dist.SparseFeaturesAllToAll, { pg = group, id_list_features_per_rank = { 1 },
        id_score_list_features_per_rank = { 1 } })
      fails("NON_GROUP_MEMBER", dist.tpu_all_to_all, { input = x, group_assignment = { { 0 } }, split_count = 1,
        split_dimension = 1, concat_dimension = 1, group = group })
      fails("NON_GROUP_MEMBER", dist.collective_utils.invoke_on_rank_and_broadcast_result, group, 0, print)
      fails("NON_GROUP_MEMBER", dist.collective_utils.is_leader, group)
      fails("NON_GROUP_MEMBER", dist.comm.intra_and_cross_node_pg, { group = group })
      fails("NON_GROUP_MEMBER", dist.Reducer, { group = group, params = {} })
    end
    if rank == 1 then assert.is_true(world:new_group({ 1 }, "one"):is_healthy()) end
    world:barrier():wait()
  end, { sizes = { 2, 3, 4, 5, 8 } })

  worlds.each("is no group at all", function(_, device)
    local x = peri.ones({ 2, 2 }, "f32", device)
    for _, what in ipairs { 5, "world", {} } do
      local kind = type(what)
      fails("group is a " .. kind, ops.reduce_scatter_base_pooled, { input = x, group = what })
      fails("group is a " .. kind, dist.KJTAllToAll, what, { 1 })
      fails("group is a " .. kind, dist.PooledEmbeddingsAllGather, { pg = what })
      fails("group is a " .. kind, dist.collective_utils.is_leader, what)
      fails("group is a " .. kind, dist.all_to_all, { x }, { x }, what)
      fails("group is a " .. kind, dist.Reducer, { group = what, params = {} })
    end
  end, { sizes = { 1, 2 }, devices = { "cpu" } })
end)

describe("a group that was left", function()
  --- Every operation on a group that this rank closed, then on one that was released.
  local function all_fail(pattern, group, n, device)
    local t = peri.ones({ n, 2 }, "f32", device)
    local kjt = peri.KeyedJaggedTensor { keys = {}, values = {}, lengths = {}, stride = 0, device = device }
    local one, tensors = list(n, 1), {}
    for i = 1, n do tensors[i] = peri.ones({ 2 }, "f32", device) end
    local calls = {
      function() return group:barrier() end, function() return group:broadcast(t, 0) end,
      function() return group:all_reduce(t) end, function() return group:all_gather(t) end,
      function() return group:all_gather_v(t:slice(1, 0, 1), one) end, function() return group:reduce_scatter(t) end,
      function() return group:reduce_scatter_v(t, one) end, function() return group:all_to_all(t) end,
      function() return group:all_to_all_v(t, one, one) end, function() return group:new_group({ 0 }, "later") end,
      function() return group:intra_node() end, function() return group:cross_node() end,
      function() return dist.all_to_all(tensors, tensors, group, true) end, function()
        local row = peri.util.map(one, function(_, i) return i - 1 end)
        return dist.tpu_all_to_all { input = t, group_assignment = { row }, split_count = n, split_dimension = 1,
          concat_dimension = 2, group = group }
      end,
      function() return ops.alltoall_pooled { a2a_pooled_embs_tensor = t, batch_size_per_rank = one,
        dim_sum_per_rank = list(n, 2), group = group } end,
      function() return ops.alltoallv { inputs = { t }, out_split = list(n, 2), group = group } end,
      function() return ops.reduce_scatter_pooled { inputs = tensors, group = group } end,
      function() return ops.reduce_scatter_base_pooled { input = t, group = group } end,
      function() return ops.reduce_scatter_v_pooled { input = t, input_splits = one, group = group } end,
      function() return ops.all_gather_base_pooled { input = t, group = group } end,
      function() return ops.variable_batch_alltoall_pooled { a2a_pooled_embs_tensor = peri.empty({ 0 }, "f32", device),
        group = group, batch_size_per_rank_per_feature = list(n, {}), batch_size_per_feature_pre_a2a = {},
        emb_dim_per_rank_per_feature = list(n, {}) } end,
      function() return ops.reduce_scatter_v_per_feature_pooled { input = t:reshape(-1), group = group,
        batch_size_per_rank_per_feature = list(n, { 1 }), embedding_dims = { 2 } } end,
      function() return ops.alltoall_sequence { a2a_sequence_embs_tensor = peri.empty({ 0, 2 }, "f32", device),
        group = group, lengths_after_sparse_data_all2all = peri.empty({ 0 }, "i32", device), num_features = 0,
        batch_size_per_rank = list(n, 0), input_splits = list(n, 0), output_splits = list(n, 0) } end,
      function() return dist.KJTAllToAll(group, list(n, 0))(kjt) end,
      function()
        return dist.collective_utils.invoke_on_rank_and_broadcast_result(group, 0, function() return 1 end)
      end, function() return dist.Reducer { group = group, params = {} } end,
    }
    for i, call in ipairs(calls) do
      local ok, err = pcall(call)
      assert.is_false(ok, "call " .. i)
      assert.is_table(err, ("call %d: %s"):format(i, tostring(err)))
      assert.truthy(tostring(err):find(pattern), ("call %d: %s"):format(i, tostring(err)))
      assert.truthy(tostring(err):find("'left'", 1, true), ("call %d: %s"):format(i, tostring(err)))
    end
  end

  worlds.each("refuses everything", function(world, device, n)
    local ranks = {}
    for r = 1, n do ranks[r] = r - 1 end
    local group = world:new_group(ranks, "left")
    group:barrier():wait()
    group:close()
    all_fail("was closed", group, n, device)
    group:close() -- again: nothing
    group:release()
    all_fail("was released", group, n, device)
    assert.equal(n, world:all_reduce(peri.ones({ 1 }, "f32", device)):wait():item())
  end)

  it("as the world does after finish", function()
    sim.run(2, function(_, world)
      world:barrier():wait()
      peri.finish()
      assert.error_matches(function() world:barrier() end, "group 'world'.*was closed")
      assert.error_matches(function() ops.all_gather_base_pooled { input = peri.ones { 1 } } end, "no world yet")
      assert.error_matches(function() dist.KJTAllToAll(nil, { 1, 1 }) end, "no world yet")
      assert.error_matches(function() dist.new_group({ 0 }) end, "no world yet")
      assert.error_matches(function() dist.all_to_all({}, {}) end, "no world yet")
    end)
  end)
end)
