-- launch/words.lua: `perilune completion bash` and zsh: scripts with which a shell completes the words of the command
-- line.
local M = {}

-- What argparse's script for bash leaves out: first arguments of a command, and the names of schedules. Behind
-- `perilune help` names of the reference stand. A shell parts words at ':', so methods are written with a dot.
local BASH = [[
_perilune_or_help() {
    local words=
    if [ "$COMP_CWORD" = 2 ]; then
        case "${COMP_WORDS[1]}" in
            help) words="$(perilune help --names)" ;;
%s        esac
    elif [ "$COMP_CWORD" = 3 ] && [ "${COMP_WORDS[1]}" = schedule ]; then
        words="%s"
    fi
    case "${COMP_WORDS[COMP_CWORD]}" in -*) words= ;; esac
    if [ -n "$words" ]; then
        COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
    else
        _perilune "$@"
    fi
}
complete -F _perilune_or_help -o bashdefault -o default perilune
]]

-- argparse's script for zsh is a file of fpath, which runs as the function that it defines; `eval` registers it.
local ZSH = [[
if [ "$funcstack[1]" = _perilune ]; then
  _perilune
else
  compdef _perilune perilune
fi
]]

--- Names of the reference, one a line: what `perilune help --names` prints.
function M.names()
  local list = {}
  for _, name in ipairs(require("perilune.util").keys(require("perilune.manual").texts)) do
    list[#list + 1] = (name:gsub("^peri%.", ""):gsub(":", "."))
  end
  return table.concat(list, "\n")
end

--- Words for the values of options that are not argparse's choices: some take a file as well, or more behind the word.
local function values()
  return {
    ["--bind"] = require("perilune.launch.openmpi").bindings,
    ["--topology"] = require("perilune.plan").Topology.presets,
    ["--simulate"] = require("perilune.pipeline.schedules").names,
    ["--resume"] = { "auto", "no" },
    ["--tables"] = require("perilune.util").keys(require("perilune.export.file").table_dtypes),
    ["--stop-on"] = { "SIGUSR1", "SIGUSR2" },
  }
end

--- The script of a shell, of the command line's parser, which is not used afterwards.
function M.script(parser, shell)
  local words = values()
  for _, command in ipairs(parser._commands) do
    for _, option in ipairs(command._options) do option._choices = option._choices or words[option._name] end
  end
  if shell == "zsh" then
    local text = parser:get_zsh_complete()
    for _, name in ipairs { "--topology", "--simulate", "--resume" } do -- bash adds files by itself where no word fits
      text = text:gsub('("' .. name:gsub("%-", "%%-") .. '%[[^\n]*: :)%(([^()]*)%)"', '%1{compadd %2; _files}"')
    end
    -- the argument of help is a name of the reference
    text = text:gsub('(help%)\n.-)"[^"\n]*:_files"', '%1":name:($(perilune help --names))"', 1)
    return (text:gsub("_perilune%s*$", function() return ZSH end))
  end
  local cases = {}
  for _, command in ipairs(parser._commands) do
    local first = command._arguments[1]
    if first and first._choices then
      cases[#cases + 1] = ('            %s) words="%s" ;;\n'):format(command._name, table.concat(first._choices, " "))
    end
  end
  return parser:get_bash_complete() .. BASH:format(table.concat(cases), table.concat(words["--simulate"], " "))
end

return M
