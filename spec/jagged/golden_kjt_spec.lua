-- KeyedJaggedTensor against TorchRec's own results (spec/golden/ops/kjt), on both devices.
--
-- Two differences are on purpose: offsets have one entry more than there are bags also when there is no key at all
-- (TorchRec: none); and permute and split keep the inverse indices of their keys, which TorchRec drops, so that no
-- lookup of the result can be right.
-- cuda: always
local peri = require "perilune"
local golden = require "spec.support.golden"
local KJT = peri.KeyedJaggedTensor

local function orderly(list) -- JSON lists without the decoder's metatables
  if type(list) ~= "table" then return list end
  local out = {}
  for k, v in pairs(list) do out[k] = orderly(v) end
  return out
end

local function is_null(x) return x == nil or x == require("dkjson").null end

local function make(case, prefix, device, from)
  local about = case.args[prefix]
  local per_rank = not is_null(about.stride_per_key_per_rank) and about.stride_per_key_per_rank or nil
  local a = { keys = orderly(about.keys), values = case:tensor(prefix .. ".values", device),
    weights = case:tensor(prefix .. ".weights", device), stride_per_key_per_rank = orderly(per_rank) }
  if from ~= "offsets" then a.lengths = case:tensor(prefix .. ".lengths", device) end
  if from ~= "lengths" then a.offsets = case:tensor(prefix .. ".offsets", device) end
  if not is_null(about.inverse_keys) then
    a.inverse_indices = { orderly(about.inverse_keys), case:tensor(prefix .. ".inverse_indices", device) }
  end
  return KJT(a)
end

--- The inverse indices of keys `names` as those of `whole` (a KJT that has some).
local function assert_inverse_of(whole, names, kjt)
  local known, rows, wanted, list = whole:inverse_indices(), {}, peri.util.index_of(names), {}
  for i, name in ipairs(known[1]) do
    if wanted[name] then list[#list + 1], rows[#rows + 1] = name, known[2]:to_table()[i] end
  end
  local got = kjt:inverse_indices()
  assert.same(list, got[1])
  assert.same(rows, got[2]:to_table())
  assert.same({ #list, known[2]:size(2) }, got[2]:shape())
end

--- `whole`: the KJT of which kjt has some keys.
local function assert_is(case, prefix, kjt, whole)
  local about = case.args[prefix]
  for _, name in ipairs { "keys", "stride", "stride_per_key", "length_per_key", "offset_per_key",
    "lengths_offset_per_key", "index_per_key" } do
    assert.same(orderly(about[name]), kjt[name](kjt), prefix .. "." .. name)
  end
  assert.equal(about.variable_stride_per_key, kjt:variable_stride_per_key())
  if about.variable_stride_per_key then
    assert.same(orderly(about.stride_per_key_per_rank), kjt:stride_per_key_per_rank())
  end
  case:assert_near(prefix .. ".values", kjt:values())
  case:assert_near(prefix .. ".lengths", kjt:lengths())
  if #about.keys > 0 then case:assert_near(prefix .. ".offsets", kjt:offsets())
  else assert.same({ 0 }, kjt:offsets():to_list()) end
  if case:has(prefix .. ".weights") then case:assert_near(prefix .. ".weights", kjt:weights())
  else assert.is_nil(kjt:weights_or_none()) end
  if whole and whole:inverse_indices_or_none() then
    assert_inverse_of(whole, kjt:keys(), kjt)
  elseif is_null(about.inverse_keys) then
    assert.is_nil(kjt:inverse_indices_or_none())
  else
    assert.same(orderly(about.inverse_keys), kjt:inverse_indices()[1])
    case:assert_near(prefix .. ".inverse_indices", kjt:inverse_indices()[2])
  end
end

local checks = {}

function checks.layout(case, device)
  for _, from in ipairs { "lengths", "offsets", "both" } do
    assert_is(case, "out.0", make(case, "in.0", device, from))
    assert_is(case, "out.0", make(case, "in.0", device, from):validate())
    assert_is(case, "out.0", make(case, "in.0", device, from):to(device == "cpu" and "opaque" or "cpu"))
  end
end
function checks.from_lengths_sync(case, device)
  local k = make(case, "in.0", device)
  assert_is(case, "out.0",
    KJT.from_lengths_sync { keys = k:keys(), values = k:values(), weights = k:weights_or_none(),
      lengths = k:lengths() })
end
function checks.from_offsets_sync(case, device)
  local k = make(case, "in.0", device)
  assert_is(case, "out.0",
    KJT.from_offsets_sync { keys = k:keys(), values = k:values(), weights = k:weights_or_none(),
      offsets = k:offsets() })
end
function checks.permute(case, device)
  for _, from in ipairs { "lengths", "offsets" } do
    local whole = make(case, "in.0", device, from)
    assert_is(case, "out.0", whole:permute(case.args.indices), whole)
  end
end
function checks.split(case, device)
  local whole = make(case, "in.0", device)
  local parts = whole:split(case.args.segments)
  assert.equal(case.args.out_count, #parts)
  for i, part in ipairs(parts) do assert_is(case, "out." .. i - 1, part, whole) end
end
function checks.concat(case, device)
  local list = {}
  for i = 1, case.args.in_count do list[i] = make(case, "in." .. i - 1, device) end
  assert_is(case, "out.0", KJT.concat(list))
end
function checks.to_dict(case, device)
  local kjt = make(case, "in.0", device)
  local dict = kjt:to_dict()
  for _, key in ipairs(kjt:keys()) do
    for _, jt in ipairs { dict[key], kjt[key] } do
      case:assert_near("out." .. key .. ".values", jt:values())
      case:assert_near("out." .. key .. ".lengths", jt:lengths())
      case:assert_near("out." .. key .. ".offsets", jt:offsets())
      if case:has("out." .. key .. ".weights") then case:assert_near("out." .. key .. ".weights", jt:weights())
      else assert.is_nil(jt:weights_or_none()) end
    end
  end
end
function checks.from_jt_dict(case, device)
  local kjt = make(case, "in.0", device)
  assert_is(case, "out.0", KJT.from_jt_dict(kjt:to_dict(), kjt:keys()))
end
function checks.dist(case, device)
  local about = case.args["in.0"]
  local kjt = KJT { keys = orderly(about.keys), values = case:tensor("in.0.values", device),
    lengths = case:tensor("in.0.lengths", device), weights = case:tensor("in.0.weights", device), stride = about.stride,
    stride_per_key_per_rank = orderly(about.stride_per_key_per_rank) }
  assert.same(orderly(case.args.labels), kjt:dist_labels())
  assert.same(orderly(case.args.splits), kjt:dist_splits(orderly(case.args.key_splits)))
  for i, tensor in ipairs(kjt:dist_tensors()) do case:assert_near("out.tensor." .. case.args.labels[i], tensor) end
end
function checks.dist_init(case, device)
  local a = case.args
  local kjt = KJT.dist_init { keys = orderly(a.keys), lengths = case:tensor("in.lengths", device),
    num_workers = a.num_workers, values = case:tensor("in.values", device), weights = case:tensor("in.weights", device),
    stagger = a.stagger, stride_per_rank = orderly(a.stride_per_rank) }
  assert_is(case, "out.0", kjt)
  -- TorchRec's order of single bags is ours of segments, written out; equal batches are given by segments there too.
  local recat, list, at = KJT.recat(#a.keys, a.num_workers, a.stagger), {}, { 0 }
  for s = 1, #a.keys * a.num_workers do at[s + 1] = at[s] + a.stride_per_rank[math.floor((s - 1) / #a.keys) + 1] end
  for _, s in ipairs(recat) do
    for bag = at[s + 1], at[s + 2] - 1 do list[#list + 1] = bag end
  end
  local want = case:list "in.recat"
  assert.same(want, #want == #recat and #want ~= #list and recat or #want == #list and list or recat)
end

for _, device in ipairs(require "spec.support.devices") do
  describe("KeyedJaggedTensor as TorchRec's on " .. device, function()
    local count = 0
    for _, name in ipairs(golden.names "ops/kjt") do
      local case = golden.load(name)
      if checks[case.args.op] then
        count = count + 1
        it(case.args.op .. ": " .. case.name, function() checks[case.args.op](case, device) end)
      end
    end
    it("covers the cases", function() assert.equal(62, count) end)
  end)
end

describe("KeyedJaggedTensor.recat", function()
  it("orders segments as TorchRec does", function()
    for _, c in ipairs(golden.document("ops/kjt/recat").cases) do
      assert.same(orderly(c.recat), KJT.recat(c.local_split, c.num_splits, c.stagger))
    end
    assert.same({ 0, 2, 1, 3 }, KJT.recat(1, 4, 2))
    assert.same({}, KJT.recat(0, 4, 2))
    assert.error_matches(function() KJT.recat(1, 4, 3) end, "stagger 3")
  end)
end)
