-- generator.lua: batches of a Lua function of one's own, with a position that a checkpoint keeps.
--
--   -- an iterator that begins with batch number `first`, from 0
--   local batches = peri.data.Generator { make = function(first)
--     local k = first
--     return function()
--       k = k + 1
--       return k <= 100 and batch_number(k) or nil
--     end
--   end }
--   for batch in batches do ... end
--   local saver = peri.checkpoint.Saver { parts = { model = model, optimizer = optimizer, batches = batches } }
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local position = require "perilune.data.position"
local signature = require "perilune.signature"

local Generator = util.seal(util.class "Generator")
position.counted(Generator)

local arguments = {
  make = util.required,   -- function(first) -> function() -> a batch, or nil at the end
  global_batches = false, -- batch k of all ranks together is the same on any number of ranks, so a position holds on
                          -- any
}

function Generator:init(args)
  local a = util.named("Generator", args, arguments)
  if not util.is_callable(a.make) then
    P.fail(("Generator: make is %s, wanted a function(first) that returns an iterator"):format(errors.kind(a.make)))
  end
  self.name, self.make, self.global_batches = "Generator", a.make, a.global_batches
  self.ahead, self._given, self._iterator = { batches = 0 }, 0, false
end

function Generator:given() return self._given end

function Generator:go_to(n) self._given, self._iterator, self.ahead = n, false, { batches = 0 } end

--- The next batch; nil at the end.
function Generator:next()
  if not self._iterator then
    local iterator = self.make(self._given)
    if not util.is_callable(iterator) then
      P.fail(("Generator: make returned %s, wanted a function that returns the next batch"):format(
        errors.kind(iterator)))
    end
    self._iterator = iterator
  end
  local batch = self._iterator()
  if batch ~= nil and batch ~= false then
    self._given = self._given + 1
    position.note(self)
  end
  return batch
end
Generator.__call = Generator.next

--- Leave the next n batches out.
function Generator:skip(n)
  self:go_to(self._given + util.integer("Generator:skip", "n", n, 0))
  return self
end

--- Begin again with the first batch.
function Generator:rewind()
  self:go_to(0)
  return self
end

signature.check("Generator:", Generator, { go_to = "self: table, n: count" })

return Generator
