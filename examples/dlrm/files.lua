-- files.lua: what the demonstration writes. Every write, flush and close is looked at: a full disk is an error.
local M = {}

function M.quoted(path) return "'" .. path:gsub("'", "'\\''") .. "'" end

--- Make a folder, and those above it.
function M.folder(path)
  if os.execute("mkdir -p " .. M.quoted(path)) ~= 0 then error(("cannot make the folder %s"):format(path), 0) end
end

--- A new file with write(text), flush() and close(), which raise errors that name it.
function M.open(path)
  local function check(ok, why)
    if not ok then error(("cannot write %s: %s"):format(path, why), 0) end
    return ok
  end
  local file = check(io.open(path, "w"))
  return {
    write = function(_, text) check(file:write(text)) end,
    flush = function() check(file:flush()) end,
    close = function()
      check(file:flush())
      check(file:close())
    end,
  }
end

return M
