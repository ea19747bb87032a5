-- Every C function that takes a pointer is called with nothing (NULL for every pointer, 0 for every number), with each
-- of its pointers missing while the others are there, with -1 things, with structures that are empty, of a wrong
-- size, or of a later header, and with members that are missing or of no meaning. One that can say an error must say
-- what is missing, or that there is nothing to do; the others answer nothing (0, NULL, false; -1 for a number that
-- counts from 0), and none crashes.
-- What such calls made is never released, which is no leak of the library's.
local shell = require "spec.support.shell"

--- What null_calls.lua prints from call number `first` on.
local function calls_from(first)
  local env = shell.luajit_env()
  env.ASAN_OPTIONS = (os.getenv "ASAN_OPTIONS" or "") .. ":detect_leaks=0"
  return shell.run(("luajit spec/support/null_calls.lua %d"):format(first), env, 600)
end

describe("C functions", function()
  it("say what is missing when they are called with NULL", function()
    local bad, first, found = {}, 1, nil
    while not found do
      local out = calls_from(first)
      local number, call, said
      for line in out:gmatch "[^\n]+" do
        local n, what = line:match "^call (%d+) (.*)$"
        found = line:match "^end (%d+)$"
        if n then number, call, said = tonumber(n), what, nil
        elseif found or line:match "^%-?%d+ " then
          said = true
          local system = line:match "^%-5 " -- PERI_EIO: it was left to the system to say
          if system or line:match "^%-%d+ .?.?.?$" then bad[#bad + 1] = ("%s: %s"):format(call, line) end
        else bad[#bad + 1] = ("%s: %s"):format(call, line) end
      end
      if not said then bad[#bad + 1] = ("%s crashes"):format(call) end
      assert(found or number and number >= first, "no call was made: " .. out)
      first = (number or 0) + 1
    end
    assert.same({}, bad)
    assert.is_true(tonumber(found) > 250, found .. " functions were found")
  end)
end)
