-- faces.lua: what kernels/list.h lists for devices has a face in kernels/cuda, also where no compiler of CUDA is there
-- to miss it.

local wanted = { -- what a list says of an entry -> the macros of kernels/cuda/cuda.h that make its faces
  KERNELS = { "PERI_CUDA_KERNEL" },
  OPS = { "PERI_CUDA_OP", "PERI_CUDA_SCRATCH" },
}
local called = { KERNELS = "kernel", OPS = "operation" }

local LIST = "kernels/list.h"

--- Entries of PERI_KERNELS_* and PERI_OPS_* (steps are cpu's own), in their order: name, list, family; and the lists.
local function entries(ctx)
  local found, families = {}, {}
  for list, family, text in ctx.read(LIST):gsub("\\\n", " "):gmatch "#define PERI_(%u+)_([%u%d_]+)%(X%)([^\n]*)" do
    if wanted[list] then
      families[#families + 1] = { list = list, family = family }
      for name in text:gmatch "X%(([%w_]+)," do
        found[#found + 1] = { name = name, list = list, family = family:lower() }
      end
    end
  end
  return found, families
end

--- macro .. name -> the file that defines this face, for the faces in kernels/cuda; and the files, in order.
local function faces(ctx)
  local at, files = {}, ctx.files("kernels/cuda", "cu")
  for _, path in ipairs(files) do
    for macro, name in ("\n" .. ctx.read(path)):gmatch "\n(PERI_CUDA_%u+)%(([%w_]+)%)" do
      at[macro .. " " .. name] = path
    end
  end
  return at, files
end

--- Where the faces of a family stand already; one without any gets a file of its name.
local function home(family, all, at)
  local seen, names = {}, {}
  for _, e in ipairs(all) do
    local path = e.family == family and at[wanted[e.list][1] .. " " .. e.name]
    if path and not seen[path] then
      seen[path] = true
      names[#names + 1] = path
    end
  end
  table.sort(names)
  return #names > 0 and table.concat(names, " or ") or ("kernels/cuda/%s.cu"):format(family)
end

local function have_faces(ctx)
  local all, families = entries(ctx)
  local at, complaints, known = faces(ctx), {}, {}
  for _, e in ipairs(all) do
    for _, macro in ipairs(wanted[e.list]) do
      known[macro .. " " .. e.name] = true
      if not at[macro .. " " .. e.name] then
        complaints[#complaints + 1] =
          ("%s lists the %s %s, which has no CUDA face: %s(%s) is missing in %s"):format(LIST, called[e.list], e.name,
            macro, e.name, home(e.family, all, at))
      end
    end
  end
  local others = {}
  for face, path in pairs(at) do -- any order: sorted below
    local macro, name = face:match "(%S+) (%S+)"
    if not known[face] then
      others[#others + 1] = ("%s defines %s(%s), which no list of kernels/list.h asks for"):format(path, macro, name)
    end
  end
  table.sort(others)
  for _, line in ipairs(others) do complaints[#complaints + 1] = line end
  local lists = ctx.read(LIST):gsub("\\\n", " ")
  for _, f in ipairs(families) do
    local whole = lists:match(("#define PERI_%s%%(X%%)([^\n]*)"):format(f.list)) or ""
    if not whole:find(("PERI_%s_%s(X)"):format(f.list, f.family), 1, true) then
      complaints[#complaints + 1] = ("%s: PERI_%s_%s is not in PERI_%s, so no device has its entries"):format(LIST,
        f.list, f.family, f.list)
    end
  end
  if #all < 100 then
    complaints[#complaints + 1] = ("kernels/list.h: only %d entries were read; the rule is blind"):format(#all)
  end
  return complaints
end

return { { "kernels and operations have a CUDA face", have_faces } }
