-- logistic.lua: the baseline: logistic regression over the ids and dense features of a loader's batches
-- (perilune/io.h).
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local batch = require "perilune.data.batch"
local signature = require "perilune.signature"
local C, check = P.C, P.check

local wrap = P.handle("peri_logistic", {}, nil, "a LogisticRegression")
local out, loss = ffi.new "peri_logistic *[1]", ffi.new "double[1]"

local LogisticRegression = util.class "LogisticRegression"

--- rows: rows of every feature's table; dense_features: their number; lr; l2.
function LogisticRegression:init(args)
  local a = util.named("LogisticRegression", args, { rows = util.required, dense_features = util.required, lr = 0.05,
    l2 = 0 })
  local n = #signature.value("LogisticRegression", "rows", a.rows, "list")
  local rows = ffi.new("int64_t[?]", math.max(n, 1))
  for i = 1, n do rows[i - 1] = util.integer("LogisticRegression", ("rows[%d]"):format(i), a.rows[i], 1) end
  signature.value("LogisticRegression", "dense_features", a.dense_features, "int")
  local o = P.struct "peri_logistic_config"
  o.table_rows, o.sparse_features, o.dense_features, o.learning_rate, o.l2 = rows, n, a.dense_features, a.lr, a.l2
  check(C.peri_logistic_new(o, out))
  self._model = P.lasting(wrap, out[0])
end

--- Train on a host batch, one sample after the other. Returns the mean loss.
function LogisticRegression:train(host)
  check(C.peri_logistic_train(self._model.ptr, batch.host_ptr(host), loss))
  return loss[0]
end

--- Write the probabilities of a host batch's rows to a float array.
function LogisticRegression:predict(host, probabilities)
  local b = batch.host_ptr(host)
  if type(probabilities) ~= "cdata" or Tensor._room_of("LogisticRegression:predict", probabilities,
    "f32") < 4 * tonumber(b.rows) then
    P.fail(("LogisticRegression:predict: probabilities must be an array of %d floats"):format(tonumber(b.rows)))
  end
  check(C.peri_logistic_predict(self._model.ptr, b, probabilities))
end

return LogisticRegression
