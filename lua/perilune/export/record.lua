-- export/record.lua: what a model does with one batch, as a list: every operation on tensors that it calls, with what
-- goes in, what comes out, and the line that called it. The model runs as always; signature.lua's guards, which stand
-- in front of all public functions, tell.
--
--   local trace = record(model, call, batch)
--   trace.entries[3]   -- { func = "linear", args = { ... }, results = { ... }, where = "model.lua:12" }
--
-- A tensor is known by the address of what its handle points to; all that were seen are kept alive until both traces
-- are done, so that no address has two meanings. An argument or result that is a tensor stands in an entry as { id = n
-- }; a tensor that no recorded operation has made stands there as { constant = tensor }.
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local jagged = require "perilune.jagged"
local signature = require "perilune.signature"
local rules = require "perilune.export.rules"
local C = P.C

local KeyedTensor, KeyedJaggedTensor, JaggedTensor = jagged.KeyedTensor, jagged.KeyedJaggedTensor, jagged.JaggedTensor

local home -- while a model is recorded: where its function begins, for calls that leave no line behind (return f(x))
local record

--- The line of the program that called what runs now: the first one outside of the library, else the first of the
--- library's own models, else where the model's function begins.
local function where()
  local inner
  for level = 3, 60 do
    local info = debug.getinfo(level, "Slf")
    if not info or info.func == record then break end
    local own = info.source:find("lua/perilune/", 1, true) or info.source:find("^=perilune")
    if info.currentline > 0 and info.source ~= "=perilune.signature" then
      local text = ("%s:%d"):format(info.short_src, info.currentline)
      if not own then return text end
      if info.source:find("perilune/nn/", 1, true) and not info.source:find("nn/call", 1, true) then
        inner = inner or text
      end
    end
  end
  return inner or home
end

local address = util.address

--- The tensor, KeyedTensor or the like that a value is or stands for; else nil.
local function handle(x)
  if Tensor.is(x) or KeyedTensor.is(x) or KeyedJaggedTensor.is(x) or JaggedTensor.is(x) then return util.resolve(x) end
end

local Trace = util.class "ExportTrace"

function Trace:init()
  self.entries, self.known, self.refused, self.kept, self.inputs = {}, {}, {}, {}, {}
  self.made, self.failed = 0, false
  -- Of constants, by their addresses: what made them of others (`entry`, and the `id` of the result); those that are
  -- made of numbers of the program only; and those whose numbers were taken into Lua, a list of { x =, where = }.
  self.computed, self.fixed, self.taken, self.n_computed = {}, {}, {}, 0
end

local release = { { Tensor, "peri_tensor" }, { KeyedTensor, "peri_kt" }, { KeyedJaggedTensor, "peri_kjt" },
  { JaggedTensor, "peri_jt" } }

--- Keep what a handle points to until `forget`.
function Trace:keep(x)
  for _, kind in ipairs(release) do
    if kind[1].is(x) then
      C[kind[2] .. "_retain"](x.ptr)
      self.kept[#self.kept + 1] = { free = C[kind[2] .. "_release"], ptr = x.ptr }
      return
    end
  end
end

function Trace:forget()
  for _, kept in ipairs(self.kept) do kept.free(kept.ptr) end
  self.kept = {}
end

local function shape_of(x) return Tensor.is(x) and x:shape() or nil end

--- A tensor that a recording knows as a constant: a handle of the recording's own, which lives until `forget`, also if
--- the model's is released meanwhile.
function Trace:own(x)
  if not Tensor.is(x) then
    self:keep(x)
    return x
  end
  C.peri_tensor_retain(x.ptr)
  local mine = P.lasting(Tensor.wrap, x.ptr)
  self.kept[#self.kept + 1] = { free = mine.release, ptr = mine }
  return mine
end

--- Note a result of an operation; returns what stands for it.
function Trace:note(x)
  self:keep(x)
  self.made = self.made + 1
  local item = { id = self.made, shape = shape_of(x), dtype = Tensor.is(x) and x:dtype() or nil }
  self.known[address(x)], self.refused[address(x)] = item, nil
  return item
end

--- What stands for an argument: of a list, a list; of named arguments, what stands for each by its name.
function Trace:describe(x, func, line)
  local h = handle(x)
  if not h then
    if type(x) == "cdata" and Tensor._is_number(x) then return tonumber(x) end -- beside floats it is one
    if type(x) ~= "table" or getmetatable(x) and not handle(x[1]) then return x end -- an nn.ParameterList is a list
    local list, named = {}, nil
    for i, y in ipairs(x) do list[i] = self:describe(y, func, line) end
    for name, y in util.ordered(#list == 0 and x or {}) do
      named = named or {}
      named[name] = self:describe(y, func, line)
    end
    return { list = list, named = named }
  end
  local at = address(h)
  if self.known[at] then return self.known[at] end
  local refused = self.refused[at]
  if refused then
    P.fail(("export: %s: '%s' has no form for inference, and '%s' (%s) uses its result"):format(refused.where,
      refused.func, func, line))
  end
  return { constant = self:own(h), at = at, shape = shape_of(h), dtype = Tensor.is(h) and h:dtype() or nil }
end

--- Whether an entry's argument holds something that depends on the batch.
local function depends(item)
  if type(item) ~= "table" then return false end
  if item.id then return true end
  for _, x in ipairs(item.list or {}) do
    if depends(x) then return true end
  end
  for _, x in util.ordered(item.named or {}) do
    if depends(x) then return true end
  end
  return false
end

--- Call f with the handle of each result, also of those in lists; what it returns is what stands for that result in
--- the entry, if there is one.
local function each_result(results, f, entry)
  for i = 1, table.maxn(results) do
    local r, items = results[i], {}
    local list = type(r) == "table" and not handle(r)
    for k, x in ipairs(list and r or { r }) do items[k] = handle(x) and f(handle(x)) or nil end
    if entry then entry.results[i] = list and { list = items } or items[1] end
  end
end

--- Note a call that has made constants of constants. is_new (or nil): a function of a result: whether it is one of
--- this call.
function Trace:add_constant(entry, results, is_new)
  local given = {}
  local function note_given(x)
    if type(x) ~= "table" then return end
    if x.at then given[x.at] = true end
    for _, y in util.ordered(x.list or x.named or {}) do note_given(y) end
  end
  for i = 1, entry.n do note_given(entry.args[i]) end
  each_result(results, function(h)
    if not Tensor.is(h) or given[address(h)] then return false end -- some functions return what they were given
    if is_new and not is_new(h) then return false end
    self:keep(h)
    local item = { id = {}, shape = shape_of(h), dtype = h:dtype() }
    self.n_computed = self.n_computed + 1
    self.computed[address(h)] = { entry = entry, id = item.id, number = self.n_computed }
    self.fixed[address(h)] = nil
    return item
  end, entry)
end

--- Whether what stands for an argument is made of numbers of the program only.
function Trace:is_own(item)
  if type(item) ~= "table" or item.at and self.fixed[item.at] then return true end
  local made = self.computed[item.at or false]
  if item.at and not made then return false end
  for _, x in util.ordered(made and made.entry.args or item.list or item.named or {}) do
    if not self:is_own(x) then return false end
  end
  return not item.id
end

--- Note a call of a function that has a rule.
function Trace:add(func, args, results, line)
  local entry = { func = func, args = {}, results = {}, where = line, n = args.n }
  local live = false
  for i = 1, args.n do
    entry.args[i] = self:describe(args[i], func, line)
    live = live or depends(entry.args[i])
  end
  if not live then return self:add_constant(entry, results) end
  each_result(results, function(h) return self:note(h) end, entry)
  self.entries[#self.entries + 1] = entry
end

--- Note a call that has made a tensor of numbers of the program.
function Trace:add_source(results)
  each_result(results, function(h)
    self:keep(h)
    self.fixed[address(h)] = true
  end)
end

--- An error that ends the recording, also where the model catches it.
function Trace:fail(format, ...)
  local _, err = pcall(P.fail, format:format(...))
  self.failed = self.failed or err
  error(err, 0)
end

--- Refuse a call that takes numbers of the batch into Lua, or changes a tensor.
function Trace:forbid(func, x)
  local h = handle(x)
  local item = h and (self.known[address(h)] or self.refused[address(h)])
  if rules.reads[func] and h and not item and Tensor.is(h) then
    self.taken[#self.taken + 1] = { where = where(),
      x = { constant = self:own(h), at = address(h), dtype = h:dtype() } }
  end
  if rules.reads[func] and item then
    self:fail("export: %s: '%s' makes what the model does depend on the numbers of a batch, of which a model file "
      .. "knows nothing", where(), (func:gsub("^%a+:", "")))
  end
  if rules.writes[func] then
    self:fail("export: %s: '%s' changes a tensor while the model answers; a model file changes nothing", where(),
      (func:gsub("^tensor:", "")))
  end
end

--- What a function without a rule returned, and nothing inside has been recorded for it: where it depends on the batch,
--- it cannot be used; else it is a constant that no formula computes (formulas.lua).
function Trace:suspect(func, args, results, line, before)
  local live, any, given = false, false, {}
  for i = 1, args.n do
    local h = handle(args[i])
    local at = h and address(h)
    live = live or at and (self.known[at] or self.refused[at]) ~= nil
    given[at or 0] = true
  end
  local function is_new(h)
    local at = address(h)
    return not given[at] and not self.known[at] and not self.computed[at] and not self.fixed[at]
  end
  --- What a function of the batch has computed of tensors that no guard has seen depends on the batch, too.
  local function is_unseen(h)
    local made = self.computed[address(h)]
    return made and made.number > before and not given[address(h)]
  end
  each_result(results, function(h)
    any = any or is_new(h)
    if live and (is_new(h) or is_unseen(h)) then
      self:keep(h)
      self.refused[address(h)], self.computed[address(h)] = { func = func, where = line }, nil
    end
  end)
  if live or not any then return end
  local entry = { func = func, args = {}, results = {}, where = line, n = args.n }
  for i = 1, args.n do entry.args[i] = self:describe(args[i], func, line) end
  self:add_constant(entry, results, is_new)
end

--- Whether a function makes a tensor of numbers of the program: no argument is a tensor.
local function is_source(func, args)
  if not rules.sources[func] then return false end
  for i = 1, args.n do
    if handle(args[i]) then return false end
  end
  return true
end

--- The watcher of guarded functions.
local function watcher(trace)
  local watch
  function watch(func, f, ...)
    local args = { n = select("#", ...), ... }
    if rules.reads[func] or rules.writes[func] then
      trace:forbid(func, (...))
      return f(...)
    end
    local line, before = where(), trace.n_computed
    local source = is_source(func, args)
    local rule = rules.known[func] or source
    if rule then signature.watch.call = false end
    local results = { pcall(f, ...) }
    signature.watch.call = watch
    if not results[1] then error(results[2], 0) end
    table.remove(results, 1)
    if source then trace:add_source(results)
    elseif rule then trace:add(func, args, results, line) else trace:suspect(func, args, results, line, before) end
    return unpack(results)
  end
  return watch
end

--- Put a recording forward in front of each collection of tables; returns the function that takes them away.
local function hook_collections(trace, collections)
  for _, c in ipairs(collections) do
    local original = c.module.forward
    rawset(c.module, "forward", function(self, features)
      local line, watch = where(), signature.watch.call
      signature.watch.call = false
      local results = { pcall(function()
        local rows, remapped = original(self, features)
        return util.resolve(rows), remapped
      end) }
      signature.watch.call = watch
      if not results[1] then error(results[2], 0) end
      local entry = { func = "lookup", collection = c, args = { trace:describe(features, "lookup", line) },
        where = line, n = 1 }
      entry.results = { c.rows and { list = util.map(c.outputs, function(out)
        return trace:note(results[2][out.name])
      end) }
        or trace:note(results[2]) }
      trace.entries[#trace.entries + 1] = entry
      return results[2], results[3]
    end)
  end
  return function()
    for _, c in ipairs(collections) do rawset(c.module, "forward", nil) end
  end
end

--- Note the fields of a batch that are tensors and KeyedJaggedTensors as its inputs.
local function note_inputs(trace, batch)
  for name, value in util.ordered(batch) do
    local h = type(name) == "string" and handle(value)
    if h then trace.inputs[#trace.inputs + 1] = { name = name, item = trace:note(h), value = h } end
  end
end

--- Run call(model, batch) and record it. collections: { module =, path = } of all modules of tables; own: the function
--- of the program's that call is or calls. Appends the trace to `traces`, also if it fails; it is to be forgotten. What
--- call returned is in its field `outputs`, a list of { name =, item = }.
function record(model, call, batch, collections, own, traces)
  local trace, info = Trace(), debug.getinfo(own, "S")
  traces[#traces + 1] = trace
  home = ("%s:%d"):format(info.short_src, info.linedefined)
  note_inputs(trace, batch)
  local unhook = hook_collections(trace, collections)
  signature.watch.call = watcher(trace)
  local ok, result = xpcall(P.no_grad, P.locate, call, model, batch)
  signature.watch.call = false
  unhook()
  if not ok or trace.failed then error(trace.failed or result, 0) end
  result = util.resolve(result)
  trace.outputs = {}
  local list = Tensor.is(result) and { logits = result } or result
  if type(list) ~= "table" or getmetatable(list) then
    P.fail(("export: the model returned %s, wanted a tensor, or a table of tensors by name"):format(
      errors.kind(result)))
  end
  for name, value in util.ordered(list) do
    if not Tensor.is(value) then P.fail(("export: the model's result '%s' is no tensor"):format(tostring(name))) end
    local item = trace:describe(value, "the model's result", tostring(name))
    if not item.id then
      P.fail(("export: the model's result '%s' does not depend on the batch"):format(tostring(name)))
    end
    trace.outputs[#trace.outputs + 1] = { name = tostring(name), item = item }
  end
end

return record
