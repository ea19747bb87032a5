-- export/formulas.lua: constants that a model computes from its parameters and buffers while it answers, such as
-- sqrt(running_var + eps) of a batch norm. The file has their numbers, as of every constant, so that opening it
-- computes nothing. How they come from the state is a small model of its own in the header (`formulas`), which a
-- follower asks whenever a checkpoint has other numbers: its inputs are tensors of the state, its outputs the
-- constants, and all of it is about one sample.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Lowering = require "perilune.export.lower"
local operations = require "perilune.export.operations"
local rules = require "perilune.export.rules"

local Formulas = util.class("ExportFormulas", Lowering)

local whole = { i32 = true, i64 = true, bool = true } -- dtypes that no parameter has

-- Numbers of a value of a model file; constants that are larger have no formula.
local MOST_NUMBERS = 2 ^ 26
local MOST_NAME = 190 -- bytes

--- names: file.Names of the model's state; trace: the recording, whose constants these are.
function Formulas:init(names, trace)
  Lowering.init(self, trace, trace, { 1, 1 })
  self.names, self.trace, self.alone, self.axis = names, trace, true, 0
  self.origins, self.known, self.inputs, self.outputs = {}, {}, {}, {}
end

local worse = { fixed = 1, state = 2, unknown = 3 }

--- Where a constant's numbers come from: "state", "fixed" (numbers of the program), or "unknown". x: { constant =, at =
--- }, or a list of such and of other things.
function Formulas:origin(x)
  if type(x) ~= "table" then return "fixed" end
  if x.list or x.named then
    local most = "fixed"
    for _, list in ipairs { x.list or {}, x.named or {} } do
      for _, y in util.ordered(list) do
        local one = self:origin(y)
        if worse[one] > worse[most] then most = one end
      end
    end
    return most
  end
  if not x.at then return "unknown" end
  local known = self.origins[x.at]
  if known then return known end
  local made = self.trace.computed[x.at]
  if self.names:find(x.constant, x.at) then known = "state"
  elseif self.trace.fixed[x.at] then known = "fixed"
  elseif made then known = self:origin { list = made.entry.args }
  else known = whole[x.dtype] and "fixed" or "unknown" end
  self.origins[x.at] = known
  return known
end

-- -- operations -------------------------------------------------------------------------------------------------------

--- Functions that are recorded otherwise than in the model itself, where their weights are sections.
local forms = {}

function forms.linear(l)
  local a, shape = l:arguments(), l:result_shape()
  local inner, columns = a[2].shape[2], a[2].shape[1]
  local rows = util.product(shape) / columns
  local x = l:op("matmul", shape, { inputs = { a[1].index, a[2].index },
    sizes = { 1, rows, columns, inner, 0, inner, 1, 0, 1, inner } })
  if a[3] then
    x = l:op("binary", shape, { ["function"] = "add", inputs = { x.index, a[3].index },
      sizes = { 2, rows, columns, columns, 1, 0, 1 } })
  end
  local name = rules.activations[a[4] or 0]
  if name ~= "identity" then
    x = l:op("unary", shape, { ["function"] = name, inputs = { x.index }, numbers = { 0, 0 } })
  end
  l:set(x)
end

forms["embedding.look_up"] = function(l)
  local a = l:arguments()
  if a[2] ~= P.C.PERI_POOLING_NONE or a[7] or a[8] then l:fail "it pools, or has a padding_idx or a max_norm" end
  l:set(l:op("take", l:result_shape(), { inputs = { a[3].index, a[1].index },
    sizes = { a[1].shape[1], a[1].shape[2] } }))
end

-- -- one sample, whose values are whole constants ---------------------------------------------------------------------

function Formulas:sample_shape(a)
  self.axis = 0 -- no dimension is that of the samples
  return #a > 0 and util.copy(a) or { 1 }
end

function Formulas:resolve(a, _, what)
  if type(a) ~= "table" then return a end
  if a.list then return util.map(a.list, function(x) return self:resolve(x, nil, what) end) end
  return self:refuse_whole_numbers(self:value_of(a), what, rules.whole[self.entry.func])
end

function Formulas:sample(x, what)
  return type(x) == "table" and x.index and x or self:fail("%s is no tensor", what)
end

function Formulas:constant(x)
  if x.index then return x end
  local v = self:value({ util.product(x.shape) }, { constant = x.constant, number = true })
  return { index = v.index, shape = x.shape, axis = 0, fixed = true }
end

--- A tensor of the state, or a part of one.
function Formulas:input(of, shape)
  local n = of.of or util.product(shape)
  if n > MOST_NUMBERS or #of.source > MOST_NAME then self:fail("'%s' is too large, or its name", of.source) end
  local v = self.inputs[of.source] or self:value({ n }, { source = of.source })
  self.inputs[of.source] = v
  if not of.of then return { index = v.index, shape = shape, axis = 0 } end
  return self:op("copy", shape, { inputs = { v.index }, sizes = { 1, of.first, util.product(shape), 1 } })
end

--- The value of a constant; an error if it has none.
function Formulas:value_of(x)
  local known, shape = self.known[x.at], x.shape and #x.shape > 0 and x.shape or { 1 }
  if not known then
    local origin, of = self:origin(x), self.names:find(x.constant, x.at)
    if of then known = self:input(of, shape)
    elseif origin == "fixed" then known = self:constant { constant = x.constant, shape = shape }
    elseif origin == "state" then known = self:computed(x.at)
    else self:fail "it comes from no parameter" end
    self.known[x.at] = known
  end
  return { index = known.index, shape = shape, axis = 0, fixed = known.fixed, whole = known.whole }
end

--- The result of a recorded function of constants.
function Formulas:computed(at)
  local made = self.trace.computed[at]
  local entry = self.entry
  self.entry, self.other = made.entry, made.entry
  if not rules.formulas[made.entry.func] then self:fail "has no form as a formula" end
  local make = forms[made.entry.func] or operations[made.entry.func]
  make(self)
  local value = self.of[made.id]
  self.entry, self.other = entry, entry
  return value or self:fail "has no such result"
end

--- The value of a constant as an output, which is an operation's result.
function Formulas:result_of(x)
  local value = self:refuse_whole_numbers(self:value_of(x), "a constant")
  for _, o in ipairs(self.operations) do
    if o.out == value.index then return value end
  end
  local n = util.product(value.shape)
  return self:op("copy", value.shape, { inputs = { value.index }, sizes = { 1, 0, n, 1 } })
end

--- The number of the output that has the numbers of a constant; nil: no formula tells them.
function Formulas:find(x)
  if self:origin(x) ~= "state" or util.product(x.shape or {}) > MOST_NUMBERS then return nil end
  local ok, value = pcall(self.result_of, self, x)
  self.entry, self.other = false, false
  if not ok then
    if getmetatable(value) ~= P.Error then error(value, 0) end
    return nil
  end
  for i, output in ipairs(self.outputs) do
    if output.value == value.index then return i - 1 end
  end
  self.outputs[#self.outputs + 1] = { name = tostring(#self.outputs), value = value.index }
  return #self.outputs - 1
end

--- What the outputs need, as file.write takes the operations of a model; nil: there are no outputs.
function Formulas:program()
  if #self.outputs == 0 then return nil end
  local kept, values = self:needed(self.outputs)
  local inputs = {}
  for _, v in util.ordered(values) do
    if v.source then
      v.input = #inputs
      inputs[#inputs + 1] = { name = v.source, columns = v.columns }
    end
  end
  return { operations = kept, values = values, outputs = self.outputs, inputs = inputs }
end

return Formulas
