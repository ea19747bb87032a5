-- Every C function that takes a pointer is called with nothing (NULL for every pointer, 0 for every number), with each
-- of its pointers missing while the others are there, with -1 things, and with structures that are empty, of a wrong
-- size, or of a later header. One that can say an error must say what is missing, or that
-- there is nothing to do; the others answer nothing (0, NULL, false; -1 for a number that counts from 0), and none
-- crashes.
-- What such calls made is never released, which is no leak of the library's.
local COMMAND = 'ASAN_OPTIONS="$ASAN_OPTIONS:detect_leaks=0" luajit spec/support/null_calls.lua %d 2>&1'

describe("C functions", function()
  it("say what is missing when they are called with NULL", function()
    local bad, first, found = {}, 1, nil
    while not found do
      local pipe = assert(io.popen(COMMAND:format(first)))
      local number, call, said
      for line in pipe:lines() do
        local n, what = line:match "^call (%d+) (.*)$"
        found = line:match "^end (%d+)$"
        if n then number, call, said = tonumber(n), what, nil
        elseif found or line:match "^%-?%d+ " then
          said = true
          if line:match "^%-%d+ .?.?.?$" then bad[#bad + 1] = ("%s: %s"):format(call, line) end
        else bad[#bad + 1] = ("%s: %s"):format(call, line) end
      end
      pipe:close()
      if not said then bad[#bad + 1] = ("%s crashes"):format(call) end
      assert(found or number and number >= first, "no call was made")
      first = (number or 0) + 1
    end
    assert.same({}, bad)
    assert.is_true(tonumber(found) > 250, found .. " functions were found")
  end)
end)
