-- Event files: records, checksums and messages, read by the format's definition (TensorBoard's own reader has read
-- them, too).
local ffi = require "ffi"
local bit = require "bit"
local peri = require "perilune"

local folder = os.tmpname() .. "_events"
teardown(function() os.execute("rm -rf " .. folder) end)

-- CRC-32C bit by bit, masked as the format says.
local function crc(text)
  local x = 0xffffffff
  for i = 1, #text do
    x = bit.bxor(x, text:byte(i))
    for _ = 1, 8 do x = bit.bxor(bit.rshift(x, 1), bit.band(x, 1) == 1 and 0x82f63b78 or 0) end
  end
  return bit.bnot(x) % 2 ^ 32
end
local function masked(text)
  local x = crc(text)
  return (math.floor(x / 2 ^ 15) + x % 2 ^ 15 * 2 ^ 17 + 0xa282ead8) % 2 ^ 32
end
local function number(ctype, text) return tonumber(ffi.new(ctype .. "[1]", ffi.cast(ctype .. " *", text)[0])[0]) end

-- The fields of a message: { number, value }.
local function fields(text)
  local list, at = {}, 1
  local function varint()
    local x, scale = 0, 1
    while true do
      local b = text:byte(at)
      x, scale, at = x + b % 128 * scale, scale * 128, at + 1
      if b < 128 then return x end
    end
  end
  while at <= #text do
    local key = varint()
    local kind = key % 8
    local value
    if kind == 0 then value = varint()
    else
      local n = kind == 1 and 8 or kind == 5 and 4 or varint()
      value, at = text:sub(at, at + n - 1), at + n
    end
    list[#list + 1] = { (key - kind) / 8, value }
  end
  return list
end

local function events(path)
  local text = assert(io.open(path, "rb")):read "*a"
  local list, at = {}, 1
  while at <= #text do
    local length = number("uint64_t", text:sub(at, at + 7))
    local record = text:sub(at + 12, at + 11 + length)
    assert.equal(masked(text:sub(at, at + 7)), number("uint32_t", text:sub(at + 8, at + 11)))
    assert.equal(masked(record), number("uint32_t", text:sub(at + 12 + length, at + 15 + length)))
    list[#list + 1], at = fields(record), at + 16 + length
  end
  return list
end

describe("SummaryWriter", function()
  it("writes what TensorBoard reads", function()
    assert.equal(0xe3069283, crc "123456789") -- the check value of CRC-32C
    local writer = peri.nn.metrics.SummaryWriter { folder = folder }
    writer:add_scalar("loss", 0.5, 300)
    writer:add_scalars({ auc = 0.25, speed = { step = 2, name = "x" } }, 2 ^ 40)
    writer:close()
    local list = events(writer.path)
    assert.equal(3, #list)
    assert.same({ 3, "brain.Event:2" }, list[1][2])
    assert.is_true(math.abs(number("double", list[2][1][2]) - os.time()) < 60)
    local function scalars(event)
      local out = { step = event[2][2] }
      for _, value in ipairs(fields(event[3][2])) do
        local v = fields(value[2])
        out[v[1][2]] = number("float", v[2][2])
      end
      return out
    end
    assert.same({ step = 300, loss = 0.5 }, scalars(list[2]))
    assert.same({ step = 2 ^ 40, auc = 0.25, ["speed/step"] = 2 }, scalars(list[3]))
  end)

  it("appends lines of JSON to a log", function()
    local path = folder .. "/made/run.jsonl"
    local function add(...)
      local writer = peri.nn.metrics.SummaryWriter { log = path }
      writer:add_scalars(...)
      return writer
    end
    local writer = add({ auc = 0.25, loss = 1 / 3, name = "x", speed = { ["a\"b"] = 2 } }, 7)
    writer:add_scalar("loss", 0 / 0, 2 ^ 40) -- each line is there at once
    local first = '{"step":7,"auc":0.25,"loss":0.33333333333333,"speed/a\\"b":2}\n{"step":1099511627776,"loss":null}\n'
    assert.equal(first, io.open(path):read "*a")
    writer:close()
    assert.error_matches(function() writer:add_scalar("a", 1, 1) end, "its log is closed")
    add({ loss = -1 / 0 }, 0):close()
    assert.equal(first .. '{"step":0,"loss":null}\n', io.open(path):read "*a")
    writer = peri.nn.metrics.SummaryWriter { log = path, overwrite = true }
    writer:add_scalar("loss", 2, 1)
    writer:close()
    assert.equal('{"step":1,"loss":2}\n', io.open(path):read "*a")
  end)

  it("says what is wrong", function()
    assert.error_matches(function() peri.nn.metrics.SummaryWriter {} end, "neither a folder nor a log")
    assert.error_matches(function() peri.nn.metrics.SummaryWriter { folder = folder, overwrite = true } end,
      "overwrite is about the log, and there is none")
    assert.error_matches(function() peri.nn.metrics.SummaryWriter { log = "/proc/nowhere/a" } end, "/proc/nowhere/a")
    local writer = peri.nn.metrics.SummaryWriter { folder = folder }
    assert.error_matches(function() writer:add_scalar("a", "b", 1) end, "value is .*, wanted a number")
    assert.error_matches(function() writer:add_scalar("a", 1, 1.5) end, "step is 1.5, allowed: whole numbers")
    writer:close()
    assert.error_matches(function() writer:add_scalar("a", 1, 1) end, "is closed")
    assert.error_matches(function() peri.nn.metrics.SummaryWriter { folder = "/proc/nowhere" } end, "/proc/nowhere")
  end)
end)
