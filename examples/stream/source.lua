-- source.lua: a stream of samples about Debian packages. A sample is a release of a package, as a raw 64-bit hash of
-- its name and version; its label: whether other packages need it, which only who has seen it before can know. Each
-- release is new at some time, is asked for more and more often, then less, and is never seen again: over the whole
-- stream there are many times more ids than at any time.
local ffi = require "ffi"
local peri = require "perilune"
local C = peri.ffi.C

local M = {}
local Source = peri.util.class "StreamSource"

-- Streams of the counter-based generator.
local BIRTH, WEIGHT, DRAW, MADE = 1, 2, 1000, 3
local KEYS = { "release" }

--- FNV-1a: 64 bits of a text.
local function hash(text)
  local h = 0xcbf29ce484222325ULL
  for i = 1, #text do h = bit.bxor(h, text:byte(i)) * 0x100000001b3ULL end
  return ffi.cast("int64_t", h)
end

local function room(n) return { n = n, release = ffi.new("int64_t[?]", n), label = ffi.new("uint8_t[?]", n) } end

--- The machine's packages, or those of a file: { n =, release = hashes, label = }.
local function read_packages(path)
  local l = peri.data.debian.read(path)
  local p = room(l.n)
  for i = 0, l.n - 1 do p.release[i] = hash(l.names[i + 1] .. "=" .. l.versions[i + 1]) end
  for i = 0, l.dependencies.n - 1 do p.label[l.dependencies.values[i]] = 1 end
  return p
end

--- Made-up packages.
local function make_packages(n, seed)
  local p = room(n)
  for i = 0, n - 1 do
    p.release[i] = hash(("package-%d=1.%d"):format(i, i % 7))
    p.label[i] = C.peri_random_uniform(seed, MADE, i) < 0.5 and 1 or 0
  end
  return p
end

--- When each package is new, in steps (before the start for those that are there at first), and how much it is asked
--- for.
local function schedule(self)
  local n, seed, span = self.packages.n, self.seed, self.steps + self.life
  local births, order = ffi.new("double[?]", n), {}
  for i = 0, n - 1 do
    births[i], order[i + 1] = C.peri_random_uniform(seed, BIRTH, i) * span - self.life, i
  end
  table.sort(order, function(a, b)
    if births[a] ~= births[b] then return births[a] < births[b] end
    return a < b
  end)
  self.birth, self.order, self.weight = ffi.new("double[?]", n), ffi.new("int32_t[?]", n), ffi.new("double[?]", n)
  for k, i in ipairs(order) do
    self.birth[k - 1], self.order[k - 1] = births[i], i
    self.weight[k - 1] = 1 / (0.02 + C.peri_random_uniform(seed, WEIGHT, i))
  end
  self.sum = ffi.new("double[?]", n + 1)
end

--- Source { data =, steps =, batch_size =, life = steps that a package lives, seed = }.
function Source:init(a)
  self.steps, self.batch_size, self.life, self.seed = a.steps, a.batch_size, a.life, a.seed
  local made = a.data:match "^synthetic:(%d+)$"
  self.packages = made and make_packages(tonumber(made), a.seed) or read_packages(a.data ~= "debian" and a.data or nil)
  schedule(self)
  self.first, self.past, self.seen, self.distinct = 0, 0, ffi.new("uint8_t[?]", self.packages.n), 0
end

--- Sums of the weights of the packages that live at `step`: those between `first` and `past`.
local function weigh(self, step)
  local n, birth, weight, sum, life = self.packages.n, self.birth, self.weight, self.sum, self.life
  while self.first < n and birth[self.first] + life <= step do self.first = self.first + 1 end
  while self.past < n and birth[self.past] <= step do self.past = self.past + 1 end
  local total = 0
  for k = self.first, self.past - 1 do
    total = total + weight[k] * math.sin(math.pi * (step - birth[k]) / life)
    sum[k] = total
  end
  return total
end

--- The place in the order of the package at `x` of the sums.
local function find(self, x)
  local low, high, sum = self.first, self.past - 1, self.sum
  while low < high do
    local middle = math.floor((low + high) / 2)
    if sum[middle] < x then low = middle + 1 else high = middle end
  end
  return low
end

--- The packages of all samples of a step.
local function draw(self, step, who)
  local total = weigh(self, step)
  for i = 0, self.batch_size - 1 do
    local package = self.order[find(self, C.peri_random_uniform(self.seed, DRAW + step, i) * total)]
    who[i] = package
    if self.seen[package] == 0 then
      self.seen[package] = 1
      self.distinct = self.distinct + 1
    end
  end
end

local function kjt(values, lengths, n)
  return peri.KeyedJaggedTensor { keys = KEYS, values = peri.Tensor.from_memory(values, { n }, "i64"),
    lengths = lengths, stride = n }
end

--- The samples of a step (from 1): this rank's share as { raw = KeyedJaggedTensor of raw ids, hashed = the same modulo
--- `rows`, labels =, n = samples of this rank }.
function Source:batch(step, rows)
  self.who = self.who or ffi.new("int32_t[?]", self.batch_size)
  draw(self, step, self.who)
  local first, last = peri.data.share(self.batch_size, peri.rank(), peri.world_size())
  local n, p = last - first, self.packages
  local raw, hashed, labels = ffi.new("int64_t[?]", n + 1), ffi.new("int64_t[?]", n + 1), ffi.new("float[?]", n + 1)
  for i = 0, n - 1 do
    local x = self.who[first + i]
    raw[i], labels[i] = p.release[x], p.label[x]
    hashed[i] = ffi.cast("int64_t", ffi.cast("uint64_t", raw[i]) % rows)
  end
  local lengths = peri.ones({ n }, "i32")
  return { raw = kjt(raw, lengths, n), hashed = kjt(hashed, lengths, n),
    labels = peri.Tensor.from_memory(labels, { n }, "f32"), n = n }
end

M.Source = Source
return M
