-- mc_moment.lua: of which map the rows of tables of raw ids are. A map and the rows that it gives to ids belong
-- together: with another map, or the same one some steps before or after, ids see what others learned. So files of rows
-- say which map they are of (its mark, see peri_collision_mark), and what does not go together is neither used,
-- flushed, saved nor loaded.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local mc_map = require "perilune.embed.mc_map"
local moment_of = require("perilune.tensor.sharded").moment_of
local signature = require "perilune.signature"
local C, check = P.C, P.check

local sum, iteration = ffi.new "uint64_t[1]", ffi.new "int64_t[1]"

--- The mark of a map: { sum =, iteration = }.
local function mark_of(map)
  check(C.peri_collision_mark(mc_map.ptr(map), sum, iteration))
  return { sum = sum[0], iteration = tonumber(iteration[0]) }
end

local Moment = util.class "CollisionMoment"

--- CollisionMoment(title, tables): of a module whose messages begin with `title`. tables: a list of { name =, map =
--- function() -> the map of its rows on this rank, or nil, buckets = function() -> its first bucket, and how many, file
--- = function() -> what tbe._file_of says of these rows, weight = name of its weights in a state_dict, from the module
--- on }.
---
--- open: rows and maps are to be compared before the rows are used; then used() is called. Where ranks share the tables
--- all have the same.
function Moment:init(title, tables, open)
  self._title, self._tables, self._by_name, self.open = title, setmetatable(tables, {}), setmetatable({}, {}), open
  for _, t in ipairs(tables) do self._by_name[t.name] = t end
end

--- What a table's file had when it was opened, while nobody has brought its map; false: nothing is missing. Asked once.
local function missing_map(t)
  if t.missing == nil then
    local file = t.file()
    t.missing = file and file.flush > 0 and file or false
  end
  return t.missing
end

local function steps(n) return ("%d step%s"):format(n, n == 1 and "" or "s") end

--- The mark that rows were noted with, if it is of the buckets that are here.
local function noted_mark(t, noted)
  local first, n = t.buckets()
  return noted and noted.first == first and noted.n == n and noted or nil
end

--- An error if rows were loaded that are known to be those of another map than the one that is here.
local function check_loaded(self, t, map)
  local noted = t.rows_loaded and noted_mark(t, t.rows_mark)
  local mark = noted and map and mark_of(map)
  if not mark or mark.sum == noted.sum then return end
  P.fail(("%s: table '%s': the weights that were loaded are those of a map that had made %s, and the map here has "
    .. "made %s%s: ids would see rows of other ids; load the map of the same state_dict too"):format(self._title,
    t.name, steps(noted.iteration), steps(mark.iteration), mark.iteration == noted.iteration and " and knows other ids"
      or ""))
end

--- What keeps the rows in the file of table `t` from being used with the map that is here, in words; nil: nothing.
local function file_problem(self, t, map)
  local file = missing_map(t)
  local mark = file and map and mark_of(map)
  if not mark or mark.sum == file.sum then return nil end
  return ("%s: table '%s': row file '%s' has, since flush %d (iteration %d), the rows of a map of raw ids that "
    .. "had made %s, and the map here %s: ids would see rows of other ids. Load the maps of that flush "
    .. "(load_state_dict(state, false) with a state_dict that was taken between that flush and the next step), or "
    .. "a whole state_dict, or remove all files to start from scratch"):format(
    self._title, t.name, file.path, file.flush, file.iteration, steps(file.ids_iteration), mark.iteration == 0
      and "is new"
    or mark.iteration == file.ids_iteration and "is another one of as many" or "has made "
    .. steps(mark.iteration))
end

--- An error unless the rows that are here are those of the maps that are here. Local.
function Moment:check()
  for _, t in ipairs(self._tables) do
    local map = t.map()
    local problem = t.known or file_problem(self, t, map)
    if problem then P.fail(problem) end
    if map then t.missing = false end
    check_loaded(self, t, map)
  end
end

--- What the files of this rank lack, by table: see `know`.
function Moment:problems()
  local found = {}
  for _, t in ipairs(self._tables) do found[t.name] = file_problem(self, t, t.map()) end
  return found
end

--- What `problems` found on some rank when the files were opened: until the table's map is loaded, check says it on
--- ranks that have no rows of the table, too.
function Moment:know(found)
  for name, problem in util.ordered(found) do self._by_name[name].known = problem end
end

--- The rows are used with the maps from now on.
function Moment:used()
  self.open = false
  for _, t in ipairs(self._tables) do t.rows_loaded = false end
end

--- What copies of table `name`'s rows are noted with (tensor/sharded.lua): the mark of this rank's map, and of which
--- buckets that is.
function Moment:mark(name)
  local t = self._by_name[name]
  local map = t.map()
  local mark = map and mark_of(map)
  if mark then mark.first, mark.n = t.buckets() end
  return mark or nil
end

--- An error if a map that is to be loaded, or its mark, does not go with the rows of table `name`. rows: the weights
--- that will be loaded too, if any.
function Moment:try(name, map, rows)
  local t = self._by_name[name]
  local file, mark = missing_map(t), mc_map.is(map) and mark_of(map) or map
  if rows or t.rows_loaded then
    local given = t.rows_mark
    if rows then given = moment_of(rows) end
    local noted = noted_mark(t, given)
    if not noted or noted.sum == mark.sum then return end
    P.fail(("%s: table '%s': the weights that are given are those of a map that had made %s, and the map has made "
      .. "%s%s: ids would see rows of other ids; load both from one state_dict"):format(self._title, name,
      steps(noted.iteration), steps(mark.iteration), mark.iteration == noted.iteration and " and knows other ids"
        or ""))
  end
  local own = file or mark_of(t.map())
  if mark.sum == own.sum then return end
  if file then
    P.fail(("%s: table '%s': the map has made %s, and row file '%s' has, since flush %d (iteration %d), the rows of a "
      .. "map that had made %s%s: ids would see rows of other ids; load a map of that flush, or the weights of this "
      .. "one's state_dict too"):format(self._title, name, steps(mark.iteration), file.path, file.flush, file.iteration,
      steps(file.ids_iteration), mark.iteration == file.ids_iteration and " and knew other ids" or ""))
  end
  P.fail(("%s: table '%s': the map that is given has made %s, and the rows are those of the map that is here, which "
    .. "has made %s%s: ids would see rows of other ids; load the weights ('%s') of the same state_dict too"):format(
    self._title, name, steps(mark.iteration), steps(own.iteration), mark.iteration == own.iteration
      and " and knows other ids" or "", t.weight))
end

--- Table `name` has taken the map, the rows, or both, that a state_dict had.
function Moment:took(name, map, rows)
  local t = self._by_name[name]
  if not map and not rows then return end
  if rows then t.rows_loaded, t.rows_mark = true, moment_of(rows) or false end
  if map then t.missing, t.known, t.rows_loaded = false, false, false end
  self.open = true
end

--- Before a flush: the rows are said to be those of the maps. mark(t, sum, iteration): writes it down for an entry of
--- `tables`.
function Moment:flush(mark)
  self:check()
  for _, t in ipairs(self._tables) do
    local map = t.file() and t.map()
    if map then
      local now = mark_of(map)
      mark(t, now.sum, now.iteration)
    end
  end
end

--- Names of a state_dict that have the weights of table `name`: of the module whose maps are at `path`.
function Moment:weight_name(name, path, below)
  local base = path:sub(1, #path - #below)
  return base .. self._by_name[name].weight
end

signature.check("CollisionMoment:", Moment, { init = "self: table, title: string, tables: list, open: boolean",
  try = "self: table, name: string, map: any, rows: any", took = "self: table, name: string, map: any, rows: any",
  flush = "self: table, mark: callable", weight_name = "self: table, name: string, path: string, below: string" })

return Moment
