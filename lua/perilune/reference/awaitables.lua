-- awaitables.lua: Results on their way.
--
-- Operations between ranks return at once. What they return is an Awaitable, which stands for the result; `wait()`
-- gives the result. A lazy Awaitable waits by itself as soon as a field, a method, a call, `tostring` or one of the
-- operators `+ - * / % ^ ..` is used. Lua asks nobody about `==`, `<`, `<=`, `#`, `pairs` and `ipairs`: with these
-- write `awaitable:wait()`, or `peri.dist.resolve(x)` where x may be either.
---@meta

---@class peri
local peri = {}
---@class peri.dist
local dist = {}
---@class peri.dist.ops
local ops = {}
---@class peri.dist.jagged
local jagged = {}
---@class peri.dist.exchange
local exchange = {}

---The base class of results that are on their way. A class of your own below it has a method `_wait_impl`, which waits
---and returns the result, and may have `_test_impl`, which tells whether that would be at once.
---
---Errors: a class without `_wait_impl`; what the operation meets.
---
---```lua
---local Answer = peri.dist.lazy_class("Answer", peri.Awaitable)
---function Answer:_wait_impl() return 42 end
---local answer = Answer():and_then(function(x) return x + 1 end)
---print(answer:test(), answer:wait(), answer:test()) --> false 43 true
---```
---@class peri.Awaitable
---@overload fun(): peri.Awaitable
peri.Awaitable = {}

---The result, once it is there. Waiting again gives the same result, or raises the same error. The result may be an
---Awaitable itself: sizes first, then numbers.
---
---Errors: what the operation meets, such as a rank that failed.
---@return any
function peri.Awaitable:wait() end

---Whether `wait` would return at once. It never waits.
---@return boolean
function peri.Awaitable:test() end

---Let what a function returns take the place of the result. Several of them run in order, at the first `wait`.
---
---Errors: one that was waited for already; what is no function.
---@param f function `f(result)`.
---@return peri.Awaitable # Itself.
function peri.Awaitable:and_then(f) end

---Stands for the result of an Awaitable: the first use of a field, method or operator waits (not `==`, `<` and `#`: see
---the top of the page).
---
---Errors: what is no Awaitable.
---
---```lua
---print(peri.LazyAwaitable(peri.NoWait(peri.ones { 3 })):numel()) --> 3
---```
---@class peri.LazyAwaitable: peri.Awaitable
---@param awaitable peri.Awaitable The one to wait for.
---@overload fun(awaitable: peri.Awaitable): peri.LazyAwaitable
peri.LazyAwaitable = {}

---An Awaitable of a result that is there already.
---
---Errors: nothing is checked.
---
---```lua
---print(peri.NoWait(5):wait()) --> 5
---```
---@class peri.NoWait: peri.Awaitable
---@param result any The result.
---@overload fun(result: any): peri.NoWait
peri.NoWait = {}

---A LazyAwaitable of a result that is there already.
---
---Errors: nothing is checked.
---
---```lua
---print(peri.LazyNoWait(5) + 1) --> 6
---```
---@class peri.LazyNoWait: peri.Awaitable
---@param result any The result.
---@overload fun(result: any): peri.LazyNoWait
peri.LazyNoWait = {}

---The list of the results of several Awaitables.
---
---Errors: an entry that is no Awaitable.
---
---```lua
---print(peri.dist.ListAwaitable({ peri.NoWait(5), peri.NoWait(6) }):wait()[2]) --> 6
---```
---@class peri.dist.ListAwaitable: peri.Awaitable
---@param list peri.Awaitable[] Those to wait for.
---@overload fun(list: peri.Awaitable[]): peri.dist.ListAwaitable
dist.ListAwaitable = {}

---Stands for one element of the result of another Awaitable. That one is waited for once, however many elements stand
---for parts of it.
---
---Errors: what is no Awaitable; when it is waited for, a result without elements.
---
---```lua
---print(peri.dist.GetItemLazyAwaitable(peri.NoWait { a = 5 }, "a") * 2) --> 10
---```
---@class peri.dist.GetItemLazyAwaitable: peri.Awaitable
---@param parent peri.Awaitable The one whose result has elements.
---@param key any The element's key in the result, which is a table or an object; an element that is not there is nil.
---@overload fun(parent: peri.Awaitable, key: any): peri.dist.GetItemLazyAwaitable
dist.GetItemLazyAwaitable = {}

---What operations of groups return: it waits for one operation of C. Scripts do not make it.
---
---Errors: what is no pointer to an operation.
---
---```lua
---print(peri.dist.WorkAwaitable.is(peri.init():barrier())) --> true
---```
---@class peri.dist.WorkAwaitable: peri.Awaitable
---@param ptr ffi.cdata* The operation (`peri_work *`), whose reference it takes over.
---@param result any The result.
---@overload fun(ptr: ffi.cdata*, result: any): peri.dist.WorkAwaitable
dist.WorkAwaitable = {}

---What the functions of `dist.ops` return: it waits for an exchange, whose results are on the gradient tape. Scripts do
---not make it.
---
---Errors: what is no pointer to an operation.
---
---```lua
---peri.init()
---print(peri.dist.ops.ExchangeAwaitable.is(
---  peri.dist.ops.all_gather_base_pooled { input = peri.ones { 2, 3 } })) --> true
---```
---@class peri.dist.ops.ExchangeAwaitable: peri.Awaitable
---@param ptr ffi.cdata* The operation (`peri_work *`), whose reference it takes over.
---@param list? boolean Whether the result is a list of tensors (default: false, it is one).
---@overload fun(ptr: ffi.cdata*, list?: boolean): peri.dist.ops.ExchangeAwaitable
ops.ExchangeAwaitable = {}

---What `TensorAllToAll` and `JaggedTensorAllToAll` return. Making it sends the numbers of rows, waiting sends the rows.
---Scripts do not make it.
---
---Errors: what is no group.
---
---```lua
---peri.init()
---print(peri.dist.jagged.RowsAwaitable.is(peri.dist.TensorAllToAll()(peri.ones { 2, 3 }, { 2 })))
-----> true
---```
---@class peri.dist.jagged.RowsAwaitable: peri.Awaitable
---@param group peri.dist.Group The ranks.
---@param parts table[] `{ tensor, rows for each rank }` each.
---@param finish function `finish(list)`: gets the tensors that came, one for each part, and returns the result.
---@overload fun(group: peri.dist.Group, parts: table[], finish: function): peri.dist.jagged.RowsAwaitable
jagged.RowsAwaitable = {}

---What `KJTAllToAll` returns: it waits for the sizes. Its result is the Awaitable of the KeyedJaggedTensor. Scripts do
---not make it.
---
---Errors: what is no pointer to an operation.
---
---```lua
---peri.init()
---local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 2 }, lengths = { 1, 1 } }
---local sizes = peri.dist.KJTAllToAll(nil, { 1 })(kjt)
---local ids = sizes:wait()
---print(peri.dist.exchange.KJTAllToAllSplitsAwaitable.is(sizes),
---  peri.dist.exchange.KJTAllToAllTensorsAwaitable.is(ids)) --> true true
---print(ids:splits().input_splits[1], ids:wait():equal(kjt)) --> 2 true
---```
---@class peri.dist.exchange.KJTAllToAllSplitsAwaitable: peri.Awaitable
---@param ptr ffi.cdata* The operation (`peri_work *`), whose reference it takes over.
---@param result any The result.
---@overload fun(ptr: ffi.cdata*, result: any): peri.dist.exchange.KJTAllToAllSplitsAwaitable
exchange.KJTAllToAllSplitsAwaitable = {}

---Waits for the ids of a KeyedJaggedTensor whose sizes are known. Scripts do not make it.
---
---Errors: what is no pointer to an operation; sizes that are asked for after `wait`.
---@class peri.dist.exchange.KJTAllToAllTensorsAwaitable: peri.Awaitable
---@param ptr ffi.cdata* The operation (`peri_work *`), whose reference it takes over.
---@param group peri.dist.Group The ranks.
---@overload fun(ptr: ffi.cdata*, group: peri.dist.Group): peri.dist.exchange.KJTAllToAllTensorsAwaitable
exchange.KJTAllToAllTensorsAwaitable = {}

---The sizes of the exchange, which the way back of sequence embeddings needs. Not after `wait`.
---@return table # `stride_per_rank` (samples of each rank), `input_splits` (ids sent to each), `output_splits` (ids that come from each).
function exchange.KJTAllToAllTensorsAwaitable:splits() end

---Stands for the tensor that an exchange of pooled embeddings brings.
---
---Errors: what is no Awaitable.
---
---```lua
---print(peri.dist.exchange.PooledEmbeddingsAwaitable(peri.NoWait(peri.ones { 2 }),
---  { function(t) return t * 3 end }):item(0)) --> 3
---```
---@class peri.dist.exchange.PooledEmbeddingsAwaitable: peri.LazyAwaitable
---@param tensor_awaitable peri.Awaitable Of the tensor.
---@param callbacks? function[] Called in order, each with what the one before returned (default: none).
---@overload fun(tensor_awaitable: peri.Awaitable, callbacks?: function[]): peri.dist.exchange.PooledEmbeddingsAwaitable
exchange.PooledEmbeddingsAwaitable = {}

---Stands for the rows that an exchange of sequence embeddings brings, in the order that a permutation says.
---
---Errors: what is no Awaitable, or no permutation; when it is waited for, a permutation that has not each row once.
---
---```lua
---local order = peri.tensor({ 1, 0 }, "i64")
---print(peri.dist.exchange.SequenceEmbeddingsAwaitable(peri.NoWait(peri.tensor { { 5 }, { 6 } }),
---  order):item(0))
-----> 6
---```
---@class peri.dist.exchange.SequenceEmbeddingsAwaitable: peri.LazyAwaitable
---@param tensor_awaitable peri.Awaitable Of the rows.
---@param permutation peri.Tensor|boolean Which row comes where, i64 `[rows]`; `false`: as they come.
---@overload fun(tensor_awaitable: peri.Awaitable, permutation: peri.Tensor|boolean): peri.dist.exchange.SequenceEmbeddingsAwaitable
exchange.SequenceEmbeddingsAwaitable = {}

---What a lazy Awaitable stands for (it waits); anything else is returned as it is.
---
---Errors: what the operation meets.
---
---```lua
---print(peri.dist.resolve(peri.LazyNoWait(5))) --> 5
---```
---@param x any Anything.
---@return any
function dist.resolve(x) end

---Make a class of lazy Awaitables: methods of the class and its base come first, all other names are those of the
---result. The example of `Awaitable` makes one.
---
---Errors: a name that is no string; a base that is no class.
---@param name string The name that messages show.
---@param base peri.Awaitable The class to build on.
---@return peri.Awaitable # The class.
function dist.lazy_class(name, base) end
