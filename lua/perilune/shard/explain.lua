-- explain.lua: how the rows of a batch go between buffers and results (runtime/shard/rows.h).
local ShardedModule = require "perilune.shard.module"
local signature = require "perilune.signature"

local M = {}

--- Print on each rank, and return as text, where the rows of a batch lie in a sharded module, who takes them to the
--- results (the lookup, the transport, or a copy through a buffer), and the same of their gradients. The ids of the
--- batch travel, nothing is looked up. Collective. `a`, `b`, `c`: what the module's forward takes.
function M.explain(module, a, b, c)
  local dist = module:input_dist(a, b, c):wait()
  local text = module:_explain(dist)
  dist:give_up()
  print(text)
  return text
end

signature.kind("Sharded", "a sharded module", ShardedModule.is)
signature.check("peri.shard.", M, { explain = "module: Sharded, a: any, b: any, c: any" })

return M
