-- lost_pages.lua: the script of spec/lost_pages_spec.lua, under lost_pages.c: a trainer and a follower in one process,
-- and pages of the model file that cannot be read, now and then, or bytes of checkpoints. After step n the rows whose
-- number is k mod 3 are minus the number of steps up to n that are k mod 3. The law: what is answered is that, or an
-- error that names the file; a poll is one, or names what it could not read; and when all can be read again, the
-- follower has the newest step.
--
--   luajit spec/support/lost_pages.lua FOLDER SEED
local ffi = require "ffi"
local peri = require "perilune"
ffi.cdef "long page_bytes(void); void lose_now(long page, int which); extern long lost_page;"
local folder, ROWS, DIM, STEPS = arg[1], 4096, 4, 12
local PAGES = math.ceil(17 * 4096 / tonumber(ffi.C.page_bytes())) -- of a checkpoint's file
math.randomseed(tonumber(arg[2]))

local Model = peri.nn.Module:extend "Model"
function Model:init()
  self.ebc = peri.EmbeddingBagCollection { fused_params = { optimizer = "sgd", learning_rate = 1 }, tables = {
    peri.EmbeddingBagConfig { name = "t", num_embeddings = ROWS, embedding_dim = DIM, feature_names = { "id" },
      init_fn = peri.embed.constant(0) } } }
end
function Model:forward(b) return self.ebc(b.ids):values() end

local function batch(first, stride)
  local values, lengths = {}, {}
  for id = first, ROWS - 1, stride do values[#values + 1], lengths[#lengths + 1] = id, 1 end
  return { ids = peri.KeyedJaggedTensor { keys = { "id" }, values = values, lengths = lengths } }
end

peri.init()
local model, all, path = Model(), batch(0, 1), folder .. "/m.peri"
model:export(path, { batches = { all }, step = 0 })
local saver = peri.checkpoint.Saver { folder = folder .. "/run", parts = { model = model }, every = 1, full_every = 5,
  keep = 30 }
local follower = peri.export.follow(path, folder .. "/run", { guard = true })
local step, right, refused = 0, 0, 0

--- The step whose rows the model answers with; nil: it refuses.
local function ask(file)
  local at = file:describe().step
  local ok, answers = pcall(file.predict, file, all)
  file:release()
  if not ok then
    assert(tostring(answers):find(path, 1, true), answers)
    refused = refused + 1
    return nil
  end
  local x = select(2, next(answers)):read()
  for id = 0, ROWS - 1 do
    local want = -math.floor((at + 2 - (id + 2) % 3) / 3)
    assert(x[id * DIM] == want, ("row %d is %g at step %d, wanted %d"):format(id, x[id * DIM], at, want))
  end
  right = right + 1
  return at
end

--- fails: the read of checkpoints that fails; 0: none.
local function poll(fails)
  peri.ffi.check(peri.ffi.C.peri_fault_arm("checkpoint_read", fails))
  local got, why = follower:poll()
  peri.ffi.check(peri.ffi.C.peri_fault_arm("checkpoint_read", 0))
  assert(not why or why:find(path, 1, true) or fails > 0 and why:find(folder .. "/run/save-", 1, true), why)
  if got then ask(got) end
end

while step < STEPS do
  local what = math.random(6)
  if what == 1 then
    step = step + 1
    peri.scope(function() model(batch(step % 3, 3)):sum():backward() end)
    saver:step(step)
  elseif what == 2 then ffi.C.lose_now(math.random(0, PAGES - 1), math.random(0, 1))
  elseif what == 3 then ffi.C.lost_page = math.random(0, PAGES - 1)
  elseif what == 4 then ffi.C.lost_page = -1
  elseif what == 5 then poll(math.random(0, 12))
  else ask(follower:model()) end
end
ffi.C.lost_page = -1
poll(0)
ask(follower:model()) -- meets what is lost still
for _ = 1, 65 do poll(0) end -- a checkpoint that could not be read is left alone for up to 64 looks
local last = ask(follower:model())
assert(last == STEPS, ("it ends at step %s"):format(tostring(last)))
saver:close()
print(("right %d, refused %d"):format(right, refused))
