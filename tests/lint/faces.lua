-- faces.lua: what kernels/*.h lists for devices has a face in kernels/cuda, also where no compiler of CUDA is there to miss it.

local wanted = { -- what a list says of an entry -> the macros of kernels/cuda/cuda.h that make its faces
  KERNELS = { "PERI_CUDA_KERNEL" },
  OPS = { "PERI_CUDA_OP", "PERI_CUDA_SCRATCH" },
}
local called = { KERNELS = "kernel", OPS = "operation" }

--- Entries of PERI_KERNELS_* and PERI_OPS_* (steps are cpu's own), in the order of the files: name, list, header, family.
local function entries(ctx)
  local found, families = {}, {}
  for _, path in ipairs(ctx.files("kernels", "h")) do
    for list, family, text in ctx.read(path):gsub("\\\n", " "):gmatch "#define PERI_(%u+)_([%u%d_]+)%(X%)([^\n]*)" do
      if wanted[list] then families[#families + 1] = { list = list, family = family, header = path } end
      for name in text:gmatch "X%(([%w_]+)," do
        if wanted[list] then found[#found + 1] = { name = name, list = list, header = path, family = family:lower() } end
      end
    end
  end
  return found, families
end

--- macro .. name -> the file that defines this face, for the faces in kernels/cuda; and the files, in order.
local function faces(ctx)
  local at, files = {}, ctx.files("kernels/cuda", "cu")
  for _, path in ipairs(files) do
    for macro, name in ("\n" .. ctx.read(path)):gmatch "\n(PERI_CUDA_%u+)%(([%w_]+)%)" do at[macro .. " " .. name] = path end
  end
  return at, files
end

--- Where the faces of a header stand already; a family without one gets a file of its name.
local function home(header, family, all, at)
  local seen, names = {}, {}
  for _, e in ipairs(all) do
    local path = e.header == header and at[wanted[e.list][1] .. " " .. e.name]
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
        complaints[#complaints + 1] = ("%s lists the %s %s, which has no CUDA face: %s(%s) is missing in %s"):format(e.header,
          called[e.list], e.name, macro, e.name, home(e.header, e.family, all, at))
      end
    end
  end
  local others = {}
  for face, path in pairs(at) do -- any order: sorted below
    local macro, name = face:match "(%S+) (%S+)"
    if not known[face] then
      others[#others + 1] = ("%s defines %s(%s), which no list of kernels/*.h asks for"):format(path, macro, name)
    end
  end
  table.sort(others)
  for _, line in ipairs(others) do complaints[#complaints + 1] = line end
  local table_of_all = ctx.read "kernels/kernels.h"
  for _, f in ipairs(families) do
    if not table_of_all:find(("PERI_%s_%s(X)"):format(f.list, f.family), 1, true) then
      complaints[#complaints + 1] = ("%s: PERI_%s_%s is not in PERI_%s of kernels/kernels.h, so no device has its entries"):format(f.header,
        f.list, f.family, f.list)
    end
  end
  if #all < 100 then complaints[#complaints + 1] = ("kernels/*.h: only %d entries were read; the rule is blind"):format(#all) end
  return complaints
end

return { { "kernels and operations have a CUDA face", have_faces } }
