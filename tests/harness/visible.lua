-- visible.lua: makes the hidden symbols of an object file visible, in place: luajit visible.lua FILE
--
-- Functions that the runtime's files share among each other are hidden, so that its library offers the public ones
-- alone. Test programs call the others, too: they are linked with a library of the same objects (the Makefile's
-- TESTS_SO), in which nothing is hidden. One library for all, so that a change of the runtime links that instead of
-- every program.
local ffi = require "ffi"

ffi.cdef [[
typedef struct {
    uint8_t ident[16];
    uint16_t type, machine;
    uint32_t version;
    uint64_t entry, program_headers, section_headers;
    uint32_t flags;
    uint16_t size, program_header_size, program_header_count, section_header_size, section_header_count, names;
} elf_header;
typedef struct {
    uint32_t name, type;
    uint64_t flags, address, offset, size;
    uint32_t link, info;
    uint64_t align, entry_size;
} elf_section;
typedef struct {
    uint32_t name;
    uint8_t info, other;
    uint16_t section;
    uint64_t value, size;
} elf_symbol;
]]
local SYMBOLS, GLOBAL, WEAK, HIDDEN = 2, 1, 2, 2

local path = assert(arg[1], "visible.lua: the name of an object file is missing")
local file = assert(io.open(path, "r+b"))
local text = file:read "*a"
local bytes = ffi.new("uint8_t[?]", #text)
ffi.copy(bytes, text, #text)

local header = ffi.cast("elf_header *", bytes)
assert(text:sub(1, 4) == "\127ELF" and bytes[4] == 2 and bytes[5] == (ffi.abi "le" and 1 or 2),
  path .. ": no ELF file of 64 bits in this machine's byte order")
local sections = ffi.cast("elf_section *", bytes + header.section_headers)
local found = 0
for i = 0, header.section_header_count - 1 do
  local s = sections[i]
  if s.type == SYMBOLS then
    local symbols = ffi.cast("elf_symbol *", bytes + s.offset)
    for k = 0, tonumber(s.size) / ffi.sizeof "elf_symbol" - 1 do
      local symbol = symbols[k]
      local binding = bit.rshift(symbol.info, 4)
      if (binding == GLOBAL or binding == WEAK) and symbol.section ~= 0 and bit.band(symbol.other, 3) == HIDDEN then
        symbol.other = bit.band(symbol.other, 0xfc)
        found = found + 1
      end
    end
  end
end
assert(found > 0, path .. ": no hidden symbol")
file:seek("set", 0)
file:write(ffi.string(bytes, #text))
assert(file:close())
