-- optimizers.lua: Optimizers and checkpoints.
--
-- Optimizers of the dense part take parameters and have PyTorch's names, defaults and arithmetic. Tables have
-- optimizers of their own (`fused_params`, docs/embedding_tables.md). A checkpoint is a folder of safetensors files
-- that loads under any plan and number of ranks (docs/checkpoints.md).
---@meta

---@class peri.nn.optim
local optim = {}
---@class peri.checkpoint
local checkpoint = {}

---Stochastic gradient descent, with momentum if asked for.
---
---Errors: an argument out of its range; a parameter that is listed twice, or that is no leaf.
---
---```lua
---local w = peri.ones({ 2, 2 }):requires_grad()
---local optimizer = nn.optim.SGD { params = { w }, lr = 0.5 };
---(w * 2):sum():backward()
---optimizer:step()
---print(w:item(0) < 1, optimizer:lr()) --> true 0.5
---```
---@class peri.nn.optim.SGD: peri.nn.optim.Optimizer
---@overload fun(args: peri.nn.optim.SGD.args): peri.nn.optim.SGD
optim.SGD = {}

---@class peri.nn.optim.SGD.args
---@field params peri.Tensor[]|peri.nn.Module|table[] Of any shape: tensors, `{ name =, tensor = }`, a module; or groups (docs/models.md).
---@field lr? number The learning rate (default: 0.001).
---@field momentum? number Share of the momentum that stays from step to step; 0: there is none (default: 0).
---@field dampening? number The gradient goes into the momentum times 1 - dampening (default: 0).
---@field nesterov? boolean Nesterov's momentum (default: false).
---@field weight_decay? number Times the parameter, added to its gradient (default: 0).
---@field maximize? boolean Go up instead of down (default: false).

---Adam: steps by the mean of gradients, divided by the root of the mean of their squares.
---
---Errors: an argument out of its range; a parameter that is listed twice, or that is no leaf.
---
---```lua
---local w = peri.ones({ 2, 2 }):requires_grad()
---local optimizer = nn.optim.Adam { params = { w }, lr = 0.5 };
---(w * 2):sum():backward()
---optimizer:step()
---print(w:item(0) < 1, optimizer:lr()) --> true 0.5
---```
---@class peri.nn.optim.Adam: peri.nn.optim.Optimizer
---@overload fun(args: peri.nn.optim.Adam.args): peri.nn.optim.Adam
optim.Adam = {}

---@class peri.nn.optim.Adam.args
---@field params peri.Tensor[]|peri.nn.Module|table[] Of any shape: tensors, `{ name =, tensor = }`, a module; or groups (docs/models.md).
---@field lr? number The learning rate (default: 0.001).
---@field betas? number[] Shares of the mean of gradients, and of the mean of squares, that stay from step to step (default: { 0.9, 0.999 }).
---@field eps? number Added to the divisor (default: 1e-8).
---@field weight_decay? number Times the parameter, added to its gradient (default: 0).
---@field amsgrad? boolean Divide by the largest mean so far (default: false).
---@field maximize? boolean Go up instead of down (default: false).

---Adam whose weight decay shrinks parameters directly.
---
---Errors: an argument out of its range; a parameter that is listed twice, or that is no leaf.
---
---```lua
---local w = peri.ones({ 2, 2 }):requires_grad()
---local optimizer = nn.optim.AdamW { params = { w }, lr = 0.5 };
---(w * 2):sum():backward()
---optimizer:step()
---print(w:item(0) < 1, optimizer:lr()) --> true 0.5
---```
---@class peri.nn.optim.AdamW: peri.nn.optim.Optimizer
---@overload fun(args: peri.nn.optim.AdamW.args): peri.nn.optim.AdamW
optim.AdamW = {}

---@class peri.nn.optim.AdamW.args
---@field params peri.Tensor[]|peri.nn.Module|table[] Of any shape: tensors, `{ name =, tensor = }`, a module; or groups (docs/models.md).
---@field lr? number The learning rate (default: 0.001).
---@field betas? number[] Shares of the mean of gradients, and of the mean of squares, that stay from step to step (default: { 0.9, 0.999 }).
---@field eps? number Added to the divisor (default: 1e-8).
---@field weight_decay? number Times lr: the share that parameters shrink by (default: 0.01).
---@field amsgrad? boolean Divide by the largest mean so far (default: false).
---@field maximize? boolean Go up instead of down (default: false).

---Adagrad: gradients divided by the root of the sum of all their squares so far.
---
---Errors: an argument out of its range; a parameter that is listed twice, or that is no leaf.
---
---```lua
---local w = peri.ones({ 2, 2 }):requires_grad()
---local optimizer = nn.optim.Adagrad { params = { w }, lr = 0.5 };
---(w * 2):sum():backward()
---optimizer:step()
---print(w:item(0) < 1, optimizer:lr()) --> true 0.5
---```
---@class peri.nn.optim.Adagrad: peri.nn.optim.Optimizer
---@overload fun(args: peri.nn.optim.Adagrad.args): peri.nn.optim.Adagrad
optim.Adagrad = {}

---@class peri.nn.optim.Adagrad.args
---@field params peri.Tensor[]|peri.nn.Module|table[] Of any shape: tensors, `{ name =, tensor = }`, a module; or groups (docs/models.md).
---@field lr? number The learning rate (default: 0.01).
---@field lr_decay? number Step t, from 0, uses lr / (1 + t * lr_decay) (default: 0).
---@field initial_accumulator_value? number Where sums of squares start (default: 0).
---@field eps? number Added to the divisor (default: 1e-10).
---@field weight_decay? number Times the parameter, added to its gradient (default: 0).
---@field maximize? boolean Go up instead of down (default: false).

---Adagrad with one sum for each row, as tables have it; parameters have two dimensions or more.
---
---Errors: an argument out of its range; a parameter that is listed twice, or that is no leaf.
---
---```lua
---local w = peri.ones({ 2, 2 }):requires_grad()
---local optimizer = nn.optim.RowWiseAdagrad { params = { w }, lr = 0.5 };
---(w * 2):sum():backward()
---optimizer:step()
---print(w:item(0) < 1, optimizer:lr()) --> true 0.5
---```
---@class peri.nn.optim.RowWiseAdagrad: peri.nn.optim.Optimizer
---@overload fun(args: peri.nn.optim.RowWiseAdagrad.args): peri.nn.optim.RowWiseAdagrad
optim.RowWiseAdagrad = {}

---@class peri.nn.optim.RowWiseAdagrad.args
---@field params peri.Tensor[]|peri.nn.Module|table[] Of any shape: tensors, `{ name =, tensor = }`, a module; or groups (docs/models.md).
---@field lr? number The learning rate (default: 0.01).
---@field lr_decay? number Step t, from 0, uses lr / (1 + t * lr_decay) (default: 0).
---@field initial_accumulator_value? number Where sums of squares start (default: 0).
---@field eps? number Added to the divisor (default: 1e-10).
---@field weight_decay? number Times the parameter, added to its gradient (default: 0).
---@field maximize? boolean Go up instead of down (default: false).

---RMSprop: gradients divided by the root of a moving mean of their squares.
---
---Errors: an argument out of its range; a parameter that is listed twice, or that is no leaf.
---
---```lua
---local w = peri.ones({ 2, 2 }):requires_grad()
---local optimizer = nn.optim.RMSprop { params = { w }, lr = 0.5 };
---(w * 2):sum():backward()
---optimizer:step()
---print(w:item(0) < 1, optimizer:lr()) --> true 0.5
---```
---@class peri.nn.optim.RMSprop: peri.nn.optim.Optimizer
---@overload fun(args: peri.nn.optim.RMSprop.args): peri.nn.optim.RMSprop
optim.RMSprop = {}

---@class peri.nn.optim.RMSprop.args
---@field params peri.Tensor[]|peri.nn.Module|table[] Of any shape: tensors, `{ name =, tensor = }`, a module; or groups (docs/models.md).
---@field lr? number The learning rate (default: 0.01).
---@field alpha? number Share of the mean of squares that stays from step to step (default: 0.99).
---@field centered? boolean Subtract the square of the mean (default: false).
---@field momentum? number Share of the momentum that stays from step to step; 0: there is none (default: 0).
---@field eps? number Added to the divisor (default: 1e-8).
---@field weight_decay? number Times the parameter, added to its gradient (default: 0).
---@field maximize? boolean Go up instead of down (default: false).

---What all optimizers have.
---
---```lua
---local w = peri.ones({ 2 }):requires_grad()
---local optimizer = nn.optim.SGD { params = { w }, lr = 0.5, momentum = 0.9 }
---w:sum():backward()
---optimizer:step()
---optimizer:zero_grad()
---optimizer:set_lr(0.1)
---optimizer:set("weight_decay", 0.01)
---optimizer:set_momentum(0.8)
---print(optimizer:lr(), optimizer:get("momentum"),
---  table.concat(optimizer:state_names(), " ")) --> 0.1 0.8 momentum_buffer
---print(nn.optim.Optimizer.is(optimizer), #optimizer:named_state(),
---  type(optimizer:state_groups()))
-----> true 2 table
---```
---@class peri.nn.optim.Optimizer: peri.nn.optim.KeyedOptimizer
optim.Optimizer = {}

---Update every parameter that has a gradient.
function optim.Optimizer:step() end

---Drop all gradients.
function optim.Optimizer:zero_grad() end

---The learning rate.
---@return number
function optim.Optimizer:lr() end

---The learning rate from now on.
---
---Errors: a rate below 0, or that is not finite.
---@param lr number The rate.
function optim.Optimizer:set_lr(lr) end

---A number of the optimizer, by its name.
---
---Errors: a name that it does not have.
---@param name string `lr`, `weight_decay`, `momentum`, `eps`, `beta1`, ...
---@return number
function optim.Optimizer:get(name) end

---Add a group of parameters, with options of its own; what it does not say is as the optimizer was made. Any time
---between two steps.
---
---Errors: an option that there is not; a parameter that is there; an empty group.
---
---```lua
---local a, b = peri.ones({ 2 }):requires_grad(), peri.ones({ 2 }):requires_grad()
---local optimizer = nn.optim.Adam { params = { a }, lr = 0.1 }
---optimizer:add_param_group { params = { b }, lr = 0.01 }
---print(#optimizer.param_groups, optimizer.param_groups[2].lr) --> 2 0.01
---```
---@param group table `{ params =, lr =, ... }`.
function optim.Optimizer:add_param_group(group) end

---Change such a number.
---
---Errors: a name that it does not have; a value out of its range.
---@param name string `lr`, `weight_decay`, `momentum`, `eps`, `beta1`, ...
---@param value number The value from now on.
function optim.Optimizer:set(name, value) end

---What schedules that cycle the momentum change: the momentum, or the first beta.
---
---Errors: a value out of its range.
---@param value number The value from now on.
function optim.Optimizer:set_momentum(value) end

---Names of the states that every parameter has: without momentum, SGD has none.
---@return string[]
function optim.Optimizer:state_names() end

---Everything that must be saved: live tensors, and for each parameter the number of steps.
---@return table[] # `{ name = "weight.exp_avg", tensor = }` each.
function optim.Optimizer:named_state() end

---The groups of ranks that have this optimizer together, where its parameters are shards of tables: `load_state_dict`
---is collective over these.
---@return peri.dist.Group[]
function optim.Optimizer:state_groups() end

---The norm of all gradients. Collective where the list holds shards of dense tables.
---
---Errors: a parameter that is listed twice.
---
---```lua
---local w = peri.ones({ 4 }):requires_grad();
---(w * 3):sum():backward()
---print(nn.optim.grad_norm({ w }):item(), nn.optim.clip_grad_norm({ w }, 1.5):item()) --> 6 6
---print(("%.3f"):format(w:grad():item(0))) --> 0.750
---nn.optim.clip_grad_value({ w }, 0.5)
---print(w:grad():item(0)) --> 0.5
---```
---@param params peri.Tensor[] Parameters, of any shape: `model:dense_parameters()`.
---@param norm_type? number p of the norm; `math.huge`: the largest (default: 2).
---@param options? table `sharded`, `group`: which parameters are parts of a rank's own (default: what the list says).
---@return peri.Tensor # A scalar, `f64`.
function optim.grad_norm(params, norm_type, options) end

---Scale all gradients in place so that their norm is at most `max_norm`. Collective as `grad_norm` is.
---
---Errors: a parameter that is listed twice.
---@param params peri.Tensor[] Parameters, of any shape.
---@param max_norm number The most.
---@param norm_type? number p of the norm; `math.huge`: the largest (default: 2).
---@param options? table `sharded`, `group` (default: what the list says).
---@return peri.Tensor # The norm before: a scalar, `f64`.
function optim.clip_grad_norm(params, max_norm, norm_type, options) end

---The part of a list of named parameters for a group of an optimizer. It keeps what the list of a
---`DistributedModelParallel` says of tables that are spread over ranks, of which some ranks may have nothing.
---
---Errors: parameters without names.
---
---```lua
---local model = nn.Sequential { nn.Linear { in_features = 2, out_features = 3 },
---  nn.Linear { in_features = 3, out_features = 1 } }
---local all = model:named_parameters()
---local biases = nn.optim.select(all, "bias$")
---local weights = nn.optim.select(all, function(name) return not name:find "bias$" end)
---local optimizer = nn.optim.AdamW { lr = 0.01,
---  params = { { params = weights }, { params = biases, weight_decay = 0 } } }
---print(#weights, #biases, biases[1].name, optimizer.param_groups[2].weight_decay)
-----> 2 2 0.bias 0
---```
---@param params table[] `model:named_parameters()`.
---@param which string|fun(name: string): boolean A pattern of Lua's that is found in the name, or a function.
---@return table[] # A list like `params`.
function optim.select(params, which) end

---Limit every element of all gradients to +-`clip_value`, in place.
---
---Errors: a value below 0.
---@param params peri.Tensor[] Parameters, of any shape.
---@param clip_value number The most.
function optim.clip_grad_value(params, clip_value) end

---Save the state of some objects as a checkpoint. The optimizers of a model's fused tables go with the model.
---Collective; it returns when the checkpoint is on the disk.
---
---Errors: a path that is taken or cannot be written; a part without `state_dict`; dense parameters that differ between
---ranks.
---
---```lua
---local model = nn.Linear { in_features = 2, out_features = 1 }
---local optimizer = nn.optim.Adam { params = model:named_parameters() }
---local path = os.tmpname() .. "-checkpoint"
---peri.checkpoint.save(path, { model = model, optimizer = optimizer }, { values = { step = 3 } })
---print(peri.checkpoint.load(path, { model = model, optimizer = optimizer }).step) --> 3
---local there = peri.checkpoint.open(path)
---print(there:has("model/weight"), there:read("model/weight"):size(2), type(there:values()),
---  there:increment()) --> true 2 table 0
---print(#there:names() >= 2, there:parent() == nil, #there:digest() > 0) --> true true true
---there:verify()
---there:close()
---peri.checkpoint.remove(path)
---```
---@param path string The checkpoint's folder; its parent must be there.
---@param parts table<string, any> Name -> an object with `state_dict` and `load_state_dict`: a model, an optimizer, a loader, ...
---@param options? table `values`, `replace`, `async`, `increment_of`, `group`, `file_bytes` (default: none): docs/checkpoints.md.
---@return string # The digest; with `async = true` a handle.
function checkpoint.save(path, parts, options) end

---Load a checkpoint into such objects, which may have another plan and be on another number of ranks. Collective.
---
---Errors: a checkpoint that is damaged; what was saved and has no place here, or is here and was not saved, all of it
---named.
---@param path string The checkpoint's folder.
---@param parts table<string, any> As for `save`.
---@param options? table `only`, `except`, `rename`, `group`: take a part on purpose (default: all).
---@return any # The `values` that were saved.
function checkpoint.load(path, parts, options) end

---Open a checkpoint to look into it. Local.
---
---Errors: what is no checkpoint, or a damaged one.
---@param path string|string[] The checkpoint's folder; or those of a full one and its increments in their order.
---@return peri.checkpoint.Checkpoint
function checkpoint.open(path) end

---Remove a checkpoint: its files, and nothing else. Local: one rank does it.
---
---Errors: what is no checkpoint; one that is open.
---@param path string The checkpoint's folder.
function checkpoint.remove(path) end

---Follow a run that saves into a folder, in another process or in this one: when `poll` is called, what that one has
---saved comes into the objects here. Of increments only the rows that changed are read.
---
---Errors: a path that is none; an object without `state_dict`.
---
---```lua
---local folder = os.tmpname() .. "-followed"
---local trained, served = nn.Linear { in_features = 2, out_features = 1 },
---  nn.Linear { in_features = 2, out_features = 1 }
---local saver = peri.checkpoint.Saver { parts = { model = trained }, folder = folder, every = 1 }
---local follower = peri.checkpoint.follow(folder, { model = served })
---print((follower:poll())) --> nil
---saver:step(1)
---follower:poll()
---print(follower.step, trained.weight:item(1) == served.weight:item(1)) --> 1 true
---follower:close()
---saver:close()
---os.execute("rm -r " .. folder)
---```
---@param folder string Of the checkpoints; it may be missing yet.
---@param parts table<string, any> As for `checkpoint.load`.
---@param options? table `only`, `except`, `rename`, `group` (default: none), as for `checkpoint.load`.
---@return peri.checkpoint.Follower
function checkpoint.follow(folder, parts, options) end

---What `checkpoint.follow` returns. `path`, `step` and `digest` say which checkpoint is here (false: none yet; `step`
---is false where no Saver saved it).
---@class peri.checkpoint.Follower
checkpoint.Follower = {}

---Take the newest checkpoint, if it is newer than what is here, as a whole or not at all. Collective.
---
---Errors: the first checkpoint does not fit the objects.
---@return string|nil # Its path, and the `values` beside it; nil: nothing is newer; or nil and why what is there cannot be had.
function checkpoint.Follower:poll() end

---Look no more. What is here stays.
function checkpoint.Follower:close() end

---A checkpoint that is open.
---@class peri.checkpoint.Checkpoint
checkpoint.Checkpoint = {}

---Names of all tensors, in order.
---@return string[]
function checkpoint.Checkpoint:names() end

---Whether there is a tensor of that name.
---
---Errors: what is no name.
---@param name string Such as `model/over.weight`.
---@return boolean
function checkpoint.Checkpoint:has(name) end

---A tensor of the checkpoint, or a part of it. It waits for the disk.
---
---Errors: a name that is not there; a part outside of the tensor.
---@param name string Such as `model/over.weight`.
---@param region? table `{ offset = { ... }, size = { ... } }` (default: all of it).
---@param tensor? peri.Tensor Where it is read to, of the part's shape (default: a new one).
---@return peri.Tensor # Of the part's shape.
function checkpoint.Checkpoint:read(name, region, tensor) end

---What the checkpoint says of a tensor, without reading it.
---
---Errors: a name that is not there.
---
---```lua
---local path = os.tmpname() .. "-checkpoint"
---peri.checkpoint.save(path, { model = nn.Linear { in_features = 2, out_features = 1 } })
---local opened = peri.checkpoint.open(path)
---local said = opened:tensor("model/weight")
---opened:close()
---print(said.dtype, said.shape[1], said.shape[2], #said.pieces) --> f32 1 2 1
---peri.checkpoint.remove(path)
---```
---@param name string Such as `model/over.weight`.
---@return table # `{ name =, dtype =, shape =, pieces = }`
function checkpoint.Checkpoint:tensor(name) end

---What was saved beside tensors: the trees of all parts, and `values` among them.
---@return any
function checkpoint.Checkpoint:values() end

---A fingerprint of all that it consists of.
---@return string
function checkpoint.Checkpoint:digest() end

---The digest of the checkpoint that this one is an increment of.
---@return string|nil # nil: it is whole by itself.
function checkpoint.Checkpoint:parent() end

---Which increment of its chain it is; 0: a full checkpoint.
---@return integer
function checkpoint.Checkpoint:increment() end

---Compare all bytes with their checksums; an error at the first that differ.
---
---Errors: a piece that differs; the error names it.
---@param rank? integer Only this rank's share (default: all).
---@param size? integer Of so many ranks (default: 1).
function checkpoint.Checkpoint:verify(rank, size) end

---Close it. The garbage collector does so too.
function checkpoint.Checkpoint:close() end

---Saves from time to time while a script trains, keeps the newest checkpoints, and goes on from them. `perilune run
-----checkpoint FOLDER` sets what is not given here. Without a folder nothing is saved.
---
---Errors: an option out of its range; a folder into which another job saves.
---
---```lua
---local model = nn.Linear { in_features = 2, out_features = 1 }
---local folder = os.tmpname() .. "-run"
---local saver = peri.checkpoint.Saver { parts = { model = model }, folder = folder,
---  every = "2steps", keep = 2 }
---local step = saver:resume() or 0
---for now = step + 1, 5 do saver:step(now, { at = now }) end
---saver:close(5, { at = 5 })
---local again = peri.checkpoint.Saver { parts = { model = model }, folder = folder }
---print(step, (again:resume())) --> 0 5
---again:close()
---os.execute("rm -r " .. folder)
---```
---@class peri.checkpoint.Saver
---@overload fun(args: peri.checkpoint.Saver.args): peri.checkpoint.Saver
checkpoint.Saver = {}

---@class peri.checkpoint.Saver.args
---@field parts table<string, any> As for `checkpoint.save`.
---@field folder? string Of the checkpoints (default: what `--checkpoint` says; none: nothing is saved).
---@field every? string|integer Steps or a time between saves: `1000steps`, `90s`, `10m` (default: 10 minutes).
---@field full_every? integer Every so many saves one is a full checkpoint, those between are increments (default: 1, all are full).
---@field keep? integer The newest so many are kept (default: 3).
---@field keep_every? integer And those of every so many steps, for ever (default: none).
---@field async? boolean Go on while a checkpoint is written (default: false).
---@field pace? number With `async`, the share of the time that copying takes (default: 0.01).
---@field resume? string `auto`: from the newest that is good; `no`; or a checkpoint's path (default: auto).
---@field group? peri.dist.Group The ranks that save together (default: the world).

---Load the checkpoint that the run goes on from. Collective.
---@return integer|nil # Its step, and the `values` that were saved; nil: there is none.
function checkpoint.Saver:resume() end

---After each step: saves if it is time, or if the run was asked to stop; where gradients of micro-batches wait for
---their update, after the last one of their group, of replicas after their next average, and where a pipeline has maps
---of raw ids learn ahead, when it has trained what they have learned from. A run that was asked to stop ends here, with
---exit code 75, unless a pipeline or `peri.stopping()` ends its loop. Collective.
---
---Errors: what the save meets; a step that is not after the last one.
---@param step integer Steps so far.
---@param values? any Plain values, or a function that returns them (default: none).
---@return string|nil # The path of what was saved.
function checkpoint.Saver:step(step, values) end

---Save now. Collective.
---
---Errors: what the save meets.
---@param step integer Steps so far.
---@param values? any Plain values, or a function that returns them (default: none).
---@return string|nil # The path; nil: there is no folder.
function checkpoint.Saver:save(step, values) end

---The end of the run: the last state is saved if it was not; where the run was asked to stop and the state is not whole
---(see `step`), nothing is saved, which is said. Then another job may save into the folder. Collective.
---
---Errors: what the save meets; a state that is not whole, where nobody asked to stop.
---@param step? integer Steps so far (default: nothing is saved).
---@param values? any Plain values, or a function that returns them (default: none).
function checkpoint.Saver:close(step, values) end
