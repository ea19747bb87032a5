-- save.lua: all ranks write one checkpoint.
--
-- 1. Every rank lists the pieces that it could write. A piece that several ranks have (the dense part, replicas) is
-- written by one of them.
-- 2. Rank 0 makes a folder, and every rank writes its pieces into files of its own there.
-- 3. Rank 0 gets the parts of the manifest, and gives the folder its name. What one rank meets is an error on all, and
-- no checkpoint.
--
-- An increment has of tables that mark their rows (embed/changes.lua) those that changed since its parent, of maps of
-- raw ids the rows that differ from the parent's (maps.lua), and everything else whole.
--
-- With async = true the second step and the third go on behind the training: see async.lua.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
local Tensor = require "perilune.tensor"
local parts_of = require "perilune.checkpoint.parts"
local pieces_of = require "perilune.checkpoint.pieces"
local together = parts_of.together
local values = require "perilune.checkpoint.values"
local changes = require "perilune.embed.changes"
local tracker_of = require "perilune.checkpoint.tracker"
local maps = require "perilune.checkpoint.maps"
local Checkpoint = require "perilune.checkpoint.reader"
local async = require "perilune.checkpoint.async"
local C, check = P.C, P.check

local M = {}

local _, _, _, wrap_writer = P.handle("peri_checkpoint_writer", {}, nil, "a writer of a checkpoint")
local _, _, _, wrap_folder = P.handle("peri_checkpoint_folder", {}, nil, "a folder of a checkpoint")
local _, _, _, wrap_publishing = P.handle("peri_checkpoint_publishing", {}, nil, "the publishing of a checkpoint")
local publishing_out = ffi.new "peri_checkpoint_publishing *[1]"
local writer_out, folder_out = ffi.new "peri_checkpoint_writer *[1]", ffi.new "peri_checkpoint_folder *[1]"
local text_out = ffi.new "const char *[1]"
local tensor_of_piece, region_of_piece = P.struct "peri_checkpoint_tensor", P.struct "peri_checkpoint_region"
local BLOCK_BYTES = 16 * 2 ^ 20 -- of rows that are read from a shard that is no tensor, or picked from one

-- -- writing ----------------------------------------------------------------------------------------------------------

local function announce(writer, p)
  local t, r = tensor_of_piece, region_of_piece
  p = pieces_of.whole(p)
  P.clear(r)
  t.name, t.dtype, t.ndim = p.name, C.peri_dtype_parse(p.dtype), #p.shape
  for d = 1, #p.shape do t.shape[d - 1], r.offset[d - 1], r.extent[d - 1] = p.shape[d], p.offset[d], p.size[d] end
  if p.columns then r.column, r.columns = p.columns[1], p.columns[2] end
  if p.list then r.rows, r.listed = p.list.name, pieces_of.listed(p) end
  check(C.peri_checkpoint_writer_add(writer, t, r))
end

--- Rows of a shard that is no tensor, block by block.
local function put_rows(writer, p)
  local rows, size = p.size[1], util.copy(p.size)
  local step = math.max(1, math.floor(BLOCK_BYTES / math.max(1, p.bytes / math.max(1, rows))))
  for row = 0, rows - 1, step do
    size[1] = math.min(step, rows - row)
    local block = Tensor.empty(size, p.dtype, p.device)
    p.shard.read(row, block)
    check(C.peri_checkpoint_writer_put(writer, Tensor.ptr(block)))
    block:release()
  end
end

--- The rows of a table in an increment, block by block.
local function put_listed(writer, p)
  local n, source, rows = pieces_of.listed(p), pieces_of.source_of(p), p.list.rows(p, 0)
  local step = math.max(1, math.floor(BLOCK_BYTES / math.max(1, p.bytes / math.max(1, n))))
  for i = 0, n - 1, step do
    local block = changes.read(source, rows:slice(1, i, math.min(i + step, n)))
    check(C.peri_checkpoint_writer_put(writer, Tensor.ptr(block)))
    block:release()
  end
  rows:release()
end

local function put(writer, p)
  local tensor = not p.each and not p.list and pieces_of.tensor_of(p)
  if tensor then
    check(C.peri_checkpoint_writer_put(writer, Tensor.ptr(tensor)))
    if p.rows then tensor:release() end
    return
  end
  p = pieces_of.whole(p)
  if p.each then
    p.each(function(block) check(C.peri_checkpoint_writer_put(writer, Tensor.ptr(block))) end)
  elseif p.list then put_listed(writer, p)
  else put_rows(writer, p) end
end

--- The pieces, each list of rows in front of the first piece that has it: pieces of the same rows of a table share one.
--- A list of evicted ids has the numbers of the list of rows of its piece.
local function with_lists(rank, pieces)
  local all, n = {}, 0
  for _, p in ipairs(pieces) do
    local list = p.list
    if list and not list.name then
      list.name = ("%%rows/%d/%d"):format(rank, n)
      all[#all + 1] = list
      if list.evicted then
        all[#all + 1] = { name = ("%%evicted/%d/%d"):format(rank, n), tensor = list.evicted,
          bytes = 8 * list.evicted:numel() }
      end
      n = n + 1
    end
    all[#all + 1] = p
  end
  return all
end

--- A writer of this rank's files to which its pieces are announced: its handle.
local function writer_of(folder, rank, pieces, file_bytes)
  check(C.peri_checkpoint_folder_await(folder))
  check(C.peri_checkpoint_writer_new(folder, ("rank-%d"):format(rank), file_bytes, writer_out))
  local handle = wrap_writer(writer_out[0])
  for _, p in ipairs(pieces) do announce(handle.ptr, p) end
  return handle
end

--- What the writer has written is on the disk: a text that says where this rank's part of the manifest is.
local function part_of(writer)
  check(C.peri_checkpoint_writer_finish(writer))
  check(C.peri_checkpoint_writer_part(writer, text_out))
  return ffi.string(text_out[0])
end

--- Write this rank's files; returns what part_of does.
local function write(folder, rank, pieces, file_bytes)
  local handle = writer_of(folder, rank, pieces, file_bytes)
  local ok, result = xpcall(function()
    for _, p in ipairs(pieces) do put(handle.ptr, p) end
    return part_of(handle.ptr)
  end, P.locate)
  handle:release()
  if not ok then error(result, 0) end
  return result
end

local arguments = {
  values = util.optional,         -- plain numbers, texts and tables of them, kept beside: what checkpoint.load returns
  replace = false,                -- whether a checkpoint that is there already is replaced
  group = util.optional,          -- the ranks that save together; default: the world, if one was joined
  file_bytes = util.optional,     -- of a file, at most (a row may be larger); default: 16 GiB
  increments = false,             -- whether increments of this checkpoint will be saved: from now on the rows that
                                  -- change are marked
  increment_of = util.optional.string, -- path of the checkpoint, saved or loaded with increments = true or an increment
                                       -- itself, of which this one is to be an increment, in the same folder
  async = false,                  -- return at once, with a handle: see checkpoint/async.lua
  pace = util.optional.number,    -- with async, the share of the time that copying takes: above 0, at most 1; default:
                                  -- 0.01
}

-- -- increments -------------------------------------------------------------------------------------------------------

--- What an increment is one of: the parent, open, so that nobody removes it meanwhile. alone: without what it is an
--- increment of itself.
local function open_parent(func, path, a, alone)
  local parent = Checkpoint(a.increment_of, alone)
  if parent:digest() == "" then
    P.fail(("%s: increment_of: '%s' is a safetensors file, wanted a checkpoint"):format(func, parent.path))
  end
  local function folder_of(p) return p:gsub("/+$", ""):match "^(.*)/[^/]*$" or "." end
  if folder_of(path) ~= folder_of(a.increment_of) then
    P.fail(("%s: '%s' is to be an increment of '%s', which lies in another folder; parents are looked for beside "
      .. "their increments"):format(
      func, path, a.increment_of))
  end
  return parent
end

--- The digest by which a tracker knows the checkpoint at `path`: its own, or that of the increment for which it stands;
--- nil: it does not.
local function known_as(tracker, path)
  local identity = P.struct "peri_checkpoint_info"
  if not tracker or C.peri_checkpoint_identify(path, identity) < 0 then return nil end
  local own, same = ffi.string(identity.digest), ffi.string(identity.same_as)
  return tracker_of.has(tracker, own) and own or same ~= "" and tracker_of.has(tracker, same) and same or nil
end

--- Leave the rows out that are as the parent has them. Pieces of the same rows of a table share one list of them. Which
--- rows these are is asked again when they are written: until then a list would have 8 bytes for each of them.
local function leave_out(parent, tracker, pieces)
  local since, lists = known_as(tracker, parent.path), {}
  local function rows_of(p, first)
    return P.lasting(tracker_of.rows, tracker, since, pieces_of.source_of(p), first)
  end
  --- The list of the rows of marked piece p, x as a whole; nil: all of them.
  local function list_of(p, x)
    local source = pieces_of.source_of(x)
    local key = ("%s %d %d"):format(changes.key(source), source.table, x.offset[1])
    if lists[key] == nil then
      local rows = rows_of(x, 0)
      local n = rows and rows:numel() or x.size[1]
      if rows then rows:release() end
      lists[key] = n < x.size[1] and pieces_of.list(n, { from = p, rows = rows_of, name = false })
    end
    return lists[key] or nil
  end
  for i, p in ipairs(pieces) do
    local x = (p.marked or maps.is_state(p)) and pieces_of.whole(p)
    if x and parent:_has_alike(x.name, x.dtype, x.shape, x.columns) then
      if p.marked then
        p.list = list_of(p, x)
        if p.list then p.bytes = p.bytes / x.size[1] * pieces_of.listed(p) end
      else
        local list, n = maps.leave_out(parent, x)
        x.list, pieces[i] = pieces_of.list(n, list), x
      end
    end
  end
end

--- The first model among the parts, whose tracker counts for all; nil: there is none.
local function model_of(parts)
  for _, part in ipairs(parts) do
    if part.module then return part.object end
  end
end

--- The tracker of these parts; nil: there is no model, or nothing is to be marked.
local function tracker_for(func, parts, a, parent)
  local model = model_of(parts)
  local tracker = model and tracker_of.tracker_of(model, a.increments)
  if not parent then return tracker end
  if not known_as(tracker, parent.path) then
    P.fail(("%s: increment_of: which rows changed since '%s' is not known; save or load a checkpoint with increments "
      .. "= true, and go on from there"):format(func, parent.path))
  end
  return tracker
end

--- Sources of the pieces, one of each table batch: these mark their rows.
local function sources_of(pieces)
  local list, seen = {}, {}
  for _, p in ipairs(pieces) do
    local source = pieces_of.source_of(p)
    local key = source and changes.key(source)
    p.marked = key and true
    if key and not seen[key] then list[#list + 1], seen[key] = source, true end
  end
  return list
end

--- What the manifest says beside tensors; the texts are s's.
local function facts_of(s)
  local facts = P.struct "peri_checkpoint_config"
  s.of = s.parent and s.parent:digest()
  facts.values, facts.parent, facts.increment = s.text, s.of, s.parent and s.parent:increment() + 1 or 0
  return facts
end

--- Join the parts of all ranks to the checkpoint: its digest. pause (or nil): called as long as it goes on, which takes
--- no time of this thread then.
local function publish(s, all, pause)
  local list, digest = ffi.new("const char *[?]", #all), ffi.new "char[33]"
  for i, part in ipairs(all) do list[i - 1] = part end
  local facts = facts_of(s)
  if not pause then
    check(C.peri_checkpoint_publish(s.folder, s.path, list, #all, facts, s.a.replace, digest))
    return ffi.string(digest)
  end
  check(C.peri_checkpoint_publishing_new(s.folder, s.path, list, #all, facts, s.a.replace, publishing_out))
  local handle = wrap_publishing(publishing_out[0])
  s.text = nil
  while check(C.peri_checkpoint_publishing_test(handle.ptr, digest)) == C.PERI_PENDING do pause() end
  handle:release()
  return ffi.string(digest)
end

--- Ranks that save together save under the same path, which they told.
local function one_path(func, all)
  for r, told in ipairs(all) do
    if told[3] ~= all[1][3] then
      P.fail(("%s: the path is '%s' on rank 0 and '%s' on rank %d, wanted the same on all ranks"):format(func,
        all[1][3], told[3], r - 1))
    end
  end
end

--- The first half of a save: what is to be written, and where. Collective.
local function begin(s, given)
  local group, func, a = s.group, s.func, s.a
  local trees, own, extra, models, rows, told, orders, given_values
  together(group, func, function()
    local parts, any = parts_of.list(func, given), false
    given_values = values.encode(a.values, func)
    s.pieces, trees, own, extra, models, rows = pieces_of.collect(func, parts, s.rank, group)
    for _, p in ipairs(s.pieces) do any = any or maps.is_state(p) end
    s.parent = a.increment_of and open_parent(func, s.path, a, not any) -- maps are compared with all of it
    s.tracker = tracker_for(func, parts, a, s.parent)
    s.point = s.tracker and tracker_of.begin(s.tracker, sources_of(s.pieces))
    if s.parent then leave_out(s.parent, s.tracker, s.pieces) end
    told = pieces_of.announcements(s.pieces)
  end)
  if s.parent then parts_of.one_digest(group, func, a.increment_of, s.parent:digest()) end
  local all = parts_of.to_first(group, func, { told, own, s.path, parts_of.random_state(), rows })
  together(group, func, function()
    if s.rank ~= 0 then return end
    one_path(func, all)
    orders = pieces_of.orders_of(util.map(all, function(of) return of[1] end))
    for name in util.ordered(own) do
      trees[name] = values.join { ranks = values.join(util.map(all, function(of) return of[2][name] end)) }
    end
    for _, of in ipairs(all) do
      for name, format in util.ordered(of[5]) do rows[name] = format end
    end
    s.text = values.join { parts = values.join(trees), rows = next(rows) and values.encode(rows, func, "rows") or nil,
      extra = values.join(extra), models = values.join(models), values = a.values ~= nil and given_values or nil,
      ranks = ("%d"):format(group and group:size() or 1),
      random = values.encode(util.map(all, function(of) return of[4] end), func, "random") }
  end)
  s.pieces = with_lists(s.rank, pieces_of.to_write(s.pieces, parts_of.from_first(group, func, orders)))
  together(group, func, function()
    if s.rank ~= 0 then return end
    check(C.peri_checkpoint_may_publish(s.path, facts_of(s), a.replace))
    check(C.peri_checkpoint_folder_new(s.path, folder_out))
    s.held = wrap_folder(folder_out[0])
    s.folder = ffi.string(C.peri_checkpoint_folder_path(s.held.ptr))
  end)
  s.folder = group and group:all_gather_object(s.folder or false, func)[1] or s.folder
end

--- Rank 0 joins the parts of all ranks: the digest.
local function join(s, all, pause)
  local digest = publish(s, all, pause)
  s.held:release() -- readers wait for it
  return digest
end

--- The second half: it returns when the checkpoint is there.
local function finish(s)
  local group, func = s.group, s.func
  local part = together(group, func, function() return write(s.folder, s.rank, s.pieces, s.a.file_bytes or 0) end)
  s.pieces = nil
  local all = parts_of.to_first(group, func, part)
  local digest = together(group, func, function() return s.rank == 0 and join(s, all) end)
  return group and group:all_gather_object(digest, func)[1] or digest
end

--- The save is over on this rank: it has become the checkpoint `digest`, or failed (nil).
local function settle(s, digest)
  if s.held then s.held:release() end
  if s.point then tracker_of.settle(s.tracker, s.point, digest) end
  if s.parent then s.parent:close() end
  s.held, s.point, s.parent = nil, nil, nil
end

--- The parts have been loaded from checkpoint `digest` as a whole: mark the rows that change from now on. as_is: names
--- of the tensors that are as the checkpoint has them; rows of others count as changed.
function M.mark(parts, digest, as_is)
  local model = model_of(parts)
  if not model then return end
  local tracker, pieces = tracker_of.tracker_of(model, true), pieces_of.collect("checkpoint.load", parts, 0)
  local point = tracker_of.begin(tracker, sources_of(pieces))
  for _, p in ipairs(pieces) do
    if p.marked and not as_is[p.name] then tracker_of.forget(point, pieces_of.source_of(p)) end
  end
  tracker_of.settle(tracker, point, digest)
end

--- Whether this rank knows which rows of the parts changed since the checkpoint at `path`, so that an increment of it
--- can be saved.
function M.knows(parts, path)
  local model = model_of(parts_of.list("checkpoint.save", parts))
  return model ~= nil and known_as(tracker_of.tracker_of(model), path) ~= nil
end

--- See checkpoint.save.
function M.save(path, given, options)
  local func = "checkpoint.save"
  signature.value(func, "path", path, "string")
  local a = util.named(func, options or {}, arguments)
  parts_of.check_path(func, path)
  if a.pace and not (a.async and a.pace > 0 and a.pace <= 1) then
    P.fail(("%s: pace is %g, allowed with async = true: above 0, at most 1"):format(func, a.pace))
  end
  async.settle(func)
  local s = { func = func, path = path, a = a, group = parts_of.group(func, a.group) }
  s.rank = s.group and s.group:rank() or 0
  local ok, result = xpcall(function()
    begin(s, given)
    if a.async then
      return async.start(s, { writer_of = writer_of, put = put, part_of = part_of, join = join, settle = settle })
    end
    return finish(s)
  end, P.locate)
  if not (ok and a.async) then settle(s, ok and result or nil) end
  if not ok then error(result, 0) end
  return result
end

return M
