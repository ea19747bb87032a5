-- Every C function that can say an error is called with nothing: NULL for every pointer, 0 for every number. It must say what is missing,
-- or that there is nothing to do, and not crash. Functions are found in the headers. Each is called in a process of its own.
local P = require "perilune.ffi"

--- Declarations of the functions that return a peri_status: { name =, arguments = number }.
local function declared()
  assert(P.C)
  local text = require("perilune.cdef"):gsub("/%*.-%*/", "")
  local list = {}
  for name, arguments in text:gmatch "peri_status%s+(peri_[%w_]+)%s*(%b())%s*;" do
    local kinds = {}
    if not arguments:find "^%(%s*void%s*%)$" then
      for argument in arguments:sub(2, -2):gmatch "[^,]+" do kinds[#kinds + 1] = argument end
    end
    list[#list + 1] = { name = name, arguments = kinds }
  end
  return list
end

describe("C functions", function()
  local functions = declared()

  it("are found", function() assert.is_true(#functions > 250, tostring(#functions)) end)

  it("name what is missing when they are called with NULL", function()
    local script = os.tmpname()
    local file = assert(io.open(script, "w"))
    file:write [[
      local ffi = require "ffi"
      local C = require("perilune.ffi").C
      io.stdout:setvbuf "no"
      for i = tonumber(arg[1]), #arg - 1 do
        local name, kinds = arg[i + 1]:match "^([%w_]+):(.*)$"
        io.write("call ", i, "\n")
        local values, n = {}, 0
        for kind in kinds:gmatch "[pn]" do
          n = n + 1
          if kind == "n" then values[n] = 0 end
        end
        local status = C[name](unpack(values, 1, n))
        local ok, message = tonumber(status) >= 0, ffi.string(C.peri_error_message())
        io.write(tonumber(status), " ", ok and "" or message, "\n")
      end
    ]]
    file:close()
    local words = {}
    for _, f in ipairs(functions) do
      local kinds = ""
      for _, argument in ipairs(f.arguments) do kinds = kinds .. (argument:find "%*" and "p" or "n") end
      words[#words + 1] = f.name .. ":" .. kinds
    end
    local bad, next_one = {}, 1
    while next_one <= #words do
      local pipe = assert(io.popen(("luajit %s %d %s 2>&1"):format(script, next_one, table.concat(words, " "))))
      local at, said = nil, nil
      for line in pipe:lines() do
        local i = line:match "^call (%d+)$"
        if i then at, said = tonumber(i), nil
        elseif line:match "^%-?%d+ " then
          said = line
          if line:match "^%-" and #line < 8 then bad[#bad + 1] = functions[at].name .. ": " .. line end
        elseif at then bad[#bad + 1] = functions[at].name .. ": " .. line end
      end
      pipe:close()
      if at and not said then bad[#bad + 1] = functions[at].name .. " crashes" end
      next_one = (at or #words) + 1
    end
    os.remove(script)
    assert.same({}, bad)
  end)
end)
