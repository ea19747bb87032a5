-- `perilune serve`: a model file answers over HTTP what it answers from Lua, bit for bit, in every form of request; the
-- command, its stop. What clients do that mean no good is in tests/unit/test_serve.c and test_serve_load.c.
-- takes: 4 s, mostly waits
local ffi = require "ffi"
local peri = require "perilune"
local shell = require "spec.support.shell"
local json = require "dkjson"
local serving = require "spec.support.serving"
local nn = peri.nn

local PERILUNE = shell.perilune
local NAMES, ROWS, SAMPLES = { "a", "b" }, 50, 7

local run = serving.run

--- Samples as plain lists, so that they can be said in any form: { dense =, a =, a.weights =, ... }.
local function make_samples(n)
  local state, list = 5, {}
  local function draw(most)
    state = (state * 1103515245 + 12345) % 2 ^ 31
    return math.floor(state / 2 ^ 31 * most)
  end
  for i = 1, n do
    local s = { dense = {} }
    for k = 1, 13 do s.dense[k] = (draw(2000) - 1000) / 512 end
    for _, name in ipairs(NAMES) do
      s[name], s[name .. ".weights"] = {}, {}
      for k = 1, draw(4) do s[name][k], s[name .. ".weights"][k] = draw(ROWS), draw(100) / 64 end
    end
    list[i] = s
  end
  return list
end

local function batch(samples)
  local dense, labels, values, weights, lengths = {}, {}, {}, {}, {}
  for i, s in ipairs(samples) do dense[i], labels[i] = s.dense, i % 2 end
  for _, name in ipairs(NAMES) do
    for _, s in ipairs(samples) do
      lengths[#lengths + 1] = #s[name]
      for k, id in ipairs(s[name]) do
        values[#values + 1], weights[#weights + 1] = id, s[name .. ".weights"][k]
      end
    end
  end
  return { dense_features = peri.tensor(dense), labels = peri.tensor(labels),
    sparse_features = peri.KeyedJaggedTensor { keys = NAMES, values = values, lengths = lengths, weights = weights } }
end

local function make_model()
  local tables = {}
  for i, name in ipairs(NAMES) do
    tables[i] = peri.EmbeddingBagConfig { name = "t_" .. name, num_embeddings = ROWS, embedding_dim = 8,
      feature_names = { name } }
  end
  local collection = peri.EmbeddingBagCollection { tables = tables, is_weighted = true }
  return nn.DLRMTrain(nn.DLRM { embedding_bag_collection = collection, dense_in_features = 13,
    dense_arch_layer_sizes = { 20, 8 }, over_arch_layer_sizes = { 33, 1 } })
end

local function list_of(numbers)
  local out = {}
  for i, x in ipairs(numbers) do out[i] = ("%.17g"):format(x) end
  return "[" .. table.concat(out, ",") .. "]"
end

local FEATURES = { "dense" }
for _, name in ipairs(NAMES) do
  FEATURES[#FEATURES + 1] = name
  FEATURES[#FEATURES + 1] = name .. ".weights"
end

local function called(name) return name == "dense" and "dense_features" or name end

local function rows(samples)
  local list = {}
  for i, s in ipairs(samples) do
    local parts = {}
    for k, name in ipairs(FEATURES) do parts[k] = ("%q:%s"):format(called(name), list_of(s[name])) end
    list[i] = "{" .. table.concat(parts, ",") .. "}"
  end
  return '{"instances":[' .. table.concat(list, ",") .. "]}"
end

local function columns(samples)
  local parts = {}
  for k, name in ipairs(FEATURES) do
    local list = {}
    for i, s in ipairs(samples) do list[i] = list_of(s[name]) end
    parts[k] = ("%q:[%s]"):format(called(name), table.concat(list, ","))
  end
  return '{"inputs":{' .. table.concat(parts, ",") .. "}}"
end

--- v2 with binary tensors: the JSON, and what follows it.
local function binary(samples)
  local parts, data = {}, {}
  local function add(name, shape, datatype, ctype, values)
    local bytes = ffi.new(ctype .. "[?]", #values + 1)
    for i, x in ipairs(values) do bytes[i - 1] = x end
    local size = #values * ffi.sizeof(ctype)
    data[#data + 1] = ffi.string(bytes, size)
    parts[#parts + 1] = ('{"name":"%s","shape":%s,"datatype":"%s","parameters":{"binary_data_size":%d}}'):format(name,
      shape, datatype, size)
  end
  for _, name in ipairs(FEATURES) do
    local flat, lengths = {}, {}
    for i, s in ipairs(samples) do
      lengths[i] = #s[name]
      for _, x in ipairs(s[name]) do flat[#flat + 1] = x end
    end
    if name == "dense" then add(called(name), ("[%d,13]"):format(#samples), "FP32", "float", flat)
    elseif name:match "weights" then add(name, ("[%d]"):format(#flat), "FP64", "double", flat)
    else
      add(name, ("[%d]"):format(#flat), "INT64", "int64_t", flat)
      add(name .. ".lengths", ("[%d]"):format(#samples), "INT32", "int32_t", lengths)
    end
  end
  local head = '{"inputs":[' .. table.concat(parts, ",") .. '],"parameters":{"binary_data_output":true}}'
  return head, table.concat(data)
end

describe("perilune serve", function()
  if serving.missing() then return pending(serving.missing()) end
  local path, server, process, url, samples, wanted

  local function start(options)
    server = serving.start(path, options)
    process, url = server.process, server.url
  end
  local function stop(signal) server:stop(signal) end
  local function export(step) -- another model each time
    make_model():export(path, { batches = { batch(make_samples(30)), batch(samples) }, step = step })
    wanted = peri.export.open(path):predict(batch(samples)).logits:to_list()
  end
  local function post(...) return server:post(...) end
  local function same(list)
    assert.equal(SAMPLES, #list)
    for i = 1, SAMPLES do
      local x, y = ffi.new("float[1]", list[i]), ffi.new("float[1]", wanted[i])
      assert.equal(ffi.string(y, 4), ffi.string(x, 4))
    end
  end

  --- Wait until /health says this.
  local function health(part)
    for _ = 1, 100 do
      local out = run("curl -s " .. url .. "health")
      if out:find(part, 1, true) then return end
      os.execute "sleep 0.05"
    end
    error(part .. ": " .. run("curl -s " .. url .. "health"))
  end
  --- The server answers with the bits of `wanted`.
  local function still() same(json.decode(post("v1/models/demo:predict", rows(samples))).predictions) end

  setup(function()
    path = os.tmpname() .. ".peri"
    samples = make_samples(SAMPLES)
    export(1)
    start "--name demo --host predict.example --delay 1ms --watch 100ms"
  end)
  teardown(function()
    stop()
    os.remove(path)
  end)

  it("answers rows and columns with the bits of the model file", function()
    same(json.decode(post("v1/models/demo:predict", rows(samples))).predictions)
    same(json.decode(post("v1/models/demo:predict", columns(samples))).outputs)
    for i, sample in ipairs(samples) do -- the same alone
      local one = json.decode(post("v1/models/demo:predict", rows { sample })).predictions
      assert.equal(tostring(json.decode(post("v1/models/demo:predict", rows(samples))).predictions[i]),
        tostring(one[1]))
      if i == 2 then break end
    end
  end)

  it("answers binary tensors with the bits of the model file", function()
    local head, data = binary(samples)
    local out = post("v2/models/demo/infer", head .. data, ("-H 'Inference-Header-Content-Length: %d'"):format(#head))
    local floats = ffi.cast("const float *", ffi.cast("const char *", out) + #out - 4 * SAMPLES)
    local list = {}
    for i = 1, SAMPLES do list[i] = floats[i - 1] end
    same(list)
    assert.matches('"binary_data_size":28', out, 1, true)
  end)

  it("says what it takes, and what does not fit", function()
    local about = json.decode(run("curl -s " .. url .. "v2/models/demo"))
    local inputs = {}
    for _, input in ipairs(about.inputs) do inputs[input.name] = input end
    assert.same({ -1, 13 }, inputs.dense_features.shape)
    assert.equal("49", inputs.a.parameters.most)
    assert.equal("weights", inputs["a.weights"].parameters.kind)
    local bad = post("v1/models/demo:predict", (rows(samples):gsub('"a":%[[^%]]*%]', '"a":[50]', 1)))
    assert.matches("feature 'a', sample 0: id 50, allowed: 0 to 49", bad, 1, true)
    assert.matches("no feature 'x'", post("v1/models/demo:predict", '{"instances":[{"x":1}]}'), 1, true)
    assert.matches('perilune_feature_values_total{feature="a",what="range"} 1', run("curl -s " .. url .. "metrics"), 1,
      true)
    assert.matches("Host is not a name", run("curl -s -H 'Host: evil.example' " .. url .. "health"), 1, true)
    assert.matches("the method is GET, allowed: POST", run("curl -s " .. url .. "v1/models/demo:predict"), 1, true)
    assert.matches('"ready":true', run("curl -s -H 'Host: predict.example' " .. url .. "health"), 1, true)
  end)

  it("takes targets in absolute form, and goes by the host that they name", function() -- RFC 9112, 3.2.2
    local function ask(target, options)
      return run(("curl -s -w ' %%{http_code}' %s --request-target '%s' %s"):format(options or "", target, url))
    end
    local own = url:sub(1, -2)
    for _, target in ipairs { "health/ready", "%68ealth/ready?x=http://evil.example/" } do
      assert.matches('"ready":true.* 200', ask(url .. target))
      assert.matches('"ready":true.* 200', ask((url:gsub("^http", "HTTP")) .. target, "-H 'Host: evil.example'"))
    end
    assert.equal(ask "/", ask(own))
    assert.equal(ask("/", "-X POST"), ask(own .. "?/health", "-X POST"))
    assert.matches("'demo', version", ask(url .. "v1/models/other"), 1, true)
    for _, host in ipairs { "evil.example", "localhost@evil.example", "localhost.", "localhost:1x" } do
      assert.matches("Host is not a name.* 403", ask("http://" .. host .. "/health"))
      assert.matches("Host is not a name.* 403", ask("http://" .. host .. "/health", "-0 -H 'Host:'"))
    end
    assert.matches("Origin is a page.* 403", ask(url, "-H 'Host: evil.example' -H 'Origin: http://evil.example'"))
    for _, host in ipairs { "", "localhost%2Fevil.example", ("a"):rep(256) } do
      assert.matches("the target's host is empty, too long.* 400", ask("http://" .. host .. "/health"))
    end
    for _, target in ipairs { "https" .. own:sub(5) .. "/health", "health", "//health", "*" } do
      assert.matches(" 40[04]$", ask(target), nil, nil, target)
    end
  end)

  it("goes over to a file that takes the place of its own, and serves on whatever else becomes of it", function()
    export(3)
    health '"version":"3"'
    still()
    local good = shell.read(path)
    for _, other in ipairs { "no model", good:sub(1, -2), good:sub(1, 200) .. "x" .. good:sub(202) } do
      local file = io.open(path .. ".new", "wb")
      file:write(other)
      file:close()
      os.rename(path .. ".new", path)
      health '"note":"the last good model serves on: '
      still()
    end
    os.remove(path)
    health "No such file"
    still()
    export(4)
    health '"version":"4"'
    still()
    assert.is_nil(run("curl -s " .. url .. "health"):find('"note"', 1, true))
    assert.matches("perilune_reloads_total 2", run("curl -s " .. url .. "metrics"), 1, true)
    os.execute((": > %s"):format(path)) -- cut in its place: nobody can answer from it, and the server says so
    health "the file of the last good model was cut or written to"
    assert.matches('{"live":true,"ready":false}', run("curl -s " .. url .. "health/ready"), 1, true)
    export(5)
    health '"ready":true,"model":"demo","version":"5"'
    still()
  end)

  it("follows its trainer: answers soon have the bits of what was saved, after a kill, too; a damaged save changes "
    .. "nothing", function()
    local folder, clean = shell.temporary()
    stop()
    local model, held = make_model(), { batch(make_samples(30)), batch(samples) }
    local optimizer = nn.optim.SGD { params = model:parameters(), lr = 0.1 }
    local saver = peri.checkpoint.Saver { folder = folder .. "/run", parts = { model = model }, every = 1,
      full_every = 4, keep = 9 }
    local file = folder .. "/now.peri"
    local function export_now()
      model:export(file, { batches = held, step = 0 })
      wanted = peri.export.open(file):predict(batch(samples)).logits:to_list()
    end
    export_now()
    assert(os.rename(file, path))
    start(("--name demo --follow %s/run"):format(folder))
    still()
    for step = 1, 6 do
      peri.scope(function()
        optimizer:zero_grad()
        local out = model(batch(make_samples(4 + step)))
        out:backward()
        optimizer:step()
      end)
      if step == 3 then os.execute("kill -STOP " .. process) end -- it does not see this one before it is damaged
      saver:step(step)
      local last = ("%s/run/save-%06d-step-%d"):format(folder, step, step)
      if step == 3 then
        shell.run(("f=$(ls %s/*.safetensors | head -1); cp $f %s/kept; echo $f >%s/name; printf xx | dd of=$f bs=1 "
          .. "conv=notrunc seek=$(($(stat -c %%s $f) - 2))"):format(last, folder, folder))
        os.execute("kill -CONT " .. process)
        health "the last good model serves on"
        assert.matches('"version":"2"', run("curl -s " .. url .. "health"), 1, true)
        still()
      else
        if step == 4 then -- an increment of the damaged one, which becomes good again, as late bytes of a network do
          os.execute "sleep 0.3"
          still()
          shell.run(("cat %s/kept >$(cat %s/name)"):format(folder, folder))
        end
        health(('"version":"%d"'):format(step))
        export_now()
        still()
      end
    end
    shell.run(("mv %s/run %s/away"):format(folder, folder))
    health "run': No such file"
    shell.run(("mkdir %s/run"):format(folder))
    health "run' has no checkpoint any more"
    still()
    shell.run(("rmdir %s/run"):format(folder))
    shell.run(("mv %s/away %s/run"):format(folder, folder))
    stop "KILL"
    start(("--name demo --follow %s/run"):format(folder))
    assert.matches('"version":"6"', run("curl -s " .. url .. "health"), 1, true)
    still()
    saver:close()
    stop()
    clean()
    export(5)
    start "--name demo"
  end)

  it("names what lies in the folder that it follows and is no checkpoint, once nobody works at it", function()
    local folder, clean = shell.temporary()
    local function make(name, age) -- seconds since it got its last file
      shell.run(("mkdir -p %s/%s && touch -d '%d seconds ago' %s/%s"):format(folder, name, age, folder, name))
    end
    local function quiet() assert.is_nil(server:get "health":find('"note"', 1, true)) end
    local first = "save-000001-step-1"
    stop()
    make("logs", 0)
    start(("--name demo --follow %s"):format(folder))
    os.execute "sleep 0.3"
    quiet() -- somebody may still copy files into it
    make("logs", 60)
    health(folder .. "/logs' is no checkpoint: it has no manifest.json, and no new file for 10 s")
    peri.checkpoint.save(folder .. "/" .. first, { model = make_model() })
    health '"version":"1"'
    make("save-000000-step-0", 60) -- older than what is served
    os.execute "sleep 0.3"
    quiet()
    make("save-000002-step-2", 60)
    health(folder .. "/save-000002-step-2' is no checkpoint")
    assert.matches('\nperilune_note{note="[^\n]*save%-000002%-step%-2[^\n]*"} 1\n', server:get "metrics")
    shell.run(("rmdir %s/save-000002-step-2"):format(folder))
    for _ = 1, 100 do
      if not server:get "health":find('"note"', 1, true) then break end
      os.execute "sleep 0.05"
    end
    quiet()
    assert.is_nil(server:get "metrics":find("perilune_note", 1, true))
    stop()
    start(("--name demo --follow %s/%s"):format(folder, first))
    health(first .. "' is a checkpoint itself; --follow takes the folder that it is in")
    stop()
    clean()
    start "--name demo"
  end)

  it("reads and prints numbers with a point, whatever locale a library chooses that is loaded before it", function()
    local folder = os.tmpname()
    os.remove(folder)
    assert(os.execute("mkdir " .. folder) == 0)
    local compile, missing = shell.preloaded(folder, "comma")
    shell.write(folder .. "/source", 'LC_NUMERIC\ndecimal_point ","\nthousands_sep ""\ngrouping -1\nEND LC_NUMERIC\n')
    run(("localedef -c -i %s/source %s/comma"):format(folder, folder)) -- 1: it warns that there are no other categories
    if not shell.exists(folder .. "/comma/LC_NUMERIC") then missing = missing or "localedef made no locale" end
    if missing or shell.no_launcher() then return pending(missing or shell.no_launcher()) end
    local twice = nn.ModuleDict { unused = nn.Linear { in_features = 1, out_features = 1 } }
    twice:export(folder .. "/m.peri", { batches = { { x = peri.randn { 16, 1 } } }, name = "m",
      call = function(_, b) return b.x * 2 end })
    local env = ("LD_PRELOAD=%s LOCPATH=%s"):format(compile(), folder)
    local other = serving.start(folder .. "/m.peri", "--watch 0", env)
    assert.equal('{"predictions":[2.5,2.5e-07,0.2469136]}\n',
      other:post("v1/models/m:predict", '{"instances":[{"x":1.25},{"x":1.25e-7},{"x":0.123456800}]}'))
    assert.matches("\nperilune_model_loaded_timestamp_seconds [%d.e+]+\n", other:get "metrics")
    other:stop()
    os.execute("rm -r " .. folder)
  end)

  it("stops when it is asked, and its port is free at once", function()
    local port = url:match ":(%d+)/"
    run("curl -s " .. url .. "health")
    assert.matches("stopping", server:stop(), 1, true)
    start("--name demo -p " .. port)
    assert.equal(port, url:match ":(%d+)/")
    local out, code = run(("%s serve %s -p %s"):format(PERILUNE, path, port))
    assert.matches("cannot listen on 127.0.0.1, port " .. port .. ": Address already in use", out, 1, true)
    assert.equal(1, code)
    stop "INT"
  end)

  it("refuses options and files by name", function()
    local out, code = run(PERILUNE .. " serve /nowhere.peri")
    assert.matches("/nowhere.peri", out, 1, true)
    assert.equal(1, code)
    for words, part in pairs { ["--timeout 0"] = "--timeout: '0', allowed: times", ["--port 70000"] = "--port: '70000'",
      ["--name ''"] = "--name: it is empty",
      ["--body 1X"] = "--body: '1X', allowed: sizes", ["--workers 0"] = "--workers: '0'",
      ["--delay -1ms"] = "--delay", ["--delay 11s"] = "'11s', allowed: times from 0 to 10s" } do
      out, code = run(("%s serve %s %s"):format(PERILUNE, path, words))
      assert.matches(part, out, 1, true)
      assert.equal(2, code)
    end
    assert.matches("--connections", run(PERILUNE .. " serve --help"), 1, true)
  end)
end)
