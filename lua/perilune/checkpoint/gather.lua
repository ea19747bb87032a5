-- gather.lua: numbers of the rows of a map of raw ids that a checkpoint has in another order, or for other rows: they
-- are put together for some rows at a time (a window), by reading all that is stored once for each window. So a map of
-- any size takes the memory of one window.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local StoredTensor = require "perilune.tensor.stored"
local C, check = P.C, P.check

local Gather = util.class "Gather"

Gather.ROWS = 2 ^ 18   -- of a window, at most, where it can be so: each takes up to 48 bytes
Gather.BLOCK = 65536   -- rows of what is stored that are read at once
local data_out = ffi.new "void *[1]"

--- The numbers of an i64 tensor in the host's memory, int64_t *, as long as it lives. (Arrays of LuaJIT end at 2 GiB.)
local function numbers_in(t)
  check(C.peri_tensor_data(Tensor.ptr(t), data_out))
  return ffi.cast("int64_t *", data_out[0])
end

--- A new tensor of n numbers (i64), and them.
local function room_for(n)
  local t = P.lasting(Tensor.empty, { n }, "i64", "cpu")
  return t, numbers_in(t)
end

--- The numbers of a stored state of rows [first, past) of its table: a tensor of one dimension, and they.
local function numbers_of(stored, first, past)
  local size, offset = stored:size(), util.map(stored:size(), function() return 0 end)
  size[1], offset[1] = past - first, first
  local t, numbers = room_for(past - first)
  P.scope(function() stored:read(offset, t:reshape(size)) end)
  return t, numbers
end

Gather.numbers_in, Gather.room_for, Gather.numbers_of = numbers_in, room_for, numbers_of

--- bounds: ascending rows, where windows begin and where the last one ends. initial: name -> the number of a row that
--- `fill` says nothing of. fill = function(window), which has the arrays by these names (int64_t *, number i is of row
--- first + i), first and past.
function Gather:init(bounds, initial, fill)
  self._bounds, self._initial, self._fill, self._window = bounds, initial, fill, false
  self._release = false
end

--- A window that nobody has filled, and a function that gives its memory back. initial: as of init.
function Gather.blank(initial, first, past)
  local w, kept = { first = first, past = past }, {}
  for name, number in util.ordered(initial) do
    kept[#kept + 1], w[name] = room_for(past - first)
    for k = 0, past - first - 1 do w[name][k] = number end
  end
  return w, function()
    for _, t in ipairs(kept) do t:release() end
  end
end

--- The window that has row `row`; it lasts until another one is asked for.
function Gather:window(row)
  local w = self._window
  if w and w.first <= row and row < w.past then return w end
  if w then self._release() end
  self._window = false
  local i = 1
  while self._bounds[i + 1] <= row do i = i + 1 end
  w, self._release = Gather.blank(self._initial, self._bounds[i], self._bounds[i + 1])
  self._fill(w)
  self._window = w
  return w
end

--- A StoredTensor of one number a row, of size `size`: those by that name. verify (or nil) = function(), called before
--- they are loaded.
function Gather:stored(name, size, dtype, verify)
  --- The end (not included) of the window that holds row `row`.
  local function window_end(row)
    local i = 2
    while self._bounds[i] <= row do i = i + 1 end
    return self._bounds[i]
  end
  return StoredTensor { size = size, dtype = dtype, verify = verify, ends = window_end, read = function(region, tensor)
    local first, n, at = region.offset[1], region.size[1], 0
    local flat = tensor:reshape(-1)
    while at < n do
      local w = self:window(first + at)
      local count = math.min(w.past - first, n) - at
      P.scope(function()
        flat:slice(1, at, at + count):copy(Tensor.from_memory(w[name] + (first + at - w.first), { count }, "i64",
          "cpu"))
      end)
      at = at + count
    end
  end }
end

return Gather
