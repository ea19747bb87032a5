-- windows.lua: what maps of raw ids (MCH) have seen since their last eviction: a part beside a model, so that a run
-- that goes on in the middle of a window evicts what the run that never stopped would have.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local ops = require "perilune.tensor.ops"

local Windows = util.class "Windows"
Windows.reads_stored = true -- load_state_dict takes StoredTensors, too (load.lua)
Windows.of_ranks = true     -- each rank has the ids of its buckets
Windows.always_merge = true -- and takes those of its buckets from all
Windows.optional = true     -- a checkpoint without them is fine: windows begin anew

--- The maps of a model whose windows are longer than a step: a list of { key =, step = name of its step in the model's
--- state_dict, map = function() -> the map on this rank, or nil }.
local function maps_of(model)
  local list = {}
  local function add(path, name, module, map)
    if (module.eviction_interval or 1) <= 1 then return end
    list[#list + 1] = { key = path .. "/" .. name, map = map, step = ("%s%s_managed_collision_modules.%s."
      .. "_current_iter_tensor"):format(path, path ~= "" and "." or "", name) }
  end
  for _, m in ipairs((model.wraps and model.module or model):named_modules()) do
    local collection = m.module
    if collection._tables and collection._map_of then
      for name, x in util.ordered(collection._tables) do
        if x.module then add(m.path, name, x.module, function() return collection:_map_of(name) end) end
      end
    elseif collection.managed_collision_modules then
      for name, module in util.ordered(collection:managed_collision_modules()) do
        if module._device ~= "meta" then add(m.path, name, module, function() return module:_settled_map() end) end
      end
    end
  end
  return list
end

--- Of a model; nil: it has no such maps.
function Windows.of(model)
  local maps = maps_of(model)
  return #maps > 0 and Windows(maps) or nil
end

function Windows:init(maps) self.maps = setmetatable(maps, {}) end -- a metatable: no place to look for modules

--- By map: the step before the window's first, and i64 [ids, 3] (nil: nothing was seen). Local.
function Windows:state_dict()
  local dict = {}
  for _, m in ipairs(self.maps) do
    local map = m.map()
    if map then
      local start, entries = P.lasting(map.window, map)
      dict[m.key] = { start = start, entries = entries:size(1) > 0 and entries or nil }
    end
  end
  return dict
end

--- What all ranks have seen: by map the step, and a list of entries.
function Windows:merge_state_dicts(list) -- luacheck: ignore 212
  local merged = {}
  for _, dict in ipairs(list) do
    for key, x in util.ordered(dict) do
      if type(x) ~= "table" or type(x.start) ~= "number" then
        return nil, ("'%s' is no window of a map of ids"):format(tostring(key))
      end
      merged[key] = merged[key] or { start = x.start, list = {} }
      table.insert(merged[key].list, x.entries)
    end
  end
  return merged
end

--- Leave the windows of maps whose steps are not loaded with them out of what merge_state_dicts has returned: they
--- begin anew. loaded: what is loaded of the model's state_dict.
function Windows:leave_out(dict, loaded)
  for _, m in ipairs(self.maps) do
    if not loaded[m.step] then dict[m.key] = nil end
  end
end

--- Go on with the ids of this rank's buckets.
function Windows:load_state_dict(dict)
  for _, m in ipairs(self.maps) do
    local x, map = dict[m.key], m.map()
    if x and map then
      P.scope(function()
        local parts = util.map(x.list or { x.entries }, function(t)
          return Tensor.is(t) and t:to(nil, "cpu") or t:tensor "cpu"
        end)
        map:set_window(x.start, #parts > 0 and ops.cat(parts, 1) or Tensor.empty({ 0, 3 }, "i64", "cpu"))
      end)
    end
  end
end

return Windows
