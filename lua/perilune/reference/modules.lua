-- modules.lua: Modules and parameters.
--
-- A model is an `nn.Module`: a class with `init`, which makes its layers, and `forward`, which computes. A Module or a
-- parameter that is assigned to a field gets the field's name, and is found by all methods here. Names of what is
-- deeper are paths: `over.model.0.weight`.
---@meta

---@class peri.nn
local nn = {}
---@class peri.nn.extra
local extra = {}

---The base of all layers and models. Call an object of it like a function to run its `forward`; `tostring` shows the
---tree of modules. Lists and maps in fields are searched for modules and parameters, too; elements of a list are named
---from `0` on.
---
---Errors: `forward` of a class that has none.
---
---```lua
---local Net = nn.Module:extend "Net"
---function Net:init()
---  self.hidden, self.scale = nn.Linear { in_features = 2, out_features = 2 },
---    nn.Parameter(peri.ones { 2 })
---end
---function Net:forward(x) return self.hidden(x) * self.scale end
---local net = Net()
---print(net(peri.ones { 3, 2 }):size(1), #net:parameters(), #net:children(), #net:modules())
-----> 3 3 1 2
---print(net:named_parameters()[2].name, net:named_children()[1].name,
---  net:named_modules()[2].path) --> hidden.weight hidden hidden
---print(net:get_module("hidden"):extra_text()) --> in_features=2, out_features=2, bias=true
---print(#net:train():eval():named_buffers(), net.training) --> 0 false
---```
---@class peri.nn.Module
---@overload fun(): peri.nn.Module
nn.Module = {}

---Make a class below this one.
---
---Errors: a name that is no string.
---@param base peri.nn.Module The class to build on, usually written before the colon: `nn.Module:extend "Net"`.
---@param name string The name that error messages show.
---@return peri.nn.Module # The class.
function nn.Module.extend(base, name) end

---What the module computes. Each class has its own; calling the module calls it.
function nn.Module:forward() end

---What `tostring` shows between the parentheses, such as sizes. Classes have their own.
---@return string
function nn.Module:extra_text() end

---All trained tensors, the module's own first, then those below it; one that is shared comes once.
---@return peri.Tensor[] # Of any shapes.
function nn.Module:parameters() end

---All trained tensors with their paths.
---
---Errors: a prefix that is no string.
---@param prefix? string Put before the names, with a dot (default: none).
---@return table[] # `{ name =, tensor = }` each, in a fixed order.
function nn.Module:named_parameters(prefix) end

---All tensors that belong to the state but are not trained, such as running means.
---
---Errors: a prefix that is no string.
---@param prefix? string Put before the names, with a dot (default: none).
---@return table[] # `{ name =, tensor = }` each.
function nn.Module:named_buffers(prefix) end

---Parameters and buffers together.
---
---Errors: a prefix that is no string.
---
---```lua
---print(#nn.BatchNorm1d({ num_features = 2 }):named_state()) --> 4
---```
---@param prefix? string Put before the names, with a dot (default: none).
---@return table[] # `{ name =, tensor = }` each.
function nn.Module:named_state(prefix) end

---The modules directly below this one.
---@return peri.nn.Module[]
function nn.Module:children() end

---The modules directly below this one, with their names.
---@return table[] # `{ name =, module = }` each.
function nn.Module:named_children() end

---This module and all below it; a shared one comes once.
---@return peri.nn.Module[]
function nn.Module:modules() end

---This module and all below it, with their paths. Its own path is the prefix.
---
---Errors: a prefix that is no string.
---@param prefix? string The path of this module (default: `""`).
---@return table[] # `{ path =, module = }` each, parents first.
function nn.Module:named_modules(prefix) end

---The module at a path.
---
---Errors: a path at which there is none; the message lists what is there.
---@param path string Such as `over_arch.model.0`; `""` is the module itself.
---@return peri.nn.Module
function nn.Module:get_module(path) end

---Put another module at a path.
---
---Errors: a path at which there is none; what is no Module.
---
---```lua
---local net = nn.Sequential { nn.ReLU(), nn.ReLU() }
---net:set_module("1", nn.Sigmoid())
---net:substitute(net[1], nn.Tanh())
---net:replace("0", nn.Identity())
---print(net(peri.zeros { 1 }):item()) --> 0.5
---```
---@param path string Of the module that goes.
---@param module peri.nn.Module The new one.
function nn.Module:set_module(path, module) end

---Put another module in place of a direct child. Lists of modules have their own.
---
---Errors: a name that no child has; what is no Module.
---@param name string Of the child.
---@param module peri.nn.Module The new one.
function nn.Module:replace(name, module) end

---Put `new` wherever this module or one below it holds `old`, in fields and in plain tables in fields.
---
---Errors: nothing is checked.
---@param old any What goes: compared by identity.
---@param new any What comes.
function nn.Module:substitute(old, new) end

---Add a module under a name that need not be an identifier; it takes the place of one that has the name.
---
---Errors: what is no Module.
---
---```lua
---local net, kept = nn.Module(), nn.Parameter(peri.zeros { 2 })
---net:add_module("first layer", nn.ReLU())
---net:register_parameter("a.b", kept)
---net:register_buffer("mean", peri.zeros { 2 })
---print(#net:children(), #net:named_parameters(), #net:named_buffers()) --> 1 1 1
---```
---@param name string Of the module.
---@param module peri.nn.Module The module.
function nn.Module:add_module(name, module) end

---Add a parameter under a name that need not be an identifier.
---
---Errors: a tensor that is no leaf, or does not require a gradient.
---@param name string Of the parameter.
---@param tensor peri.Tensor Any shape.
function nn.Module:register_parameter(name, tensor) end

---Add a tensor that belongs to the state but is not trained.
---
---Errors: what is no tensor.
---@param name string Of the buffer.
---@param tensor peri.Tensor Any shape.
function nn.Module:register_buffer(name, tensor) end

---Training mode for this module and all below it: Dropout drops, BatchNorm1d uses the batch.
---
---Errors: nothing is checked.
---@param on? boolean `false`: evaluation mode (default: true).
---@return peri.nn.Module # The module itself.
function nn.Module:train(on) end

---Evaluation mode for this module and all below it.
---@return peri.nn.Module # The module itself.
function nn.Module:eval() end

---Drop the gradients of all parameters.
---
---```lua
---local layer = nn.Linear { in_features = 1, out_features = 1 }
---layer(peri.ones { 1, 1 }):backward()
---layer:zero_grad()
---print(layer.weight:grad() == nil) --> true
---```
function nn.Module:zero_grad() end

---Everything that must be saved: names and live tensors. Copying into one of these changes the module;
---`state_dict():clone()` is a copy, and `:gather()` a copy in which tables that are spread over ranks are whole. Local.
---
---Errors: a prefix that is no string.
---
---```lua
---local from, to = nn.Linear { in_features = 2, out_features = 1 },
---  nn.Linear { in_features = 2, out_features = 1 }
---local keys = to:load_state_dict(from:state_dict())
---print(#keys.missing_keys, to:check_state_dict { weight = peri.zeros { 3 } } ~= nil) --> 0 true
---print(to.weight:item(1) == from.weight:item(1)) --> true
---```
---@param prefix? string Put before the names, with a dot (default: none).
---@return table<string, peri.Tensor> # A tensor of any shape for each name; for tables over ranks a ShardedTensor.
function nn.Module:state_dict(prefix) end

---Copy tensors into the state. If something does not fit, the error lists all of it and nothing is copied. Where
---modules are sharded it is collective; then nothing is copied on any rank. A layer or tensor that the module has under
---several names may come under any of them, or, as in PyTorch's state_dicts, under several, with the same bytes.
---
---Errors: a name that is missing or unknown (unless `strict` is false); a tensor of another shape; two names of one
---tensor with bytes that differ.
---@param map table<string, peri.Tensor> Tensors by name, each of the shape that the state has.
---@param strict? boolean `false`: missing and unknown names are allowed (default: true).
---@param groups? peri.dist.Group[] More groups of ranks that load together, all or none of them (default: none).
---@param alike? function Of an entry of the state, `{ name =, tensor =, alike = }`: the group whose ranks train it alike, or nil; given otherwise, it is refused (default: none).
---@return table # `{ missing_keys =, unexpected_keys = }`: lists of names.
function nn.Module:load_state_dict(map, strict, groups, alike) end

---What keeps `load_state_dict` from loading, in words. It changes nothing. Local.
---
---Errors: nothing is raised: what does not fit is returned.
---@param map table<string, peri.Tensor> Tensors by name, each of the shape that the state has.
---@param strict? boolean As for `load_state_dict` (default: true).
---@return string|nil # nil: it would load.
function nn.Module:check_state_dict(map, strict) end

---What this module itself, without those below it, has in a state_dict. A class whose state is not in parameters and
---buffers has its own.
---
---```lua
---print(#nn.Linear({ in_features = 1, out_features = 1 }):own_state()) --> 2
---```
---@return table[] # `{ name =, tensor =, alike = }` each; `alike`: the group whose ranks have it alike, if there is one.
function nn.Module:own_state() end

---For classes whose state is sometimes of no one moment, while rows are on their way: raises an error that says when it
---will be. Otherwise it does nothing.
---
---```lua
---local layer = nn.ReLU()
---layer:check_moment()
---layer:try_state({}, "")
---layer:took_state({}, "")
---print(layer:state_group() == nil) --> true
---```
function nn.Module:check_moment() end

---For classes that have more to check than names and shapes: raises an error if this module cannot take what `map` has
---for it. It changes nothing. `load_state_dict` calls it for every module before anything is copied.
---
---Errors: what the class has against the map.
---@param map table What `load_state_dict` was given.
---@param path string Of this module.
function nn.Module:try_state(map, path) end

---`load_state_dict` calls it when it has copied the tensors of this module.
---
---Errors: nothing is raised.
---@param map table What `load_state_dict` was given.
---@param path string Of this module.
function nn.Module:took_state(map, path) end

---The ranks that load the parts of this module's state together.
---@return peri.dist.Group|nil # nil: the state is this rank's alone.
function nn.Module:state_group() end

---A list of modules. `list[1]` is the first, whose name in paths is `0`, as in PyTorch.
---
---Errors: what is no list of Modules.
---
---```lua
---local list = nn.ModuleList { nn.ReLU() }
---local second = list:append(nn.Sigmoid())[2]
---print(second(peri.zeros { 1 }):item()) --> 0.5
---```
---@class peri.nn.ModuleList: peri.nn.Module
---@param modules? peri.nn.Module[] The modules (default: none).
---@overload fun(modules?: peri.nn.Module[]): peri.nn.ModuleList
nn.ModuleList = {}

---Add a module at the end.
---@param module peri.nn.Module The module.
---@return peri.nn.ModuleList # The list itself.
function nn.ModuleList:append(module) end

---Modules by name: `dict.name` is one. They are in the order of their names; those that `update` brings later come
---behind them. In paths they have their names.
---
---Errors: what is no table of Modules; a name with a point in it, or one that all modules have for something else
---(`forward`, `eval`).
---
---```lua
---local dict = nn.ModuleDict { b = nn.ReLU(), a = nn.Sigmoid() }
---dict:update { c = nn.Tanh() }
---print(table.concat(dict:keys(), " "), dict.a(peri.zeros { 1 }):item()) --> a b c 0.5
---```
---@class peri.nn.ModuleDict: peri.nn.Module
---@param modules? table<string, peri.nn.Module> The modules (default: none).
---@overload fun(modules?: table<string, peri.nn.Module>): peri.nn.ModuleDict
nn.ModuleDict = {}

---Add modules, or put them in the place of those that have their names.
---@param modules table<string, peri.nn.Module> The modules.
---@return peri.nn.ModuleDict # The dict itself.
function nn.ModuleDict:update(modules) end

---The names of the modules.
---@return string[] # A list of them, in order.
function nn.ModuleDict:keys() end

---A list of modules, each of which is called with what the one before returned.
---
---Errors: what is no list of Modules.
---
---```lua
---print(nn.Sequential { nn.ReLU(), nn.Sigmoid() }:forward(peri.tensor { -1 }):item()) --> 0.5
---```
---@class peri.nn.Sequential: peri.nn.ModuleList
---@param modules? peri.nn.Module[] The modules (default: none).
---@overload fun(modules?: peri.nn.Module[]): peri.nn.Sequential
nn.Sequential = {}

---Call them in order. Calling the module calls it.
---@param x any What the first module is called with.
---@return any # What the last one returned.
function nn.Sequential:forward(x) end

---A list of parameters. `list[1]` is the first, whose name in paths is `0`.
---
---Errors: an entry that is no parameter.
---
---```lua
---print(nn.ParameterList { nn.Parameter(peri.ones { 3 }) }[1]:numel()) --> 3
---```
---@class peri.nn.ParameterList: peri.nn.Module
---@param parameters? peri.Tensor[] Parameters of any shape (default: none).
---@overload fun(parameters?: peri.Tensor[]): peri.nn.ParameterList
nn.ParameterList = {}

---The mean of losses over the samples of all ranks, however many each rank has; a rank may have none. The value is the
---same on all ranks. Gradients are such that their mean over the ranks, which DistributedModelParallel makes, is right.
---Collective.
---
---Errors: weights of another shape; a group that is no group of ranks.
---
---```lua
---print(nn.global_mean(peri.tensor { 1, 3 }):item(),
---  nn.global_mean(peri.tensor { 1, 3 }, peri.tensor { 0, 1 }):item()) --> 2 3
---```
---@param losses peri.Tensor A loss for each sample: any shape.
---@param weights? peri.Tensor A weight for each: the same shape (default: all are 1).
---@param group? peri.dist.Group|boolean The ranks; `false`: this one alone (default: the world, if it was joined).
---@return peri.Tensor # A scalar.
function nn.global_mean(losses, weights, group) end

---What modules keep beside tensors, such as the state of Dropout: whatever their method `get_extra_state` returns.
---Local.
---
---Errors: what is no Module.
---
---```lua
---local net = nn.Sequential { nn.Dropout { p = 0.5 } }
---local kept = nn.extra_state(net)
---print(kept["0"].step, nn.extra.extra_refusal(net, {}))
-----> 0 state of modules beside tensors: '0' is missing
---nn.extra.set_extra_state(net, kept)
---nn.load_extra_state(net, kept)
---```
---@param module peri.nn.Module The model.
---@return table<string, table> # Path of a module -> its state.
function extra.extra_state(module) end

---Give all modules what `extra_state` returned. Local.
---
---Errors: a path that is missing or unknown; then nothing is changed.
---@param module peri.nn.Module The model.
---@param extra table What `extra_state` returned.
function extra.load_extra_state(module, extra) end

---As `load_extra_state`, without the check: modules of which `extra` has nothing keep what they have.
---
---Errors: what is no Module.
---@param module peri.nn.Module The model.
---@param extra table What `extra_state` returned, or a part of it.
function extra.set_extra_state(module, extra) end

---What keeps `load_extra_state` from loading, in words.
---
---Errors: what is no Module.
---@param module peri.nn.Module The model.
---@param extra table What `extra_state` returned.
---@return string|nil # nil: it would load.
function extra.extra_refusal(module, extra) end
