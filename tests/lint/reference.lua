-- reference.lua: what the definition files of the reference say of a name is all there: what it is for, types, shapes,
-- defaults, errors, an example. (spec/reference_spec.lua compares them with the library, and runs the examples.)

--- Complaints about one entry of a page.
local function look(entry, page, types, gen, complain)
  if #entry.description < 12 then complain(entry, "no description") end
  local parameters = gen.parameters(entry, types)
  for _, p in ipairs(parameters) do
    if #p.text < 3 then complain(entry, ("argument '%s' is not described"):format(p.name)) end
    if p.optional and not p.text:lower():find "default" then
      complain(entry, ("argument '%s' may be left out, but has no default"):format(p.name))
    end
  end
  local function shape(what, x)
    local says = x.text:find "%[.*%]" or x.text:lower():find "shape" or x.text:lower():find "scalar"
    if x.type:find "peri%.Tensor%f[^%w_%.]" and not says then
      complain(entry, what .. " is a tensor without a shape")
    end
  end
  for _, p in ipairs(parameters) do shape(("argument '%s'"):format(p.name), p) end
  for _, r in ipairs(entry.returns) do shape("what it returns", r) end
  local owner
  for _, other in ipairs(page.entries) do
    if other.name == entry.owner then owner = other end
  end
  local tells = entry.errors or owner and owner.errors
  if #parameters > 0 and not tells then complain(entry, "it takes arguments, but tells no 'Errors:'") end
  local used, word = false, "%f[%w_]" .. entry.key:lower() .. "%f[^%w_]" -- an object of a class is often called like it
  for _, other in ipairs(page.entries) do
    for _, example in ipairs(other.examples) do used = used or example:lower():find(word) ~= nil end
  end
  if not used then complain(entry, "no example on its page uses it") end
end

--- Words of types that are not classes: what LuaCATS brings along.
local plain = {}
for word in ("any nil true false boolean number integer string table function fun userdata ffi.cdata"):gmatch "%S+" do
  plain[word] = true
end

--- Complaints about types of an entry that nothing declares: editors know nothing of them. known: the classes.
local function look_at_types(entry, known, complain)
  local function look_at(what, text)
    local names = {} -- of what a function in the type takes: fun(name: type)
    for name in text:gmatch "([%w_]+)%??:" do names[name] = true end
    for word in text:gsub("'[^']*'", ""):gsub('"[^"]*"', ""):gmatch "%a[%w_%.]*" do
      if not (plain[word] or known[word] or names[word]) then
        complain(entry, ("%s is of the type '%s', which nothing declares"):format(what, word))
      end
    end
  end
  for _, kind in ipairs { "params", "fields" } do
    for _, p in ipairs(entry[kind] or {}) do look_at(("'%s'"):format(p.name), p.type) end
  end
  for _, r in ipairs(entry.returns or {}) do look_at("what it returns", r.type) end
end

local function described(ctx)
  local gen = dofile "runtime/gen/reference.lua"
  local complaints = {}
  local ok, pages, types = pcall(gen.pages)
  if not ok then return { pages } end
  local known = {}
  for _, path in ipairs(ctx.lines "ls lua/perilune/reference/*.lua") do
    for name in ("\n" .. ctx.read(path)):gmatch "\n%-%-%-@class ([%w_%.]+)" do known[name] = true end
  end
  local function complain(entry, why)
    complaints[#complaints + 1] = ("%s: %s: %s"):format(entry.where, entry.name, why)
  end
  for name, block in pairs(types) do -- any order: complaints of tables of arguments
    look_at_types(block, known, function(_, why)
      complaints[#complaints + 1] = ("lua/perilune/reference: %s: %s"):format(name, why)
    end)
  end
  for _, page in ipairs(pages) do
    for _, entry in ipairs(page.entries) do
      if entry.kind == "function" or entry.kind == "class" then look(entry, page, types, gen, complain) end
      look_at_types(entry, known, complain)
      local called = entry.kind == "function" and table.concat(({ entry.names:gsub("%s", "") }), "", 1, 1)
      local list = {}
      for i, p in ipairs(entry.params) do list[i] = p.name end
      if called and called ~= table.concat(list, ",") then
        complain(entry, ("@param says (%s)"):format(table.concat(list, ", ")))
      end
      local args = gen.arguments_of(entry, types)
      local wanted = entry.overload and entry.overload:match "args%??: (peri%.[%w_%.]+)"
      if wanted and not args then complain(entry, "no @class " .. wanted) end
    end
  end
  local made = gen.make()
  for name, text in pairs(made) do -- any order: complaints of files
    local path = "docs/reference/" .. name
    if not ctx.exists(path) or ctx.read(path) ~= text then
      complaints[#complaints + 1] = path .. " is not what `make reference` makes"
    end
  end
  if not ctx.exists(gen.FACES) or ctx.read(gen.FACES) ~= gen.faces() then
    complaints[#complaints + 1] = gen.FACES .. " is not what `make reference` makes"
  end
  for _, path in ipairs(ctx.lines "ls docs/reference/*.md") do
    if not made[path:match "[^/]+$"] then
      complaints[#complaints + 1] = path .. " is not made by `make reference`"
    end
  end
  return complaints
end

return { { "the reference says all of a name", described } }
