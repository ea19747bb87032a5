-- Interactive sessions: editing lines, completion, what values look like; perilune -e, -i, -l; perilune help, doctor,
-- completion.
local shell = require "spec.support.shell"
local complete = require "perilune.launch.complete"
local editor = require "perilune.launch.editor"
local repl = require "perilune.launch.repl"
local peri = require "perilune"
local perilune = shell.perilune

--- An editor that gets these keys: the lines that they make, and what was written.
local function edit(keys, history, words)
  local at, written = 0, {}
  local e = editor.new(function()
    at = at + 1
    return keys:byte(at)
  end, function(text) written[#written + 1] = text end, function() return 40 end, words or complete.complete)
  for _, line in ipairs(history or {}) do e:remember(line) end
  local lines = {}
  repeat
    local line, stopped = e:line_of "> "
    lines[#lines + 1] = line or stopped and "stopped" or nil
    if line then e:remember(line) end
  until not line and not stopped
  return lines, table.concat(written)
end

describe("the editor of lines", function()
  it("moves, inserts and deletes", function()
    assert.same({ "abc" }, (edit "ac\27[Db\r"))
    assert.same({ "xyz" }, (edit "yz\1x\5\r"))
    assert.same({ "ad" }, (edit "abcd\27[D\27[D\27[D\27[3~\4\r"))
    assert.same({ "one " }, (edit "one two\23\r"))
    assert.same({ "three" }, (edit "one two\21three\r"))
    assert.same({ "one" }, (edit "one two\27b\2\11\r"))
    assert.same({ "hé!" }, (edit "hé\2\6!\r"))
    assert.same({ "h" }, (edit "hé\127\r"))
    assert.same({ "stopped", "b" }, (edit "a\3b\r"))
    assert.same({}, (edit "\4unseen\r"))
  end)

  it("recalls and searches earlier lines", function()
    assert.same({ "second" }, (edit("\27[A\r", { "first", "second" })))
    assert.same({ "first" }, (edit("\16\16\16\r", { "first", "second" })))
    assert.same({ "begun on" }, (edit("begun\27[A\27[B on\r", { "first" })))
    assert.same({ "first" }, (edit("\18fi\r", { "first", "second" })))
    assert.same({ "a", "a", "b" }, (edit "a\r\16\r\16\127b\r"))
  end)

  it("shows a part of a long line, and the cursor in it", function()
    local _, written = edit(("x"):rep(100) .. "\r")
    assert.not_matches(("x"):rep(41), written)
  end)

  it("completes as far as is certain, and lists what may follow", function()
    local function words(before) return 1, before == "a" and { "alpha1", "alpha2" } or { "alpha1", "alpha2" } end
    local lines, written = edit("a\t\t1\r", nil, words)
    assert.same({ "alpha1" }, lines)
    assert.matches("alpha1  alpha2", written)
    assert.same({ "  x" }, (edit "\tx\r"))
  end)
end)

describe("completion", function()
  local function words(before)
    local first, list = complete.complete(before)
    return before:sub(1, first - 1), list
  end

  it("knows globals, parts of the library that are not loaded, classes, objects and handles", function()
    _G.session = { peri = peri, jt = peri.JaggedTensor { values = { 1 }, lengths = { 1 } }, x = peri.ones { 2 },
      linear =
      peri.nn.Linear { in_features = 2, out_features = 1 } }
    finally(function() _G.session = nil end)
    assert.same({ "tostring" }, select(2, words "print(tost"))
    assert.same({ "repeat", "require", "return" }, select(2, words "re"))
    local before, list = words "y = session.peri.EmbeddingBagColl"
    assert.equal("y = session.peri.", before)
    assert.same({ "EmbeddingBagCollection" }, list)
    assert.same({ "from_lengths_sync", "from_lists" }, select(2, words "session.peri.KeyedJaggedTensor.from_l"))
    assert.same({ "to_dense", "to_dense_weights" }, select(2, words "session.jt:to_dense"))
    assert.same({ "reshape" }, select(2, words "session.x:resh"))
    assert.same({ "named_parameters" }, select(2, words "session.linear:named_p"))
    assert.same({}, select(2, words "session.nothing.x"))
    assert.same({ "KeyedJaggedTensor:permute" }, select(2, words "help \"KeyedJaggedTensor:perm"))
  end)

  it("knows the arguments of what is called with braces", function()
    for before, list in pairs {
      ["{ peri.nn.Linear { in"] = { "in_features" },
      ["x = peri.nn.Linear { -- don't\n  in_features = 3, out"] = { "out_features" },
      ["peri.nn.optim.SGD({ params = m:parameters({ 1 }), m"] = { "maximize", "momentum" },
      ["peri.EmbeddingBagConfig { name = \"a { \\\" b\", feature_names = { 'x' }, e"] = { "embedding_dim" },
      ["peri.nn.Linear { in_features = tr"] = { "true" }, ["peri.nn.Linear { out_features = f(tr"] = { "true" },
      ["peri.nn.Linear { in_features = { tr"] = { "true" }, ["NoSuchThing { tr"] = { "true" } } do
      assert.same(list, select(2, words(before)), before)
    end
  end)
end)

describe("a session", function()
  it("shows values", function()
    assert.equal("\"a\\n\"", repl.show "a\n")
    for text, x in pairs { ["9007199254740992"] = 2 ^ 53, ["-1000000000000001"] = -1e15 - 1, ["0.1"] = 0.1,
      ["1000000000000000.5"] = 1e15 + 0.5, ["0.99999999999999989"] = 1 - 2 ^ -53, ["1e+300"] = 1e300, inf = 1 / 0 } do
      assert.equal(text, repl.show(x))
    end
    assert.error_matches(function() peri.zeros(2 ^ 53) end, "9007199254740992")
    assert.equal("{ 1, 2, x = { \"y\" }, [0] = true }",
      repl.show({ 1, 2, x = { "y" }, [0] = true }):gsub("%[0%] = true, x = { \"y\" }", "x = { \"y\" }, [0] = true"))
    assert.equal("{ { { {...} } } }", repl.show { { { { 1 } } } })
    assert.matches("^tensor f32 %[2%]", repl.show(peri.ones { 2 }))
    assert.matches("%.%.%. 76 more", repl.show((function()
      local list = {}
      for i = 1, 100 do list[i] = i end
      return list
    end)()))
  end)

  it("loads expressions and statements, and knows what is not finished", function()
    assert.same({ nil, 1, 2 }, { repl.load "1, 2" () })
    for _, text in ipairs { "for i = 1, 2 do", "x = {", "{ 1,", "1 +", "f(1,", "return" .. " 1 +", "[[a" } do
      assert.equal("more", select(2, repl.load(text)), text)
    end
    assert.matches("unexpected symbol", select(2, repl.load "1 +)"))
    repl.load "local session_x = 5" ()
    assert.equal(5, rawget(_G, "session_x"))
    _G.session_x = nil
  end)

  it("takes -l, -e, -i", function()
    assert.same({ steps = { { "l", "a.b" }, { "e", "x" }, { "e", "y" } }, arguments = { "2" }, interactive = true,
      script = "s.lua" }, repl.parse { "-l", "a.b", "-e", "x", "-ey", "-i", "s.lua", "2" })
    assert.matches("does not go with", select(2, repl.parse { "-e", "x", "--no" }))
    assert.matches("followed by", select(2, repl.parse { "-e" }))
  end)
end)

describe("the launcher", function()
  if shell.no_launcher() then return it("is there", function() pending(shell.no_launcher()) end) end
  local function run(words, input)
    return shell.run(("%s%s %s"):format(input and ("printf '%s' | "):format(input) or "", perilune, words))
  end

  it("runs texts, and sessions of piped lines", function()
    assert.equal("3\nnil\n4\n5\n6\n", (run "-e '1 + 2' -e nil -e 'return 4, 5' -e 'x = 6 return x'"))
    assert.same({ "the moon (input:1)\n", 1 }, { run "-e 'error \"the moon\"'" })
    assert.equal("group 'world' (rank 0 of 1, self)\n", (run "-e 'peri.init()'"))
    assert.equal("4\ntrue\n", (run("-l bit -e 'bit.lshift(1, 2)' -i", "x = bit ~= nil\\nx\\n")))
    assert.equal("1\n2\n", (run("-i", "for i = 1, 2 do\\nprint(i)\\nend\\n")))
    assert.same({ 2 }, { select(2, run "") }) -- no terminal: the usage
    assert.equal("Ctrl-D leaves, and so does quit()\n1\n", (run("-i", "exit\\n1\\nquit()\\n2\\n")))
  end)

  it("completes files", function()
    local folder, clean = shell.temporary()
    finally(clean)
    shell.run(("cd %s && mkdir one && touch only other .hidden one/x"):format(folder))
    local out = run(([[-e 'for _, path in ipairs { "on", "one/", "none/", ".h", "" } do
      print(unpack((select(2, require("perilune.launch.complete").complete("dofile \"%s/" .. path)))))
    end']]):format(folder))
    out = out:gsub(folder .. "/", ""):gsub("\t", " "):gsub("\n", "|")
    assert.equal("one/ only|one/x||.hidden|one/ only other|", out)
  end)

  it("stops what runs at Ctrl-C, and goes on", function()
    local loop = "for i = 1, 1e12 do peri.scope(function() return peri.rand { 2 }:item(0) end) end"
    assert.equal("stopped by Ctrl-C (input:1)\n3\n",
      (shell.run(("printf '%s\n1 + 2\n' | timeout -s INT 0.4 %s -i 2>&1"):format(loop, perilune))))
  end)

  it("tells about names, and which may be meant", function()
    local help = require("perilune.launch.help").text -- what the command prints, but for its exit code
    assert.matches("^peri.KeyedJaggedTensor:permute\n.*indices: integer%[%]", (run "help KeyedJaggedTensor:permute"))
    assert.matches("peri_status peri_kjt_permute%(", (help "peri_kjt_permute"))
    for name, full in pairs { ["t:topk"] = "nn.functional.topk", ["F.pad"] = "nn.functional.pad",
      ["torch.linspace"] = "Tensor.linspace", ["peri.randint"] = "Tensor.randint", ["torch.nn.GELU"] = "nn.GELU" } do
      assert.matches("^peri%." .. full:gsub("%.", "%%.") .. "\n", (help(name)))
    end
    assert.matches("is the name of several:\n.*peri.JaggedTensor:to ", (help "to"))
    assert.matches("is one of these meant%?\n  peri.KeyedJaggedTensor ", (help "KeyedJagedTensor"))
    assert.matches("'gzip' is no name; these speak of it:\n.*peri.data.csv ", (help "gzip"))
    assert.matches("'gzip csv' is no name; these speak of it:\n.*peri.data.csv ", (run "help gzip csv"))
    assert.matches("'tensorboard' is no name; these speak of it:\n  peri.nn.metrics.SummaryWriter ",
      (help "tensorboard"))
    assert.matches("no name 'scheduler'; is one of these meant%?\n  peri.nn.optim.LRScheduler ",
      (help "scheduler"))
    assert.same({ "bag: the ids of one feature of one sample, pooled (summed or averaged) into one vector "
      .. "(docs/glossary.md)\n", 0 }, { run "help bags" })
    assert.matches("^rank, world: one process of a job.-%(docs/glossary.md%)\n\nperi.rank\n", (help "rank"))
    assert.matches("^perilune compare, a command: Draw .-perilune compare %-%-help\n", (run "help compare"))
    assert.matches("^help \"NAME\" tells about a name", (run("-i", "help\\n")))
    local out, status = run "help NoSuchThing"
    assert.equal(1, status)
    assert.matches("there is nothing about 'NoSuchThing'; perilune help lists the pages", out)
    assert.matches("In 'nn.optim' are:\n.*peri.nn.optim.Adam ", (help "nn.optim"))
    assert.matches("^peri.nn.metrics.RecMetric:update\n", (help "GAUCMetric:update"))
    assert.matches("^module 'no_such_module' not found", (run "-l no_such_module"))
    assert.matches("jagged  +Jagged tensors", (run "help"))
    assert.matches("peri.KeyedJaggedTensor:permute +Key i", (help "jagged"))
  end)

  it("finds where the documents speak of words", function()
    local out, status = run "help resume after a crash"
    assert.same({ "In the documents:\n", 0 }, { out:match "^[^\n]*\n", status })
    local find = require("perilune.launch.search").find
    for path in shell.run("ls docs/tutorial_*.md docs/benchmarks/*.md"):gmatch "%S+" do
      local seen = {}
      for _, hit in ipairs(find(shell.read(path):match "^# ([^\n]*)")) do seen[hit.page] = true end
      assert.is_true(seen[path], path .. ", by its title")
    end
    local long = ("other words "):rep(200)
    local sections = { { "a", "One", "row row " .. long }, { "b", "Two", "row row row" }, { "c", "Rows", "nothing" },
      { "d", "Three", "a cache of rows" }, { "e", "Four", long } }
    local function pages(words)
      local list = {}
      for i, hit in ipairs(find(words, sections)) do list[i] = hit.page end
      return table.concat(list)
    end
    assert.equal("bdca", pages "the rows") -- often, in a short text; in the heading; once; somewhere in a long one
    assert.equal("d", pages "caching of rows")
    assert.equal("", pages "narrow")
    assert.equal("", pages "how to")
  end)

  it("shows the help of each command in lines that a terminal has room for", function()
    local parser, shown = require("perilune.launch.commands").parser(), 0
    local function look(command)
      for line in command:get_help():gmatch "[^\n]+" do
        shown = shown + 1
        assert.is_true(#line <= 80, line)
      end
      for _, c in ipairs(command._commands) do look(c) end
    end
    look(parser)
    assert.is_true(shown > 200)
  end)

  it("completes in bash", function()
    local function completes(words, at)
      return (shell.run(("PATH=%s:$PATH bash -c 'eval \"$(perilune completion bash)\"; COMP_WORDS=(%s); COMP_CWORD=%d; "
        .. "_perilune_or_help perilune \"${COMP_WORDS[%d]}\" \"\"; echo \"${COMPREPLY[*]}\"'"):format(shell.build,
        words, at, at)))
    end
    assert.equal("calibrate\n", completes("perilune cal", 1))
    assert.equal("KeyedJaggedTensor.permute\n", completes("perilune help KeyedJaggedTensor.perm", 2))
    assert.equal("print\n", completes("perilune schedule pr", 2))
    assert.equal("ls\n", completes("perilune checkpoint l", 2))
    assert.equal("sparse_dist sparse_dist_lite\n", completes("perilune schedule print sp", 3))
    assert.equal("int8 int8_half\n", completes("perilune export --tables int8", 3))
    assert.matches("%-%-times", completes("perilune schedule --t", 2))
    assert.equal("l1cache l2cache l3cache\n", completes("perilune run --bind l", 3))
    assert.equal("dgx_h100_80gb\n", completes("perilune plan --topology dgx_h", 3))
    assert.equal("sparse_dist sparse_dist_lite\n", completes("perilune plan --simulate sp", 3))
    assert.matches("^#compdef perilune", (run "completion zsh"))
  end)

  it("completes in zsh, by eval too", function()
    if not shell.has "zsh" then return pending "zsh was not found" end
    assert.equal("_perilune\n", (shell.run(("PATH=%s:$PATH zsh -fc 'autoload -U compinit; compinit -u -D; "
      .. "eval \"$(perilune completion zsh)\"; echo $_comps[perilune]'"):format(shell.build))))
    local script = run "completion zsh"
    assert.matches("%-%-bind%[[^\n]*: :%(none hwthread core [^\n]* cpu%-list%)\"\n", script)
    assert.matches("%-%-topology%[[^\n]*: :{compadd [^\n]* dgx_h100_80gb [^\n]*; _files}\"\n", script)
  end)

  it("compares the logs of runs", function()
    local folder, clean = shell.temporary()
    finally(clean)
    local a = shell.write(folder .. "/a.jsonl", '{"step":1,"loss":4}\n{"step":2,"loss":2}\n{"step":3,"loss":0}\n')
    local b = shell.write(folder .. "/b.jsonl",
      '{"step":1,"loss":4,"auc":0.5}\n{"step":3,"loss":1,"auc":0.7}\n{"step":')
    local out, status = run("compare " .. a .. " " .. b)
    assert.equal(0, status)
    local drawn = out:match "\nloss: 0 to 4, steps 1 to 3\n(.-)  %+"
    assert.matches("^  |%*\n", drawn)                       -- both begin with the most
    assert.matches("\n  |" .. (" "):rep(63) .. "a\n$", drawn) -- a ends with the least, in the last column
    assert.matches("a  last 0, least 0, most 4\n  b  last 1, least 1, most 4", out)
    assert.matches("auc: 0.5 to 0.7", out)
    assert.not_matches("auc:", (run("compare --fields loss " .. a .. " " .. b)))
    assert.matches("no log has 'x'; they have: auc, loss", (run("compare --fields x " .. a .. " " .. b)))
    shell.write(b, '{"step":1,"loss":4}\n{"step":2,"loss":null,"auc":"nan"}\n{"step":3,"loss":1}\n')
    for _, text in ipairs { "null", "NaN", "-Infinity" } do -- Python writes NaN
      shell.write(b, ('{"step":1,"loss":4}\n{"step":2,"loss":%s,"auc":"nan"}\n{"step":3,"loss":1}\n'):format(text))
      assert.matches("a  last 1, least 1, most 4, and 1 value that cannot be drawn (NaN or infinity)",
        (run("compare " .. b)), 1, true)
    end
    shell.write(b, '{"step":1000000000,"loss":123456789.25}\n{"step":1000000009,"loss":123456789.75}\n')
    assert.matches("loss: 123456789.25 to 123456789.75, steps 1000000000 to 1000000009\n", (run("compare " .. b)), 1,
      true)
    local no_object = "line 1 is no JSON object"
    for text, why in pairs { ["nothing\n{}\n"] = no_object, ["[1]\n{}\n"] = no_object,
      ['{"name":"x"}\n'] = "its objects have no number that can be drawn" } do
      shell.write(b, text)
      out, status = run("compare " .. b)
      assert.same({ 1, "perilune: compare: " .. b .. ": " .. why .. "\n" }, { status, out })
    end
    assert.same({ ("perilune: compare: %s: Is a directory\n"):format(folder), 1 }, { run("compare " .. folder) })
  end)

  it("looks at the machine", function()
    local out, status = run "doctor"
    assert.equal(0, status)
    assert.matches("\nok +matrix products ", out)
    assert.matches("\n%l+ +locked memory ", out)
  end)
end)
