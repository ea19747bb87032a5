-- summary.lua: numbers of a run as an event file, which TensorBoard reads, and as lines of JSON, which
-- `perilune compare` draws.
--
-- The event file is a list of records: length (8 bytes), checksum of the length (4), the record, its checksum (4). A
-- record is a protocol-buffer message Event: 1 wall time (double), 2 step (varint), 3 version of the file (text, of
-- the first one), 5 Summary: a list (1) of Value: 1 tag (text), 2 number (float). The checksum is the CRC-32C, rotated
-- and added to a constant, so that checksums of checksums are none.
local bit = require "bit"
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local errors = require "perilune.errors"
local signature = require "perilune.signature"
local quoted = require("perilune.text").json.string

local SummaryWriter = util.seal(util.class "SummaryWriter")

-- -- records ----------------------------------------------------------------------------------------------------------

local crc_table = ffi.new "uint32_t[256]"
for i = 0, 255 do
  local x = i
  for _ = 1, 8 do x = bit.bxor(bit.rshift(x, 1), bit.band(-bit.band(x, 1), 0x82f63b78)) end
  crc_table[i] = x
end

--- The masked CRC-32C of a text, as 4 bytes.
local function checksum(text)
  local x = -1
  for i = 1, #text do x = bit.bxor(crc_table[bit.band(bit.bxor(x, text:byte(i)), 255)], bit.rshift(x, 8)) end
  x = bit.bnot(x)
  local masked = bit.bor(bit.rshift(x, 15), bit.lshift(x, 17)) + 0xa282ead8
  return ffi.string(ffi.new("uint32_t[1]", masked % 2 ^ 32), 4)
end

local function varint(n)
  local out = {}
  while n >= 128 do
    out[#out + 1] = string.char(n % 128 + 128)
    n = math.floor(n / 128)
  end
  return table.concat(out) .. string.char(n)
end

--- A field of bytes.
local function bytes(number, text) return string.char(number * 8 + 2) .. varint(#text) .. text end

local function double(number, x) return string.char(number * 8 + 1) .. ffi.string(ffi.new("double[1]", x), 8) end

local function write_event(self, fields)
  local record = double(1, os.time()) .. fields
  local length = ffi.string(ffi.new("uint64_t[1]", #record), 8)
  local ok, why = self._file:write(length, checksum(length), record, checksum(record))
  if not ok then P.fail(("SummaryWriter: %s: %s"):format(self.path, why)) end
end

-- -- the writer -------------------------------------------------------------------------------------------------------

local files = 0

local ENOENT = 2
--- A file of a folder that is made if it is not there.
local function open(path, mode)
  local file, why, number = io.open(path, mode)
  if number == ENOENT then
    P.check(P.C.peri_file_write(path, "", 0, true))
    file, why = io.open(path, mode)
  end
  if not file then P.fail("SummaryWriter: " .. why) end
  return file
end

--- folder: where the event file goes; TensorBoard takes all files of a folder for one run. log: the file of lines, to
--- whose end lines are added. overwrite: the log begins anew instead. One of folder and log at least.
function SummaryWriter:init(args)
  local a = util.named("SummaryWriter", args, { folder = util.optional.string, log = util.optional.string,
    overwrite = false })
  if not (a.folder or a.log) then P.fail "SummaryWriter: there is neither a folder nor a log; wanted one of them" end
  if a.overwrite and not a.log then P.fail "SummaryWriter: overwrite is about the log, and there is none" end
  self.path, self._file, self._log = false, false, a.log and open(a.log, a.overwrite and "w" or "a") or false
  if self._log then self._log:setvbuf "line" end
  if not a.folder then return end
  files = files + 1
  self.path = ("%s/events.out.tfevents.%010d.perilune.%d.%d"):format(a.folder, os.time(),
    tonumber(P.C.peri_time_ns() % 1000000007), files)
  self._file = open(self.path, "wb")
  write_event(self, bytes(3, "brain.Event:2"))
end

--- A line of the log: {"step":7,"loss":0.5}. JSON has no word for NaN and infinity: they are null.
local function line_of(step, list)
  local parts = { ('"step":%.0f'):format(step) }
  for _, x in ipairs(list) do
    parts[#parts + 1] = ("%s:%s"):format(quoted(x[1]), math.abs(x[2]) < math.huge
      and ("%.14g"):format(x[2]) or "null")
  end
  return "{" .. table.concat(parts, ",") .. "}\n"
end

--- Every number in a table, under its key, in tables within it under "outer/inner".
local function collect(values, prefix, out)
  for key, value in util.ordered(values) do
    local tag = prefix .. tostring(key)
    if type(value) == "table" then collect(value, tag .. "/", out)
    elseif type(value) == "number" then out[#out + 1] = { tag, value } end
  end
  return out
end

local function add(self, step, list)
  if not (self._file or self._log) then P.fail(("SummaryWriter: %s is closed"):format(self.path or "its log")) end
  if step ~= math.floor(step) or step < 0 or step > 2 ^ 53 then
    P.fail(("SummaryWriter: step is %g, allowed: whole numbers 0..2^53"):format(step))
  end
  if self._log then
    local ok, why = self._log:write(line_of(step, list))
    if not ok then P.fail("SummaryWriter: the log: " .. why) end
  end
  if not self._file then return end
  local values = {}
  for i, x in ipairs(list) do
    values[i] = bytes(1, bytes(1, x[1]) .. string.char(2 * 8 + 5) .. ffi.string(ffi.new("float[1]", x[2]), 4))
  end
  write_event(self, string.char(2 * 8) .. varint(step) .. bytes(5, table.concat(values)))
end

--- A number of a step.
function SummaryWriter:add_scalar(tag, value, step)
  if type(value) ~= "number" then
    P.fail(("SummaryWriter:add_scalar: value is %s, wanted a number"):format(errors.kind(value)))
  end
  add(self, step, { { tag, value } })
end

--- All numbers of a table, such as metric:compute() or a line of a log; what is no number is left out.
function SummaryWriter:add_scalars(values, step) add(self, step, collect(values, "", {})) end

--- What was added is in the event file; lines of the log are there at once.
function SummaryWriter:flush()
  if self._file then self._file:flush() end
end

--- The files are complete.
function SummaryWriter:close()
  for _, file in ipairs { "_file", "_log" } do
    if self[file] then self[file]:close() end
    self[file] = false
  end
end

signature.check("SummaryWriter:", SummaryWriter, { add_scalar = "self: table, tag: string, value: any, step: number",
  add_scalars = "self: table, values: table, step: number" })

return SummaryWriter
