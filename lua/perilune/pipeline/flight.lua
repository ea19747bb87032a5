-- flight.lua: a batch stays as it is from when it is loaded until its forward pass. A script that fills one table, or
-- one tensor, again and again would otherwise train a batch with the numbers of the next one. A note of a batch holds
-- the values of its fields, and how often their memory had been changed in place (the versions that tensors have);
-- before a batch is used it is compared with its note.
--
-- The fields are those of the first batch (and of the first one on the device): names up to 3 tables deep. What changes
-- memory without Perilune's knowledge, such as a C library with a pointer to it, has no version and is not noticed.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local C = P.C

local DEEPEST = 3
local tensor, kjt, jt, kt = ffi.typeof "peri_tensor_ref", ffi.typeof "peri_kjt_ref", ffi.typeof "peri_jt_ref",
  ffi.typeof "peri_kt_ref"

--- How often the memory of a field's value has been changed in place; 0 for values that have none, and for handles that
--- were released.
local function version(x)
  if type(x) ~= "cdata" then return 0 end
  if ffi.istype(tensor, x) then return tonumber(C.peri_tensor_version(x.ptr)) end
  if ffi.istype(kjt, x) then return tonumber(C.peri_kjt_version(x.ptr)) end
  if ffi.istype(jt, x) then return tonumber(C.peri_jt_version(x.ptr)) end
  if ffi.istype(kt, x) then return tonumber(C.peri_kt_version(x.ptr)) end
  return 0
end

local function raw_field(x, key)
  if type(x) == "table" then return rawget(x, key) end
end

--- The fields of a batch: a list of their names, each a list of keys. Lazy awaitables are values, not tables of fields.
local function fields_of(x, keys, list)
  local names = util.is_plain(x) and #keys < DEEPEST and util.keys(x)
  if not names then
    list[#list + 1] = keys
    return list
  end
  for _, name in ipairs(names) do
    local inner = util.copy(keys)
    inner[#inner + 1] = name
    fields_of(rawget(x, name), inner, list)
  end
  return list
end

local template = [[
local field, version = ...
local function note(batch, values, versions)
  local x
%s
end
local function changed(batch, values, versions)
  local x
%s
end
return note, changed]]

--- note(batch, values, versions), which fills the two lists, and changed(batch, values, versions), which returns the
--- number of the first field that is another now, and whether it was changed in place. Written out: a loop would cut
--- the trace of a step.
local function compiled(fields)
  local notes, tests = {}, {}
  for i, keys in ipairs(fields) do
    local x = "batch"
    for _, key in ipairs(keys) do
      x = ("field(%s, %s)"):format(x, type(key) == "string" and ("%q"):format(key) or ("%.17g"):format(key))
    end
    notes[i] = ("  x = %s values[%d] = x versions[%d] = version(x)"):format(x, i, i)
    tests[i] = ("  x = %s if not rawequal(x, values[%d]) and x == x then return %d, false end "
      .. "if version(x) ~= versions[%d] then return %d, true end"):format(x, i, i, i, i)
  end
  local text = template:format(table.concat(notes, "\n"), table.concat(tests, "\n"))
  return assert(loadstring(text, "=perilune/pipeline/flight"))(raw_field, version)
end

local MOST = 100 -- fields; a batch of more is watched in these

local Flight = util.class "Flight"

--- Learns the fields of batches from `batch`.
function Flight:init(batch)
  local fields = fields_of(batch, {}, {})
  for i = #fields, MOST + 1, -1 do fields[i] = nil end
  self.fields = fields
  self.note, self.changed = compiled(fields)
end

--- A note for `take`; contexts have one each.
function Flight.new_note() return { flight = false, batch = false, values = {}, versions = {} } end

--- The batch of a context is as it should be now.
function Flight:take(context)
  local note = context.noted
  note.flight, note.batch = self, context.batch
  self.note(context.batch, note.values, note.versions)
end

--- An error of `who` unless the batch of a context is as it was noted.
function Flight.check(who, context)
  local note, batch = context.noted, context.batch
  local self = note.flight
  if not self or not rawequal(batch, note.batch) then return end
  local i, in_place = self.changed(batch, note.values, note.versions)
  if not i then return end
  local name = #self.fields[i] > 0 and ("field '%s' of batch %d"):format(table.concat(self.fields[i], "."),
    context.index)
    or ("batch %d"):format(context.index)
  P.fail(("%s: %s was %s after the batch was loaded and before its forward pass; the pipeline loads batches ahead, so "
    .. "each has to be %s")
    :format(who, name, in_place and "changed in place" or "replaced", in_place and "of tensors of its own"
      or "a table of its own"))
end

return Flight
