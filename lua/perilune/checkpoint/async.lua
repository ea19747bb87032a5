-- async.lua: saving while training goes on.
--
--   local save = model:save("model-1000", { async = true })   -- collective; the state of this moment
--   ... steps ...                                             -- it is copied and written meanwhile
--   save:done()                                               -- whether it has ended; local, does not wait
--   -- its digest, or the error that it met, on all ranks alike; collective
--   save:wait()
--
-- Rows of tables are copied bit by bit, between what the program does: in the forward passes of a
-- DistributedModelParallel, in the steps of optimizers, in done() and wait(). Rows that change before their turn are
-- kept as they were (perilune/moment.h). Everything else is small, and copied at the call. Threads write the files
-- (perilune/checkpoint.h). At the end the ranks tell rank 0 what they have written, and rank 0 tells them the outcome,
-- through a group of ranks that nothing else uses, so it does not matter when each of them comes to it.
local ffi = require "ffi"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
local Tensor = require "perilune.tensor"
local changes = require "perilune.embed.changes"
local parts_of = require "perilune.checkpoint.parts"
local pieces_of = require "perilune.checkpoint.pieces"
local C, check, state = P.C, P.check, P.state
--- The last asynchronous save of this rank: { progress = function(), finish = function(), last = }, or false.
P.own({ saves = false }, true)

local M = {}

local _, _, _, wrap_moment = P.handle("peri_moment", {}, nil, "a moment of tables")
local moment_out, index_out = ffi.new "peri_moment *[1]", ffi.new "int64_t[1]"
--- How copying goes on: bytes that are copied at once, without looking at the time (of small blocks a third of the time
--- is calls whose code and data a step has driven out of the caches); the share of the time that it may take while the
--- program does something else, where the save does not say another (`pace`), and the seconds that it may take at once
--- for that share; bytes that are copied at the call, and before these, bytes that are written at once: half of what
--- the writer has buffers for.
M.pace = { block = 2 ^ 19, share = 0.01, most = 0.02, kept = 32 * 2 ^ 20, direct = 8 * 2 ^ 20 }
local SLEEP = 100000 -- a round of peri_pause that sleeps
local OUTCOME = 2048       -- bytes of the outcome that rank 0 sends

local function now() return tonumber(C.peri_time_ns()) * 1e-9 end

local AsyncSave = util.class "AsyncSave"
M.AsyncSave = AsyncSave

--- s: what save.lua has begun; functions: its writer_of, part_of, join, settle.
function AsyncSave:init(s, functions)
  self.path, self.digest = s.path, false
  self._s, self._f = s, functions
  self._group = false
  self._phase, self._piece, self._row = "copy", 1, 0
  self._waits = false            -- wait() is called, which has time
  self._failure = false          -- what this rank met, as a text; its status and name are _code, _name
  self._code, self._name = -1, "EINVAL"
  self._outcome = false          -- { ok, digest or message }, when all know it
  self._told = false             -- somebody has been told the outcome
  self._looked, self._credit = now(), 0
  self._process = ffi.C.peri__process()
end
function AsyncSave:__tostring() return ("a save of '%s' that is under way (%s)"):format(self.path, self._phase) end

-- -- the moment -------------------------------------------------------------------------------------------------------

--- A copy of a piece that does not change with the rows of a table, in the host's memory.
local function copy_of(p)
  if p.list and not p.each then
    local rows = p.list.rows(p, 0)
    local copy = changes.read(pieces_of.source_of(p), rows):to(nil, "cpu")
    rows:release()
    return copy
  end
  local copy, at = Tensor.empty(p.each and { pieces_of.listed(p) or p.size[1] } or p.size, p.dtype, "cpu"), 0
  if p.each then
    p.each(function(block)
      copy:slice(1, at, at + block:numel()):copy(block)
      at = at + block:numel()
    end)
    return copy
  end
  local tensor = pieces_of.tensor_of(p)
  if tensor then copy:copy(tensor:detach()) else p.shard.read(0, copy) end
  if p.rows then tensor:release() end
  return copy
end

--- The pieces that are parts of the moment (parts[number + 1]), in the order in which they are best copied.
local function of_parts(moment, parts)
  local order, list = ffi.new("int64_t[?]", #parts + 1), {}
  check(C.peri_moment_order(moment, #parts, order))
  for i = 1, #parts do list[i] = parts[tonumber(order[i - 1]) + 1] end
  return list
end

--- Take the state of this moment. What does not change with the rows of tables is copied; what of it goes beyond
--- M.pace.kept bytes is written now instead, so that the save needs no more memory than that; and so is what the
--- writer has buffers for, M.pace.direct bytes: then 100,000 small tensors need no copies. Collective only in that all
--- ranks do it between the same steps.
function AsyncSave:_take()
  local s, rest, others, now_, later, parts = self._s, 0, {}, {}, {}, {}
  check(C.peri_moment_new(moment_out))
  self._moment = wrap_moment(moment_out[0])
  for _, piece in ipairs(s.pieces) do
    local p = pieces_of.whole(piece)
    local tensor, source = p.tensor or p.shard and p.shard.tensor, p.shard and p.shard.source
    index_out[0] = -1
    if tensor and not p.list then -- some rows are few, and copied at once
      check(C.peri_moment_add(self._moment.ptr, Tensor.ptr(tensor), index_out))
    elseif source and not p.list then
      local tbe, number, name = source()
      check(C.peri_moment_add_table(self._moment.ptr, tbe, number, name, C.peri_dtype_parse(p.dtype), index_out))
    end
    piece.part, piece.count = tonumber(index_out[0]), pieces_of.listed(p) or #p.size == 0 and 1 or p.size[1]
    if piece.part >= 0 then parts[piece.part + 1] = piece
    else others[#others + 1], rest = piece, rest + p.bytes end
  end
  local direct, sum, kept = math.max(M.pace.direct, rest - M.pace.kept), 0, 0
  for _, piece in ipairs(others) do
    sum = sum + piece.bytes
    if sum <= direct or kept + piece.bytes > M.pace.kept then now_[#now_ + 1] = piece
    else
      piece.copy, kept = P.lasting(copy_of, pieces_of.whole(piece)), kept + piece.bytes
      later[#later + 1] = piece
    end
  end
  s.pieces, self._piece = {}, 1
  for _, list in ipairs { now_, later, of_parts(self._moment.ptr, parts) } do
    for _, p in ipairs(list) do s.pieces[#s.pieces + 1] = p end
  end
  self._writer = self._f.writer_of(s.folder, s.rank, s.pieces, s.a.file_bytes or 0)
  for i, p in ipairs(now_) do
    self._f.put(self._writer.ptr, p)
    s.pieces[i] = false
  end
  for i = 1, #s.pieces do -- of those that are put later nothing else is needed any more
    local p = s.pieces[#now_ + i]
    s.pieces[i] = p and { part = p.part, copy = p.copy, count = p.count, bytes = p.bytes }
  end
end

-- -- copying ----------------------------------------------------------------------------------------------------------

--- Copy the next block; false: there is no room for it without waiting, or nothing is left (then the phase is another
--- one).
local function copy_block(self, waits)
  local p = self._s.pieces[self._piece]
  if not p then
    self._phase = "sync"
    return false
  end
  local rows = p.count
  local row_bytes = rows > 0 and p.bytes / rows or 0
  local n = math.min(rows - self._row, math.max(1, math.floor(M.pace.block / math.max(row_bytes, 1))))
  if not waits and tonumber(C.peri_checkpoint_writer_room(self._writer.ptr)) < n * row_bytes then
    -- A row that is larger than all buffers waits for them.
    if n > 1 or row_bytes <= M.pace.block then return false end
  end
  if p.part < 0 then
    local whole = p.copy:dim() == 0 or p.bytes <= M.pace.block
    if whole then n = rows end
    local block = whole and p.copy or p.copy:slice(1, self._row, self._row + n)
    if p.bytes > 0 then check(C.peri_checkpoint_writer_put(self._writer.ptr, Tensor.ptr(block))) end
  else
    check(C.peri_checkpoint_writer_put_moment(self._writer.ptr, self._moment.ptr, p.part, self._row, n))
  end
  self._row = self._row + n
  if self._row >= rows then
    if p.copy then p.copy:release() end
    p.copy, self._piece, self._row = nil, self._piece + 1, 0
  end
  return true
end

--- Whether the files are on the disk; then self._part is this rank's part of the manifest.
local function synced(self, waits)
  if not waits and check(C.peri_checkpoint_writer_test(self._writer.ptr)) == C.PERI_PENDING then return false end
  self._part = self._f.part_of(self._writer.ptr)
  return true
end

--- Memory and files that are not needed any more. Of a save that failed the files go.
local function give_up(self)
  for _, name in ipairs { "_moment", "_writer" } do
    if self[name] then self[name]:release() end
    self[name] = nil
  end
  self._s.pieces = {}
end

-- -- the end ----------------------------------------------------------------------------------------------------------

--- This rank can save no more: note why, which all ranks are told. Without the script's line, which is that of whatever
--- step the save came by in; wait() says its own.
local function fail(self, err)
  self._phase, self._failure = "agree", errors.said(err)
  if getmetatable(err) == errors.Error then self._code, self._name = err.code, err.name end
end

--- Tell rank 0 what this rank has, and wait for the outcome: a coroutine that yields while it would wait.
local function agree(self)
  local group, s = self._group, self._s
  local function arrive(work)
    while not work:test() do coroutine.yield() end
    return work:wait()
  end
  local own = { part = self._part, failure = self._failure or nil }
  local all = parts_of.to_first(group, s.func, own, arrive)
  local outcome
  if s.rank == 0 then
    for r, x in ipairs(all) do
      if not outcome and x.failure then outcome = (group and ("-rank %d: "):format(r - 1) or "-") .. x.failure end
    end
    if not outcome then
      local parts = util.map(all, function(x) return x.part end)
      local ok, result = xpcall(self._f.join, P.locate, s, parts,
        function() -- a thread publishes it
          if self._waits then C.peri_pause(SLEEP) else coroutine.yield() end
        end)
      if not ok then fail(self, result) end
      outcome = ok and "+" .. result or "-" .. self._failure
    end
    outcome = outcome:sub(1, OUTCOME)
  end
  if group then
    local text = outcome or ""
    local message = Tensor.from_memory(text .. ("\0"):rep(OUTCOME - #text), { OUTCOME }, "u8", "cpu")
    arrive(group:broadcast(message, 0))
    local bytes, total = message:read()
    outcome = ffi.string(bytes, total):match "^[^%z]*"
  end
  self._outcome = outcome
end

--- Go on with the save: copy blocks, and when all files are written, agree with the other ranks on the outcome. With
-- `waits` until it has ended; without, copying stops after `credit` seconds and nothing waits for disk or ranks.
local function advance(self, waits, credit)
  if self._outcome then return end
  if self._process ~= ffi.C.peri__process() then -- of a child, which has no threads that write
    self._outcome, self._told = "-the process that this one was forked from saves it, and goes on with it", true
    self._code, self._name = C.PERI_EUNSUPPORTED, "EUNSUPPORTED"
    return
  end
  if self._phase == "copy" or self._phase == "sync" then
    local ok, err = xpcall(function()
      local from = now()
      while self._phase == "copy" and copy_block(self, waits) do
        if not waits and now() - from >= credit then break end
      end
      if self._phase == "sync" and synced(self, waits) then self._phase = "agree" end
    end, P.locate)
    if not ok then fail(self, err) end
    if self._phase == "agree" then give_up(self) end
  end
  if self._phase ~= "agree" then return end
  self._waits = waits
  self._agreeing = self._agreeing or coroutine.create(agree)
  local round = 0
  repeat
    local ok, err = P.lasting(coroutine.resume, self._agreeing, self) -- no scope of a step ends what is under way
    if not ok then
      fail(self, err)
      self._outcome = "-" .. self._failure
    end
    if not self._outcome and waits then P.pause(round) end
    round = round + 1
  until self._outcome or not waits
  if self._outcome then
    if self._outcome:sub(1, 1) == "+" then self.digest = self._outcome:sub(2) end
    self._f.settle(self._s, self.digest or nil)
  end
end

--- Go on with the save for its share (pace.share) of the time that passed since the last call. Time that was not used,
-- or was overdrawn, is added to the next call's (_credit).
local function progress(self)
  local at = now()
  local share = self._s.a.pace or M.pace.share
  self._credit = math.min(M.pace.most * math.max(1, share / M.pace.share), self._credit + share * (at - self._looked))
  if self._credit > 0 then
    advance(self, false, self._credit)
    self._credit = self._credit - (now() - at)
  end
  self._looked = now()
end

--- Whether the save has ended, well or not. Does not wait.
function AsyncSave:done()
  progress(self)
  return self._outcome ~= false
end

--- What went wrong, as a text; nil: nothing, or it has not ended.
function AsyncSave:error() return self._outcome and self._outcome:match "^%-(.*)" or nil end

--- Wait until the checkpoint is on the disk: its digest. A failure is an error. Collective: all ranks call it.
function AsyncSave:wait()
  P.sparing(advance, self, true)
  self._told = true
  if self:error() then
    errors.raise { code = self._code, name = self._name, where = "",
      message = ("%s: '%s' was not saved: %s"):format(self._s.func, self.path, self:error()) }
  end
  return self.digest
end

-- -- one after the other ----------------------------------------------------------------------------------------------

--- Wait for the save that is under way, if there is one: two never run beside each other. A failure that nobody was
--- told is an error now. Collective.
function M.settle()
  local last = state.saves and state.saves.last
  if not last or last._told then return end
  P.sparing(advance, last, true)
  if not last._told then last:wait() end
end

--- Go on with the last save, if it has not ended. Steps and other calls that a training program makes often call it.
local function come_by()
  local last = state.saves.last
  if not last._outcome then progress(last) end
end

--- The group through which the saves of a group agree.
local function group_for(group)
  local ranks = {}
  for r = 1, group:size() do ranks[r] = r - 1 end
  group._saves = group._saves or group:new_group(ranks, group.name .. "-saves")
  return group._saves
end

--- See save.lua. Returns the handle. Collective.
function M.start(s, functions)
  local save = AsyncSave(s, functions)
  if s.group then save._group = group_for(s.group) end
  local ok, err = xpcall(save._take, P.locate, save)
  if not ok then
    give_up(save)
    fail(save, err)
  end
  state.saves = { last = save, progress = come_by, finish = M.settle }
  return save
end

signature.check("AsyncSave:", AsyncSave, { done = "self: object", wait = "self: object", error = "self: object" })

return M
