-- operations.lua: the kinds of operations that a schedule is made of: what each needs of its batch, what it makes of
-- it, and what it reads and changes beside. The checker knows operations by these lines only; what they do is in
-- actions.lua.
--
-- Of a batch: "host" (as the loader gave it), "batch" (on the device), "sent" (its ids are on their way), "ids" (they
-- have arrived), "rows" (looked up, on their way back), "loss" (and all that its backward pass needs), "grad" (its part
-- of the gradients is made); of a stage of a model: "input" (what the stage before makes is on its way), "upstream" (so
-- is the gradient of what this one made). Beside batches: "source" (the loader), "tables", "cache" (of tables in
-- files), "table_grads" (kept for an update), "grads" and "dense" (of the dense part).
local P = require "perilune.ffi"
local util = require "perilune.util"
local kind_of = require("perilune.errors").kind
local signature = require "perilune.signature"

local M = {}

--- What operations can need and make of a batch, and what they can read and change beside.
M.of_batch = { "host", "batch", "sent", "ids", "rows", "input", "loss", "upstream", "grad" }
M.beside = { "source", "cache", "tables", "table_grads", "grads", "dense" }

--- A kind: needs, makes (lists of M.of_batch); reads, changes (lists of M.beside, or other words, which mean what user
--- operations say); posts: channels on which it posts operations of all ranks; early: it may act on a batch of which
--- only this rank knows.
local kinds = {
  load = { makes = { "host" }, changes = { "source" }, early = true },
  to_device = { needs = { "host" }, makes = { "batch" }, early = true },
  input_dist = { needs = { "batch" }, makes = { "sent" }, posts = { "control", "ids" } },
  wait_dist = { needs = { "sent" }, makes = { "ids" } },
  prefetch = { needs = { "ids" }, changes = { "cache" } },
  lookup = { needs = { "ids" }, makes = { "rows" }, reads = { "tables" }, changes = { "cache" }, posts = { "rows" } },
  forward = { needs = { "batch", "rows" }, makes = { "loss" }, reads = { "dense" } },
  backward = { needs = { "loss" }, makes = { "grad" }, reads = { "dense" }, changes = { "tables", "cache", "grads" },
    posts = { "rows", "dense" } },
  wait_grads = { needs = { "grad" }, changes = { "grads" } },
  update = { needs = { "grad" }, changes = { "tables", "table_grads", "grads" }, posts = { "dense" }, closes = true },
  optimizer = { needs = { "grad" }, reads = { "grads" }, changes = { "dense" }, closes = true },
  zero_grad = { changes = { "grads" } },
  sync = { needs = { "grad" }, changes = { "tables" }, posts = { "dense" } },
  receive = { needs = { "batch" }, makes = { "input" }, posts = { "activations" } },
  send = { needs = { "loss" }, posts = { "activations" } },
  receive_grad = { needs = { "loss" }, makes = { "upstream" }, posts = { "gradients" } },
  send_grad = { needs = { "grad" }, posts = { "gradients" } },
}
M.kinds = kinds

--- Names of the kinds that the library has, in the order in which a batch meets them.
M.built_in = { "load", "to_device", "input_dist", "wait_dist", "prefetch", "lookup", "receive", "forward", "send",
  "zero_grad", "receive_grad", "backward", "send_grad", "wait_grads", "update", "sync", "optimizer" }

local OWN_CHANNELS = 11

local own_arguments = { run = util.required, needs = util.optional.list, makes = util.optional.list,
  reads = util.optional.list, changes = util.optional.list, posts = util.optional }

--- The kind of a user's operation: { run = function(context, pipeline), needs =, reads =, changes = (lists), posts =
--- "own1" ... }.
function M.own(func, name, fields)
  local a = util.named(("%s: operation '%s'"):format(func, name), fields, own_arguments)
  local function fail(text, ...) P.fail(("%s: operation '%s': " .. text):format(func, name, ...)) end
  if not util.is_callable(a.run) then fail("run is %s, wanted a function(context, pipeline)", kind_of(a.run)) end
  local known = util.index_of(M.of_batch)
  for _, list in ipairs { "needs", "makes", "reads", "changes" } do
    for _, what in ipairs(a[list] or {}) do
      if type(what) ~= "string" or list == "makes" and known[what] then
        fail("%s has %s, wanted a name%s", list, kind_of(what), list == "makes" and " of its own" or "")
      end
    end
  end
  local channel = type(a.posts) == "string" and tonumber(a.posts:match "^own([1-9]%d?)$")
  if a.posts ~= nil and not (channel and channel <= OWN_CHANNELS) then
    fail("posts is %s, allowed: own1 to own%d, channels of schedules", kind_of(a.posts), OWN_CHANNELS)
  end
  return { run = a.run, needs = a.needs, makes = a.makes, reads = a.reads, changes = a.changes, posts = a.posts
    and { a.posts }, channel = a.posts, own = true }
end

--- Register a user's kind, which schedules then use by name: what M.own takes.
function M.register(name, fields)
  local func = "pipeline.register"
  if type(name) ~= "string" or not name:match "^[%a_][%w_]*$" then
    P.fail(("%s: name is %s, wanted letters, digits and lines"):format(func, kind_of(name)))
  end
  if kinds[name] and not kinds[name].own then P.fail(("%s: '%s' is an operation of the library"):format(func, name)) end
  kinds[name] = M.own(func, name, fields)
end

--- What the operations of one schedule do, where some leave to others what they could do themselves: without
--- "to_device" batches stay where they are; without "input_dist" ids leave with the lookup, without "lookup" with the
--- forward pass; with "update" tables and averages wait for it. Returns by kind: { needs =, makes =, reads =, changes
--- =, posts =, ... }, lists.
function M.resolve(present)
  local out = {}
  for name, kind in util.ordered(kinds) do
    local k = { closes = kind.closes, early = kind.early, own = kind.own, run = kind.run, channel = kind.channel }
    for _, list in ipairs { "needs", "makes", "reads", "changes", "posts" } do k[list] = util.copy(kind[list] or {}) end
    out[name] = k
  end
  local function add(k, list, values)
    for _, value in ipairs(values) do k[list][#k[list] + 1] = value end
  end
  if not present.to_device then add(out.load, "makes", { "batch" }) end
  if not present.wait_dist then add(out.input_dist, "makes", { "ids" }) end
  if not present.input_dist then
    out.lookup.needs, out.lookup.posts = { "batch" }, { "control", "ids", "rows" }
  end
  if not present.lookup then
    local ids = present.input_dist
    out.forward.needs = ids and { "batch", "ids" } or { "batch" }
    add(out.forward, "reads", { "tables" })
    add(out.forward, "changes", { "cache" })
    out.forward.posts = ids and { "rows" } or { "control", "ids", "rows" }
  end
  if present.receive then add(out.forward, "needs", { "input" }) end
  if present.receive_grad then add(out.backward, "needs", { "upstream" }) end
  if present.update then
    out.backward.changes, out.backward.posts = { "table_grads", "grads" }, { "rows" }
  end
  return out
end

signature.check("pipeline.", M, { register = "name: any, fields: any" })

return M
