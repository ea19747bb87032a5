-- best.lua: a copy of all of a model's weights, each rank its own: those at the lowest validation loss. Rows of tables that live in files
-- are kept in a file, since they may not fit into memory.
local ffi = require "ffi"
local peri = require "perilune"

local Best = peri.util.class "Best"
local ROWS = 65536 -- of a table that are copied at once

--- model: a DistributedModelParallel; path: of the file, which is made where some table needs it.
function Best:init(model, path)
  self._pairs, self._shards, self._path = {}, {}, path
  self.file = false
  for _, p in ipairs(model.module:parameters()) do self:_pair(p:detach()) end
  for _, sharded in ipairs(model.sharded) do
    for _, s in ipairs(sharded:local_shards()) do
      if s.cached then self._shards[#self._shards + 1] = s else self:_pair(s.state "weight") end
    end
  end
end

function Best:_pair(live)
  self._pairs[#self._pairs + 1] = { live = live, kept = peri.Tensor.empty(live:shape(), live:dtype(), live:device()) }
end

function Best:_check(ok, why)
  if not ok then error(("cannot keep the best weights in %s: %s"):format(self._path, why), 0) end
  return ok
end

--- Blocks of rows of the tables in files: shard, first row, and a tensor to hold them.
local function blocks(self, f)
  for _, s in ipairs(self._shards) do
    local shape = s.shape "weight"
    for row = 0, s.rows - 1, ROWS do
      peri.scope(function()
        f(s, row, peri.Tensor.empty({ math.min(ROWS, s.rows - row), shape[2] }, "f32", "cpu"))
      end)
    end
  end
end

--- Remember the weights as they are now.
function Best:keep()
  for _, pair in ipairs(self._pairs) do pair.kept:copy(pair.live) end
  if #self._shards == 0 then return end
  self.file = self.file or self:_check(io.open(self._path, "w+b"))
  self:_check(self.file:seek "set")
  blocks(self, function(s, row, rows)
    local numbers, n = s.read("weight", row, rows):read()
    self:_check(self.file:write(ffi.string(numbers, n * 4)))
  end)
  self:_check(self.file:flush())
end

--- Give the model the remembered weights.
function Best:restore()
  for _, pair in ipairs(self._pairs) do pair.live:copy(pair.kept) end
  if #self._shards == 0 then return end
  self:_check(self.file:seek "set")
  blocks(self, function(s, row, rows)
    local bytes = rows:numel() * 4
    local text = self:_check(self.file:read(bytes))
    self:_check(#text == bytes, "it ends too early")
    rows:write(text)
    s.write("weight", row, rows)
  end)
end

function Best:close()
  if self.file then self.file:close() end
  os.remove(self._path)
  self._pairs, self._shards, self.file = {}, {}, false
end

return Best
