-- follow.lua: a program that follows the run of another one: what that one saves is in the objects here soon after.
--
--   local follower = peri.checkpoint.follow("checkpoints", { model = model }, { only = { "model/" } })
--   while serving do
--     -- nil: nothing newer is there; nil and a text: what is there cannot be had
--     local path, values = follower:poll()
--     ... answer ...
--   end
--
-- A poll takes the newest checkpoint of the folder (perilune/checkpoint.h says which that is). If what is here is among
-- those that it is an increment of, only the rows that changed since are read, and written into the tables; dense
-- parameters and maps of raw ids are read whole. All bytes are compared with their checksums before anything changes.
-- If something fails after that, what was there before is loaded again; that checkpoint stays open, so nobody removes
-- it.
local ffi = require "ffi"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
local Tensor = require "perilune.tensor"
local narrow = require "perilune.tensor.narrow"
local changes = require "perilune.embed.changes"
local load = require "perilune.checkpoint.load"
local parts_of = require "perilune.checkpoint.parts"
local Checkpoint = require "perilune.checkpoint.reader"
local C, check = P.C, P.check

local _, _, _, wrap_follower = P.handle("peri_checkpoint_follower", {}, nil, "who follows checkpoints")
local follower_out, checkpoint_out = ffi.new "peri_checkpoint_follower *[1]", ffi.new "peri_checkpoint *[1]"
local level_out = ffi.new "int64_t[1]"
-- What may be otherwise at the next look: a checkpoint that was not read for such a reason may be good.
local passing = { EIO = true, ENOTFOUND = true, ENOMEM = true }
local BLOCK_BYTES = 8 * 2 ^ 20 -- of rows that are read and written at once

-- -- rows that changed ------------------------------------------------------------------------------------------------

--- Write rows of a piece, as wide as it, into a table, whose shard `m` says which part of the whole it is. rows:
--- counted in the shard; dtype: of the table.
local function write_rows(source, m, piece, rows, values, dtype)
  local why = narrow.may_lose(dtype, values:dtype()) and narrow.refusal(values, dtype, function(i)
    return tonumber(rows:item(i)) + m.shard_offsets[1]
  end, piece.offset[2] or 0)
  if why then P.fail(why) end
  if values:dtype() ~= dtype then values = values:to(dtype) end
  local left, width = m.shard_offsets[2], m.shard_sizes[2]
  if left and (left ~= piece.offset[2] or width ~= piece.size[2]) then
    local from, to = math.max(left, piece.offset[2]), math.min(left + width, piece.offset[2] + piece.size[2])
    values = values:slice(2, from - piece.offset[2], to - piece.offset[2])
    if to - from < width then -- the piece has some columns of the table: the others stay
      local whole = changes.read(source, rows):to(nil, "cpu")
      whole:slice(2, from - left, to - left):copy(values)
      values = whole
    else
      values = values:contiguous()
    end
  end
  changes.write(source, rows, values)
end

local function meets(m, piece)
  for d = 1, #piece.offset do
    local low = math.max(piece.offset[d], m.shard_offsets[d] or 0)
    local high = math.min(piece.offset[d] + piece.size[d], (m.shard_offsets[d] or 0) + (m.shard_sizes[d] or 1))
    if low >= high then return false end
  end
  return true
end

--- What an increment has of one piece of tensor `name`, into a table.
local function lay(level, name, index, piece, source, m, dtype)
  if not meets(m, piece) then return end
  local low = math.max(piece.offset[1], m.shard_offsets[1])
  local high = math.min(piece.offset[1] + piece.size[1], m.shard_offsets[1] + m.shard_sizes[1])
  local from, past, first = low, high, m.shard_offsets[1]
  if piece.rows then from, past = level:_find_row(name, index, low), level:_find_row(name, index, high) end
  local row_bytes = math.max(1, piece.bytes / math.max(1, piece.listed or piece.size[1]))
  local step = math.max(1, math.floor(BLOCK_BYTES / row_bytes))
  for at = from, past - 1, step do
    local n = math.min(step, past - at)
    P.scope(function()
      if piece.rows then
        local rows, values = level:_piece_rows(name, index, at, n, first)
        return write_rows(source, m, piece, rows, values, dtype)
      end
      local offset, size = util.copy(piece.offset), util.copy(piece.size)
      offset[1], size[1] = at, n
      local region = { offset = offset, size = size, columns = piece.columns }
      local rows = Tensor.arange(at - first, at - first + n, 1, "i64", "cpu")
      write_rows(source, m, piece, rows, level:read(name, region), dtype)
    end)
  end
end

--- The pieces of a tensor that a shard's columns have a part in, by their places; nil: they are of several sets of
--- columns, whose numbers for one row make one.
local function pieces_for(t, columns)
  local chosen, set = {}, nil
  for i, piece in ipairs(t.pieces) do
    local own = piece.columns
    if not (own and columns) or own[1] < columns[1] + columns[2] and columns[1] < own[1] + own[2] then
      local key = own and ("%d %d"):format(own[1], own[2]) or ""
      if set and set ~= key then return nil end
      set, chosen[#chosen + 1] = key, i
    end
  end
  return chosen
end

--- A function of a tensor's name for load_from: brings shards that are rows of tables from what the checkpoint below
--- `levels` in the chain has to what the newest of them has. levels: open checkpoints, each without its parent, the
--- newest first.
local function patches(levels)
  return function(name)
    return function(shard, dtype)
      local source, list, m = changes.source(shard.tensor, shard), {}, shard.metadata
      if not source then return false end
      for i = #levels, 1, -1 do
        local t = levels[i]:has(name) and levels[i]:tensor(name)
        local chosen = t and pieces_for(t, m.columns)
        if not chosen then return false end
        list[#list + 1] = { level = levels[i], pieces = t.pieces, chosen = chosen }
      end
      for _, x in ipairs(list) do
        for _, index in ipairs(x.chosen) do lay(x.level, name, index, x.pieces[index], source, m, dtype) end
      end
      return true
    end
  end
end

--- The newest `n` checkpoints of a chain, each by itself.
local function levels_alone(c, n)
  local list, paths, wanted = {}, c:levels(), c:digest()
  for i = 1, n do
    local level = Checkpoint(paths[i], true)
    list[i] = level
    if level:digest() ~= wanted and level:_same_as() ~= wanted then
      P.fail(("checkpoint '%s' was replaced by another one while it was read"):format(paths[i]))
    end
    wanted = level:parent()
  end
  return list
end

-- -- following --------------------------------------------------------------------------------------------------------

local Follower = util.seal(util.class "Follower")

--- See checkpoint.follow.
function Follower:init(folder, parts, options)
  local func = "checkpoint.follow"
  signature.value(func, "folder", folder, "string")
  parts_of.check_path(func, folder)
  self.folder, self.parts = folder, parts
  self.path, self.step, self.digest = false, false, false -- of what was taken last
  self._options = load.options_of(func, options)
  if self._options.increments then
    P.fail(func .. ": increments = true is for who saves; a follower saves nothing")
  end
  parts_of.list(func, parts) -- errors now
  self._group = parts_of.group(func, self._options.group) or false
  self._current, self.closed = false, false
  check(C.peri_checkpoint_follower_new(folder, follower_out))
  self._ref = wrap_follower(follower_out[0])
end
function Follower:__tostring()
  return ("a follower of '%s' (%s)"):format(self.folder, self.path and "at '" .. self.path .. "'"
    or "nothing was taken yet")
end

--- On rank 0: what comes next, { path =, digest =, level = or nil }, a text that says why it cannot be had, or false.
local function look(self)
  local status = C.peri_checkpoint_follower_next(self._ref.ptr, checkpoint_out, level_out)
  if status == C.PERI_PENDING then return false end
  if status < 0 then return ffi.string(C.peri_error_message()) end
  local c, level = checkpoint_out[0], tonumber(level_out[0])
  return { path = ffi.string(C.peri_checkpoint_level(c, 0)), digest = ffi.string(C.peri_checkpoint_digest(c)),
    level = level >= 0 and level or nil }
end

--- On rank 0: what became of what was found last. what: the C function that says so.
local function tell(self, what)
  if self._group and self._group:rank() > 0 then return end
  check(what(self._ref.ptr))
end

--- What was here before is loaded again, after an error in the middle. Returns whether it is here.
local function go_back(self, func)
  local back = self._current and pcall(load.load_from, self._current, func, self.parts, self._options, self._group
    or nil, {}, true)
  if back then return true end
  if self._current then self._current:close() end
  self._current, self.path, self.step, self.digest = false, false, false, false
  tell(self, C.peri_checkpoint_follower_forget)
  return false
end

--- Bring the parts from what they have to what the open checkpoint `c` has. Returns whether they have it, and the
--- values or why not; an error if the parts do not fit the first one.
local function apply(self, func, c, level)
  local met, group, levels = {}, self._group or nil, nil
  local ok, result = xpcall(function()
    load.verify_together(c, group, func, met, level)
    load.together(group, func, met, function() levels = level and levels_alone(c, level) end)
    return load.load_from(c, func, self.parts, self._options, group, met, self._current ~= false, levels
      and patches(levels))
  end, P.locate)
  for _, x in ipairs(levels or {}) do x:close() end
  if ok then return true, result end
  local why, damaged, again = errors.said(result), false, false
  for _, other in ipairs(group and group:all_gather_object({ met.damaged or false, met.kind or false }, func)
    or { { met.damaged, met.kind } }) do
    damaged, again = damaged or other[1], again or passing[other[2]]
  end
  if not self.path and not damaged and not met.begun then error(result, 0) end -- the parts are others
  if not again then tell(self, C.peri_checkpoint_follower_refuse) end -- and looked at again, later
  if met.begun and go_back(self, func) then
    why = why:gsub("^part '[%w_.]+' is loaded in part only: ", "") .. "; what was there before was loaded again"
  elseif met.begun then
    why = why .. "; what the parts have now is of no one checkpoint, until one that is good was taken"
  end
  return false, why
end

--- Take the newest checkpoint, if it is newer than what is here. Returns its path and the values that were saved beside
--- it (those of its user, where a Saver saved it; `follower.step` is its step then); nil: nothing newer is there; or
--- nil and a text: what is there cannot be had, and the parts are as before. The first one that does not fit the parts
--- is an error. Collective.
function Follower:poll()
  local func, group = "Follower:poll", self._group or nil
  if self.closed then P.fail(func .. ": it was closed") end
  local found = parts_of.on_first(group, func, function() return look(self) end)
  if not found then return nil end
  if type(found) == "string" then return nil, found end
  local opened, c = pcall(load.open_together, group, func, {}, found.path, 0)
  if not opened then return nil, (errors.said(c)) end
  if c:digest() ~= found.digest then
    c:close()
    return nil, ("'%s' was replaced while it was opened"):format(found.path)
  end
  local called, ok, values = xpcall(apply, P.locate, self, func, c, found.level)
  if not (called and ok) then
    c:close()
    if not called then error(ok, 0) end
    return nil, values
  end
  tell(self, C.peri_checkpoint_follower_take)
  if self._current then self._current:close() end
  local own = type(values) == "table" and values.saver
  self._current, self.path, self.digest, self.step = c, found.path, found.digest, own and own.step or false
  if own then values = values.user end
  return found.path, values
end

--- Look no more. What is here stays; the checkpoint that it is of may be removed then.
function Follower:close()
  if self._current then self._current:close() end
  self._current, self.closed = false, true
  self._ref:release()
end

signature.check("Follower:", Follower, { poll = "self: object", close = "self: object" })

return Follower
