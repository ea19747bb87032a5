-- graphed.lua: nn.graphed: functions and modules whose work on a GPU is captured once and replayed (perilune/graph.h),
-- PyTorch's make_graphed_callables: one launch of the host in place of dozens.
--
--   nn.graphed(model.over_arch)           -- its forward, and the backward pass of its results, from now on
--   local graph = nn.graphed(function(x, y) return model.a(x) * model.b(y) end, { modules = { model.a, model.b } })
--   ... train ...
--   print(graph)                          -- Graphed(captures=2, replays=198, eager=2: first call of its kind 2)
--
-- A kind of call is the shapes and dtypes of the tensors, the other arguments, and how operations compute. The first
-- call of a kind runs as ever; the second is captured. What is captured holds for the modules' fields as they are: when
-- one is another than it was, the capture is dropped, and the call is captured anew. Modes (train, eval) are the
-- exception: each has captures of its own, which are kept.
local ffi = require "ffi"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local Module = require "perilune.nn.module"
local signature = require "perilune.signature"
local C, check, state = P.C, P.check, P.state
local rawget = rawget

local M = {}
local wrap_graph, _, graph_ptr = P.handle("peri_graph", {}, nil, "a captured graph")
local graph_out = ffi.new "peri_graph *[1]"
local pointers = ffi.typeof "peri_tensor *[?]"
local NONE = {}
local TENSOR = {} -- stands for a tensor in a list of arguments

-- -- what a capture holds for -----------------------------------------------------------------------------------------

--- All fields of modules and of those within them, and in the plain tables that they have: three lists, of tables, keys
--- and values; the tensors among the values; and the modules' modes (field `training`), which are in a list of their
--- own.
local function fields_of(modules)
  local f, tensors, seen = { n = 0, owner = {}, key = {}, value = {} }, {}, {}
  local modes = { n = 0, owner = {}, key = {}, value = {} }
  local function visit(at)
    if seen[at] then return end
    seen[at] = true
    local moving = Module.is(at) and at._moving or NONE
    for key, value in next, at do -- any order: each is compared
      if key == "training" and Module.is(at) then
        modes.n = modes.n + 1
        modes.owner[modes.n], modes.key[modes.n], modes.value[modes.n] = at, key, value
      elseif not moving[key] then
        f.n = f.n + 1
        f.owner[f.n], f.key[f.n], f.value[f.n] = at, key, value
      end
      if Tensor.is_live(value) then tensors[#tensors + 1] = value end
      if Module.is(value) or type(value) == "table" and getmetatable(value) == nil then visit(value) end
    end
  end
  for _, module in ipairs(modules) do visit(module) end
  return f, tensors, modes
end

--- The place of the first field that is another than it was; nil: none is.
local function changed_field(f)
  local owner, key, value = f.owner, f.key, f.value
  for i = 1, f.n do
    if not rawequal(rawget(owner[i], key[i]), value[i]) then return i end
  end
end

local function check_unchanged(f)
  local i = changed_field(f)
  if not i then return end
  P.fail(("graphed: field '%s' of a %s changes in each call, which a replay would not do; leave this module out of "
    .. "what is graphed"):format(tostring(f.key[i]), rawget(f.owner[i], "_children") and f.owner[i].class_name
    or "module's table"))
end

-- -- arguments --------------------------------------------------------------------------------------------------------

local plain = { number = true, string = true, boolean = true }

--- Arguments as the tensors among them, an array of their pointers, and the others by their places.
local function arguments(n, ...)
  local given, tensors, others = { ... }, {}, { n = n }
  for i = 1, n do
    local x = util.resolve(given[i])
    if Tensor.is_live(x) then tensors[#tensors + 1], others[i] = x, TENSOR
    elseif x == nil or plain[type(x)] then others[i] = x
    else
      P.fail(("graphed: argument %d is %s, allowed: tensors, numbers, strings, booleans, nil"):format(i,
        errors.kind(x)))
    end
  end
  local inputs = pointers(math.max(#tensors, 1))
  for i, t in ipairs(tensors) do inputs[i - 1] = Tensor.ptr(t) end
  return tensors, inputs, others
end

local function same_others(a, b)
  if a.n ~= b.n then return false end
  for i = 1, a.n do
    if a[i] ~= b[i] or a[i] == 0 and 1 / a[i] ~= 1 / b[i] then return false end
  end
  return true
end

--- A kind of call in words.
local function kind_of(tensors, others)
  local words = { state.grad and "grad" or "no grad", state.autocast and "autocast" or "",
    Tensor.get_float32_matmul_precision() }
  for _, t in ipairs(tensors) do
    local d = t:describe()
    words[#words + 1] = t:dtype() .. (d.requires_grad and "*" or "")
    for k = 0, d.ndim - 1 do words[#words + 1] = tostring(d.shape[k]) end
  end
  for i = 1, others.n do
    words[#words + 1] = others[i] == TENSOR and "tensor" or type(others[i]) .. tostring(others[i])
  end
  return table.concat(words, " ")
end

-- -- capturing --------------------------------------------------------------------------------------------------------

--- f's arguments with stand-ins for its tensors.
local function with_stand_ins(others, stand_ins)
  local list, at = {}, 0
  for i = 1, others.n do
    list[i] = others[i]
    if others[i] == TENSOR then
      list[i] = Tensor.wrap(stand_ins[at])
      at = at + 1
    end
  end
  return unpack(list, 1, others.n)
end

--- End the capture. `...` are the results of the function that was captured; returns how many.
local function finish(graph, ...)
  local m = select("#", ...)
  local outputs = pointers(math.max(m, 1))
  for i = 1, m do
    local x = util.resolve((select(i, ...)))
    if not Tensor.is_live(x) then
      P.fail(("graphed: result %d of the function is %s, wanted tensors"):format(i, errors.kind(x)))
    end
    outputs[i - 1] = Tensor.ptr(x)
  end
  check(C.peri_graph_end(graph, outputs, m))
  return m
end

--- Run f for a graph that was begun.
local function run_captured(graph, f, others, stand_ins)
  return finish(graph, f(with_stand_ins(others, stand_ins)))
end

local Graphed = util.class "Graphed"
M.Graphed = Graphed

function Graphed:_capture(f, inputs, n, others)
  local fields, tensors, modes = fields_of(self._modules)
  local used = pointers(math.max(#tensors, 1))
  for i, t in ipairs(tensors) do used[i - 1] = Tensor.ptr(t) end
  local stand_ins = pointers(math.max(n, 1))
  check(C.peri_graph_new(P.device(self._device), graph_out))
  local entry = { graph = P.lasting(wrap_graph, graph_out[0]), fields = fields, modes = modes,
    others = others }
  check(C.peri_graph_begin(graph_out[0], inputs, n, used, #tensors, stand_ins))
  local graph = graph_ptr(entry.graph)
  local collects = collectgarbage "isrunning" -- what is collected could ask the device something
  collectgarbage "stop"
  local draws = {} -- by what each dropout draws, in their order
  state.capturing = draws
  local ok, m = xpcall(P.scope, P.locate, run_captured, graph, f, others, stand_ins)
  state.capturing = false
  if collects then collectgarbage "restart" end
  if not ok then C.peri_graph_cancel(graph) end
  Tensor._note_autocast()
  if not ok then error(m, 0) end
  check_unchanged(fields)
  check_unchanged(modes)
  if C.peri_graph_draws(graph) ~= #draws then
    P.fail("graphed: the function calls dropout, whose numbers would be the same in each replay; allowed: nn.Dropout")
  end
  entry.m, entry.results, entry.draws = m, pointers(m), draws
  self._entries[#self._entries + 1] = entry
  self.captures = self.captures + 1
  return entry
end

-- -- calls ------------------------------------------------------------------------------------------------------------

--- Forget what was captured. Results of calls stay what they are.
function Graphed:reset()
  for _, entry in ipairs(self._entries) do entry.graph:release() end
  self._entries, self._seen, self._kinds = {}, {}, 0
end

--- Run f as ever, and count why.
function Graphed:_eager(why, f, ...)
  self.eager[why] = (self.eager[why] or 0) + 1
  return f(...)
end

local function results_of(entry, i)
  if i == entry.m then return Tensor.wrap(entry.results[i - 1]) end
  return Tensor.wrap(entry.results[i - 1]), results_of(entry, i + 1)
end

--- `drawn`: the next masks of dropout are drawn already, by the capture.
function Graphed:_replay(entry, inputs, n, drawn)
  for i = 1, drawn and 0 or #entry.draws do
    check(C.peri_graph_draw(graph_ptr(entry.graph), i - 1, entry.draws[i]()))
  end
  check(C.peri_graph_call(graph_ptr(entry.graph), inputs, n, entry.results))
  self.replays = self.replays + 1
  return results_of(entry, 1)
end

--- The capture that such a call can replay; nil, and why there is none: "new", or "busy".
function Graphed:_find(inputs, n, others)
  local entries, i, why = self._entries, 1, "new"
  while i <= #entries do
    local entry = entries[i]
    local fits = changed_field(entry.modes) and C.PERI_GRAPH_OTHER
      or changed_field(entry.fields) and C.PERI_GRAPH_STALE
      or same_others(entry.others, others) and C.peri_graph_fits(graph_ptr(entry.graph), inputs, n)
      or C.PERI_GRAPH_OTHER
    if fits == C.PERI_GRAPH_FITS then return entry end
    if fits == C.PERI_GRAPH_BUSY then why = "busy" end
    if fits == C.PERI_GRAPH_STALE then table.remove(entries, i).graph:release() else i = i + 1 end
  end
  return nil, why
end

--- Whether there is room for one more capture. Where there is none, one of another mode makes room.
function Graphed:_room()
  local entries = self._entries
  if #entries < self.max_graphs then return true end
  for i, entry in ipairs(entries) do
    if changed_field(entry.modes) then
      table.remove(entries, i).graph:release()
      return true
    end
  end
end

local FIRST, BUSY, MANY = "first call of its kind", "the call before awaits its backward pass", "too many kinds"

--- Why a call with these tensors cannot be captured at all; nil: it can.
function Graphed:_refusal(tensors)
  if not tensors[1] then return "no tensor among the arguments" end
  local device = ffi.string(C.peri_device_name(tensors[1]:describe().device))
  for _, t in ipairs(tensors) do
    if ffi.string(C.peri_device_name(t:describe().device)) ~= device then return "tensors of several devices" end
  end
  if not C.peri_graph_supported(P.device(device)) then return ("device %s captures nothing"):format(device) end
  if state.anomaly then return "nn.detect_anomaly looks at each result" end
  self._device = device
end

function Graphed:_run(f, ...)
  if state.capturing then return f(...) end -- within another's capture: a part of it
  local n = select("#", ...)
  local tensors, inputs, others = arguments(n, ...)
  local entry, why = self:_find(inputs, #tensors, others)
  if entry and not state.anomaly then return self:_replay(entry, inputs, #tensors) end
  local refusal = self:_refusal(tensors)
  if refusal then return self:_eager(refusal, f, ...) end
  if why == "busy" then return self:_eager(BUSY, f, ...) end
  if not self:_room() then return self:_eager(MANY, f, ...) end
  local kind = kind_of(tensors, others)
  if not self._seen[kind] then
    if self._kinds >= self.max_graphs then return self:_eager(MANY, f, ...) end
    self._seen[kind], self._kinds = true, self._kinds + 1
    return self:_eager(FIRST, f, ...)
  end
  return self:_replay(self:_capture(f, inputs, #tensors, others), inputs, #tensors, true)
end

function Graphed:init(f, options)
  local a = util.named("graphed", options or {}, { modules = util.optional.list, max_graphs = 8 })
  self._function, self._modules, self.max_graphs = f, a.modules or {}, a.max_graphs
  self._entries, self._seen, self._kinds, self._device = {}, {}, 0, false
  self.captures, self.replays, self.eager = 0, 0, {}
end

--- The graph of each module that is graphed, which the module's forward holds, and which holds the module: so neither
--- may be held here.
local graphs = setmetatable({}, { __mode = "kv" })

function Graphed:__call(...) return self:_run(self._function, ...) end

function Graphed:__tostring()
  local why, total = {}, 0
  for reason, n in util.ordered(self.eager) do
    why[#why + 1] = ("%s %d"):format(reason, n)
    total = total + n
  end
  return ("Graphed(captures=%d, replays=%d, eager=%d%s)"):format(self.captures, self.replays, total,
    total > 0 and ": " .. table.concat(why, ", ") or "")
end

--- Bytes of the device's memory that its captures keep.
function Graphed:bytes()
  local bytes = 0
  for _, entry in ipairs(self._entries) do bytes = bytes + tonumber(C.peri_graph_bytes(graph_ptr(entry.graph))) end
  return bytes
end

--- Let a module's forward be what `graph` captures.
local function graph_module(module, options)
  if graphs[module] then
    P.fail(("graphed: this %s is graphed already (nn.graphed(module, false) ends that)"):format(module.class_name))
  end
  local original, a = module.forward, util.copy(options or {})
  a.modules = a.modules or { module }
  local graph = Graphed(function(...) return original(module, ...) end, a)
  graph._original = rawget(module, "forward") or false
  graphs[module] = graph
  rawset(module, "forward", function(self, ...)
    if self ~= module then return graph:_eager("a copy of the module", original, self, ...) end
    return graph:_run(graph._function, ...)
  end)
  return graph
end

local function end_module(module)
  local graph = graphs[module]
  if not graph then P.fail(("graphed: this %s is not graphed"):format(module.class_name)) end
  graphs[module] = nil
  rawset(module, "forward", graph._original or nil)
  graph:reset()
  return graph
end

--- Capture what f computes and replay it. f: a Module, whose forward is that from now on, or a function, which is left
--- alone: call the result instead. Options: modules, those whose parameters a function uses; max_graphs (8), kinds of
--- calls that are captured at most. options false: a module's forward is its own again.
function M.graphed(f, options)
  if options ~= nil and options ~= false then signature.value("graphed", "options", options, "table") end
  if Module.is(f) then return options == false and end_module(f) or graph_module(f, options) end
  if type(f) ~= "function" then P.fail(("graphed: f is %s, wanted a Module or a function"):format(errors.kind(f))) end
  return Graphed(f, options or {})
end
errors.runners[M.graphed] = true

return M
