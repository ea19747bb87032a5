-- busted_main.lua: busted in this interpreter (luajit, or the launcher as one rank of a world): arguments as busted's.
require "busted.runner" { standalone = false }
