-- sass.lua: what the machine code of a kernel does with global memory, as nvdisasm prints it: loops, widths of their
-- loads and stores, and the most bytes that a thread has on their way at once.
--
-- A loop is a branch backwards and what lies between its target and it. In flight are the loads that have been issued
-- and of which nothing has been used yet: a warp issues its instructions in order and stops at the first one that needs
-- (or overwrites) what has not arrived; then that load and those before it have. Of the ways through a loop that one
-- counts which has most in flight: ways on which a row lies badly and is loaded number by number have less. A register
-- counts once.
local sass = {}

local WIDTHS = { ["128"] = 16, ["64"] = 8, U16 = 2, S16 = 2, U8 = 1, S8 = 1 }

--- "LDG.E.128.CONSTANT" -> 16.
local function width_of(opcode)
  for suffix in opcode:gmatch "%.(%w+)" do
    if WIDTHS[suffix] then return WIDTHS[suffix] end
  end
  return 4
end

--- Registers that an instruction names: `first`, how many of them, as a list of numbers.
local function registers(operands, wide)
  local list = {}
  for name, suffix in operands:gmatch "%f[%w]R(%d+)([%.%w]*)" do
    local n = tonumber(name)
    for k = 0, math.max(suffix:match "%.64" and 2 or 1, wide) - 1 do list[#list + 1] = n + k end
  end
  return list
end

local function instruction(address, predicate, opcode, operands)
  local x = { address = address, opcode = opcode, conditional = predicate ~= "" }
  local family = opcode:match "^%w+"
  if family == "LDG" or family == "LD" then
    x.load = width_of(opcode)
    local to, rest = operands:match "^%s*[%w%.]*,?%s*(R%d+)%f[^%w](.*)"
    if not to then to, rest = "R255", operands end
    x.first, x.n = tonumber(to:sub(2)), math.max(1, x.load / 4)
    x.reads = registers(rest, 1)
  elseif family == "STG" or family == "ST" then
    x.store = width_of(opcode)
    local at, value = operands:match "^(.-%])(.*)"
    x.reads = registers(at or operands, 1)
    for _, r in ipairs(registers(value or "", math.max(1, x.store / 4))) do x.reads[#x.reads + 1] = r end
  else
    x.reads = registers(operands, 1)
  end
  if family == "BRA" then x.target = operands:match "`%((.-)%)" end
  x.ends = not x.conditional and (family == "BRA" and not opcode:match "%.DIV" or family == "EXIT" or family == "RET"
    or family == "JMP")
  return x
end

--- Kernels of what nvdisasm printed: { [mangled name] = { code = {...}, labels = { [name] = index } } }.
function sass.parse(text)
  local kernels, kernel = {}, nil
  for line in text:gmatch "[^\n]+" do
    local section = line:match "^%.text%.(.-):"
    if section then
      kernel = { code = {}, labels = {} }
      kernels[section] = kernel
    elseif kernel then
      local label = line:match "^(%.L[%w_]+):"
      if label then kernel.labels[label] = #kernel.code + 1 end
      local address, rest = line:match "^%s+/%*(%x+)%*/%s+(.-)%s*;"
      if address then
        local predicate, body = rest:match "^(@!?U?P%w+)%s+(.*)"
        local opcode, operands = (body or rest):match "^(%S+)%s*(.*)"
        kernel.code[#kernel.code + 1] = instruction(tonumber(address, 16), predicate or "", opcode, operands)
      end
    end
  end
  return kernels
end

--- { { first, last }, ... }: loops with loads in them, the smallest first; the whole kernel where there is none.
local function loops(kernel)
  local all, code = {}, kernel.code
  for i, x in ipairs(code) do
    local to = x.target and kernel.labels[x.target]
    if to and to < i then
      local loads = false
      for k = to, i do loads = loads or code[k].load ~= nil end
      if loads then all[#all + 1] = { to, i } end
    end
  end
  if #all == 0 then all[1] = { 1, #code } end
  table.sort(all, function(a, b) return a[2] - a[1] < b[2] - b[1] or a[2] - a[1] == b[2] - b[1] and a[1] < b[1] end)
  return all
end

local function copy(state)
  local out = { bytes = state.bytes, most = state.most, loads = state.loads, most_loads = state.most_loads, queue = {} }
  for i, x in ipairs(state.queue) do out.queue[i] = x end
  return out
end

--- What was loaded up to the register that is needed has arrived.
local function arrive(state, register)
  for i = #state.queue, 1, -1 do
    if state.queue[i].register == register then
      for _ = 1, i do
        local done = table.remove(state.queue, 1)
        state.bytes, state.loads = state.bytes - done.bytes, state.loads - done.load
      end
      return
    end
  end
end

local function step(state, x, width)
  for _, r in ipairs(x.reads) do arrive(state, r) end
  if x.load ~= width then return end
  for k = 0, x.n - 1 do
    local register, again = x.first + k, false
    for _, y in ipairs(state.queue) do again = again or y.register == register end
    if not again then
      local bytes, load = math.min(4, x.load), k == 0 and 1 or 0
      state.queue[#state.queue + 1] = { register = register, bytes = bytes, load = load }
      state.bytes, state.loads = state.bytes + bytes, state.loads + load
    end
  end
  if state.bytes > state.most then state.most, state.most_loads = state.bytes, state.loads end
end

--- The most bytes of loads of this width in flight on any way through code[first..last], and how many loads they are.
local function in_flight(kernel, first, last, width)
  local states = { [first] = { bytes = 0, most = 0, loads = 0, most_loads = 0, queue = {} } }
  local best = states[first]
  local function reach(i, state, shared)
    local there = states[i]
    if there and (there.most > state.most or there.most == state.most and there.bytes >= state.bytes) then return end
    states[i] = shared and copy(state) or state
  end
  for i = first, last do
    local x, state = kernel.code[i], states[i]
    if state then
      step(state, x, width)
      if state.most > best.most then best = copy(state) end
      local to = x.target and kernel.labels[x.target]
      if to and to > i and to <= last then reach(to, state, true) end
      if not x.ends then reach(i + 1, state) end
      states[i] = nil
    end
  end
  return best.most, best.most_loads
end

--- "4x128 2x32" of loads or stores in code[first..last].
local function widths(kernel, first, last, what)
  local count, names = {}, {}
  for i = first, last do
    local w = kernel.code[i][what]
    if w then count[w] = (count[w] or 0) + 1 end
  end
  for _, w in ipairs { 16, 8, 4, 2, 1 } do
    if count[w] then names[#names + 1] = ("%dx%d"):format(count[w], 8 * w) end
  end
  return #names > 0 and table.concat(names, " ") or "-"
end

--- Of these loops (the smallest first) the innermost ones with an instruction `name`.
local function innermost(kernel, all, name)
  local out = {}
  for _, l in ipairs(all) do
    local has = false
    for i = l[1], l[2] do has = has or kernel.code[i].opcode:match "^%w+" == name end
    for _, inner in ipairs(out) do has = has and not (inner[1] >= l[1] and inner[2] <= l[2]) end
    if has then out[#out + 1] = l end
  end
  return out
end

--- The loop that moves rows: of those that load words of `width` bytes (default: the widest that any loop loads) the
--- smallest one of those that have most of them in flight. `with`: of the innermost loops with this instruction
--- (FFMA), where others load more (the sum of the bags of all blocks before one, say). { loads, stores: widths; width;
--- bytes, n: in flight; widest_store }
function sass.inner(kernel, width, with)
  local best
  local all = loops(kernel)
  if with then all = innermost(kernel, all, with) end
  if not width then
    width = 0
    for _, l in ipairs(all) do
      for i = l[1], l[2] do width = math.max(width, kernel.code[i].load or 0) end
    end
  end
  for _, l in ipairs(all) do
    local bytes, n = in_flight(kernel, l[1], l[2], width)
    if not best or bytes > best.bytes then best = { first = l[1], last = l[2], bytes = bytes, n = n } end
  end
  best.width = width
  best.loads, best.stores = widths(kernel, best.first, best.last, "load"),
    widths(kernel, best.first, best.last, "store")
  best.widest_store = 0
  for _, x in ipairs(kernel.code) do best.widest_store = math.max(best.widest_store, x.store or 0) end
  return best
end

return sass
