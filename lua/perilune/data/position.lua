-- position.lua: where a source of batches is: what a checkpoint has of it (PyTorch's StatefulDataLoader: state_dict and
-- load_state_dict).
--
-- A position counts batches that were given and, where a pipeline took them ahead of the steps that train them,
-- trained. For that a source has a field `ahead`, { batches = 0 }: a pipeline adds one for each batch that the source
-- gives while the pipeline asks for its next batch, and takes one away after that batch's step (pipeline/supply.lua).
-- It does not matter who called the source: the pipeline, or a function of the user's that changes its batches. Who
-- goes elsewhere in the data takes a new one: what is in flight then counts for the old.
local P = require "perilune.ffi"
local util = require "perilune.util"
local serial = require "perilune.serial"
local signature = require "perilune.signature"

local M = {}

P.own { given = false } -- while a pipeline asks for a batch: a list of the `ahead` of each source that gave it one

--- A source calls this with each batch that it gives.
function M.note(source)
  local given = P.state.given
  if given then given[#given + 1] = source.ahead end
end

--- Whether x is a whole number from 0 on.
function M.is_count(x) return type(x) == "number" and x >= 0 and x == math.floor(x) and x < 2 ^ 53 end

--- What differs first between two plain values, in words; nil: nothing does.
function M.difference(was, is, name)
  if type(was) == "table" and type(is) == "table" then
    local all = util.copy(was)
    for key, value in util.ordered(is) do all[key] = value end
    for key in util.ordered(all) do
      local why = M.difference(was[key], is[key], (name and name .. "." or "") .. tostring(key))
      if why then return why end
    end
    return nil
  end
  if serial.encode(was) == serial.encode(is) then return nil end
  return ("%s was %s, and is %s"):format(name or "it", signature.text(was), signature.text(is))
end

--- Give a class the state of a source that knows no more than how many batches it has given. An object has a name;
--- global_batches: batch k of all ranks together is the same on any number of ranks; given(): how many it has given;
--- go_to(n): it goes on behind the first n, with a new `ahead`.
function M.counted(class)
  class.of_ranks = true

  function class:state_dict() return { loader = self.name, batches = self:given() - self.ahead.batches } end

  --- What keeps load_state_dict(dict) from loading, in words; nil: nothing does. Changes nothing; not collective.
  function class:check_state_dict(dict)
    if type(dict) ~= "table" or dict.loader ~= self.name or not M.is_count(dict.batches) then
      return ("it is no position in a %s"):format(self.name)
    end
  end

  --- Go on behind such a position.
  function class:load_state_dict(dict)
    local why = self:check_state_dict(dict)
    if why then P.fail(("%s:load_state_dict: %s"):format(self.name, why)) end
    self:go_to(dict.batches)
  end

  function class:merge_state_dicts(list)
    local alike = true
    signature.value(self.name .. ":merge_state_dicts", "list", list, "list")
    for _, dict in ipairs(list) do alike = alike and not M.difference(list[1], dict) end
    if self.global_batches and alike then return list[1] end
    if self.global_batches then
      return nil, "ranks were at different batches, allowed: as many ranks as it was saved on"
    end
    return nil, ("it was saved on %s, and what the batches of other ranks are is not known; allowed: as many ranks, "
      .. "or %s { ..., global_batches = true } where batch k of all ranks together is the same on any number of "
      .. "them"):format(
      util.number_of(#list, "rank"), self.name)
  end
end

return M
