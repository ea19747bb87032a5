-- layouts.lua: a number for the layout of each argument struct of kernels, steps and operations (kernels/list.h). A
-- plugin and the library agree on one of them when its name and this number are the same for both.
--
--   luajit runtime/gen/layouts.lua >kernels/layout.h
local bit = require "bit"

--- The C of a file without comments, and with one space between words.
local function code_of(path)
  local text = assert(io.open(path)):read "*a"
  return (text:gsub("/%*.-%*/", " "):gsub("//[^\n]*", " "):gsub("%s+", " "))
end

-- The body of each struct, and, of each header, all of its enums: members have their values.
local structs, enums_beside = {}, {}
for path in io.popen("LC_ALL=C ls kernels/*.h"):lines() do
  local text, enums = code_of(path), {}
  for body in text:gmatch "enum[%s%w_]*(%b{})" do enums[#enums + 1] = body end
  for body, name in text:gmatch "typedef struct [%w_]*%s*(%b{}) ([%w_]+);" do
    structs[name], enums_beside[name] = body, table.concat(enums)
  end
end

--- All that decides how the bytes of a struct are read: itself, and the structs that it has, each once.
local function all_of(name, seen)
  if not structs[name] or seen[name] then return "" end
  seen[name] = true
  local parts = { name, structs[name], enums_beside[name] }
  for word in structs[name]:gmatch "[%a_][%w_]*" do parts[#parts + 1] = all_of(word, seen) end
  return table.concat(parts)
end

--- 31 bits of FNV-1a.
local function hash(text)
  local h = 0x811c9dc5
  for i = 1, #text do
    h = bit.bxor(h, text:byte(i))
    h = bit.tobit(h + bit.lshift(h, 1) + bit.lshift(h, 4) + bit.lshift(h, 7) + bit.lshift(h, 8) + bit.lshift(h, 24))
  end
  return bit.band(h, 0x7fffffff)
end

io.write [[
/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/layout.h: written by `luajit runtime/gen/layouts.lua >kernels/layout.h`. A number for the layout of each
 * argument struct of kernels/list.h: what the struct and its parts are declared as, comments aside.
 */
#ifndef PERI_KERNELS_LAYOUT_H
#define PERI_KERNELS_LAYOUT_H

#include <stdint.h>

/** Bytes of an argument struct (low half), and the number of its layout: members may change places or meaning, and the
 *  bytes stay the same. */
#define PERI_WORK_ARGS(type) ((int64_t)sizeof(type) | (int64_t)PERI_LAYOUT_##type << 32)

]]
local said = {}
for name in code_of("kernels/list.h"):gmatch "X%([%w_]+, ([%w_]+)%)" do
  assert(structs[name], name .. " is in kernels/list.h, and no header of kernels/ has it")
  if not said[name] then io.write(("#define PERI_LAYOUT_%s 0x%08x\n"):format(name, hash(all_of(name, {})))) end
  said[name] = true
end
io.write "\n#endif\n"
