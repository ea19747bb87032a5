-- figures.lua: the measured numbers that the charts of docs/benchmarks.md show. The page has each of them in words too,
-- with where and how it was measured; spec/pictures_spec.lua compares the two. What is measured again is changed here
-- and there, then `make pictures`.
--
-- A chart: name, title, unit, panels = { { title, unit, series = { names }, rows = { { label, values in the order of
-- the series } } } }
return {
  { name = "kernels", title = "Embedding tables on a CPU, beside FBGEMM: ms a call, less is better", panels = {
    { title = "Lookup: 32 tables of 100,000 x 128, 512 samples, 20 ids a bag", unit = "ms", series = { "Perilune",
      "FBGEMM or PyTorch, the better" },
      rows = { { "f32", 6.1, 13.6 }, { "f16", 4.5, 12.8 }, { "int8", 3.7, 14.4 }, { "int4", 3.2, 7.8 } } },
    { title = "Gradients and update of the same tables", unit = "ms",
      series = { "Perilune", "FBGEMM or PyTorch, the better" },
      rows = { { "SGD", 13.7, 72 }, { "row-wise Adagrad", 12.8, 226 } } },
  } },
  { name = "h100", title = "One H100, beside NVIDIA's cuEmbed and PyTorch: less is better", panels = {
    { title = "Lookup: a table of 10,000,000 x 128, 65,536 samples, 20 ids a bag", unit = "us",
      series = { "Perilune", "cuEmbed", "PyTorch" },
      rows = { { "f32", 257, 250, 450 }, { "f16", 136, 131, 390 } } },
    { title = "Gradients (cuEmbed), gradients and row-wise Adagrad (Perilune)", unit = "us",
      series = { "Perilune", "cuEmbed" }, rows = { { "f32", 740, 900 } } },
    { title = "Dense part of a DCN v2 step, 8,192 samples", unit = "ms",
      series = { "Perilune", "PyTorch", "torch.compile" },
      rows = { { "f32", 18.2, 19.5, 18.8 }, { "TF32", 4.95, 6.64, 5.67 }, { "bf16", 3.73, 6.71, 4.52 } } },
  } },
  { name = "network", title = "Two machines joined by 1 Gbit/s: ms a step, less is better", panels = {
    { title = "Tables only: what a plan and a codec change (2 ranks a machine)", unit = "ms",
      series = { "row-wise", "table-row-wise" }, rows = { { "f32", 215, 83 }, { "f16", 120, 57 }, { "fp8", 87, 54 } } },
    { title = "A whole DLRM step: what a schedule changes (1 rank a machine)", unit = "ms", series = { "step" },
      rows = { { "plain loop", 222.2 }, { "sparse_dist", 206.5 }, { "semi_sync", 182.2 },
        { "computation alone", 149.4 } } },
  } },
}
