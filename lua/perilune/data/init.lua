-- data: where batches come from. Each loader is called for the next batch, so `for batch in loader do ... end` goes
-- over all of them.
local util = require "perilune.util"

return util.face("peri.data", {
  Batch = require("perilune.data.batch").Batch,
  host_batch = require("perilune.data.batch").host_batch,
  share = require("perilune.data.batch").share,
  upload = require("perilune.data.batch").upload,
  Generator = require "perilune.data.generator",
  Loader = require "perilune.data.loader",
  LogisticRegression = require "perilune.data.logistic",
  criteo = require "perilune.data.criteo",
  cache = require "perilune.data.cache",
  csv = require "perilune.data.csv",
  hash = require "perilune.data.hash",
  npy = require "perilune.data.npy",
  debian = require "perilune.data.debian",
  samples = require "perilune.data.samples",
  synthetic = require "perilune.data.synthetic",
})
