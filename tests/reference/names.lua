-- names.lua: the public names of the library, as a program finds them, and which of them the definition files
-- (lua/perilune/reference) describe. A method that a class has from one above it, or has in place of it, is described
-- there.
package.path = "./?.lua;runtime/gen/?.lua;" .. package.path
local api = require "spec.support.api"

local M = {}

local machinery = { util = true, ffi = true, signature = true }
--- What classes have for the library itself.
local protocol = { init = true, is = true, wrap = true, ptr = true, out = true, set_advice = true, class_name = true,
  kind = true }

--- The value under a name such as "peri.nn.Linear" or "peri.KeyedJaggedTensor:permute"; nil: there is none.
function M.value(name)
  local x, last = require "perilune", nil
  for mark, key in name:gsub("^peri", ""):gmatch "([%.:])([%w_]+)" do
    local methods = type(x) == "table" and rawget(x, "methods")
    local found
    if type(methods) == "table" and rawget(methods, key) ~= nil then found = methods[key]
    else
      local ok, value = pcall(function() return x[key] end)
      found = ok and value or nil
    end
    if found == nil then return nil end
    x, last = found, mark
  end
  return x, last
end

--- Every public function and class: a sorted list of { name =, value = }.
function M.all()
  local peri = require "perilune"
  local functions, classes = api.walk(peri, function(key, name)
    return machinery[name] or protocol[key] and name ~= "nn.init"
  end)
  local list, seen = {}, {}
  local function add(name, value)
    if seen[value] then return end
    seen[value] = true
    list[#list + 1] = { name = "peri." .. name, value = value }
  end
  for _, e in ipairs(classes) do
    add(e.name, e.f)
    local methods = rawget(e.f, "methods")
    for _, key in ipairs(type(methods) == "table" and api.sorted(methods) or {}) do
      if type(methods[key]) == "function" and not protocol[key] and not key:find "^_" then
        add(e.name .. ":" .. key, methods[key])
      end
    end
  end
  for _, key in ipairs(api.sorted(peri.Tensor.methods or {})) do
    local f = peri.Tensor.methods[key]
    if type(f) == "function" and not protocol[key] and not key:find "^_" then add("Tensor:" .. key, f) end
  end
  for _, e in ipairs(functions) do
    if not e.name:match "[%.]_" then add(e.name, e.f) end
  end
  table.sort(list, function(a, b) return a.name < b.name end)
  return list
end

--- Whether a method of a described class does what the description of the method says that a class above it has.
--- `forward` of nn.Module says nothing of what a layer takes, so each layer describes its own.
local function inherited(name, values, module)
  local owner, key = name:match "^(.*)[%.:]([%w_]+)$"
  local class = M.value(owner)
  if type(class) ~= "table" or not values[class] then return false end
  local base = rawget(class, "super")
  while base do
    local method = rawget(base, key)
    if method ~= nil and values[method] then return not (key == "forward" and base == module) end
    base = rawget(base, "super")
  end
  return false
end

--- The names of all methods that objects of a class have, of its own and of those above it: a sorted list.
function M.methods(class)
  local found = {}
  local function take(from)
    for key, value in pairs(type(from) == "table" and from or {}) do -- any order: a set
      local public = type(key) == "string" and not key:find "^_" and not protocol[key]
      if public and type(value) == "function" then found[key] = true end
    end
  end
  while type(class) == "table" do
    take(class)
    take(rawget(class, "methods"))
    class = rawget(class, "super")
  end
  return api.sorted(found)
end

--- Names without a description; and what the definition files describe: name -> entry, value -> entry.
function M.undescribed(pages)
  local entries, values = {}, {}
  for _, page in ipairs(pages) do
    for _, entry in ipairs(page.entries) do
      entries[entry.name] = entry
      local value = M.value(entry.name)
      if value ~= nil and entry.kind ~= "value" then values[value] = entry end
    end
  end
  local names, module = {}, require("perilune").nn.Module
  for _, e in ipairs(M.all()) do
    if not values[e.value] and not inherited(e.name, values, module) then names[#names + 1] = e.name end
  end
  return names, entries, values
end

return M
