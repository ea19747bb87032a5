-- sequences.lua: Sequences: attention, places and times within jagged tensors.
--
-- A sequence is a bag of a jagged tensor; its rows are its *members*, the oldest first. Its last members may be
-- *targets*: items that a ranker is asked about; those before them are the *history*. Nothing is padded. Names and
-- arguments are those of generative-recommenders (HSTU) where it has them. In shapes, n is the number of all members, B
-- of sequences. docs/sequences.md tells more.
---@meta

---@class peri.sparse
local sparse = {}

---Attention within each sequence: the values of what a member sees, weighted by the softmax of `alpha * q . k`. A
---member sees itself and what is before it; a target sees the history and itself, but no other target. The first
---`contextual_seq_len` members (what is known of a person, in front of what the person did) see the whole history.
---Recorded on the tape.
---
---Errors: shapes or dtypes that do not fit; offsets that do not cut the rows; more targets than members; a sequence
---longer than `max_seq_len`; a history that is shorter than `contextual_seq_len`, unless the whole sequence is empty.
---
---```lua
---local offsets = peri.tensor({ 0, 1, 3 }, "i64")
---local q, v = peri.zeros { 3, 1, 2 }, peri.tensor({ 1, 2, 4 }, "f32", "cpu", { 3, 1, 1 })
---local y = peri.sparse.jagged_attention { q = q, k = q, v = v, seq_offsets = offsets }
---print(table.concat(y:to_list(), " ")) --> 1 2 3
---```
---@param args peri.sparse.jagged_attention.args
---@return peri.Tensor # `[n, heads, V]`.
function sparse.jagged_attention(args) end

---@class peri.sparse.jagged_attention.args
---@field q peri.Tensor Queries: `[n, heads, D]`, f32, f64, f16 or bf16. Rows may lie apart, as columns of one product do.
---@field k peri.Tensor Keys: `[n, heads, D]`.
---@field v peri.Tensor Values: `[n, heads, V]`.
---@field seq_offsets peri.Tensor Where each sequence begins, and the end of the last one: `[B + 1]`, i32 or i64.
---@field num_targets? peri.Tensor How many of the last members of each sequence are targets: `[B]`, i32 or i64 (default: none).
---@field max_seq_len? integer A longer sequence is an error (default: any length is fine; `hstu_mha` needs it).
---@field max_attn_len? integer How many members far a member looks; a target counts from where the history ends (default: 0, everywhere).
---@field contextual_seq_len? integer How many of the first members of each sequence are contextual; for `max_attn_len` they all stand where the first one does (default: 0).
---@field min_full_attn_seq_len? integer How many places before the end of the history members begin to look everywhere in spite of `max_attn_len`, as targets then do (default: 0, none does).
---@field alpha? number Factor of the products (default: 1 / sqrt(D)).
---@field causal? boolean Whether members of the history see only what is before them (default: true).

---HSTU's attention within each sequence: as `jagged_attention`, but the weights are `silu(alpha * q . k) /
---max_seq_len`, one by one, so that they do not compete. Recorded on the tape.
---
---Errors: as `jagged_attention`; no `max_seq_len`.
---
---```lua
---local offsets = peri.tensor({ 0, 1, 3 }, "i64")
---local q = peri.ones { 3, 1, 1 }
---local y = peri.sparse.hstu_mha { max_seq_len = 2, q = q, k = q, v = q, seq_offsets = offsets }
---print(("%.4f %.4f"):format(y:item(1), y:item(2))) --> 0.3655 0.7311
---```
---@param args peri.sparse.jagged_attention.args
---@return peri.Tensor # `[n, heads, V]`.
function sparse.hstu_mha(args) end

---How far each member is from the first target of its sequence (from the end, if there are none): `length - place`; 0
---for targets.
---
---Errors: offsets that do not cut the rows; more targets than members.
---
---```lua
---local offsets = peri.tensor({ 0, 1, 3 }, "i64")
---print(table.concat(peri.sparse.sequence_positions { seq_offsets = offsets, rows = 3,
---  max_positions = 9 }:to_list(),
---  " ")) --> 1 2 1
---```
---@param args peri.sparse.sequence_positions.args
---@return peri.Tensor # Numbers of 0..max_positions - 1: i64 `[n]`.
function sparse.sequence_positions(args) end

---@class peri.sparse.sequence_positions.args
---@field seq_offsets peri.Tensor Where each sequence begins, and the end of the last one: `[B + 1]`, i32 or i64.
---@field rows integer n: how many members there are.
---@field max_positions integer What is further away gets the last number: the rows of a table of positions.
---@field num_targets? peri.Tensor Targets of each sequence: `[B]`, i32 or i64 (default: none).

---The number of each member's sequence: with `index_select_dim0` it repeats a row of each sequence for all of its
---members.
---
---Errors: offsets that do not cut the rows.
---
---```lua
---print(table.concat(peri.sparse.sequence_numbers(peri.tensor({ 0, 1, 1, 3 }, "i64"),
---  3):to_list(), " "))
-----> 0 2 2
---```
---@param seq_offsets peri.Tensor Where each sequence begins, and the end of the last one: `[B + 1]`, i32 or i64.
---@param rows integer n: how many members there are.
---@return peri.Tensor # i64 `[n]`.
function sparse.sequence_numbers(seq_offsets, rows) end

---How long before the last member of its sequence each member happened, as a number that a table can have a row for:
---the whole part of `sqrt(d / increment)`, d being the difference of their times; at most `num_buckets`, which is one
---of them.
---
---Errors: offsets that do not cut the times; an increment that is not above 0.
---
---```lua
---local times, offsets = peri.tensor({ 0, 540, 600 }, "i64"), peri.tensor({ 0, 3 }, "i64")
---print(table.concat(peri.sparse.time_buckets { timestamps = times,
---  seq_offsets = offsets }:to_list(), " "))
-----> 3 1 0
---```
---@param args peri.sparse.time_buckets.args
---@return peri.Tensor # Numbers of 0..num_buckets: i64 `[n]`.
function sparse.time_buckets(args) end

---@class peri.sparse.time_buckets.args
---@field timestamps peri.Tensor `[n]`: i64, i32, f64 or f32. Differences of i64 are exact.
---@field seq_offsets peri.Tensor Where each sequence begins, and the end of the last one: `[B + 1]`, i32 or i64.
---@field num_buckets? integer The largest number (default: 2048).
---@field increment? number What the difference is divided by, in the unit of the times (default: 60).
---@field time_bucket_fn? string `sqrt` or `log` (default: `sqrt`).

---Two jagged tensors as one: bag by bag the rows of the left one, then those of the right one. Recorded on the tape.
---
---Errors: other numbers of bags; offsets that do not cut the values; rows of other shapes.
---
---```lua
---local left, right = peri.tensor({ 0, 1, 2 }, "i64"), peri.tensor({ 0, 0, 2 }, "i64")
---local both, offsets = peri.sparse.concat_2D_jagged {
---  values_left = peri.tensor { 1, 2 }, offsets_left = left, values_right = peri.tensor { 8, 9 },
---    offsets_right = right,
---}
---print(table.concat(both:to_list(), " "), table.concat(offsets:to_list(), " ")) --> 1 2 8 9 0 1 4
---```
---@param args peri.sparse.concat_2D_jagged.args
---@return peri.Tensor # Values: `[n + m, ...]`.
---@return peri.Tensor # Their offsets: i64 `[B + 1]`.
function sparse.concat_2D_jagged(args) end

---@class peri.sparse.concat_2D_jagged.args
---@field values_left peri.Tensor `[n, ...]`.
---@field values_right peri.Tensor `[m, ...]`.
---@field offsets_left peri.Tensor Offsets of the left values: `[B + 1]`, i32 or i64.
---@field offsets_right peri.Tensor Offsets of the right values: `[B + 1]`, i32 or i64.

---The reverse of `concat_2D_jagged`: the first rows of each bag, as many as `offsets_left` says, and the others.
---Recorded on the tape. Reads the last offsets, which waits for the device.
---
---Errors: offsets that do not cut the values.
---
---```lua
---local left, right = peri.tensor({ 0, 1, 2 }, "i64"), peri.tensor({ 0, 0, 2 }, "i64")
---local a, b = peri.sparse.split_2D_jagged { values = peri.tensor { 1, 2, 8, 9 },
---  offsets_left = left, offsets_right = right }
---print(table.concat(a:to_list(), " "), table.concat(b:to_list(), " ")) --> 1 2 8 9
---```
---@param args peri.sparse.split_2D_jagged.args
---@return peri.Tensor # The left values: `[n, ...]`.
---@return peri.Tensor # The right values: `[m, ...]`.
function sparse.split_2D_jagged(args) end

---@class peri.sparse.split_2D_jagged.args
---@field values peri.Tensor `[n + m, ...]`.
---@field offsets_left peri.Tensor Offsets of the first rows of each bag: `[B + 1]`, i32 or i64.
---@field offsets_right peri.Tensor Offsets of the others: `[B + 1]`, i32 or i64.

---At most `max_length` rows of each bag. Recorded on the tape.
---
---Errors: lengths that do not fit the values.
---
---```lua
---local values, lengths = peri.tensor { 1, 2, 3 }, peri.tensor({ 1, 2 }, "i64")
---print(table.concat((peri.sparse.truncate_jagged(values, lengths, 1)):to_list(), " ")) --> 1 3
---```
---@param values peri.Tensor `[n, ...]`.
---@param lengths peri.Tensor `[B]`, i32 or i64.
---@param max_length integer The most that a bag keeps.
---@param keep? string Which: `last` or `first` (default: `last`).
---@return peri.Tensor # The values: `[m, ...]`.
---@return peri.Tensor # Their lengths: `[B]`.
function sparse.truncate_jagged(values, lengths, max_length, keep) end
