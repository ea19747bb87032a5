-- launch/words.lua: `perilune completion bash` and zsh: scripts with which a shell completes the words of the command
-- line.
local M = {}

-- Behind `perilune help` names of the reference stand. A shell parts words at ':', so methods are written with a dot.
local BASH = [[
_perilune_or_help() {
    if [ "$COMP_CWORD" = 2 ] && [ "${COMP_WORDS[1]}" = help ]; then
        COMPREPLY=($(compgen -W "$(perilune help --names)" -- "${COMP_WORDS[2]}"))
    else
        _perilune "$@"
    fi
}
complete -F _perilune_or_help -o bashdefault -o default perilune
]]

--- Names of the reference, one a line: what `perilune help --names` prints.
function M.names()
  local list = {}
  for _, name in ipairs(require("perilune.util").keys(require("perilune.manual").texts)) do
    list[#list + 1] = (name:gsub("^peri%.", ""):gsub(":", "."))
  end
  return table.concat(list, "\n")
end

--- The script of a shell, of the command line's parser.
function M.script(parser, shell)
  if shell == "zsh" then
    local text = parser:get_zsh_complete()
    -- the argument of help is a name of the reference
    return (text:gsub('(help%)\n.-)"[^"\n]*:_files"', '%1":name:($(perilune help --names))"', 1))
  end
  return parser:get_bash_complete() .. BASH
end

return M
