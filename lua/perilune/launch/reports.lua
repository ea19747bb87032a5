-- launch/reports.lua: what failing ranks have to say, put together by the launcher: the same error of several ranks is
-- told once.
--
-- Under the launcher a rank does not print its error but sends it as a note in its standard error (see job.lua), which
-- reaches the launcher from every machine: "\x1eerror rank 0 message\x1fdetails\n", with its ends of lines as "\x1d".
-- It waits for a moment before it ends the job, so that the ranks that fail alike can say so too.
local M = {}

--- Seconds that a failing rank leaves to the others, which on a loaded machine may not run for half of one. And after
--- how many the launcher prints what has come even if the job goes on.
M.MOMENT, M.COMPLETE = 1, 2

local DETAILS = 3000 -- bytes; mpirun passes up to 4096 bytes of one rank on without other ranks' in between

--- The note of a rank's error. details: stack and place in C, or "".
function M.note(rank, message, details)
  local function flat(text) return (text:gsub("[\29-\31]", " "):gsub("\n", "\29")) end
  return ("\30error %d 0 %s\31%s\n"):format(rank, flat(message), flat(details:sub(1, DETAILS)))
end

--- "rank 3", "ranks 0-2, 5"
local function list(numbers)
  table.sort(numbers)
  local parts, i = {}, 1
  while i <= #numbers do
    local last = i
    while numbers[last + 1] == numbers[last] + 1 do last = last + 1 end
    parts[#parts + 1] = last == i and tostring(numbers[i]) or ("%d-%d"):format(numbers[i], numbers[last])
    i = last + 1
  end
  return (#numbers > 1 and "ranks " or "rank ") .. table.concat(parts, ", ")
end

--- Reports of a job of so many ranks. `take(rank, text)`: a note's text; `count`: how many wait to be printed;
--- `flush()`: their lines; `said`: which ranks have reported ever, n_said of them; `blind`: one has waited in vain for
--- ranks that its machine does not have.
function M.new(ranks)
  local R, waiting, index = { count = 0, said = {}, n_said = 0, blind = false }, {}, {}

  function R.take(rank, text)
    local message, details = text:gsub("\29", "\n"):match "^(.-)\31(.*)$"
    if not message then return end
    R.first = R.first or message
    R.n_said, R.said[rank] = R.n_said + (R.said[rank] and 0 or 1), true
    R.blind = R.blind or message:find "took longer than .*no process on " ~= nil
    -- Each rank names itself in errors of exchanges; that it is this rank is no difference.
    local key = message:gsub(("%%f[%%w]rank %d of (%%d+) in group"):format(rank), "one rank of %1 in group")
    local entry = index[key]
    if not entry then
      entry = { key = key, message = message, details = details, ranks = {} }
      waiting[#waiting + 1], index[key] = entry, entry
    end
    entry.ranks[#entry.ranks + 1] = rank
    R.count = R.count + 1
  end

  --- The reports that wait, in the order in which they came.
  function R.flush()
    local lines = {}
    for _, e in ipairs(waiting) do
      local head = ranks > 1 and ("[%s] "):format(list(e.ranks)) or "perilune: "
      lines[#lines + 1] = head .. (#e.ranks > 1 and e.key or e.message) .. "\n"
        .. (e.details ~= "" and e.details .. "\n" or "")
    end
    waiting, index, R.count = {}, {}, 0
    return table.concat(lines)
  end

  return R
end

return M
