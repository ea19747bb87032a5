-- loading_module.lua: a loader as a module, for a DataLoadingThread: `n` batches that are plain tables.
return function(arguments)
  local peri, k = require "perilune", 0
  return function()
    k = k + 1
    if k > arguments.n then return nil end
    return { number = k, text = "batch " .. k, x = { peri.tensor({ k, k + 0.5 }, "f32", "cpu") }, flag = true }
  end
end
