-- tracker.lua: which rows of a model changed since some checkpoint of it. It has marks on every table batch, which set
-- the bits of rows before they change (perilune/embed.h, peri_row_marks), and *points*: for some checkpoints, by their
-- digests, the rows that changed since.
--
--     marks               point of save-1   point of save-2
--     bits since the      bits since        bits since        a save takes the bits of all marks and adds them to every
--                         point; its own
--     last save           save-1            save-2            point then begins with none. A save that fails leaves the
--                         points as they are
--
-- An increment of save-2 has the rows of the point of save-2. Rows of a table batch that a point does not know count as
-- changed.
local P = require "perilune.ffi"
local util = require "perilune.util"
local changes = require "perilune.embed.changes"

local M = {}
local POINTS = 4 -- that are kept, the newest

local trackers = setmetatable({}, { __mode = "k" })

--- The tracker of a model (any object); nil: it has none. A new one if `make`.
function M.tracker_of(model, make)
  if not trackers[model] and make then trackers[model] = { marks = {}, points = {} } end
  return trackers[model]
end

--- The place of a checkpoint's point; nil: there is none.
local function index_of(tracker, digest)
  for i, point in ipairs(tracker.points) do
    if point.digest == digest then return i end
  end
end

function M.has(tracker, digest) return index_of(tracker, digest) ~= nil end

--- Begin a save of what has these sources (changes.lua): rows that change from now on are changed since it. Returns its
--- point, which counts when it is settled.
function M.begin(tracker, sources)
  local taken, fresh = {}, {}
  for key, marks in util.ordered(tracker.marks) do
    if changes.alive(marks) then taken[key] = P.lasting(changes.take, marks)
    else
      tracker.marks[key] = nil
      for _, point in ipairs(tracker.points) do point.bits[key] = nil end
    end
  end
  for _, point in ipairs(tracker.points) do
    for key, bits in util.ordered(point.bits) do
      if taken[key] then changes.join(bits, taken[key]) end
    end
  end
  for _, source in ipairs(sources) do
    local key = changes.key(source)
    if not tracker.marks[key] then tracker.marks[key] = changes.marks(source) end
    fresh[key] = fresh[key] or true
  end
  local point = { digest = false, bits = {} }
  for key in util.ordered(fresh) do point.bits[key] = P.lasting(changes.none, tracker.marks[key]) end
  table.insert(tracker.points, 1, point)
  return point
end

--- The point does not know the rows of a source: all count as changed.
function M.forget(point, source) point.bits[changes.key(source)] = nil end

--- The save has become the checkpoint `digest`; nil: it failed.
function M.settle(tracker, point, digest)
  point.digest = digest or false
  for i = #tracker.points, 1, -1 do
    local p = tracker.points[i]
    if p == point and not digest or p ~= point and p.digest == digest or i > POINTS then
      table.remove(tracker.points, i)
    end
  end
end

--- The rows of a source that changed since checkpoint `digest`, as they were at the last M.begin: i64, ascending,
--- counted from first_row on; nil: all.
function M.rows(tracker, digest, source, first_row)
  local point = tracker.points[index_of(tracker, digest) or 0]
  local bits = point and point.bits[changes.key(source)]
  return bits and changes.rows(source, bits, first_row) or nil
end

return M
