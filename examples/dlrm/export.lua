-- export.lua: the demonstration's model as `perilune export --model` wants it, and five questions for the server:
-- samples that nobody was trained on, as JSON, in OUT/question-1.json to question-5.json; OUT/answers.txt has what
-- became of them (1 or 0).
--
-- The words of examples/dlrm.lua stand in PERI_DEMO_WORDS, separated by spaces: the data and the model are made as it
-- makes them.
local peri = require "perilune"
local here = debug.getinfo(1, "S").source:match "^@(.*/)dlrm/[^/]*$" or "./examples/"
package.path = here .. "?.lua;" .. package.path
local settings = require "dlrm.options"
local sources = require "dlrm.sources"
local json = require "dkjson"

peri.init()
local QUESTIONS, BATCHES, SAMPLES = 5, 4, 512

local words = {}
for word in (os.getenv "PERI_DEMO_WORDS" or ""):gmatch "%S+" do words[#words + 1] = word end
local options = settings.parse(words, here)
local data = sources.open(options, function() end)
peri.ffi.state.seed = options.seed
local model = dofile(options.model) { tables = data.tables, dense_features = data.dense_features,
  embedding_dim = options.dim, learning_rate = options.learning_rate, eps = options.eps }

--- The numbers of sample i of a batch by the names of its features.
local function question(batch, i)
  local kjt, features = batch.sparse_features, {}
  local offsets, values = kjt:offsets():to_list(), kjt:values():to_list()
  for k, key in ipairs(kjt:keys()) do
    local at, ids = (k - 1) * kjt:stride() + i, {}
    for j = offsets[at] + 1, offsets[at + 1] do ids[#ids + 1] = values[j] end
    features[key] = setmetatable(ids, { __jsontype = "array" })
  end
  features.dense_features = batch.dense_features:slice(1, i - 1, i):to_list()
  return json.encode { instances = { features } }
end

local function write(name, text)
  local path = options.out .. "/" .. name
  local file = assert(io.open(path, "w"))
  file:write(text)
  file:close()
end

local batches = {}
for batch in data.loader { part = "test", batch_size = SAMPLES } do
  batches[#batches + 1] = { dense_features = peri.keep(batch.dense_features),
    sparse_features = peri.keep(batch.sparse_features), labels = peri.keep(batch.labels) }
  if #batches == BATCHES then break end
end

--- The first QUESTIONS samples of the batch whose labels alternate as far as they can: with few clicks among the
--- samples, the first ones in the file would all be 0.
local labels, asked, answers = batches[1].labels:to_list(), {}, {}
for i = 1, #labels do
  if #asked < QUESTIONS and (labels[i] ~= answers[#answers] or #labels - i < QUESTIONS - #asked) then
    asked[#asked + 1], answers[#answers + 1] = i, labels[i]
  end
end
for n, i in ipairs(asked) do write(("question-%d.json"):format(n), question(batches[1], i)) end
write("answers.txt", table.concat(answers, "\n") .. "\n")

return { model = model, batches = batches, name = "demo" }
