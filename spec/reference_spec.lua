-- The reference (lua/perilune/reference, docs/reference): it describes what is there, with the arguments and defaults
-- that the library has; its examples run and print what they say; what it describes refuses wrong arguments in words;
-- and no public name is without a description.
-- takes: 1 s
local util = require "perilune.util"
-- the name of a function that takes named arguments -> their spec: a class looks at them before those above it do
local heard = {}
local named = util.named
util.named = function(func, args, spec)
  if type(func) == "string" then heard[func] = heard[func] or spec end
  return named(func, args, spec)
end
local peri = require "perilune"
local signature = require "perilune.signature"
local gen = dofile "runtime/gen/reference.lua"
local names = dofile "tests/reference/names.lua"

local pages, types = gen.pages()
local function each(f)
  for _, page in ipairs(pages) do
    for _, entry in ipairs(page.entries) do f(entry, page) end
  end
end

--- The spec that was heard of a name: under that name, or what it ends with.
local function spec_of(name)
  while name do
    if heard[name] then return heard[name] end
    name = name:match "^[%w_]+[%.:](.*)$"
  end
end

--- Run an example. What it prints stands behind --> in its lines, in their order. made: class -> an object of it among
--- its locals.
local function run(example, name, made)
  local printed, wanted = {}, {}
  for text in (example .. "\n"):gmatch "%-%-> (.-)\n" do wanted[#wanted + 1] = text end
  local prelude = "local peri = require 'perilune'; local nn, plan, data = peri.nn, peri.plan, peri.data; local _ = "
    .. "nn, plan, data; "
  local f = assert(loadstring(prelude .. example .. "\nthe_end()", "=" .. name))
  local function print_(...)
    local parts = {}
    for i = 1, select("#", ...) do parts[i] = tostring((select(i, ...))) end
    printed[#printed + 1] = table.concat(parts, " ")
  end
  local function the_end()
    local i, local_name, value = 1, debug.getlocal(2, 1)
    while local_name do
      local class = type(value) == "table" and getmetatable(value)
      if class then made[class] = value end
      i = i + 1
      local_name, value = debug.getlocal(2, i)
    end
  end
  setfenv(f, setmetatable({ print = print_, the_end = the_end }, { __index = _G }))
  f()
  assert.same(wanted, printed)
end

--- What is wrong nearly everywhere.
local strange = { coroutine.create(function() end), -1.5, {} }

--- Call what a page describes with such values: what is not taken is an error of the library's, and none of Lua's.
local function check_words(page, made)
  local wrong = {}
  for _, entry in ipairs(page.entries) do
    local value, object = names.value(entry.name), entry.colon and made[names.value(entry.owner)] or nil
    local takes = entry.kind == "function" and #entry.params > 0 and (object or not entry.colon)
      or entry.kind == "class" and entry.overload
    for _, x in ipairs(value and takes and strange or {}) do
      local ok, err
      if object then ok, err = pcall(value, object, x, x) else ok, err = pcall(value, x, x, x) end
      if not ok and not (type(err) == "table" and err.message) then
        wrong[#wrong + 1] = ("%s: %s"):format(entry.name, tostring(err))
      end
    end
  end
  assert.same({}, wrong, "an error of Lua, where the library could say what is wrong")
end

describe("the reference", function()
  setup(function() peri.init() end)
  teardown(function() util.named = named end)

  for _, page in ipairs(pages) do
    it("has examples that run: " .. page.name, function()
      local made = {}
      for _, entry in ipairs(page.entries) do
        for i, example in ipairs(entry.examples) do run(example, ("%s, example %d"):format(entry.name, i), made) end
      end
      check_words(page, made)
    end)
  end

  it("describes names that exist, as what they are", function()
    local wrong, classes = {}, {}
    each(function(entry)
      if entry.kind == "class" then classes[names.value(entry.name) or 0] = entry.name end
    end)
    --- The nearest class above this one that has a description.
    local function above(class)
      local base = class
      repeat base = type(base) == "table" and rawget(base, "super") until not base or classes[base]
      return base and classes[base] or nil
    end
    each(function(entry)
      local value = names.value(entry.name)
      if value == nil and entry.kind ~= "value" then wrong[#wrong + 1] = entry.name .. ": there is no such name"
      elseif entry.kind == "function" and not util.is_callable(value) then wrong[#wrong + 1] = entry.name
        .. ": it is no function"
      elseif entry.kind == "class" and value and entry.base ~= above(value) then
        wrong[#wrong + 1] = ("%s: it is below %s, not %s"):format(entry.name, tostring(above(value)),
          tostring(entry.base))
      end
    end)
    assert.same({}, wrong)
  end)

  it("gives functions the arguments that they check", function()
    local by_value, wrong, compared = {}, {}, 0
    for _, s in ipairs(signature.all) do by_value[s.table[s.key]] = s end
    each(function(entry)
      local s = entry.kind == "function" and by_value[names.value(entry.name)]
      if not s then return end
      compared = compared + 1
      local checked, said = {}, {}
      for _, a in ipairs(s.arguments) do
        if a.name ~= "self" or not entry.colon then checked[#checked + 1] = a.name .. (a.optional and "?" or "") end
      end
      for i, p in ipairs(entry.params) do
        local any = s.arguments[i + (entry.colon and 1 or 0)]
        said[i] = p.name .. (p.optional and not (any and any.kind == "any") and "?" or "")
      end
      checked, said = table.concat(checked, ", "), table.concat(said, ", ")
      if checked ~= said then wrong[#wrong + 1] = ("%s(%s), but it checks (%s)"):format(entry.name, said, checked) end
    end)
    assert.same({}, wrong)
    assert.is_true(compared > 20)
  end)

  it("gives named arguments their names and defaults", function()
    local wrong, compared = {}, 0
    each(function(entry)
      local spec, args = spec_of(entry.name), gen.arguments_of(entry, types)
      if not spec or not args then return end
      compared = compared + 1
      local said = {}
      for _, f in ipairs(args.fields) do
        said[f.name] = f
        local default = spec[f.name]
        local text = f.text:match "%(default:? ([^%)]+)%)"
        if default == nil then wrong[#wrong + 1] = ("%s: there is no argument '%s'"):format(entry.name, f.name)
        elseif util.is_required(default) and f.optional then wrong[#wrong + 1] =
          ("%s: '%s' must be given"):format(entry.name, f.name)
        end
        default = util.default_of(default)
        if type(default) == "number" or type(default) == "boolean" or type(default) == "string" then
          local words = type(default) == "string" and default or tostring(default)
          if not text or text:gsub("[`\"]", "") ~= words and tonumber(text:match "[%d%.e%-]+") ~= default then
            wrong[#wrong + 1] = ("%s: the default of '%s' is %s, not %s"):format(entry.name, f.name, words,
              tostring(text))
          end
        end
      end
      for name in util.ordered(spec) do
        if not said[name] then
          wrong[#wrong + 1] = ("%s: the argument '%s' is not described"):format(entry.name, name)
        end
      end
    end)
    assert.same({}, wrong)
  end)

  it("has every method that an object of a class can be asked for: described, or a class above it has it", function()
    local help, silent = require "perilune.launch.help", {}
    each(function(entry)
      local class = entry.kind == "class" and names.value(entry.name)
      local methods = type(class) == "table" and (rawget(class, "class_name") or rawget(class, "methods"))
      for _, key in ipairs(methods and names.methods(class) or {}) do
        local found = help.find(entry.name .. ":" .. key)
        if #found ~= 1 then silent[#silent + 1] = entry.name .. ":" .. key end
      end
    end)
    assert.same({}, silent)
  end)

  it("is shown by perilune help in lines of 80 characters, but for code and lists of names", function()
    local help, wide = require "perilune.launch.help", {}
    local function look(name, text)
      local code
      for line in (text:gsub("\nExample:\n.*", ""):gsub("\nIt has:\n.*", "") .. "\n"):gmatch "(.-)\n" do
        code = line:find "^    %S" or code and line == ""
        local broken = line:find "^%s*%S+%s+%S" and not line:find "^  [%w_.]+%??: "
        if #line > 80 and not code and broken then wide[#wide + 1] = name .. ": " .. line end
      end
    end
    for _, page in ipairs(pages) do
      local text = help.text(page.name)
      text = text:gsub("^[^\n]* %(docs/glossary%.md%)\n", "")
      look(page.name, text:sub(1, text:find("\n\n  ", 1, true)))
      assert.is_truthy(text:gsub("%s+", " "):find(page.intro:match "%S+", 1, true), page.name)
    end
    each(function(entry) look(entry.name, help.text(entry.name)) end)
    assert.same({}, wide)
    local text = help.text "peri.KeyedJaggedTensor"
    assert.is_truthy(text:find("    lengths = { 2,      1,   1,   3 }        f of", 1, true), text)
    assert.is_truthy(help.text("comm_ops"):find("\n- `tag`: a whole number", 1, true))
  end)

  it("tells editors which functions are methods of tensors, and which faces there are", function()
    local told, methods, faces, F = {}, {}, 0, peri.nn.functional
    local owner
    for line in gen.faces():gmatch "[^\n]+" do
      owner = line:match "^%-%-%-@class (%S+)" or owner
      local name = line:match "^%-%-%-@field (%S+)"
      if name and owner == "peri.Tensor" then told[#told + 1] = name
      elseif name then
        faces = faces + 1
        assert.is_truthy(names.value(owner .. "." .. name), owner .. "." .. name)
      end
    end
    for name, f in util.ordered(peri.Tensor.methods) do
      local of_tensors = name:sub(1, 1) ~= "_" and rawget(F, name) == f
      if of_tensors then methods[#methods + 1] = name end
    end
    assert.same(methods, told)
    assert.is_true(faces > 30 and #told > 120)
    -- the result of a module is not a module
    for _, call in ipairs { "peri.nn.MLP\n---@overload fun(x: peri.Tensor): peri.Tensor",
      "peri.nn.MSELoss\n---@overload fun(input: peri.Tensor, target: peri.Tensor" } do
      assert.is_truthy(gen.faces():find("---@class " .. call, 1, true), call)
    end
  end)

  it("leaves no public name without a description", function()
    assert.same({}, (names.undescribed(pages)),
      "add them to lua/perilune/reference (docs/testing.md), or make them private: _name")
  end)
end)
