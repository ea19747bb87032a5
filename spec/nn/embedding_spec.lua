-- Embedding and EmbeddingBag on both devices: torch's own results (spec/golden/ops/embedding), gradients by
-- differences, padding, norms, and inputs that make no bags.
local peri = require "perilune"
local golden = require "spec.support.golden"
local support = require "spec.support.tbe"
local nn, C = peri.nn, peri.ffi.C

local STEP = 0.5

for _, device in ipairs { "cpu", "opaque" } do
  local function t(list, dtype, shape) return peri.tensor(list, dtype or "f32", device, shape) end
  local function matrix(rows, cols)
    return t(support.numbers(rows * cols, support.generator(rows)), "f32", { rows, cols })
  end

  --- Modules with these weights and arguments.
  local function bag(weight, more)
    local a = { freeze = false }
    for key, value in pairs(more or {}) do a[key] = value end
    return nn.EmbeddingBag.from_pretrained(weight, a)
  end

  describe("torch's embeddings on " .. device, function()
    for _, name in ipairs(golden.names("ops/embedding", "^bag")) do
      it("reproduces " .. name, function()
        local case = golden.load(name)
        local a = case.args
        local weights = case:tensor("in.per_sample_weights", device)
        if weights then weights:requires_grad() end
        local module = bag(case:tensor("in.weight", device),
          { mode = a.mode, padding_idx = a.padding_idx, max_norm = a.max_norm, norm_type = a.norm_type,
            include_last_offset = a.include_last_offset })
        local out = module(case:tensor("in.indices", device), case:tensor("in.offsets", device), weights)
        case:assert_near("out.output", out)
        if case:has "out.weight" then case:assert_near("out.weight", module.weight) end
        if not case:has "in.grad_output" then return end
        out:backward(case:tensor("in.grad_output", device))
        case:assert_near("grad.weight", module.weight:grad())
        if weights then case:assert_near("grad.per_sample_weights", weights:grad()) end
      end)
    end

    it("reproduces embedding", function()
      local case = golden.load "ops/embedding/embedding"
      local module = nn.Embedding.from_pretrained(case:tensor("in.weight", device), { freeze = false })
      local out = module(case:tensor("in.indices", device))
      assert.same(case:shape "out.output", out:shape())
      case:assert_near("out.output", out)
      out:backward(case:tensor("in.grad_output", device))
      case:assert_near("grad.weight", module.weight:grad())
    end)
  end)

  describe("Embedding and EmbeddingBag on " .. device, function()
    -- bags of 3, 0, 1, 5, 1, 1 ids; 5 may be padding
    local ids, offsets = { 2, 0, 2, 4, 1, 5, 3, 2, 2, 5, 0 }, { 0, 3, 3, 4, 9, 10 }
    local rows, cols = 6, 19

    --- Gradients of a function of the weights (and of the ids' weights) against differences: element by element, small
    -- enough a step that no other element becomes the largest.
    local function check(module, step, weights)
      local out = module(t(ids, "i64"), t(offsets, "i32"), weights)
      local upstream = support.numbers(out:numel(), support.generator(3))
      out:backward(t(upstream, "f32", out:shape()))
      local function loss(w, x)
        local other = bag(t(w, "f32", { rows, cols }), { mode = module.mode, padding_idx = module.padding_idx or nil })
        local list, sum = other(t(ids, "i64"), t(offsets, "i32"), x and t(x)):to_list(), 0
        for i = 1, #list do sum = sum + list[i] * upstream[i] end
        return sum
      end
      local function differences(list, f) return support.differences(list, f, step) end
      local w, x = module.weight:to_list(), weights and weights:to_list()
      local tolerance = { abs = 1e-5 / step, rel = 1e-5 / step }
      golden.assert_near(differences(w, function(moved) return loss(moved, x) end), module.weight:grad():to_list(),
        tolerance, "weight")
      if not x then return end
      golden.assert_near(differences(x, function(moved) return loss(w, moved) end), weights:grad():to_list(), tolerance,
        "ids' weights")
    end

    for _, mode in ipairs { "sum", "mean", "max" } do
      for _, padding in ipairs { false, 5 } do
        it(("has the gradients that differences give: %s%s"):format(mode, padding and ", padding" or ""), function()
          -- Numbers of a column differ by at least 1/64, so that a step of 1/256 changes no maximum.
          local list, draw = {}, support.generator(11)
          for d = 1, cols do
            local order = {}
            for r = 1, rows do order[r] = r end
            for r = rows, 2, -1 do
              local s = draw(r) + 1
              order[r], order[s] = order[s], order[r]
            end
            for r = 1, rows do list[(r - 1) * cols + d] = (order[r] - 3.5) / 64 end
          end
          local module = bag(t(list, "f32", { rows, cols }), { mode = mode, padding_idx = padding or nil })
          check(module, mode == "max" and 1 / 256 or STEP)
          if padding then -- learns nothing
            local grad = module.weight:grad():to_list()
            for d = 1, cols do assert.equal(0, grad[padding * cols + d]) end
          end
        end)
      end
    end

    it("has the gradients of the ids' weights that differences give", function()
      local draw = support.generator(5)
      for _, padding in ipairs { false, 5 } do
        local weights = t(support.numbers(#ids, draw)):requires_grad()
        check(bag(matrix(rows, cols), { mode = "sum", padding_idx = padding or nil }), STEP, weights)
      end
      local frozen = nn.EmbeddingBag.from_pretrained(matrix(rows, cols), { mode = "sum" })
      local weights = t(support.numbers(#ids, draw)):requires_grad()
      frozen(t(ids, "i64"), t(offsets, "i64"), weights):sum():backward()
      assert.is_nil(frozen.weight:grad())
      local list = frozen.weight:to_list()
      for i, x in ipairs(weights:grad():to_list()) do
        local sum = 0
        for d = 1, cols do sum = sum + list[ids[i] * cols + d] end
        assert.near(sum, x, 1e-5)
      end
    end)

    it("looks every id up in one bag, or says which offset leaves ids out", function()
      local draw = support.generator(11)
      for case = 1, 60 do
        local mode, last = ({ "sum", "mean", "max" })[case % 3 + 1], draw(2) == 1
        local n, bags, begins = draw(6), draw(4), { 0 }
        for b = 2, bags do begins[b] = begins[b - 1] + draw(n - begins[b - 1] + 1) end
        if last then begins[bags + 1] = n end
        if bags == 0 and not last then begins = {} end
        local list = {}
        for i = 1, n do list[i] = draw(rows) end
        local sound = bags > 0 or n == 0
        local at = #begins > 0 and draw(#begins) + 1 or 1
        if #begins > 0 and draw(2) == 1 then -- the first or the last one elsewhere, or one beyond the ids
          begins[at] = begins[at] + draw(4) - 2
        end
        local edge = begins[#begins]
        sound = sound and (begins[1] or 0) == 0 and (not last or edge == n) and (edge or 0) <= n
        for b = 2, #begins do sound = sound and begins[b] >= begins[b - 1] end
        local module = bag(matrix(rows, cols), { mode = mode, include_last_offset = last })
        local function call() return module(t(list, "i64"), t(begins, case % 2 == 0 and "i64" or "i32")) end
        if sound then
          local out, by_row = call():to_list(), module.weight:to_list()
          for b = 1, bags do
            local first, past = begins[b], begins[b + 1] or n
            for d = 1, cols do
              local want = past > first and mode == "max" and -math.huge or 0
              for i = first + 1, past do
                local x = by_row[list[i] * cols + d]
                want = mode == "max" and math.max(want, x) or mode ~= "max" and want + x or want
              end
              if mode == "mean" and past > first then want = want / (past - first) end
              assert.near(want, out[(b - 1) * cols + d], 1e-5)
            end
          end
        else
          local ok, why = pcall(call)
          assert.is_false(ok, ("%d ids, offsets %s"):format(n, table.concat(begins, " ")))
          assert.truthy(tostring(why):find "offset", tostring(why))
        end
      end
    end)

    if device ~= "cpu" then
      local good, at = t({ 0, 1, 3 }, "i64"), t({ 0, 2 }, "i64")
      local function fails(message, f, ...)
        local ok, why = pcall(f, ...)
        assert.is_false(ok)
        assert.matches(message, tostring(why))
      end
      --- A module, a call of it with three ids, a step, and a call with a bad id.
      local function trained(mode)
        local class = mode == "none" and nn.Embedding or nn.EmbeddingBag
        local module = class.from_pretrained(matrix(4, 2), { freeze = false, mode = mode ~= "none" and mode or nil })
        local function look(list, begins) return mode == "none" and module(list) or module(list, begins or at) end
        return module, look, function() look(good):sum():backward() end,
          function() return look(t({ 0, 1, 9 }, "i64")) end
      end

      for _, mode in ipairs { "sum", "mean", "max", "none" } do
        it("judges the ids of a loop that trains behind it, and tells of them once: " .. mode, function()
          local module, look, step, slip = trained(mode)
          local message = ("table 'weight', sample %s of the bag, allowed: 0%%.%%.3"):format(
            mode == "none" and "0: id 9 at place 2" or "1: id 9 at place 0")
          fails(message, slip) -- what no backward pass has led to is judged at once
          step()
          local out = slip()
          fails(message, out.to_list, out)
          assert.equal(0, out:to_list()[out:numel()]) -- the bad id is nowhere in it, and nobody is told again
          step()
          module.weight:set_grad(nil)
          out = slip():sum()
          local heard = { pcall(out.backward, out) }
          if heard[1] then heard = { pcall(step) } end -- at the latest now, before anything is learnt
          assert.is_false(heard[1])
          assert.matches(message, tostring(heard[2]))
          local grad = module.weight:grad()
          if grad then assert.same({ 0, 0, 0, 0 }, grad:slice(1, 2, 4):reshape(-1):to_list()) end
          step()
          if mode == "none" then return end
          out = look(t({ 0, 1, 9 }, "i64"), t({ 0, 9 }, "i64")) -- both are bad: offsets are told, and only they
          fails("offsets: bag 0: it ends at offset 9, allowed: 0%.%.3", out.to_list, out)
          out:to_list()
        end)
      end

      it("keeps nothing of calls about which nobody asks again", function()
        collectgarbage()
        collectgarbage()
        local objects = C.peri_mem_objects()
        do
          local _, look, step = trained "max"
          step()
          look(good, t({ 0, 9 }, "i64"))
        end
        C.peri_log_level_set(C.PERI_LOG_ERROR) -- the offsets are told in the log, when the weights go
        collectgarbage()
        collectgarbage()
        C.peri_log_level_set(C.PERI_LOG_WARN)
        assert.equal(objects, C.peri_mem_objects())
      end)
    end

    it("takes bags as rows of ids, as offsets with and without the last one, and ids of any shape", function()
      for _, mode in ipairs { "sum", "mean", "max" } do
        local module = bag(matrix(rows, cols), { mode = mode })
        local whole = bag(module.weight, { mode = mode, include_last_offset = true })
        local list = { 1, 4, 4, 0, 3, 2 }
        local want = module(t(list, "i32", { 3, 2 })):to_list()
        assert.same(want, module(t(list, "i64"), t({ 0, 2, 4 }, "i32")):to_list())
        assert.same(want, whole(t(list, "i64"), t({ 0, 2, 4, 6 }, "i64")):to_list())
        local transposed = t({ 1, 4, 3, 4, 0, 2 }, "i64", { 2, 3 }):transpose(1, 2) -- no contiguous ids
        assert.same(want, module(transposed):to_list())
        assert.same({ 0, cols }, module(t({}, "i64"), t({}, "i64")):shape())
        assert.same({ 2, cols }, module(t({}, "i64"), t({ 0, 0 }, "i64")):shape())
        assert.same({ 0, cols }, whole(t({}, "i64"), t({ 0 }, "i64")):shape())
        assert.same({ 2, cols }, module(t({}, "i64", { 2, 0 })):shape())
      end
      local e = nn.Embedding.from_pretrained(matrix(rows, 2))
      local w = e.weight:to_list()
      assert.same({ w[7], w[8] }, e(t({ 3 }, "i32", {})):to_list())
      assert.same({ 2 }, e(t({ 3 }, "i32", {})):shape())
      assert.same({ 2, 1, 3, 2 }, e(t({ 0, 1, 2, 3, 4, 5 }, "i64", { 2, 1, 3 })):shape())
      assert.same(w, e(t({ 0, 1, 2, 3, 4, 5 }, "i64", { 2, 1, 3 })):to_list())
      assert.same({ 0, 2 }, e(t({}, "i64")):shape())
    end)

    it("leaves padding out of sums, means, maxima and gradients", function()
      local weight = t({ 1, 2, 3, 4, 9, 9 }, "f32", { 3, 2 })
      local list, at = t({ 0, 2, 1, 2, 2, 0 }, "i64"), t({ 0, 3, 5 }, "i64")
      local function pooled(mode) return bag(weight, { mode = mode, padding_idx = -1 })(list, at):to_list() end
      assert.same({ 4, 6, 0, 0, 1, 2 }, pooled "sum")
      assert.same({ 2, 3, 0, 0, 1, 2 }, pooled "mean")
      assert.same({ 3, 4, 0, 0, 1, 2 }, pooled "max")
      local e = nn.Embedding.from_pretrained(weight, { padding_idx = 2, freeze = false })
      local out = e(list)
      assert.same({ 1, 2, 9, 9, 3, 4, 9, 9, 9, 9, 1, 2 }, out:to_list(),
        "its row is a row like others where nothing is pooled")
      out:sum():backward()
      assert.same({ 2, 2, 1, 1, 0, 0 }, e.weight:grad():to_list())
      local made = nn.EmbeddingBag { num_embeddings = 4, embedding_dim = 3, padding_idx = 1, device = device }
      local zeros, others = made.weight:detach():slice(1, 1, 2):to_list(), made.weight:to_list()
      assert.same({ 0, 0, 0 }, zeros)
      assert.is_true(others[1] ~= 0 and others[10] ~= 0)
    end)

    it("gives the first of equal elements the gradient, and lets NaN through", function()
      local nan = 0 / 0
      local module = bag(t({ -1, 5, -1, 5, -2, nan }, "f32", { 3, 2 }), { mode = "max" })
      local out = module(t({ 1, 0, 0, 0, 2, 1, 2 }, "i64"), t({ 0, 3, 6 }, "i64"))
      local got = out:to_list()
      assert.same({ -1, 5, -1 }, { got[1], got[2], got[3] })
      assert.is_true(got[4] ~= got[4])
      assert.same(-2, got[5])
      out:backward(t({ 1, 2, 3, 4, 5, 6 }, "f32", { 3, 2 }))
      assert.same({ 3, 0, 1, 2, 5, 10 }, module.weight:grad():to_list())
    end)

    it("scales rows that are too long down when they are looked up", function()
      local function scaled(norm_type, list)
        local e = nn.Embedding.from_pretrained(t({ 3, -4, 0.3, 0.4, 3, 4, 6, 8 }, "f32", { 4, 2 }),
          { max_norm = 1, norm_type = norm_type })
        local out = e(t(list or { 0, 1, 0, 3 }, "i32"))
        return e.weight:to_list(), out:to_list()
      end
      local near = { abs = 1e-6, rel = 1e-6 }
      local w, out = scaled(2)
      golden.assert_near({ 0.6, -0.8, 0.3, 0.4, 3, 4, 0.6, 0.8 }, w, near)
      golden.assert_near({ 0.6, -0.8, 0.3, 0.4, 0.6, -0.8, 0.6, 0.8 }, out, near)
      golden.assert_near({ 3 / 7, -4 / 7, 0.3, 0.4, 3, 4, 6 / 14, 8 / 14 }, (scaled(1)), near)
      golden.assert_near({ 0.75, -1, 0.3, 0.4, 3, 4, 0.75, 1 }, (scaled(math.huge)), near)
      local cube = (27 + 64) ^ (1 / 3)
      golden.assert_near({ 3 / cube, -4 / cube, 0.3, 0.4, 3, 4, 3 / cube, 4 / cube }, (scaled(3)), near)
      golden.assert_near({ 3, -4, 0.3, 0.4, 3, 4, 6, 8 }, (scaled(2, {})), near)
      local max = bag(t({ 3, -4, 1, 1 }, "f32", { 2, 2 }), { mode = "max", max_norm = 2 })
      golden.assert_near({ 1.2, 1 }, max(t({ 0, 1 }, "i64", { 1, 2 })):to_list(), near)
    end)

    it("have, in C, no padding and no norm where the arguments are zeros", function()
      local ffi, P = require "ffi", peri.ffi
      local weight, list, starts = matrix(3, 2), t({ 0, 0, 2 }, "i64"), t({ 0, 1 }, "i64")
      local args = P.struct "peri_embedding_bag_args"
      args.weight, args.ids, args.offsets = weight.ptr, list.ptr, starts.ptr
      local out, w = ffi.new "peri_tensor *[1]", weight:to_list()
      P.check(P.C.peri_embedding_bag(args, out))
      golden.assert_near({ w[1], w[2], w[1] + w[5], w[2] + w[6] }, peri.Tensor.wrap(out[0]):to_list(), { abs = 1e-6 })
      args.padding_idx = 2
      assert.is_true(P.C.peri_embedding_bag(args, out) < 0)
      assert.matches("padding_idx 2 without `padded`", ffi.string(P.C.peri_error_message()))
      args.padded = true
      P.check(P.C.peri_embedding_bag(args, out))
      assert.same({ w[1], w[2], w[1], w[2] }, peri.Tensor.wrap(out[0]):to_list())
    end)

    it("are modules: parameters, state, text", function()
      local e = nn.Embedding { num_embeddings = 3, embedding_dim = 2, padding_idx = 0, max_norm = 1, device = device }
      assert.equal("Embedding(3, 2, padding_idx=0, max_norm=1)", tostring(e))
      assert.equal("weight", e:named_parameters()[1].name)
      local b = nn.EmbeddingBag { num_embeddings = 3, embedding_dim = 2, device = device }
      assert.equal("EmbeddingBag(3, 2, mode=mean)", tostring(b))
      assert.equal("mean", b.mode)
      assert.is_false(b.include_last_offset)
      local frozen = nn.Embedding.from_pretrained(matrix(3, 2))
      assert.same({ 0, 1 }, { #frozen:parameters(), #frozen:named_buffers() })
      assert.is_nil(frozen(t({ 1 }, "i64")):grad())
      local net = nn.Sequential { e }
      local optimizer = nn.optim.SGD { params = net:parameters(), lr = 0.5 }
      local before = e.weight:to_list()
      e(t({ 1, 1 }, "i64")):sum():backward()
      optimizer:step()
      assert.equal("0.weight", net:named_state()[1].name)
      assert.is_true(e.weight:to_list()[3] ~= before[3] and e.weight:to_list()[5] == before[5])
    end)

    it("say what is wrong", function()
      local function fails(text, f, ...)
        local given = { ... }
        assert.error_matches(function() f(unpack(given)) end, text)
      end
      local function make(more)
        local a = { num_embeddings = 4, embedding_dim = 2, device = device }
        for key, value in pairs(more) do a[key] = value end
        return nn.EmbeddingBag(a)
      end
      fails("EmbeddingBag: mode is 'median', allowed: sum, mean, max", make, { mode = "median" })
      fails("EmbeddingBag: padding_idx is 4, allowed: whole numbers %-4..3", make, { padding_idx = 4 })
      fails("EmbeddingBag: padding_idx is 1.5, allowed", make, { padding_idx = 1.5 })
      fails("EmbeddingBag: max_norm is 0, allowed: finite numbers > 0", make, { max_norm = 0 })
      fails("EmbeddingBag: norm_type is 0, allowed: numbers > 0", make, { norm_type = 0 })
      fails("EmbeddingBag: embedding_dim is 0", make, { embedding_dim = 0 })
      fails("EmbeddingBag: sparse is true, allowed: false", make, { sparse = true })
      fails("EmbeddingBag: no argument 'scale_grad_by_freq'", make, { scale_grad_by_freq = true })
      fails("EmbeddingBag: _weight is .*, wanted f32 %[4, 2%]", make, { _weight = matrix(2, 4) })
      fails("Embedding: argument 'embedding_dim' is missing", nn.Embedding, { num_embeddings = 4 })
      fails("Embedding.from_pretrained: 3, wanted a tensor of 2 dimensions", nn.Embedding.from_pretrained, 3)
      local sum, mean = make { mode = "sum" }, make {}
      local list, at = t({ 0, 1, 3 }, "i64"), t({ 0, 2 }, "i64")
      fails("per_sample_weights with mode 'mean', allowed: sum", mean, list, at, t { 1, 1, 1 })
      fails("weights are f32 %[2%], ids i64 %[3%]; allowed: one weight for each id", sum, list, at, t { 1, 1 })
      fails("weights is f64", sum, list, at, t({ 1, 1, 1 }, "f64"))
      fails("ids are i64 %[3%]; without offsets they have 2 dimensions, a bag in each row", mean, list)
      fails("ids are i64 %[3, 1%]; with offsets they have 1 dimension", mean, t({ 0, 1, 3 }, "i64", { 3, 1 }), at)
      fails("ids is f32 %[3%], allowed: i32, i64", mean, t { 0, 1, 3 }, at)
      fails("offsets is f32", mean, list, t { 0, 2 })
      fails("include_last_offset without offsets", make { include_last_offset = true }, t({ 0 }, "i64", { 1, 1 }))
      fails("include_last_offset, but offsets are empty", make { include_last_offset = true }, list, t({}, "i64"))
      for _, mode in ipairs { "sum", "mean", "max" } do
        local module = make { mode = mode, max_norm = 1e-3 }
        local before = module.weight:to_list()
        fails("table 'weight', sample 1: id 4 at place 0 of the bag, allowed: 0..3, or %-1 for none %(1 such ids%)",
          module, t({ 0, 1, 4 }, "i64"), at)
        fails("offsets: bag 1: its offsets are 2 and 1, they must not decrease", module, list, t({ 0, 2, 1 }, "i32"))
        assert.same(before, module.weight:to_list(), "nothing was scaled")
      end
      fails("table 'weight', sample 0: id 7 at place 2", nn.Embedding { num_embeddings = 7, embedding_dim = 1,
        device = device }, t({ 0, 1, 7 }, "i64"))
    end)
  end)
end
