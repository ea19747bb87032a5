-- The package lists as samples: what is parsed, that the hidden dependency never shows, how negatives are drawn, how
-- parts and ranks cut.
local data = require "perilune.data"
local packages = require "perilune.data.packages"

local text = [[
Package: libfoo1
Source: foo (1.2)
Version: 1.2
Maintainer: A Person <a@example.org>
Description: library of foo 2a, the foo library
Tag: role::shared-lib, implemented-in::c,
 devel::library
Section: libs

Package: foo-tools
Source: foo
Maintainer: A Person <a@example.org>
Pre-Depends: dpkg (>= 1.15)
Depends: libfoo1 (>= 1.2) | libfoo0, libfoo1:any (<< 2), missing, bar | libfoo1, foo-tools
Recommends: baz
Description: tools for foo
 with a longer text that is not read
Section: utils

Package: dpkg
Description: package tool
Section: admin

Package: bar
Depends: libfoo1,baz
Section: utils

Package: baz
Description: baz

Package: foo-tools
Version: 0.9
Depends: dpkg

]]

-- n packages; package i needs three of the others.
local function generated(n)
  local blocks = {}
  for i = 0, n - 1 do
    blocks[#blocks + 1] = ("Package: %dp-x\nSection: s%d\nMaintainer: m%d\nTag: t::%d\n"):format(i, i % 3, i % 7,
      i % 5) ..
      ("Description: word %dw\nDepends: %dp-x, %dp-x, %dp-x\n"):format(i % 11, (i * 7 + 1) % n, (i * i + 3) % n,
        (i + 1) % n)
  end
  return table.concat(blocks, "\n")
end

local function list(l, i)
  local out = {}
  for j = l.offsets[i], l.offsets[i + 1] - 1 do out[#out + 1] = l.values[j] end
  return out
end

-- Rows of a host batch: label, and bags by key.
local function rows_of(loader, host)
  local b, at, rows = host.ptr, 0, {}
  local n = tonumber(b.rows)
  for i = 0, n - 1 do
    rows[i + 1] = { label = b.labels[i], dense = {} }
    for d = 0, b.dense_features - 1 do rows[i + 1].dense[loader.dense[d + 1]] = b.dense[i * b.dense_features + d] end
  end
  for f, key in ipairs(loader.keys) do
    for i = 0, n - 1 do
      local bag = {}
      for _ = 1, b.lengths[(f - 1) * n + i] do
        bag[#bag + 1] = tonumber(b.values[at])
        at = at + 1
      end
      rows[i + 1][key] = bag
    end
  end
  assert.equal(tonumber(b.ids), at)
  return rows
end

local function all_rows(loader)
  local rows = {}
  for host in function() return loader:next_host() end do
    for i, row in ipairs(rows_of(loader, host)) do rows[tonumber(host.ptr.global_row) + i] = row end
  end
  return rows
end

describe("data.debian", function()
  it("parses blocks, alternatives, versions, continuation lines and repeated packages", function()
    local p = packages.parse(text)
    assert.same({ "libfoo1", "foo-tools", "dpkg", "bar", "baz" }, p.names)
    assert.same({ 2, 0, 3, 4 }, list(p.dependencies, 1))
    assert.same({ 0, 4 }, list(p.dependencies, 3))
    assert.same({}, list(p.dependencies, 0))
    assert.equal(6, p.dependencies.n)
    assert.same({ 3, 0 }, { #list(p.tags, 0), #list(p.tags, 1) })
    assert.equal(p.source[0], p.source[1])
    assert.is_true(p.source[0] ~= p.source[2])
    assert.equal(p.maintainer[0], p.maintainer[1])
    assert.equal(p.section[1], p.section[3])
    assert.equal(2, #list(p.name_words, 0))        -- libfoo, 1
    assert.equal(3, #list(p.description_words, 0)) -- library, foo, 2a
    assert.equal(2, #list(p.description_words, 1)) -- tools, foo
    assert.equal(list(p.description_words, 0)[2], list(p.name_words, 1)[1])
  end)

  local lists = packages.parse(generated(60))
  local function loader(args)
    local all = { packages = lists, batch_size = 16, negatives = 3 }
    for name, value in pairs(args or {}) do all[name] = value end
    return data.debian(all)
  end
  local function dependencies(package)
    local set = {}
    for _, id in ipairs(list(lists.dependencies, package)) do set[id] = true end
    return set
  end

  it("never shows the hidden dependency, neither in positive nor in negative samples", function()
    local l = loader { max_dependencies = 8 }
    -- s is not among the features; but the first word of its name is its own here.
    local by_word = {}
    for i = 0, lists.n - 1 do by_word[list(lists.name_words, i)[1]] = i end
    local rows = all_rows(l)
    assert.equal(lists.dependencies.n * 4, #rows)
    local positives = 0
    for _, row in ipairs(rows) do
      local s, c = by_word[row.name[1]], row.candidate[1]
      local set, shown = dependencies(s), 0
      assert.equal(row.label == 1, set[c] == true)
      assert.is_true(s ~= c)
      for _, id in ipairs(row.dependencies) do
        assert.is_true(set[id])
        assert.is_true(id ~= c)
        shown = shown + 1
      end
      assert.equal(#list(lists.dependencies, s) - 1, shown)
      positives = positives + row.label
    end
    assert.equal(lists.dependencies.n, positives)
  end)

  it("shows at most max_dependencies of them, others in other samples", function()
    local seen = {}
    for _, row in ipairs(all_rows(loader { max_dependencies = 1 })) do
      assert.is_true(#row.dependencies <= 1 and #row.candidate_dependencies <= 1)
      local key = row.name[1]
      seen[key] = seen[key] or {}
      if row.dependencies[1] then seen[key][row.dependencies[1]] = true end
    end
    local more = 0
    for _, set in pairs(seen) do more = more + (next(set, next(set)) and 1 or 0) end
    assert.is_true(more > 40, tostring(more))
  end)

  it("draws negatives by popularity", function()
    local positive, negative = {}, {}
    for _ = 1, 1 do
      local l = loader { negatives = 40 }
      for _, row in ipairs(all_rows(l)) do
        local counts = row.label == 1 and positive or negative
        counts[row.candidate[1]] = (counts[row.candidate[1]] or 0) + 1
      end
    end
    local error_sum, total = 0, 0
    for c, n in pairs(positive) do
      error_sum = error_sum + math.abs((negative[c] or 0) / 40 - n)
      total = total + n
    end
    assert.is_true(error_sum / total < 0.25, tostring(error_sum / total))
    for c in pairs(negative) do assert.is_truthy(positive[c]) end
  end)

  it("computes the dense features of pairs", function()
    local l = loader { limit = 40 }
    local by_word = {}
    for i = 0, lists.n - 1 do by_word[list(lists.name_words, i)[1]] = i end
    for _, row in ipairs(all_rows(l)) do
      local s, c, d = by_word[row.name[1]], row.candidate[1], row.dense
      assert.equal(s % 3 == c % 3 and 1 or 0, d.same_section)
      assert.equal(s % 7 == c % 7 and 1 or 0, d.same_maintainer)
      assert.equal(0, d.same_source)
      assert.near(math.log(s % 5 == c % 5 and 2 or 1), d.tags, 1e-6)
      assert.near(math.log(2), d.name_name, 1e-6) -- "x"
      assert.near(math.log(s % 11 == c % 11 and 3 or 2), d.description_description, 1e-6)
      local of_c, common = dependencies(c), 0
      for _, id in ipairs(row.dependencies) do common = common + (of_c[id] and 1 or 0) end
      assert.near(math.log(1 + common), d.common_dependencies, 1e-6)
    end
  end)

  it("splits by package", function()
    local words = {}
    local total = 0
    for _, part in ipairs { "test", "fit", "validation" } do
      local rows = all_rows(loader { part = part, holdout = 0.3 })
      total = total + #rows
      for _, row in ipairs(rows) do
        assert.is_true(words[row.name[1]] == nil or words[row.name[1]] == part)
        words[row.name[1]] = part
      end
    end
    assert.equal(lists.dependencies.n * 4, total)
    local train = loader { part = "train", holdout = 0.3 }
    for _, row in ipairs(all_rows(train)) do assert.is_true(words[row.name[1]] ~= "test") end
  end)

  it("gives every world size the same samples, and every epoch other negatives", function()
    local function keys(rows)
      local out = {}
      for i, row in ipairs(rows) do out[i] = ("%d %d %d"):format(row.name[1], row.candidate[1], row.label) end
      return out
    end
    local want = keys(all_rows(loader()))
    for _, world in ipairs { 2, 3, 5, 8 } do
      local got = {}
      for rank = 0, world - 1 do
        for at, row in pairs(all_rows(loader { rank = rank, world_size = world })) do
          assert.is_nil(got[at])
          got[at] = row
        end
      end
      assert.same(want, keys(got))
    end
    local l = loader { epochs = 2, batch_size = 1000 }
    local first, second = rows_of(l, l:next_host()), rows_of(l, l:next_host())
    assert.is_nil(l:next_host())
    assert.same(want, keys(first))
    local a, b = keys(first), keys(second)
    assert.are_not.same(a, b)
    table.sort(a)
    table.sort(b)
    assert.are_not.same(a, b)
    assert.are_not.same(want, keys(all_rows(loader { seed = 2 })))
  end)

  it("compiles its hot loop", function()
    local l = loader { epochs = 200, batch_size = 64 }
    local aborts, traces = {}, 0
    local function watch(what, _, _, _, code, reason)
      if what == "stop" then traces = traces + 1 end
      if what == "abort" then aborts[#aborts + 1] = require("jit.vmdef").traceerr[code]:format(reason) end
    end
    for host in function() return l:next_host() end do
      if l.epoch == 100 then jit.attach(watch, "trace") end
      assert(host.ptr.rows > 0)
    end
    jit.attach(watch)
    for _, reason in ipairs(aborts) do assert.is_nil(reason:match "NYI", reason) end
  end)

  it("names what is wrong", function()
    local function fails(args, pattern) assert.error_matches(function() loader(args) end, pattern) end
    fails({ part = "rest" }, "part is 'rest', allowed: all, train, test, fit, validation")
    fails({ negatives = 0 }, "negatives is 0")
    fails({ holdout = 1.5 }, "holdout is 1%.5, allowed")
    fails({ part = "test", holdout = 0 }, "the part 'test' has no dependencies")
    assert.error_matches(function() data.debian { path = "/nowhere/list", batch_size = 1 } end,
      "data%.debian: /nowhere/list: No such file")
    local path = os.tmpname()
    finally(function() os.remove(path) end)
    assert.error_matches(function() data.debian { path = path, batch_size = 1 } end, "has no 'Package:' line")
    local file = io.open(path, "w")
    file:write "Package: a\nDepends: b\n\nPackage: b\n"
    file:close()
    local l = data.debian { path = path, batch_size = 1 }
    assert.error_matches(function() all_rows(l) end, "package a depends on all others")
  end)
end)
