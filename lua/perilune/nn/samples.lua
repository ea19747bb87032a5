-- samples.lua: predictions, labels, weights and sessions as the metrics of C take them.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local signature = require "perilune.signature"
local util = require "perilune.util"
local C, check = P.C, P.check

local M = {}

--- Numbers of a tensor or list as f64 host memory, and how many.
local function numbers(func, what, x)
  if Tensor.is(x) then
    return (x:to "f64"):read()
  end
  if type(x) ~= "table" then
    P.fail(("%s: %s are %s, wanted a tensor or a list"):format(func, what, signature.text(x)))
  end
  local n, fault = #x, util.list_fault(x)
  if fault then P.fail(("%s: the list of %s %s"):format(func, what, fault)) end
  local a = ffi.new("double[?]", math.max(n, 1))
  for i = 1, n do a[i - 1] = signature.value(func, ("entry %d of %s"):format(i, what), x[i], "number") end
  return a, n
end

--- The sizes of a tensor other than 1, as text; nil: it is a list.
local function layout(x)
  if not Tensor.is(x) then return nil end
  local text = ""
  for i = 1, x:dim() do
    local size = x:size(i)
    if size ~= 1 then text = text == "" and tostring(size) or text .. ", " .. tostring(size) end
  end
  return text
end
M.layout = layout

--- An error if tensors of as many elements have these in another order: [3, 2] beside [2, 3].
local function check_layouts(func, list)
  local first
  for _, what in ipairs { "labels", "predictions", "weights" } do
    local text = list[what] ~= nil and layout(list[what])
    first = first or text and { what = what, text = text }
    if text and text ~= first.text then
      P.fail(("%s: %s are %s, %s are %s"):format(func, what, tostring(list[what]), first.what,
        tostring(list[first.what])))
    end
  end
end

--- peri_metric_samples of predictions, labels and weights (nil: all 1), which are what `needs` (flags) says; the second
--- value keeps their memory alive. `per_sample`: predictions per label.
function M.metric_samples(func, needs, predictions, labels, weights, per_sample)
  local p, n = numbers(func, "predictions", predictions)
  local y, labelled = numbers(func, "labels", labels)
  if n ~= labelled * (per_sample or 1) then P.fail(("%s: %d predictions for %d labels"):format(func, n, labelled)) end
  local w, weighted
  if weights ~= nil then
    w, weighted = numbers(func, "weights", weights)
    if weighted ~= labelled then P.fail(("%s: %d weights for %d labels"):format(func, weighted, labelled)) end
  end
  local s = ffi.new "peri_metric_samples"
  -- of several each: the caller looks at them
  local first = per_sample and ffi.new("double[?]", math.max(labelled, 1)) or p
  s.predictions, s.labels, s.weights, s.n = first, y, w, labelled
  check_layouts(func, { predictions = not per_sample and predictions or nil, labels = labels, weights = weights })
  check(C.peri_metric_check(s, needs, func))
  s.predictions = p
  return s, { p, y, w }
end

--- Labels of which some may be NaN, which are missing: a list that has 0 in their place, and a list that says of each
--- whether it is missing.
function M.missing_labels(func, labels)
  local array, n = numbers(func, "labels", labels)
  local known, missing = {}, {}
  for i = 1, n do
    local y = array[i - 1]
    missing[i] = y ~= y
    known[i] = missing[i] and 0 or y
  end
  return known, missing
end

--- A list or tensor of n numbers, as an array; what: its name in messages.
function M.numbers(func, what, x, n)
  local array, found = numbers(func, what, x)
  if found ~= n then P.fail(("%s: %d %s for %d labels"):format(func, found, what, n)) end
  return array
end

--- The sessions of n labels: an array of numbers, each another session. Ids of sessions are whole numbers of 64 bits: 5
--- and 5LL are one.
function M.sessions(session, n, func)
  local known, count, of = {}, 0, ffi.new("double[?]", math.max(n, 1))
  local ids, found = session, Tensor.is(session) and session:numel() or type(session) == "table" and #session
  if Tensor.is(session) then ids = session:to_list() end
  if type(ids) == "table" then signature.value(func, "the list of sessions", ids, "list") end
  if not found then P.fail(("%s: sessions are %s, wanted a tensor or a list"):format(func, signature.text(session))) end
  if found ~= n then P.fail(("%s: %d sessions for %d labels"):format(func, found, n)) end
  for i = 1, n do
    local id = ids[i]
    if not signature.is("integer", id) then
      signature.value(func, ("the session of sample %d"):format(i - 1), id, "integer")
    end
    local key = tonumber(id)
    if key <= -2 ^ 53 or key >= 2 ^ 53 then key = tostring(id) end
    if not known[key] then
      count = count + 1
      known[key] = count
    end
    of[i - 1] = known[key]
  end
  return of
end

return M
