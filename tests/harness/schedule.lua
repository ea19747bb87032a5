-- schedule.lua: which programs of tests/run.lua run beside each other, in which order; and what they took.
--
-- A program has a weight, of which the machine takes as much as it has processors: 1 is usual, a program that mostly
-- waits has a third, and one that runs alone, such as ranks on several machines, has all of it. Long programs begin
-- first, so that none of them is left over at the end with idle processors beside it.
local process = require "tests.harness.process"

local M = {}

-- processors that one of several programs takes that mostly wait: for deadlines, for processes to start and to end
local WAITS = 1 / 3

--- What the head of a file says of its time: usual seconds ("takes: 40 s"; 0: few), and its weight beside others
--- ("takes: 40 s, mostly waits"; "runs alone": all that there is).
function M.of_head(head)
  local takes, how = head:match "takes: (%d+) s([^\n]*)"
  return tonumber(takes) or 0, head:match "%-%- runs alone" and math.huge or how and how:match "mostly waits" and WAITS
    or 1
end

--- Programs ({ takes =, weight =, ... }) in the order in which they are begun: in a random one, but long ones first,
--- and those that run alone last.
function M.order(jobs, limit)
  for i = #jobs, 2, -1 do
    local k = math.random(i)
    jobs[i], jobs[k] = jobs[k], jobs[i]
  end
  local place, order = {}, {}
  for i, j in ipairs(jobs) do place[j], order[i] = i, j end
  local function alone(j) return limit > 1 and j.weight >= limit end
  table.sort(order, function(a, b)
    if alone(a) ~= alone(b) then return alone(b) end
    if a.takes ~= b.takes then return a.takes > b.takes end
    return place[a] < place[b]
  end)
  return order
end

--- Run programs: start(j) sets j.process; finish(j) is called when it has ended; changed(running) after each of both.
--- What fits beside the running ones is begun before what does not, except that nothing overtakes one that runs alone.
function M.run(order, limit, start, finish, changed)
  local waiting, running, load = { unpack(order) }, {}, 0
  while #waiting > 0 or #running > 0 do
    local at = 1
    while at <= #waiting do
      local j = waiting[at]
      if #running == 0 or load + j.weight <= limit + 1e-6 then
        table.remove(waiting, at)
        start(j)
        running[#running + 1], load = j, load + j.weight
        changed(running)
      elseif j.weight >= limit then break
      else at = at + 1 end
    end
    for i = #running, 1, -1 do
      local j = running[i]
      if process.poll(j.process) then
        table.remove(running, i)
        load = #running == 0 and 0 or load - j.weight
        finish(j)
        changed(running)
      end
    end
    process.sleep(0.005)
  end
end

local MOST = 10 -- programs

--- The lines about the slowest programs by processor seconds, and about all of them beside a budget of processor
--- seconds, which fails nothing: other work on a machine makes programs slower by far, but changes their processor
--- seconds little. budget: nil: of no matter.
function M.report(jobs, budget)
  local list, all = {}, 0
  for i, j in ipairs(jobs) do
    list[i] = j
    all = all + (j.process.cpu_seconds or 0)
  end
  table.sort(list, function(a, b)
    local x, y = a.process.cpu_seconds or 0, b.process.cpu_seconds or 0
    if x ~= y then return x > y end
    return a.name < b.name
  end)
  local lines = { ("the slowest of %d programs, in processor seconds (and seconds):"):format(#jobs) }
  for i = 1, math.min(MOST, #list) do
    lines[i + 1] = ("  %7.1f (%5.1f) %s"):format(list[i].process.cpu_seconds or 0, list[i].process.seconds,
      list[i].name)
  end
  lines[#lines + 1] = ("all programs: %.0f processor seconds%s"):format(all, budget and (all > budget
    and ("; OVER THE BUDGET of %d (tests/run.lua): make the slowest quicker"):format(budget)
    or (" of a budget of %d"):format(budget)) or "")
  return lines
end

return M
