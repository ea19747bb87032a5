-- barriers.lua: barriers of the block that only some threads may come to, in the PTX that nvcc makes of kernels/cuda. A
-- GPU waits there for ever, and most tests never see it.
--
--   -- text of a .ptx: a list of { kernel =, line =, branch = }
--   local found = require("tests.cuda.barriers").of(text)
--
-- A branch is divergent if its condition may differ between threads of a block: it comes from the number of the thread,
-- from a load whose address does, from an atomic operation, a shuffle or a vote, or from a register that was set under
-- a divergent branch. What a barrier hands out (bar.red), parameters and the number of the block are the same for all.
-- A barrier is wrong if a divergent branch decides whether, or how often, it is reached: from the branch there is a way
-- to the end of the kernel, or back to it, without it.
--
-- This is a law about the code, not a count of its barriers, shuffles and votes: it needs no table that follows each
-- change of a kernel, and it does not mind how often a compiler unrolls.
local M = {}

--- Blocks of a kernel: a list of { code = { { line =, op =, args =, guard = } }, last = the jump at its end, next = {
--- block, ... } }.
local function blocks_of(lines, first, last)
  local blocks, labels, block = {}, {}, nil
  local function open(number)
    block = { code = {}, next = {}, line = number }
    blocks[#blocks + 1] = block
  end
  open(first)
  local call -- the lines of one that has not ended yet
  for number = first, last do
    local line = lines[number]:gsub("//.*", "")
    if call or line:find "^%s*call" or line:find "^%s*@!?%%p%d+%s+call" then
      call = (call or "") .. line
      line = call:find ";" and call or ""
      if line ~= "" then call = nil end
    end
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
    if b.last and b.last.target then
      b.next[#b.next + 1] = assert(labels[b.last.target], "no label " .. b.last.target)
    end
  end
  return blocks
end

--- Which registers an instruction sets: the first operand, with all of a vector or a pair.
local function written(code)
  if code.op:find "^st" or code.op:find "^bar" and not code.op:find "red" or code.op:find "^red" or code.jumps then
    return {}
  end
  local first = code.args:match "^%b{}" or code.args:match "^[^,]*"
  local out = {}
  for r in first:gmatch "%%[%w_.]+" do out[#out + 1] = r end
  return out
end

--- The block behind each block that every way from it to an end passes first (its immediate post-dominator; nil: the
--- end itself), by the algorithm of Cooper, Harvey and Kennedy ("A Simple, Fast Dominance Algorithm", 2001) on the ways
--- backwards.
local function post_dominators(blocks)
  local final = { next = {} } -- where all ways end
  local before, order, number, seen = { [final] = {} }, {}, {}, {}
  for _, b in ipairs(blocks) do before[b] = {} end
  local function ways(b) return b ~= final and #b.next == 0 and { final } or b.next end
  for _, b in ipairs(blocks) do
    for _, n in ipairs(ways(b)) do table.insert(before[n], b) end
  end
  local todo = { { final, 0 } } -- depth first, backwards from the end; a block is numbered when all before it are
  seen[final] = true
  while #todo > 0 do
    local top = todo[#todo]
    top[2] = top[2] + 1
    local b = before[top[1]][top[2]]
    if not b then
      order[#order + 1], number[top[1]] = top[1], #order + 1
      todo[#todo] = nil
    elseif not seen[b] then
      seen[b] = true
      todo[#todo + 1] = { b, 0 }
    end
  end
  local post, changed = { [final] = final }, true
  local function meet(x, y)
    while x ~= y do
      while number[x] < number[y] do x = post[x] end
      while number[y] < number[x] do y = post[y] end
    end
    return x
  end
  while changed do
    changed = false
    for i = #order - 1, 1, -1 do
      local b, found = order[i], nil
      for _, n in ipairs(ways(b)) do
        if post[n] then found = found and meet(found, n) or n end
      end
      if found and post[b] ~= found then post[b], changed = found, true end
    end
  end
  post[final] = nil
  return post
end

--- Blocks of which the branch at the end of @b decides whether (or how often) they are run: what is met before the
--- block that all ways pass.
local function decided(b, post)
  local passed, at = {}, post[b]
  while at do passed[at], at = true, post[at] end
  local out, todo = {}, {}
  for _, n in ipairs(b.next) do todo[#todo + 1] = n end
  while #todo > 0 do
    local x = table.remove(todo)
    if not out[x] and not passed[x] then
      out[x] = true
      if x ~= b then
        for _, n in ipairs(x.next) do todo[#todo + 1] = n end
      end
    end
  end
  return out
end

--- Whether a barrier of the block is reached here: one of its own, or one of a function that is called.
local function is_barrier(c)
  return c.op:find "^bar%." and not c.op:find "warp" or c.op:find "^barrier" or c.callee ~= nil
end

local function special(r)
  return r:find "^%%tid" or r:find "^%%laneid" or r:find "^%%warpid" or r:find "^%%lanemask" or r:find "^%%clock"
    or r:find "^%%smid"
end

--- What is looked at again and again of an instruction of @routine: the registers that it sets and reads, whether what
--- it gives differs by itself, and which function that comes to a barrier it calls.
local function prepare(c, routine, functions)
  c.sets, c.reads = written(c), {}
  local result = c.args:match "^%b{}" or c.args:match "^[^,]*"
  for r in (#c.sets > 0 and c.args:sub(#result + 1) or c.args):gmatch "%%[%w_.]+" do
    c.reads[#c.reads + 1] = r
    c.differs = c.differs or special(r) and true
  end
  if c.guard then c.reads[#c.reads + 1] = c.guard end
  for _, op in ipairs { "^atom", "^shfl", "^vote", "^match", "^activemask", "^redux" } do
    c.differs = c.differs or c.op:find(op) and true
  end
  if c.op:find "^ld%.param" then
    c.differs = c.args:find("[retval", 1, true) ~= nil or routine.differing[c.args:match "_param_(%d+)"] or false
  elseif c.op:find "^st%.param" then
    c.hands = c.args:match "%[param(%d+)"
  elseif c.op:find "^call" then
    for word in c.args:gmatch "[%w_$]+" do
      if functions[word] and functions[word].waits then c.callee = functions[word] end
    end
  end
  c.shared = c.op:find "^bar.*red" ~= nil -- one result for all that are there
end

--- The registers of @blocks: how many instructions set each.
local function count_sets(blocks)
  local times = {}
  for _, b in ipairs(blocks) do
    for _, c in ipairs(b.code) do
      for _, r in ipairs(c.sets) do times[r] = (times[r] or 0) + 1 end
    end
  end
  return times
end

--- Note that the call @c hands over parameters that differ between threads: its function has to be looked at again.
local function hand_over(c, handed)
  for n in pairs(handed) do -- any order: a set
    if not c.callee.differing[n] then c.callee.differing[n], c.callee.stale = true, true end
  end
end

--- Look at a kernel or a function. A register that one instruction sets varies or not; of one that several set it is
--- known for the beginning of each block. There are few of those: what a loop changes, what two ways have made.
--- Afterwards routine.wrong are the lines of its barriers that only some threads come to, with those of the branches.
local function check(routine, lines, functions)
  local blocks = blocks_of(lines, routine.first, routine.last)
  local post, varies, under, deciders, changed = post_dominators(blocks), {}, {}, {}, true
  local before = {} -- registers of several instructions that vary where a block begins
  for _, b in ipairs(blocks) do
    before[b] = {}
    for _, c in ipairs(b.code) do prepare(c, routine, functions) end
  end
  local times = count_sets(blocks)
  local function look(b)
    local here, handed = {}, {}
    for r in pairs(before[b]) do here[r] = true end -- any order: a set
    for _, c in ipairs(b.code) do
      local is = under[b] and true or not c.shared and c.differs or false
      for i = 1, c.shared and 0 or #c.reads do is = is or varies[c.reads[i]] or here[c.reads[i]] or false end
      for _, r in ipairs(c.sets) do
        if times[r] > 1 then here[r] = is or c.guard and here[r] or nil
        elseif is and not varies[r] then varies[r], changed = true, true end
      end
      if c.hands and is then handed[c.hands] = true end
      if c.callee then hand_over(c, handed) end
      if c.op:find "^call" then handed = {} end
      if c.guard and (varies[c.guard] or here[c.guard]) then c.alone = true end
    end
    local jump = b.last
    if jump and jump.guard and not deciders[b] and (varies[jump.guard] or here[jump.guard] or under[b]) then
      deciders[b], changed = true, true
      for x in pairs(decided(b, post)) do under[x] = under[x] or jump end -- any order: each gets the same
    end
    for _, n in ipairs(b.next) do
      for r in pairs(here) do -- any order: a set
        if not before[n][r] then before[n][r], changed = true, true end
      end
    end
  end
  while changed do
    changed = false
    for _, b in ipairs(blocks) do look(b) end
  end
  routine.barriers, routine.wrong, routine.stale = 0, {}, false
  for _, b in ipairs(blocks) do
    for _, c in ipairs(b.code) do
      local branch = under[b] or c.alone and c
      if is_barrier(c) then routine.barriers = routine.barriers + 1 end
      if is_barrier(c) and branch then
        routine.wrong[#routine.wrong + 1] = { kernel = routine.name, line = c.line, branch = branch.line }
      end
    end
  end
end

--- The kernels and functions of a text, in its order: a list of
---   { name =, first =, last =    lines between its braces
---     waits =                    a barrier is in it, or in what it calls
---     calls =                    names of what it calls
---     differing =                numbers of the parameters that differ between threads, as keys
---     stale = }                  it is to be looked at (again)
--- and the functions among them by name.
local function routines_of(lines)
  local list, functions, open = {}, {}, nil
  for number, line in ipairs(lines) do
    local entry, called = line:match "%.entry%s+([%w_$]+)", line:match "%.func.-%s([%w_$]+)%s*%(?$"
    if entry or called then
      open = { name = entry or called, differing = {}, calls = {}, stale = true }
      if called then functions[called] = open end
    end
    if open and not open.first and line:match ";%s*$" then open = nil end -- declared, not defined
    if open and not open.first and line:match "^{" then open.first = number + 1 end
    if open and open.first and line:match "^}" then
      open.last = number - 1
      list[#list + 1], open = open, nil
    elseif open and open.first then
      open.waits = open.waits or line:find "^%s*bar" ~= nil or line:find "^%s*@!?%%p%d+%s+bar" ~= nil
      open.calls[#open.calls + 1] = line:match "^%s*([%a_$][%w_$]*),%s*$" or line:match "call.*[%s,]([%w_$]+)%s*[,;]"
    end
  end
  return list, functions
end

--- The barriers in the text of a .ptx that only some threads may come to; and how many barriers, and calls that come to
--- one, there are.
function M.of(text)
  local lines, found, barriers, changed = {}, {}, 0, true
  for line in (text .. "\n"):gmatch "([^\n]*)\n" do lines[#lines + 1] = line end
  local routines, functions = routines_of(lines)
  while changed do
    changed = false
    for _, r in ipairs(routines) do
      for _, name in ipairs(r.waits and {} or r.calls) do
        if functions[name] and functions[name].waits then r.waits, changed = true, true end
      end
    end
  end
  repeat
    changed = false
    for _, r in ipairs(routines) do
      if r.waits and r.stale then
        check(r, lines, functions)
        changed = true
      end
    end
  until not changed
  for _, r in ipairs(routines) do
    barriers = barriers + (r.barriers or 0)
    for _, w in ipairs(r.wrong or {}) do found[#found + 1] = w end
  end
  return found, barriers
end

return M
