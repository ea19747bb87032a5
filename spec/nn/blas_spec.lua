-- Matrix products of f32: oneDNN's, where it is installed, and OpenBLAS's agree; PERI_BLAS chooses.
local golden = require "spec.support.golden"
local shell = require "spec.support.shell"

describe("matrix products", function()
  -- shapes and all four ways of storing the operands, large enough for oneDNN; prints one number a line
  local script = [[
    local peri = require "perilune"
    local F = peri.nn.functional
    for i, s in ipairs { { 300, 64, 40 }, { 17, 100, 130 }, { 256, 1, 512 } } do
      local a, b = peri.Tensor.uniform({ s[1], s[2] }, -1, 1, i, 0), peri.Tensor.uniform({ s[2], s[3] }, -1, 1, i, 1)
      local at, bt = a:transpose(1, 2):contiguous():transpose(1, 2), b:transpose(1, 2):contiguous():transpose(1, 2)
      for _, x in ipairs { a, at } do
        for _, y in ipairs { b, bt } do
          local c = F.matmul(x, y):to_list()
          for k = 1, #c, 97 do print(("%.9g"):format(c[k])) end
        end
      end
    end]]

  local function products(library)
    local folder, clean = shell.temporary()
    local env = shell.luajit_env()
    env.PERI_BLAS = library
    local text, status = shell.run("luajit " .. shell.write(folder .. "/script.lua", script), env)
    clean()
    return text, status
  end

  it("agree between the libraries", function()
    if shell.sanitizer ~= "" then return pending "oneDNN's code, made at run time, does not go with sanitizers" end
    local lists = {}
    for i, library in ipairs { "openblas", "onednn" } do
      local text, status = products(library)
      if text:match "libdnnl.so was not found" then return pending "oneDNN is not installed" end
      assert.equal(0, status, text)
      lists[i] = {}
      for number in text:gmatch "%S+" do lists[i][#lists[i] + 1] = tonumber(number) end
    end
    assert.is_true(#lists[1] > 100)
    golden.assert_near(lists[1], lists[2], { abs = 1e-4, rel = 1e-5 })
  end)

  it("refuse an unknown library", function()
    local text, status = products "mkl"
    assert.not_equal(0, status)
    assert.matches("PERI_BLAS is 'mkl', allowed: onednn, openblas", text)
  end)
end)
