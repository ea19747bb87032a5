-- ranks.lua: numbers of the samples of all ranks together: the mean that a loss is, and what metrics add up or gather.
-- And whether all ranks can do what they are about to do.
--
-- `group` is the ranks. Functions that users reach (group_of, mean_of, global_mean) take nil for the world, if one was
-- joined, and false for this rank alone. Functions for metrics (sum, gather) take what group_of returned: nil is this
-- rank alone. With more than one rank all of this is collective: every rank of the group calls it, with whatever
-- samples it has, also none.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local ShardedTensor = require("perilune.tensor.sharded").ShardedTensor
local F = require "perilune.nn.functional"
local signature = require "perilune.signature"

local M = {}

--- An error unless `group` can be given to the functions here.
function M._check_group(func, group)
  if group and (type(group) ~= "table" or not group.all_reduce) then
    P.fail(("%s: group is a %s, wanted a group of ranks, or false for this rank alone"):format(func, type(group)))
  end
end

--- The group to work with, or nil where this rank is alone.
function M.group_of(func, group)
  if group == nil then group = P.state.world end
  if not group then return nil end
  M._check_group(func, group)
  return group:size() > 1 and group or nil
end

-- -- the mean of a loss -----------------------------------------------------------------------------------------------

--- `sum` with the gradient of the mean that `parts` (added up over the ranks) make: the mean is S / C, and its
--- differential is dS / C - (S / C) dC / C, that of S less the mean times C. The number is that of `sum`.
local function with_count(sum, count, parts)
  local mean = parts:slice(1, 0, 1):div(parts:slice(1, 1, 2))
  mean = mean:masked_fill(mean:isnan(), 0):to(sum:dtype()):reshape(sum:shape())
  local same = count:reshape(sum:shape()):to(sum:dtype())
  return sum - (same - same:detach()) * mean
end

--- The sum of `sum` (a tensor of one element) over the ranks divided by that of `count` (a number or a tensor); 0 where
--- nobody has a sample. The value is the same on all ranks, bit for bit. Gradients are the number of ranks times those
--- of this rank's part: their means over the ranks, which DistributedModelParallel makes, are the gradients of the
--- value.
function M.mean_of(sum, count, group)
  signature.value("global_mean", "sum", sum, "tensor")
  signature.value("global_mean", "count", count, type(count) == "number" and "number" or "tensor")
  group = M.group_of("global_mean", group)
  if not group and type(count) == "number" then return F.mean_of(sum, count) end
  local parts = F.mean_parts(sum, count)
  if group then group:all_reduce(parts):wait() end
  if type(count) ~= "number" and count:describe().requires_grad then sum = with_count(sum, count, parts) end
  return F.mean_of(sum, parts, group and group:size() or 1)
end

--- The mean of the elements of `losses` on all ranks together; with `weights`, of their shape, the weighted mean. A
--- loss for training over ranks whose shares of a batch may differ: see mean_of.
function M.global_mean(losses, weights, group)
  if weights == nil then return M.mean_of(F.sum(losses), losses:numel(), group) end
  Tensor._alike("global_mean", "losses", losses, "weights", weights)
  return M.mean_of(F.sum(F.mul(losses, weights)), F.sum(weights), group)
end

-- -- numbers of metrics -----------------------------------------------------------------------------------------------

--- The numbers of `list`, each added up over the ranks of `group` (of group_of; nil: `list` itself). The lists of all
--- ranks have one length. Waits for the other ranks.
function M.sum(group, list)
  if not group then return list end
  local t = Tensor.tensor(list, "f64", "cpu")
  group:all_reduce(t):wait()
  local total = t:to_list()
  t:release()
  return total
end

--- f64 arrays of n numbers each (n may differ between ranks), and those of the other ranks before and after them:
--- arrays, and how many numbers each has.
function M.gather(group, arrays, n)
  if not group then return arrays, n end
  local own = Tensor.tensor({ n }, "i64", "cpu")
  local all = group:all_gather(own):wait()
  local counts, total, results = all:to_list(), 0, {}
  for _, count in ipairs(counts) do total = total + count end
  for k, array in ipairs(arrays) do
    local input = Tensor.from_memory(array, { n }, "f64", "cpu")
    local output = group:all_gather_v(input, counts):wait()
    results[k] = ffi.new("double[?]", total + 1)
    ffi.copy(results[k], (output:read()), total * 8)
    input:release()
    output:release()
  end
  own:release()
  all:release()
  return results, total
end

-- -- agreeing ---------------------------------------------------------------------------------------------------------

--- What went wrong, without the name of the function that says it.
local function reason_of(func, err)
  local message = tostring(type(err) == "table" and err.message or err)
  return message:sub(1, #func + 2) == func .. ": " and message:sub(#func + 3) or message
end

local STORED = "in a checkpoint"

--- The part of a whole tensor that belongs to a piece.
local function part_of(whole, metadata)
  for d, from in ipairs(metadata.shard_offsets) do whole = whole:slice(d, from, from + metadata.shard_sizes[d]) end
  return whole
end

--- The checksum of what `target` gets from `source`, in words; of a ShardedTensor, of what its pieces here get.
local function sum_of(source, target)
  local function sum(x) return tostring(Tensor._checksum(x:detach():to(target:dtype()))) end
  return P.scope(function()
    if not ShardedTensor.is(target) then return Tensor.is(source) and sum(source) or STORED end
    local sums = {}
    for i, shard in ipairs(target:local_shards()) do
      local own = ShardedTensor.is(source) and source:local_shards()[i]
      local x = own and own.tensor or Tensor.is(source) and part_of(source, shard.metadata)
      if not x then return STORED end
      sums[i] = sum(x)
    end
    return table.concat(sums, " ")
  end)
end

--- All ranks of the groups (a list; those that come twice, and those of one rank, count once and not at all) come here
--- before they change something, each with the error that it met, or nil. If one has an error it is raised on all: it
--- names the rank, unless all ranks say the same. Collective; waits.
function M.all_or_none(groups, func, err)
  local reason, told, seen = err ~= nil and reason_of(func, err) or false, nil, {}
  for _, group in ipairs(groups) do
    local list = (seen[group] or group:size() == 1) and {} or group:all_gather_object(reason, func)
    local first, alike = nil, true
    seen[group] = true
    for r, x in ipairs(list) do
      first = first or x and r
      alike = alike and x == list[1]
    end
    if first and not alike then
      reason, told = ("rank %d of group '%s': %s"):format(first - 1, group.name, list[first]), true
    end
  end
  if told then P.fail(("%s: %s"):format(func, reason)) end
  if err ~= nil then error(err, 0) end
end

--- What ranks train alike they are given alike, or their copies of it would go on as different ones. list: { name =,
--- tensor = where it goes, alike = the group that has it alike (or nil) }; given: name -> what this rank is given, as
--- it fits there, or nil. What differs on a rank is an error on all. What is read from a checkpoint is the same.
--- Collective over these groups; waits.
function M.given_alike(func, list, given)
  local groups, sums = {}, {}
  for _, s in ipairs(list) do
    local group, source = s.alike, rawget(given, s.name)
    if group and group:size() > 1 then
      if not sums[group] then groups[#groups + 1], sums[group] = group, {} end
      sums[group][s.name] = source ~= nil and sum_of(source, s.tensor)
    end
  end
  -- all groups first: ranks of one that is told nothing are in the next
  local told = util.map(groups, function(group) return group:all_gather_object(sums[group], func) end)
  for i, group in ipairs(groups) do
    local all = told[i]
    for r = 2, #all do
      for name, first in util.ordered(all[1]) do
        local sum = all[r][name]
        if (not first) ~= (not sum) or first and sum and first ~= sum and first ~= STORED and sum ~= STORED then
          P.fail(("%s: '%s' is not the same on rank 0 of group '%s' and on rank %d%s, but all ranks train it "
            .. "alike"):format(func, name, group.name, r - 1,
            first and sum and "" or (", to which it is %sgiven"):format(first and "not " or "")))
        end
      end
    end
  end
end

signature.kind("ranks", "a group of ranks", function(x)
  return type(x) == "table" and util.is_callable(x.all_reduce)
end)
signature.kind("rank_groups", "a list of groups of ranks", function(x)
  if type(x) ~= "table" then return false end
  for _, group in ipairs(x) do
    if type(group) ~= "table" or not (util.is_callable(group.size) and util.is_callable(group.all_gather_object)) then
      return false
    end
  end
  return true
end)
signature.kind("states", "a list of { name =, tensor = }", function(x)
  for _, s in ipairs(type(x) == "table" and x or { false }) do
    if type(s) ~= "table" or type(s.name) ~= "string" then return false end
  end
  return true
end)
signature.check("", M, {
  all_or_none = "groups: rank_groups, func: string, err: any",
  mean_of = "sum: tensor, count: any, group: any", global_mean = "losses: tensor, weights: tensor?, group: any",
  given_alike = "func: string, list: states, given: table",
  sum = "group: ranks?, list: list", gather = "group: ranks?, arrays: list, n: count",
})

return M
