-- hot.lua: the kernels that steps spend their time in, for tests/cuda/report.lua. Rows have 128 columns, bags 20 ids.
--
--   name    what the table calls it
--   file, kernel   where it is; its name, as the report shortens it
--   row     bytes by row: floor and moved
--   wide    rows of 16 bytes and more: that they move by 128-bit accesses, or why not
--   load    bits of the loads to look at, where the widest of the kernel are not the row's
--   with    an instruction of the loop that moves rows, where other loops load more
--   part    of those loads, the part that brings bytes of its own
--   flight  why it is not held to the bytes in flight
--   shared  bytes of dynamic shared memory a block
local SECTOR = 32

--- Bytes that lie anywhere at multiples of `step`: whole sectors of 32 bytes come, on average.
local function at(n, step)
  return { n, step % SECTOR == 0 and math.ceil(n / SECTOR) * SECTOR or n + SECTOR - step }
end
--- Bytes one after the other, with those of the neighbours.
local function stream(n) return { n, n } end

local function row(...)
  local floor, moved = 0, 0
  for _, x in ipairs { ... } do floor, moved = floor + x[1], moved + x[2] end
  return { floor = floor, moved = moved }
end

local ID, OUT = stream(8), stream(512 / 20)
local F32, F16, INT8, INT4 = at(512, 512), at(256, 256), at(136, 8), at(68, 4)
local MOMENTUM = at(4, 4)
local FEW = "a number an id, not a row"

return {
  { name = "forward, f32 rows", file = "tbe_forward", kernel = "lookup<row_f32, 32>", row = row(F32, ID, OUT),
    wide = true },
  { name = "forward, f16 rows", file = "tbe_forward", kernel = "lookup<row_half<2>, 16>", row = row(F16, ID, OUT),
    wide = true },
  { name = "forward, bf16 rows", file = "tbe_forward", kernel = "lookup<row_half<3>, 16>", row = row(F16, ID, OUT),
    wide = true },
  { name = "forward, int8 rows", file = "tbe_forward", kernel = "lookup<row_codes<64>, 8>", row = row(INT8, ID, OUT),
    load = 64, with = "FFMA", wide = "136 bytes a row: at multiples of 8" },
  { name = "forward, int4 rows", file = "tbe_forward", kernel = "lookup<row_codes<67>, 8>", row = row(INT4, ID, OUT),
    load = 32, with = "FFMA", wide = "68 bytes a row: at multiples of 4" },
  { name = "update, row-wise Adagrad", file = "tbe_update", kernel = "update_windows<shape<16, 2>, 3, true, 4>",
    row = row(F32, F32, F32, MOMENTUM, MOMENTUM, ID), wide = true },
  { name = "update, SGD", file = "tbe_update", kernel = "update_windows<shape<16, 2>, 1, true, 4>",
    row = row(F32, F32, F32, ID), wide = true },
  { name = "update, pieces of long runs", file = "tbe_update", kernel = "sum_piece<0>", row = row(F32, ID),
    wide = true },
  { name = "sort: keys of bags", file = "tbe_sort", kernel = "make_keys", row = row(ID, stream(8)), flight = FEW },
  { name = "sort: one digit", file = "tbe_sort", kernel = "peri_radix_pass", row = row(ID, stream(8)), flight = FEW },
  { name = "quantize f32 to int8", file = "quantize", kernel = "quantize_row<peri_f32, 32>", row = row(F32, INT8),
    wide = true },
  { name = "int8 to f16", file = "quantize", kernel = "restore_row<peri_f16, 8>", row = row(INT8, F16), load = 64,
    wide = true },
  { name = "permute rows", file = "jagged", kernel = "copy_words<uint4>", row = row(F32, F32), wide = true },
  { name = "permute ids", file = "jagged", kernel = "copy_words<uint2>", row = row(ID, stream(8)) },
  { name = "bucketize: count", file = "buckets", kernel = "count_tiles<unsigned long, 3>", row = row(ID),
    shared = 8 * 8 * 4 + 8 * 256 * 2, flight = FEW },
  { name = "bucketize: place", file = "buckets", kernel = "place_parts<unsigned long, 3>", row = row(ID, stream(8)),
    shared = 8 * (8 * 12 + 512 * 10), flight = FEW },
  { name = "check of offsets", file = "jagged", kernel = "check_bags", row = row(stream(8)) },
  { name = "cumulative sum: blocks", file = "jagged", kernel = "sum_blocks", row = row(stream(4)) },
  { name = "cumulative sum: write", file = "jagged", kernel = "write_sums", row = row(stream(4), stream(8)) },
  { name = "copy of a part of a matrix", file = "convert", kernel = "move_two<uint4>", row = row(F32, F32),
    wide = true },
  { name = "jagged to dense", file = "jagged", kernel = "pad_bag<uint4>", row = row(F32, F32), wide = true },
  { name = "dense to jagged", file = "jagged", kernel = "unpad_bag<uint4>", row = row(F32, F32), wide = true },
  { name = "select rows", file = "lookup", kernel = "select_row<uint32_t>", row = row(F32, F32), wide = true },
  { name = "route: combine pieces", file = "route_rows", kernel = "combine_cell", row = row(F32, F32), wide = true },
  { name = "route: spread gradients", file = "route_rows", kernel = "spread_cell", row = row(F32, F32), wide = true },
  { name = "route: rows", file = "route_rows", kernel = "rows_cell<false>", row = row(F32, F32, ID), wide = true },
  { name = "route: rows back", file = "route_rows", kernel = "rows_cell<true>", row = row(F32, F32, ID), wide = true },
  { name = "route: place runs", file = "route_rows", kernel = "place_row", row = row(F32, F32), wide = true },
  { name = "cache: fill, spill", file = "cache", kernel = "move_row", row = row(F32, F32), wide = true },
  { name = "SGD step", file = "optim", kernel = "update_kernel<peri_f32, sgd_step, 1>", row = row(F32, F32, F32),
    wide = true },
  { name = "Adagrad step", file = "optim", kernel = "update_kernel<peri_f32, adagrad_step, 1>",
    row = row(F32, F32, F32, F32, F32), wide = true },
  { name = "Adam step", file = "optim", kernel = "update_kernel<peri_f32, adam_step, 1>",
    row = row(F32, F32, F32, F32, F32, F32, F32), wide = true },
  { name = "row-wise Adagrad step", file = "optim", kernel = "rowwise_kernel<float>",
    row = row(F32, F32, F32, stream(8)) },
  { name = "cross layer, f32", file = "dense_rows", kernel = "strips_kernel<cross_strip<peri_f32, 4>>",
    row = row(F32, F32, F32, F32), wide = true },
  { name = "cross layer, bf16", file = "dense_rows", kernel = "strips_kernel<cross_strip<peri_bf16, 4>>",
    row = row(F16, F16, F16, F16), wide = true },
  { name = "cross layer back, f32", file = "dense_rows",
    kernel = "summed_strips_kernel<cross_grad_strip<peri_f32, true, false, 4>>",
    row = row(F32, F32, F32, F32, F32, F32), wide = true },
  { name = "cross layer back, bf16", file = "dense_rows",
    kernel = "summed_strips_kernel<cross_grad_strip<peri_bf16, true, false, 4>>",
    row = row(F16, F16, F16, F16, F16, F16), wide = true },
  { name = "bias and ReLU, f32", file = "dense_rows", kernel = "strips_kernel<bias_act_strip<peri_f32, 1, 4>>",
    row = row(F32, F32), wide = true },
  { name = "ReLU back, f32", file = "dense_rows", kernel = "summed_strips_kernel<act_grad_strip<peri_f32, 1, 8>>",
    row = row(F32, F32, F32), wide = true },
  { name = "ReLU back, bf16", file = "dense_rows", kernel = "summed_strips_kernel<act_grad_strip<peri_bf16, 1, 8>>",
    row = row(F16, F16, F16), wide = true },
  { name = "y += x, f32", file = "dense", kernel = "packs_kernel<axpy_map<peri_f32>>", row = row(F32, F32, F32),
    wide = true },
  { name = "x * y, bf16", file = "dense", kernel = "packs_kernel<binary_map<peri_bf16, 2>>", row = row(F16, F16, F16),
    wide = true },
  { name = "interaction", file = "interaction", kernel = "products<float>", row = row(F32),
    flight = "a block's rows come to shared memory" },
  { name = "interaction back", file = "interaction", kernel = "gradients<float>", row = row(F32, F32),
    flight = "a block's rows come to shared memory" },
  { name = "codec f16: encode", file = "codec", kernel = "code_quads<code16<peri_f16>, false>", row = row(F32, F16),
    wide = true },
  { name = "codec f16: decode", file = "codec", kernel = "code_quads<code16<peri_f16>, true>", row = row(F16, F32),
    wide = true },
  { name = "codec int8: encode", file = "codec", kernel = "encode_block<int8_block, 32>", row = row(F32, INT8),
    wide = true },
  { name = "codec int8: decode", file = "codec", kernel = "decode_block<int8_block, 8>", row = row(INT8, F32),
    load = 32, wide = true },
}
