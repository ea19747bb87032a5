-- launch/editor.lua: reads a line from a terminal with editing, history and completion. Keys arrive as bytes; what is
-- shown leaves as text.
local M = {}
M.__index = M

--- An editor. read(milliseconds) -> byte or nil (without an argument: the input has ended), write(text), columns() ->
--- number; complete(text before the cursor) -> first position of the word, list of words that may stand there.
function M.new(read, write, columns, complete)
  return setmetatable({ read = read, write = write, columns = columns, complete = complete, history = {} }, M)
end

--- The characters (UTF-8) of a text.
local function characters(text)
  local list = {}
  for c in text:gmatch "[%z\1-\127\194-\244][\128-\191]*" do list[#list + 1] = c end
  return list
end

--- Show prompt and line, and put the cursor at its place. A line that is longer than the terminal is shown in part.
function M:draw()
  local room = math.max(10, self.columns() - #self.prompt - 1)
  local first = math.max(0, self.at - room)
  local shown = table.concat(self.line, "", first + 1, math.min(#self.line, first + room))
  local back = math.min(#self.line, first + room) - self.at
  self.write(("\r%s%s\27[K%s"):format(self.prompt, shown, back > 0 and ("\27[%dD"):format(back) or ""))
end

function M:text() return table.concat(self.line) end

local function set(self, text)
  self.line = characters(text)
  self.at = #self.line
end

local function insert(self, text)
  for _, c in ipairs(characters(text)) do
    self.at = self.at + 1
    table.insert(self.line, self.at, c)
  end
end

--- Take characters first .. last away.
local function cut(self, first, last)
  for i = math.min(last, #self.line), math.max(first, 1), -1 do
    table.remove(self.line, i)
    if i <= self.at then self.at = self.at - 1 end
  end
end

--- Where the word before the cursor begins, and where the one behind it ends.
local function word_start(self)
  local i = self.at
  while i > 0 and not self.line[i]:match "[%w_\128-\255]" do i = i - 1 end
  while i > 0 and self.line[i]:match "[%w_\128-\255]" do i = i - 1 end
  return i
end
local function word_end(self)
  local i = self.at
  while i < #self.line and not self.line[i + 1]:match "[%w_\128-\255]" do i = i + 1 end
  while i < #self.line and self.line[i + 1]:match "[%w_\128-\255]" do i = i + 1 end
  return i
end

--- Another line of the history: -1 is the one before.
local function recall(self, step)
  local to = self.place + step
  if to < 1 or to > #self.history + 1 then return end
  if self.place == #self.history + 1 then self.unfinished = self:text() end
  self.place = to
  set(self, self.history[to] or self.unfinished)
end

--- What the words of a list begin with, all of them.
local function common(words)
  local prefix = words[1]
  for _, w in ipairs(words) do
    while w:sub(1, #prefix) ~= prefix do prefix = prefix:sub(1, -2) end
  end
  return prefix
end

--- The words in columns below the line.
local function list(self, words)
  local width = 0
  for _, w in ipairs(words) do width = math.max(width, #w + 2) end
  local across, out = math.max(1, math.floor(self.columns() / width)), {}
  for i, w in ipairs(words) do out[i] = w .. (i % across == 0 and "\r\n" or (" "):rep(width - #w)) end
  self.write("\r\n" .. table.concat(out) .. (#words % across == 0 and "" or "\r\n"))
end

local MOST_WORDS = 200

local function tab(self)
  local before = table.concat(self.line, "", 1, self.at)
  if before:match "^%s*$" then return insert(self, "  ") end
  local first, words = self.complete(before)
  if #words == 0 then return self.write "\7" end
  local typed, prefix = before:sub(first), common(words)
  if #prefix > #typed then return insert(self, prefix:sub(#typed + 1)) end
  if #words > 1 then
    list(self, #words <= MOST_WORDS and words or { unpack(words, 1, MOST_WORDS) })
    if #words > MOST_WORDS then self.write(("... and %d more\r\n"):format(#words - MOST_WORDS)) end
  end
end

--- Search backwards in the history for what is typed (Ctrl-R); Ctrl-R again: for an earlier line. Returns the key that
--- ended it.
local function search(self)
  local wanted, from = "", #self.history
  local function find(start)
    for i = start, 1, -1 do
      if self.history[i]:find(wanted, 1, true) then return i end
    end
  end
  while true do
    local found = find(from)
    self.write(("\r(search) '%s': %s\27[K"):format(wanted, found and self.history[found] or ""))
    local byte = self.read()
    if byte == 18 then from = found and found - 1 or from
    elseif byte == 127 or byte == 8 then wanted, from = wanted:sub(1, -2), #self.history
    elseif byte and byte >= 32 then wanted, from = wanted .. string.char(byte), #self.history
    else
      if found and byte ~= 3 and byte ~= 7 then
        set(self, self.history[found])
        self.place = found
      end
      return byte
    end
  end
end

local keys = {
  [1] = function(self) self.at = 0 end, [5] = function(self) self.at = #self.line end,
  [2] = function(self) self.at = math.max(0, self.at - 1) end,
  [6] = function(self) self.at = math.min(#self.line, self.at + 1) end,
  [8] = function(self) cut(self, self.at, self.at) end, [9] = tab,
  [11] = function(self) cut(self, self.at + 1, #self.line) end, [21] = function(self) cut(self, 1, self.at) end,
  [23] = function(self) cut(self, word_start(self) + 1, self.at) end,
  [12] = function(self) self.write "\27[H\27[2J" end, [14] = function(self) recall(self, 1) end,
  [16] = function(self) recall(self, -1) end,
}
keys[127] = keys[8]

-- What follows ESC: of arrows and other keys.
local sequences = {
  ["[A"] = keys[16], ["[B"] = keys[14], ["[C"] = keys[6], ["[D"] = keys[2], ["[H"] = keys[1], ["[F"] = keys[5],
  ["OH"] = keys[1], ["OF"] = keys[5], ["OA"] = keys[16], ["OB"] = keys[14], ["OC"] = keys[6], ["OD"] = keys[2],
  ["[1~"] = keys[1], ["[4~"] = keys[5], ["[7~"] = keys[1], ["[8~"] = keys[5], ["[3~"] = function(self)
    cut(self, self.at + 1, self.at + 1)
  end, ["b"] = function(self) self.at = word_start(self) end, ["f"] = function(self) self.at = word_end(self) end,
  ["d"] = function(self) cut(self, self.at + 1, word_end(self)) end,
}
sequences["[1;5D"], sequences["[1;5C"] = sequences.b, sequences.f

local WAIT = 50 -- milliseconds for the rest of what a key sends

local function escape(self)
  local text = ""
  repeat
    local byte = self.read(WAIT)
    text = text .. (byte and string.char(byte) or "")
  until not byte or (text:match "^%[[%d;]*[%a~]$" or text:match "^O%a$" or text:match "^[^%[O]")
  if sequences[text] then sequences[text](self) end
end

local function utf8(self, byte)
  local text, more = string.char(byte), byte >= 240 and 3 or byte >= 224 and 2 or byte >= 192 and 1 or 0
  for _ = 1, more do text = text .. string.char(self.read() or 63) end
  insert(self, text)
end

--- One line; nil at the end (Ctrl-D in an empty line, or no more input); nil, true: Ctrl-C. It is not put into the
--- history: see `remember`.
function M:line_of(prompt)
  self.prompt, self.line, self.at, self.place, self.unfinished = prompt, {}, 0, #self.history + 1, ""
  -- what ran may have left an unfinished line: these blanks go over to the next one then, and the prompt covers them
  self.write((" "):rep(self.columns() - 1))
  self:draw()
  local ahead -- a key that has arrived already: of many that are pasted only the last one draws
  while true do
    local byte = ahead or self.read()
    if byte == 18 then byte = search(self) end
    if not byte or byte == 4 and #self.line == 0 then
      self.write "\r\n"
      return nil
    elseif byte == 3 then
      self.write "^C\r\n"
      return nil, true
    elseif byte == 13 or byte == 10 then
      self.at = #self.line
      self:draw()
      self.write "\r\n"
      return self:text()
    elseif byte == 4 then sequences["[3~"](self)
    elseif byte == 27 then escape(self)
    elseif keys[byte] then keys[byte](self)
    elseif byte >= 32 then utf8(self, byte) end
    ahead = self.read(0)
    if not ahead then self:draw() end
  end
end

--- Add a line to the history, unless it is empty or the last one again. Returns whether it is new.
function M:remember(line)
  if line:match "^%s*$" or self.history[#self.history] == line then return false end
  self.history[#self.history + 1] = line
  return true
end

return M
