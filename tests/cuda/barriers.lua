-- barriers.lua: barriers of the block that only some threads may come to, in the PTX that nvcc makes of kernels/cuda. A GPU waits there for
-- ever, and most tests never see it.
--
--   local found = require("tests.cuda.barriers").of(text)     -- text of a .ptx: a list of { kernel =, line =, branch = }
--
-- A branch is divergent if its condition may differ between threads of a block: it comes from the number of the thread, from a load
-- whose address does, from an atomic operation, a shuffle or a vote, or from a register that was set under a divergent branch. What a
-- barrier hands out (bar.red), parameters and the number of the block are the same for all. A barrier is wrong if a divergent branch
-- decides whether, or how often, it is reached: from the branch there is a way to the end of the kernel, or back to it, without it.
--
-- This is a law about the code, not a count of its barriers, shuffles and votes: it needs no table that follows each change of a kernel,
-- and it does not mind how often a compiler unrolls.
local M = {}

--- Blocks of a kernel: a list of { code = { { line =, op =, args =, guard = } }, last = the jump at its end, next = { block, ... } }.
local function blocks_of(lines, first, last)
  local blocks, labels, block = {}, {}, nil
  local function open(number)
    block = { code = {}, next = {}, line = number }
    blocks[#blocks + 1] = block
  end
  open(first)
  for number = first, last do
    local line = lines[number]:gsub("//.*", "")
    local label = line:match "^%s*([%w_$]+):"
    if label then
      if #block.code > 0 or block.label then
        local before = block
        open(number)
        if not before.ended then before.next[#before.next + 1] = block end
      end
      block.label = label
      labels[label] = block
      line = line:gsub("^%s*[%w_$]+:", "")
    end
    for text in line:gmatch "([^;{}]*[{]?[^;{}]*[}]?[^;]*);" do -- one statement; vectors of registers are in braces
      local guard, rest = text:match "^%s*@!?(%%p%d+)%s+(.*)"
      rest = rest or text
      local op, args = rest:match "^%s*([%w_.:]+)%s*(.*)"
      if op and not op:find "^%." then
        local code = { line = number, op = op, args = args, guard = guard }
        block.code[#block.code + 1] = code
        if op:find "^bra" or op:find "^ret" or op:find "^exit" or op:find "^brx" then
          code.target = op:find "^bra" and args:match "[%w_$]+" or nil
          code.jumps = true
          local before = block
          before.last = code
          before.ended = not guard
          open(number + 1)
          if guard then before.next[1] = block end
        end
      end
    end
  end
  for _, b in ipairs(blocks) do
    if b.last and b.last.target then b.next[#b.next + 1] = assert(labels[b.last.target], "no label " .. b.last.target) end
  end
  return blocks
end

--- Which registers an instruction sets: the first operand, with all of a vector or a pair.
local function written(code)
  if code.op:find "^st" or code.op:find "^bar" and not code.op:find "red" or code.op:find "^red" or code.jumps then return {} end
  local first = code.args:match "^%b{}" or code.args:match "^[^,]*"
  local out = {}
  for r in first:gmatch "%%[%w_.]+" do out[#out + 1] = r end
  return out
end

--- post[b]: the set of blocks that every way from b to an end passes.
local function post_dominators(blocks)
  local all, post = {}, {}
  for _, b in ipairs(blocks) do all[b] = true end
  for _, b in ipairs(blocks) do
    if #b.next == 0 then post[b] = { [b] = true }
    else
      post[b] = {}
      for x in pairs(all) do post[b][x] = true end -- any order: a set
    end
  end
  local changed = true
  while changed do
    changed = false
    for i = #blocks, 1, -1 do
      local b = blocks[i]
      for x in pairs(post[b]) do -- any order: a set
        local kept = x == b or #b.next > 0
        for _, n in ipairs(b.next) do kept = kept and (x == b or post[n][x]) end
        if not kept then
          post[b][x] = nil
          changed = true
        end
      end
    end
  end
  return post
end

--- Blocks of which the branch at the end of @b decides whether (or how often) they are run.
local function decided(b, post)
  local out, todo = {}, {}
  for _, n in ipairs(b.next) do todo[#todo + 1] = n end
  while #todo > 0 do
    local x = table.remove(todo)
    if not out[x] and (x == b or not post[b][x]) then
      out[x] = true
      if x ~= b then
        for _, n in ipairs(x.next) do todo[#todo + 1] = n end
      end
    end
  end
  return out
end

local function check_kernel(name, lines, first, last, found)
  local blocks = blocks_of(lines, first, last)
  local has = false
  for _, b in ipairs(blocks) do
    for _, c in ipairs(b.code) do has = has or c.op:find "^bar%." and not c.op:find "warp" or c.op:find "^barrier" end
  end
  if not has then return 0 end
  local post = post_dominators(blocks)
  local before, under, deciders = {}, {}, {} -- registers that vary where a block begins; blocks under divergent branches: the branch
  for _, b in ipairs(blocks) do before[b] = {} end
  local changed = true
  local function special(r)
    return r:find "^%%tid" or r:find "^%%laneid" or r:find "^%%warpid" or r:find "^%%lanemask" or r:find "^%%clock" or r:find "^%%smid"
  end
  local function look(b)
    local varies = {}
    for r in pairs(before[b]) do varies[r] = true end -- any order: a set
    local function is_varying(r) return varies[r] or special(r) end
    for _, c in ipairs(b.code) do
      local dst, is = written(c), under[b] and true or false
      local result = c.args:match "^%b{}" or c.args:match "^[^,]*"
      local sources = #dst > 0 and c.args:sub(#result + 1) or c.args
      for r in sources:gmatch "%%[%w_.]+" do is = is or is_varying(r) and true or false end
      if c.op:find "^atom" or c.op:find "^shfl" or c.op:find "^vote" or c.op:find "^match" or c.op:find "^activemask" or
        c.op:find "^redux" then is = true end
      if c.op:find "^bar.*red" then is = under[b] and true or false end
      for _, r in ipairs(dst) do
        if c.guard then varies[r] = varies[r] or is or is_varying(c.guard) or nil else varies[r] = is or nil end
      end
    end
    local last_code = b.last
    if last_code and last_code.guard and not deciders[b] and (is_varying(last_code.guard) or under[b]) then
      deciders[b], changed = true, true
      for x in pairs(decided(b, post)) do under[x] = under[x] or last_code end -- any order: each gets the same
    end
    for _, n in ipairs(b.next) do
      for r in pairs(varies) do -- any order: a set
        if not before[n][r] then before[n][r], changed = true, true end
      end
    end
  end
  while changed do
    changed = false
    for _, b in ipairs(blocks) do look(b) end
  end
  local barriers = 0
  for _, b in ipairs(blocks) do
    for _, c in ipairs(b.code) do
      if c.op:find "^bar%." and not c.op:find "warp" or c.op:find "^barrier" then
        barriers = barriers + 1
        if under[b] then found[#found + 1] = { kernel = name, line = c.line, branch = under[b].line } end
      end
    end
  end
  return barriers
end

--- The barriers in the text of a .ptx that only some threads may come to; and how many kernels and barriers there are.
function M.of(text)
  local lines, found, kernels, barriers = {}, {}, 0, 0
  for line in (text .. "\n"):gmatch "([^\n]*)\n" do lines[#lines + 1] = line end
  local name, first
  for number, line in ipairs(lines) do
    local entry = line:match "%.entry%s+([%w_$]+)" or line:match "%.func.-%s([%w_$]+)%s*%("
    if entry then name, first = entry, nil end
    if name and not first and line:match "^{" then first = number + 1 end
    if name and first and line:match "^}" then
      kernels = kernels + 1
      barriers = barriers + check_kernel(name, lines, first, number - 1, found)
      name, first = nil, nil
    end
  end
  return found, kernels, barriers
end

return M
